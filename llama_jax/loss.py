"""Token losses of the model in nats, as sums: every mean is divided once, by the caller, with a count of targets.

A sequence is S = context + 1 tokens, or a row of S = context whose last token has no target; S - 1 targets in both.
A row is read whole all the same, its last position with weight 0: odd lengths are slow, and causal attention keeps
that position from changing any other.
Letters: B sequences, S tokens of one, T positions that the model reads.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax import ops
from llama_jax.model import Numerics, bind


def loss_sum(
    model: Any, numerics: Numerics, params: dict[str, jax.Array], tokens_BS: jax.Array, rows_B: jax.Array
) -> jax.Array:
    """Sum of the next-token losses in nats over the rows whose weight is 1; a float scalar."""
    inputs_BT, targets_BT, counts_T = _positions(model, tokens_BS)
    h_BTD, head_VD = bind(model, numerics, params)(inputs_BT)
    h, targets = h_BTD.reshape(-1, h_BTD.shape[-1]), targets_BT.reshape(-1)
    weights = jnp.repeat(rows_B, targets_BT.shape[1]).astype(jnp.promote_types(h.dtype, jnp.float32))
    if counts_T is not None:
        weights = weights * jnp.tile(counts_T.astype(weights.dtype), rows_B.shape[0])
    if numerics.head == "plain":
        return ops.plain_head_loss(h, head_VD, targets, weights)
    return ops.head_loss(h, head_VD, targets, weights, numerics.head_chunk_rows, numerics.kernels)


def sequence_losses(model: Any, numerics: Numerics, params: dict[str, jax.Array], tokens_BS: jax.Array) -> jax.Array:
    """Summed loss of each sequence in nats, float32 or wider [B]. Not for differentiation."""
    inputs_BT, targets_BT, counts_T = _positions(model, tokens_BS)
    h_BTD, head_VD = bind(model, numerics, params)(inputs_BT)
    h, targets = h_BTD.reshape(-1, h_BTD.shape[-1]), targets_BT.reshape(-1)
    rows = "xla" if numerics.head == "plain" else numerics.kernels
    losses_BT = ops.token_losses(h, head_VD, targets, numerics.head_chunk_rows, rows).reshape(targets_BT.shape)
    return (losses_BT if counts_T is None else losses_BT[:, :-1]).sum(axis=1)


def _positions(model: Any, tokens_BS: jax.Array) -> tuple[jax.Array, jax.Array, np.ndarray | None]:
    """(inputs [B, T], targets [B, T], bool [T] of the positions that count, None for all)."""
    if tokens_BS.shape[1] != model.context:
        return tokens_BS[:, :-1], tokens_BS[:, 1:], None
    return tokens_BS, jnp.roll(tokens_BS, -1, axis=1), np.arange(model.context) < model.context - 1
