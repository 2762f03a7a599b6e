"""Which weights of a checkpoint count as active parameters: rules by name, and what a layer of each family consists of.

Names are those of the checkpoints, without `model.`, `language_model.` and the like in front; a number between two
dots reads as `*`. Families and names as in transformers 5.24 and, for DeepSeek V4, in its published checkpoint.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llama_jax.errors import ConfigError

# Counted in full, except routed experts, which count at top-k of their number.
COUNTED = ("attention", "indexer", "dense", "shared", "routed", "router", "hyper", "head")
# Not counted. `vector` is what no rule knows and has at most one axis: it can't be a matrix of a multiplication.
EXCLUDED = ("embedding", "position", "norm", "bias", "scale", "table", "convolution", "vector", "mtp", "vision")

CONVENTIONS = (
    "a tied output projection counts once, the input lookup not at all",
    "routed experts count at top-k of their number, shared experts and routers in full",
    "two FP4 weights in one byte count as two, block scales not at all",
    "the depthwise convolution of linear attention is no matrix multiplication and does not count",
    "projections of hyper-connections, indexers and key-value compressors count in full",
    "norms, biases, attention sinks, position tables and token-to-expert tables do not count",
    "multi-token prediction and vision do not count",
)


class Rule(NamedTuple):
    kind: str
    pattern: re.Pattern[str]  # of the whole name
    ranks: tuple[int, ...]  # numbers of axes it may have; with another one the rule doesn't match


def _rule(kind: str, pattern: str, *ranks: int) -> Rule:
    return Rule(kind, re.compile(pattern), ranks)


_L = r"layers\.\*\."
_ANY = (0, 1, 2, 3, 4, 5)
# The first match wins. Layers of multi-token prediction that are numbered like the others, and scales, which need
# their weight, are found before these.
RULES = (
    _rule("vision", r"(visual|vision|vision_tower|vision_model|multi_modal_projector|audio_tower)\..+", *_ANY),
    _rule("mtp", r"mtp\..+", *_ANY),
    _rule("table", _L + r"ffn\.gate\.tid2eid", 2),
    _rule("position", r"(.+\.)?rotary_emb\.inv_freq", 1),
    _rule("position", _L + r"attn\.(indexer\.)?compressor\.ape", 2),
    _rule("bias", r".+(\.bias|_bias|\.sinks|\.attn_sink|\.A_log)", 1),
    _rule("bias", _L + r"mlp\.experts\.(gate_up|down)_proj_bias", 2),
    _rule("norm", r"(.+[._])?(layer)?norm\.(weight|bias)", 1),
    _rule("embedding", r"(embed_tokens|embed)\.weight", 2),
    _rule("head", r"(lm_head|head)\.weight", 2),
    _rule("router", _L + r"(mlp\.(gate|router|shared_expert_gate)|ffn\.gate)\.weight", 2),
    _rule("shared", _L + r"mlp\.shared_experts?\.(gate|up|down)_proj\.weight", 2),
    _rule("shared", _L + r"ffn\.shared_experts\.w[123]\.weight", 2),
    _rule("routed", _L + r"mlp\.experts\.\*\.(gate|up|down)_proj\.weight", 2),
    _rule("routed", _L + r"ffn\.experts\.\*\.w[123]\.weight", 2),
    _rule("routed", _L + r"mlp\.experts\.(gate_up|down)_proj", 3),
    _rule("routed", _L + r"mlp\.experts\.(gate_up|down)_proj_blocks", 4),
    _rule("indexer", _L + r"self_attn\.indexer\.(wq_b|wk|weights_proj)\.weight", 2),
    _rule("indexer", _L + r"attn\.indexer\.(wq_b|weights_proj|compressor\.(wkv|wgate))\.weight", 2),
    _rule("attention", _L + r"self_attn\.([qkvo]|q_a|q_b|kv_b)_proj\.weight", 2),
    _rule("attention", _L + r"self_attn\.kv_a_proj_with_mqa\.weight", 2),
    _rule("attention", _L + r"linear_attn\.(in_proj_(qkv|z|a|b)|out_proj)\.weight", 2),
    _rule("attention", _L + r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|compressor\.(wkv|wgate))\.weight", 2),
    _rule("dense", _L + r"mlp\.(gate|up|down|gate_up)_proj\.weight", 2),
    _rule("hyper", _L + r"hc_(attn|ffn)_fn|hc_head_fn|hc_head\.hc_fn", 2),
    _rule("convolution", _L + r"linear_attn\.conv1d\.weight", 3),
)


def kind_of(name: str, rank: int) -> str | None:
    """The class of a name with `*` for numbers, or None when it has two axes or more and no rule knows it."""
    for rule in RULES:
        if rank in rule.ranks and rule.pattern.fullmatch(name):
            return rule.kind
    return "vector" if rank <= 1 else None


class Packing(NamedTuple):
    """FP4 weights stored two per byte: what proves it, beyond the dtype."""

    setting: str  # what config.json has to say
    of: str  # the part of the model that it says this of: what their names have in common
    weight: str  # how names end
    scale: str
    dtypes: tuple[str, ...]
    scale_dtypes: tuple[str, ...]
    block: int  # weights per scale, along the last axis


PACKINGS = (
    Packing("mxfp4", ".experts.", "_blocks", "_scales", ("U8",), ("U8",), 32),
    Packing("fp4", ".experts.", ".weight", ".scale", ("I8", "U8"), ("F8_E8M0",), 32),
    Packing("nvfp4", "", ".weight", ".weight_scale", ("U8",), ("F8_E4M3",), 16),
)
# Endings of the names of scales, and those of the weights that they may belong to.
SCALES = {
    "_scales": ("_blocks",),
    ".weight_scale_inv": (".weight",),
    ".weight_scale_2": (".weight",),
    ".weight_scale": (".weight",),
    ".input_scale": (".weight",),
    ".scale": (".weight",),
    "_scale_inv": ("",),
}
BLOCK_SCALES = (".weight_scale_inv", ".weight_scale", ".scale", "_scale_inv")  # of FP8 weights


Parts = frozenset[str]


class Block(NamedTuple):
    """One part of a layer: the sets of matrices that it may consist of, and which one a layer has by config.json.

    `schedules` maps a field to {its value for the layer: the sets}. A number in the field stands for {True: the sets
    of the layers below it, False: those of the others}.
    """

    choices: tuple[Parts, ...]
    schedules: Mapping[str, Mapping[Any, tuple[Parts, ...]]] = {}


class Family(NamedTuple):
    blocks: tuple[Block, ...]
    top: tuple[Parts, ...] = (frozenset(),)  # sets of counted matrices outside the layers, without output projection
    mtp: tuple[str, ...] = ()  # fields that say how many layers of multi-token prediction follow the others


def _parts(prefix: str, *names: str, suffix: str = ".weight") -> Parts:
    return frozenset(prefix + name + suffix for name in names)


_NONE: Parts = frozenset()
_HEADS = _parts("self_attn.", "q_proj", "k_proj", "v_proj", "o_proj")
_LINEAR = _parts("linear_attn.", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
_LATENT = _parts("self_attn.", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_LATENT_FULL_Q = _parts("self_attn.", "q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_INDEXER = _parts("self_attn.indexer.", "wq_b", "wk", "weights_proj")
_DENSE = _parts("mlp.", "gate_proj", "up_proj", "down_proj")
_DENSE_FUSED = _parts("mlp.", "gate_up_proj", "down_proj")
_FUSED = _parts("mlp.experts.", "gate_up_proj", "down_proj", suffix="")
_EXPERTS = (_parts("mlp.experts.*.", "gate_proj", "up_proj", "down_proj"), _FUSED)
_GATE = _parts("mlp.", "gate")

_MOE = tuple(_GATE | experts for experts in _EXPERTS)
_SHARED = _parts("mlp.shared_experts.", "gate_proj", "up_proj", "down_proj")
_MOE_SHARED = tuple(moe | _SHARED for moe in _MOE)
_GATED = _parts("mlp.shared_expert.", "gate_proj", "up_proj", "down_proj") | _parts("mlp.", "shared_expert_gate")
_MOE_GATED = tuple(moe | _GATED for moe in _MOE)
_MOE_GPT = tuple(
    _parts("mlp.", "router") | experts
    for experts in (_FUSED, _parts("mlp.experts.", "gate_up_proj", "down_proj", suffix="_blocks"))
)
_MOE_V4 = (
    _parts("ffn.", "gate")
    | _parts("ffn.experts.*.", "w1", "w2", "w3")
    | _parts("ffn.shared_experts.", "w1", "w2", "w3")
)
_COMPRESSOR = _parts("attn.compressor.", "wkv", "wgate")
_V4_INDEXER = _parts("attn.indexer.", "wq_b", "weights_proj", "compressor.wkv", "compressor.wgate")
_SPARSE = _COMPRESSOR | _V4_INDEXER

_attention = Block((_HEADS,))
_mixed = Block((_HEADS, _LINEAR), {"layer_types": {"full_attention": (_HEADS,), "linear_attention": (_LINEAR,)}})
_latent = Block((_LATENT, _LATENT_FULL_Q))
_dense_first = Block(
    (_DENSE, *_MOE_SHARED),
    {
        "mlp_layer_types": {"dense": (_DENSE,), "sparse": _MOE_SHARED},
        "first_k_dense_replace": {True: (_DENSE,), False: _MOE_SHARED},
    },
)
_NEXT = ("num_nextn_predict_layers", "num_mtp_layers")

FAMILIES = {
    "llama": Family((_attention, Block((_DENSE,)))),
    "qwen3": Family((_attention, Block((_DENSE,)))),
    "qwen3_moe": Family((_attention, Block((_DENSE, *_MOE)))),
    "qwen3_5": Family((_mixed, Block((_DENSE,)))),
    "qwen3_5_moe": Family((_mixed, Block(_MOE_GATED))),
    "deepseek_v3": Family((_latent, _dense_first), mtp=_NEXT),
    "deepseek_v32": Family((_latent, Block((_INDEXER,)), _dense_first), mtp=_NEXT),
    "deepseek_v4": Family(
        (
            Block((_parts("attn.", "wq_a", "wq_b", "wkv", "wo_a", "wo_b"),)),
            Block(
                (_NONE, _COMPRESSOR, _SPARSE),
                {
                    "compress_ratios": {0: (_NONE,), 4: (_SPARSE,), 128: (_COMPRESSOR,)},
                    "layer_types": {
                        "sliding_attention": (_NONE,),
                        "compressed_sparse_attention": (_SPARSE,),
                        "heavily_compressed_attention": (_COMPRESSOR,),
                    },
                },
            ),
            Block((_MOE_V4,)),
            Block((_parts("", "hc_attn_fn", "hc_ffn_fn", suffix=""),)),
        ),
        top=(frozenset({"hc_head_fn"}), frozenset({"hc_head.hc_fn"})),  # the second as transformers saves it
    ),
    "glm4": Family((_attention, Block((_DENSE_FUSED,)))),
    "glm4_moe": Family((_attention, _dense_first), mtp=_NEXT),
    "glm4_moe_lite": Family((_latent, _dense_first), mtp=_NEXT),
    "glm_moe_dsa": Family(
        (
            _latent,
            Block((_INDEXER, _NONE), {"indexer_types": {"full": (_INDEXER,), "shared": (_NONE,)}}),
            _dense_first,
        ),
        mtp=_NEXT,
    ),
    "gpt_oss": Family((_attention, Block(_MOE_GPT))),
}
FAMILIES |= {name + "_text": FAMILIES[name] for name in ("qwen3_5", "qwen3_5_moe")}


def layer_choices(family: Family, config: Mapping[str, Any], layer: int) -> list[Parts]:
    """The sets of matrices that this layer may consist of. ConfigError when config.json has no value for it."""
    blocks = [_choices(block, config, layer) for block in family.blocks]
    return [frozenset().union(*parts) for parts in itertools.product(*blocks)]


def _choices(block: Block, config: Mapping[str, Any], layer: int) -> tuple[Parts, ...]:
    for field, choices in block.schedules.items():
        value = config.get(field)
        if value is None:
            continue
        if type(value) is int and True in choices:
            value = layer < value
        elif isinstance(value, Sequence) and not isinstance(value, str) and layer < len(value):
            value = value[layer]
        if not isinstance(value, str | int) or value not in choices:
            raise ConfigError(f"config.json: {field} says nothing that is known of layer {layer}")
        return choices[value]
    return block.choices
