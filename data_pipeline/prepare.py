"""Builds a token cache: python -m data_pipeline.prepare --source=c4|tfds|jsonl|mini --out=DIR [...].

Reads sources, tokenises them in parallel into pieces below DIR/partial, merges the pieces into shards and writes the
manifest last. Stopped at any moment and started again with the same arguments it goes on and ends with the same bytes.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_pipeline import folder, merge, mini, options, packages, pieces, pool, sources, streams, tokenizers
from data_pipeline.progress import Progress, say
from llama_jax import shards
from llama_jax.errors import ConfigError, DataError, Interrupted, Preempted, run_command

SKIPPED = "skipped.txt"
_SHARD = re.compile(r"(train|validation)-\d{5}\.bin(\.tmp)?")


def prepare(request: options.Request) -> shards.Manifest | None:
    """Builds the cache that `request` describes, or finds it built. None after a slice of the work.

    Raises ConfigError, DataError (naming file and line), CheckpointError for a folder that is foreign or in use.
    """
    out = request.out
    folder.claim(out)
    with folder.locked(out, request.slice):
        if (out / shards.MANIFEST).exists():
            manifest = _existing(request)
            shutil.rmtree(out / folder.PARTIAL, ignore_errors=True)
            return manifest
        return _build(request)


def _build(request: options.Request) -> shards.Manifest | None:
    out, partial = request.out, request.out / folder.PARTIAL
    tokenizer = None
    if tokenizers.bpe_size(request.tokenizer) is None:
        tokenizer = tokenizers.load(request.tokenizer, request.cache, request.eos_token)
        request.check_vocabulary(tokenizer.vocab_size)
    listing = list_items(request)
    for note in listing.notes:
        say(f"note: {note}")
    folder.check_disk(out, request.tokens, listing.items)
    try:
        partial.mkdir(exist_ok=True)
    except OSError as error:
        raise DataError(f"{partial}: {error.strerror}") from None
    if tokenizer is None:
        tokenizer = _train_tokenizer(request, listing.items, partial)
    bos_id = tokenizer.bos_id if request.bos else None
    if request.bos and bos_id is None:
        raise ConfigError(f"--bos: tokenizer {request.tokenizer} has no begin-of-sentence token")
    work = pieces.Work(
        str(partial), str(tokenizer.path), tokenizer.sha256, request.eos_token, tokenizer.eos_id, bos_id,
        tokenizer.vocab_size, request.rules, request.skip_bad,
    )  # fmt: skip
    limit = None if request.tokens is None else pieces.Limit(request.tokens, request.shuffle_buffer)
    progress = Progress(listing.items, request.tokens)
    if request.slice is not None:
        _do_slice(request.slice, listing.items, work, limit, request.workers, progress)
        return None
    for path in out.iterdir():  # shards of an attempt that did not reach its manifest
        if _SHARD.fullmatch(path.name):
            path.unlink()
    settings = merge.Settings(
        request.seed, request.shuffle_buffer, request.validation_fraction, request.deduplicate, request.tokens,
        tokenizer.vocab_size, shards.dtype_for(tokenizer.vocab_size), request.shard_tokens,
    )  # fmt: skip
    with contextlib.closing(_ordered(listing.items, work, limit, request.workers, progress)) as made:
        merged = merge.merge(out, made, lambda piece: _whole(piece, work, request.workers, progress), settings)
    progress.end()
    manifest = _finish(request, listing, tokenizer, merged)
    shutil.rmtree(partial, ignore_errors=True)
    return manifest


def list_items(request: options.Request) -> sources.Listing:
    """The items of a request, after fetching what it asks to fetch."""
    if request.source == "mini":
        return sources.Listing(mini.build(request.cache, request.mini_clients, say))
    if request.source == "tfds":
        return sources.list_tfds(request.inputs, request.tfds_split, request.tfds_validation_split)
    if request.source == "jsonl":
        return sources.list_jsonl(request.inputs, request.validation_inputs)
    if not request.download:
        return sources.list_c4(request.inputs)
    if request.tokens is None:
        raise ConfigError("--download needs --config or --tokens, which say how many of the 1,024 files are wanted")
    target = Path(request.inputs[0]) if request.inputs else request.cache / "c4"
    sources.download_c4(target, -(-request.tokens // sources.C4_TOKENS_PER_FILE) + 1, say)
    return sources.list_c4([str(target)])


def _ordered(
    items: Sequence[sources.Item], work: pieces.Work, limit: pieces.Limit | None, workers: int, progress: Progress
) -> Generator[pieces.Piece]:
    """Pieces in the order of the stream: validation files whole, then train files as far as needed."""
    validation = [item for item in items if item.split == "validation"]
    yield from pool.make_all(validation, work, None, workers, progress.tick)
    train = [item for item in items if item.split != "validation"]
    yield from pool.make_all(train, work, limit, workers, progress.tick)


def _whole(piece: pieces.Piece, work: pieces.Work, workers: int, progress: Progress) -> pieces.Piece:
    return pieces.make(piece.item, work, None, workers, progress.tick, lambda: False)


def _do_slice(
    share: tuple[int, int],
    items: Sequence[sources.Item],
    work: pieces.Work,
    limit: pieces.Limit | None,
    workers: int,
    progress: Progress,
) -> None:
    """Makes every n-th piece only, and stops when n slices like this one should do."""
    index, count = share
    validation = [item for item in items if item.split == "validation"][index::count]
    train = [item for item in items if item.split != "validation"][index::count]
    done = sum(1 for _ in pool.make_all(validation, work, None, workers, progress.tick))
    documents = tokens = 0
    with contextlib.closing(pool.make_all(train, work, limit, workers, progress.tick, count)) as made:
        for piece in made:
            done, documents, tokens = done + 1, documents + piece.documents, tokens + piece.tokens
            if limit is not None and limit.reached(count * documents, count * tokens):
                break
    progress.end()
    say(f"slice {index}/{count}: {done} files tokenised; when all slices are done, run once without --slice")


def _train_tokenizer(request: options.Request, items: Sequence[sources.Item], partial: Path) -> tokenizers.Tokenizer:
    """A byte-level BPE of the first `bpe_bytes` bytes of training documents, in stream order."""
    size = tokenizers.bpe_size(request.tokenizer)
    assert size is not None
    say(f"training a byte-level BPE of {size:,} ids")
    os.environ.setdefault("RAYON_NUM_THREADS", str(request.workers))

    def texts() -> Iterator[str]:
        left = request.bpe_bytes
        for item in items:
            if item.split == "validation":
                continue
            for text in streams.documents(item, request.rules, lambda chunk: None):
                if isinstance(text, streams.Problem):
                    if not request.skip_bad:
                        raise pieces.bad_input(text)
                    continue
                data = text.encode("utf-8")
                digest = pieces.document_digest(data)
                if item.split == "by_hash" and merge.is_validation(digest, request.seed, request.validation_fraction):
                    continue
                left -= len(data)
                if left < 0:
                    return
                yield text

    path = partial / "bpe.json"
    tokenizers.train_bpe(list(texts()), size, path)
    tokenizer = tokenizers.load(path, name=request.tokenizer)
    if tokenizer.vocab_size < size:
        say(f"note: the corpus gives only {tokenizer.vocab_size:,} different ids, not {size:,}")
    request.check_vocabulary(tokenizer.vocab_size)
    return tokenizer


def _finish(
    request: options.Request, listing: sources.Listing, tokenizer: tokenizers.Tokenizer, merged: merge.Merged
) -> shards.Manifest:
    out = request.out
    train = merged.splits["train"]
    if not train["tokens"]:
        raise DataError(f"{out}: the sources hold no training document; look at {request.source} --input")
    exhausted = request.tokens is None or train["tokens"] < request.tokens
    if request.tokens is not None and exhausted:
        say(f"note: the sources end at {train['tokens']:,} of {request.tokens:,} tokens; a longer run reads them again")
    if not merged.splits["validation"]["tokens"]:
        say("note: no validation document; raise --validation_fraction or give validation files")
    _write_skipped(out, merged.tallies)
    packages.publish(out / tokenizer.file, tokenizer.path.read_bytes())
    content = {
        "dtype": shards.dtype_for(tokenizer.vocab_size),
        "shard_tokens": request.shard_tokens,
        "seed": request.seed,
        "tokenizer": {
            "kind": tokenizer.kind,
            "name": tokenizer.name,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "bos_id": tokenizer.bos_id,
            "file": tokenizer.file,
        },
        "documents": {"eos": True, "bos": request.bos, "special_tokens_in_text": "plain text"},
        "sources": _source_records(merged.tallies),
        "splits": merged.splits,
        "unigram_nats": merged.statistics,
        "exhausted": exhausted,
        "request": request.record(),
    }
    return shards.write_manifest(out, content)


def _source_records(tallies: Sequence[merge.Tally]) -> list[dict[str, Any]]:
    """One record a source file or data set, in stream order."""
    records: dict[tuple[str, str, str], dict[str, Any]] = {}
    for tally in tallies:
        item = tally.item
        base = {
            "name": item.name, "split": item.split, "revision": item.revision or None, "sha256": tally.sha256,
            **dict(item.about), "documents": 0, "empty": 0, "duplicates": 0, "skipped": 0,
        }  # fmt: skip
        record = records.setdefault((item.name, item.split, tally.sha256), base)
        for key in ("documents", "empty", "duplicates", "skipped"):
            record[key] += getattr(tally, key)
    return list(records.values())


def _write_skipped(out: Path, tallies: Sequence[merge.Tally]) -> None:
    problems = [problem for tally in tallies for problem in tally.problems]
    (out / SKIPPED).unlink(missing_ok=True)
    if problems:
        packages.publish(out / SKIPPED, "".join(problem + "\n" for problem in problems).encode("utf-8"))
        for problem in problems[:20]:
            say(f"skipped {problem}")
        say(f"skipped {len(problems)} pieces of bad input in all, listed in {out / SKIPPED}")


def _existing(request: options.Request) -> shards.Manifest:
    """The finished cache in `out`, if it is what `request` asks for."""
    manifest = shards.read_manifest(request.out)
    request.check_vocabulary(manifest.vocab_size)
    content = options.read_content(request.out)
    old, new = content["request"], request.record()
    changed = [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in new if old.get(key) != new[key]]
    if changed:
        raise ConfigError(
            f"{request.out} is a finished cache of other settings ({'; '.join(changed)}); choose another --out"
        )
    tokens = manifest.splits["train"].tokens
    if not content.get("exhausted") and (request.tokens is None or request.tokens > tokens):
        wanted = "all" if request.tokens is None else f"{request.tokens:,}"
        raise ConfigError(
            f"{request.out} is finished with {tokens:,} tokens, {wanted} are asked for; choose another --out"
        )
    if request.source != "mini":  # mini is pinned by its package hashes
        _compare_sources(request, manifest, bool(content.get("exhausted")))
    say(f"{request.out} is finished already: nothing to do")
    return manifest


def _compare_sources(request: options.Request, manifest: shards.Manifest, exhausted: bool) -> None:
    try:
        listing = list_items(request)
    except ConfigError as error:
        say(f"note: sources not compared with the finished cache: {error}")
        return
    items = {(item.name, item.split): item for item in listing.items}
    recorded = {(str(old.get("name")), str(old.get("split"))): old.get("sha256") for old in manifest.sources}
    extra = [key[0] for key in items if key not in recorded] if exhausted else []
    for (name, split), sha256 in recorded.items():
        if (name, split) not in items:
            raise DataError(f"{request.out}: made from {name}, which is not among the inputs now; choose another --out")
        if pieces.source_sha256(items[name, split]) != sha256:
            raise DataError(
                f"{request.out}: made from {name} of sha256 {sha256}, which has changed; choose another --out"
            )
    if extra:
        raise DataError(f"{request.out}: made without {extra[0]}, which is among the inputs now; choose another --out")


def _summary(manifest: shards.Manifest, out: Path) -> None:
    for name, split in manifest.splits.items():
        ratio = f", {split.utf8_bytes / split.tokens:.3f} bytes a token" if split.tokens else ""
        say(f"{name}: {split.tokens:,} tokens in {len(split.shards)} shards, {split.documents:,} documents{ratio}")
    nats = options.read_content(out)["unigram_nats"].get("validation_unigram")
    if isinstance(nats, float):
        say(f"unigram model of train on validation: {nats:.4f} nats a token")
    say(f"cache ready: {out}")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)

    def preempted(number: int, frame: object) -> None:
        raise Preempted(f"stopped by {signal.Signals(number).name}; the same command goes on from the finished files")

    def command() -> None:
        request = options.parse(arguments)
        before = {number: signal.signal(number, preempted) for number in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            manifest = prepare(request)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; the same command goes on from the finished files") from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if manifest is not None:
            _summary(manifest, request.out)

    return run_command(command, debug="--debug" in arguments)


if __name__ == "__main__":
    sys.exit(main())
