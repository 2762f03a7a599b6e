"""The throughput benchmark: whatever a candidate does, the sweep goes on, and what it selects trains."""

import os
import subprocess
import sys

import pytest
from harness import ROOT, Commands, strict, tiny, write_cache

from bench import candidates, tables, throughput, trial
from llama_jax import config as configs
from llama_jax.errors import ConfigError

CHOSEN = {  # what timing.measure gives for every candidate that runs
    *("update_ms", "windows_ms", "warmup", "updates", "targets_per_s", "mfu", "tflops_per_s", "roofline", "compile_s"),
    *("trace_s", "compile_cached", "peak_bytes", "memory_bytes", "program_bytes", "loss", "resolved", "workers"),
    *("rows", "microbatch", "accumulation", "devices"),
}


def check_record(record):
    """The schema of the documentation of bench/throughput.py."""
    assert set(record) == {"format_version", "command", "commit", "seconds", "excluded", "settings", "cases"}
    assert record["format_version"] == 1 and record["seconds"] > 0
    keys = {"warmup", "updates", "windows", "minutes", "timeout_s", "memory_share", "memory_gib"}
    assert set(record["settings"]) == keys | {"tokens", "quick", "axes"}
    for case in record["cases"]:
        assert set(case) == set(throughput.case_record(tiny()))
        for entry in case["candidates"]:
            assert set(entry) == {"name", "settings", "status", "reason", "measured"}
            assert tuple(entry["settings"]) == candidates.CHOICES
            assert (entry["measured"] is not None) == (entry["status"] in ("measured", "rejected"))
            assert (entry["reason"] is None) == (entry["status"] == "measured")
            if entry["measured"]:
                assert set(entry["measured"]) == CHOSEN
        names = [entry["name"] for entry in case["candidates"]]
        assert len(set(names)) == len(names)
        usable = [entry for entry in case["candidates"] if entry["status"] == "measured"]
        fastest = min(usable, key=lambda entry: entry["measured"]["update_ms"], default=None)
        assert case["selected"] == (fastest and fastest["name"])


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Processes that share a compile cache."""
    commands = Commands(tmp_path, quick=True)
    for name, value in commands.environment()[0].items():
        if "JAX" in name:
            monkeypatch.setenv(name, value)
    return commands


def test_a_sweep_survives_its_candidates_and_its_choice_trains(commands, tmp_path, monkeypatch, capsys):
    cache, record_file, tuned = (
        write_cache(tmp_path / "cache"),
        tmp_path / "throughput_h200.json",
        tmp_path / "tuned.py",
    )
    monkeypatch.setenv("LLAMA_JAX_TEST_FAULT", "kill@microbatch=4 remat=True:1")
    throughput.main(
        [
            f"--config={commands.save(tiny())}",
            f"--data={cache}",
            "--axis=model.attention=cudnn,xla",  # impossible here, and what auto is
            "--axis=training.microbatch=5,4",  # 5 doesn't divide 16
            "--axis=model.remat=True",  # killed
            "--memory-gib=0.0004",  # for microbatch 4, not for 16
            *("--warmup=1", "--updates=2", "--timeout=200", f"--out={record_file}", f"--write={tuned}"),
        ]
    )
    record = strict(record_file.read_text())
    check_record(record)
    (case,) = record["cases"]
    outcomes = {entry["name"]: (entry["status"], entry["reason"]) for entry in case["candidates"]}
    assert list(outcomes) == [
        "as configured",
        "attention=cudnn",
        "microbatch=5",
        "microbatch=4",
        "microbatch=4 remat=True",
    ]
    assert outcomes["as configured"][0] == "rejected" and "over 90%" in outcomes["as configured"][1]
    assert outcomes["attention=cudnn"][0] == "failed" and "cudnn can't run here" in outcomes["attention=cudnn"][1]
    assert outcomes["microbatch=5"] == (
        "skipped",
        "training.microbatch = 5 must divide the 16 sequences that a worker has in an update",
    )
    assert outcomes["microbatch=4"] == ("measured", None)
    assert outcomes["microbatch=4 remat=True"][0] == "failed" and "signal 9" in outcomes["microbatch=4 remat=True"][1]
    assert case["selected"] == "microbatch=4" and case["written"] == str(tuned)
    assert record["command"].endswith("--out=bench/results/throughput_h200.json " + f"--write={tuned}")
    loader = case["real_data"]["measured"]["loader"]
    assert case["real_data"]["status"] == "measured" and loader["targets_per_s"] > 0
    said = capsys.readouterr().out
    assert all(name in said for name in outcomes) and f"{loader['ratio']:.3f} of those" in said
    assert "loading, validation, compilation and checkpoints are excluded" in said

    config = configs.load(tuned)
    changes = configs.diff(configs.to_dict(tiny()), configs.to_dict(config), execution=True)
    assert {field: new for field, _, new in changes} == {
        "name": "tuned",
        "model.attention": "xla",
        "model.head": "chunked",
        "model.kernels": "xla",
        "training.microbatch": 4,
    }
    monkeypatch.delenv("LLAMA_JAX_TEST_FAULT")
    ended = commands.run("llama_jax.main", f"--config={tuned}", f"--workdir={tmp_path / 'run'}")
    assert ended.code == 0, ended.err
    assert strict((tmp_path / "run" / "result.json").read_text())["targets"] == 2240

    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    table = tables.throughput()
    assert table.count("\n| ") == 2 + len(outcomes) and "| **microbatch=4** |" in table  # two: the head


def test_a_candidate_that_hangs_is_ended(monkeypatch):
    monkeypatch.setenv("LLAMA_JAX_TEST_FAULT", "stop@halt:1")
    found = trial.run(tiny(), trial.Limits(timeout_s=2), "halt")
    assert found == {"status": "timed out", "reason": "not done after 2 s", "measured": None}


def test_no_time_at_all(tmp_path):
    """As a script: nothing starts, everything is listed, and no config is written."""
    record_file, tuned = tmp_path / "record.json", tmp_path / "tuned.py"
    command = [sys.executable, "bench/throughput.py", "--config=configs/c4_20m.py", "--rows=32,8", "--minutes=0"]
    command += [f"--out={record_file}", "--axis=training.microbatch=32,8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=Commands(tmp_path).environment()[0])
    assert done.returncode == 6 and done.stderr.startswith("error: no candidate was measured"), done.stderr
    record = strict(record_file.read_text())
    check_record(record)
    found = [[(entry["name"], entry["status"]) for entry in case["candidates"]] for case in record["cases"]]
    assert found == [
        [("as configured", "left out"), ("microbatch=8", "left out")],
        [("as configured", "left out"), ("microbatch=32", "skipped")],
    ]
    assert [case["targets_per_update"] for case in record["cases"]] == [32768, 8192]
    assert not tuned.exists()


def measured(update_ms, **more):
    given = {"update_ms": update_ms, "peak_bytes": None, "memory_bytes": None, "program_bytes": 1, "devices": 1}
    given |= {"resolved": {"attention": "xla", "head": "chunked", "kernels": "xla"}, "environment": {}, **more}
    return trial.judge(given, None)


def swept(times, axes, deadline=float("inf"), config=None):
    """Names and statuses of a sweep over candidates with these times, and the selected one."""
    config, started = config or tiny(), []

    def run(chosen, candidate):
        started.append((candidate.name, chosen.training.microbatch))
        value = times[candidate.name]
        return measured(value) if isinstance(value, int | float) else value

    case = throughput.case_record(config)
    throughput.sweep(case, config, axes, deadline, run, lambda entry: None)
    return [(entry["name"], entry["status"]) for entry in case["candidates"]], case["selected"], started


def test_each_axis_starts_from_the_fastest_so_far():
    axes = {"training.microbatch": [16, 8, 4], "model.kernels": ["auto", "xla"], "model.remat": [False, True]}
    times = {"as configured": 3, "microbatch=8": 2, "microbatch=4": 4, "microbatch=8 remat=True": 2.5}
    found, selected, started = swept(times, axes)  # kernels=xla is what auto turned out to be: never tried
    assert found == [(name, "measured") for name in times]
    assert selected == "microbatch=8"
    assert started[-1] == ("microbatch=8 remat=True", 8)


def test_only_what_runs_and_fits_can_be_selected():
    axes = {"training.microbatch": [8, 4, 2], "model.head": ["plain"]}
    full = measured(1, peak_bytes=91, memory_bytes=100)
    assert full["status"] == "rejected" and measured(1, peak_bytes=90, memory_bytes=100)["status"] == "measured"
    short = trial.failure("error: RESOURCE_EXHAUSTED: Out of memory while trying to allocate; lower it\n", 6)
    times = {
        "as configured": short,
        "microbatch=8": full,
        "microbatch=4": 7,
        "microbatch=2": 9,
        "microbatch=4 head=plain": 8,
    }
    found, selected, _ = swept(times, axes)
    assert [status for _, status in found] == ["out of memory", "rejected", "measured", "measured", "measured"]
    assert selected == "microbatch=4"
    assert swept({"as configured": short, "head=plain": full}, {"model.head": ["plain"]})[1] is None


def test_equal_programs_are_tried_once():
    axes = {"model.head_chunk_rows": [64, 256, 1024, 32768], "training.microbatch": [16, 4]}
    times = {"as configured": 9, "head_chunk_rows=64": 8, "microbatch=4 head_chunk_rows=64": 7}
    found, _, _ = swept(times, axes)  # 16 sequences of 16 are 256 rows, 4 of them are 64
    assert [name for name, _ in found] == list(times)
    packed = {"decentralized.workers": 2, "training.sequence_multiple": 2, "training.microbatch": 4}
    times = {"as configured": 9, "head_chunk_rows=64": 8}  # 2 workers with 4 sequences each: 128 rows
    found, _, _ = swept(times, {"model.head_chunk_rows": [64, 128, 1024]}, config=tiny(packed))
    assert [name for name, _ in found] == list(times)


def test_reasons_of_a_process_that_ended():
    assert trial.failure("warning: x\nerror: no device\nlater\n", 6)["reason"] == "exit code 6: no device"
    assert trial.failure("", -11)["reason"] == "killed by signal 11: nothing was printed"
    trace = "Traceback\n  File x\njax.errors.JaxRuntimeError: INTERNAL: broken\nFor simplicity, JAX has removed\n"
    assert trial.failure(trace, 1)["reason"] == "exit code 1: jax.errors.JaxRuntimeError: INTERNAL: broken"
    fatal = (
        "F1130 17:48:25.471553    9636 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_no\n*** trace\n"
    )
    reason = trial.failure(fatal, -6)["reason"]
    assert reason == "killed by signal 6: parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_no"
    assert trial.failure("error: not enough memory: 5 bytes\n", 6)["status"] == "out of memory"


@pytest.mark.parametrize(
    "words",
    [
        ["--axis=optimizer.lr=0.1"],
        ["--axis=model.attention=fast"],
        ["--axis=model.head_chunk_rows=0"],
        ["--axis=training.microbatch"],
        ["--rows=0"],
        ["--rows=x"],
        ["--minutes=-1"],
        ["--updates=0"],
        ["--timeout=nan"],
        ["--write=configs/smoke.py"],
        ["--write=tuned.json"],
        ["--write=tuned.py", "--rows=8,16"],
    ],
)
def test_refusals_before_anything_starts(words):
    with pytest.raises(ConfigError) as refused:
        options, config, _ = throughput.parse(["--config=configs/smoke.py", *words])
        throughput.make_cases(config, options.rows)
    assert words[0].split("=")[1 if words[0].startswith("--axis=model") else 0] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_only_execution_choices_differ_between_candidates():
    config = configs.load("configs/c4_20m.py")
    for quick in (True, False):
        for candidate in candidates.Search(config, candidates.default_axes(config, quick)):
            assert tuple(candidate.settings) == candidates.CHOICES
            if candidate.settings["training.microbatch"] <= 128:
                chosen = candidates.changed(config, candidate.settings)
                changes = configs.diff(configs.to_dict(config), configs.to_dict(chosen), execution=True)
                assert {field for field, _, _ in changes} <= set(candidates.CHOICES)
                assert configs.make_plan(chosen) == configs.make_plan(config)
    names = [candidate.name for candidate in candidates.Search(config, candidates.default_axes(config, False))]
    assert names[:5] == ["as configured", "microbatch=32", "microbatch=16", "microbatch=8", "microbatch=4"]


def test_a_written_config_sets_its_flags_once(tmp_path, monkeypatch):
    path, resolved = tmp_path / "tuned.py", {"attention": "cudnn", "head": "chunked", "kernels": "mosaic"}
    flags = "--xla_gpu_enable_command_buffer="
    base = configs.load("configs/c4_20m_packed4.py", {"model.kv_heads": 1, "decentralized.adaptive.exclude": 'a"b'})
    path.write_text(candidates.preset(base, "tuned", flags, resolved, ["One.", "Two."]))
    monkeypatch.setenv("XLA_FLAGS", "--xla_other=1")
    for _ in range(2):
        config = configs.load(path)
        assert os.environ["XLA_FLAGS"] == f"--xla_other=1 {flags}"
    changes = configs.diff(configs.to_dict(base), configs.to_dict(config), execution=True)
    assert {field: new for field, _, new in changes} == {
        "name": "tuned",
        **{f"model.{key}": value for key, value in resolved.items()},
    }
