"""Learning-rate schedule and the AdamW update of arena rows.

Letters: N workers, P padded length of a row.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


def learning_rate(config: Any, position: int, peak: float | None = None) -> float:
    """Learning rate of the update that ENDS at `position` targets, in FP64; peak: default optimizer.lr.

    Linear warm-up from 0 (so update 1 of w has peak / w), then cosine (Loshchilov and Hutter 2017), WSD (constant, then
    linear over the last `decay_fraction`) or constant; cosine and WSD end at min_lr_ratio times the peak.
    """
    schedule, total = config.lr_schedule, config.derived.total_targets
    peak = config.optimizer.lr if peak is None else peak
    if schedule.warmup_steps is not None:
        warmup = float(schedule.warmup_steps * config.training.batch_targets)
    else:
        warmup = schedule.warmup_fraction * total
    if position < warmup:
        return peak * position / warmup
    floor = schedule.min_lr_ratio
    if schedule.name == "cosine" and total > warmup:
        progress = (position - warmup) / (total - warmup)
        return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
    if schedule.name == "wsd":
        start = max(total * (1 - schedule.decay_fraction), warmup)
        if position > start:
            return peak * (1 - (1 - floor) * (position - start) / (total - start))
    return peak


class Moments(NamedTuple):
    """AdamW state of arena rows: first and second moments [N, P], number of applied updates int32 [N]."""

    mu_NP: jax.Array
    nu_NP: jax.Array
    count_N: jax.Array


class Hyper(NamedTuple):
    """AdamW settings; the first three are numbers, or arrays [N] where the workers differ."""

    beta1: Any
    beta2: Any
    weight_decay: Any
    eps: float


def adamw(
    hyper: Hyper,
    decayed: int,
    params_NP: jax.Array,
    grads_NP: jax.Array,
    moments: Moments,
    lr_N: jax.Array,
) -> tuple[jax.Array, Moments]:
    """One AdamW update of every row (Loshchilov and Hutter 2019) -> (params, moments).

    The first `decayed` elements of a row are multiplied by 1 - lr * weight_decay; the others are not decayed, and
    neither is the zero padding after them.
    """

    def row(params_P, grads_P, mu_P, nu_P, count, lr, beta1, beta2, weight_decay):
        adam = optax.scale_by_adam(b1=beta1, b2=beta2, eps=hyper.eps)
        direction_P, state = adam.update(grads_P, optax.ScaleByAdamState(count, mu_P, nu_P))
        is_decayed = jax.lax.iota(jnp.int32, params_P.shape[0]) < decayed
        keep_P = jnp.where(is_decayed, 1 - lr * weight_decay, jnp.ones_like(lr))
        return params_P * keep_P - lr * direction_P, Moments(state.mu, state.nu, state.count)

    own = (
        hyper.beta1,
        hyper.beta2,
        hyper.weight_decay,
    )  # plain numbers stay what they are, so that equal workers compute what one alone would
    axes = (0,) * 6 + tuple(0 if hasattr(value, "shape") else None for value in own)
    return jax.vmap(row, in_axes=axes)(params_NP, grads_NP, *moments, lr_N, *own)
