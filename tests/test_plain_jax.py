"""The plain JAX peer computes the loss, the gradients and the update of our reference path, from its own code."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import tiny
from ml_collections import FrozenConfigDict

from bench import plain_jax
from llama_jax import arena, loss, model, step
from llama_jax import optimizer as optimizers

SIZES = plain_jax.Sizes(width=32, layers=2, heads=4, ffn=48, vocab=96)
CONFIG = tiny(
    {
        "model.width": SIZES.width,
        "model.layers": SIZES.layers,
        "model.heads": SIZES.heads,
        "model.ffn": SIZES.ffn,
        "model.vocab_size": SIZES.vocab,
        "training.microbatch": 4,
        "training.batch_targets": 4 * 16,
        "training.total_targets": 100_000,
    }
)
NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def to_ours(tree):
    """The peer's tree as {Hugging Face name: array}."""
    found = {"model.embed_tokens.weight": tree["table"], "model.norm.weight": tree["norm"]}
    for i, block in enumerate(tree["blocks"]):
        prefix = f"model.layers.{i}."
        found[prefix + "input_layernorm.weight"] = block["attention_norm"]
        found[prefix + "post_attention_layernorm.weight"] = block["mlp_norm"]
        for name, ours in NAMES.items():
            found[f"{prefix}{ours}.weight"] = block[name].T
    return found


@pytest.fixture(scope="module")
def case():
    """(parameters of the peer with scales that are not 1, tokens [4, 17])."""
    params = plain_jax.init(SIZES, 3)
    keys = iter(jax.random.split(jax.random.key(5), 20))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape) if x.ndim == 1 else x, params)
    return params, np.random.default_rng(1).integers(0, SIZES.vocab, (4, 17)).astype(np.uint16)


def test_loss_and_gradients_are_those_of_the_reference_path(case):
    params, tokens = case
    frozen, numerics = FrozenConfigDict(CONFIG.model), model.reference(jnp.float32)

    def ours(named):
        return loss.loss_sum(frozen, numerics, named, jnp.asarray(tokens, jnp.int32), jnp.ones(4)) / (4 * 16)

    expected, expected_grads = jax.jit(jax.value_and_grad(ours))(to_ours(params))
    peer = jax.jit(jax.value_and_grad(lambda p: plain_jax.loss(p, jnp.asarray(tokens, jnp.int32), 4, jnp.float32)))
    value, grads = peer(params)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    named = to_ours(grads)
    assert named.keys() == expected_grads.keys()
    for name, gradient in expected_grads.items():
        scale = np.abs(gradient).max()
        assert scale > 1e-5, name
        np.testing.assert_allclose(named[name], gradient, atol=2e-5 * scale, rtol=0, err_msg=name)


def test_init_has_the_scales_of_ours():
    params = to_ours(plain_jax.init(plain_jax.Sizes(width=64, layers=3, heads=2, ffn=192, vocab=512), 0))
    for name, array in params.items():
        if array.ndim == 1:
            np.testing.assert_array_equal(array, 1)
        else:
            expected = 0.02 / np.sqrt(6) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert np.std(array) == pytest.approx(expected, rel=0.05), name


def test_update_is_that_of_our_step(case):
    params, tokens = case
    recipe, layout = CONFIG.optimizer, arena.make_layout(CONFIG.model)
    assert (recipe.beta1, recipe.beta2, recipe.eps, recipe.weight_decay, recipe.clip_norm) == (0.9, 0.98, 1e-8, 0.1, 1)
    # A gradient norm above 1, so that both clip.
    params = jax.tree.map(lambda x: x * 8.0 if x.ndim > 1 else x, params)
    named = {name: np.asarray(array) for name, array in to_ours(params).items()}
    mesh = step.make_mesh(1, 1)
    state = step.init_state(arena.to_row(named, layout), 1, mesh)
    update = step.make_step(CONFIG, model.reference(jnp.float32), mesh)
    state, metrics = update(state, step.make_batch(tokens, 1, 1, 4), np.full(1, 0.01, np.float32))
    assert metrics.clip[0] < 1 and isinstance(state.moments, optimizers.Moments)
    theirs, peer_step = plain_jax.make_step(4, lr=0.01, dtype=jnp.float32)
    (after, _), value = peer_step((params, theirs.init(params)), tokens)
    np.testing.assert_allclose(value, metrics.loss_sum[0] / 64, rtol=1e-6)
    found = to_ours(after)
    # The first moment is a tenth of the clipped gradient; where that is near eps, AdamW divides rounding by rounding.
    clear = np.abs(np.asarray(state.moments.mu_NP[0])) > 1e-7
    for name, expected in arena.from_row(np.asarray(state.params_NP[0]), layout).items():
        kept = arena.from_row(clear, layout)[name]
        assert kept.mean() > 0.3, name
        np.testing.assert_allclose(np.asarray(found[name])[kept], expected[kept], atol=2e-5, err_msg=name)


def test_times_itself(tmp_path, capsys):
    ids = tmp_path / "ids"
    np.random.default_rng(0).integers(0, 96, 8 * 2 * 9).astype("<u2").tofile(ids)
    words = [f"--tokens={ids}", "--model=32,2,4,48,96", "--context=8", "--rows=2", "--steps=2", "--warmup=1"]
    plain_jax.main(words)
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "plain_jax" and len(found["windows_ms"]) == 3
    assert found["targets_per_s"] == pytest.approx(2 * 8 / found["update_ms"] * 1e3)
    assert 3 < found["loss"] < 6
