"""Errors that a user can cause or must act on: one line each, and one exit code per kind.

Exit codes: 0 done, 2 configuration, 3 data, 4 checkpoint or run folder, 5 non-finite update, 6 device,
75 saved and preempted (run the same command again), 130 interrupted (a training run was saved), 141 the reader of the
output went away.
"""

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import TextIO


class Error(Exception):
    """Base of the errors that end a command with one line and their own exit code."""

    exit_code = 1


class ConfigError(Error):
    exit_code = 2


class DataError(Error):
    exit_code = 3


class CheckpointError(Error):
    exit_code = 4


class NonFiniteError(Error):
    exit_code = 5


class DeviceError(Error):
    exit_code = 6


class Preempted(Error):
    """SIGTERM or SIGUSR1: the state was saved, the same command continues."""

    exit_code = 75


class Interrupted(Error):
    """SIGINT: the state was saved; a scheduler must not requeue."""

    exit_code = 130


def run_command(command: Callable[[], object], debug: bool = False) -> int:
    """Runs `command` and returns the exit code of the process; errors print one line, or a traceback with `debug`.

    So do the errors that any command may meet: Ctrl-C, no memory, a file or an output that can't be read or written.
    """
    with contextlib.suppress(OSError):  # a standard stream that is closed must not become the next file that is opened
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a character that can't be shown is shown as its code
    try:
        command()
        if sys.stdout is not None:
            sys.stdout.flush()  # what can't be written must not end in exit code 0
        return 0
    except (Error, KeyboardInterrupt, MemoryError, OSError) as error:
        text, code = _said(error)
        if isinstance(error, OSError) and error.filename is None:
            _drop(sys.stdout)
        if debug:
            traceback.print_exc()
        if text:
            tell(f"error: {text}")
    finally:
        try:
            if sys.stderr is not None:
                sys.stderr.flush()
        except OSError:
            _drop(sys.stderr)
    return code


def tell(text: str) -> None:
    """A line on standard error, if it can be written: a full disk under a log must not end a run or change its end."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """A warning on standard error."""
    tell(f"warning: {text}")


def _said(error: BaseException) -> tuple[str, int]:
    """What is said of an error, and its exit code."""
    if isinstance(error, Error):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", Interrupted.exit_code
    if isinstance(error, BrokenPipeError):
        return "", 141  # as if SIGPIPE had ended it: the reader, `head` for example, has what it wanted
    if isinstance(error, OSError):
        return f"{error.filename or 'the output'}: {error.strerror or error}", CheckpointError.exit_code
    return f"not enough memory: {error}; ask for less, or free some", DeviceError.exit_code


def _drop(stream: TextIO | None) -> None:
    """What a stream still holds can't be written: Python would complain about it at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())  # type: ignore[union-attr]
        os.close(null)
