"""Times the training step of a config on this device: what every benchmark of updates measures with.

    runtime.prepare(config)                  before anything else touches JAX
    rows = timing.rows(config, tokens)       8 batches of sequences; or an array of the caller's, [K, n, context + 1]
    record = timing.measure(config, rows)    a plain dict, ready for JSON

measure() is start() and a few windows; a benchmark that compares several feeds or steps calls these itself:

    stepper = timing.start(config)           builds and compiles the step as training does
    feed = timing.placed(stepper, rows)      batches on the device, in turn
    seconds = stepper.window(100, feed)      dispatches 100 updates and waits once, for the last

One process measures one device, one at a time.
"""

import math
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench import roofline
from llama_jax import config as configs
from llama_jax import control, data, flops, outer, run_folder, shards
from llama_jax import step as steps
from llama_jax.build import build
from llama_jax.errors import DataError, NonFiniteError

BATCHES = 8  # different ones, in turn
COUNTED_TOKENS = 1 << 27  # of a cache, at most, for its unigram counts

Feed = Callable[[int], steps.Batch]  # from the zero-based update to its batch on the device


def rows(config: Any, tokens: str | Path | None = None, batches: int = BATCHES, seed: int = 1) -> np.ndarray:
    """Sequences for full updates of all workers: [batches, sequences of an update, targets + 1], uint16 or uint32.

    tokens: None, English-like ids (probability of rank k proportional to 1 / (k + 2.7), ranks shuffled over the ids);
    a token cache, ids drawn with replacement from the unigram counts of its training split (of its first 134M tokens);
    a file of little-endian uint16 ids, these in order. rows(...).astype("<u2").tofile(name) makes such a file, for a
    measurement elsewhere on the same ids. Raises DataError.
    """
    vocab = config.model.vocab_size
    shape = (batches, config.derived.batch_sequences, config.derived.sequence_targets + 1)
    dtype, count = np.dtype("<u2" if vocab <= 1 << 16 else "<u4"), math.prod(shape)
    if tokens is not None and not Path(tokens).exists():
        raise DataError(f"{tokens} is neither a token cache nor a file of uint16 ids")
    if tokens is not None and not Path(tokens).is_dir():
        ids = np.fromfile(tokens, "<u2", count)
        if ids.size < count or ids.max() >= vocab:
            raise DataError(f"{tokens}: {count} uint16 ids below {vocab} are needed; it has {ids.size} or larger ones")
        return ids.reshape(shape)
    random = np.random.default_rng(seed)
    if tokens is None:
        weights = (1 / (np.arange(vocab) + 2.7))[random.permutation(vocab)]
    else:
        weights = unigram_counts(tokens, vocab)
    ends = np.cumsum(weights, dtype=np.float64)
    return np.searchsorted(ends, random.random(shape) * ends[-1], side="right").clip(0, vocab - 1).astype(dtype)


def unigram_counts(directory: str | Path, vocab: int) -> np.ndarray:
    """How often each id occurs in the training split of a cache, in its first COUNTED_TOKENS tokens: int64 [vocab]."""
    manifest = shards.read_manifest(directory)
    counts, total = np.zeros(vocab, np.int64), min(manifest.splits["train"].tokens, COUNTED_TOKENS)
    if manifest.vocab_size > vocab or not total:
        raise DataError(f"{directory}: {total} tokens of {manifest.vocab_size} ids; the model has {vocab} ids")
    for start in range(0, total, 1 << 24):
        part = shards.read_tokens(manifest, "train", start, min(1 << 24, total - start))
        counts += np.bincount(part, minlength=vocab)
    return counts


class Stepper:
    """A compiled training step and its state: each window continues where the last one ended.

    An update is what the training loop does for it: the step with the learning rates of the workers (fixed, at their
    peaks) and the mixing of its number, an outer step where one is due, the measurement of the workers' distances where
    one is due. Attributes: built, update (done so far), state, metrics (of the last update, on the device), trace_s,
    compile_s (None without runtime.jit), compile_cached, program_bytes (what XLA plans for the step, or None).
    """

    def __init__(self, config: Any, dtype: Any = np.uint16) -> None:
        self.built, self.update = build(config), 0
        self.state = self.built.initial_state()
        self.metrics: steps.Metrics | None = None
        self.mixing, self.lr_N = self.built.mixing(), np.asarray(configs.per_worker(config, "lr"), np.float32)
        self.held = control.init(self.built.mesh) if self.built.control else None
        self.met = outer.init(self.state, self.built.mesh) if self.built.sync else None
        self.trace_s: float | None = None
        self.compile_s: float | None = None
        self.compile_cached = False
        self.program_bytes: int | None = None
        if config.runtime.jit:
            self._compile(dtype)

    def _compile(self, dtype: Any) -> None:
        config, hits = self.built.config, _cache_hits()
        width = (config.derived.batch_sequences, config.derived.sequence_targets + 1)
        batch = self.built.place(np.zeros(width, dtype))
        start = time.perf_counter()
        step: Any = self.built.step  # calls of the step use the program compiled here
        lowered = step.lower(self.state, batch, self.lr_N, self.mixing(0, self.held))
        traced = time.perf_counter()
        compiled = lowered.compile()
        self.trace_s, self.compile_s = traced - start, time.perf_counter() - traced
        self.compile_cached = _cache_hits() > hits
        plan = compiled.memory_analysis()
        if plan is not None:
            needed = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
            self.program_bytes = int(needed - plan.alias_size_in_bytes)
        if config.decentralized.workers > 1:
            jax.block_until_ready(self.built.measure(self.state))
        if self.built.sync and self.met:  # the workers are at one point: this changes nothing
            self.state, self.met = self.built.sync(self.state, self.met)

    def window(self, updates: int, feed: Feed, late: bool = False) -> float:
        """Seconds that so many updates take, from the first dispatch until the last one is computed.

        late: wait for the update before the last dispatched one, as training does, which reads its results; without,
        everything is dispatched first. Raises NonFiniteError when an update was refused.
        """
        built, config = self.built, self.built.config
        sync_every = config.decentralized.sync_every
        with jax.disable_jit(not config.runtime.jit):
            start = time.perf_counter()
            for _ in range(updates):
                before, mixing = self.metrics, self.mixing(self.update % built.plan.total_updates, self.held)
                self.state, self.metrics = built.step(self.state, feed(self.update), self.lr_N, mixing)
                self.update += 1
                if built.sync and self.met and self.update % sync_every == 0:
                    self.state, self.met = built.sync(self.state, self.met, mixing.links)
                if built.control and self.update % built.schedule.period == 0:
                    self.held = built.control(self.state, self.held, np.int32(self.update), mixing.links)
                if mixing.measure and self.lr_N.size > 1:
                    built.measure(self.state, mixing.links)
                if late:
                    jax.block_until_ready(before)
            jax.block_until_ready((self.state, self.metrics))
            seconds = time.perf_counter() - start
        if not bool(self.state.ok):
            raise NonFiniteError(f"an update up to {self.update} was not finite at the peak learning rate; lower it")
        return seconds

    @property
    def loss(self) -> float:
        """Mean loss of the last update over all workers, in nats per target."""
        assert self.metrics is not None  # after a window
        return float(np.asarray(self.metrics.loss_sum, np.float64).sum() / np.asarray(self.metrics.targets).sum())


def start(config: Any, dtype: Any = np.uint16) -> Stepper:
    """Builds and compiles the step of a finalized config as training does; dtype: of the rows that it will be fed.

    Call runtime.prepare(config) first.
    """
    return Stepper(config, dtype)


def placed(stepper: Stepper, rows_KnS: np.ndarray) -> Feed:
    """The batches on the device before anything is timed, in turn: update i gets batch i mod K."""
    batches = [stepper.built.place(rows_nS) for rows_nS in rows_KnS]
    jax.block_until_ready(batches)
    return lambda update: batches[update % len(batches)]


def loaded(stepper: Stepper, loader: data.Loader) -> Feed:
    """The training stream: each batch is taken from the loader and copied to the device when its update is due."""
    return lambda update: stepper.built.place(loader.next(stepper.built.config.derived.batch_sequences))


def measure(
    config: Any,
    rows_KnS: np.ndarray,
    warmup: int = 20,
    updates: int = 100,
    windows: int = 3,
    with_loader: bool = False,
) -> dict[str, Any]:
    """Median of windows of updates after a warm-up, and what belongs to it, ready for JSON. Times leave compiling out.

    update_ms (median), windows_ms (all), targets_per_s, mfu and tflops_per_s (6 N per target, flops.py; mfu None on a
    device whose peak isn't known), roofline (floor_ms, flops_ms, bytes_ms of roofline.of, fraction = floor / measured;
    None on an unknown device), compile_s, trace_s, compile_cached, peak_bytes (of the process so far, highest device;
    None where the device doesn't tell), program_bytes (what XLA plans), memory_bytes (of the device; None where it
    isn't known), loss (last update, nats), resolved (what `auto` became), workers, rows (sequences of an update),
    microbatch, accumulation, devices, environment (versions, device, driver, XLA_FLAGS and others, git commit).

    with_loader: after each window one more, fed by the loader on the config's data: `loader` holds its update_ms,
    windows_ms, targets_per_s, and ratio (to the targets/s of the placed batches). Raises the errors of llama_jax.errors
    and what the device raises.
    """
    stepper = start(config, rows_KnS.dtype)
    feed, derived = placed(stepper, rows_KnS), config.derived
    targets = config.training.batch_targets
    loader = _open_loader(config) if with_loader else None
    try:
        stepper.window(warmup, feed)
        if loader:
            stepper.window(warmup, loaded(stepper, loader), late=True)
        seconds, loader_seconds = [], []
        for _ in range(windows):
            seconds.append(stepper.window(updates, feed) / updates)
            if loader:
                loader_seconds.append(stepper.window(updates, loaded(stepper, loader), late=True) / updates)
    finally:
        if loader:
            loader.close()
    median = statistics.median(seconds)
    devices, kind = stepper.built.mesh.size, jax.devices()[0].device_kind
    workers = config.decentralized.workers
    floor: dict[str, Any] | None = roofline.of(config.model, targets, workers, kind, devices)
    if floor:
        floor["fraction"] = floor["floor_ms"] / (1e3 * median)
    record = {
        "update_ms": 1e3 * median,
        "windows_ms": [1e3 * s for s in seconds],
        "warmup": warmup,
        "updates": updates,
        "targets_per_s": targets / median,
        "mfu": flops.mfu(config.model, targets / median, kind, devices),
        "tflops_per_s": flops.flops_per_target(config.model) * targets / median / 1e12,
        "roofline": floor,
        "compile_s": stepper.compile_s,
        "trace_s": stepper.trace_s,
        "compile_cached": stepper.compile_cached,
        **memory(),
        "program_bytes": stepper.program_bytes,
        "loss": stepper.loss,
        "resolved": dict(stepper.built.resolved),
        "workers": workers,
        "rows": derived.batch_sequences,
        "microbatch": config.training.microbatch,
        "accumulation": derived.accumulation,
        "devices": devices,
        "environment": environment(),
    }
    if loader_seconds:
        record["loader"] = _loader_record(loader_seconds, targets, median)
    return record


def _loader_record(seconds: Sequence[float], targets: int, placed_s: float) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "update_ms": 1e3 * median,
        "windows_ms": [1e3 * s for s in seconds],
        "targets_per_s": targets / median,
        "ratio": placed_s / median,
    }


def _open_loader(config: Any) -> data.Loader:
    source = data.open_source(config)
    return data.Loader(source, config.seed, 0, config.data.prefetch_groups, config.runtime.host_threads)


def memory() -> dict[str, int | None]:
    """peak_bytes that the process took of a device so far (the highest of all), memory_bytes of one; None if unknown.

    On a GPU JAX may take a share of the memory, which XLA_PYTHON_CLIENT_MEM_FRACTION names; the whole is computed back.
    """
    device, stats = jax.devices()[0], [one.memory_stats() or {} for one in jax.local_devices()]
    peak, limit = max(one.get("peak_bytes_in_use", 0) for one in stats), stats[0].get("bytes_limit")
    share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75)) if device.platform == "gpu" else 1.0
    return {"peak_bytes": peak or None, "memory_bytes": round(limit / share) if limit else None}


def environment() -> dict[str, Any]:
    """Versions, device, variables (an allow-list), git commit as a run records them, and the NVIDIA driver, if any."""
    try:
        found = re.search(r"\s(\d+\.\d+[.\d]*)\s", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return {**run_folder.environment(), "driver": found and found[1]}


_HITS: list[str] = []


def _note_hit(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _HITS.append(event)


def _cache_hits() -> int:
    """Programs taken from the compile cache so far."""
    return len(_HITS)


jax.monitoring.register_event_listener(_note_hit)
