"""Golden curves: does the fast path train like the reference path? Losses of the same updates by both, each path twice.

    python -m bench.golden --data=data/mini --out=bench/results/golden_h200.json [--updates=200] [--minutes=6]

The config (c4_20m), its seed, data order and learning rates are the same on both sides. `fast` is what training uses on
this device. `reference` shares no kernel and no gradient with it: explicit products, mask and softmax (or
--attention), plain head with float32 logits, everything by autodiff, a float32 residual stream, bfloat16 products (or
--dtype), and microbatches of 32 sequences that are accumulated. Each path runs in a process of its own and compiles
once for its two runs.

Two runs of one path differ by the order of atomic additions, and such differences grow. The verdict compares windows of
20 updates: the mean difference between a fast and a reference run must stay below twice the mean difference of the two
reference runs in the worst window so far, or below 0.01 nats, which is what rounding to bfloat16 costs before any
difference has grown.
"""

import argparse
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import children
from llama_jax import config as configs
from llama_jax.errors import run_command

WINDOW = 20  # updates
FACTOR = 2.0
FLOOR = 0.01  # nats
RUNS = 2


def arm(config_file: str, overrides: dict[str, Any], path: str, dtype: str, attention: str, updates: int) -> None:
    """Trains one path RUNS times from the start and prints a JSON line for each run; dtype, attention: reference."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from llama_jax import data, model, optimizer, runtime
    from llama_jax import step as steps
    from llama_jax.build import build

    config = configs.load(config_file, overrides)
    runtime.prepare(config)
    source, built = data.open_source(config), build(config)
    resolved = dict(built.resolved)
    if path == "reference":
        numerics = dataclasses.replace(model.reference(jnp.dtype(dtype)), residual=jnp.dtype("float32"))
        numerics = dataclasses.replace(numerics, attention=attention)
        built = built._replace(numerics=numerics, step=steps.make_step(config, numerics, built.mesh))
        resolved = {"compute_dtype": dtype, "residual_dtype": "float32", "attention": attention, "head": "plain"}
        resolved["own_gradients"] = False
    mixing, peaks = built.mixing(), configs.per_worker(config, "lr")
    for _ in range(RUNS):
        start, state = time.monotonic(), built.initial_state()
        found: list[steps.Metrics] = []
        loader = data.Loader(source, config.seed, 0, config.data.prefetch_groups, config.runtime.host_threads)
        for update in range(min(updates, config.derived.total_updates)):
            position = loader.position
            size = built.plan.update_size(position)
            end = (position + size) * config.model.context
            lr_N = np.asarray([optimizer.learning_rate(config, end, peak) for peak in peaks], np.float32)
            state, metrics = built.step(state, built.place(loader.next(size)), lr_N, mixing(update, None))
            if found:  # at most two updates under way, so that their batches don't pile up on the device
                jax.block_until_ready(found[-1].loss_sum)
            found.append(metrics)
        loader.close()
        line = {
            "path": path,
            "resolved": resolved,
            "loss": [float(np.asarray(m.loss_sum, np.float64).sum() / np.asarray(m.targets).sum()) for m in found],
            "grad_norm": [float(np.asarray(m.grad_norm, np.float64).mean()) for m in found],
            "ok": bool(found[-1].ok),
            "seconds": round(time.monotonic() - start, 1),
        }
        print(json.dumps(children.finite(line)), flush=True)
        del state


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def compare(fast: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Windows of the differences in nats, and whether they are within the noise of the reference runs.

    Each window: first update, mean and largest |fast - reference| over all pairs of runs, of the two reference runs, of
    the two fast runs, the signed mean of fast - reference, the limit of the first.
    """
    pairs = [(a, b) for a in fast for b in reference]
    length = min(len(curve) for curve in [*fast, *reference])
    windows, worst = [], 0.0
    for first in range(0, length, WINDOW):
        part = slice(first, min(first + WINDOW, length))

        def apart(couples, part=part):
            return [abs(x - y) for a, b in couples for x, y in zip(a[part], b[part], strict=True)]

        across, noise, own = apart(pairs), apart([tuple(reference)]), apart([tuple(fast)])
        worst = max(worst, mean(noise))
        signed = [x - y for a, b in pairs for x, y in zip(a[part], b[part], strict=True)]
        limit = max(FACTOR * worst, FLOOR)
        windows.append(
            {
                "first_update": first + 1,
                "fast_reference_mean": mean(across),
                "fast_reference_max": max(across),
                "reference_mean": mean(noise),
                "reference_max": max(noise),
                "fast_mean": mean(own),
                "fast_max": max(own),
                "signed_mean": mean(signed),
                "limit": limit,
                "within": mean(across) <= limit,
            }
        )
    return {"windows": windows, "within_noise": all(window["within"] for window in windows)}


def show(found: dict[str, Any]) -> None:
    names = ("fast_reference_mean", "fast_reference_max", "reference_mean", "reference_max", "fast_mean", "fast_max")
    print("differences in nats; from update " + " ".join(f"{name:>20}" for name in (*names, "signed_mean", "limit")))
    for window in found["windows"]:
        numbers = " ".join(f"{window[name]:20.5f}" for name in (*names, "signed_mean", "limit"))
        print(f"{window['first_update']:33d} {numbers} {'' if window['within'] else '  ABOVE'}")
    for path, largest in found.get("largest_grad_norm", {}).items():
        print(f"{path}: largest gradient norm {largest}")
    print("verdict:", "within the noise" if found["within_noise"] else "NOT within the noise")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="token cache")
    parser.add_argument("--out", help="JSON file of the record")
    parser.add_argument("--config", default="configs/c4_20m.py")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="overrides on both sides")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of reference products")
    parser.add_argument("--attention", default="reference", choices=("reference", "xla", "cudnn"), help="of reference")
    parser.add_argument("--reference-microbatch", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--commit", help="git commit of the code, where the copy that runs has no .git")
    parser.add_argument("--arm", choices=("fast", "reference"), help="train one path in this process and print it")
    options = parser.parse_args(arguments)
    overrides: dict[str, Any] = dict(word.split("=", 1) for word in options.set)
    overrides["data.path"] = options.data
    if options.arm:
        if options.arm == "reference":
            overrides["training.microbatch"] = options.reference_microbatch
        arm(options.config, overrides, options.arm, options.dtype, options.attention, options.updates)
        return
    if not options.out:
        parser.error("--out")
    words = ["python", "-m", "bench.golden", f"--data={options.data}", f"--out=bench/results/{Path(options.out).name}"]
    settings = {
        key: getattr(options, key) for key in ("config", "set", "updates", "dtype", "attention", "reference_microbatch")
    }
    record = children.Record(options.out, shlex.join(words), settings, options.commit)
    clock = children.Clock(options.minutes)
    curves: dict[str, list[list[float]]] = {}
    for path in ("fast", "reference"):
        own = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items() if key != "set"]
        own += [f"--set={word}" for word in options.set]
        if not record.has(f"{path} {RUNS}"):
            ended = children.run(
                children.module("bench.golden", f"--data={options.data}", *own, f"--arm={path}"), clock, limit_s=600
            )
            for number in range(RUNS):
                missing = {"error": ended.error or "it printed no result"}
                record.put(f"{path} {number + 1}", ended.lines[number] if number < len(ended.lines) else missing)
        runs = [record.measured[f"{path} {number + 1}"] for number in range(RUNS)]
        curves[path] = [run["loss"] for run in runs if "error" not in run and None not in run["loss"]]
    if any(len(found) < RUNS for found in curves.values()):
        print("verdict: none, a run is missing or not finite")
        return
    comparison = compare(curves["fast"], curves["reference"])
    comparison["largest_grad_norm"] = {
        key: max(norm for norm in run["grad_norm"] if norm is not None) for key, run in record.measured.items()
    }
    record.note("comparison", comparison)
    show(comparison)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
