"""The processes that make pieces: in order, no further ahead than needed, none left behind, deaf to job signals."""

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from data_pipeline import pieces
from data_pipeline.sources import Item
from llama_jax.errors import DataError


def needed(items: Sequence[Item], tokens: int) -> int:
    """How many of the first items hold `tokens`, estimated on the high side (C4 has half as many again a byte)."""
    for count, item in enumerate(items, 1):
        dense = 300 if item.kind == "tfds" else 0.3 if item.path.endswith((".gz", ".zst")) else 0.15
        tokens -= int(item.weight * dense)
        if tokens <= 0:
            return count
    return len(items)


def make_all(
    items: Sequence[Item],
    work: pieces.Work,
    limit: pieces.Limit | None,
    workers: int,
    tick: pieces.Tick,
    share: int = 1,
) -> Generator[pieces.Piece]:
    """Pieces of all items, in order, made by up to `workers` processes a little ahead of whoever iterates.

    Nothing is made ahead that `limit` will hardly need; the items are one `share`-th of all that count towards it.
    Fewer items than workers: the rest become threads of the tokenizer. Closing the iterator stops the processes.
    """
    wanted = len(items) if limit is None else needed(items, limit.tokens // share)
    processes = max(1, min(workers, wanted))
    threads = max(1, workers // processes)
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    if processes == 1:
        for item in items:
            yield pieces.make(item, work, limit, threads, tick, lambda: False)
        return
    # spawn: libraries with threads of their own are loaded by now, and a fork of such a process can deadlock
    context = multiprocessing.get_context("spawn")
    _start_tracker()
    ticks, stop = context.Queue(), context.Event()
    executor = ProcessPoolExecutor(processes, context, _start_worker, (ticks, stop, threads))
    waiting: deque[Future[pieces.Piece]] = deque()
    submitted = 0
    try:
        while True:
            while submitted < len(items) and len(waiting) < (2 * processes if submitted < wanted else 1):
                waiting.append(executor.submit(_in_worker, items[submitted], work, limit, threads))
                submitted += 1
            if not waiting:
                return
            while not waiting[0].done():
                with contextlib.suppress(TimeoutError):
                    waiting[0].exception(timeout=0.2)
                while not ticks.empty():
                    tick(*ticks.get())
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process died (out of memory?); repeat with fewer --workers, finished files are kept"
        ) from None
    finally:
        stop.set()
        executor.shutdown(wait=True, cancel_futures=True)


def _start_tracker() -> None:
    """Starts multiprocessing's helper process deaf to SIGUSR1, which a scheduler may send to every process of a job."""
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        multiprocessing.resource_tracker.ensure_running()
    finally:
        signal.signal(signal.SIGUSR1, handler or signal.SIG_DFL)


_worker: dict[str, Any] = {}


def _start_worker(ticks: Any, stop: Any, threads: int) -> None:
    """Set-up of a worker process: signals are the main process's business, and none outlives it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    ticks.cancel_join_thread()
    _worker.update(ticks=ticks, stop=stop)
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _in_worker(item: Item, work: pieces.Work, limit: pieces.Limit | None, threads: int) -> pieces.Piece:
    return pieces.make(
        item, work, limit, threads, lambda *amounts: _worker["ticks"].put(amounts), _worker["stop"].is_set
    )
