"""Who averages with whom at which update: schedules as data, their matrices and properties, and the mixing itself.

Letters: N workers, P padded length of a row. Worker i of a matrix W receives sum_j W[i, j] x_j. Every schedule is
doubly stochastic at every update, so mixing never moves the mean of the workers.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax import budget
from llama_jax.errors import ConfigError

NAMES = ("complete", "one_peer_ring", "one_peer_exponential", "mixed_radix", "disconnected")
PAIRINGS = ("directed", "reciprocal")

Sources = tuple[int, ...]  # one peer of each worker: row i receives row sources[i]
Ranges = Sequence[tuple[int, int]]  # (offset, size) of elements of a row


class Phase(NamedTuple):
    """One update's exchange: a worker averages itself and its peers with equal weights.

    peers: one permutation of the workers for each peer. mean: the peers are all other workers, and the mean is
    computed once for everybody.
    """

    peers: tuple[Sources, ...]
    mean: bool = False


@dataclass(frozen=True)
class Schedule:
    """A cycle of exchanges; update t, zero-based, runs phase t mod period.

    Raises ValueError unless each phase's matrix has entries >= 0 and rows and columns that sum to 1 (in FP64).
    """

    name: str
    workers: int
    pairing: str
    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        for number, phase in enumerate(self.phases):
            if any(len(sources) != self.workers for sources in phase.peers):
                raise ValueError(f"phase {number} of {self.name} must name a source for each of {self.workers} workers")
            if phase.mean and len(phase.peers) != self.workers - 1:
                raise ValueError(f"phase {number} of {self.name} is no mean of {self.workers} workers")
            matrix = self.matrix(number)
            sums = np.concatenate([matrix.sum(0), matrix.sum(1)])
            if matrix.min() < 0 or np.abs(sums - 1).max() > 1e-12:
                raise ValueError(f"phase {number} of {self.name} is not doubly stochastic: it would move the mean")

    @property
    def period(self) -> int:
        """Updates of a cycle."""
        return len(self.phases)

    @property
    def mixes(self) -> bool:
        """Whether any update exchanges anything."""
        return any(phase.peers for phase in self.phases)

    def matrix(self, update: int, gamma: float = 1.0) -> np.ndarray:
        """gamma W + (1 - gamma) I of a zero-based update, float64 [N, N]."""
        peers = self.phases[update % self.period].peers
        eye = np.eye(self.workers)
        total = eye + sum((eye[list(sources)] for sources in peers), np.zeros_like(eye))
        return gamma * total / (len(peers) + 1) + (1 - gamma) * eye

    def contraction(self, gamma: float = 1.0) -> float:
        """Spectral norm of a cycle's product minus the averaging matrix: 0 averages exactly, 1 leaves something apart.

        A single update of a one-peer schedule has norm 1 and says nothing.
        """
        return float(np.linalg.norm(self._cycle(gamma), 2))

    @property
    def exact(self) -> bool:
        """Whether a cycle makes all workers equal, up to rounding."""
        return self.contraction() < 1e-12

    @property
    def symmetric(self) -> bool:
        """Whether every matrix is symmetric (needed by EXTRA and exact diffusion, not by AWC or ATC)."""
        return all(np.array_equal(w, w.T) for w in map(self.matrix, range(self.period)))

    @property
    def peers(self) -> float:
        """Workers that a worker receives from in an update, mean over a cycle."""
        return sum(len(phase.peers) for phase in self.phases) / self.period

    def traffic(self, elements: int, element_bytes: int = 4) -> float:
        """Bytes that a worker sends (and receives) in an update if each were a device, mean over a cycle.

        A peer costs a row; a mean of all workers is a ring all-reduce, 2 (N - 1) / N rows.
        """
        n = self.workers
        rows = sum(2 * (n - 1) / n if phase.mean else len(phase.peers) for phase in self.phases) / self.period
        return rows * elements * element_bytes

    def stationary(self, scheme: str = "awc", gamma: float = 1.0) -> float:
        """Predicted consensus distance Xi^2 / sigma^2 after an update, mean over a cycle, once it no longer grows.

        The workers' updates are taken as independent noise of variance sigma^2 per worker, summed over coordinates.
        awc: X <- W X + noise; atc: X <- W (X + noise). inf where the cycle leaves workers apart.
        """
        if scheme not in ("awc", "atc"):
            raise ValueError(f"scheme {scheme!r} is neither awc nor atc")
        centre = np.eye(self.workers) - 1 / self.workers
        matrices = [self.matrix(update, gamma) for update in range(self.period)]

        def after(covariance: np.ndarray, w: np.ndarray) -> np.ndarray:
            if scheme == "awc":
                return w @ covariance @ w.T + centre
            return w @ (covariance + centre) @ w.T

        cycle = self._cycle(gamma)
        if np.linalg.norm(cycle, 2) > 1 - 1e-9:
            return math.inf
        covariance = functools.reduce(after, matrices, np.zeros_like(centre))
        while cycle.any():  # the sum of cycle^k C cycle'^k over all k, doubling the number of terms each time
            covariance = covariance + cycle @ covariance @ cycle.T
            cycle = cycle @ cycle
        distances = []
        for w in matrices:
            covariance = after(covariance, w)
            distances.append(np.trace(covariance) / self.workers)
        return max(0.0, float(np.mean(distances)))

    def _cycle(self, gamma: float) -> np.ndarray:
        product = np.eye(self.workers) - 1 / self.workers
        for update in range(self.period):
            product = self.matrix(update, gamma) @ product
        return product


@functools.cache
def make_schedule(name: str, workers: int, pairing: str = "directed") -> Schedule:
    """The schedule of a topology for any number of workers >= 1.

    complete: the mean. one_peer_ring: from i - 1 at even updates, from i + 1 at odd ones. one_peer_exponential (Ying et
    al. 2021): from i - 1, i - 2, i - 4, .. while the offset is below N; exact after log2 N updates if N is a power of
    two. mixed_radix: one update for each prime factor q of N averages q workers; exact for every N. disconnected: none.
    reciprocal: the two workers of a pair exchange, (0, 1) (2, 3) .. then (1, 2) .. (N - 1, 0) on the ring, i with
    i XOR 2^j in the exponential schedule. Raises ConfigError where the name or N has no such schedule.
    """
    if name not in NAMES:
        raise ConfigError(f"decentralized.topology = {name} must be one of {', '.join(NAMES)}")
    if pairing not in PAIRINGS:
        raise ConfigError(f"decentralized.pairing = {pairing} must be one of {', '.join(PAIRINGS)}")
    if workers < 1:
        raise ConfigError(f"decentralized.workers = {workers} must be at least 1")
    if pairing == "reciprocal":
        phases = _reciprocal(name, workers)
    else:
        phases = _directed(name, workers)
    return Schedule(name, workers, pairing, phases or (Phase(()),))


def matrix(name: str, n: int, update: int, pairing: str = "directed") -> np.ndarray:
    """The mixing matrix of a zero-based update, float64 [N, N]. Raises ConfigError like make_schedule."""
    return make_schedule(name, n, pairing).matrix(update)


def _directed(name: str, n: int) -> tuple[Phase, ...]:
    def shift(offset: int) -> Sources:
        return tuple((i - offset) % n for i in range(n))

    if n == 1 or name == "disconnected":
        return ()
    if name == "complete":
        return (Phase(tuple(map(shift, range(1, n))), mean=True),)
    if name == "one_peer_ring":
        return Phase((shift(1),)), Phase((shift(-1),))
    if name == "one_peer_exponential":
        return tuple(Phase((shift(2**j),)) for j in range((n - 1).bit_length()))
    phases, stride = [], 1
    while stride < n:
        q = next(q for q in range(2, n + 1) if n // stride % q == 0)
        phases.append(Phase(tuple(shift(j * stride) for j in range(1, q)), mean=q == n))
        stride *= q
    return tuple(phases)


def _reciprocal(name: str, n: int) -> tuple[Phase, ...]:
    def refuse(possible: str) -> ConfigError:
        return ConfigError(
            f"decentralized.pairing = reciprocal {possible}; or set decentralized.pairing to directed, which takes any"
        )

    if name == "one_peer_ring":
        if n % 2:
            near = " or ".join(str(m) for m in (n - 1, n + 1) if m)
            raise refuse(f"of {name} needs an even decentralized.workers, such as {near}, not {n}")
        first = tuple(i ^ 1 for i in range(n))
        second = tuple((i + 1 if i % 2 else i - 1) % n for i in range(n))
        return Phase((first,)), Phase((second,))
    if name == "one_peer_exponential":
        below = 1 << (n.bit_length() - 1)
        if n != below:
            raise refuse(
                f"of {name} needs a power of two as decentralized.workers, such as {below} or {2 * below}, not {n}"
            )
        return tuple(Phase((tuple(i ^ 2**j for i in range(n)),)) for j in range(below.bit_length() - 1))
    raise refuse(f"is for one_peer_ring (even N) and one_peer_exponential (N a power of two), not for {name}")


def mix(
    arena_NP: jax.Array,
    schedule: Schedule,
    phase: jax.Array,
    gamma: jax.Array,
    excluded: Ranges = (),
    axis: str | None = "worker",
) -> jax.Array:
    """Rows after one exchange, in the arena's dtype: gamma W + (1 - gamma) I applied as one convex average.

    phase: int32 scalar, update mod period; gamma: scalar in [0, 1]; both traced, so a run compiles once. Inside a
    shard_map the arena holds this device's N / shards rows of the mesh axis; axis None: all rows are here.
    excluded: static ranges of a row that always mix with gamma 1. gamma 0 keeps rows bit for bit, whatever the peers
    hold; gamma 1 is 0.5 * (own + peer) bit for bit for one peer.
    """
    if not schedule.mixes:
        return arena_NP
    shards = 1 if axis is None else jax.lax.axis_size(axis)
    if arena_NP.shape[0] * shards != schedule.workers:
        raise ValueError(f"{arena_NP.shape[0]} rows on {shards} devices are not {schedule.workers} workers")

    def average(exchange: Phase, arena_NP: jax.Array, gamma: jax.Array) -> jax.Array:
        gamma = gamma_of(gamma, arena_NP.shape[1], excluded)
        if exchange.mean:
            total_P = jnp.sum(arena_NP, axis=0)
            mean_P = (jax.lax.psum(total_P, axis) if axis else total_P) / schedule.workers
            mixed_NP = (1 - gamma) * arena_NP + gamma * mean_P[None, :]
        else:
            count = len(exchange.peers)
            received = [receive(arena_NP, sources, axis) for sources in exchange.peers]
            total_NP = functools.reduce(jnp.add, received)
            mixed_NP = (1 - gamma * (count / (count + 1))) * arena_NP + gamma / (count + 1) * total_NP
            # Equal workers stay equal even where a compiler contracts the sums of two rows differently.
            same_NP = functools.reduce(jnp.logical_and, [peer_NP == arena_NP for peer_NP in received])
            mixed_NP = jnp.where(same_NP & (arena_NP != 0), arena_NP, mixed_NP)
        return jnp.where(gamma == 0, arena_NP, mixed_NP)  # 0 * NaN of a peer would be NaN

    branches = [functools.partial(average, exchange) for exchange in schedule.phases]
    gamma = jnp.asarray(gamma, arena_NP.dtype)
    if len(branches) == 1:
        return branches[0](arena_NP, gamma)
    return jax.lax.switch(phase, branches, arena_NP, gamma)


def gamma_of(gamma: jax.Array, length: int, excluded: Ranges) -> jax.Array:
    """Gamma itself, or where ranges are excluded that of each of `length` elements, [1, P]."""
    if not excluded:
        return gamma
    return jnp.where(_within(length, excluded), jnp.ones_like(gamma), gamma)[None, :]


def receive(arena_NP: jax.Array, sources: Sources, axis: str | None = None) -> jax.Array:
    """Row i becomes row sources[i] of the whole arena; only rows that another device needs travel to it.

    Runs of local rows that come from one place on each device, at one distance within a block, move as one slice, by
    ppermute where any of them changes the device.
    """
    local = arena_NP.shape[0]
    shards = len(sources) // local
    here = jax.lax.axis_index(axis) if shards > 1 else 0

    def origins(row: int) -> tuple[tuple[int, int], ...]:
        """For each device: where its local row comes from, (device, distance in local rows)."""
        found = [divmod(sources[device * local + row], local) for device in range(shards)]
        return tuple((device, source - row) for device, source in found)

    blocks = []
    for places, run in itertools.groupby(range(local), origins):
        rows = list(run)
        routes: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        for device, (source, distance) in enumerate(places):
            routes.setdefault((distance, source != device), []).append((source, device))
        block = None
        for (distance, travels), pairs in routes.items():
            part = arena_NP[rows[0] + distance : rows[-1] + distance + 1]
            if travels:
                part = jax.lax.ppermute(part, axis, pairs)
            if block is None:
                block = part
            else:
                mine = functools.reduce(jnp.logical_or, [here == device for _, device in pairs])
                block = jnp.where(mine, part, block)
        blocks.append(block)
    return jnp.concatenate(blocks) if len(blocks) > 1 else blocks[0]


def _within(length: int, ranges: Ranges) -> jax.Array:
    """Whether each of `length` elements lies in a range, bool [P], from comparisons: no constant of a row's length."""
    index_P = jax.lax.iota(jnp.int32, length)
    inside = [(index_P >= offset) & (index_P < offset + size) for offset, size in ranges]
    return functools.reduce(jnp.logical_or, inside)


def gamma_table(learning_rates: Sequence[float], start_frac: float, p: float, min_gamma: float = 0.0) -> np.ndarray:
    """Gamma of each of the T updates of a run under adaptive consensus (Wang and Johansson, DSGD-AC), float64 [T].

    1 before update r0 = ceil(start_frac T), zero-based; from there max(min_gamma, (lr / largest lr of the updates from
    r0 on)^p). p = 0 or start_frac = 1: always 1. Raises ConfigError on values out of range, and where p > 0 and no
    update from r0 on has a learning rate above 0.
    """
    for field, value, top in (("start_frac", start_frac, 1.0), ("p", p, math.inf), ("min_gamma", min_gamma, 1.0)):
        if not (math.isfinite(value) and 0 <= value <= top):
            allowed = "finite and at least 0" if top == math.inf else "in [0, 1]"
            raise ConfigError(f"decentralized.adaptive.{field} = {value} must be {allowed}")
    rates_T = np.asarray(learning_rates, np.float64)
    start = budget.start_update(start_frac, len(rates_T))
    gamma_T = np.ones(len(rates_T))
    active = rates_T[start:]
    if p == 0 or not len(active):
        return gamma_T
    if not np.max(active) > 0:
        raise ConfigError(
            f"decentralized.adaptive.p = {p} needs a learning rate above 0 from update {start} on; set p = 0, or a "
            "larger lr_schedule.min_lr_ratio"
        )
    gamma_T[start:] = np.maximum(min_gamma, (active / np.max(active)) ** p)
    return gamma_T
