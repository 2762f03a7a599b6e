"""Sources: what is listed in which order, and every kind of damaged input named by file and line or byte."""

import gzip
import hashlib
import json
import sys
import tracemalloc
import types
import zlib
from pathlib import Path

import numpy as np
import pytest
import zstandard

from data_pipeline import sources, streams
from llama_jax.errors import ConfigError, DataError

TEXTS = ["Hello there.", "Zwei Wörter\u2028und noch eins\u0085.", "naïve café 😀", "tab\tand NUL \x00 inside"]


def json_lines(texts, **extra):
    return "".join(json.dumps({"text": text, **extra}, ensure_ascii=False) + "\n" for text in texts).encode("utf-8")


def read(path: Path, **rules):
    """(texts, problems) of one file."""
    item = sources.list_jsonl([str(path)]).items[0]
    found = list(streams.documents(item, streams.Rules(**rules), lambda chunk: None))
    return [x for x in found if isinstance(x, str)], [x for x in found if isinstance(x, streams.Problem)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_lines_plain_and_compressed(tmp_path, name, suffix):
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    path = tmp_path / (name + suffix)
    path.write_bytes(pack(json_lines(TEXTS, url="x", timestamp="t")))
    assert read(path) == (TEXTS, [])


def test_bom_crlf_blank_lines_and_escapes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n  \n{"text": "\\u00e9\\ud83d\\ude00"}')
    assert read(path) == (["one", "é😀"], [])


def test_several_gzip_members_and_zstd_frames(tmp_path):
    halves = json_lines(TEXTS[:2]), json_lines(TEXTS[2:])
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, halves)))
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, halves)))
    assert read(tmp_path / "a.jsonl.gz") == read(tmp_path / "b.jsonl.zst") == (TEXTS, [])


def test_large_members_come_out_whole(tmp_path):
    # Far beyond the read and output sizes, and so compressible that output comes in many pieces from one input.
    texts = ["ab" * 400_000, "c" * 3_000_000, "end"]
    for name, pack in (("a.jsonl.gz", gzip.compress), ("b.jsonl.zst", zstandard.ZstdCompressor().compress)):
        (tmp_path / name).write_bytes(pack(json_lines(texts)))
        assert read(tmp_path / name) == (texts, []), name


@pytest.mark.parametrize(
    ("mode", "documents"),
    [
        ("file", ["first line\nsecond é\u2028line\n\n\nlast"]),
        ("paragraph", ["first line\nsecond é\u2028line", "last"]),
        ("line", ["first line", "second é\u2028line", "", "", "last"]),
    ],
)
def test_txt_documents(tmp_path, mode, documents):
    (tmp_path / "a.txt").write_bytes("first line\r\nsecond é\u2028line\n\n\nlast\n".encode())
    assert read(tmp_path / "a.txt", txt_documents=mode) == (documents, [])


def test_txt_limits_and_encoding(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"12345\n1234")  # ten bytes as one document
    assert read(path, max_document_bytes=10) == (["12345\n1234"], [])
    texts, problems = read(path, max_document_bytes=9)
    assert not texts and [p.place for p in problems] == ["a.txt:1"] and "paragraph" in problems[0].reason
    path.write_bytes(b"good\n\nbad \xff\nalso\n\nfine\n")
    texts, problems = read(path, txt_documents="paragraph")
    assert texts == ["good", "fine"] and [(p.place, p.reason) for p in problems] == [
        ("a.txt:3", "not UTF-8 at byte 4 of the line")
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "invalid JSON (Expecting ',' delimiter at column"),
        (b'{"url": "a"}', "no field 'text' (fields: url"),
        (b'{"text": null}', "field 'text' is null, not a string"),
        (b'{"text": 7}', "field 'text' is a number, not a string"),
        (b'{"text": ["a"]}', "field 'text' is an array, not a string"),
        (b'["a"]', "expected a JSON object on each line, found an array"),
        (b'{"text": "x\\ud800y"}', "lone surrogate \\ud800 at character 1"),
        (b'{"text": "\xff"}', "not UTF-8 at byte 10 of the line"),
        (b'{"text": "' + b"z" * 101 + b'"}', "document of 101 bytes, more than --max_document_bytes=100"),
        (b'{"text": "' + b"z" * 5000 + b'"}', "line longer than 800 bytes"),
        (b"[" * 100_000, "line longer"),
        (b'{"text": "a", "n": ' + b"1" * 700 + b"}", None),
    ],
)
def test_bad_line_is_named_and_the_rest_still_read(tmp_path, line, reason):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json_lines(["before"]) + line + b"\n" + json_lines(["after"]))
    texts, problems = read(path, max_document_bytes=100)
    if reason is None:
        assert texts == ["before", "a", "after"] and not problems
        return
    assert texts == ["before", "after"]
    assert [problem.place for problem in problems] == ["bad.jsonl:2"] and not problems[0].fatal
    assert problems[0].reason.startswith(reason)


def test_deep_nesting_is_no_crash(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": ' + b"[" * 200_000 + b"\n" + json_lines(["after"]))
    texts, problems = read(tmp_path / "a.jsonl")
    assert texts == ["after"] and "nested too deeply" in problems[0].reason


WHOLE = gzip.compress(json_lines([f"document {i} " + str(i) * 50 for i in range(2000)]), mtime=0)
TWO = gzip.compress(json_lines(["one"]), mtime=0)


def flipped(data, index):
    return data[:index] + bytes([data[index] ^ 0xFF]) + data[index + 1 :]


@pytest.mark.parametrize(
    ("data", "texts", "reason"),
    [
        (b"", 0, "empty file (0 bytes)"),
        (WHOLE[: len(WHOLE) // 2], None, f"truncated: the file ends at byte {len(WHOLE) // 2} inside gzip member 1"),
        (WHOLE[:-3], 2000, f"truncated: the file ends at byte {len(WHOLE) - 3} inside gzip member 1"),
        (WHOLE[:5], 0, "truncated: the file ends at byte 5 inside gzip member 1"),
        (TWO + WHOLE[:1], 1, f"truncated: the file ends at byte {len(TWO) + 1} inside gzip member 2"),
        (TWO + b"junk", 1, f"byte {len(TWO)}: 4 or more bytes of junk after gzip member 1"),
        (TWO + b"\0" * 512, 1, f"byte {len(TWO)}: 512 or more bytes of junk after gzip member 1"),
        (flipped(WHOLE, len(WHOLE) - 6), 2000, "byte 0: corrupt gzip data in member 1 of byte 0 (incorrect data c"),
        (flipped(TWO, len(TWO) - 2), 1, "byte 0: corrupt gzip data in member 1 of byte 0 (incorrect length check)"),
        (json_lines(["plain"]), 0, "byte 0: not a gzip file"),
    ],
)  # fmt: skip
def test_damaged_gzip(tmp_path, data, texts, reason):
    (tmp_path / "x.json.gz").write_bytes(data)
    found, problems = read(tmp_path / "x.json.gz")
    assert [problem.place for problem in problems] == ["x.json.gz"] and problems[0].fatal
    assert problems[0].reason.startswith(reason)
    if texts is None:  # what came before the cut, and no half of a line
        assert 0 < len(found) < 2000 and found == [f"document {i} " + str(i) * 50 for i in range(len(found))]
    else:
        # The decoder tells of a bad checksum with the output before it; nothing wrong may be delivered as good.
        assert len(found) <= texts


def test_damaged_zstd_and_plain(tmp_path):
    data = zstandard.ZstdCompressor(write_checksum=True).compress(json_lines(["one", "two"]))
    for name, content, reason in (
        ("cut.jsonl.zst", data[:-5], "truncated: the file ends at byte"),
        ("junk.jsonl.zst", data + b"junk", f"byte {len(data)}: 4 or more bytes of junk after zstd frame 1"),
        ("flip.jsonl.zst", flipped(data, len(data) - 1), "byte 0: corrupt zstd data"),
        ("not.jsonl.zst", b"{}", "byte 0: not a zstd file"),
        ("empty.jsonl", b"", "empty file (0 bytes)"),
    ):
        (tmp_path / name).write_bytes(content)
        _, problems = read(tmp_path / name)
        assert problems and problems[-1].fatal and problems[-1].reason.startswith(reason), name


def test_decompression_bomb_stays_small(tmp_path):
    compressor = zlib.compressobj(9, wbits=31)
    with open(tmp_path / "bomb.jsonl.gz", "wb") as file:
        for _ in range(200):
            file.write(compressor.compress(b"0" * (1 << 20)))
        file.write(compressor.flush())
    tracemalloc.start()
    try:
        texts, problems = read(tmp_path / "bomb.jsonl.gz")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not texts and "line longer than" in problems[0].reason
    assert peak < 80e6  # the bomb is 200 MiB, the longest line allowed 32 MiB


def test_observe_sees_the_stored_bytes(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(WHOLE)
    seen = []
    list(streams.documents(sources.list_jsonl([str(path)]).items[0], streams.Rules(), seen.append))
    assert b"".join(seen) == WHOLE


def test_folders_globs_order_and_hidden_files(tmp_path):
    for name in ("b.jsonl", "a.txt", "sub/c.json.gz", ".hidden.jsonl", "._a.txt", ".d/e.jsonl", "readme.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    names = [item.name for item in sources.list_jsonl([str(tmp_path)]).items]
    assert names == ["a.txt", "b.jsonl", "sub/c.json.gz"]
    globbed = sources.list_jsonl([str(tmp_path / "*.jsonl"), str(tmp_path / "a.txt")]).items
    assert [(item.name, item.kind) for item in globbed] == [("b.jsonl", "jsonl"), ("a.txt", "txt")]
    twice = sources.list_jsonl([str(tmp_path / "b.jsonl"), str(tmp_path)]).items
    assert [item.name for item in twice] == ["b.jsonl", "a.txt", "sub/c.json.gz"]
    with pytest.raises(ConfigError, match="no such file or folder"):
        sources.list_jsonl([str(tmp_path / "nothing*")])
    with pytest.raises(ConfigError, match=r"readme\.md"):
        sources.list_jsonl([str(tmp_path / "readme.md")])


def test_validation_files_come_first_and_are_no_training_files(tmp_path):
    for name in ("a.jsonl", "v.jsonl"):
        (tmp_path / name).write_bytes(b"x")
    items = sources.list_jsonl([str(tmp_path)], [str(tmp_path / "v.jsonl")]).items
    assert [(item.name, item.split) for item in items] == [("v.jsonl", "validation"), ("a.jsonl", "train")]
    assert {item.split for item in sources.list_jsonl([str(tmp_path)]).items} == {"by_hash"}


def c4(folder, split, number, of):
    folder.mkdir(exist_ok=True)
    (folder / f"c4-{split}.{number:05d}-of-{of:05d}.json.gz").write_bytes(b"x")


def test_c4_listing(tmp_path):
    for number in (1, 0, 2):
        c4(tmp_path / "en", "train", number, 1024)
    (tmp_path / "en" / "._c4-train.00000-of-01024.json.gz").write_bytes(b"x")
    (tmp_path / "en" / "c4-train.00003-of-01024.json.gz.part").write_bytes(b"x")
    listing = sources.list_c4([str(tmp_path)])
    assert [item.name[:14] for item in listing.items] == ["c4-train.00000", "c4-train.00001", "c4-train.00002"]
    assert {item.split for item in listing.items} == {"by_hash"} and "by hash" in listing.notes[0]
    for number in range(8):
        c4(tmp_path / "en", "validation", number, 8)
        listing = sources.list_c4([str(tmp_path)])
        assert [item.split for item in listing.items] == ["validation"] * (number + 1) + ["train"] * 3
        assert bool(listing.notes) == (number < 7)
    assert sources.list_c4([str(tmp_path / "en" / "c4-*.json.gz")]).items == listing.items
    c4(tmp_path / "en", "train", 4, 1024)
    with pytest.raises(DataError, match=r"c4-train\.00003-of-01024\.json\.gz is missing although"):
        sources.list_c4([str(tmp_path)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="--download"):
        sources.list_c4([str(tmp_path / "empty")])


def test_expected_hashes_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"x")
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  other\n{'a' * 64} *a.jsonl\n", encoding="utf-8")
    assert sources.list_jsonl([str(tmp_path / "a.jsonl")]).items[0].sha256 == "a" * 64
    (tmp_path / "SHA256SUMS").write_text("nonsense\n", encoding="utf-8")
    with pytest.raises(DataError, match="SHA256SUMS:1"):
        sources.list_jsonl([str(tmp_path / "a.jsonl")])


def test_download_fetches_pinned_files_and_notes_their_hashes(tmp_path, monkeypatch):
    fetched = []
    hub = types.ModuleType("huggingface_hub")
    content = gzip.compress(json_lines(["x"]))

    def hf_hub_download(repository, name, *, repo_type, revision, local_dir):
        fetched.append((repository, name, repo_type, revision))
        (Path(local_dir) / name).parent.mkdir(parents=True, exist_ok=True)
        (Path(local_dir) / name).write_bytes(content)

    hub.hf_hub_download = hf_hub_download
    hub.hf_hub_url = lambda repository, name, **kwargs: name
    hub.get_hf_file_metadata = lambda url: types.SimpleNamespace(etag=f'"{hashlib.sha256(content).hexdigest()}"')
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    sources.download_c4(tmp_path, 2, lambda line: None)
    assert {entry[0] for entry in fetched} == {"allenai/c4"} and {len(entry[3]) for entry in fetched} == {40}
    items = sources.list_c4([str(tmp_path)]).items
    assert [item.split for item in items] == ["validation"] * 8 + ["train"] * 2
    assert {item.sha256 for item in items} == {hashlib.sha256(content).hexdigest()}
    assert {item.revision for item in items} == {sources.C4_REVISION}

    def offline(*args, **kwargs):
        raise OSError("no route to host")

    hub.hf_hub_download = offline
    with pytest.raises(DataError, match=r"c4-validation\.00000-of-00008\.json\.gz: can't be fetched .*no route"):
        sources.download_c4(tmp_path, 2, lambda line: None)


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
    """A small prepared TFDS data set in array_record format, written without TensorFlow."""
    import tensorflow_datasets as tfds

    class TinyText(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.2.0")

        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "n": tfds.features.Scalar(np.int64)})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, manager):
            return {"train": self._generate_examples(25, "train"), "validation": self._generate_examples(5, "held out")}

        def _generate_examples(self, count, word):
            for i in range(count):
                yield i, {"text": f"{word} document é {i}", "n": i}

    folder = tmp_path_factory.mktemp("tfds")
    builder = TinyText(data_dir=str(folder), file_format="array_record")
    builder.download_and_prepare()
    return folder


def test_tfds(tfds_folder, monkeypatch):
    monkeypatch.setattr(sources, "_TFDS_RECORDS", 10)
    listing = sources.list_tfds([str(tfds_folder)])
    shape = [(item.split, item.start, item.stop) for item in listing.items]
    assert shape == [("validation", 0, 5), ("train", 0, 10), ("train", 10, 20), ("train", 20, 25)]
    assert listing.items[1].name.endswith("tiny_text/1.2.0/train") and listing.items[1].revision == "1.2.0"
    texts = [t for item in listing.items for t in streams.documents(item, streams.Rules(), lambda chunk: None)]
    assert sorted(texts[:5]) == sorted(f"held out document é {i}" for i in range(5))
    assert sorted(texts[5:]) == sorted(f"train document é {i}" for i in range(25))
    assert "tensorflow" not in sys.modules


def test_tfds_problems(tfds_folder, tmp_path):
    item = sources.list_tfds([str(tfds_folder)]).items[0]
    problems = list(streams.documents(item, streams.Rules(text_field="n"), lambda chunk: None))
    assert len(problems) == 5 and all("record" in p.place and "not text" in p.reason for p in problems)
    problems = list(streams.documents(item, streams.Rules(text_field="body"), lambda chunk: None))
    assert "no field 'body'" in problems[0].reason
    with pytest.raises(ConfigError, match=r"no dataset_info\.json"):
        sources.list_tfds([str(tmp_path)])
    with pytest.raises(ConfigError, match="no split 'test'"):
        sources.list_tfds([str(tfds_folder)], "test")
    assert "by hash" in sources.list_tfds([str(tfds_folder)], "train", "none").notes[0]


def test_tfds_through_the_command(tfds_folder, tmp_path, monkeypatch):
    import tokenizers as library

    from data_pipeline import prepare
    from llama_jax import shards

    texts = [f"train document é {i}" for i in range(25)]
    vocabulary = {"?": 0} | {word: i + 1 for i, word in enumerate(sorted({w for t in texts for w in t.split()}))}
    engine = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="?"))
    engine.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    engine.add_special_tokens(["</s>"])
    engine.save(str(tmp_path / "t.json"))
    monkeypatch.setattr(sources, "_TFDS_RECORDS", 10)
    arguments = ["--source=tfds", f"--input={tfds_folder}", f"--tokenizer={tmp_path / 't.json'}", "--workers=1",
                 "--shuffle_buffer=0", f"--out={tmp_path / 'out'}"]  # fmt: skip
    assert prepare.main(arguments) == 0
    manifest = shards.read_manifest(tmp_path / "out")
    ids = shards.read_tokens(manifest, "train", 0, 25 * 5).reshape(25, 5)
    assert sorted(engine.decode(row.tolist()) for row in ids) == sorted(texts)
    assert manifest.splits["validation"].documents == 5
    assert [(s["name"].split("/")[-1], s["documents"]) for s in manifest.sources] == [("validation", 5), ("train", 25)]
    assert prepare.main(arguments) == 0  # finished: compared with the data set's description, left alone
