"""Configs: from a preset file and overrides to checked settings and the numbers derived from them. Needs no JAX.

The settings themselves stand in `fields.py`. `load()` reads a file of `configs/`, applies overrides and returns a
finalized, locked ConfigDict whose `derived` part holds the exact budget.
"""

import importlib.util
import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, config_dict

from llama_jax import budget, flops
from llama_jax.errors import ConfigError
from llama_jax.fields import FIELDS, checked, find, from_text
from llama_jax.fields import parse_arguments as parse_arguments
from llama_jax.hf_config import shape_fields


def default() -> ConfigDict:
    """All fields with their defaults, as a locked ConfigDict (get_config() of a preset starts here)."""
    config = ConfigDict()
    for path, field in FIELDS.items():
        *sections, key = path.split(".")
        holder = config
        for section in sections:
            if section not in holder:
                holder[section] = ConfigDict()
            holder = holder[section]
        if field.kind is None:
            holder[key] = field.default
        else:  # optional: None and values of its type are both allowed
            holder[key] = config_dict.placeholder(field.kind)
            holder[key] = field.default
    return config.lock()


def load(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ConfigDict:
    """The finalized config of a preset file (`get_config()`) or a resolved config.json, with dotted overrides applied.

    Raises ConfigError naming file, field and range.
    """
    path = Path(path)
    if not os.path.isfile(path):  # False for a name that is too long, where Path.is_file() raises
        raise ConfigError(f"config file {path} does not exist")
    if path.suffix == ".json":
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            stored = stored.get("config", stored)
            stored.items()
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"config file {path} is not a JSON object: {error}") from error
        config = _from_plain(stored)
    else:
        spec = importlib.util.spec_from_file_location(f"llama_jax_config_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"config file {path} must be a .py or .json file")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            config = module.get_config()
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"config file {path}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"config file {path}: get_config() must return a ConfigDict")
    for field, value in (overrides or {}).items():
        set_field(config, field, value)
    if config.model.init_from:
        _take_shape(config, overrides or {})
    return finalize(config)


def _take_shape(config: ConfigDict, overrides: Mapping[str, Any]) -> None:
    """Puts the shape that the folder model.init_from has into the config; ConfigError where an override differs."""
    folder, name = config.model.init_from, "config.model."
    for field, value in shape_fields(folder).items():
        before = config.model[field]
        set_field(config, f"model.{field}", value)
        if f"model.{field}" in overrides and before != value:
            raise ConfigError(f"--{name}{field} = {before}, but {folder} has {value}; leave it out: the folder decides")


def set_field(config: ConfigDict, path: str, value: Any) -> None:
    """Sets a dotted field to a typed value or to its text form ("None" empties an optional field).

    Raises ConfigError for an unknown field, a wrong type or a value out of range.
    """
    field = find(path)
    if isinstance(value, str) and field.type is not str:
        value = from_text(path, field, value)
    value = checked(path, field, value)
    *sections, key = path.split(".")
    holder = config
    for section in sections:
        holder = holder[section]
    holder[key] = value


def finalize(config: ConfigDict) -> ConfigDict:
    """Checks every field and every relation between fields, and adds `derived`. Returns a new locked ConfigDict.

    Raises ConfigError naming the field and its range. Idempotent.
    """
    plain = config.to_dict()
    plain.pop("derived", None)
    values = _flatten(plain)
    missing = sorted(set(FIELDS) - set(values))
    for path in values:
        find(path)
    if missing:
        raise ConfigError(f"config lacks the field {missing[0]}; start from llama_jax.config.default()")
    result = default()
    for path, value in values.items():
        set_field(result, path, value)
    derived = _derive(result)
    with result.unlocked():
        result.derived = ConfigDict(derived)
    return result.lock()


def make_plan(config: ConfigDict) -> budget.Plan:
    """The update plan of a finalized config, in sequences over all workers."""
    training = config.training
    try:
        return budget.make_plan(
            flops.unique_params(config.model),
            sequence_targets(config),
            training.batch_targets // sequence_targets(config),
            training.sequence_multiple,
            training.epoch_targets_per_parameter,
            training.targets_per_parameter,
            training.total_targets,
            training.total_updates,
        )
    except ValueError as error:
        raise ConfigError(f"training: {error}") from error


def sequence_targets(config: ConfigDict) -> int:
    """Prediction targets of a sequence: model.context; one less in rows, the last token of which has none."""
    return config.model.context - (config.data.source == "rows")


def to_dict(config: ConfigDict) -> dict[str, Any]:
    """Plain nested dictionary of all fields and derived numbers, ready for JSON."""
    return json.loads(json.dumps(config.to_dict()))


def from_dict(stored: Mapping[str, Any]) -> ConfigDict:
    """The finalized config of what to_dict() gave. Raises ConfigError on unknown or missing fields."""
    return finalize(_from_plain(stored))


def diff(old: Mapping[str, Any], new: Mapping[str, Any], execution: bool = False) -> list[tuple[str, Any, Any]]:
    """Fields that differ between two to_dict() results as (field, old, new), in the order of FIELDS.

    Recipe fields only, unless `execution` asks for the execution-only ones too; "absent" stands for a missing field.
    """
    before, after = _flatten(old), _flatten(new)
    paths = [*FIELDS, *sorted((before.keys() | after.keys()) - FIELDS.keys())]
    result = []
    for path in paths:
        if path.startswith("derived.") or (path in FIELDS and FIELDS[path].execution and not execution):
            continue
        a, b = before.get(path, "absent"), after.get(path, "absent")
        if a != b or type(a) is not type(b):
            result.append((path, a, b))
    return result


def _derive(config: ConfigDict) -> dict[str, int]:
    """Relations between fields, then the exact numbers of the run."""
    model, training, runtime = config.model, config.training, config.runtime
    workers = config.decentralized.workers

    def require(condition: bool, field: str, message: str) -> None:
        if not condition:
            raise ConfigError(f"{field} {message}")

    def exactly_one(section: str, names: Sequence[str]) -> None:
        chosen = [name for name in names if config[section][name] is not None]
        require(
            len(chosen) == 1,
            f"{section}: exactly one of {', '.join(names)}",
            f"must be set, not {len(chosen)}"
            + (f" ({', '.join(chosen)}); empty one with --config.{section}.{chosen[0]}=None" if chosen else ""),
        )

    params = flops.unique_params(model)
    require(params < 2**31 - 1024, "model", f"has {params} parameters, a row of the arenas holds fewer than 2^31")
    require(model.width % model.heads == 0, "model.heads", f"= {model.heads} must divide model.width = {model.width}")
    head = model.width // model.heads
    require(head % 2 == 0, "model.heads", f"= {model.heads} gives head size {head}, which must be even")
    kv_heads = model.kv_heads or model.heads
    require(model.heads % kv_heads == 0, "model.kv_heads", f"= {kv_heads} must divide model.heads = {model.heads}")
    require(
        model.rope_scaling == "none" or model.rope_low_freq < model.rope_high_freq,
        "model.rope_low_freq",
        f"= {model.rope_low_freq} must be below model.rope_high_freq = {model.rope_high_freq}",
    )
    exactly_one("training", ["targets_per_parameter", "total_targets", "total_updates"])
    exactly_one("lr_schedule", ["warmup_steps", "warmup_fraction"])

    row = sequence_targets(config) * workers
    require(
        training.batch_targets % row == 0,
        "training.batch_targets",
        f"= {training.batch_targets} must be a multiple of "
        f"{'(context - 1)' if config.data.source == 'rows' else 'context'} x workers = {row}",
    )
    local = training.batch_targets // row
    require(
        training.microbatch <= local and local % training.microbatch == 0,
        "training.microbatch",
        f"= {training.microbatch} must divide the {local} sequences that a worker has in an update",
    )
    require(
        training.microbatch % runtime.mesh_data == 0,
        "runtime.mesh_data",
        f"= {runtime.mesh_data} must divide training.microbatch = {training.microbatch}",
    )
    require(
        workers % runtime.mesh_worker == 0,
        "runtime.mesh_worker",
        f"= {runtime.mesh_worker} must divide decentralized.workers = {workers}",
    )
    multiple = training.sequence_multiple
    near = sorted({multiple // workers * workers, -(-multiple // workers) * workers} - {0})
    require(
        multiple % workers == 0,
        "training.sequence_multiple",
        f"= {multiple} must be a multiple of decentralized.workers = {workers}, or a virtual epoch would end between "
        f"the workers' sequences; the nearest: {' or '.join(map(str, near))}",
    )
    _pattern(config.decentralized.adaptive.exclude)
    if config.decentralized.adaptive.mode == "target":  # what depends on the topology's cycle: control.make_control
        fields = config.decentralized
        name, every, floor = fields.topology, fields.sync_every, fields.adaptive.min_gamma
        for field, value, good, reason in (
            ("workers", workers, workers > 1, "must be at least 2: one worker is at no distance from others"),
            ("topology", name, name != "disconnected", "must mix: otherwise gamma changes nothing"),
            ("sync_every", every, every == 0, "must be 0: an outer step makes all workers equal"),
            ("adaptive.min_gamma", floor, 0 < floor < 1, "must be between 0 and 1, such as 0.0001"),
        ):
            require(good, f"decentralized.{field}", f"= {value}: with decentralized.adaptive.mode = target it {reason}")
    for name in ("lr", "beta1", "beta2", "weight_decay"):
        per_worker(config, name)
    require(
        config.evaluation.batch_sequences % runtime.mesh_data == 0,
        "evaluation.batch_sequences",
        f"= {config.evaluation.batch_sequences} must be a multiple of runtime.mesh_data = {runtime.mesh_data}",
    )
    require(
        not (runtime.deterministic and model.attention in ("cudnn", "xla")),
        "model.attention",
        f"= {model.attention} can't be used with runtime.deterministic, which needs auto or reference",
    )
    require(
        not (runtime.deterministic and model.head == "chunked"),
        "model.head",
        "= chunked can't be used with runtime.deterministic, which needs auto or plain",
    )
    plan = make_plan(config)
    schedule = config.lr_schedule
    if schedule.warmup_steps is not None:
        warmup = schedule.warmup_steps * training.batch_targets
        require(
            warmup <= plan.total_targets,
            "lr_schedule.warmup_steps",
            f"= {schedule.warmup_steps} updates are {warmup} targets, more than the budget of {plan.total_targets}; "
            "set lr_schedule.warmup_steps=None and lr_schedule.warmup_fraction",
        )
    return {
        "unique_params": params,
        "non_embedding_params": flops.non_embedding_params(model),
        "total_targets": plan.total_targets,
        "total_sequences": plan.total_sequences,
        "total_updates": plan.total_updates,
        "epochs": len(plan.boundaries),
        "epoch_targets": plan.boundaries[0] * plan.context,
        "batch_sequences": plan.batch_sequences,
        "sequence_targets": plan.context,
        "accumulation": local // training.microbatch,
        "head_size": head,
        "kv_heads": kv_heads,
    }


def per_worker(config: ConfigDict, name: str) -> list[float]:
    """A hyperparameter of `optimizer` (lr, beta1, beta2, weight_decay) for each worker [N].

    Raises ConfigError when decentralized.worker_NAME isn't N numbers in the range of optimizer.NAME.
    """
    workers, path = config.decentralized.workers, f"decentralized.worker_{name}"
    text = config.decentralized[f"worker_{name}"]
    if not text:
        return [config.optimizer[name]] * workers
    field = find(f"optimizer.{name}")
    parts = text.split(",")
    if len(parts) != workers:
        raise ConfigError(f"{path} = {text!r} has {len(parts)} numbers, decentralized.workers is {workers}")
    try:
        values = [checked(path, field, from_text(path, field, part.strip())) for part in parts]
    except ConfigError as error:
        raise ConfigError(f"{error}; {path} = {text!r} must be {workers} numbers with commas between") from None
    return values


def _pattern(text: str) -> None:
    try:
        with warnings.catch_warnings(action="error"):  # of what Python may read differently one day
            re.compile(text)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"decentralized.adaptive.exclude = {text[:60]!r} is no regular expression: {reason}"
        ) from None


def _flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _from_plain(stored: Mapping[str, Any]) -> ConfigDict:
    values = _flatten({key: value for key, value in stored.items() if key != "derived"})
    config = default()
    for path in FIELDS:
        if path not in values:
            raise ConfigError(
                f"stored config lacks the field {path}, which is newer; write it into the stored config with the value "
                f"that changes nothing (the default is {FIELDS[path].default!r})"
            )
    for path, value in values.items():
        set_field(config, path, value)
    return config
