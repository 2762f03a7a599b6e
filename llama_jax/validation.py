"""Validation loss of ordinary parameters: token-weighted sums in FP64, whatever the batch size.

Letters: N workers, P arena row length, B sequences of a forward pass, S tokens of a sequence.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from ml_collections import FrozenConfigDict

from llama_jax import arena, loss, model

Evaluator = Callable[[jax.Array, Iterable[np.ndarray]], "Loss"]


class Loss(NamedTuple):
    """Sum of token losses in nats and their number."""

    total: float
    targets: int

    @property
    def mean(self) -> float:
        """Nats per target."""
        return self.total / self.targets

    def bits_per_byte(self, bytes_per_token: float | None) -> float | None:
        """Bits per UTF-8 byte of the split, by its bytes per token; None where the data has no text."""
        return None if bytes_per_token is None else self.mean / math.log(2) / bytes_per_token


@jax.jit
def mean_row(params_NP: jax.Array, present_N: np.ndarray | None = None) -> jax.Array:
    """The mean of the workers [P] in float32 (sum, then one division); for N = 1 the row itself.

    present_N: bool, the workers that count (network.present); None: all.
    """
    if present_N is not None:
        return jnp.sum(jnp.where(present_N[:, None], params_NP, 0), axis=0) / jnp.sum(present_N)
    if params_NP.shape[0] == 1:
        return params_NP[0]
    return jnp.sum(params_NP, axis=0) / params_NP.shape[0]


def subset_indices(sequences: int, size: int, seed: int) -> np.ndarray:
    """`size` distinct numbers below `sequences` (all if there are fewer), sorted, a function of the seed alone."""
    if size >= sequences:
        return np.arange(sequences)
    keys = np.random.PCG64(np.random.SeedSequence([seed])).random_raw(sequences)
    return np.sort(np.argsort(keys, kind="stable")[:size])


def batches(rows_of: Callable[[np.ndarray], np.ndarray], indices: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Rows [<= size, S] of the given sequences, in order."""
    for start in range(0, len(indices), size):
        yield rows_of(indices[start : start + size])


def make_losses(config: Any, numerics: model.Numerics, mesh: Mesh) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The compiled function (parameter row [P], token ids [B, S]) -> summed loss of each sequence in nats [B]."""
    layout = arena.make_layout(config.model)
    frozen = FrozenConfigDict(config.model)

    def losses(row_P, tokens_BS):
        params = {name: tensor[0] for name, tensor in arena.views(row_P[None], layout).items()}
        return loss.sequence_losses(frozen, numerics, params, tokens_BS.astype(jnp.int32))

    return jax.jit(
        jax.shard_map(losses, mesh=mesh, in_specs=(Spec(), Spec("data")), out_specs=Spec("data"), check_vma=False)
    )


def make_evaluator(config: Any, numerics: model.Numerics, mesh: Mesh) -> Evaluator:
    """A function (parameter row [P], batches of rows [<= B, S]) -> Loss, compiled for B = evaluation.batch_sequences.

    The last batch is padded with rows that don't count. Sequence sums leave the device and are added in FP64.
    """
    size = config.evaluation.batch_sequences
    place = NamedSharding(mesh, Spec("data"))
    compiled = make_losses(config, numerics, mesh)

    def evaluate(row_P: jax.Array, rows: Iterable[np.ndarray]) -> Loss:
        row_P = jax.device_put(row_P, NamedSharding(mesh, Spec()))
        total, targets, waiting = 0.0, 0, None
        for part in rows:
            padded = np.zeros((size, part.shape[1]), part.dtype)
            padded[: len(part)] = part
            running = compiled(row_P, jax.device_put(padded, place)), len(part)
            if waiting is not None:  # read one batch late, so that the device never waits for the host
                total += float(np.asarray(waiting[0], np.float64)[: waiting[1]].sum())
            waiting, targets = running, targets + len(part) * (part.shape[1] - 1)
        if waiting is not None:
            total += float(np.asarray(waiting[0], np.float64)[: waiting[1]].sum())
        if not targets:
            raise ValueError("no sequences to evaluate")
        return Loss(total, targets)

    return evaluate
