"""The memory estimate against what was measured, and its parts against what JAX keeps for the gradient."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from harness import tiny
from jax._src.cudnn import fused_attention_stablehlo
from ml_collections import FrozenConfigDict

from llama_jax import arena, config, loss, memory, runtime, shards
from llama_jax.runtime import Device

ROOT = Path(__file__).resolve().parent.parent
TPU, T4, HOPPER = Device("tpu", "TPU v5 lite"), Device("gpu", "T4", (7, 5)), Device("gpu", "H200", (9, 0))
GIB = 2**30


def estimate(settings, device):
    choices, rows = runtime.choose(settings, device)[0], runtime.chunk_rows(settings)
    return memory.parts(settings, choices, rows), memory.evaluation(settings, choices, rows)


def test_against_measured_peaks():
    """peak_bytes_in_use of training on an H200; memory_analysis() of the programs compiled for a TPU v5e."""
    parts, _ = estimate(config.load(ROOT / "configs/c4_20m.py"), HOPPER)
    assert sum(parts.values()) / GIB == pytest.approx(13.6, rel=0.05)
    small = {"training.batch_targets": 16 * 1024, "training.microbatch": 16}
    parts, evaluating = estimate(config.load(ROOT / "configs/c4_20m.py", small), TPU)
    assert sum(parts.values()) / GIB == pytest.approx(5.22, rel=0.05)
    state = 12 * 20_404_224  # the program of the evaluation alone needs no moments
    assert (evaluating - state) / GIB == pytest.approx(3.5, rel=0.05)


def kept(settings, device, rows):
    """Bytes that JAX's own differentiation of the loss of `rows` sequences keeps, weights among them."""
    numerics = runtime.numerics(settings, runtime.choose(settings, device)[0])
    params = {
        slot.name: jax.ShapeDtypeStruct(slot.shape, jnp.float32) for slot in arena.make_layout(settings.model).slots
    }
    tokens = jax.ShapeDtypeStruct((rows, settings.model.context + 1), jnp.int32)
    weights, frozen = jax.ShapeDtypeStruct((rows,), jnp.float32), FrozenConfigDict(settings.model)

    def pull(params, tokens, weights):
        return jax.vjp(lambda p: loss.loss_sum(frozen, numerics, p, tokens, weights), params)[1]

    leaves = jax.tree.leaves(jax.eval_shape(pull, params, tokens, weights))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.parametrize("changes", [{}, {"model__kv_heads": 2}, {"model__residual_dtype": "float32"}])
def test_activations_are_what_the_gradient_keeps(changes, monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 92300)
    sizes = {"width": 256, "heads": 4, "ffn": 704, "layers": 6, "vocab_size": 512, "context": 64}
    settings = tiny(
        {f"model.{name}": size for name, size in sizes.items()}
        | {"training.batch_targets": 1024, "lr_schedule.warmup_steps": 1},
        **changes,
    )
    found = (kept(settings, HOPPER, 12) - kept(settings, HOPPER, 4)) / (8 * 64)  # bytes of a token; weights cancel
    # The attention's result is kept in two shapes, which are one array in memory.
    found -= 6 * 2 * 256
    choices = runtime.choose(settings, HOPPER)[0]
    assert memory._activations(settings.model, choices, 8 * 64) / (8 * 64) == pytest.approx(found, rel=0.05)


def test_parts_by_hand():
    # 3,632 parameters in rows of 4,096; 2 workers, 2 microbatches of 4 rows of 16 targets; V 64, D 16, F 32, H 2.
    settings = tiny(decentralized__workers=2, training__sequence_multiple=2, training__microbatch=4)
    parts, _ = estimate(settings, T4)
    layer = 4 * (4 * 16 + 2 * 16 + 3 * 32) + 8
    assert parts == {
        "parameters": 4 * 2 * 4096,
        "moments": 8 * 2 * 4096,
        "gradients": 2 * 4 * 2 * 4096,  # accumulation
        "mixing": 4 * 2 * 4096,
        "activations": 2 * 64 * (layer + 4 * 16 + 2 * 4 * 16),
        "attention scores": 2 * 64 * 16 * 2 * (4 + 8),
        "logits": 2 * 64 * 64 * 2 * 4,
        "batch": 2 * 2 * 2 * 4 * (17 * 2 + 4),
    }
    spread, _ = estimate(tiny(runtime__mesh_data=2, training__microbatch=16), T4)
    alone, _ = estimate(tiny(training__microbatch=16), T4)
    assert spread["activations"] * 2 == alone["activations"] and spread["parameters"] == alone["parameters"]
    outer, _ = estimate(tiny(decentralized__workers=2, training__sequence_multiple=2, training__microbatch=8,
                             decentralized__sync_every=2), T4)  # fmt: skip
    assert outer["outer step"] == 8 * 4096
    remat, _ = estimate(tiny(model__remat=True, model__layers=3), T4)
    full, _ = estimate(tiny(model__layers=3), T4)
    assert remat["activations"] < full["activations"]


def test_constants_that_stand_twice():
    assert memory.ROW_ALIGNMENT == arena.ALIGNMENT
    for vocab in (64, 65_536, 65_537):
        assert memory._id_bytes(tiny(model__vocab_size=vocab)) == int(shards.dtype_for(vocab)[-1])


def test_sizes_for_people():
    expected = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 2**20: "1.0 MiB", 5 * 2**30 // 2: "2.50 GiB"}
    assert {size: memory.text(size) for size in expected} == expected
    assert memory.text(2**43) == "8192.00 GiB"
