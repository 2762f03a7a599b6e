"""Files of a Hugging Face folder: config.json, the index, and the headers of safetensors files. Standard library only.

A safetensors file is 8 bytes that say how long its header is (little endian), the header (UTF-8 JSON: name, dtype,
shape and place of every tensor), and the tensors without gaps, row by row (format: the safetensors README).
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.files import PathLike, read_json, sha256_of_file

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}  # bits of one element by the dtype's name


class Tensor(NamedTuple):
    """What a header says of one tensor: the dtype as safetensors names it, and the shape as stored."""

    dtype: str
    shape: tuple[int, ...]


def find_folder(path: PathLike) -> Path:
    """The Hugging Face folder that `path` names: exports/final of a run, or itself. ConfigError when there is none."""
    path = Path(path)
    for folder in (path / "exports" / "final", path):
        if (folder / "config.json").is_file() and "model_type" in read_config(folder):
            return folder
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory")
    exports = sorted(found.parent for found in path.glob("exports/*/config.json"))
    hint = f"; name one of its exports, such as {exports[-1]}" if exports else ""
    raise ConfigError(f"{path} is neither a Hugging Face folder nor a run with exports/final{hint}")


def read_config(directory: PathLike, name: str = "config.json") -> dict[str, Any]:
    """The content of config.json; CheckpointError when it isn't a readable JSON object."""
    path = Path(directory) / name
    try:
        content = read_json(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def weight_files(directory: Path, index: Path | None = None) -> dict[Path, set[str]]:
    """Files to read, each with the names that the index gives it (none where there is no index).

    Without `index` the folder must hold model.safetensors or model.safetensors.index.json, not both. CheckpointError.
    """
    if index is None:
        whole, index = directory / WEIGHTS, directory / INDEX
        if whole.is_file() and index.is_file():
            raise CheckpointError(f"{directory} holds both {WEIGHTS} and {INDEX}; remove the one that is out of date")
        if whole.is_file():
            return {_inside(directory, WEIGHTS, index): set()}
    if not index.is_file():
        pickled = sorted(path.name for path in directory.glob("*.bin"))
        why = f"; {pickled[0]} is a pickle, which is never read: save the model as safetensors" if pickled else ""
        raise CheckpointError(f"{directory} has no {WEIGHTS}{why}")
    try:
        weight_map = _parse(index.read_bytes())["weight_map"]
        pairs = {str(name): str(file) for name, file in weight_map.items()}
    except _Repeated as error:
        raise CheckpointError(f"{index} names {error} twice") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{index} is not the index of a sharded model") from None
    files: dict[Path, set[str]] = {}
    for name, file in pairs.items():
        files.setdefault(_inside(directory, file, index), set()).add(name)
    return files


def weights_sha256(directory: Path) -> str:
    """Hex SHA-256 of the weights of a folder: of model.safetensors, as the hub shows it, or of its shards.

    Of shards: of the lines "sha256  name\\n" by name, as sha256sum prints them. CheckpointError.
    """
    files = sorted(weight_files(directory))
    try:
        hashes = [sha256_of_file(path) for path in files]
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from None
    if [path.name for path in files] == [WEIGHTS]:
        return hashes[0]
    lines = [f"{digest}  {path.name}\n" for digest, path in zip(hashes, files, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _inside(directory: Path, name: str, index: Path) -> Path:
    """The file of a plain name. A link may lead only to the blobs of the Hugging Face cache that the folder is in."""
    path = directory / name
    if name != path.name or "\\" in name or not name.endswith(".safetensors"):
        raise CheckpointError(f"{index}: {name!r} is not the plain name of a .safetensors file")
    if not path.is_file():
        raise CheckpointError(f"{path}, which {index.name} names, does not exist")
    real, home = path.resolve().parent, directory.resolve()
    if real != home and not (home.parent.name == "snapshots" and real == home.parent.parent / "blobs"):
        raise CheckpointError(f"{path} is a link out of its folder")
    return path


def read_headers(files: dict[Path, set[str]], headers_only: bool = False) -> dict[str, Tensor]:
    """Every tensor by name, from the files of `weight_files`; see `read_header`. A name in two files is refused too."""
    tensors: dict[str, Tensor] = {}
    for path, listed in files.items():
        found = read_header(path, listed, headers_only)
        repeated = min(tensors.keys() & found.keys(), default=None)
        if repeated is not None:
            raise CheckpointError(f"{path}: {repeated} is stored in another file too")
        tensors |= found
    return tensors


def read_header(path: Path, listed: Collection[str] = (), headers_only: bool = False) -> dict[str, Tensor]:
    """Name, dtype and shape of every tensor of a safetensors file, in the order of their bytes. Reads only the header.

    The whole header is checked: its size, strict JSON without a repeated key, known dtypes, sizes that follow from
    dtype and shape, offsets that cover the rest of the file without gap or overlap, and the names `listed` for this
    file, if any. With `headers_only` the file may also end behind its header, as one fetched by a range request does.
    Raises CheckpointError.
    """

    def require(good: bool, message: str) -> None:
        if not good:
            raise CheckpointError(f"{path}: {message}")

    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            require(stat.S_ISREG(os.fstat(file.fileno()).st_mode), "it is not a regular file")
            length = int.from_bytes(file.read(8), "little")
            require(size >= 10, "it is too short for a safetensors file")
            require(length <= MAX_HEADER_BYTES, f"a header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
            require(8 + length <= size, f"the header of {length} bytes is cut off")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    require(len(raw) == length and raw[:1] == b"{", "it has no safetensors header")
    try:
        header = _parse(raw)
    except _Repeated as error:
        raise CheckpointError(f"{path}: the header names {error} twice") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: the header is not JSON") from None
    metadata = header.pop("__metadata__", {})
    plain = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    require(plain, "__metadata__ is not text")

    entries = []
    for name, entry in header.items():
        require(bool(name) and name.isprintable(), f"{name!r} is no name of a tensor")
        require(
            isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"},
            f"{name} has not just dtype, shape and data_offsets",
        )
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        require(isinstance(dtype, str) and dtype in BITS, f"{name} has the unknown dtype {dtype!r:.40}")
        require(_counts(shape) and _counts(offsets) and len(offsets) == 2, f"{name} has no valid shape and offsets")
        bits = math.prod(shape) * BITS[dtype]
        require(
            8 * (offsets[1] - offsets[0]) == bits,
            f"{name} is {dtype}{shape}, which does not fill the bytes {offsets[0]} to {offsets[1]}",
        )
        entries.append((offsets[0], offsets[1], name, Tensor(dtype, tuple(shape))))
    entries.sort()
    end = 0
    for first, last, name, _ in entries:
        require(first == end, f"{name} starts at byte {first} instead of {end}")
        end = last
    sizes = {8 + length + end} | ({8 + length} if headers_only else set())
    require(size in sizes, f"it has {size} bytes, its header asks for {8 + length + end}")
    if listed:
        wrong = min(header.keys() ^ set(listed), default="")
        require(not wrong, f"{wrong} is not where the index says")
    return {name: tensor for _, _, name, tensor in entries}


class _Repeated(Exception):
    """A key that a JSON object has twice."""


def _parse(raw: bytes) -> Any:
    """Strict JSON; _Repeated for a repeated key, of which Python's parser would silently take the last."""
    return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise _Repeated(name)
        content[name] = value
    return content


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
