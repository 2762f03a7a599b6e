"""Figures of a run against numbers worked out by hand; every way to measure wrongly is refused.

Sources: the recipe protocol (score, CV, cost, MFU, window) and golden numbers G1 to G6 and H4, computed with exact
fractions from its formulas.
"""

import dataclasses
import json
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest

from bench import measure
from llama_jax.errors import DataError

STEP = 128 * 8192
TOKENS = [STEP] * 20
G1 = [99.0] * 5 + [8.0] * 14 + [10.0]
G3 = [50.0] * 5 + [2.0] * 5 + [1.0] * 5 + [3.0] * 5
RAMP = [i + 1.0 for i in range(20)]


def test_golden_scores():
    assert measure.score(TOKENS, G1, 8) == pytest.approx(float(Fraction(983040, 61)), rel=1e-15)
    assert measure.score(TOKENS, G3, 1) == 524288
    assert measure.score([128 * 8191] * 20, G3, 1) == 524224
    assert 15 * STEP / measure.score(TOKENS, RAMP, 1) == pytest.approx(195, rel=1e-15)


def test_tokens_and_times_are_summed_before_dividing():
    window = slice(5, 20)
    mean_of_rates = statistics.mean(STEP / t / 8 for t in G1[window])
    assert mean_of_rates == pytest.approx(16165.546667)
    assert measure.score(TOKENS, G1, 8) < mean_of_rates
    tokens = [1000 + i for i in range(20)]
    assert measure.score(tokens, G3, 2) == pytest.approx(sum(tokens[window]) / (2 * 30), rel=1e-15)


def test_golden_spreads():
    assert measure.step_time_cv(G1) == pytest.approx(0.0613386457, rel=1e-9)
    assert measure.step_time_cv(G3) == pytest.approx(math.sqrt(2 / 3) / 2, rel=1e-15)
    assert measure.step_time_cv(G3) != pytest.approx(0.4225771274, rel=1e-3)  # that of a sample
    assert measure.step_time_cv([9.0] * 5 + [2.0] * 15) == 0
    random = np.random.RandomState(0).uniform(1, 2, 20)
    assert measure.step_time_cv(random) == pytest.approx(np.std(random[5:]) / np.mean(random[5:]), rel=1e-12)


@pytest.mark.parametrize("window", [(4, 19), (4, 20), (5, 18), (5, 19), (6, 20)])
def test_a_shifted_window_changes_the_figures(window):
    assert measure.score(TOKENS, RAMP, 1, window) != measure.score(TOKENS, RAMP, 1)
    assert measure.step_time_cv(RAMP, window) != measure.step_time_cv(RAMP)


def test_old_runs_of_14_steps_need_their_window():
    seconds = [50.0] * 4 + [2.0] * 5 + [3.0] * 5
    assert measure.score([STEP] * 14, seconds, 1, window=(4, 14)) == pytest.approx(10 * STEP / 25, rel=1e-15)
    assert measure.step_time_cv(seconds, window=(4, 14)) == pytest.approx(0.2, rel=1e-12)
    for window in [measure.WINDOW, (4, 13), (3, 14), (5, 14)]:
        with pytest.raises(measure.MeasureError, match="4-13"):
            measure.score([STEP] * 14, seconds, 1, window=window)


def test_other_number_types_give_the_same():
    expected = measure.score(TOKENS, G1, 8)
    assert measure.score(np.array(TOKENS), np.array(G1), np.int64(8)) == expected
    assert measure.score(np.array(TOKENS, np.float64), tuple(G1), 8.0) == expected
    assert measure.score(iter(TOKENS), iter(G1), 8, [5, 20]) == expected
    assert isinstance(measure.score(np.array(TOKENS), np.array(G1), 8), float)


WRONG_STEPS = {
    "19 steps": ([STEP] * 19, G1[1:], 8),
    "21 steps": ([STEP] * 21, [8.0, *G1], 8),
    "no steps": ([], [], 8),
    "tokens of fewer steps": ([STEP] * 15, G1, 8),
    "one number of tokens": (STEP, G1, 8),
    "one time": (TOKENS, 8.0, 8),
    "text": (TOKENS, "8" * 20, 8),
    "text inside": (TOKENS, ["8"] * 20, 8),
    "nested": (TOKENS, np.ones((20, 2)), 8),
    "null": (TOKENS, [*G1[:-1], None], 8),
    "NaN": (TOKENS, [*G1[:-1], math.nan], 8),
    "infinite": (TOKENS, [*G1[:-1], math.inf], 8),
    "NaN before the window": (TOKENS, [math.nan, *G1[1:]], 8),
    "no time": (TOKENS, [*G1[:-1], 0.0], 8),
    "negative time": (TOKENS, [*G1[:-1], -8.0], 8),
    "milliseconds": (TOKENS, [1000 * t for t in G1], 8),
    "nanoseconds": (TOKENS, [int(1e9 * t) for t in G3], 8),
    "completion stamps": (TOKENS, np.cumsum(G1), 8),
    "completion stamps of a clock": (TOKENS, 16000 + np.cumsum(G3), 8),
    "completion stamps after a short start": (TOKENS, 0.01 + np.cumsum([0.5, *G3[6:], *G3[:5], 0.4])[:20] / 9, 8),
    "times as truth": (TOKENS, np.ones(20, bool), 8),
    "millions of tokens": ([1.048576] * 20, G1, 8),
    "no tokens": ([0] * 20, G1, 8),
    "negative tokens": ([-STEP] * 20, G1, 8),
    "tokens NaN": ([math.nan] * 20, G1, 8),
    "no GPU": (TOKENS, G1, 0),
    "half a GPU": (TOKENS, G1, 0.5),
    "truth for a number of GPUs": (TOKENS, G1, True),
    "GPUs as text": (TOKENS, G1, "8"),
}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_wrong_steps_are_refused(name):
    tokens, seconds, n_gpus = WRONG_STEPS[name]
    with pytest.raises(measure.MeasureError) as caught:
        measure.score(tokens, seconds, n_gpus)
    assert isinstance(caught.value, DataError) and isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
    if seconds is not G1:
        with pytest.raises(measure.MeasureError):
            measure.step_time_cv(seconds)


@pytest.mark.parametrize("window", [(20, 5), (5, 5), (5, 21), (-1, 20), (5,), 5, "5", "a-b", (5.0, 20), (True, 20)])
def test_wrong_windows_are_refused(window):
    with pytest.raises(measure.MeasureError, match="window"):
        measure.score(TOKENS, G1, 8, window)


def test_a_slow_first_step_is_no_mistake():
    assert measure.score(TOKENS, [1800.0, *G1[1:]], 8) == measure.score(TOKENS, G1, 8)


def test_golden_costs():
    for rate, at_20000, at_16384 in [
        (6.88, 0.0955555556, 0.1166449653),
        (7.912, 0.1098888889, 0.1341417101),
        (14.2416, 0.1978, 0.2414550781),
    ]:
        assert measure.cost_per_million_tokens(rate, 20000) == pytest.approx(at_20000, rel=1e-9)
        assert measure.cost_per_million_tokens(rate, 16384) == pytest.approx(at_16384, rel=1e-9)
    assert measure.cost_per_million_tokens(None, 20000) is None
    assert measure.cost_per_million_tokens(6.88, None) is None


@pytest.mark.parametrize(
    ("rate", "speed"),
    [
        *[(rate, 2e4) for rate in (55.04, 113.9328, 688, 6.88 / 3600, 0, -6.88, math.nan, "6.88", True)],
        *[(6.88, speed) for speed in (0, -1, math.inf, [2e4], "2e4")],
        (None, math.nan),
    ],
)
def test_wrong_costs_are_refused(rate, speed):
    with pytest.raises(measure.MeasureError):
        measure.cost_per_million_tokens(rate, speed)


def test_golden_mfu():
    assert measure.mfu(3_041_656_832, 16384, 989e12) == pytest.approx(0.3023326928, rel=1e-9)
    assert measure.mfu(3_041_656_832, 20000, 2250e12) == pytest.approx(0.1622216977, rel=1e-9)
    assert measure.mfu(14_516_224, 1e6, 989e12) == pytest.approx(0.0880660708, rel=1e-9)
    for unknown in range(3):
        arguments = [3_041_656_832, 16384, 989e12]
        arguments[unknown] = None
        assert measure.mfu(*arguments) is None


@pytest.mark.parametrize(
    ("parameters", "speed", "peak"),
    [
        (3_041_656_832, 16384, 989),  # TFLOP/s
        (3_041_656_832, 16384, 989e9),
        (3_041_656_832, 16384, 989e15),
        (3.041656832, 16384, 989e12),  # billions
        (3041, 16384 * 64e6, 989e12),
        (8, 16384, 989e12),
        (3_041_656_832, 16384 * 8, 989e12),  # tokens/s of eight GPUs
        (3_041_656_832, -1, 989e12),
        (3_041_656_832, math.nan, 989e12),
        (3_041_656_832, 16384, math.inf),
        (0, 16384, 989e12),
        (None, 16384, 989),
    ],
)
def test_wrong_mfu_is_refused(parameters, speed, peak):
    with pytest.raises(measure.MeasureError):
        measure.mfu(parameters, speed, peak)


def test_gpu_hours():
    assert measure.gpu_hours(8, 5400) == 12
    for n_gpus, seconds in [(0, 5400), (8, 0), (8, math.nan), (1.5, 10)]:
        with pytest.raises(measure.MeasureError):
            measure.gpu_hours(n_gpus, seconds)


@dataclasses.dataclass
class Clock:
    """A clock in nanoseconds that the test moves."""

    now: int = 0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += round(seconds * 1e9)


@dataclasses.dataclass
class Pending:
    """What a dispatched step returns: whoever waits for it waits until `ready`."""

    clock: Clock
    ready: int

    def block_until_ready(self):
        self.clock.now = max(self.clock.now, self.ready)
        return self


class Machine:
    """Loads for 0.5 s, dispatches in 1 ms, computes for 2 s after the step before."""

    def __init__(self):
        self.clock, self.busy = Clock(7), 0

    def update(self, step):
        self.clock.sleep(0.5)
        self.busy = max(self.busy, self.clock.now) + 2_000_000_000
        self.clock.sleep(0.001)
        return {"state": Pending(self.clock, self.busy), "step": step}


def test_step_times_hold_the_wait_for_input_and_add_up():
    machine = Machine()
    stamps = measure.timed_steps(machine.update, clock=machine.clock)  # waits with JAX's own function
    durations = measure.durations_ns([stamps])
    assert durations == [2_500_000_000] * 20
    assert sum(durations[5:20]) == stamps[20] - stamps[5] and len(stamps) == 21
    record = measure.run_record([stamps], STEP, 1)
    assert measure.figures(record)["tokens_per_s_gpu"] == pytest.approx(STEP / 2.5, rel=1e-12)


def test_timing_the_dispatch_would_be_noticed():
    machine = Machine()
    stamps = measure.timed_steps(machine.update, wait=lambda result: None, clock=machine.clock)
    assert measure.durations_ns([stamps]) == [501_000_000] * 20


def test_irregular_stamps_add_up_to_the_nanosecond():
    random = np.random.RandomState(0)
    stamps = [int(x) for x in 10**15 + np.cumsum(random.randint(1, 10**10, 21))]
    durations = measure.durations_ns([stamps])
    assert sum(durations[5:20]) == stamps[20] - stamps[5]
    assert sum(durations) == stamps[-1] - stamps[0]


def test_a_step_takes_as_long_as_its_slowest_process():
    assert measure.durations_ns([[0, 10, 30], [1000, 1015, 1030]]) == [15, 20]


@pytest.mark.parametrize(
    "stamps",
    [
        [],
        [[]],
        [[5]],
        [[0, 10], [0, 10, 20]],
        [[0, 10, 10]],
        [[0, 10, 5]],
        [0, 10, 20],
        [[0.0, 1.5]],
        [[-1, 5]],
        "text",
    ],
)
def test_wrong_stamps_are_refused(stamps):
    with pytest.raises(measure.MeasureError):
        measure.durations_ns(stamps)


def stamped(seconds, start=123):
    return [start, *(start + int(x) for x in np.cumsum([round(t * 1e9) for t in seconds]))]


def record(**changes):
    made = measure.run_record([stamped(G1)], STEP, 8)
    made.update(changes)
    return {name: value for name, value in made.items() if value is not None}


def legacy(**changes):
    made = {"steps_per_run": 14, "window": "4-13", "n_gpus": 2, "tokens_counted": "inputs", "tokens": [STEP] * 14}
    made |= {"profiled_steps": [], "seconds": [60.0] * 4 + [2.0] * 5 + [3.0] * 5, **changes}
    return made


def test_figures_of_a_record():
    found = measure.figures(json.loads(json.dumps(record())))
    assert found["tokens_per_s_gpu"] == pytest.approx(983040 / 61, rel=1e-12)
    assert found["step_time_cv"] == pytest.approx(0.0613386457, rel=1e-9)
    assert found["step_seconds"] == pytest.approx(122 / 15, rel=1e-12)
    assert (found["window"], found["cv_ddof"], found["n_gpus"]) == ([5, 20], 0, 8)
    assert found["convergence_arm"] is True and found["tokens_counted"] == "inputs"
    seconds = record(stamps_ns=None, seconds=G1)  # a run that was not stamped
    assert measure.figures(seconds) == found


def test_a_traced_run_is_scored_without_the_trace_and_is_no_arm():
    made = measure.run_record([stamped(G1 + [100.0] * 5)], STEP, 8)
    assert made["profiled_steps"] == [22, 23, 24]
    found = measure.figures(made)
    assert found["tokens_per_s_gpu"] == pytest.approx(983040 / 61, rel=1e-12)
    assert found["convergence_arm"] is False


@pytest.mark.parametrize("window", ["4-13", [4, 14], (4, 14)])
def test_an_old_record_is_read_over_its_window(window):
    found = measure.figures(legacy(window=window))
    assert found["tokens_per_s_gpu"] == pytest.approx(10 * STEP / (2 * 25), rel=1e-12)
    assert found["window"] == [4, 14] and found["convergence_arm"] is False


WRONG_RECORDS = {
    "no object": ([], "object"),
    "unknown field": (record(score=1.0), "score"),
    "missing field": (record(profiled_steps=None), "profiled_steps"),
    "no times": (record(stamps_ns=None), "times"),
    "both times": (record(seconds=G1), "stamps_ns and seconds"),
    "19 steps": (record(steps_per_run=19), "19"),
    "21 steps": (record(steps_per_run=21), "21"),
    "steps that are not there": (record(steps_per_run=23, profiled_steps=[22]), "20 times"),
    "window of 13 to 20": (record(window=[13, 20]), "window"),
    "window without its last step": (record(window="5-18"), "window"),
    "profiler in a measured step": (record(profiled_steps=[7]), "step 7"),
    "profiler after step 19": (record(profiled_steps=[20]), "profiled_steps"),
    "tokens of 19 steps": (record(tokens=[STEP] * 19), "19 tokens"),
    "a smaller batch": (record(tokens=[STEP] * 19 + [STEP // 2]), "global batch"),
    "padding counted": (record(tokens_counted="padded"), "inputs or targets"),
    "no GPU": (record(n_gpus=0), "n_gpus"),
    "stamps of 19 steps": (record(stamps_ns=[stamped(G1)[:-1]]), "19 times"),
    "a stamp lost": (record(stamps_ns=[[*stamped(G1)[:-1], None]]), "stamp 20"),
    "old steps, new window": (legacy(window="5-19"), "window"),
    "old steps, inclusive pair": (legacy(window=[4, 13]), "window"),
    "old steps, profiled": (legacy(profiled_steps=[22]), "profiled_steps"),
    "old steps, 20 times": (legacy(seconds=G1), "20 times"),
}


@pytest.mark.parametrize("name", WRONG_RECORDS)
def test_wrong_records_are_refused(name):
    wrong, said = WRONG_RECORDS[name]
    with pytest.raises(measure.MeasureError, match=said) as caught:
        measure.figures(wrong)
    assert "\n" not in str(caught.value)


def test_stated_figures_must_be_those_of_the_arrays():
    true = measure.figures(record())
    measure.check_figures(record(), json.loads(json.dumps(true)))
    measure.check_figures(record(), {"tokens_per_s_gpu": true["tokens_per_s_gpu"] * (1 + 1e-13)})
    score = true["tokens_per_s_gpu"]
    tampered = [{"tokens_per_s_gpu": score * (1 + 1e-11)}, {"tokens_per_s_gpu": None}, {"convergence_arm": 1}]
    tampered += [{"window": [4, 20]}, {"cv_ddof": 1}, {"n_gpus": 8.0}, {"step_time_cv": True}, {"mfu": 0.3}]
    for stated in tampered:
        with pytest.raises(measure.MeasureError, match=next(iter(stated))):
            measure.check_figures(record(), {**true, **stated})
    faster = record()
    faster["stamps_ns"][0][20] -= 10**9
    with pytest.raises(measure.MeasureError, match="stated"):
        measure.check_figures(faster, true)
