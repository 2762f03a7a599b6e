"""A Llama in numpy FP64, written from its definition: the oracle of the tests of model, loss, step and validation.

It shares nothing with the package: loops over heads and positions, rotation by complex numbers, softmax row by row.
"""

import numpy as np
from ml_collections import FrozenConfigDict

MATRIX_STD = 0.15  # larger than the usual init, so that every part of a small model matters


def model(**changes):
    """The `model` section of a config, tiny: grouped heads, an odd vocabulary, FFN and context."""
    values = {
        "vocab_size": 29,
        "context": 12,
        "layers": 2,
        "width": 24,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 40,
        "tied": True,
        "rope_theta": 10000.0,
        "rope_scaling": "none",
        "rope_factor": 8.0,
        "rope_low_freq": 1.0,
        "rope_high_freq": 4.0,
        "rope_original_context": 8192,
        "norm_eps": 1e-5,
        "init_std": 0.02,
    }
    return FrozenConfigDict({**values, **changes})


def shapes(config):
    """Names and shapes of Hugging Face Llama, written out once more."""
    D, F, d = config.width, config.ffn, config.width // config.heads
    kv = (config.kv_heads or config.heads) * d
    result = {"model.embed_tokens.weight": (config.vocab_size, D)}
    for i in range(config.layers):
        for name, shape in {
            "input_layernorm": (D,),
            "self_attn.q_proj": (D, D),
            "self_attn.k_proj": (kv, D),
            "self_attn.v_proj": (kv, D),
            "self_attn.o_proj": (D, D),
            "post_attention_layernorm": (D,),
            "mlp.gate_proj": (F, D),
            "mlp.up_proj": (F, D),
            "mlp.down_proj": (D, F),
        }.items():
            result[f"model.layers.{i}.{name}.weight"] = shape
    result["model.norm.weight"] = (D,)
    if not config.tied:
        result["lm_head.weight"] = (config.vocab_size, D)
    return result


def params(config, seed=0, dtype=np.float32):
    """Random parameters: norm scales around 1, matrices of std MATRIX_STD."""
    random = np.random.default_rng(seed)
    return {
        name: (random.normal(0, MATRIX_STD, shape) if len(shape) > 1 else random.uniform(0.5, 1.5, shape)).astype(dtype)
        for name, shape in shapes(config).items()
    }


def tokens(config, rows, seed=1, length=None):
    """Random rows [rows, context + 1], uint16."""
    random = np.random.default_rng(seed)
    return random.integers(0, config.vocab_size, (rows, length or config.context + 1)).astype(np.uint16)


def rotate(x_Td, theta):
    """Each pair (i, i + d/2) as a complex number, turned by position * theta^(-2i/d)."""
    T, d = x_Td.shape
    pairs = x_Td[:, : d // 2] + 1j * x_Td[:, d // 2 :]
    turned = pairs * np.exp(1j * np.arange(T)[:, None] / theta ** (2 * np.arange(d // 2) / d)[None])
    return np.concatenate([turned.real, turned.imag], axis=1)


def norm(x_TD, scale_D, eps):
    return np.stack([row / np.sqrt(np.dot(row, row) / len(row) + eps) * scale_D for row in x_TD])


def softmax(row):
    exponentials = np.exp(row - row.max())
    return exponentials / exponentials.sum()


def attention(q_Td, k_Td, v_Td):
    """One head, one query after the other."""
    return np.stack([softmax(k_Td[: t + 1] @ q / np.sqrt(len(q))) @ v_Td[: t + 1] for t, q in enumerate(q_Td)])


def logits(config, given, tokens_BT):
    """Logits [B, T, V] in FP64 (rope_scaling none)."""

    def weight(name):
        return np.asarray(given[name + ".weight"], np.float64)

    d, group = config.width // config.heads, config.heads // (config.kv_heads or config.heads)
    embedding = weight("model.embed_tokens")
    head = embedding if config.tied else weight("lm_head")
    result = []
    for row in np.asarray(tokens_BT, np.int64):
        x = embedding[row]
        for i in range(config.layers):
            block = f"model.layers.{i}."
            h = norm(x, weight(block + "input_layernorm"), config.norm_eps)
            q, k, v = (h @ weight(f"{block}self_attn.{name}_proj").T for name in "qkv")
            heads = []
            for j in range(config.heads):
                mine = slice(j // group * d, (j // group + 1) * d)
                heads.append(
                    attention(
                        rotate(q[:, j * d : (j + 1) * d], config.rope_theta),
                        rotate(k[:, mine], config.rope_theta),
                        v[:, mine],
                    )
                )
            x = x + np.concatenate(heads, axis=1) @ weight(block + "self_attn.o_proj").T
            h = norm(x, weight(block + "post_attention_layernorm"), config.norm_eps)
            gate, up = (h @ weight(f"{block}mlp.{name}_proj").T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ weight(block + "mlp.down_proj").T
        result.append(norm(x, weight("model.norm"), config.norm_eps) @ head.T)
    return np.stack(result)


def token_losses(config, given, tokens_BS):
    """Next-token losses [B, T] in nats."""
    scores = logits(config, given, tokens_BS[:, :-1])
    return np.array(
        [
            [-np.log(softmax(scores[b, t])[tokens_BS[b, t + 1]]) for t in range(scores.shape[1])]
            for b in range(len(scores))
        ]
    )
