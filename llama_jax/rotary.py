"""The products for queries, keys and values with the rotation behind them, as one Pallas Mosaic kernel for Hopper GPUs.

It computes plain_dense() of the three matrices and plain_rope() of the first two (ops.py). A block keeps the matrices
of a head in shared memory (resident.py). A warpgroup only sees tiles of the same positions, whose cosines and sines
stay in its registers.

Letters: T rows, D width, H heads, d = 64 head size, P positions (the context).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from llama_jax import kernels, resident
from llama_jax.resident import SWIZZLED, TILE, WARPGROUPS

SIZE = 64  # of a head
HALF = SIZE // 2
LEAST_SHARE = 0.75  # of the multiprocessors that must have work
_HALVES = (plgpu.TilingTransform((8, HALF)), plgpu.SwizzleTransform(2 * HALF))  # so that a half can be written


def obstacle(width: int, heads: int, kv_heads: int, context: int) -> str | None:
    """Why the kernel can't take the sizes of a model, or None."""
    if width != heads * SIZE or kv_heads != heads:
        return f"model.width must be {SIZE} x model.heads, and model.kv_heads the same"
    if context % TILE or heads > kernels.MULTIPROCESSORS:
        return f"model.context must be a multiple of {TILE}, and model.heads at most {kernels.MULTIPROCESSORS}"
    if heads * _blocks(heads, context) < LEAST_SHARE * kernels.MULTIPROCESSORS:
        return f"model.context = {context} leaves too many multiprocessors without work"
    if not resident.fits(3 * SIZE * width + WARPGROUPS * TILE * (width + SIZE)):
        return f"matrices and rows of model.width = {width} don't fit the shared memory"
    return None


def _blocks(heads: int, context: int) -> int:
    """Blocks of a head: as many as there are, such that the tiles of a warpgroup lie whole contexts apart."""
    period = context // TILE
    return kernels.MULTIPROCESSORS // heads * WARPGROUPS // period * period // WARPGROUPS


@jax.jit
def rotated(
    h_TD: jax.Array, w_OD: jax.Array, cos_Pc: jax.Array, sin_Pc: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries and keys, and values, each [T, H d], of rows at the positions 0, ..., P - 1, 0, ..., P - 1, ...

    h, w bfloat16, O = 3 H d: the queries' outputs before the keys' before the values'; tables float32 [P, d / 2].
    """
    (T, D), dtype, context = h_TD.shape, h_TD.dtype, cos_Pc.shape[0]
    width = w_OD.shape[0] // 3
    heads = width // SIZE

    def work(turn, h, w, cos, sin, q, k, v, kept, tiles, results, loaded, arrived):
        head = pl.ds(turn.columns * SIZE, SIZE)
        copies = [
            (w.at[pl.ds(i * width + turn.columns * SIZE, SIZE)], kept.at[pl.ds(i * SIZE, SIZE)]) for i in range(3)
        ]
        resident.keep(turn, copies, loaded)
        tile, out = tiles.at[turn.warpgroup], results.at[turn.warpgroup]
        positions = pl.ds(lax.rem(turn.first, context // TILE) * TILE, TILE)
        cosines, sines = (
            kernels.load(table, (positions, slice(None)), plgpu.Layout.WGMMA, optimized=False) for table in (cos, sin)
        )

        def one(at, load_next):
            parts = resident.product(tile, kept.transpose((1, 0)), 3 * SIZE)
            load_next()
            for i, target in enumerate((q, k, v)):
                middle = i * SIZE + HALF
                low, high = (parts[:, j : j + HALF].astype(dtype) for j in (middle - HALF, middle))
                if target is not v:
                    low, high = low.astype(jnp.float32), high.astype(jnp.float32)
                    low, high = low * cosines - high * sines, high * cosines + low * sines
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out[:, :HALF], out[:, HALF:] = low.astype(dtype), high.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out, target.at[at, head])

        resident.each(turn, h, tile, arrived.at[turn.warpgroup], loaded, one)

    outs = (jax.ShapeDtypeStruct((T, width), dtype),) * 3
    scratch = (
        plgpu.SMEM((3 * SIZE, D), dtype, transforms=SWIZZLED),
        plgpu.SMEM((WARPGROUPS, TILE, D), dtype, transforms=SWIZZLED),
        plgpu.SMEM((WARPGROUPS, TILE, SIZE), dtype, transforms=_HALVES),
        plgpu.Barrier(num_arrivals=3),
        plgpu.Barrier(num_barriers=WARPGROUPS),
    )
    return resident.kernel(work, T, heads, outs, scratch, _blocks(heads, context))(h_TD, w_OD, cos_Pc, sin_Pc)
