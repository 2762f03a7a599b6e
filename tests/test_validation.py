"""Validation losses against numpy FP64, for every batch size; the subset; the mean of the workers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy_llama
import pytest

from llama_jax import arena, config, model, step, validation

FAST = model.Numerics(jnp.float32, jnp.float32, "xla", "chunked", head_chunk_rows=50)
ORACLE = numpy_llama.model(layers=1)
SEQUENCES = numpy_llama.tokens(ORACLE, 10)


def settings(batch):
    raw = config.default()
    raw.model.update({"vocab_size": 29, "context": 12, "layers": 1, "width": 24, "heads": 4, "kv_heads": 2, "ffn": 40})
    raw.training.update({"targets_per_parameter": None, "total_updates": 40, "batch_targets": 8 * 12, "microbatch": 8})
    raw.lr_schedule.warmup_steps = 5
    raw.evaluation.batch_sequences = batch
    return config.finalize(raw)


LAYOUT = arena.make_layout(settings(1).model)


def evaluate(batch, rows=SEQUENCES, numerics=FAST):
    evaluator = validation.make_evaluator(settings(batch), numerics, step.make_mesh(1, 1))
    row = arena.to_row(numpy_llama.params(ORACLE), LAYOUT)
    return evaluator(row, validation.batches(lambda i: rows[i], np.arange(len(rows)), batch))


@pytest.fixture(scope="module")
def expected():
    """Token losses [10, 12] in FP64."""
    return numpy_llama.token_losses(ORACLE, numpy_llama.params(ORACLE), SEQUENCES.astype(np.int64))


@pytest.fixture(scope="module")
def by_threes():
    """An evaluator of batches of three, and its row."""
    evaluator = validation.make_evaluator(settings(3), FAST, step.make_mesh(1, 1))
    return evaluator, arena.to_row(numpy_llama.params(ORACLE), LAYOUT)


@pytest.mark.parametrize("batch", [1, 3, 4, 10, 128])
def test_the_batch_size_changes_rounding_only(batch, expected):
    """With 10 sequences the last batch has 1, 1, 2, 10 and 10: a mean of batch means would differ for 3 and 4."""
    found = evaluate(batch)
    assert found.targets == 120
    assert isinstance(found.targets, int)
    assert isinstance(found.total, float)
    np.testing.assert_allclose(found.mean, expected.mean(), rtol=1e-6)
    np.testing.assert_allclose(found.total, expected.sum(), rtol=1e-6)


@pytest.mark.parametrize("batch", [3, 4])
def test_a_mean_of_batch_means_would_be_seen(batch, expected):
    means = [expected[i : i + batch].mean() for i in range(0, 10, batch)]
    assert abs(np.mean(means) / expected.mean() - 1) > 1e-4  # a hundred times the bound


def test_in_bfloat16_too(expected):
    found = evaluate(4, numerics=model.Numerics(head_chunk_rows=50))
    np.testing.assert_allclose(found.mean, expected.mean(), rtol=5e-3)
    assert abs(found.mean / expected.mean() - 1) > 1e-7


def test_sequences_alone_and_together(by_threes, expected):
    evaluator, row = by_threes
    for i in (0, 7):
        alone = evaluator(row, [SEQUENCES[i : i + 1]])
        assert alone.targets == 12
        np.testing.assert_allclose(alone.total, expected[i].sum(), rtol=1e-6)
    mixed = evaluator(row, [SEQUENCES[:1], SEQUENCES[4:7], SEQUENCES[9:]])  # short batches anywhere
    np.testing.assert_allclose(mixed.total, expected[[0, 4, 5, 6, 9]].sum(), rtol=1e-6)
    assert mixed.targets == 60


def test_the_padding_of_the_tail_would_count_if_it_were_given(by_threes):
    """The tail of one row is filled up with two rows of zeros; given as rows of the split they change the mean."""
    evaluator, row = by_threes
    before = evaluator(row, [SEQUENCES[:3], SEQUENCES[3:4]])
    by_hand = np.concatenate([SEQUENCES[3:4], np.zeros((2, 13), np.uint16)])
    counted = evaluator(row, [SEQUENCES[:3], by_hand])
    assert counted.targets == before.targets + 24
    assert abs(counted.mean - before.mean) > 1e-3


def test_nothing_to_evaluate(by_threes):
    evaluator, row = by_threes
    with pytest.raises(ValueError, match="no sequences"):
        evaluator(row, [])


def test_evaluation_leaves_the_training_state_alone(by_threes):
    evaluator, row = by_threes
    mesh = step.make_mesh(1, 1)
    update = step.make_step(settings(3), FAST, mesh)

    def run(evaluating):
        state = step.init_state(row, 2, mesh)
        for seed in range(3):
            tokens = numpy_llama.tokens(ORACLE, 16, seed)
            state, _ = update(state, step.make_batch(tokens, 2, 1, 8), np.full(2, 0.01, np.float32))
            if evaluating:
                before = jax.tree.map(np.array, state)
                evaluator(validation.mean_row(state.params_NP), [SEQUENCES[:3]])
                for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
                    np.testing.assert_array_equal(a, b)
        return state

    for a, b in zip(jax.tree.leaves(run(True)), jax.tree.leaves(run(False)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_bits_per_byte():
    """4 bytes a token and 2 ln 2 nats a token are half a bit a byte."""
    one = validation.Loss(total=20 * math.log(2), targets=10)
    assert one.mean == pytest.approx(2 * math.log(2), rel=1e-15)
    assert one.bits_per_byte(4.0) == pytest.approx(0.5, rel=1e-15)
    assert one.bits_per_byte(None) is None


def test_batches():
    rows = np.arange(20).reshape(10, 2)
    found = list(validation.batches(lambda i: rows[i], np.array([1, 3, 4, 8, 9]), 2))
    assert [part[:, 0].tolist() for part in found] == [[2, 6], [8, 16], [18]]


# The subset.


GOLDEN_SMALL = [0, 7, 10, 13, 19]
GOLDEN_LARGE = ([48, 147, 378], 101_538_914)


def test_subset_is_fixed_by_its_seed():
    """Golden: validation losses of different runs are of the same sequences, for good."""
    assert validation.subset_indices(20, 5, 12345).tolist() == GOLDEN_SMALL
    large = validation.subset_indices(200_000, 1024, 12345)
    assert (large[:3].tolist(), int(large.sum())) == GOLDEN_LARGE
    assert len(set(large.tolist())) == 1024
    assert (np.diff(large) > 0).all()
    assert (large.min() >= 0) & (large.max() < 200_000)
    assert large.tolist() != validation.subset_indices(200_000, 1024, 12346).tolist()
    # Uniform: each tenth of the split has about 102 of them (5 standard deviations of a binomial: 48).
    assert (np.abs(np.bincount(large // 20_000, minlength=10) - 102.4) < 48).all()


def test_a_subset_larger_than_the_split_is_all_of_it():
    assert (
        validation.subset_indices(5, 5, 1).tolist() == validation.subset_indices(5, 1024, 1).tolist() == [0, 1, 2, 3, 4]
    )
    assert len(validation.subset_indices(6, 5, 1)) == 5


# The mean of the workers.


def test_mean_row():
    rows = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    found = np.asarray(validation.mean_row(jnp.asarray(rows)))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, rows.astype(np.float64).mean(axis=0), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(validation.mean_row(jnp.asarray(rows[:1])), rows[0])
    # float32 keeps what bfloat16 would lose.
    near = jnp.asarray([[1.0], [1.004]], jnp.float32)
    assert float(validation.mean_row(near)[0]) == pytest.approx(1.002, abs=1e-6)
    assert abs(float(jnp.mean(near.astype(jnp.bfloat16))) - 1.002) > 1e-3
    # The sum is divided once: equal workers are their mean exactly.
    same = jnp.tile(jnp.asarray(rows[0]), (4, 1))
    np.testing.assert_array_equal(validation.mean_row(same), rows[0])
