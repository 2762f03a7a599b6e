"""The decoder against Hugging Face and numpy FP64; causality, first and second derivatives, initialization."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_llama
import pytest

from llama_jax import flops, loss, model, ops

FAST = model.Numerics(jnp.float32, jnp.float32, "xla", "chunked", head_chunk_rows=10)
PATHS = {"reference": model.reference(), "fast": FAST}
logits = functools.partial(jax.jit, static_argnums=(0, 1))(model.logits)

VARIANTS = {
    "tied": {"kv_heads": None},
    "grouped heads, untied": {"kv_heads": 2, "tied": False},
    "one key head, theta": {"kv_heads": 1, "rope_theta": 500_000.0},
    "llama3 scaling": {
        "rope_scaling": "llama3",
        "rope_original_context": 32,
        "rope_factor": 4.0,
        "rope_theta": 1000.0,
        "norm_eps": 1e-3,
    },
}


# Values.


def hugging_face(config, params):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling == "llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": config.rope_low_freq,
            "high_freq_factor": config.rope_high_freq,
            "original_max_position_embeddings": config.rope_original_context,
        }
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.ffn,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads or config.heads,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tied,
            rope_parameters=rope,
            max_position_embeddings=256,
            attn_implementation="eager",
        )
    ).eval()
    state = {name: torch.tensor(value) for name, value in params.items()}
    if config.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    llama.load_state_dict(state, strict=True)
    return torch, llama


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_hugging_face(variant):
    config = numpy_llama.model(context=80, **VARIANTS[variant])
    params = numpy_llama.params(config)
    tokens = numpy_llama.tokens(config, 2, length=80).astype(np.int32)
    torch, llama = hugging_face(config, params)
    with torch.no_grad():
        expected = llama(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    for numerics in PATHS.values():
        found = logits(config, numerics, params, tokens)
        assert found.dtype == np.float32
        assert np.abs(found - expected).max() < 1e-4
    assert expected.std() > 0.3  # the comparison is of something
    # The seeded defect, rotation of neighbours instead of halves, is far outside of the bound.
    swapped = dict(params)
    for i in range(config.layers):
        for kind, heads in (("q", config.heads), ("k", config.kv_heads or config.heads)):
            name = f"model.layers.{i}.self_attn.{kind}_proj.weight"
            matrix = params[name].reshape(heads, -1, 2, config.width)
            swapped[name] = matrix.swapaxes(1, 2).reshape(params[name].shape)
    assert np.abs(logits(config, FAST, swapped, tokens) - expected).max() > 1e-2


@pytest.mark.parametrize("variant", ["tied", "grouped heads, untied"])
def test_fp64_logits_equal_numpy(variant):
    config = numpy_llama.model(**VARIANTS[variant])
    params, tokens = numpy_llama.params(config, dtype=np.float64), numpy_llama.tokens(config, 2).astype(np.int32)
    expected = numpy_llama.logits(config, params, tokens)
    with jax.enable_x64(True):
        for numerics in (
            model.reference(jnp.float64),
            dataclasses.replace(FAST, compute=jnp.float64, residual=jnp.float64),
        ):
            found = logits(config, numerics, params, tokens)
            assert found.dtype == np.float64
            # jax.nn.dot_product_attention has its softmax in float32; the reference is FP64 throughout.
            bound = 1e-12 if numerics.attention == "reference" else 1e-5
            np.testing.assert_allclose(found, expected, atol=bound)


@pytest.fixture(scope="module")
def grouped():
    """(config, params, tokens [2, 13]) of one model with grouped heads and an untied head."""
    config = numpy_llama.model(tied=False)
    return config, numpy_llama.params(config), numpy_llama.tokens(config, 2).astype(np.int32)


def test_reference_and_fast_path_agree_in_float32(grouped):
    config, params, tokens = grouped

    @functools.partial(jax.jit, static_argnums=0)
    def both(numerics):
        return jax.value_and_grad(lambda p: loss.loss_sum(config, numerics, p, tokens, jnp.ones(2)))(params)

    (slow, slow_grads), (fast, fast_grads) = both(PATHS["reference"]), both(FAST)
    np.testing.assert_allclose(fast, slow, rtol=1e-6)
    for name in params:
        scale = np.abs(slow_grads[name]).max()
        assert scale > 1e-3, name
        np.testing.assert_allclose(fast_grads[name], slow_grads[name], atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("residual", [jnp.bfloat16, jnp.float32])
def test_bfloat16_stays_near_fp64(grouped, residual):
    """Bound: the longest chain has about 10 roundings a block and 5 beside them, each of relative size at most 2^-8.

    Uniform roundings have a relative rms of at most 2^-8 / sqrt(3); independent ones add in squares, and the norms
    keep the scale: rms error / rms value <= sqrt(25) 2^-8 / sqrt(3) = 1.1 %, doubled for the amplification by softmax
    and gate.
    """
    config, params, tokens = grouped
    expected = numpy_llama.logits(config, params, tokens)
    numerics = model.Numerics(jnp.bfloat16, residual, "xla", "chunked")
    found = logits(config, numerics, params, tokens)
    assert found.dtype == jnp.bfloat16
    error = np.sqrt(np.mean((np.asarray(found, np.float64) - expected) ** 2)) / np.sqrt(np.mean(expected**2))
    assert 1e-4 < error < 0.022  # below 1e-4 it would not have been bfloat16 at all


def test_scan_and_remat_change_nothing(grouped):
    config, params, tokens = grouped

    @functools.partial(jax.jit, static_argnums=0)
    def both(numerics):
        return jax.value_and_grad(lambda p: loss.loss_sum(config, numerics, p, tokens, jnp.ones(2)))(params)

    value, grads = both(FAST)
    for changes in ({"scan_layers": True}, {"remat": True}):
        other, other_grads = both(dataclasses.replace(FAST, **changes))
        np.testing.assert_allclose(other, value, rtol=1e-6)
        for name, grad in grads.items():
            np.testing.assert_allclose(other_grads[name], grad, atol=2e-6 * np.abs(grad).max(), err_msg=str(changes))


def test_remat_recomputes_and_scan_rolls_up(grouped):
    config, params, tokens = grouped

    def program(**changes):
        numerics = dataclasses.replace(FAST, **changes)
        gradient = jax.grad(lambda p: loss.loss_sum(config, numerics, p, tokens, jnp.ones(2)))
        return str(jax.make_jaxpr(gradient)(params))

    assert ("remat" in program(remat=True), "remat" in program()) == (True, False)
    assert ("scan[" in program(scan_layers=True), "scan[" in program()) == (True, False)


# Causality.


@pytest.mark.parametrize("path", PATHS)
def test_no_gradient_flows_back_from_the_future(path):
    """Tokens are all different and the head is untied, so that row j of the table is the embedded input j."""
    config = numpy_llama.model(tied=False, vocab_size=12, context=12)
    params, tokens = numpy_llama.params(config), np.random.default_rng(0).permutation(12).astype(np.int32)[None]

    @jax.jit
    def slopes(table):
        def some_logit(table):
            return jnp.sum(
                model.logits(config, PATHS[path], {**params, "model.embed_tokens.weight": table}, tokens)[0], 1
            )

        return jax.jacrev(some_logit)(table)

    by_position = np.abs(np.asarray(slopes(params["model.embed_tokens.weight"]))[:, tokens[0]]).max(axis=2)
    for i in range(12):
        assert not by_position[i, i + 1 :].any()
        assert (by_position[i, : i + 1] > 0).all()


@pytest.mark.parametrize("path", PATHS)
def test_earlier_logits_are_bitwise_blind_to_later_tokens(path, grouped):
    config, params, tokens = grouped
    before = np.asarray(logits(config, PATHS[path], params, tokens))
    for t in (1, 6, 12):
        changed = tokens.copy()
        changed[0, t] = (changed[0, t] + 1) % config.vocab_size
        after = np.asarray(logits(config, PATHS[path], params, changed))
        np.testing.assert_array_equal(after[0, :t], before[0, :t])
        np.testing.assert_array_equal(after[1], before[1])
        assert (after[0, t:] != before[0, t:]).any(axis=1).all()


# Derivatives in FP64 through the reference path.


@pytest.fixture(scope="module")
def second_order():
    """Compiled gradient and Hessian-vector products of the mean loss, a point and a direction; x64 must be on."""
    config = numpy_llama.model(layers=1, vocab_size=11, context=6, width=8, heads=2, kv_heads=1, ffn=12)
    tokens = numpy_llama.tokens(config, 2).astype(np.int32)

    def mean(params):
        return loss.loss_sum(config, model.reference(jnp.float64), params, tokens, jnp.ones(2)) / 12

    def inner(a, b):
        return sum(jnp.vdot(a[name], b[name]) for name in a)

    functions = {
        "value": jax.jit(mean),
        "gradient": jax.jit(jax.grad(mean)),
        "forward over reverse": jax.jit(lambda p, v: jax.jvp(jax.grad(mean), (p,), (v,))[1]),
        "reverse over reverse": jax.jit(lambda p, v: jax.grad(lambda p: inner(jax.grad(mean)(p), v))(p)),
    }
    point = numpy_llama.params(config, seed=3, dtype=np.float64)
    direction = numpy_llama.params(config, seed=4, dtype=np.float64)
    return functions, point, direction


def shifted(point, direction, step):
    return {name: value + step * direction[name] for name, value in point.items()}


def test_fp64_gradient_of_each_tensor_against_differences(second_order):
    functions, point, direction = second_order
    with jax.enable_x64(True):
        gradient = functions["gradient"](point)
        for name in point:
            assert gradient[name].dtype == np.float64
            along = {**{other: np.zeros_like(v) for other, v in point.items()}, name: direction[name]}
            step = 1e-5
            plus, minus = (functions["value"](shifted(point, along, s)) for s in (step, -step))
            # Truncation is of order step^2, rounding of order 1e-16 / step.
            np.testing.assert_allclose(
                np.vdot(gradient[name], direction[name]),
                (plus - minus) / (2 * step),
                rtol=1e-7,
                atol=1e-9,
                err_msg=name,
            )


def test_fp64_hessian_vector_products(second_order):
    functions, point, direction = second_order
    with jax.enable_x64(True):
        forward = functions["forward over reverse"](point, direction)
        reverse = functions["reverse over reverse"](point, direction)
        step = 1e-5
        plus, minus = (functions["gradient"](shifted(point, direction, s)) for s in (step, -step))
        for name in point:
            difference = (np.asarray(plus[name]) - np.asarray(minus[name])) / (2 * step)
            scale = np.abs(difference).max()
            assert scale > 1e-4, name
            np.testing.assert_allclose(forward[name], difference, atol=1e-6 * scale, err_msg=name)
            np.testing.assert_allclose(forward[name], reverse[name], atol=1e-12 * scale, err_msg=name)


def test_only_the_reference_path_has_forward_mode(grouped):
    config, params, tokens = grouped

    def slope(numerics):
        return jax.jit(
            lambda p: jax.jvp(lambda p: loss.loss_sum(config, numerics, p, tokens, jnp.ones(2)), (p,), (p,))
        ).lower(params)

    slope(PATHS["reference"])
    with pytest.raises(TypeError, match="forward-mode"):
        slope(FAST)


# Names, initialization, binding.


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_and_shapes(variant):
    config = numpy_llama.model(**VARIANTS[variant])
    expected = numpy_llama.shapes(config)
    assert flops.parameter_shapes(config) == expected
    assert list(flops.parameter_shapes(config)) == list(expected)
    assert {name: value.shape for name, value in model.init(config, 0).items()} == expected
    assert flops.unique_params(config) == sum(np.prod(shape) for shape in expected.values())


def test_names_equal_hugging_face():
    config = numpy_llama.model(tied=False)
    _, llama = hugging_face(config, numpy_llama.params(config))
    state = llama.state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == flops.parameter_shapes(config)


def test_initialization():
    """Means and standard deviations within five standard errors of n normal draws: std / sqrt(n), std / sqrt(2 n)."""
    config = numpy_llama.model(vocab_size=500, width=64, ffn=96, layers=3, tied=False, init_std=0.03)
    params = model.init(config, 42)
    for name, value in params.items():
        assert value.dtype == np.float32
        if value.ndim == 1:
            assert (value == 1).all()
            continue
        residual = name.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight"))
        std = 0.03 / np.sqrt(2 * 3) if residual else 0.03
        n = value.size
        assert abs(value.astype(np.float64).mean()) < 5 * std / np.sqrt(n), name
        assert abs(value.astype(np.float64).std() - std) < 5 * std / np.sqrt(2 * n), name
        assert np.abs(value).max() > 3 * std  # not cut off
    matrices = [value.reshape(-1)[:100] for value in params.values() if value.ndim == 2]
    assert len({value.tobytes() for value in matrices}) == len(matrices)  # each has a key of its own


# Fixed for good: a change of these numbers is a change of every seeded run.
GOLDEN_INIT = [-0.0179692842, 0.0063591031, 0.0049194917]


def test_one_seed_gives_one_model():
    config = numpy_llama.model()
    first, other = model.init(config, 42), model.init(config, 43)
    with jax.default_prng_impl("rbg"), jax.threefry_partitionable(False):  # variables of the environment set them too
        again = model.init(config, 42)
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
        assert value.ndim == 1 or (value != other[name]).mean() > 0.99
    golden = first["model.layers.1.mlp.up_proj.weight"][0, :3]
    np.testing.assert_allclose(golden, GOLDEN_INIT, rtol=1e-5)


def test_bind_is_strict(grouped):
    config, params, _ = grouped
    name = "model.layers.0.self_attn.k_proj.weight"
    model.bind(config, FAST, params)
    for wrong in (
        {key: value for key, value in params.items() if key != name},
        {**params, "model.layers.2.mlp.up_proj.weight": params[name]},
        {key.replace("k_proj", "key_proj"): value for key, value in params.items()},
    ):
        with pytest.raises(ValueError, match=r"parameter names differ: .*(k_proj|layers\.2)"):
            model.bind(config, FAST, wrong)
    for shape in (params[name].T, params[name][:, :-1], params[name][None]):
        with pytest.raises(ValueError, match=r"k_proj.weight has shape .*, expected \[12, 24\]"):
            model.bind(config, FAST, {**params, name: shape})
    # Rows beyond the vocabulary would be read by no token and get a share of every softmax.
    table = np.zeros((config.vocab_size + 3, config.width), np.float32)
    with pytest.raises(ValueError, match="lm_head"):
        model.bind(config, FAST, {**params, "lm_head.weight": table})


def test_the_operations_keep_the_twins_apart(grouped, monkeypatch):
    """The reference path must not touch what has a gradient of its own."""
    config, params, tokens = grouped

    def refuse(*_):
        raise AssertionError("own gradient in the reference path")

    for name in ("dense", "head_loss"):
        monkeypatch.setattr(ops, name, refuse)
    jax.eval_shape(lambda p: loss.loss_sum(config, model.reference(), p, tokens, jnp.ones(2)), params)
    with pytest.raises(AssertionError, match="own gradient"):
        jax.eval_shape(lambda p: loss.loss_sum(config, FAST, p, tokens, jnp.ones(2)), params)
