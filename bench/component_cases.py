"""All components that have tests, and those that span the model: optimizer, workers. N workers, P arena row length."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import FrozenConfigDict

from bench import component_layers
from bench.component_draws import Case, Outputs, eos, normal, shape_of, wide
from llama_jax import arena, loss, model, optimizer
from llama_jax.model import Numerics

LR, DECAY, UPDATES, WORKERS = 1e-2, 0.1, 3, 2


# Optimizer: AdamW on a tree of tensors, or on rows of an arena.

BETA1, BETA2, EPS = 0.9, 0.95, 1e-8


def optimizer_case(settings: Any, dtype: Any, rows: int) -> Case:
    layout = arena.make_layout(settings)

    def inputs(kind: str, seed: int) -> tuple[Any, ...]:
        shapes = [slot.shape for slot in layout.slots]
        params = dict(zip((slot.name for slot in layout.slots), normal(seed, *shapes), strict=True))
        grads = []
        for update in range(UPDATES):
            drawn = normal(1000 * seed + update + 1, *shapes)
            kept = [~eos(kind, seed, slot.shape[:1]).reshape(-1, *[1] * (len(slot.shape) - 1)) for slot in layout.slots]
            size = {"normal": 1e-3, "large": 30.0, "near_equal": 1e-9, "eos_dense": 1e-3}[kind]
            grads.append({s.name: g * k * size for s, g, k in zip(layout.slots, drawn, kept, strict=True)})
        return params, tuple(grads)

    def path(spec: Mapping[str, Any]) -> Callable[..., Outputs]:
        return {"tree": tree_adamw, "arena": lambda *given: arena_adamw(layout, *given)}[spec["optimizer"]]

    def oracle(params, grads) -> Outputs:
        out: Outputs = {}
        for slot in layout.slots:
            (p,) = wide(params[slot.name])
            m = v = jnp.zeros_like(p)
            for t, g in enumerate((wide(part[slot.name])[0] for part in grads), 1):
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
        tokens = np.where(eos(kind, seed, drawn.shape), 0, drawn).astype(np.int32)
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
    "attention": component_layers.attention,
    "head": component_layers.head,
    "norm": component_layers.norm,
    "mlp": component_layers.mlp,
    "projections": component_layers.projections,
    "optimizer": optimizer_case,
    "workers": workers,
}


def make(component: str, settings: Any, dtype: str, rows: int) -> Case:
    """The case of a component for the `model` section of a config; dtype: of activations."""
    return CASES[component](settings, jnp.dtype(dtype), rows)
