"""The directory of a step: its manifest, hashes of its files, checksums of its arrays, and what may be removed.

The checksum is 64 bits over an array's elements and their positions, sums modulo 2**32, so that it is the same on any
device, under any sharding, in jitted JAX and in numpy; files are covered by SHA-256.
"""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.errors import CheckpointError
from llama_jax.files import (
    canonical_json,
    read_json,
    remove_tree,
    sha256_of_file,
    sync_directory,
    write_json_atomic,
)

FORMAT_VERSION = 1
MANIFEST = "integrity.json"
DTYPES = ("float32", "int32", "uint32", "bool")
_CHUNK = 1 << 16  # elements; temporaries stay in the processor's cache
_PRIMES = tuple(np.uint32(prime) for prime in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))


class Damaged(CheckpointError):
    """A step that must not be used: it names the step, the file and the reason."""


def to_json(value: Any) -> str:
    """Strict JSON text; ValueError or TypeError for NaN and for what JSON cannot hold."""
    return json.dumps(value, allow_nan=False)


def write_manifest(step: Path, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest atomically, with the SHA-256 of its own content; the step counts from here on."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    write_json_atomic(step / MANIFEST, {**content, "sha256": hashlib.sha256(canonical_json(content)).hexdigest()})
    sync_directory(step.parent)


def read_manifest(step: Path) -> dict[str, Any]:
    """The manifest of a step if it is sound, else Damaged; files are not looked at.

    CheckpointError for a sound one of another format version: it is not damaged, only not for this program.
    """
    path = step / MANIFEST
    try:
        manifest = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"{step}: no {MANIFEST}, so it is not a complete checkpoint") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{path}: unreadable ({error})") from None
    if not isinstance(manifest, dict):
        raise Damaged(f"{path}: not a manifest")
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    if manifest.get("sha256") != hashlib.sha256(canonical_json(content)).hexdigest():
        raise Damaged(f"{path}: its content does not match its own SHA-256")
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format version {version} is refused, this program reads version {FORMAT_VERSION}; go on with the "
            "program that wrote it, or start again in a new --workdir"
        )
    kinds = {"update": int, "kind": str, "meta": dict, "arrays": dict, "files": list}
    if not all(isinstance(manifest.get(key), kind) for key, kind in kinds.items()):
        raise Damaged(f"{path}: needs {', '.join(kinds)}")
    if str(manifest.get("update")) != step.name:
        raise Damaged(f"{path}: is of update {manifest.get('update')}, not {step.name}")
    return manifest


def hash_files(step: Path) -> list[dict[str, Any]]:
    """[{"file", "bytes", "sha256"}] of every file under `step`, in the order of names; each is synced to the disk."""
    files = []
    for path in sorted(step.rglob("*")):
        if path.is_dir():
            sync_directory(path)
        elif path.name != MANIFEST:
            name = path.relative_to(step).as_posix()
            files.append({"file": name, "bytes": path.stat().st_size, "sha256": sha256_of_file(path, sync=True)})
    sync_directory(step)
    return files


def verify_files(step: Path, manifest: Mapping[str, Any]) -> None:
    """Compares every file that the manifest lists with its size and SHA-256; Damaged names the first that differs."""
    for entry in manifest["files"]:
        name = entry["file"]
        path = step / name
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise Damaged(f"{step / MANIFEST}: {name!r} is not a plain relative name")
        if path.is_symlink() or not path.is_file() or not path.resolve().is_relative_to(step.resolve()):
            raise Damaged(f"{path}: missing")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise Damaged(f"{path}: {size} bytes instead of {entry['bytes']}")
        try:
            digest = sha256_of_file(path)
        except OSError as error:
            raise Damaged(f"{path}: {error.strerror}") from None
        if digest != entry["sha256"]:
            raise Damaged(f"{path}: SHA-256 {digest[:16]}... instead of {entry['sha256'][:16]}...")


def check_templates(step: Path, stored: Mapping[str, Any], templates: Mapping[str, Any], exact: bool) -> None:
    """CheckpointError unless names (all of them with `exact`), shapes and dtypes are those stored; Orbax would cast."""
    if exact and set(stored) != set(templates):
        lacking = ", ".join(sorted(set(templates) - set(stored))) or "nothing"
        extra = ", ".join(sorted(set(stored) - set(templates))) or "nothing"
        raise CheckpointError(f"{step}: lacks {lacking} and holds {extra} in excess: it is of another recipe")
    for name, template in templates.items():
        have = f"{stored[name]['dtype']}{stored[name]['shape']}"
        want = f"{np.dtype(template.dtype)}{list(template.shape)}"
        if have != want:
            raise CheckpointError(f"{step}: {name} is {have}, this run needs {want}")


def entries_of(directory: Path) -> list[Path]:
    """What is in a directory, sorted; nothing if it does not exist."""
    return sorted(directory.iterdir()) if directory.is_dir() else []


def steps(directory: Path) -> list[int]:
    """The updates that directories are named after, rising, whatever is in them."""
    names = (path.name for path in entries_of(directory) if path.is_dir())
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def marker(step: Path) -> Path:
    """The file that says that a save of this step is ours and under way."""
    return step.with_name(f"{step.name}.saving")


def leftovers(step: Path) -> list[Path]:
    """The places that Orbax writes for a step, as far as they exist."""
    paths = [step, *step.parent.glob(f"{step.name}.orbax-checkpoint-tmp*")]
    return [path for path in paths if path.exists() or path.is_symlink()]


def drop(step: Path) -> None:
    """Removes what an unfinished save of ours left: only with our marker, and never a step with a manifest."""
    if not marker(step).exists():
        return
    for path in leftovers(step):
        if path.is_dir() and not path.is_symlink() and not (path / MANIFEST).exists():
            remove_tree(path)
    marker(step).unlink()


def retire(step: Path) -> None:
    """Removes a finished step; killed in between, it no longer counts and `clean` goes on with it."""
    retired = step.with_name(f"{step.name}.retired")
    os.rename(step, retired)
    remove_tree(retired, last=MANIFEST)


def clean(directory: Path) -> None:
    """Removes what killed saves and retirements of ours left."""
    for path in entries_of(directory):
        stem, _, suffix = path.name.rpartition(".")
        if suffix == "saving" and stem.isdecimal():
            drop(directory / stem)
        elif suffix == "retired" and stem.isdecimal() and _is_ours(path):
            remove_tree(path, last=MANIFEST)


def _is_ours(retired: Path) -> bool:
    return retired.is_dir() and not retired.is_symlink() and ((retired / MANIFEST).exists() or not entries_of(retired))


def set_aside(path: Path) -> Path:
    """Moves a step, or whatever has its name, to `damaged/` beside it under a free name; returns the new place."""
    damaged = path.parent / "damaged"
    damaged.mkdir(exist_ok=True)
    target = next(p for i in itertools.count(1) if not (p := damaged / (path.name + f".{i}" * (i > 1))).exists())
    os.rename(path, target)
    sync_directory(path.parent)
    return target


def checksum_on_device(x: jax.Array) -> jax.Array:
    """uint32 [2] checksum of an array, computed where it lives; ValueError for a dtype that is not in `DTYPES`."""
    if str(x.dtype) not in DTYPES:
        raise ValueError(f"dtype {x.dtype} cannot be checkpointed, only {', '.join(DTYPES)}")
    return _checksum(x)


@jax.jit
def _checksum(x: jax.Array) -> jax.Array:
    bits = x.astype(jnp.uint32) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, jnp.uint32)
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        stride = np.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
        index = index + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
    mixed, weighted = _mix(bits, index)
    return jnp.stack([mixed.sum(dtype=jnp.uint32), weighted.sum(dtype=jnp.uint32)])


def checksum_on_host(x: np.ndarray) -> str:
    """The same checksum as text, in numpy."""
    flat = np.ascontiguousarray(x).reshape(-1)
    flat = flat.astype(np.uint32) if flat.dtype == np.bool_ else flat.view(np.uint32)
    total, place = np.zeros(2, np.uint32), np.arange(_CHUNK, dtype=np.uint32)
    for start in range(0, flat.size, _CHUNK):
        bits = flat[start : start + _CHUNK]
        index = place[: bits.size] + np.uint32(start % 2**32)
        total += np.array([part.sum(dtype=np.uint32) for part in _mix(bits, index)], np.uint32)
    return f"{total[0]:08x}{total[1]:08x}"


def _mix(bits: Any, index: Any) -> tuple[Any, Any]:
    """Two well mixed words from an element's bits and its position; numpy or JAX, uint32 throughout."""
    mixed = (bits ^ (index * _PRIMES[0])) * _PRIMES[1]
    mixed = (mixed ^ (mixed >> np.uint32(13))) * _PRIMES[2]
    mixed = mixed ^ (mixed >> np.uint32(16))
    return mixed, mixed * (index | np.uint32(1))


def checksum_text(checksum: jax.Array) -> str:
    """The text of a checksum that was computed on a device (waits for it)."""
    first, second = jax.device_get(checksum)
    return f"{first:08x}{second:08x}"
