"""The benchmark of what surrounds the updates: processes that write, fail and hang."""

import sys

import jax
import numpy as np
import pytest
from harness import tiny, write_cache
from ml_collections import FrozenConfigDict

from bench import speed_tables, startup
from llama_jax import arena, loss
from llama_jax.build import build

WRITES = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[1]); folder.mkdir()
file = open(folder / "metrics.jsonl", "w")
file.write('{"kind": "eval", "update": 0}\\n'); file.flush()
time.sleep(0.3)
file.write('{"kind": "train", "update": 1}\\n'); file.flush()
time.sleep(0.3)
"""


def run(script, folder, limit_s=60.0):
    return startup.first_update([sys.executable, "-c", script, str(folder)], folder, limit_s)


def test_the_first_update_is_seen_while_the_run_goes_on(tmp_path):
    found = run(WRITES, tmp_path / "run")
    assert 0.3 <= found["first_update_s"] <= found["wall_s"] - 0.1


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("import sys; sys.exit('error: no such data')", "error: no such data"),
        ("print('done, but wrote nothing')", "done, but wrote nothing"),
        (WRITES + "raise SystemExit('late')", "late"),
    ],
)
def test_a_run_that_fails_has_no_time(tmp_path, script, error):
    assert run(script, tmp_path / "run") == {"error": error}


def test_a_run_that_hangs_is_ended(tmp_path):
    assert "error" in run("import time; print('waiting', flush=True); time.sleep(60)", tmp_path / "run", 0.5)


def test_the_table():
    measured = {
        "empty cache": {"first_update_s": 31.25, "wall_s": 40.0},
        "warm cache": {"first_update_s": 12.5, "wall_s": 20.0},
        "evaluation": {"update_ms": 48.0, "forward_ms": 16.0, "evaluation_ms": 15.0},
    }
    environment = {"device": "a device", "versions": {"jax": "1.2"}}
    text = speed_tables.startup(
        {"measured": measured, "environment": environment, "command": "python -m bench.startup"}
    )
    assert "| 31.2 s | 12.5 s | 48.00 ms | 16.00 ms | 15.00 ms | 1.07 |" in text


def test_evaluation_is_measured_beside_the_forward_part_and_the_update(tmp_path):
    config = tiny(data__source="cache", data__path=str(write_cache(tmp_path / "cache")), model__head_chunk_rows=100)
    found = startup.evaluation(config, config.data.path, 2)
    assert set(found) == {"update_ms", "forward_ms", "evaluation_ms"} and min(found.values()) > 0
    # The forward part computes the losses of the step, and keeps arrays for a gradient.
    built, model = build(config), FrozenConfigDict(config.model)
    tokens = np.random.default_rng(0).integers(0, 64, (16, 17)).astype(np.uint16)
    params = {name: tensor[0] for name, tensor in arena.views(built.initial_state().params_NP, built.layout).items()}
    total, kept = startup.forward_part(model, built.numerics, params, tokens)
    expected = loss.loss_sum(model, built.numerics, params, tokens.astype(np.int32), np.ones(16, np.float32))
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert sum(x.size for x in jax.tree.leaves(kept)) > 16 * 16 * config.model.ffn  # what the gate works on, at least
