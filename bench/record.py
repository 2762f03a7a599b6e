"""Records of recipes: JSON that holds what a run measured and, once it is checked, what was compared.

    {"format": FORMAT, "sha256": of the canonical JSON of "measured", "measured": {...}, "checks": {...} or null}

`measured` is written once, by the run; SCHEMA says what stands in it, and nothing else may. Its sha256 names the record
wherever another one refers to it. Every number that can be computed from another is, and read() refuses a record whose
stated numbers its arrays and its config don't give: figures, learning rates, invariants, N, tokens. `checks` is written
by `bench.recipe check` and made anew from the records it names whenever it is shown.

Functions raise RecordError, one line. No device is needed.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from bench import measure, megatron, schema
from bench.active_params import active_of_model
from bench.convergence import read_arm
from bench.measure import STEPS, MeasureError
from bench.recipe_fields import flatten, same
from bench.schema import Free
from llama_jax import arena, flops, optimizer
from llama_jax import config as configs
from llama_jax.errors import ConfigError, DataError
from llama_jax.fields import FIELDS
from llama_jax.files import PathLike, canonical_json, read_json, write_json_atomic

FORMAT = "llama_jax.recipe.v1"
STATUSES = ("reference", "recipe", "calibration")  # calibration: another run of the reference, for its noise
NOT_PINNED = "not pinned"  # a version that nothing shows
NO_NAME = r"[^\w.+-]"  # what an id doesn't hold
PATHS = {"data.path": "$SFT_DATA", "model.init_from": "$HF_CKPT", "runtime.compile_cache": "$CACHE"}
CLIP_RULE = "global norm of the gradient of a worker's mean loss"
LOSS_DENOMINATOR = "targets of the update"


class RecordError(DataError):
    """A record that isn't one, or that contradicts itself."""


class Workload(NamedTuple):
    """What a step trains on. The protocol's is PROTOCOL; others can be measured and compared among themselves."""

    rows: int
    row_length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.row_length

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.row_length:,} tokens"


PROTOCOL = Workload(128, 8192)


def parse_workload(text: str) -> Workload:
    """The workload of a word such as 128x8192."""
    found = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", text)
    if not found:
        raise ConfigError(f"--workload={text}: ROWSxLENGTH, such as {PROTOCOL.rows}x{PROTOCOL.row_length}")
    return Workload(int(found[1]), int(found[2]))


_Text, _Maybe = str, (str, type(None))
SCHEMA: dict[str, Any] = {
    "id": _Text,
    "status": _Text,
    "created": _Text,  # 2026-01-31T12:00:00Z
    "author": {"name": _Text, "link": _Maybe},  # a GitHub handle, or name and link of a tool
    "reference_public": bool,
    "model": {
        "name": _Text,
        "checkpoint": _Maybe,  # None: initial weights by the seed of the config
        "revision": _Maybe,
        "active_params": int,
        "parameters": int,
    },
    "rows": {"rows_sha256": _Text, "rows": int, "row_length": int, "made_of": (dict, type(None))},
    "workload": {"rows": int, "row_length": int},
    "device": {
        "platform": _Text,
        "kind": _Text,
        "count": int,
        "per_node": int,
        "network": _Text,
        "driver": _Maybe,
        "memory_bytes": (int, type(None)),
        "peak_bytes": (int, type(None)),
        "before": _Maybe,  # clocks, temperature, power, throttle reasons as nvidia-smi prints them
        "after": _Maybe,
    },
    "stack": {"framework": _Text, "commit": _Text, "code_sha256": _Text, "versions": Free((str,))},
    "environment": {
        "xla_flags": Free((str,)),
        "compiler_options": Free((str, bool, int, float)),
        "variables": Free((str,)),
        "jax": Free((str, bool, int, float, type(None))),
    },
    "command": _Text,
    "notes": list,
    "conventions": Free((str, bool, int, float, type(None))),
    "config": dict,
    "resolved": Free((str,)),
    "invariants": dict,
    "run": dict,
    "arm": dict,
    "gpu_time": {"admitted": float, "finished": float, "admitted_by": _Text},  # seconds since 1970
    "figures": dict,
}


SAID = ("id", "status", "created", "author", "reference_public", "model", "command", "notes")
RESOLVED = {"compute_dtype", "residual_dtype", "attention", "head", "kernels", "gate", "rotary"}


def problem_said(said: Mapping[str, Any]) -> str | None:
    """Why the fields SAID, which a run doesn't measure, can't stand in a record, or None."""
    if wrong := schema.problem({name: SCHEMA[name] for name in SAID}, said):
        return wrong
    if said["status"] not in STATUSES:
        return f"status {said['status']!r}: {', '.join(STATUSES)}"
    if re.search(NO_NAME, said["id"]) or len(said["id"]) > 100:
        return f"id {said['id'][:100]!r}: up to 100 letters, digits and ._+- are needed"
    return None if all(isinstance(note, str) for note in said["notes"]) else "notes: a list of texts"


def new(measured: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a run, verified."""
    verify(measured)
    return {"format": FORMAT, "sha256": digest(measured), "measured": dict(measured), "checks": None}


def digest(measured: Any) -> str:
    """The hex sha256 that names a record."""
    return hashlib.sha256(canonical_json(measured)).hexdigest()


def read(path: PathLike) -> dict[str, Any]:
    """A record from its file, verified. Raises RecordError naming the file."""
    try:
        record = read_json(path)
    except OSError as error:
        raise RecordError(f"{path}: can't be read ({error.strerror})") from None
    except ValueError as error:
        raise RecordError(f"{path}: not JSON, {error}") from None
    try:
        return check_record(record)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def check_record(record: Any) -> dict[str, Any]:
    """The record itself if it is one, unchanged since it was written."""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise RecordError(f"no record of a recipe: its format is not {FORMAT}")
    if set(record) != {"format", "sha256", "measured", "checks"}:
        raise RecordError("a record has format, sha256, measured and checks, and nothing else")
    if record["checks"] is not None and not isinstance(record["checks"], dict):
        raise RecordError("checks: an object, or null")
    verify(record["measured"])
    if record["sha256"] != digest(record["measured"]):
        raise RecordError("it was changed after it was written: its sha256 is not that of what it holds")
    return record


def write(path: PathLike, record: Mapping[str, Any]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, check_record(dict(record)))


def verify(measured: Any) -> None:
    """Raises RecordError unless `measured` has the schema and every number that follows from others does."""
    if wrong := schema.problem(SCHEMA, measured):
        raise RecordError(wrong)
    if wrong := problem_said({name: measured[name] for name in SAID}):
        raise RecordError(wrong)
    created(measured)
    time = measured["gpu_time"]
    held = time["finished"] - time["admitted"]
    if not time["finished"] > time["admitted"] > 0:
        raise RecordError("gpu_time: finished must lie behind admitted")
    try:
        run = measure.read_run(measured["run"])
        measure.check_figures(measured["run"], measured["figures"])
        if set(measured["figures"]) != set(measure.figures(measured["run"])):
            raise MeasureError("figures: not all are stated")
        arm = read_arm(measured["arm"])
    except MeasureError as error:
        raise RecordError(str(error)) from None
    if sum(run.seconds) > held:
        raise RecordError(f"gpu_time: the steps take {sum(run.seconds):.0f} s, {held:.0f} are between its ends")
    for name in ("losses", "grad_norms"):
        if any(isinstance(value, bool) or (value or 0) < 0 for value in measured["arm"][name]):
            raise RecordError(f"arm.{name}: numbers from 0, or null for one that isn't finite, are needed")
    workload, rows = Workload(**measured["workload"]), measured["rows"]
    _equal(
        {
            "run.n_gpus": (run.n_gpus, measured["device"]["count"]),
            "run.tokens": (run.tokens[0], workload.tokens),
            "run.tokens_counted": (run.tokens_counted, "inputs"),
            "rows.row_length": (rows["row_length"], workload.row_length),
            "rows.rows": (rows["rows"], STEPS * workload.rows),
            "arm.rows_sha256": (arm.rows_sha256, rows["rows_sha256"]),
            "arm.image": (arm.image, image(measured["stack"])),
        }
    )
    made_of = rows["made_of"] or {}
    for name in ("row_length", "rows_sha256") if made_of.get("rows") == rows["rows"] else ("row_length",):
        if made_of.get(name, rows[name]) != rows[name]:
            raise RecordError(f"rows.made_of: its {name} is {made_of[name]!r:.80}, not {rows[name]!r}")
    lengths = {name: len(measured["arm"][name]) for name in ("losses", "grad_norms", "learning_rates")}
    if set(lengths.values()) != {STEPS}:
        raise RecordError(f"arm: {STEPS} losses, gradient norms and learning rates are needed, there are {lengths}")
    if measured["stack"]["framework"] in megatron.FRAMEWORKS:
        model, gpus = measured["model"]["name"], measured["device"]["count"]
        if found := megatron.problem(measured["config"], model, gpus, workload.rows, workload.row_length):
            raise RecordError(f"config: {found}")
        return
    _verify_config(measured, workload)


def _verify_config(measured: Mapping[str, Any], workload: Workload) -> None:
    """The part of verify() that a config of llama_jax decides."""
    config = stored_config(measured["config"])
    _equal(
        {
            "workload.rows": (workload.rows, config.derived.batch_sequences),
            "workload.row_length": (workload.row_length, config.model.context),
            "device.count": (measured["device"]["count"], config.runtime.mesh_worker * config.runtime.mesh_data),
            "model.active_params": (measured["model"]["active_params"], active_of_model(config.model)),
            "model.parameters": (measured["model"]["parameters"], flops.unique_params(config.model)),
        }
    )
    if missing := RESOLVED - measured["resolved"].keys():
        raise RecordError(f"resolved.{min(missing)}: missing field")
    if bool(config.model.init_from) != (measured["model"]["checkpoint"] is not None):
        raise RecordError("model.checkpoint: it must be null where model.init_from is empty, and only there")
    expected = invariants(config, measured["resolved"], measured["arm"])
    _agrees("arm.learning_rates", measured["arm"]["learning_rates"], expected["learning_rates"])
    for name in sorted(expected.keys() | measured["invariants"].keys()):
        if name not in expected or name not in measured["invariants"]:
            raise RecordError(f"invariants: {name} is {'unknown' if name not in expected else 'missing'}")
        _agrees(f"invariants.{name}", measured["invariants"][name], expected[name])


def stored_config(stored: Mapping[str, Any]) -> Any:
    """The finalized config of a record. A field that is newer than the record has its default.

    Raises RecordError when its derived numbers are not those that follow from its fields.
    """
    values = {path: field.default for path, field in FIELDS.items()} | flatten(stored)
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *sections, key = path.split(".")
        holder = nested
        for section in sections:
            holder = holder.setdefault(section, {})
            if not isinstance(holder, dict):
                raise RecordError(f"config: {path} lies inside a value")
        holder[key] = value
    try:
        config = configs.from_dict(nested)
    except ConfigError as error:
        raise RecordError(f"config: {error}") from None
    derived, stated = configs.to_dict(config)["derived"], stored.get("derived", {})
    if not isinstance(stated, dict):
        raise RecordError(f"config: derived is {stated!r:.80}, not an object")
    for name, value in stated.items():
        if not same(value, derived.get(name)):
            raise RecordError(f"config: derived.{name} is {value!r}, its fields give {derived.get(name)!r}")
    return config


def invariants(config: Any, resolved: Mapping[str, str], arm: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal in a recipe and its reference whatever changed, from the config and the arm's names."""
    layout, derived = arena.make_layout(config.model), config.derived
    mask = [[slot.name, list(slot.shape), slot.decay] for slot in layout.slots]
    return {
        "steps": derived.total_updates,
        "rows_per_step": derived.batch_sequences,
        "tokens_per_step": derived.batch_sequences * config.model.context,
        "targets_per_step": config.training.batch_targets,
        "rows_sha256": arm["rows_sha256"],
        "init_sha256": arm["init_sha256"],
        "image": arm["image"],
        "learning_rates": learning_rates(config),
        "decay_mask_sha256": hashlib.sha256(canonical_json(sorted(mask))).hexdigest(),
        "clip_norm": config.optimizer.clip_norm,
        "clip_rule": CLIP_RULE,
        "loss_denominator": LOSS_DENOMINATOR,
        "parameters": flops.unique_params(config.model),
        "workers": config.decentralized.workers,
        "dtypes": {
            "parameters": "float32",
            "moments": "float32",
            "gradients": "float32",
            "activations": resolved["compute_dtype"],
            "residual": resolved["residual_dtype"],
        },
    }


def learning_rates(config: Any) -> list[float]:
    """The learning rates of the 20 updates, in FP64."""
    targets = config.training.batch_targets
    return [optimizer.learning_rate(config, targets * (step + 1)) for step in range(STEPS)]


def image(stack: Mapping[str, Any]) -> str:
    """What names the software of a run: a hash of its versions and of the trainer's sources."""
    return hashlib.sha256(canonical_json([stack["framework"], stack["code_sha256"], stack["versions"]])).hexdigest()


def created(measured: Mapping[str, Any]) -> datetime:
    try:
        return datetime.strptime(measured["created"], "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        raise RecordError(f"created {measured['created'][:40]!r}: 2026-01-31T12:00:00Z is needed") from None


def gpu_hours(measured: Mapping[str, Any]) -> float:
    """GPUs times hours from the scheduler's admission, or the start of the process, to the end."""
    time = measured["gpu_time"]
    return measure.gpu_hours(measured["device"]["count"], time["finished"] - time["admitted"])


def _equal(pairs: Mapping[str, tuple[Any, Any]]) -> None:
    for name, (stated, true) in pairs.items():
        if not same(stated, true):
            raise RecordError(f"{name}: {stated!r} is recorded, it must be {true!r}")


def _agrees(name: str, stated: Any, true: Any) -> None:
    """Floats to a relative 1e-12, since another machine may round a cosine otherwise; the rest exactly."""
    pairs = [(stated, true)]
    if isinstance(true, list) and isinstance(stated, list) and len(true) == len(stated):
        pairs = list(zip(stated, true, strict=True))
    for have, want in pairs:
        close = type(have) is float and type(want) is float and math.isclose(have, want, rel_tol=1e-12, abs_tol=0)
        if not (close or same(have, want)):
            raise RecordError(f"{name}: {have!r:.80} is recorded, the config gives {want!r:.80}")
