"""The processes that make pieces: in order, no further ahead than needed, none left behind, deaf to job signals."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
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
    with _deaf():  # these two start multiprocessing's own helper process
        ticks, stop = context.Queue(), context.Event()
    executor = ProcessPoolExecutor(processes, context, _start_worker, (ticks, stop, threads))
    waiting: deque[Future[pieces.Piece]] = deque()
    submitted = 0
    try:
        while True:
            while submitted < len(items) and len(waiting) < (2 * processes if submitted < wanted else 1):
                with _deaf():
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
        time.sleep(0.5)  # a signal to the whole job can reach a worker first: let this process's own handler speak
        raise DataError(
            "a worker process died (out of memory?); repeat with fewer --workers, finished files are kept"
        ) from None
    finally:
        stop.set()
        executor.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _deaf() -> Generator[None]:
    """Processes started inside are deaf to SIGINT and SIGUSR1 from birth; for this one those wait until the end.

    A terminal and a scheduler send them to every process of a job, and only the main process is to act on them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker: dict[str, Any] = {}


def _start_worker(ticks: Any, stop: Any, threads: int) -> None:
    """Set-up of a worker process: it ends with the main process, if not before.

    SIGTERM ends it too: that is how the executor gets rid of the others after one has died.
    """
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
