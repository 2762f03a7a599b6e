"""What a preparation reads: the ordered list of items (source files or record ranges) behind --source and --input.

The order of items is the order of the token stream, so it depends on names alone. Hidden files (._x) are no data.
"""

import glob
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_jax.errors import ConfigError, DataError

C4_REPOSITORY = "allenai/c4"
C4_REVISION = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"
C4_TRAIN_FILES = 1024
C4_VALIDATION_FILES = 8
# A train file holds some 143 million tokens of a 32,000-id vocabulary; the estimate for downloads stays below.
C4_TOKENS_PER_FILE = 125_000_000
SUMS = "SHA256SUMS"
REVISION = "REVISION"

_C4_NAME = re.compile(r"c4-(train|validation)\.(\d{5})-of-(\d{5})\.json\.gz")
_DATA_NAME = re.compile(r".+\.(jsonl|json|txt)(\.gz|\.zst)?")
_TFDS_RECORDS = 100_000


@dataclass(frozen=True)
class Item:
    """One unit of work: a file, or records start:stop of a TFDS split. `split` is train, validation or by_hash.

    `weight` is its size on disk (bytes) or in records, for progress only. `sha256`, where known, is what the file must
    hash to; `revision` and `about` go into the manifest.
    """

    kind: str
    path: str
    name: str
    split: str
    weight: int
    start: int = 0
    stop: int = 0
    tfds_split: str = ""
    sha256: str = ""
    revision: str = ""
    about: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Listing:
    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()


def expand(inputs: Sequence[str]) -> list[tuple[Path, str]]:
    """(path, name) of every data file that files, folders and globs name, in the order given, folders sorted by name.

    Names are relative to the folder or are the file's own, so that they do not depend on where data lies.
    Raises ConfigError for a pattern that names nothing.
    """
    found: list[tuple[Path, str]] = []
    for pattern in inputs:
        paths = [Path(pattern)]
        if not paths[0].exists():
            paths = [Path(match) for match in sorted(glob.glob(pattern, recursive=True)) if _visible(Path(match).name)]
            if not paths:
                raise ConfigError(f"--input={pattern}: no such file or folder, and no match as a pattern")
        for path in paths:
            if path.is_dir():
                inside = sorted(path.rglob("*"), key=lambda p: p.relative_to(path).as_posix())
                files = [(p, p.relative_to(path).as_posix()) for p in inside if p.is_file()]
                files = [(p, n) for p, n in files if all(map(_visible, n.split("/"))) and _DATA_NAME.fullmatch(p.name)]
                if not files:
                    raise ConfigError(f"--input={pattern}: folder without .jsonl, .json or .txt files (.gz, .zst)")
                found += files
            elif not _DATA_NAME.fullmatch(path.name):
                raise ConfigError(f"--input={path}: expected .jsonl, .json or .txt, plain or with .gz or .zst")
            else:
                found.append((path, path.name))
    unique: dict[Path, tuple[Path, str]] = {}
    for path, name in found:
        unique.setdefault(path.resolve(), (path, name))
    return list(unique.values())


def list_jsonl(inputs: Sequence[str], validation_inputs: Sequence[str] = ()) -> Listing:
    """Items of local .jsonl, .json and .txt files. Without validation files of their own, documents split by hash."""
    validation = expand(validation_inputs)
    own = {path.resolve() for path, _ in validation}
    train = [(path, name) for path, name in expand(inputs) if path.resolve() not in own]
    if not train:
        raise ConfigError("--input: no file left beside those of --validation_input")
    split = "train" if validation else "by_hash"
    items = [_file_item(path, name, "validation") for path, name in validation]
    items += [_file_item(path, name, split) for path, name in train]
    names = [item.name for item in items]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--input: two files are named {name}; give a folder that holds both")
    return Listing(tuple(items))


def list_c4(inputs: Sequence[str]) -> Listing:
    """Items of AllenAI C4 files en/c4-{train,validation}.*-of-*.json.gz in a folder (or its en/), files or globs.

    A number missing among the train files is refused: the stream would depend on what happens to be there.
    Without validation files the split is by document hash, and a note says so.
    """
    paths: dict[tuple[str, int, int], Path] = {}
    for pattern in inputs:
        root = Path(pattern)
        if root.is_dir():
            candidates = sorted([*root.glob("*.json.gz"), *root.glob("en/*.json.gz")])
        else:
            candidates = [path for path, _ in expand([pattern])]
        for path in candidates:
            if match := _C4_NAME.fullmatch(path.name):
                key = (match[1], int(match[2]), int(match[3]))
                if paths.setdefault(key, path).resolve() != path.resolve():
                    raise ConfigError(f"{path.name} is there twice: {paths[key]} and {path}; keep one")
    train = sorted(key for key in paths if key[0] == "train")
    validation = sorted(key for key in paths if key[0] == "validation")
    if not train:
        raise ConfigError(
            f"--input={' '.join(inputs)}: no c4-train.00000-of-01024.json.gz or the like; --download fetches them"
        )
    for keys in (train, validation):
        for number, key in enumerate(keys):
            if key[2] != keys[0][2] or key[1] != keys[0][1] + number:
                name = f"c4-{key[0]}.{keys[0][1] + number:05d}-of-{keys[0][2]:05d}.json.gz"
                raise DataError(
                    f"{name} is missing although {paths[key].name} is there; fetch it, or remove the later files"
                )
    notes = []
    if not validation:
        notes.append("no c4-validation files here: validation documents are taken from the train files by hash")
    elif len(validation) < validation[0][2]:
        notes.append(
            f"only {len(validation)} of {validation[0][2]} validation files are here: validation is not the whole one"
        )
    split = "train" if validation else "by_hash"
    items = [_file_item(paths[key], paths[key].name, "validation") for key in validation]
    return Listing((*items, *(_file_item(paths[key], paths[key].name, split) for key in train)), tuple(notes))


def list_tfds(inputs: Sequence[str], train_split: str = "train", validation_split: str = "validation") -> Listing:
    """Items of one prepared TFDS data set (array_record or another random-access format), in ranges of 100,000 records.

    The input is the folder with dataset_info.json, or one with a single such folder below it. No TensorFlow.
    """
    if len(inputs) != 1:
        raise ConfigError("--source=tfds takes one --input, the folder of a prepared TFDS data set")
    folders = sorted(path.parent for path in Path(inputs[0]).rglob("dataset_info.json"))
    if len(folders) != 1:
        what = "no dataset_info.json" if not folders else f"{len(folders)} data sets, such as {folders[0]}; name one"
        raise ConfigError(f"--input={inputs[0]}: {what}")
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder_from_directory(str(folders[0]))
        builder.as_data_source(split=next(iter(builder.info.splits)))
    except Exception as error:
        message = " ".join(str(error).split())[:200]
        raise DataError(
            f"{folders[0]}: TFDS can't open it for random access ({type(error).__name__}: {message})"
        ) from None
    splits = builder.info.splits
    if train_split not in splits:
        raise ConfigError(f"{folders[0]}: no split {train_split!r} (splits: {', '.join(sorted(splits))})")
    notes = []
    wanted = [(train_split, "train")]
    if validation_split in splits:
        wanted.insert(0, (validation_split, "validation"))
    else:
        notes.append(f"no split {validation_split!r}: validation documents are taken from {train_split!r} by hash")
        wanted = [(train_split, "by_hash")]
    items = []
    for name, split in wanted:
        info = splits[name]
        digest = _tfds_digest(folders[0], name, info.filenames)
        title, version = f"{builder.info.full_name}/{name}", str(builder.info.version)
        for start in range(0, info.num_examples, _TFDS_RECORDS):
            stop = min(start + _TFDS_RECORDS, info.num_examples)
            items.append(Item("tfds", str(folders[0]), title, split, stop - start, start, stop, name, digest, version))
    return Listing(tuple(items), tuple(notes))


def _tfds_digest(folder: Path, split: str, filenames: Iterable[str]) -> str:
    """Hash of the description of a split: info, features, file names and sizes (a prepared C4 is too large to hash)."""
    digest = hashlib.sha256(split.encode())
    for name in ("dataset_info.json", "features.json"):
        if (folder / name).exists():
            digest.update((folder / name).read_bytes())
    for name in sorted(filenames):
        path = folder / name
        if not path.exists():
            raise DataError(f"{path}: missing, though dataset_info.json counts it")
        digest.update(f"\n{name} {path.stat().st_size}".encode())
    return digest.hexdigest()


def _file_item(path: Path, name: str, split: str) -> Item:
    kind = "txt" if re.search(r"\.txt(\.gz|\.zst)?$", path.name) else "jsonl"
    stored = path.parent / REVISION
    revision = stored.read_text(encoding="utf-8").strip() if stored.is_file() else ""
    return Item(
        kind, str(path.resolve()), name, split, path.stat().st_size, sha256=_expected_sha256(path), revision=revision
    )


def _expected_sha256(path: Path) -> str:
    """The hash that a SHA256SUMS file beside `path` promises, or "". It is what reveals a file cut between members."""
    sums = path.parent / SUMS
    if not sums.is_file():
        return ""
    for number, line in enumerate(sums.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        match = re.fullmatch(r"([0-9a-f]{64}) [ *](.+)", line.rstrip("\r"))
        if not match:
            raise DataError(f"{sums}:{number}: expected '<sha256>  <file name>'")
        if match[2] == path.name:
            return match[1]
    return ""


def _visible(name: str) -> bool:
    return not name.startswith(".")


def download_c4(folder: Path, train_files: int, say: Callable[[str], None]) -> None:
    """Fetches the first `train_files` train files and all validation files of C4 at the pinned revision into `folder`.

    Files that are there with the published size are kept. The hub's SHA-256 of each goes into en/SHA256SUMS, against
    which every later read is checked. Raises DataError naming the file.
    """
    try:
        import huggingface_hub as hub
    except ImportError:
        raise ConfigError("--download needs the package huggingface_hub: pip install huggingface_hub") from None

    validation = [f"en/c4-validation.{i:05d}-of-{C4_VALIDATION_FILES:05d}.json.gz" for i in range(C4_VALIDATION_FILES)]
    train = [f"en/c4-train.{i:05d}-of-{C4_TRAIN_FILES:05d}.json.gz" for i in range(min(train_files, C4_TRAIN_FILES))]
    sums: dict[str, str] = {}
    for name in [*validation, *train]:
        say(f"fetching {name} of {C4_REPOSITORY} at {C4_REVISION[:12]}")
        try:
            url = hub.hf_hub_url(C4_REPOSITORY, name, repo_type="dataset", revision=C4_REVISION)
            etag = (hub.get_hf_file_metadata(url).etag or "").strip('"')
            hub.hf_hub_download(C4_REPOSITORY, name, repo_type="dataset", revision=C4_REVISION, local_dir=str(folder))
        except Exception as error:
            message = " ".join(str(error).split())[:200]
            raise DataError(
                f"{name}: can't be fetched ({type(error).__name__}: {message}); is there a network?"
            ) from None
        if re.fullmatch(r"[0-9a-f]{64}", etag):
            sums[name.removeprefix("en/")] = etag
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    (folder / "en" / SUMS).write_text(text, encoding="utf-8")
    (folder / "en" / REVISION).write_text(C4_REVISION + "\n", encoding="utf-8")


def describe(item: Item) -> str:
    """Canonical text of an item's identity, for the keys of finished work."""
    return json.dumps([item.kind, item.path, item.name, item.start, item.stop, item.tfds_split])
