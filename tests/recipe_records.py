"""Records of recipes for tests, made without a device: a tiny model, 8 rows of 32 tokens, times and losses as given."""

import copy

import numpy as np

from bench import component, component_draws, measure, recipe_checks, recipe_fields, record
from llama_jax import config as configs
from llama_jax import flops
from llama_jax.files import write_json_atomic

WORKLOAD = record.Workload(8, 32)
FIELDS = {
    "name": "tiny",
    "model.vocab_size": 64,
    "model.context": 32,
    "model.layers": 1,
    "model.width": 16,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.ffn": 24,
    "training.targets_per_parameter": None,
    "training.total_updates": 20,
    "training.epoch_targets_per_parameter": 100_000.0,
    "training.batch_targets": 8 * 31,
    "training.microbatch": 4,
    "optimizer.lr": 1e-3,
    "lr_schedule.warmup_steps": None,
    "lr_schedule.warmup_fraction": 0.1,
    "data.source": "rows",
    "data.path": "$SFT_DATA",
}
RESOLVED = {
    "compute_dtype": "bfloat16", "residual_dtype": "bfloat16", "attention": "xla", "head": "plain", "kernels": "xla",
    "gate": "xla",
    "rotary": "xla",
}  # fmt: skip
LOSSES = list(3.0 - 0.05 * np.arange(20.0) + 0.01 * np.sin(np.arange(20.0)))


def config(fields=None):
    made = configs.default()
    for path, value in {**FIELDS, **(fields or {})}.items():
        configs.set_field(made, path, value)
    return configs.finalize(made)


def measured(name="reference", status="reference", seconds=2.0, fields=None, resolved=None, change=None, **parts):
    """What a run has measured. seconds: of each step; fields: of the config; change: of the finished parts, before what
    follows from them is computed; parts: losses, model, kind, created, steps."""
    made, resolved = config(fields), {**RESOLVED, **(resolved or {})}
    steps, workload = parts.get("steps", 20), record.Workload(config(fields).derived.batch_sequences, 32)
    seconds = [seconds] * steps if isinstance(seconds, int | float) else seconds
    stamps = [0, *(int(1e9 * x) for x in np.cumsum(seconds))]
    found = {
        "id": name,
        "status": status,
        "created": parts.get("created", "2026-01-31T12:00:00Z"),
        "author": {"name": "someone", "link": None},
        "reference_public": True,
        "model": {
            "name": parts.get("model", "tiny"), "checkpoint": None, "revision": None,
            "active_params": record.active_of_model(made.model), "parameters": flops.unique_params(made.model),
        },
        "rows": {"rows_sha256": "a" * 64, "rows": 160, "row_length": 32, "made_of": None},
        "workload": workload._asdict(),
        "device": {
            "platform": "gpu", "kind": parts.get("kind", "NVIDIA H200"), "count": 1, "per_node": 1, "driver": "580.1",
            "network": "not pinned", "memory_bytes": None, "peak_bytes": None, "before": None, "after": None,
        },
        "stack": {
            "framework": "llama_jax", "commit": "c" * 40, "code_sha256": "d" * 64, "versions": {"jax": "0.11.2"},
        },
        "environment": {
            "xla_flags": {}, "compiler_options": {"xla_gpu_enable_triton_gemm": False},
            "variables": {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}, "jax": {"jax_enable_x64": False},
        },
        "command": "python -m bench.recipe run",
        "notes": [],
        "conventions": {"cv_ddof": 0},
        "config": configs.to_dict(made),
        "resolved": resolved,
        "gpu_time": {"admitted": 1.0e9, "finished": 1.0e9 + 360, "admitted_by": "process"},
    }  # fmt: skip
    if change:
        change(found)
    found["run"] = measure.run_record([stamps], workload.tokens, 1)
    found["figures"] = measure.figures(found["run"])
    found["arm"] = {
        "losses": list(parts.get("losses", LOSSES)),
        "grad_norms": [1.0] * 20,
        "learning_rates": record.learning_rates(made),
        "rows_sha256": found["rows"]["rows_sha256"],
        "init_sha256": "b" * 64,
        "image": record.image(found["stack"]),
    }
    found["invariants"] = record.invariants(made, resolved, found["arm"])
    return found


def reference(**given):
    return record.new(measured(**given))


def recipe(name="fast", fields=None, **given):
    """Another layout than the reference's: otherwise it would be a further run of it."""
    fields = {"runtime.host_threads": 4, **(fields or {})}
    return record.new(measured(**{"name": name, "status": "recipe", "seconds": 1.0, **given, "fields": fields}))


def edited(found, path, value):
    """A copy of a record with something in its `measured` changed and its hash made to fit."""
    found = copy.deepcopy(found)
    holder, *keys = found["measured"], *path.split("/")
    for key in keys[:-1]:
        holder = holder[int(key) if isinstance(holder, list) else key]
    key = int(keys[-1]) if isinstance(holder, list) else keys[-1]
    if value is KeyError:
        del holder[key]
    else:
        holder[key] = value
    found["sha256"] = record.digest(found["measured"])
    return found


def component_record(found, error=1e-3, **changes):
    """Component tests of all swaps between the reference and a recipe, with the same errors of both paths."""
    tests = []
    for wanted in recipe_fields.needed(measured(), found["measured"]):
        entry = {"a": [1e-3] * 3, "b": [error] * 3}
        errors = {kind: {"y": entry} for kind in component_draws.KINDS}
        tests.append(
            {
                **wanted, "compares": "made up", "dtype": "bfloat16", "bound": {"factor": 2.0, "slack": 1e-6},
                "layer_shape": component_draws.shape_of(wanted["component"], config().model, 4),
                "error_metric": component.METRIC, "oracle": component.ORACLE, "seeds": [1, 2, 3], "errors": errors,
                **component.judge(errors), **changes,
            }
        )  # fmt: skip
    made = {
        "created": "2026-01-31T12:00:00Z", "command": "python -m bench.component",
        "stack": found["measured"]["stack"], "environment": found["measured"]["environment"],
        "device_kind": found["measured"]["device"]["kind"], "tests": tests,
    }  # fmt: skip
    return {"format": component.FORMAT, "sha256": record.digest(made), "measured": made}


def checked(found, golden, calibration=(), components=(), workload=WORKLOAD):
    """A record with its checks."""
    against = recipe_checks.Against(golden, calibration, components)
    return {**found, "checks": recipe_checks.check(found, against, workload)}


def write(folder, *records):
    """Writes records into a folder, by number."""
    folder.mkdir(exist_ok=True)
    for number, found in enumerate(records):
        write_json_atomic(folder / f"{number}.json", found)
    return folder
