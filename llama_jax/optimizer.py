"""Learning-rate schedule and the AdamW update of arena rows.

Letters: N workers, P padded length of a row.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


def learning_rate(config: Any, position: int) -> float:
    """Learning rate of the update that ENDS at `position` targets, in FP64.

    Linear warm-up from 0 (so update 1 of w has peak / w), then cosine (Loshchilov and Hutter 2017), WSD (constant, then
    linear over the last `decay_fraction`) or constant; cosine and WSD end at min_lr_ratio times the peak.
    """
    schedule, peak, total = config.lr_schedule, config.optimizer.lr, config.derived.total_targets
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


def adamw(
    optimizer: Any,
    decayed: int,
    params_NP: jax.Array,
    grads_NP: jax.Array,
    moments: Moments,
    lr_N: jax.Array,
) -> tuple[jax.Array, Moments]:
    """One AdamW update of every row (Loshchilov and Hutter 2019) -> (params, moments).

    optimizer: beta1, beta2, eps, weight_decay. The first `decayed` elements of a row are multiplied by
    1 - lr * weight_decay; the others are not decayed, and neither is the zero padding after them.
    """
    adam = optax.scale_by_adam(b1=optimizer.beta1, b2=optimizer.beta2, eps=optimizer.eps)

    def row(params_P, grads_P, mu_P, nu_P, count, lr):
        direction_P, state = adam.update(grads_P, optax.ScaleByAdamState(count, mu_P, nu_P))
        is_decayed = jax.lax.iota(jnp.int32, params_P.shape[0]) < decayed
        keep_P = jnp.where(is_decayed, 1 - lr * optimizer.weight_decay, jnp.ones_like(lr))
        return params_P * keep_P - lr * direction_P, Moments(state.mu, state.nu, state.count)

    return jax.vmap(row)(params_NP, grads_NP, *moments, lr_N)
