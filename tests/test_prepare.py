"""Preparation end to end: golden streams, the same bytes for any workers and after any kill, strict about bad input."""

import contextlib
import dataclasses
import fcntl
import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers as library

from data_pipeline import folder, merge, options, pieces, pool, prepare, progress, sources, streams
from llama_jax import shards
from llama_jax.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "été", "Öl", "river", "stone"]
END = len(WORDS) + 1


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer that gives word i of WORDS the id i + 1; 0 is unknown, 11 </s>."""
    vocabulary = {"?": 0} | {word: i + 1 for i, word in enumerate(WORDS)}
    engine = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="?"))
    engine.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    engine.add_special_tokens(["</s>"])
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    engine.save(str(path))
    return path


def text(seed, length):
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(length))


def ids_of(document):
    return [WORDS.index(word) + 1 if word in WORDS else 0 for word in document.split()]


def write_jsonl(path, texts, pack=bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts).encode("utf-8")))


def corpus(root, files=4, documents=200):
    texts = []
    for number in range(files):
        mine = [f"{text(1000 * number + i, 5 + i % 23)}" for i in range(documents)]
        write_jsonl(root / f"part{number}.jsonl.gz", mine, gzip.compress)
        texts += mine
    return texts


def run(*arguments, code=0):
    """Runs the command in this process, with one worker unless told otherwise; checks its exit code."""
    assert prepare.main(["--workers=1", *map(str, arguments)]) == code


def content(out):
    """{name: SHA-256} of all files of a cache."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


def stream(out, split="train"):
    manifest = shards.read_manifest(out)
    return shards.read_tokens(manifest, split, 0, manifest.splits[split].tokens)


def documents_of(ids, end=END):
    """The stream cut after each end-of-document id, as a list of tuples."""
    ends = np.flatnonzero(ids == end) + 1
    return [tuple(part[:-1].tolist()) for part in np.split(ids, ends)[:-1]]


def record(out):
    return json.loads((out / "manifest.json").read_bytes())


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """No waiting for the disk in this process: these tests kill processes, not the machine."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def base(tmp_path, words):
    """Arguments of a preparation of a small corpus, and its texts."""
    texts = corpus(tmp_path / "in")
    return ["--source=jsonl", "--input", tmp_path / "in", f"--tokenizer={words}", "--shard_tokens=1000"], texts


def test_golden_stream(tmp_path, words):
    texts = ["alpha beta", "gamma </s> delta", "  \n ", "", "été?", "alpha beta", "stone"]
    write_jsonl(tmp_path / "a.jsonl", texts)
    arguments = ["--source=jsonl", "--input", tmp_path / "a.jsonl", f"--tokenizer={words}", "--shuffle_buffer=0",
                 "--validation_fraction=0"]  # fmt: skip
    run(*arguments, f"--out={tmp_path / 'out'}")
    # "</s>" in a text is text (here: unknown), the two blank documents and the second "alpha beta" are dropped.
    assert stream(tmp_path / "out").tolist() == [1, 2, END, 3, 0, 4, END, 0, END, 10, END]
    made = record(tmp_path / "out")
    source = made["sources"][0]
    assert (source["documents"], source["empty"], source["duplicates"], source["skipped"]) == (5, 2, 1, 0)
    assert source["sha256"] == hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()
    train = made["splits"]["train"]
    assert (train["tokens"], train["documents"]) == (11, 4)
    assert train["utf8_bytes"] == sum(len(t.encode()) for t in [texts[0], texts[1], texts[4], texts[6]])
    assert made["tokenizer"]["file"] == "tokenizer.json" and made["dtype"] == "<u2" and made["finished"] is True
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == words.read_bytes()
    assert sorted(content(tmp_path / "out")) == ["manifest.json", "tokenizer.json", "train-00000.bin"]
    run(*arguments, "--dedupe=off", f"--out={tmp_path / 'all'}")
    assert stream(tmp_path / "all").tolist() == [1, 2, END, 3, 0, 4, END, 0, END, 1, 2, END, 10, END]


def test_text_that_becomes_the_end_id_is_refused(tmp_path, words, capsys):
    """A tokenizer that can't keep the rule (its model has the control token as a word) is caught at each document."""
    vocabulary = {"</s>": 0, "?": 1, "alpha": 2}
    engine = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="?"))
    engine.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    engine.save(str(tmp_path / "t.json"))
    write_jsonl(tmp_path / "a.jsonl", ["alpha", "alpha </s> alpha", "alpha alpha"])
    arguments = ["--source=jsonl", "--input", tmp_path / "a.jsonl", f"--tokenizer={tmp_path / 't.json'}",
                 "--shuffle_buffer=0", "--validation_fraction=0"]  # fmt: skip
    run(*arguments, f"--out={tmp_path / 'out'}", code=3)
    assert "a.jsonl: document 2: " in capsys.readouterr().err
    run(*arguments, f"--out={tmp_path / 'out'}", "--skip_bad")
    assert stream(tmp_path / "out").tolist() == [2, 0, 2, 2, 0]


def test_bos_on_request(tmp_path, words):
    engine = library.Tokenizer.from_file(str(words))
    engine.add_special_tokens(["<s>"])
    engine.save(str(tmp_path / "t.json"))
    write_jsonl(tmp_path / "a.jsonl", ["alpha", "beta"])
    arguments = ["--source=jsonl", "--input", tmp_path / "a.jsonl", "--shuffle_buffer=0", "--validation_fraction=0"]
    run(*arguments, f"--tokenizer={tmp_path / 't.json'}", "--bos", f"--out={tmp_path / 'out'}")
    assert stream(tmp_path / "out").tolist() == [12, 1, END, 12, 2, END]
    run(*arguments, f"--tokenizer={words}", "--bos", f"--out={tmp_path / 'no'}", code=2)


def test_every_document_once_and_shuffled(tmp_path, base):
    arguments, texts = base
    run(*arguments, f"--out={tmp_path / 'out'}", "--shuffle_buffer=50", "--validation_fraction=0.1")
    train, validation = (documents_of(stream(tmp_path / "out", split)) for split in ("train", "validation"))
    wanted = [tuple(ids_of(t)) for t in dict.fromkeys(texts)]
    assert sorted(train + validation) == sorted(wanted)
    assert 0.05 * len(wanted) < len(validation) < 0.15 * len(wanted)
    assert train != [document for document in wanted if document in set(train)]  # not in file order
    made = shards.read_manifest(tmp_path / "out")
    assert len(made.splits["train"].shards) > 5
    assert [problem for _, problem in shards.verify(made)] == [None] * (len(made.splits["train"].shards) + 3)


def test_split_depends_on_text_and_seed_only(tmp_path, words, base):
    arguments, texts = base
    run(*arguments, f"--out={tmp_path / 'a'}", "--validation_fraction=0.1")
    write_jsonl(tmp_path / "other" / "b.jsonl", [*reversed(texts), "alpha"])
    arguments[2] = tmp_path / "other"
    run(*arguments, f"--out={tmp_path / 'b'}", "--validation_fraction=0.1")
    run(*arguments, f"--out={tmp_path / 'c'}", "--validation_fraction=0.1", "--seed=43")
    a, b, c = (set(documents_of(stream(tmp_path / name, "validation"))) for name in "abc")
    assert a == b - {(1,)} and a != c


def test_shuffle_buffer():
    documents = [merge.Document(np.array([i]), 1) for i in range(500)]
    order = [int(d.ids[0]) for d in merge.shuffled(iter(documents), 40, 42)]
    assert sorted(order) == list(range(500)) and order != sorted(order)
    assert all(position >= number - 40 for position, number in enumerate(order))  # at most 40 ahead of its turn
    assert [int(d.ids[0]) for d in merge.shuffled(iter(documents), 0, 42)] == list(range(500))
    assert order != [int(d.ids[0]) for d in merge.shuffled(iter(documents), 40, 43)]
    # PCG64(SeedSequence([42, 0x5EED])): frozen, so that another library version can't change a stream.
    assert order[:4] == [4, 39, 1, 15]


def test_signal_handlers_are_put_back(tmp_path, base):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    run(*base[0], f"--out={tmp_path / 'out'}", "--tokens=500")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before


def test_c4_with_official_validation(tmp_path, words):
    """C4's own file names and format: gzip JSON lines with text, timestamp and url."""
    train = [[text(100 * f + i, 10) for i in range(30)] for f in range(3)]
    held_out = [text(9000 + i, 10) for i in range(20)]

    def c4(name, texts):
        rows = [json.dumps({"text": t, "timestamp": "2019-04-25T12:57:54Z", "url": "https://x/y"}) for t in texts]
        (tmp_path / "c4" / "en").mkdir(parents=True, exist_ok=True)
        (tmp_path / "c4" / "en" / name).write_bytes(gzip.compress(("\n".join(rows) + "\n").encode()))

    for number, texts in enumerate(train):
        c4(f"c4-train.{number:05d}-of-01024.json.gz", texts)
    for number in range(8):
        c4(f"c4-validation.{number:05d}-of-00008.json.gz", held_out[number::8])
    arguments = ["--source=c4", "--input", tmp_path / "c4", f"--tokenizer={words}", "--shuffle_buffer=0"]
    run(*arguments, f"--out={tmp_path / 'all'}")
    assert documents_of(stream(tmp_path / "all")) == [tuple(ids_of(t)) for texts in train for t in texts]
    wanted = [tuple(ids_of(t)) for number in range(8) for t in held_out[number::8]]
    assert documents_of(stream(tmp_path / "all", "validation")) == wanted
    names = [source["name"] for source in record(tmp_path / "all")["sources"]]
    assert names[0] == "c4-validation.00000-of-00008.json.gz" and names[8] == "c4-train.00000-of-01024.json.gz"
    # A budget that ends in the first train file takes no other, and its stream is a prefix.
    run(*arguments, f"--out={tmp_path / 'some'}", "--tokens=200")
    assert stream(tmp_path / "some").tolist() == stream(tmp_path / "all")[:200].tolist()
    assert stream(tmp_path / "some", "validation").tolist() == stream(tmp_path / "all", "validation").tolist()
    assert len(record(tmp_path / "some")["sources"]) == 9


def test_streams_of_different_budgets_share_their_prefix(tmp_path, base):
    arguments, _ = base
    full = None
    for tokens in (None, 6000, 3001, 1000, 1):
        out = tmp_path / f"t{tokens}"
        run(*arguments, f"--out={out}", "--shuffle_buffer=30", *([] if tokens is None else [f"--tokens={tokens}"]))
        ids = stream(out)
        full = ids if full is None else full
        assert ids.tolist() == full[: ids.size].tolist() and ids.size == (tokens or full.size)
        assert record(out)["exhausted"] is (tokens is None)


def test_reading_that_ended_too_early_is_completed(tmp_path, base, monkeypatch):
    arguments, _ = base
    run(*arguments, f"--out={tmp_path / 'a'}", "--tokens=2500", "--shuffle_buffer=30")
    monkeypatch.setattr(pieces, "_BATCH_DOCUMENTS", 7)
    monkeypatch.setattr(pieces.Limit, "reached", lambda self, documents, tokens: documents > 30)
    run(*arguments, f"--out={tmp_path / 'b'}", "--tokens=2500", "--shuffle_buffer=30")
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_size_from_config(tmp_path):
    shard = shards.SHARD_TOKENS
    # 408,070,144 targets of the 20M preset are 12.2 shards: 7 groups of 2, and the token that the last target is.
    assert options.budget_tokens(str(ROOT / "configs" / "c4_20m.py"), {}, shard) == (14 * shard + 1, 32_000)
    exact = {"training.targets_per_parameter": "None", "training.total_targets": str(2 * shard)}
    assert options.budget_tokens(str(ROOT / "configs" / "c4_20m.py"), exact, shard)[0] == 2 * shard + 1
    with pytest.raises(ConfigError, match="is no multiple of"):
        options.budget_tokens(str(ROOT / "configs" / "c4_20m.py"), {}, 1000)


def test_no_more_files_are_read_ahead_than_needed(tmp_path, base, capsys):
    files = [sources.Item("jsonl", f"/c4-train.{i:05d}.json.gz", "", "train", 318_000_000) for i in range(1024)]
    assert [pool.needed(files, tokens) for tokens in (1, 95_000_000, 470_000_000, 10**12)] == [1, 1, 5, 1024]
    # With many workers a small budget makes one file, one after the other when the estimate was too low.
    for number in range(8):
        write_jsonl(tmp_path / "more" / f"{number}.jsonl", [text(50 * number + i, 20) for i in range(50)])
    arguments = [*base[0][:2], tmp_path / "more", *base[0][3:], "--workers=8", "--shuffle_buffer=0"]
    for tokens, files_made in ((200, 1), (2500, 3)):
        run(*arguments, f"--out={tmp_path / str(tokens)}", f"--tokens={tokens}", "--slice=0/1")
        assert len(list((tmp_path / str(tokens)).glob("partial/*.json"))) in (files_made, files_made + 1)


def test_vocabulary_must_fit_the_config(tmp_path, base, capsys):
    arguments, _ = base
    small = ["--config.model.vocab_size=11", "--shard_tokens=1024", f"--out={tmp_path / 'out'}"]
    run(*arguments, f"--config={ROOT / 'configs' / 'smoke.py'}", *small, code=2)
    assert "has 12 ids, more than model.vocab_size = 11" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_never_change_a_byte(tmp_path, base, workers):
    arguments, _ = base
    run(*arguments, f"--out={tmp_path / 'one'}", "--workers=1", "--tokens=9000")
    command = [sys.executable, "-m", "data_pipeline.prepare", *map(str, arguments), "--tokens=9000",
               f"--out={tmp_path / 'many'}", f"--workers={workers}"]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    assert content(tmp_path / "one") == content(tmp_path / "many")


def test_locale_hash_seed_and_folder_never_change_a_byte(tmp_path, base):
    arguments, _ = base
    run(*arguments, f"--out={tmp_path / 'here'}")
    arguments[2] = "in"
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONHASHSEED": "5", "PATH": "",
                   "PYTHONPATH": str(ROOT), "TZ": "Pacific/Kiritimati"}  # fmt: skip
    command = [sys.executable, "-m", "data_pipeline.prepare", *map(str, arguments), "--out=there"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120)
    assert content(tmp_path / "here") == content(tmp_path / "there")


def children(pid):
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_killed_at_any_moment_it_ends_with_the_same_bytes(tmp_path, words):
    """kill -9 after the first, second, ... finished file, always resumed; then run to the end."""
    corpus(tmp_path / "in", files=5, documents=6000)
    arguments = ["--source=jsonl", "--input", tmp_path / "in", f"--tokenizer={words}", "--shard_tokens=10000"]
    run(*arguments, f"--out={tmp_path / 'unbroken'}")
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "data_pipeline.prepare", *map(str, arguments), f"--out={out}"]
    kills, first = 0, None
    for number, workers in ((1, 1), (2, 2), (3, 1)):
        process = subprocess.Popen([*command, f"--workers={workers}"], cwd=ROOT, stderr=subprocess.DEVNULL)
        wait_for(lambda n=number: len(list(out.glob("partial/*.json"))) >= n)
        if process.poll() is None:
            offspring = children(process.pid)
            process.kill()
            process.wait()
            kills += 1
            wait_for(lambda pids=tuple(offspring): not any(map(alive, pids)))  # no orphans
        if not (out / "manifest.json").exists():
            kept = {path.name: path.stat().st_mtime_ns for path in out.glob("partial/*.json")}
            assert first is None or first.items() <= kept.items()  # finished files were not made again
            first = kept
    assert kills == 3
    run(*arguments, f"--out={out}")
    assert content(out) == content(tmp_path / "unbroken")


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "gave up waiting"
        time.sleep(0.002)


def test_killed_while_merging(tmp_path, base, monkeypatch):
    """Death after some shards have their names: without a manifest nothing counts, and the next run ends the same."""
    arguments, _ = base
    run(*arguments, f"--out={tmp_path / 'unbroken'}")

    class Dead(BaseException):
        pass

    def die(self):
        if len(self.shards) == 3:
            raise Dead
        finish(self)

    finish = shards.ShardWriter._finish_shard
    monkeypatch.setattr(shards.ShardWriter, "_finish_shard", die)
    with pytest.raises(Dead):
        prepare.main([*map(str, arguments), f"--out={tmp_path / 'out'}"])
    monkeypatch.undo()
    assert not (tmp_path / "out" / "manifest.json").exists() and (tmp_path / "out" / "train-00002.bin").exists()
    (tmp_path / "out" / "train-00077.bin").write_bytes(b"left over from a longer attempt")
    run(*arguments, f"--out={tmp_path / 'out'}")
    assert content(tmp_path / "out") == content(tmp_path / "unbroken")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_signals_stop_it_with_their_own_code(tmp_path, words, number, code):
    corpus(tmp_path / "in", files=6, documents=6000)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "data_pipeline.prepare", "--source=jsonl", "--input", str(tmp_path / "in"),
               f"--tokenizer={words}", f"--out={out}", "--workers=2"]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True)
    wait_for(lambda: list(out.glob("partial/*.json")))
    os.killpg(process.pid, number)
    errors = process.communicate(timeout=60)[1].decode()
    assert process.returncode == code, errors
    assert "the same command goes on" in errors and "Traceback" not in errors
    assert not (out / "manifest.json").exists()


def test_a_worker_that_dies_is_an_error_not_a_hang(tmp_path, words):
    corpus(tmp_path / "in", files=6, documents=6000)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "data_pipeline.prepare", "--source=jsonl", "--input", str(tmp_path / "in"),
               f"--tokenizer={words}", f"--out={out}", "--workers=2"]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    wait_for(lambda: list(out.glob("partial/*.json")))
    workers = [pid for pid in children(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    errors = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 3 and "error: a worker process died" in errors and "Traceback" not in errors
    run("--source=jsonl", "--input", tmp_path / "in", f"--tokenizer={words}", f"--out={out}")  # and it goes on


def test_changed_or_damaged_pieces_are_made_again(tmp_path, base):
    arguments, _ = base
    run(*arguments, f"--out={tmp_path / 'unbroken'}")
    out = tmp_path / "out"
    run(*arguments, f"--out={out}", "--slice=0/1")
    damaged, truncated = sorted(out.glob("partial/*.tokens"))[:2]
    data = bytearray(damaged.read_bytes())
    data[10] ^= 1
    damaged.write_bytes(data)
    truncated.write_bytes(truncated.read_bytes()[:-2])
    run(*arguments, f"--out={out}")
    assert content(out) == content(tmp_path / "unbroken")
    # A source that changed between two runs: its piece is not used.
    run(*arguments, f"--out={tmp_path / 'late'}", "--slice=0/1")
    path = tmp_path / "in" / "part2.jsonl.gz"
    stamp = path.stat()
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b"alpha", b"gamma"), mtime=0))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    run(*arguments, f"--out={tmp_path / 'late'}")
    run(*arguments, f"--out={tmp_path / 'fresh'}")
    assert content(tmp_path / "late") == content(tmp_path / "fresh") != content(out)


def test_slices_then_a_merge(tmp_path, base, capsys):
    arguments, _ = base
    run(*arguments, f"--out={tmp_path / 'unbroken'}")
    out = tmp_path / "out"
    for index in range(3):
        run(*arguments, f"--out={out}", f"--slice={index}/3")
    made = {path.name: path.stat().st_mtime_ns for path in out.glob("partial/*.json")}
    assert len(made) == 4 and not (out / "manifest.json").exists()
    run(*arguments, f"--out={out}")
    assert content(out) == content(tmp_path / "unbroken")
    run(*arguments, f"--out={out}", "--slice=3/3", code=2)


def test_train_and_use_a_bpe(tmp_path, base):
    arguments, texts = base
    arguments[3] = "--tokenizer=bpe:300"
    run(*arguments, f"--out={tmp_path / 'a'}", "--shuffle_buffer=0")
    run(*arguments, f"--out={tmp_path / 'b'}", "--shuffle_buffer=0", "--workers=1")
    assert content(tmp_path / "a") == content(tmp_path / "b")
    made = record(tmp_path / "a")
    assert made["tokenizer"]["name"] == "bpe:300" and made["tokenizer"]["vocab_size"] <= 300
    engine = library.Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))
    ids = stream(tmp_path / "a")
    read = [engine.decode(list(document)) for document in documents_of(ids, 0)]
    assert read and set(read) <= set(texts)
    # Validation documents had no say in the vocabulary: the same without them.
    held_out = {engine.decode(list(document)) for document in documents_of(stream(tmp_path / "a", "validation"), 0)}
    assert held_out
    write_jsonl(tmp_path / "without" / "a.jsonl", [t for t in texts if t not in held_out])
    arguments[2] = tmp_path / "without"
    run(*arguments, f"--out={tmp_path / 'c'}", "--shuffle_buffer=0")
    assert content(tmp_path / "c")["tokenizer.json"] == content(tmp_path / "a")["tokenizer.json"]


def test_uint32_when_the_vocabulary_needs_it(tmp_path):
    vocabulary = {"</s>": 0, "?": 1} | {f"w{i}": i for i in range(2, 70_000)}
    library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="?")).save(str(tmp_path / "big.json"))
    write_jsonl(tmp_path / "a.jsonl", ["w69999", "w65536", "w7"])
    run("--source=jsonl", "--input", tmp_path / "a.jsonl", f"--tokenizer={tmp_path / 'big.json'}", "--shuffle_buffer=0",
        "--validation_fraction=0", f"--out={tmp_path / 'out'}")  # fmt: skip
    assert record(tmp_path / "out")["dtype"] == "<u4"
    assert np.fromfile(tmp_path / "out" / "train-00000.bin", "<u4").tolist() == [69_999, 0, 65_536, 0, 7, 0]


def test_ids_outside_the_vocabulary_are_refused(tmp_path, base, monkeypatch, capsys):
    arguments, _ = base
    load = pieces.tokenizers.load

    def too_small(*args, **kwargs):
        return dataclasses.replace(load(*args, **kwargs), vocab_size=9)

    monkeypatch.setattr(pieces.tokenizers, "load", too_small)
    run(*arguments, f"--out={tmp_path / 'out'}", code=3)
    assert "part0.jsonl.gz: the tokenizer gave id 11, outside its vocabulary of 9" in capsys.readouterr().err


BAD = {
    "cut.jsonl.gz": (gzip.compress(b'{"text": "alpha"}\n' * 50)[:40], "cut.jsonl.gz: truncated"),
    "json.jsonl": (b'{"text": "alpha"}\n{"text": \n', "json.jsonl:2: invalid JSON"),
    "null.jsonl": (b'{"text": null}\n{"text": "beta"}\n', "null.jsonl:1: field 'text' is null"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n{"text": "beta"}\n', "surrogate.jsonl:1: lone surrogate"),
    "empty.jsonl": (b"", "empty.jsonl: empty file"),
    "blank.jsonl": (b"\n\n", "blank.jsonl: no document in it"),
}


@pytest.mark.parametrize(("name", "workers"), [*((name, 1) for name in BAD), ("cut.jsonl.gz", 2)])
def test_bad_input_is_one_line_and_leaves_nothing_finished(tmp_path, base, capfd, name, workers):
    arguments, _ = base
    data, message = BAD[name]
    (tmp_path / "in" / name).write_bytes(data)
    run(*arguments, f"--out={tmp_path / 'out'}", f"--workers={workers}", code=3)
    errors = [line for line in capfd.readouterr().err.split("\n") if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0] and "--skip_bad" in errors[0]
    assert not (tmp_path / "out" / "manifest.json").exists()
    (tmp_path / "in" / name).unlink()  # repaired: the same command goes on
    run(*arguments, f"--out={tmp_path / 'out'}")
    run(*arguments, f"--out={tmp_path / 'clean'}")
    assert content(tmp_path / "out") == content(tmp_path / "clean")


@pytest.mark.parametrize("spelling", ["--skip_bad", "--skip-bad"])
def test_skipping_counts_and_lists(tmp_path, base, spelling):
    arguments, texts = base
    for name, (data, _) in BAD.items():
        (tmp_path / "in" / name).write_bytes(data)
    run(*arguments, f"--out={tmp_path / 'out'}", spelling)
    listed = (tmp_path / "out" / "skipped.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
    assert len(listed) == len(BAD)
    assert all(any(line.startswith(message) for line in listed) for _, message in BAD.values())
    assert sum(source["skipped"] for source in record(tmp_path / "out")["sources"]) == len(BAD)
    kept = {document for split in ("train", "validation") for document in documents_of(stream(tmp_path / "out", split))}
    assert {tuple(ids_of(t)) for t in texts} <= kept and (2,) in kept


def test_cut_between_members_is_found_by_the_promised_hash(tmp_path, base, capsys):
    arguments, _ = base
    path = tmp_path / "in" / "part3.jsonl.gz"
    whole = path.read_bytes() + gzip.compress(b'{"text": "alpha"}\n')
    (tmp_path / "in" / "SHA256SUMS").write_text(f"{hashlib.sha256(whole).hexdigest()}  part3.jsonl.gz\n", "utf-8")
    run(*arguments, f"--out={tmp_path / 'out'}", code=3)
    assert "part3.jsonl.gz: sha256" in capsys.readouterr().err
    path.write_bytes(whole)
    run(*arguments, f"--out={tmp_path / 'out'}")


def test_a_finished_cache_is_left_alone_or_refused(tmp_path, base, words, capsys):
    arguments, _ = base
    out = tmp_path / "out"
    run(*arguments, f"--out={out}", "--tokens=3000")
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.iterdir()}
    run(*arguments, f"--out={out}", "--tokens=3000")
    run(*arguments, f"--out={out}", "--tokens=2000", "--workers=1")  # a smaller budget reads a prefix
    assert "nothing to do" in capsys.readouterr().err
    for changed in ("--tokens=3001", "--seed=43", "--shuffle_buffer=7", "--bos", "--dedupe=off", "--skip_bad"):
        run(*arguments, f"--out={out}", *(() if "tokens" in changed else ("--tokens=3000",)), changed, code=2)
    assert "skip_bad: False -> True" in capsys.readouterr().err
    data = (tmp_path / "in" / "part0.jsonl.gz").read_bytes()
    write_jsonl(tmp_path / "in" / "part0.jsonl.gz", ["alpha"], gzip.compress)
    run(*arguments, f"--out={out}", "--tokens=3000", code=3)
    assert "made from part0.jsonl.gz of sha256" in capsys.readouterr().err
    (tmp_path / "in" / "part0.jsonl.gz").write_bytes(data)
    kept = (out / "manifest.json").read_bytes(), (out / "manifest.json").stat().st_mtime_ns
    for key, code in (("request", 2), ("unigram_nats", 0), ("sources", 3)):  # as another program might write them
        (out / "manifest.json").write_text(json.dumps(json.loads(kept[0]) | {key: [{}]}))
        run(*arguments, f"--out={out}", "--tokens=3000", code=code)
    (out / "manifest.json").write_bytes(kept[0])
    os.utime(out / "manifest.json", ns=(kept[1], kept[1]))
    assert {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.iterdir()} == before
    (tmp_path / "in").rename(tmp_path / "gone")
    run(*arguments, f"--out={out}", "--tokens=3000")
    assert "sources not compared" in capsys.readouterr().err


def test_foreign_and_locked_folders(tmp_path, base, capsys):
    arguments, _ = base
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine", encoding="utf-8")
    run(*arguments, f"--out={out}", code=4)
    assert "thesis.tex" in capsys.readouterr().err and list(out.iterdir()) == [out / "thesis.tex"]
    (out / "thesis.tex").unlink()
    with open(out / folder.LOCK, "w", encoding="utf-8") as file:
        file.write("somehost pid 123")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        run(*arguments, f"--out={out}", code=4)
        assert "somehost pid 123" in capsys.readouterr().err
        run(*arguments, f"--out={out}", "--slice=0/2", code=4)
    run(*arguments, f"--out={out}")
    assert not list(out.glob("*.lock"))


def test_free_disk_is_checked_first(tmp_path, base, monkeypatch, capsys):
    arguments, _ = base
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: usage)
    run(*arguments, f"--out={tmp_path / 'out'}", code=3)
    assert "GB are free" in capsys.readouterr().err and not list((tmp_path / "out").glob("partial/*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source=jsonl"], "--source=jsonl needs --input"),
        (["--source=mini", "--input", "x"], "--input is not for --source=mini"),
        (["--source=jsonl", "--input", "x", "--tokens=0"], "--tokens=0 is not from 1"),
        (["--source=jsonl", "--input", "x", "--tokens=5", "--config=c.py"], "both size the cache"),
        (["--source=jsonl", "--input", "x", "--validation_fraction=nan"], "--validation_fraction=nan is not from 0.0"),
        (["--source=jsonl", "--input", "x", "--slice=2/2"], "expected I/N"),
        (["--source=jsonl", "--input", "x", "--tokenizer=bpe:12"], "V must be an integer from 257"),
        (["--source=jsonl", "--input", "x", "--wrong=1"], "unrecognized arguments: --wrong=1"),
        (["--source=mini", "--mini_clients=pip,cargo"], "'cargo' is none of pip, npm, apt"),
        (["--source=c4", "--input", "x", "--validation_input", "y"], "--validation_input is not for --source=c4"),
        (["--source=other"], "invalid choice: 'other'"),
    ],
)  # fmt: skip
def test_bad_arguments(tmp_path, capsys, arguments, message):
    run(*arguments, f"--out={tmp_path / 'out'}", code=2)
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_txt_end_to_end(tmp_path, words):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "book.txt").write_bytes(b"alpha beta\n\ngamma\n")
    arguments = ["--source=jsonl", "--input", tmp_path / "in", f"--tokenizer={words}", "--validation_fraction=0",
                 "--shuffle_buffer=0"]  # fmt: skip
    run(*arguments, f"--out={tmp_path / 'file'}")
    assert stream(tmp_path / "file").tolist() == [1, 2, 3, END]
    run(*arguments, f"--out={tmp_path / 'paragraphs'}", "--txt_documents=paragraph")
    assert stream(tmp_path / "paragraphs").tolist() == [1, 2, END, 3, END]


def test_one_huge_word_and_many_empty_documents_stay_bounded(tmp_path):
    """A line of 20 MB without a space, and 200,000 empty documents, under a real tokenizer."""
    write_jsonl(tmp_path / "in" / "a.jsonl", ["ab" * 10_000_000, "fine words here"])
    (tmp_path / "in" / "b.jsonl").write_bytes(b'{"text": ""}\n' * 200_000)
    script = (
        "import re, sys; from data_pipeline import prepare; code = prepare.main(sys.argv[1:]);"
        # Not ru_maxrss, which a process inherits from the one that started it.
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]); sys.exit(code)"
    )
    command = [sys.executable, "-c", script, "--source=jsonl", "--input", str(tmp_path / "in"), "--tokenizer=bpe:300",
               "--skip_bad", f"--out={tmp_path / 'out'}", "--workers=1"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=120)
    assert int(done.stdout) < 1_000_000  # KiB
    assert [source["empty"] for source in record(tmp_path / "out")["sources"]] == [0, 200_000]
    assert "more than --max_document_bytes" in (tmp_path / "out" / "skipped.txt").read_text(encoding="utf-8")


def test_progress_lines(monkeypatch, capsys):
    items = [
        sources.Item("jsonl", "/x", "x", "by_hash", 2_000_000),
        sources.Item("jsonl", "/y", "y", "by_hash", 2_000_000),
    ]
    shown = progress.Progress(items, None)
    shown.tick(1_000_000, 250_000)
    assert shown.line(10.0) == "tokenised 1.0 of 4.0 MB, 0.25 M tokens, 0.03 M tokens/s, 0:30 left"
    limited = progress.Progress(items, 500_000)
    limited.tick(1_000_000, 250_000)
    assert "of 2.1 MB" in limited.line(10.0) and limited.line(10.0).endswith("0:11 left")
    shown.end()
    assert capsys.readouterr().err.endswith("left\n")


def test_document_rules_are_part_of_a_piece_key(tmp_path, words):
    item = sources.Item("jsonl", "/x", "x", "by_hash", 1)
    work = pieces.Work(str(tmp_path), str(words), "0" * 64, "", 0, None, 12, streams.Rules(), False)
    others = [
        dataclasses.replace(work, tokenizer_sha256="1" * 64),
        dataclasses.replace(work, bos_id=3),
        dataclasses.replace(work, skip_bad=True),
        dataclasses.replace(work, rules=streams.Rules("body")),
        dataclasses.replace(work, rules=streams.Rules(txt_documents="line")),
    ]
    keys = {work.key(item), work.key(dataclasses.replace(item, path="/y"))} | {other.key(item) for other in others}
    assert len(keys) == 2 + len(others)
