"""Exit codes and messages of commands, in processes of their own where their output is at stake."""

import os
import subprocess
import sys

import pytest

from llama_jax import errors


def command(code, python=(), **options):
    """A process whose command is `code`: (exit code, standard error)."""
    program = f"import sys\nfrom llama_jax.errors import *\ndef command():\n    {code}\nsys.exit(run_command(command))"
    ended = subprocess.run([sys.executable, *python, "-c", program], stderr=subprocess.PIPE, **options)
    return ended.returncode, ended.stderr.decode()


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (errors.DataError("x.bin: damaged"), 3, "error: x.bin: damaged\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (MemoryError("9 TiB"), 6, "error: not enough memory: 9 TiB; ask for less, or free some\n"),
        (FileNotFoundError(2, "No such file or directory", "a/b"), 4, "error: a/b: No such file or directory\n"),
        (OSError(36, "File name too long", "a" * 9), 4, "error: aaaaaaaaa: File name too long\n"),
    ],
)
def test_errors_are_one_line_with_their_code(error, code, text, capsys):
    def fail():
        raise error

    assert errors.run_command(fail) == code
    assert capsys.readouterr() == ("", text)
    assert errors.run_command(fail, debug=True) == code
    assert "Traceback" in capsys.readouterr().err


def test_other_errors_are_bugs_and_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        errors.run_command(lambda: 1 / 0)


@pytest.mark.parametrize("code", ["print('x')", "print('x', flush=True)"])
def test_an_output_that_is_gone_or_full(code):
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    with reader.stdin as gone:
        assert command(code, stdout=gone) == (141, "")
    with open("/dev/full", "w") as full:
        assert command(code, stdout=full) == (4, "error: the output: No space left on device\n")


def test_messages_that_cannot_be_written_change_nothing():
    program = "from llama_jax.errors import *; warn('x'); warn('y'); raise SystemExit(run_command({}))"
    for call, code in (("lambda: warn('z')", 0), ("lambda: open('/nowhere')", 4)):
        with open("/dev/full", "w") as full:
            assert subprocess.run([sys.executable, "-c", program.format(call)], stderr=full).returncode == code


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_closed_stream_is_never_taken_by_a_file(closed, tmp_path):
    def close():
        for descriptor in closed:
            os.close(descriptor)

    code = f"print('x'); sys.exit(3 + open({str(tmp_path / 'file')!r}, 'w').fileno())"
    ended, _ = command(code, preexec_fn=close)
    assert ended > 3 + 2


def test_a_character_that_cannot_be_shown_is_shown_as_its_code():
    environment = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)}
    program = "import sys; from llama_jax.errors import *; sys.exit(run_command(lambda: print('\u00e9 \\ud800')))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"\\xe9 \\ud800\n", b"")
