"""Component tests: is a swapped implementation as exact as the one it replaces, at the model's shape, on this device?

    python -m bench.component REFERENCE.json RECIPE.json --out=components.json

Runs the tests that the swaps between two records need (attention, head, norm, MLP) and those of --also (attention:
reference or cuDNN; optimizer: a tree of tensors or an arena; workers: one after the other or vmapped). Each compares
outputs and gradients of both implementations with an FP64 oracle, jitted as in the step: the error of an array is
max|x - oracle| / rms(oracle), and the swap passes when its worst error over the seeds is finite and at most FACTOR
times the worst of the accepted path, plus SLACK, for every kind of input and every output. No bound is absolute: the
path that is already trusted sets it.

A record (JSON): {"format": FORMAT, "sha256" of "measured", "measured": {created, command, stack, environment,
device_kind, tests}}. A test: component, compares, a, b (implementations), layer_shape, dtype, bound, error_metric,
seeds, oracle, errors {kind: {output: {a: [of each seed], b: [...]}}}, worst_error, worst, passed; the last three follow
from the errors.
bench/components.py is something else: it times parts of the packed step.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from bench import recipe_fields, schema
from bench.recipe_fields import same
from bench.record import SCHEMA, RecordError, digest, image
from bench.schema import Free
from llama_jax.errors import ConfigError, run_command
from llama_jax.files import PathLike, read_json, reserve, write_json_atomic

FORMAT = "llama_jax.component.v1"
FACTOR, SLACK = 2.0, 1e-6
METRIC, ORACLE = "max|x - oracle| / rms(oracle)", "float64 on the same device"
SEEDS = (1, 2, 3)
ALSO = {
    "attention": ({"attention": "reference"}, {"attention": "cudnn"}),
    "optimizer": ({"optimizer": "tree"}, {"optimizer": "arena"}),
    "workers": ({"workers": "loop"}, {"workers": "vmap"}),
}
MEASURED: dict[str, Any] = {
    "created": str, "command": str, "stack": SCHEMA["stack"], "environment": SCHEMA["environment"], "device_kind": str,
    "tests": list,
}  # fmt: skip
TEST: dict[str, Any] = {
    "component": str, "compares": str, "a": Free((str, int)), "b": Free((str, int)), "layer_shape": Free((int,)),
    "dtype": str, "bound": {"factor": float, "slack": float}, "error_metric": str, "oracle": str, "seeds": list,
    "errors": dict, "worst_error": (float, type(None)), "worst": (dict, type(None)), "passed": bool,
}  # fmt: skip
ERRORS = {"a": list, "b": list}


def measure(case: Any, a: Callable[..., Any], b: Callable[..., Any], kinds: Sequence[str], seeds: Sequence[int]) -> Any:
    """Errors {kind: {output: {"a": [seeds], "b": [seeds]}}} of two paths of a case; None where one isn't finite."""
    import jax

    from llama_jax import runtime

    compiled = [jax.jit(path, compiler_options=runtime.compiler_options()) for path in (a, b)]
    oracle, apart = jax.jit(case.oracle), jax.jit(_errors)
    errors: dict[str, Any] = {kind: {} for kind in kinds}
    for kind in kinds:
        for seed in seeds:
            inputs = case.inputs(kind, seed)
            found = [path(*inputs) for path in compiled]
            with jax.enable_x64(True):
                exact = oracle(*inputs)
                measured = [jax.device_get(apart(outputs, exact)) for outputs in found]
            for name, of_outputs in zip("ab", measured, strict=True):
                for output, value in of_outputs.items():
                    entry = errors[kind].setdefault(output, {"a": [], "b": []})
                    entry[name].append(float(value) if math.isfinite(value) else None)
    return errors


def _errors(found: Mapping[str, Any], exact: Mapping[str, Any]) -> dict[str, Any]:
    """The error of each output, float64: METRIC, or the largest difference where the oracle is 0 throughout."""
    import jax.numpy as jnp

    errors = {}
    for output, true in exact.items():
        size = jnp.sqrt(jnp.mean(true * true))
        errors[output] = jnp.max(jnp.abs(found[output].astype(jnp.float64) - true)) / jnp.where(size > 0, size, 1.0)
    return errors


def judge(errors: Mapping[str, Any]) -> dict[str, Any]:
    """worst_error (of b; None: not finite), worst (kind, output, a, b, over: b over what is allowed), passed."""
    worst: dict[str, Any] | None = None
    for kind, outputs in errors.items():
        for output, entry in outputs.items():
            finite = all(value is not None for value in (*entry["a"], *entry["b"]))
            a, b = (max(entry[name]) if finite else None for name in "ab")
            over = math.inf if a is None or b is None else b / (FACTOR * a + SLACK)
            if worst is None or over > worst["over"]:
                worst = {"kind": kind, "output": output, "a": a, "b": b, "over": over}
    if worst is None:
        return {"worst_error": None, "worst": None, "passed": False}
    passed = worst["over"] <= 1
    everything = [x for outputs in errors.values() for entry in outputs.values() for x in entry["b"]]
    largest = None if None in everything else max(everything)
    worst["over"] = worst["over"] if math.isfinite(worst["over"]) else None
    return {"worst_error": largest, "worst": worst, "passed": passed}


def test(
    component: str, a: Mapping[str, Any], b: Mapping[str, Any], settings: Any, dtype: str, rows: int,
    seeds: Sequence[int] = SEEDS,
) -> dict[str, Any]:  # fmt: skip
    """One test of a component at the shape of the `model` section of a config, on the present device."""
    from bench import component_cases, component_draws

    case = component_cases.make(component, settings, dtype, rows)
    errors = measure(case, case.path(a), case.path(b), component_draws.KINDS, seeds)
    return {
        "component": component,
        "compares": case.compares,
        "a": dict(a),
        "b": dict(b),
        "layer_shape": case.shape,
        "dtype": case.dtype,
        "bound": {"factor": FACTOR, "slack": SLACK},
        "error_metric": METRIC,
        "oracle": ORACLE,
        "seeds": list(seeds),
        "errors": errors,
        **judge(errors),
    }


def read(path: PathLike) -> dict[str, Any]:
    """A record of component tests, its verdicts recomputed. Raises RecordError naming the file."""
    try:
        return check_record(read_json(path))
    except OSError as error:
        raise RecordError(f"{path}: can't be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{path}: {' '.join(str(error).split())[:200]}") from None
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def check_record(record: Any) -> dict[str, Any]:
    """The record itself, if it is one of component tests and its verdicts follow from its errors."""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise RecordError(f"no record of component tests: its format is not {FORMAT}")
    if set(record) != {"format", "sha256", "measured"}:
        raise RecordError("a record has format, sha256 and measured, and nothing else")
    if wrong := schema.problem(MEASURED, record["measured"]):
        raise RecordError(wrong)
    for number, found in enumerate(record["measured"]["tests"]):
        if wrong := _problem(found, f"tests.{number}."):
            raise RecordError(wrong)
        name = found["component"]
        if not same(found["bound"], {"factor": FACTOR, "slack": SLACK}):
            raise RecordError(f"{name}: its bound is {found['bound']}, not {FACTOR} and {SLACK}")
        for key, true in judge(found["errors"]).items():
            if not same(found[key], true):
                raise RecordError(f"{name}: {key} is {found[key]!r:.100}, its errors give {true!r:.100}")
    if record["sha256"] != digest(record["measured"]):
        raise RecordError("it was changed after it was written: its sha256 is not that of what it holds")
    return record


def _problem(found: Any, path: str) -> str | None:
    """Where a test of a record has another form than TEST, with one error from 0, or null, for each seed."""
    if wrong := schema.problem(TEST, found, path):
        return wrong
    if not all(type(seed) is int for seed in found["seeds"]):
        return f"{path}seeds: whole numbers are needed"
    for kind, outputs in found["errors"].items():
        wanted = dict.fromkeys(outputs, ERRORS) if isinstance(outputs, dict) else ERRORS
        if wrong := schema.problem(wanted, outputs, f"{path}errors.{kind}."):
            return wrong
        for output, entry in outputs.items():
            values = [*entry["a"], *entry["b"]]
            if any(x is not None and (type(x) is not float or not 0 <= x < math.inf) for x in values):
                return f"{path}errors.{kind}.{output}: numbers from 0, or null for one that isn't finite, are needed"
            if {len(entry["a"]), len(entry["b"])} != {len(found["seeds"])}:
                return f"{path}errors.{kind}.{output}: not one error for each seed"
    return None


def valid(
    found: Mapping[str, Any], record: Mapping[str, Any], measured: Mapping[str, Any], settings: Any
) -> str | None:
    """Why a test of a component record says nothing about a recipe, or None: another device, software, shape, dtype,
    other compiler settings, fewer rows, seeds or kinds of inputs than are needed."""
    from bench.component_draws import KINDS, shape_of

    rows = found["layer_shape"].get("rows", 1)
    stated = {
        "device": (record["measured"]["device_kind"], measured["device"]["kind"]),
        "software": (image(record["measured"]["stack"]), image(measured["stack"])),
        "compiler settings": tuple(compiled(one["environment"]) for one in (record["measured"], measured)),
        "shape": (found["layer_shape"], shape_of(found["component"], settings, rows)),
        "rows": (rows >= _rows_needed(found, measured), True),
        "dtype": (found["dtype"], measured["resolved"]["compute_dtype"]),
        "seeds": (len(set(found["seeds"])) >= len(SEEDS), True),
        "inputs": (sorted(found["errors"]), sorted(KINDS)),
    }
    wrong = [name for name, (have, want) in stated.items() if not same(have, want)]
    return f"of another {', '.join(wrong)}" if wrong else None


def compiled(environment: Mapping[str, Any]) -> list[Any]:
    """What decides how programs are compiled: XLA's flags and options, JAX's settings."""
    return [environment[part] for part in ("xla_flags", "compiler_options", "jax")]


def _rows_needed(found: Mapping[str, Any], measured: Mapping[str, Any]) -> int:
    """Rows that inputs must have. One shows all that a component does with a row; a head whose microbatch is cut into
    chunks must have been tested with more than one."""
    config, chunks = measured["config"], [found[side].get("chunk_rows") for side in "ab"]
    several = max((size // config["model"]["context"] + 1 for size in chunks if size), default=1)
    return int(min(config["training"]["microbatch"], several))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", help="record of the reference")
    parser.add_argument("recipe", help="record of the recipe")
    parser.add_argument("--out", required=True, help="JSON file of the record")
    parser.add_argument("--rows", type=_whole, help="rows of the inputs of head, norm and MLP (default: a microbatch)")
    parser.add_argument("--attention-rows", type=_whole, default=1, help="rows of the inputs of attention (default: 1)")
    parser.add_argument("--also", action="append", default=[], choices=sorted(ALSO), help="a test no swap asks for")
    parser.add_argument("--commit", help="of the checkout, where there is no git")
    parser.add_argument("--debug", action="store_true", help="traceback for an error")
    options = parser.parse_args(arguments)
    from bench import record as records

    reference, recipe = (records.read(path)["measured"] for path in (options.reference, options.recipe))
    config = records.stored_config(recipe["config"])
    from llama_jax import runtime

    reserve(options.out)
    with config.unlocked():  # of this machine, not of the one that made the record
        config.runtime.compile_cache = ""
    runtime.prepare(config)
    import jax

    from bench import recipe_run

    stack, environment = recipe_run.stack(options.commit), recipe_run.environment()
    kind = jax.devices()[0].device_kind
    if kind != recipe["device"]["kind"] or image(stack) != image(recipe["stack"]):
        raise ConfigError(f"{options.recipe}: made on {recipe['device']['kind']} with its own versions and sources")
    if not same(compiled(environment), compiled(recipe["environment"])):
        raise ConfigError(f"{options.recipe}: made with other XLA flags or JAX settings; set them as it had them")
    wanted = recipe_fields.needed(reference, recipe)
    wanted += [{"component": name, "a": ALSO[name][0], "b": ALSO[name][1]} for name in options.also]
    if any(pair[side].get("attention") == "cudnn" for pair in wanted for side in "ab"):
        with config.unlocked():
            config.model.attention = "cudnn"
        runtime.resolve(config)  # raises ConfigError where it can't run
    rows, tests = options.rows or config.training.microbatch, []
    with runtime.device_errors("lower --rows or --attention-rows"):
        for pair in wanted:
            size = options.attention_rows if pair["component"] == "attention" else rows
            found = test(**pair, settings=config.model, dtype=recipe["resolved"]["compute_dtype"], rows=size)
            tests.append(found)
            print(line(found), flush=True)
    measured = {
        "created": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "command": shlex.join(["python", "-m", "bench.component", *map(recipe_fields.anonymous, arguments)]),
        "stack": stack,
        "environment": environment,
        "device_kind": kind,
        "tests": tests,
    }
    record = {"format": FORMAT, "sha256": digest(measured), "measured": measured}
    write_json_atomic(options.out, check_record(record))


def _whole(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text}: a whole number from 1 is needed")
    return int(text)


def line(found: Mapping[str, Any]) -> str:
    """A test in one line."""
    a, b = ("/".join(map(str, found[side].values())) for side in "ab")
    worst, verdict = found["worst"], "passed" if found["passed"] else "FAILED"
    if worst["b"] is None:
        return f"{found['component']}: {a} -> {b}: {verdict}, not finite ({worst['kind']}, {worst['output']})"
    return (
        f"{found['component']}: {a} -> {b}: {verdict}, worst error {found['worst_error']:.2e}; closest to its bound: "
        f"{worst['output']} of {worst['kind']} inputs, {worst['b']:.2e} against {worst['a']:.2e}"
    )


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv))
