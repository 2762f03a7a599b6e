"""Faults for tests: `LLAMA_JAX_TEST_FAULT="kill@before_manifest:3"` kills the process at its third passage there.

The form is action@point:nth, several joined by commas. Actions: kill, stop, term, usr1, int (send that signal to this
process), enospc (raise OSError), nan (`fault_point` returns True, and the caller spoils a number). Each fault fires
once and appends its text to the file named by `LLAMA_JAX_TEST_FAULT_FIRED`, so that a test can assert that it did.
Without the variable nothing happens, at the price of one dictionary look-up.
"""

import errno
import os
import signal
import threading

VARIABLE = "LLAMA_JAX_TEST_FAULT"
FIRED_VARIABLE = "LLAMA_JAX_TEST_FAULT_FIRED"
_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "usr1": signal.SIGUSR1,
    "int": signal.SIGINT,
}
_passages: dict[tuple[str, str], int] = {}
_lock = threading.Lock()


def fault_point(name: str) -> bool:
    """Passes the point `name`; True when a `nan` fault is due here, OSError (no space) when an `enospc` one is."""
    specification = os.environ.get(VARIABLE)
    if specification is None:
        return False
    with _lock:
        count = _passages[specification, name] = _passages.get((specification, name), 0) + 1
    result = False
    for fault in map(str.strip, specification.split(",")):
        action, point, nth = _parse(fault)
        if (point, nth) != (name, count):
            continue
        _record(fault)
        if action == "enospc":
            raise OSError(errno.ENOSPC, f"no space left on device (test fault {fault})")
        if action == "nan":
            result = True
        else:
            os.kill(os.getpid(), _SIGNALS[action])
    return result


def _parse(fault: str) -> tuple[str, str, int]:
    action, _, rest = fault.partition("@")
    point, _, nth = rest.partition(":")
    if action not in (*_SIGNALS, "enospc", "nan") or not point or not nth.isdigit():
        raise ValueError(f"{VARIABLE}: {fault!r} is not action@point:nth")
    return action, point, int(nth)


def _record(fault: str) -> None:
    path = os.environ.get(FIRED_VARIABLE)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(fault + "\n")
