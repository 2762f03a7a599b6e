"""The fault hook fires where and when it is told, once, and is nothing without its variable."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llama_jax import faults
from llama_jax.faults import fault_point

ROOT = Path(__file__).resolve().parent.parent


def test_nothing_without_the_variable(monkeypatch):
    monkeypatch.delenv("LLAMA_JAX_TEST_FAULT", raising=False)
    before = dict(faults._passages)
    assert fault_point("here") is False
    assert faults._passages == before


def test_the_nth_passage_of_that_point_only(monkeypatch, tmp_path):
    monkeypatch.setenv("LLAMA_JAX_TEST_FAULT", "nan@step:3, enospc@save:2")
    monkeypatch.setenv("LLAMA_JAX_TEST_FAULT_FIRED", str(tmp_path / "fired"))
    assert [fault_point("step") for _ in range(5)] == [False, False, True, False, False]
    assert fault_point("other") is False and fault_point("save") is False
    with pytest.raises(OSError) as error:
        fault_point("save")
    assert error.value.errno == 28
    assert fault_point("save") is False
    assert (tmp_path / "fired").read_text() == "nan@step:3\nenospc@save:2\n"


@pytest.mark.parametrize("text", ["kill", "kill@save", "boom@save:1", "kill@:1", "kill@save:-1", "kill@save:1.5", ""])
def test_a_misspelt_fault_is_an_error(monkeypatch, text):
    monkeypatch.setenv("LLAMA_JAX_TEST_FAULT", text)
    with pytest.raises(ValueError, match="action@point:nth"):
        fault_point("save")


@pytest.mark.parametrize("action, code", [("kill", -9), ("term", -15), ("usr1", -10), ("int", -2)])
def test_signals(tmp_path, action, code):
    program = (
        "import signal, sys; sys.path.insert(0, sys.argv[1]); signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "from llama_jax.faults import fault_point\n"
        "fault_point('x'); print('once', flush=True); fault_point('x'); print('twice')"
    )
    environment = {"LLAMA_JAX_TEST_FAULT": f"{action}@x:2", "LLAMA_JAX_TEST_FAULT_FIRED": str(tmp_path / "fired")}
    result = subprocess.run(
        [sys.executable, "-c", program, str(ROOT)], env=os.environ | environment, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (code, "once\n"), result.stderr
    assert (tmp_path / "fired").read_text() == f"{action}@x:2\n"
