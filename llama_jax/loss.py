"""Token losses of the model in nats, as sums: every mean is divided once, by the caller, with a count of targets.

Letters: B sequences, S = context + 1 tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp

from llama_jax import ops
from llama_jax.model import Numerics, bind


def loss_sum(
    model: Any, numerics: Numerics, params: dict[str, jax.Array], tokens_BS: jax.Array, rows_B: jax.Array
) -> jax.Array:
    """Sum of the next-token losses in nats over the rows whose weight is 1; tokens [B, T + 1], a float scalar."""
    h_BTD, head_VD = bind(model, numerics, params)(tokens_BS[:, :-1])
    h = h_BTD.reshape(-1, h_BTD.shape[-1])
    targets, weights = tokens_BS[:, 1:].reshape(-1), jnp.repeat(rows_B, tokens_BS.shape[1] - 1)
    weights = weights.astype(jnp.promote_types(h.dtype, jnp.float32))
    if numerics.head == "plain":
        return ops.plain_head_loss(h, head_VD, targets, weights)
    return ops.head_loss(h, head_VD, targets, weights, numerics.head_chunk_rows, numerics.kernels)


def sequence_losses(model: Any, numerics: Numerics, params: dict[str, jax.Array], tokens_BS: jax.Array) -> jax.Array:
    """Summed loss of each sequence in nats, float32 or wider [B]; tokens [B, T + 1]. Not for differentiation."""
    h_BTD, head_VD = bind(model, numerics, params)(tokens_BS[:, :-1])
    h, targets = h_BTD.reshape(-1, h_BTD.shape[-1]), tokens_BS[:, 1:].reshape(-1)
    parts = range(0, h.shape[0], numerics.head_chunk_rows)
    losses = [
        ops.token_losses(h[i : i + numerics.head_chunk_rows], head_VD, targets[i : i + numerics.head_chunk_rows])
        for i in parts
    ]
    return jnp.concatenate(losses).reshape(tokens_BS.shape[0], -1).sum(axis=1)
