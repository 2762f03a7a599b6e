"""Where the time of an update goes: a profiler trace of a few updates, and its table by kernel."""

import collections
import gzip
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

UPDATES = 3


def profile(update: Callable[[], Any], keep: Path | None = None) -> list[dict[str, Any]]:
    """Kernels of warm updates, longest first: name without numbers, milliseconds and launches of one update.

    keep: where the trace file (JSON, gzip; chrome://tracing and Perfetto read it) is copied. Empty where the device
    reports no kernels, as CPUs do. While it runs, the profiler slows an update down: its sum is not an update's time.
    """
    jax.block_until_ready(update())
    with tempfile.TemporaryDirectory(prefix="llama_jax_trace_") as folder:
        with jax.profiler.trace(folder):
            for _ in range(UPDATES):
                result = update()
            jax.block_until_ready(result)
        files = sorted(Path(folder).rglob("*.trace.json.gz"))
        if not files:
            return []
        if keep is not None:
            keep.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(files[-1], keep)
        with gzip.open(files[-1], "rt", encoding="utf-8", errors="replace") as file:
            return kernels(json.load(file)["traceEvents"], UPDATES)


def kernels(events: list[dict[str, Any]], updates: int) -> list[dict[str, Any]]:
    """The table of `profile` from the events of a trace: all of GPU processes in threads that are streams."""
    named = [event for event in events if event.get("ph") == "M" and "name" in event.get("args", {})]
    processes = {event.get("pid"): event["args"]["name"] for event in named if event["name"] == "process_name"}
    threads = {
        (event.get("pid"), event.get("tid")): event["args"]["name"] for event in named if event["name"] == "thread_name"
    }
    time_ms: collections.Counter[str] = collections.Counter()
    launches: collections.Counter[str] = collections.Counter()
    for event in events:
        place = (event.get("pid"), event.get("tid"))
        if event.get("ph") != "X" or "GPU" not in processes.get(place[0], "") or "Stream" not in threads.get(place, ""):
            continue
        name = re.sub(r"[._]\d+(?=\W|_|$)", "", event["name"])[:100]
        time_ms[name] += event.get("dur", 0) / 1e3 / updates
        launches[name] += 1
    return [{"kernel": name, "ms": ms, "launches": launches[name] / updates} for name, ms in time_ms.most_common()]


def show(table: list[dict[str, Any]], most: int = 30) -> str:
    """The longest kernels as text."""
    if not table:
        return "the trace holds no kernels of a GPU"
    total = sum(row["ms"] for row in table)
    lines = [f"{total:9.3f} ms in all, {sum(row['launches'] for row in table):.0f} launches"]
    lines += [f"{row['ms']:9.3f} ms {row['launches']:7.1f} x  {row['kernel']}" for row in table[:most]]
    return "\n".join(lines)
