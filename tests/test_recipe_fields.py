"""The configuration check: every setting in one class, and what each kind of change comes to."""

import copy

import pytest
from recipe_records import WORKLOAD, config, measured, recipe, reference

from bench import recipe_checks, recipe_fields, record
from bench.recipe_fields import BOOKKEEPING, CLASSES, IMAGE, OBJECTIVE, STRUCTURAL, SWAP, class_of, same
from bench.record import RecordError
from llama_jax import config as configs
from llama_jax import runtime
from llama_jax.fields import FIELDS


def against(**given):
    """(passed, {field: class}, invariants) of a recipe with these changes against the reference."""
    found = recipe_checks.configuration(measured(), measured("fast", "recipe", 1.0, **given))
    return found["passed"], {c["field"]: c["class"] for c in found["changes"]}, found["invariants"]


def test_every_config_field_has_exactly_one_class():
    """A new field fails here until somebody has decided what a change of it means."""
    classed = [path for paths in CLASSES.values() for path in paths]
    assert sorted(classed) == sorted(FIELDS), sorted(set(classed) ^ set(FIELDS))
    assert len(classed) == len(set(classed))
    assert {*CLASSES[SWAP], "resolved/gate", "resolved/rotary"} == set(recipe_fields.SWAPS)


def test_every_choice_of_a_device_is_recorded_and_classed():
    """What runtime.choose() decides without a field of the config needs a record and a class, too."""
    choices, _ = runtime.choose(config(), runtime.Device("cpu", "cpu"))
    assert set(choices) == record.RESOLVED
    named = {f"model.{name}" if f"model.{name}" in FIELDS else f"resolved/{name}" for name in choices}
    assert named == {*recipe_fields.SWAPS, "model.compute_dtype", "model.residual_dtype"} - {"model.head_chunk_rows"}


def test_the_check_of_the_classes_can_fail(monkeypatch):
    monkeypatch.setitem(FIELDS, "optimizer.momentum", FIELDS["optimizer.beta1"])
    assert class_of("optimizer.momentum") == OBJECTIVE
    with pytest.raises(AssertionError):
        test_every_config_field_has_exactly_one_class()


def test_no_change_and_bookkeeping():
    assert against() == (True, {}, [])
    fields = {"name": "other", "log.every_updates": 7, "evaluation.subset_sequences": 5, "data.path": "elsewhere"}
    passed, changes, invariants = against(fields=fields)
    assert passed and set(changes.values()) == {BOOKKEEPING} and set(changes) == set(fields) and not invariants


def test_layout_is_structural_and_its_invariants_hold():
    """Half the microbatch is twice the accumulation, since the batch is given in targets."""
    fields = {"training.microbatch": 2, "model.remat": True, "runtime.host_threads": 1, "data.prefetch_groups": 0}
    passed, changes, invariants = against(fields=fields)
    assert passed and changes == dict.fromkeys(fields, STRUCTURAL) and not invariants
    assert [config({"training.microbatch": n}).derived.accumulation for n in (2, 4)] == [4, 2]


def test_half_of_the_batch_is_no_layout():
    fields = {"training.microbatch": 2, "training.batch_targets": 4 * 31}
    found = copy.deepcopy(measured("fast", "recipe"))
    other = config(fields)
    found["config"] = configs.to_dict(other)
    found["invariants"] = record.invariants(other, found["resolved"], found["arm"])
    result = recipe_checks.configuration(measured(), found)
    assert not result["passed"]
    assert {"rows_per_step", "targets_per_step", "tokens_per_step"} <= set(result["invariants"])


OBJECTIVES = {
    "optimizer.lr": 1e-3 * (1 + 2**-52),  # one unit in the last place
    "optimizer.beta2": 0.99,
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": 0.0,
    "lr_schedule.warmup_fraction": 0.15,
    "lr_schedule.min_lr_ratio": 0.0,
    "model.norm_eps": 1e-6,
    "model.rope_theta": 500000.0,
    "model.tied": False,
    "seed": 43,
    "data.validation_rows": 1,
}


@pytest.mark.parametrize("field", OBJECTIVES)
def test_another_objective_is_not_eligible(field):
    passed, changes, _ = against(fields={field: OBJECTIVES[field]})
    assert not passed and changes == {field: OBJECTIVE}


def test_changed_schedules_and_masks_differ_in_the_invariants():
    assert "learning_rates" in against(fields={"optimizer.lr": 1e-3 * (1 + 2**-52)})[2]
    assert "clip_norm" in against(fields={"optimizer.clip_norm": 0.0})[2]
    assert {"decay_mask_sha256", "parameters"} <= set(against(fields={"model.tied": False})[2])
    passed, changes, invariants = against(resolved={"compute_dtype": "float32"})
    assert (passed, changes, invariants) == (False, {"model.compute_dtype": OBJECTIVE}, ["dtypes"])


def test_swaps_are_those_that_ran_not_the_words():
    """`auto` and its choice are the same; another implementation is a swap with its component test."""
    assert against(fields={"model.attention": "xla", "model.head": "plain"}) == (True, {}, [])
    resolved = {"attention": "cudnn", "head": "chunked", "kernels": "mosaic"}
    passed, changes, _ = against(fields={"model.head_chunk_rows": 64}, resolved=resolved)
    names = ("model.attention", "model.head", "model.kernels", "model.head_chunk_rows")
    assert passed and changes == dict.fromkeys(names, SWAP)
    fast = measured("fast", "recipe", fields={"model.head_chunk_rows": 64}, resolved=resolved)
    assert recipe_fields.needed(measured(), fast) == [
        {"component": "attention", "a": {"attention": "xla"}, "b": {"attention": "cudnn"}},
        {"component": "head", "a": {"head": "plain"}, "b": {"head": "chunked", "chunk_rows": 64, "kernels": "mosaic"}},
        {"component": "norm", "a": {"kernels": "xla"}, "b": {"kernels": "mosaic"}},
    ]
    assert recipe_fields.needed(fast, fast) == []
    assert against(resolved={"gate": "mosaic"})[:2] == (True, {"resolved/gate": SWAP})
    assert recipe_fields.needed(measured(), measured(resolved={"gate": "mosaic"})) == [
        {"component": "mlp", "a": {"gate": "xla"}, "b": {"gate": "mosaic"}}
    ]
    assert recipe_fields.needed(measured(), measured(resolved={"rotary": "mosaic"})) == [
        {"component": "projections", "a": {"rotary": "xla"}, "b": {"rotary": "mosaic"}}
    ]
    assert against(resolved={"something new": "on"})[:2] == (False, {"resolved/something new": OBJECTIVE})
    assert against(resolved={"attention": "a new one"})[:2] == (False, {"model.attention": OBJECTIVE})


def test_flags_variables_versions():
    def changed(part, name, value):
        return against(change=lambda found: found["environment"][part].update({name: value}))[:2]

    assert changed("xla_flags", "xla_allow_excess_precision", "true") == (
        False,
        {"xla_flags/xla_allow_excess_precision": OBJECTIVE},
    )
    assert changed("xla_flags", "xla_gpu_enable_latency_hiding_scheduler", "true")[0]
    assert changed("compiler_options", "xla_gpu_enable_triton_gemm", True)[1] == {
        "compiler_options/xla_gpu_enable_triton_gemm": STRUCTURAL
    }
    assert not changed("compiler_options", "xla_gpu_new", True)[0]
    assert changed("variables", "NCCL_ALGO", "Ring")[1] == {"variables/NCCL_ALGO": STRUCTURAL}
    assert changed("variables", "JAX_PLATFORMS", "cuda")[1] == {"variables/JAX_PLATFORMS": BOOKKEEPING}
    assert not changed("variables", "NVIDIA_TF32_OVERRIDE", "1")[0]
    assert not changed("variables", "JAX_DEFAULT_MATMUL_PRECISION", "tensorfloat32")[0]
    assert changed("jax", "jax_enable_x64", True) == (False, {"jax/jax_enable_x64": OBJECTIVE})
    assert not changed("jax", "jax_enable_x64", 0)[0]  # False and 0 are not the same

    passed, changes, invariants = against(change=lambda found: found["stack"]["versions"].update(jax="0.12.0"))
    assert (passed, changes, invariants) == (False, {"versions/jax": IMAGE}, ["image"])
    assert against(change=lambda found: found["stack"]["versions"].update(cudnn="9"))[1] == {"versions/cudnn": IMAGE}
    passed, changes, invariants = against(change=lambda found: found["stack"].update(code_sha256="e" * 64))
    assert (passed, changes, invariants) == (False, {"code/sha256": IMAGE}, ["image"])
    assert against(change=lambda found: found["stack"].update(commit="f" * 40)) == (True, {}, [])


def test_flags_are_parsed():
    text = "--xla_a=1 --xla_b --xla_c='x y' --xla_a=2"
    assert recipe_fields.parse_flags(text) == {"xla_a": "2", "xla_b": "true", "xla_c": "x y"}
    assert recipe_fields.parse_flags("") == {}


@pytest.mark.parametrize(
    ("a", "b"),
    [(True, 1), (1, 1.0), (0, False), ("1", 1), (None, False), ([1], [True]), ({"a": 1}, {"a": 1.0}), ((1,), [1])],
)
def test_equality_is_of_types_too(a, b):
    assert not same(a, b) and not same(b, a) and same(a, a) and same(b, b)


def test_a_recipe_is_compared_with_a_reference_of_its_pair():
    for other in (recipe(kind="NVIDIA B200"), recipe(model="another")):
        with pytest.raises(RecordError, match="another model, GPU type or workload"):
            recipe_checks.check(other, recipe_checks.Against(reference()), WORKLOAD)
    with pytest.raises(RecordError, match="a reference is needed"):
        recipe_checks.check(recipe(), recipe_checks.Against(recipe("second")), WORKLOAD)
    changed = reference(name="again", status="calibration", fields={"training.microbatch": 2})
    with pytest.raises(RecordError, match="not another run"):
        recipe_checks.check(recipe(), recipe_checks.Against(reference(), [changed]), WORKLOAD)


def test_arguments_of_megatron():
    from test_record import megatron

    def found(**arguments):
        result = recipe_checks.configuration(megatron(), megatron(**arguments))
        return result["passed"], {c["field"].removeprefix("arguments/"): c["class"] for c in result["changes"]}

    assert found() == (True, {})
    assert found(max_tokens_per_gpu=80) == (True, {"max-tokens-per-gpu": STRUCTURAL})
    assert found(moe_aux_loss_coeff=0.0) == (False, {"moe-aux-loss-coeff": OBJECTIVE})  # 0 and 0.0: not the same type
    assert found(attention_backend="flash") == (False, {"attention-backend": OBJECTIVE})
    assert found(lr=1e-5) == (False, {"lr": OBJECTIVE})
    assert recipe_fields.needed(megatron(), megatron(lr=1e-5)) == []
