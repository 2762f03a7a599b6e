"""Rows of named parameters: where tensors lie, round trips, refusals, gradients."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import numpy_llama
import pytest

from llama_jax import arena

CONFIGS = {"tied": numpy_llama.model(), "untied": numpy_llama.model(tied=False), "deep": numpy_llama.model(layers=3)}


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def test_matrices_first_then_norm_scales_then_padding(config):
    layout, shapes = arena.make_layout(config), numpy_llama.shapes(config)
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    scales = [name for name, shape in shapes.items() if len(shape) == 1]
    assert [slot.name for slot in layout.slots] == matrices + scales
    assert len(scales) == 2 * config.layers + 1
    offset = 0
    for slot in layout.slots:
        assert (slot.offset, slot.shape, slot.size) == (offset, shapes[slot.name], np.prod(shapes[slot.name]))
        assert slot.decay == (len(slot.shape) == 2) == (slot.offset < layout.decayed)
        offset += slot.size
    assert layout.used == offset
    assert layout.decayed == layout.used - len(scales) * config.width
    assert layout.padded % 1024 == 0
    assert 0 <= layout.padded - layout.used < 1024


def test_no_padding_where_none_is_needed():
    """A block of width D = F = 32 is 7 D^2 + 2 D, so that a vocabulary of 61 makes it 9 x 1024 exactly."""
    config = numpy_llama.model(layers=1, width=32, heads=1, kv_heads=1, ffn=32, vocab_size=61)
    layout = arena.make_layout(config)
    assert layout.padded == layout.used == 7 * 32 * 32 + 2 * 32 + 61 * 32 + 32 == 9 * 1024


def test_describe_is_plain_json(config):
    described = arena.make_layout(config).describe()
    assert json.loads(json.dumps(described)) == described
    assert described[1] == {
        "name": "model.layers.0.self_attn.q_proj.weight",
        "offset": 29 * 24,
        "shape": [24, 24],
        "decay": True,
    }


def test_row_round_trip(config):
    layout, params = arena.make_layout(config), numpy_llama.params(config)
    row = arena.to_row(params, layout)
    assert row.shape == (layout.padded,)
    assert row.dtype == np.float32
    assert not row[layout.used :].any()
    assert row[: layout.used].all()
    again = arena.from_row(row, layout)
    assert again.keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(again[name], value)
    assert np.count_nonzero(row) == sum(np.count_nonzero(value) for value in params.values())


def test_views_and_pack_round_trip(config):
    layout = arena.make_layout(config)
    rows = [numpy_llama.params(config, seed) for seed in range(3)]
    arena_NP = np.stack([arena.to_row(params, layout) for params in rows])
    tensors = jax.jit(lambda a: arena.views(a, layout))(arena_NP)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, np.stack([params[name] for params in rows]))
    np.testing.assert_array_equal(jax.jit(lambda t: arena.pack(t, layout))(tensors), arena_NP)


def test_packing_ignores_the_order_of_the_dictionary(config):
    layout, params = arena.make_layout(config), numpy_llama.params(config)
    backwards = dict(reversed(params.items()))
    np.testing.assert_array_equal(arena.to_row(backwards, layout), arena.to_row(params, layout))
    packed = arena.pack({name: jnp.asarray(value[None]) for name, value in backwards.items()}, layout)
    np.testing.assert_array_equal(packed[0], arena.to_row(params, layout))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("model.norm.weight"), r"names differ: model\.norm\.weight"),
        (lambda p: p.update(extra=p["model.norm.weight"]), "names differ: extra"),
        (lambda p: p.update({"lm_head.weight": p["model.embed_tokens.weight"]}), "lm_head"),
        (lambda p: p.update({"model.norm.weight": np.ones(23, np.float32)}), r"float32\[23\], expected float32\[24\]"),
        (lambda p: p.update({"model.norm.weight": np.ones((1, 24), np.float32)}), r"float32\[1, 24\]"),
        (lambda p: p.update({"model.norm.weight": np.float32(1)}), r"float32\[\]"),
        (lambda p: p.update({"model.norm.weight": np.ones(24, np.float64)}), r"float64\[24\], expected float32"),
        (lambda p: p.update({"model.norm.weight": np.ones(24, np.float16)}), "float16"),
        (lambda p: p.update({"model.norm.weight": np.ones(24, jnp.bfloat16)}), "bfloat16"),
        (
            lambda p: p.update(
                {"model.layers.0.self_attn.k_proj.weight": p["model.layers.0.self_attn.k_proj.weight"].T}
            ),
            r"k_proj\.weight is float32\[24, 12\], expected float32\[12, 24\]",
        ),
    ],
)
def test_foreign_tensors_are_refused(change, message):
    params = numpy_llama.params(CONFIGS["tied"])
    change(params)
    with pytest.raises(ValueError, match=message):
        arena.to_row(params, arena.make_layout(CONFIGS["tied"]))


def test_gradient_through_views_and_pack_is_the_direct_one(config):
    """Of a function of the tensors: packed gradients of the views = the gradient through the slices of the arena."""
    layout = arena.make_layout(config)
    arena_NP = jnp.stack([arena.to_row(numpy_llama.params(config, seed), layout) for seed in range(2)])

    weight = {slot.name: i + 1.0 for i, slot in enumerate(layout.slots)}

    def value(tensors):
        return sum(jnp.sum(jnp.sin(tensor) * weight[name]) for name, tensor in tensors.items())

    packed = jax.jit(lambda a: arena.pack(jax.grad(value)(arena.views(a, layout)), layout))(arena_NP)
    direct = jax.jit(jax.grad(lambda a: value(arena.views(a, layout))))(arena_NP)
    np.testing.assert_array_equal(packed, direct)
    assert not np.any(packed[:, layout.used :])
    expected = {name: np.float32(weight[name]) * np.cos(value) for name, value in numpy_llama.params(config).items()}
    np.testing.assert_allclose(packed[0], arena.to_row(expected, layout), rtol=1e-5, atol=1e-6)
