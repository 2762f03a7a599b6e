"""Tokenised source files ("pieces"): the unit of parallel work, of resuming, and of sharing work between jobs.

A piece is what one item becomes, whatever the split, seed, shuffle or budget: KEY.tokens (ids), KEY.documents (one
record a document), KEY.bad (JSON lines of what was skipped) and, written last, KEY.json. The key names the item, the
tokenizer and the reading rules. Ids of a piece depend on nothing else, so any number of workers gives the same bytes.
"""

import functools
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline import packages, streams, tokenizers
from data_pipeline.sources import Item, describe
from llama_jax import shards
from llama_jax.errors import DataError
from llama_jax.files import sha256_of_file

PIECE_VERSION = 1
# Of each document: tokens (0 for an empty one, which is dropped), bytes of UTF-8, first 16 bytes of its SHA-256.
DOCUMENT = struct.Struct("<II16s")
_PARTS = ("tokens", "documents", "bad")
_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 2048
Tick = Callable[[int, int], None]  # weight of source read, tokens made


@dataclass(frozen=True)
class Limit:
    """How much is needed: `tokens` emitted by a shuffle buffer that holds back `held` documents."""

    tokens: int
    held: int

    def reached(self, documents: int, tokens: int) -> bool:
        """Whether so many documents should do, with a quarter to spare for duplicates and validation documents."""
        return documents > self.held and 4 * tokens * (documents - self.held) > 5 * self.tokens * documents


@dataclass(frozen=True)
class Work:
    """What turns items into pieces. The tokenizer is given as its file, so that a worker process loads its own."""

    folder: str
    tokenizer: str
    tokenizer_sha256: str
    eos_token: str
    eos_id: int
    bos_id: int | None  # put before each document unless None
    vocab_size: int
    rules: streams.Rules
    skip_bad: bool

    def key(self, item: Item) -> str:
        record = [PIECE_VERSION, describe(item), self.tokenizer_sha256, self.eos_id, self.bos_id, asdict(self.rules)]
        return hashlib.sha256(json.dumps([*record, self.skip_bad]).encode()).hexdigest()[:32]

    def path(self, item: Item, part: str) -> Path:
        return Path(self.folder) / f"{self.key(item)}.{part}"


@dataclass(frozen=True)
class Piece:
    """A finished piece. `complete` is False when reading ended early because its limit was reached."""

    item: Item
    base: str
    dtype: str
    documents: int
    tokens: int
    complete: bool
    source_sha256: str
    sha256: str

    def records(self) -> Iterator[tuple[int, int, bytes]]:
        """(tokens, UTF-8 bytes, digest) of each document."""
        with open(self.base + ".documents", "rb") as file:
            while chunk := file.read(4096 * DOCUMENT.size):
                yield from DOCUMENT.iter_unpack(chunk)

    def ids(self) -> np.ndarray:
        """[tokens], mapped from the file."""
        return np.memmap(self.base + ".tokens", self.dtype, "r") if self.tokens else np.empty(0, self.dtype)

    def problems(self) -> Iterator[tuple[int, str]]:
        """(number of documents before it, "place: reason") of everything skipped."""
        with open(self.base + ".bad", encoding="utf-8", newline="\n") as file:
            for line in file:
                before, text = json.loads(line)
                yield before, text


class Stopped(Exception):
    """The main process needs no more pieces."""


def find(item: Item, work: Work) -> Piece | None:
    """The finished piece of `item` if it is whole and its source is what it was; hashes both."""
    record_path = work.path(item, "json")
    if not record_path.is_file():
        return None
    try:
        record = json.loads(record_path.read_bytes())
        piece = Piece(item, str(record_path.with_suffix("")), shards.dtype_for(work.vocab_size), **record)
        whole = _content_sha256(work, item) == piece.sha256
    except (ValueError, TypeError, OSError):
        return None
    return piece if whole and source_sha256(item) == piece.source_sha256 else None


def make(item: Item, work: Work, limit: Limit | None, threads: int, tick: Tick, stop: Callable[[], bool]) -> Piece:
    """The piece of `item`: an earlier one where it is whole and the source unchanged, else made now.

    Raises DataError naming file and line of bad input, and Stopped soon after `stop` says so.
    """
    found = find(item, work)
    if found and (found.complete or (limit and limit.reached(found.documents, found.tokens))):
        tick(item.weight, found.tokens)
        return found
    temporary = {part: work.path(item, f"{part}.{os.getpid()}.tmp") for part in _PARTS}
    try:
        with open(temporary["tokens"], "wb") as ids, open(temporary["documents"], "wb") as documents:
            with open(temporary["bad"], "wb") as bad:
                record = _tokenise(item, work, limit, threads, tick, stop, (ids, documents, bad))
                for file in (ids, documents, bad):
                    file.flush()
                    os.fsync(file.fileno())
        for part in _PARTS:
            os.replace(temporary[part], work.path(item, part))
    except OSError as error:
        raise DataError(
            f"{item.name}: {error.filename or work.folder}: {error.strerror}; free space and repeat"
        ) from None
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    record["sha256"] = _content_sha256(work, item)
    packages.publish(work.path(item, "json"), json.dumps(record).encode())
    return Piece(item, str(work.path(item, "json").with_suffix("")), shards.dtype_for(work.vocab_size), **record)


def _tokenise(
    item: Item,
    work: Work,
    limit: Limit | None,
    threads: int,
    tick: Tick,
    stop: Callable[[], bool],
    files: Sequence[Any],
) -> dict[str, Any]:
    """Reads, tokenises and writes one item; returns its record, still without the hash of what was written."""
    ids_file, documents_file, bad_file = files
    tokenizer = _tokenizer(work.tokenizer, work.eos_token, work.tokenizer_sha256)
    before = [] if work.bos_id is None else [work.bos_id]
    source = hashlib.sha256()
    read = reported = documents = tokens = 0
    complete, damaged = True, False

    def observe(chunk: bytes) -> None:
        nonlocal read
        source.update(chunk)
        read += len(chunk)

    def refuse(problem: streams.Problem, ordinal: int) -> None:
        nonlocal damaged
        if not work.skip_bad:
            raise bad_input(problem)
        damaged = damaged or problem.fatal
        bad_file.write((json.dumps([ordinal, f"{problem.place}: {problem.reason}"]) + "\n").encode())

    for texts in _batches(streams.documents(item, work.rules, observe), refuse):
        if stop():
            raise Stopped
        rows = []
        for number, (text, row) in enumerate(zip(texts, tokenizer.encode_batch(texts, threads), strict=True)):
            usable = bool(text.strip())
            if usable and (row == work.eos_id).any():
                reason = "this tokenizer encodes something in the text as its end-of-document id"
                refuse(streams.Problem(f"{item.name}: document {documents + number + 1}", reason), documents + number)
                usable = False
            rows.append(np.concatenate([before, row, [work.eos_id]]).astype(np.int64) if usable else row[:0])
        flat = np.concatenate(rows)
        if flat.size and not 0 <= flat.min() <= flat.max() < work.vocab_size:
            bad_id = flat.min() if flat.min() < 0 else flat.max()
            raise DataError(f"{item.name}: the tokenizer gave id {bad_id}, outside its vocabulary of {work.vocab_size}")
        ids_file.write(flat.astype(shards.dtype_for(work.vocab_size)).tobytes())
        for text, row in zip(texts, rows, strict=True):
            encoded = text.encode("utf-8")
            documents_file.write(DOCUMENT.pack(row.size, len(encoded), document_digest(encoded)))
        documents, tokens = documents + len(texts), tokens + flat.size
        done = min(documents if item.kind == "tfds" else read, item.weight)
        tick(done - reported, flat.size)
        reported = done
        if limit is not None and limit.reached(documents, tokens):
            complete = False
            break
    tick(item.weight - reported, 0)
    digest = source.hexdigest()
    if item.kind == "tfds" or damaged or not complete:
        digest = source_sha256(item)
    if item.sha256 and digest != item.sha256:
        refuse(
            streams.Problem(item.name, f"sha256 {digest} is not the expected {item.sha256}; fetch it again"), documents
        )
    if not documents and complete and not damaged:
        refuse(streams.Problem(item.name, "no document in it"), 0)
    return {"documents": documents, "tokens": tokens, "complete": complete, "source_sha256": digest}


def _batches(
    stream: Iterator[str | streams.Problem], refuse: Callable[[streams.Problem, int], None]
) -> Iterator[list[str]]:
    batch: list[str] = []
    size = count = 0
    for text in stream:
        if isinstance(text, streams.Problem):
            refuse(text, count)
            continue
        batch.append(text)
        count, size = count + 1, size + len(text)
        if size >= _BATCH_BYTES or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@functools.lru_cache(maxsize=1)
def _tokenizer(path: str, eos_token: str, sha256: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.load(path, eos_token=eos_token)
    if tokenizer.sha256 != sha256:
        raise DataError(f"{path}: changed while it was in use; run the command again")
    return tokenizer


def bad_input(problem: streams.Problem) -> DataError:
    return DataError(f"{problem.place}: {problem.reason}; repair it, or --skip_bad skips and lists bad input")


def document_digest(encoded: bytes) -> bytes:
    """What a document is known by: the first 16 bytes of its text's SHA-256."""
    return hashlib.sha256(encoded).digest()[:16]


def source_sha256(item: Item) -> str:
    return item.sha256 if item.kind == "tfds" else sha256_of_file(Path(item.path))


def _content_sha256(work: Work, item: Item) -> str:
    return hashlib.sha256("".join(sha256_of_file(work.path(item, part)) for part in _PARTS).encode()).hexdigest()
