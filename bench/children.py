"""Measurements in processes of their own, one after the other, and the JSON record that grows with each of them.

A process prints its results as JSON lines. One that fails, hangs or runs out of memory costs its own result, no more.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llama_jax.errors import ConfigError
from llama_jax.files import read_json, write_json_atomic

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax", "torch", "triton", "numpy")
OUT_OF_MEMORY = "out of memory"
NO_TIME = "no time left"
_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory|OutOfMemory|CUDA_ERROR_OUT_OF_MEMORY", re.IGNORECASE)
_LIMIT_S = 300.0  # of one process; a compilation that hangs must not take the others' time
_LEAST_S = 15.0  # no process is started with less


class Ended(NamedTuple):
    """What a process left: its JSON lines, one line about its failure or None, seconds from start to end."""

    lines: list[dict[str, Any]]
    error: str | None
    seconds: float

    @property
    def result(self) -> dict[str, Any]:
        """The last line, or {"error": ...}; `wall_s` beside it."""
        found = self.lines[-1] if self.lines else {"error": self.error or "it printed no result"}
        return {**found, "wall_s": round(self.seconds, 1)}


class Clock:
    """The time that a benchmark may take."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()


def module(name: str, *arguments: object) -> list[str]:
    """The words that run a module of this checkout."""
    return [sys.executable, "-m", name, *map(str, arguments)]


def run(
    words: Sequence[str],
    clock: Clock,
    variables: Mapping[str, str] | None = None,
    limit_s: float = _LIMIT_S,
    quiet: bool = False,
) -> Ended:
    """Runs a command from the root of the checkout until it ends, `limit_s` or the clock; never raises for its sake."""
    limit_s = min(limit_s, clock.left_s)
    if limit_s < _LEAST_S:
        return Ended([], NO_TIME, 0.0)
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    variables = {**os.environ, "PYTHONPATH": path, **(variables or {})}
    if not quiet:
        print("$", shlex.join(words), flush=True)
    start, failure = time.monotonic(), None
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                words, cwd=ROOT, env=variables, stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            return Ended([], f"{words[0]}: {error.strerror}", 0.0)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            failure = f"stopped after {limit_s:.0f} s"
        finally:  # what it started too, and also when this process is interrupted
            _kill(process)
        out.seek(0)
        err.seek(0)
        printed, said = (file.read().decode(errors="replace") for file in (out, err))
    if failure is None and process.returncode:
        failure = OUT_OF_MEMORY if _MEMORY.search(said) else _last_line(said) or f"exit code {process.returncode}"
    if failure and not quiet:
        print(f"  failed: {failure}", flush=True)
    return Ended(_json_lines(printed), failure, time.monotonic() - start)


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _json_lines(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append(value)
    return found


def _last_line(text: str) -> str:
    """The line that most likely says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(error:|[\w.]*(Error|Exception)\b)", line)]
    return (named or lines or [""])[-1][:400]


class Record:
    """A JSON file that is written after every measurement.

    `settings` are what all its measurements share. A file that has the same ones is continued: what it holds is kept.
    Raises ConfigError where the file can't be written or read.
    """

    def __init__(self, path: str | Path, command: str, settings: Mapping[str, Any], commit: str | None = None) -> None:
        self.path = Path(path)
        self.content: dict[str, Any] = {"command": command, "commit": commit, "settings": dict(settings)}
        self.content |= {"environment": environment(), "measured": {}}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                old = read_json(self.path)
                if all(old.get(key) == self.content[key] for key in ("commit", "settings", "environment")):
                    self.content = {**self.content, **old, "command": command}
                    self.content["measured"] = dict(old["measured"])
            self._save()
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"--out={path} can't be used: {' '.join(str(error).split())}; move it away") from error

    @property
    def measured(self) -> dict[str, Any]:
        return self.content["measured"]

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Stores a measurement and writes the file; a full disk is said, not raised.

        What a measurement says of its environment is kept once: all are made on one machine.
        """
        found = finite(dict(value))
        if "environment" in found:
            self.content.setdefault("run_environment", found.pop("environment"))
        self.measured[key] = found
        self._try()

    def note(self, key: str, value: Any) -> None:
        """Stores something beside the measurements."""
        self.content[key] = finite(value)
        self._try()

    def has(self, key: str) -> bool:
        """Whether a measurement is there and did not fail."""
        return key in self.measured and "error" not in self.measured[key]

    def _try(self) -> None:
        try:
            self._save()
        except (OSError, ValueError) as error:
            print(f"{self.path} can't be written: {error}", file=sys.stderr, flush=True)

    def _save(self) -> None:
        write_json_atomic(self.path, self.content)


def finite(value: Any) -> Any:
    """JSON content with null for NaN and infinities."""
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def environment() -> dict[str, Any]:
    """Device, driver and versions, without starting JAX or torch: the device belongs to the measured processes."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    device, driver = platform.processor() or platform.machine(), None
    try:
        words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        said = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout
        device, driver = (part.strip() for part in said.splitlines()[0].split(",")[:2])
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        pass
    flags = {name: os.environ[name] for name in ("XLA_FLAGS", "JAX_PLATFORMS") if name in os.environ}
    versions["python"] = platform.python_version()
    return {"device": device, "driver": driver, "versions": versions, "flags": flags}
