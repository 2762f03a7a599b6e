"""What a run needs of each device's memory, by part, from its config alone. Pure Python: no JAX.

Letters: N workers of a device, T tokens of a worker's microbatch on a device, S context, V vocabulary, D width, F
feed-forward width, H query heads, K key/value width, L layers, P parameters of an arena row, c bytes of the compute
dtype, R rows of a chunk of the head.
"""

import math
from collections.abc import Mapping
from typing import Any

from llama_jax import flops

ASSUMPTIONS = (
    "all of it is in memory at once, as it nearly is at the head; activations are what the gradient needs",
    "checked: 20M, 128 rows on an H200, 13.5 GiB here and 13.6 measured; 16 rows compiled for a TPU v5e, 5.3 and 5.2",
    "checked: rows of 8,192 on an H200, 360M, 4 rows, 32.2 and 32.9; 1B, one row, recomputed layers, 28.1 and 28.0",
    "allow a fifth for temporary arrays, on CPUs, which fuse less, two to three times as much in all",
)
FULL, ROW_ALIGNMENT = 4, 1024  # bytes of float32; elements, as in arena.py


def parts(config: Any, choices: Mapping[str, str], chunk_rows: int) -> dict[str, int]:
    """Bytes of each part on one device while it trains; `choices` and `chunk_rows` as runtime gives them."""
    model, runtime, training = config.model, config.runtime, config.training
    N, accumulation = config.decentralized.workers // runtime.mesh_worker, config.derived.accumulation
    rows, S, V = training.microbatch // runtime.mesh_data, model.context, model.vocab_size
    T, c = rows * S, _bytes(choices["compute_dtype"])
    P = -(-flops.unique_params(model) // ROW_ALIGNMENT) * ROW_ALIGNMENT
    R = min(chunk_rows, T)
    packed = config.decentralized.workers > 1
    found = {
        "parameters": FULL * N * P,
        "moments": 2 * FULL * N * P,
        "gradients": FULL * N * P * (2 if accumulation > 1 else 1),  # with accumulation the sum and those of one part
        "mixing": FULL * N * P if packed else 0,  # the rows of peers
        "outer step": 2 * FULL * P if config.decentralized.sync_every else 0,  # where they met, and the momentum
        "activations": N * _activations(model, choices, T),
        "attention scores": N * _scores(model, choices, T),
        # Logits and their gradient; the plain head keeps those of all tokens, and float32 statistics of them.
        "logits": N * (R * V * 2 * c if choices["head"] == "chunked" else T * V * (c + 2 * FULL)),
        # The update that runs and the one after it.
        "batch": 2 * N * accumulation * rows * ((S + 1) * _id_bytes(config) + FULL),
    }
    return {name: size for name, size in found.items() if size}


def evaluation(config: Any, choices: Mapping[str, str], chunk_rows: int) -> int:
    """Bytes on one device while it evaluates the mean model, the training state included."""
    model, runtime = config.model, config.runtime
    T = config.evaluation.batch_sequences // runtime.mesh_data * model.context
    c, training = _bytes(choices["compute_dtype"]), parts(config, choices, chunk_rows)
    kept = sum(training.get(name, 0) for name in ("parameters", "moments", "outer step", "batch"))
    # A layer at a time: the stream and the largest of what it makes; of attention one square.
    width = 2 * model.width + max(3 * model.ffn, 4 * model.width)
    squares = FULL * T * model.context * model.heads if choices["attention"] != "cudnn" else 0
    logits = min(chunk_rows, T) * model.vocab_size * c
    return kept + FULL * flops.unique_params(model) + T * width * c + max(squares, logits)


def _activations(model: Any, choices: Mapping[str, str], T: int) -> int:
    """Of one worker.

    Each layer keeps its two normalized inputs, queries, keys, values, the attention's result, gate, up and their
    product; with remat only its input, and one layer's rest while that is differentiated.
    """
    D, F, H, c = model.width, model.ffn, model.heads, _bytes(choices["compute_dtype"])
    K = D // H * (model.kv_heads or H)
    stream = D * _bytes(choices["residual_dtype"])
    layer = (4 * D + 2 * K + 3 * F) * c + FULL * 2 + (FULL * H if choices["attention"] == "cudnn" else 0)
    ends = stream + 2 * D * c  # embedded tokens, the final states and their gradient
    if model.remat:
        return T * (model.layers * stream + layer + ends)
    return T * (model.layers * layer + ends)


def _scores(model: Any, choices: Mapping[str, str], T: int) -> int:
    """Of one worker: cuDNN keeps none; others the weights of each layer, and float32 scores and gradients of one."""
    if choices["attention"] == "cudnn":
        return 0
    kept = 1 if model.remat else model.layers
    return T * model.context * model.heads * (kept * _bytes(choices["compute_dtype"]) + 2 * FULL)


def _bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else FULL


def _id_bytes(config: Any) -> int:
    """As in shards.dtype_for; rows of conversations are 32 bits wide."""
    return 2 if config.model.vocab_size <= 65_536 and config.data.source != "rows" else 4


def text(size: float) -> str:
    """Bytes for people."""
    power = min(3, int(math.log(max(size, 1), 1024)))
    return f"{size / 1024**power:.{0 if not power else 1 if power < 3 else 2}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
