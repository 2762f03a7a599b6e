"""The table of kernels out of a profiler's trace."""

import jax
import jax.numpy as jnp
import pytest

from bench import trace


def event(name, pid, tid, dur, ph="X", **more):
    return {"ph": ph, "name": name, "pid": pid, "tid": tid, "dur": dur, **more}


EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
    {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "/host:CPU"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "Stream #7(Compute)"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 8, "args": {"name": "XLA Ops"}},
    {"ph": "M", "name": "thread_name", "pid": 2, "tid": 7, "args": {"name": "Stream python"}},
    event("loop_fusion_12", 1, 7, 1000),
    event("loop_fusion_3", 1, 7, 500),
    event("gemm_64x64_tn", 1, 7, 6000),
    event("gemm_64x64_tn", 1, 8, 6000),  # the same, in the thread that shows operations
    event("loop_fusion_12", 2, 7, 9000),  # on the host
    {"ph": "M", "pid": 1},
]


def test_kernels_of_gpu_streams_only():
    table = trace.kernels(EVENTS, 2)
    assert table == [
        {"kernel": "gemm_64x64_tn", "ms": 3.0, "launches": 0.5},
        {"kernel": "loop_fusion", "ms": 0.75, "launches": 1.0},
    ]
    text = trace.show(table)
    assert "3.750 ms in all" in text and "gemm_64x64_tn" in text
    assert "no kernels" in trace.show(trace.kernels([], 1))


def test_profile_on_this_device(tmp_path):
    keep = tmp_path / "traces" / "one.trace.json.gz"
    double = jax.jit(lambda x: x * 2)
    table = trace.profile(lambda: double(jnp.ones(8)), keep)
    assert keep.is_file()
    if jax.devices()[0].platform == "cpu":
        assert table == []
    else:
        assert table[0]["ms"] == pytest.approx(max(row["ms"] for row in table))
