"""Hugging Face Llama folders: export of a model and import of what transformers saved. Reads safetensors only.

An export holds model.safetensors, config.json, generation_config.json, the tokenizer's file with
tokenizer_config.json where there is a tokenizer, and llama_jax_export.json, which says that the folder is ours.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from llama_jax import flops, ops, tokenizer
from llama_jax.errors import CheckpointError, ConfigError, warn
from llama_jax.faults import fault_point
from llama_jax.files import (
    TMP_SUFFIX,
    PathLike,
    read_json,
    remove_tree,
    sha256_of_file,
    sync_directory,
    write_atomic,
    write_json_atomic,
)
from llama_jax.hf_config import from_hf_config, model_section, to_hf_config
from llama_jax.hf_files import INDEX as INDEX
from llama_jax.hf_files import WEIGHTS, read_config, read_header, weight_files, weights_sha256
from llama_jax.hf_files import find_folder as find_folder

FORMAT_VERSION = 1
MARKER = "llama_jax_export.json"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16)}
_OURS = {WEIGHTS, MARKER, "config.json", "generation_config.json", *tokenizer.FILES, *tokenizer.SETTINGS}
_OLD_SUFFIX = ".old"
_STORED = ("F32", "BF16", "F16")  # dtypes that float32 holds exactly


# Export.


def export_model(
    directory: PathLike,
    params: Mapping[str, np.ndarray],
    model: Any,
    tokenizer_file: PathLike | None = None,
    bos_id: int | None = None,
    eos_id: int | list[int] | None = None,
    dtype: str = "float32",
    origin: Mapping[str, Any] | None = None,
    inherit: PathLike | None = None,
) -> Path:
    """Writes `params` {name: float32 array} of the config section `model` as a Hugging Face Llama folder.

    One row of an arena becomes `params` through `arena.from_row`. float32 is stored bit for bit, "bfloat16" rounds; a
    tied head isn't stored. `origin` (JSON) says in the marker where the weights come from. `inherit` names the Hugging
    Face folder that they began with: its tokenizer and ids are copied. The folder is built as `directory`.tmp, synced
    and renamed, so that `directory` is always a whole export, the old or the new one. A killed replacement may leave
    the old one as `directory`.old, which the next export removes or puts back.

    Raises ValueError for parameters that aren't exactly the model's; ConfigError for a tokenizer or an id that doesn't
    fit; CheckpointError when the target is not an export of ours, a number is not finite or the disk is full.
    """
    target = Path(os.path.abspath(directory))
    shapes = flops.parameter_shapes(model)
    if params.keys() != shapes.keys():
        raise ValueError(f"parameter names differ: {', '.join(sorted(params.keys() ^ shapes.keys())[:4])}")
    for name, shape in shapes.items():
        if params[name].shape != shape or params[name].dtype != np.float32:
            raise ValueError(f"{name} is {params[name].dtype}{list(params[name].shape)}, not float32{list(shape)}")
        if not np.isfinite(params[name]).all():
            raise CheckpointError(f"export to {target}: {name} has numbers that are not finite")
    if dtype not in DTYPES:
        raise ConfigError(f"export: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if inherit is not None:
        bos_id, eos_id = (read_config(inherit).get(f"{name}_token_id") for name in ("bos", "eos"))
        copies = tokenizer.files_of(inherit)
    else:
        copies = tokenizer.export_files(tokenizer_file, bos_id, eos_id, model.context)
    for key, ids in (("bos_id", bos_id), ("eos_id", eos_id)):
        for token in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if type(token) is not int or not 0 <= token < model.vocab_size:
                raise ConfigError(f"export: {key} = {token!r} is outside the vocabulary of {model.vocab_size}")
    tensors = {name: np.ascontiguousarray(params[name], DTYPES[dtype]) for name in shapes}
    temporary = target.with_name(target.name + TMP_SUFFIX)
    _clear(target)
    try:
        temporary.mkdir(parents=True)
        marker = {"program": "llama_jax", "format_version": FORMAT_VERSION, "origin": dict(origin or {})}
        write_json_atomic(temporary / MARKER, marker)
        _write_weights(temporary, tensors)
        write_json_atomic(temporary / MARKER, {**marker, "weights_sha256": sha256_of_file(temporary / WEIGHTS)})
        for name, data in copies.items():
            write_atomic(temporary / name, data)
        write_json_atomic(temporary / "generation_config.json", {"bos_token_id": bos_id, "eos_token_id": eos_id})
        # The last file, because nothing loads a folder without it.
        write_json_atomic(temporary / "config.json", to_hf_config(model, bos_id, eos_id, dtype))
        fault_point("export_before_rename")
        _publish(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            _remove(temporary)
        raise CheckpointError(f"export to {target}: {error.strerror or error}") from error
    return target


def _write_weights(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    fault_point("export_weights")
    try:
        safetensors.numpy.save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:  # it speaks of every failed write
        raise OSError(errno.EIO, str(error).replace("\n", " ")) from error
    # The library makes the file private, whatever the umask.
    os.chmod(directory / WEIGHTS, (directory / MARKER).stat().st_mode)
    with open(directory / WEIGHTS, "rb") as file:
        os.fsync(file.fileno())


def _clear(target: Path) -> None:
    """Removes what a killed export left beside `target`; CheckpointError when something foreign stands in the way."""
    temporary, old = (target.with_name(target.name + suffix) for suffix in (TMP_SUFFIX, _OLD_SUFFIX))
    for path in (target, temporary, old):
        _refuse_foreign(path)
    try:
        if old.is_dir() and not target.exists():  # killed between the two renames
            old.rename(target)
        _remove(old)
        _remove(temporary)
    except OSError as error:
        raise CheckpointError(f"export to {target}: {error.strerror or error}") from error


def _refuse_foreign(path: Path) -> None:
    """CheckpointError unless `path` is missing, an empty directory, or a directory of nothing but an export of ours."""
    if not path.exists() and not path.is_symlink():
        return
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"export: {path} exists and is not a directory; choose another name")
    names = {child.name for child in path.iterdir()}
    foreign = sorted(name for name in names if name.removesuffix(TMP_SUFFIX) not in _OURS)
    if foreign:
        raise CheckpointError(f"export: {path} holds {foreign[0]}, which is not of an export; choose another directory")
    if names - {MARKER + TMP_SUFFIX} and MARKER not in names:
        raise CheckpointError(f"export: {path} is no export of llama_jax (no {MARKER}); choose another directory")


def _remove(directory: Path) -> None:
    if directory.is_dir():
        remove_tree(directory, last=MARKER)  # so that a removal that is killed can be taken up again


def _publish(temporary: Path, target: Path) -> None:
    sync_directory(temporary)
    old = target.with_name(target.name + _OLD_SUFFIX)
    replaces = target.exists()
    if replaces:
        target.rename(old)
    try:
        fault_point("export_between_renames")
        temporary.rename(target)
    except OSError:
        if replaces:
            old.rename(target)
        raise
    sync_directory(target.parent)
    _remove(old)


# Import.


def load_folder(directory: PathLike) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(fields of the `model` config section, {name: float32 array}) of a Hugging Face Llama folder.

    The weights are one model.safetensors, or shards with an index. bfloat16 and float16 tensors are widened to float32,
    which is exact; nothing else is cast. Every tensor must be there, finite, with its shape, and no other, except a
    stored copy of a tied head and rotary tables, both of which must agree with the rest.

    Raises ConfigError for a model that can't be represented, CheckpointError for damaged or unsafe files.
    """
    directory = Path(directory)
    section = from_hf_config(read_config(directory), directory / "config.json")
    model = model_section(section)
    shapes = flops.parameter_shapes(model)
    frequencies = ops.rope_frequencies(model)
    accepted = dict(shapes)
    if model.tied:
        accepted["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    rotary = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": frequencies.shape for i in range(model.layers)}
    params: dict[str, np.ndarray] = {}
    for name, tensor in _read_weights(directory, accepted | rotary):
        if name in params:
            raise CheckpointError(f"{directory}: {name} is stored twice")
        params[name] = tensor
    missing = [name for name in shapes if name not in params]
    if missing:
        raise CheckpointError(f"{directory}: missing {len(missing)} of {len(shapes)} tensors, first {missing[0]}")
    for name in params.keys() - shapes.keys():
        if name in rotary:
            agrees = np.allclose(params[name], frequencies, rtol=1e-2, atol=1e-6)  # float16 tables are coarse
        else:
            agrees = np.array_equal(params[name], params["model.embed_tokens.weight"])
        if not agrees:
            raise CheckpointError(f"{directory}: {name} contradicts config.json")
    return section, {name: params[name] for name in shapes}


def load_params(directory: PathLike, model: Any) -> dict[str, np.ndarray]:
    """The weights of model.init_from for the config section `model`, which must have its shape. Raises as load_folder.

    A context above that of the folder is warned about: rotary positions are computed for it, but were never trained.
    """
    section, params = load_folder(find_folder(directory))
    for field, value in section.items():
        if field != "context" and value != model[field]:
            raise ConfigError(f"model.{field} = {model[field]}, but {directory} has {value}; the folder decides")
    if model.context > section["context"]:
        warn(f"model.context = {model.context}: {directory} was made for {section['context']} positions")
    return params


def identity(directory: PathLike) -> dict[str, str]:
    """What identifies the weights of model.init_from among the choices of a run; nothing where it is empty."""
    return {"init": weights_sha256(find_folder(directory))} if directory else {}


def _read_weights(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, np.ndarray]]:
    """Name and float32 array of every stored tensor; names and shapes are checked before anything is read."""
    files = weight_files(directory)
    if directory / WEIGHTS in files:
        _check_hash(directory)
    for path, listed in files.items():
        header = read_header(path, listed)
        for name, (dtype, shape) in sorted(header.items()):
            if name not in shapes:
                raise CheckpointError(f"{path}: unexpected tensor {name}")
            if shape != shapes[name] or dtype not in _STORED:
                raise CheckpointError(f"{path}: {name} is {dtype}{list(shape)}, not F32{list(shapes[name])}")
        try:
            with safetensors.safe_open(path, framework="np") as file:
                for name in sorted(header):
                    tensor = file.get_tensor(name).astype(np.float32)
                    if not np.isfinite(tensor).all():
                        raise CheckpointError(f"{path}: {name} has numbers that are not finite")
                    yield name, tensor
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path}: {str(error).splitlines()[0]}") from None


def _check_hash(directory: Path) -> None:
    """Our own exports carry a hash of the weights: a flipped bit is named instead of loaded."""
    try:
        expected = read_json(directory / MARKER)["weights_sha256"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{directory / MARKER} is damaged") from None
    found = sha256_of_file(directory / WEIGHTS)
    if found != expected:
        raise CheckpointError(
            f"{directory / WEIGHTS} has SHA-256 {found}, {MARKER} says {expected}; "
            f"if it was replaced on purpose, delete {MARKER}"
        )
