"""The speed benchmarks on tiny models: what they start, compute and record, with children in this process.

`inline` replaces the processes of our own modules; the PyTorch peer is a script of its own, as it would be.
"""

import contextlib
import io
import itertools
import json
import sys
from pathlib import Path

import harness
import jax
import numpy as np
import pytest
from harness import write_cache

from bench import children, components, golden, ours, packed, peer, plain_jax, scaling, timing
from bench.speed_tables import SPEED
from llama_jax import config as configs
from llama_jax import step as steps
from llama_jax.build import build
from llama_jax.errors import ConfigError, Error

ROOT = Path(__file__).resolve().parent.parent
MODULES = {f"bench.{m.__name__.split('.')[-1]}": m for m in (golden, ours, packed, plain_jax)}
SET = {field: value for field, value in harness.TINY.items() if field.startswith("model.")}
WORDS = [f"--set={field}={value}" for field, value in SET.items()]
STUB = """
import argparse, json, numpy
parser = argparse.ArgumentParser()
for name in ("size", "mode", "ce", "tokens"):
    parser.add_argument("--" + name)
for name in ("rows", "steps", "warmup"):
    parser.add_argument("--" + name, type=int)
a = parser.parse_args()
ids = numpy.fromfile(a.tokens, "<u2")[: 8 * a.rows * 17].reshape(8, a.rows, 17)
if a.size == "90m":
    raise SystemExit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB")
rate = {"default": 1000, "reduce-overhead": 1500}[a.mode] * a.rows
print("noise before")
print(json.dumps(dict(tok_s=rate, ms=1.0, peakGB=2.0, compile_s=20.5, loss=float("nan"), ids=int(ids.sum()))))
"""


@pytest.fixture
def inline(monkeypatch):
    """Runs our own modules in this process; returns the list of what was started."""
    started, outside = [], children.run

    def run(words, clock, variables=None, limit_s=300.0, quiet=False):
        if quiet or words[1:2] != ["-m"]:
            return outside(words, clock, variables, limit_s, quiet)
        started.append(words)
        # JAX can't leave a compile cache again, and the folder doesn't outlive the test.
        own = [word for word in words[3:] if "runtime.compile_cache" not in word]
        out, error = io.StringIO(), None
        with contextlib.redirect_stdout(out):
            try:
                MODULES[words[2]].main(own)
            except Error as failure:
                error = str(failure)
        lines = [json.loads(line) for line in out.getvalue().splitlines() if line.startswith("{")]
        return children.Ended(lines, error, 1.0)

    monkeypatch.setattr(children, "run", run)
    return started


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return write_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def stub(tmp_path):
    path = tmp_path / "stub.py"
    path.write_text(STUB)
    return path


def read(path):
    def refuse(word):
        raise AssertionError(f"{word} in JSON")

    return json.loads(Path(path).read_text(), parse_constant=refuse)


def test_cases_alternate_and_give_the_ratio(inline, cache, stub, tmp_path, capsys, monkeypatch):
    out = tmp_path / "peer.json"
    words = [f"--peer={stub}", f"--data={cache}", f"--out={out}", "--cases=20m/4,90m/2", "--packed-rows=4"]
    words += ["--packed=2", "--steps=2", "--warmup=2", *WORDS]
    peer.main(words)
    record = read(out)
    assert list(record["measured"])[:5] == [
        "20m/4 ours 1",
        "20m/4 peer default 1",
        "20m/4 peer reduce-overhead 1",
        "20m/4 ours 2",
        "20m/4 peer reduce-overhead 2",
    ]
    case, measured = record["cases"]["20m/4"], record["measured"]
    rates = [measured[f"20m/4 ours {n}"]["targets_per_s"] for n in (1, 2)]
    assert case["mode"] == "reduce-overhead" and case["complete"] and case["peer_targets_per_s"] == 6000
    assert case["ratio"] == pytest.approx(np.mean(rates) / 6000)
    assert case["ours_noise"] == pytest.approx(abs(rates[0] - rates[1]) / np.mean(rates))
    assert (case["peer_peak_bytes"], case["peer_compile_s"], case["peer_noise"]) == (2 << 30, 20.5, 0)
    assert case["other_heads"] == {"liger": None, "cce": None}
    assert "not installed" in measured["20m/4 peer liger 1"]["error"]
    # A side that fails leaves the rest of the record as it is.
    failed = record["cases"]["90m/2"]
    assert (failed["ratio"], failed["complete"]) == (None, False) and failed["ours_targets_per_s"] > 0
    assert measured["90m/2 peer default 1"]["error"] == children.OUT_OF_MEMORY
    both = record["packed"]["2"]
    assert both["ratio"] == pytest.approx(measured["packed 2 x 2"]["targets_per_s"] / np.mean(rates))
    assert measured["packed 2 x 2"]["workers"] == 2 and measured["packed 2 x 2"]["microbatch"] == 2
    assert "90m/2" in capsys.readouterr().out
    assert f"| **{case['ratio']:.2f}** |" in SPEED["peer"].make(record)
    assert f"| {both['ratio']:.2f} |" in SPEED["packed_rows"].make(record)
    # Both sides read the same ids: the first 8 x 4 x 17 of what the cache's frequencies give.
    ids = [word.removeprefix("--tokens=") for word in inline[0] if word.startswith("--tokens=")]
    expected = timing.rows(configs.load("configs/c4_20m.py", ours.settings(WORDS_SET, 128)), cache)
    assert measured["20m/4 peer default 1"]["ids"] == int(expected.reshape(-1)[: 8 * 4 * 17].sum()) and len(ids) == 1
    # Again: the finished case is kept but for a head that it lacks, the other one starts anew.
    count = len(inline)
    monkeypatch.setitem(peer.HEADS, "cce", "numpy")  # some package that is there
    peer.main([*words, "--packed="])
    again = read(out)
    assert len(inline) == count + 2 and again["measured"]["20m/4 ours 1"] == measured["20m/4 ours 1"]
    assert again["cases"]["20m/4"] == {**case, "other_heads": {"liger": None, "cce": 4000}}
    assert f" Other heads of PyTorch's: numpy {np.__version__}.\n" in SPEED["peer"].make(again)


WORDS_SET = [word.removeprefix("--set=") for word in WORDS]


def test_ladder_has_all_rungs_and_falls_back_where_memory_ends(inline, cache, tmp_path, monkeypatch):
    out, run = tmp_path / "peer.json", children.run

    def small_memory(words, *rest, **more):
        if "bench.plain_jax" in words and "--rows=8" in words:
            return children.Ended([], children.OUT_OF_MEMORY, 1.0)
        return run(words, *rest, **more)

    monkeypatch.setattr(children, "run", small_memory)
    words = ["--ladder", f"--data={cache}", f"--out={out}", "--ladder-rows=8", "--ladder-steps=2", "--warmup=1", *WORDS]
    peer.main(words)
    ladder = read(out)["ladder"]
    assert [rung["rung"] for rung in ladder] == [peer.PLAIN, *peer.LADDER, peer.TRITON]
    assert ladder[0]["rows"] == 2 and ladder[0]["targets_per_s"] > 0
    assert ladder[1]["rows"] == 8 and ladder[1]["update_ms"] > 0
    if jax.devices()[0].platform == "cpu":
        assert all("can't run here" in rung["error"] for rung in ladder[2:])
    assert f"| {ladder[1]['update_ms']:.2f} ms |" in SPEED["ladder"].make(read(out))
    switched = [peer.LADDER[name] for name in peer.LADDER]
    changes = [sum(a[key] != b[key] for key in a) for a, b in itertools.pairwise(switched)]
    assert changes == [1, 1, 1]


def test_triton_is_allowed_only_where_asked(monkeypatch, capsys):
    seen = []

    def measure(config, rows, warmup, updates):
        from llama_jax import runtime

        seen.append(runtime.compiler_options())
        return {"rows": rows.shape[1]}

    from llama_jax import runtime

    monkeypatch.setattr(runtime, "compiler_options", lambda: {"x": False})
    monkeypatch.setattr(timing, "measure", measure)
    for more in ([], ["--triton"]):
        ours.main(["--rows=4", *WORDS, *more])
    assert seen == [{"x": False}, None] and runtime.compiler_options() == {"x": False}
    assert [json.loads(line)["rows"] for line in capsys.readouterr().out.splitlines()] == [4, 4]


def test_workers_in_turn_are_the_packed_workers_of_scheme_atc():
    """What packing is compared with computes the same: N ordinary steps, then the mixing of the same phase."""
    words = [*WORDS_SET, "decentralized.scheme=atc"]
    config = configs.load("configs/c4_20m.py", ours.settings(words, 8, 4))
    alone = configs.load("configs/c4_20m.py", ours.settings(words, 2))
    tokens = timing.rows(config)
    schedule = steps.make_schedule(config)

    def mixing(update):
        return steps.Mixing(np.int32(update % schedule.period), np.float32(0.75), np.bool_(False))

    update = packed.InTurn(build(alone), 4, tokens, components.row_mixer(schedule), mixing)
    built = build(config)
    state, lr_N = built.initial_state(), np.full(4, config.optimizer.lr, np.float32)
    for number in range(3):
        update()
        state, _ = built.step(state, built.place(tokens[number]), lr_N, mixing(number))
    rows = np.concatenate([np.asarray(state.params_NP) for state in update.states])
    assert np.abs(rows - rows[0]).max() > 1e-3  # the workers do differ
    np.testing.assert_allclose(rows, np.asarray(state.params_NP), atol=2e-5)
    unmixed = packed.InTurn(build(alone), 4, tokens, None, mixing)
    unmixed()
    assert not np.allclose(np.asarray(unmixed.states[0].params_NP), np.asarray(unmixed.states[1].params_NP), atol=1e-4)


def test_packed_records_every_part(inline, cache, tmp_path, capsys):
    out, traces = tmp_path / "packed.json", tmp_path / "traces"
    words = [f"--data={cache}", f"--out={out}", "--workers=2", "--rows=4", "--component-rows=4", "--steps=2"]
    words += ["--warmup=2", f"--trace={traces}", *WORDS]
    packed.main(words)
    record = read(out)
    parts, case = record["measured"]["2/4"], record["cases"]["2/4"]
    assert list(parts) == ["sequential", "sequential_mixed", "packed", *components.PARTS, "kernels"]
    assert not [name for name, part in parts.items() if "error" in part]
    assert parts["sequential"]["applied"] and parts["sequential_mixed"]["applied"]
    ms = {name: part["update_ms"] for name, part in parts.items() if "update_ms" in part}
    assert case["over_sequential"] == pytest.approx(ms["sequential"] / ms["packed"])
    assert case["packed_targets_per_s"] == pytest.approx(4 * 16 / ms["packed"] * 1e3)
    assert case["update_ms"] == pytest.approx(ms["packed"] - ms["forward_backward"])
    assert (traces / "packed_2_4.trace.json.gz").is_file()
    made = SPEED["packed"].make(record)
    assert f"**{case['over_sequential']:.2f} x**" in made and f"| {case['clip_ms']:.2f} ms |" in made
    assert "N=2, 4 rows" in capsys.readouterr().out
    packed.main(words)
    assert len(inline) == 1
    with pytest.raises(ConfigError, match="--gamma"):
        packed.main([*words, "--gamma=2"])


def test_one_failing_part_costs_no_other(inline, cache, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(components, "PARTS", {"clip": broken, "adamw": components.PARTS["adamw"]})
    out = tmp_path / "packed.json"
    words = [f"--data={cache}", f"--out={out}", "--workers=1", "--rows=4", "--component-rows=4", "--steps=1"]
    packed.main([*words, "--warmup=1", *WORDS])
    parts = read(out)["measured"]["1/4"]
    assert list(parts) == ["packed", "clip", "adamw"] and parts["clip"] == {"error": children.OUT_OF_MEMORY}
    assert parts["adamw"]["update_ms"] > 0 and read(out)["cases"]["1/4"]["clip_ms"] is None


def test_forward_backward_is_the_gradient_of_the_step():
    config = configs.load("configs/c4_20m.py", ours.settings(WORDS_SET, 4, 2))
    stepper = timing.start(config)
    batch = stepper.built.place(timing.rows(config)[0])
    losses_N, grads_NP = components.forward_backward(stepper.built)(stepper.state.params_NP, batch)
    _, metrics = stepper.built.step(stepper.state, batch, stepper.lr_N, steps.NO_MIXING)
    np.testing.assert_allclose(losses_N, metrics.loss_sum, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(grads_NP, axis=1) / (2 * 16), metrics.grad_norm, rtol=1e-5)


def test_scaling_stops_each_line_where_memory_ends(tmp_path, monkeypatch, capsys):
    started = []

    def run(words, clock, variables=None, limit_s=300.0, quiet=False):
        given = dict(word[2:].split("=", 1) for word in words[3:] if not word.startswith("--set"))
        started.append((Path(given["config"]).stem, int(given["rows"]), int(given["workers"])))
        if len(started) > 12:
            return children.Ended([], children.NO_TIME, 0.0)
        if int(given["rows"]) > (256 if "20m" in given["config"] else 64):
            return children.Ended([], children.OUT_OF_MEMORY, 1.0)
        found = dict.fromkeys((*scaling.KEYS, "compile_s"), 2.0)
        return children.Ended([found | {"resolved": {}, "windows_ms": [2.0]}], None, 1.0)

    monkeypatch.setattr(children, "run", run)
    out = tmp_path / "scaling.json"
    words = [f"--out={out}", "--workers=1,2,4", "--contexts=512,1024,2048", "--sizes=20m,50m"]
    words += ["--rows=64,128,256,512,1024"]
    scaling.main(words)
    record = read(out)
    assert record["lines"] == {
        "workers": [f"20m, {n} x {128 // n} rows of 1024" for n in (1, 2, 4)],
        "context": ["20m, 1 x 256 rows of 512", "20m, 1 x 128 rows of 1024", "20m, 1 x 64 rows of 2048"],
        "20m": [f"20m, 1 x {n} rows of 1024" for n in (64, 128, 256, 512)],
        "50m": [f"50m, 1 x {n} rows of 1024" for n in (64, 128)],
    }
    assert record["measured"]["50m, 1 x 128 rows of 1024"]["error"] == children.OUT_OF_MEMORY
    made = SPEED["scaling"].make(record)
    assert made.count("| 128 | 0.00 M | 2.00 ms | 200.0% | 0.0 GiB |") == 1 and "| 512 | out of memory |" in made
    assert len(started) == 10  # the point that lines share is measured once
    scaling.main(words)
    assert len(started) == 10 and "out of memory" in capsys.readouterr().out
    scaling.main([*words, "--workers=1,2,4,8,16,32", "--only=workers"])
    assert len(read(out)["lines"]["workers"]) == 5  # no time for the last one


def test_scaling_starts_what_can_be_measured(inline, cache, tmp_path):
    out = tmp_path / "scaling.json"
    words = [f"--data={cache}", f"--out={out}", "--only=workers", "--workers=2", "--context=16", "--targets=64"]
    scaling.main([*words, "--steps=1", *WORDS])
    (found,) = read(out)["measured"].values()
    assert (found["workers"], found["rows"], found["context"]) == (2, 4, 16) and found["targets_per_s"] > 0


def test_golden_curves_of_both_paths(inline, cache, tmp_path, capsys):
    out = tmp_path / "golden.json"
    recipe = {
        "training.targets_per_parameter": None,
        "training.total_updates": 12,
        "training.batch_targets": 128,
        "training.microbatch": 8,
        "training.epoch_targets_per_parameter": 100,
        "lr_schedule.warmup_steps": 3,
    }
    words = [f"--data={cache}", f"--out={out}", "--updates=10", "--reference-microbatch=4", "--dtype=float32"]
    golden.main([*words, *WORDS, *(f"--set={field}={value}" for field, value in recipe.items())])
    record = read(out)
    runs = record["measured"]
    assert [run["path"] for run in runs.values()] == ["fast"] * 2 + ["reference"] * 2
    assert all(len(run["loss"]) == 10 and run["ok"] and run["loss"][-1] < run["loss"][0] for run in runs.values())
    assert runs["reference 1"]["resolved"]["attention"] == "reference" != runs["fast 1"]["resolved"]["attention"]
    if jax.devices()[0].platform == "cpu":
        assert runs["fast 1"]["loss"] == runs["fast 2"]["loss"]
    np.testing.assert_allclose(runs["fast 1"]["loss"], runs["reference 1"]["loss"], atol=1e-4)
    assert "is **within** the noise" in SPEED["golden"].make(record)
    assert record["comparison"]["within_noise"] and "within the noise" in capsys.readouterr().out


def test_golden_verdict():
    rng = np.random.default_rng(0)
    base = 10 - np.linspace(0, 3, 60)

    def curve(scale, shift=0.0):
        return list(base + scale * np.linspace(0, 1, 60) * rng.standard_normal(60) + shift)

    def within(fast, reference):
        return golden.compare(fast, reference)["within_noise"]

    reference = [curve(0.3), curve(0.3)]
    assert within([curve(0.3), curve(0.3)], reference)
    assert not within([curve(0.3, 0.8), curve(0.3, 0.8)], reference)
    assert not within([curve(0.0, 0.02)] * 2, [curve(0.0)] * 2)  # more than rounding, and no noise
    assert within([curve(0.0, 0.005)] * 2, [curve(0.0)] * 2)
    found = golden.compare([[1.0, 2.0], [1.0, 4.0]], [[1.5, 2.0], [1.5, 3.0]])["windows"]
    assert len(found) == 1 and found[0]["fast_reference_mean"] == pytest.approx((0.5 * 4 + 0 + 1 + 2 + 1) / 8)
    assert found[0]["reference_mean"] == 0.5 and found[0]["fast_max"] == 2.0 and found[0]["signed_mean"] == 0.0


def test_refusals(tmp_path, cache):
    for words, text in (
        (["--peer=/no/such", f"--data={cache}", f"--out={tmp_path}/a"], "--peer"),
        ([f"--data={cache}", f"--out={tmp_path}/a", "--cases=20m"], "--cases"),
    ):
        with pytest.raises(ConfigError, match=text):
            peer.main(words)
    with pytest.raises(ConfigError, match="FIELD=VALUE"):
        ours.settings(["model.layers"])
    with pytest.raises(ConfigError, match="multiple of the 3 workers"):
        ours.settings([], 4, 3)


def test_a_real_child_prints_its_measurement(cache):
    words = children.module("bench.ours", "--rows=2", "--steps=1", "--warmup=1", f"--tokens={cache}", *WORDS)
    found = children.run(words, children.Clock(5)).result
    assert found["kind"] == "ours" and found["rows"] == 2 and found["targets_per_s"] > 0
    assert "error" in children.run([*words, "--rows=0"], children.Clock(5)).result
    assert sys.executable == words[0]
