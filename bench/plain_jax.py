"""The second peer: the same Llama as one would first write it in JAX, without a line of llama_jax's model or optimizer.

    python -m bench.plain_jax --tokens=IDS [--model=320,8,5,896,32000] [--rows=128] [--steps=100] [--warmup=20]

Parameters are a tree of [in, out] matrices, cast to bfloat16 where they are used; attention is jax.nn's on XLA, the
head is float32 logits and optax's cross-entropy under autodiff, AdamW is optax's chain over the tree. Layers are
unrolled, the step is jitted and donates its state. Prints one JSON line: median of three windows.
Letters: B sequences, T targets of a sequence, D width, H heads, d head size, F inner width, V vocabulary.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench import timing
from bench.windows import windows

Params = dict[str, Any]


class Sizes(NamedTuple):
    """Shape of a model."""

    width: int = 320
    layers: int = 8
    heads: int = 5
    ffn: int = 896
    vocab: int = 32000


def init(sizes: Sizes, seed: int) -> Params:
    """Float32 parameters: normal, std 0.02, the two residual projections 0.02 / sqrt(2 layers), norm scales 1."""
    D, F = sizes.width, sizes.ffn
    shapes = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "gate": (D, F), "up": (D, F), "down": (F, D)}
    keys = iter(jax.random.split(jax.random.key(seed), 1 + sizes.layers * len(shapes)))

    def block() -> Params:
        found: Params = {"attention_norm": jnp.ones(D), "mlp_norm": jnp.ones(D)}
        for name, shape in shapes.items():
            std = 0.02 / math.sqrt(2 * sizes.layers) if name in ("o", "down") else 0.02
            found[name] = std * jax.random.normal(next(keys), shape)
        return found

    table_VD = 0.02 * jax.random.normal(next(keys), (sizes.vocab, D))
    return {"table": table_VD, "norm": jnp.ones(D), "blocks": [block() for _ in range(sizes.layers)]}


def _norm(x_BTD: jax.Array, scale_D: jax.Array) -> jax.Array:
    wide = x_BTD.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return (wide * scale_D[None, None, :]).astype(x_BTD.dtype)


def _rope(x_BTHd: jax.Array) -> jax.Array:
    T, d = x_BTHd.shape[1], x_BTHd.shape[3]
    angles = jnp.outer(jnp.arange(T), 10000.0 ** (-jnp.arange(0, d, 2) / d))[None, :, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    low, high = jnp.split(x_BTHd.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x_BTHd.dtype)


def loss(params: Params, tokens_BS: jax.Array, heads: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Mean next-token cross-entropy in nats of tokens [B, T + 1]."""
    inputs_BT, targets_BT = tokens_BS[:, :-1], tokens_BS[:, 1:]
    B, T = inputs_BT.shape
    x = params["table"][inputs_BT].astype(dtype)

    def dense(h: jax.Array, w_IO: jax.Array) -> jax.Array:
        return h @ w_IO.astype(dtype)

    for block in params["blocks"]:
        h = _norm(x, block["attention_norm"])
        q, k, v = (dense(h, block[name]).reshape(B, T, heads, -1) for name in "qkv")
        y = jax.nn.dot_product_attention(_rope(q), _rope(k), v, is_causal=True, implementation="xla")
        x = x + dense(y.reshape(B, T, -1), block["o"])
        h = _norm(x, block["mlp_norm"])
        x = x + dense(jax.nn.silu(dense(h, block["gate"])) * dense(h, block["up"]), block["down"])
    h = _norm(x, params["norm"])
    logits = jnp.einsum("btd,vd->btv", h, params["table"].astype(dtype), preferred_element_type=jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets_BT))


def make_step(heads: int, lr: float = 0.0056, dtype: Any = jnp.bfloat16) -> tuple[Any, Any]:
    """(optimizer, compiled step): the step takes ((params, state), tokens [B, T + 1]) and donates its first argument.

    Clip at global norm 1, then AdamW: beta1 0.9, beta2 0.98, eps 1e-8, decay 0.1 on matrices.
    """
    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    adamw = optax.adamw(lr, b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.1, mask=matrices)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def step(state, tokens_BS):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, tokens_BS.astype(jnp.int32), heads, dtype)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return optimizer, jax.jit(step, donate_argnums=0)


def measure(sizes: Sizes, tokens_KBS: np.ndarray, steps: int, warmup: int) -> dict[str, Any]:
    """Times the step on K batches of sequences [B, T + 1], which are used in turn."""
    batches = [jax.device_put(batch) for batch in tokens_KBS]
    _, rows, length = tokens_KBS.shape
    params = init(sizes, 0)
    optimizer, step = make_step(sizes.heads)
    state, number, value = (params, optimizer.init(params)), 0, jnp.zeros(())

    def update() -> Any:
        nonlocal state, number, value
        state, value = step(state, batches[number % len(batches)])
        number += 1
        return value

    found = windows(update, steps, warmup)
    rate = rows * (length - 1) / found["update_ms"] * 1e3
    return {"kind": "plain_jax", **found, "targets_per_s": rate, "loss": float(value), **timing.memory()}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", required=True, help="file of uint16 token ids")
    parser.add_argument(
        "--model", default=",".join(map(str, Sizes())), help="width, layers, heads, inner width, vocabulary"
    )
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=20)
    options = parser.parse_args(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    sizes = Sizes(*map(int, options.model.split(",")))
    count = timing.BATCHES * options.rows * (options.context + 1)
    tokens = np.fromfile(options.tokens, "<u2", count).reshape(timing.BATCHES, options.rows, options.context + 1)
    print(json.dumps(measure(sizes, tokens, options.steps, options.warmup)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
