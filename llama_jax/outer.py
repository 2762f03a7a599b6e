"""Local steps with an outer optimizer: every H updates all workers meet at a point that their mean progress has moved.

DiLoCo (Douillard et al. 2023) is topology `disconnected`, outer Nesterov momentum 0.9 and learning rate 0.7; FedAvg
(McMahan et al. 2017) is momentum 0 and learning rate 1. With another topology the workers also mix in between. The
inner moments stay local and are not reset.

Letters: N workers, P arena row length.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from llama_jax import network
from llama_jax.errors import ConfigError
from llama_jax.step import STATE_SPEC, State, shardings


class Outer(NamedTuple):
    """Where the workers last met, and the momentum of the outer steps, float32 [P], the same on all devices."""

    params_P: jax.Array
    momentum_P: jax.Array


OUTER_SPEC = Outer(Spec(), Spec())


def init(state: State, mesh: Mesh) -> Outer:
    """The outer state before the first update: all workers are at one point."""
    row_P = jax.device_put(state.params_NP[0], shardings(mesh, Spec()))
    return Outer(row_P, jnp.zeros_like(row_P))


def make_sync(config: Any, mesh: Mesh) -> Callable[..., tuple[State, Outer]]:
    """The compiled outer step (state, outer, the update's Links or None) -> (state, outer); the first two are donated.

    A state that is not ok is left as it is. The mean is over the connected workers; the others keep their parameters
    and take part again, from where they are, when they are back. Nothing happens when nobody is connected.

    d = met - mean of the workers; momentum = b momentum + d; met -= lr (d + b momentum) with Nesterov, else
    met -= lr momentum.
    """
    fields, workers, updates = config.decentralized, config.decentralized.workers, config.derived.total_updates
    if fields.sync_every > updates:
        raise ConfigError(
            f"decentralized.sync_every = {fields.sync_every}: there is no outer step in a run of {updates} updates; "
            "lower it, or set it to 0"
        )

    def meet(state: State, outer: Outer, links: network.Links | None) -> tuple[State, Outer]:
        if links is None:
            mean_P, ok = jax.lax.psum(jnp.sum(state.params_NP, axis=0), "worker") / workers, state.ok
        else:
            mean_P, number = network.mean(state.params_NP, links.connected_N)
            ok = state.ok & (number > 0)
        delta_P = outer.params_P - mean_P
        momentum_P = fields.outer_momentum * outer.momentum_P + delta_P
        step_P = delta_P + fields.outer_momentum * momentum_P if fields.outer_nesterov else momentum_P
        met_P = outer.params_P - fields.outer_lr * step_P
        met_NP = jnp.broadcast_to(met_P, state.params_NP.shape)
        if links is not None:
            met_NP = jnp.where(links.connected_N[:, None], met_NP, state.params_NP)
        moved = (met_NP, Outer(met_P, momentum_P))
        params_NP, outer = jax.tree.map(lambda new, old: jnp.where(ok, new, old), moved, (state.params_NP, outer))
        return state._replace(params_NP=params_NP), outer

    specs = (STATE_SPEC, OUTER_SPEC)
    sharded = jax.shard_map(meet, mesh=mesh, in_specs=(*specs, Spec("worker")), out_specs=specs, check_vma=False)

    def sync(state: State, outer: Outer, links: network.Links | None = None) -> tuple[State, Outer]:
        return sharded(state, outer, links)

    return jax.jit(sync, donate_argnums=(0, 1), out_shardings=shardings(mesh, specs))
