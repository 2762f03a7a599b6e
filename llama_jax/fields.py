"""Every setting of a run, once: default, allowed values, meaning. Needs no JAX.

A preset in `configs/` states only what differs from these defaults.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from ml_collections import config_dict

from llama_jax.errors import ConfigError


class Field(NamedTuple):
    """Default of a field, its allowed values and meaning.

    allowed: an interval such as "(0, 10]" for numbers, a tuple for choices, None for free text and booleans.
    kind: the type, needed only where the default is None (the field is optional).
    execution: a restart may change it; every other field belongs to the recipe.
    """

    default: Any
    allowed: str | tuple[str, ...] | None
    note: str
    execution: bool = False
    kind: type | None = None

    @property
    def type(self) -> type:
        return self.kind or type(self.default)


FIELDS: dict[str, Field] = {
    "name": Field("run", None, "name of the preset, shown in logs", execution=True),
    "seed": Field(42, "[0, 4294967295]", "initialization and data order"),
    # Model: a Llama decoder.
    "model.vocab_size": Field(32000, "[2, 1048576]", "token ids"),
    "model.context": Field(1024, "[2, 131072]", "tokens that the model reads of a sequence"),
    "model.layers": Field(8, "[1, 256]", "decoder blocks"),
    "model.width": Field(320, "[2, 65536]", "residual stream"),
    "model.heads": Field(5, "[1, 1024]", "query heads; the head size is width / heads, even"),
    "model.kv_heads": Field(
        None, "[1, 1024]", "key/value heads (grouped-query attention); None: as many as heads", kind=int
    ),
    "model.ffn": Field(896, "[1, 262144]", "SwiGLU inner width"),
    "model.tied": Field(True, None, "logits through the token embedding"),
    "model.rope_theta": Field(10000.0, "(1, 1e9]", "base of the rotary frequencies"),
    "model.rope_scaling": Field("none", ("none", "llama3"), "frequency scaling of Llama 3.1 and later"),
    "model.rope_factor": Field(8.0, "[1, 1024]", "llama3 scaling: factor"),
    "model.rope_low_freq": Field(1.0, "(0, 1024]", "llama3 scaling: low_freq_factor"),
    "model.rope_high_freq": Field(4.0, "(0, 1024]", "llama3 scaling: high_freq_factor"),
    "model.rope_original_context": Field(8192, "[1, 1048576]", "llama3 scaling: original_max_position_embeddings"),
    "model.norm_eps": Field(1e-5, "(0, 1)", "RMSNorm epsilon"),
    "model.init_std": Field(0.02, "(0, 10]", "normal init; residual projections divide it by sqrt(2 layers)"),
    "model.init_from": Field(
        "",
        None,
        "Hugging Face Llama folder of the initial weights, whose config.json replaces the fields above but context",
        execution=True,  # the folder may move; the hash of its weights belongs to the recipe
    ),
    "model.attention": Field(
        "auto", ("auto", "cudnn", "xla", "reference"), "auto: cudnn on NVIDIA where it can run, else xla"
    ),
    "model.head": Field(
        "auto", ("auto", "chunked", "plain"), "loss head: chunked has its own gradient, plain is autodiff"
    ),
    "model.head_chunk_rows": Field(
        32768, "[1, 16777216]", "tokens of one chunk of the chunked head, all workers of a device together"
    ),
    "model.kernels": Field(
        "auto",
        ("auto", "mosaic", "xla"),
        "row operations and the MLP's gate as Mosaic kernels (Hopper) or by XLA; auto: mosaic where it can",
    ),
    "model.compute_dtype": Field(
        "auto", ("auto", "bfloat16", "float32"), "auto: bfloat16 on accelerators, float32 on CPU"
    ),
    "model.residual_dtype": Field("compute", ("compute", "float32"), "dtype of the residual stream"),
    "model.remat": Field(False, None, "recompute each block in the backward pass"),
    "model.scan_layers": Field(False, None, "one scanned block instead of unrolled ones: compiles faster, runs slower"),
    # Budget and batch. Exactly one of the three budgets is set; the others are None.
    "training.targets_per_parameter": Field(20.0, "(0, 100000]", "budget in targets per unique parameter", kind=float),
    "training.total_targets": Field(
        None, "[1, 1000000000000000]", "budget in targets, rounded down to whole sequences", kind=int
    ),
    "training.total_updates": Field(None, "[1, 1000000000]", "budget in optimizer updates", kind=int),
    "training.sequence_multiple": Field(
        1, "[1, 65536]", "the budget and virtual epochs are multiples of this many sequences"
    ),
    "training.epoch_targets_per_parameter": Field(0.5, "(0, 100000]", "length of a virtual epoch"),
    "training.batch_targets": Field(131072, "[1, 1073741824]", "targets of a full update over all workers"),
    "training.microbatch": Field(
        128, "[1, 1048576]", "sequences of one forward pass of a worker; smaller than its batch: accumulation"
    ),
    "training.checkpoint_policy": Field(
        "final", ("final", "interval", "none"), "which checkpoints are retained", execution=True
    ),
    "training.interval_epochs": Field(
        1, "[1, 1000000]", "policy interval: every so many virtual epochs", execution=True
    ),
    "training.recovery_minutes": Field(10.0, "[0, 100000]", "time between recovery checkpoints", execution=True),
    # AdamW.
    "optimizer.lr": Field(0.0056, "(0, 100]", "peak learning rate"),
    "optimizer.beta1": Field(0.9, "[0, 1)", "decay of the first moment"),
    "optimizer.beta2": Field(0.98, "[0, 1)", "decay of the second moment"),
    "optimizer.eps": Field(1e-8, "(0, 1]", "added to the root of the second moment"),
    "optimizer.weight_decay": Field(0.1, "[0, 10]", "decoupled decay of matrices; norm scales have none"),
    "optimizer.clip_norm": Field(1.0, "[0, 1e9]", "global norm of the raw gradient of a worker; 0: no clipping"),
    # Schedule over the position in targets at the end of each update. Exactly one warm-up is set.
    "lr_schedule.name": Field("cosine", ("cosine", "wsd", "constant"), "shape after the linear warm-up"),
    "lr_schedule.warmup_steps": Field(312, "[0, 1000000000]", "warm-up in full updates' worth of targets", kind=int),
    "lr_schedule.warmup_fraction": Field(None, "[0, 1)", "warm-up as a fraction of the budget", kind=float),
    "lr_schedule.min_lr_ratio": Field(0.1, "[0, 1]", "last learning rate over the peak (cosine, wsd)"),
    "lr_schedule.decay_fraction": Field(
        0.2, "(0, 1]", "wsd: fraction of the budget over which the rate falls linearly"
    ),
    # Workers trained together on one accelerator.
    "decentralized.workers": Field(1, "[1, 1024]", "model replicas N; the budget is that of one"),
    "decentralized.topology": Field(
        "one_peer_exponential",
        ("complete", "one_peer_ring", "one_peer_exponential", "mixed_radix", "disconnected"),
        "who averages with whom at each update",
    ),
    "decentralized.pairing": Field(
        "directed", ("directed", "reciprocal"), "one-peer topologies: receive from a peer, or exchange with it"
    ),
    "decentralized.scheme": Field(
        "awc", ("awc", "atc"), "mix the parameters before (awc) or after (atc) the local AdamW"
    ),
    # Adaptive consensus: W' = gamma W + (1 - gamma) I. An experiment: the archived C4 runs show no gain from it.
    "decentralized.adaptive.mode": Field(
        "off",
        ("off", "lr_power", "target"),
        "lr_power: gamma = (lr / largest active lr)^p; target: gamma holds the workers' distance where it was",
    ),
    "decentralized.adaptive.start_frac": Field(0.5, "[0, 1]", "gamma is 1 before this fraction of the updates"),
    "decentralized.adaptive.p": Field(1.0, "[0, 100]", "lr_power: power of the learning-rate ratio"),
    "decentralized.adaptive.rho": Field(1.0, "(0, 100]", "target: distance to hold over the one before start_frac"),
    "decentralized.adaptive.kappa": Field(
        0.5, "(0, 2]", "target: once per cycle gamma *= (distance / target)^kappa; larger is faster and swings more"
    ),
    "decentralized.adaptive.min_gamma": Field(0.0, "[0, 1]", "floor of gamma; target needs one above 0"),
    "decentralized.adaptive.exclude": Field(
        "", None, "regular expression of tensor names that always mix with gamma 1"
    ),
    # Hyperparameters of each worker, N numbers separated by commas; empty: those of `optimizer`. With topology
    # disconnected a packed run is a sweep.
    "decentralized.worker_lr": Field("", None, "peak learning rate of each worker"),
    "decentralized.worker_beta1": Field("", None, "beta1 of each worker"),
    "decentralized.worker_beta2": Field("", None, "beta2 of each worker"),
    "decentralized.worker_weight_decay": Field("", None, "weight decay of each worker"),
    # Local steps with an outer optimizer (DiLoCo; FedAvg with outer_lr 1 and outer_momentum 0).
    "decentralized.sync_every": Field(0, "[0, 1000000000]", "updates between outer steps on the mean; 0: none"),
    "decentralized.outer_lr": Field(0.7, "(0, 10]", "learning rate of the outer step"),
    "decentralized.outer_momentum": Field(0.9, "[0, 1)", "momentum of the outer step"),
    "decentralized.outer_nesterov": Field(True, None, "Nesterov momentum in the outer step"),
    "decentralized.mix_moments": Field(
        "none", ("none", "first", "both"), "moments that are mixed as the parameters are: none, the first, or both"
    ),
    # A simulated network: workers that are away or slow (functions of the seed and the update), bytes and time.
    "decentralized.network.dropout": Field(
        0.0, "[0, 1)", "probability that a worker is away at an update; its sequences are skipped"
    ),
    "decentralized.network.outage_updates": Field(
        1, "[1, 1000000000]", "updates that an outage by chance lasts, or a multiple"
    ),
    "decentralized.network.outages": Field(
        "", None, "planned outages, worker:first-last update, separated by commas: 2:100-150,0:300-320"
    ),
    "decentralized.network.rejoin": Field(
        "keep",
        ("keep", "mean"),
        "a worker that is back has its old parameters and moments, or the mean of those that stayed and no moments",
    ),
    "decentralized.network.stragglers": Field(0.0, "[0, 1]", "probability that a worker is slow at an update"),
    "decentralized.network.slowdown": Field(2.0, "[1, 1000000]", "time that a slow worker's update takes, in updates"),
    "decentralized.network.straggler_policy": Field(
        "wait", ("wait", "skip"), "wait for slow workers, or leave them out of the exchange"
    ),
    "decentralized.network.compute_s": Field(0.0, "[0, 1000000]", "simulated seconds that a worker computes an update"),
    "decentralized.network.latency_s": Field(0.0, "[0, 1000000]", "simulated latency of a transfer in seconds"),
    "decentralized.network.bandwidth": Field(
        0.0, "[0, 1e18]", "simulated bytes a second that a worker receives; 0: no limit"
    ),
    # Data.
    "data.source": Field(
        "cache",
        ("cache", "rows", "synthetic"),
        "a prepared token cache, rows of conversations in their order, or the built-in Markov language",
    ),
    "data.path": Field("", None, "directory of the token cache; rows.parquet or its directory", execution=True),
    "data.shuffle_group_size": Field(2, "[1, 1024]", "shards shuffled together"),
    "data.prefetch_groups": Field(1, "[0, 1]", "groups loaded ahead in the background", execution=True),
    "data.validation_rows": Field(
        0, "[0, 1000000000]", "rows: the last so many are held out for validation; 0: no evaluation"
    ),
    "data.synthetic_branching": Field(4, "[2, 1024]", "synthetic: successors of a token"),
    "data.synthetic_group_sequences": Field(4096, "[1, 1048576]", "synthetic: sequences of a group"),
    "data.synthetic_validation_sequences": Field(1024, "[1, 1048576]", "synthetic: validation sequences"),
    # Evaluation.
    "evaluation.subset_sequences": Field(1024, "[1, 1000000]", "validation sequences at the end of each virtual epoch"),
    "evaluation.subset_seed": Field(12345, "[0, 4294967295]", "which ones"),
    "evaluation.batch_sequences": Field(128, "[1, 1048576]", "sequences of one forward pass", execution=True),
    "evaluation.full_at_end": Field(True, None, "whole validation split after the last update", execution=True),
    # Logs.
    "log.every_updates": Field(
        20, "[1, 1000000]", "updates between writes of the metrics and progress lines", execution=True
    ),
    "log.consensus_every": Field(50, "[1, 1000000]", "updates between consensus measurements", execution=True),
    "log.tensorboard": Field(False, None, "also write TensorBoard events", execution=True),
    "log.wandb": Field(False, None, "also log to Weights & Biases", execution=True),
    # Runtime.
    "runtime.deterministic": Field(
        False, None, "bitwise repeatable on an accelerator, slower; an error where impossible"
    ),
    "runtime.jit": Field(True, None, "False runs operation by operation, for debugging"),
    "runtime.device": Field(
        "auto", ("auto", "cpu", "gpu", "tpu"), "required platform; auto: the best present", execution=True
    ),
    "runtime.host_threads": Field(8, "[1, 1024]", "host threads that read and assemble batches", execution=True),
    "runtime.mesh_worker": Field(1, "[1, 1024]", "devices over which workers are spread", execution=True),
    "runtime.mesh_data": Field(
        1, "[1, 1024]", "devices over which the sequences of a microbatch are spread", execution=True
    ),
    "runtime.compile_cache": Field(
        "",
        None,
        "directory of compiled programs; empty: $LLAMA_JAX_COMPILE_CACHE, else ~/.cache/llama_jax",
        execution=True,
    ),
    "runtime.memory_fraction": Field(0.9, "(0, 1]", "share of the GPU memory that JAX takes", execution=True),
}


def find(path: str) -> Field:
    """The field of a dotted path. Raises ConfigError, with the closest name, when there is none."""
    if path not in FIELDS:
        close = difflib.get_close_matches(path, FIELDS, n=1)
        raise ConfigError(f"unknown config field {path}" + (f"; did you mean {close[0]}?" if close else ""))
    return FIELDS[path]


def describe(field: Field) -> str:
    """The allowed values in words, for messages."""
    allowed = f"one of {', '.join(field.allowed)}" if isinstance(field.allowed, tuple) else field.allowed
    if field.type in (int, float):
        allowed = f"{'an integer' if field.type is int else 'a number'} in {allowed}"
    elif field.type is bool:
        allowed = "True or False"
    return (allowed or "text") + (" or None" if field.kind else "")


def from_text(path: str, field: Field, text: str) -> Any:
    """The value that a command-line word stands for. Raises ConfigError when it isn't of the field's type."""
    if field.kind and text in ("None", "none", "null"):
        return None
    if field.type is bool:
        if text.lower() in ("true", "false", "1", "0"):
            return text.lower() in ("true", "1")
    else:
        try:
            return field.type(text)
        except ValueError:
            pass
    raise ConfigError(f"{path} = {text!r} is not {describe(field)}")


def checked(path: str, field: Field, value: Any) -> Any:
    """The value in the type of the field, or a ConfigError that names field and range."""
    if isinstance(value, config_dict.FieldReference):
        value = value.get()
    good = True
    if value is None:
        good = field.kind is not None
    elif field.type is float and isinstance(value, int | float) and not isinstance(value, bool):
        good = abs(value) <= sys.float_info.max  # False for NaN, infinities and integers that no float holds
        value = float(value) if good else value
    elif type(value) is not field.type:
        good = False
    if good and value is not None and isinstance(field.allowed, tuple):
        good = value in field.allowed
    elif good and value is not None and isinstance(field.allowed, str):
        low, high = (float(part) for part in field.allowed[1:-1].split(","))
        above = value >= low if field.allowed[0] == "[" else value > low
        below = value <= high if field.allowed[-1] == "]" else value < high
        good = above and below
    if not good:
        raise ConfigError(f"{path} = {value!r} is not {describe(field)}")
    return value


def command_parser(
    module: str, text: str | None, field: str = "sets a field; llama_jax/fields.py lists them"
) -> argparse.ArgumentParser:
    """The parser of a command that takes a config: its first two options are for --help, parse_arguments reads them."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="a file of configs/, or the config.json of a run")
    parser.add_argument("--config.FIELD", metavar="VALUE", help=field)
    return parser


def parse_arguments(arguments: Sequence[str]) -> tuple[str | None, dict[str, str], list[str]]:
    """Splits command-line words into (config file, dotted overrides, the rest).

    Takes --config=FILE and --config.FIELD=VALUE, with = or as two words. Raises ConfigError on a missing value.
    """
    file, overrides, rest = None, {}, []
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        name = name.replace("--", "", 1) if name.startswith("--") else name.removeprefix("-")
        if not word.startswith("-") or not (name == "config" or name.startswith("config.")):
            rest.append(word)
            continue
        if not equals:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"{word} needs a value: {word}=VALUE")
            value = words.pop(0)
        if name == "config":
            file = value
        else:
            overrides[name.removeprefix("config.")] = value
    return file, overrides, rest
