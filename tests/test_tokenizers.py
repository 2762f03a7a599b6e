"""Tokenizers: ids equal those of the libraries themselves, text stays text, files that are no tokenizer are refused."""

import hashlib
import io
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers as library

from data_pipeline import packages, tokenizers
from llama_jax.errors import ConfigError, DataError
from llama_jax.files import sha256_of_file

ROOT = Path(__file__).resolve().parent.parent
HARD = ["", " ", "a", "Hello  world\n\n", "naïve 😀 \u2028 \x00 end", "</s><s>[INST]<|endoftext|><unk>", "é" * 500]


def corpus(n=300):
    words = ["the", "a", "of", "to", "and", "in", "river", "stone", "over", "under", "light", "walks", "sings", "never"]
    draw = random.Random(7)
    return [" ".join(draw.choice(words) for _ in range(40)) + "." for _ in range(n)]


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    """A small SentencePiece BPE with byte fallback, in Llama's manner."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=model, vocab_size=340, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("spm") / "small.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizers.train_bpe(corpus(), 400, path)
    return path


def test_sentencepiece_golden(spm):
    ours = tokenizers.load(spm)
    engine = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    assert (ours.kind, ours.vocab_size, ours.eos_id, ours.bos_id) == ("sentencepiece", 340, 2, 1)
    assert ours.sha256 == hashlib.sha256(spm.read_bytes()).hexdigest() and ours.file == "tokenizer.model"
    texts = HARD + corpus(5)
    for threads in (1, 3):
        rows = ours.encode_batch(texts, threads)
        assert [row.tolist() for row in rows] == [engine.encode(text) for text in texts]
        assert all(row.dtype == np.int64 for row in rows)
    assert ours.encode_batch([]) == []
    assert ours.decode(ours.encode_batch(["over the river"])[0]) == "over the river"


def test_huggingface_golden(bpe):
    ours = tokenizers.load(bpe)
    engine = library.Tokenizer.from_file(str(bpe))
    assert (ours.kind, ours.eos_id, ours.bos_id, ours.file) == ("huggingface", 0, None, "tokenizer.json")
    assert ours.vocab_size == engine.get_vocab_size()
    plain = [text for text in HARD if "<|endoftext|>" not in text] + corpus(5)
    assert [row.tolist() for row in ours.encode_batch(plain)] == [engine.encode(text).ids for text in plain]
    for text in HARD:  # byte level: nothing is lost
        assert ours.decode(ours.encode_batch([text])[0]) == text


def test_control_tokens_in_text_are_text(spm, bpe):
    text = "a </s> b <s> <|endoftext|> c"
    for path in (spm, bpe):
        ours = tokenizers.load(path)
        ids = ours.encode_batch([text])[0].tolist()
        assert ours.eos_id not in ids and (ours.bos_id is None or ours.bos_id not in ids)
        assert ours.decode(ids) == text
    # The library's own default would have given the control id: the rule is not vacuous.
    assert 0 in library.Tokenizer.from_file(str(bpe)).encode(text).ids


def test_nothing_is_added_cut_or_padded(tmp_path):
    engine = library.Tokenizer(library.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "?": 4}, unk_token="?"))
    engine.pre_tokenizer = library.pre_tokenizers.Whitespace()
    engine.post_processor = library.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    engine.enable_truncation(3)
    engine.enable_padding(length=8)
    engine.add_special_tokens(["<s>", "</s>"])
    engine.save(str(tmp_path / "tokenizer.json"))
    ours = tokenizers.load(tmp_path)
    assert (ours.eos_id, ours.bos_id) == (1, 0)
    assert [row.tolist() for row in ours.encode_batch(["a b a b a b", "b"])] == [[2, 3, 2, 3, 2, 3], [3]]


def test_end_token_is_found_or_asked_for(tmp_path):
    engine = library.Tokenizer(library.models.WordLevel({"a": 0, "STOP": 1, "</s>": 2, "GAP": 9}, unk_token="a"))
    engine.save(str(tmp_path / "tokenizer.json"))
    assert tokenizers.load(tmp_path).eos_id == 2
    assert tokenizers.load(tmp_path).vocab_size == 10  # the largest id counts, not the number of entries
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "STOP"}}), encoding="utf-8")
    assert tokenizers.load(tmp_path).eos_id == 1
    assert tokenizers.load(tmp_path, eos_token="a").eos_id == 0
    with pytest.raises(ConfigError, match="--eos_token=END is not in its vocabulary"):
        tokenizers.load(tmp_path, eos_token="END")
    library.Tokenizer(library.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "none.json"))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="no end-of-text token found"):
        tokenizers.load(tmp_path / "none.json")


def test_sentencepiece_end_token(spm):
    piece = sentencepiece.SentencePieceProcessor(model_file=str(spm)).id_to_piece(300)
    assert tokenizers.load(spm, eos_token=piece).eos_id == 300
    with pytest.raises(ConfigError, match="no such piece"):
        tokenizers.load(spm, eos_token="no such thing")


@pytest.mark.parametrize("name", ["x.model", "x.json"])
@pytest.mark.parametrize("content", [b"", b"garbage", b"{}", b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}'])
def test_damaged_files_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        tokenizers.load(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000])
def test_a_damaged_file_beside_it_is_named(tmp_path, bpe, content):
    (tmp_path / "tokenizer.json").write_bytes(bpe.read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer_config\.json"):
        tokenizers.load(tmp_path / "tokenizer.json")


def test_unknown_specs():
    with pytest.raises(ConfigError, match="no such file"):
        tokenizers.load("nothing.model")
    with pytest.raises(ConfigError, match="trained by the preparation"):
        tokenizers.load("bpe:4096")
    assert tokenizers.bpe_size("bpe:4096") == 4096 and tokenizers.bpe_size("a.model") is None
    for spec in ("bpe:", "bpe:256", "bpe:-5", "bpe:4k", "bpe:2000000"):
        with pytest.raises(ConfigError, match="V must be"):
            tokenizers.bpe_size(spec)


def test_bpe_training_does_not_depend_on_process_or_threads(tmp_path, bpe):
    script = (
        "import sys; sys.path[:0] = [sys.argv[2], sys.argv[3]]\n"
        "from pathlib import Path; from data_pipeline import tokenizers; from test_tokenizers import corpus\n"
        "tokenizers.train_bpe(corpus(), 400, Path(sys.argv[1]))"
    )
    for threads in ("1", "4"):
        path = tmp_path / f"{threads}.json"
        subprocess.run(
            [sys.executable, "-c", script, str(path), str(ROOT), str(ROOT / "tests")], check=True,
            env={"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads, "PATH": "", "LC_ALL": "C"},
        )  # fmt: skip
        assert path.read_bytes() == bpe.read_bytes()
    ours = tokenizers.load(bpe)
    assert ours.vocab_size <= 400 and len(ours.encode_batch(["the river"])[0]) == 2


def wheel(path, content):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mistral_common/data/tokenizer.model.v1", content)


def test_default_model_is_checked_against_its_pins(tmp_path, spm, monkeypatch):
    """The download is replaced by a local file: the wheel's hash is pinned, and so is that of the model inside."""
    name = "mistral_common-1.13.1-py3-none-any.whl"
    commands = []

    def fake_run(command, folder, what):
        commands.append(command)
        wheel(folder / name, spm.read_bytes())

    monkeypatch.setattr(packages, "_run", fake_run)
    with pytest.raises(packages.Unavailable, match="is not the pinned 98b4d07"):
        tokenizers.load("llama32k", tmp_path)
    assert commands[0][-1] == "mistral-common==1.13.1" and "--no-deps" in commands[0] and "download" in commands[0]
    wheel(tmp_path / "probe.whl", spm.read_bytes())
    digest = hashlib.sha256((tmp_path / "probe.whl").read_bytes()).hexdigest()
    monkeypatch.setattr(tokenizers, "_WHEEL", ("mistral-common", "1.13.1", digest))
    monkeypatch.setattr(packages, "_run", lambda c, folder, w: (tmp_path / "probe.whl").rename(folder / name))
    with pytest.raises(DataError, match="is not the pinned dadfd56"):
        tokenizers.load("llama32k", tmp_path)
    monkeypatch.setattr(tokenizers, "_MEMBER_SHA256", sha256_of_file(spm))
    assert tokenizers.load("llama32k", tmp_path).name == "llama32k"
    monkeypatch.setattr(packages, "_run", lambda *a: pytest.fail("a second load needs no network"))
    assert tokenizers.load("llama32k", tmp_path).vocab_size == 340
