"""A sweep as data: stages, points, runs, what makes runs comparable, and the rule that promotes. Needs no JAX.

A sweep file is Python with get_sweep() -> {"name", "seeds", "settings", "ties", "stages"}; settings are config fields
of every run. A stage is {"name", "config", "settings", "grid", "best"}: a preset, and for each field of the grid the
values that are combined with each other; best: so many points of the stage before are taken over with all their values.
"""

import importlib.util
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_jax import config as configs
from llama_jax import fields
from llama_jax.errors import ConfigError

STAGE_OWN = {"training.microbatch"}  # beside the model's shape: what stages may differ in
SHARED_MODEL = {"model.vocab_size", "model.context"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}")
TAKEN = {"sweep.json", "table.md", "runs.csv", "points.csv", "figures"}  # beside the stages' folders

Values = tuple[tuple[str, Any], ...]  # a point: (field, value) in the order of the stages' grids


@dataclass(frozen=True)
class Stage:
    """Runs that are compared with each other. `best` points of the stage before are combined with the grid."""

    name: str
    config: str
    settings: Mapping[str, Any]
    grid: Mapping[str, tuple[Any, ...]]
    best: int


@dataclass(frozen=True)
class Sweep:
    """A checked sweep. Exact ties of the mean loss go to the point that is lower in the first field of `ties`, ..."""

    name: str
    seeds: tuple[int, ...]
    ties: tuple[str, ...]
    stages: tuple[Stage, ...]

    def fields(self, stage: int) -> list[str]:
        """The swept fields of a stage's points."""
        return [field for part in self.stages[: stage + 1] for field in part.grid]

    def count(self, stage: int) -> int:
        """The runs of a stage, known before anything has run."""
        part = self.stages[stage]
        return max(part.best, 1) * math.prod(map(len, part.grid.values())) * len(self.seeds)

    def points(self, stage: int, promoted: Sequence[Values]) -> list[Values]:
        """The points of a stage, given those that the stage before promoted (none for the first)."""
        grid = self.stages[stage].grid
        combined = [tuple(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
        return [(*before, *values) for before in promoted or [()] for values in combined]

    def settings(self, stage: int, point: Values, seed: int) -> dict[str, Any]:
        """The config fields of a run that differ from its preset."""
        return {**self.stages[stage].settings, **dict(point), "seed": seed}

    def record(self) -> dict[str, Any]:
        """The sweep as JSON content, without execution-only settings."""
        stages = [
            {
                "name": part.name,
                "config": part.config,
                "settings": {key: value for key, value in part.settings.items() if not fields.find(key).execution},
                "grid": {field: list(values) for field, values in part.grid.items()},
                "best": part.best,
            }
            for part in self.stages
        ]
        return {"name": self.name, "seeds": list(self.seeds), "ties": list(self.ties), "stages": stages}


def load(path: str, overrides: Mapping[str, Any], seeds: Sequence[int] | None = None) -> Sweep:
    """The checked sweep of a file. ConfigError naming what is wrong in it.

    overrides are settings of all stages; `seeds`, where given, stand for those of the file.
    """
    spec = importlib.util.spec_from_file_location(f"llama_jax_sweep_{Path(path).stem}", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ConfigError(f"sweep file {path} does not exist, or is no .py file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        content = module.get_sweep()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"sweep file {path}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    try:
        return make(content, overrides, seeds)
    except ConfigError as error:
        raise ConfigError(f"sweep file {path}: {error}") from None


def make(content: Any, overrides: Mapping[str, Any], seeds: Sequence[int] | None = None) -> Sweep:
    """The checked sweep of what get_sweep() returns. ConfigError."""
    top = _keys(content, "it", {"name", "stages"}, {"seeds", "settings", "ties"})
    shared = {**_keys(top.get("settings", {}), "settings"), **overrides}
    _require(isinstance(top["stages"], list | tuple) and top["stages"], "stages must be a list of at least one stage")
    stages: list[Stage] = []
    for number, given in enumerate(top["stages"], 1):
        part = _keys(given, f"stage {number}", {"name", "config"}, {"settings", "grid", "best"})
        name, best = part["name"], part.get("best", 0)
        _require(type(best) is int and best >= 0, f"stage {name}: best = {best!r} is no number from 0")
        _require((best > 0) == (number > 1), f"stage {name}: best must be set in every stage but the first")
        grid = {}
        for field, values in _keys(part.get("grid", {}), f"stage {name}: grid").items():
            _require(isinstance(values, list | tuple) and values, f"stage {name}: {field} needs a list of values")
            grid[field] = tuple(_value(field, value) for value in values)
            _require(len(set(grid[field])) == len(values), f"stage {name}: {field} has a value twice")
        _require(number > 1 or grid, f"stage {name}: it has no grid")
        own = {**_keys(part.get("settings", {}), f"stage {name}: settings"), **overrides}
        settings = {field: _value(field, value) for field, value in {**shared, **own}.items()}
        stages.append(Stage(str(name), str(part["config"]), settings, grid, best))
    seeds, ties = seeds if seeds is not None else top.get("seeds", [42]), top.get("ties", [])
    sound = isinstance(seeds, list | tuple) and seeds and all(type(seed) is int for seed in seeds)
    _require(sound, "seeds must be a list of numbers")
    _require(len(set(seeds)) == len(seeds), "seeds has a number twice")
    seeds = [_value("seed", seed) for seed in seeds]
    sound = isinstance(ties, list | tuple) and all(isinstance(field, str) for field in ties)
    _require(sound, "ties must be a list of fields")
    sweep = Sweep(str(top["name"]), tuple(seeds), tuple(ties), tuple(stages))
    for name in (sweep.name, *(stage.name for stage in stages)):
        _require(bool(NAME.fullmatch(name)), f"the name {name!r} may have letters, digits, '.', '_' and '-' only")
    _require(len({stage.name for stage in stages}) == len(stages), "two stages have one name")
    taken = sorted(TAKEN & {stage.name for stage in stages})
    _require(not taken, f"a stage can't have the name {taken[0] if taken else ''}, which is that of a result")
    _check_fields(sweep)
    return sweep


def check(sweep: Sweep) -> None:
    """Whether every run that the sweep may come to has a sound config, and all can be compared. ConfigError."""
    possible: list[Values] = []
    shown: list[tuple[str, dict[str, Any]]] = []
    for number, stage in enumerate(sweep.stages):
        possible = sweep.points(number, possible)
        _require(
            stage.best <= (size := sweep.count(number - 1) // len(sweep.seeds) if number else 0),
            f"stage {stage.name}: best = {stage.best}, but the stage before has {size} points",
        )
        names = [run_name(point, sweep.seeds[0]) for point in possible]
        _require(len(set(names)) == len(names), f"stage {stage.name}: two of its runs would share a folder")
        for point in possible:
            config = run_config(sweep, number, point, sweep.seeds[0])
            packed = config.decentralized
            alone = packed.workers > 1 and packed.topology == "disconnected" and not packed.sync_every
            _require(not alone, f"stage {stage.name}: workers that never mix have no common loss to promote by")
            _require(
                config.evaluation.full_at_end,
                f"stage {stage.name}: evaluation.full_at_end must be True, the full validation loss decides",
            )
        shown.append((stage.name, _comparable(config, sweep)))
    (first, wanted), *others = shown
    for name, found in others:
        differ = [f"{field}: {wanted[field]} -> {found[field]}" for field in wanted if wanted[field] != found[field]]
        _require(not differ, f"stages {first} and {name} differ in what must be the same: {'; '.join(differ)}")


def run_config(sweep: Sweep, stage: int, point: Values, seed: int) -> Any:
    """The finalized config of a run. ConfigError."""
    part = sweep.stages[stage]
    try:
        return configs.load(part.config, sweep.settings(stage, point, seed))
    except ConfigError as error:
        raise ConfigError(f"stage {part.name}, {run_name(point, seed)}: {error}") from None


def run_name(point: Values, seed: int) -> str:
    """A folder name for a run: its swept values and its seed."""
    short = [field.split(".")[-1] for field, _ in point]
    parts = [
        f"{name if short.count(name) == 1 else field}_{value}"
        for name, (field, value) in zip(short, point, strict=True)
    ]
    return re.sub(r"[^A-Za-z0-9._+-]", "_", "-".join([*parts, f"seed_{seed}"]))


def text(value: Any) -> str:
    """A value as the command line takes it."""
    return repr(value) if isinstance(value, float) else str(value)


def rank(sweep: Sweep, losses: Mapping[Values, Sequence[float]]) -> list[tuple[Values, float]]:
    """Points by mean loss over seeds, exact ties by the fields of `ties`, lower first, then by the other swept fields.

    A point one of whose losses is infinite, since its run diverged, has an infinite mean.
    """

    def order(item: tuple[Values, float]) -> tuple:
        point, loss = item
        values = dict(point)
        tied = [field for field in sweep.ties if field in values] + [f for f in values if f not in sweep.ties]
        keys = [(1, 0.0, str(v)) if isinstance(v, str | None) else (0, float(v), "") for v in map(values.get, tied)]
        return (loss, keys)

    means = [(point, math.fsum(found) / len(found)) for point, found in losses.items()]
    return sorted(means, key=order)


def promote(sweep: Sweep, stage: int, losses: Mapping[Values, Sequence[float]]) -> list[Values]:
    """The points of a finished stage that the next one takes over, best first. ConfigError where too few are left."""
    wanted = sweep.stages[stage + 1].best
    finite = [point for point, loss in rank(sweep, losses) if math.isfinite(loss)]
    if len(finite) < wanted:
        raise ConfigError(
            f"stage {sweep.stages[stage].name}: only {len(finite)} of {len(losses)} points have a finite loss, "
            f"{wanted} are to be promoted; lower the learning rates of the sweep"
        )
    return finite[:wanted]


def _comparable(config: Any, sweep: Sweep) -> dict[str, Any]:
    """What all runs must have in common, swept fields apart: recipe fields but the model's shape, and the data."""
    swept, plain = set(sweep.fields(len(sweep.stages) - 1)), configs.to_dict(config)
    found = {}
    for path, field in fields.FIELDS.items():
        shape = path.startswith("model.") and path not in SHARED_MODEL
        if path in swept | STAGE_OWN or shape or (field.execution and path != "data.path"):
            continue
        value: Any = plain
        for key in path.split("."):
            value = value[key]
        found[path] = value
    return found


def _check_fields(sweep: Sweep) -> None:
    seen: set[str] = set()
    for stage in sweep.stages:
        for field in stage.grid:
            _require(field != "seed", "seed can't be in a grid; seeds has the seeds of every point")
            _require(not fields.find(field).execution, f"{field} can't be swept: it doesn't change what is trained")
            _require(field not in seen, f"stage {stage.name}: {field} was swept in an earlier stage")
            seen.add(field)
        _require("seed" not in stage.settings, "seed can't be among the settings; seeds has the seeds of every point")
    for number, stage in enumerate(sweep.stages):
        both = sorted(set(sweep.fields(number)) & set(stage.settings))
        _require(not both, f"stage {stage.name}: {', '.join(both)} is swept and among the settings")
    for field in sweep.ties:
        _require(field in seen, f"ties: {field} is not swept")


def _value(field: str, value: Any) -> Any:
    found = fields.find(field)
    if isinstance(value, str) and found.type is not str:
        value = fields.from_text(field, found, value)
    return fields.checked(field, found, value)


def _keys(value: Any, where: str, needed: set[str] | None = None, more: set[str] | None = None) -> dict[str, Any]:
    """A dictionary with string keys: `needed` all there, nothing but those and `more`."""
    _require(isinstance(value, Mapping) and all(isinstance(key, str) for key in value), f"{where} must be a dictionary")
    if needed is not None:
        missing, unknown = sorted(needed - value.keys()), sorted(value.keys() - needed - (more or set()))
        _require(not missing, f"{where} lacks {', '.join(missing)}")
        _require(not unknown, f"{where} has the unknown key {', '.join(unknown)}")
    return dict(value)


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ConfigError(message)
