"""One measurement in a process of its own, whatever happens to that process.

run() starts `python -m bench.trial FOLDER` and returns an outcome: status, reason, measured.
    status    measured | rejected (measured, but over MEMORY_SHARE of the memory) | out of memory | failed | timed out
    reason    None when measured
    measured  what timing.measure returned, or None
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llama_jax import config as configs
from llama_jax.errors import run_command
from llama_jax.faults import fault_point
from llama_jax.files import read_json, write_json_atomic

ROOT = Path(__file__).resolve().parent.parent
MEMORY_SHARE = 0.9  # of the device memory: what takes more is rejected
CHILD_SHARE = "0.97"  # of the GPU memory that the process may take, so that it can be measured beyond that
SLOW = {"warmup": 1, "updates": 1, "windows": 1}  # without jit an update takes minutes


class Limits(NamedTuple):
    """Counts as in timing.measure, seconds that the process may take, memory to fit in (None: that of the device)."""

    warmup: int = 20
    updates: int = 100
    windows: int = 3
    timeout_s: float = 600.0
    memory_gib: float | None = None


def outcome(status: str, reason: str | None = None, measured: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"status": status, "reason": reason, "measured": measured}


def run(
    config: Any, limits: Limits, name: str = "trial", tokens: str | None = None, loader: bool = False, flags: str = ""
) -> dict[str, Any]:
    """The outcome of a finalized config. tokens as in timing.rows; loader: measured with it too; flags: for XLA."""
    counts = {"warmup": limits.warmup, "updates": limits.updates, "windows": limits.windows}
    counts = counts if config.runtime.jit else SLOW
    task = {"name": name, "config": configs.to_dict(config), "tokens": tokens, "with_loader": loader, "counts": counts}
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": CHILD_SHARE,
        **({"XLA_FLAGS": flags} if flags else {}),
    }
    with tempfile.TemporaryDirectory(prefix="llama_jax_trial_") as place:
        folder = Path(place)
        (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        command, nothing = [sys.executable, "-m", "bench.trial", place], subprocess.DEVNULL
        with open(folder / "log", "wb") as log:
            try:  # on any exception, a signal's too, the process is killed
                code = subprocess.run(
                    command, env=environment, stdin=nothing, stdout=log, stderr=log, timeout=limits.timeout_s
                ).returncode
            except subprocess.TimeoutExpired:
                return outcome("timed out", f"not done after {limits.timeout_s:g} s")
        if code == 0:
            return judge(read_json(folder / "result.json"), limits.memory_gib)
        return failure((folder / "log").read_text(encoding="utf-8", errors="replace"), code)


def failure(log: str, code: int) -> dict[str, Any]:
    """The outcome of a process that ended with `code` (negative: the signal), from what it printed."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("error: ")]
    said = said or [
        line for line in lines if re.search(r"^F\d{4} |Unknown flag|RESOURCE_EXHAUSTED|^[\w.]+Error\b", line)
    ]
    reason = (said or lines or ["nothing was printed"])[-1].removeprefix("error: ")
    reason = re.sub(r"^F\d{4} \S+ +\d+ ", "", reason)[:500]  # without the time and thread of a fatal line
    ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    short = re.search(r"RESOURCE_EXHAUSTED|out of memory|not enough memory", reason, re.IGNORECASE)
    return outcome("out of memory" if short else "failed", f"{ended}: {reason}")


def judge(measured: dict[str, Any], memory_gib: float | None) -> dict[str, Any]:
    """measured, or rejected when the peak is over MEMORY_SHARE of the device memory (or of `memory_gib`).

    The peak is what the device tells, or what XLA plans for the step where it tells nothing.
    """
    total = measured["memory_bytes"] if memory_gib is None else memory_gib * 2**30
    peak = measured["peak_bytes"] or measured["program_bytes"]
    if total and peak and peak > MEMORY_SHARE * total:
        reason = f"{peak / 2**30:.2f} GiB are {peak / total:.0%} of the device memory, over {MEMORY_SHARE:.0%}"
        return outcome("rejected", reason, measured)
    return outcome("measured", None, measured)


def main(arguments: Sequence[str]) -> None:
    """What the process does: task.json of the folder -> result.json."""
    folder = Path(arguments[0])
    task = read_json(folder / "task.json")
    config = configs.from_dict(task["config"])
    from llama_jax import runtime

    runtime.prepare(config)
    fault_point(task["name"])
    from bench import timing  # after prepare(): importing it may start the backend

    with runtime.device_errors("lower training.microbatch or set model.remat"):
        rows = timing.rows(config, task["tokens"])
        measured = timing.measure(config, rows, with_loader=task["with_loader"], **task["counts"])
    write_json_atomic(folder / "result.json", measured)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
