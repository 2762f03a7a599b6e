"""The operations of the decoder: fast forms, some with gradients of their own, and plain twins without.

Letters: B sequences, T tokens, D width, I in, O out, H query heads, K key/value heads, d head size, V vocabulary.
Matrices are [out, in] as in Hugging Face Llama. Statistics (norms, softmax, losses) are computed in at least float32;
FP64 inputs stay FP64.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax import gate, kernels, rotary
from llama_jax.kernels import statistics_dtype


def _flat(x: jax.Array) -> jax.Array:
    """All rows, [tokens, width]."""
    return x.reshape(-1, x.shape[-1])


# Dense.


def plain_dense(x: jax.Array, w_OI: jax.Array) -> jax.Array:
    """x [..., I] times the transpose of w [O, I] in the dtype of x -> [..., O]."""
    return jnp.einsum("...i,oi->...o", x, w_OI.astype(x.dtype))


@jax.custom_vjp
def dense(x: jax.Array, w_OI: jax.Array) -> jax.Array:
    """plain_dense whose weight gradient leaves its GEMM in the dtype of w.

    Autodiff of the cast weight would round the gradient of a float32 matrix to bfloat16 first.
    """
    return plain_dense(x, w_OI)


def _dense_forward(x, w_OI):
    return plain_dense(x, w_OI), (x, w_OI)


def _dense_backward(saved, dy):
    x, w_OI = saved
    dx = jnp.einsum("...o,oi->...i", dy, w_OI.astype(x.dtype))
    # Over one dimension of all tokens: with two, XLA transposes dy in memory when there are several workers.
    dw = jnp.einsum("to,ti->oi", _flat(dy), _flat(x), preferred_element_type=w_OI.dtype)
    return dx, dw


dense.defvjp(_dense_forward, _dense_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def projections(x: jax.Array, w_OI: jax.Array, sizes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """dense in parts of the outputs O = sum(sizes); the backward pass joins them for one product of each kind."""
    return tuple(plain_dense(x, part) for part in jnp.split(w_OI, np.cumsum(sizes)[:-1]))


def _projections_forward(x, w_OI, sizes):
    return projections(x, w_OI, sizes), (x, w_OI)


def _projections_backward(sizes, saved, dys):
    return _dense_backward(saved, _once(jnp.concatenate(dys, axis=-1)))


projections.defvjp(_projections_forward, _projections_backward)


def _once(x: jax.Array) -> jax.Array:
    """x computed once for all its users: XLA would repeat a concatenation before each of two products."""
    return jax.lax.optimization_barrier(x)


# Embedding, norm, rotary positions, MLP.


def embed(table_VD: jax.Array, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of the table, cast after the lookup -> [B, T, D].

    The lookup is in the table's float32 so that its gradient is a float32 scatter-add; in bfloat16 it is a
    compare-and-swap loop on GPUs. Token ids are range-checked where they are loaded.
    """
    return table_VD.at[tokens_BT].get(mode="promise_in_bounds").astype(dtype)


def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float, dtype: jnp.dtype) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, cast to dtype (Zhang and Sennrich 2019)."""
    x = x.astype(statistics_dtype(x))
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x * inverse * scale_D.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def norm(x: jax.Array, eps: float, dtype: jnp.dtype, form: str) -> tuple[jax.Array, jax.Array]:
    """(x, its RMSNorm without a scale in `dtype`), [..., D]; form: mosaic or xla.

    Going on from the x that is returned lets one pass add both gradients.
    """
    return _norm_forward(x, eps, dtype, form)[0]


def _norm_forward(x, eps, dtype, form):
    h, inverse = kernels.pick(form).norm(_flat(x), eps, dtype)
    h = h.reshape(x.shape)
    return (x, h), (h, inverse)


def _norm_backward(eps, dtype, form, saved, cotangents):
    h, inverse = saved
    dy, dh = cotangents
    return (kernels.pick(form).norm_gradient(_flat(h), inverse, _flat(dh), _flat(dy)).reshape(dy.shape),)


norm.defvjp(_norm_forward, _norm_backward)


def rope_frequencies(model) -> np.ndarray:
    """Angle per position of each pair, FP64 [d/2] (Su et al. 2021; llama3 scaling as in Llama 3.1)."""
    size = model.width // model.heads
    frequencies = 1.0 / model.rope_theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
    if model.rope_scaling == "none":
        return frequencies
    wavelengths = 2 * np.pi / frequencies
    original, low, high = model.rope_original_context, model.rope_low_freq, model.rope_high_freq
    # 0 for waves longer than original / low (scaled down), 1 for shorter than original / high (kept), linear between.
    kept = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * frequencies / model.rope_factor + kept * frequencies


def rope_tables(model, positions: np.ndarray, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """cos and sin [T, d/2] of the rotation at the given integer positions [T]."""
    angles = np.outer(np.asarray(positions, np.float64), rope_frequencies(model))
    return jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)


def plain_rope(x_BTHd: jax.Array, cos_Tc: jax.Array, sin_Tc: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + d/2) by position: the half-rotation convention of Hugging Face Llama."""
    x = x_BTHd.astype(statistics_dtype(x_BTHd))
    cos, sin = cos_Tc[None, :, None, :].astype(x.dtype), sin_Tc[None, :, None, :].astype(x.dtype)
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x_BTHd.dtype)


@jax.custom_vjp
def rope(x_BTHd: jax.Array, cos_Tc: jax.Array, sin_Tc: jax.Array) -> jax.Array:
    """plain_rope whose gradient, the rotation back, is written so that it fuses into the concatenation after it."""
    return plain_rope(x_BTHd, cos_Tc, sin_Tc)


def _rope_forward(x_BTHd, cos_Tc, sin_Tc):
    return rope(x_BTHd, cos_Tc, sin_Tc), (cos_Tc, sin_Tc)


def _rope_backward(saved, dy_BTHd):
    cos_Tc, sin_Tc = saved
    dy = dy_BTHd.astype(statistics_dtype(dy_BTHd)).reshape(*dy_BTHd.shape[:-1], 2, -1)
    cos = cos_Tc[None, :, None, None, :].astype(dy.dtype)
    sin = jnp.stack([sin_Tc, -sin_Tc], axis=1)[None, :, None].astype(dy.dtype)
    # The other half by reversal: splitting and joining halves would be a concatenation of its own.
    dx = dy * cos + jax.lax.rev(dy, (dy.ndim - 2,)) * sin
    return dx.reshape(dy_BTHd.shape).astype(dy_BTHd.dtype), None, None


rope.defvjp(_rope_forward, _rope_backward)


def rotated_projections(
    h_BTD: jax.Array, w_OD: jax.Array, shape: tuple[int, int, int], tables: tuple[jax.Array, jax.Array], form: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, H, d] and keys [B, T, K, d] with rope, and values [B, T, K, d]; shape: (H, K, d).

    w: the queries' outputs above the keys' above the values'. form: mosaic (one kernel, see rotary.obstacle) or xla.
    """
    if form == "mosaic":
        return _rotated(h_BTD, w_OD, *tables)
    H, K, d = shape
    q, k, v = (x.reshape(*x.shape[:2], -1, d) for x in projections(h_BTD, w_OD, (H * d, K * d, K * d)))
    return rope(q, *tables), rope(k, *tables), v


@jax.custom_vjp
def _rotated(h_BTD, w_OD, cos_Tc, sin_Tc):
    return _rotated_forward(h_BTD, w_OD, cos_Tc, sin_Tc)[0]


def _rotated_forward(h_BTD, w_OD, cos_Tc, sin_Tc):
    parts = rotary.rotated(_flat(h_BTD), w_OD.astype(h_BTD.dtype), cos_Tc, sin_Tc)
    parts = tuple(part.reshape(*h_BTD.shape[:2], -1, 2 * cos_Tc.shape[1]) for part in parts)
    return parts, (h_BTD, w_OD, cos_Tc, sin_Tc)


def _rotated_backward(saved, cotangents):
    h_BTD, w_OD, *tables = saved
    dq, dk, dv = cotangents
    parts = [_rope_backward(tables, dq)[0], _rope_backward(tables, dk)[0], dv]
    joined = _once(jnp.concatenate([part.reshape(*h_BTD.shape[:2], -1) for part in parts], axis=-1))
    return *_dense_backward((h_BTD, w_OD), joined), None, None


_rotated.defvjp(_rotated_forward, _rotated_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def mlp(h: jax.Array, w_GD: jax.Array, w_DF: jax.Array, form: str) -> jax.Array:
    """The product with w_GD (gate above up, G = 2 F), swiglu of its halves, the product with w_DF: [..., D] -> same.

    form: mosaic or xla, how the gate and the products beside it are computed.
    """
    return _mlp_forward(h, w_GD, w_DF, form)[0]


def _mlp_forward(h, w_GD, w_DF, form):
    gate_up_TG, product_TF = gate.pick(form).products(_flat(h), w_GD.astype(h.dtype))
    return plain_dense(product_TF, w_DF).reshape(h.shape), (h, w_GD, w_DF, gate_up_TG, product_TF)


def _mlp_backward(form, saved, dy):
    h, w_GD, w_DF, gate_up_TG, product_TF = saved
    _, dw_DF = _dense_backward((product_TF, w_DF), _flat(dy))  # the gradient of the product is within the next line
    dgate_up_TG = gate.pick(form).gradient(_flat(dy), w_DF.astype(dy.dtype), gate_up_TG)
    dh, dw_GD = _dense_backward((_flat(h), w_GD), dgate_up_TG)
    return dh.reshape(h.shape), dw_GD, dw_DF


mlp.defvjp(_mlp_forward, _mlp_backward)


# Causal attention.


def reference_attention(q_BTHd: jax.Array, k_BTKd: jax.Array, v_BTKd: jax.Array) -> jax.Array:
    """Causal attention by explicit products, mask and softmax -> [B, T, H, d]; materializes [B, H, T, T]."""
    T, H, K = q_BTHd.shape[1], q_BTHd.shape[2], k_BTKd.shape[2]
    k, v = (jnp.repeat(x, H // K, axis=2) for x in (k_BTKd, v_BTKd))
    wide = statistics_dtype(q_BTHd)
    scores = jnp.einsum("bthd,bshd->bhts", q_BTHd, k, preferred_element_type=wide) / np.sqrt(q_BTHd.shape[-1])
    causal = np.tril(np.ones((T, T), bool))[None, None]
    scores = jnp.where(causal, scores, jnp.asarray(-jnp.inf, wide))
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def attention(implementation: str) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """The causal attention function (q [B, T, H, d], k and v [B, T, K, d]) of that name: cudnn, xla or reference."""
    if implementation == "reference":
        return reference_attention

    def fast(q_BTHd, k_BTKd, v_BTKd):
        return jax.nn.dot_product_attention(q_BTHd, k_BTKd, v_BTKd, is_causal=True, implementation=implementation)

    return fast


# Loss head: projection to the vocabulary and cross-entropy, in nats.


def plain_head_loss(h_TD: jax.Array, w_VD: jax.Array, targets_T: jax.Array, weights_T: jax.Array) -> jax.Array:
    """Weighted sum of the token losses, plain logits and log-softmax; keeps the dtype, forward mode works."""
    logits = plain_dense(h_TD, w_VD)
    logits = logits.astype(statistics_dtype(logits))
    picked = jnp.take_along_axis(logits, targets_T[:, None], axis=-1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.sum(losses * weights_T.astype(losses.dtype))


def token_losses(
    h_TD: jax.Array, w_VD: jax.Array, targets_T: jax.Array, chunk_rows: int, rows: str = "xla"
) -> jax.Array:
    """Cross-entropy of each token in nats, float32 or wider [T], in chunks; logits in the dtype of h.

    rows: how the losses are computed from logits, mosaic or xla. Not for differentiation.
    """
    w_cast = w_VD.astype(h_TD.dtype)
    losses: list[jax.Array] = []
    for part in _chunks(h_TD.shape[0], chunk_rows):
        # As in training, a chunk begins when the one before it is done.
        h, losses = jax.lax.optimization_barrier((h_TD[part], losses))
        losses.append(kernels.pick(rows).token_losses(plain_dense(h, w_cast), targets_T[part]))
    return jnp.concatenate(losses)


def head_loss(
    h_TD: jax.Array, w_VD: jax.Array, targets_T: jax.Array, weights_T: jax.Array, chunk_rows: int, rows: str = "xla"
) -> jax.Array:
    """plain_head_loss whose gradients are computed beside the loss, in chunks of `chunk_rows` tokens.

    Logits and their gradients exist once, in the dtype of h, a chunk at a time; the gradient of w is accumulated in its
    own dtype. No [T, V] array outlives its chunk and nothing is recomputed in the backward pass.
    """
    return _head_loss(chunk_rows, rows, h_TD, w_VD, targets_T, weights_T)


def _chunks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _head_loss_value(chunk_rows, rows, h_TD, w_VD, targets_T, weights_T):
    return jnp.sum(token_losses(h_TD, w_VD, targets_T, chunk_rows, rows) * weights_T)


def _head_loss_forward(chunk_rows, rows, h_TD, w_VD, targets_T, weights_T):
    w_cast = w_VD.astype(h_TD.dtype)
    total = jnp.zeros((), statistics_dtype(h_TD))
    dh, dw = [], jnp.zeros_like(w_VD)
    for part in _chunks(h_TD.shape[0], chunk_rows):
        # A chunk begins when the one before it is done, so that the logits of only one are in memory.
        h, dw = jax.lax.optimization_barrier((h_TD[part], dw))
        dlogits, losses = kernels.pick(rows).softmax_gradient(plain_dense(h, w_cast), targets_T[part], weights_T[part])
        total += jnp.sum(losses * weights_T[part])
        dh.append(jnp.einsum("tv,vd->td", dlogits, w_cast))
        dw += jnp.einsum("tv,td->vd", dlogits, h, preferred_element_type=w_VD.dtype)
    return total, (jnp.concatenate(dh), dw)


def _head_loss_backward(chunk_rows, rows, saved, cotangent):
    dh, dw = saved
    return (dh * cotangent.astype(dh.dtype), dw * cotangent.astype(dw.dtype), None, None)


_head_loss = jax.custom_vjp(_head_loss_value, nondiff_argnums=(0, 1))
_head_loss.defvjp(_head_loss_forward, _head_loss_backward)
