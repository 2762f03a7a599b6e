"""Measurements in processes of their own: what they print, how they fail, what the record keeps."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from bench import children
from llama_jax.errors import ConfigError


def python(script):
    return [sys.executable, "-c", script]


def test_result_is_the_last_json_line():
    ended = children.run(
        python("print('{\"a\": 1}'); print('{broken'); print('{\"a\": 2}'); print('done')"), children.Clock(1)
    )
    assert (ended.lines, ended.error) == ([{"a": 1}, {"a": 2}], None)
    assert ended.result["a"] == 2 and ended.result["wall_s"] >= 0


def test_a_failure_is_one_line_and_keeps_what_was_printed():
    script = "print('{\"a\": 1}', flush=True); raise ValueError('wrong\\nthing')"
    ended = children.run(python(script), children.Clock(1))
    assert ended.lines == [{"a": 1}] and ended.error == "ValueError: wrong"
    said = "print('W0 note', file=sys.stderr); print('jax.errors.E: RESOURCE_EXHAUSTED: x', file=sys.stderr)"
    script = f"import sys; {said}; sys.exit(1)"
    assert children.run(python(script), children.Clock(1)).error == children.OUT_OF_MEMORY
    assert children.run(python("import os; os._exit(3)"), children.Clock(1)).result["error"] == "exit code 3"
    assert children.run(python("pass"), children.Clock(1)).result["error"] == "it printed no result"
    assert "no_such_program" in children.run(["/no_such_program"], children.Clock(1)).error


def test_a_warning_about_memory_is_no_failure():
    script = "import sys; print('Allocator ran out of memory, retrying', file=sys.stderr); print('{\"a\": 1}')"
    ended = children.run(python(script), children.Clock(1))
    assert ended.error is None and ended.result["a"] == 1


def test_a_process_that_hangs_ends_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "_LEAST_S", 0)
    pid = tmp_path / "pid"
    script = (
        "import pathlib, subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']); "
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid)); "
        "print('{\"a\": 1}', flush=True); time.sleep(100)"
    )
    ended = children.run(python(script), children.Clock(1), limit_s=3)
    assert ended.error == "stopped after 3 s" and ended.lines == [{"a": 1}]
    stat = Path("/proc") / pid.read_text() / "stat"
    for _ in range(50):  # a killed process stays as a zombie until init takes it
        try:
            if stat.read_text().split()[2] == "Z":
                break
        except OSError:
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the child of the child lives on")


def test_nothing_starts_when_the_time_is_over(tmp_path):
    mark = tmp_path / "mark"
    ended = children.run(python(f"open({str(mark)!r}, 'w')"), children.Clock(0.01))
    assert ended.error == children.NO_TIME and not mark.exists()


def test_record_is_written_at_every_step_and_continued(tmp_path):
    path = tmp_path / "deep" / "record.json"
    record = children.Record(path, "command", {"steps": 3}, "abc")
    record.put("a", {"loss": float("nan"), "environment": {"x": 1}})
    record.put("b", {"error": "late"})
    record.note("cases", {"k": [1.0, float("inf")]})
    found = json.loads(path.read_text())
    assert found["measured"] == {"a": {"loss": None}, "b": {"error": "late"}}
    assert (found["run_environment"], found["cases"], found["commit"]) == ({"x": 1}, {"k": [1.0, None]}, "abc")
    again = children.Record(path, "other command", {"steps": 3}, "abc")
    assert again.has("a") and not again.has("b") and again.content["cases"] == {"k": [1.0, None]}
    assert json.loads(path.read_text())["command"] == "other command"
    for settings, commit in (({"steps": 4}, "abc"), ({"steps": 3}, "abd")):
        assert not children.Record(path, "command", settings, commit).measured


def test_record_that_cannot_be_used_is_an_error_at_the_start(tmp_path):
    path = tmp_path / "record.json"
    path.write_text("not JSON")
    with pytest.raises(ConfigError, match=r"record\.json"):
        children.Record(path, "command", {})
    assert path.read_text() == "not JSON"
    with pytest.raises(ConfigError):
        children.Record(tmp_path, "command", {})


def test_a_full_disk_later_is_said(tmp_path, capsys, monkeypatch):
    record = children.Record(tmp_path / "record.json", "command", {})

    def fail(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(children, "write_json_atomic", fail)
    record.put("a", {"x": 1})
    assert "can't be written" in capsys.readouterr().err and record.has("a")
