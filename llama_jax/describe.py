"""What a run says before it starts and when it is done; as a command, what a config asks for, without starting it.

python -m llama_jax.describe --config=configs/c4_20m.py [--device="NVIDIA H200"] [--config.FIELD=VALUE ...]

The command starts no device: it takes seconds, on any machine. --device is a device kind as JAX shows it (NVIDIA GH200,
Tesla T4, TPU v5 lite, cpu), for an NVIDIA GPU that isn't known with its compute capability ("NVIDIA X,8.9"); without
it, what this machine has.
"""

import contextlib
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from llama_jax import budget, data, flops, memory, network, optimizer, runtime, shards
from llama_jax import config as configs
from llama_jax import step as steps
from llama_jax.build import Built
from llama_jax.data import Source
from llama_jax.errors import ConfigError, run_command
from llama_jax.fields import command_parser, find
from llama_jax.runtime import Device

TPU_FILES = ("/dev/accel0", "/dev/vfio/0")  # of the first chip: up to v4, and later ones


def before(built: Built, source: Source, update: int, changes: Sequence[str]) -> list[str]:
    """What a run says before it starts."""
    config, derived, device = built.config, built.config.derived, jax.devices()[0]
    passes = derived.total_sequences / source.sequences
    lines = [
        f"{config.name}: {derived.unique_params:,} parameters ({derived.non_embedding_params:,} without embeddings), "
        f"{derived.total_targets:,} targets in {derived.total_updates:,} updates, {derived.epochs} virtual epochs",
        f"device {device.device_kind} x {built.mesh.size}, JAX {jax.__version__}: "
        + ", ".join(f"{key} {value}" for key, value in built.resolved.items()),
        f"data {source.sequences:,} sequences of {source.targets} targets, {passes:.2f} passes; "
        f"{source.validation_sequences:,} validation sequences",
    ]
    if config.model.init_from:
        lines.append(f"initial weights of {config.model.init_from}")
    if device.platform == "gpu":
        lines[2:2] = [f"auto: {line}" for line in _reasons(config, runtime.present())]
    if source.entropy is not None:
        lines.append(f"entropy of the language {source.entropy:.4f} nats per target: no model can do better")
    if config.decentralized.workers > 1:
        lines.append(_workers(config))
    if update:
        lines.append(f"continues after update {update:,}")
    return lines + [f"changed since the last start: {change}" for change in changes]


def after(path: Path, result: dict[str, Any]) -> list[str]:
    """What a finished run says; path is its folder."""
    loss, bits = result["validation_loss"], result["bits_per_byte"]
    text = f"done: {result['targets']:,} targets in {result['updates']:,} updates"
    if loss is not None:
        text += f", validation loss {loss:.4f} nats" + ("" if bits is None else f", {bits:.4f} bits per byte")
    if result["entropy"] is not None:
        text += f" (entropy of the language {result['entropy']:.4f})"
    return [text, f"results in {path}"]


def _workers(config: Any) -> str:
    fields = config.decentralized
    changed = [f"{n} {v}" for n, v in fields.network.items() if v != find(f"decentralized.network.{n}").default]
    return (
        f"{fields.workers} workers, {fields.topology} ({fields.pairing}), {fields.scheme}, "
        f"adaptive consensus {fields.adaptive.mode}"
        + (f", outer step every {fields.sync_every} updates" if fields.sync_every else "")
        + (f", mixed moments {fields.mix_moments}" if fields.mix_moments != "none" else "")
        + (f", network: {', '.join(changed)}" if changed else "")
    )


def _reasons(config: Any, device: Device) -> list[str]:
    choices, reasons = runtime.choose(config, device)
    return [f"{field} {choices[field]}, because {reason}" for field, reason in reasons.items()]


# The command.


def device_named(text: str) -> Device:
    """The device of a kind as JAX shows it, or of "KIND,CAPABILITY". Raises ConfigError for an unknown NVIDIA GPU."""
    kind, _, capability = (part.strip() for part in text.partition(","))
    if kind.lower() == "cpu":
        return Device("cpu", "cpu")
    if kind.upper().startswith("TPU"):
        return Device("tpu", kind)
    number = re.fullmatch(r"(\d+)\.(\d+)", capability)
    if capability and not number:
        raise ConfigError(f"--device={text}: {capability!r} is no compute capability such as 9.0")
    found: tuple[int, int] | None = None if capability else flops.of_kind(flops.CAPABILITY, kind)
    found = (int(number[1]), int(number[2])) if number else found
    if not kind or found is None:
        raise ConfigError(
            f"--device={text}: a GPU whose compute capability isn't known; add it, as in --device='{kind or 'X'},8.9'"
        )
    return Device("gpu", kind, found)


def device_here() -> Device:
    """What this machine has, without starting it: an NVIDIA GPU by nvidia-smi, TPU chips by their files, or the CPU."""
    if smi := shutil.which("nvidia-smi"):
        words = [smi, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
        lines = []
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # it can't run, or hangs on a broken driver
            lines = subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.splitlines()
        if lines and re.fullmatch(r".+, *\d+\.\d+", lines[0]):
            return device_named(lines[0])
    if any(map(os.path.exists, TPU_FILES)):
        return Device("tpu", "TPU")
    return Device("cpu", "cpu")


def sections(config: Any, device: Device) -> Iterator[tuple[str, list[str]]]:
    """(heading, lines) about a finalized config on a device. Raises ConfigError and DataError as a run would."""
    network.check(config)
    choices, _ = runtime.choose(config, device)
    yield "model", _model(config.model)
    yield "budget", _budget(config)
    yield "learning rate", _rates(config)
    yield "device", _device(config, device, choices)
    yield "memory of a device", _memory(config, choices)
    yield "workers", _topology(config)
    yield "data", _data(config)


def _model(model: Any) -> list[str]:
    shapes = flops.parameter_shapes(model)
    first, rest = "model.layers.0.", "model.layers."
    own = {name: shape for name, shape in shapes.items() if name.startswith(first) or not name.startswith(rest)}
    lines, unique, outside = [], flops.unique_params(model), flops.non_embedding_params(model)
    for name, shape in own.items():
        times = model.layers if name.startswith(first) else 1
        label = f"model.layers.0-{times - 1}.{name.removeprefix(first)}" if times > 1 else name
        count = f"{times} x {math.prod(shape):,}" if times > 1 else f"{math.prod(shape):,}"
        lines.append(f"{label:<48} {' x '.join(map(str, shape)):>14} {count:>18}")
    return [
        *lines,
        f"{unique:,} unique parameters: {unique - outside:,} in vocabulary matrices"
        + (" (tied, counted once)" if model.tied else "")
        + f", {outside:,} without them",
        f"{flops.flops_per_target(model):,.0f} FLOPs per target (6 N; attention scores and recomputation not counted)",
    ]


def _budget(config: Any) -> list[str]:
    derived, plan = config.derived, configs.make_plan(config)
    edges = [0, *plan.boundaries]
    short = sum((b - a) % plan.batch_sequences > 0 for a, b in itertools.pairwise(edges))
    return [
        f"{derived.total_targets:,} targets = {derived.total_sequences:,} sequences of {plan.context:,}, "
        f"{derived.total_targets / derived.unique_params:.4g} per parameter",
        f"{derived.total_updates:,} updates of {plan.batch_sequences * plan.context:,} targets "
        f"(workers x microbatches x sequences: {config.decentralized.workers} x {derived.accumulation} x "
        f"{config.training.microbatch}), {short} of them shorter, at the end of a virtual epoch",
        f"{derived.epochs} virtual epochs of {derived.epoch_targets:,} targets",
        f"{flops.flops_per_target(config.model) * derived.total_targets:.4g} FLOPs in all",
    ]


def update_end(plan: budget.Plan, position: int) -> int:
    """Where the update ends that trains sequence `position` (one-based, up to the total), in sequences."""
    epoch = plan.epoch(position - 1)
    start = plan.boundaries[epoch - 1] if epoch else 0
    return min(start + -(-(position - start) // plan.batch_sequences) * plan.batch_sequences, plan.boundaries[epoch])


def _rates(config: Any) -> list[str]:
    plan, schedule = configs.make_plan(config), config.lr_schedule
    if schedule.warmup_steps is not None:
        warmup = float(schedule.warmup_steps * config.training.batch_targets)
    else:
        warmup = schedule.warmup_fraction * config.derived.total_targets
    total, peaks = plan.total_sequences, configs.per_worker(config, "lr")
    lines = []
    for label, sequence in (
        ("first update", 1),
        ("end of the warm-up", min(max(1, math.ceil(warmup / plan.context)), total)),
        ("half of the budget", -(-total // 2)),
        ("last update", total),
    ):
        end = update_end(plan, sequence)
        rates = [optimizer.learning_rate(config, end * plan.context, peak) for peak in dict.fromkeys(peaks)]
        lines.append(f"{label:<20} update {plan.updates_until(end):>9,}   {', '.join(f'{rate:.6g}' for rate in rates)}")
    return [f"{schedule.name}, peak {', '.join(f'{peak:g}' for peak in dict.fromkeys(peaks))}", *lines]


def _device(config: Any, device: Device, choices: dict[str, str]) -> list[str]:
    capability = f", compute capability {device.capability[0]}.{device.capability[1]}" if device.capability else ""
    worker, spread, peak = config.runtime.mesh_worker, config.runtime.mesh_data, flops.peak_flops(device.kind)
    devices = f"{worker * spread} device{'s' * (worker * spread > 1)}"
    lines = [
        f"{device.kind}{capability}; mesh worker {worker} x data {spread}: {devices}",
        ", ".join(f"{field} {value}" for field, value in choices.items()),
        *(f"auto: {line}" for line in _reasons(config, device)),
    ]
    if config.runtime.device not in ("auto", device.platform):
        lines.append(f"runtime.device = {config.runtime.device}: a run would not start on this {device.platform}")
    if peak is None:
        return [*lines, f"peak of {device.kind} unknown: no MFU"]
    note = "" if choices["compute_dtype"] == "bfloat16" else "; float32 products are slower"
    hours = flops.flops_per_target(config.model) * config.derived.total_targets / (peak * worker * spread) / 3600
    return [
        *lines,
        f"peak {peak / 1e12:,.0f} TFLOP/s each (16 bits, dense, data sheet{note}): {hours:.3g} h at an MFU of 100 %",
    ]


def _memory(config: Any, choices: dict[str, str]) -> list[str]:
    rows = runtime.chunk_rows(config)
    found = memory.parts(config, choices, rows)
    lines = [f"{name:<20} {memory.text(size):>10}" for name, size in found.items()]
    total, evaluating = sum(found.values()), memory.evaluation(config, choices, rows)
    evaluates = config.data.source != "rows" or config.data.validation_rows > 0
    here = config.decentralized.workers // config.runtime.mesh_worker
    return [
        *lines,
        f"{'training, in all':<20} {memory.text(total):>10}   for {here} worker{'s' * (here > 1)}",
        f"{'evaluating, in all':<20} {memory.text(evaluating) if evaluates else 'never':>10}",
        *(f"assumed: {text}" for text in memory.ASSUMPTIONS),
    ]


def _data(config: Any) -> list[str]:
    derived, fields, path = config.derived, config.data, Path(config.data.path)
    needed, command, missing = f"{derived.total_targets + 1:,} training tokens for one pass", "prepare", False
    if fields.source == "cache":
        group = fields.shuffle_group_size * shards.SHARD_TOKENS
        needed += f"; prepare --config makes {-(-derived.total_targets // group) * group + 1:,}"
        path, missing = path / shards.MANIFEST, bool(fields.path) and not (path / shards.MANIFEST).exists()
    elif fields.source == "rows":
        needed = f"{derived.total_sequences:,} rows of {config.model.context:,} tokens"
        command, missing = "sft_rows", bool(fields.path) and not path.exists()
    if missing:
        return [f"needed: {needed}", f"present: nothing, {path} is missing: python -m data_pipeline.{command}"]
    source = data.open_source(config)
    passes = derived.total_sequences / source.sequences
    found = f"{source.sequences:,} sequences, so " + (
        f"{passes:.2f} passes" if passes > 1 else f"{passes:.2f} of a pass"
    )
    if source.entropy is not None:
        found = f"the synthetic language, entropy {source.entropy:.4f} nats per target"
    elif source.manifest is not None:
        found = f"{source.manifest.splits['train'].tokens:,} tokens, {found}"
    subset = min(source.validation_sequences, config.evaluation.subset_sequences)
    return [
        f"needed: {needed}",
        f"present: {found}",
        f"validation: {source.validation_sequences:,} sequences, {subset:,} of them after each virtual epoch",
    ]


def _topology(config: Any) -> list[str]:
    schedule, fields = steps.make_schedule(config), config.decentralized
    if fields.workers == 1:
        return ["1: ordinary training"]
    left = schedule.contraction()
    effect = "averages exactly" if schedule.exact else f"leaves up to {left:.3g} of the workers' distance"
    return [
        _workers(config),
        f"a cycle of {schedule.period} updates {effect}; a worker receives from {schedule.peers:g} others an update, "
        f"{memory.text(schedule.traffic(config.derived.unique_params))} if each were a device",
    ]


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = command_parser("llama_jax.describe", __doc__)
    parser.add_argument("--device", metavar="KIND", help="describe it on this device; default: what is here")
    parser.add_argument("--debug", action="store_true", help="print a traceback with an error")

    def command() -> None:
        file, overrides, rest = configs.parse_arguments(arguments)
        options = parser.parse_args(rest)
        if file is None:
            raise ConfigError("--config=FILE is required, for example --config=configs/c4_20m.py")
        config = configs.load(file, overrides)
        if options.device is not None:
            device = device_named(options.device)
        else:
            device = Device("cpu", "cpu") if config.runtime.device == "cpu" else device_here()
        print(f"{config.name} ({file})")
        for heading, lines in sections(config, device):
            print(f"\n{heading}", *(f"  {line}" for line in lines), sep="\n")

    return run_command(command, debug="--debug" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
