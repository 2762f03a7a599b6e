"""The training loop in one process: exact budget and schedule, resume at every place, policies, refusals, faults."""

import errno
import json
import math
import os
import shutil
import threading
import time
from pathlib import Path

import harness
import jax
import numpy as np
import pytest
from harness import ENDS, SEQUENCES, SIZES, StopAfter, tiny

from llama_jax import build as builds
from llama_jax import checkpoint, data, faults, integrity, train, validation
from llama_jax.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeviceError,
    Interrupted,
    NonFiniteError,
    Preempted,
)

ASKS = 19  # calls of `stop` in a tiny run: 7 updates, 3 evaluations of 2 batches and once after each, 3 batches
SAVING = {"training.recovery_minutes": 0.0}  # a recovery checkpoint after every update


class Crash(Exception):
    """Ends a run without a save."""


def crash_at(k):
    """A `stop` that crashes at its k-th call."""
    calls = iter(range(1, k + 1))

    def stop():
        if next(calls) == k:
            raise Crash

    return stop


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return harness.write_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def scenario(cache):
    """Recipes by name, as changes of the tiny config."""
    from_cache = {"data.source": "cache", "data.path": str(cache)}
    return {
        "synthetic": {},
        "cache": from_cache,
        "accumulation": {**from_cache, "training.microbatch": 4},
    }


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, scenario):
    """The folder of the unbroken run of a scenario."""
    done = {}

    def of(name):
        if name not in done:
            done[name] = tmp_path_factory.mktemp(name)
            harness.run(tiny(scenario[name]), done[name])
        return done[name]

    return of


@pytest.fixture
def fault(monkeypatch):
    """Sets a fault for this process, its counts from one."""

    def set_fault(text):
        faults._passages.clear()
        monkeypatch.setenv(faults.VARIABLE, text)

    yield set_fault
    faults._passages.clear()


# What an unbroken run does.


def test_budget_updates_and_epochs_are_exact(unbroken):
    derived = tiny().derived
    train_lines = harness.lines(unbroken("synthetic"), "train")
    assert [line["update"] for line in train_lines] == list(range(1, 11))
    assert [line["targets"] for line in train_lines] == [16 * sum(SIZES[: i + 1]) for i in range(10)]
    assert train_lines[-1]["targets"] == derived.total_targets == 16 * SEQUENCES
    assert [line["epoch"] for line in train_lines] == [1] * 4 + [2] * 4 + [3] * 2
    for line in train_lines:
        assert 0 < line["clip"] <= 1 and line["grad_norm"] > 0
        assert line["clip"] == pytest.approx(min(1, 1 / (line["grad_norm"] + 1e-6)), rel=1e-6)


def test_learning_rates_are_the_closed_form_at_the_end_of_each_update(unbroken):
    peak, warmup, total = 0.0056, 3 * 256, 16 * SEQUENCES
    rates = []
    for line in harness.lines(unbroken("synthetic"), "train"):
        end = line["targets"]
        rate = peak * end / warmup
        if end > warmup:
            rate = peak / 10 + 0.9 * peak * math.cos(math.pi / 2 * (end - warmup) / (total - warmup)) ** 2
        assert line["lr"] == pytest.approx(rate, rel=2e-15, abs=0)
        rates.append(line["lr"])
    assert rates[0] == pytest.approx(peak / 3, rel=1e-15) and rates[2] == peak
    assert rates[-1] == pytest.approx(peak / 10, rel=1e-15)


def test_evaluations_stand_behind_the_last_update_of_each_epoch(unbroken):
    found = harness.lines(unbroken("synthetic"))
    order = [(line["kind"], line["update"], line.get("split")) for line in found]
    expected = []
    for update in range(1, 11):
        expected.append(("train", update, None))
        expected += [("eval", update, "subset")] * (update in ENDS)
    assert order == [*expected, ("eval", 10, "validation")]
    evaluations = [line for line in found if line["kind"] == "eval"]
    assert [line["eval_targets"] for line in evaluations] == [320, 320, 320, 640]
    assert [line["targets"] for line in evaluations] == [16 * 56, 16 * 113, 16 * 140, 16 * 140]
    assert [line["epoch"] for line in evaluations] == [1, 2, 3, 3]


def test_result_and_best(unbroken, scenario):
    for name, bytes_per_token in (("synthetic", None), ("cache", 4.0)):
        folder, config = unbroken(name), tiny(scenario[name])
        result = harness.strict((folder / "result.json").read_text())
        subset, validation = harness.lines(folder, "eval")[-2:]
        assert result["unique_params"] == 3632 and result["non_embedding_params"] == 3632 - 64 * 16
        assert result["targets"] == config.derived.total_targets and result["updates"] == 10
        assert result["validation_loss"] == validation["loss"] and result["subset_loss"] == subset["loss"]
        bits = bytes_per_token and validation["loss"] / math.log(2) / bytes_per_token
        assert result["bits_per_byte"] == (bits and pytest.approx(bits, rel=1e-12))
        assert result["wall_s"] > 0 and result["device"] == jax.devices()[0].device_kind
        assert result["targets_per_s_all"] == result["targets"] / result["wall_s"]
        best = min(harness.lines(folder, "eval")[:3], key=lambda line: line["loss"])
        stored = harness.strict((folder / "best.json").read_text())
        assert stored == result["best"]
        assert {key: stored[key] for key in ("update", "targets", "loss")} == {
            key: best[key] for key in ("update", "targets", "loss")
        }
        assert stored["checkpoint"] == ("checkpoints/10" if best["update"] == 10 else None)


def test_every_sequence_of_the_stream_is_trained_once_in_order(cache, scenario, tmp_path):
    seen, config = [], tiny(scenario["cache"])
    built = harness.KEPT(config)

    def step(state, batch, lr_N, mixing):
        seen.append((np.asarray(batch.tokens)[0, 0], np.asarray(batch.rows)[0, 0]))
        return built.step(state, batch, lr_N, mixing)

    def spy(config):
        return harness.KEPT(config)._replace(step=step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "build", spy)
        train.run(config, tmp_path / "run")
    tokens = np.concatenate([np.fromfile(path, "<u2") for path in sorted(cache.glob("train-*.bin"))])
    order = []
    for pass_index in range(3):
        for group, (first, n) in enumerate([(0, 20), (20, 20), (40, 8)]):
            bits = np.random.PCG64(np.random.SeedSequence([42, pass_index, group])).random_raw(n)
            order += [first + i for i in np.argsort(bits, kind="stable")]
    assert [int(weights.sum()) for _, weights in seen] == SIZES
    rows = np.concatenate([batch[:size] for (batch, _), size in zip(seen, SIZES, strict=True)])
    np.testing.assert_array_equal(rows, [tokens[i * 16 : i * 16 + 17] for i in order[:SEQUENCES]])
    for (batch, weights), size in zip(seen, SIZES, strict=True):
        assert batch.shape == (16, 17) and not batch[size:].any() and (weights[:size] == 1).all()


def test_an_update_is_finished_when_the_device_says_so(tmp_path):
    """Dispatching a large update blocks until most of it is computed, so the host reads the one before it too late."""
    config = tiny(training__epoch_targets_per_parameter=100.0, log__every_updates=1)

    def step(*given):
        time.sleep(0.2)
        return harness.KEPT(config).step(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "build", lambda config: harness.KEPT(config)._replace(step=step))
        result = train.run(config, tmp_path / "run")
    rates = [line["targets_per_s"] for line in harness.lines(tmp_path / "run", "train")]
    assert rates[-1] == result["targets_per_s"] and max(rates[1:]) < 2 * 256 / 0.2


def test_the_start_says_what_will_happen(tmp_path, cache, capsys):
    harness.run(tiny(data__source="cache", data__path=str(cache)), tmp_path / "run")
    text = capsys.readouterr().out
    assert "3,632 parameters (2,608 without embeddings), 2,240 targets in 10 updates, 3 virtual epochs" in text
    assert "pass 2 over the data begins" in text and "pass 3 over the data begins" in text
    assert f"results in {tmp_path / 'run'}" in text


# Resume.


@pytest.mark.parametrize("k", range(1, ASKS + 1))
def test_resume_after_a_stop_at_every_place(k, unbroken, tmp_path):
    stop = StopAfter(k)
    if k < ASKS:
        with pytest.raises(Preempted, match=r"saved at update \d+, the same command continues"):
            harness.run(tiny(), tmp_path, stop)
        (update, kind), *others = harness.kept(tmp_path)
        assert kind == "recovery" and not others and not (tmp_path / "result.json").exists()
        assert [line["update"] for line in harness.lines(tmp_path, "train")] == list(range(1, update + 1))
        assert harness.meta(tmp_path)["loader"]["position"] == sum(SIZES[:update])
        harness.run(tiny(), tmp_path)
    else:  # asked after the last evaluation: there is nothing left to save for
        harness.run(tiny(), tmp_path, stop)
        assert stop.asked == ASKS
    assert harness.outcome(tmp_path) == harness.outcome(unbroken("synthetic"))
    assert harness.kept(tmp_path) == [(10, "final")]


@pytest.mark.parametrize("k", range(2, ASKS + 1, 3))
def test_resume_after_a_crash(k, unbroken, scenario, tmp_path):
    """A crash saves nothing: the run goes on from the last recovery checkpoint, over data in several passes."""
    name = "accumulation" if k % 2 else "cache"
    config = tiny(scenario[name] | SAVING | {"data.prefetch_groups": k % 3 % 2})
    with pytest.raises(Crash):
        harness.run(config, tmp_path, crash_at(k))
    harness.run(config, tmp_path)
    assert harness.outcome(tmp_path) == harness.outcome(unbroken(name))
    assert harness.kept(tmp_path) == [(10, "final")]


def test_an_evaluation_logged_before_a_crash_is_logged_once(unbroken, tmp_path):
    """Stopped inside an evaluation, which the next process finishes and logs; then it crashes without a save."""
    with pytest.raises(Preempted):
        harness.run(tiny(), tmp_path, StopAfter(5))
    assert harness.lines(tmp_path, "eval") == []
    with pytest.raises(Crash):
        harness.run(tiny(), tmp_path, crash_at(5))
    assert [line["update"] for line in harness.lines(tmp_path, "eval")] == [4]
    harness.run(tiny(), tmp_path)
    assert harness.outcome(tmp_path) == harness.outcome(unbroken("synthetic"))


def test_the_best_of_former_processes_stays_the_best(tmp_path):
    config = tiny(optimizer__lr=1.0, lr_schedule__warmup_steps=8)  # so high that the loss rises
    best = harness.run(config, tmp_path / "unbroken")["best"]
    assert best["update"] == 4
    with pytest.raises(Preempted):
        harness.run(config, tmp_path / "run", StopAfter(14))
    # What a process that was killed later may have left, and this one does not find again on an accelerator.
    (tmp_path / "run/best.json").write_text('{"update": 8, "loss": 0.0}')
    harness.run(config, tmp_path / "run")
    assert harness.outcome(tmp_path / "run") == harness.outcome(tmp_path / "unbroken")
    assert harness.strict((tmp_path / "run/best.json").read_text()) == best


@pytest.mark.parametrize("name", ["synthetic", "cache", "accumulation"])
@pytest.mark.parametrize("legs", [(1, 1, 1), (3, 4, 5), (6, 1, 7)])
def test_several_legs_in_a_row(name, legs, unbroken, scenario, tmp_path):
    for number, k in enumerate(legs):
        config = tiny(scenario[name] | {"data.prefetch_groups": number % 2, "runtime.host_threads": 1 + number})
        with pytest.raises(Interrupted if number == 1 else Preempted):
            harness.run(config, tmp_path, StopAfter(k, Interrupted if number == 1 else Preempted))
    harness.run(tiny(scenario[name]), tmp_path)
    assert harness.outcome(tmp_path) == harness.outcome(unbroken(name))


def test_execution_only_fields_change_nothing(unbroken, scenario, tmp_path, capsys):
    """Between legs and against the unbroken run: state, losses, order. Evaluation batches change sums by rounding."""
    changes = [
        {"data.prefetch_groups": 0, "runtime.host_threads": 1, "name": "renamed"},
        {"log.every_updates": 1, "training.recovery_minutes": 0.0, "training.checkpoint_policy": "interval"},
        {"log.every_updates": 7, "evaluation.batch_sequences": 3, "training.interval_epochs": 2},
    ]
    for k, change in enumerate(changes[:2], 4):
        with pytest.raises(Preempted):
            harness.run(tiny(scenario["cache"] | change), tmp_path, StopAfter(k))
    capsys.readouterr()
    harness.run(tiny(scenario["cache"] | changes[2]), tmp_path)
    assert "changed since the last start: evaluation.batch_sequences: 16 -> 3" in capsys.readouterr().out
    found, expected = harness.outcome(tmp_path), harness.outcome(unbroken("cache"))
    for key in ("arrays", "export"):
        assert found[key] == expected[key]
    train_lines = [harness.timeless(harness.lines(folder, "train")) for folder in (tmp_path, unbroken("cache"))]
    assert train_lines[0] == train_lines[1]
    assert found["result"]["validation_loss"] == pytest.approx(expected["result"]["validation_loss"], abs=1e-6)
    assert json.loads((tmp_path / "config.json").read_text())["config"]["evaluation"]["batch_sequences"] == 3


def test_moved_data_is_the_same_data(cache, scenario, unbroken, tmp_path):
    with pytest.raises(Preempted):
        harness.run(tiny(scenario["cache"]), tmp_path / "run", StopAfter(5))
    shutil.copytree(cache, tmp_path / "moved")
    harness.run(tiny(scenario["cache"] | {"data.path": str(tmp_path / "moved")}), tmp_path / "run")
    assert harness.outcome(tmp_path / "run") == harness.outcome(unbroken("cache"))


# Evaluation and training do not disturb each other.


@pytest.mark.parametrize(
    "change",
    [
        {"evaluation.subset_sequences": 1, "evaluation.full_at_end": False},
        {"evaluation.subset_sequences": 40, "evaluation.subset_seed": 1},
    ],
)
def test_evaluation_does_not_touch_training(change, unbroken, tmp_path):
    result = harness.run(tiny(change), tmp_path)
    assert harness.arrays(tmp_path) == harness.arrays(unbroken("synthetic"))
    if "evaluation.full_at_end" in change:
        assert result["validation_loss"] is None and result["bits_per_byte"] is None
        assert {line["split"] for line in harness.lines(tmp_path, "eval")} == {"subset"}


@pytest.mark.parametrize("size", [1, 3, 64])
def test_evaluation_batch_changes_the_loss_by_rounding_only(size, unbroken, tmp_path):
    harness.run(tiny(evaluation__batch_sequences=size), tmp_path)
    assert harness.arrays(tmp_path) == harness.arrays(unbroken("synthetic"))
    for line, other in zip(harness.lines(tmp_path, "eval"), harness.lines(unbroken("synthetic"), "eval"), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert line["eval_targets"] == other["eval_targets"]


# Refusals.


@pytest.mark.parametrize(
    ("field", "value", "old"),
    [
        ("optimizer.lr", 0.004, 0.0056),
        ("optimizer.weight_decay", 0.0, 0.1),
        ("training.batch_targets", 512, 256),
        ("training.microbatch", 8, 16),
        ("training.total_targets", 4000, 2255),
        ("seed", 43, 42),
        ("model.ffn", 48, 32),
        ("model.compute_dtype", "float32", "auto"),
        ("model.remat", True, False),
        ("model.attention", "reference", "auto"),
        ("data.synthetic_group_sequences", 32, 64),
        ("evaluation.subset_sequences", 10, 20),
        ("lr_schedule.warmup_steps", 2, 3),
    ],
)
def test_a_changed_recipe_is_refused_with_the_difference(field, value, old, unbroken):
    folder = unbroken("synthetic")
    before = harness.tree(folder)
    with pytest.raises(ConfigError) as caught:
        harness.run(tiny({field: value}), folder)
    assert f"\n  {field}: {old} -> {value}" in str(caught.value) and caught.value.exit_code == 2
    assert harness.tree(folder) == before


def test_what_auto_became_is_recipe(unbroken):
    config = json.loads((unbroken("synthetic") / "config.json").read_text())
    assert config["resolved"] == {
        "compute_dtype": "float32",
        "residual_dtype": "float32",
        "attention": "xla",
        "head": "chunked",
        "kernels": "xla",
        "gate": "xla",
        "rotary": "xla",
    }

    def other(config):
        built = harness.KEPT(config)
        return built._replace(resolved={**built.resolved, "attention": "cudnn"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "build", other)
        with pytest.raises(ConfigError, match=r"resolved\.attention: xla -> cudnn"):
            train.run(tiny(), unbroken("synthetic"))


def test_changed_data_is_refused(scenario, tmp_path):
    copy = harness.write_cache(tmp_path / "data")
    config = tiny(scenario["cache"] | {"data.path": str(copy)})
    with pytest.raises(Preempted):
        harness.run(config, tmp_path / "run", StopAfter(5))
    shutil.rmtree(copy)
    harness.write_cache(copy, seed=1)
    before = harness.tree(tmp_path / "run")
    with pytest.raises(DataError, match="other data") as caught:
        harness.run(config, tmp_path / "run")
    assert caught.value.exit_code == 3 and harness.tree(tmp_path / "run") == before
    (copy / "train-00002.bin").unlink()
    with pytest.raises(DataError, match=r"train-00002\.bin"):
        harness.run(config, tmp_path / "run")


def test_a_damaged_shard_stops_the_run_and_a_repaired_one_continues_it(unbroken, tmp_path, scenario, monkeypatch):
    copy = harness.write_cache(tmp_path / "data")
    config = tiny(scenario["cache"] | SAVING | {"data.path": str(copy)})
    shard = copy / "train-00004.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:9] + bytes([content[9] ^ 1]) + content[10:])
    slow = integrity.hash_files

    def hash_files(step):
        time.sleep(0.3)
        return slow(step)

    monkeypatch.setattr(integrity, "hash_files", hash_files)
    with pytest.raises(DataError, match=r"train-00004\.bin"):
        harness.run(config, tmp_path / "run")
    # The save that was under way is complete as soon as the folder is unlocked.
    updates = [update for update, _ in harness.kept(tmp_path / "run")]
    assert updates and updates[-1] == 1 and not list((tmp_path / "run/checkpoints").glob("*.saving"))
    monkeypatch.undo()
    shard.write_bytes(content)
    harness.run(config, tmp_path / "run")
    assert harness.outcome(tmp_path / "run") == harness.outcome(unbroken("cache"))


# Damaged checkpoints and failed saves.


def stopped(folder, changes, k=9):
    """A run stopped at ask k with two recovery checkpoints; their directories, newest first."""
    with pytest.raises(Preempted):
        harness.run(tiny(changes | SAVING), folder, StopAfter(k))
    updates = [update for update, _ in harness.kept(folder)]
    assert len(updates) == 2
    return [folder / "checkpoints" / str(update) for update in reversed(updates)]


def damage(step):
    """Flips one bit in the largest file of a checkpoint."""
    path = max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_a_damaged_newest_checkpoint_costs_nothing_but_time(unbroken, tmp_path, capsys):
    newest, older = stopped(tmp_path, {})
    damage(newest)
    harness.run(tiny(), tmp_path)
    error = capsys.readouterr().err
    assert str(newest) in error and f"using update {older.name} instead" in error
    assert (tmp_path / "checkpoints/damaged" / newest.name).is_dir()
    assert harness.outcome(tmp_path) == harness.outcome(unbroken("synthetic"))


def test_without_a_good_checkpoint_a_run_never_starts_afresh(tmp_path):
    for step in stopped(tmp_path, {}):
        damage(step)
    before = harness.tree(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        harness.run(tiny(), tmp_path)
    assert harness.tree(tmp_path / "checkpoints") == before


def test_a_failed_recovery_save_is_reported_and_training_goes_on(fault, unbroken, tmp_path, capsys):
    fault("enospc@before_manifest:2,enospc@metrics_flush:3")
    harness.run(tiny(SAVING), tmp_path)
    error = capsys.readouterr().err
    assert "was not saved" in error and "metrics.jsonl: cannot write" in error
    assert harness.outcome(tmp_path) == harness.outcome(unbroken("synthetic"))


@pytest.mark.parametrize(
    "point", ["before_save:1", "before_manifest:1", "export_weights:1", "metrics_flush:7", "metrics_flush:8"]
)
def test_a_failed_end_is_an_error_and_the_next_start_repairs_it(point, fault, unbroken, tmp_path, monkeypatch):
    fault(f"enospc@{point}")
    with pytest.raises(CheckpointError):
        harness.run(tiny(), tmp_path)
    assert not (tmp_path / "result.json").exists()
    monkeypatch.delenv(faults.VARIABLE)
    harness.run(tiny(), tmp_path)
    assert harness.outcome(tmp_path) == harness.outcome(unbroken("synthetic"))


# A finished run, and what the policies leave.


def test_a_finished_run_is_verified_and_repeats_its_result(unbroken, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(unbroken("synthetic"), folder)
    before, result = harness.tree(folder), json.loads((folder / "result.json").read_text())
    assert harness.run(tiny(), folder) == result
    text = capsys.readouterr().out
    assert "is finished and verified" in text and f"validation loss {result['validation_loss']:.4f}" in text
    assert harness.run(tiny(log__every_updates=1, training__checkpoint_policy="none"), folder) == result
    assert harness.tree(folder) == before
    damage(folder / "checkpoints/10")
    with pytest.raises(CheckpointError, match="checkpoints/10"):
        harness.run(tiny(), folder)
    assert (folder / "checkpoints/10").is_dir() and not (folder / "checkpoints/damaged").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"updates": 10, "targets": "x"}', "[" * 100_000])
def test_a_damaged_result_is_named_and_written_again(text, unbroken, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(unbroken("synthetic"), folder)
    (folder / "result.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"result\.json: damaged .*; delete it, then the same command"):
        harness.run(tiny(), folder)
    (folder / "result.json").unlink()
    harness.run(tiny(), folder)
    assert harness.outcome(folder) == harness.outcome(unbroken("synthetic"))


def test_policy_final_leaves_exactly_one_checkpoint(unbroken):
    folder = unbroken("synthetic")
    assert harness.kept(folder) == [(10, "final")]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["10", "saved.json"]
    assert [path.name for path in (folder / "exports").iterdir()] == ["final"]


@pytest.mark.parametrize("every", [1, 2])
def test_policy_interval_keeps_and_exports_every_so_many_epochs(every, unbroken, tmp_path):
    changes = {"training.checkpoint_policy": "interval", "training.interval_epochs": every}
    harness.run(tiny(changes | SAVING), tmp_path)
    inner = [4, 8] if every == 1 else [8]
    assert harness.kept(tmp_path) == [*((update, "interval") for update in inner), (10, "final")]
    exports = sorted(path.name for path in (tmp_path / "exports").iterdir())
    assert exports == ["final", *(f"update-{update}" for update in inner)]
    assert harness.arrays(tmp_path) == harness.arrays(unbroken("synthetic"))
    best = json.loads((tmp_path / "best.json").read_text())
    assert best["checkpoint"] == f"checkpoints/{best['update']}" and (tmp_path / best["checkpoint"]).is_dir()


def test_interval_checkpoints_survive_a_stop_at_their_update(tmp_path, unbroken):
    changes = {"training.checkpoint_policy": "interval"}
    with pytest.raises(Preempted):
        harness.run(tiny(changes), tmp_path, StopAfter(6))  # after the first evaluation
    assert harness.kept(tmp_path) == [(4, "interval")] and (tmp_path / "exports/update-4").is_dir()
    harness.run(tiny(changes), tmp_path)
    assert harness.kept(tmp_path) == [(4, "interval"), (8, "interval"), (10, "final")]
    assert harness.arrays(tmp_path) == harness.arrays(unbroken("synthetic"))


@pytest.mark.parametrize("point", ["export_weights:1", "export_before_rename:2", "after_manifest:1"])
def test_an_interval_that_fails_is_complete_after_a_restart(point, fault, tmp_path, monkeypatch):
    """Whatever fails in an interval's export or behind its save, the restart has both."""
    changes = {"training.checkpoint_policy": "interval"}
    fault(f"enospc@{point}")
    if point == "after_manifest:1":  # the checkpoint is whole: training goes on
        harness.run(tiny(changes), tmp_path)
    else:
        with pytest.raises(CheckpointError, match="export"):
            harness.run(tiny(changes), tmp_path)
        monkeypatch.delenv(faults.VARIABLE)
        harness.run(tiny(changes), tmp_path)
    assert harness.kept(tmp_path) == [(4, "interval"), (8, "interval"), (10, "final")]
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == ["final", "update-4", "update-8"]


def test_policy_none_leaves_no_checkpoint_and_no_export(unbroken, tmp_path, capsys):
    config = tiny({"training.checkpoint_policy": "none"} | SAVING)
    result = harness.run(config, tmp_path)
    assert harness.kept(tmp_path) == [] and not (tmp_path / "exports").exists()
    expected = json.loads((unbroken("synthetic") / "result.json").read_text())
    assert result["validation_loss"] == expected["validation_loss"]
    assert result["best"]["checkpoint"] is None
    before = harness.tree(tmp_path)
    capsys.readouterr()
    assert harness.run(config, tmp_path) == result
    assert "verified" not in capsys.readouterr().out  # there is nothing to verify
    assert harness.run(tiny(), tmp_path) == result  # the policy of the run counts, not that of the command
    assert harness.tree(tmp_path) == before


def test_policy_none_still_saves_when_it_is_stopped(unbroken, tmp_path):
    config = tiny({"training.checkpoint_policy": "none"})
    with pytest.raises(Preempted):
        harness.run(config, tmp_path, StopAfter(7))
    assert len(harness.kept(tmp_path)) == 1
    harness.run(config, tmp_path)
    assert harness.kept(tmp_path) == [] and not (tmp_path / "exports").exists()
    assert harness.timeless(harness.lines(tmp_path)) == harness.timeless(harness.lines(unbroken("synthetic")))


# Non-finite updates.


@pytest.mark.parametrize("k", [1, 4, 6, 10])
def test_a_non_finite_update_is_not_applied(k, fault, unbroken, tmp_path, monkeypatch):
    fault(f"nan@step:{k}")
    with pytest.raises(NonFiniteError) as caught:
        harness.run(tiny(SAVING), tmp_path)
    start, end = sum(SIZES[: k - 1]), sum(SIZES[:k])
    order = [
        64 * (position // 64) + int(data.permutation(42, 0, position // 64, 64)[position % 64])
        for position in range(start, min(start + 8, end))
    ]
    message = str(caught.value)
    assert caught.value.exit_code == 5 and message.startswith(f"update {k}: ") and "worker 0" in message
    assert f"sequences {', '.join(map(str, order))}" in message and f"positions {start} to {end - 1}" in message
    bad = harness.lines(tmp_path)[-1]
    assert (bad["kind"], bad["update"], bad["loss"]) == ("train", k, None) and "loss" in bad["nonfinite"]
    assert [update for update, _ in harness.kept(tmp_path)] == [u for u in (k - 2, k - 1) if u > 0]
    for update, _ in harness.kept(tmp_path):
        saved = checkpoint.Checkpoints(tmp_path / "checkpoints", None, read_only=True).read(update)
        assert all(np.isfinite(np.asarray(array)).all() for array in saved.arrays.values())
    monkeypatch.delenv(faults.VARIABLE)
    harness.run(tiny(SAVING), tmp_path)
    assert harness.outcome(tmp_path) == harness.outcome(unbroken("synthetic"))


def test_a_diverging_run_ends_with_a_non_finite_error(tmp_path):
    config = tiny(
        optimizer__lr=100.0, optimizer__clip_norm=0.0, optimizer__weight_decay=10.0, lr_schedule__warmup_steps=0
    )
    with pytest.raises(NonFiniteError, match=r"lower optimizer\.lr"):
        harness.run(config, tmp_path)
    assert not (tmp_path / "result.json").exists()


def test_a_non_finite_evaluation_ends_the_run(tmp_path, unbroken):
    def spy(config):
        return harness.KEPT(config)._replace(evaluate=lambda row_P, rows: validation.Loss(math.nan, len(list(rows))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "build", spy)
        with pytest.raises(NonFiniteError, match="update 4: the loss on the subset split is not finite"):
            train.run(tiny(), tmp_path)
    assert not (tmp_path / "best.json").exists()
    harness.run(tiny(), tmp_path)
    assert harness.outcome(tmp_path) == harness.outcome(unbroken("synthetic"))


@pytest.mark.parametrize("out_of_memory", [True, False])
def test_an_error_of_the_device_is_one_line(out_of_memory, unbroken, tmp_path, monkeypatch):
    text = "RESOURCE_EXHAUSTED: Out of memory" if out_of_memory else "INTERNAL: the device\nis lost"

    def step(state, batch, lr_N, mixing):
        raise jax.errors.JaxRuntimeError(text)

    with monkeypatch.context() as patch:
        patch.setattr(train, "build", lambda config: harness.KEPT(config)._replace(step=step))
        with pytest.raises(DeviceError) as caught:
            train.run(tiny(), tmp_path)
    message = str(caught.value)
    assert caught.value.exit_code == 6 and message.startswith(" ".join(text.split())) and "\n" not in message
    assert ("lower training.microbatch (now 16)" in message) == out_of_memory
    harness.run(tiny(), tmp_path)  # the folder is unlocked, and the run starts again
    assert harness.outcome(tmp_path) == harness.outcome(unbroken("synthetic"))


# Threads and locks.


def test_nothing_is_left_running(tmp_path):
    before = set(threading.enumerate())
    harness.run(tiny(SAVING), tmp_path)
    alive = [thread for thread in set(threading.enumerate()) - before if not thread.daemon and thread.is_alive()]
    assert alive == []


def test_a_locked_folder_and_a_foreign_one_are_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match=r"not a run folder and holds thesis.tex"):
        harness.run(tiny(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    asked = []

    def stop():
        if not asked:
            asked.append(True)
            with pytest.raises(CheckpointError, match=r"in use by host \S+ pid \d+"):
                harness.run(tiny(), tmp_path / "run")
        return None

    harness.run(tiny(), tmp_path / "run", stop)
    assert asked


def test_build_is_what_is_kept(tmp_path, unbroken):
    """The harness keeps compiled programs; a run that builds everything anew ends equal."""
    assert train.build is builds.build
    train.run(tiny(), tmp_path)
    assert harness.outcome(tmp_path) == harness.outcome(unbroken("synthetic"))
    assert Path(tmp_path, "environment.json").is_file()


@pytest.mark.parametrize("name", ["best.json", "result.json"])
def test_a_full_disk_at_a_small_file_is_one_line(name, tmp_path, unbroken, monkeypatch):
    write = train.write_json_atomic

    def full(path, value):
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, value)

    monkeypatch.setattr(train, "write_json_atomic", full)
    with pytest.raises(CheckpointError, match=rf"{name}: No space left on device; free space"):
        harness.run(tiny(), tmp_path)
    monkeypatch.undo()
    harness.run(tiny(), tmp_path)
    assert harness.outcome(tmp_path) == harness.outcome(unbroken("synthetic"))
