"""Real runs of the training command on this machine, checked and recorded as JSON.

python bench/runs.py mini --data=data/mini --out=bench/results/mini_20m_h200.json
    mini_20m twice with the same data order: once without a break, once stopped by SIGTERM on the way and continued.
python bench/runs.py c4 --data=data/c4 --out=bench/results/c4_start_h200.json
    c4_20m, c4_50m, c4_90m: three updates, stopped and continued in between, evaluated, saved, verified.
python bench/runs.py sft --data=data/sft_rows --out=bench/results/sft_1b_h200.json
    sft_8k: four updates of 128 rows of 8,192 tokens on a 1B-class model, with recomputed layers and without.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_jax import metrics
from llama_jax.files import read_json, write_json_atomic

ROOT = Path(__file__).resolve().parent.parent


def train(config: str, workdir: Path, data: str, overrides: Sequence[str] = (), fault: str = "") -> int:
    """Runs the training command and returns its exit code."""
    command = [sys.executable, "-m", "llama_jax.main", f"--config=configs/{config}.py", f"--workdir={workdir}"]
    command += [f"--config.data.path={data}", *overrides]
    environment = {**os.environ, "LLAMA_JAX_TEST_FAULT": fault} if fault else None
    print("$", shlex.join(command), fault, flush=True)
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def evaluate(workdir: Path) -> dict[str, Any]:
    """What the evaluate command prints for a run."""
    command = [sys.executable, "-m", "llama_jax.evaluate", f"--run={workdir}"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def expect(condition: bool, text: str) -> None:
    if not condition:
        raise SystemExit(f"FAILED: {text}")


def lines(workdir: Path) -> tuple[list[dict], list[dict]]:
    """(train lines, evaluation lines) of a run."""
    every = list(metrics.read(workdir / "metrics.jsonl"))
    return [x for x in every if x["kind"] == "train"], [x for x in every if x["kind"] == "eval"]


def environment(workdir: Path) -> dict[str, Any]:
    record = read_json(workdir / "environment.json")["starts"][-1]
    return {key: record[key] for key in ("device", "versions", "git_commit")}


def summary(workdir: Path) -> dict[str, Any]:
    result, (updates, evaluations) = read_json(workdir / "result.json"), lines(workdir)
    return {
        **result,
        "curve": [[x["targets"], x["loss"], x["lr"], x["grad_norm"]] for x in updates],
        "evaluations": [[x["targets"], x["split"], x["loss"], x["bits_per_byte"]] for x in evaluations],
    }


def mini(data: str, work: Path) -> dict[str, Any]:
    """Two full runs of mini_20m and what lies between them."""
    whole, broken = work / "whole", work / "broken"
    expect(train("mini_20m", whole, data) == 0, "the unbroken run must exit 0")
    stopped = 125
    code = train("mini_20m", broken, data, fault=f"term@step:{stopped}")
    expect(code == 75, f"the stopped run must exit 75, not {code}")
    expect(train("mini_20m", broken, data) == 0, "the continued run must exit 0")
    a, b = summary(whole), summary(broken)
    expect(len(a["curve"]) == len(b["curve"]) == a["updates"] == 312, "each of the 312 updates once")
    expect([x[0] for x in a["curve"]] == [x[0] for x in b["curve"]], "equal positions")
    expect([x[2] for x in a["curve"]] == [x[2] for x in b["curve"]], "equal learning rates")
    differences = [abs(x[1] - y[1]) for x, y in zip(a["curve"], b["curve"], strict=True)]
    again = evaluate(broken)
    expect(abs(again["loss"] - b["validation_loss"]) < 1e-5, "the evaluate command must give the run's validation loss")
    return {
        "environment": environment(whole),
        "whole": a,
        "stopped_and_continued": b,
        "stopped_near_update": stopped,
        "largest_loss_difference": max(differences),
        "first_loss_difference": differences[0],
        "validation_loss_difference": abs(a["validation_loss"] - b["validation_loss"]),
    }


def c4(data: str, work: Path) -> dict[str, Any]:
    """Three updates of each C4 preset."""
    short = [
        "--config.training.targets_per_parameter=None",
        "--config.training.total_updates=3",
        "--config.lr_schedule.warmup_steps=1",
    ]
    record: dict[str, Any] = {}
    for preset in ("c4_20m", "c4_50m", "c4_90m"):
        folder = work / preset
        code = train(preset, folder, data, short, fault="term@step:2")
        expect(code == 75, f"{preset}: the stopped run must exit 75, not {code}")
        expect(train(preset, folder, data, short) == 0, f"{preset}: the continued run must exit 0")
        found = summary(folder)
        expect(len(found["curve"]) == found["updates"] == 3, f"{preset}: three updates")
        again = evaluate(folder)
        expect(abs(again["loss"] - found["validation_loss"]) < 1e-5, f"{preset}: the evaluate command must agree")
        expect((folder / "exports" / "final" / "model.safetensors").is_file(), f"{preset}: an export")
        record[preset] = found
        record["environment"] = environment(folder)
    return record


SFT = {"recomputed layers": True, "nothing recomputed": False}  # model.remat


def sft(data: str, work: Path) -> dict[str, Any]:
    """Four updates of sft_8k."""
    record: dict[str, Any] = {}
    for number, (name, remat) in enumerate(SFT.items()):
        folder = work / str(number)
        short = ["--config.training.total_updates=4", "--config.training.checkpoint_policy=none"]
        expect(train("sft_8k", folder, data, [*short, f"--config.model.remat={remat}"]) == 0, f"{name} must exit 0")
        found = summary(folder)
        losses = [x[1] for x in found["curve"]]
        expect(len(losses) == 4 and losses[-1] < losses[0], f"{name}: four updates, and the loss falls")
        record[name] = found
        record["environment"] = environment(folder)
    return record


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("mini", "c4", "sft"))
    parser.add_argument("--data", required=True, help="token cache, or rows")
    parser.add_argument("--out", required=True, help="JSON file of the record")
    parser.add_argument("--commit", help="git commit of the code, where the copy that runs has no .git")
    options = parser.parse_args(arguments)
    work, start = Path(tempfile.mkdtemp(prefix="llama_jax_runs_")), time.monotonic()
    try:
        record = {"mini": mini, "c4": c4, "sft": sft}[options.what](options.data, work)
    finally:
        shutil.rmtree(work)
    out = f"--out=bench/results/{Path(options.out).name}"  # where a record belongs, not where this machine put it
    command = shlex.join(["python", "bench/runs.py", options.what, f"--data={options.data}", out])
    record = {"command": command, "commit": options.commit, "seconds": time.monotonic() - start, **record}
    write_json_atomic(options.out, record)
    for name, found in record.items():
        if isinstance(found, dict) and "curve" in found:
            loss = found["validation_loss"]
            validation = "" if loss is None else f"validation {loss:.4f} nats, "
            print(
                f"{name}: {found['targets']:,} targets, last loss {found['curve'][-1][1]:.4f}, {validation}"
                f"{found['targets_per_s'] or 0:,.0f} targets/s, MFU {found['mfu'] or 0:.1%}, "
                f"{(found['peak_memory_bytes'] or 0) / 2**30:.1f} GiB"
            )
    print({key: value for key, value in record.items() if key.endswith("difference")})


if __name__ == "__main__":
    main(sys.argv[1:])
