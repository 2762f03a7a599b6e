"""Export and import of Hugging Face folders, against transformers itself and against hand-made folders."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from llama_jax import arena, config, faults, flops, hf, hf_config, model
from llama_jax.errors import CheckpointError, ConfigError

SIZES = {"vocab_size": 96, "context": 128, "layers": 2, "width": 32, "heads": 4, "ffn": 48}
LLAMA3 = {
    "rope_scaling": "llama3",
    "rope_factor": 4.0,
    "rope_low_freq": 1.0,
    "rope_high_freq": 4.0,
    "rope_original_context": 32,
    "rope_theta": 5000.0,
}
MODELS = {
    "tied": SIZES,
    "grouped": SIZES | {"kv_heads": 2, "norm_eps": 1e-3},
    "untied": SIZES | {"tied": False, "rope_theta": 100.0},
    "llama3": SIZES | {"tied": False, "kv_heads": 1} | LLAMA3,
}


def random_params(section, seed=0):
    draw = np.random.default_rng(seed)
    return {
        name: (len(shape) == 1) + np.float32(0.3) * draw.standard_normal(shape, np.float32)
        for name, shape in flops.parameter_shapes(section).items()
    }


def make(tmp_path, kind="grouped", name="export", **keywords):
    section = hf_config.model_section(MODELS[kind])
    params = random_params(section)
    return section, params, hf.export_model(tmp_path / name, params, section, **keywords)


def our_logits(section, params, tokens):
    tensors = {name: jnp.asarray(tensor) for name, tensor in params.items()}
    return np.asarray(model.logits(section, model.reference(), tensors, jnp.asarray(tokens)))


def prompts(section):
    return np.random.default_rng(1).integers(0, section.vocab_size, (3, section.context))


def edit(path, **changes):
    content = json.loads(path.read_text())
    for key, value in changes.items():
        if value is KeyError:
            content.pop(key, None)
        else:
            content[key] = value
    path.write_text(json.dumps(content))


def rewrite(folder, change):
    """Changes the tensors of an export that then carries no hash."""
    tensors = safetensors.numpy.load_file(folder / hf.WEIGHTS)
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / hf.WEIGHTS, metadata={"format": "pt"})
    (folder / hf.MARKER).unlink(missing_ok=True)


# Against transformers.


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_computes_our_logits(tmp_path, kind):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    section, params, folder = make(tmp_path, kind, eos_id=3)
    theirs, report = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.dtype == torch.float32
    assert (theirs.config.eos_token_id, theirs.config.bos_token_id) == (3, None)
    assert theirs.config.max_position_embeddings == 128
    tokens = prompts(section)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(our_logits(section, params, tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_folder_of_transformers_loads(tmp_path, kind, dtype, sharded):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    ours = hf_config.model_section(MODELS[kind])
    scaling = None
    if ours.rope_scaling == "llama3":
        scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling["original_max_position_embeddings"] = 32
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=ours.kv_heads or 4,
            max_position_embeddings=128,
            rms_norm_eps=ours.norm_eps,
            initializer_range=0.2,
            rope_theta=ours.rope_theta,
            rope_scaling=scaling,
            tie_word_embeddings=ours.tied,
        )
    ).to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="9KB" if sharded else "1GB")
    assert (tmp_path / "theirs" / hf.INDEX).is_file() == sharded
    section, params = hf.load_folder(tmp_path / "theirs")
    assert hf_config.model_section(section) == hf_config.model_section(dict(MODELS[kind]) | {"init_std": 0.2})
    assert all(tensor.dtype == np.float32 for tensor in params.values())
    state = theirs.state_dict()
    for name, tensor in params.items():
        np.testing.assert_array_equal(tensor, state[name].float().numpy(), err_msg=name)
    tokens = prompts(ours)
    # Not theirs.float(): the rotary table of a half-precision module is rounded.
    fresh = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    with torch.no_grad():
        expected = fresh(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(our_logits(ours, params, tokens), expected, atol=1e-4, rtol=0)


def test_tokenizer_of_the_export_is_the_same_for_transformers(tmp_path):
    transformers, library = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    trainer = library.trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(["the cat sat on the mat, the dog's hat"] * 20, trainer)
    bpe.save(str(tmp_path / "any name.json"))
    section = hf_config.model_section(SIZES | {"vocab_size": 280})
    folder = hf.export_model(
        tmp_path / "export", random_params(section), section, tokenizer_file=tmp_path / "any name.json", eos_id=0
    )
    assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "any name.json").read_bytes()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.model_max_length) == (0, None, 128)
    for text in ("the cat sat", "  Two  spaces\nand é 🎉\n\n", ""):
        assert theirs(text).input_ids == bpe.encode(text).ids
        assert theirs.decode(theirs(text).input_ids) == text


# Round trip and the files of an export.


@pytest.mark.parametrize("kind", MODELS)
def test_round_trip_is_bitwise(tmp_path, kind):
    section, params, folder = make(tmp_path, kind)
    loaded, back = hf.load_folder(folder)
    assert list(back) == list(params)
    for name, tensor in params.items():
        assert back[name].tobytes() == tensor.tobytes(), name
    assert hf_config.model_section(loaded) == section
    stored = safetensors.numpy.load_file(folder / hf.WEIGHTS)
    assert ("lm_head.weight" in stored) == (not section.tied)


def test_a_row_of_an_arena_is_exported(tmp_path):
    section = hf_config.model_section(MODELS["grouped"])
    layout = arena.make_layout(section)
    rows = np.stack([arena.to_row(random_params(section, seed), layout) for seed in (0, 1)])
    folder = hf.export_model(tmp_path / "mean", arena.from_row(rows.mean(axis=0), layout), section)
    _, back = hf.load_folder(folder)
    expected = (random_params(section, 0)["model.norm.weight"] + random_params(section, 1)["model.norm.weight"]) / 2
    np.testing.assert_array_equal(back["model.norm.weight"], expected)


def test_bfloat16_export_rounds(tmp_path):
    _, params, folder = make(tmp_path, dtype="bfloat16")
    _, back = hf.load_folder(folder)
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for name, tensor in params.items():
        np.testing.assert_allclose(back[name], tensor, rtol=2**-8, atol=0)
        assert not (back[name].view(np.uint32) & 0xFFFF).any()


def test_config_json_says_everything(tmp_path):
    _, _, folder = make(tmp_path, "llama3", bos_id=1, eos_id=2, origin={"update": 7})
    rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 32
    assert json.loads((folder / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": "float32",
        "eos_token_id": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_parameters": rope | {"rope_theta": 5000.0},
        "rope_scaling": rope,
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": 96,
    }
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}
    assert json.loads((folder / hf.MARKER).read_text())["origin"] == {"update": 7}
    assert list(tmp_path.iterdir()) == [folder]


def test_modes_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        _, _, folder = make(tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}
    assert folder.stat().st_mode & 0o777 == 0o750


def test_export_is_strict(tmp_path):
    section, params, _ = make(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    for bad in (
        {key: value for key, value in params.items() if key != name},
        params | {"lm_head.weight": params[name]},
        params | {name: params[name].T},
        params | {name: params[name].astype(np.float64)},
    ):
        with pytest.raises(ValueError):
            hf.export_model(tmp_path / "bad", bad, section)
    broken = params[name].copy()
    broken[3, 4] = np.nan
    with pytest.raises(CheckpointError, match=rf"{name} has numbers that are not finite"):
        hf.export_model(tmp_path / "bad", params | {name: broken}, section)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "odd.json").write_text("[]")
    for keywords, message in (
        ({"dtype": "float16"}, "dtype 'float16'"),
        ({"eos_id": 96}, "eos_id = 96 is outside the vocabulary of 96"),
        ({"tokenizer_file": tmp_path / "notes.txt"}, "not a .json or .model file"),
        ({"tokenizer_file": tmp_path / "absent.json"}, "absent.json is not"),
        ({"tokenizer_file": tmp_path / "odd.json"}, "not a Hugging Face tokenizer.json"),
    ):
        with pytest.raises(ConfigError, match=message):
            hf.export_model(tmp_path / "bad", params, section, **keywords)
    assert not list(tmp_path.glob("bad*"))


# What stands at the target.


def test_own_export_is_replaced(tmp_path):
    section, params, folder = make(tmp_path, eos_id=1)
    other = random_params(section, 5)
    hf.export_model(folder, other, section)
    _, back = hf.load_folder(folder)
    assert back["model.norm.weight"].tobytes() == other["model.norm.weight"].tobytes()
    assert list(tmp_path.iterdir()) == [folder]
    (tmp_path / "empty").mkdir()
    hf.export_model(tmp_path / "empty", params, section)
    hf.load_folder(tmp_path / "empty")


@pytest.mark.parametrize("suffix", ["", ".tmp", ".old"])
@pytest.mark.parametrize("what", ["notes", "unmarked", "extra", "file", "link"])
def test_foreign_target_is_left_alone(tmp_path, suffix, what):
    section, params, folder = make(tmp_path)
    target = tmp_path / f"target{suffix}"
    if what == "notes":
        target.mkdir()
        (target / "notes.txt").write_text("precious")
    elif what == "file":
        target.write_text("precious")
    elif what == "link":
        target.symlink_to(folder)
    else:
        shutil.copytree(folder, target)
        if what == "unmarked":
            (target / hf.MARKER).unlink()
        else:
            (target / "README.md").write_text("precious")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="choose another") as caught:
        hf.export_model(tmp_path / "target", params, section)
    assert str(target) in str(caught.value)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    hf.load_folder(folder)


# Interrupted exports.

EXPORT = """
import resource, sys
import numpy as np
from llama_jax import errors, flops, hf, hf_config

target, size = sys.argv[1], int(sys.argv[2])
if size:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
section = hf_config.model_section({sizes})
params = {{name: np.full(shape, 2.0, np.float32) for name, shape in flops.parameter_shapes(section).items()}}
sys.exit(errors.run_command(lambda: hf.export_model(target, params, section)))
"""


def export_in_process(target, fault="", size=0):
    """(exit code, stderr) of an export of a model of twos in a process of its own, in which the fault has fired."""
    fired = target.parent / "fired"
    variables = {"LLAMA_JAX_TEST_FAULT": fault, "LLAMA_JAX_TEST_FAULT_FIRED": str(fired)} if fault else {}
    done = subprocess.run(
        [sys.executable, "-c", EXPORT.format(sizes=MODELS["grouped"]), str(target), str(size)],
        env=os.environ | {"PYTHONPATH": str(Path(hf.__file__).parent.parent)} | variables,
        capture_output=True,
        text=True,
    )
    if fault:
        assert fired.read_text() == fault + "\n"
        fired.unlink()
    return done.returncode, done.stderr


def passes(folder):
    """Whether a reader would take the folder for a model."""
    if not (folder / "config.json").is_file() or not (folder / hf.WEIGHTS).is_file():
        return False
    hf.load_folder(folder)
    return True


def first_norm(folder):
    return float(hf.load_folder(folder)[1]["model.norm.weight"][0])


POINTS = ["export_weights", "export_before_rename", "export_between_renames"]


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_killed_export(tmp_path, replaces, point):
    section, params, target = make(tmp_path)
    before = first_norm(target)
    if not replaces:
        shutil.rmtree(target)
    code, message = export_in_process(target, f"kill@{point}:1")
    assert code == -9, message
    moved = replaces and point == "export_between_renames"
    assert target.exists() == (replaces and not moved)
    if replaces:
        assert first_norm(tmp_path / "export.old" if moved else target) == before
    assert passes(tmp_path / "export.tmp") == (point != "export_weights")  # what is whole may be read
    twos = {name: np.full_like(tensor, 2) for name, tensor in params.items()}
    hf.export_model(target, twos, section)
    assert first_norm(target) == 2 and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_disk_full(tmp_path, monkeypatch, replaces, point):
    section, params, target = make(tmp_path)
    before = first_norm(target)
    if not replaces:
        shutil.rmtree(target)
    monkeypatch.setattr(faults, "_passages", {})
    monkeypatch.setenv(faults.VARIABLE, f"enospc@{point}:1")
    twos = {name: np.full_like(tensor, 2) for name, tensor in params.items()}
    with pytest.raises(CheckpointError, match=f"export to {target}: no space left"):
        hf.export_model(target, twos, section)
    assert list(tmp_path.iterdir()) == ([target] if replaces else [])
    assert not replaces or first_norm(target) == before


def test_killed_replacement_is_put_back_before_the_next_one(tmp_path, monkeypatch):
    section, params, target = make(tmp_path)
    target.rename(tmp_path / "export.old")  # as after a kill between the two renames
    monkeypatch.setattr(faults, "_passages", {})
    monkeypatch.setenv(faults.VARIABLE, "enospc@export_weights:1")
    with pytest.raises(CheckpointError, match="no space left"):
        hf.export_model(target, params, section)
    assert passes(target) and list(tmp_path.iterdir()) == [target]


def test_real_write_error(tmp_path):
    target = tmp_path / "export"
    code, message = export_in_process(target, size=20_000)  # bytes that a file may have; the weights are 77,000
    assert code == CheckpointError.exit_code, message
    assert message.startswith(f"error: export to {target}: ") and "File too large" in message
    assert message.count("\n") == 1 and not list(tmp_path.iterdir())


# Refusals of an import.

REFUSED_CONFIGS = {
    "model_type is 'mistral'": {"model_type": "mistral"},
    "model_type is None": {"model_type": KeyError},
    "architectures is": {"architectures": ["LlamaForSequenceClassification"]},
    "attention_bias is True": {"attention_bias": True},
    "mlp_bias is True": {"mlp_bias": True},
    "hidden_act is 'gelu'": {"hidden_act": "gelu"},
    "quantized": {"quantization_config": {"bits": 4}},
    "head_dim = 16": {"head_dim": 16},
    "hidden_size is missing": {"hidden_size": KeyError},
    "hidden_size = -32 is not": {"hidden_size": -32},
    "hidden_size = '32' is not": {"hidden_size": "32"},
    "hidden_size / num_attention_heads must be even": {"hidden_size": 36, "head_dim": 9},
    "vocab_size = True is not": {"vocab_size": True},
    "num_hidden_layers = 100000 is not": {"num_hidden_layers": 100000},
    "tie_word_embeddings = 1 is not": {"tie_word_embeddings": 1},
    "num_key_value_heads = 3 does not divide": {"num_key_value_heads": 3},
    "only default and llama3": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "too much or too little: factor": {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
    "too much or too little: partial_rotary_factor": {
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}
    },
    "high_freq_factor, low_freq_factor, original_max_position_embeddings": {
        "rope_scaling": {"rope_type": "llama3", "factor": 2.0}
    },
    "contradict each other": {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "llama3"}},
    "rope_theta is said twice": {"rope_theta": 500.0},
    "rope_scaling is not an object": {"rope_scaling": [1]},
    "rms_norm_eps = nan": {"rms_norm_eps": "nan"},
}
COMPLETE = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("message", REFUSED_CONFIGS)
def test_models_that_cannot_be_represented(tmp_path, message):
    _, _, folder = make(tmp_path)
    changes = dict(REFUSED_CONFIGS[message])
    if message.startswith("contradict"):
        changes["rope_parameters"] = changes["rope_parameters"] | COMPLETE
    edit(folder / "config.json", **changes)
    if "nan" in message:
        changed = (folder / "config.json").read_text().replace('"nan"', "NaN")
        (folder / "config.json").write_text(changed)
        with pytest.raises(CheckpointError, match="NaN is not JSON"):
            hf.load_folder(folder)
        return
    with pytest.raises(ConfigError) as caught:
        hf.load_folder(folder)
    assert message in str(caught.value) and str(folder / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_silent_fields_have_the_defaults_of_transformers(tmp_path):
    wanted = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    content = hf_config.to_hf_config(hf_config.model_section(SIZES), None, None)
    least = {"model_type": "llama"} | {key: content[key] for key in wanted}
    section = hf_config.from_hf_config(least)
    assert section["tied"] is False and section["norm_eps"] == 1e-6 and section["context"] == 2048
    assert section["rope_theta"] == 10000.0 and section["rope_scaling"] == "none" and section["kv_heads"] is None
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig(**{key: value for key, value in least.items() if key != "model_type"})
    assert (theirs.tie_word_embeddings, theirs.rms_norm_eps) == (section["tied"], section["norm_eps"])
    assert theirs.max_position_embeddings == section["context"]


def test_imported_section_fits_a_config(tmp_path):
    _, _, folder = make(tmp_path, "llama3")
    section, _ = hf.load_folder(folder)
    settings = config.default()
    for name, value in section.items():
        config.set_field(settings, f"model.{name}", value)
    settings.training.batch_targets = settings.training.microbatch * 128
    settings.lr_schedule.warmup_steps = 0
    assert config.finalize(settings).derived.head_size == 8


UP = "model.layers.1.mlp.up_proj.weight"
TABLE = "model.layers.0.self_attn.rotary_emb.inv_freq"
REFUSED_WEIGHTS = {
    f"missing 1 of 20 tensors, first {UP}": lambda t: t.pop(UP),
    "unexpected tensor model.layers.0.self_attn.q_proj.bias": lambda t: t.update(
        {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}
    ),
    "unexpected tensor model.layers.2.mlp": lambda t: t.update({UP.replace("1", "2"): t[UP]}),
    f"{UP} is F32[32, 48], not F32[48, 32]": lambda t: t.update({UP: t[UP].T.copy()}),
    f"{UP} is F64": lambda t: t.update({UP: t[UP].astype(np.float64)}),
    f"{UP} is I32": lambda t: t.update({UP: t[UP].astype(np.int32)}),
    f"{UP} has numbers that are not finite": lambda t: t[UP].fill(np.inf),
    "lm_head.weight contradicts": lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
    f"{TABLE} contradicts": lambda t: t.update({TABLE: np.array([1, 0.5, 0.1, 0.01], np.float32)}),
}


@pytest.mark.parametrize("message", REFUSED_WEIGHTS)
def test_tensors_that_do_not_fit(tmp_path, message):
    _, _, folder = make(tmp_path)
    rewrite(folder, REFUSED_WEIGHTS[message])
    with pytest.raises(CheckpointError) as caught:
        hf.load_folder(folder)
    assert message in str(caught.value) and str(folder) in str(caught.value)


def test_redundant_tensors_that_agree(tmp_path):
    _, params, folder = make(tmp_path)
    table = (10000.0 ** -(np.arange(0, 8, 2) / 8)).astype(np.float16)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy(), TABLE: table}))
    _, back = hf.load_folder(folder)
    assert back.keys() == params.keys()


def test_damaged_files(tmp_path):
    _, _, folder = make(tmp_path)
    whole = (folder / hf.WEIGHTS).read_bytes()
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    (folder / hf.WEIGHTS).write_bytes(flipped)
    with pytest.raises(CheckpointError, match="has SHA-256"):
        hf.load_folder(folder)
    (folder / hf.MARKER).write_text("{")
    with pytest.raises(CheckpointError, match=f"{hf.MARKER} is damaged"):
        hf.load_folder(folder)
    (folder / hf.MARKER).unlink()
    hf.load_folder(folder)
    for data in (b"", whole[:-4], b"\x80\x04}q\x00." * 9, b"\xff" * 7 + b"\x7f" + whole[8:]):
        (folder / hf.WEIGHTS).write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"{hf.WEIGHTS}: ") as caught:
            hf.load_folder(folder)
        assert "\n" not in str(caught.value)
    for text in ("", "[]", '{"a": ' * 9, "[" * 100_000, '{"vocab_size": NaN}'):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            hf.load_folder(folder)


def test_pickles_are_never_read(tmp_path):
    _, _, folder = make(tmp_path)
    proof = tmp_path / "executed"
    payload = b"cposix\nsystem\n(S'touch " + os.fsencode(proof) + b"'\ntR."
    (folder / "pytorch_model.bin").write_bytes(payload)
    hf.load_folder(folder)  # beside safetensors it doesn't matter
    (folder / hf.WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle, which is never read"):
        hf.load_folder(folder)
    (folder / hf.WEIGHTS).write_bytes(payload)
    (folder / hf.MARKER).unlink()
    with pytest.raises(CheckpointError):
        hf.load_folder(folder)
    assert not proof.exists()


def shard(folder, names=("a.safetensors", "b.safetensors")):
    """Turns an export into two shards with an index, and gives the index."""
    tensors = safetensors.numpy.load_file(folder / hf.WEIGHTS)
    (folder / hf.WEIGHTS).unlink()
    weight_map = {name: names[number % 2] for number, name in enumerate(tensors)}
    for file in names:
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        safetensors.numpy.save_file(part, folder / file, metadata={"format": "pt"})
    (folder / hf.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_shards(tmp_path):
    _, params, folder = make(tmp_path)
    weight_map = shard(folder)
    _, back = hf.load_folder(folder)
    assert all(back[name].tobytes() == params[name].tobytes() for name in params)
    moved = next(name for name in weight_map if weight_map[name] == "a.safetensors")
    for change, message in (
        ({moved: "b.safetensors"}, "is not where"),
        ({"model.layers.7.x": "a.safetensors"}, "is not where"),
        ({"x": "c.safetensors"}, "does not exist"),
    ):
        (folder / hf.INDEX).write_text(json.dumps({"weight_map": weight_map | change}))
        with pytest.raises(CheckpointError, match=message):
            hf.load_folder(folder)
    for text in ("{}", "[]", '{"weight_map": [1]}', "{"):
        (folder / hf.INDEX).write_text(text)
        with pytest.raises(CheckpointError, match="not the index"):
            hf.load_folder(folder)


@pytest.mark.parametrize("kind", ["..", "absolute", "folder", "pickle", "link"])
def test_index_cannot_lead_out(tmp_path, kind):
    _, _, folder = make(tmp_path)
    weight_map = shard(folder)
    outside = tmp_path / "a.safetensors"
    (folder / "a.safetensors").rename(outside)
    name = {"..": "../a.safetensors", "absolute": str(outside), "folder": "sub/a.safetensors", "pickle": "a.bin"}.get(
        kind
    )
    if kind == "folder":
        (folder / "sub").mkdir()
        shutil.copy(outside, folder / "sub" / "a.safetensors")
    elif kind == "pickle":
        shutil.copy(outside, folder / "a.bin")
    elif kind == "link":
        (folder / "a.safetensors").symlink_to(outside)
    if name:
        weight_map = {key: name if file == "a.safetensors" else file for key, file in weight_map.items()}
        (folder / hf.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="link out of its folder" if kind == "link" else "not the plain name"):
        hf.load_folder(folder)


def test_snapshot_of_the_hub_cache_loads(tmp_path):
    _, params, folder = make(tmp_path)
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", hf.WEIGHTS):
        shutil.copy(folder / name, blobs / f"hash-{name}")
        (snapshot / name).symlink_to(f"../../blobs/hash-{name}")
    _, back = hf.load_folder(snapshot)
    assert back["model.norm.weight"].tobytes() == params["model.norm.weight"].tobytes()


def test_whole_and_shards_together_are_refused(tmp_path):
    _, _, folder = make(tmp_path)
    shutil.copy(folder / hf.WEIGHTS, tmp_path / "kept")
    shard(folder)
    shutil.copy(tmp_path / "kept", folder / hf.WEIGHTS)
    with pytest.raises(CheckpointError, match="holds both"):
        hf.load_folder(folder)


def test_find_folder(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"program": "llama_jax", "config": {}}')
    with pytest.raises(ConfigError, match=r"neither a Hugging Face folder nor a run with exports/final$"):
        hf.find_folder(run)
    _, _, step = make(run / "exports", name="epoch-1")
    with pytest.raises(ConfigError, match=r"name one of its exports, such as .*epoch-1"):
        hf.find_folder(run)
    _, _, folder = make(run / "exports", name="final")
    assert hf.find_folder(run) == hf.find_folder(folder) == folder
    assert hf.find_folder(step) == step
    with pytest.raises(ConfigError, match="is not a directory"):
        hf.find_folder(tmp_path / "absent")
