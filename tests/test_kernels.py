"""The row kernels: what their plain twins compute, that they lower for a GPU everywhere, and when they are refused.

The kernels themselves are compared with the twins on a GPU, in tests/gpu.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import kernels

EPS = 1e-5


def normal(seed, *shape, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def test_norm_and_its_gradient():
    with jax.enable_x64(True):
        x, dy, dh = (normal(seed, 6, 64) for seed in range(3))

        def function(x):
            return x, x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPS)

        (_, h), pull = jax.vjp(function, x)
        found, inverse = kernels.plain_norm(x, EPS, jnp.float64)
        np.testing.assert_allclose(found, h, rtol=1e-13)
        gradient = kernels.plain_norm_gradient(found, inverse, dh, dy)
        np.testing.assert_allclose(gradient, pull((dy, dh))[0], rtol=1e-12, atol=1e-13)


def test_softmax_gradient():
    with jax.enable_x64(True):
        logits, weights = 3 * normal(0, 7, 40), jnp.abs(normal(1, 7)).at[3].set(0)
        targets = jnp.asarray(np.random.default_rng(2).integers(0, 40, 7))

        def losses(logits):
            return -jax.nn.log_softmax(logits)[jnp.arange(7), targets]

        gradient, found = kernels.plain_softmax_gradient(logits, targets, weights)
        np.testing.assert_allclose(found, losses(logits), rtol=1e-13)
        np.testing.assert_allclose(kernels.plain_token_losses(logits, targets), losses(logits), rtol=1e-13)
        np.testing.assert_allclose(
            gradient, jax.grad(lambda x: jnp.sum(losses(x) * weights))(logits), rtol=1e-11, atol=1e-14
        )
        assert not np.any(gradient[3])


def cases(T, D, V):
    wide = jax.ShapeDtypeStruct((T, D), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((T,), jnp.float32)
    logits, targets = jax.ShapeDtypeStruct((T, V), jnp.bfloat16), jax.ShapeDtypeStruct((T,), jnp.int32)
    return {
        "norm": (lambda x: kernels.norm(x, EPS, jnp.bfloat16), (wide,)),
        "norm_gradient": (kernels.norm_gradient, (wide, row, wide, wide)),
        "softmax_gradient": (kernels.softmax_gradient, (logits, targets, row)),
        "token_losses": (kernels.token_losses, (logits, targets)),
    }


@pytest.mark.parametrize("name", ["norm", "norm_gradient", "softmax_gradient", "token_losses"])
@pytest.mark.parametrize("workers", [None, 3])
def test_kernels_lower_for_a_gpu(name, workers):
    function, arguments = cases(256, 320, 32000)[name]
    plain = {"norm": lambda x: kernels.plain_norm(x, EPS, jnp.bfloat16)}.get(name, getattr(kernels, f"plain_{name}"))
    if workers:
        function, plain = jax.vmap(function), jax.vmap(plain)
        arguments = [jax.ShapeDtypeStruct((workers, *a.shape), a.dtype) for a in arguments]
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1  # one kernel for all workers
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(function, *arguments))]
    assert shapes == [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(plain, *arguments))]


def test_a_kernel_of_every_layer_is_lowered_once():
    def layers(x):
        for _ in range(5):
            x, _ = kernels.norm(x, EPS, jnp.bfloat16)
        return x

    wide = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    text = jax.jit(layers).trace(wide).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1
    assert text.count("call @norm") == 5


@pytest.mark.parametrize(
    ("width", "vocab", "context", "part"),
    [
        (100, 32000, 1024, "model.width must be a multiple of 64"),
        (320, 32001, 1024, "model.vocab_size must be a multiple of 256"),
        (320, 131072, 1024, "doesn't fit the shared memory"),
        (64 * 100, 32000, 1024, "rows of 6400 elements don't fit"),
        (320, 32000, 1025, "model.context must be a multiple of 8"),
    ],
)
def test_sizes_that_have_no_kernel(width, vocab, context, part):
    assert part in kernels.obstacle(width, vocab, context)


def test_rows_that_are_not_whole_tiles_are_refused():
    wide = jax.ShapeDtypeStruct((12, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="12 rows are not whole tiles of 8"):
        jax.eval_shape(lambda x: kernels.norm(x, EPS, jnp.bfloat16), wide)


@pytest.mark.parametrize("width", [320, 512, 640, 768, 960, 2048])
@pytest.mark.parametrize("vocab", [32000, 32768, 49152, 50304 - 128])
def test_sizes_that_have_kernels(width, vocab):
    assert kernels.obstacle(width, vocab, 1024) is None
