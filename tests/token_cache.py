"""Small token caches for tests, written without llama_jax: raw little-endian files and a manifest made by hand."""

import hashlib
import json
from pathlib import Path

import numpy as np


def manifest_content(directory, train, validation, shard_tokens, vocab_size, dtype="<u2"):
    """What manifest.json of a cache with these two token streams must hold; writes the shards beside it."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_bytes(b'{"some": "tokenizer"}')
    splits = {}
    for name, tokens in (("train", train), ("validation", validation)):
        records = []
        for index, start in enumerate(range(0, len(tokens), shard_tokens)):
            raw = np.asarray(tokens[start : start + shard_tokens]).astype(dtype).tobytes()
            file = f"{name}-{index:05d}.bin"
            (directory / file).write_bytes(raw)
            size = len(raw) // np.dtype(dtype).itemsize
            records.append({"file": file, "tokens": size, "sha256": hashlib.sha256(raw).hexdigest()})
        splits[name] = {"tokens": len(tokens), "documents": 3, "utf8_bytes": 4 * len(tokens), "shards": records}
    return {
        "format_version": 1,
        "finished": True,
        "dtype": dtype,
        "shard_tokens": shard_tokens,
        "seed": 7,
        "tokenizer": {
            "kind": "bpe",
            "name": "small",
            "sha256": hashlib.sha256(b'{"some": "tokenizer"}').hexdigest(),
            "vocab_size": vocab_size,
            "eos_id": 0,
            "bos_id": None,
            "file": "tokenizer.json",
        },
        "sources": [{"name": "made up", "revision": "1", "sha256": "0" * 64}],
        "splits": splits,
    }


def write_cache(directory, train, validation=(1, 2, 3), shard_tokens=32, vocab_size=65_536, dtype="<u2"):
    """Writes a whole cache and returns its directory."""
    content = manifest_content(directory, train, validation, shard_tokens, vocab_size, dtype)
    (Path(directory) / "manifest.json").write_text(json.dumps(content))
    return Path(directory)


def flip(path, offset=5, bit=1):
    """Flips one bit of a file, its length unchanged."""
    raw = bytearray(Path(path).read_bytes())
    raw[offset] ^= bit
    Path(path).write_bytes(bytes(raw))
