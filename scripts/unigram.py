"""Prints the validation loss of a run beside the unigram entropy of its corpus, the loss of knowing frequencies alone.

    python scripts/unigram.py RUN CACHE

RUN is a finished run folder, CACHE the token cache it was trained on.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.verify import unigram_entropy
from llama_jax import shards
from llama_jax.errors import DataError, run_command
from llama_jax.files import read_json


def compare(run: Path, cache: Path) -> str:
    """The comparison as text, in nats. Raises DataError when the run has no validation loss or the cache is damaged."""
    try:
        loss = read_json(run / "result.json")["validation_loss"]
    except FileNotFoundError:
        raise DataError(f"{run} has no result.json: the run is not finished") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{run}/result.json: damaged ({error}); the training command says what to do") from None
    if not isinstance(loss, float):
        raise DataError(f"{run}/result.json has no validation loss: the run had evaluation.full_at_end=False")
    unigram = unigram_entropy(shards.read_manifest(cache), "validation")
    if math.isnan(unigram.entropy):
        raise DataError(f"{cache} has no validation text, so it is not the cache of {run}")
    return (
        f"validation loss         {loss:.4f} nats per token\n"
        f"unigram entropy         {unigram.entropy:.4f} nats per token of the validation text\n"
        f"unigram cross-entropy   {unigram.cross_entropy:.4f} with the frequencies of the training text: what a model\n"
        f"                        that looks at no context reaches. Learned from context: "
        f"{unigram.cross_entropy - loss:.4f} nats per token"
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
