"""Finds the fastest way to execute a recipe on this device: a sweep over execution choices, each in its own process.

    python -m bench.throughput --config=configs/c4_20m.py --data=data/c4 --write=configs/tuned_c4_20m.py
    python -m bench.throughput --config=configs/c4_20m.py --rows=128,32 --quick --minutes=4 --out=throughput.json
    python -m llama_jax.main --config=configs/tuned_c4_20m.py

Measured are full optimizer updates of the real training step on batches that are already on the device; loading,
validation, compilation and checkpoints are excluded. With --data the ids are drawn from the unigram counts of that
token cache, and the selected candidate is measured once more with the loader feeding it from there, to show what
loading costs; the written config keeps the data of its recipe.

A candidate changes how a recipe is executed (microbatch, kernels, attention, head, its chunks, scanned or recomputed
layers, XLA flags; jit by --axis=runtime.jit=True,False), never the recipe. One that crashes, runs out of memory or time
is recorded with its reason, one that takes over 90 % of the device memory is rejected. One axis follows the other, each
from the fastest candidate so far; --minutes ends that, --axis=model.attention=auto,xla replaces it.

The record (--out), JSON, written anew after each candidate:
    format_version 1, command, commit, seconds, excluded
    settings   warmup, updates, windows, minutes, timeout_s, memory_share, memory_gib, tokens, quick, axes
    cases      for each of --rows:
        config, rows, workers, targets_per_update, parameters, environment (timing.environment of the children)
        candidates  name, settings (all choices), status, reason, measured (timing.measure without its environment)
            status: measured | rejected (measured, too much memory) | out of memory | failed | timed out |
                    skipped (the config refuses it) | left out (no time left)
        selected    name of the fastest measured candidate, or null
        real_data   status, reason and measured of it with the loader (--data), or null
        written     the config file (--write), or null
"""

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import candidates, trial
from bench.candidates import FLAGS, Candidate
from llama_jax import config as configs
from llama_jax import shards
from llama_jax.errors import ConfigError, DeviceError, run_command
from llama_jax.fields import command_parser
from llama_jax.files import write_atomic, write_json_atomic

EXCLUDED = "loading, validation, compilation and checkpoints"

Run = Callable[[Any, Candidate], dict[str, Any]]  # (config of the candidate, candidate) -> outcome of trial.run


def sweep(
    case: dict[str, Any],
    config: Any,
    axes: candidates.Axes,
    deadline: float,
    run: Run,
    show: Callable[[dict[str, Any]], None],
) -> None:
    """Fills candidates, environment and selected of `case`; show(entry) is called after each candidate.

    They run one at a time; none starts after `deadline` of the monotonic clock.
    """
    search = candidates.Search(config, axes)
    for candidate in search:
        try:
            chosen = candidates.changed(config, candidate.settings)
            late = time.monotonic() >= deadline
            found = trial.outcome("left out", "no time left") if late else run(chosen, candidate)
        except ConfigError as error:
            found = trial.outcome("skipped", str(error))
        case["environment"] = case["environment"] or (found["measured"] or {}).get("environment")
        search.tell(candidate, found)
        case["selected"] = search.best and search.best[1].name
        entry = {"name": candidate.name, "settings": candidate.settings, **stored(found)}
        case["candidates"].append(entry)
        show(entry)


def stored(found: dict[str, Any]) -> dict[str, Any]:
    """An outcome without the environment, which is the case's."""
    measured = found["measured"] and {key: value for key, value in found["measured"].items() if key != "environment"}
    return {**found, "measured": measured}


def usable(entry: dict[str, Any]) -> bool:
    return entry["status"] == "measured"


def selected(case: dict[str, Any]) -> dict[str, Any] | None:
    """The entry of the selected candidate."""
    return next((entry for entry in case["candidates"] if entry["name"] == case["selected"]), None)


def write_preset(path: Path, config: Any, case: dict[str, Any]) -> None:
    """Writes the selected candidate as a config file."""
    entry = selected(case)
    assert entry is not None
    measured, device, versions = entry["measured"], case["environment"]["device"], case["environment"]["versions"]
    chosen = candidates.changed(config, entry["settings"])
    ran = sum(map(usable, case["candidates"]))
    found = [
        f"{config.name} as it is fastest on {device['kind']}: {measured['targets_per_s'] / 1e6:.3g} M targets/s.",
        f"{candidates.MARK} with JAX {versions['jax']}: {entry['name']}; candidates that ran and fit: {ran}. "
        "A choice that can't run on another device is an error there.",
    ]
    text = candidates.preset(chosen, path.stem, entry["settings"][FLAGS], measured["resolved"], found)
    write_atomic(path, text.encode())


HEAD = ("ms/update", "M targets/s", "MFU", "TFLOP/s", "roofline", "peak GiB", "compile s")


def cells(measured: dict[str, Any]) -> list[str]:
    """The columns HEAD of a measurement; what isn't known is a dash."""

    def number(value: float | None, form: str, scale: float = 1.0) -> str:
        return "-" if value is None else format(value * scale, form)

    roofline = measured["roofline"]
    return [
        number(measured["update_ms"], ".2f"),
        number(measured["targets_per_s"], ".3f", 1e-6),
        number(measured["mfu"], ".1%"),
        number(measured["tflops_per_s"], ".1f"),
        number(roofline and roofline["fraction"], ".1%"),
        number(measured["peak_bytes"] or measured["program_bytes"], ".2f", 2**-30),
        number(measured["compile_s"], ".1f") + "*" * measured["compile_cached"],
    ]


def row(entry: dict[str, Any]) -> str:
    columns = "".join(f"{cell:>12}" for cell in (cells(entry["measured"]) if entry["measured"] else []))
    text = entry["status"] + (f": {entry['reason']}" if entry["reason"] else "")
    return f"{entry['name']:32}{columns}" + ("" if usable(entry) else f"  {text}")


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Any, candidates.Axes]:
    """Options, the config, and the axes of the command line. Raises ConfigError."""
    parser = command_parser("bench.throughput", __doc__, "sets a field of the recipe or where the sweep starts")
    parser.add_argument("--rows", help="sequences of an update, several with commas; default: the config's")
    parser.add_argument("--data", help="token cache: ids from its counts, and a last measurement with its loader")
    parser.add_argument("--tokens", help="file of uint16 ids instead of drawn ones")
    parser.add_argument("--quick", action="store_true", help="a small grid")
    parser.add_argument("--axis", action="append", default=[], metavar="FIELD=V1,V2", help="instead of the grid")
    parser.add_argument(
        "--minutes", "--budget-minutes", type=float, default=30.0, help="divided among the cases; none starts later"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one candidate")
    parser.add_argument("--memory-gib", type=float, help="device memory to fit in; default: that of the device")
    parser.add_argument("--warmup", type=int, default=20, help="updates before the windows")
    parser.add_argument("--updates", type=int, default=100, help="updates of a window")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file of the record")
    parser.add_argument("--write", type=Path, help="config file for the selected candidate, of one case")
    parser.add_argument("--commit", help="git commit of the code, where the copy that runs has no .git")
    parser.add_argument("--debug", action="store_true", help="print a traceback with an error")
    file, overrides, rest = configs.parse_arguments(arguments)
    options = parser.parse_args(rest)
    for name in ("minutes", "timeout", "memory_gib", "warmup", "updates", "windows"):
        value = getattr(options, name)
        low = 0 if name in ("minutes", "warmup") else 1e-9
        if value is not None and not low <= value <= 1e9:
            raise ConfigError(f"--{name.replace('_', '-')}={value} is out of range")
    if file is None:
        raise ConfigError("--config=FILE is required, for example --config=configs/c4_20m.py")
    if options.data:
        shards.read_manifest(options.data)
    write = options.write
    if write and (write.suffix != ".py" or not write.stem.isidentifier()):
        raise ConfigError(f"--write={write}: a .py file whose name is a name in Python")
    if write and write.exists() and candidates.MARK not in write.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(f"--write={write} exists and was not written by this command; choose another name")
    if write and options.rows and "," in options.rows:
        raise ConfigError("--write takes the selected candidate of one case: give one number of --rows")
    config = configs.load(file, overrides)
    axes: candidates.Axes = {}
    for path, values in map(candidates.parse_axis, options.axis):
        axes.setdefault(path, []).extend(values)
    return options, config, axes


def make_cases(config: Any, rows: str | None) -> list[Any]:
    """The config with each of the given numbers of sequences in an update."""
    if rows is None:
        return [config]
    context, workers, found = config.model.context, config.decentralized.workers, []
    for word in rows.split(","):
        if not word.strip().isdigit() or not 0 < int(word) <= 1 << 20 or int(word) % workers:
            raise ConfigError(f"--rows={rows}: positive numbers that are multiples of the {workers} workers")
        microbatch = min(config.training.microbatch, int(word) // workers)
        batch = {"training.batch_targets": int(word) * context, "training.microbatch": microbatch}
        found.append(candidates.changed(config, batch))
    return found


def command(arguments: Sequence[str]) -> str:
    """The command line as others can repeat it: the record where it belongs, not where this machine put it."""
    words = [word for word in arguments if not word.startswith("--commit=")]
    words = [f"--out=bench/results/{Path(word).name}" if word.startswith("--out=") else word for word in words]
    return shlex.join(["python", "-m", "bench.throughput", *words])


def case_record(config: Any) -> dict[str, Any]:
    return {
        "config": config.name,
        "rows": config.derived.batch_sequences,
        "workers": config.decentralized.workers,
        "targets_per_update": config.training.batch_targets,
        "parameters": config.derived.unique_params,
        "environment": None,
        "candidates": [],
        "selected": None,
        "real_data": None,
        "written": None,
    }


def main(arguments: Sequence[str]) -> None:
    options, config, axes = parse(arguments)
    started, everyone = time.monotonic(), make_cases(config, options.rows)
    keys = ("warmup", "updates", "windows", "minutes", "memory_gib", "quick")
    settings = {key: getattr(options, key) for key in keys}
    tokens = options.tokens or (f"unigram counts of {options.data}" if options.data else "English-like ids")
    settings |= {
        "timeout_s": options.timeout,
        "memory_share": trial.MEMORY_SHARE,
        "tokens": tokens,
        "axes": axes or None,
    }
    limits = trial.Limits(options.warmup, options.updates, options.windows, options.timeout, options.memory_gib)
    record: dict[str, Any] = {
        "format_version": 1,
        "command": command(arguments),
        "commit": options.commit,
        "excluded": EXCLUDED,
        "settings": settings,
        "cases": [],
    }

    def save() -> None:
        record["seconds"] = time.monotonic() - started
        environments = [case["environment"] for case in record["cases"] if case["environment"]]
        record["commit"] = options.commit or (environments[0]["git_commit"] if environments else None)
        if options.out:
            write_json_atomic(options.out, record)

    def run(config: Any, candidate: Candidate, loader: bool = False) -> dict[str, Any]:
        if options.data:
            config = candidates.changed(config, {"data.source": "cache", "data.path": options.data})
        source = options.tokens or options.data
        return trial.run(config, limits, candidate.name, source, loader, candidate.settings[FLAGS])

    def show(entry: dict[str, Any]) -> None:
        print(row(entry), flush=True)
        save()

    for config in everyone:
        case = case_record(config)
        record["cases"].append(case)
        print(f"{case['config']}, {case['rows']} rows, {case['targets_per_update']:,} targets an update, {tokens}")
        print(f"{'':32}" + "".join(f"{name:>12}" for name in HEAD), flush=True)
        deadline = time.monotonic() + 60 * options.minutes / len(everyone)
        sweep(case, config, axes or candidates.default_axes(config, options.quick), deadline, run, show)
        finish(case, config, options, run)
        save()
    print(f"Updates on batches that are already on the device: {EXCLUDED} are excluded. *: from the compile cache.")
    if any(case["selected"] is None for case in record["cases"]):
        raise DeviceError("no candidate was measured and fits; the table above has the reasons")


def finish(case: dict[str, Any], config: Any, options: argparse.Namespace, run: Callable[..., dict[str, Any]]) -> None:
    """What follows a sweep: the selected candidate with the loader, and its config file."""
    entry = selected(case)
    if entry is None:
        return
    print(f"selected: {entry['name']}, {entry['measured']['targets_per_s']:,.0f} targets/s")
    if options.data:
        chosen = candidates.changed(config, entry["settings"])
        found = run(chosen, Candidate(entry["name"], entry["settings"]), loader=True)
        text = found["reason"]
        case["real_data"] = stored(found)
        if found["measured"]:
            loader = found["measured"]["loader"]
            text = f"{loader['targets_per_s']:,.0f} targets/s, {loader['ratio']:.3f} of those of the placed batches"
        print(f"with the loader: {text}")
    if options.write:
        write_preset(options.write, config, case)
        case["written"] = str(options.write)
        print(f"written: {options.write}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the process of a candidate ends with this one
    sys.exit(run_command(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv))
