"""The synthetic language: its entropy counted from its own text, its chains against a loop in plain Python."""

import collections
import hashlib
import math

import numpy as np
import pytest

from llama_jax import config as configs
from llama_jax import data
from llama_jax.errors import ConfigError
from llama_jax.synthetic import SyntheticSource, successor_counts

GROUP_0 = [28, 15, 14, 1, 8, 63, 12, 3, 19, 56, 19, 56, 35, 16, 39, 49, 14, 1, 8, 19]
GROUP_5 = [57, 53, 0, 61, 35, 16, 33, 32, 36, 59, 24, 11, 33, 32, 36, 26, 8, 19, 60, 51]
VALIDATION_1 = [50, 6, 9, 47, 43, 48, 56, 35, 30, 26, 27, 46, 31, 24, 48, 56, 25]
LARGE = "10955c591ced6745b38bc764cebf68f21937d77d87ff849aad4d13e70e2d78df"
SMALL = {"context": 64, "seed": 42, "group_sequences": 4096}


def conditional_entropy(tokens, order=1):
    """Entropy in nats of a token given the `order` tokens before it, from counts."""
    width = tokens.size - order
    context = sum(tokens[i : i + width].astype(np.int64) * 4096**i for i in range(order))
    pairs = np.unique(context * 4096 + tokens[order:], return_counts=True)[1]
    contexts = np.unique(context, return_counts=True)[1]
    return (np.sum(contexts * np.log(contexts)) - np.sum(pairs * np.log(pairs))) / width


def python_chain(vocab_size, seed, branching, stream, index, steps):
    """The language of the docstring, one token after the other: nothing but raw bits of PCG64 and a dictionary."""

    def bits(kind, number):
        return np.random.PCG64(np.random.SeedSequence([seed, 0x53594E54, kind, number]))

    language = bits(0, 0)
    keys = [int(language.random_raw()) for _ in range(vocab_size)]
    ids = sorted(range(vocab_size), key=lambda i: (keys[i], i))
    keys = [int(language.random_raw()) for _ in range(vocab_size - 2)]
    offsets = ([1] + [2 + i for i in sorted(range(vocab_size - 2), key=lambda i: (keys[i], i))] + [0])[:branching]
    limits = np.cumsum(successor_counts(branching)).tolist()
    text = bits(stream, index)
    state = int(text.random_raw()) % vocab_size
    tokens, words = [ids[state]], 0
    for step in range(steps):
        if step % 4 == 0:
            words = int(text.random_raw())
        draw = words >> 16 * (step % 4) & 0xFFFF
        state = (state + offsets[next(i for i, limit in enumerate(limits) if draw < limit)]) % vocab_size
        tokens.append(ids[state])
    return tokens


def test_entropy_in_closed_form():
    ln2 = math.log(2)
    for k, bits in [(1, 0), (2, 1), (3, 1.5), (4, 1.75), (5, 1.875), (6, 1.9375)]:
        assert SyntheticSource(64, 8, 0, k).entropy == pytest.approx(bits * ln2)
    assert successor_counts(4) == [32_768, 16_384, 8192, 8192]
    for k in (1, 2, 5, 7, 100, 1024, 4096):
        counts = successor_counts(k)
        assert len(counts) == k
        assert sum(counts) == 65_536
        assert min(counts) >= 1
        assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("branching", [1, 2, 4, 8])
@pytest.mark.parametrize("vocab_size", [8, 64])
def test_counted_entropy_is_the_closed_form(vocab_size, branching):
    source = SyntheticSource(vocab_size, branching=branching, **SMALL)
    tokens = source.load_group(0)
    assert abs(conditional_entropy(tokens) - source.entropy) < 0.005
    if vocab_size == 8:  # more history tells nothing more
        assert abs(conditional_entropy(tokens, 2) - source.entropy) < 0.005
    share = np.bincount(tokens, minlength=vocab_size) / tokens.size
    assert share.min() > 0.9 / vocab_size  # uniform, so that counting tokens alone stays at ln V
    assert share.max() < 1.1 / vocab_size


def test_successors_of_every_token():
    source = SyntheticSource(64, **SMALL)
    tokens = source.load_group(0)
    pairs = np.zeros((64, 64), np.int64)
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    for row in pairs:
        share = np.sort(row)[::-1] / row.sum()
        np.testing.assert_allclose(share[:4], [0.5, 0.25, 0.125, 0.125], atol=0.035)
        assert not share[4:].any()
    assert not np.array_equal(np.sort(pairs.argmax(1)), pairs.argmax(1))  # relabelled, not simply counting up
    validation = source.validation_rows(np.arange(1024))
    assert pairs[validation[:, :-1], validation[:, 1:]].all()  # the same language


@pytest.mark.parametrize(("vocab_size", "branching"), [(64, 4), (5, 5), (2, 2), (1, 1), (300, 37)])
def test_against_plain_python(vocab_size, branching):
    source = SyntheticSource(vocab_size, 7, 3, branching, group_sequences=9, validation_sequences=5)
    for group in (0, 1, 77):
        assert source.load_group(group).tolist() == python_chain(vocab_size, 3, branching, 1, group, 63)
    flat = python_chain(vocab_size, 3, branching, 2, 0, 35)
    rows = source.validation_rows([4, 0])
    assert rows.tolist() == [flat[28:36], flat[:8]]


def test_golden():
    source = SyntheticSource(64, 16, 42, group_sequences=8, validation_sequences=4)
    assert source.load_group(0)[:20].tolist() == GROUP_0
    assert source.load_group(5)[:20].tolist() == GROUP_5
    assert source.validation_rows([1]).tolist() == [VALIDATION_1]
    large = SyntheticSource(32_000, 64, 42).load_group(2)
    assert hashlib.sha256(large.astype("<u2").tobytes()).hexdigest() == LARGE


def test_groups_are_random_access_and_apart():
    source = SyntheticSource(64, **SMALL)
    source.validation_rows([0])
    in_order = [source.load_group(group) for group in range(3)]
    for group in (2, 0, 1, 2):
        np.testing.assert_array_equal(SyntheticSource(64, **SMALL).load_group(group), in_order[group])
    validation = SyntheticSource(64, validation_sequences=4096, **SMALL).validation_rows(np.arange(4096))
    streams = [*in_order, np.append(validation[:, :-1].ravel(), validation[-1, -1])]
    for i, one in enumerate(streams):
        for other in streams[:i]:
            assert np.mean(one == other) < 0.03  # 1/64 by chance


def test_seeds_and_settings_tell_apart():
    base = SyntheticSource(64, **SMALL)
    assert base.fingerprint == SyntheticSource(64, **SMALL).fingerprint
    others = [
        SyntheticSource(64, **SMALL | {"seed": 43}),
        SyntheticSource(65, **SMALL),
        SyntheticSource(64, branching=3, **SMALL),
        SyntheticSource(64, validation_sequences=7, **SMALL),
    ]
    assert len({source.fingerprint for source in [base, *others]}) == 5
    for other in others[:3]:
        assert not np.array_equal(base.load_group(0), other.load_group(0))


def test_dtype_follows_the_vocabulary():
    for vocab_size, dtype in [(65_536, np.uint16), (65_537, np.uint32)]:
        source = SyntheticSource(vocab_size, 64, 1, group_sequences=2048)
        tokens = source.load_group(0)
        assert tokens.dtype == source.dtype == source.validation_rows([0]).dtype == dtype
        assert tokens.size == 2048 * 64 + 1
        assert tokens.max() < vocab_size
        assert tokens.max() > vocab_size * 0.98


def test_branching_out_of_range():
    for vocab_size, branching in [(3, 4), (64, 0), (100_000, 4097)]:
        with pytest.raises(ConfigError, match=r"data\.synthetic_branching"):
            SyntheticSource(vocab_size, 8, 1, branching)


def test_loader_reads_the_language():
    config = configs.default()
    fields = {
        "data.source": "synthetic",
        "data.synthetic_group_sequences": 16,
        "data.synthetic_validation_sequences": 6,
    }
    for name, value in {**fields, "model.vocab_size": 50, "model.context": 8, "seed": 5}.items():
        configs.set_field(config, name, value)
    source = data.open_source(config)
    assert isinstance(source, SyntheticSource)
    assert (source.vocab_size, source.context, source.group_size, source.validation_sequences) == (50, 8, 16, 6)
    assert source.entropy == pytest.approx(1.75 * math.log(2))
    assert source.bytes_per_token is None
    loader = data.Loader(source, 5)
    rows = loader.next(40)
    state = loader.state()
    rest = loader.next(30)
    loader.close()
    expected = []
    for group in range(3):
        flat = python_chain(50, 5, 4, 1, group, 128)
        expected += [flat[j * 8 : j * 8 + 9] for j in data.permutation(5, 0, group, 16)]
    assert rows.tolist() == expected[:40]
    resumed = data.Loader.from_state(source, 5, state, 0)
    np.testing.assert_array_equal(resumed.next(30), rest)
    resumed.close()
    few = SyntheticSource(50, 8, 5, group_sequences=4, groups=2)
    loader = data.Loader(few, 5)
    once, twice = loader.next(8), loader.next(8)
    assert loader.passes == 2
    loader.close()
    assert collections.Counter(map(bytes, once)) == collections.Counter(map(bytes, twice))
    assert once.tolist() != twice.tolist()
