"""The smoke test of a TPU, on the CPU by an explicit option: everything but the device is what a TPU would run."""

import json
import os
import shutil
import subprocess
import sys

import harness
import pytest


@pytest.fixture
def smoke(tmp_path):
    """A function that runs the script with an environment of this Python -> (exit code, output, errors)."""
    python = tmp_path / "my venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    variables, _ = harness.Commands(tmp_path, quick=True).environment(VENV=str(python.parent.parent))

    def start(*arguments):
        words = ["bash", harness.ROOT / "scripts" / "tpu_smoke.sh", *arguments]
        ended = subprocess.run(words, cwd="/", env=variables, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        return ended.returncode, ended.stdout, ended.stderr

    return start


TINY = [f"--config.{field}={value}" for field, value in harness.TINY.items() if field.startswith("model.")]


@pytest.mark.timeout(900)
def test_all_of_it_on_the_cpu(smoke, tmp_path):
    out = tmp_path / "a run"
    code, text, error = smoke(
        "--device=cpu", "--updates=8", f"--out={out}", *TINY, "--config.training.batch_targets=256"
    )
    assert code == 0, text + error
    assert "All of it worked on cpu in " in text and text.count("\nok      ") == 6
    assert "peak of cpu unknown" in text and "sample 1 of 1" in text
    assert error.count("error: ") == 1 and "error: SIGUSR1 received: saved at update " in error
    assert harness.outcome(out / "broken") == harness.outcome(out / "unbroken")
    assert len(json.loads((out / "broken/environment.json").read_text())["starts"]) == 2
    one = smoke("--device=cpu", "--updates=1")
    assert one == (2, "", "error: --updates=1: 2 or more, so that a loss can fall\n")
    again = smoke("--device=cpu", f"--out={out}")
    assert again == (2, "", f"error: {out} is there already: remove it, or name another folder with --out\n")


def test_another_device_than_asked_for_is_an_error(smoke, tmp_path):
    code, _, error = smoke("--device=tpu", f"--out={tmp_path / 'out'}")
    assert code == 6 and "error: runtime.device = tpu, but JAX" in error and "sees only cpu" in error


def test_an_environment_is_made_where_there_is_none(tmp_path):
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(harness.ROOT / "scripts" / "tpu_smoke.sh", root / "scripts")
    (root / "scripts" / "setup.sh").write_text('echo "setup $*"; exit 7\n')
    variables = {name: value for name, value in os.environ.items() if name != "VENV"}
    for device, code in (("tpu", 7), ("cpu", 7), ("gpu", 2)):
        words = ["bash", root / "scripts" / "tpu_smoke.sh", f"--device={device}"]
        ended = subprocess.run(words, env=variables, capture_output=True, text=True)
        assert ended.returncode == code
        assert ended.stdout == ("" if device == "gpu" else f"setup --{device}\n")
