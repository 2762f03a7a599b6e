"""SwiGLU with the products beside it: what the plain form computes, that the kernels lower for a GPU, and their sizes.

The kernels themselves are compared with the plain form on a GPU, in tests/gpu.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import gate


def normal(seed, *shape, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def test_swiglu():
    x, up = (np.asarray(normal(seed, 4, 5, dtype=np.float32)) * 3 for seed in (0, 1))
    expected = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64))) * up
    np.testing.assert_allclose(gate.swiglu(x, up), expected, rtol=1e-5, atol=1e-7)
    assert gate.swiglu(jnp.asarray(x, jnp.bfloat16), jnp.asarray(up, jnp.bfloat16)).dtype == jnp.bfloat16


def test_plain_form_against_autodiff():
    with jax.enable_x64(True):
        h, w_GD, w_DF, dy = normal(0, 6, 8), normal(1, 10, 8), normal(2, 8, 5), normal(3, 6, 8)
        gate_up, product = gate.plain_products(h, w_GD)
        np.testing.assert_allclose(gate_up, h @ w_GD.T, rtol=1e-13)
        silu = gate_up[:, :5] / (1 + np.exp(-gate_up[:, :5]))
        np.testing.assert_allclose(product, silu * gate_up[:, 5:], rtol=1e-12)

        def output(gate_up):
            return (gate_up[:, :5] * jax.nn.sigmoid(gate_up[:, :5]) * gate_up[:, 5:]) @ w_DF.T

        expected = jax.vjp(output, gate_up)[1](dy)[0]
        np.testing.assert_allclose(gate.plain_gradient(dy, w_DF, gate_up), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["products", "gradient"])
@pytest.mark.parametrize("workers", [None, 3])
def test_kernels_lower_for_a_gpu(name, workers):
    T, D, F = 256, 320, 896
    shapes = {"products": ((T, D), (2 * F, D)), "gradient": ((T, D), (D, F), (T, 2 * F))}[name]
    function, plain = getattr(gate, name), getattr(gate, f"plain_{name}")
    if workers:
        function, plain = jax.vmap(function), jax.vmap(plain)
        shapes = [(workers, *shape) for shape in shapes]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1  # one kernel for all workers
    found = [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(function, *arguments))]
    assert found == [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(plain, *arguments))]


@pytest.mark.parametrize(
    ("width", "ffn", "context", "part"),
    [
        (100, 896, 1024, "model.width must be a multiple of 64"),
        (320, 900, 1024, "model.ffn of 128"),
        (320, 896, 1000, "model.context of 64"),
        (512, 1408, 1024, "weights and rows of model.width = 512 don't fit"),
        (320, 128 * 67, 1024, "model.ffn is over 8448"),
    ],
)
def test_sizes_that_have_no_kernel(width, ffn, context, part):
    assert part in gate.obstacle(width, ffn, context)


@pytest.mark.parametrize("width", [64, 128, 256, 320])
@pytest.mark.parametrize("ffn", [128, 896, 8448])
def test_sizes_that_have_kernels(width, ffn):
    assert gate.obstacle(width, ffn, 64) is None


def test_rows_that_are_not_whole_tiles_are_refused():
    rows, weights = jax.ShapeDtypeStruct((96, 64), jnp.bfloat16), jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="96 rows are not whole tiles of 64"):
        jax.eval_shape(gate.products, rows, weights)
