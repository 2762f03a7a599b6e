"""The figures of a recipe: tokens/s per GPU, spread of the step time, cost, MFU, all recomputed from raw arrays.

A run is STEPS optimizer steps (0-19) with the profiler off; the steps of WINDOW (5-19) count, the ones before absorb
compilation and warm-up. Windows are half-open, (5, 20) is steps 5-19. What the protocol leaves open is decided here:

Step time. Stamp c_i is the host's monotonic clock after everything step i computes is ready, t_i = c_i - c_(i-1). So
waiting for input, copies and logging count, and the times of a window add up to the distance of two stamps. Of several
processes, whose clocks can't be compared, a step takes as long as the slowest needs for it.
Coefficient of variation. Population standard deviation (CV_DDOF = 0) over the mean. It is the spread inside one run and
says nothing about the spread between runs.
Tokens. A row has as many tokens as it has inputs; a record says so (`tokens_counted`), and records that count targets,
one fewer a row, are never compared with it.
Units. Numbers that only a mistake can produce are refused: see score(), cost_per_million_tokens() and mfu().

A run's record (JSON): steps_per_run, window, n_gpus, tokens_counted, tokens [steps], profiled_steps, and either
stamps_ns [processes][steps + 1] or, where a run wasn't stamped, seconds [steps]. Everything else is computed from it.
Functions raise MeasureError, one line. Needs neither JAX nor NumPy; NumPy values are taken.
"""

import itertools
import math
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from llama_jax.errors import DataError

STEPS, WINDOW = 20, (5, 20)
LEGACY_STEPS, LEGACY_WINDOW = 14, (4, 14)  # runs under the earlier window, steps 4-13
PROFILED_FROM, MOST_STEPS = (
    22,
    25,
)  # a traced run goes on: step 20 sets the profiler up, 21 warms it, 22-24 are recorded
CV_DDOF = 0
COUNTED = ("inputs", "targets")
EXACT = 1e-12  # relative difference up to which a stated figure is the recomputed one

LONGEST_STEP_S = 1e3  # in milliseconds every step of a second or more reaches it
RATES = (0.01, 50.0)  # $ per GPU-hour: a price per second lies below, one of an instance of 8 GPUs above
LEAST_PEAK, MOST_PEAK = 1e13, 1e17  # FLOP/s: TFLOP/s lie below
LEAST_PARAMETERS = 1000  # millions or billions of parameters lie below

FIELDS = ("steps_per_run", "window", "n_gpus", "tokens_counted", "tokens", "profiled_steps")
TIMES = ("stamps_ns", "seconds")


class MeasureError(DataError, ValueError):
    """A measurement that can't be right: wrong length, not finite, not positive, wrong unit, not as recorded."""


def score(tokens: Iterable[int], seconds: Iterable[float], n_gpus: int, window: Sequence[int] = WINDOW) -> float:
    """Tokens per second and GPU over the window: the sum of its tokens over n_gpus times the sum of its seconds.

    Summed before dividing, so it is never above the mean of the steps' rates. tokens, seconds: of all 20 steps; of all
    14 of an old run, with its window=(4, 14). Refused as mistaken units: a step of the window of 1,000 s or more
    (milliseconds), and seconds that rise from each step to the next (completion stamps, which take differences first).
    Times that rise by exactly the same amount are not refused: no clock gives such stamps.
    """
    first, end, times = _windowed(seconds, window)
    counts = [_whole(f"tokens of step {i}", value) for i, value in enumerate(_listed("tokens", tokens))]
    if len(counts) != len(times):
        raise MeasureError(f"tokens has {len(counts)} entries, seconds {len(times)}: one of each is needed for a step")
    return sum(counts[first:end]) / (_whole("n_gpus", n_gpus) * math.fsum(times[first:end]))


def step_time_cv(seconds: Iterable[float], window: Sequence[int] = WINDOW) -> float:
    """Coefficient of variation of the step time over the window: population standard deviation over mean.

    seconds and what is refused: as in score().
    """
    first, end, times = _windowed(seconds, window)
    times = times[first:end]
    mean = math.fsum(times) / len(times)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in times) / len(times)) / mean


def cost_per_million_tokens(rate: float | None, tokens_per_s_gpu: float | None) -> float | None:
    """$ per million tokens at `rate` $ per GPU-hour; None where the rate or the score isn't known.

    Refused as mistaken units: rates outside $0.01 to $50, prices per second or of a whole instance.
    """
    if rate is not None:
        rate = _number("rate", rate)
        if not RATES[0] <= rate <= RATES[1]:
            raise MeasureError(f"rate {rate:g}: dollars per hour of one GPU, from {RATES[0]:g} to {RATES[1]:g}")
    if tokens_per_s_gpu is not None:
        tokens_per_s_gpu = _number("tokens_per_s_gpu", tokens_per_s_gpu)
    if rate is None or tokens_per_s_gpu is None:
        return None
    return rate / (tokens_per_s_gpu * 3600) * 1e6


def mfu(active_params: int | None, tokens_per_s_gpu: float | None, peak_flops: float | None) -> float | None:
    """6 N tokens/s/GPU over the GPU's dense bf16 peak in FLOP/s, as a fraction; None where one of them isn't known.

    Attention scores and recomputation are not counted. Refused as mistaken units: fewer than 1,000 active parameters
    (they are counted one by one), a peak outside 1e13 to 1e17 (989 TFLOP/s are 989e12), a result above 1.
    """
    if active_params is not None:
        active_params = _whole("active_params", active_params)
        if active_params < LEAST_PARAMETERS:
            raise MeasureError(f"active_params {active_params}: a number of parameters, not of millions or billions")
    if tokens_per_s_gpu is not None:
        tokens_per_s_gpu = _number("tokens_per_s_gpu", tokens_per_s_gpu)
    if peak_flops is not None:
        peak_flops = _number("peak_flops", peak_flops)
        if not LEAST_PEAK <= peak_flops <= MOST_PEAK:
            raise MeasureError(f"peak_flops {peak_flops:g}: FLOP/s of one GPU, so 989 TFLOP/s are 989e12")
    if active_params is None or tokens_per_s_gpu is None or peak_flops is None:
        return None
    result = 6 * active_params * tokens_per_s_gpu / peak_flops
    if result > 1:
        raise MeasureError(
            f"MFU {result:.3g} is above 1: {tokens_per_s_gpu:g} tokens/s must be those of one GPU, {peak_flops:g} "
            f"FLOP/s its dense bf16 peak"
        )
    return result


def gpu_hours(n_gpus: int, seconds: float) -> float:
    """GPUs times the hours from the scheduler's admission of the run to its end, start-up included."""
    return _whole("n_gpus", n_gpus) * _number("seconds", seconds) / 3600


def timed_steps(
    update: Callable[[int], Any],
    steps: int = STEPS,
    wait: Callable[[Any], Any] | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> list[int]:
    """Runs update(0) ... update(steps - 1) -> steps + 1 stamps in nanoseconds: the start and each step's completion.

    update(i) gets the batch of step i, dispatches the step and returns all that it computes, the whole new state and
    not the loss alone. wait: blocks until that is ready (jax.block_until_ready); without it dispatch would be timed.
    """
    if wait is None:
        import jax

        wait = jax.block_until_ready
    stamps = [clock()]
    for i in range(steps):
        wait(update(i))
        stamps.append(clock())
    return stamps


def durations_ns(stamps_ns: Sequence[Sequence[int]]) -> list[int]:
    """Nanoseconds of each step from the stamps of one or more processes, [processes][steps + 1]: of its slowest one."""
    found = []
    for process, stamps in enumerate(_listed("stamps_ns", stamps_ns)):
        own = [
            _index(f"stamp {i} of process {process}", value)
            for i, value in enumerate(_listed(f"stamps_ns of process {process}", stamps))
        ]
        differences = [after - before for before, after in itertools.pairwise(own)]
        if not differences or min(differences) <= 0:
            step = next((i for i, value in enumerate(differences) if value <= 0), 0)
            raise MeasureError(f"stamps_ns of process {process}: step {step} does not end after the one before it")
        if max(own) >= 1 << 63:
            raise MeasureError(f"stamps_ns of process {process}: they are no nanoseconds of a clock")
        found.append(differences)
    if len({len(own) for own in found}) != 1:
        raise MeasureError("stamps_ns: one list of as many stamps for each process is needed")
    return [max(of_step) for of_step in zip(*found, strict=True)]


def parse_window(window: Any) -> tuple[int, int]:
    """A window as (first, end): from the text of the first and last step that count, "4-13", or the pair [4, 14]."""
    if isinstance(window, str):
        ends = window.split("-")
        if len(ends) == 2 and all(end.isdecimal() for end in ends):
            return int(ends[0]), int(ends[1]) + 1
    elif isinstance(window, Sequence) and len(window) == 2:
        return _index("window", window[0]), _index("window", window[1])
    raise MeasureError(f'window {window!r}: the first and last step as "5-19", or half-open as [5, 20]')


class Run(NamedTuple):
    """A checked run: tokens and seconds of its measured steps (20, or 14), and what belongs to them.

    convergence_arm: whether its losses can be those of a convergence check, which takes runs of exactly 20 steps: the
    number of steps can change the learning rates.
    """

    tokens: list[int]
    seconds: list[float]
    n_gpus: int
    window: tuple[int, int]
    tokens_counted: str
    convergence_arm: bool


def run_record(
    stamps_ns: Sequence[Sequence[int]], tokens: int, n_gpus: int, tokens_counted: str = "inputs"
) -> dict[str, Any]:
    """The record of a run: stamps [processes][steps + 1], tokens of one step. More than 20 steps: a traced run."""
    steps = len(durations_ns(stamps_ns))
    record = {
        "steps_per_run": steps,
        "window": list(WINDOW),
        "n_gpus": n_gpus,
        "tokens_counted": tokens_counted,
        "tokens": [tokens] * steps,
        "profiled_steps": list(range(PROFILED_FROM, steps)),
        "stamps_ns": [[int(stamp) for stamp in stamps] for stamps in stamps_ns],
    }
    read_run(record)
    return record


def read_run(record: Mapping[str, Any]) -> Run:
    """The run of a record, checked: all fields and no others, lengths, window, profiler, one global batch throughout.

    20 steps are measured over 5-19. 23 to 25 steps are a traced run, of which the first 20 are measured; 14 steps an
    old one, measured over 4-13, as its window must say.
    """
    if not isinstance(record, Mapping):
        raise MeasureError("the record of a run is a JSON object")
    missing = [name for name in FIELDS if name not in record]
    unknown = sorted(str(name) for name in record if name not in (*FIELDS, *TIMES))
    times = [name for name in TIMES if name in record]
    if missing or unknown or len(times) != 1:
        raise MeasureError(
            f"record: missing {', '.join(missing) or 'none'}, unknown {', '.join(unknown) or 'none'}; "
            f"it has {' and '.join(times) or 'no times'}, one of {' and '.join(TIMES)} is needed"
        )
    steps, window = _whole("steps_per_run", record["steps_per_run"]), parse_window(record["window"])
    profiled = [_index("profiled_steps", step) for step in _listed("profiled_steps", record["profiled_steps"])]
    legacy = steps == LEGACY_STEPS
    if not legacy and steps != STEPS and not PROFILED_FROM < steps <= MOST_STEPS:
        raise MeasureError(f"steps_per_run {steps}: 20; 23 to 25 with a trace; 14 under the earlier window")
    if window != (LEGACY_WINDOW if legacy else WINDOW):
        raise MeasureError(f"window {record['window']!r}: a run of {steps} steps is measured over its own")
    if early := [step for step in profiled if step < STEPS]:
        raise MeasureError(f"profiled_steps: the profiler was on in step {early[0]}, which is measured")
    if profiled != list(range(PROFILED_FROM, steps)):
        raise MeasureError(f"profiled_steps {profiled}: of {steps} steps they are {list(range(PROFILED_FROM, steps))}")
    if record["tokens_counted"] not in COUNTED:
        raise MeasureError(f"tokens_counted {record['tokens_counted']!r}: {' or '.join(COUNTED)}")
    tokens = [_whole(f"tokens of step {i}", value) for i, value in enumerate(_listed("tokens", record["tokens"]))]
    if times == ["seconds"]:
        seconds = [_number(f"seconds of step {i}", x) for i, x in enumerate(_listed("seconds", record["seconds"]))]
    else:
        seconds = [nanoseconds / 1e9 for nanoseconds in durations_ns(record["stamps_ns"])]
    if len(tokens) != steps or len(seconds) != steps:
        raise MeasureError(f"{len(tokens)} tokens and {len(seconds)} times are recorded of {steps} steps")
    if len(set(tokens)) != 1:
        raise MeasureError(f"tokens: from {min(tokens)} to {max(tokens)} a step; each trains on one global batch")
    measured = LEGACY_STEPS if legacy else STEPS
    return Run(
        tokens[:measured],
        seconds[:measured],
        _whole("n_gpus", record["n_gpus"]),
        window,
        record["tokens_counted"],
        steps == STEPS,
    )


def figures(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a record shows, computed from its arrays: score, CV, mean step time, and how they were measured."""
    run = read_run(record)
    first, end = run.window
    return {
        "tokens_per_s_gpu": score(run.tokens, run.seconds, run.n_gpus, run.window),
        "step_time_cv": step_time_cv(run.seconds, run.window),
        "cv_ddof": CV_DDOF,
        "step_seconds": math.fsum(run.seconds[first:end]) / (end - first),
        "window": [first, end],
        "tokens_counted": run.tokens_counted,
        "n_gpus": run.n_gpus,
        "convergence_arm": run.convergence_arm,
    }


def check_figures(record: Mapping[str, Any], stated: Mapping[str, Any]) -> None:
    """Refuses figures stated beside a record that its arrays don't give, numbers to a relative 1e-12."""
    found = figures(record)
    for name, value in stated.items():
        if name not in found:
            raise MeasureError(f"{name} is stated, but no figure of a run")
        true = found[name]
        if isinstance(true, float) and not isinstance(value, bool) and isinstance(value, int | float):
            same = abs(value) < 1e300 and math.isclose(value, true, rel_tol=EXACT, abs_tol=0.0)
        else:
            same = type(value) is type(true) and value == true
        if not same:
            raise MeasureError(f"{name}: {value!r} is stated, the recorded steps give {true!r}")


def _windowed(seconds: Iterable[float], window: Sequence[int]) -> tuple[int, int, list[float]]:
    """(first, end, times) of a checked window and of checked times of all steps."""
    times = [_number(f"seconds of step {i}", value) for i, value in enumerate(_listed("seconds", seconds))]
    first, end = parse_window(window)
    if len(times) == LEGACY_STEPS:
        if (first, end) != LEGACY_WINDOW:
            raise MeasureError(f"window ({first}, {end}): an old run of 14 steps is measured over 4-13, (4, 14)")
    elif len(times) != STEPS:
        raise MeasureError(f"seconds has {len(times)} entries: a run is measured over its steps 0 to 19")
    if not 0 <= first < end <= len(times):
        raise MeasureError(f"window ({first}, {end}) of {len(times)} steps: first and end, which is not counted")
    for step in range(first, end):
        if times[step] >= LONGEST_STEP_S:
            raise MeasureError(f"step {step} takes {times[step]:g} s: seconds are needed, not milliseconds or stamps")
    rises = [after - before for before, after in itertools.pairwise(times)]
    if min(rises) > 0 and max(rises) - min(rises) > 1e-9 * max(times):
        raise MeasureError("seconds rise from each step to the next: step times are needed, not completion stamps")
    return first, end, times


def _listed(name: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise MeasureError(f"{name}: a list is needed, not {type(values).__name__}")
    return list(values)


def _number(name: str, value: Any) -> float:
    """A finite positive number as float."""
    try:
        if isinstance(value, bool | str | bytes) or str(getattr(value, "dtype", "")) == "bool":
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise MeasureError(f"{name}: a number is needed, not {value!r}") from None
    if not math.isfinite(number) or number <= 0:
        raise MeasureError(f"{name} {number:g}: it must be finite and positive")
    return number


def _whole(name: str, value: Any) -> int:
    """A positive whole number, exact: of an integer type, or a float without a fraction."""
    number = _number(name, value)
    if not number.is_integer():
        raise MeasureError(f"{name} {number:g}: a whole number is needed")
    return operator.index(value) if hasattr(value, "__index__") else int(number)


def _index(name: str, value: Any) -> int:
    """A whole number from 0."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 0:
        raise MeasureError(f"{name} {value!r}: whole numbers from 0 are needed")
    return operator.index(value)
