"""Consensus metrics against FP64 numpy: distances, blocks, concentration, cosines, on one device and on several."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import consensus

ROOT = Path(__file__).resolve().parent.parent
P, BLOCKS = 24, ((0, 5), (5, 9), (14, 8))  # the last two columns are padding


def rows(n: int) -> np.ndarray:
    """Rows that lie far from zero and close together, as workers do."""
    rng = np.random.default_rng(n)
    x_NP = (3 * rng.standard_normal(P) + 0.01 * rng.standard_normal((n, P))).astype(np.float32)
    x_NP[:, 22:] = 0
    return x_NP


def oracle(x_NP: np.ndarray) -> tuple:
    x_NP = x_NP.astype(np.float64)
    error_NP = x_NP - x_NP.mean(0)
    squares = error_NP**2
    distance = squares.sum(1).mean()
    return (
        distance,
        [squares[:, offset : offset + size].sum(1).mean() for offset, size in BLOCKS],
        distance / (x_NP.mean(0) ** 2).sum(),
        (squares.max(1) / squares.sum(1)).max(),
    )


def cosines(x_NP: np.ndarray) -> float:
    x_NP = x_NP.astype(np.float64)
    return np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in itertools.combinations(x_NP, 2)])


measure = jax.jit(lambda x_NP: (consensus.consensus_distance(x_NP, BLOCKS), consensus.pairwise_cosine(x_NP)))


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_equals_numpy(n):
    x_NP = rows(n)
    got, cosine = measure(x_NP)
    for value, want in zip(got, oracle(x_NP), strict=True):
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, want, rtol=3e-5)
    np.testing.assert_allclose(jnp.sum(got.blocks_K), got.distance, rtol=1e-6)
    np.testing.assert_allclose(cosine, cosines(x_NP), rtol=1e-6)


def test_by_hand():
    """Rows (3, 0) and (1, 4): mean (2, 2), errors (1, -2) and (-1, 2)."""
    got = consensus.consensus_distance(jnp.asarray([[3.0, 0.0], [1.0, 4.0]]), ((0, 1), (1, 1)))
    assert float(got.distance) == 5
    assert got.blocks_K.tolist() == [1, 4]
    assert float(got.relative) == 5 / 8
    assert float(got.share) == pytest.approx(0.8)
    assert float(consensus.pairwise_cosine(jnp.asarray([[3.0, 0.0], [3.0, 4.0]]))) == pytest.approx(0.6)


def test_equal_rows_have_no_distance():
    """Three equal rows: 3 x / 3 may differ from x by an ulp, which must not count."""
    x_NP = np.tile(rows(1), (3, 1))
    got, cosine = measure(x_NP)
    assert float(got.distance) <= (1e-7 * 1e-6) ** 2 * P
    assert float(cosine) == pytest.approx(1, abs=1e-6)


def test_a_distance_below_the_rounding_of_large_rows():
    """Workers an ulp apart around 1000: a difference of sums of squares, near 2e7, would see nothing."""
    x_NP = np.full((2, P), 1000, np.float32)
    x_NP[1] = np.nextafter(np.float32(1000), np.float32(2000))
    got, _ = measure(x_NP)
    assert float(got.distance) == pytest.approx(P * (np.spacing(np.float32(1000)) / 2) ** 2, rel=1e-5)


def test_one_runaway_coordinate_is_seen():
    x_NP = rows(4)
    healthy = float(measure(x_NP)[0].share)
    x_NP[2, 7] += 5
    assert healthy < 0.5 < 0.99 < float(measure(x_NP)[0].share) <= 1


def test_long_rows_keep_their_precision():
    """Two million coordinates: a naive float32 running sum would lose several digits."""
    rng = np.random.default_rng(0)
    x_NP = (1 + 0.1 * rng.standard_normal((2, 2_000_000))).astype(np.float32)
    got = jax.jit(lambda x_NP: consensus.consensus_distance(x_NP, ((0, 1_999_999),)))(x_NP)
    error_NP = x_NP.astype(np.float64) - x_NP.astype(np.float64).mean(0)
    want = (error_NP**2).sum(1).mean()
    assert float(got.distance) == pytest.approx(want, rel=2e-6)
    assert float(got.blocks_K[0]) == pytest.approx(want, rel=4e-6)
    assert float(consensus.pairwise_cosine(jnp.asarray(x_NP))) == pytest.approx(cosines(x_NP), rel=2e-6)


def test_zeros_and_one_row():
    """Moments before the first update; a run with one worker."""
    got, cosine = measure(np.zeros((3, P), np.float32))
    assert [float(got.distance), float(got.relative), float(got.share), float(cosine)] == [0, 0, 0, 0]
    got, cosine = measure(rows(1))
    assert [float(got.distance), float(got.share), float(cosine)] == [0, 0, 1]
    assert consensus.consensus_distance(rows(2)).blocks_K.shape == (0,)


def test_what_is_not_finite_shows():
    x_NP = rows(3)
    x_NP[1, 4] = np.nan
    got, cosine = measure(x_NP)
    assert np.isnan([got.distance, got.blocks_K[0], got.relative, got.share, cosine]).all()
    assert np.isfinite(got.blocks_K[1:]).all()


def test_float64_stays():
    with jax.enable_x64(True):
        x_NP = np.random.default_rng(2).standard_normal((3, P))
        got, cosine = measure(x_NP)
        np.testing.assert_allclose(got.distance, oracle(x_NP)[0], rtol=1e-14)
        np.testing.assert_allclose(cosine, cosines(x_NP), rtol=1e-13)
        assert got.share.dtype == cosine.dtype == jnp.float64


SEVERAL = """
import jax, numpy as np
from jax.sharding import AxisType, PartitionSpec as Spec
import test_consensus as t
from llama_jax import consensus

for n, shards in ((8, 4), (6, 2), (4, 4)):
    mesh = jax.make_mesh((shards,), ("worker",), (AxisType.Auto,), devices=jax.devices()[:shards])
    def body(x_NP):
        return consensus.consensus_distance(x_NP, t.BLOCKS, "worker"), consensus.pairwise_cosine(x_NP, "worker")
    sharded = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=Spec("worker"), out_specs=Spec(), check_vma=False))
    got, cosine = sharded(t.rows(n))
    for value, want in zip(got, t.oracle(t.rows(n)), strict=True):
        np.testing.assert_allclose(value, want, rtol=3e-5)
    np.testing.assert_allclose(cosine, t.cosines(t.rows(n)), rtol=1e-6)
    for value in (*got, cosine):
        assert all(np.array_equal(shard.data, value) for shard in value.addressable_shards)
print("equal")
"""


def test_devices_equal_numpy():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, "-c", SEVERAL],
        cwd=ROOT / "tests",
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip() == "equal"
