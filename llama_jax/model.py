"""The Llama decoder in Flax NNX, split once into structure and parameters; parameters are named as in Hugging Face.

Letters: B sequences, T tokens, D width, H query heads, K key/value heads, d head size.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from llama_jax import flops, gate, ops


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How the forward pass is computed. All choices share one parameter layout.

    compute: dtype of activations and matrix operands. residual: dtype of the residual stream.
    attention: cudnn, xla or reference. head: chunked or plain. own_gradients: fast forms with their own gradients
    instead of the plain twins. kernels, gate, rotary: mosaic or xla: what computes the row operations of fast forms,
    the MLP's gate with the products beside it, and the rotation with the products before it.
    """

    compute: Any = jnp.bfloat16
    residual: Any = jnp.bfloat16
    attention: str = "xla"
    head: str = "chunked"
    head_chunk_rows: int = 32768
    own_gradients: bool = True
    kernels: str = "xla"
    gate: str = "xla"
    rotary: str = "xla"
    remat: bool = False
    scan_layers: bool = False


def reference(dtype: Any = jnp.float32) -> Numerics:
    """The reference path: explicit products, mask and softmax in `dtype`, no custom gradients (forward mode works)."""
    return Numerics(dtype, dtype, "reference", "plain", own_gradients=False)


class Weight(nnx.Module):
    """One tensor, called `weight` as in Hugging Face."""

    def __init__(self, *shape: int):
        self.weight = nnx.Param(jnp.zeros(shape, jnp.float32))


class Attention(nnx.Module):
    """Causal self-attention with rotary positions and grouped key/value heads."""

    def __init__(self, model: Any, numerics: Numerics):
        D, d = model.width, model.width // model.heads
        K = model.kv_heads or model.heads
        self.shape = (model.heads, K, d)
        self.numerics = numerics
        self.q_proj, self.o_proj = Weight(D, D), Weight(D, D)
        self.k_proj, self.v_proj = Weight(K * d, D), Weight(K * d, D)

    def __call__(self, h_BTD: jax.Array, scale_D: jax.Array | None, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        B, T, D = h_BTD.shape
        d = self.shape[-1]
        parts = (self.q_proj, self.k_proj, self.v_proj)
        if self.numerics.own_gradients:
            dense = ops.dense
            q, k, v = ops.rotated_projections(h_BTD, _scaled(scale_D, *parts), self.shape, rope, self.numerics.rotary)
        else:
            dense = ops.plain_dense
            q, k, v = (dense(h_BTD, part.weight[...]).reshape(B, T, -1, d) for part in parts)
            q, k = ops.plain_rope(q, *rope), ops.plain_rope(k, *rope)
        y = ops.attention(self.numerics.attention)(q, k, v)
        return dense(y.reshape(B, T, D), self.o_proj.weight[...])


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, model: Any, numerics: Numerics):
        self.numerics = numerics
        self.gate_proj, self.up_proj = Weight(model.ffn, model.width), Weight(model.ffn, model.width)
        self.down_proj = Weight(model.width, model.ffn)

    def __call__(self, h_BTD: jax.Array, scale_D: jax.Array | None) -> jax.Array:
        if not self.numerics.own_gradients:
            parts = (ops.plain_dense(h_BTD, w.weight[...]) for w in (self.gate_proj, self.up_proj))
            return ops.plain_dense(gate.swiglu(*parts), self.down_proj.weight[...])
        gate_up_GD = _scaled(scale_D, self.gate_proj, self.up_proj)
        return ops.mlp(h_BTD, gate_up_GD, self.down_proj.weight[...], self.numerics.gate)


class Block(nnx.Module):
    """x += Attn(RMSNorm(x)); x += SwiGLU(RMSNorm(x)); the products at the ends add to x themselves."""

    def __init__(self, model: Any, numerics: Numerics):
        self.eps, self.numerics = model.norm_eps, numerics
        self.input_layernorm, self.post_attention_layernorm = Weight(model.width), Weight(model.width)
        self.self_attn, self.mlp = Attention(model, numerics), MLP(model, numerics)

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, h, scale = _norm(x, self.input_layernorm, self.eps, self.numerics)
        x = x + self.self_attn(h, scale, rope).astype(x.dtype)
        x, h, scale = _norm(x, self.post_attention_layernorm, self.eps, self.numerics)
        return x + self.mlp(h, scale).astype(x.dtype)


class Decoder(nnx.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, model: Any, numerics: Numerics):
        self.config, self.numerics = model, numerics
        self.embed_tokens = Weight(model.vocab_size, model.width)
        self.layers = nnx.List([Block(model, numerics) for _ in range(model.layers)])
        self.norm = Weight(model.width)

    def __call__(self, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """(normalized states [B, T, D], the final scale [D] where it is left to the head)."""
        x = ops.embed(self.embed_tokens.weight[...], tokens_BT, self.numerics.residual)
        rope = ops.rope_tables(self.config, np.arange(tokens_BT.shape[1]), _table_dtype(self.numerics.compute))
        split = [nnx.split(layer) for layer in self.layers]

        def run(x, structure, params):
            return nnx.merge(structure, params)(x, rope)

        if self.numerics.remat:
            run = jax.checkpoint(run, static_argnums=(1,))
        if self.numerics.scan_layers:
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params for _, params in split))
            x, _ = jax.lax.scan(lambda x, params: (run(x, split[0][0], params), None), x, stacked)
        else:
            for structure, params in split:
                x = run(x, structure, params)
        _, h, scale = _norm(x, self.norm, self.config.norm_eps, self.numerics)
        return h, scale


class Llama(nnx.Module):
    """The decoder and, where it isn't tied, the output projection."""

    def __init__(self, model: Any, numerics: Numerics):
        self.model = Decoder(model, numerics)
        if not model.tied:
            self.lm_head = Weight(model.vocab_size, model.width)

    def __call__(self, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(states [B, T, D], output projection [V, D]), whose product is the logits."""
        h_BTD, scale_D = self.model(tokens_BT)
        return h_BTD, _scaled(scale_D, self.lm_head if hasattr(self, "lm_head") else self.model.embed_tokens)


def _norm(x: jax.Array, weight: Weight, eps: float, numerics: Numerics):
    """(x, its RMSNorm, the scale that the next matrix must take up or None where it is applied)."""
    if numerics.own_gradients:
        return *ops.norm(x, eps, numerics.compute, numerics.kernels), weight.weight[...]
    return x, ops.rms_norm(x, weight.weight[...], eps, numerics.compute), None


def _scaled(scale_D: jax.Array | None, *weights: Weight) -> jax.Array:
    """Matrices [out, in] one below the other, which take up the norm's scale of their inputs.

    So neither pass multiplies or sums over the tokens for it, and their gradients stay one array.
    """
    matrix = jnp.concatenate([weight.weight[...] for weight in weights])
    return matrix if scale_D is None else matrix * scale_D[None, :]


def _table_dtype(compute) -> jnp.dtype:
    return jnp.promote_types(compute, jnp.float32)


@functools.lru_cache(maxsize=32)
def _structure(model: Any, numerics: Numerics):
    return nnx.split(nnx.eval_shape(lambda: Llama(model, numerics)))


def bind(model: Any, numerics: Numerics, params: dict[str, jax.Array]) -> Llama:
    """The model over a flat dictionary {Hugging Face name: array}; names and shapes must match exactly (ValueError)."""
    structure, abstract = _structure(model, numerics)
    flat = dict(nnx.to_flat_state(abstract))
    names = {".".join(str(part) for part in path): path for path in flat}
    if names.keys() != params.keys():
        raise ValueError(f"parameter names differ: {sorted(names.keys() ^ params.keys())[:4]}")
    for name, shape in flops.parameter_shapes(model).items():
        if params[name].shape != shape:
            raise ValueError(f"{name} has shape {list(params[name].shape)}, expected {list(shape)}")
    state = nnx.from_flat_state([(path, flat[path].replace(params[name])) for name, path in names.items()])
    return nnx.merge(structure, state)


def logits(model: Any, numerics: Numerics, params: dict[str, jax.Array], tokens_BT: jax.Array) -> jax.Array:
    """Logits [B, T, V] in the compute dtype."""
    return ops.plain_dense(*bind(model, numerics, params)(tokens_BT))


def init(model: Any, seed: int) -> dict[str, np.ndarray]:
    """Initial parameters, float32: normal with std `init_std`, divided by sqrt(2 layers) for the residual projections.

    Norm scales are 1. One seed gives one model: each tensor has its own key, by its place in the model.
    """
    key = jax.random.key(seed, impl="threefry2x32")  # whatever JAX_DEFAULT_PRNG_IMPL and the flag below say
    residual_std = model.init_std / math.sqrt(2 * model.layers)
    params = {}
    for index, (name, shape) in enumerate(flops.parameter_shapes(model).items()):
        if len(shape) == 1:
            params[name] = np.ones(shape, np.float32)
        else:
            std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else model.init_std
            with jax.threefry_partitionable(True):
                draw = jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
            params[name] = np.asarray(draw * np.float32(std))
    return params
