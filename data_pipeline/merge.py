"""From pieces to the cache: drops duplicates, splits by document hash, shuffles, writes shards.

Everything here runs in one process in the order of the items, from seeded streams of raw PCG64 output (which NumPy
keeps stable), so the result is a function of the pieces and the settings alone. The first n tokens of the train stream
do not depend on how many are asked for.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.pieces import Piece
from llama_jax import shards

_SHUFFLE_STREAM = 0x5EED
_APPEND_TOKENS = 1 << 20


@dataclass(frozen=True)
class Settings:
    """validation_fraction: share of the documents of by_hash items. train_tokens: the stream's end or None."""

    seed: int
    shuffle_buffer: int
    validation_fraction: float
    deduplicate: bool
    train_tokens: int | None
    vocab_size: int
    dtype: str
    shard_tokens: int


@dataclass
class Tally:
    """What a source gave: counts of the documents that were looked at."""

    item: Any
    sha256: str
    documents: int = 0
    empty: int = 0
    duplicates: int = 0
    skipped: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Merged:
    """The manifest's "splits"; unigram statistics in nats per token; what each source gave."""

    splits: dict[str, Any]
    statistics: dict[str, float | None]
    tallies: tuple[Tally, ...]


@dataclass(frozen=True)
class Document:
    ids: np.ndarray
    utf8_bytes: int


class SplitWriter:
    """One split: gathers documents into large appends, counts them, and ends exactly at its last token."""

    def __init__(self, directory: Path, split: str, settings: Settings, tokens: int | None) -> None:
        self._writer = shards.ShardWriter(directory, split, settings.dtype, settings.shard_tokens)
        self._pending: list[np.ndarray] = []
        self._pending_tokens = 0
        self._end = tokens
        self.counts = np.zeros(settings.vocab_size, np.int64)
        self.tokens = self.documents = self.utf8_bytes = 0

    @property
    def full(self) -> bool:
        return self._end is not None and self.tokens >= self._end

    def add(self, document: Document) -> None:
        """Appends a document; one that reaches over the end is cut, and its bytes count in proportion."""
        if self.full:
            return
        ids, utf8_bytes = document.ids, document.utf8_bytes
        if self._end is not None and self.tokens + ids.size > self._end:
            kept = self._end - self.tokens
            utf8_bytes = utf8_bytes * kept // ids.size
            ids = ids[:kept]
        self._pending.append(ids)
        self._pending_tokens += ids.size
        self.tokens, self.documents, self.utf8_bytes = (
            self.tokens + ids.size,
            self.documents + 1,
            self.utf8_bytes + utf8_bytes,
        )
        if self._pending_tokens >= _APPEND_TOKENS:
            self._flush()

    def finish(self) -> dict[str, Any]:
        """The split's entry in the manifest."""
        self._flush()
        written = self._writer.finish()
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "utf8_bytes": self.utf8_bytes,
            "shards": [{"file": shard.file, "tokens": shard.tokens, "sha256": shard.sha256} for shard in written],
        }

    def _flush(self) -> None:
        if self._pending:
            ids = np.concatenate(self._pending)
            self._writer.append(ids)
            self.counts += np.bincount(ids, minlength=self.counts.size)
            self._pending, self._pending_tokens = [], 0


def shuffled(documents: Iterable[Document], size: int, seed: int) -> Iterator[Document]:
    """Documents in the order of a shuffle buffer: each newcomer takes the place of a random one, which goes out."""
    if size < 2:
        yield from documents
        return
    draws = _draws(seed)
    buffer: list[Document] = []
    for document in documents:
        if len(buffer) < size:
            buffer.append(document)
            continue
        place = next(draws) % size
        yield buffer[place]
        buffer[place] = document
    while buffer:
        place = next(draws) % len(buffer)
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        yield buffer.pop()


def _draws(seed: int) -> Iterator[int]:
    bits = np.random.PCG64(np.random.SeedSequence([seed, _SHUFFLE_STREAM]))
    while True:
        yield from bits.random_raw(4096).tolist()


def is_validation(digest: bytes, seed: int, fraction: float) -> bool:
    """Whether the document of this digest is a validation document: a pure function of its text and the seed."""
    draw = hashlib.sha256(seed.to_bytes(8, "little") + digest).digest()[:8]
    return int.from_bytes(draw, "little") < fraction * 2.0**64


def merge(
    directory: Path,
    pieces: Iterable[Piece],
    whole: Callable[[Piece], Piece],
    settings: Settings,
) -> Merged:
    """Writes the shards of both splits.

    `whole` turns a piece whose reading ended early into a complete one, for the rare case that it was too early.
    """
    train = SplitWriter(directory, "train", settings, settings.train_tokens)
    validation = SplitWriter(directory, "validation", settings, None)
    seen: set[bytes] = set()
    tallies: list[Tally] = []

    def train_documents() -> Iterator[Document]:
        for piece in pieces:
            tally = Tally(piece.item, piece.source_sha256)
            tallies.append(tally)
            for document, digest in _documents(piece, whole, tally):
                if settings.deduplicate:
                    if digest in seen:
                        tally.duplicates += 1
                        continue
                    seen.add(digest)
                split = piece.item.split
                if split == "validation" or (
                    split == "by_hash" and is_validation(digest, settings.seed, settings.validation_fraction)
                ):
                    validation.add(document)
                else:
                    yield document

    for document in shuffled(train_documents(), settings.shuffle_buffer, settings.seed):
        train.add(document)
        if train.full:
            break
    splits = {"train": train.finish(), "validation": validation.finish()}
    statistics = {
        "train_entropy": entropy(train.counts),
        "validation_entropy": entropy(validation.counts),
        "validation_unigram": cross_entropy(validation.counts, train.counts),
    }
    return Merged(splits, statistics, tuple(tallies))


def entropy(counts: np.ndarray) -> float | None:
    """Entropy in nats per token of token counts [vocabulary], None of no tokens; rounded to a millionth."""
    total = int(counts.sum())
    if not total:
        return None
    return round(math.log(total) - math.fsum(n * math.log(n) for n in counts.tolist() if n) / total, 6)


def cross_entropy(counts: np.ndarray, model: np.ndarray) -> float | None:
    """Nats per token that the unigram model of the counts `model`, add-one smoothed, needs for tokens of `counts`."""
    total, mass = int(counts.sum()), int(model.sum()) + model.size
    if not total:
        return None
    pairs = zip(counts.tolist(), model.tolist(), strict=True)
    return round(math.log(mass) - math.fsum(n * math.log(m + 1) for n, m in pairs if n) / total, 6)


def _documents(piece: Piece, whole: Callable[[Piece], Piece], tally: Tally) -> Iterator[tuple[Document, bytes]]:
    """Documents of a piece with their digests; counts them, and the bad input that lies before them, in `tally`."""
    problems = piece.problems()
    problem = next(problems, None)
    ids, start, count = np.asarray(piece.ids()), 0, 0
    records = piece.records()
    while True:
        while problem is not None and problem[0] <= count:
            tally.skipped += 1
            tally.problems.append(problem[1])
            problem = next(problems, None)
        record = next(records, None)
        if record is None:
            if piece.complete:
                return
            piece = whole(piece)
            ids, records, problems = np.asarray(piece.ids()), piece.records(), piece.problems()
            for _ in range(count):
                next(records)
            for _ in range(tally.skipped):
                next(problems)
            problem = next(problems, None)
            continue
        tokens, utf8_bytes, digest = record
        count += 1
        if tokens:
            tally.documents += 1
            yield Document(ids[start : start + tokens], utf8_bytes), digest
        else:
            tally.empty += 1
        start += tokens
