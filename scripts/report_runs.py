"""Reads run folders for the report: what is there, as arrays, with a note on everything that is missing or broken."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llama_jax.errors import DataError

SMOOTHING = 0.01  # of a run's updates, on each side


@dataclass(frozen=True)
class Series:
    """A quantity over a run: x (targets by default), y, lowest and highest worker (y itself if it has no workers)."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Run:
    """One run folder: its config, what its `auto` settings became, the environment of its latest start.

    `result` is empty until the run is done.
    """

    name: str
    directory: Path
    config: dict[str, Any]
    resolved: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]
    train: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    notes: tuple[str, ...]

    def series(self, field: str, against: str = "targets") -> Series:
        """A field of the train lines against another; lines without one or with a non-finite value are left out.

        What the workers have of it stands in the field worker_NAME, a list, null for one that is away.
        """
        return _series(self.train, field, against)

    def evaluations(self, split: str, field: str = "loss") -> Series:
        """A field of the evaluations of one split (subset or validation) against targets."""
        return _series([line for line in self.evals if line.get("split") == split], field)

    def setting(self, path: str) -> Any:
        """The value of a dotted config field, or None where the run has no such field."""
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def read_run(directory: str | Path) -> Run:
    """Reads a run folder, finished or not. Raises DataError where there is neither config.json nor metrics.jsonl."""
    directory = Path(directory)
    if not (directory / "config.json").is_file() and not (directory / "metrics.jsonl").is_file():
        raise DataError(f"{directory} is not a run folder: it has neither config.json nor metrics.jsonl")
    notes: list[str] = []
    stored = _read_json(directory / "config.json", notes)
    config = _dict(stored.get("config"))
    starts = _read_json(directory / "environment.json", notes).get("starts")
    environment = _dict(starts[-1]) | {"starts": len(starts)} if isinstance(starts, list) and starts else {}
    result = _read_json(directory / "result.json", notes) if (directory / "result.json").is_file() else {}
    train, evals = _read_metrics(directory / "metrics.jsonl", notes)
    if not result:
        done = train[-1]["update"] if train else 0
        total = _dict(config.get("derived")).get("total_updates")
        of = f" of {total:,}" if isinstance(total, int) else ""
        notes.insert(0, f"unfinished: {done:,}{of} updates so far")
    return Run(
        directory.resolve().name,
        directory,
        config,
        _dict(stored.get("resolved")),
        environment,
        result,
        train,
        evals,
        tuple(notes),
    )


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
        return {}
    except OSError as error:
        notes.append(f"{path.name} was left out: {error.strerror}")
        return {}
    except (ValueError, RecursionError):
        notes.append(f"{path.name} is not valid JSON and was left out")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} is not a JSON object and was left out")
        return {}
    return value


def _read_metrics(path: Path, notes: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train lines by update and evaluations by (update, split), each once, sorted; broken lines become notes."""
    if not path.is_file():
        notes.append(f"{path.name} is missing")
        return [], []
    train: dict[int, dict[str, Any]] = {}
    evals: dict[tuple[int, str], dict[str, Any]] = {}
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            update, targets, kind = line["update"], line["targets"], line["kind"]
            if not all(type(count) is int and 0 <= count < 1 << 63 for count in (update, targets)):
                raise ValueError
            if any(key.startswith("worker_") and not isinstance(value, list) for key, value in line.items()):
                raise ValueError
            if not isinstance(line.get("local_loss", {}), dict):
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            torn = number == len(lines)  # only a line cut off in the middle has no newline after it
            notes.append(f"{path.name}: " + ("the last line is cut off" if torn else f"line {number} is broken"))
            continue
        if kind == "train":
            train[update] = line
        elif kind == "eval":
            evals[update, str(line.get("split"))] = line
    return [train[key] for key in sorted(train)], [evals[key] for key in sorted(evals)]


def _series(lines: list[dict[str, Any]], field: str, against: str = "targets") -> Series:
    rows = []
    for line in lines:
        if line.get(field) is None or line.get(against) is None:
            continue
        try:
            x, y = float(line[against]), float(line[field])
            workers = [float(value) for value in line.get(f"worker_{field}") or [y] if value is not None]
        except (TypeError, ValueError, OverflowError):
            continue
        if workers and np.isfinite([x, y, *workers]).all():
            rows.append((x, y, min(workers), max(workers)))
    table = np.array(rows, dtype=np.float64).reshape(-1, 4)
    return Series(*table.T)


def smoothed(series: Series) -> tuple[np.ndarray, int]:
    """Moving mean of y, SMOOTHING of the run to both sides, and its full width in updates.

    Narrower at the start, where a loss falls steeply; one-sided at the end, where noise would show as a hook.
    """
    n = len(series)
    half = int(n * SMOOTHING)
    if half == 0:
        return series.y, 1
    total = np.concatenate([[0.0], np.cumsum(series.y)])
    index = np.arange(n)
    before = np.minimum(half, index)
    after = np.minimum(before, n - 1 - index)
    return (total[index + after + 1] - total[index - before]) / (before + after + 1), 2 * half + 1
