"""What a difference between two recipes means: the class of every setting, and the swaps that need a component test.

A setting has exactly one class; what has none is an error for config fields and an objective change for everything else
(an XLA flag, a variable), so that nothing passes because nobody thought of it.

bookkeeping   names, paths, logs, evaluation: nothing of a step
structural    placement and packing: how the same sums are dealt out
swap          the same mathematics by another implementation; eligible with a passed component test
objective     everything else: another recipe, never eligible
image         versions and code: arms are compared on one image only

What `auto` became is compared, not the word: `model.attention` below stands for the implementation that ran.
"""

import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from bench import megatron
from llama_jax.fields import FIELDS

BOOKKEEPING, STRUCTURAL, SWAP, OBJECTIVE, IMAGE = "bookkeeping", "structural", "swap", "objective", "image"
ABSENT = "absent"  # a setting that only the other run has

CLASSES: dict[str, tuple[str, ...]] = {
    BOOKKEEPING: (
        "name",
        "model.init_from",
        "training.checkpoint_policy",
        "training.interval_epochs",
        "training.recovery_minutes",
        "data.path",
        "evaluation.subset_sequences",
        "evaluation.subset_seed",
        "evaluation.batch_sequences",
        "evaluation.full_at_end",
        "log.every_updates",
        "log.consensus_every",
        "log.tensorboard",
        "log.wandb",
        "runtime.compile_cache",
    ),
    STRUCTURAL: (
        "model.remat",
        "model.scan_layers",
        "training.microbatch",
        "data.prefetch_groups",
        "runtime.deterministic",
        "runtime.jit",
        "runtime.device",
        "runtime.host_threads",
        "runtime.mesh_worker",
        "runtime.mesh_data",
        "runtime.memory_fraction",
    ),
    SWAP: ("model.attention", "model.head", "model.head_chunk_rows", "model.kernels"),
    OBJECTIVE: (
        "seed",
        "model.vocab_size",
        "model.context",
        "model.layers",
        "model.width",
        "model.heads",
        "model.kv_heads",
        "model.ffn",
        "model.tied",
        "model.rope_theta",
        "model.rope_scaling",
        "model.rope_factor",
        "model.rope_low_freq",
        "model.rope_high_freq",
        "model.rope_original_context",
        "model.norm_eps",
        "model.init_std",
        "model.compute_dtype",
        "model.residual_dtype",
        "training.targets_per_parameter",
        "training.total_targets",
        "training.total_updates",
        "training.sequence_multiple",
        "training.epoch_targets_per_parameter",
        "training.batch_targets",
        "optimizer.lr",
        "optimizer.beta1",
        "optimizer.beta2",
        "optimizer.eps",
        "optimizer.weight_decay",
        "optimizer.clip_norm",
        "lr_schedule.name",
        "lr_schedule.warmup_steps",
        "lr_schedule.warmup_fraction",
        "lr_schedule.min_lr_ratio",
        "lr_schedule.decay_fraction",
        "decentralized.workers",
        "decentralized.topology",
        "decentralized.pairing",
        "decentralized.scheme",
        "decentralized.adaptive.mode",
        "decentralized.adaptive.start_frac",
        "decentralized.adaptive.p",
        "decentralized.adaptive.rho",
        "decentralized.adaptive.kappa",
        "decentralized.adaptive.min_gamma",
        "decentralized.adaptive.exclude",
        "decentralized.worker_lr",
        "decentralized.worker_beta1",
        "decentralized.worker_beta2",
        "decentralized.worker_weight_decay",
        "decentralized.sync_every",
        "decentralized.outer_lr",
        "decentralized.outer_momentum",
        "decentralized.outer_nesterov",
        "decentralized.mix_moments",
        "decentralized.network.dropout",
        "decentralized.network.outage_updates",
        "decentralized.network.outages",
        "decentralized.network.rejoin",
        "decentralized.network.stragglers",
        "decentralized.network.slowdown",
        "decentralized.network.straggler_policy",
        "decentralized.network.compute_s",
        "decentralized.network.latency_s",
        "decentralized.network.bandwidth",
        "data.source",
        "data.shuffle_group_size",
        "data.validation_rows",
        "data.synthetic_branching",
        "data.synthetic_group_sequences",
        "data.synthetic_validation_sequences",
    ),
}

# Swaps: what a field may change between. Integers of head_chunk_rows are all allowed: they cut one sum elsewhere.
SWAPS: dict[str, tuple[str, ...] | type] = {
    "model.attention": ("reference", "xla", "cudnn"),
    "model.head": ("plain", "chunked"),
    "model.head_chunk_rows": int,
    "model.kernels": ("xla", "mosaic"),
    "resolved/gate": ("xla", "mosaic"),  # no fields: where model.kernels can have them
    "resolved/rotary": ("xla", "mosaic"),
}

# XLA flags that choose among schedules, algorithms of one product and memory limits. All others may change the results:
# xla_allow_excess_precision, fast-math flags.
STRUCTURAL_FLAGS = (
    "xla_force_host_platform_device_count",
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_all_reduce_combine_threshold_bytes",
    "xla_gpu_autotune_level",
    "xla_gpu_cublas_fallback",
    "xla_gpu_deterministic_ops",
    "xla_gpu_dot_merger_threshold_mb",
    "xla_gpu_enable_command_buffer",
    "xla_gpu_enable_cublaslt",
    "xla_gpu_enable_latency_hiding_scheduler",
    "xla_gpu_enable_triton_gemm",
    "xla_gpu_graph_level",
    "xla_gpu_graph_min_graph_size",
    "xla_gpu_memory_limit_slop_factor",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
)
# Variables: exact names, or beginnings of names.
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": BOOKKEEPING,
    "JAX_COMPILATION_CACHE_DIR": BOOKKEEPING,
    "JAX_PLATFORMS": BOOKKEEPING,
    "NCCL_": STRUCTURAL,
    "XLA_PYTHON_CLIENT_": STRUCTURAL,
}


def class_of(path: str) -> str:
    """The class of a setting by its name in settings()."""
    for name, paths in CLASSES.items():
        if path in paths:
            return name
    if path in SWAPS:
        return SWAP
    part, _, name = path.partition("/")
    if part in ("xla_flags", "compiler_options") and name in STRUCTURAL_FLAGS:
        return STRUCTURAL
    if part == "variables":
        for prefix, found in VARIABLES.items():
            if name == prefix or (prefix.endswith("_") and name.startswith(prefix)):
                return found
    if part == "arguments":
        return STRUCTURAL if name in megatron.STRUCTURAL else OBJECTIVE
    if part in ("versions", "code"):
        return IMAGE
    return STRUCTURAL if path in ("device/count", "device/driver") else OBJECTIVE


def parse_flags(text: str) -> dict[str, str]:
    """XLA_FLAGS as {name: value}, without dashes; a flag without a value is true, the last of several counts."""
    words = (word.lstrip("-").partition("=") for word in shlex.split(text))
    return {name: value if equals else "true" for name, equals, value in words}


def settings(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was set in a run, flat: config fields by their paths, the rest as part/name.

    A field that the config lacks, being newer than the record, has its default.
    """
    environment, stack = measured["environment"], measured["stack"]
    if stack["framework"] in megatron.FRAMEWORKS:
        flat = {f"arguments/{name}": value for name, value in measured["config"].items()}
    else:
        flat = _fields(flatten(measured["config"]), measured["resolved"])
    for part in ("xla_flags", "compiler_options", "variables", "jax"):
        flat |= {f"{part}/{name}": value for name, value in environment[part].items()}
    flat |= {f"versions/{name}": value for name, value in stack["versions"].items()}
    flat |= {"code/sha256": stack["code_sha256"]}
    return flat | {f"device/{name}": measured["device"][name] for name in ("kind", "count", "driver")}


def _fields(config: Mapping[str, Any], resolved: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a config by their paths, with what `auto` became."""
    flat: dict[str, Any] = {path: config.get(path, field.default) for path, field in FIELDS.items()}
    flat |= {path: value for path, value in config.items() if not path.startswith("derived.")}
    flat |= {f"model.{name}" if f"model.{name}" in FIELDS else f"resolved/{name}": x for name, x in resolved.items()}
    flat["model.kv_heads"] = flat["model.kv_heads"] or flat["model.heads"]
    if resolved["head"] == "plain":
        del flat["model.head_chunk_rows"]  # it has no chunks
    return flat


def anonymous(word: str) -> str:
    """A word of a command line; a path from the root, which only this machine has, is left with its last name."""
    name, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    return f"{name}{equals}DIR/{PurePath(value).name}" if value.startswith("/") else word


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted paths."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type, at every depth: True is not 1, 1 is not 1.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def changes(reference: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Settings that differ between two runs: field, from, to, class; "absent" for one that only the other has.

    A swap to or from a value that SWAPS doesn't name is an objective change.
    """
    before, after = settings(reference), settings(recipe)
    found = []
    for path in [*before, *(path for path in after if path not in before)]:
        old, new = before.get(path, ABSENT), after.get(path, ABSENT)
        if same(old, new):
            continue
        kind = class_of(path)
        if kind == SWAP:
            allowed = SWAPS[path]
            values = (value for value in (old, new) if value != ABSENT)
            good = (type(value) is allowed if isinstance(allowed, type) else value in allowed for value in values)
            kind = SWAP if all(good) else OBJECTIVE
        found.append({"field": path, "from": old, "to": new, "class": kind})
    return found


def components(measured: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The implementations that a run of llama_jax used, by component: what its tests compare."""
    if measured["stack"]["framework"] in megatron.FRAMEWORKS:
        return {}
    flat = settings(measured)
    head = {"head": flat["model.head"]}
    if flat["model.head"] == "chunked":
        head |= {"chunk_rows": flat["model.head_chunk_rows"], "kernels": flat["model.kernels"]}
    return {
        "attention": {"attention": flat["model.attention"]},
        "head": head,
        "norm": {"kernels": flat["model.kernels"]},
        "mlp": {"gate": flat["resolved/gate"]},
        "projections": {"rotary": flat["resolved/rotary"]},
    }


def needed(reference: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The component tests that the swaps between two runs need: component, a (of the reference), b (of the recipe)."""
    before, after = components(reference), components(recipe)
    pairs = [{"component": name, "a": before[name], "b": after[name]} for name in before if name in after]
    return [pair for pair in pairs if not same(pair["a"], pair["b"])]
