"""Our step against compiled PyTorch on one GPU, in alternation, on the same token ids; and the ladder of our design.

    python -m bench.peer --peer=PEER.py --data=data/mini --out=bench/results/peer_h200.json [--minutes=20]
    python -m bench.peer --ladder --data=data/mini --out=bench/results/ladder_h200.json

PEER.py is a script that takes --size, --rows, --steps, --warmup, --mode, --ce and --tokens and prints a JSON line with
tok_s, ms, peakGB and compile_s. Both sides read one file of ids, drawn from the unigram counts of the cache, as 8
batches in turn; both report the median of three windows. A case runs ours, the peer in each mode of torch.compile, ours
again and the peer's best mode again, each in a process of its own. Ratio: mean of ours over the mean of the peer's best
mode; noise: relative difference of the two runs of one side. Compile times are those of the first run of a
side, which starts without any cache; the later ones find theirs.

Packed rows: N workers with 128 / N sequences each over our own N = 1. The ladder: plain JAX (bench/plain_jax.py), then
our step with one field after the other switched to what it is by default.

A record with the same settings is continued: finished cases, rows and rungs are kept, so that --cases can be run one at
a time; an unfinished case starts again, so that its runs alternate.
"""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import children, ours, timing
from llama_jax import config as configs
from llama_jax.errors import ConfigError, run_command

CASES = "20m/128,20m/32,50m/32,90m/32"
HEADS = {"liger": "liger-kernel", "cce": "cut-cross-entropy"}  # --ce of the peer: the package that it needs
LADDER: dict[str, dict[str, str]] = {
    "XLA attention, plain head": {"attention": "xla", "head": "plain", "kernels": "xla"},
    "cuDNN attention": {"attention": "cudnn", "head": "plain", "kernels": "xla"},
    "chunked head": {"attention": "cudnn", "head": "chunked", "kernels": "xla"},
    "Mosaic kernels": {"attention": "cudnn", "head": "chunked", "kernels": "mosaic"},
}
PLAIN, TRITON = "plain JAX", "Triton products allowed"


class Bench(NamedTuple):
    """What all measurements share; scratch: a folder for the ids and the compile caches."""

    options: argparse.Namespace
    record: children.Record
    clock: children.Clock
    scratch: Path

    @property
    def ids(self) -> Path:
        return self.scratch / "ids.bin"

    def preset(self, size: str) -> str:
        return self.options.config.format(size=size)


def measured(bench: Bench, key: str, words: Sequence[str], caches: str) -> dict[str, Any]:
    """A measurement, out of the record or by a new process. What there was no time for is not recorded."""
    if not bench.record.has(key):
        folder = bench.scratch / caches
        places = {"TORCHINDUCTOR_CACHE_DIR": folder / "inductor", "TRITON_CACHE_DIR": folder / "triton"}
        found = children.run(words, bench.clock, {name: str(place) for name, place in places.items()}).result
        if found.get("error") == children.NO_TIME:
            return found
        bench.record.put(key, found)
    return bench.record.measured[key]


def our_words(bench: Bench, size: str, rows: int, caches: str, *more: object, ladder: bool = False) -> list[str]:
    options = bench.options
    words = children.module("bench.ours", f"--config={bench.preset(size)}", f"--rows={rows}", f"--tokens={bench.ids}")
    words += [f"--set={word}" for word in options.set]
    words += [f"--set=runtime.compile_cache={bench.scratch / caches / 'jax'}"]
    return [*words, *speed(options, ladder), *map(str, more)]


def speed(options: argparse.Namespace, ladder: bool = False) -> list[str]:
    """Rungs of the ladder differ by more than a long measurement would resolve, and the slow ones take long."""
    steps, warmup = (options.ladder_steps, min(5, options.warmup)) if ladder else (options.steps, options.warmup)
    return [f"--steps={steps}", f"--warmup={warmup}"]


def peer_words(bench: Bench, size: str, rows: int, mode: str, ce: str = "naive") -> list[str]:
    options = bench.options
    words = [options.peer_python, str(Path(options.peer).resolve()), "--size", size, "--rows", str(rows)]
    words += ["--mode", mode, "--ce", ce, "--tokens", str(bench.ids)]
    return [*words, "--steps", str(options.steps), "--warmup", str(options.warmup)]


def run_case(bench: Bench, size: str, rows: int) -> None:
    """All runs of one case, and its summary; of a complete case only what is missing of the other heads."""
    case = f"{size}/{rows}"
    cases = bench.record.content.setdefault("cases", {})
    complete = cases.get(case, {}).get("complete")
    if not complete:
        for key in [key for key in bench.record.measured if key.startswith(case + " ")]:
            del bench.record.measured[key]
    caches, modes = case.replace("/", "_"), bench.options.modes.split(",")

    def our_run(number: int) -> None:
        measured(bench, f"{case} ours {number}", our_words(bench, size, rows, caches), caches)

    def peer_run(mode: str, number: int, ce: str = "naive") -> dict[str, Any]:
        key = f"{case} peer {mode if ce == 'naive' else ce} {number}"
        return measured(bench, key, peer_words(bench, size, rows, mode, ce), caches)

    best = cases[case]["mode"] if complete else modes[0]
    if not complete:
        our_run(1)
        rates = {mode: peer_run(mode, 1).get("tok_s", 0) for mode in modes}
        our_run(2)
        best = max(rates, key=lambda mode: rates[mode])
        if rates[best]:
            peer_run(best, 2)
    for ce, package in HEADS.items():
        key = f"{case} peer {ce} 1"
        if bench.record.has(key):
            continue
        version = package_version(bench.options.peer_python, package)
        found = peer_run("default", 1, ce) if version else {"error": f"{package} is not installed"}
        bench.record.put(key, {**found, "package": f"{package} {version}"} if version else found)
    cases[case] = summary(bench.record.measured, case, best, modes[0])
    bench.record.note("cases", cases)
    print(table(cases), flush=True)


def package_version(python: str, package: str) -> str | None:
    """The installed version of a distribution under another Python, None where there is none."""
    script = f"import importlib.metadata, json; print(json.dumps({{'is': importlib.metadata.version({package!r})}}))"
    lines = children.run([python, "-c", script], children.Clock(1), quiet=True).lines
    return lines[-1]["is"] if lines else None


def summary(measured: dict[str, Any], case: str, mode: str, first_mode: str) -> dict[str, Any]:
    """The row of a case; numbers that there are no runs for are None. Memory in bytes, noise relative."""

    def runs(side: str, key: str) -> list[dict[str, Any]]:
        return [run for n in (1, 2) if key in (run := measured.get(f"{case} {side} {n}", {}))]

    mine, theirs = runs("ours", "targets_per_s"), runs(f"peer {mode}", "tok_s")
    ours_s, peer_s = [run["targets_per_s"] for run in mine], [run["tok_s"] for run in theirs]
    first, other = (mine or [{}])[0], (theirs or [{}])[0]
    return {
        "complete": len(mine) == len(theirs) == 2,
        "mode": mode,
        "ours_targets_per_s": mean(ours_s),
        "peer_targets_per_s": mean(peer_s),
        "ratio": ratio(mean(ours_s), mean(peer_s)),
        "ours_noise": spread(ours_s),
        "peer_noise": spread(peer_s),
        "ours_peak_bytes": first.get("peak_bytes"),
        "peer_peak_bytes": round(other["peakGB"] * 2**30) if "peakGB" in other else None,
        "ours_compile_s": first["compile_s"] + first["trace_s"] if first else None,
        "peer_compile_s": measured.get(f"{case} peer {first_mode} 1", {}).get("compile_s"),
        "other_heads": {ce: measured.get(f"{case} peer {ce} 1", {}).get("tok_s") for ce in HEADS},
    }


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def spread(values: Sequence[float]) -> float | None:
    """Relative difference of two runs."""
    return abs(values[0] - values[1]) / (sum(values) / 2) if len(values) == 2 else None


def show(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value / scale, form)


def table(cases: dict[str, Any]) -> str:
    """The cases as text."""
    head = f"{'case':10}{'ours M/s':>10}{'peer M/s':>10}{'ratio':>8}{'noise %':>14}{'GiB':>14}{'compile s':>14}"
    lines = [head + "  mode; other heads M/s"]
    for case, row in cases.items():
        pairs = [
            f"{show(row[f'ours_{name}'], form, scale)} / {show(row[f'peer_{name}'], form, scale)}"
            for name, form, scale in (("noise", ".2f", 0.01), ("peak_bytes", ".1f", 2**30), ("compile_s", ".0f", 1))
        ]
        heads = ", ".join(f"{ce} {show(rate, '.3f', 1e6)}" for ce, rate in row["other_heads"].items())
        rates = [show(row[f"{side}_targets_per_s"], "10.3f", 1e6) for side in ("ours", "peer")]
        lines.append(
            f"{case:10}{rates[0]:>10}{rates[1]:>10}{show(row['ratio'], '.3f'):>8}"
            + "".join(f"{pair:>14}" for pair in pairs)
            + f"  {row['mode']}; {heads}"
        )
    return "\n".join(lines)


def run_packed(bench: Bench) -> None:
    """Packed workers over our own N = 1 at the same number of sequences."""
    rows = bench.options.packed_rows
    base = f"20m/{rows} ours"
    if not bench.record.has(f"{base} 1"):
        measured(bench, f"{base} 1", our_words(bench, "20m", rows, "packed"), "packed")
    found: dict[str, Any] = {}
    for workers in map(int, bench.options.packed.split(",")):
        key = f"packed {workers} x {rows // workers}"
        run = measured(bench, key, our_words(bench, "20m", rows, "packed", f"--workers={workers}"), "packed")
        rates = [bench.record.measured[k]["targets_per_s"] for n in (1, 2) if bench.record.has(k := f"{base} {n}")]
        rate, alone = run.get("targets_per_s"), mean(rates)
        found[str(workers)] = {
            "workers": workers,
            "rows": rows,
            "targets_per_s": rate,
            "one_worker_targets_per_s": alone,
            "ratio": ratio(rate, alone),
            "peak_bytes": run.get("peak_bytes"),
            "compile_s": run.get("compile_s"),
        }
        print(
            f"packed N={workers}, {rows} rows: {show(rate, '.3f', 1e6)} M targets/s, "
            f"{show(found[str(workers)]['ratio'], '.3f')} of one worker",
            flush=True,
        )
        bench.record.note("packed", found)


def run_ladder(bench: Bench) -> None:
    """One rung after the other, at 32 rows where the memory doesn't hold the wanted ones."""
    wanted = bench.options.ladder_rows
    model = configs.load(bench.preset("20m"), ours.settings(bench.options.set)).model
    sizes = ",".join(str(model[name]) for name in ("width", "layers", "heads", "ffn", "vocab_size"))
    found: list[dict[str, Any]] = []
    for rung in (PLAIN, *LADDER, TRITON):
        for rows in dict.fromkeys((wanted, max(1, wanted // 4))):
            if rung == PLAIN:
                words = children.module("bench.plain_jax", f"--model={sizes}", f"--context={model.context}")
                words += [f"--rows={rows}", f"--tokens={bench.ids}", *speed(bench.options, ladder=True)]
            else:
                fields = LADDER.get(rung, list(LADDER.values())[-1])
                own = [f"--set=model.{name}={value}" for name, value in fields.items()]
                own += ["--triton"] * (rung == TRITON)
                words = our_words(bench, "20m", rows, "ladder", *own, ladder=True)
            run = measured(bench, f"ladder {rung}, {rows} rows", words, "ladder")
            if run.get("error") != children.OUT_OF_MEMORY:
                break
        keys = ("update_ms", "targets_per_s", "peak_bytes", "compile_s", "error")
        found.append({"rung": rung, "rows": rows, **{key: run[key] for key in keys if key in run}})
        print(
            f"{rung:28} {rows:4d} rows {show(run.get('update_ms'), '8.2f')} ms "
            f"{show(run.get('targets_per_s'), '8.3f', 1e6)} M targets/s  {run.get('error', '')}",
            flush=True,
        )
        bench.record.note("ladder", found)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="the PyTorch script; without it no cases are run")
    parser.add_argument("--data", required=True, help="token cache, whose frequencies the ids get")
    parser.add_argument("--out", required=True, help="JSON file of the record")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--modes", default="default,reduce-overhead", help="of torch.compile; the better one counts")
    parser.add_argument("--packed", default="4,8", help="numbers of workers; empty: none")
    parser.add_argument("--packed-rows", type=int, default=128)
    parser.add_argument("--ladder", action="store_true", help="the ladder, and nothing else")
    parser.add_argument("--ladder-rows", type=int, default=128)
    parser.add_argument("--ladder-steps", type=int, default=20, help="updates of a window of the ladder")
    parser.add_argument("--steps", type=int, default=100, help="updates of a window")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=30.0, help="nothing is started after them")
    parser.add_argument("--config", default="configs/c4_{size}.py", help="presets, by the size of a case")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="overrides of our presets")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--commit", help="git commit of the code, where the copy that runs has no .git")
    options = parser.parse_args(arguments)
    if options.peer and not Path(options.peer).is_file():
        raise ConfigError(f"--peer={options.peer} does not exist")
    try:
        cases = [(size, int(rows)) for size, rows in (case.split("/") for case in options.cases.split(",") if case)]
    except ValueError:
        raise ConfigError(f"--cases={options.cases} is not SIZE/ROWS,SIZE/ROWS,...") from None
    out = f"--out=bench/results/{Path(options.out).name}"
    peer = [f"--peer={Path(options.peer).name}"] if options.peer else []
    peer += ["--ladder"] * options.ladder
    command = shlex.join(["python", "-m", "bench.peer", *peer, f"--data={options.data}", out])
    shared = {key: getattr(options, key) for key in ("steps", "warmup", "ladder_steps", "config", "set")}
    with tempfile.TemporaryDirectory(prefix="llama_jax_peer_") as scratch:
        record = children.Record(options.out, command, shared, options.commit)
        bench = Bench(options, record, children.Clock(options.minutes), Path(scratch))
        rows = max([options.packed_rows, options.ladder_rows, *(rows for _, rows in cases)])
        largest = configs.load(bench.preset("20m"), ours.settings(options.set, rows))
        timing.rows(largest, options.data).astype("<u2").tofile(bench.ids)
        if options.ladder:
            run_ladder(bench)
            return
        for size, rows in cases if options.peer else []:
            run_case(bench, size, rows)
        if options.packed:
            run_packed(bench)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
