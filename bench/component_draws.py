"""What component tests share: cases, their shapes, kinds of inputs.

A case makes inputs, builds a path from what a record calls it ({"attention": "cudnn"}), and has an oracle: the same
values and gradients in FP64, written from the definitions, in pieces that fit the memory. Inputs are what the oracle
takes as exact: bfloat16 and float32 numbers widen without rounding. Oracles run under jax.enable_x64.

Kinds of inputs: normal; large (logits and scores of some tens, where softmax saturates); near_equal (logits that hardly
differ, values where an epsilon matters); eos_dense (half of the tokens are the same one, as in rows of short
conversations).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax import arena

KINDS = ("normal", "large", "near_equal", "eos_dense")
SCALES = {"normal": 1.0, "large": 30.0, "near_equal": 1e-3, "eos_dense": 1.0}
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
    if component in ("attention", "projections"):
        kv = settings.kv_heads or settings.heads
        size |= {"heads": settings.heads, "kv_heads": kv, "head_size": settings.width // settings.heads}
        return size if component == "attention" else size | {"width": settings.width}
    if component == "optimizer":
        return {"parameters": arena.make_layout(settings).used}
    own = {"norm": {}, "mlp": {"ffn": settings.ffn}}.get(component, {"vocab_size": settings.vocab_size})
    return size | {"width": settings.width} | own


def normal(seed: int, *shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys, shapes, strict=True)]


def eos(kind: str, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Where the tokens are the same one."""
    return np.random.default_rng(seed).random(shape) < (0.5 if kind == "eos_dense" else 0.0)


def wide(*arrays: Any) -> list[jax.Array]:
    return [jnp.asarray(array).astype(jnp.float64) for array in arrays]
