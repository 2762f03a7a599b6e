"""Re-hashes a token cache: python -m data_pipeline.verify DIR [--entropy]. Exit code 0, or 3 when anything is wrong."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_pipeline import merge
from llama_jax import shards
from llama_jax.errors import DataError, run_command


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data_pipeline.verify", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--entropy", action="store_true", help="also print unigram entropies")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    return run_command(lambda: verify(options.directory, options.entropy), options.debug)


if __name__ == "__main__":
    sys.exit(main())
