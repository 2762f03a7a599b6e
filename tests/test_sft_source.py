"""The rows source: the file's order whatever is asked for, the hash by hand, and everything that is refused."""

import hashlib
import json
import struct

import numpy as np
import pytest

from llama_jax import config, data, rows
from llama_jax.errors import ConfigError, DataError

LENGTH, VOCAB, COUNT = 8, 50, 300  # rows of 128, 128 and 44


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(0, VOCAB, (COUNT, LENGTH)).astype(np.int32)


@pytest.fixture
def folder(tmp_path, ids):
    write(tmp_path / "rows.parquet", ids)
    return tmp_path


def write(path, ids):
    rows.write(path, [ids[i : i + 100] for i in range(0, len(ids), 100)], ids.shape[1])


def fields(path, **changes):
    chosen = config.default()
    settings = {
        "model.vocab_size": VOCAB,
        "model.context": LENGTH,
        "training.targets_per_parameter": None,
        "training.total_updates": 2,
        "training.batch_targets": 4 * (LENGTH - 1),
        "training.microbatch": 2,
        "lr_schedule.warmup_steps": 0,
        "data.source": "rows",
        "data.path": str(path),
    }
    for field, value in {**settings, **{name.replace("__", "."): value for name, value in changes.items()}}.items():
        config.set_field(chosen, field, value)
    return config.finalize(chosen)


def by_hand(ids):
    return hashlib.sha256(b"llama_jax.rows.v1\0" + struct.pack("<QQ", *ids.shape) + ids.astype("<i4").tobytes())


def taken(loader, *sizes):
    with_rows = [loader.next(size) for size in sizes]
    loader.close()
    return np.concatenate(with_rows)


def test_rows_come_in_the_order_of_the_file(folder, ids):
    source = data.open_source(fields(folder))
    assert (source.sequences, source.validation_sequences, source.targets) == (COUNT, 0, LENGTH - 1)
    assert source.fingerprint == by_hand(ids).hexdigest()
    for seed, prefetch in ((42, 1), (7, 0)):  # neither plays a part
        np.testing.assert_array_equal(taken(data.Loader(source, seed, 0, prefetch), 5, 130, 1, 164), ids)
    assert source.validation_rows([]).shape == (0, LENGTH)


def test_a_loader_continues_where_another_stopped(folder, ids):
    source = data.open_source(fields(folder / "rows.parquet"))  # the file itself is named
    first = data.Loader(source, 42)
    np.testing.assert_array_equal(taken(first, 127, 3), ids[:130])
    state = json.loads(json.dumps(first.state()))
    assert (state["position"], state["data"]) == (130, source.fingerprint)
    second = data.Loader.from_state(data.open_source(fields(folder)), 42, state)
    assert second.locate(200) == (0, 1, 200)
    np.testing.assert_array_equal(taken(second, 170), ids[130:])
    with pytest.raises(DataError, match="another stream"):
        data.Loader.from_state(source, 42, {**state, "data": "0" * 64})


def test_the_last_rows_are_held_out(folder, ids):
    source = data.open_source(fields(folder, data__validation_rows=20))
    assert (source.sequences, source.validation_sequences, source.groups[-1]) == (280, 20, (256, 24))
    np.testing.assert_array_equal(source.validation_rows([0, 19, 3]), ids[[280, 299, 283]])
    np.testing.assert_array_equal(taken(data.Loader(source, 42), 280), ids[:280])
    assert source.fingerprint == by_hand(ids).hexdigest()  # of the whole file
    for wrong in (-1, 20):
        with pytest.raises(DataError, match="held out"):
            source.validation_rows([wrong])


def test_a_record_beside_the_file_must_agree(folder, ids):
    record, digest = folder / "rows.json", by_hand(ids).hexdigest()
    record.write_text(json.dumps({"rows": COUNT, "rows_sha256": digest}))
    data.open_source(fields(folder))
    changed = ids.copy()
    changed[299, 7] = (changed[299, 7] + 1) % VOCAB  # one token
    write(folder / "rows.parquet", changed)
    with pytest.raises(DataError, match=f"{by_hand(changed).hexdigest()}, rows.json says 300 with {digest}"):
        data.open_source(fields(folder))
    write(folder / "rows.parquet", ids)
    for text in ("{", "[]", '{"rows": 300}'):
        record.write_text(text)
        with pytest.raises(DataError, match=r"rows\.json: damaged"):
            data.open_source(fields(folder))


def test_another_tokenizer_is_warned_about(folder, ids, tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "tokenizer.json").write_bytes(b"theirs")
    record = {"rows": COUNT, "rows_sha256": by_hand(ids).hexdigest()}
    for made_with, warned in ((b"theirs", False), (b"other", True), (None, False)):
        said = {"tokenizer": {"sha256": hashlib.sha256(made_with).hexdigest()}} if made_with else {}
        (folder / "rows.json").write_text(json.dumps(record | said))
        data.open_source(fields(folder, model__init_from=str(model)))
        assert ("another tokenizer" in capsys.readouterr().err) == warned
        data.open_source(fields(folder))
        assert capsys.readouterr().err == ""


def test_what_is_refused(folder, ids, tmp_path):
    for changes, message in (
        ({"model__context": 16, "training__batch_targets": 60}, "rows of 8 tokens, model.context is 16"),
        ({"model__vocab_size": int(ids.max())}, f"holds id {ids.max()}, model.vocab_size is {ids.max()}"),
        ({"data__validation_rows": COUNT}, "none beside data.validation_rows = 300"),
        ({"data__path": str(tmp_path / "gone")}, "no such file"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            data.open_source(fields(folder, **changes))
        assert "\n" not in str(caught.value)
    data.open_source(fields(folder, model__vocab_size=int(ids.max()) + 1))
    with pytest.raises(ConfigError, match=r"data\.path is empty"):
        data.open_source(fields(""))
    (folder / "rows.parquet").write_bytes(b"PAR1" * 10)
    with pytest.raises(DataError, match="parquet"):
        data.open_source(fields(folder))


def test_the_row_of_the_vocabulary_error_is_the_first(folder, ids):
    changed = ids.copy()
    changed[[201, 299], 3] = VOCAB + 5
    write(folder / "rows.parquet", changed)
    with pytest.raises(DataError, match=f"row 201 holds id {VOCAB + 5}"):
        data.open_source(fields(folder))


def test_targets_of_a_row_are_one_less_than_its_tokens(folder):
    derived = fields(folder).derived
    assert (derived.sequence_targets, derived.batch_sequences, derived.total_targets) == (7, 4, 2 * 4 * 7)
    with pytest.raises(ConfigError, match=r"batch_targets = 32 must be a multiple of \(context - 1\) x workers = 7"):
        fields(folder, training__batch_targets=32)


@pytest.mark.parametrize("preset", ["sft_8k", "sft_360m"])
def test_presets_are_the_protocol(preset):
    """20 updates of 128 whole rows of 8,192, and the optimizer and schedule of the reference recipe."""
    chosen = config.load(f"configs/{preset}.py")
    assert list(config.make_plan(chosen).sizes()) == [128] * 20
    assert (chosen.model.context, chosen.derived.batch_sequences, chosen.derived.sequence_targets) == (8192, 128, 8191)
    optimizer, schedule = chosen.optimizer, chosen.lr_schedule
    assert (optimizer.lr, optimizer.weight_decay, optimizer.beta1, optimizer.beta2) == (1e-5, 0.1, 0.9, 0.95)
    assert (schedule.name, schedule.warmup_fraction, schedule.min_lr_ratio) == ("cosine", 0.1, 0.1)
    assert (optimizer.clip_norm, chosen.data.source, chosen.data.validation_rows) == (1.0, "rows", 0)
    shape = chosen.model
    known = {"sft_8k": (16, 2048, 32, 8, 8192, 128256), "sft_360m": (32, 960, 15, 5, 2560, 49152)}
    assert (shape.layers, shape.width, shape.heads, shape.kv_heads, shape.ffn, shape.vocab_size) == known[preset]
