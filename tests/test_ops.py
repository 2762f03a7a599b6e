"""Operations against numpy FP64, their twins and the definitions; what the lowered programs compute in which dtype."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import numpy_llama
import pytest

from llama_jax import gate, ops

BF16 = 2.0**-8  # largest relative error of rounding to bfloat16


def draw(seed, *shape, dtype=np.float32, scale=1.0):
    return (np.random.default_rng(seed).normal(0, scale, shape)).astype(dtype)


def rounded(x):
    """float32 values that bfloat16 holds exactly."""
    return np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))


def products(function, *arguments):
    """(left, right, result) types such as 4x5xbf16 of each dot_general in the lowered program."""
    text = jax.jit(function).lower(*arguments).as_text()
    pattern = r"stablehlo\.dot_general .* : \(tensor<(\S+)>, tensor<(\S+)>\) -> tensor<(\S+)>"
    found = re.findall(pattern, text)
    assert len(found) == text.count("stablehlo.dot_general")
    return found


def scatters(function, *arguments):
    """Result types of each scatter in the lowered program."""
    text = jax.jit(function).lower(*arguments).as_text()
    found = re.findall(r'"stablehlo\.scatter".*?\}\) : \(.*?\) -> tensor<(\S+)>', text, re.DOTALL)
    assert len(found) == text.count('"stablehlo.scatter"')
    return found


# Dense.


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_dense_and_its_gradients_against_numpy(wide):
    dtype, tolerance = (np.float64, 1e-14) if wide else (np.float32, 2e-6)
    x, w, dy = draw(0, 3, 2, 3, 5, dtype=dtype), draw(1, 3, 4, 5, dtype=dtype), draw(2, 3, 2, 3, 4, dtype=dtype)
    x64, w64, dy64 = (a.astype(np.float64) for a in (x, w, dy))
    expected = (
        np.stack([x64[n] @ w64[n].T for n in range(3)]),
        np.stack([dy64[n] @ w64[n] for n in range(3)]),
        np.stack([dy64[n].reshape(-1, 4).T @ x64[n].reshape(-1, 5) for n in range(3)]),
    )

    def both(function, x, w, dy):
        y, back = jax.vjp(function, x, w)
        return y, *back(dy)

    with jax.enable_x64(wide):
        for function in (ops.dense, ops.plain_dense):
            # One worker, and three under vmap.
            single = jax.jit(functools.partial(both, function))(x[0], w[0], dy[0])
            several = jax.jit(jax.vmap(functools.partial(both, function)))(x, w, dy)
            for one, many, right in zip(single, several, expected, strict=True):
                assert one.dtype == many.dtype == dtype
                np.testing.assert_allclose(one, right[0], rtol=tolerance, atol=tolerance * 10)
                np.testing.assert_allclose(many, right, rtol=tolerance, atol=tolerance * 10)


def weight_gradient_type(function, vmapped):
    def gradient(x, w, dy):
        return jax.grad(lambda w: jnp.sum(function(x, w) * dy).astype(jnp.float32))(w)

    arguments = jnp.ones((2, 3, 5), jnp.bfloat16), jnp.ones((2, 4, 5)), jnp.ones((2, 3, 4), jnp.bfloat16)
    if vmapped:
        found = products(jax.vmap(gradient), *arguments)
    else:
        found = products(gradient, *(x[0] for x in arguments))
    (only,) = [product for product in found if re.match(r"(2x)?(4x5|5x4)x", product[2])]
    assert only[0].endswith("bf16")
    assert only[1].endswith("bf16")
    return only[2].split("x")[-1]


@pytest.mark.parametrize("vmapped", [False, True])
def test_dense_weight_gradient_leaves_its_product_in_float32(vmapped):
    assert weight_gradient_type(ops.dense, vmapped) == "f32"
    assert weight_gradient_type(ops.plain_dense, vmapped) == "bf16"  # the defect that the own gradient avoids


def test_dense_weight_gradient_keeps_what_bfloat16_loses():
    """256 + 1 in float32; the twin rounds it to 256."""
    x = jnp.asarray([[256.0], [1.0]], jnp.bfloat16)
    w = jnp.zeros((1, 1))
    total = lambda function: jax.grad(lambda w: jnp.sum(function(x, w).astype(jnp.float32)))(w)  # noqa: E731
    assert total(ops.dense).item() == 257.0
    assert total(ops.plain_dense).item() == 256.0


# Embedding, norm, gate.


def test_embed_looks_up_in_float32_and_casts_after():
    table, tokens = draw(0, 7, 3), np.array([[1, 6, 1], [0, 2, 1]], np.int32)
    out = ops.embed(jnp.asarray(table), jnp.asarray(tokens), jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), rounded(table)[tokens])


def embedding_gradient(embed, vmapped=False):
    tokens = jnp.asarray([[[1, 6, 1], [0, 2, 1]]] * 2, jnp.int32)
    weights = jnp.asarray(rounded(draw(1, 2, 2, 3, 3)))

    def gradient(table, tokens, weights):
        return jax.grad(lambda t: jnp.sum(embed(t, tokens, jnp.bfloat16).astype(jnp.float32) * weights))(table)

    if vmapped:
        return jax.vmap(gradient), (jnp.asarray(draw(0, 2, 7, 3)), tokens, weights)
    return gradient, (jnp.asarray(draw(0, 7, 3)), tokens[0], weights[0])


@pytest.mark.parametrize("vmapped", [False, True])
def test_embedding_gradient_is_a_float32_scatter(vmapped):
    gradient, arguments = embedding_gradient(ops.embed, vmapped)
    assert [kind.split("x")[-1] for kind in scatters(gradient, *arguments)] == ["f32"]
    tokens, weights = np.asarray(arguments[1]).reshape(-1, 2, 3), np.asarray(arguments[2]).reshape(-1, 2, 3, 3)
    expected = np.zeros((len(tokens), 7, 3))
    for n in range(len(tokens)):
        np.add.at(expected[n], tokens[n], weights[n])
    np.testing.assert_allclose(np.asarray(gradient(*arguments)).reshape(expected.shape), expected, rtol=1e-6)

    def narrow(table, tokens, dtype):  # the defect: cast first, look up after
        return table.astype(dtype).at[tokens].get(mode="promise_in_bounds")

    gradient, arguments = embedding_gradient(narrow, vmapped)
    assert [kind.split("x")[-1] for kind in scatters(gradient, *arguments)] == ["bf16"]


def test_rms_norm():
    x, scale = draw(0, 2, 3, 8), draw(1, 8)
    expected = np.stack([numpy_llama.norm(row, scale.astype(np.float64), 1e-5) for row in x.astype(np.float64)])
    np.testing.assert_allclose(ops.rms_norm(x, scale, 1e-5, jnp.float32), expected, rtol=2e-6, atol=1e-7)
    # bfloat16 in and out: statistics in float32, so that one rounding of the result is the only error.
    narrow = ops.rms_norm(jnp.asarray(x, jnp.bfloat16), scale, 1e-5, jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16
    expected = np.stack([numpy_llama.norm(row, scale.astype(np.float64), 1e-5) for row in rounded(x).astype(float)])
    np.testing.assert_allclose(narrow.astype(jnp.float32), expected, rtol=BF16 * 1.001)
    # eps counts: without it a row of zeros would be NaN.
    assert not np.any(ops.rms_norm(jnp.zeros((1, 8)), scale, 1e-5, jnp.float32))
    large = ops.rms_norm(jnp.full((1, 8), 0.01), jnp.ones(8), 1e-4, jnp.float32)
    np.testing.assert_allclose(large, 0.01 / np.sqrt(1e-4 + 1e-4), rtol=1e-6)


def check_slope(function, *inputs):
    """Forward- and reverse-mode slope along random directions of one output sum in FP64, against a difference."""
    along = [draw(10 + i, *x.shape, dtype=np.float64) for i, x in enumerate(inputs)]
    weights = draw(9, *jax.eval_shape(function, *inputs).shape, dtype=np.float64)

    @jax.jit
    def value(shift):
        moved = [x + shift * d for x, d in zip(inputs, along, strict=True)]
        return jnp.sum(function(*moved) * weights)

    step = 1e-5
    difference = (value(step) - value(-step)) / (2 * step)
    forward = jax.jit(lambda: jax.jvp(value, (0.0,), (1.0,))[1])()
    reverse = jax.jit(jax.grad(value))(0.0)
    assert abs(difference) > 0.01
    np.testing.assert_allclose([forward, reverse], difference, rtol=1e-7)


def test_slopes_of_small_operations_against_differences():
    with jax.enable_x64(True):
        x, scale = draw(0, 2, 3, 8, dtype=np.float64), draw(1, 8, dtype=np.float64)
        check_slope(lambda x, s: ops.rms_norm(x, s, 1e-5, jnp.float64), x, scale)
        check_slope(gate.swiglu, x, 2 * x[::-1])
        tables = ops.rope_tables(numpy_llama.model(width=8, heads=1), np.arange(3), jnp.float64)
        check_slope(lambda x: ops.plain_rope(x, *tables), x[..., None, :])


def twins():
    """name: (fast form with a gradient of its own, plain form that autodiff takes apart, inputs)."""
    x, scale = draw(0, 2, 3, 8, dtype=np.float64), draw(1, 8, dtype=np.float64)
    w = draw(2, 14, 8, dtype=np.float64)
    tables = ops.rope_tables(numpy_llama.model(width=8, heads=1), np.arange(3), jnp.float64)

    def parts(x, w):
        return tuple(ops.plain_dense(x, part) for part in (w[:6], w[6:10], w[10:]))

    def plain_mlp(x, w, v):
        return ops.plain_dense(gate.swiglu(*jnp.split(ops.plain_dense(x, w), 2, axis=-1)), v)

    def norm(x):
        return x, ops.rms_norm(x, jnp.ones(8), 1e-5, jnp.float64)

    return {
        "dense": (ops.dense, ops.plain_dense, (x, w)),
        "projections": (lambda x, w: ops.projections(x, w, (6, 4, 4)), parts, (x, w)),
        "rope": (lambda x: ops.rope(x, *tables), lambda x: ops.plain_rope(x, *tables), (x[..., None, :],)),
        "mlp": (lambda x, w, v: ops.mlp(x, w, v, "xla"), plain_mlp, (x, w, draw(3, 8, 7, dtype=np.float64))),
        "norm": (lambda x: ops.norm(x, 1e-5, jnp.float64, "xla"), norm, (3 * x * scale,)),
    }


@pytest.mark.parametrize("workers", [None, 3])
@pytest.mark.parametrize("name", ["dense", "projections", "rope", "mlp", "norm"])
def test_own_gradients_against_autodiff_of_the_twin(name, workers):
    with jax.enable_x64(True):
        fast, plain, inputs = twins()[name]
        if workers:
            inputs = tuple(np.stack([x * (n + 1) for n in range(workers)]) for x in inputs)

        def both(function):
            over = jax.vmap(function) if workers else function
            out, pull = jax.vjp(over, *inputs)
            seeds = [draw(20 + i, *x.shape, dtype=np.float64) for i, x in enumerate(jax.tree.leaves(out))]
            return out, pull(jax.tree.unflatten(jax.tree.structure(out), seeds))

        for found, expected in zip(*map(jax.tree.leaves, (both(fast), both(plain))), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


def test_a_concatenated_gradient_is_computed_once():
    """Two products read it: without a barrier XLA repeats the concatenation in front of each on a GPU."""

    def gradient(x, w):
        return jax.grad(lambda x, w: jnp.sum(ops.mlp(x, w, w[:6].T, "xla") ** 2), (0, 1))(x, w)

    text = jax.jit(gradient).lower(draw(0, 4, 8), draw(1, 12, 8)).as_text()
    assert text.count("stablehlo.optimization_barrier") == 1


# Rotary positions.


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rope_is_a_complex_rotation(theta):
    model = numpy_llama.model(width=32, heads=2, rope_theta=theta)
    x = draw(0, 1, 300, 2, 16)
    with jax.enable_x64(True):
        wide = np.asarray(ops.rope(x.astype(np.float64), *ops.rope_tables(model, np.arange(300), jnp.float64)))
    narrow = ops.rope(x, *ops.rope_tables(model, np.arange(300), jnp.float32))
    for head in range(2):
        expected = numpy_llama.rotate(x[0, :, head].astype(np.float64), theta)
        np.testing.assert_allclose(wide[0, :, head], expected, atol=1e-12)
        # Tables are computed in FP64, so that float32 costs no accuracy at far positions.
        np.testing.assert_allclose(narrow[0, :, head], expected, atol=2e-6)
        assert np.abs(expected[2:] - x[0, 2:, head]).max() > 1  # positions beyond 1 do turn


def test_rope_starts_anywhere():
    model = numpy_llama.model(width=16, heads=1)
    x = draw(0, 1, 9, 1, 16)
    whole = ops.rope(x, *ops.rope_tables(model, np.arange(9), jnp.float32))
    later = ops.rope(x[:, 5:], *ops.rope_tables(model, np.arange(5, 9), jnp.float32))
    np.testing.assert_array_equal(whole[:, 5:], later)


@pytest.mark.parametrize(
    ("size", "theta", "factor", "low", "high", "original"),
    [(64, 500_000.0, 8.0, 1.0, 4.0, 8192), (128, 500_000.0, 32.0, 1.0, 4.0, 8192), (16, 10_000.0, 2.0, 1.0, 8.0, 64)],
)
def test_llama3_scaling_equals_transformers(size, theta, factor, low, high, original):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    config = transformers.LlamaConfig(
        hidden_size=size * 2, num_attention_heads=2, rope_parameters=parameters, max_position_embeddings=131_072
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    model = numpy_llama.model(
        width=size * 2,
        heads=2,
        rope_theta=theta,
        rope_scaling="llama3",
        rope_factor=factor,
        rope_low_freq=low,
        rope_high_freq=high,
        rope_original_context=original,
    )
    assert attention_factor == 1.0
    np.testing.assert_allclose(ops.rope_frequencies(model), expected.numpy(), rtol=2e-6)
    unscaled = 1 / theta ** (np.arange(0, size, 2) / size)
    kept, divided = ops.rope_frequencies(model) == unscaled, ops.rope_frequencies(model) == unscaled / factor
    assert kept.any()
    assert divided.any()
    assert not (kept | divided).all()  # some lie in between


# Attention.


def attention_inputs(heads=4, kv_heads=2, dtype=np.float32):
    return (
        draw(0, 2, 11, heads, 8, dtype=dtype),
        draw(1, 2, 11, kv_heads, 8, dtype=dtype),
        draw(2, 2, 11, kv_heads, 8, dtype=dtype),
    )


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_attention_against_numpy(implementation, kv_heads):
    q, k, v = attention_inputs(kv_heads=kv_heads)
    out = jax.jit(ops.attention(implementation))(q, k, v)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    for b in range(2):
        for head in range(4):
            mine = head // (4 // kv_heads)
            expected = numpy_llama.attention(q[b, :, head], k[b, :, mine], v[b, :, mine])
            np.testing.assert_allclose(out[b, :, head], expected, atol=2e-6)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_gradients_of_xla_equal_the_reference(kv_heads):
    inputs, weights = attention_inputs(kv_heads=kv_heads), draw(3, 2, 11, 4, 8)

    def gradients(implementation):
        return jax.jit(jax.grad(lambda *x: jnp.sum(ops.attention(implementation)(*x) * weights), (0, 1, 2)))(*inputs)

    for fast, slow in zip(gradients("xla"), gradients("reference"), strict=True):
        np.testing.assert_allclose(fast, slow, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_attention_looks_back_only(implementation):
    function = jax.jit(ops.attention(implementation))
    q, k, v = attention_inputs()
    before = np.asarray(function(q, k, v))
    k[:, 6:], v[:, 6:] = 9, -9
    after = np.asarray(function(q, k, v))
    np.testing.assert_array_equal(after[:, :6], before[:, :6])
    assert (after[:, 6:] != before[:, 6:]).all()


def test_an_attention_that_looks_ahead_would_be_seen():
    q, k, v = attention_inputs(kv_heads=4)
    leaky = jax.nn.dot_product_attention(q, k, v, is_causal=False)
    expected = numpy_llama.attention(*(x[0, :, 0].astype(np.float64) for x in (q, k, v)))
    assert np.abs(np.asarray(leaky)[0, :, 0] - expected).max() > 0.1


def test_reference_attention_keeps_fp64_and_forward_mode():
    with jax.enable_x64(True):
        inputs = attention_inputs(dtype=np.float64)
        assert jax.eval_shape(ops.reference_attention, *inputs).dtype == np.float64
        check_slope(ops.reference_attention, *inputs)


# Loss head. Workers N = 3, tokens T = 11, width D = 6, vocabulary V = 13.
N, T, D, V = 3, 11, 6, 13


def head_inputs(dtype=np.float32, scale=1.0):
    random = np.random.default_rng(5)
    targets = random.integers(0, V, (N, T)).astype(np.int32)
    weights = (random.random((N, T)) < 0.7).astype(np.float32)
    return draw(3, N, T, D, dtype=dtype), draw(4, N, V, D, dtype=dtype, scale=scale), targets, weights


def numpy_head(h, w, targets, weights):
    """(loss, gradient of h, gradient of w) of one worker in FP64."""
    h, w = np.asarray(h, np.float64), np.asarray(w, np.float64)
    loss, dh, dw = 0.0, np.zeros_like(h), np.zeros_like(w)
    for t in range(len(h)):
        scores = w @ h[t]
        log_sum = scores.max() + np.log(np.exp(scores - scores.max()).sum())
        loss += weights[t] * (log_sum - scores[targets[t]])
        slope = np.exp(scores - log_sum)
        slope[targets[t]] -= 1
        dh[t] = weights[t] * (slope @ w)
        dw += weights[t] * np.outer(slope, h[t])
    return loss, dh, dw


@functools.partial(jax.jit, static_argnums=0)
def head_gradients(chunk, *inputs):
    """Loss and both gradients through the chunked head, or through the plain one (chunk None)."""

    def loss(h, w, targets, weights):
        if chunk is None:
            return ops.plain_head_loss(h, w, targets, weights)
        return ops.head_loss(h, w, targets, weights, chunk)

    value, gradients = jax.value_and_grad(loss, (0, 1))(*inputs)
    return value, *gradients


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("chunk", [None, 4, T, 1000])
def test_head_loss_against_numpy(chunk, wide):
    dtype, tolerance = (np.float64, 1e-13) if wide else (np.float32, 5e-6)
    inputs = head_inputs(dtype)
    with jax.enable_x64(wide):
        several = jax.jit(jax.vmap(functools.partial(head_gradients, chunk)))(*inputs)
        single = head_gradients(chunk, *(x[1] for x in inputs))
        if chunk:  # the value without gradients takes another way
            values = jax.jit(jax.vmap(lambda *x: ops.head_loss(*x, chunk)))(*inputs)
            np.testing.assert_allclose(values, several[0], rtol=tolerance)
            assert values.dtype == dtype
        for n in range(N):
            for found, right in zip(several, numpy_head(*(x[n] for x in inputs)), strict=True):
                assert found.dtype == dtype
                np.testing.assert_allclose(found[n], right, rtol=tolerance, atol=tolerance)
        for one, many in zip(single, several, strict=True):
            np.testing.assert_allclose(one, many[1], rtol=tolerance, atol=tolerance)


def test_head_loss_is_a_sum_over_chunks_of_any_size():
    """The seeded defect, a chunk dropped at the end, changes the result by far more than the tolerance."""
    inputs = [x[0] for x in head_inputs()]
    whole = head_gradients(T, *inputs)
    for found, right in zip(head_gradients(4, *inputs), whole, strict=True):
        np.testing.assert_allclose(found, right, rtol=2e-6, atol=2e-6)
    cut = [x[: T // 4 * 4] if len(x) == T else x for x in inputs]
    assert abs(head_gradients(4, *cut)[0] - whole[0]) > 0.1


def test_head_loss_scales_with_its_cotangent():
    h, w, targets, weights = (x[0] for x in head_inputs())
    plain = head_gradients(4, h, w, targets, weights)[1:]
    scaled = jax.jit(jax.grad(lambda h, w: 0.25 * ops.head_loss(h, w, targets, weights, 4), (0, 1)))(h, w)
    for one, quarter in zip(plain, scaled, strict=True):
        np.testing.assert_array_equal(0.25 * one, quarter)


@pytest.mark.parametrize("chunk", [None, 4])
def test_rows_of_weight_zero_count_nothing(chunk):
    """Not even with activations that would give inf - inf in a careless softmax."""
    h, w, targets, weights = (x[0] for x in head_inputs())
    loss, dh, dw = head_gradients(chunk, h, w, targets, np.zeros_like(weights))
    assert loss == 0
    assert not np.any(dh)
    assert not np.any(dw)
    before = head_gradients(chunk, h, w, targets, weights)
    h = np.where(weights[:, None] > 0, h, 1e4).astype(np.float32)
    after = head_gradients(chunk, h, w, (targets + (weights == 0)) % V, weights)
    np.testing.assert_allclose(after[0], before[0], rtol=1e-6)
    np.testing.assert_allclose(after[2], before[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("chunk", [None, 4])
def test_large_logits_stay_finite_and_right(chunk, dtype):
    """Logits of some 1e4: exp of one overflows every dtype."""
    h, w, targets, weights = (x[0] for x in head_inputs(scale=3e3))
    h, w = rounded(h), rounded(w)
    right = numpy_head(h, w, targets, weights)
    largest = np.abs(h @ w.T).max()
    assert largest > 1e4
    found = head_gradients(chunk, jnp.asarray(h, dtype), w, targets, weights)
    assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in found)
    # A logit is off by one rounding, in log-sum and in the picked one: 2 |l| eps a token.
    rounding = BF16 if dtype == jnp.bfloat16 else 2.0**-22
    assert abs(float(found[0]) - right[0]) <= 2 * largest * rounding * weights.sum()


@pytest.mark.parametrize("chunk", [None, 4])
def test_bfloat16_head_within_the_bound_of_its_roundings(chunk):
    """Inputs are exact in bfloat16, products are summed in float32, so what is rounded is known:

    each logit (relative BF16: |log-probability error| <= 2 M BF16 = s for logits up to M), each dlogit (BF16), and the
    gradient of h. A dlogit p - y is thus off by at most p (e^s - 1) + |p - y| BF16. The plain twin also rounds the
    gradient of w. 1 % is left for float32 sums.
    """
    h, w, targets, weights = (x[0] for x in head_inputs())
    h, w = rounded(h), rounded(w)
    loss, dh, dw = head_gradients(chunk, jnp.asarray(h, jnp.bfloat16), w, targets, weights)
    assert loss.dtype == dw.dtype == jnp.float32
    assert dh.dtype == jnp.bfloat16
    right = numpy_head(h, w, targets, weights)
    scores = h.astype(np.float64) @ w.T
    spread = 2 * np.abs(scores).max() * BF16
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    slope = np.abs(p - np.eye(V)[targets])
    error = weights[:, None] * (p * np.expm1(spread) + slope * BF16) * 1.01
    assert abs(loss - right[0]) <= spread * weights.sum() * 1.01
    last = 0 if chunk else BF16 * 1.01
    assert (np.abs(np.asarray(dw) - right[2]) <= error.T @ np.abs(h) + np.abs(right[2]) * last + 1e-6).all()
    dh_error = np.abs(np.asarray(dh, np.float64) - right[1])
    assert (dh_error <= error @ np.abs(w) + np.abs(right[1]) * BF16 * 1.01 + 1e-6).all()
    # The bound is no free pass: it is a few percent of the gradients themselves.
    assert np.median(error.T @ np.abs(h)) < 0.05 * np.abs(right[2]).max()


def test_head_program_on_bfloat16():
    """bf16 logits and operands, float32 weight gradients, and no [T, V] array outlives its chunk."""
    h, w, targets, weights = (x[0] for x in head_inputs())
    h = jnp.asarray(h, jnp.bfloat16)
    chunk = 4

    def gradients(h, w):
        return jax.grad(lambda h, w: ops.head_loss(h, w, targets, weights, chunk), (0, 1))(h, w)

    found = products(gradients, h, w)
    assert len(found) == 3 * 3  # chunks of 4, 4 and 3: logits, gradient of h, gradient of w
    assert all(left.endswith("bf16") and right.endswith("bf16") for left, right, _ in found)
    results = sorted(result for _, _, result in found)
    assert results == sorted(
        [f"{rows}x{V}xbf16" for rows in (4, 4, 3)] + [f"{rows}x{D}xbf16" for rows in (4, 4, 3)] + [f"{V}x{D}xf32"] * 3
    )

    def kept(loss):
        """Shapes that the forward pass hands to the backward pass."""
        return [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(lambda h, w: jax.vjp(loss, h, w)[1], h, w))]

    own = kept(lambda h, w: ops.head_loss(h, w, targets, weights, chunk))
    assert not [shape for shape, _ in own if V in shape and D not in shape]
    assert sorted(shape for shape, _ in own) == sorted([(T, D), (V, D)])
    # The twin does keep [T, V] in float32, so that the check can fail.
    assert ((T, V), jnp.float32) in kept(lambda h, w: ops.plain_head_loss(h, w, targets, weights))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("vocabulary", [13, 32_000])
def test_uniform_logits_give_the_log_of_the_vocabulary(vocabulary, dtype):
    rows = 6
    h, targets = jnp.asarray(draw(0, rows, D), dtype), np.arange(rows, dtype=np.int32) * (vocabulary // rows)
    for w in (np.zeros((vocabulary, D), np.float32), np.tile(draw(1, 1, D), (vocabulary, 1))):
        means = (
            jax.jit(ops.head_loss, static_argnums=4)(h, w, targets, np.ones(rows, np.float32), 4) / rows,
            jax.jit(ops.plain_head_loss)(h, w, targets, np.ones(rows, np.float32)) / rows,
        )
        np.testing.assert_allclose(means, np.log(vocabulary), rtol=1e-6)
        losses = jax.jit(ops.token_losses, static_argnums=3)(h, w, targets, 4)
        np.testing.assert_allclose(losses, np.log(vocabulary), rtol=1e-6)
