"""metrics.jsonl after every kind of crash, the meter on a clock of its own, the progress line."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import metrics
from llama_jax.errors import CheckpointError, DataError
from llama_jax.metrics import Meter, MetricsLog, Progress

ROOT = Path(__file__).resolve().parent.parent


def train(update, **values):
    return {"kind": "train", "update": update, "targets": update * 10, "loss": 5.0 / update, **values}


def evaluation(update):
    return {"kind": "eval", "update": update, "targets": update * 10, "split": "subset", "loss": 4.0}


def log_of(path, updates, evals=()):
    log = MetricsLog(path)
    for update in range(1, updates + 1):
        log.append(train(update))
        if update in evals:
            log.append(evaluation(update))
    log.close()
    return path


def kinds(path):
    return [(line["kind"][0], line["update"]) for line in metrics.read(path)]


def test_lines_are_strict_json_and_numbers_survive(tmp_path):
    path = tmp_path / "ein Lauf: é" / "metrics.jsonl"
    path.parent.mkdir()
    log = MetricsLog(path)
    lr = 0.1 + 0.2
    shown = log.append(
        train(
            1,
            loss=jnp.float32(2.5),
            lr=np.float64(lr),
            grad_norm=float("nan"),
            worker_loss=[1.0, float("inf")],
            worker_norm=np.array([np.nan, 2.0], np.float32),
            targets=10**12,
            attention="xla",
            mfu=None,
            clipped=True,
        )
    )
    log.close()
    text = path.read_text()
    assert text.count("\n") == 1 and "NaN" not in text and "Infinity" not in text

    def refuse(word):
        raise AssertionError(word)

    line = json.loads(text, parse_constant=refuse)
    assert line == shown
    assert line["loss"] == 2.5 and line["lr"] == lr and line["targets"] == 10**12 and line["clipped"] is True
    assert line["grad_norm"] is None and line["worker_loss"] == [1.0, None] and line["worker_norm"] == [None, 2.0]
    assert line["nonfinite"] == ["grad_norm", "worker_loss", "worker_norm"]
    assert list(metrics.read(path)) == [line]


def test_lines_stay_in_memory_until_flushed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append(train(1))
    assert not path.exists()
    assert log.flush()
    log.append(train(2))
    assert kinds(path) == [("t", 1)]
    assert log.flush(sync=True)
    assert kinds(path) == [("t", 1), ("t", 2)]
    log.close()
    assert kinds(path) == [("t", 1), ("t", 2)]


def test_each_update_once_and_in_order(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(train(1))
    log.append(train(2))
    for wrong in (train(2), train(1), train(4), evaluation(3), evaluation(1)):
        with pytest.raises(ValueError, match="expected"):
            log.append(wrong)
    log.append(evaluation(2))
    log.append(train(3))
    log.close()
    with pytest.raises(ValueError, match="truncate"):
        MetricsLog(tmp_path / "metrics.jsonl").append(train(4))


@pytest.mark.parametrize("keep_eval", [False, True])
def test_resume_drops_what_came_later(tmp_path, keep_eval):
    path = log_of(tmp_path / "metrics.jsonl", 9, evals=(3, 6, 9))
    log = MetricsLog(path)
    log.truncate(6, keep_eval)
    expected = [("t", 1), ("t", 2), ("t", 3), ("e", 3), ("t", 4), ("t", 5), ("t", 6)] + [("e", 6)] * keep_eval
    assert kinds(path) == expected
    log.append(train(7))
    log.close()
    assert kinds(path) == [*expected, ("t", 7)]
    MetricsLog(path).truncate(0)
    assert kinds(path) == []


def test_an_evaluation_before_the_first_update(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.truncate(0)
    assert not path.exists(), "nothing to change"
    log.append(evaluation(0))
    log.append(train(1))
    log.close()
    MetricsLog(path).truncate(1)
    assert kinds(path) == [("e", 0), ("t", 1)]
    MetricsLog(path).truncate(0)
    assert kinds(path) == []


def test_a_log_in_order_is_not_rewritten(tmp_path):
    path = log_of(tmp_path / "metrics.jsonl", 4, evals=(4,))
    before = path.stat()
    MetricsLog(path).truncate(4, keep_eval=True)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_torn_tail_at_every_place(tmp_path, cut):
    path = log_of(tmp_path / "metrics.jsonl", 3)
    path.write_bytes(path.read_bytes()[:-cut])
    assert [line["update"] for line in metrics.read(path)] == [1, 2], "a reader does not see half a line"
    log = MetricsLog(path)
    log.truncate(2)
    log.append(train(3))
    log.close()
    assert kinds(path) == [("t", 1), ("t", 2), ("t", 3)]


def test_damaged_and_missing_lines_are_named(tmp_path, capsys):
    path = log_of(tmp_path / "metrics.jsonl", 6)
    lines = path.read_bytes().split(b"\n")
    lines[2] = b'{"kind": "train", "update": 3, "loss": NaN}'
    lines[3] = b"\0\0\0"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match="line 3: NaN is not JSON"):
        list(metrics.read(path))
    log = MetricsLog(path)
    log.truncate(8)
    warning = capsys.readouterr().err
    assert "dropped 2 damaged lines" in warning and "updates 3-4, 7-8" in warning
    log.append(train(9))
    log.close()
    assert [update for _, update in kinds(path)] == [1, 2, 5, 6, 9]


def test_duplicates_of_an_older_crash_are_dropped(tmp_path):
    path = log_of(tmp_path / "metrics.jsonl", 3)
    path.write_bytes(path.read_bytes() + b'{"kind": "train", "update": 2}\n{"kind": "train", "update": 4}\n')
    MetricsLog(path).truncate(4)
    assert [update for _, update in kinds(path)] == [1, 2, 3, 4]


def test_a_full_disk_loses_no_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append(train(1))
    assert log.flush()
    write = os.write

    def half(descriptor, data):
        write(descriptor, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    log.append(train(2))
    monkeypatch.setattr(metrics.os, "write", half)
    assert not log.flush(sync=True) and not log.flush(sync=True)
    assert capsys.readouterr().err.count("cannot write (No space left on device)") == 1
    assert kinds(path) == [("t", 1)] and path.read_bytes().endswith(b"}\n"), "no torn line stays"
    log.append(train(3))
    with pytest.raises(CheckpointError, match="2 lines could not be written"):
        log.close()
    monkeypatch.undo()
    log.close()
    assert kinds(path) == [("t", 1), ("t", 2), ("t", 3)]


def test_a_device_that_is_always_full(capsys):
    log = MetricsLog("/dev/full")
    log.append(train(1))
    assert not log.flush(sync=True)
    with pytest.raises(CheckpointError, match="/dev/full"):
        log.close()


def test_killed_while_writing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]; from test_metrics import *\n"
        "log = MetricsLog(sys.argv[1])\n"
        "for update in range(1, 10): log.append(train(update)); log.flush()"
    )
    fired = tmp_path / "fired"
    environment = {"LLAMA_JAX_TEST_FAULT": "kill@metrics_flush:4", "LLAMA_JAX_TEST_FAULT_FIRED": str(fired)}
    command = [sys.executable, "-c", code, str(path), str(ROOT), str(ROOT / "tests")]
    assert subprocess.run(command, env=os.environ | environment, timeout=60).returncode == -9
    assert fired.read_text() == "kill@metrics_flush:4\n"
    assert kinds(path) == [("t", 1), ("t", 2), ("t", 3)]


def test_reading_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="nothing"):
        list(metrics.read(tmp_path / "nothing"))


# The meter


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_rates_without_and_with_pauses():
    clock = Clock()
    meter = Meter(10_000, flops_per_target=6.0, peak_flops=2000.0, window=2, clock=clock)
    assert meter.rates() == {
        "targets_per_s": None,
        "targets_per_s_all": None,
        "mfu": None,
        "eta_s": None,
        "wall_s": 0.0,
    }
    clock.now += 50  # compiling, and the first update
    meter.step(100)
    assert meter.rates()["targets_per_s"] is None and meter.rates()["targets_per_s_all"] == 2.0
    clock.now += 2
    meter.step(100)
    assert meter.rates()["targets_per_s"] == 50.0 and meter.rates()["mfu"] == pytest.approx(50 * 6 / 2000)
    with meter.pause():
        clock.now += 30
        with meter.pause():  # a save within an evaluation counts once
            clock.now += 10
    clock.now += 1
    meter.step(100)
    rates = meter.rates()
    assert rates["targets_per_s"] == pytest.approx(200 / 3), "40 s of evaluation are left out"
    assert rates["wall_s"] == 93.0 and rates["targets_per_s_all"] == pytest.approx(300 / 93)
    assert rates["eta_s"] == pytest.approx((10_000 - 300) * 43 / 200), "the pauses will come again"
    clock.now += 4
    meter.step(100)
    assert meter.rates()["targets_per_s"] == pytest.approx(200 / 5), "only the last two updates"


def test_a_step_that_ends_in_a_pause_does_not_count_the_pause():
    clock = Clock()
    meter = Meter(1000, clock=clock)
    meter.step(10)
    clock.now += 2
    with meter.pause():
        clock.now += 5
        meter.step(10)
    assert meter.rates()["targets_per_s"] == 5.0


def test_an_update_that_is_read_late():
    clock = Clock()
    meter = Meter(1000, clock=clock)
    for finished_s, late_s in ((1005.0, 1.9), (1007.0, 1.9), (1009.0, 0.0)):  # nothing comes behind the last
        clock.now = finished_s + late_s
        meter.step(10, finished_s)
    assert meter.rates()["targets_per_s"] == 5.0 and meter.rates()["eta_s"] == (1000 - 30) * 4 / 20


def test_a_slow_update_lowers_the_rate():
    clock = Clock()
    meter = Meter(1000, clock=clock)
    for seconds in (1, 1, 1.1):
        clock.now += seconds
        meter.step(10)
    assert meter.rates()["targets_per_s"] == pytest.approx(20 / 2.1)


def test_a_restarted_run_adds_up():
    clock = Clock()
    meter = Meter(1000, targets=600, wall_s=120.0, clock=clock)
    clock.now += 20
    meter.step(50)
    clock.now += 10
    meter.step(50)
    rates = meter.rates()
    assert rates["wall_s"] == 150.0 and rates["targets_per_s_all"] == pytest.approx(700 / 150)
    assert rates["targets_per_s"] == 5.0 and rates["eta_s"] == pytest.approx(300 / 5)


def test_a_stopped_process_is_kept_out():
    clock = Clock()
    meter = Meter(1000, clock=clock)
    for seconds in (1, 1, 30):
        clock.now += seconds
        if seconds == 30:
            meter.restart()
        meter.step(10)
    assert meter.rates()["targets_per_s"] is None
    clock.now += 1
    meter.step(10)
    assert meter.rates()["targets_per_s"] == 10.0


def test_a_clock_set_back_changes_nothing(monkeypatch):
    times = iter([5000.0, 1000.0, 10.0, 0.0])
    monkeypatch.setattr("time.time", lambda: next(times))
    meter = Meter(100)
    meter.step(1)
    meter.step(1)
    rates = meter.rates()
    assert rates["wall_s"] >= 0 and (rates["targets_per_s"] is None or rates["targets_per_s"] > 0)
    assert next(times) == 5000.0, "the wall clock is not read"


# The progress line


def rated(update):
    return train(update, lr=0.004, targets_per_s=1_234_567.0, mfu=0.4321, eta_s=7500.0)


def test_progress_text():
    assert metrics.progress_text(rated(1250), 3114) == (
        "update 1,250/3,114  loss 0.0040  lr 4.000e-03  1.23M targets/s  MFU 43.2%  ETA 2h05m"
    )
    assert metrics.progress_text({"update": 1, "loss": None}, 5) == "update 1/5  loss ?  lr ?  ? targets/s  ETA ?"


def test_duration():
    seconds = {0: "0s", 59.6: "1m00s", 200: "3m20s", 7500: "2h05m", 86400 * 4 + 3600 * 3 + 1700: "4d03h"}
    assert {value: metrics.duration(value) for value in seconds} == seconds


def test_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    progress = Progress(25, every=10, stream=stream)
    for update in range(1, 26):
        progress.show(rated(update))
    progress.note("evaluated")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["update 10/25", "update 20/25", "update 25/25", "evaluated"]
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_one_live_line_on_a_terminal():
    stream = io.StringIO()
    stream.isatty = lambda: True
    progress = Progress(3, every=10, stream=stream)
    progress.show(rated(1))
    progress.show(rated(2))
    assert stream.getvalue().count("\r") == 2 and "\n" not in stream.getvalue()
    progress.note("evaluated")
    progress.show(rated(3))
    progress.close()
    progress.close()
    assert stream.getvalue().count("\n") == 2 and "\x1b[Kevaluated\n" in stream.getvalue()


def test_a_closed_output_ends_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # what Python makes of one that is closed at the start
    progress = Progress(3, every=1)
    progress.show(rated(1))
    progress.note("x")
    progress.close()


def test_a_reader_that_goes_away_ends_nothing():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    progress = Progress(3, every=1, stream=Closed())
    progress.show(rated(1))
    progress.note("x")
    progress.close()
