"""Writes the measured tables of README.md from the records in bench/results; --check only compares.

A table stands between `<!-- results: NAME -->` and `<!-- end -->`; NAME is the function here that makes it, or one of
speed_tables. `<!-- pending: NAME -->` is the place of a table whose record isn't there yet; once it is, the table takes
that place.
"""

import argparse
import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.speed_tables import SPEED, gib, markdown
from llama_jax.files import read_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS, RECIPES = ROOT / "bench" / "results", ROOT / "bench" / "recipes"
PLACE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PENDING = re.compile(r"<!-- pending: (\w+) -->\n")


def _run_row(name: str, run: dict[str, Any]) -> list[str]:
    return [
        name,
        f"{run['targets']:,}",
        f"{run['validation_loss']:.4f}",
        f"{run['bits_per_byte']:.4f}",
        f"{run['targets_per_s'] / 1e6:.2f} M",
        f"{run['mfu']:.1%}",
        gib(run["peak_memory_bytes"]),
        f"{run['wall_s']:.0f} s",
    ]


RUN_HEAD = ["run", "targets", "validation, nats", "bits/byte", "targets/s", "MFU", "peak memory", "wall time"]


def mini_20m() -> str:
    """Two full runs of mini_20m on one device."""
    record = read_json(RESULTS / "mini_20m_h200.json")
    curves = [record[name]["curve"] for name in ("whole", "stopped_and_continued")]
    differences = [abs(one[1] - other[1]) for one, other in zip(*curves, strict=True)]
    apart = differences.index(max(differences)) + 1
    device, versions = record["environment"]["device"], record["environment"]["versions"]
    rows = [
        _run_row("unbroken", record["whole"]),
        _run_row(f"stopped near update {record['stopped_near_update']}, continued", record["stopped_and_continued"]),
    ]
    where = f"One {device['kind']}, JAX {versions['jax']}, commit {record['commit'][:7]}"
    return (
        f"{where}; `{record['command']}`. The validation losses of the runs "
        f"differ by {record['validation_loss_difference']:.4f} nats, the losses of one update by at most "
        f"{max(differences):.4f} (update {apart}).\n\n" + markdown(RUN_HEAD, rows)
    )


def c4_start() -> str:
    """First updates of the C4 presets on one device."""
    record = read_json(RESULTS / "c4_start_h200.json")
    device = record["environment"]["device"]
    rows = [
        [
            f"`{preset}`",
            f"{record[preset]['unique_params']:,}",
            f"{record[preset]['curve'][0][1]:.4f}",
            f"{record[preset]['curve'][-1][1]:.4f}",
            gib(record[preset]["peak_memory_bytes"]),
        ]
        for preset in ("c4_20m", "c4_50m", "c4_90m")
    ]
    return (
        f"Three updates of each C4 preset on files in C4's format, stopped and continued in between, evaluated, saved "
        f"and verified on one {device['kind']}, commit {record['commit'][:7]}; `{record['command']}`.\n\n"
        + markdown(["preset", "parameters", "loss of update 1", "loss of update 3", "peak memory"], rows)
    )


def sft_1b() -> str:
    """Fine-tuning updates of a 1B-class model on one device."""
    record = read_json(RESULTS / "sft_1b_h200.json")
    rows = [
        [
            name,
            f"{found['unique_params']:,}",
            f"{found['curve'][0][1]:.4f}",
            f"{found['curve'][-1][1]:.4f}",
            f"{found['targets_per_s']:,.0f}",
            f"{found['mfu']:.1%}",
            gib(found["peak_memory_bytes"]),
        ]
        for name, found in record.items()
        if isinstance(found, dict) and "curve" in found
    ]
    device, versions = record["environment"]["device"], record["environment"]["versions"]
    return (
        f"Four updates of `configs/sft_8k.py` from random weights on one {device['kind']}, JAX {versions['jax']}; "
        f"`{record['command']}`.\n\n"
        + markdown(["layers", "parameters", "loss of update 1", "update 4", "targets/s", "MFU", "peak memory"], rows)
    )


def topologies() -> str:
    """Ordinary training and packed workers over several topologies on one device."""
    record = read_json(RESULTS / "topologies_h200.json")
    rows = [
        [
            f"{found['topology']}" + (f", N = {found['workers']}" if found["workers"] > 1 else ""),
            f"{found['validation_loss']:.3f}",
            ""
            if found["local_loss"] is None
            else f"{found['local_loss']['min']:.3f} to {found['local_loss']['max']:.3f}",
            f"{found['consensus'][-1][1]:.3f}" if found["consensus"] else "",
            f"{found['bytes_per_worker_and_update'] / 1e6:.1f} MB" if found["workers"] > 1 else "",
            f"{found['targets_per_s'] / 1e6:.2f} M",
        ]
        for found in record["arms"]
    ]
    head = ["run", "mean model, nats", "local models", "consensus distance", "bytes per worker and update", "targets/s"]
    where = f"One {record['environment']['device']['kind']}, commit {record['commit'][:7]}"
    return f"{where}; `{record['command']}`.\n\n" + markdown(head, rows)


def speed(name: str) -> str:
    """A table of speed_tables from its record; OSError where there is none."""
    return SPEED[name].make(read_json(RESULTS / SPEED[name].file))


def recorded(name: str) -> bool:
    """Whether there is a record for a table, with its part of it."""
    if name == "recipes":
        return any(RECIPES.glob("*.json"))
    if name not in SPEED:
        return (RESULTS / f"{name}_h200.json").exists()
    path = RESULTS / SPEED[name].file
    return path.exists() and bool(read_json(path).get(SPEED[name].part))


def throughput() -> str:
    """Execution choices of the training step on one device, and the step with the loader; nothing without records."""
    paths = [RESULTS / f"{name}_h200.json" for name in ("throughput", "loader")]
    return "\n".join(_sweep(read_json(path)) for path in paths if path.is_file())


def _sweep(record: dict[str, Any]) -> str:
    text = []
    for case in record["cases"]:
        rows = [
            [f"**{entry['name']}**" if entry["name"] == case["selected"] else entry["name"], *_throughput_row(entry)]
            for entry in case["candidates"]
            if entry["status"] != "left out"
        ]
        device, settings = case["environment"], record["settings"]
        where = f"one {device['device']['kind']}, JAX {device['versions']['jax']}" if device else "no device"
        loader = (case["real_data"] or {}).get("measured")
        text.append(
            f"{case['config']} with {case['rows']} rows ({case['targets_per_update']:,} targets an update), {where}; "
            f"ids: {settings['tokens']}; median of {settings['windows']} windows of {settings['updates']} updates; "
            f"{record['excluded']} are excluded."
            + (f" With the loader: {loader['loader']['ratio']:.3f} of these targets/s." if loader else "")
            + "\n\n"
            + markdown(["candidate", "ms", "targets/s", "MFU", "TFLOP/s", "roofline", "peak memory", "compile"], rows)
        )
    return f"`{record['command']}`\n\n" + "\n".join(text)


def slurm() -> str:
    """A training job of scripts/slurm on a GPU, signalled and requeued: the lines of its console that say so."""
    record = read_json(RESULTS / "slurm_h200.json")
    said = ("slurm:", "error:", "continues after", "done:")
    lines = [line for line in record["log"] if line.startswith(said)]
    device, versions = record["environment"]["device"], record["environment"]["versions"]
    return (
        f"One {device['kind']}, JAX {versions['jax']}, commit {record['commit'][:7]}; `{record['command']}`, "
        f"{record['seconds']:.0f} s in all, USR1 {record['signal_after_s']:.0f} s after the submission.\n\n"
        + "\n".join(["```text", *lines, "```\n"])
    )


def sensitivity() -> str:
    """What the convergence checks say of known defects."""
    from bench import sensitivity as record

    return record.verdicts(read_json(RESULTS / "sensitivity_cpu.json"))


def recipes() -> str:
    """The ranking of the recipes in bench/recipes."""
    from bench import gpus, ranking

    text = []
    for pair in ranking.ranking(ranking.read_folder([RECIPES]), gpus.read()):
        reference = next((entry for entry in pair.entries if entry.measured["status"] == "reference"), None)
        rows = []
        for entry in pair.entries:
            gain = f"{entry.score / reference.score:.2f} x" if reference and entry.rank else ""
            verdict, name, score, cv, step, cost, mfu, gpu_count, hours, strict, date = ranking.cells(entry)
            rows.append([f"`{name}`", verdict, score, gain, step, cv, cost, mfu, gpu_count, hours, strict, date])
        names = ["recipe", "rank", "tokens/s/GPU", "over reference", "s/step", "CV", "$ / 1M tokens", "MFU", "GPUs"]
        versions = pair.entries[0].measured["stack"]["versions"]
        text.append(
            f"{pair.model} on {pair.gpu.type}, {pair.workload}, JAX {versions['jax']}, rows "
            f"`{pair.rows_sha256[:12]}`\n\n" + markdown([*names, "GPU-hours", "strict flag", "date"], rows)
        )
    return "\n".join(text)


def _throughput_row(entry: dict[str, Any]) -> list[str]:
    found = entry["measured"]
    if not found or entry["status"] != "measured":
        return [entry["status"], *[""] * 6]
    roofline, peak = found["roofline"], found["peak_bytes"] or found["program_bytes"]
    return [
        f"{found['update_ms']:.2f}",
        f"{found['targets_per_s'] / 1e6:.2f} M",
        f"{found['mfu']:.1%}" if found["mfu"] else "",
        f"{found['tflops_per_s']:.0f}",
        f"{roofline['fraction']:.1%}" if roofline else "",
        gib(peak) if peak else "",
        "cached" if found["compile_cached"] else f"{found['compile_s']:.0f} s" if found["compile_s"] else "",
    ]


TABLES: dict[str, Callable[[], str]] = {
    "mini_20m": mini_20m,
    "c4_start": c4_start,
    "topologies": topologies,
    "throughput": throughput,
    "slurm": slurm,
    "sensitivity": sensitivity,
    "recipes": recipes,
    "sft_1b": sft_1b,
}
TABLES |= {name: functools.partial(speed, name) for name in SPEED}


def render(text: str) -> str:
    """The text with every table made anew, pending ones where they are recorded; KeyError for an unknown name."""
    text = PENDING.sub(lambda at: f"<!-- results: {at[1]} -->\n<!-- end -->\n" if recorded(at[1]) else at[0], text)
    return PLACE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 when README.md differs from the records")
    options = parser.parse_args(arguments)
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    new = render(old)
    if options.check:
        return int(old != new)
    path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
