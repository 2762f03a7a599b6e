"""Copies of the metrics for TensorBoard and Weights & Biases, on request; both packages are extras."""

import importlib
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llama_jax.errors import ConfigError, warn
from llama_jax.files import write_atomic


class Tracker(NamedTuple):
    """`write(line)` takes a line of metrics.jsonl, `close()` ends the tracker; neither raises."""

    write: Callable[[Mapping[str, Any]], None]
    close: Callable[[], None]


def open_trackers(
    directory: Path, tensorboard: bool, wandb: bool, name: str, config: Mapping[str, Any], update: int
) -> list[Tracker]:
    """The trackers asked for, writing under `directory`, continued behind `update`.

    ConfigError naming the extra that is not installed, or what Weights & Biases complains about.
    """
    modules = check_trackers(tensorboard, wandb)
    trackers = []
    if tensorboard:
        trackers.append(_tensorboard(modules["tensorboardX"], directory / "tensorboard", update))
    if wandb:
        trackers.append(_wandb(modules["wandb"], directory, name, config))
    return trackers


def check_trackers(tensorboard: bool, wandb: bool) -> dict[str, Any]:
    """Imports the packages asked for: {name: module}; ConfigError naming the extra to install. Call it early."""
    modules = {}
    for wanted, field, package in ((tensorboard, "tensorboard", "tensorboardX"), (wandb, "wandb", "wandb")):
        if wanted:
            try:
                modules[package] = importlib.import_module(package)
            except ImportError:
                raise ConfigError(
                    f"log.{field}: {package} is not installed; pip install 'llama_jax[{field}]' or set it to False"
                ) from None
    return modules


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line under names like train/loss and eval/subset/loss; lists give name/0, name/1, ..."""
    prefix = "/".join(str(line[key]) for key in ("kind", "split") if key in line)
    found: dict[str, float] = {}
    for key, value in line.items():
        values = {f"/{i}": item for i, item in enumerate(value)} if isinstance(value, list) else {"": value}
        for suffix, item in values.items():
            if key != "update" and isinstance(item, int | float) and not isinstance(item, bool):
                found[f"{prefix}/{key}{suffix}"] = item
    return found


def _tensorboard(module: Any, directory: Path, update: int) -> Tracker:
    # purge_step: a viewer forgets the points behind `update`, which a crashed process wrote and this one writes again
    writer = module.SummaryWriter(logdir=str(directory), purge_step=update + 1)

    def write(line: Mapping[str, Any]) -> None:
        for name, value in scalars(line).items():
            writer.add_scalar(name, value, global_step=line["update"])

    return _careful("TensorBoard", write, writer.close)


def _wandb(module: Any, directory: Path, name: str, config: Mapping[str, Any]) -> Tracker:
    identity = directory / "wandb_id.txt"  # a restarted run continues the same curves
    if not identity.exists():
        write_atomic(identity, uuid.uuid4().hex[:12].encode() + b"\n")
    try:
        run = module.init(
            project="llama_jax",
            name=name,
            id=identity.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(directory),
            config=dict(config),
            save_code=False,
        )
    except Exception as error:
        raise ConfigError(f"log.wandb: {' '.join(str(error).split())[:300]}; set it to False to go without") from error

    def write(line: Mapping[str, Any]) -> None:
        run.log({**scalars(line), "update": line["update"]}, step=line["update"])

    return _careful("Weights & Biases", write, run.finish)


def _careful(name: str, write: Callable[[Mapping[str, Any]], None], close: Callable[[], None]) -> Tracker:
    """A copy of the metrics must never end a run: the first failure is said on stderr and the tracker left alone."""
    working = True

    def run(action: Callable[..., None], *arguments: Any) -> None:
        nonlocal working
        if working:
            try:
                action(*arguments)
            except Exception as error:
                working = False
                warn(f"{name} stopped: {' '.join(str(error).split())[:300]}")

    return Tracker(lambda line: run(write, line), lambda: run(close))
