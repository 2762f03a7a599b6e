"""What surrounds the updates: seconds until the first one, and the speed of evaluation beside the forward pass.

    python -m bench.startup --data=data/mini --out=bench/results/startup_h200.json [--config=configs/c4_20m.py]

Start-up: the training command runs two updates in a fresh folder, twice with one compile cache, which the first run
fills; seconds from the start of the process until its first update is written. Evaluation: milliseconds of an update's
targets in the evaluator, with its sequences on the host; in the forward part of an update, which computes the losses
and keeps what the backward part needs; and in a whole update, both with the sequences on the device.
"""

import argparse
import functools
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import FrozenConfigDict

from bench import children, ours, timing
from bench.windows import windows
from llama_jax import arena, kernels, metrics, ops, runtime
from llama_jax import config as configs
from llama_jax.errors import run_command
from llama_jax.model import Numerics, bind

BATCHES = 16  # of one evaluation, which waits for the device at its end: 2,048 sequences
RUNS = {"empty cache": "first", "warm cache": "second"}
SHORT = {
    "training.targets_per_parameter": "None",
    "training.total_targets": "None",
    "training.total_updates": "2",
    "training.checkpoint_policy": "none",
    "lr_schedule.warmup_steps": "1",
    "lr_schedule.warmup_fraction": "None",
    "log.every_updates": "1",
    "evaluation.subset_sequences": "1",
    "evaluation.full_at_end": "False",
}


def first_update(words: Sequence[str], workdir: Path, limit_s: float) -> dict[str, Any]:
    """{first_update_s, wall_s} of a training command, or {error}: read off the metrics file while it runs."""
    start, seen = time.monotonic(), None
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(words, cwd=children.ROOT, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
        try:
            while process.poll() is None and time.monotonic() - start < limit_s:
                time.sleep(0.02)
                if seen is None and any(_train_lines(workdir)):
                    seen = time.monotonic() - start
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    if process.returncode or seen is None:
        return {"error": (lines or ["it printed nothing"])[-1][:400]}
    return {"first_update_s": seen, "wall_s": time.monotonic() - start}


def _train_lines(workdir: Path) -> Iterator[dict[str, Any]]:
    path = workdir / "metrics.jsonl"
    if path.exists():
        yield from (line for line in metrics.read(path) if line["kind"] == "train")


def forward_part(
    model: Any, numerics: Numerics, params: dict[str, jax.Array], tokens_BS: jax.Array
) -> tuple[jax.Array, Any]:
    """(sum of the losses, all that the gradient of the layers needs): what an update does before its first gradient.

    The head's own forward part is its logits, their losses and their softmax, which one kernel computes.
    """
    tokens = tokens_BS.astype(jnp.int32)
    (h_BTD, head_VD), pull = jax.vjp(lambda params: bind(model, numerics, params)(tokens[:, :-1]), params)
    h, targets, w = h_BTD.reshape(-1, h_BTD.shape[-1]), tokens[:, 1:].reshape(-1), head_VD.astype(h_BTD.dtype)
    total, softmax = jnp.zeros((), jnp.float32), kernels.pick(numerics.kernels).softmax_gradient
    for start in range(0, len(targets), numerics.head_chunk_rows):
        at = slice(start, start + numerics.head_chunk_rows)
        rows, total = jax.lax.optimization_barrier((h[at], total))
        total += softmax(ops.plain_dense(rows, w), targets[at], jnp.ones(len(rows)))[1].sum()
    return total, pull


def evaluation(config: Any, tokens: str, updates: int) -> dict[str, Any]:
    """{evaluation_ms, forward_ms, update_ms} of one update's targets, medians of three windows, in this process."""
    rows_KnS = timing.rows(config, tokens)
    stepper = timing.start(config, rows_KnS.dtype)
    feed, built = timing.placed(stepper, rows_KnS), stepper.built
    part = functools.partial(forward_part, FrozenConfigDict(config.model), built.numerics)

    @jax.jit
    def forward(params_NP: jax.Array, batch: Any) -> Any:
        return jax.vmap(part)(arena.views(params_NP, built.layout), batch.tokens[:, 0])

    number = 0

    def turn() -> int:
        nonlocal number
        number += 1
        return number

    stepper.window(5, feed)
    update_ms = 1e3 * sorted(stepper.window(updates, feed) / updates for _ in range(3))[1]
    params_NP = stepper.state.params_NP
    row_P = params_NP[0]
    host = [rows[: config.evaluation.batch_sequences] for rows in rows_KnS]
    share = len(host[0]) / rows_KnS.shape[1]  # of an update's targets in one batch of the evaluator

    def evaluate() -> np.ndarray:
        return np.asarray(built.evaluate(row_P, (host[turn() % len(host)] for _ in range(BATCHES))).total)

    return {
        "update_ms": update_ms,
        "forward_ms": windows(lambda: forward(params_NP, feed(turn())), updates, 3)["update_ms"],
        "evaluation_ms": windows(evaluate, max(1, updates // BATCHES), 2)["update_ms"] / BATCHES / share,
    }


def show(measured: dict[str, Any]) -> None:
    for name in RUNS:
        found = measured.get(name, {})
        print(f"{name}: {found.get('error') or format(found['first_update_s'], '.1f') + ' s until the first update'}")
    found = measured.get("evaluation", {})
    if "error" in found:
        print("evaluation:", found["error"])
    elif found:
        print(
            f"an update {found['update_ms']:.2f} ms, its forward part {found['forward_ms']:.2f} ms, "
            f"evaluation of as many targets {found['evaluation_ms']:.2f} ms"
        )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="token cache")
    parser.add_argument("--out", help="JSON file of the record")
    parser.add_argument("--config", default="configs/c4_20m.py")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--updates", type=int, default=30, help="of a window")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--commit", help="git commit of the code, where the copy that runs has no .git")
    parser.add_argument("--child", action="store_true", help="the evaluation, in this process")
    options = parser.parse_args(arguments)
    if options.child:
        config = configs.load(options.config, ours.settings(options.set) | {"data.path": options.data})
        runtime.prepare(config)
        print(json.dumps(evaluation(config, options.data, options.updates)), flush=True)
        return
    if not options.out:
        parser.error("--out")
    words = ["python", "-m", "bench.startup", f"--data={options.data}", f"--out=bench/results/{Path(options.out).name}"]
    settings = {"config": options.config, "set": options.set, "updates": options.updates}
    record = children.Record(options.out, shlex.join(words), settings, options.commit)
    clock = children.Clock(options.minutes)
    overrides = SHORT | dict(word.split("=", 1) for word in options.set) | {"data.path": options.data}
    with tempfile.TemporaryDirectory(prefix="llama_jax_startup_") as folder:
        cache = f"{folder}/cache"
        for name, place in RUNS.items():
            run = children.module("llama_jax.main", f"--config={options.config}", f"--workdir={folder}/{place}")
            run += [f"--config.{field}={value}" for field, value in overrides.items()]
            run.append(f"--config.runtime.compile_cache={cache}")
            print("$", shlex.join(run), flush=True)
            record.put(name, first_update(run, Path(folder) / place, clock.left_s))
        own = [f"--data={options.data}", f"--config={options.config}", f"--updates={options.updates}", "--child"]
        own += [f"--set={word}" for word in [*options.set, f"runtime.compile_cache={cache}"]]
        record.put("evaluation", children.run(children.module("bench.startup", *own), clock).result)
    show(record.measured)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
