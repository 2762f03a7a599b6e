"""The command: exit codes, messages, and what real signals and kill -9 leave behind.

Every process is one of its own; a chain of them shares a run folder, as restarts of one job do.
"""

import json
import math
import random
import re
import signal
import time

import harness
import pytest
from harness import tiny

from llama_jax import config as configs
from llama_jax import main, runtime

SAVING = {"training.recovery_minutes": 0.0}


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    return harness.Commands(tmp_path_factory.mktemp("commands"))


@pytest.fixture(scope="module")
def unbroken(commands, tmp_path_factory):
    """The folder of the unbroken tiny run."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert commands.train(tiny(), folder).code == 0
    return folder


@pytest.fixture
def call(monkeypatch, capsys, commands):
    """The command in this process: (exit code, standard error). Signals are left alone."""
    monkeypatch.setattr(runtime, "watch_signals", lambda: lambda: None)

    def run(*arguments, config=None):
        words = [f"--config={commands.save(config)}"] if config is not None else []
        capsys.readouterr()
        code = main.main([*words, *map(str, arguments)])
        return code, capsys.readouterr().err

    return run


# Bad configs.

BAD = [
    (["--config.optimizer.learning_rate=1"], "optimizer.learning_rate"),
    (["--config.optimizr.lr=1"], "did you mean optimizer.lr"),
    (["--config.optimizer.lr=fast"], r"optimizer.lr = 'fast' is not a number in \(0, 100\]"),
    (["--config.optimizer.lr=nan"], r"optimizer.lr = nan is not a number in \(0, 100\]"),
    (["--config.optimizer.lr=-1"], r"optimizer.lr = -1.0 is not a number in \(0, 100\]"),
    (["--config.optimizer.lr=0"], r"optimizer.lr = 0.0"),
    (["--config.optimizer.beta1=1"], r"optimizer.beta1 = 1.0 is not a number in \[0, 1\)"),
    (["--config.optimizer.lr"], "optimizer.lr needs a value"),
    (["--config.model.layers=1.5"], r"model.layers = '1.5' is not an integer in \[1, 256\]"),
    (["--config.model.layers=0"], r"model.layers = 0 is not an integer in \[1, 256\]"),
    (["--config.model.tied=maybe"], "model.tied = 'maybe' is not True or False"),
    (["--config.model.context=1000000"], "model.context = 1000000"),
    (["--config.model.attention=flash"], "one of auto, cudnn, xla, reference"),
    (["--config.model.heads=3"], "model.heads = 3 must divide model.width"),
    (["--config.training.total_updates=5"], "exactly one of targets_per_parameter, total_targets, total_updates"),
    (["--config.training.total_targets=None"], "must be set, not 0"),
    (["--config.training.total_targets=3"], "less than 1 sequences"),
    (["--config.training.microbatch=0"], r"training.microbatch = 0 is not an integer in \[1,"),
    (["--config.training.microbatch=5"], "training.microbatch = 5 must divide the 16 sequences"),
    (["--config.lr_schedule.warmup_steps=1000"], "lr_schedule.warmup_steps = 1000"),
    (["--config.decentralized.workers=0"], "decentralized.workers = 0"),
    (["--config.runtime.mesh_data=3"], "runtime.mesh_data = 3 must divide"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_a_bad_config_is_one_line(arguments, message, call, tmp_path):
    code, error = call(*arguments, f"--workdir={tmp_path / 'run'}", config=tiny())
    assert code == 2
    assert error.startswith("error: ") and error.count("\n") == 1 and error.endswith("\n")
    assert re.search(message, error), error
    assert not (tmp_path / "run").exists()


PRESET = "from llama_jax.config import default\n\ndef get_config():\n    c = default()\n    "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("def get_config(:", "SyntaxError"),
        ("def get_config():\n    return {}", "must return a ConfigDict"),
        ("x = 1", "get_config"),
        (f"{PRESET}c.model.depth = 3\n    return c", "depth"),
        (f"{PRESET}c.seed = 'a'\n    return c", "seed"),
        ("raise ValueError('a\\nb')", "ValueError: a b\n"),
        ("raise SystemExit(0)", "SystemExit: 0\n"),
    ],
)
def test_a_bad_config_file_is_one_line(content, message, call, tmp_path):
    file = tmp_path / "bad.py"
    if content is not None:
        file.write_text(content)
    code, error = call(f"--config={file}")
    assert code == 2 and message in error and str(file) in error
    assert error.startswith("error: ") and error.count("\n") == 1


def test_config_and_known_words_are_required(call, capsys):
    assert call() == (2, "error: --config=FILE is required, for example --config=configs/smoke.py\n")
    code, error = call("--workdir=", config=tiny())
    assert code == 2 and error.startswith("error: --workdir is empty")
    with pytest.raises(SystemExit) as caught:
        call("--wrkdir=x", config=tiny())
    assert caught.value.code == 2 and "unrecognized arguments: --wrkdir=x" in capsys.readouterr().err


def test_a_bad_config_needs_no_jax(commands, tmp_path):
    """It ends before JAX would be imported: here that import fails. So does a --debug start, with a traceback."""
    for name in ("jax", "jaxlib", "orbax", "grain"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    path = f"{tmp_path}:{harness.ROOT}"
    words = ("--config=configs/c4_20m.py", "--config.optimizer.lr=-1")
    ended = commands.run("llama_jax.main", *words, PYTHONPATH=path)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "error: optimizer.lr = -1.0 is not a number in (0, 100]\n"
    ended = commands.run("llama_jax.main", *words, "--debug", PYTHONPATH=path)
    assert ended.code == 2 and "Traceback" in ended.err
    assert ended.err.endswith("\nerror: optimizer.lr = -1.0 is not a number in (0, 100]\n")


# Exit codes of the other refusals, and of the end.


def test_exit_codes_in_one_folder(call, tmp_path, unbroken, monkeypatch):
    monkeypatch.setattr("llama_jax.train.build", harness.KEPT)
    workdir, folder = f"--workdir={unbroken}", tmp_path / "foreign"
    code, error = call(workdir, "--config.optimizer.lr=0.004", "--config.seed=1", config=tiny())
    assert code == 2
    assert error.splitlines()[1:] == ["  seed: 42 -> 1", "  optimizer.lr: 0.0056 -> 0.004"]
    folder.mkdir()
    (folder / "thesis.tex").touch()
    code, error = call(f"--workdir={folder}", config=tiny())
    assert code == 4 and "thesis.tex" in error and error.count("\n") == 1
    code, error = call(f"--workdir={tmp_path / 'a'}", "--config.data.source=cache", config=tiny())
    assert code == 2 and "data.path is empty" in error
    code, error = call(
        f"--workdir={tmp_path / 'a'}", "--config.data.source=cache", "--config.data.path=nowhere", config=tiny()
    )
    assert code == 3 and "nowhere" in error and not (tmp_path / "a").exists()
    assert call(workdir, config=tiny()) == (0, "")


def test_the_workdir_is_named_after_the_config(call, tmp_path, monkeypatch):
    monkeypatch.setattr("llama_jax.train.build", harness.KEPT)
    monkeypatch.chdir(tmp_path)
    assert call("--config.training.total_targets=2000", config=tiny(name="small name"))[0] == 0
    assert (tmp_path / "runs" / "small name" / "result.json").is_file()


# Killed and signalled processes.

KILLS = [
    "kill@start:1",
    "kill@before_save:1",
    "kill@after_orbax_commit:2",
    "kill@after_manifest:2",
    "kill@metrics_flush:3",
    "kill@step:2",
    "kill@eval:3",
    "kill@export_weights:1",
    "kill@export_before_rename:1",
]


def test_killed_at_a_place_and_restarted(commands, unbroken, tmp_path):
    """One run through all places; those inside a save are also killed in the tests of checkpoints."""
    config = tiny(SAVING)
    for fault in KILLS:
        ended = commands.train(config, tmp_path, fault=fault)
        assert (ended.code, ended.fired) == (-signal.SIGKILL, [fault]), ended
        assert not (tmp_path / "result.json").exists()
    ended = commands.train(config, tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert harness.outcome(tmp_path) == harness.outcome(unbroken)
    assert harness.kept(tmp_path) == [(10, "final")]
    assert [path.name for path in (tmp_path / "exports").iterdir()] == ["final"]


def test_killed_at_random_times(commands, tmp_path):
    """A longer run with a save after every update, killed at seeded moments while it trains."""
    more, moments = {"training.total_targets": 16 * 1500}, random.Random(7)
    assert commands.train(tiny(more), tmp_path / "unbroken").code == 0
    folder, reached = tmp_path / "run", []
    for _ in range(3):
        process = commands.start_train(tiny(more | SAVING), folder)
        left = moments.randint(3, 8)
        while left:  # each is three updates further, or an evaluation
            left -= process.stdout.readline().startswith("update ")
        time.sleep(moments.uniform(0, 0.3))
        process.kill()
        assert commands.end(process).code == -signal.SIGKILL
        reached.append(harness.kept(folder)[-1][0] if (folder / "checkpoints").exists() else 0)
    assert reached == sorted(reached) and 0 < reached[0] < reached[-1]
    ended = commands.train(tiny(more), folder)
    assert (ended.code, ended.err) == (0, "")
    assert f"continues after update {reached[-1]}" in ended.out
    assert harness.outcome(folder) == harness.outcome(tmp_path / "unbroken")


SIGNALS = [  # fault, exit code, name in the message
    ("term@start:1", 75, "SIGTERM"),
    ("usr1@step:2", 75, "SIGUSR1"),
    ("int@eval:2", 130, "SIGINT"),
]


def test_signals_save_and_end_with_their_code(commands, unbroken, tmp_path):
    for fault, code, name in SIGNALS:
        ended = commands.train(tiny(), tmp_path, fault=fault)
        assert (ended.code, ended.fired) == (code, [fault]), ended
        assert re.fullmatch(rf"error: {name} received: saved at update \d+, the same command continues\n", ended.err)
        ((update, kind),) = harness.kept(tmp_path)[-1:]
        assert kind == "recovery" and f"update {update}," in ended.err
    ended = commands.train(tiny(), tmp_path, fault="term@export:1")  # too late to be worth another start
    assert (ended.code, ended.fired, ended.err) == (0, ["term@export:1"], "")
    assert harness.outcome(tmp_path) == harness.outcome(unbroken)


def test_a_second_signal_ends_at_once(commands, unbroken, tmp_path):
    fault = "term@step:2,term@before_save:1,stop@after_manifest:1"  # the last would hang a process that still saves
    ended = commands.train(tiny(), tmp_path, fault=fault)
    assert ended.code == 128 + signal.SIGTERM and ended.fired == fault.split(",")[:2], ended
    ended = commands.train(tiny(), tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert harness.outcome(tmp_path) == harness.outcome(unbroken)


def test_another_environment_and_a_locked_folder(commands, unbroken, tmp_path):
    """Locale, time zone, hash seed, working directory and a cold compile cache change nothing."""
    folder = tmp_path / "a run, ünïcode"
    process = commands.start_train(
        tiny(),
        folder,
        fault="stop@step:5",
        LC_ALL="C",
        TZ="Pacific/Kiritimati",
        PYTHONHASHSEED="random",
        JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cold"),
    )
    while not process.fired.exists():
        assert process.poll() is None
        time.sleep(0.05)
    ended = commands.train(tiny(), folder)
    assert ended.code == 4 and "is in use by host" in ended.err and f"pid {process.pid};" in ended.err
    process.send_signal(signal.SIGCONT)
    ended = commands.end(process)
    assert (ended.code, ended.fired) == (0, ["stop@step:5"]), ended
    assert harness.outcome(folder) == harness.outcome(unbroken)


def test_non_finite_exits_with_5(commands, tmp_path):
    ended = commands.train(tiny(), tmp_path, fault="nan@step:2")
    assert ended.code == 5 and ended.err.startswith("error: update 2: ") and ended.err.count("\n") == 1
    assert harness.lines(tmp_path)[-1]["loss"] is None


def test_the_smoke_preset_learns_with_overrides(tmp_path):
    """A third of its updates bring the loss from ln(64) = 4.16 near the entropy of the language, 1.21."""
    words = [
        "--config",
        "configs/smoke.py",
        "--config.training.total_updates",
        "60",
        "--config.lr_schedule.warmup_steps=10",
    ]
    commands = harness.Commands(tmp_path, quick=True)
    ended = commands.run("llama_jax.main", *words, f"--workdir={tmp_path / 'run'}")
    assert (ended.code, ended.err) == (0, "")
    result = json.loads((tmp_path / "run/result.json").read_text())
    stored = json.loads((tmp_path / "run/config.json").read_text())["config"]
    assert result["updates"] == stored["training"]["total_updates"] == 60
    assert configs.from_dict(stored).derived.total_updates == 60
    assert f"entropy of the language {result['entropy']:.4f}" in ended.out
    assert abs(harness.lines(tmp_path / "run")[0]["loss"] - math.log(64)) < 0.3
    assert result["entropy"] < result["validation_loss"] < result["entropy"] + 0.2
