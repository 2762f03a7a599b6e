"""SwiGLU with the products beside it: the first product with the gate behind it, and its gradient likewise.

Where the kernels can't run, XLA makes a product and a pass over its result of each; `plain_*` is that form and defines
what is computed. The kernels are products with resident weights (resident.py) for Hopper GPUs. One H200, 131,072 rows
of 320, F = 896: 306 and 296 us; by XLA 421 and 396.

Letters: T rows, D width, F gated width, G = 2 F columns: the gate's, then those that it multiplies ("up").
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from llama_jax import kernels, resident
from llama_jax.kernels import statistics_dtype
from llama_jax.resident import SWIZZLED, TILE, WARPGROUPS

FORWARD, BACKWARD = 64, 128  # columns of F that a block keeps; the forward ones twice, of gate and up


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
    if not resident.fits(elements):
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


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))


@jax.jit
def products(h_TD: jax.Array, w_GD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """plain_products as one kernel, where both dtypes are bfloat16."""
    (T, D), F, dtype, n = h_TD.shape, w_GD.shape[0] // 2, h_TD.dtype, FORWARD

    def work(turn, h, w, gate_up, product, kept, tiles, results, loaded, arrived):
        halves = [pl.ds(start + turn.columns * n, n) for start in (0, F)]
        resident.keep(turn, [(w.at[half], kept.at[pl.ds(i * n, n)]) for i, half in enumerate(halves)], loaded)
        tile, out = tiles.at[turn.warpgroup], results.at[turn.warpgroup]

        def one(at, load_next):
            both = resident.product(tile, kept.transpose((1, 0)), 2 * n)
            load_next()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            gate, up = both[:, :n].astype(dtype), both[:, n:].astype(dtype)
            out[0], out[1] = gate, up
            gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
            out[2] = (gate * _sigmoid(gate) * up).astype(dtype)
            plgpu.commit_smem()
            for i, half in enumerate(halves):
                plgpu.copy_smem_to_gmem(out.at[i], gate_up.at[at, half])
            plgpu.copy_smem_to_gmem(out.at[2], product.at[at, halves[0]])

        resident.each(turn, h, tile, arrived.at[turn.warpgroup], loaded, one)

    outs = (jax.ShapeDtypeStruct((T, 2 * F), dtype), jax.ShapeDtypeStruct((T, F), dtype))
    scratch = (
        plgpu.SMEM((2 * n, D), dtype, transforms=SWIZZLED),
        plgpu.SMEM((WARPGROUPS, TILE, D), dtype, transforms=SWIZZLED),
        plgpu.SMEM((WARPGROUPS, 3, TILE, n), dtype, transforms=SWIZZLED),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_barriers=WARPGROUPS),
    )
    return resident.kernel(work, T, F // n, outs, scratch)(h_TD, w_GD)


@jax.jit
def gradient(dy_TD: jax.Array, w_DF: jax.Array, gate_up_TG: jax.Array) -> jax.Array:
    """plain_gradient as one kernel, where all dtypes are bfloat16."""
    (T, D), F, dtype, n = dy_TD.shape, w_DF.shape[1], dy_TD.dtype, BACKWARD

    def work(turn, dy, w, gate_up, out, kept, tiles, results, loaded, arrived, read):
        halves = [pl.ds(start + turn.columns * n, n) for start in (0, F)]
        resident.keep(turn, [(w.at[:, halves[0]], kept)], loaded)
        tile, parts, read = tiles.at[turn.warpgroup], results.at[turn.warpgroup], read.at[turn.warpgroup]

        def one(at, load_next):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for i, half in enumerate(halves):
                plgpu.copy_gmem_to_smem(gate_up.at[at, half], parts.at[i], read)
            d = resident.product(tile, kept, n)
            load_next()
            plgpu.barrier_wait(read)
            for start in range(0, n, 64):
                where = (slice(None), slice(start, start + 64))
                gate, up = (kernels.load(parts, (i, *where), plgpu.Layout.WGMMA).astype(jnp.float32) for i in (0, 1))
                mine = d[where].astype(dtype).astype(jnp.float32)
                for i, derivative in enumerate(_derivatives(mine, gate, up, _sigmoid(gate))):
                    parts[i, *where] = derivative.astype(dtype)
            plgpu.commit_smem()
            for i, half in enumerate(halves):
                plgpu.copy_smem_to_gmem(parts.at[i], out.at[at, half])

        resident.each(turn, dy, tile, arrived.at[turn.warpgroup], loaded, one)

    scratch = (
        plgpu.SMEM((D, n), dtype, transforms=SWIZZLED),
        plgpu.SMEM((WARPGROUPS, TILE, D), dtype, transforms=SWIZZLED),
        plgpu.SMEM((WARPGROUPS, 2, TILE, n), dtype, transforms=SWIZZLED),
        plgpu.Barrier(),
        plgpu.Barrier(num_barriers=WARPGROUPS),
        plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
    )
    return resident.kernel(work, T, F // n, jax.ShapeDtypeStruct((T, 2 * F), dtype), scratch)(dy_TD, w_DF, gate_up_TG)
