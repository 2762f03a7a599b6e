"""Products for Hopper GPUs in Pallas Mosaic whose weights stay in shared memory, for kernels that finish their results.

A block keeps the weights of one group of columns and goes down the rows in tiles; each of its two warpgroups takes
tiles of its own, so that one multiplies while the other one finishes and stores. It pays where the inner dimension is
short, so that a product is bound by what it writes.

Letters: T rows, D inner dimension, n columns.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from llama_jax import kernels

TILE = 64  # rows of a tile
WARPGROUPS = 2
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


class Turn(NamedTuple):
    """A warpgroup's part: its group of columns, its number in the block, its tiles first, first + stride, ..."""

    columns: Any
    warpgroup: Any
    first: Any
    stride: int
    tiles: int  # of all warpgroups


def fits(elements: int) -> bool:
    """Whether so many bfloat16 numbers and some barriers fit the shared memory of a block."""
    return 2 * elements <= kernels.SHARED_BYTES - 2048


def kernel(
    work: Callable[..., None], rows: int, columns: int, outs: Any, scratch: Any, blocks: int | None = None
) -> Callable[..., Any]:
    """A kernel in which each warpgroup does work(turn, *refs); columns: number of groups of them.

    blocks: of one group, default as many as there are. The blocks of all groups walk down the rows together, so that
    each row comes from memory once and from the cache for the others.
    """
    if rows % TILE:
        raise ValueError(f"{rows} rows are not whole tiles of {TILE}")
    blocks = blocks or kernels.MULTIPROCESSORS // columns

    def body(*refs):
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        first = lax.div(block, columns) * WARPGROUPS + warpgroup
        work(Turn(lax.rem(block, columns), warpgroup, first, blocks * WARPGROUPS, rows // TILE), *refs)
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


def keep(turn: Turn, copies: Iterable[tuple[Any, Any]], loaded: Any) -> None:
    """Starts copies (from, to) into what the whole block keeps; each arrives at the barrier `loaded`."""

    @pl.when(turn.warpgroup == 0)
    def _():
        for source, target in copies:
            plgpu.copy_gmem_to_smem(source, target, loaded)


def each(turn: Turn, inputs: Any, tile: Any, arrived: Any, loaded: Any, one: Callable[[Any, Any], None]) -> None:
    """Calls one(at, load_next) for each tile of the turn, `at` its rows, once it is in `tile`.

    `one` must call load_next() as soon as it has read the tile. loaded: the barrier of what the block keeps.
    """

    def load(number):
        @pl.when(number < turn.tiles)
        def _():
            plgpu.copy_gmem_to_smem(inputs.at[pl.ds(number * TILE, TILE)], tile, arrived)

    def step(index, _):
        number = turn.first + index * turn.stride
        plgpu.barrier_wait(arrived)
        one(pl.ds(number * TILE, TILE), lambda: load(number + turn.stride))

    load(turn.first)
    plgpu.barrier_wait(loaded)
    lax.fori_loop(0, lax.div(turn.tiles - turn.first + turn.stride - 1, turn.stride), step, None)


def product(tile: Any, weights: Any, columns: int) -> jax.Array:
    """tile [TILE, D] times weights [D, n], both in shared memory -> float32 in registers."""

    def multiply(total):
        plgpu.wgmma(total, tile, weights)
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC((TILE, columns), jnp.float32))
