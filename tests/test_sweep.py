"""scripts/sweep.py: the rule that promotes, tables against numbers by hand, refusals, kills; one campaign for real."""

import csv
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import harness
import numpy as np
import pytest

from llama_jax import config as configs
from llama_jax.errors import CheckpointError, ConfigError, Interrupted, Preempted
from scripts import sweep, sweep_plan, sweep_runs

ROOT = harness.ROOT
TRAINER = ROOT / "tests" / "fakes" / "trainer.py"
ARCHIVED = "configs/sweeps/c4_three_stage.py"


@pytest.fixture
def fake(tmp_path, monkeypatch, capsys):
    """Runs the command here with the fake trainer: call(*words, losses={...}, code=0) -> (output, errors, starts)."""
    starts = tmp_path / "starts"
    monkeypatch.setattr(sweep, "TRAIN", (sys.executable, str(TRAINER)))
    monkeypatch.setattr(sweep_runs, "POLL_S", 0.02)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FAKE_STARTS", str(starts))
    monkeypatch.setenv("FAKE_LOSSES", str(tmp_path / "losses.json"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def call(*words, losses=None, code=0):
        (tmp_path / "losses.json").write_text(json.dumps(losses or {}))
        starts.write_text("")
        found = sweep.main([*map(str, words)])
        said = capsys.readouterr()
        assert found == code, said
        return said.out, said.err, starts.read_text().splitlines()

    return call


# The archived campaign.


def test_the_archived_campaign():
    """SPEC of the campaign, field by field: 6, 4 and 2 runs; what is fixed, what varies, and the three sizes."""
    made = sweep_plan.load(ARCHIVED, {})
    sweep_plan.check(made)
    assert [made.count(stage) for stage in range(3)] == [6, 4, 2] and made.seeds == (42,)
    first = made.points(0, [])
    pairs = [(lr, decay) for lr in (3e-4, 1e-3, 3e-3) for decay in (0.0, 0.1)]
    assert [tuple(value for _, value in point) for point in first] == pairs
    second = made.points(1, first[:2])
    assert [tuple(value for _, value in point) for point in second] == [
        (*pair, b) for pair in pairs[:2] for b in (0.95, 0.99)
    ]
    assert made.points(2, second[1:3]) == second[1:3]
    seen = []
    for stage, point in [(0, first[3]), (1, second[3]), (2, second[0])]:
        config = sweep_plan.run_config(made, stage, point, 42)
        common = (config.training.batch_targets, config.lr_schedule.warmup_fraction, config.lr_schedule.warmup_steps)
        assert common == (32768, 0.05, None) and config.lr_schedule.name == "cosine" and config.seed == 42
        assert (config.lr_schedule.min_lr_ratio, config.optimizer.beta1, config.optimizer.clip_norm) == (0.1, 0.9, 1.0)
        assert config.training.targets_per_parameter == 20 and config.data.path == "data/c4"
        assert config.derived.accumulation == 1
        seen.append(
            (config.derived.unique_params, config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.beta2)
        )
    assert seen == [(20403520, 1e-3, 0.1, 0.95), (48507392, 3e-4, 0.1, 0.99), (91605120, 3e-4, 0.0, 0.95)]


LOSSES = {  # by hand; stage 20m has three equal losses, two of them at the lowest rate among these
    "20m/lr_0.0003-weight_decay_0.0-seed_42": 3.90,
    "20m/lr_0.0003-weight_decay_0.1-seed_42": 3.75,
    "20m/lr_0.001-weight_decay_0.0-seed_42": 3.75,
    "20m/lr_0.001-weight_decay_0.1-seed_42": 3.70,
    "20m/lr_0.003-weight_decay_0.0-seed_42": 3.75,
    "20m/lr_0.003-weight_decay_0.1-seed_42": "diverged",
    # promoted: (0.001, 0.1), then of the three at 3.75 the lower rate: (0.0003, 0.1)
    "50m/lr_0.001-weight_decay_0.1-beta2_0.95-seed_42": 3.60,
    "50m/lr_0.001-weight_decay_0.1-beta2_0.99-seed_42": 3.60,
    "50m/lr_0.0003-weight_decay_0.1-beta2_0.95-seed_42": 3.61,
    "50m/lr_0.0003-weight_decay_0.1-beta2_0.99-seed_42": 3.60,
    # promoted: of the three at 3.60 the lower rate (0.0003, 0.1, 0.99), then the lower beta2 (0.001, 0.1, 0.95)
    "90m/lr_0.0003-weight_decay_0.1-beta2_0.99-seed_42": 3.5,
    "90m/lr_0.001-weight_decay_0.1-beta2_0.95-seed_42": 3.4,
}


def test_promotions_and_tables_by_hand(fake, tmp_path):
    out = tmp_path / "my campaign"
    said, _, starts = fake(f"--sweep={ARCHIVED}", f"--out={out}", "--at-once=2", losses=LOSSES)
    assert sorted(starts) == sorted(f"{name} on None" for name in LOSSES)
    assert (
        said.count("stage 20m: 6 runs, 2 at once")
        == said.count("stage 50m: 4 runs")
        == said.count("stage 90m: 2 runs")
        == 1
    )
    table = (out / "table.md").read_text()
    assert table in said
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    assert [row for row in rows if row[0].isdecimal()] == [
        ["1", "0.001", "0.1", "3.7000", "promoted"],
        ["2", "0.0003", "0.1", "3.7500", "promoted"],
        ["3", "0.001", "0.0", "3.7500", ""],
        ["4", "0.003", "0.0", "3.7500", ""],
        ["5", "0.0003", "0.0", "3.9000", ""],
        ["6", "0.003", "0.1", "diverged", ""],
        ["1", "0.0003", "0.1", "0.99", "3.6000", "promoted"],
        ["2", "0.001", "0.1", "0.95", "3.6000", "promoted"],
        ["3", "0.001", "0.1", "0.99", "3.6000", ""],
        ["4", "0.0003", "0.1", "0.95", "3.6100", ""],
        ["1", "0.001", "0.1", "0.95", "3.4000", ""],
        ["2", "0.0003", "0.1", "0.99", "3.5000", ""],
    ]
    for caveat in ("no robustness over seeds", "no batch-size optimum", "used to select", "no unbiased estimate"):
        assert caveat in table
    lines = list(csv.DictReader(io.StringIO((out / "runs.csv").read_text())))
    found = {f"{line['stage']}/{line['run']}": line["validation_loss"] or line["state"] for line in lines}
    assert found == {name: str(loss) for name, loss in LOSSES.items()}
    assert {(line["subset_loss"], line["optimizer.beta2"]) for line in lines if line["stage"] == "90m"} == {
        ("4.0", "0.99"),
        ("3.9", "0.95"),
    }
    points = list(csv.DictReader(io.StringIO((out / "points.csv").read_text())))
    assert [point["stage"] for point in points if point["promoted"] == "1"] == ["20m", "20m", "50m", "50m"]
    figures = sorted(path.name for path in (out / "figures").iterdir())
    assert figures == [
        f"{name}.{form}" for name in ("heat-20m", "heat-50m", "heat-90m", "response") for form in ("png", "svg")
    ]
    svg = (out / "figures" / "heat-20m.svg").read_text()
    assert all(text in svg for text in (">3.7000<", ">diverged<", ">optimizer.lr<", ">optimizer.weight_decay<"))
    # Once more: nothing is done again, and nothing changes.
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.suffix != ".png"}
    _, _, starts = fake(f"--sweep={ARCHIVED}", f"--out={out}", losses=LOSSES)
    assert starts == [] and all(path.read_bytes() == content for path, content in before.items())


def test_means_and_deviations_over_seeds(fake, tmp_path):
    """A grid from the command line, three seeds: NumPy's mean and sample standard deviation, ranked by the mean."""
    losses = {0.003: [4.1, 4.3, 4.2], 0.01: [4.0, 4.0, 4.9], 0.03: [4.0, 4.0, "diverged"]}
    table = {
        f"grid/lr_{lr}-seed_{seed}": loss
        for lr, row in losses.items()
        for seed, loss in zip((1, 2, 5), row, strict=True)
    }
    words = [
        "--config=configs/smoke.py",
        "--grid=optimizer.lr=0.003,0.01,0.03",
        "--seeds=1,2,5",
        f"--out={tmp_path / 'out'}",
    ]
    said, _, starts = fake(*words, "--config.optimizer.beta2=0.9", losses=table)
    assert len(starts) == 9 and "mean and sample standard deviation over 3 seeds" in said
    assert "no robustness" not in said and "no unbiased estimate" in said
    points = list(csv.DictReader(io.StringIO((tmp_path / "out" / "points.csv").read_text())))
    assert [float(point["optimizer.lr"]) for point in points] == [0.003, 0.01, 0.03]
    for point in points[:2]:
        numbers = losses[float(point["optimizer.lr"])]
        assert np.isclose(float(point["mean_loss"]), np.mean(numbers), rtol=1e-12)
        assert np.isclose(float(point["sample_sd"]), np.std(numbers, ddof=1), rtol=1e-12)
    assert (points[2]["mean_loss"], points[2]["sample_sd"]) == ("", "")
    stored = json.loads((tmp_path / "out/grid/lr_0.01-seed_5/config.json").read_text())["config"]
    assert (stored["seed"], stored["optimizer"]["lr"], stored["optimizer"]["beta2"]) == (5, 0.01, 0.9)


# What is refused.

STAGE = {"name": "a", "config": "configs/smoke.py", "grid": {"optimizer.lr": [0.01, 0.02]}}
NEXT = {"name": "b", "config": "configs/smoke.py", "best": 1}
BAD = [
    ([], "it must be a dictionary"),
    ({"name": "x"}, "it lacks stages"),
    ({"name": "x", "stages": []}, "at least one stage"),
    ({"name": "x", "stages": [STAGE], "sedes": [1]}, "unknown key sedes"),
    ({"name": "x y", "stages": [STAGE]}, "letters, digits"),
    ({"name": "x", "stages": [STAGE], "seeds": []}, "seeds must be a list"),
    ({"name": "x", "stages": [STAGE], "seeds": [1, 1]}, "seeds has a number twice"),
    ({"name": "x", "stages": [STAGE], "seeds": [1, -1]}, "seed = -1 is not an integer"),
    ({"name": "x", "stages": [STAGE], "seeds": 42}, "seeds must be a list"),
    ({"name": "x", "stages": [STAGE], "ties": None}, "ties must be a list"),
    ({"name": "x", "stages": [STAGE], "ties": [[]]}, "ties must be a list"),
    ({"name": "x", "stages": [{**STAGE, "name": "table.md"}]}, "can't have the name table.md"),
    ({"name": "x", "stages": [{**STAGE, "grid": {}}]}, "it has no grid"),
    ({"name": "x", "stages": [{**STAGE, "grid": {"optimizer.lr": []}}]}, "needs a list of values"),
    ({"name": "x", "stages": [{**STAGE, "grid": {"optimizer.lr": [0.1, "0.1"]}}]}, "a value twice"),
    ({"name": "x", "stages": [{**STAGE, "grid": {"optimizer.lr": [-1]}}]}, r"optimizer.lr = -1.0 is not a number"),
    ({"name": "x", "stages": [{**STAGE, "grid": {"optimizer.rate": [1]}}]}, "unknown config field optimizer.rate"),
    ({"name": "x", "stages": [{**STAGE, "grid": {"seed": [1, 2]}}]}, "seeds has the seeds"),
    ({"name": "x", "stages": [{**STAGE, "grid": {"data.path": ["a", "b"]}}]}, "doesn't change what is trained"),
    ({"name": "x", "stages": [{**STAGE, "settings": {"optimizer.lr": 0.1}}]}, "swept and among the settings"),
    ({"name": "x", "stages": [{**STAGE, "best": 1}]}, "every stage but the first"),
    ({"name": "x", "stages": [STAGE, {**NEXT, "best": 0}]}, "every stage but the first"),
    ({"name": "x", "stages": [STAGE, {**NEXT, "best": 3}]}, "best = 3, but the stage before has 2 points"),
    ({"name": "x", "stages": [STAGE, {**NEXT, "grid": STAGE["grid"]}]}, "was swept in an earlier stage"),
    ({"name": "x", "stages": [STAGE, {**NEXT, "name": "a"}]}, "two stages have one name"),
    ({"name": "x", "stages": [STAGE], "ties": ["optimizer.beta2"]}, "optimizer.beta2 is not swept"),
    (
        {"name": "x", "stages": [STAGE, {**NEXT, "settings": {"optimizer.beta2": 0.9}}]},
        "stages a and b differ in .*: optimizer.beta2: 0.98 -> 0.9",
    ),
    ({"name": "x", "stages": [STAGE, {**NEXT, "settings": {"data.path": "d"}}]}, "stages a and b differ .*data.path"),
    ({"name": "x", "stages": [STAGE], "settings": {"evaluation.full_at_end": False}}, "full_at_end must be True"),
    ({"name": "x", "stages": [STAGE], "settings": {"training.microbatch": 5}}, "stage a, lr_0.01-seed_42: training.mi"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), BAD)
def test_a_bad_sweep_is_refused(content, message):
    with pytest.raises(ConfigError, match=message) as caught:
        sweep_plan.check(sweep_plan.make(content, {}))
    assert "\n" not in str(caught.value)


GRID = ("--config=configs/smoke.py", "--grid=optimizer.lr=0.003,0.01")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out=x"], "give either --sweep=FILE or --config=FILE with --grid"),
        ([f"--sweep={ARCHIVED}", *GRID, "--out=x"], "give either"),
        ([f"--sweep={ARCHIVED}", "--grid=optimizer.eps=1", "--out=x"], "--grid goes with --config"),
        (["--sweep=nowhere.py", "--out=x"], "nowhere.py does not exist"),
        ([*GRID, "--grid=optimizer.lr=1", "--out=x"], "each field once"),
        ([*GRID, "--grid=optimizer.lr", "--out=x"], "FIELD=V1,V2 is needed"),
        ([*GRID, "--seeds=a", "--out=x"], "--seeds=a: numbers"),
        ([*GRID, "--config.optimizer.lr=1", "--out=x"], "optimizer.lr is swept and among the settings"),
        ([*GRID, "--config.seed=1", "--out=x"], "seed can't be among the settings"),
        ([*GRID, "--task=1", "--out=x"], "--stage and --task belong together"),
        ([*GRID, "--where", "--out=x"], "--where needs both"),
        ([*GRID, "--stage=1", "--task=2", "--out=x"], "the sweep has no such run"),
        ([*GRID, "--devices=0,0", "--out=x"], "each once"),
        ([*GRID, "--devices=0,1", "--at-once=3", "--out=x"], "--at-once=3: from 1 to the number of GPUs, which is 2"),
        ([*GRID, "--at-once=0", "--out=x"], "--at-once=0"),
    ],
)
def test_bad_arguments_are_one_line(words, message, fake, tmp_path, monkeypatch):
    _, error, starts = fake(
        *[word.replace("=x", f"={tmp_path / 'x'}") if word == "--out=x" else word for word in words], code=2
    )
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error and starts == []


def test_other_settings_and_other_runs_are_refused(fake, tmp_path):
    out = tmp_path / "out"
    fake(*GRID, f"--out={out}")
    _, error, _ = fake("--config=configs/smoke.py", "--grid=optimizer.lr=0.003", f"--out={out}", code=2)
    assert "holds a sweep of other settings" in error and "\n  stages[0].grid.optimizer.lr: [" in error
    assert fake(*GRID, "--config.optimizer.eps=1e-6", f"--out={out}", "--tasks", code=2)[1].count("\n") == 2
    fake(*GRID, f"--out={out}", "--config.log.every_updates=7")  # an execution field may change
    _, error, _ = fake(*GRID, f"--out={out}", "--config.optimizer.eps=1e-6", code=2)
    assert "1e-06" in error
    stored = json.loads((out / "grid/lr_0.01-seed_42/config.json").read_text())
    stored["config"]["optimizer"]["beta2"] = 0.5
    (out / "grid/lr_0.01-seed_42/config.json").write_text(json.dumps(stored))
    _, error, _ = fake(*GRID, f"--out={out}", code=2)
    assert "holds a run of another recipe (here old -> new)\n  optimizer.beta2: 0.5 -> 0.98\n" in error
    _, error, _ = fake(*GRID, f"--out={out}", "--table", code=2)
    assert "holds a run of another recipe" in error
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    _, error, _ = fake(*GRID, f"--out={tmp_path / 'foreign'}", code=4)
    assert "holds thesis.tex and no sweep.json" in error
    assert fake(*GRID, f"--out={tmp_path / 'foreign'}", "--tasks", code=4)[1] == error
    fake(*GRID, f"--out={tmp_path / 'new'}", "--tasks")
    assert not (tmp_path / "new").exists()


def test_tasks_that_begin_together_make_one_record(tmp_path, monkeypatch):
    """One finds no record; before it looks at the folder, another has written it, and a third was killed writing it."""
    made, listdir, write = sweep_plan.load("configs/sweeps/smoke.py", {}), os.listdir, sweep.write_atomic
    used = []

    def late(folder):
        monkeypatch.setattr(os, "listdir", listdir)
        monkeypatch.setattr(os, "getpid", lambda: 7)
        sweep.check_folder(made, tmp_path)
        monkeypatch.setattr(os, "getpid", lambda: 8)
        used[0].write_text('{"progr')
        return listdir(folder)

    def note(path, data, temporary):
        used.append(temporary)
        write(path, data, temporary)

    monkeypatch.setattr(os, "listdir", late)
    monkeypatch.setattr(sweep, "write_atomic", note)
    for _ in range(2):
        sweep.check_folder(made, tmp_path)
    assert len(set(used)) == 2 and {path.name for path in tmp_path.iterdir()} == {"sweep.json", used[0].name}


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(sweep_runs.fcntl, "flock", flock)
    with sweep_runs.locked(tmp_path, False, sweep_runs.Stop()) as lock:
        assert os.fstat(lock)
    assert capsys.readouterr().err == (
        f"warning: {tmp_path}: this file system has no locks (No locks available); run one sweep here only\n"
    )


def test_other_data_and_damaged_results_are_refused(fake, tmp_path, monkeypatch):
    out = tmp_path / "out"
    fake(*GRID, f"--out={out}")
    (out / "grid/lr_0.01-seed_42/result.json").unlink()
    _, error, _ = fake(*GRID, f"--out={out}", "--table", code=3)
    assert "grid/lr_0.01-seed_42 is not done; run the sweep, or its stage 1, first" in error
    monkeypatch.setenv("FAKE_DATA", "other")
    _, error, _ = fake(*GRID, f"--out={out}", code=3)
    assert "lr_0.01-seed_42 was trained on other data than" in error
    (out / "grid/lr_0.01-seed_42/result.json").write_text('{"validation_loss": null}')
    _, error, _ = fake(*GRID, f"--out={out}", code=3)
    assert "it has no validation loss" in error


def test_a_failed_run_ends_the_sweep_with_its_code(fake, tmp_path):
    out = tmp_path / "out"
    words = ["--config=configs/smoke.py", "--grid=optimizer.lr=0.003,0.01,0.02", f"--out={out}"]
    _, error, starts = fake(*words, losses={"grid/lr_0.01-seed_42": {"code": 6}}, code=6)
    assert f"error: grid/lr_0.01-seed_42: exit code 6: it was told to fail ({out}" in error and len(starts) == 2
    _, error, _ = fake(*words, losses={"grid/lr_0.01-seed_42": {"kill": 9}}, code=1)
    assert "exit code -9: it said nothing (" in error  # and not what the start before it had said
    _, _, starts = fake(*words)
    assert len(starts) == 2  # the first run is not done again


def test_too_few_points_are_left(fake, tmp_path):
    losses = {f"small/lr_{lr}-seed_{seed}": "diverged" for lr in (0.003, 0.01) for seed in (1, 2, 3)}
    _, error, starts = fake("--sweep=configs/sweeps/smoke.py", f"--out={tmp_path / 'out'}", losses=losses, code=2)
    assert "stage small: only 0 of 2 points have a finite loss, 1 are to be promoted" in error and len(starts) == 6


# Devices, view, tasks.


def test_one_process_a_device(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_S", "0.2")
    words = ["--config=configs/smoke.py", "--grid=optimizer.lr=0.003,0.01,0.02,0.03", f"--out={tmp_path / 'out'}"]
    _, _, starts = fake(*words, "--devices=MIG-7,3")
    assert sorted(line.split(" on ")[1] for line in starts) == ["3", "3", "MIG-7", "MIG-7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert sweep.find_devices("auto", None) == ["4", "5", "6"] and sweep.find_devices("auto", 2) == ["4", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert sweep.find_devices("auto", None) == [None] and sweep.find_devices("auto", 3) == [None] * 3
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    lines = ["GPU 0: H200 (UUID: a)", "  MIG 1g.18gb     Device  0: (UUID: MIG-c)", "GPU 1: H200 (UUID: b)"]
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert sweep.find_devices("auto", None) == ["0", "1"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_view_has_one_line_a_run(tmp_path, monkeypatch):
    jobs = [sweep_runs.Job(name, tmp_path / name, ()) for name in "abcd"]
    for job in jobs:
        job.folder.mkdir()
    line = {"kind": "train", "update": 1200, "loss": 4.25, "targets_per_s": 81000.4, "eta_s": 61.2}
    (tmp_path / "b" / "metrics.jsonl").write_text(json.dumps(line) + '\n{"kind": "train", "upd')
    (tmp_path / "c" / "result.json").write_text('{"validation_loss": 3.5}')
    (tmp_path / "d" / "diverged.json").write_text('{"said": "update 3"}')
    wanted = [
        "a  waiting",
        "b  running  update 1,200  loss 4.2500  81,000 targets/s  61 s to go",
        "c  done, loss 3.5000",
        "d  diverged",
    ]
    log, screen = io.StringIO(), Terminal()
    monkeypatch.setenv("COLUMNS", "200")
    for stream in (log, screen):
        view = sweep_runs.View(jobs, stream)
        view.show({"b"})
        view.show({"b"})
    assert log.getvalue().splitlines() == wanted  # the second call has nothing new
    assert screen.getvalue() == "".join(f"\x1b[2K{text}\n" for text in wanted)
    view.show(set(), last=True)
    assert screen.getvalue().endswith(
        "\x1b[4A" + "".join(f"\x1b[2K{t}\n" for t in [wanted[0], "b  stopped at update 1,200", *wanted[2:]])
    )


def test_tasks_of_an_array_do_one_run_each(fake, tmp_path):
    words = ["--sweep=configs/sweeps/smoke.py", f"--out={tmp_path / 'out'}"]
    assert fake(*words, "--tasks")[0] == "6 small\n6 wide\n"
    losses = {f"small/lr_0.01-seed_{seed}": 3.0 for seed in (1, 2, 3)}
    _, error, _ = fake(*words, "--stage=2", "--task=0", losses=losses, code=3)
    assert "small/lr_0.003-seed_1 is not done; run the sweep, or its stage 1, first" in error
    for task in range(6):
        _, _, starts = fake(*words, "--stage=1", f"--task={task}", losses=losses)
        assert len(starts) == 1
    folder = fake(*words, "--stage=2", "--task=4", "--where", losses=losses)[0].strip()
    assert folder == str(tmp_path / "out/wide/lr_0.01-beta2_0.99-seed_2") and not Path(folder).exists()
    _, _, starts = fake(*words, "--stage=2", "--task=4", losses=losses)
    assert starts == ["wide/lr_0.01-beta2_0.99-seed_2 on None"] and Path(folder).exists()


# Signals and kills.


def test_a_second_signal_ends_the_runs_at_once(tmp_path):
    """The process saves for ever after the first; the second one ends it, as it does a training run."""
    script = "trap 'trap - TERM' TERM; echo ready; while :; do sleep 0.02; done"
    job = sweep_runs.Job("a", tmp_path / "a", ("bash", "-c", script))
    stop = sweep_runs.Stop()
    stop.number = signal.SIGTERM

    class Impatient:
        def show(self, running, last=False):
            console = tmp_path / "a" / "console.log"
            if stop.count < 2 and console.exists() and console.read_text():
                stop.count += 1
                time.sleep(0.1)

    with open(os.devnull) as null, pytest.raises(Preempted, match="SIGTERM received"):
        sweep_runs.run_all([job], [None], null.fileno(), stop, Impatient())
    assert stop.count == 2


def test_a_folder_in_use_is_waited_for(tmp_path, monkeypatch, capsys):
    """Tasks of an array share it; a whole sweep excludes them and others, and a signal ends the wait."""
    monkeypatch.setattr(sweep_runs, "POLL_S", 0.01)
    stop = sweep_runs.Stop()
    with sweep_runs.locked(tmp_path, True, stop), sweep_runs.locked(tmp_path, True, stop):
        with (
            pytest.raises(CheckpointError, match="in use by another sweep"),
            sweep_runs.locked(tmp_path, False, stop, 0.1),
        ):
            pass
        stop.count, stop.number = 1, signal.SIGINT
        with pytest.raises(Interrupted, match="SIGINT received"), sweep_runs.locked(tmp_path, False, stop):
            pass
    with sweep_runs.locked(tmp_path, False, stop, 0):
        pass
    assert capsys.readouterr().err.count("waiting for the runs of an earlier sweep") == 1


def processes(mark):
    """Ids of the processes that have a text among their variables."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


UPDATES = {
    "a": 10,
    "b": 11,
    "c": 10,
}  # a wider model has longer virtual epochs, and so other short updates at their ends


def test_a_campaign_killed_twice(tmp_path):
    """Three stages of real training, five runs. SIGTERM in stage a: the run saves. SIGKILL in stage b: the run saves by
    itself, and the next start waits for it. Then promotions by hand, and an interrupted run against an unbroken one.
    """
    commands, out = harness.Commands(tmp_path, quick=True), tmp_path / "campaign"
    base = str(commands.save(harness.tiny()))
    stages = [
        {"name": "a", "config": base, "grid": {"optimizer.lr": [0.003, 0.03]}},
        {
            "name": "b",
            "config": base,
            "best": 1,
            "settings": {"model.ffn": 48},
            "grid": {"optimizer.beta2": [0.8, 0.98]},
        },
        {"name": "c", "config": base, "best": 1},  # of the shape of a, whose program is in the compile cache
    ]
    content = {"name": "tiny", "seeds": [7], "ties": ["optimizer.lr", "optimizer.beta2"], "stages": stages}
    (tmp_path / "tiny.py").write_text(f"def get_sweep():\n    return {content!r}\n")
    words = [sys.executable, "scripts/sweep.py", f"--sweep={tmp_path / 'tiny.py'}", f"--out={out}"]

    def start(fault=None):
        """A start of the campaign; with a fault also the id of the run that it has stopped."""
        variables, fired = commands.environment(fault)
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, cwd=ROOT, env=variables, stdout=pipe, stderr=pipe, text=True)
        if not fault:
            return process, None
        end = time.monotonic() + 200
        while not fired.exists():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        assert fired.read_text().split() == [fault]
        (stopped,) = set(processes(f"LLAMA_JAX_TEST_FAULT_FIRED={fired}")) - {process.pid}
        return process, stopped

    process, stopped = start("stop@step:4")
    process.terminate()
    time.sleep(0.5)  # the run gets its SIGTERM while it is stopped
    os.kill(stopped, signal.SIGCONT)
    said, error = process.communicate(timeout=120)
    assert process.returncode == 75, error
    assert error == "error: SIGTERM received: the runs have saved, the same command continues\n"
    names = ["a/lr_0.003-seed_7", "a/lr_0.03-seed_7"]
    assert harness.kept(out / names[0])[-1][1] == "recovery" and f"{names[0]}  stopped at update " in said

    process, stopped = start("stop@step:11")  # only runs of stage b have so many
    process.kill()
    process.communicate(timeout=60)
    process, _ = start()
    time.sleep(2)
    os.kill(stopped, signal.SIGCONT)
    said, error = process.communicate(timeout=240)
    assert process.returncode == 0, error
    assert error in ("", f"warning: {out} is in use: waiting for the runs of an earlier sweep\n")

    def losses(names):
        return {name: json.loads((out / name / "result.json").read_text())["validation_loss"] for name in names}

    found = losses(names)
    assert found[names[0]] != found[names[1]]
    best = min(found, key=found.get).removeprefix("a/").removesuffix("-seed_7")
    names = [f"b/{best}-beta2_0.8-seed_7", f"b/{best}-beta2_0.98-seed_7"]
    assert sorted(f"b/{path.name}" for path in (out / "b").iterdir()) == names
    found = losses(names)
    assert found[names[0]] != found[names[1]]
    last = min(found, key=found.get).replace("b/", "c/")
    assert [f"c/{path.name}" for path in (out / "c").iterdir()] == [last]
    starts = {}
    for name in ("a/lr_0.003-seed_7", "a/lr_0.03-seed_7", *names, last):
        assert [line["update"] for line in harness.lines(out / name, "train")] == list(range(1, UPDATES[name[0]] + 1))
        starts[name] = len(harness.strict((out / name / "environment.json").read_text())["starts"])
    assert list(starts.values()) == [2, 1, 2, 1, 1]
    assert f"| {losses([last])[last]:.4f} |" in (out / "table.md").read_text()
    config = configs.from_dict(json.loads((out / names[0] / "config.json").read_text())["config"])
    harness.run(config, tmp_path / "unbroken")
    assert harness.outcome(out / names[0]) == harness.outcome(tmp_path / "unbroken")
