"""How far apart the workers are: consensus distance, its concentration, cosines. Reads state, never changes it.

Letters: N workers, P padded length of a row, K blocks. Inside a shard_map `axis` names the mesh axis over which the
rows are spread, and every result is the same on all its devices; None: all rows are here. present_N: the rows that
count, bool; None: all of them, N is then their number. The others may hold anything.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Consensus(NamedTuple):
    """Distances of rows x_i from their mean m, with e_i = x_i - m; scalars but for blocks_K.

    distance: Xi^2 = mean_i |e_i|^2. blocks_K: its part in each block. relative: Xi^2 / |m|^2, of gradients the
    disagreement. share: max_i max_j e_ij^2 / |e_i|^2, near 1 when one coordinate runs away. A ratio of zeros is 0.
    """

    distance: jax.Array
    blocks_K: jax.Array
    relative: jax.Array
    share: jax.Array


def consensus_distance(
    arena_NP: jax.Array,
    blocks: Sequence[tuple[int, int]] = (),
    axis: str | None = None,
    present_N: jax.Array | None = None,
) -> Consensus:
    """Consensus of the rows; blocks: static (offset, size) ranges of a row.

    The mean is subtracted before anything is squared, and so is the rounding error of the mean: equal rows have
    distance 0 to the square of the precision, not a difference of two large sums.
    """
    workers, arena_NP = _number(arena_NP, axis, present_N), _counted(arena_NP, present_N)
    rough_P = _sum(arena_NP, axis) / workers
    error_NP = _counted(arena_NP - rough_P[None, :], present_N)
    rest_P = _sum(error_NP, axis) / workers
    error_NP = _counted(error_NP - rest_P[None, :], present_N)
    mean_P = rough_P + rest_P
    square_NP = error_NP * error_NP
    norm2_N = jnp.sum(square_NP, axis=1)
    parts = [jnp.sum(square_NP[:, offset : offset + size]) for offset, size in blocks]
    blocks_K = jnp.stack(parts) if parts else jnp.zeros(0, arena_NP.dtype)
    distance = _total(jnp.sum(norm2_N), axis) / workers
    share = jnp.max(_ratio(jnp.max(square_NP, axis=1), norm2_N))
    return Consensus(
        distance,
        _total(blocks_K, axis) / workers,
        _ratio(distance, jnp.sum(mean_P * mean_P)),
        jax.lax.pmax(share, axis) if axis else share,
    )


def pairwise_cosine(arena_NP: jax.Array, axis: str | None = None, present_N: jax.Array | None = None) -> jax.Array:
    """Mean cosine of the N (N - 1) / 2 pairs of rows, a scalar; 1 for one row, and a zero row has cosine 0.

    With unit rows u_i the pairs sum to |sum_i u_i|^2 - sum_i |u_i|^2, so that no pair is formed.
    """
    workers, arena_NP = _number(arena_NP, axis, present_N), _counted(arena_NP, present_N)
    if present_N is None and workers == 1:
        return jnp.ones((), arena_NP.dtype)
    norm_N = jnp.sqrt(jnp.sum(arena_NP * arena_NP, axis=1))
    unit_NP = _ratio(arena_NP, norm_N[:, None])
    sum_P = _sum(unit_NP, axis)
    pairs = jnp.sum(sum_P * sum_P) - _total(jnp.sum(unit_NP * unit_NP), axis)
    if present_N is None:
        return pairs / (workers * (workers - 1))
    return jnp.where(workers == 1, 1, pairs / jnp.maximum(workers * (workers - 1), 1))


def _number(arena_NP: jax.Array, axis: str | None, present_N: jax.Array | None) -> Any:
    if present_N is None:
        return arena_NP.shape[0] * (jax.lax.axis_size(axis) if axis else 1)
    return _total(jnp.sum(present_N.astype(arena_NP.dtype)), axis)


def _counted(arena_NP: jax.Array, present_N: jax.Array | None) -> jax.Array:
    return arena_NP if present_N is None else jnp.where(present_N[:, None], arena_NP, 0)


def _total(value: jax.Array, axis: str | None) -> jax.Array:
    return jax.lax.psum(value, axis) if axis else value


def _sum(arena_NP: jax.Array, axis: str | None) -> jax.Array:
    """The sum of all rows [P]."""
    return _total(jnp.sum(arena_NP, axis=0), axis)


def _ratio(above: jax.Array, below: jax.Array) -> jax.Array:
    """above / below, 0 where below is 0; NaN stays NaN."""
    return jnp.where(below == 0, jnp.zeros_like(above), above / jnp.where(below == 0, 1, below))
