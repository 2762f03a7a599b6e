"""The runs of a sweep as processes: one a device, started, watched, asked to save, and what their folders say."""

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from llama_jax import errors
from llama_jax.errors import CheckpointError, DataError, Error, Interrupted, Preempted
from llama_jax.files import read_json, write_json_atomic

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
DIVERGED = "diverged.json"  # in a run folder: an update was not finite, so the run has no loss
CONSOLE = "console.log"
POLL_S = 0.1
_CLASSES = {
    kind.exit_code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Error)
}


@dataclass(frozen=True)
class Job:
    """A run to do: what it is called, its folder, the words of its command."""

    name: str
    folder: Path
    words: tuple[str, ...]


class Stop:
    """Counts the signals that ask for an end; as a context it takes them over from whoever had them."""

    def __init__(self) -> None:
        self.count, self.number = 0, 0

    def __enter__(self) -> "Stop":
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        self.count, self.number = self.count + 1, self.number or number

    def error(self) -> Error:
        """What ends the sweep after a signal."""
        kind = Interrupted if self.number == signal.SIGINT else Preempted
        return kind(f"{signal.Signals(self.number).name} received: the runs have saved, the same command continues")


def result(folder: Path) -> dict[str, Any] | None:
    """What a finished run says; {"diverged": its last line} for one that diverged; None for all others. DataError."""
    try:
        if (folder / "result.json").exists():
            found = read_json(folder / "result.json")
            if not isinstance(found["validation_loss"], float):
                raise ValueError("it has no validation loss")
            return found
        if (folder / DIVERGED).exists():
            return {"diverged": str(read_json(folder / DIVERGED)["said"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: damaged ({error}); remove the folder, and the run is done again") from None
    return None


def run_all(jobs: Sequence[Job], devices: Sequence[str | None], lock: int, stop: Stop, view: "View") -> None:
    """Runs what is not done yet, one process a device, which is a value of CUDA_VISIBLE_DEVICES or None.

    A signal asks all processes to save, a second one ends them at once. After a failure nothing new is started. Raises
    the error of the signal, or of the first failure, with its exit code.
    """
    waiting = [job for job in jobs if result(job.folder) is None]
    running: dict[int, tuple[Job, subprocess.Popen, int]] = {}
    failure: Error | None = None
    asked = 0
    try:
        while waiting or running:
            if stop.count > asked:
                asked = stop.count
                waiting.clear()
                for _, process, _ in running.values():
                    process.terminate()
            for slot, (job, process, since) in list(running.items()):
                code = process.poll()
                if code is not None:
                    del running[slot]
                    failure = failure or _ended(job, code, since, bool(asked))
                    if failure:
                        waiting.clear()
            for slot, device in enumerate(devices):
                if slot not in running and waiting and not stop.count:
                    job = waiting.pop(0)
                    running[slot] = (job, *_start(job, device, lock))
            view.show({job.name for job, _, _ in running.values()})
            time.sleep(POLL_S)
    finally:
        for _, process, _ in running.values():  # only after an error of this program
            process.terminate()
    view.show(set(), last=True)
    if failure:
        raise failure
    if asked:
        raise stop.error()


def _start(job: Job, device: str | None, lock: int) -> tuple[subprocess.Popen, int]:
    """(the process, where its part of the console begins)."""
    job.folder.mkdir(parents=True, exist_ok=True)
    variables = dict(os.environ) if device is None else {**os.environ, "CUDA_VISIBLE_DEVICES": device}
    with open(job.folder / CONSOLE, "ab") as log:
        since = log.tell()
        process = subprocess.Popen(
            job.words, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[lock],
            start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
    return process, since


def _die_with_parent() -> None:
    """In the child: SIGTERM, and so a save, when the sweep is killed. The lock that it has shows when it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _ended(job: Job, code: int, since: int, asked: bool) -> Error | None:
    """What a process that ended means for the sweep: an error that ends it, or None."""
    if code == 0:
        result(job.folder)
        return None
    said = _last_line(job.folder / CONSOLE, since)
    if code == errors.NonFiniteError.exit_code:
        write_json_atomic(job.folder / DIVERGED, {"said": said})
        return None
    if asked and code in (Preempted.exit_code, Interrupted.exit_code, 128 + signal.SIGTERM, -signal.SIGTERM):
        return None
    text = f"{job.name}: exit code {code}: {said} ({job.folder / CONSOLE})"
    return _CLASSES.get(code, Error)(text)


def _last_line(path: Path, since: int) -> str:
    with contextlib.suppress(OSError):
        lines = [line for line in _tail(path, since).decode(errors="replace").splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("error: ")] or lines
        if said:
            return said[-1].removeprefix("error: ")[:300]
    return "it said nothing"


def _tail(path: Path, since: int = 0, size: int = 8192) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(since, os.fstat(file.fileno()).st_size - size))
        return file.read()


def latest(folder: Path) -> dict[str, Any]:
    """The newest whole training line of a run, empty without one."""
    with contextlib.suppress(OSError):
        for line in reversed(_tail(folder / "metrics.jsonl").split(b"\n")):
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict) and found.get("kind") == "train":
                    return found
    return {}


@contextlib.contextmanager
def locked(out: Path, shared: bool, stop: Stop, wait_s: float = 120.0) -> Iterator[int]:
    """The lock of a sweep's folder as a descriptor, which its runs inherit; tasks of an array share it.

    Runs that a killed sweep has left still save for a moment: waits for them. CheckpointError when they don't end, and
    the error of a signal.
    """
    descriptor = os.open(out / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    end, said = time.monotonic() + wait_s, False
    try:
        while True:
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except OSError as error:
                if not isinstance(error, BlockingIOError):
                    errors.warn(f"{out}: this file system has no locks ({error.strerror}); run one sweep here only")
                    break
                if time.monotonic() > end:
                    raise CheckpointError(f"{out} is in use by another sweep, or its runs; wait for them") from None
                if stop.count:
                    raise stop.error() from None
                if not said:
                    errors.warn(f"{out} is in use: waiting for the runs of an earlier sweep")
                    said = True
                time.sleep(POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)


class View:
    """One line a run: redrawn on a terminal, elsewhere printed when it changes, and once a minute while it runs."""

    def __init__(self, jobs: Sequence[Job], stream: TextIO, every_s: float = 60.0) -> None:
        self.jobs, self.stream = jobs, stream
        self.live = stream.isatty()
        self.every_s = 0.5 if self.live else every_s
        self.drawn, self.when, self.states = 0, float("-inf"), dict.fromkeys((job.name for job in jobs), "")

    def show(self, running: set[str], last: bool = False) -> None:
        """Shows the runs, those whose names are given as running."""
        before = self.states
        self.states = {job.name: self._state(job, job.name in running) for job in self.jobs}
        changed = {name for name, state in self.states.items() if state != before[name]}
        due = last or time.monotonic() - self.when >= self.every_s
        if due:
            self.when = time.monotonic()
        if self.live and (due or changed):
            self._redraw([self._line(job) for job in self.jobs])
        elif not self.live:
            for job in self.jobs:
                if job.name in changed or (due and job.name in running):
                    print(self._line(job), file=self.stream, flush=True)

    def _state(self, job: Job, running: bool) -> str:
        if running:
            return "running"
        if self.states[job.name].startswith(("done", "diverged")):
            return self.states[job.name]
        found = result(job.folder)
        if found is None:
            at = latest(job.folder).get("update")
            return f"stopped at update {at:,}" if isinstance(at, int) else "waiting"
        return "diverged" if "diverged" in found else f"done, loss {found['validation_loss']:.4f}"

    def _line(self, job: Job) -> str:
        parts = [job.name, self.states[job.name]]
        line = latest(job.folder) if parts[1] == "running" else {}
        for key, form in (
            ("update", "update {:,}"),
            ("loss", "loss {:.4f}"),
            ("targets_per_s", "{:,.0f} targets/s"),
            ("eta_s", "{:,.0f} s to go"),
        ):
            value = line.get(key)
            if isinstance(value, int | float):
                parts.append(form.format(value))
        return "  ".join(parts)

    def _redraw(self, lines: Sequence[str]) -> None:
        width = shutil.get_terminal_size().columns - 1
        up = f"\x1b[{self.drawn}A" if self.drawn else ""
        self.stream.write(up + "".join(f"\x1b[2K{line[:width]}\n" for line in lines))
        self.stream.flush()
        self.drawn = len(lines)
