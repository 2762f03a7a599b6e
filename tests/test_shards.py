"""The token cache: bytes on disk against numpy and hashlib, and refusal of everything damaged or hostile."""

import copy
import errno
import hashlib
import json
import os

import numpy as np
import pytest
from token_cache import flip, manifest_content, write_cache

from llama_jax import shards
from llama_jax.errors import DataError

SHARD = 32
STREAM = np.random.default_rng(1).integers(0, 500, 3 * SHARD + 13)
VALIDATION = np.random.default_rng(2).integers(0, 500, 40)


@pytest.fixture
def cache(tmp_path):
    return write_cache(tmp_path / "cache", STREAM, VALIDATION, SHARD, 500)


def one_line(error, *parts):
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert str(part) in text
    return True


@pytest.mark.parametrize("pieces", [1, 2, 7, 109])
def test_writer_makes_the_bytes_of_the_stream(tmp_path, pieces):
    writer = shards.ShardWriter(tmp_path, "train", "<u2", SHARD)
    for piece in np.array_split(STREAM, pieces):
        writer.append(piece)
    written = writer.finish()
    expected = [STREAM[i : i + SHARD].astype("<u2").tobytes() for i in range(0, len(STREAM), SHARD)]
    assert [shard.file for shard in written] == [f"train-{i:05d}.bin" for i in range(4)]
    assert [(tmp_path / shard.file).read_bytes() for shard in written] == expected
    assert [shard.sha256 for shard in written] == [hashlib.sha256(raw).hexdigest() for raw in expected]
    assert [shard.tokens for shard in written] == [32, 32, 32, 13]
    assert sorted(path.name for path in tmp_path.iterdir()) == [shard.file for shard in written]


def test_writer_takes_lists_empty_pieces_and_uint32(tmp_path):
    writer = shards.ShardWriter(tmp_path, "validation", "<u4", 3)
    writer.append([])
    writer.append([70_000, 4_294_967_295, 0, 5])
    first, second = writer.finish()
    assert (tmp_path / first.file).read_bytes() == bytes.fromhex("70110100 ffffffff 00000000")
    assert (tmp_path / second.file).read_bytes() == bytes.fromhex("05000000")


@pytest.mark.parametrize("exact", [True, False])
def test_a_shard_gets_its_name_only_when_complete(tmp_path, exact):
    writer = shards.ShardWriter(tmp_path, "train", "<u2", SHARD)
    writer.append(STREAM[: 2 * SHARD if exact else 2 * SHARD - 1])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == ({"train-00000.bin", "train-00001.bin"} if exact else {"train-00000.bin", "train-00001.bin.tmp"})
    assert len(writer.finish()) == 2


@pytest.mark.parametrize("ids", [[1, 65_536], [-1, 2], [1.0, 2.0], [[1, 2]], ["a"], [True]])
def test_writer_refuses_ids_that_do_not_fit(tmp_path, ids):
    writer = shards.ShardWriter(tmp_path, "train", "<u2", 4)
    writer.append([9])
    with pytest.raises(DataError) as error:
        writer.append(ids)
    assert one_line(error, tmp_path / "train-00000.bin")
    writer.append([8])
    (shard,) = writer.finish()
    assert (tmp_path / shard.file).read_bytes() == bytes([9, 0, 8, 0])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_leaves_no_shard_and_no_manifest(tmp_path, monkeypatch):
    (tmp_path / "train-00000.bin.tmp").symlink_to("/dev/full")
    writer = shards.ShardWriter(tmp_path, "train", "<u2", SHARD)
    with pytest.raises(DataError) as error:
        writer.append(STREAM)
    assert one_line(error, tmp_path / "train-00000.bin", "No space left")
    assert not (tmp_path / "train-00000.bin").exists()
    content = manifest_content(tmp_path / "cache", STREAM, VALIDATION, SHARD, 500)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError) as error:
        shards.write_manifest(tmp_path / "cache", content)
    assert one_line(error, "manifest.json", "No space left")
    assert not list((tmp_path / "cache").glob("manifest.json*"))


def test_manifest_round_trip(tmp_path):
    content = manifest_content(tmp_path, STREAM, VALIDATION, SHARD, 500)
    records = [shards.Shard(**record) for record in content["splits"]["train"]["shards"]]
    given = copy.deepcopy(content)
    given["splits"]["train"]["shards"] = records
    del given["format_version"], given["finished"]
    manifest = shards.write_manifest(tmp_path, given)
    assert json.loads((tmp_path / "manifest.json").read_text()) == content
    assert not (tmp_path / "manifest.json.tmp").exists()
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert manifest.sha256 == hashlib.sha256(canonical.encode()).hexdigest()
    assert shards.read_manifest(tmp_path) == manifest
    assert manifest.splits["train"] == shards.Split(109, 3, 436, tuple(records))
    assert (manifest.dtype, manifest.shard_tokens, manifest.seed, manifest.vocab_size) == ("<u2", 32, 7, 500)
    assert manifest.sources == tuple(content["sources"])


def test_manifest_hash_is_of_the_content(cache):
    before = shards.read_manifest(cache).sha256
    content = json.loads((cache / "manifest.json").read_text())
    (cache / "manifest.json").write_text(json.dumps(dict(reversed(content.items())), indent=3))
    os.utime(cache / "train-00000.bin", (1, 1))
    assert shards.read_manifest(cache).sha256 == before
    content["seed"] += 1
    (cache / "manifest.json").write_text(json.dumps(content))
    assert shards.read_manifest(cache).sha256 != before


def at(*path, value):
    """A change of the manifest: sets (or, with value DROP, removes) what lies at a path."""

    def change(content):
        holder = content
        for key in path[:-1]:
            holder = holder[key]
        if value is DROP:
            del holder[path[-1]]
        else:
            holder[path[-1]] = value

    return change


DROP = object()
TRAIN = ("splits", "train", "shards")
BAD_MANIFESTS = {
    "not finished": at("finished", value=False),
    "finished is 1": at("finished", value=1),
    "no finished": at("finished", value=DROP),
    "future version": at("format_version", value=2),
    "version true": at("format_version", value=True),
    "version text": at("format_version", value="1"),
    "dtype for other vocabulary": at("tokenizer", "vocab_size", value=65_537),
    "dtype wider than needed": at("dtype", value="<u4"),
    "big-endian": at("dtype", value=">u2"),
    "object dtype": at("dtype", value="O"),
    "dtype list": at("dtype", value=["<u2"]),
    "vocabulary 0": at("tokenizer", "vocab_size", value=0),
    "vocabulary text": at("tokenizer", "vocab_size", value="500"),
    "vocabulary huge": at("tokenizer", "vocab_size", value=10**30),
    "eos outside": at("tokenizer", "eos_id", value=500),
    "bos outside": at("tokenizer", "bos_id", value=-1),
    "tokenizer missing": at("tokenizer", value=DROP),
    "tokenizer list": at("tokenizer", value=[]),
    "tokenizer name": at("tokenizer", "name", value=3),
    "tokenizer file above": at("tokenizer", "file", value="../tokenizer.json"),
    "tokenizer file absent": at("tokenizer", "file", value="other.json"),
    "shard_tokens 0": at("shard_tokens", value=0),
    "shard_tokens float": at("shard_tokens", value=32.0),
    "shard_tokens other": at("shard_tokens", value=64),
    "seed negative": at("seed", value=-1),
    "sources text": at("sources", value="c4"),
    "sources of texts": at("sources", value=["c4"]),
    "splits missing": at("splits", value=DROP),
    "no validation": at("splits", "validation", value=DROP),
    "shards not a list": at(*TRAIN, value={"0": {}}),
    "shard not an object": at(*TRAIN, 0, value="train-00000.bin"),
    "counts do not add up": at("splits", "train", "tokens", value=110),
    "negative documents": at("splits", "train", "documents", value=-1),
    "bytes missing": at("splits", "train", "utf8_bytes", value=DROP),
    "shard dropped": at(*TRAIN, 1, value=DROP),
    "last shard dropped": at(*TRAIN, 3, value=DROP),
    "short shard in the middle": at(*TRAIN, 1, "tokens", value=31),
    "tokens negative": at(*TRAIN, 3, "tokens", value=-13),
    "tokens true": at(*TRAIN, 3, "tokens", value=True),
    "tokens do not match the file": at(*TRAIN, 3, "tokens", value=14),
    "hash too short": at(*TRAIN, 0, "sha256", value="ab"),
    "hash upper case": at(*TRAIN, 0, "sha256", value="A" * 64),
    "hash missing": at(*TRAIN, 0, "sha256", value=DROP),
    "listed twice": at(*TRAIN, 1, "file", value="train-00000.bin"),
    "other split's file": at(*TRAIN, 0, "file", value="validation-00000.bin"),
    "missing file": at(*TRAIN, 0, "file", value="train-00009.bin"),
    "parent": at(*TRAIN, 0, "file", value="../cache/train-00000.bin"),
    "dots": at(*TRAIN, 0, "file", value=".."),
    "hidden": at(*TRAIN, 0, "file", value=".train-00000.bin"),
    "subdirectory": at(*TRAIN, 0, "file", value="./train-00000.bin"),
    "backslash": at(*TRAIN, 0, "file", value="..\\train-00000.bin"),
    "absolute": at(*TRAIN, 0, "file", value="/etc/hostname"),
    "newline": at(*TRAIN, 0, "file", value="train-00000.bin\n"),
    "NUL": at(*TRAIN, 0, "file", value="train\0.bin"),
    "long": at(*TRAIN, 0, "file", value="a" * 5000),
    "the manifest itself": at(*TRAIN, 0, "file", value="manifest.json"),
    "name is a number": at(*TRAIN, 0, "file", value=0),
}


@pytest.mark.parametrize("change", BAD_MANIFESTS.values(), ids=BAD_MANIFESTS.keys())
def test_bad_manifest_is_refused_on_reading_and_on_writing(cache, change):
    path = cache / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(DataError) as error:
        shards.read_manifest(cache)
    assert one_line(error, cache)
    assert len(str(error.value)) < 500 + len(str(cache))
    path.unlink()
    if content.get("finished") is not None:  # an absent one is filled in
        with pytest.raises(DataError):
            shards.write_manifest(cache, content)
        assert not path.exists()


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"seed": NaN', b"{}", b"1" * 5000],
    ids=lambda raw: repr(raw[:8]),
)
def test_manifest_that_is_no_json_object(cache, raw):
    (cache / "manifest.json").write_bytes(raw)
    with pytest.raises(DataError) as error:
        shards.read_manifest(cache)
    assert one_line(error, cache / "manifest.json")


def test_no_manifest_no_cache(tmp_path, cache):
    os.rename(cache / "manifest.json", cache / "manifest.json.tmp")
    for directory in (cache, tmp_path / "nowhere", cache / "train-00000.bin"):
        with pytest.raises(DataError) as error:
            shards.read_manifest(directory)
        assert one_line(error, directory / "manifest.json")


def test_size_and_kind_of_files(tmp_path, cache):
    shard = cache / "train-00001.bin"
    good = shard.read_bytes()
    for raw in (good[:-1], good[:-2], good + b"\0", b""):
        shard.write_bytes(raw)
        with pytest.raises(DataError) as error:
            shards.read_manifest(cache)
        assert one_line(error, shard, len(raw), 64)
    shard.unlink()
    with pytest.raises(DataError) as error:
        shards.read_manifest(cache)
    assert one_line(error, shard, "missing")
    shard.mkdir()
    with pytest.raises(DataError):
        shards.read_manifest(cache)
    shard.rmdir()
    (tmp_path / "outside.bin").write_bytes(good)
    shard.symlink_to(tmp_path / "outside.bin")
    with pytest.raises(DataError) as error:
        shards.read_manifest(cache)
    assert one_line(error, "leads out")
    shard.unlink()
    shard.write_bytes(good)
    (tmp_path / "link").symlink_to(cache)
    assert shards.read_manifest(tmp_path / "link").sha256 == shards.read_manifest(cache).sha256


def test_load_shard_and_its_lookahead(cache):
    manifest = shards.read_manifest(cache)
    for index, (start, stop) in enumerate([(0, 33), (32, 65), (64, 97), (96, 109)]):
        tokens = shards.load_shard(manifest, "train", index)
        assert tokens.dtype == np.uint16
        np.testing.assert_array_equal(tokens, STREAM[start:stop])
        np.testing.assert_array_equal(shards.load_shard(manifest, "train", index, False), STREAM[start : start + 32])


@pytest.mark.parametrize("offset", [0, 31, 63])
def test_flipped_bit_is_found(cache, offset):
    manifest = shards.read_manifest(cache)
    flip(cache / "train-00001.bin", offset)
    assert shards.read_manifest(cache) == manifest  # opening does not hash
    shards.load_shard(manifest, "train", 0)
    with pytest.raises(DataError) as error:
        shards.load_shard(manifest, "train", 1)
    new = hashlib.sha256((cache / "train-00001.bin").read_bytes()).hexdigest()
    assert one_line(error, cache / "train-00001.bin", manifest.splits["train"].shards[1].sha256, new)


def test_id_outside_the_vocabulary_is_found(tmp_path):
    stream = STREAM.copy()
    stream[40] = 500
    manifest = shards.read_manifest(write_cache(tmp_path, stream, VALIDATION, SHARD, 500))
    with pytest.raises(DataError) as error:
        shards.load_shard(manifest, "train", 1)
    assert one_line(error, "train-00001.bin", 500)
    with pytest.raises(DataError):
        shards.read_tokens(manifest, "train", 40, 1)
    shards.read_tokens(manifest, "train", 0, 40)
    assert dict(shards.verify(manifest))["train-00001.bin"] is not None


def test_shard_that_changed_after_opening(cache):
    manifest = shards.read_manifest(cache)
    shard = cache / "train-00001.bin"
    good = shard.read_bytes()
    shard.write_bytes(good + b"\0\0")
    with pytest.raises(DataError, match="66 bytes instead of 64"):
        shards.load_shard(manifest, "train", 1)
    shard.write_bytes(good[:40])
    for call in (
        lambda: shards.load_shard(manifest, "train", 1),
        lambda: shards.read_tokens(manifest, "train", 32, 32),
    ):
        with pytest.raises(DataError) as error:
            call()
        assert one_line(error, shard)
    shard.unlink()
    with pytest.raises(DataError) as error:
        shards.load_shard(manifest, "train", 1)
    assert one_line(error, shard)


def test_read_tokens_everywhere(cache):
    manifest = shards.read_manifest(cache)
    for start in range(110):
        for count in (0, 1, 31, 32, 33, 65, 109 - start):
            if start + count <= 109:
                np.testing.assert_array_equal(
                    shards.read_tokens(manifest, "train", start, count), STREAM[start : start + count]
                )
    for start, count in [(-1, 2), (0, 110), (109, 1), (5, -1)]:
        with pytest.raises(DataError):
            shards.read_tokens(manifest, "train", start, count)


def test_more_than_one_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_CHUNK_BYTES", 10)
    cache = write_cache(tmp_path, STREAM, VALIDATION, SHARD, 500)
    manifest = shards.read_manifest(cache)
    np.testing.assert_array_equal(shards.load_shard(manifest, "train", 3), STREAM[96:])
    assert all(problem is None for _, problem in shards.verify(manifest))


def test_verify_names_what_is_wrong(cache):
    manifest = shards.read_manifest(cache)
    files = [
        "tokenizer.json",
        *(f"train-{i:05d}.bin" for i in range(4)),
        "validation-00000.bin",
        "validation-00001.bin",
    ]
    assert list(shards.verify(manifest)) == [(file, None) for file in files]
    flip(cache / "tokenizer.json")
    flip(cache / "train-00002.bin")
    (cache / "validation-00000.bin").unlink()
    (cache / "train-00003.bin").write_bytes(b"")
    found = {file: problem for file, problem in shards.verify(manifest) if problem}
    assert sorted(found) == ["tokenizer.json", "train-00002.bin", "train-00003.bin", "validation-00000.bin"]
    assert all("\n" not in problem for problem in found.values())


def test_uint32_cache(tmp_path):
    stream = np.array([0, 70_000, 99_999, 3])
    manifest = shards.read_manifest(write_cache(tmp_path, stream, [1, 2], 4, 100_000, "<u4"))
    tokens = shards.load_shard(manifest, "train", 0)
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == stream.tolist()
