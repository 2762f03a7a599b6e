"""Measures the loader: tokens/s with one group ahead, cold and warm, and what a paced consumer waits.

    python -m bench.loader [--cache=DIR] [--config=configs/c4_20m.py] [--batch=128] [--context=1024]

Without --cache it writes one of random tokens into a temporary directory and removes it afterwards. Cold: the kernel is
asked to drop the shards from its page cache first (Linux; needs no privileges). The unpaced consumer only takes
batches, so that it measures reading, hashing and shuffling; the paced one sleeps --step-ms between batches, as a
training step would. Prints a table, and one JSON line at the end.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from llama_jax import config as configs
from llama_jax import data, shards
from llama_jax.errors import ConfigError, DataError, run_command

VOCAB_SIZE = 32_768


def write_random_cache(directory: Path, count: int, shard_tokens: int) -> None:
    """A cache of `count` full training shards and the lookahead token, ids uniform in 0 to 32,767."""
    splits = {}
    for split, tokens in (("train", count * shard_tokens + 1), ("validation", shard_tokens)):
        writer = shards.ShardWriter(directory, split, "<u2", shard_tokens)
        bits = np.random.PCG64(len(split))
        for start in range(0, tokens, shard_tokens):
            n = min(shard_tokens, tokens - start)
            writer.append(bits.random_raw(-(-n // 4)).view(np.uint16)[:n] & np.uint16(VOCAB_SIZE - 1))
        splits[split] = {"tokens": tokens, "documents": 0, "utf8_bytes": 0, "shards": writer.finish()}
    tokenizer = {
        "kind": "none",
        "name": "random ids",
        "sha256": "",
        "vocab_size": VOCAB_SIZE,
        "eos_id": 0,
        "file": None,
    }
    content = {"dtype": "<u2", "shard_tokens": shard_tokens, "seed": 0, "sources": [], "tokenizer": tokenizer}
    shards.write_manifest(directory, {**content, "splits": splits})


def drop_from_page_cache(manifest: shards.Manifest) -> bool:
    """Asks the kernel to forget the training shards; False where it can't be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for shard in manifest.splits["train"].shards:
        descriptor = os.open(manifest.directory / shard.file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True


def one_pass(source: data.CacheSource, options: argparse.Namespace, step_s: float = 0.0) -> dict[str, float]:
    """One pass over the data: seconds to the first batch, tokens/s with and without it, waits in milliseconds.

    A wait is the time that one call of next() takes, the first one left out.
    """
    start = time.monotonic()
    loader = data.Loader(source, 42, 0, options.prefetch, options.threads)
    waits = []
    try:
        for _ in range(source.sequences // options.batch):
            before = time.monotonic()
            loader.next(options.batch)
            waits.append(time.monotonic() - before)
            if step_s:
                time.sleep(step_s)
        total = time.monotonic() - start
        group_wait = loader.waited_s
    finally:
        loader.close()
    tokens = len(waits) * options.batch * source.context
    first, later = waits[0], np.array(waits[1:]) * 1e3
    return {
        "batches": len(waits),
        "first_batch_s": round(first, 4),
        "tokens_per_s": round(tokens / total),
        "group_wait_s": round(group_wait, 4),
        "wait_mean_ms": round(float(later.mean()), 4),
        "wait_p50_ms": round(float(np.percentile(later, 50)), 4),
        "wait_p99_ms": round(float(np.percentile(later, 99)), 4),
        "wait_max_ms": round(float(later.max()), 4),
    }


def measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    source = data.CacheSource(shards.read_manifest(directory), options.context, options.group_size)
    result: dict[str, Any] = {
        "benchmark": "loader",
        "batch": [options.batch, options.context],
        "train_tokens": source.manifest.splits["train"].tokens,
        "shard_tokens": source.manifest.shard_tokens,
        "group_size": options.group_size,
        "prefetch_groups": options.prefetch,
        "threads": options.threads,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "step_ms": options.step_ms,
    }
    if source.sequences < 2 * options.batch:
        raise DataError(
            f"{directory}: {source.sequences} sequences are not two batches of {options.batch}; lower --batch"
        )
    if drop_from_page_cache(source.manifest):
        result["cold"] = one_pass(source, options)
    one_pass(source, options)
    result["warm"] = one_pass(source, options)
    result["paced"] = one_pass(source, options, options.step_ms / 1e3)
    scale = 1 if sys.platform == "darwin" else 1024
    result["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale >> 20
    return result


def print_table(result: dict[str, Any]) -> None:
    rows, context = result["batch"]
    print(
        f"loader: {result['train_tokens']:,} tokens, batches of {rows} x {context}, {result['cpus']} CPUs, "
        f"{result['prefetch_groups']} group(s) of {result['group_size']} shard(s) ahead, "
        f"peak memory {result['peak_rss_mib']} MiB"
    )
    print(f"{'':8}{'Mtok/s':>10}{'first s':>10}{'mean ms':>10}{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}")
    for name in ("cold", "warm", "paced"):
        if name in result:
            line = result[name]
            waits = "".join(f"{line[f'wait_{key}_ms']:10.3f}" for key in ("mean", "p50", "p99", "max"))
            print(f"{name:8}{line['tokens_per_s'] / 1e6:10.1f}{line['first_batch_s']:10.3f}{waits}")
    print(
        f"paced: {result['step_ms']} ms between batches; a wait is the time that one next() takes, the first left out"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="a prepared token cache; default: random tokens, removed at the end")
    parser.add_argument("--config", help="take batch, context, group size, prefetch and threads from this config")
    parser.add_argument("--batch", type=int, default=128, help="sequences of a batch")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--group-size", type=int, default=2, help="shards shuffled together")
    parser.add_argument("--prefetch", type=int, default=1, help="groups loaded ahead: 0 or 1")
    parser.add_argument("--threads", type=int, default=8, help="shards read at a time")
    parser.add_argument("--shards", type=int, default=6, help="shards of the random cache")
    parser.add_argument("--shard-tokens", type=int, default=shards.SHARD_TOKENS)
    parser.add_argument(
        "--directory", type=Path, help="where the random cache is written; default: the temporary folder"
    )
    parser.add_argument("--step-ms", type=float, default=4.0, help="what the paced consumer does between batches")
    options = parser.parse_args()
    for name in ("batch", "context", "group-size", "shards", "shard-tokens", "step-ms"):
        low = 0 if name == "step-ms" else 1
        value = getattr(options, name.replace("-", "_"))
        if not low <= value <= 1 << 31:
            raise ConfigError(f"--{name}={value} is not from {low} to {1 << 31}")
    if options.config:
        config = configs.load(options.config)
        options.context = config.model.context
        options.batch = config.training.batch_targets // config.model.context
        options.group_size = config.data.shuffle_group_size
        options.prefetch, options.threads = config.data.prefetch_groups, config.runtime.host_threads
    if options.cache:
        result = measure(options.cache, options)
    else:
        with tempfile.TemporaryDirectory(dir=options.directory) as name:
            write_random_cache(Path(name), options.shards, options.shard_tokens)
            result = measure(Path(name), options)
    print_table(result)
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(run_command(main))
