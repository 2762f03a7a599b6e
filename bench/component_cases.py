"""The parts of a step that have several implementations: inputs at a model's shape, the paths, FP64 oracles.

A case makes inputs, builds a path from what a record calls it ({"attention": "cudnn"}), and has an oracle: the same
values and gradients in FP64, written from the definitions, in pieces that fit the memory. Inputs are what the oracle
takes as exact: bfloat16 and float32 numbers widen without rounding. Oracles run under jax.enable_x64.

Kinds of inputs: normal; large (logits and scores of some tens, where softmax saturates); near_equal (logits that hardly
differ, values where an epsilon matters); eos_dense (half of the tokens are the same one, as in rows of short
conversations).

Letters: B rows, T tokens of a row, H query heads, K key/value heads, G heads of a group, d head size, D width, V
vocabulary, N workers, n tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import FrozenConfigDict

from llama_jax import arena, loss, model, ops, optimizer
from llama_jax.model import Numerics

KINDS = ("normal", "large", "near_equal", "eos_dense")
SCALES = {"normal": 1.0, "large": 30.0, "near_equal": 1e-3, "eos_dense": 1.0}
LR, DECAY, UPDATES, WORKERS = 1e-2, 0.1, 3, 2
Outputs = dict[str, Any]


class Case(NamedTuple):
    """A component at the shape of a model. compares: what its outputs are, in words; shape: as records state it.

    inputs(kind, seed) -> arrays; path(spec)(*inputs) and oracle(*inputs) -> {output or gradient: array}.
    """

    compares: str
    shape: dict[str, int]
    dtype: str
    inputs: Callable[[str, int], tuple[Any, ...]]
    path: Callable[[Mapping[str, Any]], Callable[..., Outputs]]
    oracle: Callable[..., Outputs]


def shape_of(component: str, settings: Any, rows: int) -> dict[str, int]:
    """The shape of a component in the model of a config, with so many rows of a microbatch."""
    size = {"rows": rows, "row_length": settings.context}
    if component == "attention":
        kv = settings.kv_heads or settings.heads
        return size | {"heads": settings.heads, "kv_heads": kv, "head_size": settings.width // settings.heads}
    if component == "optimizer":
        return {"parameters": arena.make_layout(settings).used}
    return size | {"width": settings.width} | ({} if component == "norm" else {"vocab_size": settings.vocab_size})


def make(component: str, settings: Any, dtype: str, rows: int) -> Case:
    """The case of a component for the `model` section of a config; dtype: of activations."""
    return CASES[component](settings, jnp.dtype(dtype), rows)


def _normal(seed: int, *shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys, shapes, strict=True)]


def _eos(kind: str, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Where the tokens are the same one."""
    return np.random.default_rng(seed).random(shape) < (0.5 if kind == "eos_dense" else 0.0)


def _wide(*arrays: Any) -> list[jax.Array]:
    return [jnp.asarray(array).astype(jnp.float64) for array in arrays]


# Attention.


def attention(settings: Any, dtype: Any, rows: int) -> Case:
    shape = shape_of("attention", settings, rows)
    B, T, H, K, d = shape.values()

    def inputs(kind: str, seed: int) -> tuple[Any, ...]:
        q, k, v, dy = _normal(seed, (B, T, H, d), (B, T, K, d), (B, T, K, d), (B, T, H, d))
        same = jnp.asarray(_eos(kind, seed, (B, T)))[:, :, None, None]
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

        q, k, v, dy = _wide(q, k, v, dy)
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
        h, w = _normal(seed, (n, D), (V, D))
        random = np.random.default_rng(seed)
        targets = np.where(_eos(kind, seed, (n,)), 0, random.integers(0, V, n)).astype(np.int32)
        targets[: min(8, n)] = V - 1
        weights = (np.arange(n) % T < T - 1).astype(np.float32)  # the last token of a row has no target
        return (h * min(SCALES[kind], 1.0)).astype(dtype), w * 0.02 * max(SCALES[kind], 1.0), targets, weights

    def path(spec: Mapping[str, Any]) -> Callable[..., Outputs]:
        if spec["head"] == "plain":
            return head_path(ops.plain_head_loss)
        return head_path(lambda h, w, t, weights: ops.head_loss(h, w, t, weights, spec["chunk_rows"], spec["kernels"]))

    def oracle(h, w, targets, weights) -> Outputs:
        h, w, weights = _wide(h, w, weights)

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


# Residual addition and norm.


def norm(settings: Any, dtype: Any, rows: int) -> Case:
    shape, eps = shape_of("norm", settings, rows), settings.norm_eps
    n, D = shape["rows"] * shape["row_length"], shape["width"]

    def inputs(kind: str, seed: int) -> tuple[Any, ...]:
        x, delta, dy, dh = _normal(seed, (n, D), (n, D), (n, D), (n, D))
        same = jnp.asarray(_eos(kind, seed, (n,)))[:, None]
        x, delta = (jnp.where(same, a[:1], a) * SCALES[kind] for a in (x, delta))
        return tuple(a.astype(dtype) for a in (x, delta, dy, dh))

    def path(spec: Mapping[str, Any]) -> Callable[..., Outputs]:
        return norm_path(lambda x, delta: ops.add_norm(x, delta, eps, dtype, spec["kernels"]))

    def oracle(x, delta, dy, dh) -> Outputs:
        def add_norm(x, delta):
            y = x + delta
            return y, y / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)

        x, delta, dy, dh = _wide(x, delta, dy, dh)
        return norm_path(add_norm)(x, delta, dy, dh)

    return Case("residual sum, its RMSNorm, gradients of both inputs", shape, dtype.name, inputs, path, oracle)


def norm_path(add_norm: Callable[..., Any]) -> Callable[..., Outputs]:
    """Outputs and gradients of an addition with a norm."""

    def run(x, delta, dy, dh):
        (y, h), pull = jax.vjp(add_norm, x, delta)
        return dict(zip(("y", "h", "dx", "ddelta"), (y, h, *pull((dy, dh))), strict=True))

    return run


# Optimizer: AdamW on a tree of tensors, or on rows of an arena.

BETA1, BETA2, EPS = 0.9, 0.95, 1e-8


def optimizer_case(settings: Any, dtype: Any, rows: int) -> Case:
    layout = arena.make_layout(settings)

    def inputs(kind: str, seed: int) -> tuple[Any, ...]:
        shapes = [slot.shape for slot in layout.slots]
        params = dict(zip((slot.name for slot in layout.slots), _normal(seed, *shapes), strict=True))
        grads = []
        for update in range(UPDATES):
            drawn = _normal(1000 * seed + update + 1, *shapes)
            kept = [
                ~_eos(kind, seed, slot.shape[:1]).reshape(-1, *[1] * (len(slot.shape) - 1)) for slot in layout.slots
            ]
            size = {"normal": 1e-3, "large": 30.0, "near_equal": 1e-9, "eos_dense": 1e-3}[kind]
            grads.append({s.name: g * k * size for s, g, k in zip(layout.slots, drawn, kept, strict=True)})
        return params, tuple(grads)

    def path(spec: Mapping[str, Any]) -> Callable[..., Outputs]:
        return {"tree": tree_adamw, "arena": lambda *given: arena_adamw(layout, *given)}[spec["optimizer"]]

    def oracle(params, grads) -> Outputs:
        out: Outputs = {}
        for slot in layout.slots:
            (p,) = _wide(params[slot.name])
            m = v = jnp.zeros_like(p)
            for t, g in enumerate((_wide(part[slot.name])[0] for part in grads), 1):
                m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
                if len(slot.shape) > 1:  # matrices decay, norm scales don't
                    p = p * (1 - LR * DECAY)
                p = p - LR * (m / (1 - BETA1**t)) / (jnp.sqrt(v / (1 - BETA2**t)) + EPS)
            out |= {f"params {slot.name}": p, f"mu {slot.name}": m, f"nu {slot.name}": v}
        return out

    words = f"parameters and moments of every tensor after {UPDATES} AdamW updates"
    return Case(words, shape_of("optimizer", settings, rows), "float32", inputs, path, oracle)


def tree_adamw(params, grads, decays: Callable[[str, Any], bool] = lambda _, p: p.ndim > 1) -> Outputs:
    """optax on the tree of tensors."""
    mask = {name: decays(name, p) for name, p in params.items()}
    transform = optax.adamw(LR, b1=BETA1, b2=BETA2, eps=EPS, weight_decay=DECAY, mask=mask)
    state = transform.init(params)
    for part in grads:
        updates, state = transform.update(part, state, params)
        params = optax.apply_updates(params, updates)
    parts = {"params": params, "mu": state[0].mu, "nu": state[0].nu}
    return {f"{part} {name}": x for part, tensors in parts.items() for name, x in tensors.items()}


def arena_adamw(layout: arena.Layout, params, grads) -> Outputs:
    """The trainer's update of a row."""

    def row(tensors):
        return arena.pack({name: x[None] for name, x in tensors.items()}, layout)

    params_NP = row(params)
    moments = optimizer.Moments(jnp.zeros_like(params_NP), jnp.zeros_like(params_NP), jnp.zeros(1, jnp.int32))
    hyper = optimizer.Hyper(BETA1, BETA2, DECAY, EPS)
    for part in grads:
        lr_N = jnp.full(1, LR, jnp.float32)
        params_NP, moments = optimizer.adamw(hyper, layout.decayed, params_NP, row(part), moments, lr_N)
    arenas = {"params": params_NP, "mu": moments.mu_NP, "nu": moments.nu_NP}
    return {f"{part} {name}": x[0] for part, whole in arenas.items() for name, x in arena.views(whole, layout).items()}


# Workers of one device: vmapped, or one after the other.


def workers(settings: Any, dtype: Any, rows: int) -> Case:
    frozen, layout = FrozenConfigDict(settings), arena.make_layout(settings)
    fast = Numerics(dtype, dtype, "xla", "chunked")
    shape = shape_of("workers", settings, rows)
    B, T, _, V = shape.values()

    def inputs(kind: str, seed: int) -> tuple[Any, ...]:
        size = {"normal": 1.0, "large": 4.0, "near_equal": 0.05, "eos_dense": 1.0}[kind]
        rows_NP = [arena.to_row(model.init(settings, seed + i), layout) * np.float32(size) for i in range(WORKERS)]
        drawn = np.random.default_rng(seed).integers(0, V, (WORKERS, B, T + 1))
        tokens = np.where(_eos(kind, seed, drawn.shape), 0, drawn).astype(np.int32)
        return arena.views(jnp.asarray(np.stack(rows_NP)), layout), tokens, np.ones((WORKERS, B), np.float32)

    def named(losses, grads) -> Outputs:
        return {"loss": losses, **{f"d {name}": grads[name] for name in grads}}

    def one(numerics: Numerics) -> Callable[..., Any]:
        return jax.value_and_grad(lambda params, t, r: loss.loss_sum(frozen, numerics, params, t, r))

    def path(spec: Mapping[str, Any]) -> Callable[..., Outputs]:
        if spec["workers"] == "vmap":
            return lambda *given: named(*jax.vmap(one(fast))(*given))
        return lambda *given: named(*_loop(one(fast), *given))

    def oracle(params, tokens, weights) -> Outputs:
        wide = {name: x.astype(jnp.float64) for name, x in params.items()}
        return named(*_loop(one(model.reference(jnp.float64)), wide, tokens, weights.astype(np.float64)))

    return Case("losses and gradients of each worker's model", shape, dtype.name, inputs, path, oracle)


def _loop(one: Callable[..., Any], *given: Any) -> Any:
    """`one` for each worker, the results stacked."""
    found = [one(*jax.tree.map(lambda x, i=i: x[i], given)) for i in range(WORKERS)]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *found)


CASES: dict[str, Callable[[Any, Any, int], Case]] = {
    "attention": attention,
    "head": head,
    "norm": norm,
    "optimizer": optimizer_case,
    "workers": workers,
}
