"""The shortest time that an update can take on a device, from its FLOPs and its memory traffic. Pure Python: no JAX.

Letters: T targets of an update, S context, V vocabulary, D width, F feed-forward width, L layers, K key/value width,
P parameters, N workers.
"""

from typing import Any, NamedTuple

from llama_jax import flops

# Memory bandwidth in bytes/s by a part of jax's device_kind, first match wins. NVIDIA data sheets (GH200: with HBM3 of
# 96 GB and HBM3e of 144 GB; A100: SXM of 40 and 80 GB); Google Cloud TPU: system architecture pages, per chip (v2 and
# v3 devices are half chips).
BANDWIDTH = (
    ("GH200 144G", 4.9e12),
    ("GH200", 4.0e12),
    ("H200", 4.8e12),
    ("H100 PCIe", 2.0e12),
    ("H100 NVL", 3.9e12),
    ("H100", 3.35e12),
    ("GB200", 8.0e12),
    ("B200", 8.0e12),
    ("A100-SXM4-40GB", 1.555e12),
    ("A100-PCIE-40GB", 1.555e12),
    ("A100", 1.935e12),
    ("TPU v6 lite", 1.638e12),
    ("TPU v6e", 1.638e12),
    ("TPU v5 lite", 0.819e12),
    ("TPU v5e", 0.819e12),
    ("TPU v5p", 2.765e12),
    ("TPU v5", 2.765e12),
    ("TPU v4 lite", None),
    ("TPU v4", 1.228e12),
    ("TPU v3", 0.45e12),
    ("TPU v2", 0.35e12),
)


class Part(NamedTuple):
    """Work of one kind in an update: FLOPs and bytes moved to and from memory."""

    flops: float
    bytes: float


def bandwidth(device_kind: str) -> float | None:
    """Memory bandwidth of one device in bytes/s, or None where it isn't known."""
    return next((rate for part, rate in BANDWIDTH if part in device_kind), None)


def parts(model: Any, targets: int, workers: int = 1) -> dict[str, Part]:
    """FLOPs and least traffic of one update in bfloat16 with float32 parameters, gradients and moments.

    `targets` over all workers; without accumulation and recomputation, so that all ways to execute a recipe have one
    floor. A matrix product [T, I] x [I, O] takes 2 T I O FLOPs and moves each operand and its result once, forward,
    for the gradient of its input, and for that of its weights (float32 result). Causal attention takes half of its
    square: 2 T S D FLOPs forward, 2.5 times that backward (five products instead of two), and moves q, k, v, the
    result and their gradients once. Between products: residual addition with RMSNorm (4 passes over [T, D] each way),
    rotation, gate. The head writes logits once, turns them into their gradient in place, and reads that twice. AdamW
    reads and writes parameters and moments and reads the gradient twice (the clip needs its norm first).
    """
    T, S, V, D, F, L, N = targets, model.context, model.vocab_size, model.width, model.ffn, model.layers, workers
    K = D // model.heads * (model.kv_heads or model.heads)
    half, full = 2, 4  # bytes of bfloat16 and float32

    def product(inputs: int, outputs: int) -> Part:
        x, y, w = T * inputs, T * outputs, N * inputs * outputs
        return Part(6.0 * T * inputs * outputs, half * (3 * x + 3 * y + 2 * w) + full * w)

    products = {"qkv": (D, D + 2 * K), "attention_output": (D, D), "gate_up": (D, 2 * F), "down": (F, D)}
    norms = (2 * L + 1) * 8 * D
    rotations, gates = L * 4 * (D + K), L * (3 * F + 5 * F)
    params = flops.unique_params(model) * N
    return {
        **{name: Part(*(L * amount for amount in product(*sizes))) for name, sizes in products.items()},
        "attention": Part(L * 7.0 * T * S * D, L * half * T * (2 * D + 2 * K + 4 * D + 4 * K)),
        "between": Part(0.0, half * T * (norms + rotations + gates)),
        "head": product(D, V),
        "cross_entropy": Part(0.0, half * 2 * T * V),
        "embedding": Part(0.0, T * D * (full + 2 * half) + full * N * V * D),
        "adamw": Part(0.0, full * 8 * params),
    }


def floor_s(parts: dict[str, Part], peak: float, rate: float) -> float:
    """Seconds: each part takes the longer of its FLOPs at `peak` FLOP/s and its bytes at `rate` bytes/s, in turn.

    The roofline model (Williams, Waterman, Patterson 2009) applied to each part, summed, because a device works on one
    part at a time. No kernel reaches the peaks of a data sheet: large bf16 products run at about 80 % of 989 TFLOP/s
    on an H200, copies at 90 % of its bandwidth, attention far lower.
    """
    return sum(max(part.flops / peak, part.bytes / rate) for part in parts.values())


def of(model: Any, targets: int, workers: int, device_kind: str, devices: int = 1) -> dict[str, float] | None:
    """Floor of an update on `devices` equal devices, in ms: in all, by FLOPs alone, by bytes alone; None if unknown."""
    peak, rate = flops.peak_flops(device_kind), bandwidth(device_kind)
    if peak is None or rate is None:
        return None
    work = parts(model, targets, workers)
    total = Part(sum(p.flops for p in work.values()), sum(p.bytes for p in work.values()))
    return {
        "floor_ms": 1e3 * floor_s(work, peak, rate) / devices,
        "flops_ms": 1e3 * total.flops / peak / devices,
        "bytes_ms": 1e3 * total.bytes / rate / devices,
    }
