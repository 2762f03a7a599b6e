"""Parameter shapes and counts, FLOPs per target, peak FLOP/s of devices. Pure Python: no JAX, no numpy.

Letters: V vocabulary, D width, F feed-forward width, H query heads, d head size.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

# Dense bf16 peak FLOP/s (never the doubled "with sparsity" figure of the data sheets) by a part of jax's device_kind,
# first match wins. NVIDIA: H100, H200, B200, A100, L4 data sheets, dense tensor-core rates; T4: fp16. Google Cloud TPU:
# system architecture pages, per chip (v2 and v3 devices are half chips).
PEAK_FLOPS = (
    ("GH200", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L4", 121e12),
    ("T4", 65e12),
    ("TPU v6 lite", 918e12),
    ("TPU v6e", 918e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5p", 459e12),
    ("TPU v5", 459e12),
    ("TPU v4 lite", None),
    ("TPU v4", 275e12),
    ("TPU v3", 61.5e12),
    ("TPU v2", 22.5e12),
)


# Compute capability of NVIDIA GPUs (NVIDIA's list of CUDA GPUs), for what is asked about a device that isn't there.
CAPABILITY = (
    ("GH200", (9, 0)),
    ("H200", (9, 0)),
    ("H100", (9, 0)),
    ("GB200", (10, 0)),
    ("B200", (10, 0)),
    ("A100", (8, 0)),
    ("L4", (8, 9)),
    ("T4", (7, 5)),
    ("V100", (7, 0)),
)


def of_kind(table: Sequence[tuple[str, Any]], device_kind: str) -> Any:
    """The first entry of a table whose name stands in a device kind, in upper or lower case, or None."""
    for part, value in table:
        # Whole words: "L4" must not match "L40S", nor "B200" "GB200", nor "TPU v5" "TPU v5e".
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(part)}(?![A-Za-z0-9])", device_kind, re.IGNORECASE):
            return value
    return None


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 peak of one device in FLOP/s, or None where it isn't known (then no MFU is shown)."""
    return of_kind(PEAK_FLOPS, device_kind)


def parameter_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes by Hugging Face Llama name, in model order; matrices are [out, in] as there.

    `model` has vocab_size, width, layers, heads, kv_heads (None: heads), ffn, tied.
    """
    V, D, F, H = model.vocab_size, model.width, model.ffn, model.heads
    d = D // H
    kv = (model.kv_heads or H) * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for layer in range(model.layers):
        block = f"model.layers.{layer}."
        shapes |= {
            block + "input_layernorm.weight": (D,),
            block + "self_attn.q_proj.weight": (D, D),
            block + "self_attn.k_proj.weight": (kv, D),
            block + "self_attn.v_proj.weight": (kv, D),
            block + "self_attn.o_proj.weight": (D, D),
            block + "post_attention_layernorm.weight": (D,),
            block + "mlp.gate_proj.weight": (F, D),
            block + "mlp.up_proj.weight": (F, D),
            block + "mlp.down_proj.weight": (D, F),
        }
    shapes["model.norm.weight"] = (D,)
    if not model.tied:
        shapes["lm_head.weight"] = (V, D)
    return shapes


def unique_params(model: Any) -> int:
    """Number of trainable parameters; a tied embedding counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())


def non_embedding_params(model: Any) -> int:
    """Parameters outside the token embedding and the output projection."""
    vocabulary_matrices = 1 if model.tied else 2
    return unique_params(model) - vocabulary_matrices * model.vocab_size * model.width


def flops_per_target(model: Any) -> float:
    """Training FLOPs per target, 6 N: N leaves out the input lookup and counts the output projection once.

    Attention scores and recomputation are not counted, so MFU compares only runs of one model and context.
    """
    lookup_only = 0 if model.tied else model.vocab_size * model.width
    return 6.0 * (unique_params(model) - lookup_only)


def mfu(model: Any, targets_per_s: float, device_kind: str, devices: int = 1) -> float | None:
    """Model FLOPs utilisation in 0..1 of `devices` equal devices, or None where the peak isn't known."""
    peak = peak_flops(device_kind)
    return None if peak is None else flops_per_target(model) * targets_per_s / (peak * devices)
