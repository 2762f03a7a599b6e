"""Samples text from a model: one pass over the prompt, then a token at a time over a cache of keys and values.

    python -m llama_jax.generate --model=FOLDER [--prompt=TEXT] [--tokens=100] [--temperature=0.8] [--top_k=50]
                                 [--seed=0] [--samples=3]

FOLDER is a Hugging Face Llama folder or a run that has an export. The prompt starts as a document does, after the
beginning-of-text id of config.json or else after its end-of-text id; a sample is shown up to its own end of text.
Where there is neither id, an empty prompt is id 0. Without a tokenizer (the synthetic language) prompt and samples are
ids.

Letters: B sequences, S cache positions, T tokens, D width, H query heads, K key/value heads, G = H / K, d head size,
V vocabulary, L layers.
"""

import argparse
import functools
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import FrozenConfigDict

from llama_jax import config as configs
from llama_jax import errors, gate, hf, ops, runtime, tokenizer
from llama_jax.errors import ConfigError
from llama_jax.model import Numerics


def sample(
    model: Any,
    numerics: Numerics,
    params: dict[str, jax.Array],
    prompt_BT: np.ndarray,
    steps: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> np.ndarray:
    """`steps` new ids [B, steps], int32, after integer prompts [B, T] of one length.

    Temperature 0 takes the likeliest id; otherwise ids are drawn from the softmax of logits / temperature over the
    `top_k` likeliest ones (0: all). Row b depends on the seed, b and its prompt only. Nothing stops at an end-of-text
    id. Compiled once for each (B, T, steps, top_k).

    Raises ConfigError when prompt and new ids exceed the context (no sliding: the model has never seen such positions)
    or for a setting out of range, ValueError for ids outside the vocabulary.
    """
    prompt_BT = np.asarray(prompt_BT)
    if prompt_BT.ndim != 2 or 0 in prompt_BT.shape or not np.issubdtype(prompt_BT.dtype, np.integer):
        raise ValueError(f"prompts are non-empty integer rows [B, T], not {prompt_BT.dtype}{list(prompt_BT.shape)}")
    if prompt_BT.min() < 0 or prompt_BT.max() >= model.vocab_size:
        raise ValueError(f"a prompt has an id outside 0..{model.vocab_size - 1}")
    length = prompt_BT.shape[1]
    _require(steps >= 1, f"tokens = {steps} must be at least 1")
    _require(
        length + steps <= model.context,
        f"{length} prompt ids and {steps} new ones exceed the context of {model.context}; shorten one of them",
    )
    _require(
        temperature == 0 or 1e-6 <= temperature <= 1e6, f"temperature = {temperature} must be 0 or from 1e-06 to 1e+06"
    )
    _require(top_k >= 0, f"top_k = {top_k} must be 0 (all) or larger")
    _require(0 <= seed < 2**32, f"seed = {seed} must be from 0 to {2**32 - 1}")
    if temperature == 0:
        top_k, temperature = 1, 1.0
    new_BT = _generate(
        FrozenConfigDict(model),
        numerics,
        steps,
        min(top_k or model.vocab_size, model.vocab_size),
        params,
        jnp.asarray(prompt_BT, jnp.int32),
        jnp.asarray(temperature, jnp.float32),
        jax.random.key(np.uint32(seed)),
    )
    return np.asarray(new_BT)


def _require(good: bool, message: str) -> None:
    if not good:
        raise ConfigError(message)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _generate(model, numerics, steps, top_k, params, prompt_BT, temperature, key):
    B, T = prompt_BT.shape
    S = T + steps
    kv_heads, size = model.kv_heads or model.heads, model.width // model.heads
    # Everything is cast and stacked once, outside the loop. Blocks are scanned, not unrolled: a sample should not wait
    # for the compiler. The embedding is cast after its lookup, as in training.
    embedding_VD = params["model.embed_tokens.weight"]
    head_VD = (embedding_VD if model.tied else params["lm_head.weight"]).astype(numerics.compute)
    first = "model.layers.0."
    blocks = {}
    for name in (name.removeprefix(first) for name in params if name.startswith(first)):
        stacked = jnp.stack([params[f"model.layers.{layer}.{name}"] for layer in range(model.layers)])
        blocks[name] = stacked if name.endswith("norm.weight") else stacked.astype(numerics.compute)
    cos_Sc, sin_Sc = ops.rope_tables(model, np.arange(S), jnp.promote_types(numerics.compute, jnp.float32))

    def forward(tokens_BT, rope, cache, position):
        """Hidden state of the last token [B, D], and the cache with these tokens from `position` on."""
        x = ops.embed(embedding_VD, tokens_BT, numerics.residual)
        x, new = jax.lax.scan(functools.partial(_block, model, numerics, rope, position), x, (blocks, cache))
        cache = tuple(
            jax.lax.dynamic_update_slice_in_dim(old, update, 0 if position is None else position, axis=2)
            for old, update in zip(cache, new, strict=True)
        )
        return ops.rms_norm(x[:, -1], params["model.norm.weight"], model.norm_eps, numerics.compute), cache

    def decode(carry, step):
        h_BD, cache = carry
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, step), jnp.arange(B))
        id_B = choose_ids(ops.plain_dense(h_BD, head_VD), keys, temperature, top_k)
        position = T + step
        rope = tuple(jax.lax.dynamic_slice_in_dim(table, position, 1) for table in (cos_Sc, sin_Sc))
        return forward(id_B[:, None], rope, cache, position), id_B

    empty = jnp.zeros((model.layers, B, S, kv_heads, size), numerics.compute)
    start = forward(prompt_BT, (cos_Sc[:T], sin_Sc[:T]), (empty, empty), None)
    _, new_SB = jax.lax.scan(decode, start, jnp.arange(steps))
    return new_SB.T


def _block(
    model: Any,
    numerics: Numerics,
    rope: tuple[jax.Array, jax.Array],
    position: jax.Array | None,
    x_BTD: jax.Array,
    layer: tuple[dict[str, jax.Array], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One decoder block over (its weights, its cache) -> residual stream, keys and values [B, T, K, d] of the tokens.

    position None: the tokens are the whole prompt. Otherwise one token there, which sees the cache before it.
    """
    weights, (k_cache, v_cache) = layer
    B, T = x_BTD.shape[:2]
    H, K, d = model.heads, model.kv_heads or model.heads, model.width // model.heads

    def dense(x: jax.Array, name: str) -> jax.Array:
        return ops.plain_dense(x, weights[f"{name}_proj.weight"])

    h = ops.rms_norm(x_BTD, weights["input_layernorm.weight"], model.norm_eps, numerics.compute)
    q = ops.plain_rope(dense(h, "self_attn.q").reshape(B, T, H, d), *rope)
    k = ops.plain_rope(dense(h, "self_attn.k").reshape(B, T, K, d), *rope)
    v = dense(h, "self_attn.v").reshape(B, T, K, d)
    if position is None:
        y = ops.attention(numerics.attention)(q, k, v)
    else:
        k_cache = jax.lax.dynamic_update_slice_in_dim(k_cache, k, position, axis=1)
        v_cache = jax.lax.dynamic_update_slice_in_dim(v_cache, v, position, axis=1)
        y = cached_attention(q[:, 0], k_cache, v_cache, position)
    x_BTD = x_BTD + dense(y.reshape(B, T, H * d), "self_attn.o").astype(x_BTD.dtype)
    h = ops.rms_norm(x_BTD, weights["post_attention_layernorm.weight"], model.norm_eps, numerics.compute)
    gated = gate.swiglu(dense(h, "mlp.gate"), dense(h, "mlp.up"))
    return x_BTD + dense(gated, "mlp.down").astype(x_BTD.dtype), (k, v)


def cached_attention(q_BHd: jax.Array, k_BSKd: jax.Array, v_BSKd: jax.Array, position: jax.Array) -> jax.Array:
    """Attention of one query per sequence over the cache positions 0..position -> [B, H, d]; statistics in float32."""
    B, H, d = q_BHd.shape
    S, K = k_BSKd.shape[1:3]
    wide = jnp.promote_types(q_BHd.dtype, jnp.float32)
    q_BKGd = q_BHd.reshape(B, K, H // K, d)
    scores = jnp.einsum("bkgd,bskd->bkgs", q_BKGd, k_BSKd, preferred_element_type=wide) / np.sqrt(d).astype(wide)
    seen = (jnp.arange(S) <= position)[None, None, None, :]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v_BSKd.dtype)
    return jnp.einsum("bkgs,bskd->bkgd", weights, v_BSKd).reshape(B, H, d)


def choose_ids(logits_BV: jax.Array, keys_B: jax.Array, temperature: jax.Array, top_k: int) -> jax.Array:
    """One id per row, int32 [B], drawn with its own key among the top_k likeliest; ties go to the lower id."""
    best_Bk, ids_Bk = jax.lax.top_k(logits_BV.astype(jnp.float32), top_k)
    picked_B = jax.vmap(jax.random.categorical)(keys_B, best_Bk / temperature)
    return jnp.take_along_axis(ids_Bk, picked_B[:, None], axis=1)[:, 0].astype(jnp.int32)


# The command.


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see python -m llama_jax.generate --help")


def default_numerics(device: runtime.Device | None = None) -> Numerics:
    """XLA's attention, which runs everywhere, in what `auto` computes in on a device; None: the present one."""
    compute = jnp.dtype("float32" if runtime.bfloat16_obstacle(device or runtime.present()) else "bfloat16")
    return Numerics(compute, compute, "xla", "plain", own_gradients=False)


def run(words: Sequence[str]) -> None:
    """Reads the command's words, samples and prints. Raises ConfigError, CheckpointError and DeviceError."""
    parser = _Parser(
        "python -m llama_jax.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="Hugging Face Llama folder, or a run with an export")
    parser.add_argument("--prompt", default="", help="text to continue, or ids where there is no tokenizer")
    parser.add_argument("--tokens", type=int, default=100, help="new tokens of a sample")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest")
    parser.add_argument("--top_k", type=int, default=50, help="draw among so many likeliest ids; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--debug", action="store_true", help="tracebacks of errors")
    options = parser.parse_args(words)
    _require(options.samples >= 1, f"--samples={options.samples} must be at least 1")
    folder = hf.find_folder(options.model)
    section, params = hf.load_folder(folder)
    model = hf.model_section(section)
    runtime.prepare(configs.default())
    text = tokenizer.load(folder)
    begin, ends = _special_ids(hf.read_config(folder), model.vocab_size)
    prompt = begin + _encode(text, options.prompt, model.vocab_size)
    prompt = prompt or [0]
    with runtime.device_errors("ask for fewer --samples"):
        new = sample(
            model,
            default_numerics(),
            {name: jnp.asarray(tensor) for name, tensor in params.items()},
            np.tile(np.array(prompt, np.int32), (options.samples, 1)),
            options.tokens,
            options.temperature,
            options.top_k,
            options.seed,
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that can't show a character shows its code
    show: Callable[[list[int]], str] = text.decode if text else lambda ids: " ".join(map(str, ids))
    for number, row in enumerate(new.tolist(), 1):
        stop = next((index for index, token in enumerate(row) if token in ends), len(row))
        print(f"--- sample {number} of {options.samples}")
        print(show(prompt[len(begin) :] + row[:stop]), flush=True)


def _special_ids(content: dict[str, Any], vocab_size: int) -> tuple[list[int], set[int]]:
    """(ids put before a prompt, ids that end a text) of a config.json; an id may be null or a list there."""
    found = {}
    for key in ("bos_token_id", "eos_token_id"):
        value = content.get(key)
        found[key] = value if isinstance(value, list) else [] if value is None else [value]
        for token in found[key]:
            _require(type(token) is int and 0 <= token < vocab_size, f"config.json: {key} = {value} is not an id")
    return (found["bos_token_id"] or found["eos_token_id"])[:1], set(found["eos_token_id"])


def _encode(text: tokenizer.Tokenizer | None, prompt: str, vocab_size: int) -> list[int]:
    if text is not None:
        _require(not any("\ud800" <= letter <= "\udfff" for letter in prompt), "--prompt: not UTF-8")
        ids = text.encode(prompt) if prompt else []
        _require(max(ids, default=0) < vocab_size, "the tokenizer has more ids than the model")
        return ids
    try:
        ids = [int(word) for word in prompt.split()]
    except ValueError:
        raise ConfigError("--prompt: this model has no tokenizer, so the prompt is ids such as '5 17 3'") from None
    _require(all(0 <= token < vocab_size for token in ids), f"--prompt: ids go from 0 to {vocab_size - 1}")
    return ids


def main() -> int:
    """The command; returns its exit code."""
    words = sys.argv[1:]
    return errors.run_command(lambda: run(words), debug="--debug" in words)


if __name__ == "__main__":
    sys.exit(main())
