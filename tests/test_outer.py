"""Local steps with an outer optimizer, and packed runs whose workers have hyperparameters of their own."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import tiny

from llama_jax import arena, config, loss, model, outer, step
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
    return state._replace(params_NP=jax.device_put(params_NP, state.params_NP.sharding))


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
    state, met = outer.make_sync(settings, mesh)(state._replace(ok=jnp.asarray(False)), met)
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


def test_disconnected_workers_with_their_own_settings_are_single_runs():
    """In FP64: in float32 AdamW makes the rounding of a gradient near zero large."""
    with jax.enable_x64(True):
        compare_with_single_runs(model.reference(jnp.float64))


def compare_with_single_runs(numerics):
    own = {"lr": "0.001, 0.01, 0.003", "beta1": "0.8,0.9,0.95", "beta2": "0.9,0.98,0.99", "weight_decay": "0,0.1,0.3"}
    settings = tiny(PACKED | {f"decentralized.worker_{name}": text for name, text in own.items()})
    mesh = step.make_mesh(1, 1)
    layout = arena.make_layout(settings.model)
    row = arena.to_row(harness.builds.model.init(settings.model, 0), layout).astype(np.float64)
    packed, packed_step = step.init_state(row, 3, mesh), step.make_step(settings, numerics, mesh)
    draw = np.random.default_rng(2)
    batches = [draw.integers(0, 64, (15, 17)).astype(np.uint16) for _ in range(4)]
    peaks = config.per_worker(settings, "lr")
    for rows in batches:
        packed, _ = packed_step(packed, step.make_batch(rows, 3, 1, 5), np.asarray(peaks))
    for worker in range(3):
        changes = {f"optimizer.{name}": float(text.split(",")[worker]) for name, text in own.items()}
        alone_settings = tiny(changes, training__batch_targets=80, training__microbatch=5)
        alone, alone_step = step.init_state(row, 1, mesh), step.make_step(alone_settings, numerics, mesh)
        for rows in batches:
            lr_N = np.asarray([peaks[worker]])
            alone, _ = alone_step(alone, step.make_batch(rows[worker::3], 1, 1, 5), lr_N)
        np.testing.assert_allclose(
            np.asarray(packed.params_NP[worker]), np.asarray(alone.params_NP[0]), rtol=1e-10, atol=1e-13
        )


# Outer steps, topologies and settings of the workers together, against numpy in FP64.

PGA = {"decentralized.outer_lr": 1.0, "decentralized.outer_momentum": 0.0}  # the outer step is the plain mean
OWN = {
    "decentralized.worker_lr": "0.002, 0.01, 0.005",
    "decentralized.worker_beta1": "0.8, 0.9, 0.95",
    "decentralized.worker_beta2": "0.9, 0.98, 0.99",
    "decentralized.worker_weight_decay": "0, 0.1, 0.3",
}
GAMMAS = [1.0] * 5 + [0.7, 0.4, 0.4, 0.0]  # of nine updates
CIRCLES = {  # name: sources of each phase, as shifts; a worker averages with them
    "disconnected": [()],
    "complete": [(1, 2)],
    "one_peer_ring": [(1,), (2,)],
    "one_peer_exponential": [(1,), (2,)],
}


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@functools.cache
def gradient():
    """(row [P], tokens [B, S]) -> gradient [P] of the mean loss of one model; tiny() in FP64."""
    section = step.FrozenConfigDict(tiny().model)
    layout, numerics = arena.make_layout(section), model.reference(jnp.float64)

    def mean_loss(row_P, tokens_BS):
        params = {name: tensor[0] for name, tensor in arena.views(row_P[None], layout).items()}
        return loss.loss_sum(section, numerics, params, tokens_BS, jnp.ones(len(tokens_BS))) / tokens_BS[:, 1:].size

    return jax.jit(jax.grad(mean_loss))


def three_models(settings, row_P, batches):
    """Rows [3, P] after each update of three models that are trained, mixed and brought together in numpy."""
    decentralized, n = settings.decentralized, 3
    decay_P = np.arange(row_P.size) < arena.make_layout(settings.model).decayed
    lr, beta1, beta2, decay = (config.per_worker(settings, name) for name in ("lr", "beta1", "beta2", "weight_decay"))
    x, mu, nu = np.tile(row_P, (n, 1)), np.zeros((n, row_P.size)), np.zeros((n, row_P.size))
    met, momentum, result = row_P.copy(), np.zeros_like(row_P), []
    phases = CIRCLES[decentralized.topology]

    def mix(x, update):
        shifts = phases[update % len(phases)]
        mean = (x + sum(np.roll(x, shift, axis=0) for shift in shifts)) / (1 + len(shifts))
        return GAMMAS[update] * mean + (1 - GAMMAS[update]) * x

    for update, rows in enumerate(batches):
        g = np.stack([np.asarray(gradient()(x[i], rows[i::n].astype(np.int32))) for i in range(n)])
        g *= np.minimum(1, settings.optimizer.clip_norm / (np.linalg.norm(g, axis=1) + 1e-6))[:, None]
        x = mix(x, update) if decentralized.scheme == "awc" else x
        for i in range(n):
            mu[i] = beta1[i] * mu[i] + (1 - beta1[i]) * g[i]
            nu[i] = beta2[i] * nu[i] + (1 - beta2[i]) * g[i] ** 2
            u = mu[i] / (1 - beta1[i] ** (update + 1)) / (np.sqrt(nu[i] / (1 - beta2[i] ** (update + 1))) + 1e-8)
            x[i] = (1 - lr[i] * decay[i] * decay_P) * x[i] - lr[i] * u
        x = mix(x, update) if decentralized.scheme == "atc" else x
        if decentralized.sync_every and (update + 1) % decentralized.sync_every == 0:
            delta = met - x.mean(axis=0)
            momentum = decentralized.outer_momentum * momentum + delta
            moved = delta + decentralized.outer_momentum * momentum if decentralized.outer_nesterov else momentum
            met = met - decentralized.outer_lr * moved
            x = np.tile(met, (n, 1))
        result.append(x.copy())
    return result


def packed(settings, row_P, batches, gammas):
    """The same through the package: rows [3, P] after each update."""
    mesh, result = step.make_mesh(1, 1), []
    update_of = step.make_step(settings, model.reference(jnp.float64), mesh)
    sync = outer.make_sync(settings, mesh)
    period, every = step.make_schedule(settings).period, settings.decentralized.sync_every
    state = step.init_state(row_P, 3, mesh)
    met = outer.init(state, mesh)
    lr_N = np.asarray(config.per_worker(settings, "lr"))
    for update, rows in enumerate(batches):
        mixing = step.Mixing(np.int32(update % period), np.float64(gammas[update]), np.bool_(False))
        state, _ = update_of(state, step.make_batch(rows, 3, 1, 5), lr_N, mixing)
        if every and (update + 1) % every == 0:
            state, met = sync(state, met)
        result.append(np.array(state.params_NP))
    return result


@pytest.mark.parametrize(
    ("name", "scheme", "changes"),
    [
        ("one_peer_exponential", "awc", PGA | {"decentralized.sync_every": 4}),  # Gossip-PGA (Chen et al. 2021)
        ("one_peer_exponential", "atc", {"decentralized.sync_every": 3} | OWN),
        ("complete", "awc", {"decentralized.sync_every": 2, "decentralized.outer_nesterov": False}),
        ("complete", "atc", {"decentralized.sync_every": 3}),
        ("one_peer_ring", "awc", OWN),
    ],
)
def test_three_workers_equal_three_models(x64, name, scheme, changes):
    """Nine updates, of which one is short; largest difference of any parameter after any of them."""
    chosen = {"decentralized.topology": name, "decentralized.scheme": scheme, "optimizer.clip_norm": 0.5}
    settings = tiny(PACKED | chosen | changes)
    layout, draw = arena.make_layout(settings.model), np.random.default_rng(4)
    row_P = arena.to_row(model.init(settings.model, 0), layout).astype(np.float64)
    batches = [draw.integers(0, 64, (9 if update == 5 else 15, 17)).astype(np.uint16) for update in range(9)]
    found, expected = packed(settings, row_P, batches, GAMMAS), three_models(settings, row_P, batches)
    for update, (a, b) in enumerate(zip(found, expected, strict=True), 1):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12, err_msg=f"update {update}")
        every = settings.decentralized.sync_every
        together = np.abs(a - a[0]).max() < 1e-14
        averaged = scheme == "atc" and name == "complete" and GAMMAS[update - 1] == 1
        assert together == bool((every and update % every == 0) or averaged)
    assert np.abs(found[-1] - row_P).max() > 0.01


@pytest.mark.parametrize("name", ["disconnected", "one_peer_exponential"])
def test_a_plain_outer_step_after_every_update_is_complete_atc(x64, name):
    """FedAvg with one local step; a doubly stochastic mixing before the mean changes nothing."""
    common, draw = {"decentralized.scheme": "atc"} | OWN, np.random.default_rng(5)
    synced = tiny(PACKED | common | PGA | {"decentralized.topology": name, "decentralized.sync_every": 1})
    mixed = tiny(PACKED | common | {"decentralized.topology": "complete"})
    row_P = arena.to_row(model.init(synced.model, 0), arena.make_layout(synced.model)).astype(np.float64)
    batches = [draw.integers(0, 64, (15, 17)).astype(np.uint16) for _ in range(6)]
    a, b = (packed(settings, row_P, batches, [1.0] * 6) for settings in (synced, mixed))
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
    assert np.abs(a[-1] - row_P).max() > 0.01


def test_gossip_with_outer_steps_resumes_across_them(tmp_path):
    """Outer steps behind updates 4 and 8, where virtual epochs end too; stopped at each place on the way."""
    changes = {"decentralized.topology": "one_peer_exponential", "decentralized.sync_every": 4}
    settings = tiny(PACKED | OWN | changes)
    harness.run(settings, tmp_path / "whole")
    distances = [line["consensus_distance"] for line in harness.lines(tmp_path / "whole", "train")]
    assert [distance < 1e-9 for distance in distances] == [update % 4 == 0 for update in range(1, 11)]
    whole, reached = harness.outcome(tmp_path / "whole"), set()
    assert {"outer_params", "outer_momentum"} < set(whole["arrays"])
    for asked in (3, 4, 12, 13):
        folder = tmp_path / f"stopped{asked}"
        with pytest.raises(Preempted) as caught:
            harness.run(settings, folder, harness.StopAfter(asked))
        reached.add(str(caught.value).split(",")[0])
        harness.run(settings, folder)
        assert harness.outcome(folder) == whole
    assert len(reached) == 3, reached  # two of them in one evaluation


@pytest.mark.parametrize(
    "text, reason",
    [
        ("0.1,0.2", "has 2 numbers"),
        ("1,x,2", "must be 3 numbers"),
        ("1,2,-3", "-3.0"),
        ("1,2,", "= '1,2,' must be 3 num"),
    ],
)
def test_bad_settings_of_workers_are_refused(text, reason):
    with pytest.raises(ConfigError, match=f"decentralized.worker_lr.*{reason}"):
        tiny(PACKED, decentralized__worker_lr=text)


def test_an_outer_step_that_never_comes_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"decentralized\.sync_every = 11: there is no outer step in a run of 10 updates"
    ):
        harness.run(tiny(PACKED, decentralized__sync_every=11), tmp_path / "run")
    assert not (tmp_path / "run").exists()
