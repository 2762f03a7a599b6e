"""The exact budget against brute force in Fractions and a naive simulation of the updates."""

import dataclasses
import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from llama_jax import budget

P_20M = 20_403_520


def ends_by_definition(params, context, multiple, epoch, count):
    """The first `count` distinct positive boundaries floor(floor(k e P / T) / m) m, one k after the other."""
    ends, k = [], 0
    while len(ends) < count:
        k += 1
        end = math.floor(Fraction(math.floor(k * epoch * params / context), multiple)) * multiple
        if end > 0 and (not ends or end > ends[-1]):
            ends.append(end)
    return ends


def simulate(batch, ends, total):
    """(start, size, epoch, whether an epoch ends with it) of all updates, one sequence after the other."""
    updates, start, epoch = [], 0, 0
    for position in range(1, total + 1):
        at_end = position == total or position in ends
        if position - start == batch or at_end:
            updates.append((start, position - start, epoch, at_end))
            start, epoch = position, epoch + at_end
    return updates


def check_against_simulation(plan, ends, total):
    updates = simulate(plan.batch_sequences, set(ends), total)
    assert plan.total_sequences == total
    assert plan.total_targets == total * plan.context
    # One more is asked for than there are, so that sizes that never end are a failure, not a hang.
    sizes = list(itertools.islice(plan.sizes(), len(updates) + 1))
    assert sizes == [size for _, size, _, _ in updates]
    assert sum(sizes) == total
    assert plan.total_updates == len(updates)
    for number, (start, size, epoch, at_end) in enumerate(updates):
        assert plan.epoch(start) == epoch
        assert plan.update_size(start) == size <= plan.batch_sequences
        assert plan.updates_until(start) == number
        assert plan.updates_until(start + size) == number + 1
        assert plan.is_boundary(start + size) == at_end
        for inside in range(start + 1, start + size):
            assert not plan.is_boundary(inside)
    if updates:
        middle = updates[len(updates) // 2][0]
        assert list(plan.sizes(middle)) == [size for start, size, _, _ in updates if start >= middle]
    assert not plan.is_boundary(0)


decimals = some.decimals(min_value="0.1", max_value=40, places=3)


@settings(max_examples=150)
@given(
    params=some.integers(10, 4000),
    context=some.integers(2, 64),
    multiple=some.integers(1, 9),
    batch=some.integers(1, 40),
    epoch=decimals,
    ratio=decimals,
)
def test_targets_per_parameter_against_brute_force(params, context, multiple, batch, epoch, ratio):
    total = math.floor(Fraction(math.floor(Fraction(ratio) * params / context), multiple)) * multiple
    arguments = (params, context, batch, multiple, float(epoch))
    if total == 0:
        with pytest.raises(ValueError, match=f"{multiple} sequences of {context} targets"):
            budget.make_plan(*arguments, targets_per_parameter=float(ratio))
        return
    plan = budget.make_plan(*arguments, targets_per_parameter=float(ratio))
    ends = ends_by_definition(params, context, multiple, Fraction(epoch), len(plan.boundaries))
    assert plan.boundaries == (*[end for end in ends if end < total], total)
    if total <= 5000:
        check_against_simulation(plan, ends, total)


@settings(max_examples=80)
@given(
    params=some.integers(10, 4000),
    context=some.integers(2, 64),
    multiple=some.integers(1, 9),
    batch=some.integers(1, 40),
    epoch=decimals,
    targets=some.integers(1, 60_000),
)
def test_total_targets_against_brute_force(params, context, multiple, batch, epoch, targets):
    total = max(n for n in range(0, targets // context + 1, multiple))
    arguments = (params, context, batch, multiple, float(epoch))
    if total == 0:
        with pytest.raises(ValueError):
            budget.make_plan(*arguments, total_targets=targets)
        return
    plan = budget.make_plan(*arguments, total_targets=targets)
    ends = ends_by_definition(params, context, multiple, Fraction(epoch), len(plan.boundaries))
    assert plan.boundaries == (*[end for end in ends if end < total], total)
    if total <= 5000:
        check_against_simulation(plan, ends, total)


@settings(max_examples=80)
@given(
    params=some.integers(10, 4000),
    context=some.integers(2, 64),
    multiple=some.integers(1, 9),
    batch=some.integers(1, 40),
    epoch=decimals,
    updates=some.integers(1, 120),
)
def test_total_updates_against_brute_force(params, context, multiple, batch, epoch, updates):
    plan = budget.make_plan(params, context, batch, multiple, float(epoch), total_updates=updates)
    ends = ends_by_definition(params, context, multiple, Fraction(epoch), len(plan.boundaries))
    longer = simulate(batch, set(ends), max(plan.total_sequences, ends[-1]))
    assert plan.total_updates == updates
    assert list(itertools.islice(plan.sizes(), updates + 1)) == [size for _, size, _, _ in longer[:updates]]
    check_against_simulation(plan, ends, plan.total_sequences)


@pytest.mark.parametrize(
    ("params", "batch", "targets", "updates"),
    # Hand count for 20M: 40 epochs of 9,962 or 9,963 sequences are 77 full updates of 128 and a short one each.
    [(P_20M, 128, 408_070_144, 3120), (48_507_392, 32, 970_147_840, 29_640), (91_605_120, 32, 1_832_101_888, 55_920)],
)
def test_the_c4_budgets(params, batch, targets, updates):
    plan = budget.make_plan(params, 1024, batch, 1, 0.5, targets_per_parameter=20.0)
    assert plan.total_targets == targets == params * 20 // 1024 * 1024
    assert len(plan.boundaries) == 40
    assert plan.boundaries == tuple(k * params // 2048 for k in range(1, 41))
    sizes = list(plan.sizes())
    assert (len(sizes), sum(sizes) * 1024) == (updates, targets)
    edges = [0, *plan.boundaries]
    assert plan.total_updates == sum(math.ceil((b - a) / batch) for a, b in itertools.pairwise(edges))


def test_packed_budget_is_in_whole_rounds_of_eight():
    plan = budget.make_plan(P_20M, 1024, 128, 8, 0.5, targets_per_parameter=20.0)
    assert plan.total_targets == 408_068_096
    assert all(end % 8 == 0 for end in plan.boundaries)
    assert all(size % 8 == 0 for size in plan.sizes())


@pytest.mark.parametrize("multiple", [1, 8])
def test_boundaries_do_not_depend_on_the_total(multiple):
    long = budget.make_plan(P_20M, 1024, 128, multiple, 0.5, targets_per_parameter=20.0)
    for ratio in (0.7, 3.0, 7.77):
        short = budget.make_plan(P_20M, 1024, 128, multiple, 0.5, targets_per_parameter=ratio)
        assert short.boundaries[:-1] == long.boundaries[: len(short.boundaries) - 1]
        assert list(short.sizes())[:-1] == list(long.sizes())[: short.total_updates - 1]
    by_updates = budget.make_plan(P_20M, 1024, 128, multiple, 0.5, total_updates=200)
    assert list(by_updates.sizes()) == list(long.sizes())[:200]


def test_decimal_ratios_are_exact():
    """0.1 is one tenth: as a binary fraction it would put the last sequence of ten million elsewhere."""
    assert budget.exact(0.1) == Fraction(1, 10)
    assert budget.exact(1e-05) == Fraction(1, 100_000)
    plan = budget.make_plan(10_000_000, 10, 1000, 1, 0.1, targets_per_parameter=0.3)
    assert plan.boundaries == (100_000, 200_000, 300_000)
    assert math.floor(Fraction(0.29) * 100) == 28  # what the nearest binary fraction would give ...
    assert budget.sequences_for(budget.exact(0.29), 100, 1, 1) == 29  # ... and what it is


def test_epochs_far_shorter_than_a_sequence_end_with_each_sequence():
    """And cost no time: boundary k isn't searched for one k after the other."""
    plan = budget.make_plan(1000, 100, 4, 2, 1e-12, targets_per_parameter=1.0)
    assert plan.boundaries == (2, 4, 6, 8, 10)


def test_more_virtual_epochs_than_memory_holds_are_refused():
    for one in ({"targets_per_parameter": 1e5}, {"total_targets": 10**9}, {"total_updates": 10**9}):
        with pytest.raises(ValueError, match=r"100,000 virtual epochs; raise training\.epoch_targets_per_parameter"):
            budget.make_plan(10_000, 10, 4, 1, 1e-3, **one)


def test_large_budgets_stay_exact():
    """Beyond float64 and int32: every number is a Python integer."""
    params = 70_000_000_001
    plan = budget.make_plan(params, 7, 1 << 20, 3, 0.5, targets_per_parameter=20.0)
    assert plan.total_targets == 20 * params // 7 // 3 * 3 * 7
    assert sum(plan.sizes()) == plan.total_sequences


def test_a_crossing_update_would_be_seen():
    """The simulation is an oracle that can fail: sizes that ignore the boundaries differ from it."""
    plan = budget.make_plan(100, 7, 10, 1, 0.5, targets_per_parameter=20.0)
    ends = ends_by_definition(100, 7, 1, Fraction(1, 2), len(plan.boundaries))
    check_against_simulation(plan, ends, plan.total_sequences)
    with pytest.raises(AssertionError):
        check_against_simulation(
            dataclasses.replace(plan, boundaries=(plan.total_sequences,)), ends, plan.total_sequences
        )
