"""Records of recipes: what is read back is what was measured; everything that contradicts itself is refused."""

import copy
import json
import math

import pytest
from recipe_records import LOSSES, edited, measured, recipe, reference

from bench import measure, record
from bench.record import RecordError
from llama_jax.errors import ConfigError, DataError

STAMPS = [i * 10**9 for i in range(21)]


def test_a_record_is_read_as_it_was_written(tmp_path):
    found = reference()
    record.write(tmp_path / "deep" / "reference.json", found)
    assert record.read(tmp_path / "deep" / "reference.json") == found
    assert found["sha256"] == record.digest(found["measured"]) != recipe()["sha256"]
    assert issubclass(RecordError, DataError)


def test_invariants_follow_from_the_config():
    """20 updates of 248 targets, two of warm-up, cosine to a tenth; written out here once more."""
    found = reference()["measured"]["invariants"]
    rates = []
    for step in range(1, 21):
        progress = (step - 2) / 18
        rates.append(1e-3 * (step / 2 if step < 2 else 0.1 + 0.45 * (1 + math.cos(math.pi * progress))))
    assert found["learning_rates"] == pytest.approx(rates, rel=1e-12)
    assert (found["tokens_per_step"], found["targets_per_step"], found["rows_per_step"]) == (256, 248, 8)
    matrices = 64 * 16 + 16 * 16 * 2 + 8 * 16 * 2 + 3 * 24 * 16  # embedding, q and o, k and v of one head, FFN
    assert found["parameters"] == matrices + 3 * 16
    assert reference()["measured"]["model"]["active_params"] == matrices  # the tied embedding is the head, once


MUTANTS = {
    "tokens/s": ("figures/tokens_per_s_gpu", 129.0),
    "CV": ("figures/step_time_cv", 0.1),
    "figures not all stated": ("figures/cv_ddof", KeyError),
    "an unknown figure": ("figures/best", 1.0),
    "convergence arm": ("figures/convergence_arm", False),
    "a stamp": ("run/stamps_ns/0/12", 1),
    "a token": ("run/tokens/3", 257),
    "targets for inputs": ("run/tokens_counted", "targets"),
    "another window": ("run/window", [6, 20]),
    "more GPUs than ran": ("run/n_gpus", 2),
    "GPUs of the device": ("device/count", 2),
    "a learning rate": ("arm/learning_rates/7", 1e-3),
    "a learning rate of the invariants": ("invariants/learning_rates/7", 1e-3),
    "a loss lost": ("arm/losses", LOSSES[:-1]),
    "a loss that is text": ("arm/losses/4", "3.0"),
    "rows of the arm": ("arm/rows_sha256", "0" * 64),
    "rows": ("rows/rows_sha256", "0" * 64),
    "rows of another length": ("rows/row_length", 31),
    "fewer rows": ("rows/rows", 159),
    "workload": ("workload/rows", 128),
    "initial weights": ("arm/init_sha256", "0" * 64),
    "image": ("arm/image", "0" * 64),
    "a version": ("stack/versions/jax", "0.12.0"),
    "code": ("stack/code_sha256", "0" * 64),
    "N": ("model/active_params", 10**6),
    "N as a float": ("model/active_params", 2784.0),
    "parameters": ("model/parameters", 10**6),
    "a field of the config": ("config/optimizer/lr", 2e-3),
    "clip": ("config/optimizer/clip_norm", 2.0),
    "microbatch without its accumulation": ("config/training/microbatch", 8),
    "a field that isn't one": ("config/optimizer/momentum", 0.9),
    "a field of another type": ("config/model/tied", 1),
    "a derived number": ("config/derived/batch_sequences", 9),
    "resolved dtype": ("resolved/compute_dtype", "float32"),
    "an invariant less": ("invariants/clip_rule", KeyError),
    "an invariant more": ("invariants/luck", 1),
    "an invariant of another type": ("invariants/workers", True),
    "status": ("status", "winner"),
    "date": ("created", "yesterday"),
    "id": ("id", "../x"),
    "notes": ("notes", [1]),
    "missing": ("author", KeyError),
    "missing inside": ("model/revision", KeyError),
    "unknown": ("score", 5.0),
    "unknown inside": ("device/luck", 1),
    "a number for a text": ("command", 5),
    "an integer for a boolean": ("reference_public", 1),
    "an empty text": ("author/name", ""),
    "end before start": ("gpu_time/finished", 1.0),
    "less time than its steps": ("gpu_time/finished", 1.0e9 + 10),
    "no time at all": ("gpu_time/admitted", 1.0e9 + 360),
    "derived numbers that are a list": ("config/derived", [1]),
    "derived numbers that are null": ("config/derived", None),
    "no resolved dtype": ("resolved/compute_dtype", KeyError),
    "no resolved residual dtype": ("resolved/residual_dtype", KeyError),
    "no resolved head": ("resolved/head", KeyError),
    "no resolved gate": ("resolved/gate", KeyError),
    "no resolved rotary": ("resolved/rotary", KeyError),
    "nothing resolved": ("resolved", {}),
    "a loss that is a truth value": ("arm/losses/4", True),
    "a loss below 0": ("arm/losses/4", -1.0),
    "a gradient norm below 0": ("arm/grad_norms/19", -1.0),
    "a loss beyond all floats": ("arm/losses/4", 10**400),
    "a learning rate beyond all floats": ("arm/learning_rates/4", 10**400),
    "a figure beyond all floats": ("figures/step_seconds", 10**400),
    "a stamp beyond all clocks": ("run/stamps_ns/0/20", 10**400),
    "a checkpoint that was not loaded": ("model/checkpoint", "$HF_CKPT"),
    "weights without a checkpoint": ("config/model/init_from", "$HF_CKPT"),
    "rows made with another hash": ("rows/made_of", {"rows": 160, "rows_sha256": "0" * 64}),
    "rows made with another length": ("rows/made_of", {"rows": 9999, "row_length": 31}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_record_that_contradicts_itself_is_refused(name):
    """The hash is made to fit each time, as whoever edits a record on purpose would."""
    path, value = MUTANTS[name]
    with pytest.raises(RecordError) as error:
        record.check_record(edited(recipe(), path, value))
    assert "\n" not in str(error.value)


def test_rows_may_be_the_first_of_more():
    made_of = {"rows": 9999, "row_length": 32, "rows_sha256": "0" * 64}
    record.check_record(edited(recipe(), "rows/made_of", made_of))
    record.check_record(edited(recipe(), "rows/made_of", {"rows": 160, "rows_sha256": "a" * 64}))


def test_the_hash_covers_what_nothing_else_shows(tmp_path):
    found = reference()
    found["measured"]["author"]["name"] = "someone else"
    with pytest.raises(RecordError, match="sha256"):
        record.check_record(found)
    for broken in (
        {**reference(), "format": "llama_jax.recipe.v0"},
        {**reference(), "extra": 1},
        {key: value for key, value in reference().items() if key != "checks"},
        {**reference(), "checks": []},
        [],
    ):
        with pytest.raises(RecordError):
            record.check_record(broken)
    path = tmp_path / "record.json"
    for text in ("{", json.dumps(reference())[:-40], '{"format": NaN}'):
        path.write_text(text)
        with pytest.raises(RecordError, match=r"record\.json"):
            record.read(path)
    with pytest.raises(RecordError, match="can't be read"):
        record.read(tmp_path / "nowhere.json")


def test_a_config_that_is_older_than_a_field_has_its_default():
    found = copy.deepcopy(recipe()["measured"])
    del found["config"]["data"]["validation_rows"]
    record.verify(found)
    assert record.stored_config(found["config"]).data.validation_rows == 0


def test_losses_that_are_not_finite_can_be_recorded():
    found = measured(losses=[*LOSSES[:-1], None])
    record.verify(found)


def test_a_traced_run_is_a_record_but_no_arm():
    found = recipe(steps=25)["measured"]
    assert found["run"]["profiled_steps"] == [22, 23, 24] and not found["figures"]["convergence_arm"]
    with pytest.raises(RecordError, match="profiler"):
        record.check_record(edited(recipe(steps=25), "run/profiled_steps", [19, 23, 24]))


def test_gpu_hours_and_workloads():
    assert record.gpu_hours(reference()["measured"]) == pytest.approx(0.1)
    assert record.parse_workload("128x8192") == record.PROTOCOL == record.Workload(128, 8192)
    assert record.PROTOCOL.tokens == 1_048_576
    for text in ("128", "0x8192", "128x", "128x-1", "x", "1e3x10"):
        with pytest.raises(ConfigError, match="128x8192"):
            record.parse_workload(text)
    assert measure.STEPS == 20


# Records of other frameworks.

LAYOUT = {
    "tensor-model-parallel-size": 2,
    "pipeline-model-parallel-size": 2,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 4,
    "expert-tensor-parallel-size": 1,
    "max-tokens-per-gpu": 40,
    "moe-aux-loss-coeff": 0,
}


def megatron(seconds=2.0, steps=20, model="Qwen3.5-35B-A3B", gpus=8, **arguments):
    """A record of slime on 8 GPUs."""
    found = measured("slime", seconds=seconds, model=model)
    found["stack"]["framework"] = "slime"
    found["config"] = {**LAYOUT, **{name.replace("_", "-"): value for name, value in arguments.items()}}
    found["device"]["count"], found["resolved"], found["invariants"] = gpus, {}, {}
    run = {**found["run"], "n_gpus": gpus}
    if steps == 14:
        run = run | {"steps_per_run": 14, "window": [4, 14], "tokens": [256] * 14, "seconds": [seconds] * 14}
        del run["stamps_ns"]
    found["run"], found["figures"] = run, measure.figures(run)
    found["arm"]["image"] = record.image(found["stack"])
    return found


def test_megatron_records_and_their_layout():
    record.verify(megatron())
    for words, arguments in {
        "whole replicas": {"gpus": 10},
        "do not divide by DP": {"gpus": 12},
        "no multiple of EP": {"expert_model_parallel_size": 3},
        "EP x ETP = 16": {"expert_tensor_parallel_size": 4},
        "doesn't hold a row": {"max_tokens_per_gpu": 31},
        "train with 0": {"moe_aux_loss_coeff": 0.01},
        "not a number of GPUs": {"tensor_model_parallel_size": True},
    }.items():
        with pytest.raises(RecordError, match=words):
            record.verify(megatron(**arguments))
    record.verify(megatron(context_parallel_size=2, max_tokens_per_gpu=16))  # two GPUs hold a row
    record.verify(megatron(model="Qwen3-30B-A3B", moe_aux_loss_coeff=0.01))


def test_old_runs_of_14_steps_have_an_arm_of_their_own():
    found = megatron(steps=14)
    record.verify(found)
    assert found["figures"]["window"] == [4, 14] and not found["figures"]["convergence_arm"]
    assert found["figures"]["tokens_per_s_gpu"] == 256 / (8 * 2.0) and len(found["arm"]["losses"]) == 20
