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


def make_sync(config: Any, mesh: Mesh) -> Callable[[State, Outer], tuple[State, Outer]]:
    """The compiled outer step; both arguments are donated. A state that is not ok is left as it is.

    d = met - mean of the workers; momentum = b momentum + d; met -= lr (d + b momentum) with Nesterov, else
    met -= lr momentum.
    """
    fields, workers = config.decentralized, config.decentralized.workers

    def sync(state: State, outer: Outer) -> tuple[State, Outer]:
        mean_P = jax.lax.psum(jnp.sum(state.params_NP, axis=0), "worker") / workers
        delta_P = outer.params_P - mean_P
        momentum_P = fields.outer_momentum * outer.momentum_P + delta_P
        step_P = delta_P + fields.outer_momentum * momentum_P if fields.outer_nesterov else momentum_P
        met_P = outer.params_P - fields.outer_lr * step_P
        moved = (jnp.broadcast_to(met_P, state.params_NP.shape), Outer(met_P, momentum_P))
        params_NP, outer = jax.tree.map(lambda new, old: jnp.where(state.ok, new, old), moved, (state.params_NP, outer))
        return state._replace(params_NP=params_NP), outer

    specs = (STATE_SPEC, OUTER_SPEC)
    sharded = jax.shard_map(sync, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    return jax.jit(sharded, donate_argnums=(0, 1), out_shardings=shardings(mesh, specs))
