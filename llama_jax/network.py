"""Workers that come and go, what their exchange would cost on a network, and mixing of moments. Off by default.

Outages and stragglers are pure functions of (seed, update), so that a resumed run meets the same ones. A worker that is
away is not updated and exchanges nothing; its sequences of the stream are skipped, as if it had been there. Updates
are zero-based here, except in `decentralized.network.outages`, whose numbers are those of the log.

Letters: N workers, P arena row length. The functions on arenas run inside the step's shard_map and see the rows of one
device; `axis` names the mesh axis of the workers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax import topology
from llama_jax.errors import ConfigError

ELEMENT_BYTES = 4  # parameters and moments travel as float32
SHIFT, AWAY, SLOW = range(3)  # what is drawn: streams of random numbers that never meet
MOMENTS: dict[str, tuple[str, ...]] = {"none": (), "first": ("mu_NP",), "both": ("mu_NP", "nu_NP")}


class Events(NamedTuple):
    """Who is there at an update, bool [N] each.

    active: computes and updates. connected: takes part in the exchange (active, and no straggler that is skipped).
    back: active, but not at the update before. slow: active and a straggler.
    """

    active_N: np.ndarray
    connected_N: np.ndarray
    back_N: np.ndarray
    slow_N: np.ndarray


class Links(NamedTuple):
    """An update's events for the device: row i of the exchange receives sum_j counts[i, j] x_j / parts[i].

    active, connected, back: bool [N]; counts: float [N, N]; parts: float [N]. Small integers, so that nothing is
    rounded before the sum is divided.
    """

    active_N: Any
    connected_N: Any
    back_N: Any
    counts_NN: Any
    parts_N: Any


def check(config: Any) -> None:
    """Raises ConfigError where the fields of decentralized.network contradict each other or the number of workers."""
    decentralized = config.decentralized
    fields, workers, text = decentralized.network, decentralized.workers, decentralized.network.outages
    if workers == 1:
        for name in ("dropout", "outages", "stragglers"):
            if fields[name]:
                raise ConfigError(f"decentralized.network.{name} = {fields[name]} needs decentralized.workers above 1")
    planned = _planned(text)
    for worker, first, last in planned:
        if not (worker < workers and 1 <= first <= last and first <= config.derived.total_updates):
            raise ConfigError(
                f"decentralized.network.outages: {worker}:{first}-{last} must be a worker below {workers} and updates "
                f"from 1 to {config.derived.total_updates}, the first not after the last"
            )
        if len({other for other, a, b in planned if a <= first <= b}) == workers:
            raise ConfigError(
                f"decentralized.network.outages = {text} leaves no worker at update {first}; one must stay"
            )
    if decentralized.mix_moments != "none" and (fields.dropout or fields.outages):
        raise ConfigError(
            f"decentralized.mix_moments = {decentralized.mix_moments} can't be used with decentralized.network.dropout "
            "or outages: moments of workers with different numbers of updates differ in their bias, and a mixed one "
            "belongs to neither; set mix_moments to none"
        )


def changes_training(config: Any) -> bool:
    """Whether any update can have other events than all workers connected."""
    fields = config.decentralized.network
    skips = fields.stragglers > 0 and fields.straggler_policy == "skip"
    return config.decentralized.workers > 1 and bool(fields.dropout > 0 or fields.outages or skips)


def independent(config: Any, schedule: topology.Schedule) -> bool:
    """Whether there are several workers that never exchange anything: a sweep, in which one may fail alone."""
    return config.decentralized.workers > 1 and not schedule.mixes and not config.decentralized.sync_every


def events(config: Any, update: int) -> Events:
    """Who is there at an update, a function of the config and the update alone.

    Chance divides a worker's time into pieces of outage_updates updates, its first one cut at a place of its own, and
    takes it away for a whole piece with probability dropout: outages last that long or a multiple. At least one worker
    is always active: when chance and plan leave none, the one that chance came closest to leaving, among those without
    a planned outage, stays.
    """
    active_N = _active(config, update)
    before_N = _active(config, update - 1) if update else active_N
    fields = config.decentralized.network
    slow_N = active_N & (_draws(config.seed, SLOW, update, active_N.size) < fields.stragglers)
    connected_N = active_N & ~slow_N if fields.straggler_policy == "skip" else active_N
    return Events(active_N, connected_N, active_N & ~before_N, slow_N)


def present(config: Any, updates: int) -> np.ndarray | None:
    """The workers of the mean model after so many updates, bool [N]: those of the last one; None: always all."""
    return _active(config, updates - 1) if changes_training(config) and updates else None


def _active(config: Any, update: int) -> np.ndarray:
    fields, workers = config.decentralized.network, config.decentralized.workers
    planned_N = np.zeros(workers, bool)
    for worker, first, last in _planned(fields.outages):
        planned_N[worker] |= first <= update + 1 <= last
    draw_N = np.ones(workers)
    if fields.dropout:
        length = fields.outage_updates
        shift_N = (_draws(config.seed, SHIFT, 0, workers) * length).astype(np.int64)
        piece_N = (update + shift_N) // length
        for piece in np.unique(piece_N):  # one or two
            draw_N = np.where(piece_N == piece, _draws(config.seed, AWAY, int(piece), workers), draw_N)
    active_N = ~planned_N & (draw_N >= fields.dropout)
    if not active_N.any():
        active_N[np.argmax(np.where(planned_N, -1.0, draw_N))] = True
    return active_N


@functools.lru_cache(maxsize=64)  # an update asks again for what the one before it drew
def _draws(seed: int, kind: int, number: int, n: int) -> np.ndarray:
    """n numbers in [0, 1) that depend on the arguments alone (Philox: the key and the counter are the whole state)."""
    bits = np.random.Philox(key=np.array([seed, number], np.uint64), counter=np.array([0, 0, 0, kind], np.uint64))
    return (bits.random_raw(n) >> np.uint64(11)) * 2.0**-53


@functools.cache
def _planned(text: str) -> tuple[tuple[int, int, int], ...]:
    """(worker, first update, last update) of "2:100-150,0:300-320". Raises ConfigError on any other text."""
    found = []
    for part in text.split(",") if text else []:
        worker, _, span = part.strip().partition(":")
        numbers = [worker, *span.split("-")]
        if len(numbers) != 3 or not all(
            number.isascii() and number.isdigit() and len(number) < 16 for number in numbers
        ):
            raise ConfigError(
                f"decentralized.network.outages: {part.strip()!r} is not worker:first-last, such as 2:100-150"
            )
        found.append((int(worker), int(numbers[1]), int(numbers[2])))
    return tuple(found)


# The exchange.


def counts(phase: topology.Phase, connected_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(counts float64 [N, N], parts float64 [N]) of a phase among the connected workers; the others keep their rows.

    The ordinary matrix is a mean of permutations. Each is followed from a connected worker past the ones that are away
    to the first connected source, which is a permutation of the connected again: rows and columns still sum to parts,
    and the mean does not move. (Dividing what is left of a row by its sum would move it.) A reciprocal pair whose
    partner is away comes back to itself. A mean is the mean of the connected.
    """
    n, here = connected_N.size, np.flatnonzero(connected_N)
    result, parts_N = np.eye(n), np.ones(n)
    if phase.mean and here.size:
        result[np.ix_(here, here)] = 1
        parts_N[here] = here.size
    elif not phase.mean:
        for sources in phase.peers:
            for worker in here:
                source = sources[worker]
                while not connected_N[source]:
                    source = sources[source]
                result[worker, source] += 1
        parts_N[here] = len(phase.peers) + 1
    return result, parts_N


def make_links(config: Any, schedule: topology.Schedule) -> Callable[[int], Links | None]:
    """A function from the update to its Links in float32; always None where every worker is always connected."""
    if not changes_training(config):
        return lambda update: None

    def of(update: int) -> Links:
        found = events(config, update)
        counts_NN, parts_N = counts(schedule.phases[update % schedule.period], found.connected_N)
        sums = (counts_NN.astype(np.float32), parts_N.astype(np.float32))
        return Links(found.active_N, found.connected_N, found.back_N, *sums)

    return of


def mix(
    arena_NP: jax.Array, links: Links, gamma: jax.Array, excluded: topology.Ranges = (), axis: str = "worker"
) -> jax.Array:
    """Rows after the exchange of Links, as topology.mix otherwise; a row that receives nothing stays bit for bit."""
    # Who is away may hold anything, and 0 * NaN is NaN: its row is taken out before the product.
    sent_NP = jnp.where(links.connected_N[:, None], arena_NP, 0)
    # Which rows are needed where is not known when this is compiled, so every device gets all of them for a moment; the
    # ordinary exchange moves only what it needs.
    sent_NP = jax.lax.all_gather(sent_NP, axis, tiled=True)
    counts_NN, parts_N = links.counts_NN.astype(arena_NP.dtype), links.parts_N.astype(arena_NP.dtype)
    received_NP = jnp.dot(counts_NN, sent_NP, precision=jax.lax.Precision.HIGHEST) / parts_N[:, None]
    gamma = topology.gamma_of(jnp.asarray(gamma, arena_NP.dtype), arena_NP.shape[1], excluded)
    alone_N = jnp.max(counts_NN, axis=1) == parts_N  # a row of the unit matrix
    return jnp.where(alone_N[:, None] | (gamma == 0), arena_NP, (1 - gamma) * arena_NP + gamma * received_NP)


def mean(arena_NP: jax.Array, chosen_N: jax.Array, axis: str = "worker") -> tuple[jax.Array, jax.Array]:
    """(mean [P] of the chosen rows of all devices, their number); zeros where none is chosen."""
    number = jax.lax.psum(jnp.sum(chosen_N), axis)
    total_P = jax.lax.psum(jnp.sum(jnp.where(chosen_N[:, None], arena_NP, 0), axis=0), axis)
    return total_P / jnp.maximum(number, 1).astype(arena_NP.dtype), number


def rejoin(config: Any, state: Any, links: Links) -> Any:
    """The step's state as the workers find it that are back: their own stale one, or with rejoin `mean` a fresh one.

    Fresh: parameters are the mean of the workers that stayed, moments zero and their count 0, as for a new machine that
    receives parameters only. Where nobody stayed the stale state is kept.
    """
    if config.decentralized.network.rejoin == "keep":
        return state
    mean_P, stayed = mean(state.params_NP, links.active_N & ~links.back_N)
    stale_N = ~(links.back_N & (stayed > 0))
    params_NP = jnp.where(stale_N[:, None], state.params_NP, mean_P[None, :])
    moments = jax.tree.map(lambda old: jnp.where(_like(stale_N, old), old, 0), state.moments)
    return state._replace(params_NP=params_NP, moments=moments)


def hold(links: Links, new: Any, old: Any) -> Any:
    """The tree `new` [N, ...] for the active workers, bit for bit the old one for the others."""
    return choose(links.active_N, new, old)


def choose(chosen_N: jax.Array, new: Any, old: Any) -> Any:
    """The tree `new` [N, ...] for the chosen workers, bit for bit the old one for the others."""
    return jax.tree.map(lambda a, b: jnp.where(_like(chosen_N, a), a, b), new, old)


def _like(mask_N: jax.Array, array: jax.Array) -> jax.Array:
    return mask_N.reshape(-1, *[1] * (array.ndim - 1))


def mix_moments(config: Any, exchange: Callable[[jax.Array], jax.Array], moments: Any) -> Any:
    """The moments that decentralized.mix_moments names through the exchange of the parameters, at the same place.

    awc: before the local AdamW, which adds the local gradient to the mixed moments; atc: after it. A mean with weights
    >= 0 leaves second moments >= 0.
    """
    mixed = {name: exchange(getattr(moments, name)) for name in MOMENTS[config.decentralized.mix_moments]}
    return moments._replace(**mixed) if mixed else moments


# The ledger.


def received(phase: topology.Phase, connected_N: np.ndarray) -> np.ndarray:
    """Rows that each worker receives in a phase, float64 [N]; see topology.Schedule.traffic."""
    if phase.mean:
        return _ring(connected_N)
    return (counts(phase, connected_N)[0] > 0).sum(axis=1) - 1.0


def _ring(connected_N: np.ndarray) -> np.ndarray:
    """Rows of a ring all-reduce among the connected, float64 [N]."""
    n = int(connected_N.sum())
    return np.where(connected_N, 2 * (n - 1) / max(n, 1), 0.0)


def cost(config: Any, schedule: topology.Schedule, update: int) -> tuple[np.ndarray, float]:
    """(bytes that each worker receives float64 [N], seconds) of an update if each worker were a machine of its own.

    Everybody waits for the slowest computation and the largest transfer; skipped stragglers are not waited for. With
    awc the exchange of parameters (and moments) runs beside the computation, as they are those before the update; with
    atc it follows. An outer step follows everything, and a worker that is back first receives its parameters. A
    transfer takes its bytes over bandwidth, and a latency: for a ring all-reduce of n workers 2 (n - 1) of them.
    """
    decentralized = config.decentralized
    fields, here = decentralized.network, events(config, update)
    row, phase = config.derived.unique_params * ELEMENT_BYTES, schedule.phases[update % schedule.period]
    ring_latencies = 2 * (int(here.connected_N.sum()) - 1)

    def seconds(bytes_N: np.ndarray, latencies: int) -> float:
        if not bytes_N.any():
            return 0.0
        return latencies * fields.latency_s + (bytes_N.max() / fields.bandwidth if fields.bandwidth else 0.0)

    mixed_N = received(phase, here.connected_N) * row * (1 + len(MOMENTS[decentralized.mix_moments]))
    outer = decentralized.sync_every and (update + 1) % decentralized.sync_every == 0
    outer_N = _ring(here.connected_N) * row if outer else np.zeros_like(mixed_N)
    stayed = (here.active_N & ~here.back_N).any()
    back_N = here.back_N * float(row if fields.rejoin == "mean" and stayed else 0)
    waited_N = here.connected_N if here.connected_N.any() else here.active_N
    compute_s = fields.compute_s * (fields.slowdown if (waited_N & here.slow_N).any() else 1.0)
    mix_s = seconds(mixed_N, ring_latencies if phase.mean else 1)
    beside = max(compute_s, mix_s) if decentralized.scheme == "awc" else compute_s + mix_s
    total_s = seconds(back_N, 1) + beside + seconds(outer_N, ring_latencies)
    return mixed_N + outer_N + back_N, float(total_s)


def make_ledger(config: Any, schedule: topology.Schedule) -> Callable[[int], dict[str, float]]:
    """A function from the number of done updates, which may not fall, to the sums over them for the log.

    simulated_bytes: received by a worker, mean over all N. simulated_s, where compute_s, latency_s or bandwidth is set.
    Nothing is stored: a resumed run adds them up again.
    """
    fields = config.decentralized.network
    clock = bool(fields.compute_s or fields.latency_s or fields.bandwidth)
    done, total_bytes, total_s = 0, 0.0, 0.0

    def through(updates: int) -> dict[str, float]:
        nonlocal done, total_bytes, total_s
        while done < updates:
            bytes_N, seconds = cost(config, schedule, done)
            done, total_bytes, total_s = done + 1, total_bytes + float(bytes_N.mean()), total_s + seconds
        return {"simulated_bytes": total_bytes} | ({"simulated_s": total_s} if clock else {})

    return through
