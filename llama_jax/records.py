"""What a run writes of an update, of an evaluation and of its end, as plain dictionaries for JSON."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from llama_jax import arena, control, data, network
from llama_jax import step as steps
from llama_jax import validation as validations
from llama_jax.build import Built


class Update(NamedTuple):
    """One update: its place in the stream in sequences, and its batch on the device."""

    position: int
    size: int
    batch: steps.Batch


class Sent(NamedTuple):
    """An update on its way: its one-based number, learning rates FP64 [N], and results on the device.

    finished: seconds on the meter's clock when the device had computed it.
    """

    number: int
    update: Update
    lr_N: np.ndarray
    mixing: steps.Mixing
    metrics: steps.Metrics
    distances: steps.Distances | None
    held: control.Control | None
    finished: Future[float]


def update_line(
    built: Built,
    sent: Sent,
    found: steps.Metrics,
    rates: dict[str, float | None],
    ledger: Callable[[int], dict[str, float]],
) -> dict[str, Any]:
    """The metrics line of an update whose metrics have come to the host as `found`."""
    plan, end = built.plan, sent.update.position + sent.update.size
    epoch = plan.epoch(sent.update.position) + 1
    line = train_line(sent.number, epoch, end * plan.context, sent.lr_N, found, rates, sent.mixing.links)
    if built.config.decentralized.workers > 1:
        line |= packed_fields(found, sent.mixing, sent.lr_N) | ledger(sent.number)
    if sent.distances is not None:
        line |= consensus_fields(built, sent.mixing, sent.lr_N, found, sent.distances)
    if sent.held is not None:
        line |= control_fields(built.config.decentralized.adaptive.rho, sent.held)
    return line


def train_line(
    update: int,
    epoch: int,
    targets: int,
    lr_N: np.ndarray,
    found: steps.Metrics,
    rates: dict[str, float | None],
    links: network.Links | None = None,
) -> dict[str, Any]:
    """The metrics line of an update: loss in nats per target over the workers, means of the rest over the workers.

    links: who is there; who is not, or was not finite while others went on, does not count.
    """
    there = _there(found, links)
    return {
        "kind": "train",
        "update": update,
        "epoch": epoch,
        "targets": targets,
        "loss": float(np.asarray(found.loss_sum, np.float64)[there].sum() / np.asarray(found.targets)[there].sum()),
        "lr": float(lr_N[0] if len(set(lr_N)) == 1 else lr_N.mean()),
        "grad_norm": float(found.grad_norm[there].mean()),
        "clip": float(found.clip[there].mean()),
        **rates,
    }


def packed_fields(found: steps.Metrics, mixing: steps.Mixing, lr_N: np.ndarray) -> dict[str, Any]:
    """What the line of an update says of several workers: lists per worker, phase and gamma; who is there, if not all.

    A worker that is away or was left out because it was not finite has None for its numbers.
    """
    links, there = mixing.links, _there(found, mixing.links)

    def listed(values: np.ndarray) -> list[float | None]:
        return [float(value) if here else None for value, here in zip(values, there, strict=True)]

    more = {} if links is None else {"active": links.active_N.tolist(), "connected": links.connected_N.tolist()}
    if len(set(lr_N)) > 1:
        more["worker_lr"] = lr_N.tolist()
    return {
        "worker_loss": listed(np.asarray(found.loss_sum, np.float64) / np.where(there, found.targets, 1)),
        "worker_grad_norm": listed(found.grad_norm),
        "worker_clip": listed(found.clip),
        "phase": int(mixing.phase),
        "gamma": float(mixing.gamma),
        **more,
    }


def _there(found: steps.Metrics, links: network.Links | None) -> np.ndarray:
    """The workers that count, bool [N]: there, and where the update was applied all the same, finite."""
    active_N = np.ones(found.targets.size, bool) if links is None else links.active_N
    return active_N & finite(found) if found.ok else active_N


def finite(found: steps.Metrics) -> np.ndarray:
    """The workers whose loss and gradient are finite, bool [N]."""
    return np.isfinite(found.loss_sum) & np.isfinite(found.grad_norm)


def consensus_fields(
    built: Built, mixing: steps.Mixing, lr_N: np.ndarray, found: steps.Metrics, distances: steps.Distances
) -> dict[str, Any]:
    """Where the workers stand after an update.

    consensus_distance: mean_i |x_i - mean|^2 of the parameters, consensus_blocks its parts by block.
    consensus_predicted: what it would settle at if the workers' updates were independent noise of their present size
    (None where the topology leaves workers apart for good, and with outages, outer steps or mixed moments, which the
    formula does not know).
    """
    params, schedule, fields = distances.params, built.schedule, built.config.decentralized
    noise = float(np.mean(lr_N**2)) * float(distances.direction) * schedule.workers / (schedule.workers - 1)
    predicted = noise * schedule.stationary(fields.scheme, float(mixing.gamma))
    if network.changes_training(built.config) or fields.sync_every or fields.mix_moments != "none":
        predicted = math.inf
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
    """The metrics line of an evaluation; loss in nats per target, None where it is not finite (mean of a sweep)."""
    return {
        "kind": "eval",
        "update": update,
        "epoch": epoch,
        "targets": targets,
        "split": split,
        "loss": loss.mean if math.isfinite(loss.mean) else None,
        "bits_per_byte": loss.bits_per_byte(source.bytes_per_token) if math.isfinite(loss.mean) else None,
        "eval_targets": loss.targets,
        "eval_s": seconds,
    }


def eval_text(line: dict[str, Any]) -> str:
    """An evaluation for people."""
    if line["loss"] is None:
        return f"update {line['update']:,}: the {line['split']} loss of the mean model is not finite"
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
    """result.json: `final` holds the last evaluations (lines by split) and rates, `best` the best subset evaluation.

    Without validation sequences the losses are None.
    """
    device, full, subset = jax.devices()[0], final.get("validation"), final.get("subset")
    stats = device.memory_stats() or {}
    return {
        "unique_params": config.derived.unique_params,
        "non_embedding_params": config.derived.non_embedding_params,
        "targets": targets,
        "updates": update,
        "validation_loss": full and full["loss"],
        "bits_per_byte": full and full["bits_per_byte"],
        "subset_loss": subset and subset["loss"],
        **({"local_loss": subset["local_loss"]} if subset and "local_loss" in subset else {}),
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


def blame(sent: Sent, found: steps.Metrics, loader: data.Loader) -> str | None:
    """What ends the run behind an update: which worker isn't finite and which sequences it saw; None: nothing does."""
    number, position, end = sent.number, sent.update.position, sent.update.position + sent.update.size
    if found.ok:
        if sent.held is not None and not math.isfinite(sent.held.distance):
            return f"update {number}: the distance of the workers is not finite; lower optimizer.lr"
        return None
    worker = int(np.argmin(finite(found)))
    mine = range(position + worker, end, found.targets.size)
    sequences = ", ".join(str(loader.locate(at)[2]) for at in mine[:8]) + (", ..." if len(mine) > 8 else "")
    return (
        f"update {number}: loss or gradient of worker {worker} is not finite and was not applied; it saw sequences "
        f"{sequences} (positions {position} to {end - 1} of the stream); lower optimizer.lr, or look at them"
    )
