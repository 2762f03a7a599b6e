"""Every compiled program of a run, lowered for TPUs and GPUs from this CPU with the choices of those devices.

What a device can't run shows in the lowered program as a custom call of another platform, or has no lowering at all.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import tiny
from jax._src.cudnn import fused_attention_stablehlo
from ml_collections import FrozenConfigDict

from llama_jax import arena, control, generate, loss, model, network, optimizer, outer, runtime, topology, validation
from llama_jax import step as steps
from llama_jax.runtime import Device

TPU = Device("tpu", "TPU v5 lite")
T4, AMPERE, HOPPER = (Device("gpu", kind, of) for kind, of in (("T4", (7, 5)), ("A100", (8, 0)), ("H200", (9, 0))))
NAMES = {"tpu": "tpu", "gpu": "cuda"}  # of the lowering, by platform
CUDNN, MOSAIC = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}, {"mosaic_gpu_v2"}
WIDE = {  # sizes that have kernels
    "model.context": 64,
    "model.width": 64,
    "model.heads": 1,
    "model.ffn": 128,
    "model.vocab_size": 512,
    "training.total_targets": 20 * 1024,
    "training.batch_targets": 1024,
    "training.microbatch": 4,
    "training.sequence_multiple": 4,
    "lr_schedule.warmup_steps": 1,
}


@pytest.fixture(autouse=True)
def cudnn(monkeypatch):
    """Attention by cuDNN asks for the library's version while it is traced, and there is none here."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 92300)


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), tree)


def calls(function, arguments, device):
    """Targets of the custom calls of a jitted function lowered for the platform of a device."""
    lowered = function.trace(*arguments).lower(lowering_platforms=(NAMES[device.platform],))
    return set(re.findall(r"custom_call @([^\s(]+)", lowered.as_text()))


def prepared(device, **changes):
    """(config, numerics, state, batch, learning rates) of a small model on a device, arrays as their shapes."""
    config = tiny(WIDE, **changes)
    workers, accumulation = config.decentralized.workers, config.derived.accumulation
    rows = np.zeros((workers * accumulation * 4, 65), np.uint16)
    size = arena.make_layout(config.model).padded
    arena_NP = jax.ShapeDtypeStruct((workers, size), jnp.float32)
    count_N, ok = jax.ShapeDtypeStruct((workers,), jnp.int32), jax.ShapeDtypeStruct((), bool)
    state = steps.State(arena_NP, optimizer.Moments(arena_NP, arena_NP, count_N), ok)
    batch = like(steps.make_batch(rows, workers, accumulation, 4))
    numerics = runtime.numerics(config, runtime.choose(config, device)[0])
    assert numerics.gate == numerics.kernels == ("mosaic" if device == HOPPER else "xla")
    return config, numerics, state, batch, jax.ShapeDtypeStruct((workers,), jnp.float32)


PACKED = {"decentralized__workers": 4}
FAST = [(TPU, set()), (T4, set()), (AMPERE, CUDNN), (HOPPER, CUDNN | MOSAIC)]


@pytest.mark.parametrize(("device", "expected"), FAST, ids=lambda value: getattr(value, "kind", ""))
@pytest.mark.parametrize("changes", [{"model__remat": True, "model__scan_layers": True}, PACKED], ids=["one", "packed"])
def test_the_step(device, expected, changes):
    config, numerics, state, batch, lr_N = prepared(device, **changes)
    assert (config.derived.accumulation, batch.tokens.shape[0]) in ((4, 1), (1, 4))
    step = steps.make_step(config, numerics, steps.make_mesh(1, 1))
    assert calls(step, (state, batch, lr_N, steps.NO_MIXING), device) == expected


@pytest.mark.parametrize(("device", "expected"), FAST, ids=lambda value: getattr(value, "kind", ""))
def test_evaluation(device, expected):
    config, numerics, state, *_ = prepared(device)
    losses = validation.make_losses(config, numerics, steps.make_mesh(1, 1))
    row_P = jax.ShapeDtypeStruct(state.params_NP.shape[1:], jnp.float32)
    tokens = jax.ShapeDtypeStruct((4, 65), jnp.uint16)
    # Without a gradient: no backward of the attention.
    assert calls(losses, (row_P, tokens), device) == expected - {"__cudnn$fmhaSoftmaxBackward"}
    assert calls(validation.mean_row, (state.params_NP,), device) == set()
    if expected >= MOSAIC:
        # The losses of a batch of 4 x 64 logits come from the kernel, and never are in memory as float32.
        text = losses.trace(row_P, tokens).lower(lowering_platforms=("cuda",)).as_text()
        assert f"256x{config.model.vocab_size}xbf16" in text and f"256x{config.model.vocab_size}xf32" not in text


@pytest.mark.parametrize(("device", "expected"), FAST, ids=lambda value: getattr(value, "kind", ""))
def test_model_and_head(device, expected):
    config, numerics, _, _, _ = prepared(device)
    frozen, f32 = FrozenConfigDict(config.model), jnp.float32
    params = {slot.name: jax.ShapeDtypeStruct(slot.shape, f32) for slot in arena.make_layout(config.model).slots}
    tokens, rows = jax.ShapeDtypeStruct((2, 65), jnp.int32), jax.ShapeDtypeStruct((2,), f32)
    logits = jax.jit(lambda p, t: model.logits(frozen, numerics, p, t[:, 1:]))
    assert calls(logits, (params, tokens), device) == expected - {"__cudnn$fmhaSoftmaxBackward"}
    head = jax.jit(jax.grad(lambda p, t, r: loss.loss_sum(frozen, numerics, p, t, r)))
    assert calls(head, (params, tokens, rows), device) == expected


@pytest.mark.parametrize("device", [TPU, T4, HOPPER], ids=lambda value: value.kind)
def test_sampling(device):
    config, _, _, _, _ = prepared(device)
    params = {
        slot.name: jax.ShapeDtypeStruct(slot.shape, jnp.float32) for slot in arena.make_layout(config.model).slots
    }
    ids, numerics = jax.ShapeDtypeStruct((2, 4), jnp.int32), generate.default_numerics(device)
    assert numerics.compute == (jnp.float32 if device == T4 else jnp.bfloat16)
    arguments = (FrozenConfigDict(config.model), numerics, 3, 5, params, ids, np.float32(1), jax.random.key(0))
    assert calls(generate._generate, arguments, device) <= {"mhlo.topk", "ApproxTopK", "cu_threefry2x32_ffi"}


@pytest.mark.parametrize("device", [TPU, HOPPER], ids=lambda value: value.kind)
@pytest.mark.parametrize("name", topology.NAMES)
def test_mixing_and_the_optimizer(device, name):
    config, _, state, _, lr_N = prepared(device, **PACKED, decentralized__topology=name)
    schedule, layout = steps.make_schedule(config), arena.make_layout(config.model)
    mix = jax.jit(lambda x, phase, gamma: topology.mix(x, schedule, phase, gamma, axis=None))
    assert calls(mix, (state.params_NP, np.int32(0), np.float32(1)), device) == set()
    hyper = optimizer.Hyper(0.9, 0.99, 0.1, 1e-8)
    adamw = jax.jit(lambda p, g, m, lr: optimizer.adamw(hyper, layout.decayed, p, g, m, lr))
    assert calls(adamw, (state.params_NP, state.params_NP, state.moments, lr_N), device) == set()


@pytest.mark.parametrize("device", [TPU, HOPPER], ids=lambda value: value.kind)
def test_measurements_outages_outer_steps_and_control(device):
    mesh = steps.make_mesh(1, 1)
    config, numerics, state, batch, lr_N = prepared(device, **PACKED, decentralized__network__dropout=0.5)
    links = like(network.make_links(config, steps.make_schedule(config))(0))
    mixing = steps.Mixing(np.int32(0), np.float32(1), np.bool_(True), links)
    fast = set() if device == TPU else CUDNN | MOSAIC
    assert calls(steps.make_step(config, numerics, mesh), (state, batch, lr_N, mixing), device) == fast
    assert calls(steps.make_measure(config, mesh), (state, links), device) == set()
    row_P = jax.ShapeDtypeStruct(state.params_NP.shape[1:], jnp.float32)
    config = prepared(device, **PACKED, decentralized__sync_every=2)[0]
    assert calls(outer.make_sync(config, mesh), (state, outer.Outer(row_P, row_P)), device) == set()
    target = {"decentralized__adaptive__mode": "target", "decentralized__adaptive__min_gamma": 0.01}
    config = prepared(device, **PACKED, **target)[0]
    held = like(control.init(mesh))
    assert calls(control.make_control(config, mesh), (state, held, np.int32(1)), device) == set()


def test_a_gpu_only_call_does_not_pass():
    config, numerics, state, batch, lr_N = prepared(HOPPER)
    step = steps.make_step(config, numerics, steps.make_mesh(1, 1))
    # "not found for platform tpu", or what the TPU's own lowering of Pallas kernels asserts about them
    with pytest.raises((NotImplementedError, AssertionError)):
        calls(step, (state, batch, lr_N, steps.NO_MIXING), TPU)
