"""Row kernels for Hopper GPUs in Pallas Mosaic: each reads its inputs once and writes its results once.

They exist where XLA makes several passes over memory. Each has a plain twin, `plain_*`, which defines what it computes
and runs everywhere else; `pick` gives one set or the other. All statistics are float32.

A block of threads takes every n-th tile of rows: tile in, statistics, results over the inputs in shared memory, tile
out. Several blocks on each multiprocessor overlap one another's loads, arithmetic and stores. Each kernel is jitted by
itself, so that one that every layer calls is lowered once.

Letters: T rows, D row length, V vocabulary, R rows of a tile, K D / 64.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

MULTIPROCESSORS = 132  # of an H100, H200 or GH200; another number only changes how tiles are dealt
SHARED_BYTES = 227 * 1024  # of one multiprocessor
COLUMNS = 64  # of one pass: 32 lanes of 2 elements; a warp takes every fourth row
TILE_ROWS = 8  # of the norms; with MOST_BLOCKS the best of 8, 16, 32 and 4, 8 on an H200 at widths 320, 512, 640
MOST_BLOCKS = 4  # on a multiprocessor
LANES = 256  # a copy engine's largest extent
LOG2E = 1.4426950408889634

# Keyword and argument names that changed between the supported JAX versions.
_NEW_NAMES = "out_type" in inspect.signature(plgpu.kernel).parameters
OUT, SCRATCH = ("out_type", "scratch_types") if _NEW_NAMES else ("out_shape", "scratch_shapes")
_INDEXED_LOAD = any(p.name == "idx" and p.default is p.empty for p in inspect.signature(plgpu.load).parameters.values())


class Rows(NamedTuple):
    """The row operations that have kernels."""

    norm: Callable[..., tuple[jax.Array, jax.Array]]
    norm_gradient: Callable[..., jax.Array]
    softmax_gradient: Callable[..., tuple[jax.Array, jax.Array]]
    token_losses: Callable[..., jax.Array]


def pick(kernels: str) -> Rows:
    """The row operations by the name in a config: mosaic or xla."""
    if kernels == "mosaic":
        return Rows(norm, norm_gradient, softmax_gradient, token_losses)
    return Rows(plain_norm, plain_norm_gradient, plain_softmax_gradient, plain_token_losses)


def obstacle(width: int, vocab: int, context: int) -> str | None:
    """Why the kernels can't take the sizes of a model, or None."""
    if width % COLUMNS:
        return f"model.width must be a multiple of {COLUMNS}"
    if vocab % LANES:
        return f"model.vocab_size must be a multiple of {LANES}"
    if 2 * vocab > SHARED_BYTES - 4096:
        return f"a row of {vocab} logits doesn't fit the shared memory"
    if 3 * 2 * TILE_ROWS * width > SHARED_BYTES - 4096:
        return f"{TILE_ROWS} rows of {width} elements don't fit the shared memory three times"
    if context % TILE_ROWS:
        return f"model.context must be a multiple of {TILE_ROWS}"
    return None


def statistics_dtype(x: jax.Array) -> jnp.dtype:
    """float32, or the dtype of x where that is wider."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _kernel(tile: Callable[..., None], length: int, rows: int | None, shared: int, outs: Any, scratch: Any) -> Any:
    """A kernel that calls tile(place, *refs) for every `rows` rows of `length`; rows None: one row, by its number.

    shared: bytes of shared memory that a block needs, which decides how many run on a multiprocessor.
    """
    blocks = MULTIPROCESSORS * max(1, min(MOST_BLOCKS, SHARED_BYTES // (shared + 2048)))
    if rows and length % rows:
        raise ValueError(f"{length} rows are not whole tiles of {rows}")
    count = length // (rows or 1)

    def body(*refs):
        first = lax.axis_index("block")

        def one(n, _):
            index = first + n * blocks
            tile(index if rows is None else pl.ds(index * rows, rows), *refs)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next tile overwrites this one

        lax.fori_loop(0, lax.div(count - first + blocks - 1, blocks), one, None)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **{OUT: outs, SCRATCH: scratch},
    )


_TILED = plgpu.Layout.TILED(plgpu.Tiling(((4, COLUMNS), (2,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def load(ref: Any, at: Any, layout: Any, **options: Any) -> jax.Array:
    """plgpu.load of a part of a reference, under any supported JAX version."""
    if _INDEXED_LOAD:
        return plgpu.load(ref, at, layout=layout, **options)
    return plgpu.load(ref.at[at], layout=layout, **options)


def _columns(ref: Any, k: Any) -> jax.Array:
    """Columns [R, COLUMNS] of a tile [R, K, COLUMNS], float32."""
    return load(ref, (slice(None), k), _TILED).astype(jnp.float32)


def _zeros(rows: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((rows, COLUMNS), jnp.float32), _TILED)


def _spread(value_R: jax.Array) -> jax.Array:
    """A number of each row over the columns, [R, COLUMNS]."""
    shape = (value_R.shape[0], COLUMNS)
    return plgpu.layout_cast(lax.broadcast_in_dim(value_R, shape, (0,)), _TILED)


def _split(size: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Rows [T, W] as [T, W / size, size]: an extent of a copy is at most 256."""
    return tuple(x.reshape(x.shape[0], -1, size) for x in arrays)


# RMSNorm without its scale, which is folded into the next matrix.


def plain_norm(x_TD: jax.Array, eps: float, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """h = x / sqrt(mean(x^2) + eps) in `dtype` -> (h [T, D], inverse root [T])."""
    wide = x_TD.astype(statistics_dtype(x_TD))
    inverse_T = lax.rsqrt(jnp.mean(wide * wide, axis=-1) + eps)
    return (wide * inverse_T[..., None]).astype(dtype), inverse_T


@functools.partial(jax.jit, static_argnums=(1, 2))
def norm(x_TD: jax.Array, eps: float, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """plain_norm as one kernel, where x is of `dtype`."""
    T, D = x_TD.shape
    K = D // COLUMNS

    def tile(at, x, h, inverse, x_tile, inverse_tile, arrived):
        plgpu.copy_gmem_to_smem(x.at[at], x_tile, arrived)
        plgpu.barrier_wait(arrived)
        squares = _zeros(TILE_ROWS)
        for k in range(K):
            squares += _columns(x_tile, k) * _columns(x_tile, k)
        root = lax.rsqrt(jnp.sum(squares, axis=1) * (1 / D) + eps)
        inverse_tile[...] = root
        root = _spread(root)
        for k in range(K):
            x_tile[:, k] = (_columns(x_tile, k) * root).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_tile, h.at[at])
        plgpu.copy_smem_to_gmem(inverse_tile, inverse.at[at])

    wide, shared = jax.ShapeDtypeStruct((T, K, COLUMNS), dtype), plgpu.SMEM((TILE_ROWS, K, COLUMNS), dtype)
    outs = (wide, jax.ShapeDtypeStruct((T,), jnp.float32))
    scratch = (shared, plgpu.SMEM((TILE_ROWS,), jnp.float32), plgpu.Barrier())
    h, inverse_T = _kernel(tile, T, TILE_ROWS, 2 * TILE_ROWS * D, outs, scratch)(*_split(COLUMNS, x_TD))
    return h.reshape(T, D), inverse_T


def plain_norm_gradient(h_TD: jax.Array, inverse_T: jax.Array, dh_TD: jax.Array, dy_TD: jax.Array) -> jax.Array:
    """Gradient of x [T, D]: dy, which reaches x beside the norm, plus dh through the norm, from the norm's results."""
    wide = statistics_dtype(dy_TD)
    h, dh = h_TD.astype(wide), dh_TD.astype(wide)
    through = inverse_T[..., None] * (dh - h * jnp.mean(h * dh, axis=-1, keepdims=True))
    return (dy_TD.astype(wide) + through).astype(dy_TD.dtype)


@jax.jit
def norm_gradient(h_TD: jax.Array, inverse_T: jax.Array, dh_TD: jax.Array, dy_TD: jax.Array) -> jax.Array:
    """plain_norm_gradient as one kernel."""
    (T, D), dtype = h_TD.shape, h_TD.dtype
    K = D // COLUMNS

    def tile(at, h, inverse, dh, dy, dx, h_tile, dh_tile, dy_tile, arrived):
        for n, (source, target) in enumerate(((h, h_tile), (dh, dh_tile), (dy, dy_tile))):
            plgpu.copy_gmem_to_smem(source.at[at], target, arrived.at[n])
        plgpu.barrier_wait(arrived.at[0])
        plgpu.barrier_wait(arrived.at[1])
        products = _zeros(TILE_ROWS)
        for k in range(K):
            products += _columns(h_tile, k) * _columns(dh_tile, k)
        mean = _spread(jnp.sum(products, axis=1) * (1 / D))
        root = _spread(load(inverse, (at,), _TILED.reduce(1), optimized=False))
        plgpu.barrier_wait(arrived.at[2])
        for k in range(K):
            through = root * (_columns(dh_tile, k) - _columns(h_tile, k) * mean)
            dy_tile[:, k] = (_columns(dy_tile, k) + through).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(dy_tile, dx.at[at])

    shared = plgpu.SMEM((TILE_ROWS, K, COLUMNS), dtype)
    scratch = (shared, shared, shared, plgpu.Barrier(num_barriers=3))
    run = _kernel(tile, T, TILE_ROWS, 3 * 2 * TILE_ROWS * D, jax.ShapeDtypeStruct((T, K, COLUMNS), dtype), scratch)
    h, dh, dy = _split(COLUMNS, h_TD, dh_TD, dy_TD)
    return run(h, inverse_T, dh, dy).reshape(T, D)


# Cross-entropy.


def _plain_losses(logits_TV: jax.Array, targets_T: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(token losses in nats [T], logsumexp [T], is-target mask [T, V]); gathers nothing, so that the passes fuse."""
    wide = logits_TV.astype(statistics_dtype(logits_TV))
    log_sum_T = jax.nn.logsumexp(wide, axis=-1)
    hit_TV = lax.broadcasted_iota(targets_T.dtype, wide.shape, 1) == targets_T[:, None]
    return log_sum_T - jnp.sum(jnp.where(hit_TV, wide, 0), axis=-1), log_sum_T, hit_TV


def plain_token_losses(logits_TV: jax.Array, targets_T: jax.Array) -> jax.Array:
    """Cross-entropy of each row with its target in nats, float32 or wider [T]."""
    return _plain_losses(logits_TV, targets_T)[0]


def plain_softmax_gradient(
    logits_TV: jax.Array, targets_T: jax.Array, weights_T: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(weights * (softmax - one-hot of the target) [T, V] in the dtype of the logits, token losses in nats [T])."""
    losses_T, log_sum_T, hit_TV = _plain_losses(logits_TV, targets_T)
    softmax = jnp.exp(logits_TV.astype(log_sum_T.dtype) - log_sum_T[:, None])
    gradient = (softmax - hit_TV) * weights_T[:, None].astype(softmax.dtype)
    return gradient.astype(logits_TV.dtype), losses_T


def _scan(row: Any, step: Callable[..., Any], start: Any) -> Any:
    """Carries values that start as `start`, or None, through step(place, x, carry) over a row in shared memory.

    The row is [V / LANES, LANES]; x float32 [part, LANES], what is in registers at a time; place: its place in the row.
    """
    count = row.shape[0]
    part = max(n for n in range(1, 26) if count % n == 0)
    layout = plgpu.Layout.WG_STRIDED((part, LANES), vec_size=2)

    def one(n, carry):
        at = (pl.ds(n * part, part), slice(None))
        return step(at, load(row, at, layout).astype(jnp.float32), carry)

    full = None if start is None else plgpu.layout_cast(jnp.full((part, LANES), start, jnp.float32), layout)
    return lax.fori_loop(0, count // part, one, full)


def _log_sum(row: Any) -> jax.Array:
    """log2 of the sum of exp(logit) of a row. Base 2 throughout: it is the exponential that the hardware has."""
    top = jnp.max(_scan(row, lambda _, x, most: jnp.maximum(most, x), -jnp.inf)) * LOG2E
    sums = _scan(row, lambda _, x, total: total + jnp.exp2(x * LOG2E - top), 0.0)
    return top + jnp.log2(jnp.sum(sums))


def _place(token: Any) -> tuple[Any, Any]:
    """Where the logit of a token is in a row."""
    return lax.div(token, LANES), lax.rem(token, LANES)


@jax.jit
def softmax_gradient(logits_TV: jax.Array, targets_T: jax.Array, weights_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """plain_softmax_gradient as one kernel: a row stays in shared memory for its maximum, sum and gradient."""
    (T, V), dtype = logits_TV.shape, logits_TV.dtype

    def tile(at, logits, targets, weights, gradient, losses, row, arrived):
        plgpu.copy_gmem_to_smem(logits.at[at], row, arrived)
        plgpu.barrier_wait(arrived)
        mine, weight, log_sum = _place(targets[at]), weights[at], _log_sum(row)
        hit = row[mine].astype(jnp.float32)
        losses[at] = log_sum * (1 / LOG2E) - hit

        def write(where, x, _):
            row[where] = (jnp.exp2(x * LOG2E - log_sum) * weight).astype(dtype)

        _scan(row, write, None)
        row[mine] = ((jnp.exp2(hit * LOG2E - log_sum) - 1) * weight).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(row, gradient.at[at])

    outs = (jax.ShapeDtypeStruct((T, V // LANES, LANES), dtype), jax.ShapeDtypeStruct((T,), jnp.float32))
    run = _kernel(tile, T, None, 2 * V, outs, (plgpu.SMEM((V // LANES, LANES), dtype), plgpu.Barrier()))
    gradient, losses_T = run(*_split(LANES, logits_TV), targets_T.astype(jnp.int32), weights_T.astype(jnp.float32))
    return gradient.reshape(T, V), losses_T


@jax.jit
def token_losses(logits_TV: jax.Array, targets_T: jax.Array) -> jax.Array:
    """plain_token_losses as one kernel, which reads a row once and writes a number."""
    (T, V), dtype = logits_TV.shape, logits_TV.dtype

    def tile(at, logits, targets, losses, row, arrived):
        plgpu.copy_gmem_to_smem(logits.at[at], row, arrived)
        plgpu.barrier_wait(arrived)
        hit = row[_place(targets[at])].astype(jnp.float32)
        losses[at] = _log_sum(row) * (1 / LOG2E) - hit
        plgpu.commit_smem()  # when all threads have read the row, the next one may come

    outs, scratch = jax.ShapeDtypeStruct((T,), jnp.float32), (plgpu.SMEM((V // LANES, LANES), dtype), plgpu.Barrier())
    run = _kernel(tile, T, None, 2 * V, outs, scratch)
    return run(*_split(LANES, logits_TV), targets_T.astype(jnp.int32))
