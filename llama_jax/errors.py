"""Errors that a user can cause or must act on: one line each, and one exit code per kind.

Exit codes: 0 done, 2 configuration, 3 data, 4 checkpoint or run folder, 5 non-finite update, 6 device,
75 saved and preempted (run the same command again), 130 saved and interrupted.
"""

import sys
import traceback
from collections.abc import Callable


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
    """Runs `command` and returns the exit code of the process; errors print one line, or a traceback with `debug`."""
    try:
        command()
    except Error as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0
