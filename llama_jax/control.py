"""Adaptive consensus by feedback: gamma holds the workers as far apart as they were when it was 1. An experiment.

Xi = sqrt(mean_i |x_i - mean|^2), of the workers that are there, is measured at each end of a cycle of the topology, so
always after the same phase. The last 50 of these before update r0 = ceil(start_frac T) form the reference; later ones
set gamma <- clip(gamma (Xi / target)^kappa, min_gamma, 1), target = rho reference. Near a small gamma this is a spring
of damping ratio sqrt(gamma period / kappa): it swings where the learning rate jumps, and follows one that falls
slowly. Tensors of `adaptive.exclude` count in Xi, though gamma does not move them.

Everything stays on the device: the host learns gamma with an update's metrics.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from llama_jax import budget, consensus, network
from llama_jax.errors import ConfigError
from llama_jax.step import STATE_SPEC, State, make_schedule, shardings

CYCLES = 50  # before r0 that form the reference
DECAY = 0.9  # of their weights from one to the next: at the end of 50 cycles the first would have half a percent


class Control(NamedTuple):
    """What sets gamma, float32 scalars, the same on all devices.

    gamma: of the next update. distance: Xi at the last end of a cycle. reference: weighted mean of Xi before r0;
    weight: the sum of its weights, below 1 after few cycles.
    """

    gamma: jax.Array
    distance: jax.Array
    reference: jax.Array
    weight: jax.Array


CONTROL_SPEC = Control(Spec(), Spec(), Spec(), Spec())

Advance = Callable[..., Control]


def init(mesh: Mesh) -> Control:
    """The control before the first update."""
    numbers = Control(np.float32(1), np.float32(0), np.float32(0), np.float32(0))
    return jax.tree.map(jax.device_put, numbers, shardings(mesh, CONTROL_SPEC))


def make_control(config: Any, mesh: Mesh) -> Advance:
    """The compiled control of a finalized config: (state, control, number of updates done, its Links) -> control.

    To be called at ends of cycles. Nothing is donated: an update that has not been logged holds its gamma. A state
    that is not ok, an Xi that is not finite and one of fewer than two workers change nothing but `distance`. Raises
    ConfigError where no cycle ends before r0, and where gamma 1 leaves no distance to hold.
    """
    fields, updates = config.decentralized, config.derived.total_updates
    schedule, adaptive, workers = make_schedule(config), fields.adaptive, fields.workers
    start, period = budget.start_update(adaptive.start_frac, updates), schedule.period
    if start < period:
        least = f"set it to {period / updates:.4g} or more" if period <= updates else f"a run has only {updates}"
        raise ConfigError(
            f"decentralized.adaptive.start_frac = {adaptive.start_frac}: mode target measures a cycle of {period} "
            f"updates of {fields.topology} before gamma moves; {least}"
        )
    if start >= updates:
        raise ConfigError(
            f"decentralized.adaptive.start_frac = {adaptive.start_frac}: with mode target gamma would never move in "
            f"{updates} updates; lower it"
        )
    if schedule.stationary(fields.scheme) < 1e-9:
        raise ConfigError(
            f"decentralized.adaptive.mode = target: {fields.topology} with scheme {fields.scheme} and "
            f"{fields.workers} workers makes all of them equal after each update, so there is no distance to hold; set "
            "decentralized.scheme to awc"
        )

    def advance(state: State, control: Control, update: jax.Array, present_N: jax.Array | None) -> Control:
        found = consensus.consensus_distance(state.params_NP, axis="worker", present_N=present_N)
        number = workers
        if present_N is not None:
            number = jax.lax.psum(jnp.sum(present_N.astype(jnp.float32)), "worker")
        # n independent points are (n - 1) / n of their variance from their mean: as if all were there.
        scale = (workers - 1) / workers * number / jnp.maximum(number - 1, 1)
        distance = jnp.sqrt(found.distance * scale)
        good = state.ok & jnp.isfinite(distance) & (number > 1)
        measures = good & (update <= start) & (update > start - CYCLES * period)
        weight = DECAY * control.weight + (1 - DECAY)
        reference = control.reference + (1 - DECAY) / weight * (distance - control.reference)
        target = adaptive.rho * control.reference
        acts = good & (update > start) & (target > 0)
        ratio = distance / jnp.where(acts, target, 1)
        gamma = jnp.clip(control.gamma * ratio**adaptive.kappa, adaptive.min_gamma, 1)
        return Control(
            jnp.where(acts, gamma, control.gamma),
            distance,
            jnp.where(measures, reference, control.reference),
            jnp.where(measures, weight, control.weight),
        )

    specs = (STATE_SPEC, CONTROL_SPEC, Spec(), Spec("worker"))
    sharded = jax.shard_map(advance, mesh=mesh, in_specs=specs, out_specs=CONTROL_SPEC, check_vma=False)

    def control(state: State, held: Control, update: Any, links: network.Links | None = None) -> Control:
        return sharded(state, held, update, links.active_N if links else None)

    return jax.jit(control, out_shardings=shardings(mesh, CONTROL_SPEC))
