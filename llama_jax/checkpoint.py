"""Checkpoints of a run: Orbax writes the arrays, our own manifest says that a step is whole, and what is kept is ours.

    checkpoints/120/                a step: Orbax's files, and integrity.json, written last
    checkpoints/120.saving          a save of update 120 is under way, or was when the process died
    checkpoints/120.retired         a step on its way out
    checkpoints/damaged/            steps that failed verification, never deleted
    checkpoints/saved.json          that there has been a checkpoint at all

A step counts only with its `integrity.json`: format version, update, kind, fingerprint, the caller's `meta`, shape,
dtype and checksum of every array, size and SHA-256 of every file, and a SHA-256 of itself. It is written (temporary
file, sync, rename) after Orbax has committed, every file has been synced and hashed, and the arrays have been read back
and compared with checksums taken on the device before the save. Orbax alone restores flipped bits, casts dtypes and
counts empty directories as steps. Everything that a killed save leaves carries the `.saving` marker and is cleaned at
the next opening; what carries no marker is moved to `damaged/` when it is in the way, never deleted.

Kinds: `recovery` (the newest two are kept), `interval` (kept), `final` (kept; once verified, the recovery ones go).
"""

import contextlib
import dataclasses
import logging
import math
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from llama_jax import integrity
from llama_jax.errors import CheckpointError, warn
from llama_jax.faults import fault_point
from llama_jax.files import json_differences, parse_json, write_json_atomic
from llama_jax.integrity import FORMAT_VERSION, Damaged

KINDS = ("recovery", "interval", "final")  # rising: a later save of the same update never lowers the kind
KEPT_RECOVERY = 2
SPACE_FACTOR = 1.2
_ITEM = "arrays"
logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs the traceback of each error that it raises


class Restored(NamedTuple):
    """One checkpoint: update, {name: array}, the caller's JSON `meta`, kind."""

    update: int
    arrays: dict[str, Any]
    meta: dict[str, Any]
    kind: str


class Entry(NamedTuple):
    """What a step's manifest says: update, kind, meta, {name: {"shape", "dtype", "checksum"}}; files not verified."""

    update: int
    kind: str
    meta: dict[str, Any]
    arrays: dict[str, Any]


@dataclasses.dataclass
class _Flight:
    """A save whose background part has not been waited for."""

    update: int
    kind: str
    thread: threading.Thread | None = None
    error: Exception | None = None


class Checkpoints:
    """The checkpoints of one run folder; one writer at a time (the run folder's lock), any number of readers.

    `fingerprint` is a JSON-able dict of everything that must agree between save and restore (recipe hash, arena layout,
    loader version); a difference is refused by name. None compares nothing (for readers). Opening with
    `read_only=False` creates the directory and removes what killed saves left. Raises CheckpointError.
    """

    def __init__(self, directory: str | os.PathLike[str], fingerprint: Mapping | None, read_only: bool = False):
        self.directory = Path(directory).absolute()
        self.fingerprint = None if fingerprint is None else parse_json(integrity.to_json(dict(fingerprint)))
        self._flight: _Flight | None = None
        self._lost: list[str] = []  # interval checkpoints that could not be written
        if not read_only:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                integrity.clean(self.directory)
            except OSError as error:
                raise CheckpointError(f"{self.directory}: {error.strerror or error}; is it writable?") from None

    def save(
        self, update: int, arrays: Mapping[str, jax.Array], meta: Mapping[str, Any], kind: str, wait: bool = False
    ) -> bool:
        """Saves float32, int32, uint32 or bool arrays and a JSON-able `meta`; True when the save is on its way or done.

        Waits for a save in flight, copies the arrays to the host, and returns while a thread writes; the arrays may be
        donated at once. `meta` may hold integers of any size but no NaN (ValueError). A second save of one update must
        hold the same arrays; it only renews kind (never lowered) and meta.
        With `wait`, and always for `final`, returns only when the checkpoint is complete and verified, and any failure
        raises CheckpointError. Otherwise a failure (disk full) is reported on stderr and training may go on: False when
        it shows at once; a lost `interval` checkpoint raises at `finish`, a lost `recovery` one does not.
        """
        if kind not in KINDS or update < 0:
            raise ValueError(f"kind {kind!r}, update {update}: kind must be one of {', '.join(KINDS)}, update >= 0")
        self._join()  # reports what became of the former save
        wait = wait or kind == "final"
        manifest = {
            "format_version": FORMAT_VERSION,
            "update": update,
            "kind": kind,
            "fingerprint": self.fingerprint,
            "meta": parse_json(integrity.to_json(dict(meta))),
            "arrays": {name: {"shape": list(x.shape), "dtype": str(x.dtype)} for name, x in arrays.items()},
        }
        checksums = {name: integrity.checksum_on_device(x) for name, x in arrays.items()}
        try:
            if self._stored(update) and self._renew(manifest, checksums):
                return True
            self._start(manifest, checksums, arrays)
        except Exception as error:  # Orbax and tensorstore raise many types for a failed write
            self._drop(update)
            return self._failed(update, kind, error, wait)
        if wait:
            self._join(wait)
        return True

    def restore_latest(self, templates: Mapping[str, jax.ShapeDtypeStruct]) -> Restored | None:
        """The newest checkpoint that verifies, or None when the directory never had one.

        `templates` names every array with its exact shape and dtype, and the sharding it shall get. A damaged newer
        step is named on stderr and moved to `damaged/`. CheckpointError when there had been checkpoints and none
        verifies (nothing is moved then), or when the newest good one belongs to another recipe, layout or version.
        """
        self._join()
        damaged: list[tuple[Path, str]] = []
        for update in reversed(integrity.steps(self.directory)):
            try:
                restored = self._load(update, templates, exact=True)
            except Damaged as error:
                damaged.append((self._step(update), str(error)))
                continue
            for path, reason in damaged:
                warn(f"checkpoint {reason}; moved to {integrity.set_aside(path)}, using update {update} instead")
            if restored.kind == "final":
                self._retire("final")
            return restored
        reasons = [reason for path, reason in damaged if any(path.iterdir())]
        if not reasons and not (self.directory / "saved.json").exists():
            return None
        raise CheckpointError(
            f"no usable checkpoint in {self.directory} although there had been some:"
            f" {'; '.join(reasons) or 'they are gone'}. Put a good copy back, or start again in a new --workdir"
        )

    def read(
        self,
        update: int | None = None,
        names: Iterable[str] | None = None,
        sharding: jax.sharding.Sharding | None = None,
    ) -> Restored:
        """Verifies and reads one checkpoint (default the newest), or some of its arrays, moving nothing.

        For commands beside training. Arrays get `sharding` (default the first device). CheckpointError.
        """
        self._join()
        entries = {entry.update: entry for entry in self.entries()}
        update = max(entries, default=None) if update is None else update
        if update not in entries:
            if not entries:
                raise CheckpointError(f"{self.directory}: no whole checkpoint")
            raise CheckpointError(f"{self.directory}: no checkpoint of update {update}, there are: {list(entries)}")
        for newer in integrity.steps(self.directory):
            if newer > max(entries) and not integrity.marker(self._step(newer)).exists():
                warn(f"{self._step(newer)} has no sound {integrity.MANIFEST}; reading update {update}")
        stored = entries[update].arrays
        missing = set(names or ()) - set(stored)
        if missing:
            raise CheckpointError(f"{self._step(update)} holds {', '.join(stored)}, not {', '.join(sorted(missing))}")
        sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        templates = {
            name: jax.ShapeDtypeStruct(tuple(stored[name]["shape"]), stored[name]["dtype"], sharding=sharding)
            for name in (stored if names is None else names)
        }
        return self._load(update, templates, exact=False)

    def entries(self) -> list[Entry]:
        """The steps that have a sound manifest of this format version, oldest first."""
        manifests = [self._stored(update) for update in integrity.steps(self.directory)]
        return [Entry(m["update"], m["kind"], m["meta"], m["arrays"]) for m in manifests if m]

    def finish(self) -> None:
        """Waits for the save in flight; CheckpointError if an interval checkpoint could not be written at any time.

        Needed before the process ends, after an error too: Orbax loses what is in flight when the interpreter stops.
        """
        self._join()
        if self._lost:
            raise CheckpointError("; ".join(self._lost) + ": free space on the disk, then run the same command again")

    def _start(self, manifest: dict, checksums: Mapping, arrays: Mapping[str, jax.Array]) -> None:
        update, step = manifest["update"], self._step(manifest["update"])
        self._drop(update)
        for path in integrity.leftovers(step):  # without our marker; Orbax refuses to overwrite
            warn(f"{path} is in the way of a checkpoint; moved to {integrity.set_aside(path)}")
        needed = SPACE_FACTOR * sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays.values())
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise OSError(f"the disk has {free / 1e6:.1f} MB free, {needed / 1e6:.1f} MB are needed")
        write_json_atomic(integrity.marker(step), {"update": update, "kind": manifest["kind"]})
        fault_point("before_save")
        manager = _manager(self.directory)  # a new one each time: a failed save leaves wrong steps in its cache
        try:
            args = ocp.args.Composite(**{_ITEM: ocp.args.PyTreeSave(dict(arrays))})
            if not manager.save(update, args=args, force=True):
                raise OSError("Orbax did not save")
        except BaseException:
            with contextlib.suppress(Exception):
                manager.close()  # its threads must not go on writing
            raise
        flight = _Flight(update, manifest["kind"])
        flight.thread = threading.Thread(target=self._complete, args=(manager, manifest, checksums, flight))
        flight.thread.start()
        self._flight = flight

    def _complete(self, manager: ocp.CheckpointManager, manifest: dict, checksums: Mapping, flight: _Flight) -> None:
        """In the background: from Orbax's commit to the verified manifest and the retirement of older steps."""
        update, step = flight.update, self._step(flight.update)
        try:
            manager.close()  # waits for the commit, raises its errors
            fault_point("after_orbax_commit")
            manifest["files"] = integrity.hash_files(step)
            for name, expected in checksums.items():
                stored = manifest["arrays"][name]
                stored["checksum"] = integrity.checksum_text(expected)
                on_disk = _read(self.directory, update, {name: np.empty(stored["shape"], stored["dtype"])})[name]
                if integrity.checksum_on_host(on_disk) != stored["checksum"]:
                    raise OSError(f"{name} reads back different from what was saved")
            fault_point("before_manifest")
            integrity.write_manifest(step, manifest)
        except Exception as error:
            flight.error = error
            self._drop(update)
            return
        try:
            fault_point("after_manifest")
            write_json_atomic(self.directory / "saved.json", {"format_version": FORMAT_VERSION, "newest": update})
            integrity.marker(step).unlink()
            self._retire(manifest["kind"])
        except OSError as error:  # the checkpoint itself is safe
            warn(f"{self.directory}: tidying after update {update}: {error}")

    def _renew(self, manifest: dict, checksums: Mapping) -> bool:
        """Gives an already saved update its new kind and meta; False when it turns out damaged (then set aside)."""
        step = self._step(manifest["update"])
        try:
            stored = integrity.read_manifest(step)
            integrity.verify_files(step, stored)
        except Damaged as error:
            warn(f"checkpoint {error}; moved to {integrity.set_aside(step)}, saving it again")
            return False
        new = {name: integrity.checksum_text(value) for name, value in checksums.items()}
        if new != {name: array["checksum"] for name, array in stored["arrays"].items()}:
            raise OSError("this update is already saved with other arrays")
        kind = max(stored["kind"], manifest["kind"], key=KINDS.index)
        integrity.write_manifest(step, {**stored, "kind": kind, "meta": manifest["meta"]})
        self._retire(kind)
        return True

    def _failed(self, update: int, kind: str, error: Exception, wait: bool) -> bool:
        text = f"{kind} checkpoint of update {update} in {self.directory} was not saved: {_one_line(error)}"
        if wait:
            raise CheckpointError(f"{text}; older checkpoints are untouched") from error
        if kind != "recovery":
            self._lost.append(text)
        warn(f"{text}; training goes on, older checkpoints are untouched")
        return False

    def _join(self, wait: bool = False) -> None:
        """Waits for the save in flight; its failure raises with `wait`, else is reported and remembered."""
        flight, self._flight = self._flight, None
        if flight and flight.thread:
            flight.thread.join()
            if flight.error:
                self._failed(flight.update, flight.kind, flight.error, wait)

    def _load(self, update: int, templates: Mapping[str, jax.ShapeDtypeStruct], exact: bool) -> Restored:
        """Damaged when the step's own files are wrong; CheckpointError when the step does not belong here."""
        step = self._step(update)
        manifest = integrity.read_manifest(step)
        if self.fingerprint is not None:
            lines = json_differences(manifest["fingerprint"], self.fingerprint)
            if lines:
                raise CheckpointError(f"{step} is of another recipe, layout or version: {'; '.join(lines)}")
        integrity.check_templates(step, manifest["arrays"], templates, exact)
        integrity.verify_files(step, manifest)
        try:
            arrays = _read(self.directory, update, templates)
        except Exception as error:  # the files are as they were written, so this is not a matter of another copy
            raise CheckpointError(f"{step}: its files verify, but cannot be read: {_one_line(error)}") from error
        for name, x in arrays.items():
            if integrity.checksum_text(integrity.checksum_on_device(x)) != manifest["arrays"][name]["checksum"]:
                raise CheckpointError(f"{step}: {name} was restored different from what was saved")
        return Restored(update, arrays, manifest["meta"], manifest["kind"])

    def _step(self, update: int) -> Path:
        return self.directory / str(update)

    def _stored(self, update: int) -> dict[str, Any] | None:
        try:
            return integrity.read_manifest(self._step(update))
        except CheckpointError:
            return None

    def _drop(self, update: int) -> None:
        try:
            integrity.drop(self._step(update))
        except OSError as error:
            warn(f"{self._step(update)}: cannot remove an unfinished save: {error}")

    def _retire(self, kind: str) -> None:
        """After a verified save of `kind`: all recovery checkpoints go for a final one, else all but the newest two."""
        recovery = [entry.update for entry in self.entries() if entry.kind == "recovery"]
        for update in recovery if kind == "final" else recovery[:-KEPT_RECOVERY]:
            integrity.retire(self._step(update))


def _manager(directory: Path) -> ocp.CheckpointManager:
    """One for each use, and only for this: it keeps every step, deletes nothing and caches nothing between uses."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=None, create=False, save_root_metadata=False, lightweight_initialize=True
    )
    return ocp.CheckpointManager(directory, options=options)


def _read(directory: Path, update: int, templates: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of a step as JAX arrays of the templates' shardings, or as numpy arrays where the template is one."""
    item = dict(templates)
    args = ocp.checkpoint_utils.construct_restore_args(item)
    restore = ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True)
    with _manager(directory) as manager:
        return dict(manager.restore(update, args=ocp.args.Composite(**{_ITEM: restore}))[_ITEM])


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
