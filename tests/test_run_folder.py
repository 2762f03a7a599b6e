"""The run folder: who may go on in it, and what is written there."""

import copy
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llama_jax import config, run_folder
from llama_jax.errors import CheckpointError, ConfigError, DataError

ROOT = Path(__file__).resolve().parent.parent
RESOLVED = {"attention": "xla", "compute_dtype": "float32"}
DATA = {"manifest": "ab" * 32}


@pytest.fixture(scope="module")
def recipe():
    return config.to_dict(config.load(ROOT / "configs" / "smoke.py"))


def start(path, recipe, resolved=RESOLVED, data=DATA):
    return run_folder.open_run(path, recipe, resolved, data)


def changed(recipe, **fields):
    result = copy.deepcopy(recipe)
    for name, value in fields.items():
        section, field = name.split("__")
        assert result[section][field] != value
        result[section][field] = value
    return result


def content(path):
    return {file.name: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file() and file.name != ".lock"}


def test_a_new_folder_and_the_same_again(tmp_path, recipe):
    path = tmp_path / "Läufe hier" / "漢 1"
    run = start(path, recipe)
    assert (run.resumed, run.finished, run.changes, run.path) == (False, False, (), path)
    run.close()
    stored = json.loads((path / "config.json").read_text())
    assert stored["config"] == recipe and stored["resolved"] == RESOLVED and stored["data"] == DATA
    assert run_folder.read_run(path) == stored
    assert config.to_dict(config.load(path / "config.json")) == recipe
    before = (path / "config.json").stat().st_ino
    run = start(path, recipe)
    assert run.resumed and (path / "config.json").stat().st_ino == before
    run.close()
    assert len(json.loads((path / "environment.json").read_text())["starts"]) == 2
    assert sorted(file.name for file in path.iterdir()) == [".lock", "config.json", "environment.json"]


def test_the_places(tmp_path, recipe):
    run = start(tmp_path, recipe)
    places = [run.metrics, run.checkpoints, run.exports, run.result, run.best]
    run.close()
    assert [place.relative_to(tmp_path).as_posix() for place in places] == [
        "metrics.jsonl",
        "checkpoints",
        "exports",
        "result.json",
        "best.json",
    ]


def test_a_changed_recipe_is_refused_field_by_field(tmp_path, recipe):
    start(tmp_path, recipe).close()
    before = content(tmp_path)
    other = changed(recipe, optimizer__lr=0.123, data__shuffle_group_size=7, log__every_updates=3)
    with pytest.raises(ConfigError) as error:
        start(tmp_path, other, RESOLVED | {"attention": "cudnn"})
    first, *fields = str(error.value).split("\n")
    assert str(tmp_path) in first and "--workdir" in first
    assert sorted(fields) == sorted(
        [
            f"  optimizer.lr: {recipe['optimizer']['lr']} -> 0.123",
            f"  data.shuffle_group_size: {recipe['data']['shuffle_group_size']} -> 7",
            "  resolved.attention: xla -> cudnn",
        ]
    )
    assert error.value.exit_code == 2
    assert content(tmp_path) == before


def test_execution_only_fields_may_change_and_are_recorded(tmp_path, recipe):
    start(tmp_path, recipe).close()
    other = changed(recipe, log__every_updates=3, data__prefetch_groups=0)
    run = start(tmp_path, other)
    run.close()
    assert run.resumed
    assert f"log.every_updates: {recipe['log']['every_updates']} -> 3" in run.changes and len(run.changes) == 2
    assert run_folder.read_run(tmp_path)["config"] == other
    starts = json.loads((tmp_path / "environment.json").read_text())["starts"]
    assert [record["changes"] for record in starts] == [[], list(run.changes)]


def test_other_data_is_refused(tmp_path, recipe):
    start(tmp_path, recipe).close()
    for data in ({"manifest": "cd" * 32}, {}, DATA | {"more": 1}):
        with pytest.raises(DataError) as error:
            start(tmp_path, recipe, data=data)
        assert error.value.exit_code == 3 and "\n" not in str(error.value)
    with pytest.raises(DataError, match=f"manifest: {'ab' * 32} -> {'cd' * 32}"):
        start(tmp_path, recipe, data={"manifest": "cd" * 32})


def test_a_finished_run_is_not_written_to(tmp_path, recipe):
    start(tmp_path, recipe).close()
    (tmp_path / "result.json").write_text("{}")
    before = content(tmp_path)
    run = start(tmp_path, changed(recipe, log__every_updates=3))
    run.close()
    assert run.finished and content(tmp_path) == before


@pytest.mark.parametrize("name", ["thesis.tex", "checkpoints/1/x", "metrics.jsonl"])
def test_a_foreign_folder_is_refused(tmp_path, recipe, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("x")
    with pytest.raises(CheckpointError, match="not a run folder") as error:
        start(tmp_path, recipe)
    assert error.value.exit_code == 4
    assert list(content(tmp_path)) == [Path(name).name]


def test_what_a_scheduler_or_a_killed_start_left_is_accepted(tmp_path, recipe):
    for name in ("slurm-17.out", "job.log", ".lock", "environment.json.tmp", "config.json.tmp"):
        (tmp_path / name).write_text("x")
    run = start(tmp_path, recipe)
    run.close()
    assert not run.resumed and run_folder.read_run(tmp_path)["config"] == recipe


@pytest.mark.parametrize(
    "text, reason",
    [
        ("{", "unreadable"),
        ('{"lr": NaN}', "unreadable"),
        ('{"optimizer": {}}', "not written by"),
        ('{"program": "llama_jax", "format_version": 9}', "format version 9"),
        ('{"program": "llama_jax", "format_version": 1}', "needs config"),
    ],
)
def test_a_config_of_something_else_is_refused(tmp_path, recipe, text, reason):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=reason):
        start(tmp_path, recipe)
    assert (tmp_path / "config.json").read_text() == text


def test_places_that_cannot_be_written(tmp_path, recipe):
    (tmp_path / "file").write_text("x")
    names = ("file/run", "long" * 100, "\0", "\ud800", "\udcff")
    for path in (*(tmp_path / name for name in names), "/proc/run"):
        with pytest.raises(CheckpointError, match="run folder"):
            start(path, recipe)


def test_a_second_process_is_refused_and_a_dead_one_is_not(tmp_path, recipe):
    code = (
        "import sys, json; sys.path[:0] = [sys.argv[1]]\n"
        "from llama_jax import run_folder\n"
        "run = run_folder._lock(run_folder.Path(sys.argv[2]) / '.lock'); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(ROOT), str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=f"in use by host .* pid {process.pid}"):
            start(tmp_path, recipe)
        assert list(content(tmp_path)) == []
    finally:
        process.kill()
        process.communicate()
    run = start(tmp_path, recipe)  # kill -9 leaves the file, not the lock
    with pytest.raises(CheckpointError, match=f"in use by host .* pid {os.getpid()}"):
        start(tmp_path, recipe)
    run.close()
    start(tmp_path, recipe).close()


def test_a_failed_start_releases_the_lock(tmp_path, recipe):
    start(tmp_path, recipe).close()
    with pytest.raises(ConfigError):
        start(tmp_path, changed(recipe, optimizer__lr=0.123))
    start(tmp_path, recipe).close()


def test_a_file_system_without_locks(tmp_path, recipe, monkeypatch, capsys):
    def unsupported(descriptor, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(run_folder.fcntl, "flock", unsupported)
    assert fcntl.flock is unsupported
    start(tmp_path, recipe).close()
    assert "no locks" in capsys.readouterr().err
    host = run_folder.socket.gethostname()
    (tmp_path / ".lock").write_text(f"host {host} pid {os.getppid()}\n")
    with pytest.raises(CheckpointError, match="in use"):
        start(tmp_path, recipe)
    (tmp_path / ".lock").write_text(f"host {host} pid 4194999\n")
    start(tmp_path, recipe).close()


def test_no_secret_reaches_a_file(tmp_path, recipe, monkeypatch):
    planted = {
        "HF_TOKEN": "hf_planted1",
        "WANDB_API_KEY": "planted2",
        "AWS_SECRET_ACCESS_KEY": "planted3",
        "JAX_SECRET": "planted4",
        "JAX_API_KEY": "planted5",
        "SLURM_JWT": "planted6",
        "DATABASE_PASSWORD": "planted7",
        "SOMETHING_ELSE": "planted8",
    }
    wanted = {"XLA_FLAGS": "--xla_dump_to=", "SLURM_JOB_ID": "17", "CUDA_VISIBLE_DEVICES": "MIG-1", "JAX_FOO": "1"}
    for name, value in (planted | wanted).items():
        monkeypatch.setenv(name, value)
    start(tmp_path, recipe).close()
    for name, data in content(tmp_path).items():
        assert b"planted" not in data, name
        assert not any(variable.encode() in data for variable in planted), name
    (record,) = json.loads((tmp_path / "environment.json").read_text())["starts"]
    assert record["variables"].items() >= wanted.items()
    assert record["variables"].keys() <= wanted.keys() | {n for n in os.environ if n.startswith(("JAX_", "XLA_"))}
    assert set(record["versions"]) >= {"python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"}
    assert record["device"]["platform"] == "cpu" and record["host"]["cpus_allowed"] >= 1


@pytest.mark.parametrize("name", ["a[1]", "a\\b"])
def test_a_path_that_the_array_library_takes_for_a_pattern_is_refused(name, tmp_path):
    with pytest.raises(CheckpointError, match=r"may not have \[ or \\; choose another --workdir"):
        run_folder.open_run(tmp_path / name, {}, {}, {})
    assert not (tmp_path / name).exists()
