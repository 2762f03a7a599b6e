"""Trains the 20 steps of a recipe and makes its record: the measured run, which is its convergence arm too.

Import after runtime.prepare(config). A step is the trainer's own: rows from its loader, the copy to the device, the
compiled update, and a wait for everything that the update computes. Nothing else happens between two stamps.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from bench import measure, record, timing
from bench.active_params import active_of_model, active_params
from bench.measure import STEPS
from bench.recipe_fields import ABSENT, parse_flags
from bench.record import NOT_PINNED, PATHS, Workload
from llama_jax import config as configs
from llama_jax import data, flops, optimizer, rows, run_folder, runtime
from llama_jax.build import Built, build
from llama_jax.errors import ConfigError, DataError, NonFiniteError
from llama_jax.files import read_json

CODE = Path(flops.__file__).parent  # the trainer: its sources are part of what names a run's software
JAX_SETTINGS = (
    "jax_debug_nans", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_disable_jit",
    "jax_disable_most_optimizations", "jax_enable_x64", "jax_numpy_dtype_promotion", "jax_threefry_partitionable",
)  # fmt: skip
LIBRARIES = {"cuda": "nvidia-cuda-runtime", "cudnn": "nvidia-cudnn", "nccl": "nvidia-nccl"}
_VARIABLES = re.compile(
    r"JAX_\w+|XLA_PYTHON_CLIENT_\w+|NCCL_\w+|CUBLAS\w*|CUDNN\w*|NVIDIA_TF32_OVERRIDE|CUDA_VISIBLE_DEVICES"
)
_SMI = ("clocks.sm", "temperature.gpu", "power.draw", "clocks_event_reasons.active")


class About(NamedTuple):
    """What is said of a run rather than measured; see record.SCHEMA."""

    id: str | None = None
    status: str = "recipe"
    author: str = "The llama_jax authors"
    author_link: str | None = None
    reference_public: bool = True
    model: str | None = None
    revision: str | None = None
    commit: str | None = None
    network: str = NOT_PINNED
    notes: Sequence[str] = ()
    command: str = "python -m bench.recipe run"
    admitted: float | None = None  # by a scheduler, seconds since 1970
    started: float | None = None  # of the process
    trace: Path | None = None


def check_config(config: Any, workload: Workload) -> None:
    """Raises ConfigError unless the config is that of a recipe on this workload."""
    training, derived = config.training, config.derived
    wrong = {
        "data.source": (config.data.source, "rows"),
        "training.total_updates": (training.total_updates, STEPS),
        "model.context": (config.model.context, workload.row_length),
        "training.batch_targets, in rows,": (derived.batch_sequences, workload.rows),
        "decentralized.workers": (config.decentralized.workers, 1),
    }
    for name, (found, needed) in wrong.items():
        if found != needed:
            raise ConfigError(f"{name} is {found}: a recipe on {workload} needs {needed}")
    sizes = set(configs.make_plan(config).sizes())
    if sizes != {workload.rows}:
        raise ConfigError(f"an update has {min(sizes)} rows: raise training.epoch_targets_per_parameter")


def run(config: Any, about: About, workload: Workload = record.PROTOCOL) -> dict[str, Any]:
    """Measures a finalized config on the present device -> its record, with no checks.

    Raises ConfigError for a config that is no recipe, DataError for its rows, NonFiniteError for an update that was
    refused, DeviceError.
    """
    begin = about.started or time.time()
    check_config(config, workload)
    said = _said(config, about, begin)  # before the training, so that a slip doesn't cost it
    source = data.open_source(config)
    rows_made = _rows(Path(config.data.path), workload)
    if source.sequences < STEPS * workload.rows:  # what is held out is no part of them
        raise DataError(
            f"{config.data.path}: {source.sequences:,} rows to train on, the {STEPS} steps take "
            f"{STEPS * workload.rows:,}: lower data.validation_rows, or build more rows"
        )
    with runtime.device_errors("lower training.microbatch or set model.remat"):
        built = build(config)
        before = _smi()
        stamps, metrics, init = _train(built, source, about.trace)
        after = _smi()
    norms = [float(found.grad_norm[0]) for found in metrics]
    refused = next((step for step, found in enumerate(metrics) if not found.ok), None)
    if refused is not None:
        sums = f"sum of losses {float(metrics[refused].loss_sum[0])}, gradient norm {norms[refused]}"
        raise NonFiniteError(f"step {refused}: {sums}; lower optimizer.lr")
    losses = [float(found.loss_sum[0]) / int(found.targets[0]) for found in metrics]
    software = stack(about.commit)
    arm = {
        "losses": losses[:STEPS],
        "grad_norms": norms[:STEPS],
        "learning_rates": record.learning_rates(config),
        "rows_sha256": rows_made["rows_sha256"],
        "init_sha256": init,
        "image": record.image(software),
    }
    measured_run = measure.run_record([stamps], workload.tokens, built.mesh.size)
    admitted, admitted_by = _admitted(about.admitted, begin)
    measured = {
        **said,
        "rows": rows_made,
        "workload": workload._asdict(),
        "device": _device(built, about.network, before, after),
        "stack": software,
        "environment": environment(),
        "conventions": {
            "cv_ddof": measure.CV_DDOF,
            "step_time": "difference of completion stamps, waiting for input included",
            "loss": "float32 sums over all targets of a step, before its update",
            "attention": "across the conversations of a row",
        },
        "config": _anonymous(configs.to_dict(config)),
        "resolved": dict(built.resolved),
        "invariants": record.invariants(config, built.resolved, arm),
        "run": measured_run,
        "arm": arm,
        "gpu_time": {"admitted": admitted, "finished": time.time(), "admitted_by": admitted_by},
        "figures": measure.figures(measured_run),
    }
    return record.new(measured)


def _said(config: Any, about: About, begin: float) -> dict[str, Any]:
    """The parts of a record that the run doesn't measure. Raises ConfigError for what a record can't hold."""
    created = datetime.now(UTC).replace(microsecond=0)
    said = {
        "id": about.id or f"{re.sub(record.NO_NAME, '_', config.name) or 'recipe'}-{created:%Y%m%dT%H%M%SZ}",
        "status": about.status,
        "created": f"{created:%Y-%m-%dT%H:%M:%SZ}",
        "author": {"name": about.author, "link": about.author_link},
        "reference_public": about.reference_public,
        "model": _model(config, about),
        "command": about.command,
        "notes": list(about.notes),
    }
    if wrong := record.problem_said(said):
        raise ConfigError(wrong)
    if not about.network:
        raise ConfigError("network: it is empty")
    if about.admitted is not None and not 0 < about.admitted <= begin:
        raise ConfigError(f"admitted {about.admitted}: seconds since 1970 are needed, before the run began")
    return said


def _train(built: Built, source: data.Source, trace: Path | None) -> tuple[list[int], list[Any], str]:
    """(stamps, metrics of each step on the host, sha256 of the initial parameters)."""
    config, mixing, state = built.config, built.mixing(), built.initial_state()
    init = hashlib.sha256(np.ascontiguousarray(np.asarray(state.params_NP[0]), "<f4").data).hexdigest()
    loader = data.Loader(source, config.seed, 0, config.data.prefetch_groups, config.runtime.host_threads)
    steps, count, found = (measure.MOST_STEPS if trace else STEPS), config.derived.batch_sequences, []
    batch: Any = None
    with contextlib.ExitStack() as profiler:

        def update(step: int) -> Any:
            nonlocal state, batch
            if trace:
                _profile(step, trace, profiler)
            if step < STEPS:  # what comes later is no step of the run: only its time is looked at, on the last batch
                batch = built.place(loader.next(count))
            ends = config.training.batch_targets * (min(step, STEPS - 1) + 1)
            lr_N = np.asarray([optimizer.learning_rate(config, ends)]).astype(np.float32)
            state, metrics = built.step(state, batch, lr_N, mixing(min(step, STEPS - 1), None))
            found.append(metrics)
            return state, metrics

        try:
            with jax.disable_jit(not config.runtime.jit):
                stamps = measure.timed_steps(update, steps)
        finally:
            loader.close()
    return stamps, [jax.tree.map(np.asarray, metrics) for metrics in found], init


def _profile(step: int, folder: Path, profiler: contextlib.ExitStack) -> None:
    """Sets the profiler up in step 20, which it records nowhere, lets step 21 pass, and records from step 22."""
    if step == STEPS:
        scratch = profiler.enter_context(tempfile.TemporaryDirectory(prefix="llama_jax_trace_"))
        profiler.enter_context(jax.profiler.trace(scratch))
    elif step == STEPS + 1:
        profiler.close()
    elif step == measure.PROFILED_FROM:
        profiler.enter_context(jax.profiler.trace(str(folder)))


def _rows(path: Path, workload: Workload) -> dict[str, Any]:
    """The rows of the 20 steps, hashed from the file, and what rows.json beside it says they were made of."""
    path = path / "rows.parquet" if path.is_dir() else path
    count = STEPS * workload.rows
    with contextlib.closing(rows.RowsFile(path)) as file:
        digest, length = file.sha256(count), file.row_length
    beside = path.parent / rows.RECORD
    try:
        made_of = read_json(beside) if beside.exists() else None
    except ValueError as error:
        raise DataError(f"{beside}: not JSON, {error}") from None
    if made_of is not None and not isinstance(made_of, dict):
        raise DataError(f"{beside}: not a JSON object")
    if made_of and made_of.get("rows") == count and made_of.get("rows_sha256") != digest:
        raise DataError(f"{path}: its rows are not those of {rows.RECORD} beside it; build it again")
    return {"rows_sha256": digest, "rows": count, "row_length": length, "made_of": made_of}


def _model(config: Any, about: About) -> dict[str, Any]:
    folder = getattr(config.model, "init_from", "")
    counted = active_of_model(config.model)
    if folder and active_params(folder)["active_parameters"] != counted:
        raise DataError(f"{folder}: its tensors have another number of active parameters than the config, {counted:,}")
    return {
        "name": about.model or (Path(folder).resolve().name if folder else config.name),
        "checkpoint": "$HF_CKPT" if folder else None,
        "revision": about.revision,
        "active_params": counted,
        "parameters": flops.unique_params(config.model),
    }


def _device(built: Built, network: str, before: str | None, after: str | None) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "count": built.mesh.size,
        "per_node": jax.local_device_count(),
        "network": network,
        "driver": timing.environment()["driver"],
        **timing.memory(),
        "before": before,
        "after": after,
    }


def stack(commit: str | None) -> dict[str, Any]:
    found = run_folder.environment()
    versions = {name: version or NOT_PINNED for name, version in found["versions"].items() if name != "llama_jax"}
    for package in importlib.metadata.distributions():
        name = (package.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith(("nvidia-", "jax")):
            versions[name] = package.version
    for label, prefix in LIBRARIES.items():
        ours = sorted(version for name, version in versions.items() if name.startswith(prefix))
        versions[label] = ", ".join(ours) or NOT_PINNED
    code = hashlib.sha256()
    for path in sorted(CODE.rglob("*.py")):
        code.update(path.relative_to(CODE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return {
        "framework": "llama_jax",
        "commit": commit or found["git_commit"] or NOT_PINNED,
        "code_sha256": code.hexdigest(),
        "versions": {"python": platform.python_version()} | dict(sorted(versions.items())),
    }


def environment() -> dict[str, Any]:
    secret = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
    return {
        "xla_flags": parse_flags(os.environ.get("XLA_FLAGS", "")),
        "compiler_options": dict(runtime.compiler_options() or {}),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if value and _VARIABLES.fullmatch(name) and not secret.search(name)
        },
        "jax": {name: _plain(_setting(name)) for name in JAX_SETTINGS},
    }


def _setting(name: str) -> Any:
    """The value in force; what has a context manager can't be read(), and some others can be read() only."""
    try:
        return getattr(jax.config, name) if hasattr(jax.config, name) else jax.config.read(name)
    except AttributeError:  # of another version of JAX
        return ABSENT


def _plain(value: Any) -> Any:
    """A setting as JSON: some versions of JAX have enumerations where others have their names."""
    return value if type(value) in (bool, int, float, str, type(None)) else str(getattr(value, "value", value))


def _anonymous(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with variables for the paths of this machine."""
    config = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    for path, variable in PATHS.items():
        section, key = path.split(".")
        if config[section].get(key):
            config[section][key] = variable
    return config


def _admitted(given: float | None, begin: float) -> tuple[float, str]:
    """When the scheduler admitted the run, and who says so."""
    if given is not None:
        return given, "argument"
    text = os.environ.get("SLURM_JOB_START_TIME", "")
    if text.isdecimal() and 0 < int(text) <= begin:
        return float(text), "scheduler"
    return begin, "process"


def _smi() -> str | None:
    """Clocks, temperature, power and throttle reasons of all GPUs; None where nvidia-smi isn't there."""
    words = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(done.stdout.split("\n")).strip("; ") or None
