"""The one training step: gradients of N workers, clip, mixing, AdamW, and the guard against non-finite updates.

Letters: N workers, A microbatches of an update, B sequences of a microbatch, S tokens of a sequence, P row length.
The whole step is one shard_map over a mesh (worker, data); every collective of an update stands in this file.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from ml_collections import FrozenConfigDict

from llama_jax import arena, consensus, loss, model, network, optimizer, runtime, topology
from llama_jax import config as configs
from llama_jax.errors import ConfigError


class State(NamedTuple):
    """Everything on the device that an update reads and writes. ok: False blocks all further updates."""

    params_NP: jax.Array
    moments: optimizer.Moments
    ok: jax.Array


class Batch(NamedTuple):
    """One update's data: token ids [N, A, B, S], row weights [N, A, B] (1: counts, 0: padding)."""

    tokens: jax.Array
    rows: jax.Array


class Mixing(NamedTuple):
    """How an update mixes: phase of the schedule int32, gamma float32 in [0, 1], measure: gradient disagreement too.

    links: who is there and exchanges with whom; None: all workers, by the phase.
    """

    phase: Any
    gamma: Any
    measure: Any
    links: network.Links | None = None


NO_MIXING = Mixing(np.int32(0), np.float32(1), np.bool_(False))  # of one worker


class Metrics(NamedTuple):
    """What an update tells, per worker [N]: loss sum (nats), targets, gradient norm before the clip, clip factor.

    All are 0 for a worker that is away.
    ok: whether the update was applied. disagreement: mean_i |g_i - g|^2 / |g|^2 of the workers' mean gradients before
    the clip where it was asked for, otherwise 0.
    """

    loss_sum: jax.Array
    targets: jax.Array
    grad_norm: jax.Array
    clip: jax.Array
    ok: jax.Array
    disagreement: jax.Array


STATE_SPEC = State(Spec("worker"), optimizer.Moments(Spec("worker"), Spec("worker"), Spec("worker")), Spec())
BATCH_SPEC = Batch(Spec("worker", None, "data"), Spec("worker", None, "data"))
METRICS_SPEC = Metrics(Spec("worker"), Spec("worker"), Spec("worker"), Spec("worker"), Spec(), Spec())
MIXING_SPEC = Mixing(Spec(), Spec(), Spec(), Spec("worker"))

Step = Callable[..., tuple[State, Metrics]]


def make_mesh(worker: int, data: int) -> Mesh:
    """Mesh (worker, data) over the first worker * data devices."""
    return jax.make_mesh(
        (worker, data), ("worker", "data"), (AxisType.Auto, AxisType.Auto), devices=jax.devices()[: worker * data]
    )


def shardings(mesh: Mesh, spec: Any) -> Any:
    """The specs of a tuple as shardings on the mesh."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), spec, is_leaf=lambda s: isinstance(s, Spec))


def init_state(row_P: np.ndarray, workers: int, mesh: Mesh) -> State:
    """The state before the first update: every worker starts from the same row [P], moments zero."""
    place = shardings(mesh, STATE_SPEC)
    params_NP = np.broadcast_to(row_P, (workers, row_P.shape[0]))
    zeros = np.zeros_like(params_NP)
    state = State(params_NP, optimizer.Moments(zeros, zeros, np.zeros(workers, np.int32)), np.asarray(True))
    return jax.tree.map(jax.device_put, state, place)


def make_step(config: Any, numerics: model.Numerics, mesh: Mesh) -> Step:
    """The compiled step of a finalized config: (state, batch, learning rates [N], Mixing) -> (state, metrics).

    The state is donated. A worker's gradient is that of its own mean loss over its own valid targets; padding rows,
    accumulation and short updates change it by rounding only. Scheme awc mixes the parameters before the local AdamW,
    whose gradients are those at the parameters before mixing, atc after it; the moments stay local. One worker mixes
    nothing. An update in which any worker's loss or gradient is not finite is not applied, nor is any after it; among
    workers that never exchange anything only those that are not finite skip it, until none is left. Raises ConfigError
    where the topology can't be had.
    """
    layout = arena.make_layout(config.model)
    schedule, excluded = make_schedule(config), excluded_ranges(config, layout)
    mixes_first = config.decentralized.scheme == "awc"
    independent = network.independent(config, schedule)
    frozen = FrozenConfigDict(config.model)
    clip_norm = config.optimizer.clip_norm

    def loss_sum(params, tokens_BS, rows_B):
        return loss.loss_sum(frozen, numerics, params, tokens_BS.astype(jnp.int32), rows_B)

    def microbatch(params_NP, tokens_NBS, rows_NB):
        # With respect to the views and then packed once: through slices of the arena each tensor would be padded.
        losses_N, grads = jax.vmap(jax.value_and_grad(loss_sum))(arena.views(params_NP, layout), tokens_NBS, rows_NB)
        return losses_N, arena.pack(grads, layout)

    def gradients(params_NP, batch):
        """Sums over all microbatches: losses [N], gradients [N, P]."""
        if batch.tokens.shape[1] == 1:
            return microbatch(params_NP, batch.tokens[:, 0], batch.rows[:, 0])

        def accumulate(carry, part):
            return jax.tree.map(jnp.add, carry, microbatch(params_NP, *part)), None

        parts = (jnp.moveaxis(batch.tokens, 1, 0), jnp.moveaxis(batch.rows, 1, 0))
        zero = (jnp.zeros(params_NP.shape[0], params_NP.dtype), jnp.zeros_like(params_NP))
        return jax.lax.scan(accumulate, zero, parts)[0]

    def update(state, batch, lr_N, mixing):
        before, links = state, mixing.links
        present_N = None if links is None else links.active_N
        state = state if links is None else network.rejoin(config, state, links)
        targets = batch.tokens.shape[-1] - 1
        losses_N, grads_NP = jax.lax.psum(gradients(state.params_NP, batch), "data")
        targets_N = jax.lax.psum(jnp.sum(batch.rows.astype(jnp.int32), axis=(1, 2)) * targets, "data")
        count_N = jnp.maximum(targets_N, 1).astype(grads_NP.dtype)
        norm_N = jnp.sqrt(jnp.sum(grads_NP * grads_NP, axis=1)) / count_N
        clip_N = jnp.minimum(1.0, clip_norm / (norm_N + 1e-6)) if clip_norm else jnp.ones_like(norm_N)
        scaled_NP = grads_NP * (clip_N / count_N)[:, None]

        def exchange(arena_NP):
            if links is not None:
                return network.mix(arena_NP, links, mixing.gamma, excluded)
            return topology.mix(arena_NP, schedule, mixing.phase, mixing.gamma, excluded)

        def mix(params_NP, moments):
            return exchange(params_NP), network.mix_moments(config, exchange, moments)

        params_NP, moments = state.params_NP, state.moments
        params_NP, moments = mix(params_NP, moments) if mixes_first else (params_NP, moments)
        lr_N = lr_N.astype(grads_NP.dtype)
        hyper = _hyper(config, params_NP.shape[0], grads_NP.dtype)
        params_NP, moments = optimizer.adamw(hyper, layout.decayed, params_NP, scaled_NP, moments, lr_N)
        params_NP, moments = (params_NP, moments) if mixes_first else mix(params_NP, moments)
        disagreement = jnp.zeros((), grads_NP.dtype)
        if config.decentralized.workers > 1:
            disagreement = jax.lax.cond(
                mixing.measure,
                lambda: consensus.consensus_distance(grads_NP / count_N[:, None], (), "worker", present_N).relative,
                lambda: disagreement,
            )
        if links is not None:  # whatever a worker that is away has computed counts nowhere
            params_NP, moments = network.hold(links, (params_NP, moments), (before.params_NP, before.moments))
            told = (losses_N, targets_N, norm_N, clip_N)
            losses_N, targets_N, norm_N, clip_N = network.hold(links, told, jax.tree.map(jnp.zeros_like, told))
        finite_N = jnp.isfinite(losses_N) & jnp.isfinite(norm_N)
        wanted_N = finite_N if independent else ~finite_N
        count = jax.lax.psum(jnp.sum(wanted_N, dtype=jnp.int32), "worker")
        ok = state.ok & ((count > 0) if independent else (count == 0))
        applied_N = ok & (finite_N if independent else jnp.ones_like(finite_N))
        new, old = (params_NP, moments), (before.params_NP, before.moments)
        params_NP, moments = network.choose(applied_N, new, old)
        return State(params_NP, moments, ok), Metrics(losses_N, targets_N, norm_N, clip_N, ok, disagreement)

    # check_vma=False: replication is not tracked, so no collective is inserted beside the ones written above.
    sharded = jax.shard_map(
        update,
        mesh=mesh,
        in_specs=(STATE_SPEC, BATCH_SPEC, Spec("worker"), MIXING_SPEC),
        out_specs=(STATE_SPEC, METRICS_SPEC),
        check_vma=False,
    )
    # The results keep the shardings of the inputs, so that the second update finds the program of the first.
    placed = shardings(mesh, (STATE_SPEC, METRICS_SPEC))

    def step(state: State, batch: Batch, lr_N: jax.Array, mixing: Mixing = NO_MIXING) -> tuple[State, Metrics]:
        return sharded(state, batch, lr_N, mixing)

    return jax.jit(step, donate_argnums=0, out_shardings=placed, compiler_options=runtime.compiler_options())


class Distances(NamedTuple):
    """Where the workers stand: consensus of the parameters, mean pairwise cosines of parameters and moments.

    direction: mean_i |u_i - u|^2 of the Adam directions u_i, which the learning rate scales to an update.
    """

    params: consensus.Consensus
    direction: jax.Array
    cosine_params: jax.Array
    cosine_mu: jax.Array
    cosine_nu: jax.Array


def make_measure(config: Any, mesh: Mesh) -> Callable[..., Distances]:
    """A compiled function (state after an update, its Links or None) -> Distances of the workers that are there.

    Changes nothing; blocks as in arena.blocks.
    """
    ranges = tuple(arena.blocks(arena.make_layout(config.model)).values())

    def of(state: State, links: network.Links | None) -> Distances:
        present_N = None if links is None else links.active_N
        moments = state.moments
        hyper = _hyper(config, moments.mu_NP.shape[0], moments.mu_NP.dtype)
        beta1_N1, beta2_N1 = jnp.reshape(hyper.beta1, (-1, 1)), jnp.reshape(hyper.beta2, (-1, 1))
        count_N1 = moments.count_N.astype(moments.mu_NP.dtype)[:, None]
        mean_NP, square_NP = moments.mu_NP / (1 - beta1_N1**count_N1), moments.nu_NP / (1 - beta2_N1**count_N1)
        direction_NP = mean_NP / (jnp.sqrt(square_NP) + hyper.eps)
        arenas = (state.params_NP, moments.mu_NP, moments.nu_NP)
        return Distances(
            consensus.consensus_distance(state.params_NP, ranges, "worker", present_N),
            consensus.consensus_distance(direction_NP, (), "worker", present_N).distance,
            *(consensus.pairwise_cosine(arena_NP, "worker", present_N) for arena_NP in arenas),
        )

    specs = (STATE_SPEC, Spec("worker"))
    sharded = jax.shard_map(of, mesh=mesh, in_specs=specs, out_specs=Spec(), check_vma=False)

    def measure(state: State, links: network.Links | None = None) -> Distances:
        return sharded(state, links)

    return jax.jit(measure)


def _hyper(config: Any, rows: int, dtype: jnp.dtype) -> optimizer.Hyper:
    """Inside the shard_map: AdamW settings of this device's rows, numbers where all workers have the same."""

    def of(name: str) -> Any:
        values = configs.per_worker(config, name)
        if len(set(values)) == 1:
            return values[0]
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(values, dtype), jax.lax.axis_index("worker") * rows, rows)

    return optimizer.Hyper(of("beta1"), of("beta2"), of("weight_decay"), config.optimizer.eps)


def make_schedule(config: Any) -> topology.Schedule:
    """The mixing schedule of a finalized config. Raises ConfigError where the topology can't be had."""
    decentralized = config.decentralized
    return topology.make_schedule(decentralized.topology, decentralized.workers, decentralized.pairing)


def excluded_ranges(config: Any, layout: arena.Layout) -> tuple[tuple[int, int], ...]:
    """(offset, size) of the tensors that always mix with gamma 1; ConfigError where the pattern matches none or all."""
    pattern = config.decentralized.adaptive.exclude
    chosen = [slot for slot in layout.slots if pattern and re.search(pattern, slot.name)]
    if pattern and len(chosen) in (0, len(layout.slots)):
        matches, names = ("all tensors" if chosen else "no tensor"), ", ".join(slot.name for slot in layout.slots[:3])
        raise ConfigError(f"decentralized.adaptive.exclude = {pattern!r} matches {matches}; their names: {names}, ...")
    return tuple((slot.offset, slot.size) for slot in chosen)


def make_batch(rows: np.ndarray, workers: int, accumulation: int, microbatch: int) -> Batch:
    """Arranges the next sequences of the stream [n, S], n <= N A B and a multiple of N: worker i takes rows i::N.

    A short update keeps its shapes: the missing rows are zeros of weight 0.
    """
    n, width = rows.shape
    if n % workers or n > workers * accumulation * microbatch:
        raise ValueError(f"{n} sequences don't fit {workers} workers x {accumulation} x {microbatch}")
    local = accumulation * microbatch
    tokens = np.zeros((workers, local, width), rows.dtype)
    weights = np.zeros((workers, local), np.float32)
    tokens[:, : n // workers] = rows.reshape(n // workers, workers, width).swapaxes(0, 1)
    weights[:, : n // workers] = 1
    return Batch(
        tokens.reshape(workers, accumulation, microbatch, width), weights.reshape(workers, accumulation, microbatch)
    )
