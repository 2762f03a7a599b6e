"""The loader benchmark runs as its documentation says and cleans up."""

import json
import subprocess
import sys
from pathlib import Path

from token_cache import write_cache

from bench import loader
from llama_jax.errors import run_command

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments):
    command = [sys.executable, "-m", "bench.loader", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_random_cache(tmp_path):
    done = run(
        "--shards=3", "--shard-tokens=2048", "--context=16", "--batch=8", "--step-ms=0.1", f"--directory={tmp_path}"
    )
    assert done.returncode == 0, done.stderr
    *table, line = done.stdout.splitlines()
    result = json.loads(line)
    assert result["train_tokens"] == 3 * 2048 + 1
    assert result["batch"] == [8, 16]
    for name in ("warm", "paced"):
        assert result[name]["batches"] == 3 * 2048 // 16 // 8
        assert result[name]["tokens_per_s"] > 0
        assert any(text.startswith(name) for text in table)
    assert result["paced"]["tokens_per_s"] < 8 * 16 / 0.0001  # the pause is in the time
    assert not list(tmp_path.iterdir())


def test_prepared_cache_and_refusal(tmp_path):
    cache = write_cache(tmp_path, range(200), shard_tokens=32)
    before = {path: path.read_bytes() for path in cache.iterdir()}
    assert run(f"--cache={cache}", "--context=8", "--batch=3").returncode == 0
    refused = run(f"--cache={cache}", "--context=8", "--batch=100")
    assert (refused.returncode, refused.stdout) == (3, "")
    assert refused.stderr.count("\n") == 1
    assert str(cache) in refused.stderr
    assert {path: path.read_bytes() for path in cache.iterdir()} == before


def test_settings_out_of_range_are_one_line(monkeypatch, capsys):
    for setting in ("--batch=0", "--context=0", "--group-size=0", "--shards=-1", "--shard-tokens=0", "--step-ms=nan"):
        monkeypatch.setattr(sys, "argv", ["loader", setting])
        assert run_command(loader.main) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {setting} is not from"), error
