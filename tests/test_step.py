"""The training step: what an update does, and what workers, padding, accumulation and meshes must not change."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy_llama
import pytest

from llama_jax import arena, config, loss, model, optimizer, step

ROOT = Path(__file__).parent.parent
FAST = model.Numerics(jnp.float32, jnp.float32, "xla", "chunked", head_chunk_rows=40)
B, T = 8, 12
LR = 2.0**-6  # with a weight decay of 1/8 exact in float32


def settings(clip_norm=1.0, **changes):
    raw = config.default()
    raw.model.update({"vocab_size": 29, "context": T, "layers": 1, "width": 24, "heads": 4, "kv_heads": 2, "ffn": 40})
    raw.model.update(changes)
    raw.training.update({"targets_per_parameter": None, "total_updates": 40, "batch_targets": B * T, "microbatch": B})
    raw.lr_schedule.warmup_steps = 5
    raw.optimizer.weight_decay = 0.125
    raw.optimizer.clip_norm = clip_norm
    return config.finalize(raw)


SETTINGS = settings()
LAYOUT = arena.make_layout(SETTINGS.model)
ORACLE = numpy_llama.model(layers=1)


@pytest.fixture(scope="module")
def mesh():
    return step.make_mesh(1, 1)


@pytest.fixture(scope="module")
def one(mesh):
    """The compiled step; each number of workers and shape of a batch compiles it once more."""
    return step.make_step(SETTINGS, FAST, mesh)


def row(seed=0):
    return arena.to_row(numpy_llama.params(ORACLE, seed), LAYOUT)


def state_of(rows, ok=True):
    """Workers that start from different rows, in the middle of training: moments and counts are not zero."""
    rows = np.stack(rows)
    random = np.random.default_rng(9)
    used = np.arange(rows.shape[1]) < LAYOUT.used
    mu = (random.normal(0, 1e-3, rows.shape) * used).astype(np.float32)
    moments = optimizer.Moments(jnp.asarray(mu), jnp.asarray(mu**2), jnp.full(len(rows), 7, jnp.int32))
    return step.State(jnp.asarray(rows), moments, jnp.asarray(ok))


def rates(workers, lr=LR):
    return np.full(workers, lr, np.float32)


def host(tree):
    return jax.tree.map(np.array, tree)


def assert_bitwise(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def assert_rounding(found, expected, bound=2e-6):
    """Equal but for the order of float32 sums: relative to the largest value of each array.

    Adam divides the first moment by the root of the second, so that an element whose gradient is itself rounding error
    may move by up to the learning rate; starting from settled moments (state_of) damps that.
    """
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=bound * np.abs(b).max())


# What an update does.


def test_metrics_and_first_moment_against_numpy_and_fp64_gradients(mesh):
    """Losses from numpy; norm before the clip, factor and clipped gradient of each worker from FP64 gradients."""
    rows = [row(n) for n in range(3)]
    tokens = numpy_llama.tokens(ORACLE, 3 * 5)
    reference = model.reference(jnp.float64)
    grads = []
    with jax.enable_x64(True):
        gradient = jax.jit(
            jax.grad(lambda p, t: loss.loss_sum(ORACLE, reference, p, t, jnp.ones(5, jnp.float64)) / (5 * T))
        )
        for n in range(3):
            params = {name: value.astype(np.float64) for name, value in numpy_llama.params(ORACLE, n).items()}
            grads.append(host(gradient(params, tokens[n::3].astype(np.int32))))
    norms = np.array([np.sqrt(sum(np.sum(g**2) for g in one.values())) for one in grads])
    low, _, high = np.sort(norms)
    assert high > 1.05 * low
    limit = float((low + high) / 2)  # clips some workers and not others: they are not clipped jointly

    update = step.make_step(settings(clip_norm=limit), FAST, mesh)
    start = step.init_state(rows[0], 3, mesh)._replace(params_NP=jnp.asarray(np.stack(rows)))
    state, metrics = update(start, step.make_batch(tokens, 3, 1, B), rates(3))
    for n in range(3):
        expected = numpy_llama.token_losses(ORACLE, numpy_llama.params(ORACLE, n), tokens[n::3].astype(np.int64))
        np.testing.assert_allclose(metrics.loss_sum[n], expected.sum(), rtol=1e-6)
    assert metrics.targets.tolist() == [5 * T] * 3
    np.testing.assert_allclose(metrics.grad_norm, norms, rtol=1e-5)
    factors = np.minimum(1, limit / (norms + 1e-6))
    assert {factor < 1 for factor in factors} == {True, False}
    np.testing.assert_allclose(metrics.clip, factors, rtol=1e-5)
    assert (np.asarray(metrics.clip) == 1).tolist() == (factors == 1).tolist()
    assert bool(metrics.ok)
    for n in range(3):
        for name, moment in arena.from_row(np.asarray(state.moments.mu_NP)[n], LAYOUT).items():
            expected = 0.1 * factors[n] * grads[n][name]
            np.testing.assert_allclose(moment, expected, atol=2e-6 * np.abs(expected).max(), err_msg=name)
    assert state.moments.count_N.tolist() == [1, 1, 1]


def shrunk_once(update, chosen, mesh):
    """Runs an update without targets: 1 - lr * decay = 511/512 exactly; returns the state."""
    layout, params = arena.make_layout(chosen.model), numpy_llama.params(chosen.model)
    batch = step.make_batch(np.zeros((0, T + 1), np.uint16), 2, 1, B)
    state, metrics = update(step.init_state(arena.to_row(params, layout), 2, mesh), batch, rates(2))
    assert metrics.loss_sum.tolist() == metrics.grad_norm.tolist() == metrics.targets.tolist() == [0, 0]
    assert bool(metrics.ok)
    for n in range(2):
        found = arena.from_row(np.asarray(state.params_NP)[n], layout)
        for name, value in params.items():
            kept = np.float32(1 if value.ndim == 1 else 511 / 512)
            np.testing.assert_array_equal(found[name], value * kept, err_msg=name)
    assert not np.asarray(state.params_NP)[:, layout.used :].any()
    assert state.moments.count_N.tolist() == [1, 1]
    return state


def test_zero_gradients_leave_norm_scales_and_shrink_matrices_once(one, mesh):
    """The tied embedding too; the padding stays zero."""
    shrunk_once(one, SETTINGS, mesh)


def test_scanned_untied_layers_and_clip_off(mesh):
    """Scanned layers are stacked only inside of the model: their norm scales aren't decayed either."""
    chosen = settings(clip_norm=0.0, tied=False, layers=2)
    update = step.make_step(chosen, dataclasses.replace(FAST, scan_layers=True), mesh)
    state = shrunk_once(update, chosen, mesh)
    batch = step.make_batch(numpy_llama.tokens(ORACLE, 2), 2, 1, B)
    batch.rows[batch.rows > 0] = 100  # a large gradient of a sum, divided by a small count
    state, metrics = update(state, batch._replace(rows=batch.rows * 0.01), rates(2))
    assert metrics.clip.tolist() == [1.0, 1.0]
    assert (np.asarray(metrics.grad_norm) > 1.2).all()


def test_all_workers_start_from_one_row(mesh):
    state = step.init_state(row(), 3, mesh)
    for params_P in np.asarray(state.params_NP):
        np.testing.assert_array_equal(params_P, row())
    assert not np.any(state.moments.mu_NP)
    assert not np.any(state.moments.nu_NP)
    assert state.moments.count_N.tolist() == [0, 0, 0]
    assert bool(state.ok)


def test_padding_of_the_arena_stays_zero(one):
    state, tokens = state_of([row()]), numpy_llama.tokens(ORACLE, B)
    for _ in range(3):
        state, _ = one(state, step.make_batch(tokens, 1, 1, B), rates(1))
    for array in (state.params_NP, state.moments.mu_NP, state.moments.nu_NP):
        assert not np.asarray(array)[:, LAYOUT.used :].any()


# Workers.


def test_make_batch_deals_the_stream_out_in_turns():
    stream = np.arange(10 * (T + 1), dtype=np.uint16).reshape(10, T + 1)
    for workers, accumulation, microbatch in ((1, 1, 10), (2, 1, 5), (2, 3, 2), (5, 1, 4), (1, 4, 4)):
        batch = step.make_batch(stream, workers, accumulation, microbatch)
        assert batch.tokens.shape == (workers, accumulation, microbatch, T + 1)
        assert batch.rows.shape == (workers, accumulation, microbatch)
        assert batch.tokens.dtype == np.uint16
        for i in range(workers):
            counted = batch.rows[i].reshape(-1).astype(bool)
            mine = batch.tokens[i].reshape(-1, T + 1)
            np.testing.assert_array_equal(mine[: len(stream[i::workers])], stream[i::workers])
            assert counted.tolist() == [True] * (10 // workers) + [False] * (len(counted) - 10 // workers)
            assert not mine[~counted].any()
    for workers, accumulation, microbatch in ((3, 1, 8), (2, 2, 2), (1, 3, 3)):
        with pytest.raises(ValueError, match="10 sequences don't fit"):
            step.make_batch(stream, workers, accumulation, microbatch)


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_equal_separate_runs(one, workers):
    """Each with its own parameters, data and learning rate, over three updates.

    Not bitwise: a batched product on CPU adds in another order than a single one.
    """
    random = np.random.default_rng(4)
    rows = [row(n) for n in range(workers)]
    together = state_of(rows)
    whole = host(together)
    separate = [jax.tree.map(lambda x: jnp.asarray(x[n : n + 1] if x.ndim else x), whole) for n in range(workers)]  # noqa: B023
    lrs = LR * (1 + np.arange(workers, dtype=np.float32))
    for size in (B, B, 5):
        tokens = random.integers(0, 29, (workers * size, T + 1)).astype(np.uint16)
        together, metrics = one(together, step.make_batch(tokens, workers, 1, B), lrs)
        for n in range(workers):
            separate[n], own = one(separate[n], step.make_batch(tokens[n::workers], 1, 1, B), lrs[n : n + 1])
            mine = jax.tree.map(lambda x: np.asarray(x)[n : n + 1] if x.ndim else x, (together, metrics))  # noqa: B023
            assert_rounding(mine, (separate[n], own), bound=1e-5)
    assert np.abs(np.diff(np.asarray(together.params_NP), axis=0)).max() > 0.1


def test_equal_workers_stay_bitwise_equal(one, mesh):
    state = step.init_state(row(), 3, mesh)
    for size in (B, 5):
        tokens = np.repeat(numpy_llama.tokens(ORACLE, size), 3, axis=0)
        state, metrics = one(state, step.make_batch(tokens, 3, 1, B), rates(3))
    for array in (*jax.tree.leaves((state, metrics)),):
        for other in np.asarray(array)[1:] if array.ndim else ():
            np.testing.assert_array_equal(other, np.asarray(array)[0])


# Short updates and accumulation.


def test_a_short_update_equals_a_smaller_batch(one):
    tokens = numpy_llama.tokens(ORACLE, 5)
    padded = one(state_of([row()]), step.make_batch(tokens, 1, 1, B), rates(1))
    exact = one(state_of([row()]), step.make_batch(tokens, 1, 1, 5), rates(1))
    assert_rounding(padded, exact)
    assert padded[1].targets.tolist() == [5 * T]
    # The seeded defect, a division by the full batch, is 5/8 in norm.
    wrong = one(state_of([row()]), step.make_batch(np.concatenate([tokens, tokens[:3]]), 1, 1, B), rates(1))
    with pytest.raises(AssertionError):
        assert_rounding(wrong, exact)


@pytest.mark.parametrize("size", [8, 5])
def test_the_microbatch_changes_rounding_only(one, size):
    tokens = numpy_llama.tokens(ORACLE, size)
    whole = one(state_of([row()]), step.make_batch(tokens, 1, 1, B), rates(1))
    parts = one(state_of([row()]), step.make_batch(tokens, 1, 4, 2), rates(1))
    assert_rounding(parts, whole)


def test_accumulation_with_unequal_counts(one):
    """1 and 7 valid rows: one mean over 8, not the mean of two means; clipped once, after the sum."""
    tokens = numpy_llama.tokens(ORACLE, B)
    parts = np.zeros((1, 2, B, T + 1), np.uint16)
    parts[0, 0, 3], parts[0, 1, 1:] = tokens[0], tokens[1:]
    weights = np.zeros((1, 2, B), np.float32)
    weights[0, 0, 3] = weights[0, 1, 1:] = 1
    found = one(state_of([row()]), step.Batch(parts, weights), rates(1))
    whole = one(state_of([row()]), step.make_batch(tokens, 1, 1, B), rates(1))
    assert_rounding(found, whole)
    # The seeded defect: a mean of means weighs the first row 7 times as much as each of the others.
    skewed = step.make_batch(tokens, 1, 1, B)
    skewed.rows[0, 0, 0] = 7
    wrong = one(state_of([row()]), skewed, rates(1))
    with pytest.raises(AssertionError):
        assert_rounding(wrong[0], whole[0])


# Non-finite updates.


def broken(kind):
    """(rows of three workers, row weights): worker 1 has a loss or gradient that isn't finite."""
    rows, weights = [row(n) for n in range(3)], np.ones((3, 1, B), np.float32)
    norm = next(slot for slot in LAYOUT.slots if slot.name == "model.norm.weight")
    if kind == "nan":
        rows[1][norm.offset] = np.nan
    elif kind == "inf":
        rows[1][norm.offset] = np.inf
    else:  # loss and gradient are finite, but the square of the norm is not
        weights[1] = 1e21
    return rows, weights


@pytest.mark.parametrize("kind", ["nan", "inf", "overflow"])
def test_one_non_finite_worker_blocks_the_update_and_all_later_ones(one, kind):
    rows, weights = broken(kind)
    tokens = numpy_llama.tokens(ORACLE, 3 * B)
    good = step.make_batch(tokens, 3, 1, B)
    before = host(state_of(rows))
    state, metrics = one(state_of(rows), step.Batch(good.tokens, weights), rates(3))
    finite = np.isfinite(metrics.loss_sum) & np.isfinite(metrics.grad_norm)
    assert finite.tolist() == [True, False, True]  # the host can name the worker
    if kind == "overflow":
        assert np.isfinite(metrics.loss_sum).all()
    assert not bool(metrics.ok)
    assert not bool(state.ok)
    assert_bitwise(state._replace(ok=before.ok), before)  # params, moments and counts of all workers

    healthy = state_of([row(n) for n in range(3)], ok=state.ok)
    before = host(healthy)
    for _ in range(2):
        healthy, metrics = one(healthy, good, rates(3))
        assert np.isfinite(metrics.grad_norm).all()
        assert not bool(metrics.ok)
    assert_bitwise(healthy, before)
    # The same update is applied when the flag is up.
    moved, metrics = one(state_of([row(n) for n in range(3)]), good, rates(3))
    assert bool(metrics.ok)
    assert moved.moments.count_N.tolist() == [8, 8, 8]
    assert (np.asarray(moved.params_NP)[:, : LAYOUT.decayed] != before.params_NP[:, : LAYOUT.decayed]).mean() > 0.9


def test_a_non_finite_microbatch_blocks_the_whole_update(one):
    batch = step.make_batch(numpy_llama.tokens(ORACLE, B), 1, 4, 2)
    batch.rows[0, 1, 0] = np.nan
    before = host(state_of([row()]))
    state, metrics = one(state_of([row()]), batch, rates(1))
    assert not bool(metrics.ok)
    assert_bitwise(state._replace(ok=before.ok), before)


# Compilation, donation, debugging.


def test_nothing_recompiles_and_the_state_is_donated(mesh):
    """Full and short updates and all learning rates run through one program."""
    update = step.make_step(SETTINGS, FAST, mesh)
    state = step.init_state(row(), 1, mesh)
    for number, size in enumerate((8, 3, 8, 1, 8)):
        before = state
        batch = step.make_batch(numpy_llama.tokens(ORACLE, size, seed=number), 1, 1, B)
        state, _ = update(state, batch, rates(1, LR / (number + 1)))
        assert before.params_NP.is_deleted()
        assert before.moments.mu_NP.is_deleted()
        assert before.moments.nu_NP.is_deleted()
        assert update._cache_size() == 1


def test_runs_repeat_bitwise(one, mesh):
    def run():
        state = step.init_state(row(), 1, mesh)
        for seed in range(3):
            state, metrics = one(state, step.make_batch(numpy_llama.tokens(ORACLE, B, seed), 1, 1, B), rates(1))
        return host((state, metrics))

    assert_bitwise(run(), run())


@pytest.mark.parametrize(("own", "narrow"), [(True, 0), (False, 7)])
def test_weight_gradients_leave_their_products_in_float32(mesh, own, narrow):
    """In the lowered program of a bfloat16 step; autodiff of the cast weights, the twin, gives seven in bfloat16."""
    numerics = model.Numerics(own_gradients=own)
    update = step.make_step(SETTINGS, numerics, mesh)
    state = step.init_state(row(), 2, mesh)
    text = update.lower(state, step.make_batch(numpy_llama.tokens(ORACLE, 2 * B), 2, 1, B), rates(2)).as_text()
    shapes = {shape for shape in numpy_llama.shapes(ORACLE).values() if len(shape) == 2}
    if own:  # query, key, value are one product, and so are gate and up
        D, d = ORACLE.width, ORACLE.width // ORACLE.heads
        joined = {((ORACLE.heads + 2 * (ORACLE.kv_heads or ORACLE.heads)) * d, D), (2 * ORACLE.ffn, D)}
        shapes = {(D, D), (D, ORACLE.ffn), (ORACLE.vocab_size, D)} | joined
    both = {f"2x{a}x{b}x" for o, i in shapes for a, b in ((o, i), (i, o))}
    results = re.findall(r"stablehlo\.dot_general .* -> tensor<(\S+)>", text)
    kinds = [result.rsplit("x", 1) for result in results]
    found = [kind for shape, kind in kinds if shape + "x" in both]
    assert len(found) == (5 if own else 8)  # q, k, v, o, gate, up, down and the head
    assert found.count("bf16") == narrow
    assert not re.findall(r'"stablehlo\.scatter".*?\}\) : \(.*?\) -> tensor<\S+xbf16>', text, re.DOTALL)


# Several devices.

SEVERAL = """
import sys
sys.path.insert(0, "tests")
import jax, numpy as np
import test_step as t
from llama_jax import step, validation

assert len(jax.devices()) == 4

def place(mesh, tree, spec):
    return jax.tree.map(jax.device_put, tree, step.shardings(mesh, spec))

def run(update, mesh):
    state = place(mesh, t.state_of([t.row(0), t.row(1)]), step.STATE_SPEC)
    for size in (8, 5):
        tokens = t.numpy_llama.tokens(t.ORACLE, 2 * size, seed=size)
        state, metrics = update(state, place(mesh, step.make_batch(tokens, 2, 2, 4), step.BATCH_SPEC), t.rates(2))
    assert update._cache_size() == 1
    return t.host((state, metrics))

def validate(mesh):
    return validation.make_evaluator(t.SETTINGS, t.FAST, mesh)(t.row(), [t.numpy_llama.tokens(t.ORACLE, 10)])

meshes = {shape: step.make_mesh(*shape) for shape in ((1, 1), (2, 2), (1, 4))}
steps = {shape: step.make_step(t.SETTINGS, t.FAST, mesh) for shape, mesh in meshes.items()}
expected = run(steps[1, 1], meshes[1, 1])
assert bool(expected[1].ok) and expected[1].targets.tolist() == [5 * t.T] * 2
for shape in ((2, 2), (1, 4)):
    t.assert_rounding(run(steps[shape], meshes[shape]), expected)
one, several = validate(meshes[1, 1]), validate(meshes[2, 2])
assert one.targets == several.targets == 10 * t.T
np.testing.assert_allclose(several.mean, one.mean, rtol=1e-6)

# A worker that isn't finite blocks those on other devices as well.
rows = [t.row(0), t.row(1)]
rows[1][0] = np.nan
before = t.host(t.state_of(rows))
tokens = np.zeros((16, t.T + 1), np.uint16)  # all of the broken embedding row
batch = place(meshes[2, 2], step.make_batch(tokens, 2, 2, 4), step.BATCH_SPEC)
state, metrics = steps[2, 2](place(meshes[2, 2], t.state_of(rows), step.STATE_SPEC), batch, t.rates(2))
assert np.isfinite(metrics.grad_norm).tolist() == [True, False] and not bool(state.ok)
t.assert_bitwise(t.host(state)._replace(ok=before.ok), before)
print("equal")
"""


def test_a_mesh_of_four_devices_equals_one():
    """Meshes (2, 2) and (1, 4) of four host devices, two workers, accumulation, a short update; the evaluator too."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, "-c", SEVERAL],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip() == "equal"
