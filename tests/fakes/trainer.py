"""Stands for llama_jax.main in tests of sweeps: the same arguments, signals, exit codes and files, but no training.

FAKE_LOSSES names a JSON file {STAGE/RUN: loss, "diverged", an exit code as {"code": 3} or a signal as {"kill": 9}};
runs without an entry get 4.0. FAKE_UPDATES updates of FAKE_STEP_S seconds each; FAKE_STARTS names a file to which every
start adds a line.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from llama_jax import config as configs
from llama_jax.errors import CheckpointError, NonFiniteError, Preempted, run_command


def train(arguments):
    received = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    file, overrides, rest = configs.parse_arguments(arguments)
    (word,) = rest
    folder = Path(word.removeprefix("--workdir="))
    name = "/".join(folder.parts[-2:])
    with open(os.environ["FAKE_STARTS"], "a") as starts:
        starts.write(f"{name} on {os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
    config = configs.load(file, overrides)
    stored = {"program": "llama_jax", "format_version": 1, "config": configs.to_dict(config), "resolved": {}}
    (folder / "config.json").write_text(json.dumps(stored | {"data": {"tokens": os.environ.get("FAKE_DATA", "same")}}))
    loss = json.loads(Path(os.environ["FAKE_LOSSES"]).read_text()).get(name, 4.0)
    if isinstance(loss, dict) and "kill" in loss:
        os.kill(os.getpid(), loss["kill"])
    if isinstance(loss, dict):
        print("error: it was told to fail", file=sys.stderr)
        sys.exit(loss["code"])
    at, total = folder / "at", int(os.environ.get("FAKE_UPDATES", "2"))
    for update in range(1 + (int(at.read_text()) if at.exists() else 0), total + 1):
        time.sleep(float(os.environ.get("FAKE_STEP_S", "0")))
        with open(folder / "metrics.jsonl", "a") as metrics:
            line = {"kind": "train", "update": update, "loss": 5.0, "targets_per_s": 1000.0, "eta_s": 7}
            metrics.write(json.dumps(line) + "\n")
        if received:
            at.write_text(str(update))
            raise Preempted(f"SIGTERM received: saved at update {update}, the same command continues")
    if loss == "diverged":
        raise NonFiniteError("update 2: not finite")
    if (folder / "result.json").exists():
        raise CheckpointError("done twice")
    result = {
        "validation_loss": loss,
        "bits_per_byte": None,
        "subset_loss": loss + 0.5,
        "targets": 10,
        "updates": total,
    }
    (folder / "result.json").write_text(json.dumps(result | {"targets_per_s": 1000.0, "wall_s": 1.5}))


if __name__ == "__main__":
    sys.exit(run_command(lambda: train(sys.argv[1:])))
