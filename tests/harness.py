"""Runs of a tiny model for the tests of the training loop: in this process, or as the real command with faults.

The tiny run: 3,632 parameters, context 16, 140 sequences in 10 updates of 16 and three virtual epochs of 56, 57 and 27
sequences, so that the updates at their ends hold 8, 9 and 11. Compiled programs are shared between runs (in this
process by keeping them, between processes by JAX's compile cache); everything else is the real thing.
"""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import conftest
import numpy as np

from llama_jax import build as builds
from llama_jax import checkpoint, network, shards, train
from llama_jax import config as configs
from llama_jax.errors import Preempted

ROOT = Path(__file__).resolve().parent.parent
TIMES = {"targets_per_s", "targets_per_s_all", "mfu", "eta_s", "wall_s", "eval_s", "peak_memory_bytes"}
SEQUENCES = 140
SIZES = [16, 16, 16, 8, 16, 16, 16, 9, 16, 11]  # sequences of each update
ENDS = [4, 8, 10]  # updates that end a virtual epoch
TINY = {
    "model.vocab_size": 64,
    "model.context": 16,
    "model.layers": 1,
    "model.width": 16,
    "model.heads": 2,
    "model.ffn": 32,
    "training.targets_per_parameter": None,
    "training.total_targets": SEQUENCES * 16 + 15,  # not whole sequences: the rest is not trained
    "training.epoch_targets_per_parameter": 0.25,
    "training.batch_targets": 256,
    "training.microbatch": 16,
    "lr_schedule.warmup_steps": 3,
    "data.source": "synthetic",
    "data.synthetic_group_sequences": 64,
    "data.synthetic_validation_sequences": 40,
    "evaluation.subset_sequences": 20,
    "evaluation.batch_sequences": 16,
    "log.every_updates": 3,
}


def tiny(changes=None, **more):
    """The finalized config of the tiny run with changed fields; keywords write a dot as two underscores."""
    config = configs.default()
    given = {name.replace("__", "."): value for name, value in more.items()}
    for field, value in {**TINY, **(changes or {}), **given}.items():
        configs.set_field(config, field, value)
    return configs.finalize(config)


def write_cache(directory, seed=0, train_tokens=777, validation_tokens=651, shard_tokens=160):
    """A real token cache of 64 ids: 5 training shards of 10 sequences, so groups of 20, 20 and 8, 48 a pass."""
    random = np.random.default_rng(seed)
    content = {"dtype": "<u2", "shard_tokens": shard_tokens, "seed": 1, "sources": [{"name": "made up"}], "splits": {}}
    for split, tokens in (("train", train_tokens), ("validation", validation_tokens)):
        writer = shards.ShardWriter(directory, split, "<u2", shard_tokens)
        steps = random.integers(0, 4, tokens)
        writer.append((np.cumsum(steps) % 64).astype(np.uint16))
        content["splits"][split] = {
            "tokens": tokens,
            "documents": 1,
            "utf8_bytes": 4 * tokens,
            "shards": list(writer.finish()),
        }
    tokenizer = b'{"added_tokens": []}'
    (Path(directory) / "tokenizer.json").write_bytes(tokenizer)
    content["tokenizer"] = {
        "kind": "bpe",
        "name": "made up",
        "sha256": hashlib.sha256(tokenizer).hexdigest(),
        "vocab_size": 64,
        "eos_id": 0,
        "bos_id": None,
        "file": "tokenizer.json",
    }
    shards.write_manifest(directory, content)
    return Path(directory)


class KeptBuilds:
    """Stands for build.build: step and evaluation of configs that need the same programs are compiled once."""

    def __init__(self):
        self.kept = {}

    def __call__(self, config):
        built, runtime = builds.build(config), config.runtime
        program = [
            {**config.model, "init_from": ""},
            runtime.deterministic,
            runtime.jit,
            runtime.mesh_worker,
            runtime.mesh_data,
        ]
        packed = configs.to_dict(config)["decentralized"]
        adaptive = packed["adaptive"]
        # The rest becomes an argument of the step, as worker_lr; a gamma on the device is another kind of argument.
        packed["adaptive"] = [adaptive["exclude"], adaptive["mode"] == "target"]
        packed["network"] = [network.changes_training(config), packed["network"]["rejoin"]]
        for field in ("worker_lr", "sync_every", "outer_lr", "outer_momentum", "outer_nesterov"):
            del packed[field]
        step = [*program, {**config.optimizer, "lr": None}, packed]
        evaluation = [*program, config.evaluation.batch_sequences]
        return built._replace(
            step=self.keep(["step", *step], built.step),
            evaluate=self.keep(["evaluate", *evaluation], built.evaluate),
            measure=self.keep(["measure", *step], built.measure),
            control=self.keep(["control", *step, adaptive, config.derived.total_updates], built.control),
        )

    def keep(self, key, function):
        return self.kept.setdefault(json.dumps(key, sort_keys=True), function)


KEPT = KeptBuilds()


def run(config, workdir, stop=lambda: None):
    """train.run in this process with kept programs."""
    with mock.patch.object(train, "build", KEPT):
        return train.run(config, workdir, stop)


class StopAfter:
    """A `stop` that asks for the end at its k-th call, and from then on at each."""

    def __init__(self, k, error=Preempted):
        self.k, self.error, self.asked = k, error, 0

    def __call__(self):
        self.asked += 1
        return self.error("test") if self.asked >= self.k else None


@dataclasses.dataclass
class Ended:
    """A process that ended: exit code (negative: the signal), output, and the faults that fired in it."""

    code: int
    out: str
    err: str
    fired: list


class Commands:
    """Starts the command in processes of its own, which share a compile cache.

    quick: they compile as this process does, with little optimization, for runs that are compared with one in it.
    """

    def __init__(self, directory, quick=False):
        self.directory = Path(directory)
        self.quick = quick
        self.count = 0

    def environment(self, fault=None, **more):
        """The variables of a process, and the file where it notes the faults that fired."""
        self.count += 1
        fired = self.directory / f"fired-{self.count}"
        inherited = dict(os.environ)
        if not self.quick:
            del inherited["JAX_DISABLE_MOST_OPTIMIZATIONS"]
            flags = inherited.get("XLA_FLAGS", "").split()
            inherited["XLA_FLAGS"] = " ".join(flag for flag in flags if flag != conftest.OLD_EMITTERS)
        variables = {
            **inherited,
            "PYTHONPATH": str(ROOT),
            "JAX_COMPILATION_CACHE_DIR": str(self.directory / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "LLAMA_JAX_TEST_FAULT_FIRED": str(fired),
            **more,
        }
        if fault:
            variables["LLAMA_JAX_TEST_FAULT"] = fault
        return variables, fired

    def start(self, module, *arguments, fault=None, python=(sys.executable,), **more):
        """Starts a command; its output goes to pipes."""
        variables, fired = self.environment(fault, **more)
        words = [*python, "-m", module, *map(str, arguments)]
        process = subprocess.Popen(
            words, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        process.fired = fired
        return process

    def end(self, process):
        """Waits for a started command."""
        out, err = process.communicate(timeout=240)
        fired = process.fired.read_text().split() if process.fired.exists() else []
        return Ended(process.returncode, out, err, fired)

    def run(self, module, *arguments, **options):
        return self.end(self.start(module, *arguments, **options))

    def train(self, config, workdir, *arguments, **options):
        """Runs `python -m llama_jax.main` on a finalized config."""
        return self.end(self.start_train(config, workdir, *arguments, **options))

    def start_train(self, config, workdir, *arguments, **options):
        return self.start(
            "llama_jax.main", f"--config={self.save(config)}", f"--workdir={workdir}", *arguments, **options
        )

    def save(self, config):
        """Writes a finalized config as JSON and returns its path."""
        text = json.dumps(configs.to_dict(config), sort_keys=True)
        path = self.directory / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        path.write_text(text)
        return path


def arrays(workdir, update=None):
    """{name: bytes} of the newest or a given checkpoint, verified."""
    found = checkpoint.Checkpoints(Path(workdir) / "checkpoints", None, read_only=True).read(update)
    return {name: np.asarray(array).tobytes() for name, array in found.arrays.items()}


def meta(workdir):
    """What the newest checkpoint says beside its arrays, without times."""
    found = checkpoint.Checkpoints(Path(workdir) / "checkpoints", None, read_only=True).read()
    return timeless({"update": found.update, "kind": found.kind, **found.meta})


def kept(workdir):
    """(update, kind) of the checkpoints in a run folder."""
    saved = checkpoint.Checkpoints(Path(workdir) / "checkpoints", None, read_only=True)
    return [(entry.update, entry.kind) for entry in saved.entries()]


def timeless(value):
    """JSON content without the fields that hold times, at any depth."""
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if key not in TIMES}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


def strict(text):
    """Parses JSON, refusing NaN and Infinity."""

    def refuse(word):
        raise AssertionError(f"{word} in JSON")

    return json.loads(text, parse_constant=refuse)


def lines(workdir, kind=None):
    """The lines of metrics.jsonl, all or those of one kind; the file must end with a whole line."""
    text = (Path(workdir) / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    found = [strict(line) for line in text.splitlines()]
    return [line for line in found if kind in (None, line["kind"])]


def outcome(workdir):
    """Everything that must be equal between two runs of one recipe: all but times."""
    workdir = Path(workdir)
    return {
        "arrays": {name: hashlib.sha256(data).hexdigest() for name, data in arrays(workdir).items()},
        "meta": meta(workdir),
        "metrics": timeless(lines(workdir)),
        "best": timeless(strict((workdir / "best.json").read_text())),
        "result": timeless(strict((workdir / "result.json").read_text())),
        "export": hashlib.sha256((workdir / "exports/final/model.safetensors").read_bytes()).hexdigest(),
    }


def tree(workdir):
    """{name: SHA-256} of all files of a run folder but the lock, and the names of its directories."""
    workdir = Path(workdir)
    files = {str(path.relative_to(workdir)): path for path in workdir.rglob("*") if path.name != ".lock"}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "" for name, path in files.items()
    }
