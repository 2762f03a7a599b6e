"""Parts of the packed training step as programs of their own, to be timed.

Each reads and writes whole arenas, where the step fuses clip, mixing and AdamW into one pass: their sum is an upper
bound. Letters: N workers, P arena row length.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as Spec
from ml_collections import FrozenConfigDict

from bench import timing
from bench.windows import windows
from llama_jax import arena, loss, optimizer, runtime, topology
from llama_jax import step as steps
from llama_jax.build import Built

EVERY = 50  # updates between consensus measurements, the default

Mixings = Callable[[int], steps.Mixing]  # from the zero-based update


def forward_backward(built: Built) -> Callable[[jax.Array, steps.Batch], tuple[jax.Array, jax.Array]]:
    """Compiled (parameters [N, P], batch) -> (loss sums [N], gradients [N, P]) as in the step, without accumulation."""
    frozen, layout = FrozenConfigDict(built.config.model), built.layout

    def loss_sum(params: Any, tokens_BS: jax.Array, rows_B: jax.Array) -> jax.Array:
        return loss.loss_sum(frozen, built.numerics, params, tokens_BS.astype(jnp.int32), rows_B)

    def run(params_NP: jax.Array, batch: steps.Batch) -> tuple[jax.Array, jax.Array]:
        both = jax.vmap(jax.value_and_grad(loss_sum))
        losses_N, grads = both(arena.views(params_NP, layout), batch.tokens[:, 0], batch.rows[:, 0])
        return losses_N, arena.pack(grads, layout)

    rows = Spec("worker")
    sharded = jax.shard_map(
        run, mesh=built.mesh, in_specs=(rows, steps.BATCH_SPEC), out_specs=(rows, rows), check_vma=False
    )
    return jax.jit(sharded, compiler_options=runtime.compiler_options())


def mixer(schedule: topology.Schedule) -> Callable[[jax.Array, Any, Any], jax.Array]:
    """Compiled (parameters [N, P], phase, gamma) -> mixed parameters; donates the first."""

    def mix(params_NP: jax.Array, phase: Any, gamma: Any) -> jax.Array:
        return topology.mix(params_NP, schedule, phase, gamma, axis=None)

    return jax.jit(mix, donate_argnums=0)


def row_mixer(schedule: topology.Schedule) -> Callable[[tuple[jax.Array, ...], Any, Any], tuple[jax.Array, ...]]:
    """Compiled mixing of N separate rows [1, P], which it donates."""

    def mix(rows: tuple[jax.Array, ...], phase: Any, gamma: Any) -> tuple[jax.Array, ...]:
        mixed_NP = topology.mix(jnp.concatenate(rows), schedule, phase, gamma, axis=None)
        return tuple(jnp.split(mixed_NP, len(rows)))

    return jax.jit(mix, donate_argnums=0)


class Running:
    """The packed step, its state and what it is fed, for updates that follow one another.

    mixing: from the zero-based update to its Mixing. Calling it dispatches an update and returns its metrics, with the
    distances of the workers after them where the update is measured.
    """

    def __init__(self, stepper: timing.Stepper, feed: timing.Feed, mixing: Mixings) -> None:
        self.stepper, self.built, self.feed, self.mixing, self.update = stepper, stepper.built, feed, mixing, 0

    @property
    def state(self) -> steps.State:
        return self.stepper.state

    def __call__(self, measured: bool = False) -> Any:
        mixing = self.mixing(self.update)._replace(measure=np.bool_(measured))
        batch, lr_N = self.feed(self.update), self.stepper.lr_N
        self.stepper.state, metrics = self.built.step(self.stepper.state, batch, lr_N, mixing)
        self.update += 1
        return (metrics, self.built.measure(self.stepper.state)) if measured else metrics


def time_forward_backward(running: Running, updates: int, warmup: int) -> dict[str, Any]:
    run, params_NP, number = forward_backward(running.built), running.state.params_NP, 0

    def update() -> Any:
        nonlocal number
        number += 1
        return run(params_NP, running.feed(number))

    return windows(update, updates, warmup)


def time_clip(running: Running, updates: int, warmup: int) -> dict[str, Any]:
    config = running.built.config
    clip_norm, count = config.optimizer.clip_norm, config.training.batch_targets / config.decentralized.workers

    @jax.jit
    def clip(grads_NP: jax.Array) -> tuple[jax.Array, jax.Array]:
        norm_N = jnp.sqrt(jnp.sum(grads_NP * grads_NP, axis=1)) / count
        factor_N = jnp.minimum(1.0, clip_norm / (norm_N + 1e-6)) if clip_norm else jnp.ones_like(norm_N)
        return grads_NP * (factor_N / count)[:, None], norm_N

    grads_NP = jnp.copy(running.state.moments.mu_NP)
    return windows(lambda: clip(grads_NP), updates, warmup)


def time_mix(running: Running, updates: int, warmup: int) -> dict[str, Any]:
    mix, params_NP, number = mixer(running.built.schedule), jnp.copy(running.state.params_NP), 0

    def update() -> Any:
        nonlocal params_NP, number
        mixing = running.mixing(number)
        params_NP, number = mix(params_NP, mixing.phase, mixing.gamma), number + 1
        return params_NP

    return windows(update, updates, warmup)


def time_adamw(running: Running, updates: int, warmup: int) -> dict[str, Any]:
    recipe, decayed = running.built.config.optimizer, running.built.layout.decayed
    hyper = optimizer.Hyper(recipe.beta1, recipe.beta2, recipe.weight_decay, recipe.eps)

    def adamw(carry: Any, grads_NP: jax.Array, lr_N: jax.Array) -> Any:
        return optimizer.adamw(hyper, decayed, carry[0], grads_NP, carry[1], lr_N)

    run = jax.jit(adamw, donate_argnums=0)
    carry = jax.tree.map(jnp.copy, (running.state.params_NP, running.state.moments))
    grads_NP = jnp.copy(running.state.moments.mu_NP)

    def update() -> Any:
        nonlocal carry
        carry = run(carry, grads_NP, running.stepper.lr_N)
        return carry

    return windows(update, updates, warmup)


def time_measure(running: Running, updates: int, warmup: int) -> dict[str, Any]:
    """What an update costs more after which consensus is measured: disagreement in the step, distances after it."""
    without = windows(running, updates, warmup)
    found = windows(functools.partial(running, True), updates, warmup)
    extra = found["update_ms"] - without["update_ms"]
    share = extra / EVERY / (without["update_ms"] + extra / EVERY)
    return {**found, "without_ms": without["update_ms"], "extra_ms": extra, "share_every_50": share}


PARTS: dict[str, Callable[[Running, int, int], dict[str, Any]]] = {
    "forward_backward": time_forward_backward,
    "clip": time_clip,
    "mix": time_mix,
    "adamw": time_adamw,
    "measure": time_measure,
}
