"""Targets/s against the number of workers, the context, the model's size and the rows of an update; where memory ends.

    python -m bench.scaling --data=data/mini --out=bench/results/scaling_h200.json [--only=workers,context,rows]

workers: N = 1 to 32, and context: 512 to 8192, both with 131,072 targets an update in one microbatch of each worker.
rows: each preset with 32 sequences an update, 128, and on by doubling until the device's memory ends. Every point is a
process of its own; one that runs out of memory is recorded as that, and ends its line. A point takes fewer updates
where they are larger. A record with the same settings is continued.
"""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import children
from llama_jax.errors import run_command

LINES = ("workers", "context", "rows")
KEYS = (
    "update_ms",
    "windows_ms",
    "targets_per_s",
    "mfu",
    "tflops_per_s",
    "peak_bytes",
    "memory_bytes",
    "program_bytes",
)


class Point(NamedTuple):
    """One measurement: preset size, sequences of an update, their context, workers."""

    size: str
    rows: int
    context: int
    workers: int

    @property
    def key(self) -> str:
        return f"{self.size}, {self.workers} x {self.rows // self.workers} rows of {self.context}"


def points(line: str, options: argparse.Namespace) -> Iterator[Point]:
    """The points of a line (workers, context, or the size whose rows grow), in the order in which they need memory."""
    targets, usual, size = options.targets, options.context, options.sizes.split(",")[0]
    if line == "workers":
        for workers in numbers(options.workers):
            yield Point(size, targets // usual, usual, workers)
    elif line == "context":
        for context in numbers(options.contexts):
            yield Point(size, targets // context, context, 1)
    else:
        for rows in numbers(options.rows):
            yield Point(line, rows, usual, 1)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def measure(
    point: Point, options: argparse.Namespace, record: children.Record, clock: children.Clock, cache: str
) -> dict[str, Any]:
    """A point, out of the record or by a new process; a lack of memory is a result too."""
    if not record.has(point.key) and record.measured.get(point.key, {}).get("error") != children.OUT_OF_MEMORY:
        work = point.rows * point.context / 131072
        steps = max(3, min(options.steps, round(options.steps / work)))
        words = children.module("bench.ours", f"--config={options.config.format(size=point.size)}")
        words += [f"--rows={point.rows}", f"--workers={point.workers}", f"--steps={steps}", "--warmup=3"]
        words += [*([f"--tokens={options.data}"] if options.data else []), *(f"--set={word}" for word in options.set)]
        words += [f"--set=model.context={point.context}", f"--set=runtime.compile_cache={cache}"]
        found = children.run(words, clock).result
        if found.get("error") == children.NO_TIME:
            return found
        chosen = {key: found[key] for key in (*KEYS, "compile_s", "resolved", "error", "wall_s") if key in found}
        record.put(point.key, {**point._asdict(), **chosen})
    return record.measured[point.key]


def show(found: dict[str, Any], key: str) -> str:
    if "error" in found:
        return f"{key:36} {found['error']}"
    peak = "-" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**30:.1f}"
    mfu = "-" if found["mfu"] is None else f"{found['mfu']:.1%}"
    return (
        f"{key:36}{found['update_ms']:10.2f} ms{found['targets_per_s'] / 1e6:9.3f} M targets/s {mfu:>7} {peak:>7} GiB"
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="token cache, whose frequencies the ids get; default: English-like ones")
    parser.add_argument("--out", required=True, help="JSON file of the record")
    parser.add_argument("--only", default=",".join(LINES))
    parser.add_argument("--workers", default="1,2,4,8,16,32")
    parser.add_argument("--contexts", default="512,1024,2048,4096,8192")
    parser.add_argument("--sizes", default="20m,50m,90m", help="presets; the first one is that of the other lines")
    parser.add_argument("--rows", default="32,128,256,512,1024,2048,4096")
    parser.add_argument("--context", type=int, default=1024, help="along workers and rows")
    parser.add_argument("--targets", type=int, default=131072, help="of an update, along workers and context")
    parser.add_argument("--steps", type=int, default=15, help="updates of a window of 131,072 targets")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--config", default="configs/c4_{size}.py")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--commit", help="git commit of the code, where the copy that runs has no .git")
    options = parser.parse_args(arguments)
    out = f"--out=bench/results/{Path(options.out).name}"
    command = shlex.join(["python", "-m", "bench.scaling", *([f"--data={options.data}"] if options.data else []), out])
    shared = {key: getattr(options, key) for key in ("steps", "config", "set", "targets")}
    record, clock = children.Record(options.out, command, shared, options.commit), children.Clock(options.minutes)
    lines: dict[str, list[str]] = record.content.setdefault("lines", {})
    wanted = [name for name in LINES if name in options.only.split(",")]
    names = [n for name in wanted for n in (options.sizes.split(",") if name == "rows" else [name])]
    with tempfile.TemporaryDirectory(prefix="llama_jax_scaling_") as cache:
        for name in names:
            kept = []
            for point in points(name, options):
                found = measure(point, options, record, clock, cache)
                print(show(found, point.key), flush=True)
                if found.get("error") == children.NO_TIME:
                    break
                kept.append(point.key)
                lines[name] = kept
                record.note("lines", lines)
                if found.get("error") == children.OUT_OF_MEMORY or ("error" in found and name not in LINES):
                    break


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
