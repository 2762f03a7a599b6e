"""Sums of token losses against numpy FP64 and against models whose loss is known."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy_llama
import pytest

from llama_jax import loss, model

FAST = model.Numerics(jnp.float32, jnp.float32, "xla", "chunked", head_chunk_rows=10)  # 24 targets: 10, 10 and 4
PLAIN = model.Numerics(jnp.float32, jnp.float32, "xla", "plain")
ALL = {"chunked": FAST, "plain": PLAIN, "reference": model.reference()}
loss_sum = functools.partial(jax.jit, static_argnums=(0, 1))(loss.loss_sum)
sequence_losses = functools.partial(jax.jit, static_argnums=(0, 1))(loss.sequence_losses)


@pytest.fixture(scope="module")
def case():
    config = numpy_llama.model(layers=1)
    params, tokens = numpy_llama.params(config), numpy_llama.tokens(config, 2).astype(np.int32)
    return config, params, tokens, numpy_llama.token_losses(config, params, tokens)


@pytest.mark.parametrize("name", ALL)
def test_sums_against_numpy(case, name):
    config, params, tokens, expected = case
    for rows in ([1, 1], [1, 0], [0, 1], [0, 0]):
        found = loss_sum(config, ALL[name], params, tokens, np.array(rows, np.float32))
        np.testing.assert_allclose(found, np.array(rows) @ expected.sum(axis=1), rtol=1e-6)
    found = sequence_losses(config, ALL[name], params, tokens)
    assert found.shape == (2,)
    np.testing.assert_allclose(found, expected.sum(axis=1), rtol=1e-6)


def test_fp64_stays_fp64(case):
    config, params, tokens, expected = case
    wide = {name: value.astype(np.float64) for name, value in params.items()}
    with jax.enable_x64(True):
        found = loss_sum(config, model.reference(jnp.float64), wide, tokens, np.ones(2))
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected.sum(), rtol=1e-14)


@pytest.mark.parametrize("numerics", [FAST, model.Numerics()], ids=["float32", "bfloat16"])
def test_workers_under_vmap(case, numerics):
    config, params, tokens, expected = case
    stacked = {name: jnp.stack([value, 0.5 * value]) for name, value in params.items()}
    swapped, rows = np.stack([tokens, tokens[::-1]]), np.array([[1, 0], [1, 1]], np.float32)
    found = jax.jit(jax.vmap(lambda p, t, r: loss.loss_sum(config, numerics, p, t, r)))(stacked, swapped, rows)
    assert found.dtype == jnp.float32
    other = numpy_llama.token_losses(config, {name: 0.5 * value for name, value in params.items()}, tokens)
    # bfloat16: each logit is off by about 1 % of logits of size 1, and the 12 or 24 errors of a sum have mixed signs.
    np.testing.assert_allclose(found, [expected[0].sum(), other.sum()], rtol=1e-6 if numerics is FAST else 1e-2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_uniform_logits_give_ln_v_for_any_split(dtype):
    """A final norm scale of zero makes all logits zero. The mean is ln V to 1e-6, whichever rows count."""
    config = numpy_llama.model(layers=1)
    params = {**numpy_llama.params(config), "model.norm.weight": np.zeros(config.width, np.float32)}
    tokens = numpy_llama.tokens(config, 3).astype(np.int32)
    for head in ("chunked", "plain"):
        numerics = model.Numerics(dtype, dtype, "xla", head, head_chunk_rows=10)
        for rows in ([1, 1, 1], [0, 1, 0], [1, 0, 1]):
            found = loss_sum(config, numerics, params, tokens, np.array(rows, np.float32))
            np.testing.assert_allclose(found / (sum(rows) * 12), math.log(29), rtol=1e-6)


def test_the_target_is_the_next_token():
    """A model that predicts 'input + 1' has loss 0 on 0, 1, 2, ...; one that predicts 'input + 2' has not."""
    V = 14
    config = numpy_llama.model(layers=1, width=V, heads=1, kv_heads=1, vocab_size=V, tied=False)
    params = {name: np.zeros(shape, np.float32) for name, shape in numpy_llama.shapes(config).items()}
    params["model.norm.weight"] += 1
    params["model.embed_tokens.weight"] = np.eye(V, dtype=np.float32)  # blocks of zeros pass it on unchanged
    tokens = np.arange(13, dtype=np.int32)[None]
    for ahead, low, high in ((1, 0, 1e-3), (2, 30, 50), (0, 30, 50)):
        params["lm_head.weight"] = 10 * np.roll(np.eye(V, dtype=np.float32), ahead, axis=0)
        for numerics in ALL.values():
            assert low <= loss_sum(config, numerics, params, tokens, np.ones(1, np.float32)) / 12 <= high
