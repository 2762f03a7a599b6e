"""Builds the rows of a recipe: python -m data_pipeline.sft_rows --source=tulu3|messages|mini --model=DIR --out=DIR.

Conversations are put in a seeded order, rendered with the model's chat template, tokenized with its tokenizer, joined
with an EOS token between conversations and cut into consecutive rows of exactly `row_length` tokens. There is no
padding; what is left over at the end is dropped. DIR/rows.parquet holds the rows (llama_jax.rows says how they are
stored and hashed); DIR/rows.json, written last, says what they were made of and their rows_sha256. A recipe carries it
as its "rows".

What the protocol leaves open is decided so:
- Order: conversation i of n stands where sha256(<Q seed> <Q i>) does among all n, which any language can repeat.
- EOS goes between conversations, never after the last, whatever the template ended with; when that was EOS already
  there are two. rows.json counts the conversations that end so. BOS is where the template writes it and nowhere else.
- Attention and positions run across conversations, and all tokens of a row are trained on.
- The first k rows do not depend on how many are asked for with --rows, and a recipe's rows may be the first of a
  larger build. So --rows=2560, 20 steps of 128 rows, is the whole input of a recipe at a fraction of the work.
- A conversation that can't be used (without text, or refused by the template) is an error, or with --skip_bad counted
  and left out. It keeps its number, so the order of the others stays.

A build is not continued: stopped at any moment, it leaves a folder without rows.json, and the same command starts
again. Exit codes: 0 done, 2 arguments, 3 data, 4 folder foreign or in use.
"""

import argparse
import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from data_pipeline import chat, conversations, options, packing
from data_pipeline.progress import say
from llama_jax import rows
from llama_jax.errors import CheckpointError, ConfigError, DataError, run_command
from llama_jax.files import read_json, write_json_atomic

# Raise when the same settings begin to give other rows.
BUILDER_VERSION = 1
ROWS, RECORD = rows.FILE, rows.RECORD
_WORK, _LOCK = "partial", "rows.lock"
_OURS = {ROWS, RECORD, ROWS + ".tmp", RECORD + ".tmp", _WORK, _LOCK}
_TOKENIZER_CHARACTERS = 200_000_000  # text that a tokenizer is trained on


@dataclass(frozen=True)
class Request:
    """A build. `rows` None takes everything; `make_tokenizer` is None or the size of the one to make in `model`."""

    source: str
    model: Path
    out: Path
    inputs: tuple[str, ...] = ()
    cache: Path = Path("downloads")
    messages_field: str = "messages"
    chat_template: str = ""
    eos_token: str = ""
    date: str = chat.DATE
    seed: int = 42
    row_length: int = rows.ROW_LENGTH
    rows: int | None = None
    skip_bad: bool = False
    make_tokenizer: int | None = None


def build(request: Request) -> dict[str, Any]:
    """Builds what `request` describes, or finds it built and whole; returns the record.

    Raises ConfigError, DataError (naming file and line), CheckpointError for a folder that is foreign or in use.
    """
    with _claimed(request.out) as work:
        source = _open(request)
        say(f"{source.conversations:,} conversations in {len(source.files)} files")
        if request.make_tokenizer is not None:
            ids = chat.make_tokenizer(request.model, _texts(source, request), request.make_tokenizer, work)
            say(f"{request.model}: a tokenizer of {ids:,} ids with a ChatML template")
        talk = chat.load(request.model, request.chat_template, request.eos_token, request.date)
        settings = {
            "builder_version": BUILDER_VERSION, "asked_rows": request.rows, "seed": request.seed, "order": "sha256",
            "eos_between": True, **talk.record, "source": source.record, "messages_field": request.messages_field,
            "skip_bad": request.skip_bad,
        }  # fmt: skip
        if (request.out / RECORD).exists():
            return _existing(request, settings)
        tally, path = packing.Tally(), request.out / ROWS
        tokens = None if request.rows is None else request.rows * request.row_length
        order = packing.Order(request.seed, tokens, request.skip_bad)
        with open(work / "tokens.bin", "w+b") as spool:
            with contextlib.closing(
                packing.ordered(source, request.messages_field, talk, order, spool, tally)
            ) as conversation_ids:
                blocks = packing.cut(conversation_ids, talk.eos_id, request.row_length, request.rows)
                count = rows.write(path, blocks, request.row_length)
        for problem in tally.problems[:20]:
            say(f"left out: {problem}")
        if count < (request.rows or 1):
            path.unlink()
            raise DataError(
                f"{request.out}: {tally.conversations:,} conversations give {tally.tokens:,} tokens, so {count:,} rows "
                f"of {request.row_length:,}, not {request.rows or 1:,}"
            )
        with contextlib.closing(rows.RowsFile(path)) as file:  # what is on the disk, not what was meant to go there
            digest = file.sha256()
        record = {
            "format": rows.FORMAT, "rows_sha256": digest, "rows": count, "row_length": request.row_length, **settings,
            "conversations": tally.conversations, "skipped": tally.skipped, "ending_in_eos": tally.ending_in_eos,
            "dropped_tokens": tally.tokens - count * request.row_length if request.rows is None else None,
        }  # fmt: skip
        write_json_atomic(request.out / RECORD, record)
        return record


def _open(request: Request) -> conversations.Source:
    if request.source == "tulu3":
        return conversations.open_tulu3(request.inputs, request.messages_field, say)
    if request.source == "messages":
        return conversations.open_messages(request.inputs, request.messages_field)
    return conversations.open_plays(request.cache, say)


def _texts(source: conversations.Source, request: Request) -> Iterator[str]:
    """What a tokenizer is trained on: the messages of the first conversations, up to a length."""
    left = _TOKENIZER_CHARACTERS
    for found in conversations.read(source, request.messages_field, np.ones(source.conversations, bool)):
        for message in found.messages:
            left -= len(message["content"])
            if left < 0:
                return
            yield message["content"]


def _existing(request: Request, settings: dict[str, Any]) -> dict[str, Any]:
    """The record of the finished build in `out`, if it is what `request` asks for and its rows are whole."""
    path = request.out / RECORD
    try:
        record = read_json(path)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise DataError(f"{path}: damaged; remove {request.out} and build again")
    for key, value in {"format": rows.FORMAT, "row_length": request.row_length, **settings}.items():
        if record.get(key) != value:
            raise ConfigError(f"{request.out} is a finished build with another {key}; choose another --out")
    with contextlib.closing(rows.RowsFile(request.out / ROWS)) as file:
        if (file.rows, file.sha256()) != (record.get("rows"), record.get("rows_sha256")):
            raise DataError(f"{file.path}: its rows are not those of {RECORD}; remove {request.out} and build again")
    say(f"{request.out} is finished already: nothing to do")
    return record


@contextlib.contextmanager
def _claimed(out: Path) -> Iterator[Path]:
    """`out` made or found to hold only ours, for this process alone; yields an empty folder in it to work in."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        foreign = sorted(path.name for path in out.iterdir() if path.name not in _OURS)
    except OSError as error:
        raise CheckpointError(f"--out={out}: {error.strerror}") from None
    if foreign:
        raise CheckpointError(
            f"--out={out}: holds {foreign[0]}, which is no part of a build; choose a folder of its own"
        )
    lock, work = out / _LOCK, out / _WORK
    with open(lock, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(os.fstat(file.fileno()), os.stat(lock))  # else its holder has just removed it
        except OSError:
            held = False
        if not held:
            raise CheckpointError(f"{out} is being built already; wait for it")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
            lock.unlink(missing_ok=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the arguments")


def parse(arguments: Sequence[str]) -> Request:
    """The request that the command line makes. Raises ConfigError naming the argument."""
    p = _Parser(
        prog="python -m data_pipeline.sft_rows", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = p.add_argument
    add("--source", required=True, choices=("tulu3", "messages", "mini"),
        help=f"{conversations.TULU3} at a pinned revision (--input names a local copy, else the hub); files of "
        "messages; or a stand-in made of plays, for machines without a network")  # fmt: skip
    add("--model", required=True, type=Path, help="folder with tokenizer.json, tokenizer_config.json, chat template")
    add("--out", required=True, type=Path, metavar="DIR", help="the folder to build")
    add(
        "--input",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH",
        help=".parquet and .jsonl files, folders, globs",
    )
    add("--messages_field", default="messages", help="column or field of the messages (default: %(default)s)")
    add("--rows", type=int, help="stop after so many rows (default: all)")
    add("--row_length", type=int, default=rows.ROW_LENGTH, help="tokens a row (default: %(default)s)")
    add("--seed", type=int, default=42, help="of the order (default: %(default)s)")
    add("--chat_template", default="", metavar="FILE", help="a template file, or chatml, instead of the model's own")
    add("--eos_token", default="", help="the token between conversations (default: the model's eos_token)")
    add("--date", default=chat.DATE, help="today, for templates that ask for it (default: %(default)s)")
    add("--skip_bad", action="store_true", help="leave out conversations that can't be used, instead of stopping")
    add("--make_tokenizer", type=int, metavar="V",
        help="first make a tokenizer of V ids in --model, trained on the conversations")  # fmt: skip
    add("--cache", type=Path, help="folder of downloads of the stand-in (default: DIR/../downloads)")
    add("--debug", action="store_true", help="show tracebacks")
    a = p.parse_args(list(arguments))
    limits = {"rows": (1, 1 << 32), "row_length": (2, 1 << 20), "seed": (0, (1 << 64) - 1)}
    for name, (low, high) in limits.items():
        value = getattr(a, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"--{name}={value} is not from {low} to {high}")
    if a.source == "mini" and a.input:
        raise ConfigError("--input is not for --source=mini")
    return Request(
        a.source, a.model, a.out, tuple(a.input), a.cache or a.out.absolute().parent / "downloads", a.messages_field,
        a.chat_template, a.eos_token, a.date, a.seed, a.row_length, a.rows, a.skip_bad, a.make_tokenizer,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    os.environ.setdefault("RAYON_NUM_THREADS", str(options.allowed_cpus()))  # threads of the tokenizer

    def command() -> None:
        request = parse(arguments)
        record = build(request)
        say(f"{record['conversations']:,} conversations ({record['skipped']:,} left out), seed {record['seed']}")
        print(f"{request.out / ROWS}: {record['rows']:,} rows of {record['row_length']:,} tokens")
        print(f"rows_sha256 {record['rows_sha256']}")

    return run_command(command, debug="--debug" in arguments)


if __name__ == "__main__":
    sys.exit(main())
