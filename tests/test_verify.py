"""verify: every damage is found and named; entropies equal those worked out by hand and by plain numpy."""

import json
import math

import numpy as np
import pytest

from data_pipeline import merge, verify
from llama_jax import shards

TRAIN = np.array([0, 1, 1, 2, 2, 2, 2, 0, 1, 1], np.uint16)
VALIDATION = np.array([2, 2, 1, 3], np.uint16)


@pytest.fixture
def cache(tmp_path):
    """A cache of 5 ids written with the shard module alone, two train shards and one of validation."""
    splits = {}
    for name, ids in (("train", TRAIN), ("validation", VALIDATION)):
        writer = shards.ShardWriter(tmp_path, name, "<u2", 8)
        writer.append(ids)
        splits[name] = {"tokens": ids.size, "documents": 2, "utf8_bytes": 3 * ids.size, "shards": list(writer.finish())}
    tokenizer = {"kind": "huggingface", "name": "t", "sha256": "0" * 64, "vocab_size": 5, "eos_id": 0, "file": None}
    source = {"name": "a.jsonl", "sha256": "1" * 64, "skipped": 3}
    content = {
        "dtype": "<u2",
        "shard_tokens": 8,
        "seed": 42,
        "tokenizer": tokenizer,
        "sources": [source],
        "splits": splits,
    }
    shards.write_manifest(tmp_path, content)
    return tmp_path


def test_whole_cache(cache, capsys):
    assert verify.main([str(cache)]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[:3] == ["train-00000.bin: ok", "train-00001.bin: ok", "validation-00000.bin: ok"]
    assert "train: 2 documents, 10 tokens in 2 shards, 3.0000 bytes a token" in lines
    assert any("bad input skipped: 3" in line for line in lines)


def test_what_other_programs_say_of_their_sources_is_not_trusted(cache, capsys):
    content = json.loads((cache / "manifest.json").read_bytes())
    content["sources"] = [{"skipped": "none"}, {}]
    content["tokenizer"]["name"] = "half \ud800"
    (cache / "manifest.json").write_text(json.dumps(content))
    assert verify.main([str(cache)]) == 0
    out = capsys.readouterr().out
    assert "sources: 2, bad input skipped: 0" in out and "tokenizer half \\ud800: 5 ids" in out


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00001.bin", "validation-00000.bin"])
def test_changed_byte(cache, capsys, name):
    data = bytearray((cache / name).read_bytes())
    data[2] ^= 1
    (cache / name).write_bytes(data)
    assert verify.main([str(cache)]) == 3
    out, err = capsys.readouterr()
    assert [line.partition(": sha256")[0] for line in out.split("\n")[:3] if not line.endswith(": ok")] == [name]
    assert err.startswith("error: ") and name in err and err.count("\n") == 1


def test_other_damage(cache, capsys):
    data = (cache / "train-00001.bin").read_bytes()
    (cache / "train-00001.bin").write_bytes(data[:-2])
    assert verify.main([str(cache)]) == 3 and "train-00001.bin" in capsys.readouterr().err
    (cache / "train-00001.bin").unlink()
    assert verify.main([str(cache)]) == 3 and "train-00001.bin" in capsys.readouterr().err
    (cache / "manifest.json").unlink()
    assert verify.main([str(cache)]) == 3 and "manifest.json" in capsys.readouterr().err
    assert verify.main([str(cache / "nothing")]) == 3


def test_unigram_entropy(cache, capsys):
    manifest = shards.read_manifest(cache)
    # train counts 2, 4, 4, 0, 0; plus one each, of 15: 3, 5, 5, 1, 1. validation: 2, 2, 1, 3.
    cross = -(2 * math.log(5 / 15) + math.log(5 / 15) + math.log(1 / 15)) / 4
    own = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    assert verify.unigram_entropy(manifest) == pytest.approx((cross, own), abs=1e-6)
    p = np.array([0.2, 0.4, 0.4])
    assert verify.unigram_entropy(manifest, "train").entropy == pytest.approx(float(-(p * np.log(p)).sum()), abs=1e-6)
    assert verify.main([str(cache), "--entropy"]) == 0
    assert (
        f"validation: {own:.6f} nats a token of unigram entropy, {cross:.6f} under train's" in capsys.readouterr().out
    )


def test_entropy_of_nothing_and_of_random_counts():
    assert merge.entropy(np.zeros(5, np.int64)) is None
    assert merge.cross_entropy(np.zeros(5, np.int64), np.ones(5, np.int64)) is None
    counts = np.random.default_rng(1).integers(0, 50, (2, 1000))
    p, q = counts[0] / counts[0].sum(), (counts[1] + 1) / (counts[1] + 1).sum()
    inside = p > 0
    assert merge.entropy(counts[0]) == pytest.approx(-(p[inside] * np.log(p[inside])).sum(), abs=1e-6)
    assert merge.cross_entropy(counts[0], counts[1]) == pytest.approx(-(p * np.log(q)).sum(), abs=1e-6)


def test_manifest_keeps_no_nan(cache):
    json.loads((cache / "manifest.json").read_bytes(), parse_constant=lambda word: pytest.fail(word))
