"""Every command in the README's sections on SLURM and sweeps, run as it stands there: jobs go to the fake cluster."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import harness
import pytest
from fakes.slurm.cluster import Cluster
from readme import commands

from data_pipeline import options
from llama_jax import config as configs

ROOT = harness.ROOT
PYTHON = """#!/usr/bin/env bash
# Notes what it is asked to run; only a sweep's questions about itself are answered for real.
{note} "$@" >>{calls}
[[ "$1" == scripts/sweep.py ]] || exit 0
for word in "$@"; do
  case "$word" in --task=* | --table | --where) exit 0 ;; esac
done
[[ -n "${{FAKE_SLURM_SUBMITS:-}}" ]] || set -- "$@" --tasks
exec {python} "$@"
"""


@pytest.fixture
def shell(tmp_path):
    """A checkout to run commands in, and a function that runs one and returns what Python was asked to run."""
    root, calls = tmp_path / "checkout", tmp_path / "calls"
    root.mkdir()
    for name in ("configs", "bench", "llama_jax", "data_pipeline"):
        (root / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("site.conf", "__pycache__"))
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    note = shlex.join([sys.executable, "-SE", "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"])
    python.write_text(PYTHON.format(note=note, calls=shlex.quote(str(calls)), python=shlex.quote(sys.executable)))
    python.chmod(0o755)
    (root / "scripts/setup.sh").write_text(f'mkdir -p "$VENV/bin"; cp {shlex.quote(str(python))} "$VENV/bin/python"\n')
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "LLAMA_JAX_"))}
    variables = outer | {"FAKE_SLURM": str(tmp_path / "cluster"), "PYTHONPATH": str(root)}
    variables["PATH"] = f"{tmp_path / 'bin'}:{ROOT / 'tests/fakes/slurm'}:{os.environ['PATH']}"

    def run(line):
        more = {"FAKE_SLURM_SUBMITS": "1"} if "submit.sh" in line else {}
        ended = subprocess.run(["bash", "-c", line], cwd=root, env=variables | more, capture_output=True, text=True)
        assert ended.returncode == 0, (line, ended)
        return ended.stdout

    run.calls = lambda: [harness.strict(line) for line in calls.read_text().splitlines()]
    run.cluster = Cluster(tmp_path / "cluster")
    return run


def check_words(words):
    """Whether a command that Python is asked to run would take its arguments; whether its input exists is not asked."""
    if words[:2] == ["-m", "llama_jax.main"]:
        file, overrides, rest = configs.parse_arguments(words[2:])
        configs.load(ROOT / file, overrides)
        assert [word.split("=")[0] for word in rest] == ["--workdir"]
    elif words[:2] == ["-m", "data_pipeline.prepare"]:
        options.parse([word.replace("--config=", f"--config={ROOT}/") for word in words[2:]])
    elif words[0] == "-m":
        usage = subprocess.run([sys.executable, *words[:2], "--help"], cwd=ROOT, capture_output=True, text=True).stdout
        assert all(f"{word.split('=')[0]} " in usage for word in words[2:]), (words, usage)
    else:
        assert words[0] == "scripts/sweep.py"  # asked for its tasks, it has read and checked everything


def test_slurm_section(shell):
    lines = commands("On a SLURM cluster")
    for line in lines:
        if line.startswith(("squeue", "sacct")):
            line = line.replace("JOB ", f"{shell.cluster.jobs()[0]['raw']} ")
        said = shell(line)
        assert ("slurm: job " in said) == ("submit.sh" in line and "submit.sh setup" not in line), (line, said)
    assert len(lines) > 5 and {line.split()[0] for line in lines} == {"cp", "bash", "squeue", "sacct"}
    for job in shell.cluster.jobs():
        if job["task"]:  # one task of each array is enough here
            shell.cluster.put(job, state="COMPLETED", code=0)
    shell.cluster.drain(limit_s=250)
    assert {(job["state"], job["code"]) for job in shell.cluster.jobs()} == {("COMPLETED", 0)}
    ran = [words for words in shell.calls() if not {"--where", "--tasks"} & set(words)]
    assert len(ran) == len([job for job in shell.cluster.jobs() if not job["task"]])
    for words in {tuple(word for word in words if not re.match("--(slice|task|stage)=", word)) for words in ran}:
        check_words(list(words))


def test_sweeps_section(shell):
    lines = commands("Sweeps")
    for line in lines:
        assert re.fullmatch(r"(\d+ \w+\n)+", shell(line)), line  # the runs of each stage
    assert len(shell.calls()) == len(lines) > 1
