"""What a checkpoint of a run holds: from device state, progress and loader to arrays and JSON, and back.

Letters: N workers, P arena row length.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from llama_jax import arena, checkpoint, control, data, describe, hf, metrics, network, optimizer, outer, run_folder
from llama_jax import step as steps
from llama_jax import validation as validations
from llama_jax.build import Built
from llama_jax.errors import CheckpointError, warn
from llama_jax.files import read_json


@dataclasses.dataclass
class Progress:
    """How far a run is.

    position: sequences of the stream that the model has seen. evaluated: all evaluations due at this update are done
    and logged. final: evaluations and throughput after the last update. wall_s: seconds, former processes included.
    """

    update: int = 0
    position: int = 0
    evaluated: bool = True
    best: dict[str, Any] | None = None
    final: dict[str, Any] | None = None
    wall_s: float = 0.0


def open_checkpoints(directory: Path, layout: arena.Layout) -> checkpoint.Checkpoints:
    """The checkpoints of a run whose arena layout and loader version must agree."""
    fingerprint = {
        "arena": {"padded": layout.padded, "slots": layout.describe()},
        "loader": data.LOADER_VERSION,
    }
    return checkpoint.Checkpoints(directory, fingerprint)


def content(
    state: steps.State, met: outer.Outer | None, held: control.Control | None, at: Progress, loader: data.Loader
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """(arrays, JSON) of a checkpoint. The state's `ok` isn't among them: a state that isn't ok is never saved."""
    moments = state.moments
    arrays = {"params": state.params_NP, "mu": moments.mu_NP, "nu": moments.nu_NP, "count": moments.count_N}
    if met is not None:
        arrays |= {"outer_params": met.params_P, "outer_momentum": met.momentum_P}
    if held is not None:
        arrays |= {f"control_{name}": value for name, value in held._asdict().items()}
    # The loader is one batch ahead; what counts is what the model has seen.
    cursor = {**loader.state(), "position": at.position}
    return arrays, {"progress": dataclasses.asdict(at), "loader": cursor}


def restore(
    saved: checkpoint.Checkpoints, built: Built, source: data.Source
) -> tuple[Progress, steps.State, outer.Outer | None, control.Control | None, data.Loader]:
    """Progress, states, control and loader of the newest good checkpoint, or of the start when there never was one."""
    config = built.config
    loading = (config.data.prefetch_groups, config.runtime.host_threads)
    place = steps.shardings(built.mesh, steps.STATE_SPEC)
    workers = config.decentralized.workers
    arena_NP = jax.ShapeDtypeStruct((workers, built.layout.padded), np.float32, sharding=place.params_NP)
    count_N = jax.ShapeDtypeStruct((workers,), np.int32, sharding=place.moments.count_N)
    templates = {"params": arena_NP, "mu": arena_NP, "nu": arena_NP, "count": count_N}
    if built.sync:
        row_P = jax.ShapeDtypeStruct((built.layout.padded,), np.float32, sharding=place.ok)
        templates |= {"outer_params": row_P, "outer_momentum": row_P}
    if built.control:
        scalar = jax.ShapeDtypeStruct((), np.float32, sharding=place.ok)
        templates |= {f"control_{name}": scalar for name in control.Control._fields}
    found = saved.restore_latest(templates)
    if found is None:
        state = built.initial_state()
        met = outer.init(state, built.mesh) if built.sync else None
        held = control.init(built.mesh) if built.control else None
        return Progress(), state, met, held, data.Loader(source, config.seed, 0, *loading)
    arrays = found.arrays
    moments = optimizer.Moments(arrays["mu"], arrays["nu"], arrays["count"])
    state = steps.State(arrays["params"], moments, jax.device_put(np.asarray(True), place.ok))
    met = outer.Outer(arrays["outer_params"], arrays["outer_momentum"]) if built.sync else None
    held = None
    if built.control:
        held = control.Control(*(arrays[f"control_{name}"] for name in control.Control._fields))
    loader = data.Loader.from_state(source, config.seed, found.meta["loader"], *loading)
    return Progress(**found.meta["progress"]), state, met, held, loader


def export(directory: Path, built: Built, source: data.Source, params_NP: jax.Array, at: Progress) -> None:
    """The mean model in ordinary format, with the tokenizer of its data."""
    row_P = validations.mean_row(params_NP, network.present(built.config, at.update))
    export_row(directory, built.config, source, row_P, at.update, at.position)


def export_row(
    directory: Path,
    config: Any,
    source: data.Source,
    row_P: jax.Array,
    update: int,
    position: int,
    worker: int | None = None,
    dtype: str = "float32",
) -> None:
    """One parameter row [P] in ordinary format, with the tokenizer of its data or of model.init_from.

    worker None: the mean of the workers.

    position: sequences of the stream that all workers together have seen. Raises as hf.export_model.
    """
    params = arena.from_row(np.asarray(row_P), arena.make_layout(config.model))
    origin = {"run": config.name, "update": update, "targets": position * config.derived.sequence_targets}
    tokenizer, began = source.manifest.tokenizer if source.manifest else {}, config.model.init_from
    if began and not Path(began).is_dir():
        warn(f"{directory} has no tokenizer: the folder {began} that the weights began with is gone")
    hf.export_model(
        directory,
        params,
        config.model,
        source.manifest.directory / tokenizer["file"] if source.manifest and tokenizer["file"] else None,
        tokenizer.get("bos_id"),
        tokenizer.get("eos_id"),
        dtype,
        origin if worker is None else {**origin, "worker": worker},
        hf.find_folder(began) if began and not tokenizer and Path(began).is_dir() else None,
    )


def read_params(run: str | Path, config: Any, update: int | None) -> checkpoint.Restored:
    """The verified parameters [N, P] of a run's newest or given checkpoint; config: the run's. Changes nothing.

    Raises CheckpointError, also where config.json and checkpoint differ in the number of workers, and ConfigError.
    """
    network.check(config)
    saved = checkpoint.Checkpoints(Path(run) / "checkpoints", None, read_only=True)
    found, workers = saved.read(update, ["params"]), config.decentralized.workers
    if len(found.arrays["params"]) != workers:
        there = len(found.arrays["params"])
        raise CheckpointError(f"{run}: its checkpoint has {there} workers, its config.json {workers}; one was changed")
    return found


def finished(folder: run_folder.RunFolder) -> dict[str, Any]:
    """Verifies a finished run's final checkpoint, if its policy kept one, and repeats its result; changes nothing."""
    try:
        result = read_json(folder.result)
        update, texts = result["updates"], describe.after(folder.path, result)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{folder.result}: damaged ({error}); delete it, then the same command writes it again"
        ) from None
    state = "finished"
    # The policy that the run ended with, whatever this command's is.
    if run_folder.read_run(folder.path)["config"]["training"]["checkpoint_policy"] != "none":
        checkpoint.Checkpoints(folder.checkpoints, None, read_only=True).read(update)
        state = "finished and verified"
    progress = metrics.Progress(update)
    for text in (f"{folder.path} is {state}", *texts):
        progress.note(text)
    return result
