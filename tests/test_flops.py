"""Shapes, counts and FLOPs by hand."""

import math
from types import SimpleNamespace

import pytest

from llama_jax import flops

MODELS = {  # layers, width, heads, ffn
    "20m": (8, 320, 5, 896, 20_403_520),
    "50m": (10, 512, 8, 1408, 48_507_392),
    "90m": (14, 640, 10, 1792, 91_605_120),
}


def model(layers, width, heads, ffn, kv_heads=None, tied=True, vocab_size=32_000):
    return SimpleNamespace(
        vocab_size=vocab_size, layers=layers, width=width, heads=heads, kv_heads=kv_heads, ffn=ffn, tied=tied
    )


@pytest.mark.parametrize("size", MODELS)
def test_counts(size):
    layers, width, heads, ffn, expected = MODELS[size]
    one = model(layers, width, heads, ffn)
    by_hand = layers * (4 * width**2 + 3 * width * ffn + 2 * width) + width + 32_000 * width
    assert flops.unique_params(one) == by_hand == expected
    assert flops.non_embedding_params(one) == by_hand - 32_000 * width
    untied = model(layers, width, heads, ffn, tied=False)
    assert flops.unique_params(untied) == by_hand + 32_000 * width
    assert flops.non_embedding_params(untied) == flops.non_embedding_params(one)
    assert flops.flops_per_target(one) == 6 * by_hand
    assert flops.flops_per_target(untied) == 6 * by_hand  # the output projection once, the lookup not at all


def test_shapes_with_grouped_heads():
    one = model(2, 24, 6, 40, kv_heads=2, tied=False, vocab_size=11)
    shapes = flops.parameter_shapes(one)
    assert len(shapes) == 2 + 2 * 9 + 1
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (11, 24)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (24, 24)
    assert (
        shapes["model.layers.1.self_attn.k_proj.weight"] == shapes["model.layers.1.self_attn.v_proj.weight"] == (8, 24)
    )
    assert shapes["model.layers.1.mlp.gate_proj.weight"] == (40, 24)
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (24, 40)
    assert sum(math.prod(shape) for shape in shapes.values()) == flops.unique_params(one)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("Tesla T4", 65e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GB200", 2500e12),
        ("nvidia h200", 989e12),
        ("TPU v5e", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v6e", 918e12),
        ("TPU v4", 275e12),
        ("TPU v4 lite", None),
        ("NVIDIA A100X", None),
        ("NVIDIA L40", None),
        ("NVIDIA T400 4GB", None),
        ("cpu", None),
    ],
)
def test_peaks(kind, peak):
    assert flops.peak_flops(kind) == peak


def test_mfu():
    one = model(*MODELS["20m"][:4])
    assert flops.mfu(one, 1e6, "NVIDIA H200") == pytest.approx(6 * 20_403_520 * 1e6 / 989e12, rel=1e-15)
    assert flops.mfu(one, 4e6, "NVIDIA H200", devices=4) == flops.mfu(one, 1e6, "NVIDIA H200")
    assert flops.mfu(one, 1e6, "cpu") is None
