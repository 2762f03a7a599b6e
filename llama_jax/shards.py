"""The token cache: raw little-endian shards beside one manifest; write, read, verify. Needs numpy only.

A cache is a directory with `manifest.json`, `train-00000.bin`, ..., `validation-00000.bin`, ... and a tokenizer file.
Every shard of a split holds `shard_tokens` ids, the last one 1 to `shard_tokens`; ids are uint16, or uint32 when the
vocabulary is larger than 65,536. The manifest is written last, so a directory without one was never finished.
A manifest is input from somebody else: every field is checked before it is used, and no name may leave the directory.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llama_jax.errors import DataError
from llama_jax.files import canonical_json, publish, sha256_of_file, write_atomic

AnyPath = str | os.PathLike[str]

FORMAT_VERSION = 1
SHARD_TOKENS = 33_554_432
MANIFEST = "manifest.json"

_MANIFEST_BYTES = 64 << 20  # a manifest is some kB; anything larger is not one
_CHUNK_BYTES = 2 << 20  # read, hashed and range-checked while it is in the CPU's cache
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TOO_LARGE = 1 << 53
_WRITE = "it was not written: free space or fix permissions and repeat"
_RESTORE = "restore it or prepare the cache again"


@dataclasses.dataclass(frozen=True)
class Shard:
    file: str
    tokens: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Split:
    tokens: int
    documents: int
    utf8_bytes: int
    shards: tuple[Shard, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    directory: Path
    format_version: int
    dtype: str
    shard_tokens: int
    seed: int
    tokenizer: dict[str, Any]
    sources: tuple[dict[str, Any], ...]
    splits: dict[str, Split]
    sha256: str

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer["vocab_size"])


def dtype_for(vocab_size: int) -> str:
    """The numpy dtype string of a cache whose ids are 0 to vocab_size - 1: "<u2" up to 65,536 ids, else "<u4"."""
    return "<u2" if vocab_size <= 65_536 else "<u4"


def read_manifest(directory: AnyPath) -> Manifest:
    """Reads and checks the manifest of a cache, and the size of every file it names; hashes nothing.

    Raises DataError naming the file: missing, unfinished, unknown version, dtype that does not fit the vocabulary,
    names that are not plain names of files in this directory, sizes or counts that do not add up.
    """
    directory = Path(directory)
    path = directory / MANIFEST
    try:
        if path.stat().st_size > _MANIFEST_BYTES:
            raise DataError(f"{path}: larger than {_MANIFEST_BYTES} bytes, not a manifest; prepare the cache again")
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{path}: missing, so {directory} is no finished token cache; make it with python -m data_pipeline.prepare"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; check the path and its permissions") from None
    except (ValueError, RecursionError):
        raise DataError(f"{path}: not valid JSON, so damaged; prepare the cache again") from None
    return _parse(directory, content)


def write_manifest(directory: AnyPath, content: dict[str, Any]) -> Manifest:
    """Writes the manifest atomically (temporary file, fsync, rename): the very last step of a preparation.

    `content` is what manifest.json holds; `format_version` and `finished` are filled in, Shard objects may stand for
    their dicts. It is checked against the files first: a manifest that read_manifest refuses is never written.
    Raises DataError naming the file.
    """
    directory = Path(directory)
    path = directory / MANIFEST
    full = {"format_version": FORMAT_VERSION, "finished": True, **content}
    text = json.dumps(full, default=dataclasses.asdict, indent=1, allow_nan=False) + "\n"
    manifest = _parse(directory, json.loads(text))
    with _disk(path, _WRITE):
        write_atomic(path, text.encode())
    return manifest


class ShardWriter:
    """Writes the ids of one split as shards of `shard_tokens`; a shard gets its name when it is complete and on disk.

    Until then it is `<name>.tmp`, which a later writer simply overwrites. `shards` lists the shards finished so far.
    Raises DataError naming the file: ids outside the dtype, or the disk's own error.
    """

    def __init__(self, directory: AnyPath, split: str, dtype: str, shard_tokens: int = SHARD_TOKENS) -> None:
        self.shards: list[Shard] = []
        self._directory = Path(directory)
        self._split = split
        self._dtype = np.dtype(dtype)
        if self._dtype.str not in ("<u2", "<u4") or shard_tokens < 1:
            raise ValueError(f"shards hold at least one <u2 or <u4 id, not {shard_tokens} of {dtype}")
        self._shard_tokens = shard_tokens
        self._file: Any = None
        self._tokens = 0
        self._hash = hashlib.sha256()
        self._directory.mkdir(parents=True, exist_ok=True)

    def append(self, ids: npt.ArrayLike) -> None:
        """Appends ids (1-D integers) to the split's stream."""
        array = np.asarray(ids)
        if array.size == 0:
            return
        limit = int(np.iinfo(self._dtype).max)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(f"{self._path()}: ids must be a 1-D array of integers, not {array.dtype} {array.shape}")
        if int(array.min()) < 0 or int(array.max()) > limit:
            raise DataError(f"{self._path()}: ids {array.min()} to {array.max()} do not fit in 0 to {limit}")
        array = np.ascontiguousarray(array, self._dtype)
        while array.size:
            piece = array[: self._shard_tokens - self._tokens]
            with _disk(self._path(), _WRITE):
                if self._file is None:
                    self._file = open(self._temporary(), "wb")  # noqa: SIM115 (open over many calls)
                self._file.write(_bytes(piece))
            self._hash.update(_bytes(piece))
            self._tokens += piece.size
            if self._tokens == self._shard_tokens:
                self._finish_shard()
            array = array[piece.size :]

    def finish(self) -> tuple[Shard, ...]:
        """Completes the last, possibly shorter, shard and returns all of them."""
        if self._tokens:
            self._finish_shard()
        return tuple(self.shards)

    def _finish_shard(self) -> None:
        with _disk(self._path(), _WRITE), self._file:
            publish(self._file, self._temporary(), self._path())
        self.shards.append(Shard(self._path().name, self._tokens, self._hash.hexdigest()))
        self._file, self._tokens, self._hash = None, 0, hashlib.sha256()

    def _path(self) -> Path:
        return self._directory / f"{self._split}-{len(self.shards):05d}.bin"

    def _temporary(self) -> Path:
        return self._path().with_suffix(".bin.tmp")


def load_shard(manifest: Manifest, split: str, index: int, lookahead: bool = True) -> np.ndarray:
    """One whole shard, checked against its SHA-256 and the vocabulary: [tokens], or [tokens + 1] with `lookahead`.

    The lookahead token is the first of the next shard (only range-checked here); the last shard has none.
    Raises DataError naming the shard, with both hashes where they differ.
    """
    shards = manifest.splits[split].shards
    tokens = shards[index].tokens
    out = np.empty(tokens + (lookahead and index + 1 < len(shards)), manifest.dtype)
    read_shard(manifest, split, index, out[:tokens])
    if out.size > tokens:
        out[tokens:] = read_tokens(manifest, split, index * manifest.shard_tokens + tokens, 1)
    return out


def read_shard(manifest: Manifest, split: str, index: int, out: np.ndarray | None) -> None:
    """Reads and checks one shard as load_shard does, into `out` [tokens]; with None it is only checked."""
    shard = manifest.splits[split].shards[index]
    path = manifest.directory / shard.file
    dtype = np.dtype(manifest.dtype)
    digest, largest = hashlib.sha256(), 0
    chunk = min(shard.tokens, _CHUNK_BYTES // dtype.itemsize)
    buffer = np.empty(chunk, dtype)
    with _disk(path, _RESTORE), open(path, "rb", buffering=0) as file:
        _check_size(path, os.fstat(file.fileno()).st_size, shard, dtype)
        for start in range(0, shard.tokens, chunk):
            count = min(chunk, shard.tokens - start)
            piece = buffer[:count] if out is None else out[start : start + count]
            _read_exactly(file, path, _bytes(piece))
            digest.update(_bytes(piece))
            largest = max(largest, int(piece.max()))
    _check_digest(path, digest.hexdigest(), shard.sha256)
    _check_largest(path, largest, manifest)


def read_tokens(manifest: Manifest, split: str, start: int, count: int) -> np.ndarray:
    """Tokens start to start + count of a split's stream, across shards, as a new array; range-checked, not hashed."""
    record = manifest.splits[split]
    if start < 0 or count < 0 or start + count > record.tokens:
        raise DataError(
            f"{manifest.directory}: tokens {start} to {start + count} wanted of split {split}, it has {record.tokens}"
        )
    out = np.empty(count, manifest.dtype)
    done = 0
    while done < count:
        index, offset = divmod(start + done, manifest.shard_tokens)
        path = manifest.directory / record.shards[index].file
        piece = out[done : done + record.shards[index].tokens - offset]
        with _disk(path, _RESTORE), open(path, "rb", buffering=0) as file:
            file.seek(offset * out.itemsize)
            _read_exactly(file, path, _bytes(piece))
        _check_largest(path, int(piece.max()), manifest)
        done += piece.size
    return out


def verify(manifest: Manifest) -> Iterator[tuple[str, str | None]]:
    """Re-hashes and range-checks every file of a cache: yields (file, None) or (file, what is wrong with it)."""
    checks = [
        (shard.file, functools.partial(read_shard, manifest, split, index, None))
        for split, record in manifest.splits.items()
        for index, shard in enumerate(record.shards)
    ]
    if manifest.tokenizer["file"] is not None:
        checks.insert(0, (manifest.tokenizer["file"], functools.partial(_check_tokenizer, manifest)))
    for file, check in checks:
        try:
            check()
        except DataError as error:
            yield file, str(error).removeprefix(f"{manifest.directory / file}: ")
        else:
            yield file, None


def _check_tokenizer(manifest: Manifest) -> None:
    path = manifest.directory / manifest.tokenizer["file"]
    with _disk(path, _RESTORE):
        digest = sha256_of_file(path)
    _check_digest(path, digest, manifest.tokenizer["sha256"])


def _parse(directory: Path, content: object) -> Manifest:
    path = directory / MANIFEST
    try:
        return _checked(directory, content)
    except ValueError as problem:
        raise DataError(f"{path}: {problem}; prepare the cache again or restore it from a good copy") from None


def _checked(directory: Path, content: object) -> Manifest:
    """What `content` describes. Raises ValueError with the problem, DataError where that lies in another file."""
    digest = hashlib.sha256(canonical_json(content)).hexdigest()
    record = _field({"content": content}, "content", dict, "the manifest")
    version = record.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise ValueError(f"format_version is {_show(version)}, this program reads {FORMAT_VERSION}")
    if record.get("finished") is not True:
        raise ValueError("not marked finished, so its preparation did not end")
    tokenizer = dict(_field(record, "tokenizer", dict, "the manifest"))
    vocab_size = _count(tokenizer, "vocab_size", "tokenizer", low=1, high=1 << 32)
    for key in ("kind", "name", "sha256"):
        _field(tokenizer, key, str, "tokenizer")
    for key in ("eos_id", "bos_id"):
        if key == "eos_id" or tokenizer.setdefault(key, None) is not None:
            _count(tokenizer, key, "tokenizer", high=vocab_size - 1)
    dtype = dtype_for(vocab_size)
    if record.get("dtype") != dtype:
        raise ValueError(f"dtype is {_show(record.get('dtype'))}, but a vocabulary of {vocab_size} needs {dtype!r}")
    shard_tokens = _count(record, "shard_tokens", "the manifest", low=1)
    seed = _count(record, "seed", "the manifest", high=(1 << 64) - 1)
    sources = tuple(_field(record, "sources", list, "the manifest"))
    if not all(isinstance(source, dict) for source in sources):
        raise ValueError("sources is not a list of objects")
    files: set[str] = set()
    if tokenizer.setdefault("file", None) is not None:
        _plain_file(directory, tokenizer["file"], files)

    splits: dict[str, Split] = {}
    for name in ("train", "validation"):
        raw = _field(_field(record, "splits", dict, "the manifest"), name, dict, "splits")
        where = f"split {name}"
        entries = _field(raw, "shards", list, where)
        shards = []
        for index, entry in enumerate(entries):
            here = f"{where}, shard {index}"
            entry = _field({"it": entry}, "it", dict, here)
            path = _plain_file(directory, entry.get("file"), files)
            sha256 = _field(entry, "sha256", str, here)
            if not _SHA256.fullmatch(sha256):
                raise ValueError(f"{here}: sha256 is {_show(sha256)}, not 64 hexadecimal digits")
            low = 1 if index + 1 == len(entries) else shard_tokens
            shard = Shard(path.name, _count(entry, "tokens", here, low, shard_tokens), sha256)
            _check_size(path, path.stat().st_size, shard, np.dtype(dtype))
            shards.append(shard)
        tokens, documents, utf8_bytes = (_count(raw, key, where) for key in ("tokens", "documents", "utf8_bytes"))
        if tokens != sum(shard.tokens for shard in shards):
            raise ValueError(f"{where} has {tokens} tokens, its shards {sum(shard.tokens for shard in shards)}")
        splits[name] = Split(tokens, documents, utf8_bytes, tuple(shards))
    return Manifest(directory, FORMAT_VERSION, dtype, shard_tokens, seed, tokenizer, sources, splits, digest)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _field(record: dict[str, Any], key: str, kind: type, where: str) -> Any:
    value = record.get(key)
    if not isinstance(value, kind):
        raise ValueError(f"{where}: {key} is {_show(value)}, not of type {kind.__name__}")
    return value


def _count(record: dict[str, Any], key: str, where: str, low: int = 0, high: int = _TOO_LARGE) -> int:
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{where}: {key} is {_show(value)}, not an integer from {low} to {high}")
    return value


def _plain_file(directory: Path, name: object, seen: set[str]) -> Path:
    """The path of a file of this directory; a name or link that leads elsewhere is refused, and so is a second use."""
    if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name) or name == MANIFEST:
        raise ValueError(f"file name {_show(name)} is not a plain name inside the cache")
    if name in seen:
        raise ValueError(f"file {name} is listed twice")
    seen.add(name)
    path = directory / name
    if not path.is_file():
        raise DataError(f"{path}: missing, though {MANIFEST} lists it; {_RESTORE}")
    if path.resolve().parent != directory.resolve():
        raise ValueError(f"file {name} is a link that leads out of the cache")
    return path


def _check_size(path: Path, size: int, shard: Shard, dtype: np.dtype[Any]) -> None:
    expected = shard.tokens * dtype.itemsize
    if size != expected:
        raise DataError(f"{path}: {size} bytes instead of {expected} ({shard.tokens} tokens); {_RESTORE}")


def _check_digest(path: Path, digest: str, expected: str) -> None:
    if digest != expected:
        raise DataError(f"{path}: sha256 {digest} is not the manifest's {expected}, so it was changed; {_RESTORE}")


def _check_largest(path: Path, largest: int, manifest: Manifest) -> None:
    if largest >= manifest.vocab_size:
        raise DataError(
            f"{path}: id {largest} outside the vocabulary of {manifest.vocab_size}; prepare the cache again"
        )


@contextlib.contextmanager
def _disk(path: Path, advice: str) -> Iterator[None]:
    """Turns the disk's errors into a DataError that names the file and says what to do."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; {advice}") from None


def _bytes(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data


def _read_exactly(file: Any, path: Path, buffer: memoryview) -> None:
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise DataError(f"{path}: shorter than its manifest says; {_RESTORE}")
        buffer = buffer[count:]
