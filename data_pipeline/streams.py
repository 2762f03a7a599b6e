"""Documents out of files: plain, gzip or zstd; JSON lines, text or TFDS records. Streaming, bounded memory, strict.

Everything that can be wrong with a file becomes a Problem that names the file and the line, or the byte offset in the
file as stored. Lines end at the byte 0x0A and nowhere else (U+2028 stays inside its line) and text is UTF-8 in every
locale. A damaged stream delivers what came before the damage, then one Problem, then ends.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from data_pipeline.sources import Item

_READ_BYTES = 1 << 18
_OUT_BYTES = 1 << 20
# zstd can expand 4 bytes to 128 KiB and its Python binding has no output limit: small inputs bound the output.
_ZSTD_BYTES = 1 << 12
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Problem:
    """Something unusable: `place` is file:line or the like, `fatal` when the rest of the file is lost with it."""

    place: str
    reason: str
    fatal: bool = False


@dataclass(frozen=True)
class Rules:
    """How documents are cut out of files. Lengths in bytes of UTF-8."""

    text_field: str = "text"
    txt_documents: str = "file"
    max_document_bytes: int = 4 << 20


class StreamError(Exception):
    """A damaged file; the text says where and what."""


def documents(item: Item, rules: Rules, observe: Callable[[bytes], None]) -> Iterator[str | Problem]:
    """Yields the documents of `item` in order, and a Problem for each unusable one.

    `observe` is given every byte of the file as stored, in order (for hashing and progress).
    """
    if item.kind == "tfds":
        yield from _tfds(item, rules)
        return
    with open(item.path, "rb") as file:
        chunks = _decoded(item.path, _observed(file, observe))
        # A JSON string may need six bytes for one (\u0041), so a line is bounded well above the document.
        limit = 8 * rules.max_document_bytes if item.kind == "jsonl" else rules.max_document_bytes
        lines = _lines(chunks, limit)
        try:
            if item.kind == "jsonl":
                yield from _json_lines(item, lines, rules)
            else:
                yield from _text(item, lines, rules)
        except StreamError as error:
            yield Problem(item.name, str(error), fatal=True)


def json_records(path: str, observe: Callable[[bytes], None], limit: int) -> Iterator[tuple[int, bytes | None]]:
    """(line number, line) of every line of a JSON-lines file that is not blank, None for one longer than `limit` bytes.

    `observe` is given every byte of the file as stored. Raises StreamError for a damaged file.
    """
    with open(path, "rb") as file:
        for number, line in _lines(_decoded(path, _observed(file, observe)), limit):
            if line is not None and number == 1:
                line = line.removeprefix(_BOM)
            if line is None or line.strip():
                yield number, line


def parse_record(line: bytes) -> Any:
    """The JSON value of one line. Raises ValueError with the reason."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("invalid JSON (nested too deeply)") from None
    except ValueError:
        raise ValueError("invalid JSON (a number with too many digits)") from None


def _observed(file: BinaryIO, observe: Callable[[bytes], None]) -> Iterator[bytes]:
    while chunk := file.read(_READ_BYTES):
        observe(chunk)
        yield chunk


def _decoded(path: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
    if path.endswith(".gz"):
        return _members(chunks, lambda: zlib.decompressobj(wbits=31), "gzip", b"\x1f\x8b")
    if path.endswith(".zst"):
        import zstandard

        small = (chunk[i : i + _ZSTD_BYTES] for chunk in chunks for i in range(0, len(chunk), _ZSTD_BYTES))
        return _members(small, lambda: zstandard.ZstdDecompressor().decompressobj(), "zstd", b"\x28\xb5\x2f\xfd")
    return _plain(chunks)


def _plain(chunks: Iterator[bytes]) -> Iterator[bytes]:
    empty = True
    for chunk in chunks:
        empty = False
        yield chunk
    if empty:
        raise StreamError("empty file (0 bytes)")


def _members(chunks: Iterator[bytes], new_decoder: Callable[[], Any], kind: str, magic: bytes) -> Iterator[bytes]:
    """Decompresses all members of a file. Stricter than Python's gzip module, which takes a file cut down to nothing,
    or padded with zeros after a member, for a whole one."""
    offset, member, member_start, decoder = 0, 0, 0, None
    name = "member" if kind == "gzip" else "frame"
    for chunk in chunks:
        data: bytes | None = chunk
        while data is not None:
            if decoder is None:
                if not data:
                    break
                if data[: len(magic)] != magic[: len(data)]:
                    if member:
                        raise StreamError(
                            f"byte {offset}: {len(data)} or more bytes of junk after {kind} {name} {member}"
                        )
                    raise StreamError(f"byte 0: not a {kind} file")
                decoder, member, member_start = new_decoder(), member + 1, offset
            try:
                out = decoder.decompress(data, _OUT_BYTES) if kind == "gzip" else decoder.decompress(data)
            except Exception as error:
                text = str(error).rpartition(": ")[2]
                raise StreamError(
                    f"byte {offset}: corrupt {kind} data in {name} {member} of byte {member_start} ({text})"
                ) from None
            if out:
                yield out
            if decoder.eof:
                left = decoder.unused_data
                decoder = None
            elif kind == "gzip":
                left = decoder.unconsumed_tail
            else:
                left = b""
            offset += len(data) - len(left)
            # With its output full, zlib may hold more although it took all input: ask again with nothing.
            data = left if left or (kind == "gzip" and decoder is not None and len(out) == _OUT_BYTES) else None
    if decoder is not None:
        raise StreamError(
            f"truncated: the file ends at byte {offset} inside {kind} {name} {member} of byte {member_start}"
        )
    if not member:
        raise StreamError("empty file (0 bytes)")


def _lines(chunks: Iterator[bytes], limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines without their line feed; None for one longer than `limit` bytes."""
    number, size = 1, 0
    parts: list[bytes] = []
    for chunk in chunks:
        *complete, rest = chunk.split(b"\n")
        for piece in complete:
            size += len(piece)
            yield number, None if size > limit else b"".join([*parts, piece])
            number, parts, size = number + 1, [], 0
        size += len(rest)
        if size > limit:
            parts = []
        elif rest:
            parts.append(rest)
    if size:
        yield number, None if size > limit else b"".join(parts)


def _json_lines(item: Item, lines: Iterator[tuple[int, bytes | None]], rules: Rules) -> Iterator[str | Problem]:
    for number, line in lines:
        place = f"{item.name}:{number}"
        if line is None:
            yield Problem(place, f"line longer than {8 * rules.max_document_bytes} bytes (--max_document_bytes)")
            continue
        if number == 1:
            line = line.removeprefix(_BOM)
        if not line.strip():
            continue
        try:
            text = _json_text(line, rules.text_field)
        except ValueError as error:
            yield Problem(place, str(error))
            continue
        yield from _checked(place, text, rules)


def _json_text(line: bytes, field: str) -> str:
    """The text field of one JSON line. Raises ValueError with the reason."""
    record = parse_record(line)
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object on each line, found {_json_type(record)}")
    if field not in record:
        raise ValueError(f"no field {field!r} (fields: {', '.join(sorted(record)[:5]) or 'none'}; see --text_field)")
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} is {_json_type(text)}, not a string")
    return text


def _json_type(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return {int: "a number", float: "a number", str: "a string", list: "an array", dict: "an object"}[type(value)]


def _checked(place: str, text: str, rules: Rules) -> Iterator[str | Problem]:
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        yield Problem(place, f"lone surrogate \\u{ord(text[error.start]):04x} at character {error.start} of the text")
        return
    if size > rules.max_document_bytes:
        yield Problem(place, f"document of {size} bytes, more than --max_document_bytes={rules.max_document_bytes}")
        return
    yield text


def _text(item: Item, lines: Iterator[tuple[int, bytes | None]], rules: Rules) -> Iterator[str | Problem]:
    """Documents of a .txt file: the whole file, paragraphs between blank lines, or lines. CR LF becomes LF."""
    mode, limit = rules.txt_documents, rules.max_document_bytes
    parts: list[str] = []
    first, size, broken = 1, -1, False  # size of the document so far, without the line feed after its last line

    def close() -> Iterator[str | Problem]:
        if size > limit and not broken:
            advice = "; --txt_documents=paragraph cuts at blank lines" if mode == "file" else ""
            yield Problem(f"{item.name}:{first}", f"document longer than --max_document_bytes={limit}{advice}")
        elif parts and not broken:
            yield "\n".join(parts)

    for number, line in lines:
        text = ""
        if line is None:
            size = limit + 1
        else:
            line = (line.removeprefix(_BOM) if number == 1 else line).removesuffix(b"\r")
            size += len(line) + 1
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                yield Problem(f"{item.name}:{number}", f"not UTF-8 at byte {error.start} of the line")
                broken = True
        blank = line is not None and not line.strip()
        if not (mode == "paragraph" and blank):
            if size > limit or broken:
                parts.clear()
            else:
                parts.append(text)
        else:
            size -= len(line or b"") + 1
        if mode == "line" or (mode == "paragraph" and blank):
            yield from close()
            parts.clear()
            first, size, broken = number + 1, -1, False
    yield from close()


def _tfds(item: Item, rules: Rules) -> Iterator[str | Problem]:
    import tensorflow_datasets as tfds

    place = f"{item.name}[{item.start}:{item.stop}]"
    try:
        builder = tfds.builder_from_directory(item.path)
        records = builder.as_data_source(split=f"{item.tfds_split}[{item.start}:{item.stop}]")
    except Exception as error:
        yield Problem(place, _one_line(error), fatal=True)
        return
    for index in range(item.stop - item.start):
        place = f"{item.name}:record {item.start + index}"
        try:
            text = records[index][rules.text_field]
        except KeyError:
            yield Problem(place, f"no field {rules.text_field!r} (see --text_field)")
            continue
        except Exception as error:
            yield Problem(place, f"can't be read ({_one_line(error)})", fatal=True)
            return
        try:
            text = text.decode("utf-8") if isinstance(text, bytes) else text
        except UnicodeDecodeError as error:
            yield Problem(place, f"not UTF-8 at byte {error.start} of the text")
            continue
        if not isinstance(text, str):
            yield Problem(place, f"field {rules.text_field!r} is a {type(text).__name__}, not text")
            continue
        yield from _checked(place, text, rules)


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:300]
