"""The loader: its order against an independent one, resume at every position, refusals, damage, threads."""

import gc
import hashlib
import json
import threading
import time

import numpy as np
import pytest
from token_cache import flip, write_cache

from llama_jax import config as configs
from llama_jax import data, shards
from llama_jax.errors import ConfigError, DataError

T = 8
SHARD = 32
# Tokens of the streams used here: unequal last group and partial last shard; exactly full shards (the last sequence
# lacks its lookahead); the lookahead alone in a shard of its own; a last shard without a sequence; less than a shard.
LENGTHS = [5 * SHARD + 13, 4 * SHARD, 4 * SHARD + 1, 4 * SHARD + T, 2 * T + 1]
GOLDEN = {
    (42, 0, 0, 12): [4, 8, 10, 1, 9, 3, 6, 0, 7, 2, 11, 5],
    (42, 1, 0, 12): [10, 1, 2, 8, 11, 5, 3, 9, 6, 0, 4, 7],
    (42, 0, 3, 12): [9, 5, 6, 8, 2, 0, 7, 3, 1, 11, 10, 4],
    (7, 0, 0, 5): [3, 4, 0, 2, 1],
}
LARGE = "54ed1d3df13d352307b8b4f49ad129926deed777afa6c8658b44fa534cf4f9f9"


def source_of(tmp_path, length, group_size=2, context=T):
    """A cache whose token i has id i, so that every row shows where it came from."""
    cache = write_cache(tmp_path / f"cache{length}", np.arange(length), np.arange(45), SHARD)
    return data.CacheSource(shards.read_manifest(cache), context, group_size)


def pcg64_raw(seed, count):
    """PCG64 (XSL-RR 128/64) in Python integers, from the state that NumPy derives from the seed sequence."""
    state = np.random.PCG64(np.random.SeedSequence(seed)).state["state"]
    value, increment, mask = state["state"], state["inc"], (1 << 128) - 1
    raw = []
    for _ in range(count):
        value = (value * 0x2360ED051FC65DA44385DF649FCCF645 + increment) & mask
        folded, turn = (value >> 64) ^ (value & ((1 << 64) - 1)), value >> 122
        raw.append(((folded >> turn) | (folded << (64 - turn))) & ((1 << 64) - 1))
    return raw


def expected_order(tokens, seed, passes, group_size, context=T):
    """Sequence numbers of the stream in order, worked out in plain Python."""
    sequences, per_group = (tokens - 1) // context, group_size * SHARD // context
    order = []
    for pass_index in range(passes):
        for group, first in enumerate(range(0, sequences, per_group)):
            n = min(per_group, sequences - first)
            raw = pcg64_raw([seed, pass_index, group], n)
            order += [first + i for i in sorted(range(n), key=lambda i: (raw[i], i))]
    return order


def rows_of(order, context=T):
    """The rows of sequences of the stream 0, 1, 2, ..."""
    return np.array([np.arange(i * context, (i + 1) * context + 1) for i in order])


def check_stream(source, tokens, seed=42, step=3, **options):
    """Two and a half passes equal the independent order, token by token."""
    order = expected_order(tokens, seed, 3, source.group_size, source.context)[: source.sequences * 5 // 2]
    loader = data.Loader(source, seed, **options)
    try:
        rows = [loader.next(min(step, len(order) - at)) for at in range(0, len(order), step)]
    finally:
        loader.close()
    np.testing.assert_array_equal(np.concatenate(rows), rows_of(order, source.context))


def test_permutation_golden():
    for key, expected in GOLDEN.items():
        assert data.permutation(*key).tolist() == expected
    large = data.permutation(42, 3, 5, 65_536)
    assert large.dtype == np.int64
    assert hashlib.sha256(large.astype("<i8").tobytes()).hexdigest() == LARGE


@pytest.mark.parametrize("key", [(0, 0, 0), (42, 0, 0), (42, 1, 0), (42, 0, 1), (2**63, 5, 1000)])
def test_permutation_against_python(key):
    for n in (1, 2, 100):
        raw = pcg64_raw(list(key), n)
        assert data.permutation(*key, n).tolist() == sorted(range(n), key=lambda i: (raw[i], i))


def test_permutation_depends_on_everything():
    base = data.permutation(42, 0, 0, 50).tolist()
    others = [data.permutation(*key, 50).tolist() for key in [(43, 0, 0), (42, 1, 0), (42, 0, 1)]]
    assert base != list(range(50))
    assert base not in others
    assert len({tuple(other) for other in others}) == 3


@pytest.mark.parametrize("group_size", [1, 2, 3, 7])
@pytest.mark.parametrize("length", LENGTHS)
def test_stream_is_the_independent_one(tmp_path, length, group_size):
    check_stream(source_of(tmp_path, length, group_size), length)


def test_context_as_long_as_a_shard(tmp_path):
    check_stream(source_of(tmp_path, 5 * SHARD + 13, 2, SHARD), 5 * SHARD + 13)


@pytest.mark.parametrize("length", LENGTHS)
def test_each_sequence_once_a_pass_inside_its_group(tmp_path, length):
    source = source_of(tmp_path, length)
    assert source.sequences == (length - 1) // T == sum(n for _, n in source.groups)
    loader = data.Loader(source, 1)
    for _ in range(3):
        numbers = loader.next(source.sequences)[:, 0] // T
        assert sorted(numbers.tolist()) == list(range(source.sequences))
        for group, (first, n) in enumerate(source.groups):
            assert set(numbers[first : first + n].tolist()) == set(range(first, first + n))
            assert first == group * 2 * SHARD // T
    loader.close()


DEFECTS = {
    "identity": ("permutation", lambda seed, pass_index, group, n: np.arange(n)),
    "same in every pass": (
        "permutation",
        lambda seed, pass_index, group, n: ORIGINAL["permutation"](seed, 0, group, n),
    ),
    "same in every group": (
        "permutation",
        lambda seed, pass_index, group, n: ORIGINAL["permutation"](seed, pass_index, 0, n),
    ),
    "no lookahead": (
        "_rows",
        lambda tokens, context: np.pad(ORIGINAL["_rows"](tokens, context)[:, :-1], ((0, 0), (0, 1)), "edge"),
    ),
    "rows of T+1 apart": ("_rows", lambda tokens, context: ORIGINAL["_rows"](np.roll(tokens, -1), context)),
}
ORIGINAL = {"permutation": data.permutation, "_rows": data._rows}


@pytest.mark.parametrize("name", DEFECTS)
def test_seeded_defects_are_seen(tmp_path, monkeypatch, name):
    monkeypatch.setattr(data, *DEFECTS[name])
    with pytest.raises(AssertionError):
        check_stream(source_of(tmp_path, LENGTHS[0]), LENGTHS[0])


@pytest.mark.parametrize("step", [1, 2, 8, 21, 60])
@pytest.mark.parametrize(("prefetch", "threads"), [(0, 1), (0, 8), (1, 1), (1, 8)])
def test_stream_depends_on_nothing_else(tmp_path, step, prefetch, threads):
    check_stream(source_of(tmp_path, LENGTHS[0]), LENGTHS[0], 42, step, prefetch_groups=prefetch, threads=threads)


def test_stream_of_a_prefix_cache_is_the_prefix(tmp_path):
    """Two whole groups and their lookahead token give the same sequences as a larger cache does."""
    small, large = source_of(tmp_path, 4 * SHARD + 1), source_of(tmp_path, 5 * SHARD + 13)
    rows = []
    for source in (small, large):
        loader = data.Loader(source, 42)
        rows.append(loader.next(4 * SHARD // T))
        loader.close()
    np.testing.assert_array_equal(*rows)


def test_workers_take_every_nth_row(tmp_path):
    source = source_of(tmp_path, LENGTHS[0])
    order = expected_order(LENGTHS[0], 42, 2, 2)
    loader = data.Loader(source, 42)
    taken = [[], [], []]
    for n in (6, 9, 3, 12):
        batch = loader.next(n)
        for worker in range(3):
            taken[worker] += (batch[worker::3, 0] // T).tolist()
    loader.close()
    assert taken == [order[worker:30:3] for worker in range(3)]


def test_resume_at_every_position_three_times(tmp_path):
    source = source_of(tmp_path, LENGTHS[0])
    order = expected_order(LENGTHS[0], 42, 4, 2)
    end = 2 * source.sequences + 3
    for k in range(end + 1):
        position, state = 0, None
        legs = [(k, 5, k % 2), (2, 1, 1 - k % 2), (7, 4, k // 2 % 2), (source.sequences + 1, 9, 1)]
        for leg, (count, step, prefetch) in enumerate(legs):
            if state is None:
                loader = data.Loader(source, 42, prefetch_groups=prefetch)
            else:
                loader = data.Loader.from_state(source, 42, json.loads(state), prefetch, threads=leg)
            stop = position + count
            while position < stop:
                n = min(step, stop - position)
                np.testing.assert_array_equal(
                    loader.next(n), rows_of(order[position : position + n]), f"k={k} leg={leg}"
                )
                position += n
            assert loader.position == position
            state = json.dumps(loader.state())
            loader.close()


class Watched(data.CacheSource):
    """Remembers which groups were loaded, in order."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.loads = []

    def load_group(self, group, threads=1):
        self.loads.append(group)
        return super().load_group(group, threads)


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited 30 s in vain"
        time.sleep(0.001)


def test_one_group_ahead_and_the_cursor_counts_what_was_consumed(tmp_path):
    cache = write_cache(tmp_path, np.arange(LENGTHS[0]), shard_tokens=SHARD)
    source = Watched(shards.read_manifest(cache), T, 2)
    loader = data.Loader(source, 42, prefetch_groups=1)
    loader.next(3)
    wait_for(lambda: len(source.loads) == 2)
    assert (source.loads, loader.position) == ([0, 1], 3)
    resumed = data.Loader.from_state(source, 42, loader.state(), 0)
    np.testing.assert_array_equal(resumed.next(3), rows_of(expected_order(LENGTHS[0], 42, 1, 2)[3:6]))
    resumed.close()
    source.loads.clear()
    for position in range(3, 50):
        group = data.locate(source.groups, position)
        loader.next(1)
        ahead = (group[0] * 3 + group[1]) + 1  # groups of the whole stream up to the one after this
        assert 2 + len(source.loads) <= ahead + 1
    loader.close()
    assert source.loads[:5] == [2, 0, 1, 2, 0]

    source.loads.clear()
    loader = data.Loader(source, 42, position=8, prefetch_groups=0)
    assert source.loads == []
    loader.next(1)
    loader.next(7)
    assert source.loads == [1]
    loader.close()


def test_resume_loads_only_its_own_group(tmp_path):
    cache = write_cache(tmp_path, np.arange(LENGTHS[0]), shard_tokens=SHARD)
    source = Watched(shards.read_manifest(cache), T, 2)
    position = 10**9 * source.sequences + 17
    loader = data.Loader(source, 42, position, prefetch_groups=0)
    expected = 16 + data.permutation(42, 10**9, 2, 5)[1:4]
    np.testing.assert_array_equal(loader.next(3), rows_of(expected))
    assert source.loads == [2]
    assert loader.passes == 10**9 + 1
    loader.close()


def test_passes_and_locate(tmp_path):
    source = source_of(tmp_path, LENGTHS[0])
    assert (source.sequences, source.groups) == (21, [(0, 8), (8, 8), (16, 5)])
    loader = data.Loader(source, 42)
    passes, numbers = [], []
    for _ in range(50):
        numbers.append(int(loader.next(1)[0, 0]) // T)
        passes.append(loader.passes)
    assert passes == [1] * 21 + [2] * 21 + [3] * 8
    for position, number in enumerate(numbers):
        assert loader.locate(position) == (position // 21, position % 21 // 8, number)
    loader.close()
    loader = data.Loader(source, 42, 21)
    assert loader.passes == 1
    loader.close()


def test_rows_are_contiguous_and_never_written_again(tmp_path):
    for dtype, vocab in (("<u2", 65_536), ("<u4", 70_000)):
        cache = write_cache(tmp_path / dtype[1:], np.arange(LENGTHS[0]), (1, 2, 3), SHARD, vocab, dtype)
        loader = data.Loader(data.CacheSource(shards.read_manifest(cache), T, 2), 42)
        batches = [loader.next(n) for n in (5, 5, 20, 5, 1)]
        copies = [batch.copy() for batch in batches]
        loader.next(100)
        loader.close()
        for i, batch in enumerate(batches):
            assert batch.flags.c_contiguous
            assert batch.flags.aligned
            assert batch.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(batch, copies[i])
            assert not any(np.shares_memory(batch, other) for other in batches[:i])


CHANGES = {
    "seed": ("seed was 42, is 43", lambda path: (source_of(path, LENGTHS[0]), 43)),
    "group_size": ("group_size was 2, is 3", lambda path: (source_of(path, LENGTHS[0], 3), 42)),
    "context": ("context was 8, is 16", lambda path: (source_of(path, LENGTHS[0], 2, 16), 42)),
    "data": ("data was '", lambda path: (source_of(path, LENGTHS[1]), 42)),
}


@pytest.mark.parametrize("field", CHANGES)
def test_other_data_is_refused(tmp_path, field):
    loader = data.Loader(source_of(tmp_path, LENGTHS[0]), 42)
    loader.next(5)
    loader.close()
    message, make = CHANGES[field]
    source, seed = make(tmp_path)
    with pytest.raises(DataError) as error:
        data.Loader.from_state(source, seed, loader.state())
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert [name for name in loader.state() if f"{name} was" in str(error.value)] == [field]


def test_other_states_are_refused(tmp_path, monkeypatch):
    source = source_of(tmp_path, LENGTHS[0])
    loader = data.Loader(source, 42, 5)
    loader.close()
    good = loader.state()
    assert good == {
        "loader_version": 2,
        "seed": 42,
        "group_size": 2,
        "context": T,
        "data": source.manifest.sha256,
        "position": 5,
    }
    for key in good:
        with pytest.raises(DataError, match="position" if key == "position" else f"{key} was None"):
            data.Loader.from_state(source, 42, {name: value for name, value in good.items() if name != key})
    for position in (-1, 5.0, "5", True, None):
        with pytest.raises(DataError, match="position"):
            data.Loader.from_state(source, 42, good | {"position": position})
    with pytest.raises(DataError, match="seed was 1, is 42; context was 9, is 8"):
        data.Loader.from_state(source, 42, good | {"seed": 1, "context": 9})
    monkeypatch.setattr(data, "LOADER_VERSION", 3)
    with pytest.raises(DataError, match="loader_version was 2, is 3"):
        data.Loader.from_state(source, 42, good)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize(("shard", "good_rows"), [(0, 0), (1, 0), (2, 8), (3, 8), (5, 16)])
def test_damaged_shard_stops_before_its_group(tmp_path, prefetch, shard, good_rows):
    source = source_of(tmp_path, LENGTHS[0])
    path = source.manifest.directory / f"train-{shard:05d}.bin"
    flip(path, 9)
    expected = rows_of(expected_order(LENGTHS[0], 42, 1, 2))
    loader = data.Loader(source, 42, prefetch_groups=prefetch)
    if good_rows:
        np.testing.assert_array_equal(loader.next(good_rows - 1), expected[: good_rows - 1])
        good_rows -= 1
    for n in (3, 3, 2):  # a request that crosses into the damaged group delivers nothing, and it stays so
        with pytest.raises(DataError) as error:
            loader.next(n)
        assert str(path) in str(error.value)
        assert "sha256" in str(error.value)
        assert "\n" not in str(error.value)
        assert loader.position == good_rows
    flip(path, 9)
    np.testing.assert_array_equal(loader.next(21 - good_rows), expected[good_rows:])
    loader.close()


def test_reordered_shards_are_found(tmp_path):
    source = source_of(tmp_path, LENGTHS[0])
    first, second = (source.manifest.directory / f"train-{i:05d}.bin" for i in (0, 1))
    first.write_bytes(second.read_bytes())
    with pytest.raises(DataError, match=r"train-00000\.bin"):
        data.Loader(source, 42).next(1)


def test_id_outside_the_vocabulary_is_found(tmp_path):
    for position, file in [(SHARD + 3, "train-00001"), (2 * SHARD, "train-00002")]:  # also as a mere lookahead token
        tokens = np.zeros(LENGTHS[0], np.int64)
        tokens[position] = 50
        cache = write_cache(tmp_path / file, tokens, (1, 2, 3), SHARD, 50)
        loader = data.Loader(data.CacheSource(shards.read_manifest(cache), T, 2), 42)
        with pytest.raises(DataError, match=rf"{file}\.bin: id 50 outside the vocabulary of 50"):
            loader.next(1)
        loader.close()


def test_validation_rows(tmp_path):
    tokens = np.random.default_rng(3).integers(0, 1000, 3 * SHARD + 11)
    cache = write_cache(tmp_path, np.arange(50), tokens, SHARD)
    source = data.CacheSource(shards.read_manifest(cache), T, 2)
    assert source.validation_sequences == (3 * SHARD + 10) // T == 13
    assert source.bytes_per_token == 4.0
    expected = np.array([tokens[i * T : i * T + T + 1] for i in range(13)])
    for indices in ([], [0], [12], list(range(13)), [3, 4, 5, 9, 0, 1, 12, 12, 7], list(range(12, -1, -1))):
        rows = source.validation_rows(np.array(indices, np.int64))
        assert rows.shape == (len(indices), T + 1)
        assert rows.dtype == np.uint16
        np.testing.assert_array_equal(rows, expected[indices])
    for indices in ([-1], [13], [0, 13]):
        with pytest.raises(DataError):
            source.validation_rows(indices)


def test_damaged_validation_shard_is_found(tmp_path):
    cache = write_cache(tmp_path, np.arange(50), np.arange(3 * SHARD + 11), SHARD)
    source = data.CacheSource(shards.read_manifest(cache), T, 2)
    flip(cache / "validation-00001.bin")
    source.validation_rows([0, 1, 2])
    flip(cache / "validation-00000.bin")
    source.validation_rows([0, 1, 2])  # each shard is hashed once, not at every evaluation
    for indices in ([4], [0, 7], [4]):
        with pytest.raises(DataError, match=r"validation-00001\.bin: sha256"):
            source.validation_rows(indices)


def small_config(path, **fields):
    config = configs.default()
    for name, value in {"data.path": str(path), "model.context": T, "model.vocab_size": 65_536, **fields}.items():
        configs.set_field(config, name, value)
    return config


def test_open_source(tmp_path):
    cache = write_cache(tmp_path, np.arange(LENGTHS[0]), np.arange(45), SHARD)
    source = data.open_source(small_config(cache, **{"data.shuffle_group_size": 3}))
    assert (source.context, source.group_size, source.sequences, source.validation_sequences) == (T, 3, 21, 5)
    assert (source.vocab_size, source.dtype, source.entropy) == (65_536, np.uint16, None)
    assert source.fingerprint == shards.read_manifest(cache).sha256
    data.open_source(small_config(cache, **{"model.vocab_size": 65_600}))


def test_open_source_refuses(tmp_path):
    whole = write_cache(tmp_path / "whole", np.arange(LENGTHS[0]), np.arange(45), SHARD)
    no_train = write_cache(tmp_path / "a", np.arange(T), np.arange(45), SHARD)
    empty = write_cache(tmp_path / "b", [], np.arange(45), SHARD)
    no_validation = write_cache(tmp_path / "c", np.arange(45), np.arange(T), SHARD)
    no_validation_shards = write_cache(tmp_path / "d", np.arange(45), [], SHARD)
    truncated = write_cache(tmp_path / "e", np.arange(LENGTHS[0]), np.arange(45), SHARD)
    shard = truncated / "train-00002.bin"
    shard.write_bytes(shard.read_bytes()[:-4])
    cases = [
        (DataError, small_config(tmp_path / "nowhere"), "manifest.json: missing"),
        (DataError, small_config(truncated), r"train-00002\.bin: 60 bytes instead of 64"),
        (DataError, small_config(whole, **{"model.vocab_size": 65_535}), r"65536 ids.*model\.vocab_size is 65535"),
        (DataError, small_config(whole, **{"model.context": 12}), r"32 tokens.*model\.context = 12"),
        (DataError, small_config(whole, **{"model.context": 64}), r"32 tokens.*model\.context = 64"),
        (DataError, small_config(no_train), r"train has 8 tokens.* = 9"),
        (DataError, small_config(empty), "train has 0 tokens"),
        (DataError, small_config(no_validation), "validation has 8 tokens"),
        (DataError, small_config(no_validation_shards), "validation has 0 tokens"),
        (ConfigError, small_config(""), "data.path is empty"),
    ]
    for kind, config, message in cases:
        with pytest.raises(kind, match=message) as error:
            data.open_source(config)
        assert "\n" not in str(error.value)


def test_loader_refuses_senseless_arguments(tmp_path):
    source = source_of(tmp_path, LENGTHS[0])
    for options, kind in [
        ({"prefetch_groups": 2}, ConfigError),
        ({"threads": 0}, ConfigError),
        ({"position": -1}, DataError),
    ]:
        with pytest.raises(kind):
            data.Loader(source, 42, **options)
    loader = data.Loader(source, 42)
    for n in (0, -1):
        with pytest.raises(ValueError, match="at least one"):
            loader.next(n)
    loader.close()
    with pytest.raises(DataError, match="0 sequences"):
        data.Loader(source_of(tmp_path, T), 42)


def test_close_leaves_no_thread(tmp_path):
    before = set(threading.enumerate())
    source = source_of(tmp_path, LENGTHS[0])
    loaders = [data.Loader(source, 42, prefetch_groups=prefetch) for prefetch in (0, 1, 1, 1)]
    for loader in loaders[:3]:
        loader.next(9)
    assert set(threading.enumerate()) - before
    for loader in loaders:
        loader.close()
        loader.close()
    wait_for(lambda: set(threading.enumerate()) <= before)
    with pytest.raises(ValueError, match="closed"):
        loaders[1].next(1)


def test_a_dropped_loader_is_collected_without_waiting(tmp_path):
    """The garbage collector may run anywhere, also where the end of a thread can't come."""
    started, go_on, collected = threading.Event(), threading.Event(), threading.Event()

    class Held(data.CacheSource):
        def load_group(self, group, threads=1):
            if group:
                started.set()
                go_on.wait(60)
            return super().load_group(group, threads)

    cache = write_cache(tmp_path, np.arange(LENGTHS[0]), shard_tokens=SHARD)

    def drop():
        loader = data.Loader(Held(shards.read_manifest(cache), T, 2), 42)
        loader.next(1)
        assert started.wait(30)  # the next group is on its way
        del loader
        gc.collect()
        collected.set()

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    try:
        assert collected.wait(30)
    finally:
        go_on.set()
        thread.join()


def test_close_waits_for_the_load_in_progress(tmp_path):
    started, ended = threading.Event(), threading.Event()

    class Slow(data.CacheSource):
        def load_group(self, group, threads=1):
            started.set()
            tokens = super().load_group(group, threads)
            time.sleep(0.3)
            ended.set()
            return tokens

    cache = write_cache(tmp_path, np.arange(LENGTHS[0]), shard_tokens=SHARD)
    loader = data.Loader(Slow(shards.read_manifest(cache), T, 2), 42)
    assert started.wait(30)
    loader.close()
    assert ended.is_set()


def test_grain_counts_sequences_too(tmp_path):
    """The Grain iterator underneath keeps Grain's own contract: one element at a time, state restored exactly."""
    cursor = data.Loader(source_of(tmp_path, LENGTHS[0]), 42)._cursor
    rows = [next(cursor) for _ in range(30)]
    np.testing.assert_array_equal(rows, rows_of(expected_order(LENGTHS[0], 42, 2, 2)[:30]))
    assert cursor.get_state() == {"sequence": 30}
    cursor.set_state({"sequence": 4})
    np.testing.assert_array_equal([next(cursor) for _ in range(20)], rows[4:24])
    cursor.close()
