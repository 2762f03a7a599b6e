"""What a run says about itself: metrics.jsonl, throughput, the progress line.

metrics.jsonl holds strict JSON, one object a line: {"kind": "train", "update", "targets", "loss", ...} once for every
update, in order, and {"kind": "eval", "update", ...} behind the line of its update. Lines are kept in memory until
`flush`, which the loop calls at each log window and before each checkpoint, so that a checkpoint of update k implies
the lines up to k. A number that JSON cannot hold is null and named in "nonfinite".
"""

import contextlib
import json
import math
import os
import shutil
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from llama_jax.errors import CheckpointError, DataError, warn
from llama_jax.faults import fault_point
from llama_jax.files import parse_json, write_atomic


class MetricsLog:
    """Appends lines to `path`; `truncate` must come first when the file has content (also with update 0)."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._lines: list[str] = []
        self._last: int | None = None  # newest update with a train line; None before truncate() of an existing file
        self._file: int | None = None
        self._good_bytes = 0
        self._warned = False

    def truncate(self, update: int, keep_eval: bool = False) -> None:
        """Keeps the train lines up to `update` and the other lines before it (with `keep_eval` those of `update` too).

        Drops what a crash left behind: later lines, a torn last line, lines that are not JSON (these with a warning).
        Rewrites atomically, and only if something changes. Missing updates are named on stderr.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        pieces = content.split(b"\n")
        kept, last, bad, missing = [], 0, 0, []
        for piece in pieces[:-1]:  # behind the last newline there is nothing, or a torn line
            try:
                line = parse_json(piece)
                kind, number = line["kind"], line["update"]
                wanted = last < number <= update if kind == "train" else number < update + bool(keep_eval)
            except (ValueError, KeyError, TypeError):
                bad += 1
                continue
            if not wanted:
                continue
            if kind == "train":
                missing += [f"{last + 1}-{number - 1}"] * (number > last + 1)
                last = number
            kept.append(piece + b"\n")
        missing += [f"{last + 1}-{update}"] * (last < update)
        if bad:
            warn(f"{self.path}: dropped {bad} damaged lines")
        if missing:
            warn(f"{self.path}: no lines of updates {', '.join(missing)}; the run continues from {update} without them")
        if b"".join(kept) != content:
            write_atomic(self.path, b"".join(kept))
        self._last = update

    def append(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Adds one line ("kind" and "update" are required) and returns it as written, without NaN.

        Train lines must come one for each update, others must carry the update of the newest train line; ValueError.
        """
        clean = _clean(line)
        update = clean["update"]
        if self._last is None:
            if _size(self.path):
                raise ValueError(f"{self.path} has content: truncate() first")
            self._last = update - 1 if clean["kind"] == "train" else update
        expected = self._last + 1 if clean["kind"] == "train" else self._last
        if update != expected:
            raise ValueError(f"{self.path}: {clean['kind']} line of update {update}, expected {expected}")
        self._last = update
        self._lines.append(json.dumps(clean, allow_nan=False))
        return clean

    def flush(self, sync: bool = False) -> bool:
        """Writes the lines in memory, with `sync` down to the disk (before a checkpoint).

        False when that fails (disk full): said on stderr once, the file is left without a torn line, and the lines stay
        in memory for the next call. A checkpoint must not be saved then.
        """
        data = "".join(line + "\n" for line in self._lines).encode()
        try:
            fault_point("metrics_flush")
            if self._file is None:
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
                self._good_bytes = os.fstat(self._file).st_size
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            if sync and stat.S_ISREG(os.fstat(self._file).st_mode):
                os.fsync(self._file)
        except OSError as error:
            if self._file is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._good_bytes)
            if not self._warned:
                warn(f"{self.path}: cannot write ({error.strerror or error}); the lines are kept for the next attempt")
            self._warned = True
            return False
        self._good_bytes += len(data)
        self._lines.clear()
        self._warned = False
        return True

    def close(self) -> None:
        """Writes what is left; CheckpointError if that fails."""
        written = self.flush(sync=True)
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if not written:
            raise CheckpointError(f"{self.path}: {len(self._lines)} lines could not be written; free space on the disk")


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl, strictly parsed; DataError naming the line. A torn last line is not a line yet."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    for number, piece in enumerate(content.split(b"\n")[:-1], 1):
        try:
            line = parse_json(piece)
        except ValueError as error:
            raise DataError(f"{path} line {number}: {error}") from None
        if not isinstance(line, dict):
            raise DataError(f"{path} line {number}: not an object")
        yield line


def _clean(line: Mapping[str, Any]) -> dict[str, Any]:
    """Python numbers for numpy and JAX ones, null for what is not finite, and "nonfinite" with those names."""
    nonfinite = []

    def plain(name: str, value: Any) -> Any:
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, list | tuple):
            return [plain(name, item) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite.append(name)
            return None
        return value

    result = {name: plain(name, value) for name, value in line.items()}
    return {**result, "nonfinite": list(dict.fromkeys(nonfinite))} if nonfinite else result


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class Meter:
    """Throughput and time of a run, on a monotonic clock.

    `total_targets` of the whole run; `targets` and `wall_s` already done in former processes (from the checkpoint);
    `flops_per_target` and `peak_flops` (per second, of all devices together), None if unknown; `window` in updates.
    """

    def __init__(
        self,
        total_targets: int,
        targets: int = 0,
        wall_s: float = 0.0,
        flops_per_target: float | None = None,
        peak_flops: float | None = None,
        window: int = 20,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total_targets = total_targets
        self.targets = targets
        self._before_s = wall_s
        self._flops = (flops_per_target, peak_flops)
        self.clock = clock
        self._start = clock()
        self._paused_s = 0.0
        self._pause_start: float | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=window + 1)  # (seconds without pauses, targets)
        self._first: tuple[float, int] | None = None  # (clock, targets) at the first finished update of this process
        self._last_s = self._start  # clock at the newest one

    @property
    def wall_s(self) -> float:
        """Seconds of this run so far, former processes included (without what a crash threw away)."""
        return self._before_s + self.clock() - self._start

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Around an evaluation, a save or an export: its time does not count in `targets_per_s`."""
        outer = self._pause_start is not None
        if not outer:
            self._pause_start = self.clock()
        try:
            yield
        finally:
            if not outer and self._pause_start is not None:
                self._paused_s += self.clock() - self._pause_start
                self._pause_start = None

    def step(self, targets: int, finished_s: float | None = None) -> None:
        """One more update, of `targets` targets, was finished when `clock` showed finished_s (None: now).

        No pause may lie between that time and this call.
        """
        self.targets += targets
        self._last_s = self.clock() if finished_s is None else finished_s
        active = (self._last_s if self._pause_start is None else self._pause_start) - self._start - self._paused_s
        self._recent.append((active, self.targets))
        if self._first is None:
            self._first = (self._last_s, self.targets)

    def restart(self) -> None:
        """Forgets the window: the process was stopped (SIGSTOP) and the time since the last update means nothing."""
        self._recent.clear()

    def rates(self) -> dict[str, float | None]:
        """targets_per_s, targets_per_s_all, mfu, eta_s, wall_s; None while or where unknown.

        `targets_per_s` and `mfu` are over the window without pauses (the first update, which compiles, only starts it),
        `targets_per_s_all` over the whole run with everything, `eta_s` from this process with its pauses.
        """
        rate = None
        if len(self._recent) > 1:
            (start, before), (end, after) = self._recent[0], self._recent[-1]
            rate = (after - before) / (end - start) if end > start else None
        wall = self.wall_s
        flops, peak = self._flops
        return {
            "targets_per_s": rate,
            "targets_per_s_all": self.targets / wall if wall > 0 else None,
            "mfu": rate * flops / peak if rate and flops and peak else None,
            "eta_s": self._eta(),
            "wall_s": wall,
        }

    def _eta(self) -> float | None:
        if self._first is None or self.targets == self._first[1]:
            return None
        elapsed = self._last_s - self._first[0]
        return (self.total_targets - self.targets) * elapsed / (self.targets - self._first[1])


class Progress:
    """Shows train lines: one live line on a terminal, otherwise a plain line every `every` updates and the last one."""

    def __init__(self, total_updates: int, every: int = 20, stream: TextIO | None = None):
        self.total_updates = total_updates
        self.every = every
        self._stream: TextIO | None = sys.stdout if stream is None else stream
        self._live = self._stream is not None and self._stream.isatty()  # None: started with a closed output
        self._shown = False

    def show(self, line: Mapping[str, Any]) -> None:
        """Shows a train line with the meter's rates."""
        text = progress_text(line, self.total_updates)
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            self._write("\r" + text[:width] + "\x1b[K")
            self._shown = True
        elif line["update"] % self.every == 0 or line["update"] == self.total_updates:
            self._write(text + "\n")

    def note(self, text: str) -> None:
        """Prints a line of its own, above the live line."""
        self._write(("\r\x1b[K" if self._shown else "") + text + "\n")
        self._shown = False

    def close(self) -> None:
        """Leaves the live line standing and goes to the next one."""
        if self._shown:
            self._write("\n")
        self._shown = False

    def _write(self, text: str) -> None:
        try:
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()
        except (OSError, ValueError):  # the reader of a pipe went away: training goes on
            self._stream = None


def progress_text(line: Mapping[str, Any], total_updates: int) -> str:
    """update, loss, learning rate, targets/s, MFU where known, ETA of a train line; "?" where a value is missing."""

    def number(name: str, form: str) -> str:
        value = line.get(name)
        return "?" if value is None else format(value, form)

    rate, mfu, eta = line.get("targets_per_s"), line.get("mfu"), line.get("eta_s")
    parts = [
        f"update {line['update']:,}/{total_updates:,}",
        f"loss {number('loss', '.4f')}",
        f"lr {number('lr', '.3e')}",
        f"{'?' if rate is None else _quantity(rate)} targets/s",
        *([] if mfu is None else [f"MFU {mfu:.1%}"]),  # never known on a device whose peak isn't
        f"ETA {'?' if eta is None else duration(eta)}",
    ]
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds in two units: 45s, 3m20s, 2h05m, 4d03h."""
    seconds = round(seconds)
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size}{unit}{seconds % size // part:02d}{below}"
    return f"{seconds}s"


def _quantity(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
