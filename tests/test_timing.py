"""Timed updates are those of training, the ids are those asked for, and the roofline is what a hand computes."""

import types

import jax
import numpy as np
import pytest
from harness import KEPT, tiny, write_cache

from bench import roofline, timing
from llama_jax import config as configs
from llama_jax import flops, outer
from llama_jax.errors import DataError, NonFiniteError


@pytest.fixture(autouse=True)
def kept_programs(monkeypatch):
    monkeypatch.setattr(timing, "build", KEPT)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "decentralized.workers": 2,
            "training.sequence_multiple": 2,
            "training.microbatch": 8,
            "log.consensus_every": 4,
        },
        {
            "decentralized.workers": 2,
            "decentralized.topology": "disconnected",
            "decentralized.sync_every": 3,
            "training.sequence_multiple": 2,
            "training.microbatch": 4,
        },
    ],
    ids=["one", "packed", "outer steps, accumulation"],
)
def test_a_measurement_is_so_many_updates_of_training(changes, monkeypatch):
    config = tiny(changes)
    rows = timing.rows(config, batches=3)
    steppers = []
    monkeypatch.setattr(timing, "start", lambda *given: steppers.append(timing.Stepper(*given)) or steppers[0])
    record = timing.measure(config, rows, warmup=2, updates=3, windows=2)
    built = KEPT(config)
    state, mixing, lr_N = built.initial_state(), built.mixing(), np.full(config.decentralized.workers, 0.0056, "f4")
    met = outer.init(state, built.mesh) if built.sync else None
    for update in range(8):
        state, metrics = built.step(state, built.place(rows[update % 3]), lr_N, mixing(update, None))
        if built.sync and update % 3 == 2:
            state, met = built.sync(state, met, None)
    assert steppers[0].update == 8
    np.testing.assert_array_equal(steppers[0].state.params_NP, state.params_NP)
    assert record["loss"] == pytest.approx(float(metrics.loss_sum.sum()) / 256, rel=1e-6)
    assert len(record["windows_ms"]) == 2 and min(record["windows_ms"]) > 0
    assert record["update_ms"] == pytest.approx(sum(record["windows_ms"]) / 2)
    assert record["targets_per_s"] == pytest.approx(256 / record["update_ms"] * 1e3)
    assert record["tflops_per_s"] == pytest.approx(6 * 3632 * record["targets_per_s"] / 1e12)
    assert (record["rows"], record["workers"]) == (16, config.decentralized.workers)
    assert record["accumulation"] * record["microbatch"] * record["workers"] == 16
    assert record["mfu"] is None and record["roofline"] is None  # nobody knows the peak of "cpu"
    assert record["compile_s"] > 0 and record["program_bytes"] > 3 * 4 * 3632
    assert record["resolved"]["attention"] == "xla"
    assert record["environment"]["versions"]["jax"] == jax.__version__


def test_the_loader_feeds_the_order_of_training():
    config = tiny()
    record = timing.measure(config, timing.rows(config), warmup=1, updates=2, windows=2, with_loader=True)
    loader = record["loader"]
    assert loader["ratio"] == pytest.approx(record["update_ms"] / loader["update_ms"])
    assert len(loader["windows_ms"]) == 2
    stepper = timing.start(config)
    source = timing.data.open_source(config)
    streams = [timing.data.Loader(source, config.seed, 0) for _ in range(2)]
    feed = timing.loaded(stepper, streams[0])
    for update in range(2):
        np.testing.assert_array_equal(feed(update).tokens[0, 0], streams[1].next(16))
    for stream in streams:
        stream.close()


def test_a_refused_update_is_an_error():
    config = tiny({"optimizer.lr": 100.0, "optimizer.clip_norm": 0.0, "optimizer.weight_decay": 10.0})
    with pytest.raises(NonFiniteError, match=r"up to \d+ was not finite"):
        timing.measure(config, timing.rows(config), warmup=0, updates=200, windows=1)


def test_ids_follow_the_counts_of_a_cache(tmp_path):
    config = tiny({"training.batch_targets": 256 * 16, "training.microbatch": 16, "lr_schedule.warmup_steps": 0})
    cache = write_cache(tmp_path / "cache")
    train = np.concatenate([np.fromfile(path, "<u2") for path in sorted(cache.glob("train-*.bin"))])
    wanted = np.bincount(train, minlength=64) / train.size
    assert (timing.unigram_counts(cache, 64) == np.bincount(train, minlength=64)).all()
    drawn = timing.rows(config, cache)
    assert drawn.shape == (8, 256, 17) and drawn.dtype == np.uint16
    found = np.bincount(drawn.ravel(), minlength=64) / drawn.size
    assert np.abs(found - wanted).max() < 6 * np.sqrt(wanted.max() / drawn.size)
    assert (drawn == timing.rows(config, str(cache))).all()
    assert (drawn != timing.rows(config, cache, seed=2)).any()
    with pytest.raises(DataError, match="64 ids; the model has 32"):
        timing.rows(tiny({"model.vocab_size": 32}), cache)


def test_english_like_ids_follow_their_law():
    config = tiny({"training.batch_targets": 256 * 16, "training.microbatch": 16, "lr_schedule.warmup_steps": 0})
    drawn = timing.rows(config)
    found = np.sort(np.bincount(drawn.ravel(), minlength=64))[::-1] / drawn.size
    law = 1 / (np.arange(64) + 2.7)
    np.testing.assert_allclose(found, law / law.sum(), rtol=0.1)
    assert len(np.unique(drawn.reshape(8, -1), axis=0)) == 8


def test_a_token_file_is_taken_as_it_is(tmp_path):
    config = tiny()
    ids = np.arange(2 * 16 * 17, dtype="<u2") % 64
    ids.tofile(tmp_path / "ids")
    assert (timing.rows(config, tmp_path / "ids", batches=2).ravel() == ids).all()
    with pytest.raises(DataError, match="816 uint16 ids below 64 are needed; it has 544"):
        timing.rows(config, tmp_path / "ids", batches=3)
    with pytest.raises(DataError, match="544 uint16 ids below 63"):
        timing.rows(tiny({"model.vocab_size": 63}), tmp_path / "ids", batches=2)
    with pytest.raises(DataError, match="neither"):
        timing.rows(config, tmp_path / "none")


def test_memory_of_a_device_is_computed_back_from_the_share(monkeypatch):
    def device(peak):
        stats = {"peak_bytes_in_use": peak, "bytes_limit": 97_000}
        return types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)

    monkeypatch.setattr(jax, "devices", lambda: [device(5)])
    monkeypatch.setattr(jax, "local_devices", lambda: [device(5), device(7)])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.97")
    assert timing.memory() == {"peak_bytes": 7, "memory_bytes": 100_000}


# One layer, 4 targets in sequences of 2; the head size is 2, so keys and values are 2 wide.
SMALL = types.SimpleNamespace(
    vocab_size=10, width=4, ffn=8, heads=2, kv_heads=1, layers=1, context=2, tied=True
)  # 40 + (4 + 16 + 8 + 8 + 16 + 4 + 32 + 32 + 32) + 4 = 196 parameters


def test_roofline_by_hand():
    assert roofline.parts(SMALL, 4) == {
        "qkv": (768, 544),
        "attention_output": (384, 320),
        "gate_up": (1536, 992),
        "down": (768, 544),
        "attention": (224, 288),
        "between": (0, 1472),
        "head": (960, 656),
        "cross_entropy": (0, 160),
        "embedding": (0, 288),
        "adamw": (0, 32 * 196),
    }
    # 0.768 + 0.384 + 1.536 + 0.768 + 0.288 + 1.472 + 0.96 + 0.16 + 0.288 + 6.272
    assert roofline.floor_s(roofline.parts(SMALL, 4), 1000, 1000) == pytest.approx(12.896)
    assert roofline.floor_s(roofline.parts(SMALL, 4), 1000, 1e99) == pytest.approx(4.64)
    two = roofline.parts(SMALL, 8, workers=2)  # twice the targets, and every worker its own weights
    assert all(two[name] == (2 * part.flops, 2 * part.bytes) for name, part in roofline.parts(SMALL, 4).items())


def test_roofline_of_a_preset_on_known_and_unknown_devices():
    model = configs.load("configs/c4_20m.py").model
    floor = roofline.of(model, 131072, 1, "NVIDIA H200")
    norms = 17 * 320
    products = (flops.flops_per_target(model) - 6 * norms) * 131072
    attention = 7 * 8 * 131072 * 1024 * 320  # 7 times layers, targets, context, width
    assert floor["flops_ms"] == pytest.approx((products + attention) / 989e12 * 1e3)
    assert max(floor["flops_ms"], floor["bytes_ms"]) < floor["floor_ms"] < floor["flops_ms"] + floor["bytes_ms"]
    assert roofline.of(model, 131072, 1, "NVIDIA H200", devices=2)["floor_ms"] == pytest.approx(floor["floor_ms"] / 2)
    slower = roofline.of(model, 131072, 1, "NVIDIA GH200 480GB")
    assert slower["flops_ms"] == floor["flops_ms"] and slower["bytes_ms"] == pytest.approx(floor["bytes_ms"] * 4.8 / 4)
    assert roofline.bandwidth("NVIDIA H100 PCIe") == 2.0e12 and roofline.bandwidth("NVIDIA H100 80GB HBM3") == 3.35e12
    assert roofline.of(model, 131072, 1, "cpu") is None and roofline.of(model, 131072, 1, "NVIDIA L40S") is None
