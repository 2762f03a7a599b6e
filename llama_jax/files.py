"""Writing files so that a crash leaves either the old or the new content, and reading them strictly (stdlib only)."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

PathLike = str | os.PathLike[str]
TMP_SUFFIX = ".tmp"


def write_atomic(path: PathLike, data: bytes, temporary: Path | None = None) -> None:
    """Replaces `path` by `data`: written to `path`.tmp in the same directory, synced, renamed, directory synced.

    The temporary name is fixed, so that a killed write leaves at most one file, which the next write reuses; callers
    hold the lock of the run folder, or give a `temporary` name of their own in that directory. The mode follows the
    umask. Raises OSError, after removing the temporary file.
    """
    path = Path(path)
    temporary = temporary or path.with_name(path.name + TMP_SUFFIX)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            publish(file, temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def publish(file: BinaryIO, temporary: PathLike, path: PathLike) -> None:
    """Makes an open file called `temporary` durable and gives it the name `path` in the same directory. OSError."""
    file.flush()
    os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(Path(path).parent)


def reserve(path: PathLike) -> None:
    """Makes the directory of a file that long work will write. Raises OSError where none could be written."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    for wrong, number in (
        (Path(path).is_dir(), errno.EISDIR),
        (not os.access(Path(path).parent, os.W_OK), errno.EACCES),
    ):
        if wrong:
            raise OSError(number, os.strerror(number), str(path))


def write_json_atomic(path: PathLike, value: Any) -> None:
    """Writes `value` as indented strict JSON through `write_atomic`; ValueError for NaN or infinity, OSError."""
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def parse_json(text: str | bytes) -> Any:
    """Parses strict JSON: ValueError for the words NaN and Infinity, which Python's parser lets through.

    Nesting too deep for Python's parser is a ValueError too.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def read_json(path: PathLike) -> Any:
    """The strictly parsed content of a JSON file; OSError or ValueError (which UnicodeDecodeError is too)."""
    return parse_json(Path(path).read_bytes())


def canonical_json(value: Any) -> bytes:
    """`value` as JSON bytes with sorted keys and no white space: equal values give equal bytes, for hashing."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def json_differences(old: Any, new: Any, name: str = "") -> list[str]:
    """`name: old -> new` for each place where two JSON values differ (of a list, the first place); null: not there."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        prefix = f"{name}." if name else ""
        return [line for key in keys for line in json_differences(old.get(key), new.get(key), f"{prefix}{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        lines = (json_differences(a, b, f"{name}[{i}]") for i, (a, b) in enumerate(zip(old, new, strict=True)))
        return next((line for line in lines if line), [])
    if type(old) is type(new) and old == new:
        return []
    return [f"{name}: {_short(old)} -> {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:60] + "..." + text[-17:]


def sha256_of_file(path: PathLike, sync: bool = False) -> str:
    """SHA-256 of a file's bytes as hex; with `sync` the file is flushed to the disk first."""
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: PathLike) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path, last: str = "") -> None:
    """Removes a directory, the entry called `last` after all others; links are removed, never followed."""
    for child in sorted(path.iterdir(), key=lambda child: (child.name == last, child.name)):
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()
    path.rmdir()
