"""What a run writes of an update, of an evaluation and of its end, as plain dictionaries for JSON."""

from typing import Any

import jax
import numpy as np

from llama_jax import data
from llama_jax import step as steps
from llama_jax import validation as validations


def train_line(
    update: int, epoch: int, targets: int, lr: float, found: steps.Metrics, rates: dict[str, float | None]
) -> dict[str, Any]:
    """The metrics line of an update; loss in nats per target over all workers, lists where there are several."""
    return {
        "kind": "train",
        "update": update,
        "epoch": epoch,
        "targets": targets,
        "loss": float(np.asarray(found.loss_sum, np.float64).sum() / np.asarray(found.targets).sum()),
        "lr": lr,
        "grad_norm": _scalar(found.grad_norm),
        "clip": _scalar(found.clip),
        **rates,
    }


def eval_line(
    update: int, epoch: int, targets: int, split: str, loss: validations.Loss, source: data.Source, seconds: float
) -> dict[str, Any]:
    """The metrics line of an evaluation; loss in nats per target."""
    return {
        "kind": "eval",
        "update": update,
        "epoch": epoch,
        "targets": targets,
        "split": split,
        "loss": loss.mean,
        "bits_per_byte": loss.bits_per_byte(source.bytes_per_token),
        "eval_targets": loss.targets,
        "eval_s": seconds,
    }


def eval_text(line: dict[str, Any]) -> str:
    """An evaluation for people."""
    bits = "" if line["bits_per_byte"] is None else f", {line['bits_per_byte']:.4f} bits per byte"
    return f"update {line['update']:,}: {line['split']} loss {line['loss']:.4f} nats{bits}"


def result(
    config: Any,
    source: data.Source,
    update: int,
    targets: int,
    final: dict[str, Any],
    best: dict[str, Any] | None,
    passes: int,
    wall_s: float,
) -> dict[str, Any]:
    """result.json: `final` holds the last evaluations (lines by split) and rates, `best` the best subset evaluation."""
    device, full = jax.devices()[0], final.get("validation")
    stats = device.memory_stats() or {}
    return {
        "unique_params": config.derived.unique_params,
        "non_embedding_params": config.derived.non_embedding_params,
        "targets": targets,
        "updates": update,
        "validation_loss": full and full["loss"],
        "bits_per_byte": full and full["bits_per_byte"],
        "subset_loss": final["subset"]["loss"],
        "entropy": source.entropy,
        "best": best,
        "passes": passes,
        "targets_per_s": final["targets_per_s"],
        "targets_per_s_all": targets / wall_s if wall_s > 0 else None,
        "mfu": final["mfu"],
        "peak_memory_bytes": stats.get("peak_bytes_in_use"),
        "wall_s": wall_s,
        "device": device.device_kind,
        "devices": config.runtime.mesh_worker * config.runtime.mesh_data,
        "jax": jax.__version__,
    }


def blame(update: int, position: int, size: int, found: steps.Metrics, loader: data.Loader) -> str:
    """Which worker's loss or gradient isn't finite, and which sequences it saw; position and size in sequences."""
    finite_N = np.isfinite(found.loss_sum) & np.isfinite(found.grad_norm)
    worker, end = int(np.argmin(finite_N)), position + size
    mine = range(position + worker, end, finite_N.size)
    sequences = ", ".join(str(loader.locate(at)[2]) for at in mine[:8]) + (", ..." if len(mine) > 8 else "")
    return (
        f"update {update}: loss or gradient of worker {worker} is not finite and was not applied; it saw sequences "
        f"{sequences} (positions {position} to {end - 1} of the stream); lower optimizer.lr, or look at them"
    )


def _scalar(values_N: np.ndarray) -> Any:
    return float(values_N[0]) if values_N.size == 1 else [float(value) for value in values_N]
