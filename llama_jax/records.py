"""What a run writes of an update, of an evaluation and of its end, as plain dictionaries for JSON."""

import math
from typing import Any

import jax
import numpy as np

from llama_jax import arena, control, data, network
from llama_jax import step as steps
from llama_jax import validation as validations
from llama_jax.build import Built


def train_line(
    update: int,
    epoch: int,
    targets: int,
    lr: float,
    found: steps.Metrics,
    rates: dict[str, float | None],
    links: network.Links | None = None,
) -> dict[str, Any]:
    """The metrics line of an update: loss in nats per target over the workers, mean gradient norm and clip factor.

    links: who is there; the others do not count (their losses and targets are 0).
    """
    there = _there(found, links)
    return {
        "kind": "train",
        "update": update,
        "epoch": epoch,
        "targets": targets,
        "loss": float(np.asarray(found.loss_sum, np.float64).sum() / np.asarray(found.targets).sum()),
        "lr": lr,
        "grad_norm": float(found.grad_norm[there].mean()),
        "clip": float(found.clip[there].mean()),
        **rates,
    }


def packed_fields(found: steps.Metrics, mixing: steps.Mixing) -> dict[str, Any]:
    """What the line of an update says of several workers: lists per worker, phase and gamma; who is there, if not all.

    A worker that is away has None for its numbers.
    """
    links, there = mixing.links, _there(found, mixing.links)

    def listed(values: np.ndarray) -> list[float | None]:
        return [float(value) if here else None for value, here in zip(values, there, strict=True)]

    presence = {} if links is None else {"active": links.active_N.tolist(), "connected": links.connected_N.tolist()}
    return {
        "worker_loss": listed(np.asarray(found.loss_sum, np.float64) / np.where(there, found.targets, 1)),
        "worker_grad_norm": listed(found.grad_norm),
        "worker_clip": listed(found.clip),
        "phase": int(mixing.phase),
        "gamma": float(mixing.gamma),
        **presence,
    }


def _there(found: steps.Metrics, links: network.Links | None) -> np.ndarray:
    """The workers that are there, bool [N]."""
    return np.ones(found.targets.size, bool) if links is None else links.active_N


def consensus_fields(
    built: Built, found: steps.Metrics, mixing: steps.Mixing, lr: float, distances: steps.Distances
) -> dict[str, Any]:
    """Where the workers stand after an update.

    consensus_distance: mean_i |x_i - mean|^2 of the parameters, consensus_blocks its parts by block.
    consensus_predicted: what it would settle at if the workers' updates were independent noise of their present size
    (None where the topology leaves workers apart for good).
    """
    params, schedule, there = distances.params, built.schedule, int(_there(found, mixing.links).sum())
    noise = lr**2 * float(distances.direction) * there / max(there - 1, 1)
    predicted = noise * schedule.stationary(built.config.decentralized.scheme, float(mixing.gamma))
    blocks = np.asarray(params.blocks_K, np.float64).tolist()
    return {
        "consensus_distance": float(params.distance),
        "consensus_predicted": predicted if math.isfinite(predicted) else None,
        "consensus_blocks": dict(zip(arena.blocks(built.layout), blocks, strict=True)),
        "consensus_relative": float(params.relative),
        "largest_coordinate_share": float(params.share),
        "direction_disagreement": float(distances.direction),
        "gradient_disagreement": float(found.disagreement),
        "cosine_params": float(distances.cosine_params),
        "cosine_mu": float(distances.cosine_mu),
        "cosine_nu": float(distances.cosine_nu),
    }


def control_fields(rho: float, held: control.Control) -> dict[str, Any]:
    """What gamma was last set by: Xi^2 at the last end of a cycle, and the Xi^2 to hold from the next cycle on."""
    return {
        "control_distance": float(held.distance) ** 2,
        "control_target": (rho * float(held.reference)) ** 2,
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
