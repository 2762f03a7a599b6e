"""What only a GPU can show; skipped elsewhere. Run on one: python -m pytest -q tests/gpu

The fast path at the shapes of the 20M model (cuDNN attention, bfloat16, chunked head, vmapped workers) against the
reference path in float32, and repeatability of the deterministic mode.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import FrozenConfigDict

from bench import component
from llama_jax import arena, config, gate, kernels, loss, model, ops, runtime, step

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.skipif(jax.devices()[0].platform != "gpu", reason="needs a GPU")


def _gradients(settings, numerics, params_NP, layout, tokens_NBS):
    frozen = FrozenConfigDict(settings.model)
    rows = np.ones(tokens_NBS.shape[:2], np.float32)
    found = jax.jit(jax.vmap(jax.value_and_grad(lambda p, t, r: loss.loss_sum(frozen, numerics, p, t, r))))(
        arena.views(params_NP, layout), tokens_NBS, rows
    )
    return jax.tree.map(lambda x: np.asarray(x, np.float64), found)


@pytest.mark.parametrize("workers", [1, 2])
def test_fast_path_against_float32_reference(workers):
    settings = config.load(ROOT / "configs" / "c4_20m.py")
    fast, resolved = runtime.resolve(settings)
    expected = {"attention": "cudnn", "compute_dtype": "bfloat16", "head": "chunked"}
    form = "mosaic" if jax.devices()[0].compute_capability.startswith("9.") else "xla"
    assert resolved == {**expected, "residual_dtype": "bfloat16", "kernels": form, "gate": form, "rotary": form}
    layout = arena.make_layout(settings.model)
    rows = [arena.to_row(model.init(settings.model, seed), layout) for seed in range(workers)]
    params_NP = jnp.asarray(np.stack(rows))
    tokens = np.random.default_rng(0).integers(0, 32000, (workers, 4, 1025)).astype(np.int32)
    with jax.default_matmul_precision("highest"):
        exact = _gradients(settings, model.reference(jnp.float32), params_NP, layout, tokens)
    found = _gradients(settings, fast, params_NP, layout, tokens)
    assert np.all(np.abs(found[0] - exact[0]) / exact[0] < 1e-3)
    for name, gradient in exact[1].items():
        for worker in range(workers):
            error = np.linalg.norm(found[1][name][worker] - gradient[worker]) / np.linalg.norm(gradient[worker])
            assert error < 3e-2, (name, worker, error)  # eight layers of bfloat16 products, 8 bits each


@pytest.mark.parametrize("width", [320, 512, 640, 960, 2048])
@pytest.mark.parametrize("workers", [None, 3])
def test_row_kernels_against_their_twins(width, workers):
    """Rows, and a number of tiles, that don't divide evenly among the blocks; twins in float32 on the same inputs."""
    shape = (*([workers] if workers else []), 8 * 1217)
    keys = jax.random.split(jax.random.key(width), 6)
    x, dy, dh = (jax.random.normal(key, (*shape, width), jnp.bfloat16) for key in keys[:3])
    over = jax.vmap if workers else lambda function: function

    def check(found, expected, bound):
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            ours, theirs = (np.asarray(array, np.float64) for array in (ours, theirs))
            assert np.max(np.abs(ours - theirs)) <= bound * np.max(np.abs(theirs))

    eps, half = 1e-5, jnp.bfloat16
    exact = over(lambda x: kernels.plain_norm(x.astype(jnp.float32), eps, jnp.float32))(x)
    h, inverse = jax.jit(over(lambda x: kernels.norm(x, eps, half)))(x)
    check((h, inverse), exact, 2**-8)
    exact = over(kernels.plain_norm_gradient)(*(array.astype(jnp.float32) for array in (h, inverse, dh, dy)))
    check(jax.jit(over(kernels.norm_gradient))(h, inverse, dh, dy), exact, 2**-8)


@pytest.mark.parametrize(("width", "ffn", "workers"), [(320, 896, None), (320, 896, 3), (64, 128, None)])
def test_gate_kernels_against_the_plain_form(width, ffn, workers):
    """A number of tiles that doesn't divide evenly among the blocks; scale 30: gates that are fully open and closed."""
    more = (workers,) if workers else ()
    keys = jax.random.split(jax.random.key(width), 4)
    h, dy = (jax.random.normal(key, (*more, 64 * 97, width), jnp.bfloat16) for key in keys[:2])
    w_DF = (ffn**-0.5 * jax.random.normal(keys[3], (*more, width, ffn))).astype(jnp.bfloat16)
    over = jax.vmap if workers else lambda function: function
    products, gradient = jax.jit(over(gate.products)), jax.jit(over(gate.gradient))
    for scale in (1.0, 30.0):
        w_GD = (scale * width**-0.5 * jax.random.normal(keys[2], (*more, 2 * ffn, width))).astype(jnp.bfloat16)
        gate_up, product = products(h, w_GD)
        with jax.default_matmul_precision("highest"):
            exact = over(gate.plain_products)(h.astype(jnp.float32), w_GD.astype(jnp.float32))
            exact_gradient = over(gate.plain_gradient)(*(x.astype(jnp.float32) for x in (dy, w_DF, gate_up)))
        results = (gate_up, product, gradient(dy, w_DF, gate_up))
        for found, expected in zip(results, (*exact, exact_gradient), strict=True):
            found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
            assert np.max(np.abs(found - expected)) <= 2**-7 * np.max(np.abs(expected))
            assert np.linalg.norm(found - expected) <= 2**-8 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("width", "context", "sequences", "workers"), [(320, 1024, 7, None), (320, 512, 3, 3), (64, 64, 5, None)]
)
def test_rotated_projections_against_the_plain_form(width, context, sequences, workers):
    """Other positions, not whole turns of the blocks, one head; tables that no two positions share."""
    more = (workers,) if workers else ()
    keys = jax.random.split(jax.random.key(width), 2)
    h = jax.random.normal(keys[0], (*more, sequences, context, width), jnp.bfloat16)
    w_OD = width**-0.5 * jax.random.normal(keys[1], (*more, 3 * width, width), jnp.float32)
    settings = FrozenConfigDict({"width": width, "heads": width // 64, "rope_theta": 1e4, "rope_scaling": "none"})
    tables = ops.rope_tables(settings, np.arange(context), jnp.float32)

    def plain(h, w_OD):
        q, k, v = (ops.plain_dense(h, part).reshape(*h.shape[:2], -1, 64) for part in jnp.split(w_OD, 3))
        return ops.plain_rope(q, *tables), ops.plain_rope(k, *tables), v

    over = jax.vmap if workers else lambda function: function
    seeds = [jax.random.normal(key, (*h.shape[:-1], width // 64, 64), h.dtype) for key in jax.random.split(keys[0], 3)]

    def both(function, h, w_OD, seeds):
        out, pull = jax.vjp(over(function), h, w_OD)
        return out, pull(tuple(seeds))

    found = jax.jit(
        lambda *given: both(
            lambda h, w: ops.rotated_projections(h, w, (width // 64,) * 2 + (64,), tables, "mosaic"), *given
        )
    )(h, w_OD, seeds)
    with jax.default_matmul_precision("highest"):
        wide = [seed.astype(jnp.float32) for seed in seeds]
        expected = both(plain, h.astype(jnp.float32), w_OD.astype(h.dtype).astype(jnp.float32), wide)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert np.max(np.abs(ours - theirs)) <= 2**-6 * np.max(np.abs(theirs))
        assert np.linalg.norm(ours - theirs) <= 2**-7 * np.linalg.norm(theirs)


@pytest.mark.parametrize("case", ["ordinary", "large", "nearly equal", "one token dominates"])
@pytest.mark.parametrize("vocab", [32000, 49152])
def test_softmax_kernel_against_its_twin(case, vocab):
    keys = jax.random.split(jax.random.key(7), 3)
    scale = {"ordinary": 2.0, "large": 200.0, "nearly equal": 1e-3, "one token dominates": 1.0}[case]
    logits = scale * jax.random.normal(keys[0], (3, 1001, vocab), jnp.float32)
    if case == "one token dominates":
        logits = logits.at[:, :, 5].add(60.0)
    logits = logits.astype(jnp.bfloat16)
    targets = jax.random.randint(keys[1], (3, 1001), 0, vocab).at[:, :9].set(5).at[0, 0].set(0).at[0, 1].set(vocab - 1)
    weights = jax.random.uniform(keys[2], (3, 1001)).at[:, 10].set(0.0)
    gradient, losses = jax.jit(jax.vmap(kernels.softmax_gradient))(logits, targets, weights)
    exact, exact_losses = jax.vmap(kernels.plain_softmax_gradient)(logits.astype(jnp.float32), targets, weights)
    bounds = {"rtol": 2e-6, "atol": 2e-5 * max(1.0, scale / 20)}
    np.testing.assert_allclose(losses, exact_losses, **bounds)
    np.testing.assert_allclose(jax.jit(jax.vmap(kernels.token_losses))(logits, targets), exact_losses, **bounds)
    error = np.abs(np.asarray(gradient, np.float32) - np.asarray(exact))
    assert np.all(error <= 2**-7 * np.abs(np.asarray(exact)) + 1e-7)
    assert not np.any(np.asarray(gradient[:, 10], np.float32))


def test_deterministic_runs_are_bitwise_equal(tmp_path):
    overrides = {
        "name": "deterministic",
        "runtime.deterministic": True,
        "data.source": "synthetic",
        "training.targets_per_parameter": None,
        "training.total_updates": 12,
        "training.batch_targets": 32 * 1024,
        "training.microbatch": 32,
        "training.checkpoint_policy": "none",
        "lr_schedule.warmup_steps": 4,
        "evaluation.subset_sequences": 64,
        "evaluation.full_at_end": False,
    }
    command = [sys.executable, "-m", "llama_jax.main", "--config=configs/c4_20m.py"]
    command += [f"--config.{field}={value}" for field, value in overrides.items()]
    curves = []
    for name in ("first", "second"):
        subprocess.run([*command, f"--workdir={tmp_path / name}"], cwd=ROOT, check=True, env={**os.environ})
        lines = [json.loads(text) for text in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        curves.append([(line["loss"], line.get("grad_norm")) for line in lines])
    assert curves[0] == curves[1]
    assert np.isfinite([value for pair in curves[0] for value in pair if value is not None]).all()


def test_step_donates_and_blocks_nonfinite_updates():
    settings = config.load(ROOT / "configs" / "c4_20m.py", {"training.batch_targets": 8192, "training.microbatch": 8})
    fast, _ = runtime.resolve(settings)
    mesh, layout = step.make_mesh(1, 1), arena.make_layout(settings.model)
    state = step.init_state(arena.to_row(model.init(settings.model, 0), layout), 1, mesh)
    update = step.make_step(settings, fast, mesh)
    tokens = np.random.default_rng(1).integers(0, 32000, (8, 1025)).astype(np.uint16)
    good = step.make_batch(tokens, 1, 1, 8)
    lr = np.full(1, 1e-3, np.float32)
    before = np.asarray(state.params_NP)
    state, measured = update(state, good._replace(rows=good.rows * np.nan), lr)
    assert not measured.ok and not state.ok
    np.testing.assert_array_equal(before, np.asarray(state.params_NP))
    state, measured = update(state, good, lr)
    assert not measured.ok
    np.testing.assert_array_equal(before, np.asarray(state.params_NP))


@pytest.mark.parametrize("name", ["attention", "head", "norm", "mlp", "projections"])
def test_swapped_components_are_as_exact(name):
    """At the shape of the 20M model; a recipe has such tests at its own."""
    settings = config.load(ROOT / "configs" / "c4_20m.py")
    resolved = runtime.resolve(settings)[1]
    swaps = {
        "attention": ({"attention": "xla"}, {"attention": resolved["attention"]}),
        "head": ({"head": "plain"}, {"head": "chunked", "chunk_rows": 1024, "kernels": resolved["kernels"]}),
        "norm": ({"kernels": "xla"}, {"kernels": resolved["kernels"]}),
        "mlp": ({"gate": "xla"}, {"gate": resolved["gate"]}),
        "projections": ({"rotary": "xla"}, {"rotary": resolved["rotary"]}),
    }
    found = component.test(name, *swaps[name], settings.model, "bfloat16", 2)
    assert found["passed"], found["worst"]
