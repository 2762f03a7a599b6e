"""What a run says before it starts and when it is done."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from llama_jax.build import Built
from llama_jax.data import Source
from llama_jax.fields import find


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
    if source.entropy is not None:
        lines.append(f"entropy of the language {source.entropy:.4f} nats per target: no model can do better")
    if config.decentralized.workers > 1:
        fields = config.decentralized
        network = [f"{n} {v}" for n, v in fields.network.items() if v != find(f"decentralized.network.{n}").default]
        lines.append(
            f"{fields.workers} workers, {fields.topology} ({fields.pairing}), {fields.scheme}, "
            f"adaptive consensus {fields.adaptive.mode}"
            + (f", outer step every {fields.sync_every} updates" if fields.sync_every else "")
            + (f", mixed moments {fields.mix_moments}" if fields.mix_moments != "none" else "")
            + (f", network: {', '.join(network)}" if network else "")
        )
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
