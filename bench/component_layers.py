"""Component tests of what a layer is made of: attention, projections, loss head, norm, MLP; paths and FP64 oracles.

Letters: B rows, T tokens of a row, H query heads, K key/value heads, G heads of a group, d head size, D width, V
vocabulary, F inner width, n tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.component_draws import SCALES, Case, Outputs, eos, normal, shape_of, wide
from llama_jax import ops

# Attention.


def attention(settings: Any, dtype: Any, rows: int) -> Case:
    shape = shape_of("attention", settings, rows)
    B, T, H, K, d = shape.values()

    def inputs(kind: str, seed: int) -> tuple[Any, ...]:
        q, k, v, dy = normal(seed, (B, T, H, d), (B, T, K, d), (B, T, K, d), (B, T, H, d))
        same = jnp.asarray(eos(kind, seed, (B, T)))[:, :, None, None]
        k, v = (jnp.where(same, x[:1, :1], x) for x in (k, v))
        return tuple(x.astype(dtype) for x in (q * SCALES[kind], k, v, dy))

    def path(spec: Mapping[str, Any]) -> Callable[..., Outputs]:
        return attention_path(ops.attention(spec["attention"]))

    def oracle(q, k, v, dy) -> Outputs:
        def one(group):  # q and dy [T, G, d], k and v [T, d] of one row and one key/value head
            def attend(q, k, v):
                scores = jnp.einsum("tgd,sd->gts", q, k) * d**-0.5
                at = jnp.arange(T)
                weights = jax.nn.softmax(jnp.where(at[None, :] <= at[:, None], scores, -jnp.inf), axis=-1)
                return jnp.einsum("gts,sd->tgd", weights, v)

            y, pull = jax.vjp(attend, *group[:3])
            return y, *pull(group[3])

        q, k, v, dy = wide(q, k, v, dy)
        q, dy = (jnp.moveaxis(x.reshape(B, T, K, H // K, d), 2, 1).reshape(B * K, T, H // K, d) for x in (q, dy))
        k, v = (jnp.moveaxis(x, 2, 1).reshape(B * K, T, d) for x in (k, v))
        y, dq, dk, dv = jax.lax.map(one, (q, k, v, dy))
        y, dq = (jnp.moveaxis(x.reshape(B, K, T, H // K, d), 1, 2).reshape(B, T, H, d) for x in (y, dq))
        dk, dv = (jnp.moveaxis(x.reshape(B, K, T, d), 1, 2) for x in (dk, dv))
        return {"y": y, "dq": dq, "dk": dk, "dv": dv}

    return Case("causal attention and its gradients", shape, dtype.name, inputs, path, oracle)


def attention_path(attend: Callable[..., Any]) -> Callable[..., Outputs]:
    """Output and gradients of an attention function."""

    def run(q, k, v, dy):
        y, pull = jax.vjp(attend, q, k, v)
        return dict(zip(("y", "dq", "dk", "dv"), (y, *pull(dy)), strict=True))

    return run


# Loss head.


def head(settings: Any, dtype: Any, rows: int) -> Case:
    shape = shape_of("head", settings, rows)
    B, T, D, V = shape.values()
    n, part = B * T, next(size for size in range(min(1024, B * T), 0, -1) if B * T % size == 0)

    def inputs(kind: str, seed: int) -> tuple[Any, ...]:
        h, w = normal(seed, (n, D), (V, D))
        random = np.random.default_rng(seed)
        targets = np.where(eos(kind, seed, (n,)), 0, random.integers(0, V, n)).astype(np.int32)
        targets[: min(8, n)] = V - 1
        weights = (np.arange(n) % T < T - 1).astype(np.float32)  # the last token of a row has no target
        return (h * min(SCALES[kind], 1.0)).astype(dtype), w * 0.02 * max(SCALES[kind], 1.0), targets, weights

    def path(spec: Mapping[str, Any]) -> Callable[..., Outputs]:
        if spec["head"] == "plain":
            return head_path(ops.plain_head_loss)
        return head_path(lambda h, w, t, weights: ops.head_loss(h, w, t, weights, spec["chunk_rows"], spec["kernels"]))

    def oracle(h, w, targets, weights) -> Outputs:
        h, w, weights = wide(h, w, weights)

        def step(dw, block):
            h_n, targets_n, weights_n = block

            def total(h_n, w):
                logits = h_n @ w.T
                losses = jax.nn.logsumexp(logits, axis=-1) - logits[jnp.arange(part), targets_n]
                return jnp.sum(losses * weights_n)

            value, (dh, own) = jax.value_and_grad(total, argnums=(0, 1))(h_n, w)
            return dw + own, (value, dh)

        blocks = (h.reshape(-1, part, D), jnp.asarray(targets).reshape(-1, part), weights.reshape(-1, part))
        dw, (values, dh) = jax.lax.scan(step, jnp.zeros_like(w), blocks)
        return {"loss": jnp.sum(values), "dh": dh.reshape(n, D), "dw": dw}

    return Case("sum of the token losses, gradients of states and projection", shape, dtype.name, inputs, path, oracle)


def head_path(total: Callable[..., Any]) -> Callable[..., Outputs]:
    """Loss and gradients of a head."""

    def run(h, w, targets, weights):
        value, (dh, dw) = jax.value_and_grad(total, argnums=(0, 1))(h, w, targets, weights)
        return {"loss": value, "dh": dh, "dw": dw}

    return run


# Projections: queries, keys and values with the rotation.


def projections(settings: Any, dtype: Any, rows: int) -> Case:
    shape = shape_of("projections", settings, rows)
    B, T, H, K, d, D = shape.values()
    angles = np.outer(np.arange(T), ops.rope_frequencies(settings))
    tables = tuple(jnp.asarray(table(angles), jnp.float32) for table in (np.cos, np.sin))

    def inputs(kind: str, seed: int) -> tuple[Any, ...]:
        h, w, *dys = normal(seed, (B, T, D), ((H + 2 * K) * d, D), (B, T, H, d), (B, T, K, d), (B, T, K, d))
        h = jnp.where(jnp.asarray(eos(kind, seed, (B, T)))[..., None], h[:1, :1], h) * SCALES[kind]
        return h.astype(dtype), 0.02 * w, *(dy.astype(dtype) for dy in dys)

    def path(spec: Mapping[str, Any]) -> Callable[..., Outputs]:
        return projections_path(lambda h, w: ops.rotated_projections(h, w, (H, K, d), tables, spec["rotary"]))

    def oracle(h, w, *dys) -> Outputs:
        turn = jnp.asarray(np.exp(1j * angles), jnp.complex128)[None, :, None]

        def rotate(x):  # pair (i, i + d / 2) as one complex number
            z = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * turn
            return jnp.concatenate([z.real, z.imag], axis=-1)

        def apply(h, w):
            q, k, v = (x.reshape(B, T, -1, d) for x in jnp.split(h @ w.T, [H * d, (H + K) * d], axis=-1))
            return rotate(q), rotate(k), v

        return projections_path(apply)(*wide(h, w, *dys))

    return Case("rotated queries and keys, values, and gradients", shape, dtype.name, inputs, path, oracle)


def projections_path(apply: Callable[..., Any]) -> Callable[..., Outputs]:
    """Queries, keys and values, and the gradients of what they come from."""

    def run(h, w, *dys):
        parts, pull = jax.vjp(apply, h, w)
        return dict(zip(("q", "k", "v", "dh", "dw"), (*parts, *pull(dys)), strict=True))

    return run


# Norm.


def norm(settings: Any, dtype: Any, rows: int) -> Case:
    shape, eps = shape_of("norm", settings, rows), settings.norm_eps
    n, D = shape["rows"] * shape["row_length"], shape["width"]

    def inputs(kind: str, seed: int) -> tuple[Any, ...]:
        x, dy, dh = normal(seed, (n, D), (n, D), (n, D))
        x = jnp.where(jnp.asarray(eos(kind, seed, (n,)))[:, None], x[:1], x) * SCALES[kind]
        return tuple(a.astype(dtype) for a in (x, dy, dh))

    def path(spec: Mapping[str, Any]) -> Callable[..., Outputs]:
        return norm_path(lambda x: ops.norm(x, eps, dtype, spec["kernels"]))

    def oracle(x, dy, dh) -> Outputs:
        def both(x):
            return x, x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)

        return norm_path(both)(*wide(x, dy, dh))

    return Case("RMSNorm, gradient of its input and of what goes on from it", shape, dtype.name, inputs, path, oracle)


def norm_path(both: Callable[..., Any]) -> Callable[..., Outputs]:
    """Output and gradient of a norm that returns its input too."""

    def run(x, dy, dh):
        (_, h), pull = jax.vjp(both, x)
        return {"h": h, "dx": pull((dy, dh))[0]}

    return run


# MLP: the gate with the products beside it.


def mlp(settings: Any, dtype: Any, rows: int) -> Case:
    shape = shape_of("mlp", settings, rows)
    n, D, F = shape["rows"] * shape["row_length"], shape["width"], shape["ffn"]
    part = next(size for size in range(min(8192, n), 0, -1) if n % size == 0)

    def inputs(kind: str, seed: int) -> tuple[Any, ...]:
        h, w_GD, w_DF, dy = normal(seed, (n, D), (2 * F, D), (D, F), (n, D))
        h = jnp.where(jnp.asarray(eos(kind, seed, (n,)))[:, None], h[:1], h) * SCALES[kind]
        return h.astype(dtype), 0.02 * w_GD, 0.02 * w_DF, dy.astype(dtype)

    def path(spec: Mapping[str, Any]) -> Callable[..., Outputs]:
        return mlp_path(lambda h, w_GD, w_DF: ops.mlp(h, w_GD, w_DF, spec["gate"]))

    def oracle(h, w_GD, w_DF, dy) -> Outputs:
        def apply(h, w_GD, w_DF):
            gate, up = h @ w_GD[:F].T, h @ w_GD[F:].T
            return (gate / (1 + jnp.exp(-gate)) * up) @ w_DF.T

        h, w_GD, w_DF, dy = wide(h, w_GD, w_DF, dy)

        def step(sums, block):
            y, pull = jax.vjp(apply, block[0], w_GD, w_DF)
            dh, *own = pull(block[1])
            return [a + b for a, b in zip(sums, own, strict=True)], (y, dh)

        blocks = (h.reshape(-1, part, D), dy.reshape(-1, part, D))
        (dw_GD, dw_DF), (y, dh) = jax.lax.scan(step, [jnp.zeros_like(w_GD), jnp.zeros_like(w_DF)], blocks)
        return {"y": y.reshape(n, D), "dh": dh.reshape(n, D), "dw_gate_up": dw_GD, "dw_down": dw_DF}

    return Case("SwiGLU MLP, gradients of its input and weights", shape, dtype.name, inputs, path, oracle)


def mlp_path(apply: Callable[..., Any]) -> Callable[..., Outputs]:
    """Output and gradients of an MLP."""

    def run(h, w_GD, w_DF, dy):
        y, pull = jax.vjp(apply, h, w_GD, w_DF)
        return dict(zip(("y", "dh", "dw_gate_up", "dw_down"), (y, *pull(dy)), strict=True))

    return run
