"""Trains the runs of a sweep, stage by stage, and compares them.

    python scripts/sweep.py --sweep=configs/sweeps/c4_three_stage.py --out=runs/sweeps/c4_three_stage
    python scripts/sweep.py --config=configs/quickstart.py --grid=optimizer.lr=0.003,0.005 --seeds=1,2,3 --out=FOLDER

One process a run and GPU. The same command continues: runs that are done are skipped, a stopped one goes on where it
stood. SIGTERM (or Ctrl-C) asks the runs to save and ends, a second one ends at once. A run whose update is not finite
counts as diverged and is never promoted. Below FOLDER: STAGE/RUN, the run folders, each with its console.log; table.md,
runs.csv, points.csv, figures.

Exit codes: those of training; 75 and 130 after a signal. The other options are for scripts/slurm/submit.sh, which makes
each stage an array with one run a task.
"""

import argparse
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llama_jax import config as configs
from llama_jax.errors import CheckpointError, ConfigError, DataError, run_command
from llama_jax.files import TMP_SUFFIX, json_differences, read_json, write_atomic
from scripts import sweep_plan, sweep_runs
from scripts.sweep_plan import Sweep, Values
from scripts.sweep_runs import Job

PROGRAM = "llama_jax sweep"
RECORD = "sweep.json"
OWN = (".log", f".sweep{TMP_SUFFIX}")  # endings of files that may be there before the record
TRAIN = (sys.executable, "-m", "llama_jax.main")


class Outcome(NamedTuple):
    """A run that is done: its loss on the full validation split (infinite: it diverged) and its result.json."""

    name: str
    folder: Path
    seed: int
    loss: float
    result: dict[str, Any]


def jobs_of(sweep: Sweep, stage: int, points: Sequence[Values], out: Path) -> list[Job]:
    """The runs of a stage: points by seeds."""
    part, jobs = sweep.stages[stage], []
    for point in points:
        for seed in sweep.seeds:
            name = sweep_plan.run_name(point, seed)
            folder = out / part.name / name
            settings = sweep.settings(stage, point, seed).items()
            overrides = [f"--config.{field}={sweep_plan.text(value)}" for field, value in settings]
            words = (*TRAIN, f"--config={part.config}", f"--workdir={folder}", *overrides)
            jobs.append(Job(f"{part.name}/{name}", folder, words))
    return jobs


def results_of(sweep: Sweep, stage: int, points: Sequence[Values], out: Path) -> dict[Values, list[Outcome]]:
    """What the runs of a finished stage have come to, one for each seed.

    DataError where one is missing or had other data, ConfigError where one had another recipe, as after a change of the
    preset's file between two runs.
    """
    found: dict[Values, list[Outcome]] = {point: [] for point in points}
    places = [(point, seed) for point in points for seed in sweep.seeds]
    for job, (point, seed) in zip(jobs_of(sweep, stage, points, out), places, strict=True):
        result = sweep_runs.result(job.folder)
        if result is None:
            raise DataError(f"{job.name} is not done; run the sweep, or its stage {stage + 1}, first")
        check_run(sweep, stage, point, seed, job.folder)
        first = out / sweep.stages[0].name / sweep_plan.run_name(sweep.points(0, [])[0], seed)
        if job.folder != first and _data(job.folder) != _data(first):
            raise DataError(
                f"{job.folder} was trained on other data than {first}; a sweep compares runs on the same data"
            )
        loss = math.inf if "diverged" in result else result["validation_loss"]
        found[point].append(Outcome(job.name, job.folder, seed, loss, result))
    return found


def points_of(sweep: Sweep, stage: int, out: Path) -> list[Values]:
    """The points of a stage, after the promotions of those before it. DataError where these are not finished."""
    points = sweep.points(0, [])
    for before in range(stage):
        found = results_of(sweep, before, points, out)
        points = sweep.points(before + 1, sweep_plan.promote(sweep, before, losses(found)))
    return points


def losses(found: dict[Values, list[Outcome]]) -> dict[Values, list[float]]:
    """The losses of points, one for each seed."""
    return {point: [outcome.loss for outcome in outcomes] for point, outcomes in found.items()}


def _data(folder: Path) -> Any:
    try:
        return read_json(folder / "config.json")["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}; remove the folder, then it is done again") from None


def check_folder(sweep: Sweep, out: Path, make: bool = True) -> None:
    """Makes `out`, or finds that it belongs to this sweep; without `make` only the latter, of a folder that is there.

    ConfigError for other settings, CheckpointError for a foreign or unwritable folder.
    """
    path, now = out / RECORD, sweep.record()
    try:
        if make:
            out.mkdir(parents=True, exist_ok=True)
        if path.exists():
            old = read_json(path)
            if not isinstance(old, dict) or old.get("program") != PROGRAM:
                raise ValueError("it is no record of a sweep")
            if changed := json_differences(old["sweep"], now):
                lines = "".join(f"\n  {line}" for line in changed)
                raise ConfigError(f"{out} holds a sweep of other settings; restore them or choose another --out{lines}")
        elif make or out.exists():
            # The tasks of an array begin together: another may write the same record, or have just written it.
            ours = {".lock", RECORD, *(stage.name for stage in sweep.stages)}
            foreign = [name for name in sorted(os.listdir(out)) if name not in ours and not name.endswith(OWN)]
            if foreign:
                raise ValueError(f"it holds {foreign[0]} and no {RECORD}")
            if make:
                temporary = out / f"{socket.gethostname()}-{os.getpid()}.sweep{TMP_SUFFIX}"
                write_atomic(path, json.dumps({"program": PROGRAM, "sweep": now}, indent=2).encode(), temporary)
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{out}: {error}; choose another --out") from None


def check_run(sweep: Sweep, stage: int, point: Values, seed: int, folder: Path) -> None:
    """Whether a run that has begun has the recipe that this sweep gives it. ConfigError with the fields that differ."""
    if not (folder / "config.json").exists():
        return
    try:
        stored = read_json(folder / "config.json")["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}; remove the folder, then it is done again") from None
    wanted = configs.to_dict(sweep_plan.run_config(sweep, stage, point, seed))
    differ = configs.diff(stored, wanted)
    if differ:
        lines = "".join(f"\n  {field}: {old} -> {new}" for field, old, new in differ)
        raise ConfigError(f"{folder} holds a run of another recipe (here old -> new){lines}")


def run(sweep: Sweep, out: Path, devices: Sequence[str | None], only: tuple[int, int] | None = None) -> None:
    """Does every stage, or one run (stage, task) of an array's. Raises the errors of its runs and of signals."""
    check_folder(sweep, out)
    with sweep_runs.Stop() as stop, sweep_runs.locked(out, only is not None, stop) as lock:
        for stage in range(len(sweep.stages)) if only is None else [only[0]]:
            points = points_of(sweep, stage, out)
            for point in points:
                for seed in sweep.seeds:
                    check_run(
                        sweep, stage, point, seed, out / sweep.stages[stage].name / sweep_plan.run_name(point, seed)
                    )
            jobs = jobs_of(sweep, stage, points, out)
            if only is not None:
                jobs = [jobs[only[1]]]
            else:
                print(f"stage {sweep.stages[stage].name}: {len(jobs)} runs, {len(devices)} at once", flush=True)
            sweep_runs.run_all(jobs, devices, lock, stop, sweep_runs.View(jobs, sys.stdout))


def table(sweep: Sweep, out: Path) -> None:
    """Writes and prints the comparison of a finished sweep."""
    from scripts import sweep_table  # needs matplotlib

    found = [results_of(sweep, stage, points_of(sweep, stage, out), out) for stage in range(len(sweep.stages))]
    print(sweep_table.write(sweep, found, out))


def find_devices(text: str, at_once: int | None) -> list[str | None]:
    """A value of CUDA_VISIBLE_DEVICES for each process at a time; [None] where there is no NVIDIA GPU. ConfigError."""
    if text != "auto":
        devices = [part.strip() for part in text.split(",")]
        if not all(devices) or len(set(devices)) < len(devices):
            raise ConfigError(f"--devices={text}: numbers or ids of GPUs with commas between, each once")
    elif os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        devices = [part for part in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if part]
    else:
        try:
            found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
            lines = [line for line in found.stdout.splitlines() if line.startswith("GPU ")]  # not the parts of one
            devices = [] if found.returncode else [str(number) for number in range(len(lines))]
        except (OSError, subprocess.SubprocessError):
            devices = []
    if at_once is not None:
        if at_once < 1 or (devices and at_once > len(devices)):
            raise ConfigError(
                f"--at-once={at_once}: from 1 to the number of GPUs, which is {len(devices) or 'not known'}"
            )
        return [*devices[:at_once]] if devices else [None] * at_once
    return [*devices] or [None]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--sweep", metavar="FILE", help="a file of configs/sweeps/")
    p.add_argument("--config", metavar="FILE", help="instead of --sweep: the preset of a single grid")
    p.add_argument("--grid", action="append", default=[], metavar="FIELD=V1,V2", help="values of a field; repeat it")
    p.add_argument("--seeds", metavar="S1,S2", help="seeds of every point; default: the sweep's, 42 for a grid")
    p.add_argument("--config.FIELD", metavar="VALUE", help="a setting of all runs")
    p.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="the folder of the sweep")
    p.add_argument("--devices", default="auto", help="GPUs, with commas; default: all that are visible")
    p.add_argument("--at-once", type=int, metavar="N", help="processes at a time; default: one a GPU, 1 without")
    p.add_argument("--table", action="store_true", help="only compare a finished sweep")
    p.add_argument("--tasks", action="store_true", help="print the number of runs and the name of each stage")
    p.add_argument("--stage", type=int, metavar="K", help="with --task: the stage, from 1")
    p.add_argument("--task", type=int, metavar="I", help="do one run of a stage, from 0")
    p.add_argument("--where", action="store_true", help="with --stage and --task: print the run's folder")
    p.add_argument("--debug", action="store_true", help="print a traceback with an error")
    return p


def read_sweep(options: argparse.Namespace, file: str | None, overrides: dict[str, str]) -> Sweep:
    """The checked sweep that the command line asks for. ConfigError."""
    try:
        seeds = [int(part) for part in options.seeds.split(",")] if options.seeds is not None else None
    except ValueError:
        raise ConfigError(f"--seeds={options.seeds}: numbers with commas between") from None
    if (options.sweep is None) == (file is None):
        raise ConfigError("give either --sweep=FILE or --config=FILE with --grid")
    if options.sweep is not None:
        if options.grid:
            raise ConfigError("--grid goes with --config, not with --sweep")
        return sweep_plan.load(options.sweep, overrides, seeds)
    grid: dict[str, list[str]] = {}
    for word in options.grid:
        field, equals, values = word.partition("=")
        if not equals or field in grid:
            raise ConfigError(f"--grid={word}: FIELD=V1,V2 is needed, each field once")
        grid[field] = values.split(",")
    stage = {"name": "grid", "config": file, "grid": grid}
    return sweep_plan.make({"name": "grid", "ties": list(grid), "stages": [stage]}, overrides, seeds)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""

    def command() -> None:
        file, overrides, rest = configs.parse_arguments(arguments)
        options = parser().parse_args(rest)
        sweep = read_sweep(options, file, overrides)
        sweep_plan.check(sweep)
        if options.tasks:
            check_folder(sweep, options.out, make=False)
            for stage, part in enumerate(sweep.stages):
                print(sweep.count(stage), part.name)
            return
        if (options.task is None) != (options.stage is None) or (options.where and options.task is None):
            raise ConfigError("--stage and --task belong together, and --where needs both")
        if options.task is not None:
            if not 1 <= options.stage <= len(sweep.stages) or not 0 <= options.task < sweep.count(options.stage - 1):
                raise ConfigError(f"--stage={options.stage} --task={options.task}: the sweep has no such run")
            only = (options.stage - 1, options.task)
            if options.where:
                points = points_of(sweep, only[0], options.out)
                print(jobs_of(sweep, only[0], points, options.out)[only[1]].folder)
                return
            run(sweep, options.out, [None], only)
            return
        if not options.table:
            run(sweep, options.out, find_devices(options.devices, options.at_once))
        table(sweep, options.out)

    return run_command(command, debug="--debug" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
