"""config.json of Hugging Face Llama folders and the `model` section of our config, in both directions. Needs no JAX."""

import os
from collections.abc import Mapping
from typing import Any

from ml_collections import FrozenConfigDict

from llama_jax.errors import ConfigError
from llama_jax.fields import FIELDS, checked
from llama_jax.files import PathLike
from llama_jax.hf_files import find_folder, read_config

# config.json field: ours, and what transformers' LlamaConfig takes where the file is silent (None: it has to say).
_FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", None),
    "max_position_embeddings": ("context", 2048),
    "num_hidden_layers": ("layers", None),
    "hidden_size": ("width", None),
    "num_attention_heads": ("heads", None),
    "intermediate_size": ("ffn", None),
    "tie_word_embeddings": ("tied", False),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "initializer_range": ("init_std", 0.02),
}
_ROPE = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq",
    "high_freq_factor": "rope_high_freq",
    "original_max_position_embeddings": "rope_original_context",
}
_FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def to_hf_config(
    model: Any, bos_id: int | None, eos_id: int | list[int] | None, dtype: str = "float32"
) -> dict[str, Any]:
    """config.json of a model section; rotary settings and dtype stand under the names of transformers 4 and 5."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling == "llama3":
        rope = {"rope_type": "llama3"} | {key: model[ours] for key, ours in _ROPE.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        **_FIXED,
        **{key: model[ours] for key, (ours, _) in _FIELDS.items()},
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": model.width // model.heads,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_scaling == "none" else rope,
        "rope_parameters": rope | {"rope_theta": model.rope_theta},
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
        "dtype": dtype,
        "use_cache": True,
    }


def from_hf_config(content: Mapping[str, Any], path: str | os.PathLike[str] = "config.json") -> dict[str, Any]:
    """Fields of our `model` section from a config.json; ConfigError names the field that can't be represented."""

    def require(good: bool, message: str) -> None:
        if not good:
            raise ConfigError(f"{path}: {message}")

    def given(key: str, default: Any) -> Any:
        return default if content.get(key) is None else content[key]

    for key, only in (_FIXED | {"architectures": ["LlamaForCausalLM"]}).items():
        default = None if key == "model_type" else only
        value = given(key, default)
        require(value == only and type(value) is type(only), f"{key} is {value!r}; only {only!r} can be loaded")
    require(content.get("quantization_config") is None, "the weights are quantized; save them as floating point")
    section = {}
    for key, (ours, default) in _FIELDS.items():
        value = given(key, default)
        require(value is not None, f"{key} is missing")
        section[ours] = _checked(path, key, ours, value)
    heads = section["heads"]
    kv_heads = _checked(path, "num_key_value_heads", "kv_heads", given("num_key_value_heads", heads))
    section["kv_heads"] = None if kv_heads == heads else kv_heads
    require(heads % kv_heads == 0, f"num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}")
    require(section["width"] % (2 * heads) == 0, f"hidden_size / num_attention_heads must be even, with {heads} heads")
    size = given("head_dim", section["width"] // heads)
    require(size * heads == section["width"], f"head_dim = {size!r} is not hidden_size / num_attention_heads")

    # rope_scaling beside rope_theta in transformers 4, rope_parameters with everything in 5; ours are in both.
    thetas = [content["rope_theta"]] if given("rope_theta", None) is not None else []
    scaling: dict[str, Any] | None = None
    for key in ("rope_scaling", "rope_parameters"):
        rope = given(key, None)
        if rope is None:
            continue
        require(isinstance(rope, dict), f"{key} is not an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        require(kind in ("default", "llama3"), f"{key} of type {kind!r}; only default and llama3 can be loaded")
        wanted = set(_ROPE) if kind == "llama3" else set()
        odd = sorted((rope.keys() - {"rope_type", "type", "rope_theta"}) ^ wanted)
        require(not odd, f"{key} of type {kind} has too much or too little: {', '.join(odd)}")
        found = {"rope_scaling": "none" if kind == "default" else "llama3"}
        found |= {ours: _checked(path, f"{key}.{name}", ours, rope[name]) for name, ours in _ROPE.items() if wanted}
        require(scaling in (None, found), "rope_scaling and rope_parameters contradict each other")
        scaling = found
        thetas += [rope["rope_theta"]] if "rope_theta" in rope else []
    thetas = [_checked(path, "rope_theta", "rope_theta", theta) for theta in thetas or [10000.0]]
    require(len(set(thetas)) == 1, f"rope_theta is said twice and differs: {thetas}")
    section["rope_theta"] = thetas[0]
    section |= scaling or {"rope_scaling": "none"}
    low, high = section.get("rope_low_freq", 0), section.get("rope_high_freq", 1)
    require(low < high, "rope low_freq_factor must be below high_freq_factor")
    return section


def _checked(path: str | os.PathLike[str], key: str, ours: str, value: Any) -> Any:
    try:
        return checked(key, FIELDS[f"model.{ours}"], value)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def model_section(section: Mapping[str, Any]) -> FrozenConfigDict:
    """The `model` config section, hashable, with the given fields and the defaults of the others."""
    return FrozenConfigDict({**_defaults(), **section})


def shape_fields(folder: PathLike) -> dict[str, Any]:
    """Fields of `model` that the Hugging Face folder (or run with exports/final) of model.init_from decides.

    All that config.json says but the context, which a run may choose. ConfigError, or CheckpointError for damaged JSON.
    """
    try:
        found = find_folder(folder)
    except ConfigError as error:
        raise ConfigError(f"model.init_from: {error}") from None
    section = from_hf_config(read_config(found), found / "config.json")
    del section["context"]
    return {name: value for name, value in _defaults().items() if name in _ROPE.values()} | section


def _defaults() -> dict[str, Any]:
    return {path.removeprefix("model."): field.default for path, field in FIELDS.items() if path.startswith("model.")}
