"""The budget of a run in exact integers: how many sequences, where virtual epochs end, how large each update is.

A sequence is `context` prediction targets. Nothing here rounds: the only divisions are floors of exact rationals.
"""

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

MAX_EPOCHS = 100_000  # boundaries are listed in memory; a usual run has 40


def sequences_for(targets_per_parameter: Fraction, params: int, context: int, multiple: int) -> int:
    """floor(floor(r P / T) / m) m sequences for r targets per parameter, P parameters, context T, multiple m."""
    sequences = targets_per_parameter * params / context
    return sequences.numerator // sequences.denominator // multiple * multiple


def exact(number: float) -> Fraction:
    """The rational that the shortest decimal form of `number` names: 0.1 is 1/10, not the nearest binary fraction."""
    return Fraction(repr(number))


def start_update(fraction: float, updates: int) -> int:
    """ceil(fraction x updates): the zero-based update at which that fraction of a run's updates is done."""
    return math.ceil(exact(float(fraction)) * updates)


@dataclass(frozen=True)
class Plan:
    """Sizes of all updates of a run.

    boundaries: increasing positions in sequences where a virtual epoch ends; the last is the end of the run.
    """

    context: int
    batch_sequences: int
    boundaries: tuple[int, ...]

    @property
    def total_sequences(self) -> int:
        return self.boundaries[-1]

    @property
    def total_targets(self) -> int:
        return self.total_sequences * self.context

    @property
    def total_updates(self) -> int:
        return self.updates_until(self.total_sequences)

    def epoch(self, position: int) -> int:
        """Zero-based virtual epoch of the update that starts at `position` (in sequences)."""
        return bisect.bisect_right(self.boundaries, position)

    def is_boundary(self, position: int) -> bool:
        """Whether a virtual epoch ends exactly at `position` (in sequences)."""
        return position > 0 and self.boundaries[bisect.bisect_left(self.boundaries, position)] == position

    def update_size(self, position: int) -> int:
        """Sequences of the update that starts at `position`: a full batch, or what is left of the virtual epoch."""
        return min(self.batch_sequences, self.boundaries[self.epoch(position)] - position)

    def updates_until(self, position: int) -> int:
        """Number of updates that end at or before `position`, which must be the end of an update or 0."""
        epoch = self.epoch(position) if position < self.total_sequences else len(self.boundaries)
        edges = (0, *self.boundaries[:epoch])
        done = sum(-(-(b - a) // self.batch_sequences) for a, b in itertools.pairwise(edges))
        return done + -(-(position - edges[-1]) // self.batch_sequences)

    def sizes(self, position: int = 0) -> Iterator[int]:
        """Sizes in sequences of all updates from `position` to the end."""
        while position < self.total_sequences:
            size = self.update_size(position)
            yield size
            position += size


def make_plan(
    params: int,
    context: int,
    batch_sequences: int,
    multiple: int,
    epoch_targets_per_parameter: float,
    targets_per_parameter: float | None = None,
    total_targets: int | None = None,
    total_updates: int | None = None,
) -> Plan:
    """The plan of a run from exactly one of the three budgets.

    Boundary k lies at floor(floor(k e P / T) / m) m sequences, e targets per parameter an epoch, whatever the total.
    Raises ValueError for a budget of not one sequence or of more than MAX_EPOCHS virtual epochs.
    """
    epoch_ratio = exact(epoch_targets_per_parameter)

    def boundaries() -> Iterator[int]:
        last = 0
        for _ in range(MAX_EPOCHS):
            # The first k that ends past the last one: an epoch shorter than `multiple` sequences has no end of its own.
            k = math.ceil((last + multiple) * context / (epoch_ratio * params))
            last = sequences_for(k * epoch_ratio, params, context, multiple)
            yield last
        raise ValueError(f"more than {MAX_EPOCHS:,} virtual epochs; raise training.epoch_targets_per_parameter")

    if total_updates is not None:
        ends, position, left = [], 0, total_updates
        for end in boundaries():
            updates = -(-(end - position) // batch_sequences)
            if updates >= left:
                ends.append(min(end, position + left * batch_sequences))
                break
            ends.append(end)
            position, left = end, left - updates
        return Plan(context, batch_sequences, tuple(ends))
    if targets_per_parameter is not None:
        total = sequences_for(exact(targets_per_parameter), params, context, multiple)
    else:
        assert total_targets is not None
        total = total_targets // (context * multiple) * multiple
    if total < 1:
        raise ValueError(f"the budget is less than {multiple} sequences of {context} targets")
    ends = []
    for end in boundaries():
        ends.append(min(end, total))
        if end >= total:
            return Plan(context, batch_sequences, tuple(ends))
    raise AssertionError("unreachable: boundaries end with an error")
