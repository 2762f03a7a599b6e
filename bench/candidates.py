"""Execution choices that the throughput benchmark tries: which, in which order, and the config file of the chosen one.

A candidate changes how a recipe is executed, never the recipe: CHOICES is all that it may set. Needs no JAX.
"""

import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from llama_jax import config as configs
from llama_jax import fields
from llama_jax.errors import ConfigError

FLAGS = "xla_flags"  # the one choice that is no config field: flags for XLA, set before JAX starts
CHOICES = (
    "training.microbatch",
    "model.kernels",
    "model.head_chunk_rows",
    "model.attention",
    "model.head",
    "model.scan_layers",
    "model.remat",
    "runtime.jit",
    FLAGS,
)
MARK = "Chosen by bench/throughput.py"

Axes = dict[str, list[Any]]


class Candidate(NamedTuple):
    """Values of some CHOICES, and a name of those that differ from the config."""

    name: str
    settings: dict[str, Any]


def changed(config: Any, settings: Mapping[str, Any]) -> Any:
    """The finalized config with other values; FLAGS is left out. Raises ConfigError."""
    stored = configs.to_dict(config)
    for path, value in settings.items():
        if path != FLAGS:
            *sections, key = path.split(".")
            holder = stored
            for section in sections:
                holder = holder[section]
            holder[key] = value
    return configs.from_dict(stored)


def values_of(config: Any) -> dict[str, Any]:
    """What a config says of each choice."""
    return {path: get(config, path) for path in CHOICES if path != FLAGS} | {FLAGS: ""}


def get(config: Any, path: str) -> Any:
    """The value of a dotted field."""
    for key in path.split("."):
        config = config[key]
    return config


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """FIELD=V1,V2 of the command line; the value of xla_flags is one set of flags. Raises ConfigError."""
    path, equals, values = text.partition("=")
    if not equals or path not in CHOICES:
        raise ConfigError(f"--axis={text}: FIELD=VALUE,VALUE with a field of {', '.join(CHOICES)}")
    if path == FLAGS:
        return path, ["", values]
    field = fields.find(path)
    words = values.split(",")
    typed = [word if field.type is str else fields.from_text(path, field, word) for word in words]
    return path, [fields.checked(path, field, value) for value in typed]


def default_axes(config: Any, quick: bool) -> Axes:
    """What is tried, the choices that decide most first. Anything else, jit off for example, is asked for by name.

    Without jit every operation is dispatched by itself, which is slower by orders of magnitude.
    """
    own = config.training.microbatch
    if quick:
        return {
            "training.microbatch": [own, max(1, own // 4)],
            "model.kernels": ["auto", "xla"],
            "model.attention": ["auto", "xla"],
        }
    return {
        "training.microbatch": [own, *(size for size in (128, 32, 16, 8, 4) if size != own)],
        "model.kernels": ["auto", "xla"],
        "model.head_chunk_rows": [8192, 16384, 32768, 65536, 131072],
        "model.attention": ["auto", "xla"],
        "model.head": ["auto", "plain"],
        "model.scan_layers": [False, True],
        "model.remat": [False, True],
        # The step's own compiler options (runtime.compiler_options) stand above flags.
        FLAGS: ["", "--xla_gpu_enable_command_buffer="],
    }


class Search:
    """One axis after the other, each from the fastest candidate so far: iterate, and call `tell` for each.

    A candidate that is the program of one before it is passed over.
    """

    def __init__(self, config: Any, axes: Axes) -> None:
        self.config, self.axes, self.own = config, axes, values_of(config)
        self.best: tuple[float, Candidate] | None = None  # ms of an update
        self._seen: list[dict[str, Any]] = []
        self._auto: dict[str, str] = {}

    def tell(self, candidate: Candidate, found: Mapping[str, Any]) -> None:
        """The outcome of a candidate (trial.run): how fast it is, and what its `auto` became."""
        if found["measured"]:
            resolved = {f"model.{key}": value for key, value in found["measured"]["resolved"].items()}
            self._auto |= {path: value for path, value in resolved.items() if candidate.settings.get(path) == "auto"}
        if found["status"] == "measured":
            update_ms = found["measured"]["update_ms"]
            if self.best is None or update_ms < self.best[0]:
                self.best = (update_ms, candidate)

    def __iter__(self) -> Iterator[Candidate]:
        yield from self._new(self.own)
        for path, values in self.axes.items():
            start = self.best[1].settings if self.best else self.own
            for value in values:
                yield from self._new(start | {path: value})

    def _new(self, settings: dict[str, Any]) -> Iterator[Candidate]:
        program = self._program(settings)
        if all(self._program(other) != program for other in self._seen):
            self._seen.append(settings)
            yield Candidate(self._name(settings), settings)

    def _program(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings that are equal for equal programs, as far as it is known what `auto` becomes here."""
        known = {path: self._auto.get(path, value) if value == "auto" else value for path, value in settings.items()}
        # A chunk of more rows than the workers of a device have in a microbatch is one of all of them.
        runtime, workers = self.config.runtime, self.config.decentralized.workers
        sequences = settings["training.microbatch"] * workers // (runtime.mesh_worker * runtime.mesh_data)
        rows = sequences * self.config.model.context
        return known | {"model.head_chunk_rows": min(settings["model.head_chunk_rows"], rows)}

    def _name(self, settings: dict[str, Any]) -> str:
        different = {path: value for path, value in settings.items() if value != self.own[path]}
        words = (f"{path.split('.')[-1]}={value}" for path, value in different.items() if path != FLAGS)
        return " ".join(itertools.chain(words, [different[FLAGS]] if FLAGS in different else [])) or "as configured"


def preset(config: Any, name: str, flags: str, resolved: Mapping[str, str], found: Sequence[str]) -> str:
    """Source of a config file: all fields of `config` that are no defaults, what `auto` became, flags for XLA.

    found: paragraphs of its docstring on how it was chosen.
    """
    chosen = {f"model.{key}": resolved[key] for key in ("attention", "head", "kernels")}
    default, lines = configs.default(), []
    for path in fields.FIELDS:
        value = chosen.get(path, get(config, path))
        if path == "name":
            value = name
        if value != get(default, path):
            literal = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
            lines.append(f"    config.{path} = {literal}")
    if flags:
        lines += [
            "    # XLA reads its flags when JAX starts, which is after this file is loaded.",
            f"    flags = {json.dumps(flags)}",
            '    if flags not in os.environ.get("XLA_FLAGS", ""):',
            "        os.environ[\"XLA_FLAGS\"] = f\"{os.environ.get('XLA_FLAGS', '')} {flags}\".strip()",
        ]
    first, *others = [textwrap.fill(paragraph, 118, break_on_hyphens=False) for paragraph in found]
    command = f"    python -m llama_jax.main --config=configs/{name}.py --workdir=runs/{name}"
    text = "\n\n".join([first, command, *others])
    imports = ("import os\n\n" if flags else "") + "from llama_jax.config import default\n"
    body = "\n".join(["    config = default()", *lines, "    return config"])
    return f'"""{text}\n"""\n\n{imports}\n\ndef get_config():\n{body}\n'
