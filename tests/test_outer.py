"""Local steps with an outer optimizer, and packed runs whose workers have hyperparameters of their own."""

import harness
import numpy as np
import optax
import pytest
from harness import tiny

from llama_jax import arena, config, outer, step
from llama_jax.errors import ConfigError, Preempted

PACKED = {
    "decentralized.workers": 3,
    "training.sequence_multiple": 3,
    "training.batch_targets": 15 * 16,
    "training.microbatch": 5,
    "decentralized.topology": "disconnected",
    "log.consensus_every": 1,
}


def state_of(settings, params_NP, mesh):
    state = step.init_state(params_NP[0], params_NP.shape[0], mesh)
    return state._replace(params_NP=step.jax.device_put(params_NP, state.params_NP.sharding))


def rounds(settings, count):
    """Outer steps from random local progress: [(rows before, rows after)], every row equal to the first afterwards."""
    mesh, draw = step.make_mesh(1, 1), np.random.default_rng(0)
    width = arena.make_layout(settings.model).padded
    workers = settings.decentralized.workers
    state = state_of(settings, np.tile(draw.standard_normal(width).astype(np.float32), (workers, 1)), mesh)
    met, sync, found = outer.init(state, mesh), outer.make_sync(settings, mesh), []
    start = np.asarray(met.params_P, np.float64)
    for _ in range(count):
        rows = np.asarray(state.params_NP) + draw.standard_normal((workers, width)).astype(np.float32)
        state, met = sync(state_of(settings, rows, mesh), met)
        after = np.asarray(state.params_NP)
        assert (after == after[0]).all()
        np.testing.assert_array_equal(after[0], np.asarray(met.params_P))
        found.append((rows.astype(np.float64), after[0].astype(np.float64)))
    return start, found


def test_fedavg_is_the_mean():
    settings = tiny(PACKED, decentralized__sync_every=2, decentralized__outer_lr=1.0, decentralized__outer_momentum=0.0)
    for rows, after in rounds(settings, 3)[1]:
        np.testing.assert_allclose(after, rows.mean(axis=0), rtol=0, atol=2e-6)


@pytest.mark.parametrize("nesterov", [True, False])
def test_outer_steps_are_those_of_optax(nesterov):
    settings = tiny(PACKED, decentralized__sync_every=2, decentralized__outer_nesterov=nesterov)
    point, found = rounds(settings, 5)
    sgd = optax.sgd(0.7, momentum=0.9, nesterov=nesterov)
    memory = sgd.init(point)
    for rows, after in found:
        change, memory = sgd.update(point - rows.mean(axis=0), memory)
        point = point + np.asarray(change)
        np.testing.assert_allclose(after, point, rtol=0, atol=2e-5)


def test_one_worker_looks_ahead():
    settings = tiny(decentralized__sync_every=1, decentralized__outer_momentum=0.0)
    point, found = rounds(settings, 2)
    for rows, after in found:  # Lookahead (Zhang et al. 2019): slow += lr (fast - slow)
        point = point + 0.7 * (rows[0] - point)
        np.testing.assert_allclose(after, point, rtol=0, atol=2e-6)


def test_a_state_that_is_not_ok_stays():
    settings, mesh = tiny(PACKED, decentralized__sync_every=2), step.make_mesh(1, 1)
    width = arena.make_layout(settings.model).padded
    rows = np.random.default_rng(1).standard_normal((3, width)).astype(np.float32)
    state = state_of(settings, rows, mesh)
    met = outer.init(state, mesh)
    state, met = outer.make_sync(settings, mesh)(state._replace(ok=step.jax.numpy.asarray(False)), met)
    np.testing.assert_array_equal(np.asarray(state.params_NP), rows)
    np.testing.assert_array_equal(np.asarray(met.params_P), rows[0])


def test_workers_meet_after_every_third_update_and_resume_in_between(tmp_path):
    settings = tiny(PACKED, decentralized__sync_every=3)
    harness.run(settings, tmp_path / "whole")
    distances = [line["consensus_distance"] for line in harness.lines(tmp_path / "whole", "train")]
    assert [distance < 1e-9 for distance in distances] == [update % 3 == 0 for update in range(1, len(distances) + 1)]
    for asked in (2, 5, 7):
        folder = tmp_path / f"stopped{asked}"
        with pytest.raises(Preempted):
            harness.run(settings, folder, harness.StopAfter(asked))
        harness.run(settings, folder)
        assert harness.outcome(folder)["arrays"] == harness.outcome(tmp_path / "whole")["arrays"]


def test_disconnected_workers_with_their_own_settings_are_single_runs(tmp_path):
    own = {"lr": "0.001, 0.01, 0.003", "beta1": "0.8,0.9,0.95", "beta2": "0.9,0.98,0.99", "weight_decay": "0,0.1,0.3"}
    settings = tiny(PACKED | {f"decentralized.worker_{name}": text for name, text in own.items()})
    mesh = step.make_mesh(1, 1)
    layout = arena.make_layout(settings.model)
    numerics = harness.builds.runtime.resolve(settings)[0]
    row = arena.to_row(harness.builds.model.init(settings.model, 0), layout)
    packed, packed_step = step.init_state(row, 3, mesh), step.make_step(settings, numerics, mesh)
    draw = np.random.default_rng(2)
    batches = [draw.integers(0, 64, (15, 17)).astype(np.uint16) for _ in range(4)]
    peaks = config.per_worker(settings, "lr")
    for rows in batches:
        packed, _ = packed_step(packed, step.make_batch(rows, 3, 1, 5), np.asarray(peaks, np.float32))
    for worker in range(3):
        changes = {f"optimizer.{name}": float(text.split(",")[worker]) for name, text in own.items()}
        alone_settings = tiny(changes, training__batch_targets=80, training__microbatch=5)
        alone, alone_step = step.init_state(row, 1, mesh), step.make_step(alone_settings, numerics, mesh)
        for rows in batches:
            lr_N = np.asarray([peaks[worker]], np.float32)
            alone, _ = alone_step(alone, step.make_batch(rows[worker::3], 1, 1, 5), lr_N)
        np.testing.assert_allclose(
            np.asarray(packed.params_NP[worker]), np.asarray(alone.params_NP[0]), rtol=2e-5, atol=2e-6
        )


@pytest.mark.parametrize(
    "text, reason", [("0.1,0.2", "has 2 numbers"), ("1,x,2", "is not a number"), ("1,2,-3", "-3.0")]
)
def test_bad_settings_of_workers_are_refused(text, reason):
    with pytest.raises(ConfigError, match=f"decentralized.worker_lr.*{reason}"):
        tiny(PACKED, decentralized__worker_lr=text)
