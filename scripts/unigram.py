"""Prints the validation loss of a run beside the unigram entropy of its corpus, the loss of knowing frequencies alone.

    python scripts/unigram.py RUN CACHE

RUN is a finished run folder, CACHE the token cache it was trained on.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llama_jax import shards
from llama_jax.errors import DataError, run_command


def unigram_entropy(manifest: shards.Manifest, split: str = "train") -> float:
    """Entropy in nats of the token frequencies of a split, in FP64. Raises DataError for an empty or damaged split."""
    count_V = np.zeros(manifest.vocab_size, np.int64)
    for index in range(len(manifest.splits[split].shards)):
        count_V += np.bincount(
            shards.load_shard(manifest, split, index, lookahead=False), minlength=manifest.vocab_size
        )
    if not count_V.any():
        raise DataError(f"{manifest.directory}: split {split} holds no tokens")
    p = count_V[count_V > 0] / count_V.sum()
    return float(-(p * np.log(p)).sum())


def compare(run: Path, cache: Path) -> str:
    """The comparison as text. Raises DataError when the run has no result yet or the cache can't be read."""
    try:
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{run} has no result.json: the run is not finished") from None
    loss = result.get("validation_loss")
    if loss is None:
        raise DataError(f"{run}/result.json has no validation loss: the run had evaluation.full_at_end=False")
    entropy = unigram_entropy(shards.read_manifest(cache))
    return (
        f"validation loss   {loss:.4f} nats per token\n"
        f"unigram entropy   {entropy:.4f} nats per token, what knowing only the frequencies of the tokens would reach\n"
        f"learned           {entropy - loss:.4f} nats per token from context"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a finished run folder")
    parser.add_argument("cache", type=Path, metavar="CACHE", help="its token cache")
    options = parser.parse_args(arguments)
    return run_command(lambda: print(compare(options.run, options.cache)))


if __name__ == "__main__":
    sys.exit(main())
