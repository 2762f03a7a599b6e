"""verify: every damage is found and named; entropies equal those worked out by hand and by plain numpy.

For rows: each way in which a build can be another one ends the command with 1, what can't be read with 2.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline import chat, merge, packing, sft_rows, verify
from llama_jax import rows, shards

ROOT = Path(__file__).resolve().parent.parent
LENGTH = 16

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


WORDS = ["river", "stone", "over", "under", "light", "walks", "sings", "never"]
TALKS = [[{"role": "user", "content": " ".join(WORDS[: 1 + n % 8]) + f" {n}"}] for n in range(60)]


def build(folder, out, conversations=TALKS, vocabulary=280, **settings):
    """A build of those conversations with a tokenizer of that size; returns rows.parquet."""
    folder.mkdir(exist_ok=True)
    scratch, model, data = folder / "scratch", folder / f"m{vocabulary}", folder / "talks.jsonl"
    scratch.mkdir(exist_ok=True)
    chat.make_tokenizer(model, [" ".join(WORDS)] * 50, vocabulary, scratch)
    data.write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations))
    request = sft_rows.Request("messages", model, folder / out, (str(data),), row_length=LENGTH, **settings)
    sft_rows.build(request)
    return folder / out / "rows.parquet"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """(a recipe, the ids of its rows, the folder that they were built in), all only read."""
    folder = tmp_path_factory.mktemp("recipe")
    path = build(folder, "out")
    record = json.loads((path.parent / "rows.json").read_bytes())
    (folder / "recipe.json").write_text(json.dumps({"schema": 1, "score": 1.0, "rows": record}))
    return folder / "recipe.json", np.concatenate(list(rows.RowsFile(path).blocks())), folder


def run(path, recipe_path, capsys):
    capsys.readouterr()
    code = verify.main([str(path), f"--recipe={recipe_path}"])
    out, err = capsys.readouterr()
    assert err.startswith("error: ") == bool(code) and err.count("\n") == bool(code)
    return code, out + err


def test_rows_of_the_recipe(recipe, tmp_path, capsys):
    path, ids, folder = recipe
    made = folder / "out" / "rows.parquet"
    digest = json.loads(path.read_bytes())["rows"]["rows_sha256"]
    assert digest == rows.rows_sha256([ids], len(ids), LENGTH)
    code, said = run(made, path, capsys)
    assert (
        code == 0
        and f"{len(ids)} rows of 16 tokens, rows_sha256 {digest}" in said
        and "ok: the recipe's rows\n" in said
    )
    assert verify.main([str(made)]) == 0  # rows.json beside it is a recipe too
    again = build(tmp_path, "again")
    assert run(again, path, capsys)[0] == 0
    pq.write_table(pq.read_table(made), tmp_path / "other.parquet", compression="gzip", row_group_size=3)
    assert run(tmp_path / "other.parquet", path, capsys)[0] == 0
    for content in (
        {"rows_sha256": digest},
        {"rows_sha256": digest, "rows": len(ids)},
        {"rows": {"rows_sha256": digest}},
    ):
        (tmp_path / "short.json").write_text(json.dumps(content))
        assert run(made, tmp_path / "short.json", capsys)[0] == 0


def test_a_larger_build_holds_the_recipes_rows(recipe, tmp_path, capsys):
    _, ids, folder = recipe
    build(tmp_path, "first", rows=5)
    record = tmp_path / "first" / "rows.json"
    code, said = run(folder / "out" / "rows.parquet", record, capsys)
    assert code == 0 and f"and {len(ids) - 5} more that it does not read" in said
    code, said = run(tmp_path / "first" / "rows.parquet", folder / "recipe.json", capsys)
    assert code == 1 and f"5 rows, the recipe has {len(ids)}" in said
    last = ids.copy()
    last[4, -1] ^= 1
    rows.write(tmp_path / "changed.parquet", [last], LENGTH)
    assert run(tmp_path / "changed.parquet", record, capsys)[0] == 1
    last = ids.copy()
    last[5, 0] ^= 1
    rows.write(tmp_path / "changed.parquet", [last], LENGTH)
    assert run(tmp_path / "changed.parquet", record, capsys)[0] == 0


def padded(ids):
    ids = ids.copy()
    ids[2, LENGTH // 2 :] = 0
    return ids


def one_token(ids):
    ids = ids.copy()
    ids[len(ids) // 2, 3] ^= 1
    return ids


def swapped(ids):
    ids = ids.copy()
    ids[[1, 2]] = ids[[2, 1]]
    return ids


@pytest.mark.parametrize("defect", [one_token, swapped, padded, lambda ids: ids[:-1], lambda ids: ids[1:]])
def test_changed_rows(recipe, tmp_path, capsys, defect):
    path, ids, _ = recipe
    rows.write(tmp_path / "rows.parquet", [defect(ids)], LENGTH)
    code, said = run(tmp_path / "rows.parquet", path, capsys)
    assert code == 1 and ("not the recipe's rows" in said or "rows, the recipe has" in said)


def test_rows_made_another_way(recipe, tmp_path, capsys, monkeypatch):
    path, ids, _ = recipe
    ways = {
        "conversation": {"conversations": TALKS[:30] + TALKS[31:]},
        "reordered": {"conversations": TALKS[::-1]},
        "tokenizer": {"vocabulary": 279},
        "seed": {"seed": 43},
        "template": {"chat_template": str(tmp_path / "own.jinja")},
        "eos": {"eos_token": "<|im_end|>"},
    }
    (tmp_path / "own.jinja").write_text(chat.CHATML.replace("\\n", " "))
    for name, settings in ways.items():
        code, said = run(build(tmp_path / name, "out", **settings), path, capsys)
        assert code == 1 and ("not the recipe's rows" in said or "rows, the recipe has" in said), name
        why = {
            "conversation": "source.conversations: 60 -> 59\n", "reordered": "source.files: ",
            "tokenizer": "tokenizer.sha256: ", "seed": "seed: 42 -> 43\n", "template": "chat_template.sha256: ",
            "eos": "eos.id: 0 -> 2\n",
        }[name]  # fmt: skip
        assert why in said, name

    def without_eos(conversation_ids, eos_id, row_length, limit=None):
        yield from cut((np.concatenate(list(conversation_ids)),), eos_id, row_length, limit)

    def eos_after_each(conversation_ids, eos_id, row_length, limit=None):
        yield from cut((np.append(one, np.int32(eos_id)) for one in conversation_ids), eos_id, row_length, limit)

    cut = packing.cut
    for mutant in (without_eos, eos_after_each):
        monkeypatch.setattr(packing, "cut", mutant)
        made = build(tmp_path / mutant.__name__, "out")
        extra = np.concatenate([np.concatenate(list(rows.RowsFile(made).blocks())), ids])  # never too few rows
        rows.write(made, [extra], LENGTH)
        code, said = run(made, path, capsys)
        assert code == 1 and "not the recipe's rows" in said, mutant


def test_rows_of_another_shape(recipe, tmp_path, capsys):
    path, ids, _ = recipe
    made = tmp_path / "rows.parquet"
    lists = ids.tolist()
    for column, message in (
        (pa.array(lists, pa.list_(pa.int64(), LENGTH)), "holds int64, rows hold int32"),
        (
            pa.array([lists[0], lists[1][:-1], *lists[2:]], pa.list_(pa.int32())),
            "row 1 has 15 tokens, the first one 16",
        ),
        (pa.array([lists[0], None, *lists[2:]], pa.list_(pa.int32(), LENGTH)), "row 1 is null"),
        (pa.array(ids.reshape(-1, 8).tolist(), pa.list_(pa.int32(), 8)), "rows of 8 tokens, the recipe's have 16"),
    ):
        pq.write_table(pa.table({"input_ids": column}), made)
        code, said = run(made, path, capsys)
        assert code == 1 and message in said


def test_unreadable(recipe, tmp_path, capsys):
    path, ids, folder = recipe
    made = tmp_path / "rows.parquet"
    assert run(made, path, capsys)[0] == 2 and verify.main([str(made)]) == 2
    capsys.readouterr()
    for data in (b"", b"PAR1", (folder / "out" / "rows.parquet").read_bytes()[:-30]):
        made.write_bytes(data)
        code, said = run(made, path, capsys)
        assert code == 2 and "can't be read as parquet" in said
    pq.write_table(pa.table({"text": ["a"]}), made)
    assert run(made, path, capsys)[0] == 2
    assert run(folder, path, capsys)[0] == 2  # a folder is no rows file
    rows.write(made, [ids], LENGTH)
    digest = rows.rows_sha256([ids], len(ids), LENGTH)
    other = tmp_path / "recipe.json"
    for content, message in (
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "needs one rows_sha256"),
        ('{"rows_sha256": "abc"}', "needs one rows_sha256"),
        ('{"rows_sha256": 7, "rows": {}}', "needs one rows_sha256"),
        (json.dumps({"rows_sha256": digest, "rows": {"rows_sha256": "0" * 64}}), "needs one rows_sha256"),
        (json.dumps({"rows_sha256": digest, "row_length": True}), "row_length is True"),
        (json.dumps({"rows_sha256": digest, "rows": -1}), "rows is -1"),
        (json.dumps({"rows_sha256": digest, "rows": "3"}), "rows is '3'"),
    ):
        other.write_text(content)
        code, said = run(made, other, capsys)
        assert code == 2 and message in said, content
    assert run(made, tmp_path / "nothing.json", capsys)[0] == 2


def test_exit_codes_of_the_command(recipe, tmp_path):
    path, ids, folder = recipe
    rows.write(tmp_path / "changed.parquet", [one_token(ids)], LENGTH)
    for made, code in (
        (folder / "out" / "rows.parquet", 0),
        (tmp_path / "changed.parquet", 1),
        (tmp_path / "nothing.parquet", 2),
    ):
        command = [sys.executable, "-m", "data_pipeline.verify", str(made), "--recipe", str(path)]
        assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == code
