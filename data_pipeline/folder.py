"""The folder of a cache under construction: what may lie in it, who may work in it, whether it fits on the disk."""

import contextlib
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_pipeline.sources import Item
from llama_jax import shards
from llama_jax.errors import CheckpointError, DataError

PARTIAL = "partial"
LOCK = "prepare.lock"
_OURS = re.compile(
    r"manifest\.json(\.tmp)?|(train|validation)-\d{5}\.bin(\.tmp)?|tokenizer\.(json|model)|prepare[\w-]*\.lock"
    r"|skipped\.txt|partial|\..+\.\d+\.tmp"
)


def claim(out: Path) -> None:
    """Makes `out`, or checks that everything in it is ours."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        foreign = sorted(path.name for path in out.iterdir() if not _OURS.fullmatch(path.name))
    except OSError as error:
        raise CheckpointError(f"--out={out}: {error.strerror}") from None
    if foreign:
        raise CheckpointError(
            f"--out={out}: holds {foreign[0]}, which is no part of a token cache; choose a folder of its own"
        )


@contextlib.contextmanager
def locked(out: Path, share: tuple[int, int] | None) -> Iterator[None]:
    """One preparation at a time; slices exclude whole preparations and each itself. Locks end with their process."""
    with contextlib.ExitStack() as stack:
        if share is None:
            stack.enter_context(_lock(out / LOCK, fcntl.LOCK_EX))
        else:
            stack.enter_context(_lock(out / LOCK, fcntl.LOCK_SH))
            stack.enter_context(_lock(out / f"prepare-slice-{share[0]}-of-{share[1]}.lock", fcntl.LOCK_EX))
        try:
            yield
        finally:
            if (out / shards.MANIFEST).exists():
                for path in out.glob("prepare*.lock"):
                    path.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(path: Path, mode: int) -> Iterator[None]:
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, mode | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read(200).strip() or "slices of it"
            raise CheckpointError(f"{path.parent} is being prepared already (by {holder}); wait for it") from None
        if mode == fcntl.LOCK_EX:
            file.truncate(0)
            file.write(f"{socket.gethostname()} pid {os.getpid()}")
            file.flush()
        yield


def check_disk(out: Path, limit: int | None, items: Sequence[Item]) -> None:
    """Refuses to start what the disk can't hold: pieces and shards of all tokens, by a rough estimate."""
    by_size = sum(
        item.weight * (1000 if item.kind == "tfds" else 0.9 if item.path.endswith((".gz", ".zst")) else 0.3)
        for item in items
    )
    tokens = by_size if limit is None else min(by_size, 1.6 * limit)
    needed = int(tokens * 2 * 2)
    partial = out / PARTIAL
    there = sum(path.stat().st_size for path in partial.iterdir()) if partial.is_dir() else 0
    free = shutil.disk_usage(out).free
    if free < needed - there:
        raise DataError(
            f"{out}: about {(needed - there) / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free; "
            "free space, choose another --out, or ask for fewer --tokens"
        )
