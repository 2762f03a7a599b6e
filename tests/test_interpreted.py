"""The Mosaic kernels as a simulated GPU computes them on the CPU: threads, barriers and copies, races reported.

Memory that nothing wrote is NaN there. JAX can do it since 0.11; the kernels of real GPUs are tested in tests/gpu.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from ml_collections import FrozenConfigDict

from llama_jax import gate, kernels, ops, rotary

pytestmark = pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="this JAX can't simulate a GPU")
HALF = jnp.bfloat16


@pytest.fixture
def simulated(monkeypatch):
    """Two multiprocessors, so that few rows are many turns."""
    monkeypatch.setattr(kernels, "MULTIPROCESSORS", 2)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def normal(seed, *shape, scale=1.0, dtype=HALF):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def plain_rotated(h, w, cos, sin):
    q, k, v = (ops.plain_dense(h, part).reshape(-1, len(cos), h.shape[1] // 64, 64) for part in jnp.split(w, 3))
    return tuple(x.reshape(h.shape) for x in (ops.plain_rope(q, cos, sin), ops.plain_rope(k, cos, sin), v))


def cases():
    x, dh, dy = (normal(seed, 72, 128) for seed in range(3))
    h, inverse = kernels.plain_norm(x, 1e-5, HALF)
    logits, targets = normal(3, 11, 768, scale=4), np.random.default_rng(4).integers(0, 768, 11, np.int32)
    logits[0], logits[1, 5], targets[:3] = 0, 80, (0, 5, 767)
    weights = np.arange(11, dtype=np.float32)
    rows, up, down = normal(5, 448, 64), normal(6, 256, 64, scale=0.1), normal(7, 64, 128, scale=0.1)
    model = FrozenConfigDict({"width": 128, "heads": 2, "rope_theta": 1e4, "rope_scaling": "none"})
    tables = ops.rope_tables(model, np.arange(64), jnp.float32)
    return {
        "norm": (lambda x: kernels.norm(x, 1e-5, HALF), lambda x: kernels.plain_norm(x, 1e-5, HALF), (x,)),
        "norm_gradient": (kernels.norm_gradient, kernels.plain_norm_gradient, (h, inverse, dh, dy)),
        "softmax_gradient": (kernels.softmax_gradient, kernels.plain_softmax_gradient, (logits, targets, weights)),
        "token_losses": (kernels.token_losses, kernels.plain_token_losses, (logits, targets)),
        "products": (gate.products, gate.plain_products, (rows, up)),
        "gradient": (gate.gradient, gate.plain_gradient, (rows, down, normal(8, 448, 256))),
        "rotated": (rotary.rotated, plain_rotated, (normal(9, 448, 128), normal(10, 384, 128, scale=0.1), *tables)),
    }


@pytest.mark.parametrize("name", list(cases()) if hasattr(plgpu, "InterpretGPUParams") else ["norm"])
@pytest.mark.parametrize("workers", [None, 2])
def test_a_kernel_computes_its_plain_form(name, workers, simulated):
    function, plain, given = cases()[name]
    if workers:
        # Of each worker other numbers, but for what all share (the tables of the rotation).
        axes = [0 if i < 2 or name != "rotated" else None for i in range(len(given))]
        given = [x if axis is None else np.stack([x, np.flip(x, 0)]) for x, axis in zip(given, axes, strict=True)]
        function, plain = (jax.vmap(one, in_axes=axes) for one in (function, plain))
    found, expected = function(*given), plain(*given)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        # A sum in another order is rounded to the other neighbour now and then, and what follows from it.
        each, together = (2**-6, 2**-9) if ours.dtype == HALF else (1e-6, 1e-6)
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        assert np.max(np.abs(ours - theirs)) <= each * np.max(np.abs(theirs))
        assert np.linalg.norm(ours - theirs) <= together * np.linalg.norm(theirs)


def test_a_race_is_noticed(simulated):
    """A tile that is read before its copy has arrived."""

    def body(x, y, tile, arrived):
        plgpu.copy_gmem_to_smem(x, tile, arrived)
        y[...] = tile[...]
        plgpu.barrier_wait(arrived)

    out, scratch = jax.ShapeDtypeStruct((64, 64), HALF), (plgpu.SMEM((64, 64), HALF), plgpu.Barrier())
    run = plgpu.kernel(body, grid=(1,), grid_names=("block",), **{kernels.OUT: out, kernels.SCRATCH: scratch})
    with pytest.raises(Exception, match=r"(?i)race"):
        jax.block_until_ready(run(normal(0, 64, 64)))
