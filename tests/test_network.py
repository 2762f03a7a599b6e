"""Workers that are away or slow, the ledger, and mixed moments.

Oracles: the censored chain for matrices (what a walk that skips the absent does), ordinary models with explicit
matrices in FP64 for the step, tables worked by hand for bytes and seconds.
"""

import functools
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import StopAfter, tiny
from jax.sharding import PartitionSpec as Spec
from ml_collections import FrozenConfigDict
from test_packed import (
    FOUR,
    FP32,
    FP64,
    LAYOUT,
    LR,
    B,
    Spy,
    deal,
    host,
    loss_and_gradients,
    start,
    stream,
    toy_loss,
)
from test_packed import settings as packed_settings

from llama_jax import arena, config, evaluate, export, hf, loss, network, outer, step, topology, validation
from llama_jax.errors import ConfigError, Preempted, run_command
from scripts import report_figures, report_runs

ROOT = Path(__file__).resolve().parent.parent
SCHEDULES = [
    (name, pairing, n)
    for name, pairing in [
        *((name, "directed") for name in topology.NAMES),
        ("one_peer_ring", "reciprocal"),
        ("one_peer_exponential", "reciprocal"),
    ]
    for n in range(1, 10)
    if pairing == "directed" or n in ((2, 4, 6, 8) if name == "one_peer_ring" else (1, 2, 4, 8))
]


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def settings(workers, name="one_peer_exponential", scheme="awc", exclude="", **fields):
    """Those of test_packed with fields of decentralized.network, or with mix_moments."""
    raw = config.default()
    for path, value in config._flatten(packed_settings(workers, name, scheme, exclude).to_dict()).items():
        if not path.startswith("derived."):
            config.set_field(raw, path, value)
    for field, value in fields.items():
        place = "decentralized" if field in ("mix_moments", "sync_every") else "decentralized.network"
        config.set_field(raw, f"{place}.{field}", value)
    return FrozenConfigDict(config.finalize(raw))


def masks(n, count=12):
    """All of small n, some of a larger one, always with everybody and with one alone."""
    if n <= 4:
        return [np.array(mask) for mask in itertools.product([False, True], repeat=n)]
    random = np.random.default_rng(n)
    return [np.ones(n, bool), np.arange(n) == 1, *(random.random((count, n)) < random.random((count, 1)))]


def censored(phase, connected):
    """The matrix of a phase among the connected, by the theory of chains that are watched only in some states."""
    n, here, away = connected.size, np.flatnonzero(connected), np.flatnonzero(~connected)
    result = np.eye(n)
    if phase.mean:
        result[np.ix_(here, here)] = 1 / max(here.size, 1)
        return result
    total = np.eye(n)
    for sources in phase.peers:
        p = np.eye(n)[list(sources)]
        walk = sum((np.linalg.matrix_power(p[np.ix_(away, away)], k) for k in range(n)), np.zeros((away.size,) * 2))
        total[np.ix_(here, here)] += p[np.ix_(here, here)] + p[np.ix_(here, away)] @ walk @ p[np.ix_(away, here)]
    result[here] = total[here] / (len(phase.peers) + 1)
    return result


def matrix(phase, connected):
    counts, parts = network.counts(phase, connected)
    return counts / parts[:, None]


# Matrices.


@pytest.mark.parametrize(("name", "pairing", "n"), SCHEDULES)
def test_every_matrix_is_doubly_stochastic_on_the_connected(name, pairing, n):
    schedule = topology.make_schedule(name, n, pairing)
    for update, phase in enumerate(schedule.phases):
        for connected in masks(n):
            w, away = matrix(phase, connected), np.flatnonzero(~connected)
            assert w.min() >= 0
            np.testing.assert_allclose([w.sum(0), w.sum(1)], 1, rtol=0, atol=1e-15)
            np.testing.assert_array_equal(w[away], np.eye(n)[away])
            np.testing.assert_array_equal(w[:, away], np.eye(n)[:, away])
            np.testing.assert_allclose(w, censored(phase, connected), rtol=0, atol=1e-15)
            if pairing == "reciprocal":
                np.testing.assert_array_equal(w, w.T)
        np.testing.assert_allclose(matrix(phase, np.ones(n, bool)), schedule.matrix(update), rtol=0, atol=1e-15)


def test_a_worker_receives_from_the_first_that_is_there():
    """Row i receives row i - 2 of eight; workers 4, 6 and 3 are away. And a pair whose partner is away keeps itself."""
    connected = np.array([True, True, True, False, False, True, False, True])
    w = matrix(topology.make_schedule("one_peer_exponential", 8).phases[1], connected)
    received = {i: [int(j) for j in np.flatnonzero(w[i]) if j != i] for i in np.flatnonzero(connected)}
    assert received == {0: [2], 1: [7], 2: [0], 5: [1], 7: [5]}
    pairs = matrix(topology.make_schedule("one_peer_exponential", 8, "reciprocal").phases[1], connected)
    received = {i: [int(j) for j in np.flatnonzero(pairs[i]) if j != i] for i in np.flatnonzero(connected)}
    assert received == {0: [2], 1: [], 2: [0], 5: [7], 7: [5]}


def test_dividing_by_what_is_left_of_a_row_would_move_the_mean():
    """Eight workers, offset 1, one away: the naive rule is biased, so the tests above can fail."""
    phase, connected = topology.make_schedule("one_peer_exponential", 8).phases[0], np.arange(8) != 3
    naive = topology.matrix("one_peer_exponential", 8, 0)
    naive[:, ~connected] = naive[~connected] = 0
    naive[~connected, ~connected] = 1
    naive /= naive.sum(1, keepdims=True)
    x = np.random.default_rng(0).normal(size=(8, 50))
    np.testing.assert_allclose(naive.sum(0)[[2, 4]], [0.5, 1.5])
    assert np.abs((naive @ x)[connected].mean(0) - x[connected].mean(0)).max() > 0.05
    w = matrix(phase, connected)
    np.testing.assert_allclose((w @ x)[connected].mean(0), x[connected].mean(0), rtol=0, atol=1e-15)


@functools.cache
def on_device(excluded):
    """network.mix as the step runs it."""
    rows = Spec("worker")
    return jax.jit(
        jax.shard_map(
            lambda links, x, gamma: network.mix(x, links, gamma, excluded),
            mesh=step.make_mesh(1, 1),
            in_specs=(rows, rows, Spec()),
            out_specs=rows,
        )
    )


def test_mixing_on_the_device_is_the_matrix(x64):
    """FP64 to 1e-15, float32 to rounding; gamma, a range that mixes with gamma 1; who gets nothing keeps its bits."""
    random = np.random.default_rng(1)
    for name, n in [("one_peer_exponential", 5), ("complete", 3), ("mixed_radix", 6), ("one_peer_ring", 2)]:
        phase = topology.make_schedule(name, n).phases[-1]
        gammas = itertools.cycle([1.0, 0.3, 0.0])
        for connected, gamma in zip(masks(n, 4), gammas, strict=False):
            counts, parts = network.counts(phase, connected)
            for dtype, bound in ((np.float64, 1e-15), (np.float32, 1e-6)):
                x = random.normal(size=(n, 24)).astype(dtype)
                x[~connected] = np.nan  # may hold anything
                links = network.Links(connected, connected, connected & False, np.float32(counts), np.float32(parts))
                found = np.asarray(on_device(((4, 3),))(links, x, np.float64(gamma)))
                clean = np.where(connected[:, None], x, 0).astype(np.float64)
                gamma_P = np.where((np.arange(24) >= 4) & (np.arange(24) < 7), 1.0, gamma)
                expected = (1 - gamma_P) * clean + gamma_P * (censored(phase, connected) @ clean)
                assert found.dtype == dtype
                np.testing.assert_allclose(found[connected], expected[connected], rtol=0, atol=bound)
                alone = (censored(phase, connected) == np.eye(n)).all(1)
                assert found[alone].tobytes() == x[alone].tobytes()
                assert gamma != 0 or found[:, 7:].tobytes() == x[:, 7:].tobytes()


# Events.


def table(chosen, updates):
    """active [updates, N] in text, one row a worker: 1 there, 0 away."""
    active = np.array([network.events(chosen, update).active_N for update in range(updates)])
    return ["".join(map(str, row)) for row in active.T.astype(int)]


def test_events_are_the_same_everywhere():
    """Golden: a function of seed and update, on any machine, in any order, in any process."""
    chosen = settings(4, dropout=0.3, outage_updates=4, outages="2:1-3,0:38-99")
    whole = table(chosen, 40)
    assert whole == GOLDEN
    backwards = [network.events(chosen, update) for update in reversed(range(40))][::-1]
    for update in (0, 17, 39):
        for a, b in zip(backwards[update], network.events(chosen, update), strict=True):
            np.testing.assert_array_equal(a, b)
    assert table(FrozenConfigDict({**chosen, "seed": 43}), 40) != whole


GOLDEN = [
    "0111111111111000011111111111111111111000",
    "1111111111110000111100001111000000000000",
    "0001100001111111111110000111100001111111",
    "1111111000011110000111111111111111111111",
]


def test_frequencies_of_outages_and_stragglers():
    updates, n = 4000, 8
    chosen = settings(n, dropout=0.2, outage_updates=5, stragglers=0.25, straggler_policy="skip")
    found = [network.events(chosen, update) for update in range(updates)]
    active, slow = np.array([e.active_N for e in found]), np.array([e.slow_N for e in found])
    assert np.abs((~active).mean(0) - 0.2).max() < 0.05 and abs((~active).mean() - 0.2) < 0.015
    assert abs(slow[active].mean() - 0.25) < 0.01 and not slow[~active].any()
    lengths, ends = [], []
    for i in range(n):
        away = np.diff(np.concatenate([[0], ~active[:, i], [0]]).astype(int))
        begin, end = np.flatnonzero(away == 1), np.flatnonzero(away == -1)
        lengths += [int(b - a) for a, b in zip(begin, end, strict=True) if a > 0 and b < updates]
        ends += [int(b) % 5 for b in end if b < updates]
    assert {length % 5 for length in lengths} == {0} and {5, 10} <= set(lengths)
    assert len(set(ends)) > 2  # the workers do not all leave at once
    for one, before in zip(found[1:], found, strict=False):
        np.testing.assert_array_equal(one.back_N, one.active_N & ~before.active_N)
        np.testing.assert_array_equal(one.connected_N, one.active_N & ~one.slow_N)
    assert not found[0].back_N.any()


def test_one_worker_always_stays():
    """By chance alone, and where a plan takes the one that chance would leave."""
    chance = settings(3, dropout=0.95)
    active = np.array([network.events(chance, update).active_N for update in range(300)])
    assert active.any(1).all() and (active.sum(1) == 1).mean() > 0.7 and (active.sum(0) > 50).all()
    planned = settings(3, dropout=0.95, outages="0:1-40,2:1-40")
    active = np.array([network.events(planned, update).active_N for update in range(40)])
    np.testing.assert_array_equal(active, np.tile([False, True, False], (40, 1)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"outages": "1:5"}, "'1:5' is not worker:first-last"),
        ({"outages": "1:5-8,,"}, "'' is not worker:first-last"),
        ({"outages": "0:1-" + "9" * 5000}, "is not worker:first-last"),
        ({"outages": "-1:5-8"}, "'-1:5-8' is not worker:first-last"),
        ({"outages": "3:5-8"}, "3:5-8 must be a worker below 3 and updates from 1 to 40"),
        ({"outages": "1:0-8"}, "updates from 1"),
        ({"outages": "1:8-5"}, "the first not after the last"),
        ({"outages": "1:41-50"}, "updates from 1 to 40"),
        ({"outages": "0:1-9,1:4-6,2:6-30"}, "leaves no worker at update 6"),
        ({"outages": "1:4-6", "mix_moments": "first"}, "mix_moments = first can't be used with .*differ in their bias"),
        ({"dropout": 0.1, "mix_moments": "both"}, "mix_moments = both can't be used"),
    ],
)
def test_contradictions_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        network.check(settings(3, **fields))


@pytest.mark.parametrize("fields", [{"dropout": 0.1}, {"outages": "0:3-4"}, {"stragglers": 0.5}])
def test_one_worker_has_no_network(fields):
    with pytest.raises(ConfigError, match=f"network.{next(iter(fields))} = .* needs decentralized.workers above 1"):
        network.check(settings(1, **fields))


def test_a_refused_run_leaves_no_folder(tmp_path, capsys):
    chosen = tiny(FOUR | {"decentralized.network.outages": "9:1-2"})
    assert run_command(lambda: harness.run(chosen, tmp_path / "run")) == 2
    assert "must be a worker below 4" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_stragglers_that_are_waited_for_change_nothing_but_the_clock():
    assert not network.changes_training(settings(3, stragglers=0.5))
    assert network.make_links(settings(3, stragglers=0.5), topology.make_schedule("complete", 3))(4) is None
    assert network.changes_training(settings(3, stragglers=0.5, straggler_policy="skip"))
    assert not network.changes_training(settings(3, straggler_policy="skip", rejoin="mean", outage_updates=7))


# The step.


def link_mixing(chosen, update, gamma=1.0, dtype=np.float32):
    schedule = step.make_schedule(chosen)
    links = network.make_links(chosen, schedule)(update)
    return step.Mixing(np.int32(update % schedule.period), dtype(gamma), np.bool_(update % 2), links)


def test_nothing_is_compiled_when_it_is_off(monkeypatch):
    """No function of the module runs while the step is traced, and its fields leave the program word for word."""

    def refuse(*args, **kwargs):
        raise AssertionError("a feature that is off")

    texts = []
    for fields in ({}, {"stragglers": 0.4, "rejoin": "mean", "outage_updates": 9, "compute_s": 1.0, "bandwidth": 1e9}):
        chosen = settings(4, exclude="q_proj", **fields)
        arguments = start(4), deal(stream(4 * B), 4), np.full(4, LR, np.float32), link_mixing(chosen, 1, 0.3)
        with monkeypatch.context() as patch:
            for name in ("mix", "mean", "rejoin", "hold"):
                patch.setattr(network, name, refuse)
            program = step.make_step(chosen, FP32, step.make_mesh(1, 1))
            texts.append(program.lower(*arguments).as_text())
            step.make_measure(chosen, step.make_mesh(1, 1)).lower(arguments[0])
    assert texts[0] == texts[1]
    moments = step.make_step(settings(4, exclude="q_proj", mix_moments="first"), FP32, step.make_mesh(1, 1))
    assert moments.lower(*arguments).as_text() != texts[0]


class Separate:
    """N ordinary models with an AdamW each; who is away stands still, and matrices come from the censored chain."""

    def __init__(self, chosen, rows):
        self.chosen, self.n = chosen, len(rows)
        self.params = [self.by_name(row) for row in rows]
        self.mu, self.nu = ([self.by_name(0 * row) for row in rows] for _ in range(2))
        self.count = [0] * self.n

    @staticmethod
    def by_name(row):
        return {name: value.copy() for name, value in arena.from_row(row, LAYOUT).items()}

    def mix(self, models, w, gamma):
        old = [dict(one) for one in models]
        for i, name in itertools.product(range(self.n), old[0]):
            g = 1.0 if self.chosen.decentralized.adaptive.exclude in name else gamma
            models[i][name] = (1 - g) * old[i][name] + g * sum(w[i, j] * old[j][name] for j in range(self.n))

    def step(self, update, tokens, gamma):
        """(mean losses and norms of the active workers, their numbers)."""
        hyper, fields, found = self.chosen.optimizer, self.chosen.decentralized, network.events(self.chosen, update)
        active = np.flatnonzero(found.active_N)
        stayed = [i for i in active if not found.back_N[i]]
        for i in np.flatnonzero(found.back_N) if fields.network.rejoin == "mean" and stayed else []:
            for name in self.params[i]:
                self.params[i][name] = sum(self.params[j][name] for j in stayed) / len(stayed)
                self.mu[i][name], self.nu[i][name] = 0 * self.mu[i][name], 0 * self.nu[i][name]
            self.count[i] = 0
        told, grads = [], {}
        for i in active:
            value, grad = loss_and_gradients()(self.params[i], tokens[i :: self.n].astype(np.int32))
            norm = math.sqrt(sum(float(np.vdot(g, g)) for g in grad.values()))
            grads[i] = {k: np.asarray(g) * min(1.0, hyper.clip_norm / (norm + 1e-6)) for k, g in grad.items()}
            told.append((float(value), norm))
        schedule = topology.make_schedule(fields.topology, self.n)
        w = censored(schedule.phases[update % schedule.period], found.connected_N)
        moments = {"none": (), "first": (self.mu,), "both": (self.mu, self.nu)}[fields.mix_moments]
        for models in (self.params, *moments) if fields.scheme == "awc" else ():
            self.mix(models, w, gamma)
        for i in active:
            self.count[i] += 1
            for name, g in grads[i].items():
                mu, nu, k = self.mu[i], self.nu[i], self.count[i]
                mu[name] = hyper.beta1 * mu[name] + (1 - hyper.beta1) * g
                nu[name] = hyper.beta2 * nu[name] + (1 - hyper.beta2) * g * g
                u = mu[name] / (1 - hyper.beta1**k) / (np.sqrt(nu[name] / (1 - hyper.beta2**k)) + hyper.eps)
                decay = hyper.weight_decay if g.ndim > 1 else 0.0
                self.params[i][name] = (1 - LR * decay) * self.params[i][name] - LR * u
        for models in (self.params, *moments) if fields.scheme == "atc" else ():
            self.mix(models, w, gamma)
        return np.array(told).T, active


def off_by(state, separate):
    worst = 0.0
    arenas = (state.params_NP, state.moments.mu_NP, state.moments.nu_NP)
    for arena_NP, models in zip(arenas, (separate.params, separate.mu, separate.nu), strict=True):
        for row_P, one in zip(np.asarray(arena_NP), models, strict=True):
            named = arena.from_row(row_P, LAYOUT).items()
            worst = max(worst, *(np.abs(found - one[name]).max() for name, found in named))
    np.testing.assert_array_equal(state.moments.count_N, separate.count)
    return worst


def against_the_oracle(chosen, updates=12):
    n, worst = chosen.decentralized.workers, 0.0
    state, program = start(n, np.float64), step.make_step(chosen, FP64, step.make_mesh(1, 1))
    separate = Separate(chosen, np.array(state.params_NP))
    for update in range(updates):
        tokens, gamma = stream(n * (2 if update == 5 else B), seed=update), 1.0 if update < 4 else 0.6
        mixing = link_mixing(chosen, update, gamma, np.float64)
        before = host(state)
        state, told = program(state, deal(tokens, n), np.full(n, LR), mixing)
        (losses, norms), active = separate.step(update, tokens, gamma)
        worst = max(worst, off_by(state, separate))
        nats, targets, norm = np.asarray(told.loss_sum), np.asarray(told.targets), np.asarray(told.grad_norm)
        worst = max(worst, np.abs(nats[active] / targets[active] - losses).max(), np.abs(norm[active] - norms).max())
        away = np.setdiff1d(np.arange(n), active)
        assert not nats[away].any() and not targets[away].any() and bool(told.ok)
        for a, b in zip(jax.tree.leaves(state)[:4], jax.tree.leaves(before)[:4], strict=True):
            assert np.asarray(a)[away].tobytes() == b[away].tobytes()
        if update % 2:  # the gradient disagreement of those who are there was asked for
            assert (float(told.disagreement) > 0) == (len(active) > 1)
    return worst, state


OUTAGES = "1:3-5,0:5-8,2:9-10"  # two are away at update 5


@pytest.mark.parametrize(
    ("name", "scheme", "fields"),
    [
        ("one_peer_exponential", "awc", {"outages": OUTAGES, "stragglers": 0.3, "straggler_policy": "skip"}),
        ("one_peer_exponential", "atc", {"outages": OUTAGES, "rejoin": "mean"}),
        ("complete", "awc", {"outages": "1:1-3,2:1-3,0:4-6,1:8-10", "rejoin": "mean"}),  # nobody stays at update 4
        ("complete", "atc", {"dropout": 0.4, "outage_updates": 2}),
    ],
)
def test_three_workers_with_outages_equal_three_models(x64, name, scheme, fields):
    """Twelve updates in FP64: outages, returns, skipped stragglers, gamma, an excluded tensor, a short update."""
    chosen = settings(3, name, scheme, "q_proj", **fields)
    found = [network.events(chosen, update) for update in range(12)]
    assert any(one.back_N.any() for one in found) and sum(one.active_N.sum() == 1 for one in found) >= 1
    worst, _ = against_the_oracle(chosen)
    assert worst < 1e-12


@pytest.mark.parametrize(
    ("name", "scheme", "moments"), [("one_peer_exponential", "awc", "both"), ("complete", "atc", "first")]
)
def test_mixed_moments_equal_three_models(x64, name, scheme, moments):
    worst, state = against_the_oracle(settings(3, name, scheme, "q_proj", mix_moments=moments))
    assert worst < 1e-12
    assert np.asarray(state.moments.nu_NP).min() >= 0
    apart = np.abs(np.diff(np.asarray(state.moments.mu_NP), axis=0)).max()
    assert apart > 1e-8 if scheme == "awc" else apart < 1  # gamma 0.6 leaves the first moments apart


def test_second_moments_stay_positive_in_float32():
    chosen = settings(3, mix_moments="both")
    state, program = start(3), step.make_step(chosen, FP32, step.make_mesh(1, 1))
    for update in range(8):
        mixing = link_mixing(chosen, update, np.random.default_rng(update).uniform())
        state, told = program(state, deal(stream(3 * B, seed=update), 3), np.full(3, LR, np.float32), mixing)
        assert bool(told.ok) and np.asarray(state.moments.nu_NP).min() >= 0


def test_complete_mixing_of_all_with_one_gradient_is_one_worker(x64):
    """Everybody sees the same sequences from its own point; after one complete exchange (atc) all are one AdamW run."""
    several, one = settings(3, "complete", "atc", mix_moments="both"), settings(1, "complete")
    state = start(3, np.float64, apart=False)
    alone = step.init_state(np.asarray(state.params_NP)[0], 1, step.make_mesh(1, 1))
    programs = [step.make_step(chosen, FP64, step.make_mesh(1, 1)) for chosen in (several, one)]
    for update in range(4):
        tokens = stream(B, seed=update)
        state, _ = programs[0](state, deal(np.repeat(tokens, 3, 0), 3), np.full(3, LR), link_mixing(several, update))
        alone, _ = programs[1](alone, deal(tokens, 1), np.full(1, LR), step.NO_MIXING)
        for a, b in zip(jax.tree.leaves(state)[:4], jax.tree.leaves(alone)[:4], strict=True):
            np.testing.assert_allclose(np.asarray(a), np.broadcast_to(b, a.shape), rtol=0, atol=1e-14)


def test_mixed_moments_without_an_exchange_change_nothing():
    arguments = []
    for fields in ({}, {"mix_moments": "both"}):
        chosen = settings(3, "disconnected", **fields)
        program = step.make_step(chosen, FP32, step.make_mesh(1, 1))
        call = start(3), deal(stream(3 * B), 3), np.full(3, LR, np.float32), link_mixing(chosen, 1)
        arguments.append(program.lower(*call).as_text())
    assert arguments[0] == arguments[1]


@pytest.mark.parametrize("scheme", ["awc", "atc"])
def test_what_an_absent_worker_holds_reaches_nobody(scheme):
    """NaN in its parameters and moments: all other rows and numbers are those of a run without, bit for bit."""
    chosen = settings(4, "one_peer_exponential", scheme, outages="2:1-4")
    program, ends = step.make_step(chosen, FP32, step.make_mesh(1, 1)), []
    measure = step.make_measure(chosen, step.make_mesh(1, 1))
    for poison in (False, True):
        state = start(4)
        if poison:
            rows = [leaf.at[2].set(jnp.nan) for leaf in (state.params_NP, *state.moments[:2])]
            state = state._replace(params_NP=rows[0], moments=state.moments._replace(mu_NP=rows[1], nu_NP=rows[2]))
        told = []
        for update in range(4):
            mixing = link_mixing(chosen, update, 0.7)
            batch = deal(stream(4 * B, seed=update), 4)
            state, metrics = program(state, batch, np.full(4, LR, np.float32), mixing)
            told.append(host((metrics, measure(state, mixing.links))))
            assert bool(metrics.ok) and np.isfinite(jax.tree.leaves(told[-1])[-1]).all()
        ends.append((host(state), told))
    (clean, told), (poisoned, also) = ends
    others = [0, 1, 3]
    for a, b in zip(jax.tree.leaves(clean)[:4], jax.tree.leaves(poisoned)[:4], strict=True):
        assert a[others].tobytes() == b[others].tobytes()
    assert np.isnan(poisoned.params_NP[2, : LAYOUT.used]).all() and poisoned.moments.count_N[2] == 0
    for a, b in zip(jax.tree.leaves(told), jax.tree.leaves(also), strict=True):
        np.testing.assert_array_equal(a, b)


def test_measurements_are_those_of_the_workers_that_are_there(x64):
    """Three of four, against the measurement of these three alone; one alone is at distance 0."""
    four, three = settings(4, outages="2:1-4"), settings(3)
    state = start(4, np.float64)
    random = np.random.default_rng(0).normal(size=(2, *state.params_NP.shape))
    state = state._replace(moments=state.moments._replace(mu_NP=random[0], nu_NP=random[1] ** 2, count_N=np.full(4, 3)))
    mesh, there = step.make_mesh(1, 1), [0, 1, 3]
    few = jax.tree.map(lambda x: np.asarray(x)[there] if np.ndim(x) else x, state)
    found = step.make_measure(four, mesh)(state, link_mixing(four, 0).links)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(step.make_measure(three, mesh)(few)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    alone = settings(4, outages="0:1-4,1:1-4,3:1-4")
    found = step.make_measure(alone, mesh)(state, link_mixing(alone, 0).links)
    assert float(found.params.distance) < 1e-30 and float(found.cosine_params) == 1.0


def check_devices():
    """Runs in a process with two devices: four workers over them, with everything that an outage does; no model."""
    assert len(jax.devices()) == 2
    loss.loss_sum = toy_loss
    fields = {"rejoin": "mean", "stragglers": 0.3, "straggler_policy": "skip", "sync_every": 3}
    chosen, ends = settings(4, outages="2:2-3,0:3-4", **fields), []
    assert len({tuple(network.events(chosen, update).connected_N) for update in range(5)}) > 3
    for shards in (1, 2):
        mesh = step.make_mesh(shards, 1)
        program, meet = step.make_step(chosen, FP32, mesh), outer.make_sync(chosen, mesh)
        measure, told = step.make_measure(chosen, mesh), []
        state = jax.tree.map(jax.device_put, host(start(4)), step.shardings(mesh, step.STATE_SPEC))
        met = outer.init(state, mesh)
        for update in range(5):
            batch = deal(stream(4 * B, seed=update), 4)
            batch = jax.tree.map(jax.device_put, batch, step.shardings(mesh, step.BATCH_SPEC))
            mixing = link_mixing(chosen, update, 0.8)
            state, metrics = program(state, batch, np.full(4, LR, np.float32), mixing)
            if update == 2:
                state, met = meet(state, met, mixing.links)
            told.append(host((metrics, measure(state, mixing.links))))
        ends.append(host((state, met, told)))
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1e-6, np.abs(a).max()))


def test_workers_over_two_devices_equal_one_device():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    variables = {"XLA_FLAGS": flags, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    ended = subprocess.run(
        [sys.executable, "-c", "import test_network as t\nt.check_devices()\nprint('done')"],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_an_outer_step_moves_the_connected_only():
    """d = met - mean of the connected; the absent one, NaN and all, stays; nobody connected: nothing happens."""
    chosen, mesh = settings(3, "disconnected", outages="1:1-5", sync_every=1), step.make_mesh(1, 1)
    rows = np.asarray(start(3).params_NP)
    rows = np.where(np.arange(3)[:, None] == 1, np.float32(np.nan), rows)
    meet, place = outer.make_sync(chosen, mesh), step.shardings(mesh, step.STATE_SPEC)
    links = link_mixing(chosen, 0).links
    for connected in (links.connected_N, np.zeros(3, bool)):
        state = step.init_state(rows[0], 3, mesh)
        state = state._replace(params_NP=jax.device_put(rows, place.params_NP))
        met = outer.init(start(3), mesh)
        point = np.asarray(met.params_P, np.float64)
        state, met = meet(state, met, links._replace(connected_N=connected))
        found = np.asarray(state.params_NP)
        if not connected.any():
            assert found.tobytes() == rows.tobytes() and not np.asarray(met.momentum_P).any()
            continue
        d = point - rows[[0, 2]].astype(np.float64).mean(0)
        expected = point - 0.7 * (d + 0.9 * d)
        np.testing.assert_allclose(found[[0, 2]], np.stack([expected] * 2), rtol=0, atol=1e-6)
        assert found[1].tobytes() == rows[1].tobytes()


# Real runs.

OUT = FOUR | {
    "decentralized.network.outages": "1:3-6,3:6-7,0:10-10",
    "decentralized.network.compute_s": 0.5,
    "decentralized.network.latency_s": 0.01,
    "decentralized.network.bandwidth": 1e5,
}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """(folder, spy) of the unbroken run with outages."""
    folder, spy = tmp_path_factory.mktemp("out"), Spy()
    spy.run(tiny(OUT), folder)
    return folder, spy


def test_the_log_says_who_was_there(out):
    """Loss, norm and clip over the active; null for the others; their sequences are skipped, not handed on."""
    folder, spy = out
    lines = harness.lines(folder, "train")
    active = np.ones((10, 4), bool)
    active[2:6, 1] = active[5:7, 3] = active[9, 0] = False
    assert [line["active"] for line in lines] == active.tolist() == [line["connected"] for line in lines]
    for line, there in zip(lines, active, strict=True):
        for field, mean in (("worker_loss", "loss"), ("worker_grad_norm", "grad_norm"), ("worker_clip", "clip")):
            assert [value is not None for value in line[field]] == there.tolist()
            assert line[mean] == pytest.approx(np.mean([v for v in line[field] if v is not None]), rel=1e-6)
        assert "nonfinite" not in line
        assert ("consensus_distance" in line) == (line["update"] % 3 == 0)
    plain, also = Spy(), tiny(FOUR)
    with pytest.raises(Preempted):
        plain.run(also, folder.parent / "plain", StopAfter(3))
    for a, b in zip(plain.batches, spy.batches, strict=False):
        np.testing.assert_array_equal(a.tokens, b.tokens)
    assert harness.strict((folder / "result.json").read_text())["targets"] == 140 * 16


def test_the_mean_model_is_that_of_the_workers_that_are_there(out, tmp_path):
    """Evaluation, local losses and the commands evaluate and export; worker 1 is away at update 4, worker 0 at 10."""
    folder, spy = out
    chosen = tiny(OUT)
    built = harness.KEPT(chosen)
    source = harness.train.data.open_source(chosen)
    rows = source.validation_rows(validation.subset_indices(40, 20, 12345))
    lines = {line["update"]: line for line in harness.lines(folder, "eval") if line["split"] == "subset"}
    for update, there in ((4, [0, 2, 3]), (8, [0, 1, 2, 3]), (10, [1, 2, 3])):
        x_NP = spy.after[update - 1].params_NP
        mean = built.evaluate(jnp.asarray(x_NP[there].mean(0)), [rows[:16], rows[16:]]).mean
        assert lines[update]["loss"] == pytest.approx(mean, rel=1e-6)
        local = [built.evaluate(jnp.asarray(x_NP[i]), [rows[:16], rows[16:]]).mean for i in there]
        expected = {"mean": np.mean(local), "min": min(local), "max": max(local)}
        told = dict(lines[update]["local_loss"])
        workers = told.pop("workers")
        assert [workers[i] for i in there] == pytest.approx(local, rel=1e-6) and workers.count(None) == 4 - len(there)
        assert told == {key: pytest.approx(value, rel=1e-6) for key, value in expected.items()}
    mean_P = spy.after[-1].params_NP[[1, 2, 3]].astype(np.float64).mean(0)
    _, exported = hf.load_folder(folder / "exports/final")
    np.testing.assert_allclose(arena.to_row(exported, built.layout), mean_P, rtol=2e-7, atol=1e-8)
    export.export(folder, tmp_path / "again")
    again, final = (path / "model.safetensors" for path in (tmp_path / "again", folder / "exports/final"))
    assert again.read_bytes() == final.read_bytes()
    row_P, update = evaluate.load_run(folder, chosen)
    assert update == 10
    np.testing.assert_allclose(row_P, mean_P, rtol=2e-7, atol=1e-8)


@pytest.mark.parametrize(
    ("changes", "update"),
    [(OUT, 2), (OUT, 3), (OUT, 5), (OUT, 6)],
)
def test_resume_inside_an_outage(changes, update, out, tmp_path):
    """Before an outage, inside it, and where one ends while another begins: parameters, log and ledger to the bit."""
    asks = update if update < 4 else update + 2 * (1 + 3)  # also twice for each model evaluated behind update 4
    with pytest.raises(Preempted, match=f"saved at update {update},"):
        harness.run(tiny(changes), tmp_path, StopAfter(asks))
    harness.run(tiny(changes), tmp_path)
    assert harness.outcome(tmp_path) == harness.outcome(out[0])


def test_resume_with_chance_rejoining_and_outer_steps(tmp_path):
    chance = FOUR | {
        "decentralized.network.dropout": 0.35,
        "decentralized.network.outage_updates": 2,
        "decentralized.network.stragglers": 0.3,
        "decentralized.network.straggler_policy": "skip",
        "decentralized.network.rejoin": "mean",
        "decentralized.sync_every": 3,
    }
    harness.run(tiny(chance), tmp_path / "whole")
    lines = harness.lines(tmp_path / "whole", "train")
    assert any(line["active"] != line["connected"] for line in lines) and any(not all(x["active"]) for x in lines)
    with pytest.raises(Preempted):
        harness.run(tiny(chance), tmp_path / "stopped", StopAfter(17))
    harness.run(tiny(chance), tmp_path / "stopped")
    assert harness.outcome(tmp_path / "stopped") == harness.outcome(tmp_path / "whole")


def test_a_run_survives_what_an_absent_worker_holds(out, tmp_path):
    """Worker 1 loses its memory while it is away; it is back with the mean of the others, and the run ends well."""

    class Poison(Spy):
        def __call__(self, chosen):
            built = super().__call__(chosen)

            def poisoned(state, batch, lr_N, mixing):
                if len(self.after) == 3:  # inside its outage, before the evaluation of update 4
                    state = state._replace(params_NP=state.params_NP.at[1].set(jnp.nan))
                return built.step(state, batch, lr_N, mixing)

            return built._replace(step=poisoned)

    chosen = tiny(OUT | {"decentralized.network.rejoin": "mean"})
    folders, spies = [tmp_path / name for name in ("clean", "poisoned")], [Spy(), Poison()]
    for spy, folder in zip(spies, folders, strict=True):
        spy.run(chosen, folder)
    assert np.isnan(spies[1].after[3].params_NP[1]).any()
    assert harness.outcome(folders[0]) == harness.outcome(folders[1])


# The ledger.

D = 20_403_520


def big(workers, name="one_peer_exponential", **fields):
    """configs/c4_20m.py with N workers."""
    overrides = {
        "decentralized.workers": workers,
        "decentralized.topology": name,
        "training.microbatch": 128 // workers,
        "training.sequence_multiple": workers,
    }
    for field, value in fields.items():
        top = field in ("scheme", "sync_every", "mix_moments")
        overrides[f"decentralized.{field}" if top else f"decentralized.network.{field}"] = value
    chosen = config.load(ROOT / "configs/c4_20m.py", overrides)
    network.check(chosen)
    return chosen, topology.make_schedule(name, workers)


def test_bytes_by_hand():
    """N = 4, 20,403,520 parameters: 81.6 MB to a peer, 122.4 MB in a ring all-reduce; and what events leave of it."""
    one, ring = 81_614_080, 122_421_120

    def of(update, *args, **fields):
        return network.cost(*big(4, *args, **fields), update)[0].tolist()

    assert one == D * 4
    assert of(0) == of(1) == of(2) == [one] * 4
    assert of(0, "complete") == [ring] * 4
    assert of(0, "disconnected") == [0] * 4
    assert of(0, mix_moments="first") == [2 * one] * 4 and of(0, mix_moments="both") == [3 * one] * 4
    assert of(6, "disconnected", sync_every=8) == [0] * 4 and of(7, "disconnected", sync_every=8) == [ring] * 4
    assert of(7, sync_every=8) == [one + ring] * 4
    assert of(0, outages="1:1-5") == [one, 0, one, one]
    assert of(0, "complete", outages="1:1-5") == pytest.approx([one * 4 / 3, 0, one * 4 / 3, one * 4 / 3])
    assert of(0, outages="1:1-5,2:1-5,3:1-5") == [0] * 4  # nobody to receive from
    assert of(5, outages="1:1-5") == [one] * 4 and of(5, outages="1:1-5", rejoin="mean") == [one, 2 * one, one, one]
    # The schedule's own figure, a mean over its cycle.
    for name, n in (("mixed_radix", 12), ("one_peer_exponential", 8), ("complete", 6), ("one_peer_ring", 3)):
        schedule = topology.make_schedule(name, n)
        rows = [network.received(phase, np.ones(n, bool)).mean() for phase in schedule.phases]
        assert np.mean(rows) * D * 4 == pytest.approx(schedule.traffic(D), rel=1e-12)


def test_seconds_by_hand():
    """Compute 0.1 s, latency 2 ms, 1 GB/s: a row takes 0.0816 s, a ring all-reduce of four 6 latencies and 0.1224 s."""
    clock = {"compute_s": 0.1, "latency_s": 0.002, "bandwidth": 1e9}
    row, ring = 0.002 + 0.08161408, 6 * 0.002 + 0.12242112

    def of(update, *args, **fields):
        return network.cost(*big(4, *args, **{**clock, **fields}), update)[1]

    assert of(0) == pytest.approx(0.1)  # awc: the exchange runs beside the computation
    assert of(0, scheme="atc") == pytest.approx(0.1 + row)
    assert of(0, "complete") == pytest.approx(ring)
    assert of(0, "complete", scheme="atc") == pytest.approx(0.1 + ring)
    assert of(0, bandwidth=0.0, scheme="atc") == pytest.approx(0.102)
    assert of(0, "disconnected", scheme="atc") == pytest.approx(0.1)
    assert of(7, "disconnected", sync_every=8) == pytest.approx(0.1 + ring)
    assert of(0, mix_moments="first") == pytest.approx(0.002 + 2 * 0.08161408)
    assert of(5, outages="1:1-5", rejoin="mean") == pytest.approx(row + 0.1)
    slow = {"stragglers": 0.3, "slowdown": 3.0}
    for update in range(20):
        late = network.events(big(4, **slow)[0], update).slow_N
        assert of(update, **slow) == pytest.approx(0.3 if late.any() else 0.1)
        assert of(update, **slow, straggler_policy="skip") == pytest.approx(0.3 if late.all() else 0.1)
    assert of(0, stragglers=1.0, straggler_policy="skip", scheme="atc") == pytest.approx(0.2)  # all slow: no exchange


def test_the_log_adds_up_bytes_and_seconds(out):
    """Four workers of 3,632 parameters; 14,528 bytes a row take 0.155 s, less than the 0.5 s of a computation."""
    # From the worker one before, then from the one two before, which is a pair: who is away leaves its partner alone.
    rows = np.array([4, 4, 3, 2, 3, 2, 3, 4, 4, 2]) / 4
    lines = harness.lines(out[0], "train")
    np.testing.assert_allclose([x["simulated_bytes"] for x in lines], np.cumsum(rows) * 3632 * 4, rtol=1e-12)
    np.testing.assert_allclose([x["simulated_s"] for x in lines], 0.5 * np.arange(1, 11), rtol=1e-12)


def test_bytes_are_always_logged_and_seconds_on_request():
    chosen = tiny(FOUR)
    ledger = network.make_ledger(chosen, topology.make_schedule("one_peer_exponential", 4))
    assert ledger(3) == {"simulated_bytes": 3.0 * 3632 * 4}
    assert ledger(3) == ledger(3) and ledger(5) == {"simulated_bytes": 5.0 * 3632 * 4}


def test_the_report_draws_loss_against_bytes_and_time(out, tmp_path):
    run = report_runs.read_run(out[0])
    found = {drawing.name: drawing for drawing in report_figures.draw([run])}
    assert "bytes received by a worker" in found["bytes"].svg and "simulated seconds" in found["time"].svg
    series = run.series("loss", "simulated_s")
    np.testing.assert_allclose(series.x, 0.5 * np.arange(1, 11))
    np.testing.assert_array_equal(series.y, [line["loss"] for line in harness.lines(out[0], "train")])
    lines = [{"kind": "train", "update": u, "targets": u, "loss": 1.0, "simulated_s": "x"} for u in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not {"bytes", "time"} & {one.name for one in report_figures.draw([report_runs.read_run(tmp_path)])}
