"""N packed workers against N workers one after the other, at equal sequences of an update; and where the time goes.

    python -m bench.packed --data=data/mini --out=bench/results/packed_h200.json [--trace=DIR] [--gamma=0.5]

Sequential is what a user without packing would do on one device: the ordinary compiled step of one worker with its
rows / N sequences, called for each of N states in turn, nothing read in between. `sequential` doesn't mix: N
independent runs, the faster baseline and the one that ratios are over. `sequential_mixed` applies the same mixing
after the N steps, as one compiled program over the N parameter rows, which is the order of scheme atc. `packed` is the
step of training with its mixing (one_peer_exponential), without measuring consensus.

Components, of the packed step: `forward_backward`, `clip`, `mix` and `adamw` are each compiled by themselves, so that
the last three read and write arrays that the step keeps within one pass; `update_ms` is the difference of packed and
forward_backward: clip, mixing, AdamW and the guard as the step runs them. `measure` is what consensus measuring adds
to an update after which it is due, and its share of the time when that is every 50 updates; with one worker training
measures nothing.

Each case runs in a process of its own: sequential first, whose memory is less, then packed. Times are medians of three
windows. --gamma fixes the adaptive factor of all mixing.
"""

import argparse
import functools
import json
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import children, components, ours, timing, trace
from bench.windows import windows
from llama_jax import config as configs
from llama_jax import runtime
from llama_jax import step as steps
from llama_jax.build import Built, build
from llama_jax.errors import ConfigError, run_command


class InTurn:
    """N states of one compiled step, updated one after the other; worker i has rows i::N of an update.

    mix: None, or a function of components.row_mixer. Calling it dispatches an update of all workers.
    """

    def __init__(
        self, alone: Built, workers: int, tokens_KnS: np.ndarray, mix: Any, mixing: components.Mixings
    ) -> None:
        self.alone, self.mix, self.mixing, self.update = alone, mix, mixing, 0
        self.batches = [[alone.place(rows[i::workers]) for rows in tokens_KnS] for i in range(workers)]
        self.states = [alone.initial_state() for _ in range(workers)]
        self.lr_N = np.asarray(configs.per_worker(alone.config, "lr"), np.float32)

    def __call__(self) -> Any:
        for i, batches in enumerate(self.batches):
            self.states[i], _ = self.alone.step(self.states[i], batches[self.update % len(batches)], self.lr_N)
        if self.mix is not None:
            now = self.mixing(self.update)
            rows = self.mix(tuple(state.params_NP for state in self.states), now.phase, now.gamma)
            self.states = [state._replace(params_NP=row) for state, row in zip(self.states, rows, strict=True)]
        self.update += 1
        return [(state.params_NP, state.ok) for state in self.states]


def child(options: argparse.Namespace, workers: int, rows: int) -> None:
    """All parts of one case, a JSON line for each; a part that fails costs no other."""
    words = [*options.set, "log.consensus_every=1000000"]
    config = configs.load(options.config, ours.settings(words, rows, workers))
    runtime.prepare(config)
    tokens, timed = timing.rows(config, options.data), (options.steps, options.warmup)
    held: dict[str, Any] = {}

    def mixing(update: int) -> steps.Mixing:
        return steps.Mixing(np.int32(update % held["period"]), np.float32(options.gamma), np.bool_(False))

    def sequential_part(mixes: bool) -> dict[str, Any]:
        if "alone" not in held:
            held["alone"] = build(configs.load(options.config, ours.settings(words, rows // workers)))
        mix = components.row_mixer(held["schedule"]) if mixes else None
        update = InTurn(held["alone"], workers, tokens, mix, mixing)
        found = windows(update, *timed)
        return {**found, **timing.memory(), "applied": all(bool(state.ok) for state in update.states)}

    def packed_part() -> dict[str, Any]:
        held.pop("alone", None)
        before = timing.memory()["peak_bytes"] or 0
        stepper = timing.start(config)
        running = held["running"] = components.Running(stepper, timing.placed(stepper, tokens), mixing)
        found = windows(running, *timed)
        memory = timing.memory()
        found |= {**memory, "peak_is_own": (memory["peak_bytes"] or 0) > before, "program_bytes": stepper.program_bytes}
        applied, resolved = bool(stepper.state.ok), dict(stepper.built.resolved)
        return {**found, "compile_s": stepper.compile_s, "applied": applied, "resolved": resolved}

    def component(name: str) -> dict[str, Any]:
        return components.PARTS[name](held["running"], *timed)

    def kernels() -> dict[str, Any]:
        keep = Path(options.trace) / f"packed_{workers}_{rows}.trace.json.gz"
        return {"kernels": trace.profile(held["running"], keep)}

    schedule = steps.make_schedule(config)
    held |= {"schedule": schedule, "period": schedule.period}
    parts: dict[str, Callable[[], dict[str, Any]]] = {}
    if workers > 1:
        parts["sequential"] = functools.partial(sequential_part, False)
        parts["sequential_mixed"] = functools.partial(sequential_part, True)
    parts["packed"] = packed_part
    if rows in options.component_rows:
        # One worker neither mixes nor is measured.
        for name in [name for name in components.PARTS if workers > 1 or name not in ("mix", "measure")]:
            parts[name] = functools.partial(component, name)
    if options.trace:
        parts["kernels"] = kernels
    for name, part in parts.items():
        try:
            found = part()
        except Exception as error:
            traceback.print_exc()
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            found = {"error": children.OUT_OF_MEMORY if "RESOURCE_EXHAUSTED" in said else said}
        print(json.dumps({"part": name, **children.finite(found)}), flush=True)


def summary(parts: dict[str, Any], workers: int, rows: int, context: int) -> dict[str, Any]:
    """Ratios and components of one case; None where a part is missing."""

    def ms(name: str) -> float | None:
        return parts.get(name, {}).get("update_ms")

    def over(name: str) -> float | None:
        slow, fast = ms(name), ms("packed")
        return slow / fast if slow and fast else None

    whole, packed, backward = parts.get("packed", {}), ms("packed"), ms("forward_backward")
    return {
        "workers": workers,
        "rows": rows,
        "packed_ms": packed,
        "packed_targets_per_s": rows * context / packed * 1e3 if packed else None,
        "packed_peak_bytes": whole.get("peak_bytes") if whole.get("peak_is_own") else None,
        "packed_program_bytes": whole.get("program_bytes"),
        "sequential_ms": ms("sequential"),
        "sequential_peak_bytes": parts.get("sequential", {}).get("peak_bytes"),
        "sequential_mixed_ms": ms("sequential_mixed"),
        "over_sequential": over("sequential"),
        "over_sequential_mixed": over("sequential_mixed"),
        "noise": spread(whole.get("windows_ms"), parts.get("sequential", {}).get("windows_ms")),
        "forward_backward_ms": backward,
        "update_ms": packed - backward if packed and backward else None,
        **{f"{name}_ms": ms(name) for name in ("clip", "mix", "adamw")},
        "measure_ms": parts.get("measure", {}).get("extra_ms"),
        "measure_share": parts.get("measure", {}).get("share_every_50"),
    }


def spread(*windows_ms: list[float] | None) -> float | None:
    """The largest relative range of the windows of a part."""
    found = [(max(values) - min(values)) / min(values) for values in windows_ms if values]
    return max(found, default=None)


def show(case: dict[str, Any]) -> str:
    def number(name: str, form: str, scale: float = 1.0) -> str:
        return "-" if case[name] is None else format(case[name] / scale, form)

    return (
        f"N={case['workers']}, {case['rows']} rows: packed {number('packed_ms', '.2f')} ms "
        f"{number('packed_targets_per_s', '.3f', 1e6)} M targets/s, {number('packed_peak_bytes', '.1f', 2**30)} GiB; "
        f"sequential {number('sequential_ms', '.2f')} ms, with mixing {number('sequential_mixed_ms', '.2f')} ms; "
        f"packed is {number('over_sequential', '.2f')} x sequential, {number('over_sequential_mixed', '.2f')} x with "
        f"mixing (windows within {number('noise', '.2f', 0.01)} %)\n"
        f"  forward and backward {number('forward_backward_ms', '.2f')} ms, the rest {number('update_ms', '.2f')} ms; "
        f"alone: clip {number('clip_ms', '.3f')}, mix {number('mix_ms', '.3f')}, AdamW {number('adamw_ms', '.3f')}; "
        f"measuring {number('measure_ms', '.2f')} ms, {number('measure_share', '.2f', 0.01)} % of the time every 50"
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="token cache, whose frequencies the ids get; default: English-like ones")
    parser.add_argument("--out", help="JSON file of the record")
    parser.add_argument("--workers", default="4,8,1")
    parser.add_argument("--rows", default="32,128", help="sequences of an update over all workers")
    parser.add_argument("--component-rows", default="128", help="at which the components are timed")
    parser.add_argument("--gamma", type=float, default=1.0)
    parser.add_argument("--trace", default="", metavar="DIR", help="also profile; the trace files go there")
    parser.add_argument("--steps", type=int, default=20, help="updates of a window")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--config", default="configs/c4_20m.py")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--commit", help="git commit of the code, where the copy that runs has no .git")
    parser.add_argument("--child", help="N/ROWS: one case in this process")
    options = parser.parse_args(arguments)
    if not 0 <= options.gamma <= 1:
        raise ConfigError(f"--gamma={options.gamma} is not in [0, 1]")
    numbers = {name: [int(n) for n in getattr(options, name).split(",") if n] for name in ("workers", "rows")}
    options.component_rows = [int(n) for n in options.component_rows.split(",") if n]
    if options.child:
        child(options, *map(int, options.child.split("/")))
        return
    if not options.out:
        parser.error("--out")
    out = f"--out=bench/results/{Path(options.out).name}"
    command = shlex.join(["python", "-m", "bench.packed", *([f"--data={options.data}"] if options.data else []), out])
    shared = {key: getattr(options, key) for key in ("steps", "warmup", "gamma", "config", "set")}
    record = children.Record(options.out, command, shared, options.commit)
    clock = children.Clock(options.minutes)
    context = configs.load(options.config, ours.settings(options.set)).model.context
    with tempfile.TemporaryDirectory(prefix="llama_jax_packed_") as scratch:
        common = [*arguments, f"--set=runtime.compile_cache={scratch}"]
        cases = record.content.setdefault("cases", {})
        for rows in numbers["rows"]:
            for workers in numbers["workers"]:
                case = f"{workers}/{rows}"
                if case in cases and cases[case]["packed_ms"]:
                    continue
                if rows % workers:
                    raise ConfigError(f"--rows={rows} must be a multiple of {workers} workers")
                ended = children.run(children.module("bench.packed", *common, f"--child={case}"), clock)
                if ended.error == children.NO_TIME:
                    continue
                parts = {line.pop("part"): line for line in ended.lines if "part" in line}
                record.put(case, {**parts, **({"error": ended.error} if ended.error else {})})
                cases[case] = summary(parts, workers, rows, context)
                record.note("cases", cases)
                print(show(cases[case]), flush=True)
                if "kernels" in parts.get("kernels", {}):
                    print(trace.show(parts["kernels"]["kernels"]), flush=True)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
