"""Checks prepared data against what is recorded of it.

A token cache: python -m data_pipeline.verify DIR [--entropy] re-hashes it. Exit code 0, or 3 when anything is wrong.

Rows of a recipe: python -m data_pipeline.verify rows.parquet --recipe recipe.json compares the hash of the rows with
the rows_sha256 that the recipe records, itself or in its "rows" (without --recipe, rows.json beside the file does).
A file that holds more rows than the recipe records is checked in those. Exit code 0 when they are the recipe's rows, 1
when they are others, 2 when the file or the recipe can't be read.
"""

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_pipeline import merge
from llama_jax import rows, shards
from llama_jax.errors import DataError, Error, run_command
from llama_jax.files import read_json

# What tells two builds apart when their rows differ, as far as both are recorded.
_MADE_OF = (
    "format", "builder_version", "seed", "order", "eos_between", "eos.id", "tokenizer.sha256", "chat_template.sha256",
    "chat_template.date", "source.name", "source.revision", "source.conversations", "source.files", "skipped",
)  # fmt: skip


class Different(Error):
    """Rows that can be read and are not those of the recipe."""

    exit_code = 1


class Unreadable(Error):
    """A rows file or a recipe that can't be read as one."""

    exit_code = 2


class Expected(NamedTuple):
    """What a recipe records of its rows; `rows` and `row_length` are None where it gives the hash alone."""

    sha256: str
    rows: int | None
    row_length: int | None
    record: dict[str, Any]


class Unigram(NamedTuple):
    """Nats per token of a split: under the unigram model of train (counts + 1), and its own entropy."""

    cross_entropy: float
    entropy: float


def unigram_entropy(manifest: shards.Manifest, split: str = "validation") -> Unigram:
    """The loss that a model without context reaches on `split`, from the counts of train; nan without tokens."""
    counts = token_counts(manifest, split)
    values = merge.cross_entropy(counts, token_counts(manifest, "train")), merge.entropy(counts)
    return Unigram(*(math.nan if value is None else value for value in values))


def token_counts(manifest: shards.Manifest, split: str) -> np.ndarray:
    """How often each id occurs in a split, int64 [vocabulary]; checks each shard's hash on the way (DataError)."""
    counts = np.zeros(manifest.vocab_size, np.int64)
    for index in range(len(manifest.splits[split].shards)):
        counts += np.bincount(shards.load_shard(manifest, split, index, lookahead=False), minlength=counts.size)
    return counts


def verify(directory: Path, entropy: bool = False) -> None:
    """Prints a line a file and a summary. Raises DataError when a file is not what the manifest says."""
    manifest = shards.read_manifest(directory)
    damaged = []
    for file, problem in shards.verify(manifest):
        print(f"{file}: {problem or 'ok'}", flush=True)
        if problem:
            damaged.append(file)
    tokenizer = manifest.tokenizer
    print(f"tokenizer {tokenizer['name']}: {tokenizer['vocab_size']:,} ids, sha256 {tokenizer['sha256']}")
    for name, split in manifest.splits.items():
        ratio = f", {split.utf8_bytes / split.tokens:.4f} bytes a token" if split.tokens else ""
        print(f"{name}: {split.documents:,} documents, {split.tokens:,} tokens in {len(split.shards)} shards{ratio}")
    counts = [source.get("skipped") for source in manifest.sources]  # made by other programs it may be anything
    skipped = sum(count for count in counts if isinstance(count, int))
    print(f"sources: {len(manifest.sources)}, bad input skipped: {skipped}; cache {manifest.sha256}")
    if damaged:
        raise DataError(
            f"{directory}: {len(damaged)} damaged: {', '.join(damaged)}; restore them or prepare the cache again"
        )
    if entropy:
        for name in manifest.splits:
            nats = unigram_entropy(manifest, name)
            print(f"{name}: {nats.entropy:.6f} nats a token of unigram entropy, {nats.cross_entropy:.6f} under train's")


def expected_rows(recipe: Path) -> Expected:
    """What a recipe, or rows.json, records of its rows. Raises Unreadable."""
    try:
        content = read_json(recipe)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON, {error}"
        raise Unreadable(f"{recipe}: can't be read ({reason})") from None
    if not isinstance(content, dict):
        raise Unreadable(f"{recipe}: not a JSON object, so no recipe")
    if isinstance(content.get("measured"), dict):  # the record of a run
        content = content["measured"]
    inner = content.get("rows")
    record = inner if isinstance(inner, dict) else content
    digests = {part["rows_sha256"] for part in (content, record) if isinstance(part.get("rows_sha256"), str)}
    if len(digests) != 1 or not re.fullmatch("[0-9a-f]{64}", *digests):
        raise Unreadable(f"{recipe}: needs one rows_sha256 of 64 hexadecimal digits, has {len(digests)}")
    for key in ("rows", "row_length"):
        value = record.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise Unreadable(f"{recipe}: {key} is {value!r}, not a number of at least 1")
    made_of = record.get("made_of")
    whole = {**made_of, **record} if isinstance(made_of, dict) else record
    return Expected(digests.pop(), record.get("rows"), record.get("row_length"), whole)


def verify_rows(path: Path, recipe: Path | None = None) -> None:
    """Prints what was found. Raises Different or Unreadable, which name the file."""
    beside = path.parent / rows.RECORD
    expected = expected_rows(recipe or beside)
    try:
        with contextlib.closing(rows.RowsFile(path)) as file:
            have, length = file.rows, file.row_length
            count = have if expected.rows is None else expected.rows
            digest = file.sha256(count) if count <= have else ""
    except rows.Misshapen as error:
        raise Different(str(error)) from None
    except (DataError, OSError) as error:
        raise Unreadable(str(error)) from None
    if digest:
        print(f"{path}: {count:,} rows of {length:,} tokens, rows_sha256 {digest}")
    if digest != expected.sha256 or expected.row_length not in (None, length):
        for line in _differences(beside, expected.record):
            print(line)
        if expected.row_length not in (None, length):
            raise Different(f"{path}: rows of {length} tokens, the recipe's have {expected.row_length}")
        if not digest:
            raise Different(f"{path}: {have} rows, the recipe has {count}")
        raise Different(f"{path}: not the recipe's rows, whose rows_sha256 is {expected.sha256}")
    print(f"ok: the recipe's rows{f', and {have - count:,} more that it does not read' if have > count else ''}")


def _differences(beside: Path, wanted: dict[str, Any]) -> list[str]:
    """`field: recipe's -> file's` for what a record beside the file says of how it was made, if there is one."""
    try:
        have = expected_rows(beside).record
    except Unreadable:
        return []

    def at(record: Any, name: str) -> Any:
        for key in name.split("."):
            record = record.get(key) if isinstance(record, dict) else None
        return record

    pairs = [(name, at(wanted, name), at(have, name)) for name in _MADE_OF]
    return [f"{name}: {old!r:.100} -> {new!r:.100}" for name, old, new in pairs if old is not None and old != new]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data_pipeline.verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, metavar="DIR|rows.parquet")
    parser.add_argument("--entropy", action="store_true", help="of a cache: also print unigram entropies")
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="of rows: the recipe that they should be those of")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    if options.recipe is not None or options.path.suffix == ".parquet":
        return run_command(lambda: verify_rows(options.path, options.recipe), options.debug)
    return run_command(lambda: verify(options.path, options.entropy), options.debug)


if __name__ == "__main__":
    sys.exit(main())
