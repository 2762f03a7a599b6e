"""The loader: one endless stream of training sequences, in an order that is a pure function of its position.

Sequence i covers tokens i*T to i*T+T of a stream (T inputs and the targets one further). Groups of shards are visited
in file order, each with a permutation of its own; pass 2 over the data has new permutations. Grain loads whole groups,
one ahead, in the background; the cursor is the number of sequences consumed, and resuming at it replays nothing.
Rows of conversations keep the order of their file.
Letters: T context, n sequences, S tokens of a sequence (T + 1; T in rows), V vocabulary size.
"""

import functools
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import grain
import numpy as np
import numpy.typing as npt
from ml_collections import ConfigDict

from llama_jax import shards
from llama_jax.errors import ConfigError, DataError
from llama_jax.sft_source import RowsSource
from llama_jax.synthetic import SyntheticSource

LOADER_VERSION = 2


class Source(Protocol):
    """What the loader and evaluation read: CacheSource, RowsSource and SyntheticSource.

    targets: of a sequence, which has one token more; permuted: whether groups are visited in an order of their own;
    groups: (first sequence, number of sequences) of each group, equal but for the last, which may be smaller; where
    known, the manifest of the token cache, UTF-8 bytes per validation token, and the entropy in nats per target.
    """

    @property
    def manifest(self) -> shards.Manifest | None: ...

    context: int
    targets: int
    permuted: bool
    vocab_size: int
    dtype: np.dtype[Any]
    fingerprint: str
    group_size: int
    groups: list[tuple[int, int]]
    sequences: int
    validation_sequences: int
    bytes_per_token: float | None
    entropy: float | None

    def load_group(self, group: int, threads: int = 1) -> np.ndarray: ...

    def validation_rows(self, indices: npt.ArrayLike) -> np.ndarray: ...


def permutation(seed: int, pass_index: int, group: int, n: int) -> np.ndarray:
    """The order in which the n sequences of a group are visited in a pass: int64 [n].

    Stable argsort of a PCG64 raw stream, the one thing that NumPy promises never to change (NEP 19).
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, pass_index, group]))
    return np.argsort(bits.random_raw(n), kind="stable")


def locate(groups: Sequence[tuple[int, int]], position: int) -> tuple[int, int, int]:
    """(pass, group, rank inside the group's permutation) of a position of the stream, in constant time."""
    first, n = groups[-1]
    pass_index, rest = divmod(position, first + n)
    group = rest // groups[0][1]
    return pass_index, group, rest - groups[group][0]


class CacheSource:
    """The sequences of a token cache. Raises DataError when T does not divide the shard length."""

    def __init__(self, manifest: shards.Manifest, context: int, group_size: int = 2) -> None:
        if manifest.shard_tokens % context:
            raise DataError(
                f"{manifest.directory}: shards of {manifest.shard_tokens} tokens are no multiple of model.context = "
                f"{context}; choose a context that divides them or prepare a cache for this one"
            )
        train, validation = manifest.splits["train"], manifest.splits["validation"]
        self.manifest = manifest
        self.context = self.targets = context
        self.permuted = True
        self.group_size = group_size
        self.vocab_size = manifest.vocab_size
        self.dtype = np.dtype(manifest.dtype)
        self.fingerprint = manifest.sha256
        self.sequences = max(train.tokens - 1, 0) // context
        self.validation_sequences = max(validation.tokens - 1, 0) // context
        self.bytes_per_token = validation.utf8_bytes / validation.tokens if validation.utf8_bytes else None
        self.entropy: float | None = None
        n = group_size * manifest.shard_tokens // context
        self.groups = [(first, min(n, self.sequences - first)) for first in range(0, self.sequences, n)]
        self._checked_validation: set[int] = set()

    def load_group(self, group: int, threads: int = 1) -> np.ndarray:
        """Tokens of one group, [at least n*T + 1]: local sequence j is tokens[j*T : (j+1)*T + 1].

        Every shard of the group is hashed and range-checked; `threads` of them are read at a time.
        Raises DataError naming the shard.
        """
        split = self.manifest.splits["train"]
        first = group * self.group_size
        sizes = [shard.tokens for shard in split.shards[first : first + self.group_size]]
        start, total = first * self.manifest.shard_tokens, sum(sizes)
        tokens = np.empty(total + (start + total < split.tokens), self.dtype)
        pieces = np.split(tokens[:total], np.cumsum(sizes)[:-1])
        with ThreadPoolExecutor(min(threads, len(sizes)), "shard") as pool:
            read = functools.partial(shards.read_shard, self.manifest, "train")
            list(pool.map(read, range(first, first + len(sizes)), pieces))
        if tokens.size > total:  # the lookahead of the last sequence is the next group's first token
            tokens[total:] = shards.read_tokens(self.manifest, "train", start + total, 1)
        return tokens

    def validation_rows(self, indices: npt.ArrayLike) -> np.ndarray:
        """Validation sequences by index, [n, T+1]; a shard is hashed when it is first used. Raises DataError."""
        indices = np.asarray(indices, np.int64)
        rows = np.empty((indices.size, self.context + 1), self.dtype)
        if not indices.size:
            return rows
        if indices.min() < 0 or indices.max() >= self.validation_sequences:
            raise DataError(
                f"{self.manifest.directory}: validation sequences {indices.min()} to {indices.max()} wanted, "
                f"it has {self.validation_sequences}"
            )
        per_shard = self.manifest.shard_tokens // self.context
        for index in set((indices // per_shard).tolist()) - self._checked_validation:
            shards.read_shard(self.manifest, "validation", index, None)
            self._checked_validation.add(index)
        done = 0
        for run in np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1):  # neighbours are one read
            start, count = int(run[0]) * self.context, run.size * self.context + 1
            tokens = shards.read_tokens(self.manifest, "validation", start, count)
            rows[done : done + run.size] = _rows(tokens, self)
            done += run.size
        return rows


def open_source(config: ConfigDict) -> Source:
    """The source that a config names, with all checks that need no hashing; rows are hashed.

    Raises ConfigError or DataError, saying what to do: no finished cache, files that do not fit the manifest, ids that
    the model lacks, a context that does not divide the shards or is no row, not one training or validation sequence.
    """
    data, model = config.data, config.model
    if data.source == "synthetic":
        return SyntheticSource(
            model.vocab_size,
            model.context,
            config.seed,
            data.synthetic_branching,
            data.synthetic_group_sequences,
            data.synthetic_validation_sequences,
        )
    if not data.path:
        raise ConfigError("data.path is empty; name a prepared token cache or rows, or set data.source to synthetic")
    if data.source == "rows":
        return RowsSource(data.path, model.context, model.vocab_size, data.validation_rows, model.init_from)
    source = CacheSource(shards.read_manifest(data.path), model.context, data.shuffle_group_size)
    if source.vocab_size > model.vocab_size:
        raise DataError(
            f"{data.path}: its tokenizer has {source.vocab_size} ids, model.vocab_size is {model.vocab_size}; "
            "raise model.vocab_size or use another cache"
        )
    for split, count in (("train", source.sequences), ("validation", source.validation_sequences)):
        if count < 1:
            raise DataError(
                f"{data.path}: split {split} has {source.manifest.splits[split].tokens} tokens, one sequence needs "
                f"model.context + 1 = {model.context + 1}; lower model.context or prepare more data"
            )
    return source


class _Group(NamedTuple):
    number: int  # pass * number of groups + group
    order_n: np.ndarray
    rows_nT: np.ndarray


class _Cursor(grain.DatasetIterator):
    """Grain's iterator over groups, cut into sequences; its state is the number of sequences consumed."""

    def __init__(self, source: Source, seed: int, prefetch_groups: int, threads: int) -> None:
        self.waited_s, self._source = 0.0, source
        self._loading: set[threading.Thread] = set()
        load = functools.partial(_load, source, seed, threads, self._loading)
        groups = grain.MapDataset.range(sys.maxsize).map(load)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch_groups)
        super().__init__(iter(groups.to_iter_dataset(options)))
        self._sequence = 0
        self._group: _Group | None = None

    def __next__(self) -> np.ndarray:
        return self.take(1)[0]

    def take(self, n: int) -> np.ndarray:
        """The next n sequences in memory of their own, [n, S]; the cursor moves only when all of them are there."""
        parts, position, end = [], self._sequence, self._sequence + n
        while position < end:
            pass_index, group, rank = locate(self._source.groups, position)
            loaded = self._load_group(pass_index * len(self._source.groups) + group)
            chosen = loaded.order_n[rank : rank + end - position]
            parts.append(loaded.rows_nT[chosen])
            position += chosen.size
        self._sequence = position
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def get_state(self) -> dict[str, int]:
        return {"sequence": self._sequence}

    def set_state(self, state: dict[str, int]) -> None:
        self._sequence = state["sequence"]
        pass_index, group, _ = locate(self._source.groups, self._sequence)
        self._group = None
        self._parent.set_state({"next_index": pass_index * len(self._source.groups) + group})

    def close(self) -> None:
        """Stops the background thread; returns when it has ended."""
        super().close()
        self._group = None
        for thread in list(self._loading):
            thread.join()

    def __del__(self) -> None:  # waits for no thread: the collector may run where a lock is held that its end needs
        super().close()

    def _load_group(self, number: int) -> _Group:
        if self._group is None or self._group.number != number:
            self._group = None  # so that no more than the next group and the one after it are in memory
            at = {"next_index": number}
            if self._parent.get_state() != at:  # after a failure on the way into the next group
                self._parent.set_state(at)
            start = time.monotonic()
            try:
                self._group = next(self._parent)
            except BaseException:  # Grain has dropped the group that failed: ask for the same one again next time
                self._parent.set_state(at)
                raise
            finally:
                self.waited_s += time.monotonic() - start
        assert self._group.number == number
        return self._group


class Loader:
    """The training stream: next(n) gives its next n sequences, whatever n was before.

    prefetch_groups (0 or 1 groups loaded ahead) and threads (shards read at a time) change nothing but the speed.
    `waited_s` is the time spent waiting for groups, in seconds. Not thread-safe. Raises DataError naming the shard as
    soon as a row of a damaged group is asked for.
    """

    def __init__(self, source: Source, seed: int, position: int = 0, prefetch_groups: int = 1, threads: int = 8):
        if prefetch_groups not in (0, 1):
            raise ConfigError(f"data.prefetch_groups = {prefetch_groups} must be 0 or 1")
        if threads < 1:
            raise ConfigError(f"runtime.host_threads = {threads} must be at least 1")
        if position < 0 or source.sequences < 1:
            raise DataError(f"can't start at sequence {position} of data with {source.sequences} sequences a pass")
        self._source = source
        self._seed = seed
        self._order = functools.lru_cache(maxsize=2)(functools.partial(_order, source, seed))
        self._cursor = _Cursor(source, seed, prefetch_groups, threads)
        self._cursor.set_state({"sequence": position})
        self._cursor.start_prefetch()

    @classmethod
    def from_state(
        cls, source: Source, seed: int, state: dict[str, Any], prefetch_groups: int = 1, threads: int = 8
    ) -> "Loader":
        """The loader that continues where state() was taken. Raises DataError naming every difference of the data."""
        now = _identity(source, seed)
        differences = [f"{key} was {state.get(key)!r}, is {new!r}" for key, new in now.items() if state.get(key) != new]
        if differences:
            raise DataError(
                f"the saved position belongs to another stream of data: {'; '.join(differences)}; "
                "go back to the former data and settings, or start a new run folder"
            )
        position = state.get("position")
        if not isinstance(position, int) or isinstance(position, bool) or position < 0:
            raise DataError(f"the saved position is {position!r}, not a number of sequences; use an older checkpoint")
        return cls(source, seed, position, prefetch_groups, threads)

    @property
    def position(self) -> int:
        """Sequences handed out since the start of the run."""
        return self._cursor.get_state()["sequence"]

    @property
    def passes(self) -> int:
        """Passes over the data begun so far: 1, and 2 as soon as a sequence was handed out a second time."""
        return max(1, -(-self.position // self._source.sequences))

    @property
    def waited_s(self) -> float:
        return self._cursor.waited_s

    def next(self, n: int) -> np.ndarray:
        """The next n >= 1 sequences, [n, S] in the source's dtype: contiguous, and never written again."""
        if n < 1:
            raise ValueError(f"next({n}): at least one sequence must be asked for")
        return self._cursor.take(n)

    def state(self) -> dict[str, Any]:
        """What resuming needs, ready for JSON: the position, and what the order of the stream depends on."""
        return {**_identity(self._source, self._seed), "position": self.position}

    def locate(self, position: int) -> tuple[int, int, int]:
        """(pass, group, sequence) at a position of the stream; sequence counts from the start of the data."""
        pass_index, group, rank = locate(self._source.groups, position)
        return pass_index, group, self._source.groups[group][0] + int(self._order(pass_index, group)[rank])

    def close(self) -> None:
        """Ends the background thread. Idempotent."""
        self._cursor.close()


def _identity(source: Source, seed: int) -> dict[str, Any]:
    return {
        "loader_version": LOADER_VERSION,
        "seed": seed,
        "group_size": source.group_size,
        "context": source.context,
        "data": source.fingerprint,
    }


def _load(source: Source, seed: int, threads: int, loading: set[threading.Thread], index: int) -> _Group:
    """One group, in the background: its tokens, checked, and its permutation."""
    if threading.current_thread() is not threading.main_thread():
        loading.add(threading.current_thread())
    pass_index, group = divmod(int(index), len(source.groups))
    rows = _rows(source.load_group(group, threads), source)[: source.groups[group][1]]
    return _Group(int(index), _order(source, seed, pass_index, group), rows)


def _order(source: Source, seed: int, pass_index: int, group: int) -> np.ndarray:
    n = source.groups[group][1]
    return permutation(seed, pass_index, group, n) if source.permuted else np.arange(n)


def _rows(tokens: np.ndarray, source: Source) -> np.ndarray:
    """View of all whole sequences of a piece of the stream, [n, S]; neighbours share a token, except in rows."""
    return np.lib.stride_tricks.sliding_window_view(tokens, source.targets + 1)[:: source.context]
