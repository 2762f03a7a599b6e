"""The folder of a run: its lock, config.json, environment.json, and whether a restart may go on in it.

.lock              held with flock by the process that trains; host and pid inside, for people
config.json        {"program", "format_version", "config": every field with derived numbers, "resolved": what `auto`
                   became, "data": fingerprints of the data}
environment.json   one record for each start: versions, device, an allow-list of variables, changed fields
metrics.jsonl, checkpoints/, exports/, best.json, result.json
"""

import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llama_jax import config as configs
from llama_jax.errors import CheckpointError, ConfigError, DataError, warn
from llama_jax.files import TMP_SUFFIX, canonical_json, parse_json, read_json, write_json_atomic

FORMAT_VERSION = 1
PROGRAM = "llama_jax"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_OURS = {".lock", "config.json", "environment.json"}  # what a start that was killed at once may leave
_LOGS = (".out", ".err", ".log")  # a scheduler may put its own logs here before the program starts

_VARIABLES = re.compile(
    r"XLA_FLAGS|JAX_\w+|CUDA_VISIBLE_DEVICES|XLA_PYTHON_CLIENT_\w+"
    r"|SLURM_(JOB_ID|JOB_NODELIST|ARRAY_JOB_ID|ARRAY_TASK_ID|RESTART_COUNT|PROCID|NTASKS|NNODES|CPUS_PER_TASK)"
)
_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)


@dataclass(frozen=True)
class RunFolder:
    """An opened run folder; `resumed`: it held this run already, `finished`: with its result. `close()` unlocks it."""

    path: Path
    resumed: bool
    finished: bool
    changes: tuple[str, ...]  # execution-only fields that this start changed, as "field: old -> new"
    lock: int

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def exports(self) -> Path:
        return self.path / "exports"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def best(self) -> Path:
        return self.path / "best.json"

    def close(self) -> None:
        """Releases the lock (the end of the process does so as well)."""
        os.close(self.lock)


def open_run(
    workdir: str | os.PathLike[str], config: Mapping[str, Any], resolved: Mapping[str, Any], data: Mapping[str, Any]
) -> RunFolder:
    """Creates or reopens the run folder and locks it.

    `config` is config.to_dict(); `resolved` the choices behind `auto` (attention, compute dtype, head, ...), part of
    the recipe; `data` the fingerprints of the data. CheckpointError for a folder that is locked, foreign or not
    writable, ConfigError with one line for each changed recipe field, DataError for other data. Changed execution-only
    fields are written to config.json and recorded in environment.json. A finished run is not written to.
    """
    path = Path(workdir).absolute()
    new = {
        "program": PROGRAM,
        "format_version": FORMAT_VERSION,
        "config": _plain(config),
        "resolved": _plain(resolved),
        "data": _plain(data),
    }
    try:
        str(path).encode()  # the libraries that write arrays take names in UTF-8 only, and these two as patterns
        if "[" in str(path) or "\\" in str(path):
            raise ValueError("its path may not have [ or \\")
        path.mkdir(parents=True, exist_ok=True)
        _refuse_foreign(path)
        lock = _lock(path / ".lock")
    except (OSError, ValueError) as error:  # ValueError: NUL or no UTF-8 in the name
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"run folder {path}: {reason}; choose another --workdir") from None
    try:
        old = read_run(path) if (path / "config.json").exists() else None
        finished = (path / "result.json").exists()
        changes = _compare(path, old, new) if old else []
        if not finished:
            if old is None or changes:
                write_json_atomic(path / "config.json", new)
            _record_start(path, changes)
    except OSError as error:
        os.close(lock)
        raise CheckpointError(f"run folder {path}: {error.strerror or error}; free space or fix its rights") from None
    except BaseException:
        os.close(lock)
        raise
    return RunFolder(path, old is not None, finished, tuple(changes), lock)


def read_run(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """config.json of a run: {"config", "resolved", "data", ...}; CheckpointError if it is not one of this program."""
    path = Path(workdir) / "config.json"
    try:
        content = read_json(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; is {workdir} a run folder?") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: unreadable ({error}); put a good copy back or use a new --workdir") from None
    if not isinstance(content, dict) or content.get("program") != PROGRAM:
        raise CheckpointError(f"{path} was not written by {PROGRAM}; choose another --workdir")
    if content.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format version {content.get('format_version')} is refused, this program reads {FORMAT_VERSION}"
        )
    if not all(isinstance(content.get(key), dict) for key in ("config", "resolved", "data")):
        raise CheckpointError(f"{path}: needs config, resolved and data; put a good copy back or use a new --workdir")
    return content


def environment() -> dict[str, Any]:
    """Versions, devices, processors, git commit, and the variables of an allow-list; never the whole environment."""
    import jax

    devices = jax.devices()
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in (PROGRAM, *PACKAGES)}},
        "device": {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)},
        "host": {"machine": platform.machine(), "cpus": os.cpu_count(), "cpus_allowed": _allowed_cpus()},
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name) and not _SECRET.search(name)
        },
        "git_commit": _git_commit(),
    }


def _compare(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Changed execution-only fields as lines; the errors of `open_run` for everything else that changed."""
    fields = configs.diff(old["config"], new["config"])
    for key in sorted(old["resolved"].keys() | new["resolved"].keys()):
        before, after = old["resolved"].get(key, "absent"), new["resolved"].get(key, "absent")
        if canonical_json(before) != canonical_json(after):
            fields.append((f"resolved.{key}", before, after))
    if fields:
        raise ConfigError(
            f"{path} holds a run of another recipe; restore these fields (here old -> new) or use a new --workdir"
            + "".join(f"\n  {field}: {before} -> {after}" for field, before, after in fields)
        )
    for key in sorted(old["data"].keys() | new["data"].keys()):
        before, after = old["data"].get(key, "absent"), new["data"].get(key, "absent")
        if canonical_json(before) != canonical_json(after):
            raise DataError(
                f"{path} was trained on other data: {key}: {before} -> {after}; restore the data or use a new --workdir"
            )
    changed = configs.diff(old["config"], new["config"], execution=True)
    return [f"{field}: {before} -> {after}" for field, before, after in changed]


def _refuse_foreign(path: Path) -> None:
    if (path / "config.json").exists():
        return
    for entry in sorted(path.iterdir()):
        name = entry.name
        if name not in _OURS and name.removesuffix(TMP_SUFFIX) not in _OURS and not name.endswith(_LOGS):
            raise CheckpointError(f"{path} is not a run folder and holds {name}; choose an empty or new --workdir")


def _lock(path: Path) -> int:
    """An open descriptor with the lock, which ends with the process however it dies; CheckpointError if taken."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    holder = os.read(descriptor, 200).decode(errors="replace").strip()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES) or _lives(holder):
            os.close(descriptor)
            raise CheckpointError(
                f"{path.parent} is in use by {holder or 'another process'}; wait for it or choose another --workdir"
            ) from None
        warn(f"{path}: this file system has no locks ({error.strerror}); run one process here only")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"host {socket.gethostname()} pid {os.getpid()}\n".encode(), 0)
    return descriptor


def _lives(holder: str) -> bool:
    """Whether the text of a lock names a living process of this host, where the file system cannot tell."""
    found = re.fullmatch(r"host (\S+) pid (\d+)", holder)
    if not found or found[1] != socket.gethostname() or int(found[2]) == os.getpid():
        return False
    return Path(f"/proc/{found[2]}").exists()


def _record_start(path: Path, changes: list[str]) -> None:
    """Adds a record to environment.json; one that cannot be read is started anew."""
    file = path / "environment.json"
    try:
        starts = read_json(file)["starts"]
    except (OSError, ValueError, KeyError, TypeError):
        starts = []
    record = {"started": datetime.now(UTC).isoformat(timespec="seconds"), **environment(), "changes": changes}
    write_json_atomic(file, {"starts": [*starts, record]})


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    return parse_json(json.dumps(dict(value), allow_nan=False))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _allowed_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else None


def _git_commit() -> str | None:
    """The commit of the checkout that this file is tracked in, with "+" if tracked files differ; None elsewhere."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        here = Path(__file__).parent
        return subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10)

    try:
        if git("ls-files", "--error-unmatch", Path(__file__).name).returncode:
            return None
        head = git("rev-parse", "HEAD").stdout.strip()
        return (head + "+" * (git("diff", "--quiet", "HEAD").returncode != 0)) or None
    except (OSError, subprocess.SubprocessError):
        return None
