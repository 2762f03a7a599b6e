"""The clock of every measurement here: median of three windows of updates after a warm-up, nothing read in between."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

WINDOWS = 3


def windows(update: Callable[[], Any], steps: int, warmup: int) -> dict[str, Any]:
    """Milliseconds of one `update()`, which dispatches and returns arrays that are ready when its work is done.

    -> {"update_ms": median of the windows, "windows_ms": each of them, "compile_s": the first update}. The first update
    compiles; the device is waited for at the end of each window only.
    """
    start = time.monotonic()
    jax.block_until_ready(update())
    compile_s = time.monotonic() - start
    result = None
    for _ in range(warmup - 1):
        result = update()
    jax.block_until_ready(result)
    found = []
    for _ in range(WINDOWS):
        start = time.monotonic()
        for _ in range(steps):
            result = update()
        jax.block_until_ready(result)
        found.append((time.monotonic() - start) / steps * 1e3)
    return {
        "update_ms": statistics.median(found),
        "windows_ms": found,
        "compile_s": compile_s,
    }
