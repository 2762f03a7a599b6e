"""A training job through scripts/slurm on the device of this machine and a fake cluster; log and result as JSON.

    LLAMA_JAX_PYTHON=python3 python tests/gpu/slurm_smoke.py --out=bench/results/slurm_h200.json

Submits a 20M run, sends USR1 to the batch shell after a minute, lets the job requeue itself and end, then checks that
every update was logged once, over two starts, and that the result is whole. The run reads the built-in synthetic
language unless --data names a token cache. Two to three minutes on an H200.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from fakes.slurm.cluster import Cluster  # noqa: E402


def expect(condition, text):
    if not condition:
        raise SystemExit(f"FAILED: {text}")


def submit(cluster, words):
    """Runs submit.sh with the fake commands in PATH; the Python of the job is LLAMA_JAX_PYTHON, or this one."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    variables.setdefault("LLAMA_JAX_PYTHON", sys.executable)
    variables |= {"FAKE_SLURM": str(cluster.folder), "PATH": f"{ROOT / 'tests/fakes/slurm'}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "scripts/slurm/submit.sh"), *words]
    print("$ bash scripts/slurm/submit.sh", *words, flush=True)
    print(subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout, flush=True)


def run(options, work):
    """Submits, signals, drains; the record."""
    cluster, folder = Cluster(work / "cluster"), work / "run"
    words = ["train", f"--config={options.config}", f"--workdir={folder}"]
    words += ["--config.training.targets_per_parameter=None", f"--config.training.total_updates={options.updates}"]
    if options.data:
        words.append(f"--config.data.path={options.data}")
    else:
        words.append("--config.data.source=synthetic")
    start, sent = time.monotonic(), []
    submit(cluster, [f"--cpus={os.cpu_count()}", *words, *options.more])

    def watch(node):
        logged = folder / "metrics.jsonl"
        if not sent and time.monotonic() - start >= options.signal_after and logged.exists() and logged.stat().st_size:
            sent.append(round(time.monotonic() - start, 1))
            node.warn()

    cluster.drain(watch, limit_s=options.limit)
    (job,) = cluster.jobs()
    text = (folder / f"slurm-{job['raw']}.log").read_text()
    print(text, flush=True)
    expect(sent, "the run was over before USR1 was due; raise --updates")
    expect((job["state"], job["code"], job["restarts"]) == ("COMPLETED", 0, 1), f"one requeue, then the end, not {job}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [line["update"] for line in lines if line["kind"] == "train"]
    result = json.loads((folder / "result.json").read_text())
    expect(updates == list(range(1, result["updates"] + 1)), "every update once, in order")
    expect(result["updates"] >= options.updates, "all updates")
    starts = json.loads((folder / "environment.json").read_text())["starts"]
    counts = [found["variables"].get("SLURM_RESTART_COUNT") for found in starts]
    expect(counts == [None, "1"], f"two starts, not {counts}")
    expect("SIGUSR1 received: saved at update " in text and "continues after update " in text, "a save and a restart")
    return {
        "signal_after_s": sent[0],
        "environment": {key: starts[-1][key] for key in ("device", "versions", "variables", "git_commit")},
        "result": result,
        "losses": [[line["update"], line["loss"]] for line in lines if line["kind"] == "train"][
            :: max(1, len(lines) // 50)
        ],
        "log": text.replace(str(work), "WORK").splitlines(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="JSON file of the record")
    parser.add_argument("--config", default="configs/c4_20m.py")
    parser.add_argument("--data", help="token cache; default: the synthetic language")
    parser.add_argument("--updates", type=int, default=1300)
    parser.add_argument("--signal-after", type=float, default=60.0, metavar="S", help="seconds from the submission")
    parser.add_argument("--limit", type=float, default=400.0, metavar="S", help="seconds that all starts may take")
    parser.add_argument("--commit", help="git commit of the code, where the copy that runs has no .git")
    parser.add_argument(
        "more", nargs="*", metavar="--config.FIELD=VALUE", help="further arguments of training, after --"
    )
    options = parser.parse_args()
    work, start = Path(tempfile.mkdtemp(prefix="llama_jax_slurm_")), time.monotonic()
    try:
        record = run(options, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    command = f"python tests/gpu/slurm_smoke.py --out=bench/results/{options.out.name}"
    command += f" --data={options.data}" if options.data else ""
    command += f" --updates={options.updates}" if options.updates != parser.get_default("updates") else ""
    record = {"command": command, "commit": options.commit, "seconds": round(time.monotonic() - start, 1), **record}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    after, loss = record["signal_after_s"], record["result"]["validation_loss"]
    print(f"USR1 after {after} s, one requeue, validation loss {loss:.4f}, {record['seconds']} s in all")


if __name__ == "__main__":
    main()
