"""Mixing against explicit matrices, the properties of schedules, gamma tables, and the stationary disagreement."""

import functools
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import topology
from llama_jax.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
P, USED = 12, 10  # the last two columns are padding


def allowed(name: str, n: int, pairing: str) -> bool:
    if pairing == "directed":
        return True
    return {"one_peer_ring": n % 2 == 0, "one_peer_exponential": n & (n - 1) == 0}.get(name, False)


CASES = [
    (name, n, pairing)
    for name in topology.NAMES
    for n in range(1, 18)
    for pairing in topology.PAIRINGS
    if allowed(name, n, pairing)
]


def oracle(name: str, n: int, t: int, pairing: str = "directed") -> np.ndarray:
    """The matrix of update t from its definition: entry by entry, without permutations or schedules."""
    w = np.zeros((n, n))
    if n == 1 or name == "disconnected":
        return np.eye(n)
    if name == "complete":
        return np.full((n, n), 1 / n)
    if name == "mixed_radix":
        factors = [q for q in range(2, n + 1) for _ in range(n) if all(q % d for d in range(2, q))]
        stages, rest = [], n
        for q in factors:
            if rest % q == 0:
                stages.append(q)
                rest //= q
        stage = t % len(stages)
        stride = math.prod(stages[:stage])
        for i in range(n):
            for j in range(stages[stage]):
                w[i, (i - j * stride) % n] += 1 / stages[stage]
        return w
    offsets = [2**j for j in range(10) if 2**j < n]
    for i in range(n):
        if name == "one_peer_ring" and pairing == "directed":
            peer = i - 1 if t % 2 == 0 else i + 1
        elif name == "one_peer_ring":
            peer = i + 1 if i % 2 == t % 2 else i - 1
        elif pairing == "directed":
            peer = i - offsets[t % len(offsets)]
        else:
            peer = i ^ offsets[t % len(offsets)]
        w[i, i] += 0.5
        w[i, peer % n] += 0.5
    return w


@functools.cache
def mixer(schedule: topology.Schedule, excluded: topology.Ranges = ()):
    return jax.jit(lambda x_NP, phase, gamma: topology.mix(x_NP, schedule, phase, gamma, excluded, axis=None))


def run(schedule, x_NP, update, gamma=1.0, excluded=()):
    phase = jnp.int32(update % schedule.period)
    return np.asarray(mixer(schedule, excluded)(x_NP, phase, jnp.float32(gamma)))


def rows(n: int, seed: int = 0) -> np.ndarray:
    x_NP = np.random.default_rng([seed, n]).standard_normal((n, P)).astype(np.float32)
    x_NP[:, USED:] = 0
    return x_NP


def bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).view(np.uint32)


@pytest.fixture(scope="module", autouse=True)
def optimized():
    """What claims bits is compiled with all optimizations, as in a run."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()


@pytest.fixture
def quick_compilation():
    """For many small programs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def check_mix(schedule, name, n, pairing):
    """Every phase at gamma 1 and 0.3 is the oracle's matrix to a few ulp of the largest entry; padding stays zero."""
    x_NP = rows(n)
    mixed = mixer.__wrapped__(schedule)
    ulp = np.spacing(np.abs(x_NP).max())
    for update in range(schedule.period):
        w = oracle(name, n, update, pairing)
        for gamma in (1.0, 0.3):
            got = np.asarray(mixed(x_NP, jnp.int32(update), jnp.float32(gamma)))
            want = (float(np.float32(gamma)) * w + (1 - float(np.float32(gamma))) * np.eye(n)) @ x_NP.astype(np.float64)
            assert got.dtype == np.float32
            assert np.abs(got - want).max() <= 3 * ulp
            assert not bits(got[:, USED:]).any()


@pytest.mark.parametrize("name", topology.NAMES)
def test_mix_and_matrix_are_the_definition(name, quick_compilation):
    for case, n, pairing in CASES:
        if case == name:
            schedule = topology.make_schedule(name, n, pairing)
            for update in range(2 * schedule.period + 1):
                w = topology.matrix(name, n, update, pairing)
                assert w.dtype == np.float64
                np.testing.assert_allclose(w, oracle(name, n, update, pairing), rtol=0, atol=1e-15)
                np.testing.assert_allclose([w.sum(0), w.sum(1)], 1, rtol=0, atol=1e-14)
                assert w.min() >= 0
            check_mix(schedule, name, n, pairing)


def test_periods():
    def period(name, n, pairing="directed"):
        return topology.make_schedule(name, n, pairing).period

    assert [period("one_peer_exponential", n) for n in range(1, 18)] == [
        *(1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 5),
    ]
    assert [period("mixed_radix", n) for n in range(1, 17)] == [1, 1, 1, 2, 1, 2, 1, 3, 2, 2, 1, 3, 1, 2, 2, 4]
    assert [period("one_peer_ring", n) for n in (1, 2, 3, 8)] == [1, 2, 2, 2]
    assert [period("one_peer_exponential", n, "reciprocal") for n in (1, 2, 4, 8, 16)] == [1, 1, 2, 3, 4]
    assert period("complete", 7) == period("disconnected", 7) == 1


def test_ring_of_three_by_hand():
    """Workers hold 2, 4, 8: an even update receives from the left neighbour, an odd one from the right."""
    schedule = topology.make_schedule("one_peer_ring", 3)
    x_NP = np.asarray([[2.0], [4.0], [8.0]], np.float32)
    assert run(schedule, x_NP, 0).ravel().tolist() == [5, 3, 6]
    assert run(schedule, x_NP, 1).ravel().tolist() == [3, 6, 5]
    assert run(schedule, x_NP, 2).ravel().tolist() == [5, 3, 6]


def test_exponential_of_five_by_hand():
    """Workers hold 2, 4, 8, 16, 32: offsets 1, 2, 4, row i receives row i - offset."""
    schedule = topology.make_schedule("one_peer_exponential", 5)
    x_NP = np.asarray([[2.0], [4.0], [8.0], [16.0], [32.0]], np.float32)
    assert run(schedule, x_NP, 0).ravel().tolist() == [17, 3, 6, 12, 24]
    assert run(schedule, x_NP, 1).ravel().tolist() == [9, 18, 5, 10, 20]
    assert run(schedule, x_NP, 2).ravel().tolist() == [3, 6, 12, 24, 17]
    assert run(schedule, x_NP, 3).ravel().tolist() == [17, 3, 6, 12, 24]


@pytest.mark.parametrize("name", ["one_peer_ring", "one_peer_exponential"])
def test_opposite_direction_is_caught(name, quick_compilation):
    schedule = topology.make_schedule(name, 5)
    inverted = [
        topology.Phase(tuple(tuple(np.argsort(s).tolist()) for s in phase.peers), phase.mean)
        for phase in schedule.phases
    ]
    with pytest.raises(AssertionError):
        check_mix(topology.Schedule(name, 5, "directed", tuple(inverted)), name, 5, "directed")


def test_a_schedule_must_be_doubly_stochastic():
    """Rows of (I + peers) / 2 sum to 1 for any sources; columns only where each worker is heard once."""
    with pytest.raises(ValueError, match=r"phase 1 of own is not doubly stochastic"):
        topology.Schedule("own", 3, "directed", (topology.Phase(((1, 2, 0),)), topology.Phase(((0, 0, 1),))))
    with pytest.raises(ValueError, match="a source for each of 3 workers"):
        topology.Schedule("own", 3, "directed", (topology.Phase(((1, 0),)),))
    with pytest.raises(ValueError, match="no mean of 3 workers"):
        topology.Schedule("own", 3, "directed", (topology.Phase(((1, 2, 0),), mean=True),))


@pytest.mark.parametrize("n", [2, 4, 8, 16])
@pytest.mark.parametrize("pairing", topology.PAIRINGS)
def test_powers_of_two_average_exactly_from_any_phase(n, pairing):
    """Up to ulps in the directed schedule, bitwise where pairs exchange: a + b commutes."""
    schedule = topology.make_schedule("one_peer_exponential", n, pairing)
    assert schedule.exact
    start = rows(n)
    for first in range(schedule.period):
        x_NP = start
        for update in range(first, first + schedule.period):
            x_NP = run(schedule, x_NP, update)
        np.testing.assert_allclose(x_NP, np.broadcast_to(start.mean(0, np.float64), x_NP.shape), rtol=0, atol=4e-7)
        if pairing == "reciprocal":
            assert np.array_equal(bits(x_NP), np.broadcast_to(bits(x_NP[0]), x_NP.shape))


@pytest.mark.parametrize("n", range(1, 18))
def test_mixed_radix_averages_exactly_for_any_number(n):
    schedule = topology.make_schedule("mixed_radix", n)
    assert schedule.exact
    start = x_NP = rows(n)
    for update in range(1, 1 + schedule.period):
        x_NP = run(schedule, x_NP, update)
    np.testing.assert_allclose(x_NP, np.broadcast_to(start.mean(0, np.float64), x_NP.shape), rtol=0, atol=4e-7)


def test_other_one_peer_schedules_do_not():
    assert not any(topology.make_schedule("one_peer_exponential", n).exact for n in (3, 5, 6, 7, 9, 12))
    assert not any(topology.make_schedule("one_peer_ring", n).exact for n in (3, 4, 5, 8))
    assert topology.make_schedule("one_peer_ring", 2).exact


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_complete_makes_rows_bitwise_equal(n):
    x_NP = run(topology.make_schedule("complete", n), rows(n), 0)
    assert np.array_equal(bits(x_NP), np.broadcast_to(bits(x_NP[0]), x_NP.shape))


@pytest.mark.parametrize("n", [2, 3, 5, 6, 8])
@pytest.mark.parametrize("name", topology.NAMES)
def test_equal_rows_stay_equal(name, n):
    """Bitwise equal to each other, and unchanged unless a mean of all is formed, which may round."""
    schedule = topology.make_schedule(name, n)
    start = np.tile(rows(1, seed=5), (n, 1))
    start[:, 0] = -0.0
    for update in range(schedule.period):
        for gamma in (1.0, 0.3):
            x_NP = run(schedule, start, update, gamma)
            assert np.array_equal(bits(x_NP), np.broadcast_to(bits(x_NP[0]), x_NP.shape))
            if not schedule.phases[update].mean:
                assert np.array_equal(bits(x_NP), bits(start))


def test_one_program_for_a_run():
    schedule = topology.make_schedule("one_peer_exponential", 5)
    mixed = jax.jit(lambda x_NP, phase, gamma: topology.mix(x_NP, schedule, phase, gamma, axis=None))
    x_NP = jnp.asarray(rows(5))
    for update in range(3 * schedule.period):
        x_NP = mixed(x_NP, jnp.int32(update % schedule.period), jnp.float32(1 - 0.1 * update))
    assert mixed._cache_size() == 1


@pytest.mark.parametrize(("name", "n"), [(name, 1) for name in topology.NAMES] + [("disconnected", 4)])
def test_nothing_to_mix_is_the_arena_itself(name, n):
    schedule = topology.make_schedule(name, n)
    x_NP = jnp.asarray(rows(n))
    assert topology.mix(x_NP, schedule, jnp.int32(0), jnp.float32(1), axis=None) is x_NP
    assert not schedule.mixes


def test_number_of_rows_must_fit():
    with pytest.raises(ValueError, match="3 rows on 1 devices are not 4 workers"):
        topology.mix(jnp.zeros((3, P)), topology.make_schedule("complete", 4), jnp.int32(0), jnp.float32(1), axis=None)


def test_float64_stays():
    with jax.enable_x64(True):
        x_NP = jnp.asarray(np.random.default_rng(1).standard_normal((6, P)))
        for name in topology.NAMES:
            schedule = topology.make_schedule(name, 6)
            mixed = mixer.__wrapped__(schedule)
            for update in range(schedule.period):
                got = mixed(x_NP, jnp.int32(update), jnp.float64(0.3))
                want = (0.3 * oracle(name, 6, update) + 0.7 * np.eye(6)) @ np.asarray(x_NP)
                assert got.dtype == jnp.float64
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-15)


# Gamma.


@pytest.mark.parametrize("pairing", topology.PAIRINGS)
@pytest.mark.parametrize("name", ["one_peer_ring", "one_peer_exponential"])
def test_gamma_one_is_the_plain_average_bitwise(name, pairing):
    schedule = topology.make_schedule(name, 8, pairing)
    x_NP = rows(8)
    for update, phase in enumerate(schedule.phases):
        plain = np.float32(0.5) * (x_NP + x_NP[list(phase.peers[0])])
        assert np.array_equal(bits(run(schedule, x_NP, update)), bits(plain))


@pytest.mark.parametrize("name", topology.NAMES)
def test_gamma_zero_keeps_every_bit(name):
    """Negative zeros too, and a worker that is not finite stays alone."""
    x_NP = rows(6)
    x_NP[0, 0], x_NP[1, 1], x_NP[2] = -0.0, np.float32(1e-45), np.nan
    schedule = topology.make_schedule(name, 6)
    for update in range(schedule.period):
        assert np.array_equal(bits(run(schedule, x_NP, update, 0.0)), bits(x_NP))


@pytest.mark.parametrize(("name", "n", "pairing"), [c for c in CASES if c[1] in (4, 6, 7)])
def test_weakened_mixing_keeps_the_mean(name, n, pairing):
    """gamma W + (1 - gamma) I is doubly stochastic; with mixing first or last, the mean moves by the mean update."""
    schedule = topology.make_schedule(name, n, pairing)
    x_NP, u_NP = rows(n), rows(n, seed=1)
    for gamma in np.random.default_rng(3).uniform(0, 1, 3):
        w = schedule.matrix(0, gamma)
        np.testing.assert_allclose([w.sum(0), w.sum(1)], 1, rtol=0, atol=1e-14)
        assert w.min() >= 0
        want = 0.9 * x_NP.mean(0) - 0.1 * u_NP.mean(0)
        adapt_while_combine = np.float32(0.9) * run(schedule, x_NP, 0, gamma) - np.float32(0.1) * u_NP
        adapt_then_combine = run(schedule, np.float32(0.9) * x_NP - np.float32(0.1) * u_NP, 0, gamma)
        np.testing.assert_allclose(adapt_while_combine.mean(0), want, rtol=0, atol=3e-7)
        np.testing.assert_allclose(adapt_then_combine.mean(0), want, rtol=0, atol=3e-7)


@pytest.mark.parametrize("name", ["complete", "one_peer_exponential", "mixed_radix"])
def test_excluded_ranges_mix_fully(name):
    schedule = topology.make_schedule(name, 6)
    x_NP = rows(6)
    excluded = ((2, 3), (7, 1))
    full = np.isin(np.arange(P), [2, 3, 4, 7])
    for gamma in (0.0, 0.3):
        got = run(schedule, x_NP, 1, gamma, excluded)
        np.testing.assert_allclose(got[:, full], run(schedule, x_NP, 1)[:, full], rtol=0, atol=3e-7)
        np.testing.assert_allclose(got[:, ~full], run(schedule, x_NP, 1, gamma)[:, ~full], rtol=0, atol=3e-7)
        if name.startswith("one_peer"):
            assert np.array_equal(bits(got[:, full]), bits(run(schedule, x_NP, 1)[:, full]))
        if gamma == 0:
            assert np.array_equal(bits(got[:, ~full]), bits(x_NP[:, ~full]))
    traced = jax.make_jaxpr(mixer(schedule, excluded))(x_NP, jnp.int32(0), jnp.float32(0.3))
    assert not any(np.size(constant) >= P for constant in traced.consts)


def test_gamma_table_by_hand():
    """Ten updates, two of warm-up; the largest rate of the second half is 0.8, not the peak."""
    rates = [0.5, 1.0, 1.0, 1.0, 0.9, 0.8, 0.6, 0.4, 0.2, 0.1]
    first = [1.0] * 5
    table = topology.gamma_table(rates, 0.5, 1)
    assert table.dtype == np.float64
    np.testing.assert_allclose(table, [*first, 1, 0.75, 0.5, 0.25, 0.125], rtol=1e-15)
    np.testing.assert_allclose(
        topology.gamma_table(rates, 0.5, 2), [*first, 1, 0.5625, 0.25, 0.0625, 0.015625], rtol=1e-15
    )
    np.testing.assert_allclose(topology.gamma_table(rates, 0.5, 1, 0.3), [*first, 1, 0.75, 0.5, 0.3, 0.3], rtol=1e-15)
    assert topology.gamma_table(rates, 0.5, 0).tolist() == [1.0] * 10
    assert topology.gamma_table(rates, 1.0, 2).tolist() == [1.0] * 10
    # From the start the warm-up weakens mixing as well.
    np.testing.assert_allclose(topology.gamma_table(rates, 0.0, 1), rates, rtol=1e-15)
    # ceil(0.41 x 10) = 5, and 0.07 x 100 is 7, not the 8 of ceil(7.000000000000001).
    np.testing.assert_array_equal(topology.gamma_table(rates, 0.41, 1), table)
    assert topology.gamma_table(np.arange(100, 0, -1), np.float64(0.07), 1)[6:9].tolist() == [1, 1, 92 / 93]


def test_gamma_table_refuses():
    rates = [1.0, 0.5, 0.0, 0.0]
    for arguments, field in [
        ((-0.1, 1), "start_frac"),
        ((1.1, 1), "start_frac"),
        ((math.nan, 1), "start_frac"),
        ((0.5, -1), "p"),
        ((0.5, math.inf), "p"),
        ((0.5, 1, 1.5), "min_gamma"),
    ]:
        with pytest.raises(ConfigError, match=rf"decentralized\.adaptive\.{field} = "):
            topology.gamma_table(rates, *arguments)
    with pytest.raises(ConfigError, match="learning rate above 0 from update 2 on"):
        topology.gamma_table(rates, 0.5, 1)
    assert topology.gamma_table(rates, 0.5, 0).tolist() == topology.gamma_table(rates, 1, 1).tolist() == [1.0] * 4


# Refusals.


def test_pairing_is_refused_where_there_is_none():
    for name in topology.NAMES:
        for n in range(1, 18):
            if not allowed(name, n, "reciprocal"):
                with pytest.raises(ConfigError, match=r"decentralized\.pairing = reciprocal"):
                    topology.matrix(name, n, 0, "reciprocal")
    with pytest.raises(ConfigError, match=r"even decentralized\.workers, such as 4 or 6, not 5"):
        topology.make_schedule("one_peer_ring", 5, "reciprocal")
    with pytest.raises(ConfigError, match=r"power of two as decentralized\.workers, such as 8 or 16, not 12"):
        topology.make_schedule("one_peer_exponential", 12, "reciprocal")


def test_names_are_checked():
    with pytest.raises(ConfigError, match=r"decentralized\.topology = star must be one of complete, one_peer_ring"):
        topology.make_schedule("star", 4)
    with pytest.raises(ConfigError, match=r"decentralized\.pairing = mutual must be one of directed, reciprocal"):
        topology.make_schedule("complete", 4, "mutual")
    with pytest.raises(ConfigError, match=r"decentralized\.workers = 0 must be at least 1"):
        topology.make_schedule("complete", 0)


# What a schedule publishes.


def test_contraction_of_a_cycle():
    """Known values of the directed exponential schedule; the ring's rate is cos(pi / N) an update."""
    known = {3: 0.25, 5: 0.202, 6: 0.217, 7: 0.125, 12: 0.209}
    for n, value in known.items():
        assert topology.make_schedule("one_peer_exponential", n).contraction() == pytest.approx(value, abs=5e-4)
    for n in (4, 5, 8, 16):
        ring = topology.make_schedule("one_peer_ring", n).contraction()
        assert ring == pytest.approx(math.cos(math.pi / n) ** 2, rel=1e-9)
    # Two projections at an angle: their product has its cosine as norm, and the square of it as asymptotic rate.
    for n, cosine in {6: 0.5, 8: 0.7071, 16: 0.9239}.items():
        ring = topology.make_schedule("one_peer_ring", n, "reciprocal").contraction()
        assert ring == pytest.approx(cosine, abs=1e-4)
    for gamma in (0.9, 0.5, 0.1):
        assert topology.make_schedule("one_peer_exponential", 8).contraction(gamma) == pytest.approx(1 - gamma)
        assert topology.make_schedule("complete", 8).contraction(gamma) == pytest.approx(1 - gamma)
    assert topology.make_schedule("disconnected", 3).contraction() == pytest.approx(1)


def test_symmetry_peers_and_traffic():
    published = {
        (name, n, pairing): topology.make_schedule(name, n, pairing)
        for name, n, pairing in CASES
        if (name, n) in {("complete", 4), ("one_peer_exponential", 8), ("mixed_radix", 12), ("disconnected", 4)}
    }
    directed, reciprocal = (published["one_peer_exponential", 8, pairing] for pairing in topology.PAIRINGS)
    assert not directed.symmetric
    assert reciprocal.symmetric
    assert published["complete", 4, "directed"].symmetric
    # 20,403,520 float32: 81.6 MB to one peer, 122.4 MB for a ring all-reduce of four; 12 = 2 x 2 x 3 has 1, 1, 2 peers.
    elements = 20_403_520
    assert directed.traffic(elements) == reciprocal.traffic(elements) == 81_614_080
    assert published["complete", 4, "directed"].traffic(elements) == 122_421_120
    assert published["mixed_radix", 12, "directed"].traffic(elements) == pytest.approx(4 / 3 * 81_614_080)
    assert published["disconnected", 4, "directed"].traffic(elements) == 0
    # A prime number of workers is averaged at once: as a mean, not by six peers.
    assert topology.make_schedule("mixed_radix", 7).traffic(7) == topology.make_schedule("complete", 7).traffic(7) == 48
    assert [schedule.peers for schedule in published.values()] == [3, 1, 1, pytest.approx(4 / 3), 0]


def test_stationary_distance_is_the_closed_form():
    for n in (2, 3, 4, 8, 16, 32):
        fresh = (n - 1) / n
        complete = topology.make_schedule("complete", n)
        for gamma in (1.0, 0.5, 0.1):
            want = fresh / (1 - (1 - gamma) ** 2)
            assert complete.stationary("awc", gamma) == pytest.approx(want, rel=1e-9)
            assert complete.stationary("atc", gamma) == pytest.approx(want * (1 - gamma) ** 2, rel=1e-9, abs=1e-12)
        ring = topology.make_schedule("one_peer_ring", n)
        assert ring.stationary("awc") == pytest.approx((n * n - 1) / (3 * n), rel=1e-9)
        assert ring.stationary("atc") == pytest.approx((n * n - 1) / (3 * n) - fresh, rel=1e-9, abs=1e-12)
        if n & (n - 1) == 0:
            for pairing in topology.PAIRINGS:
                exponential = topology.make_schedule("one_peer_exponential", n, pairing)
                want = 2 - (2 + math.log2(n)) / n
                assert exponential.stationary("awc") == pytest.approx(want, rel=1e-9)
                assert exponential.stationary("atc") == pytest.approx(want - fresh, rel=1e-9, abs=1e-12)
    assert topology.make_schedule("one_peer_ring", 8, "reciprocal").stationary() == pytest.approx(1.5)
    weak = [
        topology.make_schedule("one_peer_exponential", 4, pairing).stationary("awc", 0.1)
        for pairing in topology.PAIRINGS
    ]
    assert weak == [pytest.approx(5.986, abs=5e-4), pytest.approx(6.329, abs=5e-4)]


def test_stationary_distance_without_an_end():
    assert topology.make_schedule("disconnected", 3).stationary() == math.inf
    assert topology.make_schedule("complete", 3).stationary("awc", 0.0) == math.inf
    assert topology.make_schedule("disconnected", 1).stationary() == 0
    with pytest.raises(ValueError, match="neither awc nor atc"):
        topology.make_schedule("complete", 3).stationary("cta")


# Independent noise instead of updates: what the closed forms are about.


def spread(x_NP: jax.Array) -> jax.Array:
    """Xi^2 per coordinate."""
    return jnp.mean(jnp.square(x_NP - jnp.mean(x_NP, axis=0)[None, :]))


@pytest.mark.parametrize(
    ("name", "n", "pairing"),
    [c for c in CASES if c[1] in (4, 8) and c[0] in ("complete", "one_peer_ring", "one_peer_exponential")],
)
def test_noise_settles_at_the_prediction(name, n, pairing):
    schedule = topology.make_schedule(name, n, pairing)
    kinds = [(scheme, gamma) for scheme in ("awc", "atc") for gamma in (1.0, 0.1)]
    # A weak ring forgets slowly: with eight workers and gamma 0.1, its slowest mode loses 1.5 % an update.
    burn, updates = 300, 1800

    @jax.jit
    def settled():
        def update(states, t):
            noise_NP = jax.random.normal(jax.random.fold_in(jax.random.key(7), t), (n, 512))
            new = []
            for (scheme, gamma), x_NP in zip(kinds, states, strict=True):
                if scheme == "atc":
                    x_NP = x_NP + noise_NP
                x_NP = topology.mix(x_NP, schedule, t % schedule.period, jnp.float32(gamma), axis=None)
                new.append(x_NP + noise_NP if scheme == "awc" else x_NP)
            return new, jnp.stack([spread(x_NP) for x_NP in new])

        return jax.lax.scan(update, [jnp.zeros((n, 512))] * len(kinds), jnp.arange(burn + updates))[1]

    measured = np.asarray(settled(), np.float64)[burn:].mean(0)
    predicted = [schedule.stationary(scheme, gamma) for scheme, gamma in kinds]
    np.testing.assert_allclose(measured, predicted, rtol=0.02, atol=1e-6)


def test_disagreement_follows_the_power_of_the_rate():
    """The 20M recipe's cosine (12,473 updates, 5 % warm-up, floor 10 %), four workers, start_frac 0.25.

    p = 2 holds the distance, p = 0 lets it fall with the learning rate, p = 3 makes it grow.
    """
    total, n = 12473, 4
    position = (np.arange(total) + 1) / total
    decay = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * np.clip((position - 0.05) / 0.95, 0, 1)))
    rates = np.where(position < 0.05, position / 0.05, decay)
    powers = (0, 1, 2, 3)
    tables = np.stack([topology.gamma_table(rates, 0.25, p) for p in powers], axis=1)
    assert tables[-1, 1:3] == pytest.approx([0.11050, 0.01221], abs=5e-6)
    schedule = topology.make_schedule("one_peer_exponential", n)

    @jax.jit
    def distances(rates, tables):
        def update(states, now):
            t, rate, gammas = now
            noise_NP = rate * jax.random.normal(jax.random.fold_in(jax.random.key(3), t), (n, 256))
            new = [
                topology.mix(x_NP, schedule, t % schedule.period, gammas[i], axis=None) + noise_NP
                for i, x_NP in enumerate(states)
            ]
            return new, jnp.stack([spread(x_NP) for x_NP in new])

        inputs = (jnp.arange(total), rates, tables)
        return jax.lax.scan(update, [jnp.zeros((n, 256))] * len(powers), inputs)[1]

    squared = np.asarray(distances(jnp.float32(rates), jnp.float32(tables)), np.float64)
    half, end = (np.sqrt(squared[at - 200 : at + 200].mean(0)) for at in (total // 2, total))
    np.testing.assert_allclose(half, [0.587, 0.632, 0.737, 0.888], rtol=0.03)
    np.testing.assert_allclose(end, [0.100, 0.232, 0.692, 2.019], rtol=0.06)
    assert 5 < half[0] / end[0] < 6
    windows = np.sqrt(squared[total // 2 :, 2].reshape(-1, 99).mean(1))  # 63 windows of the second half
    np.testing.assert_allclose(windows, windows.mean(), rtol=0.1)


# Several devices.

SEVERAL = r"""
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as Spec
from llama_jax import topology

P = 16


def collectives(compiled):
    # Operation and the rows it moves: every collective here has a result f32[rows, P] or, the mean, f32[P].
    found = re.findall(r"= f32\[([\d,]*)\]\S* (collective-permute|all-gather|all-reduce|all-to-all)\(", compiled)
    named = re.findall(r"(collective-permute|all-gather|all-reduce|all-to-all)\(", compiled)
    assert len(found) == len(named), compiled
    return sorted((kind, shape) for shape, kind in found)


def compile_mix(schedule, shards, excluded=()):
    data = 2 if shards == 2 else 1  # a second mesh axis, over which the arena is replicated
    devices = jax.devices()[: shards * data]
    mesh = jax.make_mesh((shards, data), ("worker", "data"), (AxisType.Auto,) * 2, devices=devices)
    def body(x_NP, phase, gamma):
        return topology.mix(x_NP, schedule, phase, gamma, excluded)
    specs = (Spec("worker"), Spec(), Spec())
    sharded = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=Spec("worker"), check_vma=False)
    shape = jax.ShapeDtypeStruct((schedule.workers, P), jnp.float32, sharding=NamedSharding(mesh, Spec("worker")))
    scalar = lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=NamedSharding(mesh, Spec()))
    return mesh, jax.jit(sharded).lower(shape, scalar(jnp.int32), scalar(jnp.float32)).compile()


def check(name, n, pairing, shards):
    schedule = topology.make_schedule(name, n, pairing)
    mesh, sharded = compile_mix(schedule, shards, ((3, 4),))
    alone = jax.jit(lambda x, phase, gamma: topology.mix(x, schedule, phase, gamma, ((3, 4),), axis=None))
    x_NP = np.random.default_rng(n).standard_normal((n, P)).astype(np.float32)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    for phase in range(schedule.period):
        for gamma in (1.0, 0.3, 0.0):
            arguments = x_NP, np.int32(phase), np.float32(gamma)
            got = sharded(*map(put, arguments, (Spec("worker"), Spec(), Spec())))
            want = alone(*arguments)
            if name.startswith("one_peer") and gamma != 0.3:
                assert np.array_equal(got, want), (name, n, pairing, shards, phase, gamma)
            np.testing.assert_allclose(got, want, rtol=0, atol=5e-7, err_msg=str((name, n, pairing, shards, phase)))
    kinds = {kind for kind, _ in collectives(sharded.as_text())}
    if schedule.mixes and name.startswith("one_peer"):
        assert kinds == {"collective-permute"}, (name, n, pairing, shards, kinds)
    assert "all-gather" not in kinds


for name, n, shards in [
    ("complete", 8, 2), ("complete", 6, 2), ("disconnected", 4, 2),
    ("one_peer_ring", 8, 8), ("one_peer_ring", 12, 4), ("one_peer_ring", 6, 2),
    ("one_peer_exponential", 8, 2), ("one_peer_exponential", 8, 4), ("one_peer_exponential", 8, 8),
    ("one_peer_exponential", 12, 4), ("one_peer_exponential", 16, 8), ("one_peer_exponential", 6, 2),
    ("mixed_radix", 12, 4), ("mixed_radix", 6, 2), ("mixed_radix", 5, 5),
]:
    check(name, n, "directed", shards)
for name, n, shards in [
    ("one_peer_ring", 8, 2), ("one_peer_ring", 8, 8), ("one_peer_ring", 6, 2), ("one_peer_ring", 12, 4),
    ("one_peer_exponential", 8, 2), ("one_peer_exponential", 16, 8),
]:
    check(name, n, "reciprocal", shards)

# What travels: one edge row per ring update of two local rows; in the exponential schedule of eight workers on two
# devices offsets 1 and 2 move edge rows and offset 4 the whole block; of two local rows, offset 4 moves both.
def moved(name, n, shards, pairing="directed"):
    compiled = compile_mix(topology.make_schedule(name, n, pairing), shards)[1]
    return [shape for _, shape in collectives(compiled.as_text())]

assert moved("one_peer_ring", 8, 4) == ["1,16"] * 2
assert moved("one_peer_exponential", 8, 2) == ["1,16", "2,16", "4,16"]
assert moved("one_peer_exponential", 8, 2, "reciprocal") == ["4,16"]
assert moved("one_peer_exponential", 8, 4) == ["1,16", "2,16", "2,16"]
assert moved("complete", 8, 4) == ["16"]

# Defect: row numbers from a traced table, left to the partitioner.
mesh = jax.make_mesh((4,), ("worker",), (AxisType.Auto,), devices=jax.devices()[:4])
place = NamedSharding(mesh, Spec("worker"))
table = jnp.asarray([phase.peers[0] for phase in topology.make_schedule("one_peer_exponential", 8).phases])
gather = jax.jit(lambda x, phase: 0.5 * (x + x[table[phase]]), in_shardings=(place, None), out_shardings=place)
text = gather.lower(jax.ShapeDtypeStruct((8, P), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)).compile().as_text()
assert {kind for kind, _ in collectives(text)} != {"collective-permute"}, text
print("equal")
"""


def test_devices_equal_one():
    """2, 4, 5 and 8 host devices: the result of one, and only the rows that another device needs travel."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, "-c", SEVERAL],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip() == "equal"
