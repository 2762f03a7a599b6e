"""The shell scripts: syntax, quoting, usage, exit codes and idempotence; the unigram entropy against a hand count."""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llama_jax import shards
from llama_jax.errors import DataError
from scripts import unigram

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [
    *sorted((ROOT / "scripts").rglob("*.sh")),
    *sorted((ROOT / "scripts").rglob("*.sbatch")),
    ROOT / ".ci" / "run",
]


def run(*command, cwd=ROOT, **variables):
    outer = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "VENV")}
    environment = outer | {name: str(value) for name, value in variables.items()}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_shell_style(script):
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    assert os.access(script, os.X_OK)
    result = run("bash", "-n", script)
    assert (result.returncode, result.stderr) == (0, "")
    for forbidden in ("http:", "https:", "--index-url", "--trusted-host", "curl ", "wget "):
        assert forbidden not in text, forbidden


def unquoted(line):
    """Expansions of variables outside double quotes, arithmetic and [[ ]] in one line of shell."""
    line = re.sub(r"(^|\s)#.*", "", line)
    line = re.sub(r"\[\[.*?\]\]|\(\(.*?\)\)|'[^']*'", "", line)
    line = re.sub(r"\"(?:\\.|\$\([^\"]*?(?:\"[^\"]*\"[^\"]*?)*\)|[^\"\\])*\"", "", line)
    return re.findall(r"\$\{?[A-Za-z@*]\w*", line)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_expansions_are_quoted(script):
    text = re.sub(r"<<'(\w+)'.*?\n\1\n", "\n", script.read_text(encoding="utf-8"), flags=re.DOTALL)
    for number, line in enumerate(text.split("\n"), 1):
        if re.match(r"\s*(\w+=|case |for extra in \$\{installed)", line):
            continue  # no word splitting in assignments and case; one loop splits a list of plain words on purpose
        assert unquoted(line) == [], f"{script.name} near line {number}: {line}"


def test_quoting_check_can_fail():
    assert unquoted("rm -r $folder/x") == ["$folder"]
    assert unquoted('cp "$a" ${b}') == ["${b"]
    assert unquoted('cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."') == []


@pytest.mark.parametrize("script", ["setup.sh", "quickstart.sh", "tpu_smoke.sh"])
def test_usage(script):
    result = run("bash", ROOT / "scripts" / script, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith(f"usage: bash scripts/{script}")
    result = run("bash", ROOT / "scripts" / script, "--wrong")
    assert result.returncode == 2
    assert "error: unknown argument: --wrong" in result.stderr


def test_test_script_usage():
    result = run("bash", ROOT / "scripts" / "test.sh", "--help")
    assert result.returncode == 0
    assert "bash scripts/test.sh" in result.stdout


def test_setup_refuses_what_cannot_work(tmp_path):
    result = run("bash", "scripts/setup.sh", "--cuda12", "--tpu", VENV=tmp_path / "v")
    assert (result.returncode, result.stderr) == (2, "error: --cuda12 and --tpu exclude each other\n")
    old = tmp_path / "python"
    old.write_text(f'#!/bin/sh\ncase "$2" in *"(3, 12)"*) exit 1;; esac\nexec "{sys.executable}" "$@"\n')
    old.chmod(0o755)
    result = run("bash", "scripts/setup.sh", "--cuda13", PYTHON=old, VENV=tmp_path / "v")
    assert result.returncode == 2
    assert "is no Python 3.12 or newer that runs, which --cuda13 needs" in result.stderr
    assert not (tmp_path / "v").exists()
    result = run("bash", "scripts/setup.sh", "--jax=new", VENV=tmp_path / "v")
    assert (result.returncode, result.stderr) == (2, "error: --jax=new: a version such as 0.11.2 is needed\n")


@pytest.mark.parametrize("name", ["thesis.txt", ".hidden", "a folder"])
def test_setup_never_empties_a_folder_of_other_things(name, tmp_path):
    kept = tmp_path / "scratch" / name
    kept.parent.mkdir()
    kept.mkdir() if " " in name else kept.write_text("years of work")
    result = run("bash", "scripts/setup.sh", PYTHON="/nowhere/python", VENV=kept.parent)
    assert kept.exists() and result.returncode == 2
    assert result.stderr == f"error: {kept.parent} holds {name} and is no environment: set VENV to a new folder\n"
    kept.rmdir() if " " in name else kept.unlink()
    result = run("bash", "scripts/setup.sh", PYTHON="/nowhere/python", VENV=kept.parent)
    assert "PYTHON=/nowhere/python is no Python 3.11" in result.stderr  # an empty folder may become one


@pytest.mark.parametrize("version", ["0.10.2", "0.11.0"])
@pytest.mark.parametrize("device", ["cuda12", "cuda13"])
def test_setup_refuses_the_slow_scatter(version, device, tmp_path):
    result = run("bash", "scripts/setup.sh", f"--{device}", f"--jax={version}", VENV=tmp_path / "v")
    expected = f"error: JAX {version} has a slow scatter-add on NVIDIA GPUs, so not with --{device}; take another"
    assert result.returncode == 2 and result.stderr.startswith(expected)
    assert not (tmp_path / "v").exists()


PYTHON = """#!/bin/sh
# A Python that says that it is 3.{minor}, has JAX {jax}, makes environments of itself, and notes what pip is asked for.
case "$*" in
  *"%d%d"*) echo 3{minor}; exit ;;
  *sys.version_info*) [ {minor} -ge "$(echo "$*" | sed 's/.*(3, \\([0-9]*\\)).*/\\1/')" ]; exit ;;
  *importlib.metadata*) echo {jax}; exit ;;
  --version) echo Python 3.{minor}.0; exit ;;
  "-m venv"*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; exit ;;
  "-m pip --version") exit ;;
  "-m pip install"*) echo "$*" >> "{root}/pip.txt"; exit ;;
esac
exec "{real}" "$@"
"""


@pytest.fixture
def pythons(checkout):
    """A function that runs setup.sh where PATH has the given Pythons {name: (minor, JAX)} -> (result, pip's words)."""
    shutil.rmtree(checkout / ".venv")
    folder = checkout / "bin"
    folder.mkdir()
    for tool in ("dirname", "sed", "cat", "tail", "mv", "mkdir", "cp"):
        (folder / tool).symlink_to(shutil.which(tool))

    def setup(given, *arguments):
        for name, (minor, jax) in given.items():
            text = PYTHON.format(minor=minor, jax=jax, root=checkout, real=sys.executable)
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        bash = shutil.which("bash")
        result = run(
            bash, checkout / "scripts" / "setup.sh", *arguments, PATH=folder, HOME=checkout, PYENV_ROOT=checkout
        )
        noted = checkout / "pip.txt"
        return result, noted.read_text() if noted.exists() else ""

    return setup


def test_setup_prefers_a_python_with_tested_versions(pythons):
    result, words = pythons({"python3": (13, "0.12.0.1"), "python3.12": (12, "0.12.0.1")}, "--cuda13")
    assert (result.returncode, result.stderr) == (0, "")
    assert "making .venv with Python 3.12.0 (" in result.stdout and "/bin/python3.12)" in result.stdout
    assert "--constraint constraints/py312.txt --editable .[prepare,report,cuda13]" in words
    assert "setup: done, JAX 0.12.0.1 for cuda13; use it with" in result.stdout


def test_setup_takes_what_there_is(pythons):
    result, words = pythons({"python3": (13, "0.12.0.1"), "python3.11": (11, "0.10.2")}, "--cuda12")
    assert result.returncode == 0 and "with Python 3.13.0" in result.stdout  # 3.11 has no JAX for CUDA
    assert "no pinned versions for this Python" in result.stdout and "--constraint" not in words


def test_setup_installs_the_version_asked_for(pythons):
    result, words = pythons({"python3.12": (12, "0.11.2")}, "--cuda13", "--jax=0.11.2")
    assert result.returncode == 0 and "with JAX 0.11.2 and the newest of everything else" in result.stdout
    assert "jax==0.11.2 --editable" in words and "--constraint" not in words
    result, _ = pythons({}, "--cuda13", "--jax=0.11.2")
    assert "is up to date" in result.stdout
    _, words = pythons({}, "--cuda13")
    assert words.endswith("--constraint constraints/py312.txt --editable .[prepare,report,cuda13]\n")


def test_setup_refuses_a_slow_scatter_that_is_pinned_or_came(pythons, checkout):
    result, words = pythons({"python3.12": (12, "0.11.0")}, "--cuda13")
    assert result.returncode == 2 and words
    assert (
        "error: JAX 0.11.0 has a slow scatter-add on NVIDIA GPUs, so not with --cuda13; take another" in result.stderr
    )
    assert (checkout / ".venv" / "llama_jax.stamp").read_text().startswith("-\n")  # not up to date
    (checkout / "pip.txt").unlink()
    pins = checkout / "constraints" / "py312.txt"
    pins.write_text(re.sub(r"\njax==.*", "\njax==0.11.0", pins.read_text()))
    result, words = pythons({}, "--cuda13")
    assert result.returncode == 2 and not words
    assert result.stderr.startswith("error: constraints/py312.txt: JAX 0.11.0 has a slow scatter-add")
    assert pythons({}, "--cpu")[0].returncode == 0


@pytest.fixture
def checkout(tmp_path):
    """A copy of what setup.sh reads, in a folder with a space, and a Python whose pip only notes its arguments."""
    root = tmp_path / "my checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", root / "scripts")
    shutil.copy(ROOT / "pyproject.toml", root)
    shutil.copytree(ROOT / "constraints", root / "constraints")
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"""#!/bin/sh
case "$1 $2 $3" in
  "-m pip --version") exit 0 ;;
  "-m pip install")
    printf '%s\\n' "$@" >> "{root}/pip.txt"
    echo out of luck
    exit "${{PIP_CODE:-0}}" ;;
esac
exec "{sys.executable}" "$@"
"""
    )
    python.chmod(0o755)
    return root


def test_setup_installs_once(checkout):
    def setup(*arguments, **variables):
        result = run("bash", checkout / "scripts" / "setup.sh", *arguments, cwd="/", **variables)
        noted = checkout / "pip.txt"
        words = noted.read_text().split("\n") if noted.exists() else []
        noted.unlink(missing_ok=True)
        return result, words

    result, words = setup(PIP_CODE=1)
    assert result.returncode == 2
    assert "out of luck" in result.stderr
    assert "everything pip said is in .venv/setup.log" in result.stderr
    assert ".[prepare,report]" in words

    result, words = setup()
    assert result.returncode == 0, result.stderr
    assert ".[prepare,report]" in words
    pins = f"constraints/py{sys.version_info.major}{sys.version_info.minor}.txt"
    assert (pins in words) == (checkout / pins).exists()

    result, words = setup()
    assert "is up to date" in result.stdout
    assert words == []

    _, words = setup("--dev")
    assert ".[prepare,report,test]" in words
    result, words = setup()  # what was installed before is kept and needs nothing new
    assert words == []

    with open(checkout / "pyproject.toml", "a") as file:
        file.write("# changed\n")
    _, words = setup()
    assert ".[prepare,report,test]" in words

    result, words = setup("--tpu", PIP_CODE=1)
    assert result.returncode == 2 and ".[prepare,report,tpu,test]" in words
    # The accelerator, which may be there in part, is known to the next call, and nothing is up to date.
    assert (checkout / ".venv" / "llama_jax.stamp").read_text() == "-\nprepare report tpu test\n"
    result, words = setup("--cuda12")
    assert result.returncode == 2
    assert words == []
    _, words = setup()
    assert ".[prepare,report,tpu,test]" in words


def test_setup_heeds_the_python_named_for_an_environment_that_is_there(checkout, tmp_path):
    def setup(python):
        return run("bash", checkout / "scripts" / "setup.sh", cwd="/", PYTHON=python)

    assert "is no Python 3.11 or newer that runs" in setup("/nowhere/python").stderr
    other = tmp_path / "other"
    other.write_text('#!/bin/sh\n[ "$1" != --version ] || echo Python 3.19.0\ncase "$*" in *print*) echo 319 ;; esac\n')
    other.chmod(0o755)
    result = setup(other)
    assert result.returncode == 2 and f"PYTHON={other} is Python 3.19.0: remove it or set VENV" in result.stderr
    assert not (checkout / "pip.txt").exists() and setup(sys.executable).returncode == 0
    shutil.rmtree(checkout / ".venv")
    (checkout / ".venv").write_text("")
    assert ".venv is no folder: set VENV to a new one" in setup(sys.executable).stderr


@pytest.fixture
def quickstart(tmp_path):
    """A function that runs quickstart.sh in a folder with a space; its Python only notes what it is asked to run."""
    root = tmp_path / "my checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "quickstart.sh", root / "scripts")
    (root / "scripts" / "setup.sh").write_text("printf 'installed\\n'\n")
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"""#!/bin/sh
printf '%s|' "$@" >> "{root}/asked.txt"
echo >> "{root}/asked.txt"
case "$2" in
  data_pipeline.prepare) mkdir -p data/quickstart && echo > data/quickstart/manifest.json ;;
  llama_jax.main)
    for word in "$@"; do case "$word" in --workdir=*) mkdir -p "${{word#--workdir=}}" ;; esac; done
    exit "${{TRAIN_CODE:-0}}" ;;
esac
"""
    )
    python.chmod(0o755)

    def start(*arguments, **variables):
        result = run("bash", root / "scripts" / "quickstart.sh", *arguments, cwd="/", **variables)
        asked = (root / "asked.txt").read_text().splitlines()
        (root / "asked.txt").unlink()
        return result, [line.strip("|").split("|") for line in asked]

    return start


@pytest.mark.parametrize(("word", "name"), [("", "quickstart"), ("--packed", "quickstart_packed")])
def test_quickstart_runs_each_step_once(word, name, quickstart):
    train = ["-m", "llama_jax.main", f"--config=configs/{name}.py", f"--workdir=runs/{name}"]
    behind = [
        ["-m", "llama_jax.evaluate", f"--run=runs/{name}"],
        ["scripts/unigram.py", f"runs/{name}", "data/quickstart"],
        ["-m", "llama_jax.generate", f"--model=runs/{name}", "--prompt=The people of the United States"],
        ["scripts/report.py", f"runs/{name}"],
    ]
    assert (ROOT / train[2].removeprefix("--config=")).is_file()
    result, asked = quickstart(*filter(None, [word]))
    assert (result.returncode, result.stderr) == (0, "")
    assert asked[0][:3] == ["-m", "data_pipeline.prepare", "--source=mini"]
    assert asked[1:] == [train, *behind]
    assert f"runs/{name}/report.html " in result.stdout
    field = "--config.name=a b"
    result, asked = quickstart(*filter(None, [field, word, "--config.seed=1"]))
    assert asked == [[*train, field, "--config.seed=1"], *behind]  # the data are there already
    result, asked = quickstart(*filter(None, [word]), TRAIN_CODE=75)
    assert (result.returncode, asked) == (75, [train])


def test_constraints_pin_everything_exactly():
    for path in sorted((ROOT / "constraints").glob("py*.txt")):
        pins = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        for pin in pins:
            assert re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.]*", pin), pin
        names = [pin.split("==")[0] for pin in pins]
        assert names == sorted(set(names))
        assert {"jax", "jaxlib", "flax", "grain", "orbax-checkpoint", "pytest", "ruff", "mypy"} <= set(names)
        assert not any(name.startswith(("tensorflow-cpu", "nvidia", "bagz", "tokamax")) for name in names)
        assert ("torch" in names) == (path.name == "py311.txt")


def write_cache(directory, ids, vocab_size):
    directory.mkdir()
    (directory / "tokenizer.json").write_text("{}")
    dtype = shards.dtype_for(vocab_size)
    splits = {}
    for split, part in (("train", ids), ("validation", ids[8:12])):
        writer = shards.ShardWriter(directory, split, dtype, 8)
        writer.append(part)
        splits[split] = {"tokens": len(part), "documents": 1, "utf8_bytes": 9, "shards": writer.finish()}
    tokenizer = {"kind": "bpe", "name": "t", "vocab_size": vocab_size, "eos_id": 0, "bos_id": None}
    tokenizer |= {"file": "tokenizer.json", "sha256": hashlib.sha256(b"{}").hexdigest()}
    content = {"dtype": dtype, "shard_tokens": 8, "seed": 1, "tokenizer": tokenizer, "sources": [], "splits": splits}
    shards.write_manifest(directory, content)


def test_unigram_entropy(tmp_path):
    write_cache(tmp_path / "cache", np.array([1] * 10 + [2] * 5 + [3] * 5), 5)
    (tmp_path / "run").mkdir()
    with pytest.raises(DataError, match=r"no result\.json"):
        unigram.compare(tmp_path / "run", tmp_path / "cache")
    (tmp_path / "run" / "result.json").write_text(json.dumps({"validation_loss": None}))
    with pytest.raises(DataError, match="full_at_end"):
        unigram.compare(tmp_path / "run", tmp_path / "cache")
    for damaged in ("", "[]", "{}", "[" * 100_000):
        (tmp_path / "run" / "result.json").write_text(damaged)
        with pytest.raises(DataError, match=r"result\.json: damaged"):
            unigram.compare(tmp_path / "run", tmp_path / "cache")
    (tmp_path / "run" / "result.json").write_text(json.dumps({"validation_loss": 0.5}))
    said = unigram.compare(tmp_path / "run", tmp_path / "cache")
    # Validation is 1 1 2 2; the counts of train + 1 are 1, 11, 6, 6, 1 of 25.
    cross_entropy = -(math.log(11 / 25) + math.log(6 / 25)) / 2
    for name, value in (("entropy", math.log(2)), ("cross-entropy", cross_entropy)):
        assert re.search(rf"^unigram {name} +{value:.4f} ", said, re.MULTILINE), said
    assert re.search(r"^validation loss +0\.5000 ", said)
    assert f"Learned from context: {cross_entropy - 0.5:.4f} nats" in said
