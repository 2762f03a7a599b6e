"""Every command in the README's sections on describing a run, Colab and TPUs, run as it stands there."""

import os
import shutil
import subprocess
import sys

import harness
import pytest
from readme import commands

PYTHON = """#!/bin/sh
# Describes for real, and notes whatever else it is asked to run.
echo "$*" >> "{calls}"
[ "$2" = llama_jax.describe ] || exit 0
exec "{python}" "$@"
"""


@pytest.fixture
def shell(tmp_path):
    """A function that runs a line in a copy of the checkout -> (exit code, output, what Python was asked to run)."""
    root, calls = tmp_path / "checkout", tmp_path / "calls"
    tracked = subprocess.run(["git", "ls-files", "scripts", "configs", "llama_jax"], cwd=harness.ROOT, text=True,
                             stdout=subprocess.PIPE, check=True).stdout.split()  # fmt: skip
    for name in tracked:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(harness.ROOT / name, root / name)
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(calls=calls, python=sys.executable))
    python.chmod(0o755)
    (root / "scripts" / "setup.sh").write_text('echo "setup $*"\n')
    variables = os.environ | {"VENV": str(tmp_path / "venv"), "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    variables["PATH"] = f"{python.parent}:{os.environ['PATH']}"

    def run(line):
        calls.write_text("")
        ended = subprocess.run(["bash", "-c", line], cwd=root, env=variables, capture_output=True, text=True)
        return ended.returncode, ended.stdout + ended.stderr, calls.read_text().splitlines()

    return run


def test_describing(shell):
    lines = commands("Before a run")
    assert lines
    for line in lines:
        code, said, _ = shell(line)
        assert code == 0 and "unique parameters" in said and "data" in said, said


def test_colab(shell, tmp_path):
    (line,) = commands("Colab")
    words = line.replace("--output=llama_jax.zip", f"--output={tmp_path / 'llama_jax.zip'}")
    assert words != line
    subprocess.run(["bash", "-c", words], cwd=harness.ROOT, check=True)
    listed = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", tmp_path / "llama_jax.zip"], capture_output=True, text=True
    )
    assert "llama_jax/pyproject.toml" in listed.stdout and "llama_jax/llama_jax/main.py" in listed.stdout


def test_tpu(shell):
    """The script describes for real; its training ends at once here, so it stops where it wants the code of a stop."""
    lines = commands("TPU")
    assert len(lines) == 4
    for line in lines:
        code, said, calls = shell(line)
        if "setup.sh" in line:
            assert (code, said) == (0, "setup --tpu\n")
            continue
        assert code == 1 and "the stopped run ended with 0 instead of 75" in said, said
        assert [call.split()[1] for call in calls] == ["llama_jax.describe", *["llama_jax.main"] * 2]
        assert calls[1].replace("llama_jax.main", "llama_jax.describe").split(" --workdir")[0] in calls[0] + " "
