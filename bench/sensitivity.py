"""What the convergence checks see: known defects, trained or drawn as curves, and the verdicts on them.

    python -m bench.sensitivity --out=bench/results/sensitivity_cpu.json      two minutes of one CPU core

The record holds the curves of the trained arms (bench/defects.py); table() judges them anew.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from bench import defects
from bench.children import environment
from bench.convergence import Arm, aa_noise, compare, read_arm
from bench.measure import STEPS
from bench.speed_tables import markdown
from llama_jax.errors import run_command
from llama_jax.files import write_json_atomic


def drawn() -> dict[str, tuple[Arm, Arm]]:
    """{name: (current, golden)}: curves in closed form for what training doesn't show."""
    t = np.arange(STEPS)
    falling, line, random = 7.2 + 3.2 * np.exp(-t / 6), 4 - 0.1 * t, np.random.RandomState(3)
    batches, flat = 0.02 * random.standard_normal(STEPS), 0.9 - 0.002 * t

    def pair(current: np.ndarray, golden: np.ndarray, norms: float = 1.0) -> tuple[Arm, Arm]:
        rates = defects.schedule(1e-5)
        return (
            Arm(current, np.full(STEPS, norms), rates, "rows", "init", "image"),
            Arm(golden, np.full(STEPS, 1.0), rates, "rows", "init", "image"),
        )

    noisy = flat + batches + 0.01 * random.standard_normal((2, STEPS))
    return {
        **{f"falls with tau {tau} instead of 6": pair(7.2 + 3.2 * np.exp(-t / tau), falling) for tau in (3, 10, 15)},
        "4 % above, losses over 2": pair(1.04 * line, line),
        "4.9 % above, losses under 2": pair(1.049 * (flat + batches), flat + batches),
        "flat, the same but for noise of 0.01": pair(*noisy),
        "steps 0 to 3 are 99 to 96": pair(np.where(t < 4, 99 - t, line), line),
        "one loss 11 % above": pair(np.where(t == 10, 1.11 * line, line), line),
        "gradient norms 10 % above": pair(line, line, 1.1),
        "losses rounded to bfloat16": pair(np.asarray(jnp.asarray(line, jnp.bfloat16), np.float64), line),
        "NaN from step 15": pair(np.where(t < 15, line, np.nan), line),
        "NaN throughout": pair(np.full(STEPS, np.nan), line),
        "constant, the reference too": pair(np.full(STEPS, 2.5), np.full(STEPS, 2.5)),
    }


def table(arms: dict[str, Any]) -> list[dict[str, Any]]:
    """Verdicts on all arms of train() and on drawn(): start, change, control, largest |d| / g, mean d / mean g,
    megatron_bridge (failed metrics), guards, passed (the verdict of a record), strict (what failed)."""
    cases: list[tuple[str, str, bool, Arm, Arm, float | None]] = []
    controls = {change.name for change in defects.CHANGES if change.control}
    for start, found in arms.items():
        golden = read_arm(found["reference"])
        again = [read_arm(arm) for arm in found["again"]]
        s_aa = aa_noise([golden, *again])["s_aa"]
        named = {f"reference again, {i + 1}": arm for i, arm in enumerate(again)}
        cases += [(start, name, True, arm, golden, s_aa) for name, arm in named.items()]
        for name, arm in found["changed"].items():
            cases.append((start, name, name in controls, read_arm(arm), golden, s_aa))
    cases += [("drawn", name, False, *pair, None) for name, pair in drawn().items()]
    rows = []
    for start, name, control, current, golden, s_aa in cases:
        c, g = np.asarray(current.losses, np.float64), np.asarray(golden.losses, np.float64)
        found = compare(current, golden, s_aa)
        rows.append(
            {
                "start": start,
                "change": name,
                "control": control,
                "largest": float(np.max(np.abs(c - g) / np.abs(g))),
                "mean": float(np.mean(c - g) / np.mean(g)),
                "megatron_bridge": found["megatron_bridge"]["failed_metrics"],
                "guards": found["guards"],
                "passed": found["passed"],
                "strict": found["strict"]["failed"],
            }
        )
    return rows


def sensitivity(record: dict[str, Any]) -> str:
    """The record as a markdown table."""

    def said(failed: list[str]) -> str:
        return ", ".join(name.replace("_", " ") for name in failed) or "passes"

    rows = [
        [
            f"{row['start']}: {row['change']}" + (" (control)" if row["control"] else ""),
            *(f"{row[name]:.1e}" if np.isfinite(row[name]) else "" for name in ("largest", "mean")),
            said(row["megatron_bridge"]),
            said(row["guards"]),
            said(row["strict"]),
        ]
        for row in table(record["arms"])
    ]
    head = ["20 steps", "largest d / g", "mean d / g", "Megatron-Bridge fails", "guards fail", "strict fails"]
    environment = record["environment"]
    return (
        f"A tiny Llama in bfloat16, {environment['device']}, JAX {environment['versions']['jax']}; "
        f"`{record['command']}`. d: difference of the losses, g: loss of the reference.\n\n" + markdown(head, rows)
    )


def verdicts(record: dict[str, Any]) -> str:
    """The record as a short markdown table: a row for each change, what each check said of it from both starts."""

    def said(row: dict[str, Any] | None, check: str) -> str:
        if row is None:
            return ""
        failed = row[check] + (row["guards"] if check == "megatron_bridge" else [])
        return "**refused**" if failed else "passes"

    found = {(row["start"], row["change"]): row for row in table(record["arms"])}
    starts = [*record["arms"], "drawn"]
    rows = []
    for name, control in {row["change"]: row["control"] for row in found.values()}.items():
        cells = [name + (" (control)" if control else "")]
        trained = [found.get((start, name)) for start in starts[:-1]]
        for row in trained if any(trained) else [found.get((starts[-1], name)), None]:
            cells += [said(row, "megatron_bridge"), said(row, "strict")]
        rows.append(cells)
    head = ["change", *(f"{start}: {check}" for start in starts[:-1] for check in ("verdict", "strict flag"))]
    environment = record["environment"]
    return (
        f"Known defects in a tiny Llama in bfloat16, {environment['device']}, JAX {environment['versions']['jax']}; "
        f"`{record['command']}`. The last rows are curves drawn by hand, under the first two columns.\n\n"
        + markdown(head, rows)
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="JSON file of the record")
    options = parser.parse_args(arguments)
    words = ["python", "-m", "bench.sensitivity", f"--out=bench/results/{Path(options.out).name}"]
    record = {
        "command": shlex.join(words),
        "environment": environment(),
        "fields": defects.FIELDS,
        "arms": defects.train(),
    }
    write_json_atomic(options.out, record)
    print(sensitivity(record))


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
