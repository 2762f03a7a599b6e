"""Ordinary training against packed workers over several topologies: one budget, one global batch, one data order.

python -m bench.topologies --data=data/mini --out=bench/results/topologies_h200.json     trains and records
python -m bench.topologies --draw=bench/results/topologies_h200.json                     draws the record beside it

Every run is configs/mini_20m.py with 131,072 targets an update: one worker with 128 sequences, or N with 128 / N each.
Same learning rate everywhere, one seed: the table compares settings of this corpus and budget, it ranks nothing else.
"""

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.runs import environment, expect, lines, train
from llama_jax import topology
from llama_jax.files import read_json, write_json_atomic

TOPOLOGIES = ("complete", "one_peer_exponential", "one_peer_ring")
WORKERS = (4, 8)


def settings(workers: int, name: str) -> list[str]:
    """Overrides of mini_20m for one arm."""
    fields = {
        "name": "synchronous" if workers == 1 else f"{name}_{workers}",
        "training.sequence_multiple": 8,
        "training.microbatch": 128 // workers,
        "decentralized.workers": workers,
        "decentralized.topology": name,
        "log.consensus_every": 10,
        "training.checkpoint_policy": "none",
    }
    return [f"--config.{field}={value}" for field, value in fields.items()]


def arm(workers: int, name: str, folder: Path) -> dict[str, Any]:
    """What is recorded of a finished run."""
    result, (updates, evaluations) = read_json(folder / "result.json"), lines(folder)
    subset = [line for line in evaluations if line["split"] == "subset"]
    schedule = topology.make_schedule(name, workers)
    measured = [line for line in updates if line.get("consensus_distance") is not None]
    return {
        "workers": workers,
        "topology": name if workers > 1 else "synchronous",
        "validation_loss": result["validation_loss"],
        "local_loss": subset[-1].get("local_loss"),
        "targets": result["targets"],
        "targets_per_s": result["targets_per_s"],
        "peak_memory_bytes": result["peak_memory_bytes"],
        "bytes_per_worker_and_update": schedule.traffic(result["unique_params"]) if workers > 1 else 0,
        "updates": result["updates"],
        "consensus": [[x["targets"], x["consensus_distance"], x["consensus_predicted"]] for x in measured],
        "evaluations": [[x["targets"], x["loss"], x.get("local_loss")] for x in subset],
        "curve": [[x["targets"], x["loss"]] for x in updates],
    }


def study(data: str) -> dict[str, Any]:
    """All arms, one after the other on this device."""
    work = Path(tempfile.mkdtemp(prefix="llama_jax_topologies_"))
    try:
        arms, record = [], {}
        for workers, name in [(1, "complete"), *((n, name) for n in WORKERS for name in TOPOLOGIES)]:
            folder = work / f"{name}_{workers}"
            code = train("mini_20m", folder, data, settings(workers, name))
            expect(code == 0, f"{name} with {workers} workers must exit 0, not {code}")
            arms.append(arm(workers, name, folder))
            record = environment(folder)
        return {"environment": record, "arms": arms}
    finally:
        shutil.rmtree(work)


def draw(path: Path) -> Path:
    """A PNG beside the record: consensus distance and loss of the mean model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for index, found in enumerate(read_json(path)["arms"]):
        name = found["topology"] + (f", N = {found['workers']}" if found["workers"] > 1 else "")
        colour = f"C{index}"
        if found["consensus"]:
            targets, measured, predicted = zip(*found["consensus"], strict=True)
            left.plot(targets, measured, color=colour, label=name)
            left.plot(targets, predicted, "--", color=colour, linewidth=0.8)
        right.plot(
            [x[0] for x in found["evaluations"]], [x[1] for x in found["evaluations"]], "o-", color=colour, label=name
        )
    left.set(yscale="log", xlabel="targets", ylabel="consensus distance (dashed: independent updates)")
    right.set(xlabel="targets", ylabel="loss of the mean model, validation subset (nats)")
    right.legend()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=120)
    return target


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="token cache")
    parser.add_argument("--out", help="JSON file of the record")
    parser.add_argument("--commit", help="git commit of the code, where the copy that runs has no .git")
    parser.add_argument("--draw", type=Path, help="a record to draw")
    options = parser.parse_args(arguments)
    if options.draw:
        print(draw(options.draw))
        return
    if not (options.data and options.out):
        parser.error("--data and --out, or --draw")
    out = f"--out=bench/results/{os.path.basename(options.out)}"
    command = shlex.join(["python", "-m", "bench.topologies", f"--data={options.data}", out])
    record = {"command": command, "commit": options.commit, **study(options.data)}
    write_json_atomic(options.out, record)
    for found in record["arms"]:
        last = found["consensus"][-1][1] if found["consensus"] else 0.0
        name = f"{found['topology']:22s} N={found['workers']}  mean model {found['validation_loss']:.4f}"
        wire, rate = found["bytes_per_worker_and_update"] / 1e6, found["targets_per_s"] / 1e6
        print(f"{name}  consensus {last:.4g}  {wire:.1f} MB  {rate:.2f} M targets/s")


if __name__ == "__main__":
    main(sys.argv[1:])
