"""SwiGLU with the products beside it: the first product with the gate behind it, and its gradient likewise.

Where the kernels can't run, XLA makes a product and a pass over its result of each; `plain_*` is that form and defines
what is computed. The kernels are Pallas Mosaic for Hopper GPUs: a block keeps the weights of some columns in shared
memory and goes down the rows; its two warpgroups take every second tile, so that one multiplies while the other one
applies the gate and stores. (One H200, 131,072 rows of 320, F = 896: 306 and 296 us; by XLA 421 and 396.)

Letters: T rows, D width, F gated width, G = 2 F columns: the gate's, then those that it multiplies ("up").
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from llama_jax import kernels
from llama_jax.kernels import statistics_dtype

TILE = 64  # rows of a tile
WARPGROUPS = 2
FORWARD, BACKWARD = 64, 128  # columns of F that a block keeps; the forward ones twice, of gate and up
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


class Gate(NamedTuple):
    """The operations that have kernels."""

    products: Callable[..., tuple[jax.Array, jax.Array]]
    gradient: Callable[..., jax.Array]


def pick(name: str) -> Gate:
    """The operations by how they are computed: mosaic or xla."""
    return Gate(products, gradient) if name == "mosaic" else Gate(plain_products, plain_gradient)


def obstacle(width: int, ffn: int, context: int) -> str | None:
    """Why the kernels can't take the sizes of a model, or None."""
    if width % 64 or ffn % BACKWARD or context % TILE:
        return f"model.width must be a multiple of 64, model.ffn of {BACKWARD}, model.context of {TILE}"
    if ffn // FORWARD > kernels.MULTIPROCESSORS:
        return f"model.ffn is over {FORWARD * kernels.MULTIPROCESSORS}"
    rows = WARPGROUPS * TILE * width
    elements = max(
        2 * FORWARD * width + rows + WARPGROUPS * 3 * TILE * FORWARD,
        BACKWARD * width + rows + WARPGROUPS * 2 * TILE * BACKWARD,
    )
    if 2 * elements > kernels.SHARED_BYTES - 2048:
        return f"weights and rows of model.width = {width} don't fit the shared memory"
    return None


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up (Shazeer 2020)."""
    wide = statistics_dtype(gate)
    return (jax.nn.silu(gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)


def plain_products(h_TD: jax.Array, w_GD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(h w^T [T, G], swiglu of its halves [T, F]), in the dtype of h."""
    gate_up_TG = jnp.einsum("td,gd->tg", h_TD, w_GD)
    return gate_up_TG, swiglu(*jnp.split(gate_up_TG, 2, axis=-1))


def plain_gradient(dy_TD: jax.Array, w_DF: jax.Array, gate_up_TG: jax.Array) -> jax.Array:
    """The gradient of gate_up [T, G], from that of y = swiglu(gate, up) w^T [T, D]."""
    wide = statistics_dtype(gate_up_TG)
    d = jnp.einsum("td,df->tf", dy_TD, w_DF).astype(wide)
    gate, up = (x.astype(wide) for x in jnp.split(gate_up_TG, 2, axis=-1))
    parts = [part.astype(gate_up_TG.dtype) for part in _derivatives(d, gate, up, jax.nn.sigmoid(gate))]
    # The barrier: XLA would repeat the concatenation before each of the two products that follow.
    return lax.optimization_barrier(jnp.concatenate(parts, axis=-1))


def _derivatives(d: Any, gate: Any, up: Any, sigmoid: Any) -> tuple[Any, Any]:
    """Gradients of gate and up, from that of swiglu(gate, up)."""
    silu = gate * sigmoid
    return d * up * (sigmoid + silu * (1 - sigmoid)), d * silu


def _kernel(tile: Callable[..., None], rows: int, columns: int, outs: Any, scratch: Any) -> Any:
    """A kernel of blocks that keep one of `columns` groups of columns each and share the tiles of rows.

    tile(column, group, first, stride, count, *refs) is what a warpgroup does, number `group` of its block, with the
    tiles first, first + stride, ... below count. The blocks of all columns walk down the rows together, so that each
    row comes from memory once and from the cache for the others.
    """
    if rows % TILE:
        raise ValueError(f"{rows} rows are not whole tiles of {TILE}")
    blocks = kernels.MULTIPROCESSORS // columns  # of one group of columns
    count, stride = rows // TILE, blocks * WARPGROUPS

    def body(*refs):
        block, group = lax.axis_index("block"), lax.axis_index("warpgroup")
        first = lax.div(block, columns) * WARPGROUPS + group
        tile(lax.rem(block, columns), group, first, stride, count, *refs)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        grid=(blocks * columns,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **{kernels.OUT: outs, kernels.SCRATCH: scratch},
    )


def _product(rows: Any, weights: Any, columns: int) -> jax.Array:
    """rows [TILE, D] times weights [D, columns], both in shared memory -> float32 in registers."""

    def multiply(total):
        plgpu.wgmma(total, rows, weights)
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC((TILE, columns), jnp.float32))


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))


@jax.jit
def products(h_TD: jax.Array, w_GD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """plain_products as one kernel, where both dtypes are bfloat16."""
    (T, D), F, dtype, n = h_TD.shape, w_GD.shape[0] // 2, h_TD.dtype, FORWARD

    def tile(column, group, first, stride, count, *refs):
        h, w, gate_up, product, kept, all_rows, all_out, loaded, arrived = refs

        @pl.when(group == 0)
        def _():
            plgpu.copy_gmem_to_smem(w.at[pl.ds(column * n, n)], kept.at[pl.ds(0, n)], loaded)
            plgpu.copy_gmem_to_smem(w.at[pl.ds(F + column * n, n)], kept.at[pl.ds(n, n)], loaded)

        rows, out = all_rows.at[group], all_out.at[group]

        def fetch(number):
            @pl.when(number < count)
            def _():
                plgpu.copy_gmem_to_smem(h.at[pl.ds(number * TILE, TILE)], rows, arrived.at[group])

        fetch(first)
        plgpu.barrier_wait(loaded)

        def one(step, _):
            number = first + step * stride
            plgpu.barrier_wait(arrived.at[group])
            both = _product(rows, kept.transpose((1, 0)), 2 * n)
            fetch(number + stride)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out[0], out[1] = both[:, :n].astype(dtype), both[:, n:].astype(dtype)
            gate, up = (x.astype(dtype).astype(jnp.float32) for x in (both[:, :n], both[:, n:]))
            out[2] = (gate * _sigmoid(gate) * up).astype(dtype)
            plgpu.commit_smem()
            at, columns = pl.ds(number * TILE, TILE), pl.ds(column * n, n)
            plgpu.copy_smem_to_gmem(out.at[0], gate_up.at[at, columns])
            plgpu.copy_smem_to_gmem(out.at[1], gate_up.at[at, pl.ds(F + column * n, n)])
            plgpu.copy_smem_to_gmem(out.at[2], product.at[at, columns])

        lax.fori_loop(0, lax.div(count - first + stride - 1, stride), one, None)

    outs = (jax.ShapeDtypeStruct((T, 2 * F), dtype), jax.ShapeDtypeStruct((T, F), dtype))
    scratch = (
        plgpu.SMEM((2 * n, D), dtype, transforms=_SWIZZLED),
        plgpu.SMEM((WARPGROUPS, TILE, D), dtype, transforms=_SWIZZLED),
        plgpu.SMEM((WARPGROUPS, 3, TILE, n), dtype, transforms=_SWIZZLED),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_barriers=WARPGROUPS),
    )
    return _kernel(tile, T, F // n, outs, scratch)(h_TD, w_GD)


@jax.jit
def gradient(dy_TD: jax.Array, w_DF: jax.Array, gate_up_TG: jax.Array) -> jax.Array:
    """plain_gradient as one kernel, where all dtypes are bfloat16."""
    (T, D), F, dtype, n = dy_TD.shape, w_DF.shape[1], dy_TD.dtype, BACKWARD

    def tile(column, group, first, stride, count, *refs):
        dy, w, gate_up, out, kept, all_rows, all_parts, loaded, arrived, read = refs

        @pl.when(group == 0)
        def _():
            plgpu.copy_gmem_to_smem(w.at[:, pl.ds(column * n, n)], kept, loaded)

        rows, parts = all_rows.at[group], all_parts.at[group]

        def fetch(number):
            @pl.when(number < count)
            def _():
                plgpu.copy_gmem_to_smem(dy.at[pl.ds(number * TILE, TILE)], rows, arrived.at[group])

        fetch(first)
        plgpu.barrier_wait(loaded)

        def one(step, _):
            number = first + step * stride
            at = pl.ds(number * TILE, TILE)
            halves = [(at, pl.ds(start + column * n, n)) for start in (0, F)]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for half, place in enumerate(halves):
                plgpu.copy_gmem_to_smem(gate_up.at[place], parts.at[half], read.at[group])
            plgpu.barrier_wait(arrived.at[group])
            d = _product(rows, kept, n)
            fetch(number + stride)
            plgpu.barrier_wait(read.at[group])
            for start in range(0, n, 64):
                where = slice(start, start + 64)
                gate, up = (
                    kernels.load(parts, (half, slice(None), where), plgpu.Layout.WGMMA).astype(jnp.float32)
                    for half in (0, 1)
                )
                mine = d[:, where].astype(dtype).astype(jnp.float32)
                for half, derivative in enumerate(_derivatives(mine, gate, up, _sigmoid(gate))):
                    parts[half, :, where] = derivative.astype(dtype)
            plgpu.commit_smem()
            for half, place in enumerate(halves):
                plgpu.copy_smem_to_gmem(parts.at[half], out.at[place])

        lax.fori_loop(0, lax.div(count - first + stride - 1, stride), one, None)

    scratch = (
        plgpu.SMEM((D, n), dtype, transforms=_SWIZZLED),
        plgpu.SMEM((WARPGROUPS, TILE, D), dtype, transforms=_SWIZZLED),
        plgpu.SMEM((WARPGROUPS, 2, TILE, n), dtype, transforms=_SWIZZLED),
        plgpu.Barrier(),
        plgpu.Barrier(num_barriers=WARPGROUPS),
        plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
    )
    return _kernel(tile, T, F // n, jax.ShapeDtypeStruct((T, 2 * F), dtype), scratch)(dy_TD, w_DF, gate_up_TG)
