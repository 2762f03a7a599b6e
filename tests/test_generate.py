"""Sampling with a cache, against full forward passes without one, transformers and counting."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import flops, generate, hf, hf_config, model, tokenizer
from llama_jax.errors import CheckpointError, ConfigError

SIZES = {"vocab_size": 61, "context": 24, "layers": 2, "width": 32, "heads": 4, "ffn": 48}
MODELS = {
    "tied": SIZES,
    "grouped": SIZES | {"kv_heads": 2, "tied": False},
    "llama3": SIZES
    | {"kv_heads": 1, "rope_scaling": "llama3", "rope_factor": 4.0, "rope_original_context": 16, "rope_theta": 50.0},
}
FLOAT32 = model.Numerics(jnp.float32, jnp.float32, "xla", "plain", own_gradients=False)


def make(kind="tied", seed=0):
    section = hf_config.model_section(MODELS[kind])
    draw = np.random.default_rng(seed)
    return section, {
        name: (len(shape) == 1) + np.float32(0.3) * draw.standard_normal(shape, np.float32)
        for name, shape in flops.parameter_shapes(section).items()
    }


def prompts(rows=3, length=5):
    return np.random.default_rng(1).integers(0, 61, (rows, length))


@functools.partial(jax.jit, static_argnums=(0, 1))
def full_logits(section, numerics, params, tokens):
    """Logits of whole sequences, without a cache, float32."""
    return model.logits(section, numerics, params, tokens).astype(jnp.float32)


def without_cache(section, numerics, params, prompt, steps):
    """The likeliest ids by a full forward pass over everything so far, for each token."""
    length = prompt.shape[1]
    tokens = np.zeros((len(prompt), section.context), np.int32)  # one shape: causality hides the zeros
    tokens[:, :length] = prompt
    for end in range(length, length + steps):
        tokens[:, end] = full_logits(section, numerics, params, tokens)[:, end - 1].argmax(-1)
    return tokens[:, length : length + steps]


@pytest.mark.parametrize("kind", [*MODELS, "reference"])
def test_greedy_equals_full_passes(kind):
    numerics = model.reference() if kind == "reference" else FLOAT32
    section, params = make("grouped" if kind == "reference" else kind)
    new = generate.sample(section, numerics, params, prompts(), 19, temperature=0)
    assert new.shape == (3, 19) and new.dtype == np.int32
    np.testing.assert_array_equal(new, without_cache(section, numerics, params, prompts(), 19))
    assert len({tuple(row) for row in new.tolist()}) == 3 and len(set(new.ravel().tolist())) > 5


@pytest.mark.parametrize("length", [1, 23])
def test_prompt_lengths_up_to_the_context(length):
    section, params = make("grouped")
    steps = section.context - length
    new = generate.sample(section, FLOAT32, params, prompts(2, length), steps, temperature=0)
    np.testing.assert_array_equal(new, without_cache(section, FLOAT32, params, prompts(2, length), steps))


def test_bfloat16_follows_bfloat16():
    """Ids may differ only where full passes in bfloat16 put two logits within rounding of each other."""
    section, params = make("grouped")
    numerics = model.Numerics(jnp.bfloat16, jnp.bfloat16, "xla", "plain", own_gradients=False)
    new = generate.sample(section, numerics, params, prompts(), 12, temperature=0)
    whole = np.concatenate([prompts(), new], axis=1)
    logits = np.asarray(full_logits(section, numerics, params, jnp.asarray(whole[:, :-1], jnp.int32)))
    best = logits[:, 4:].max(-1)
    taken = np.take_along_axis(logits[:, 4:], new[..., None], axis=-1)[..., 0]
    assert (best - taken <= 2**-6 * np.abs(best)).all() and (best == taken).mean() > 0.9


@pytest.mark.parametrize("kind", MODELS)
def test_greedy_equals_transformers(tmp_path, kind):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    section, params = make(kind)
    hf.export_model(tmp_path / "export", params, section)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "export")
    prompt = torch.tensor(prompts())
    expected = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=19, do_sample=False)
    new = generate.sample(section, FLOAT32, params, prompts(), 19, temperature=0)
    np.testing.assert_array_equal(new, expected[:, 5:].numpy())


def test_sampling_depends_on_the_seed_alone():
    section, params = make()
    first = generate.sample(section, FLOAT32, params, prompts(), 19, temperature=1.5, top_k=0, seed=7)
    again = generate.sample(section, FLOAT32, params, prompts(), 19, temperature=1.5, top_k=0, seed=7)
    other = generate.sample(section, FLOAT32, params, prompts(), 19, temperature=1.5, top_k=0, seed=8)
    fewer = generate.sample(section, FLOAT32, params, prompts()[:2], 9, temperature=1.5, top_k=0, seed=7)
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.5
    np.testing.assert_array_equal(fewer, first[:2, :9])
    same = generate.sample(section, FLOAT32, params, np.tile(prompts(1), (3, 1)), 19, temperature=1.5, top_k=0, seed=7)
    assert len({tuple(row) for row in same.tolist()}) == 3


def test_top_k_of_one_and_small_temperatures_are_greedy():
    section, params = make("grouped")
    greedy = generate.sample(section, FLOAT32, params, prompts(), 19, temperature=0)
    for temperature, top_k in ((5.0, 1), (1e-6, 0), (0, 7)):
        new = generate.sample(section, FLOAT32, params, prompts(), 19, temperature=temperature, top_k=top_k, seed=3)
        np.testing.assert_array_equal(new, greedy)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (3.0, 4)])
def test_frequencies_are_the_softmax(temperature, top_k):
    section, params = make()
    rows = 4096
    prompt = np.tile(prompts(1), (rows, 1))
    new = generate.sample(section, FLOAT32, params, prompt, 1, temperature=temperature, top_k=top_k, seed=11)[:, 0]
    logits = np.asarray(full_logits(section, FLOAT32, params, jnp.asarray(prompt[:1])), np.float64)[0, -1]
    kept = logits >= np.sort(logits)[-top_k] if top_k else np.ones(61, bool)
    expected = np.where(kept, np.exp((logits - logits.max()) / temperature), 0)
    expected /= expected.sum()
    counts = np.bincount(new, minlength=61)
    assert not counts[expected == 0].any()
    assert (expected > 0.01).sum() > 2
    deviation = np.sqrt(rows * expected * (1 - expected))
    assert (np.abs(counts - rows * expected) <= 5 * deviation + 1).all()


def test_second_token_is_drawn_anew():
    """Not with the random numbers of the first: where all logits are equal, the ids would be as well."""
    section, params = make()
    params["model.norm.weight"] = np.zeros_like(params["model.norm.weight"])
    new = generate.sample(section, FLOAT32, params, prompts(), 19, temperature=1.0, top_k=0)
    assert (new[:, 1:] == new[:, :-1]).mean() < 0.15 and (new[1:] == new[:-1]).mean() < 0.15


def test_ties_go_to_the_lower_id():
    keys = jax.random.split(jax.random.key(0), 2)
    logits = jnp.array([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    assert generate.choose_ids(logits, keys, jnp.float32(1), 1).tolist() == [1, 0]


def test_one_compilation_serves_all_tokens_seeds_and_temperatures():
    section, params = make()
    before = generate._generate._cache_size()
    for temperature, seed in ((0.7, 1), (0.9, 2), (1.3, 3)):
        generate.sample(section, FLOAT32, params, prompts(), 19, temperature=temperature, top_k=9, seed=seed)
    assert generate._generate._cache_size() == before + 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 20}, "5 prompt ids and 20 new ones exceed the context of 24"),
        ({"steps": 0}, "tokens = 0 must be at least 1"),
        ({"temperature": -0.1}, "temperature = -0.1 must be 0 or from"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"temperature": 1e-46}, "temperature = 1e-46 must be 0 or from 1e-06 to 1e\\+06"),  # float32 would make it 0
        ({"top_k": -1}, "top_k = -1"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**32}, "seed = 4294967296"),
    ],
)
def test_settings_out_of_range(changes, message):
    section, params = make()
    settings = {"steps": 3} | changes
    with pytest.raises(ConfigError, match=message):
        generate.sample(section, FLOAT32, params, prompts(), **settings)


@pytest.mark.parametrize("prompt", [[[61]], [[-1]], [[]], [1, 2], [[0.5]]])
def test_bad_prompts(prompt):
    section, params = make()
    with pytest.raises(ValueError):
        generate.sample(section, FLOAT32, params, np.array(prompt), 3)


# The command.

TEXT = ["the cat sat on the mat and the dog ate the hat", "a dog and a cat ran to the mat"] * 20


def bpe_folder(tmp_path):
    """An export with a byte-level BPE trained here, whose end of text is id 0."""
    library = pytest.importorskip("tokenizers")
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    trainer = library.trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXT, trainer)
    bpe.save(str(tmp_path / "tokenizer.json"))
    section = hf_config.model_section(SIZES | {"vocab_size": bpe.get_vocab_size(), "tied": False})
    draw = np.random.default_rng(0)
    params = {
        tensor: (len(shape) == 1) + np.float32(0.3) * draw.standard_normal(shape, np.float32)
        for tensor, shape in flops.parameter_shapes(section).items()
    }
    folder = hf.export_model(tmp_path / "export", params, section, tokenizer_file=tmp_path / "tokenizer.json", eos_id=0)
    return bpe, section, params, folder


def test_command_prints_what_sample_gives(tmp_path, capsys):
    bpe, section, params, folder = bpe_folder(tmp_path)
    (tmp_path / "run" / "exports").mkdir(parents=True)
    folder.rename(tmp_path / "run" / "exports" / "final")
    (tmp_path / "run" / "config.json").write_text('{"program": "llama_jax"}')
    prompt = [0, *bpe.encode("the cat").ids]
    words = ["--prompt=the cat", "--tokens=9", "--temperature=0.9", "--top_k=20", "--seed=5", "--samples=2"]
    generate.run([f"--model={tmp_path / 'run'}", *words])
    printed = capsys.readouterr().out
    new = generate.sample(
        section, generate.default_numerics(), params, np.tile(prompt, (2, 1)), 9, temperature=0.9, top_k=20, seed=5
    )
    assert 0 not in new
    expected = "".join(
        f"--- sample {number} of 2\n{bpe.decode(prompt[1:] + row)}\n" for number, row in enumerate(new.tolist(), 1)
    )
    assert printed == expected and "the cat" in printed
    generate.run([f"--model={tmp_path / 'run' / 'exports' / 'final'}", *words])
    assert capsys.readouterr().out == printed


def test_sample_ends_at_the_end_of_text(tmp_path, capsys):
    _, _, params, folder = bpe_folder(tmp_path)
    section, _ = hf.load_folder(folder)
    for name in params:  # logits 0 but for id 0, whatever the input
        params[name] = np.zeros_like(params[name]) if name.endswith("_proj.weight") else params[name]
    params["model.embed_tokens.weight"] = np.ones_like(params["model.embed_tokens.weight"])
    params["model.norm.weight"] = np.ones_like(params["model.norm.weight"])
    params["lm_head.weight"] = np.zeros_like(params["lm_head.weight"])
    params["lm_head.weight"][0] = 1
    hf.export_model(folder, params, hf_config.model_section(section), tmp_path / "tokenizer.json", eos_id=0)
    generate.run([f"--model={folder}", "--prompt=a dog", "--tokens=5", "--temperature=0", "--samples=1"])
    assert capsys.readouterr().out == "--- sample 1 of 1\na dog\n"


def test_control_tokens_in_a_prompt_are_text(tmp_path):
    bpe, _, _, folder = bpe_folder(tmp_path)
    text = tokenizer.load(folder)
    assert 0 not in text.encode("<|endoftext|>") and text.decode(text.encode("<|endoftext|>")) == "<|endoftext|>"
    assert text.decode([0, *text.encode("a dog"), 0]) == "a dog"
    assert text.encode("a dog") == bpe.encode("a dog").ids
    with pytest.raises(ConfigError, match="--prompt: not UTF-8"):
        generate.run([f"--model={folder}", "--prompt=a \udcff dog"])


def test_sentencepiece_model(tmp_path):
    library = pytest.importorskip("sentencepiece")
    with open(tmp_path / "any.model", "wb") as file:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT), model_writer=file, vocab_size=40, model_type="bpe", minloglevel=2
        )
    engine = library.SentencePieceProcessor(model_file=str(tmp_path / "any.model"))
    section, params = make()
    text = tokenizer.load(hf.export_model(tmp_path / "export", params, section, tmp_path / "any.model", eos_id=2))
    assert text.encode("the cat sat") == engine.encode("the cat sat") != []
    assert text.decode([2, *engine.encode("the cat sat"), 2]) == "the cat sat"


def test_model_without_a_tokenizer(tmp_path, capsys):
    section, params = make()
    folder = hf.export_model(tmp_path / "export", params, section)
    generate.run([f"--model={folder}", "--prompt=5 17 3", "--tokens=4", "--temperature=0", "--samples=1"])
    new = generate.sample(section, FLOAT32, params, np.array([[5, 17, 3]]), 4, temperature=0)[0]
    assert capsys.readouterr().out == "--- sample 1 of 1\n5 17 3 " + " ".join(map(str, new)) + "\n"
    for prompt, message in (("words", "has no tokenizer"), ("5 61", "ids go from 0 to 60"), ("-1", "ids go from")):
        with pytest.raises(ConfigError, match=message):
            generate.run([f"--model={folder}", f"--prompt={prompt}"])


def test_beginning_of_text_comes_first():
    assert generate._special_ids({"bos_token_id": 1, "eos_token_id": 2}, 9) == ([1], {2})
    assert generate._special_ids({"bos_token_id": None, "eos_token_id": [2, 3]}, 9) == ([2], {2, 3})
    assert generate._special_ids({}, 9) == ([], set())
    for bad in (9, -1, "2", True, [1.5]):
        with pytest.raises(ConfigError, match="eos_token_id"):
            generate._special_ids({"eos_token_id": bad}, 9)


@pytest.mark.parametrize("package", ["tokenizers", "sentencepiece"])
def test_missing_package_names_the_extra(tmp_path, monkeypatch, package):
    section, params = make()
    folder = hf.export_model(tmp_path / "export", params, section)
    (folder / ("tokenizer.json" if package == "tokenizers" else "tokenizer.model")).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}: pip install 'llama_jax\[prepare\]'"):
        generate.run([f"--model={folder}"])
    monkeypatch.undo()
    pytest.importorskip(package)
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        generate.run([f"--model={folder}"])


def test_exit_codes_of_the_command(tmp_path):
    section, params = make()
    folder = hf.export_model(tmp_path / "a folder", params, section)

    def command(*words, **variables):
        return subprocess.run(
            [sys.executable, "-m", "llama_jax.generate", *words],
            cwd=Path(generate.__file__).parent.parent,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )

    done = command(f"--model={folder}", "--tokens=2", "--samples=1")
    assert done.returncode == 0 and done.stdout.startswith("--- sample 1 of 1\n0 "), done.stderr
    done = command(f"--model={folder}", JAX_PLATFORMS="absent")
    assert done.returncode == 6 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    (folder / hf.WEIGHTS).write_bytes(b"")
    done = command(f"--model={folder}", "--debug")
    assert done.returncode == 4 and "Traceback" in done.stderr and done.stderr.splitlines()[-1].startswith("error: ")


def test_one_line_and_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate", f"--model={tmp_path / 'absent'}"])
    assert generate.main() == ConfigError.exit_code
    assert capsys.readouterr().err == f"error: {tmp_path / 'absent'} is not a directory\n"


@pytest.mark.parametrize("words", [[], ["--model=x", "--tokens=many"], ["--model=x", "--prompts=y"], ["--samples=0"]])
def test_bad_words(words):
    with pytest.raises(ConfigError):
        generate.run(words)


def test_numbers_of_samples_and_tokens_are_checked(tmp_path):
    section, params = make()
    folder = hf.export_model(tmp_path / "export", params, section)
    with pytest.raises(ConfigError, match="--samples=0"):
        generate.run([f"--model={folder}", "--samples=0"])
    with pytest.raises(ConfigError, match="1 prompt ids and 100 new ones exceed the context of 24"):
        generate.run([f"--model={folder}"])
