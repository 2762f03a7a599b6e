"""Packed workers: the step against separate models and explicit matrices, and real runs of several workers.

The real runs are those of `harness.tiny` with N workers; the oracle is ordinary training of N models, one after the
other, in FP64, with gradients of the reference loss by tensor name and everything else in numpy.
"""

import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import harness
import jax
import jax.numpy as jnp
import numpy as np
import numpy_llama
import pytest
from harness import StopAfter, tiny
from ml_collections import FrozenConfigDict

from llama_jax import arena, config, data, loss, model, optimizer, step, topology, train, validation
from llama_jax.errors import ConfigError, NonFiniteError, Preempted, run_command
from scripts import report

ROOT = Path(__file__).resolve().parent.parent
T, B, LR = 6, 4, 0.01  # context, local sequences of a full update, learning rate of the step tests
SHAPE = {"vocab_size": 13, "context": T, "layers": 1, "width": 8, "heads": 2, "kv_heads": 1, "ffn": 12}
ORACLE = numpy_llama.model(**SHAPE)
FP32 = model.Numerics(jnp.float32, jnp.float32, "xla", "chunked", head_chunk_rows=4096)
FP64 = model.reference(jnp.float64)
DIRECTED = ("complete", "one_peer_ring", "one_peer_exponential", "mixed_radix", "disconnected")
SHORT = (3, 4, 9, 17)  # short updates of the oracle's twenty


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@functools.cache
def settings(workers, name, scheme="awc", exclude="", pairing="directed"):
    raw = config.default()
    raw.model.update(SHAPE)
    raw.training.update({"targets_per_parameter": None, "total_updates": 40, "microbatch": B})
    raw.training.update({"batch_targets": workers * B * T, "sequence_multiple": workers})
    raw.lr_schedule.warmup_steps = 5
    raw.optimizer.update({"clip_norm": 0.8, "beta2": 0.98})
    raw.decentralized.update({"workers": workers, "topology": name, "scheme": scheme, "pairing": pairing})
    raw.decentralized.adaptive.exclude = exclude
    return FrozenConfigDict(config.finalize(raw))  # can be hashed


LAYOUT = arena.make_layout(settings(1, "complete").model)


@functools.cache
def program(chosen, numerics):
    """The compiled step of settings; FP64 and FP32 compile it for themselves."""
    return step.make_step(chosen, numerics, step.make_mesh(1, 1))


def row(seed, dtype=np.float32):
    return arena.to_row(numpy_llama.params(ORACLE, seed), LAYOUT).astype(dtype)


def start(workers, dtype=np.float32, apart=True):
    """The state before the first update; apart: every worker has parameters of its own."""
    state = step.init_state(row(0, dtype), workers, step.make_mesh(1, 1))
    rows_NP = np.stack([row(n if apart else 0, dtype) for n in range(workers)])
    return state._replace(params_NP=jax.device_put(rows_NP, state.params_NP.sharding))


def stream(sequences, seed=0):
    return numpy_llama.tokens(ORACLE, sequences, seed)


def deal(tokens, workers):
    return step.make_batch(tokens, workers, 1, B)


def mixing(chosen, update, gamma=1.0, dtype=np.float32):
    period = step.make_schedule(chosen).period
    return step.Mixing(np.int32(update % period), dtype(gamma), np.bool_(update % 2))


def host(tree):
    return jax.tree.map(np.array, tree)


# The oracle.


@functools.cache
def loss_and_gradients():
    """(params by name, tokens) -> mean loss in nats and its gradients by name."""

    def mean_loss(params, tokens):
        rows = jnp.ones(tokens.shape[0], jnp.float64)
        return loss.loss_sum(ORACLE, FP64, params, tokens, rows) / (tokens.shape[0] * T)

    return jax.jit(jax.value_and_grad(mean_loss))


class Separate:
    """N ordinary models with an AdamW each, and a matrix between them."""

    def __init__(self, chosen, rows):
        self.chosen, self.n, self.update = chosen, len(rows), 0
        self.params = [{k: v.copy() for k, v in arena.from_row(r, LAYOUT).items()} for r in rows]
        self.mu = [{k: np.zeros_like(v) for k, v in one.items()} for one in self.params]
        self.nu = [{k: np.zeros_like(v) for k, v in one.items()} for one in self.params]

    def mix(self, gamma):
        decentralized = self.chosen.decentralized
        w = topology.matrix(decentralized.topology, self.n, self.update)
        for name in self.params[0]:
            excluded = decentralized.adaptive.exclude and re.search(decentralized.adaptive.exclude, name)
            g = 1.0 if excluded else gamma
            own = [one[name] for one in self.params]
            for i in range(self.n):
                self.params[i][name] = (1 - g) * own[i] + g * sum(w[i, j] * own[j] for j in range(self.n))

    def step(self, tokens, gamma, lr=LR):
        """One update; (mean losses, gradient norms, clip factors) of the workers."""
        hyper, told = self.chosen.optimizer, []
        grads = []
        for i in range(self.n):
            value, found = loss_and_gradients()(self.params[i], tokens[i :: self.n].astype(np.int32))
            found = {name: np.asarray(g) for name, g in found.items()}
            norm = math.sqrt(sum(float(np.vdot(g, g)) for g in found.values()))
            clip = min(1.0, hyper.clip_norm / (norm + 1e-6))
            grads.append({name: g * clip for name, g in found.items()})
            told.append((float(value), norm, clip))
        if self.chosen.decentralized.scheme == "awc":
            self.mix(gamma)
        power = self.update + 1
        for i, name in ((i, name) for i in range(self.n) for name in self.params[0]):
            g, mu, nu = grads[i][name], self.mu[i], self.nu[i]
            mu[name] = hyper.beta1 * mu[name] + (1 - hyper.beta1) * g
            nu[name] = hyper.beta2 * nu[name] + (1 - hyper.beta2) * g * g
            u = mu[name] / (1 - hyper.beta1**power) / (np.sqrt(nu[name] / (1 - hyper.beta2**power)) + hyper.eps)
            decay = hyper.weight_decay if g.ndim > 1 else 0.0
            self.params[i][name] = (1 - lr * decay) * self.params[i][name] - lr * u
        if self.chosen.decentralized.scheme == "atc":
            self.mix(gamma)
        self.update += 1
        return np.array(told).T


def off_by(state, separate):
    """Largest difference of parameters and moments, whose padding must be zero."""
    worst = 0.0
    arenas = (state.params_NP, state.moments.mu_NP, state.moments.nu_NP)
    for arena_NP, models in zip(arenas, (separate.params, separate.mu, separate.nu), strict=True):
        assert not np.asarray(arena_NP)[:, LAYOUT.used :].any()
        for row_P, one in zip(np.asarray(arena_NP), models, strict=True):
            for name, found in arena.from_row(row_P, LAYOUT).items():
                worst = max(worst, np.abs(found - one[name]).max())
    return worst


def against_the_oracle(chosen, update_of, updates=20):
    """Largest difference after any of the updates, and all clip factors."""
    n, random = chosen.decentralized.workers, np.random.default_rng(1)
    state = start(n, np.float64)
    separate, worst, clips = Separate(chosen, np.array(state.params_NP)), 0.0, []
    for update in range(updates):
        tokens = stream(n * (2 if update in SHORT else B), seed=update)
        gamma = 1.0 if update < 6 else random.uniform()
        lr_N = np.full(n, LR)
        state, told = update_of(state, deal(tokens, n), lr_N, mixing(chosen, update, gamma, np.float64))
        losses, norms, factors = separate.step(tokens, gamma)
        clips.append(factors)
        worst = max(worst, off_by(state, separate))
        means = np.asarray(told.loss_sum) / np.asarray(told.targets)
        for found, expected in ((means, losses), (told.grad_norm, norms), (told.clip, factors)):
            worst = max(worst, np.abs(np.asarray(found) - expected).max())
    return worst, np.array(clips)


CASES = [
    ("one_peer_exponential", "awc", "embed_tokens|q_proj|norm"),
    ("one_peer_exponential", "atc", ""),
    ("complete", "awc", ""),
    ("complete", "atc", "mlp"),
]


@pytest.mark.parametrize(("name", "scheme", "exclude"), CASES)
def test_three_workers_equal_three_models_and_a_matrix(x64, name, scheme, exclude):
    """20 updates in FP64, short ones, gamma from the seventh on, excluded tensors, local clips, padding zero."""
    chosen = settings(3, name, scheme, exclude)
    worst, clips = against_the_oracle(chosen, program(chosen, FP64))
    assert worst < 1e-12
    assert ((clips < 1).any(1) & (clips == 1).any(1)).any()  # some updates clip one worker and not another


def test_mixing_before_the_gradient_is_seen(x64, monkeypatch):
    """The seeded defect: gradients at the mixed parameters."""
    chosen, views = settings(3, "complete", "awc"), arena.views
    schedule = step.make_schedule(chosen)

    def mixed(params_NP, layout):
        return views(topology.mix(params_NP, schedule, 0, 1.0), layout)

    monkeypatch.setattr(arena, "views", mixed)
    worst, _ = against_the_oracle(chosen, step.make_step(chosen, FP64, step.make_mesh(1, 1)), updates=1)
    assert worst > 1e-3


def test_averaging_the_gradients_is_seen(x64, monkeypatch):
    """The seeded defect: all workers step along the mean gradient."""
    chosen, pack = settings(3, "one_peer_exponential", "atc"), arena.pack

    def averaged(tensors, layout):
        grads_NP = pack(tensors, layout)
        return jnp.broadcast_to(jnp.mean(grads_NP, axis=0, keepdims=True), grads_NP.shape)

    monkeypatch.setattr(arena, "pack", averaged)
    worst, _ = against_the_oracle(chosen, step.make_step(chosen, FP64, step.make_mesh(1, 1)), updates=1)
    assert worst > 1e-3


@pytest.mark.parametrize(("name", "scheme", "exclude"), CASES)
def test_the_mean_never_sees_the_topology(x64, name, scheme, exclude):
    """mean(x') = (1 - lr decay) mean(x) - lr mean(u), for any gamma; norm scales have no decay."""
    chosen, random = settings(3, name, scheme, exclude), np.random.default_rng(3)
    hyper, state = chosen.optimizer, start(3, np.float64)
    lr_N = np.full(3, LR)
    decay_P = np.where(np.arange(LAYOUT.padded) < LAYOUT.decayed, hyper.weight_decay, 0.0)
    for update in range(5):
        before = host(state)
        batch = deal(stream(3 * B, seed=100 + update), 3)
        state, _ = program(chosen, FP64)(state, batch, lr_N, mixing(chosen, update, random.uniform(), np.float64))
        after, power = host(state), update + 1
        mean_NP, square_NP = (after.moments.mu_NP / (1 - hyper.beta1**power), after.moments.nu_NP)
        u_NP = mean_NP / (np.sqrt(square_NP / (1 - hyper.beta2**power)) + hyper.eps)
        expected = (1 - LR * decay_P) * before.params_NP.mean(0) - LR * u_NP.mean(0)
        np.testing.assert_allclose(after.params_NP.mean(0), expected, rtol=0, atol=1e-14)
        assert np.abs(np.diff(after.params_NP, axis=0)).max() > 1e-3 or name == "complete"
        assert np.abs(u_NP).max() > 0.1


@pytest.mark.parametrize("scheme", ["atc", "awc"])
def test_complete_atc_with_sgd_is_synchronous_sgd(x64, scheme, monkeypatch):
    """Plain SGD in place of AdamW: three workers that average after each update are one model on three times the batch.

    With awc they are not: gradients are taken where the workers have come apart.
    """

    def sgd(hyper, decayed, params_NP, grads_NP, moments, lr_N):
        return params_NP - lr_N[:, None] * grads_NP, moments

    monkeypatch.setattr(optimizer, "adamw", sgd)
    mesh, rate = step.make_mesh(1, 1), 0.5
    unclipped = config.ConfigDict(settings(3, "complete", scheme))
    unclipped.optimizer.clip_norm = 0.0
    update_of = step.make_step(FrozenConfigDict(unclipped), FP64, mesh)
    state = start(3, np.float64, apart=False)
    params = {name: value.copy() for name, value in arena.from_row(np.array(state.params_NP[0]), LAYOUT).items()}
    for update in range(6):
        tokens = stream(3 * (2 if update == 3 else B), seed=update)
        state, _ = update_of(state, deal(tokens, 3), np.full(3, rate), mixing(unclipped, update, 1.0, np.float64))
        _, gradients = loss_and_gradients()(params, tokens.astype(np.int32))
        params = {name: value - rate * np.asarray(gradients[name]) for name, value in params.items()}
    off = max(
        np.abs(found - params[name]).max()
        for row_P in np.asarray(state.params_NP)
        for name, found in arena.from_row(row_P, LAYOUT).items()
    )
    assert off < 1e-13 if scheme == "atc" else off > 1e-3


# One worker, and workers that never mix.


def test_one_worker_is_plain_training_whatever_the_topology():
    """One program, word for word, for all topologies and schemes, also under adaptive consensus."""
    texts = set()
    for number, name in enumerate(DIRECTED):
        chosen = settings(1, name, ("awc", "atc")[number % 2], "embed" if number == 2 else "")
        arguments = start(1), deal(stream(3), 1), np.full(1, LR, np.float32), mixing(chosen, 1, 0.3)
        texts.add(program(chosen, FP32).lower(*arguments).as_text())
    assert len(texts) == 1 and "collective_permute" not in texts.pop()


def test_disconnected_workers_are_separate_runs(x64):
    """In FP64 to rounding: a batched product adds in another order than a single one. And both equal the oracle."""
    pair, alone = settings(2, "disconnected"), settings(1, "one_peer_ring")
    together = start(2, np.float64)
    separate = [together._replace(params_NP=together.params_NP[i : i + 1]) for i in range(2)]
    separate = [s._replace(moments=jax.tree.map(lambda x: x[:1], s.moments)) for s in separate]
    models = Separate(pair, np.array(together.params_NP))
    separate = jax.tree.map(jnp.array, separate)  # copies, as each step deletes its state
    for update in range(6):
        tokens = stream(4 if update == 2 else 2 * B, seed=update)
        together, _ = program(pair, FP64)(together, deal(tokens, 2), np.full(2, LR), mixing(pair, update, 0.4))
        for i in range(2):
            separate[i], _ = program(alone, FP64)(separate[i], deal(tokens[i::2], 1), np.full(1, LR), step.NO_MIXING)
        models.step(tokens, 1.0)
    assert off_by(together, models) < 1e-12
    for i in range(2):
        mine = jax.tree.map(lambda x: np.asarray(x)[i : i + 1] if x.ndim else np.asarray(x), together)  # noqa: B023
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(separate[i]), strict=True):
            np.testing.assert_allclose(a, np.asarray(b), rtol=0, atol=1e-13)


# A sweep: workers that never exchange anything.

SWEEP = {
    "decentralized.workers": 3,
    "decentralized.topology": "disconnected",
    "decentralized.worker_lr": "0.001,0.003,0.002",
    "training.sequence_multiple": 3,
    "training.microbatch": 5,
    "training.batch_targets": 240,
    "log.consensus_every": 4,
}


def poisoned(updates, worker=1):
    """A batch placer after whose hands the worker's rows weigh NaN at these zero-based updates."""
    original, count = harness.builds.Built.place, itertools.count()

    def place(self, rows):
        batch = original(self, rows)
        if next(count) in updates:
            batch = batch._replace(rows=batch.rows.at[worker].set(jnp.nan))
        return batch

    return place


def test_a_member_of_a_sweep_fails_alone(tmp_path, monkeypatch, capsys):
    """It skips the updates that are not finite; the others are bit for bit those of a sweep in which nothing fails."""
    healthy, spy = Spy(), Spy()
    healthy.run(tiny(SWEEP), tmp_path / "healthy")
    monkeypatch.setattr(harness.builds.Built, "place", poisoned({2, 5}))
    spy.run(tiny(SWEEP), tmp_path / "run")
    for update, (ours, theirs) in enumerate(zip(spy.after, healthy.after, strict=True)):
        assert bool(ours.ok)
        for a, b in zip(jax.tree.leaves(ours[:2]), jax.tree.leaves(theirs[:2]), strict=True):
            np.testing.assert_array_equal(np.delete(a, 1, axis=0), np.delete(b, 1, axis=0))
        before = spy.after[update - 1]
        assert np.array_equal(ours.params_NP[1], before.params_NP[1]) == (update in {2, 5})
    assert spy.after[-1].moments.count_N.tolist() == [10, 8, 10]
    assert capsys.readouterr().out.count("worker 1 is not finite and skips it; the others go on") == 1
    lines = harness.lines(tmp_path / "run", "train")
    for update, line in enumerate(lines):
        assert [value is None for value in line["worker_loss"]] == [False, update in {2, 5}, False]
        assert line["lr"] == pytest.approx(np.mean(line["worker_lr"]), rel=1e-12)
        assert np.array(line["worker_lr"]) / line["worker_lr"][0] == pytest.approx([1, 3, 2], rel=1e-12)
        there = [value for value in line["worker_loss"] if value is not None]
        assert line["loss"] == pytest.approx(np.mean(there), rel=1e-6)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    last = [line for line in harness.lines(tmp_path / "run", "eval") if line["split"] == "subset"][-1]
    assert result["local_loss"] == last["local_loss"] and len(result["local_loss"]["workers"]) == 3


def test_a_sweep_ends_when_no_member_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(harness.builds.Built, "place", poisoned({2}, worker=slice(None)))
    with pytest.raises(NonFiniteError, match="update 3: loss or gradient of worker 0 is not finite"):
        harness.run(tiny(SWEEP), tmp_path / "run")


def test_a_member_whose_model_is_lost_spoils_no_evaluation(tmp_path):
    """Its parameters are finite and its loss is not; so is that of the mean model, which nobody wants of a sweep."""
    lost = {"decentralized.worker_lr": "0.01,100,0.01", "decentralized.worker_weight_decay": "0,10,0"}
    more = {"optimizer.clip_norm": 0.0, "lr_schedule.name": "constant", "lr_schedule.warmup_steps": 0}
    harness.run(tiny(SWEEP | lost | more), tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    losses = result["local_loss"]["workers"]
    assert result["validation_loss"] is None and losses[1] is None and 0 < max(losses[0], losses[2]) < 6
    assert report.main([str(tmp_path / "run"), f"--out={tmp_path / 'report.html'}"]) == 0


def test_learning_rates_of_workers_count_in_the_prediction(tmp_path):
    """Four equal ones that are not optimizer.lr give the lines of a run with that optimizer.lr."""
    lines = []
    for name, changes in (
        ("listed", {"decentralized.worker_lr": "0.001,0.001,0.001,0.001"}),
        ("plain", {"optimizer.lr": 0.001}),
    ):
        harness.run(tiny(FOUR | changes), tmp_path / name)
        lines.append(harness.lines(tmp_path / name, "train"))
    for ours, theirs in zip(*lines, strict=True):
        for key in ("lr", "worker_loss", "consensus_distance", "consensus_predicted"):
            assert ours.get(key) == theirs.get(key), key


@pytest.mark.parametrize(("pattern", "matches"), [("embeding", "no tensor"), (".", "all tensors")])
def test_a_pattern_that_excludes_nothing_or_all_is_refused(pattern, matches, tmp_path):
    with pytest.raises(ConfigError, match=f"exclude = '{pattern}' matches {matches}; their names: model.embed_tokens"):
        harness.run(tiny(FOUR, decentralized__adaptive__exclude=pattern), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Isolation.


def reached(chosen, updates):
    """For each update, the workers whose (parameters, moments) worker 2's data has reached behind it."""
    n, awc = chosen.decentralized.workers, chosen.decentralized.scheme == "awc"
    params, moments, result = set(), set(), []
    for update in range(updates):
        w = topology.matrix(chosen.decentralized.topology, n, update)
        moments = moments | params | {2}
        source = params if awc else params | {2}
        params = {i for i in range(n) if any(w[i, j] > 0 for j in source)} | (params | {2} if awc else set())
        result.append((params, moments))
    return result


@pytest.mark.parametrize(
    ("workers", "name", "scheme"),
    [(4, "one_peer_exponential", "awc"), (5, "one_peer_exponential", "atc"), (5, "one_peer_ring", "awc")],
)
def test_data_travels_only_along_the_topology(workers, name, scheme):
    """Other data of worker 2: who can't have heard of it yet is bitwise unchanged, everybody else is not."""
    chosen = settings(workers, name, scheme)
    expected, runs = reached(chosen, 5), []
    for changed in (False, True):
        state, states = start(workers, apart=False), []
        for update in range(5):
            tokens = stream(workers * (B - update % 2), seed=update)
            if changed:
                tokens[2::workers] = (tokens[2::workers] + 1) % SHAPE["vocab_size"]
            lr_N = np.full(workers, LR, np.float32)
            state, _ = program(chosen, FP32)(state, deal(tokens, workers), lr_N, mixing(chosen, update, 0.7))
            states.append(host(state))
        runs.append(states)
    assert len(expected[0][0]) == (1 if scheme == "awc" else 2) and len(expected[-1][0]) == workers
    for (params, moments), a, b in zip(expected, *runs, strict=True):
        for i in range(workers):
            assert (a.params_NP[i].tobytes() == b.params_NP[i].tobytes()) == (i not in params)
            for x, y in ((a.moments.mu_NP, b.moments.mu_NP), (a.moments.nu_NP, b.moments.nu_NP)):
                assert (x[i].tobytes() == y[i].tobytes()) == (i not in moments)


# Real runs.

FOUR = {
    "decentralized.workers": 4,
    "training.sequence_multiple": 4,
    "training.microbatch": 4,
    "optimizer.clip_norm": 0.72,  # in most updates clips some workers and not others
    "log.consensus_every": 3,
}
SIZES = [16, 16, 16, 8, 16, 16, 16, 8, 16, 12]  # of four workers; virtual epochs of 56, 56 and 28 sequences
ADAPTIVE = {
    "decentralized.adaptive.mode": "lr_power",
    "decentralized.adaptive.start_frac": 0.3,
    "decentralized.adaptive.p": 2.0,
}
START = 3  # zero-based: ceil(0.3 x 10)
FIVE = {
    "decentralized.workers": 5,
    "training.sequence_multiple": 5,
    "training.batch_targets": 240,
    "training.microbatch": 3,
    "log.consensus_every": 2,
}


class Spy:
    """Stands for build.build: keeps what each update of a run gets and leaves."""

    def __init__(self):
        self.before, self.batches, self.after = [], [], []

    def __call__(self, chosen):
        built = harness.KEPT(chosen)

        def spying(state, batch, *rest):
            self.before.append(np.array(state.params_NP))
            self.batches.append(host(batch))
            after, told = built.step(state, batch, *rest)
            self.after.append(host(after))
            return after, told

        return built._replace(step=spying)

    def run(self, chosen, workdir, stop=lambda: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "build", self)
            return train.run(chosen, workdir, stop)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """(folder, spy) of the unbroken run of four workers."""
    folder, spy = tmp_path_factory.mktemp("four"), Spy()
    spy.run(tiny(FOUR), folder)
    return folder, spy


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adaptive")
    harness.run(tiny(FOUR | ADAPTIVE), folder)
    return folder


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    folder = tmp_path_factory.mktemp("five")
    harness.run(tiny(FIVE), folder)
    return folder


def stop_at(update, ends, evaluation_asks):
    """A `stop` that ends a run behind an update: it is asked once after each, and all along evaluations."""
    asks = 0
    for number in range(1, update + 1):
        asks += evaluation_asks + 1 if number in ends else 1
    return StopAfter(asks)


def interrupted(changes, folder, update, ends=(4, 8, 10)):
    """A run stopped behind an update (at the end of an epoch, behind its evaluations) and continued."""
    workers = changes["decentralized.workers"]
    with pytest.raises(Preempted, match=f"saved at update {update},"):
        harness.run(tiny(changes), folder, stop_at(update, ends, 2 * (workers + 1)))
    harness.run(tiny(changes), folder)


def test_every_worker_has_its_own_part_of_the_stream(tmp_path):
    """Groups of 20, 20 and 8 sequences, 48 a pass, three virtual epochs, a stop: worker i takes i, i + 4, ..."""
    cache = harness.write_cache(tmp_path / "data")
    chosen, spy = tiny(FOUR, data__source="cache", data__path=str(cache)), Spy()
    with pytest.raises(Preempted, match="saved at update 6,"):
        spy.run(chosen, tmp_path / "run", stop_at(6, (4, 8, 10), 10))
    spy.run(chosen, tmp_path / "run")
    tokens = np.concatenate([np.fromfile(path, "<u2") for path in sorted(cache.glob("train-*.bin"))])
    order = []
    for pass_index in range(3):
        for group, (first, count) in enumerate([(0, 20), (20, 20), (40, 8)]):
            bits = np.random.PCG64(np.random.SeedSequence([42, pass_index, group])).random_raw(count)
            order += [first + i for i in np.argsort(bits, kind="stable")]
    assert [int(batch.rows.sum()) for batch in spy.batches] == SIZES
    for i in range(4):
        seen = []
        for batch, size in zip(spy.batches, SIZES, strict=True):
            weights, rows = batch.rows[i].reshape(-1), batch.tokens[i].reshape(-1, 17)
            assert weights.tolist() == [1] * (size // 4) + [0] * (4 - size // 4)  # equal parts for all workers
            assert not rows[size // 4 :].any()
            seen.append(rows[: size // 4])
        mine = order[:140][i::4]
        np.testing.assert_array_equal(np.concatenate(seen), [tokens[j * 16 : j * 16 + 17] for j in mine])


@pytest.mark.parametrize(
    ("multiple", "workers", "nearest"), [(1, 4, "4"), (6, 4, "4 or 8"), (8, 5, "5 or 10"), (3, 16, "16")]
)
def test_epochs_that_split_an_update_unequally_are_refused(multiple, workers, nearest):
    changes = FIVE if workers == 5 else {**FOUR, "decentralized.workers": workers, "training.microbatch": 1}
    with pytest.raises(ConfigError) as caught:
        tiny(changes | {"training.sequence_multiple": multiple})
    message = str(caught.value)
    assert message.startswith(f"training.sequence_multiple = {multiple} must be a multiple of decentralized.workers = ")
    assert message.endswith(f"the nearest: {nearest}") and "\n" not in message
    for one in nearest.split(" or "):
        tiny(changes | {"training.sequence_multiple": int(one)})


def test_one_worker_runs_are_plain_runs(tmp_path):
    harness.run(tiny(), tmp_path / "plain")
    changes = {"decentralized.topology": "complete", "decentralized.scheme": "atc", "log.consensus_every": 1}
    harness.run(tiny(changes | ADAPTIVE), tmp_path / "one")
    assert harness.outcome(tmp_path / "one") == harness.outcome(tmp_path / "plain")
    keys = {key for line in harness.lines(tmp_path / "one") for key in line}
    assert not keys & {"gamma", "worker_loss", "consensus_distance", "local_loss"}


# Adaptive consensus.


def rates():
    """Learning rates of the run of four workers, worked out again: three warm-up updates, then a cosine."""
    result = []
    for end in np.cumsum(SIZES) * 16:
        after = (end - 768) / (140 * 16 - 768)
        cosine = 0.0056 * (0.1 + 0.9 * math.cos(math.pi / 2 * after) ** 2)
        result.append(0.0056 * end / 768 if end <= 768 else cosine)
    return np.array(result)


def gammas(folder):
    return [line["gamma"] for line in harness.lines(folder, "train")]


def test_gamma_of_a_run(four, adaptive):
    lr = rates()
    np.testing.assert_allclose([line["lr"] for line in harness.lines(adaptive, "train")], lr, rtol=1e-14)
    expected = np.concatenate([np.ones(START), (lr[START:] / lr[START:].max()) ** 2])
    assert expected[START] == 1 and expected[-1] < 0.02
    np.testing.assert_allclose(gammas(adaptive), expected, rtol=1e-7)
    assert gammas(four[0]) == [1.0] * 10
    assert [line["phase"] for line in harness.lines(adaptive, "train")] == [0, 1] * 5
    # Bitwise the ordinary run while gamma is 1, and only so long.
    losses = [[line["worker_loss"] for line in harness.lines(folder, "train")] for folder in (four[0], adaptive)]
    assert losses[0][: START + 2] == losses[1][: START + 2]
    assert losses[0][START + 2] != losses[1][START + 2]


def test_gamma_during_warm_up_and_with_a_floor(tmp_path):
    changes = {
        "decentralized.adaptive.start_frac": 0.0,
        "decentralized.adaptive.p": 1.0,
        "decentralized.adaptive.min_gamma": 0.25,
    }
    harness.run(tiny(FOUR | ADAPTIVE | changes), tmp_path)
    np.testing.assert_allclose(gammas(tmp_path), np.maximum(0.25, rates() / 0.0056), rtol=1e-7)
    assert gammas(tmp_path)[0] == pytest.approx(1 / 3, rel=1e-7) and gammas(tmp_path)[-1] == 0.25


@pytest.mark.parametrize("change", [{"p": 0.0}, {"start_frac": 1.0}])
def test_adaptive_consensus_that_never_acts_changes_nothing(change, four, tmp_path):
    changes = {f"decentralized.adaptive.{key}": value for key, value in change.items()}
    harness.run(tiny(FOUR | ADAPTIVE | changes), tmp_path)
    assert harness.outcome(tmp_path) == harness.outcome(four[0])


@pytest.mark.parametrize("update", [START - 1, START, START + 1])
def test_resume_where_adaptive_consensus_begins(update, adaptive, tmp_path):
    interrupted(FOUR | ADAPTIVE, tmp_path, update)
    assert harness.outcome(tmp_path) == harness.outcome(adaptive)


def test_one_compilation_for_a_whole_run(adaptive, tmp_path):
    """All phases, gammas, short updates, measured and unmeasured ones, and a restored state."""
    interrupted(FOUR | ADAPTIVE, tmp_path, 2)
    assert harness.outcome(tmp_path) == harness.outcome(adaptive)
    assert len(set(gammas(tmp_path))) == 7
    built = harness.KEPT(tiny(FOUR | ADAPTIVE))  # what all runs of four workers in this process have shared
    assert built.step is harness.KEPT(tiny(FOUR)).step
    assert built.step._cache_size() == built.measure._cache_size() == 1


# Metrics.


def tensors(rows_NP, chosen):
    """FP64 parameters by name of each row."""
    layout = arena.make_layout(chosen.model)
    return [arena.from_row(row_P.astype(np.float64), layout) for row_P in rows_NP]


def block_of(name, value):
    """The block of a tensor, by its own rule."""
    if value.ndim == 1:
        return "norm_scales"
    return re.sub(r"^model\.(layers\.\d+|embed_tokens)\..*", r"\1", name)


def pair_cosine(x_NP):
    x_NP = x_NP.astype(np.float64)
    found = [x @ y / np.sqrt((x @ x) * (y @ y)) for i, x in enumerate(x_NP) for y in x_NP[:i]]
    return np.mean(found)


def test_consensus_of_a_run(four):
    """Against FP64 numpy on the states of the run, at updates 3, 6 and 9 only."""
    folder, spy = four
    chosen, lines = tiny(FOUR), harness.lines(folder, "train")
    assert [line["update"] for line in lines if "consensus_distance" in line] == [3, 6, 9]
    for line in lines[2::3]:
        state = spy.after[line["update"] - 1]
        x_NP = state.params_NP.astype(np.float64)
        error_NP = x_NP - x_NP.mean(0)
        total = (error_NP**2).sum() / 4
        assert line["consensus_distance"] == pytest.approx(total, rel=1e-5) and total > 0
        assert line["consensus_relative"] == pytest.approx(total / (x_NP.mean(0) ** 2).sum(), rel=1e-5)
        share = ((error_NP**2).max(1) / (error_NP**2).sum(1)).max()
        assert line["largest_coordinate_share"] == pytest.approx(share, rel=1e-4)
        blocks = {}
        for one in tensors(error_NP, chosen):
            for name, value in one.items():
                block = block_of(name, value)
                blocks[block] = blocks.get(block, 0) + (value**2).sum() / 4
        assert line["consensus_blocks"] == {key: pytest.approx(value, rel=1e-5) for key, value in blocks.items()}
        assert set(blocks) == {"embed_tokens", "layers.0", "norm_scales"}
        assert sum(line["consensus_blocks"].values()) == pytest.approx(line["consensus_distance"], rel=1e-6)
        moments, power = state.moments, line["update"]
        u_NP = moments.mu_NP / (1 - 0.9**power) / (np.sqrt(moments.nu_NP / (1 - 0.98**power)) + 1e-8)
        spread = ((u_NP - u_NP.mean(0)) ** 2).sum() / 4
        assert line["direction_disagreement"] == pytest.approx(spread, rel=1e-4)
        # The closed form 2 - (2 + log2 N) / N of independent noise, whose variance about its mean is 3/4 of itself.
        assert line["consensus_predicted"] == pytest.approx(line["lr"] ** 2 * spread * 4 / 3, rel=1e-4)
        for key, array in (("params", x_NP), ("mu", moments.mu_NP), ("nu", moments.nu_NP)):
            assert line[f"cosine_{key}"] == pytest.approx(pair_cosine(array), rel=1e-5)


def test_losses_norms_and_disagreement_of_the_workers(four):
    """Against FP64 gradients of each worker at its parameters before the update, before the clip."""
    folder, spy = four
    chosen, lines = tiny(FOUR), harness.lines(folder, "train")
    with jax.enable_x64(True):
        frozen = numpy_llama.model(**{key: chosen.model[key] for key in numpy_llama.model()})

        @jax.jit
        def gradients(params, tokens, rows):
            return jax.value_and_grad(lambda p: loss.loss_sum(frozen, FP64, p, tokens, rows) / rows.sum() / 16)(params)

        for line in (lines[2], lines[3], lines[5]):  # the fourth is short and not measured
            index = line["update"] - 1
            batch, workers = spy.batches[index], tensors(spy.before[index], chosen)
            found = [
                gradients(params, batch.tokens[i, 0].astype(np.int32), batch.rows[i, 0].astype(np.float64))
                for i, params in enumerate(workers)
            ]
            losses = [float(value) for value, _ in found]
            g_NP = np.stack([np.concatenate([np.ravel(g) for g in grads.values()]) for _, grads in found])
            norms = np.sqrt((g_NP**2).sum(1))
            assert line["worker_loss"] == pytest.approx(losses, rel=1e-6)
            assert line["loss"] == pytest.approx(np.mean(losses), rel=1e-6)  # equal numbers of targets
            assert line["worker_grad_norm"] == pytest.approx(norms, rel=1e-5)
            assert line["worker_clip"] == pytest.approx(np.minimum(1, 0.72 / (norms + 1e-6)), rel=1e-5)
            if "gradient_disagreement" in line:
                mean_P = g_NP.mean(0)
                expected = ((g_NP - mean_P) ** 2).sum() / 4 / (mean_P @ mean_P)
                assert line["gradient_disagreement"] == pytest.approx(expected, rel=1e-4)
    assert {clip < 1 for clip in lines[5]["worker_clip"]} == {True, False}
    assert "gradient_disagreement" in lines[2] and "gradient_disagreement" not in lines[3]


@pytest.mark.parametrize(
    "change",
    [
        {"log.consensus_every": 1},
        {"log.consensus_every": 1_000_000, "evaluation.subset_sequences": 1, "evaluation.full_at_end": False},
    ],
)
def test_measuring_and_evaluating_change_nothing(change, four, tmp_path):
    harness.run(tiny(FOUR | change), tmp_path)
    assert harness.arrays(tmp_path) == harness.arrays(four[0])
    lines, expected = harness.lines(tmp_path, "train"), harness.lines(four[0], "train")
    assert sum("consensus_distance" in line for line in lines) == (10 if change["log.consensus_every"] == 1 else 0)
    for line, other in zip(lines, expected, strict=True):
        assert (line["worker_loss"], line["worker_grad_norm"]) == (other["worker_loss"], other["worker_grad_norm"])


def test_losses_of_the_mean_and_of_the_workers_on_the_same_sequences(four):
    """Each evaluation against a Llama in numpy."""
    folder, spy = four
    chosen = tiny(FOUR)
    source = data.open_source(chosen)
    rows = source.validation_rows(validation.subset_indices(40, 20, 12345)).astype(np.int64)
    oracle = numpy_llama.model(**{key: chosen.model[key] for key in numpy_llama.model()})
    lines = [line for line in harness.lines(folder, "eval") if line["split"] == "subset"]
    assert [line["update"] for line in lines] == [4, 8, 10]
    for line in lines[::2]:
        x_NP = spy.after[line["update"] - 1].params_NP.astype(np.float64)
        *workers, mean = (
            numpy_llama.token_losses(oracle, params, rows).mean()
            for params in tensors(np.concatenate([x_NP, x_NP.mean(0, keepdims=True)]), chosen)
        )
        assert line["loss"] == pytest.approx(mean, rel=1e-6)
        expected = {"mean": np.mean(workers), "min": min(workers), "max": max(workers), "workers": workers}
        assert line["local_loss"] == {key: pytest.approx(value, rel=1e-6) for key, value in expected.items()}
        assert len(set(workers)) == 4
    assert all("local_loss" not in line for line in harness.lines(folder) if line not in lines)


# Resume.


@pytest.mark.parametrize("update", range(1, 8))
def test_resume_inside_a_cycle_of_offsets(update, five, tmp_path):
    """Five workers: offsets 1, 2, 4 in turn; virtual epochs end behind updates 4, 8 and 10."""
    assert [line["phase"] for line in harness.lines(five, "train")] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    interrupted(FIVE, tmp_path, update)
    assert harness.outcome(tmp_path) == harness.outcome(five)


@pytest.mark.parametrize("asks", [3, 17])
def test_resume_after_a_crash_inside_a_cycle(asks, five, tmp_path):
    """A crash saves nothing: the run goes on from the recovery checkpoint of an update before."""

    class Crash(Exception):
        pass

    calls = iter(range(1, asks + 1))

    def crash():
        if next(calls) == asks:
            raise Crash

    changes = FIVE | {"training.recovery_minutes": 0.0}
    with pytest.raises(Crash):
        harness.run(tiny(changes), tmp_path, crash)
    assert harness.kept(tmp_path)[-1][0] in (1, 2, 4, 5)
    harness.run(tiny(changes), tmp_path)
    assert harness.outcome(tmp_path) == harness.outcome(five)


@pytest.mark.parametrize(
    ("field", "value", "old"),
    [
        ("decentralized.workers", 1, 4),
        ("decentralized.workers", 2, 4),
        ("decentralized.topology", "one_peer_ring", "one_peer_exponential"),
        ("decentralized.pairing", "reciprocal", "directed"),
        ("decentralized.scheme", "atc", "awc"),
        ("decentralized.adaptive.mode", "lr_power", "off"),
        ("decentralized.adaptive.exclude", "norm", ""),
        ("decentralized.worker_lr", "0.001,0.002,0.003,0.004", ""),
        ("decentralized.sync_every", 2, 0),
        ("decentralized.outer_lr", 1.0, 0.7),
        ("decentralized.outer_momentum", 0.0, 0.9),
        ("decentralized.outer_nesterov", False, True),
    ],
)
def test_other_workers_and_another_mixing_are_refused_with_the_difference(field, value, old, four, capsys):
    folder = four[0]
    before = harness.tree(folder)
    assert run_command(lambda: harness.run(tiny(FOUR | {field: value}), folder)) == 2
    error = capsys.readouterr().err
    assert f"\n  {field}: {old} -> {value}\n" in error and "Traceback" not in error
    assert harness.tree(folder) == before


def test_a_pairing_that_the_number_of_workers_does_not_have_is_refused(tmp_path, capsys):
    chosen = tiny(FIVE | {"decentralized.pairing": "reciprocal"})
    assert run_command(lambda: harness.run(chosen, tmp_path / "run")) == 2
    assert "a power of two as decentralized.workers, such as 4 or 8, not 5" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# Workers over devices.


def toy_loss(chosen, numerics, params, tokens_BS, rows_B):
    """Stands for the model where only the workers matter: a small program that uses every parameter and token."""
    level_B = rows_B * jnp.mean(jnp.sin(1.0 + tokens_BS), axis=1)
    total = sum(jnp.sum(jnp.tanh(value) * jnp.cos(3 * value)) for value in params.values())
    return jnp.sum(level_B) * total + jnp.sum(rows_B)


def over_devices(chosen, shards):
    """Five updates with workers spread over devices; (states and metrics, text of the compiled step)."""
    mesh, n = step.make_mesh(shards, 1), chosen.decentralized.workers
    update_of = step.make_step(chosen, FP32, mesh)

    def place(tree, spec):
        return jax.tree.map(jax.device_put, tree, step.shardings(mesh, spec))

    state, told = place(host(start(n)), step.STATE_SPEC), []
    for update in range(5):
        tokens = stream(n * (2 if update == 2 else B), seed=update)
        batch = place(deal(tokens, n), step.BATCH_SPEC)
        arguments = batch, np.full(n, LR, np.float32), mixing(chosen, update, 1 - update / 10)
        if update == 0:
            compiled = update_of.lower(state, *arguments).compile()
        state, metrics = compiled(state, *arguments)
        told.append(host(metrics))
    assert not np.asarray(state.params_NP)[:, LAYOUT.used :].any()
    return (host(state), told), compiled.as_text()


def check_devices():
    """Runs in a process with four devices. The real model over devices is in the run below."""
    assert len(jax.devices()) == 4
    loss.loss_sum = toy_loss
    for number, (workers, name, pairing, *over) in enumerate(
        [
            (4, "complete", "directed", 4),
            (8, "one_peer_ring", "directed", 2),
            (4, "one_peer_exponential", "directed", 2, 4),
            (12, "mixed_radix", "directed", 4),
            (4, "disconnected", "directed", 2),
            (4, "one_peer_ring", "reciprocal", 4),
            (8, "one_peer_exponential", "reciprocal", 4),
        ]
    ):
        chosen = settings(workers, name, ("awc", "atc")[number % 2], "q_proj" * (number % 3 == 0), pairing)
        expected, text = over_devices(chosen, 1)
        assert "collective-permute" not in text
        for shards in over:
            found, text = over_devices(chosen, shards)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1e-6, np.abs(b).max()))
            assert "all-gather" not in text and "all-to-all" not in text
            assert ("collective-permute" in text) == (name not in ("complete", "disconnected")), (name, shards)


def with_four_devices(code):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    variables = {"XLA_FLAGS": flags, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    ended = subprocess.run(
        [sys.executable, "-c", f"import test_packed as t\n{code}\nprint('done')"],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.strip().endswith("done")


def test_workers_over_two_and_four_devices_equal_one_device():
    """All topologies; rows travel by collective-permute, and one-peer topologies gather nothing."""
    with_four_devices("t.check_devices()")


def test_a_run_over_four_devices(four, tmp_path):
    """Losses, consensus and local losses to rounding; the state too, and its checkpoint continues on one device."""
    folder = tmp_path / "run"
    code = f"""
import pytest
with pytest.raises(t.Preempted):
    t.harness.run(t.tiny(t.FOUR | {{"runtime.mesh_worker": 4}}), {str(folder)!r}, t.StopAfter(15))
"""
    with_four_devices(code)
    harness.run(tiny(FOUR), folder)
    found, expected = (json.loads(json.dumps(harness.timeless(harness.lines(one)))) for one in (folder, four[0]))

    def numbers(value):
        if isinstance(value, dict):
            return [x for key in sorted(value) for x in numbers(value[key])]
        if isinstance(value, list):
            return [x for inner in value for x in numbers(inner)]
        return [value] if isinstance(value, int | float) else []

    assert len(found) == len(expected) == 14
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose(numbers(a), numbers(b), rtol=2e-3)
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
