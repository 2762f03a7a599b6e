"""The products with the rotation behind them: that the kernel lowers for a GPU, and its sizes.

The kernel itself is compared with the plain form on a GPU, in tests/gpu.
"""

import jax
import jax.numpy as jnp
import pytest

from llama_jax import rotary


@pytest.mark.parametrize("workers", [None, 3])
def test_the_kernel_lowers_for_a_gpu(workers):
    more = (workers,) if workers else ()
    h, w = (jax.ShapeDtypeStruct((*more, *shape), jnp.bfloat16) for shape in ((4096, 320), (960, 320)))
    table = jax.ShapeDtypeStruct((1024, 32), jnp.float32)
    over = (lambda f: jax.vmap(f, in_axes=(0, 0, None, None))) if workers else lambda f: f
    text = jax.jit(over(rotary.rotated)).trace(h, w, table, table).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1  # one kernel for all workers
    found = jax.eval_shape(over(rotary.rotated), h, w, table, table)
    assert [(x.shape, x.dtype) for x in found] == [((*more, 4096, 320), jnp.bfloat16)] * 3


@pytest.mark.parametrize(
    ("width", "heads", "kv_heads", "context", "part"),
    [
        (320, 10, 10, 1024, "model.width must be 64 x model.heads"),
        (320, 5, 1, 1024, "model.kv_heads the same"),
        (320, 5, 5, 1000, "model.context must be a multiple of 64"),
        (320, 5, 5, 2048, "model.context = 2048 leaves too many multiprocessors without work"),
        (512, 8, 8, 1024, "matrices and rows of model.width = 512 don't fit"),
    ],
)
def test_sizes_that_have_no_kernel(width, heads, kv_heads, context, part):
    assert part in rotary.obstacle(width, heads, kv_heads, context)


@pytest.mark.parametrize(("heads", "context"), [(5, 1024), (5, 512), (5, 64), (4, 1024), (1, 4096), (2, 2048)])
def test_a_warpgroup_sees_the_same_positions_alone(heads, context):
    assert rotary.obstacle(64 * heads, heads, heads, context) is None
    stride = rotary.WARPGROUPS * rotary._blocks(heads, context)
    assert stride % (context // rotary.TILE) == 0
    assert heads * rotary._blocks(heads, context) <= 132
