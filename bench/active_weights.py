"""Classifies the tensors of a checkpoint by the rules; refuses missing and unknown ones and unclear number formats.

What proves a number format: FP4 weights that share a byte need scales of the right shape and a config.json that says
so; FP8 weights count as stored, and scales, where there are any, must fit them. Errors are CheckpointError for the
tensors and ConfigError for config.json, without the folder's name.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.active_rules import (
    BLOCK_SCALES,
    COUNTED,
    FAMILIES,
    PACKINGS,
    SCALES,
    Family,
    Packing,
    kind_of,
    layer_choices,
)
from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.hf_files import Tensor

_PREFIX = re.compile(r"(model\.language_model|language_model\.model|language_model|model)\.")
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?=\.)")
_INTEGERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")
# Matrices with the model's width as one of their axes: a wrong unpacking, or another model's config.json, shows here.
_OF_WIDTH = ("embedding", "head", "router", "dense", "shared", "routed")


class Model(NamedTuple):
    """What config.json says, as far as the count needs it."""

    family: Family
    config: Mapping[str, Any]  # of the text model
    layers: int
    mtp_layers: int
    width: int
    vocabulary: int
    experts: int  # 0: none
    top_k: int
    tied: bool | None  # None: said twice and differently
    formats: frozenset[str]  # settings of PACKINGS that hold
    block: tuple[int, int]  # rows and columns per scale of FP8 weights; 0, 0: not said


class Weight(NamedTuple):
    """One tensor, classified; `shape` with unpacked weights."""

    name: str  # without prefix
    pattern: str  # with `*` for numbers
    kind: str
    stored: Tensor
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def layer(self) -> int:
        return int(self.name.split(".")[1])

    @property
    def part(self) -> str:
        """The name inside the layer, with `*` for the number of an expert."""
        return self.pattern.removeprefix("layers.*.")


# What config.json says.


def read_model(config: Mapping[str, Any], quantization: Mapping[str, Any]) -> Model:
    """The facts of a config.json, whose text model may be nested as `text_config`. ConfigError names the field."""
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise ConfigError("config.json: text_config is not an object")
    model_type = text.get("model_type", config.get("model_type"))
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"config.json: model_type {model_type!r} is not one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    experts = _number(text, ("num_experts", "num_local_experts", "n_routed_experts"), 0)
    top_k = _number(text, ("num_experts_per_tok", "experts_per_token"), 0)
    if experts and not 1 <= top_k <= experts:
        raise ConfigError(f"config.json: num_experts_per_tok = {top_k} of {experts} experts")
    ties = [place["tie_word_embeddings"] for place in (text, config) if place.get("tie_word_embeddings") is not None]
    if not all(type(tie) is bool for tie in ties):
        raise ConfigError("config.json: tie_word_embeddings is neither true nor false")
    quant = text.get("quantization_config") or config.get("quantization_config") or {}
    elsewhere = quantization.get("quantization") or {}
    if not isinstance(quant, Mapping) or not isinstance(elsewhere, Mapping):
        raise ConfigError("config.json: quantization_config is not an object")
    settings = {
        "mxfp4": quant.get("quant_method") == "mxfp4",
        "fp4": any(place.get("expert_dtype") == "fp4" for place in (text, config, quant)),
        "nvfp4": any(str(place.get("quant_algo")).lower() == "nvfp4" for place in (quant, elsewhere)),
    }
    block = quant.get("weight_block_size") or [0, 0]
    if not isinstance(block, Sequence) or len(block) != 2 or not all(type(n) is int and n >= 0 for n in block):
        raise ConfigError("config.json: weight_block_size is not two numbers")
    return Model(
        family=family,
        config={**text, "model_type": model_type},
        layers=_number(text, ("num_hidden_layers",), None),
        mtp_layers=_number(text, family.mtp, 0) if family.mtp else 0,
        width=_number(text, ("hidden_size",), None),
        vocabulary=_number(text, ("vocab_size",), None),
        experts=experts,
        top_k=top_k if experts else 0,
        tied=None if len(set(ties)) > 1 else True in ties,
        formats=frozenset(name for name, holds in settings.items() if holds),
        block=(block[0], block[1]),
    )


def _number(config: Mapping[str, Any], fields: Sequence[str], default: int | None) -> int:
    """A count that may stand under several names, which then have to agree."""
    found = {field: config[field] for field in fields if config.get(field) is not None}
    for field, value in found.items():
        if type(value) is not int or value < (1 if default is None else 0):
            raise ConfigError(f"config.json: {field} is {value!r}")
    if len(set(found.values())) > 1:
        raise ConfigError(f"config.json: {' and '.join(found)} differ")
    if not found and default is None:
        raise ConfigError(f"config.json: {fields[0]} is missing")
    return next(iter(found.values()), default or 0)


# Classes.


def classify(tensors: Mapping[str, Tensor], model: Model) -> list[Weight]:
    """Class and unpacked shape of every tensor. CheckpointError for an unknown matrix or a number format in doubt."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name
        if short in plain:
            raise CheckpointError(f"{short} is stored twice, with and without prefix")
        if "*" in name:
            raise CheckpointError(f"{name} is no name of a tensor")
        plain[short] = tensor
    kinds: dict[tuple[str, int], str | None] = {}
    weights = []
    for name, tensor in plain.items():
        pattern, rank = _NUMBER.sub("*", name), len(tensor.shape)
        if (pattern, rank) not in kinds:
            kinds[pattern, rank] = kind_of(pattern, rank)
        kind = kinds[pattern, rank]
        if kind not in ("mtp", "vision"):
            layer = int(name.split(".")[1]) if pattern.startswith("layers.*.") else 0
            if layer >= model.layers + model.mtp_layers:
                raise CheckpointError(f"{name} is of a layer that config.json does not have")
            if layer >= model.layers:
                kind = "mtp"
            elif any(owner in plain for owner in _owners(name)):
                kind = "scale"
        if kind is None:
            raise CheckpointError(f"{name} {tensor.dtype}{list(tensor.shape)} is a tensor that no rule knows")
        packing = _packing(name, plain, model) if kind != "scale" else None
        shape = _unpacked(tensor.shape, packing) if packing else tensor.shape
        if kind in COUNTED or kind == "embedding":
            _check_format(name, kind, packing, plain, model)
            if kind in _OF_WIDTH and model.width not in shape:
                raise CheckpointError(f"{name} {list(shape)} has no axis of hidden_size = {model.width}")
        elif kind == "table" and tensor.dtype not in _INTEGERS:
            raise CheckpointError(f"{name} is {tensor.dtype}, not a table of integers")
        weights.append(Weight(name, pattern, kind, tensor, shape))
    return weights


def _owners(name: str) -> list[str]:
    """Names of the weights that a tensor of this name may be the scale of."""
    return [name.removesuffix(end) + of for end, owners in SCALES.items() if name.endswith(end) for of in owners]


def _packing(name: str, plain: Mapping[str, Tensor], model: Model) -> Packing | None:
    """How two weights share a byte of this tensor, where its scales and config.json prove that they do."""
    dtype, shape = plain[name]
    for packing in PACKINGS:
        said = packing.setting in model.formats and packing.of in name and name.endswith(packing.weight)
        if not said or dtype not in packing.dtypes:
            continue
        scale = plain.get(name.removesuffix(packing.weight) + packing.scale)
        if scale is None or scale.dtype not in packing.scale_dtypes or len(shape) < 2:
            continue
        if packing.weight == "_blocks":  # the last axis is one block
            proven = 2 * shape[-1] == packing.block and scale.shape == shape[:-1]
        else:
            blocks, rest = divmod(2 * shape[-1], packing.block)
            proven = not rest and scale.shape == (*shape[:-1], blocks)
        if proven:
            return packing
    return None


def _unpacked(shape: tuple[int, ...], packing: Packing) -> tuple[int, ...]:
    if packing.weight == "_blocks":
        return (*shape[:-2], 2 * shape[-2] * shape[-1])
    return (*shape[:-1], 2 * shape[-1])


def _check_format(name: str, kind: str, packing: Packing | None, plain: Mapping[str, Tensor], model: Model) -> None:
    """CheckpointError unless the number format of a counted weight follows from dtype, scales and config.json."""
    dtype, shape = plain[name]
    said = f"{name} is {dtype}{list(shape)}"
    if dtype in _INTEGERS and packing is None:
        raise CheckpointError(f"{said}: nothing proves that two FP4 weights share a byte, other integers are unknown")
    if kind == "routed" and packing is None and dtype != "F4" and model.formats & {"mxfp4", "fp4"}:
        raise CheckpointError(f"{said}, but config.json says that experts are FP4")
    if name.endswith("_blocks") and packing is None:
        raise CheckpointError(f"{said}, which is no block of FP4 weights")
    scales = [name.removesuffix(of) + end for end, owners in SCALES.items() for of in owners if name.endswith(of)]
    found = [scale for scale in scales if scale in plain]
    if not found or packing or dtype == "F4":
        return
    if not dtype.startswith("F8_"):
        raise CheckpointError(f"{said} and has the scale {found[0]}, which only smaller formats need")
    for scale in found:
        got = plain[scale].shape
        whole = math.prod(got) == 1
        rows = got in (shape[:-1], (*shape[:-1], 1))
        blocks = 0 not in model.block and got == (
            *shape[:-2],
            *(-(-size // block) for size, block in zip(shape[-2:], model.block, strict=True)),
        )
        if not whole and not (scale.endswith(BLOCK_SCALES) and (rows or blocks)):
            raise CheckpointError(f"{said}, its scale {scale} {list(got)} does not fit")


# Completeness.


def check_head(model: Model, weights: list[Weight]) -> list[Weight]:
    """The weights with the class `head` for the one output projection: a tied embedding becomes it."""
    found = {kind: [weight for weight in weights if weight.kind == kind] for kind in ("embedding", "head")}
    for kind, members in found.items():
        if len(members) > 1:
            raise CheckpointError(f"{members[0].name} and {members[1].name}: more than one {kind}")
        for weight in members:
            if weight.shape != (model.vocabulary, model.width):
                raise CheckpointError(f"{weight.name} is {list(weight.shape)}, not [vocab_size, hidden_size]")
    if not found["embedding"]:
        raise CheckpointError("there is no input embedding")
    if found["head"]:
        return weights
    if not model.tied:
        said = "contradicts itself" if model.tied is None else "does not say that it is tied"
        raise CheckpointError(f"there is no output projection, and tie_word_embeddings in config.json {said}")
    return [weight._replace(kind="head") if weight.kind == "embedding" else weight for weight in weights]


def check_layers(model: Model, weights: Sequence[Weight]) -> None:
    """CheckpointError unless every layer has all matrices that its family asks for, equal in all layers of a kind."""
    if model.layers > len(weights):
        raise CheckpointError(f"config.json says {model.layers} layers, there are {len(weights)} tensors")
    layers: dict[int, dict[str, list[Weight]]] = {layer: defaultdict(list) for layer in range(model.layers)}
    top: set[str] = set()
    for weight in weights:
        if weight.kind not in COUNTED or weight.kind == "head":
            continue
        if weight.pattern.startswith("layers.*."):
            layers[weight.layer][weight.part].append(weight)
        else:
            top.add(weight.name)
    if top not in model.family.top:
        raise CheckpointError(f"{min(top ^ model.family.top[0])} is missing or does not belong to this family")
    shapes: dict[tuple[frozenset[str], str], tuple[int, ...]] = {}
    for layer, parts in layers.items():
        names = frozenset(parts)
        choices = layer_choices(model.family, model.config, layer)
        if names not in choices:
            nearest = min(choices, key=lambda choice: (len(choice ^ names), sorted(choice)))
            missing, surplus = sorted(nearest - names), sorted(names - nearest)
            what = f"lacks {missing[0]}" if missing else f"has {surplus[0]}, which does not belong there"
            raise CheckpointError(f"layer {layer} {what}")
        _check_inner(layer, parts)
        mixing = {part for part in names if parts[part][0].kind in ("attention", "indexer")}
        for part, members in parts.items():
            if "*" not in part and len(members) > 1:
                raise CheckpointError(f"layer {layer} has {part} twice")
            _check_experts(model, layer, part, members)
            same = names & mixing if part in mixing else names - mixing
            for weight in members:
                shape = shapes.setdefault((same, part), weight.shape)
                if weight.shape != shape:
                    raise CheckpointError(f"{weight.name} is {list(weight.shape)}, others of its kind {list(shape)}")


def _check_inner(layer: int, parts: Mapping[str, Sequence[Weight]]) -> None:
    """CheckpointError unless gate, up and down projections of a layer are of one size, a joint gate and up of two."""
    for kind in ("dense", "shared", "routed"):
        found = {part: weights[0] for part, weights in parts.items() if weights[0].kind == kind}
        sizes = {weight.size // (2 if "gate_up_proj" in part else 1) for part, weight in found.items()}
        if len(sizes) > 1:
            shapes = ", ".join(f"{part} {list(weight.shape)}" for part, weight in found.items())
            raise CheckpointError(f"layer {layer}: {shapes} do not fit each other")


def _check_experts(model: Model, layer: int, part: str, members: Sequence[Weight]) -> None:
    """CheckpointError unless a layer has the number of experts that config.json says, and a router for them."""
    first = members[0]
    if first.kind == "routed" and "*" in part:
        numbers = sorted(int(re.findall(r"experts\.([0-9]+)\.", weight.name)[0]) for weight in members)
        if numbers != list(range(len(numbers))):
            raise CheckpointError(f"layer {layer}: the experts of {part} are not numbered 0, 1, 2 and so on")
        found = len(numbers)
    elif first.kind == "routed" or part in ("mlp.gate.weight", "mlp.router.weight", "ffn.gate.weight"):
        found = first.shape[0]
    else:
        return
    if found != model.experts:
        raise CheckpointError(f"layer {layer} has {found} x {part}, config.json says {model.experts} experts")
