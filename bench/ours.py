"""Times our step, one config, in this process; the benchmarks here start it as a child. Prints one JSON line.

    python -m bench.ours --config=configs/c4_20m.py [--set=FIELD=VALUE ...] [--rows=128] [--tokens=CACHE_OR_IDS]

--rows: sequences of an update over all workers, one microbatch of each. --triton lets XLA turn matrix products into
Triton kernels, which the training step forbids on GPUs (llama_jax.runtime.compiler_options): for the comparison only.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

from bench import timing
from llama_jax import config as configs
from llama_jax import runtime
from llama_jax.errors import ConfigError, run_command


def settings(words: Sequence[str], rows: int | None = None, workers: int = 1, context: int = 1024) -> dict[str, Any]:
    """Overrides of a config: FIELD=VALUE words, and `rows` sequences an update, one microbatch of each worker.

    The warm-up of the learning rate plays no part in a speed measurement; it must only fit the budget.
    """
    found: dict[str, Any] = {"lr_schedule.warmup_steps": None, "lr_schedule.warmup_fraction": 0.1}
    if workers > 1:
        found |= {"decentralized.workers": workers, "training.sequence_multiple": workers}
    for word in words:
        field, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set={word} needs a value: --set=FIELD=VALUE")
        found[field] = value
    if rows is not None:
        context = int(found.get("model.context", context))
        if rows < workers or rows % workers:
            raise ConfigError(f"--rows={rows} must be a multiple of the {workers} workers")
        found |= {"training.batch_targets": rows * context, "training.microbatch": rows // workers}
    return found


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/c4_20m.py")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--rows", type=int, help="sequences of an update; default: those of the config")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tokens", help="token cache or file of uint16 ids; default: English-like frequencies")
    parser.add_argument("--steps", type=int, default=100, help="updates of a window; three windows")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--triton", action="store_true")
    options = parser.parse_args(arguments)
    context = configs.load(options.config).model.context
    config = configs.load(options.config, settings(options.set, options.rows, options.workers, context))
    runtime.prepare(config)
    with mock.patch.object(runtime, "compiler_options", (lambda: None) if options.triton else runtime.compiler_options):
        found = timing.measure(config, timing.rows(config, options.tokens), options.warmup, options.steps)
    print(json.dumps({"kind": "ours", **found}), flush=True)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
