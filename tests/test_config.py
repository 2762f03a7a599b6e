"""Settings: counts worked out by hand, every refusal with field and range, round trips, and the list of field names."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llama_jax import config
from llama_jax.errors import ConfigError
from llama_jax.fields import FIELDS, checked

ROOT = Path(__file__).parent.parent
PRESETS = sorted((ROOT / "configs").glob("*.py"))
NUMBERS = [path for path, field in FIELDS.items() if field.type in (int, float)]
C4_20M = ROOT / "configs" / "c4_20m.py"


def load(**overrides):
    return config.load(C4_20M, {name.replace("__", "."): value for name, value in overrides.items()})


def bounds(path):
    """(low, low excluded, high, high excluded) read from the table by another way than the code's."""
    left, low, high, right = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", FIELDS[path].allowed).groups()
    number = FIELDS[path].type
    return number(float(low)), left == "(", number(float(high)), right == ")"


def outside(path):
    """Values of the field's own type that its interval leaves out."""
    low, low_open, high, high_open = bounds(path)
    if FIELDS[path].type is int:
        return [low - 1 + low_open, high + 1 - high_open, -(10**30), 10**30, 10**400]
    below = low if low_open else math.nextafter(low, -math.inf)
    above = high if high_open else math.nextafter(high, math.inf)
    return [below, above, -1.0, math.nan, math.inf, -math.inf, 10**400]


# Presets.


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_preset_loads_with_every_field_and_its_name(preset):
    loaded = config.load(preset)
    assert loaded.name == preset.stem
    for path in FIELDS:
        section, _, key = path.rpartition(".")
        assert key in (loaded[section] if section else loaded), path
    assert json.loads(json.dumps(config.to_dict(loaded))) == config.to_dict(loaded)


# Layers x (4 D^2 + 3 D F + 2 D) + V D + D, with the width, ffn and depth of each preset, by hand.
@pytest.mark.parametrize(
    ("preset", "unique", "non_embedding"),
    [
        ("c4_20m", 20_403_520, 20_403_520 - 32_000 * 320),
        ("c4_50m", 48_507_392, 48_507_392 - 32_000 * 512),
        ("c4_90m", 91_605_120, 91_605_120 - 32_000 * 640),
    ],
)
def test_parameter_counts(preset, unique, non_embedding):
    derived = config.load(ROOT / "configs" / f"{preset}.py").derived
    assert derived.unique_params == unique
    assert derived.non_embedding_params == non_embedding


@pytest.mark.parametrize(("multiple", "targets"), [(1, 408_070_144), (8, 408_068_096)])
def test_budget_of_the_20m_preset(multiple, targets):
    derived = load(training__sequence_multiple=multiple).derived
    assert derived.total_targets == targets
    assert derived.total_sequences * 1024 == targets
    assert derived.epochs == 40
    # Half a target per parameter: floor(20,403,520 / 2 / 1024) sequences, rounded down to the multiple.
    assert derived.epoch_targets == 9962 // multiple * multiple * 1024


def test_settings_of_the_c4_presets():
    small, medium, large = (config.load(ROOT / "configs" / f"c4_{size}m.py") for size in (20, 50, 90))
    for one in (small, medium, large):
        assert (one.seed, one.model.vocab_size, one.model.context, one.model.tied) == (42, 32000, 1024, True)
        assert (one.model.rope_theta, one.model.norm_eps, one.model.init_std) == (10000.0, 1e-5, 0.02)
        assert (one.optimizer.beta1, one.optimizer.eps, one.optimizer.weight_decay) == (0.9, 1e-8, 0.1)
        assert (one.optimizer.clip_norm, one.training.targets_per_parameter) == (1.0, 20.0)
        schedule = one.lr_schedule
        assert (schedule.name, schedule.warmup_steps, schedule.min_lr_ratio) == ("cosine", 312, 0.1)
        assert (one.evaluation.subset_sequences, one.evaluation.subset_seed) == (1024, 12345)
    assert [(c.optimizer.lr, c.optimizer.beta2) for c in (small, medium, large)] == [
        (0.0056, 0.98),
        (0.001, 0.99),
        (0.001, 0.99),
    ]
    assert [(c.training.batch_targets, c.training.microbatch) for c in (small, medium, large)] == [
        (131_072, 128),
        (32_768, 32),
        (32_768, 32),
    ]
    assert [c.derived.accumulation for c in (small, medium, large)] == [1, 1, 1]
    assert [c.derived.head_size for c in (small, medium, large)] == [64, 64, 64]


def test_field_names_are_frozen():
    """A renamed, new or removed field changes stored configs: do it knowingly, with the golden list."""
    golden = (Path(__file__).parent / "golden" / "config_fields.txt").read_text().split()
    assert list(FIELDS) == golden


def test_importing_the_config_needs_no_jax():
    code = "import sys, llama_jax.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# Refusals. Each message is one line that names the field and what is allowed.


def refused(overrides, *parts):
    with pytest.raises(ConfigError) as caught:
        config.load(C4_20M, overrides)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize("path", NUMBERS)
def test_numbers_out_of_range_are_refused(path):
    for value in outside(path):
        for given in (value, str(value)):
            refused({path: given}, path, FIELDS[path].allowed)


@pytest.mark.parametrize("path", NUMBERS)
def test_numbers_at_the_ends_of_their_range_are_taken(path):
    low, low_open, high, high_open = bounds(path)
    one = 1 if FIELDS[path].type is int else 0
    for end, excluded, inwards in ((low, low_open, math.inf), (high, high_open, -math.inf)):
        inner = end + int(math.copysign(1, inwards)) if one else math.nextafter(end, inwards)
        value = inner if excluded else end
        assert checked(path, FIELDS[path], value) == value


@pytest.mark.parametrize("path", list(FIELDS))
def test_values_of_another_type_are_refused(path):
    field = FIELDS[path]
    wrong = {
        int: [True, False, 1.0, 1.5, "many", [1], {}],
        float: [True, "fast", [1.0], {}],
        bool: [0, 1, 1.0, "maybe", ""],
        str: [1, True, 1.5, [], {}],
    }[field.type]
    for value in [*wrong, *([] if field.kind else [None])]:
        refused({path: value}, path)
    if isinstance(field.allowed, tuple):
        refused({path: "nonsense"}, path, *field.allowed)


def test_an_unknown_field_is_refused_with_a_suggestion():
    refused({"optimizer.lrr": 1.0}, "optimizer.lrr", "did you mean optimizer.lr?")
    refused({"training.batch_target": 1}, "did you mean training.batch_targets?")
    refused({"qqqqqqqq": 1}, "unknown config field qqqqqqqq")
    refused({"derived.total_targets": 1}, "unknown config field derived.total_targets")


def preset_file(folder, body):
    path = folder / "preset.py"
    path.write_text(
        "from llama_jax.config import default\n\n\ndef get_config():\n    config = default()\n"
        + "".join(f"    {line}\n" for line in body)
        + "    return config\n"
    )
    return path


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("config.optimizer.lrr = 0.1", "lrr"),
        ("config.optimizer.lr = 'fast'", "preset.py"),
        ("config.optimizer.lr = float('nan')", "optimizer.lr = nan is not a number in (0, 100]"),
        ("config.optimizer.lr = -0.1", "optimizer.lr = -0.1 is not a number in (0, 100]"),
        ("config.model.layers = True", "model.layers = True is not an integer in [1, 256]"),
        ("config.model.layers = 0", "model.layers = 0 is not an integer in [1, 256]"),
        ("config.optimizer = 3", "optimizer"),
        ("raise RuntimeError('broken')", "preset.py: RuntimeError: broken"),
        ("return {}", "preset.py: get_config() must return a ConfigDict"),
    ],
)
def test_a_bad_line_of_a_preset_is_refused(tmp_path, line, part):
    with pytest.raises(ConfigError, match=re.escape(part)):
        config.load(preset_file(tmp_path, [line]))


def test_a_preset_may_give_an_integer_for_a_float(tmp_path):
    loaded = config.load(preset_file(tmp_path, ["config.optimizer.lr = 1"]))
    assert loaded.optimizer.lr == 1.0
    assert type(loaded.optimizer.lr) is float


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.py does not exist"):
        config.load(tmp_path / "nowhere.py")
    (tmp_path / "preset.txt").write_text("")
    with pytest.raises(ConfigError, match=r"preset\.txt"):
        config.load(tmp_path / "preset.txt")
    with pytest.raises(ConfigError, match="does not exist"):
        config.load(tmp_path / ("long" * 100))
    for text in ("{", "[1, 2]", "3", "\udcff", '{"config": null}', "[" * 100_000):
        (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ConfigError, match=r"config\.json"):
            config.load(tmp_path / "config.json")


# Relations between fields.


def test_exactly_one_budget():
    for first, second in (("total_targets", 10**8), ("total_updates", 1000)):
        refused({f"training.{first}": second}, "training", "targets_per_parameter", first, "not 2")
    refused({"training.targets_per_parameter": None}, "targets_per_parameter, total_targets, total_updates", "not 0")
    one = {"training.targets_per_parameter": None}
    assert config.load(C4_20M, {**one, "training.total_targets": 10**8}).derived.total_targets == 97656 * 1024
    assert config.load(C4_20M, {**one, "training.total_updates": 1000}).derived.total_updates == 1000


def test_exactly_one_warmup():
    refused({"lr_schedule.warmup_fraction": 0.05}, "warmup_steps, warmup_fraction", "not 2")
    refused({"lr_schedule.warmup_steps": None}, "warmup_steps, warmup_fraction", "not 0")
    load(lr_schedule__warmup_steps=None, lr_schedule__warmup_fraction=0.0)


def test_a_warmup_longer_than_the_budget_is_refused():
    budget = {"training.targets_per_parameter": None, "training.total_targets": 312 * 131_072}
    assert config.load(C4_20M, budget).derived.total_targets == 312 * 131_072
    refused({**budget, "training.total_targets": 312 * 131_072 - 1024}, "lr_schedule.warmup_steps", "warmup_fraction")


TARGET = {  # a config of four workers that is accepted
    "decentralized.workers": 4,
    "training.microbatch": 32,
    "training.sequence_multiple": 4,
    "decentralized.adaptive.mode": "target",
    "decentralized.adaptive.min_gamma": 0.0001,
}


def test_the_distance_of_workers_can_be_held():
    assert config.load(C4_20M, TARGET).decentralized.adaptive.rho == 1


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"training.batch_targets": 131_073}, ("training.batch_targets", "1024")),
        ({"training.microbatch": 96}, ("training.microbatch", "128")),
        ({"training.microbatch": 256}, ("training.microbatch", "128")),
        ({"model.heads": 7}, ("model.heads", "320")),
        ({"model.heads": 64}, ("model.heads", "even")),
        ({"model.kv_heads": 2}, ("model.kv_heads", "5")),
        ({"model.rope_scaling": "llama3", "model.rope_low_freq": 4.0}, ("model.rope_low_freq", "model.rope_high_freq")),
        ({"runtime.mesh_data": 3}, ("runtime.mesh_data", "128")),
        ({"runtime.mesh_worker": 2}, ("runtime.mesh_worker", "1")),
        ({"decentralized.workers": 3}, ("training.batch_targets", "3072")),
        ({"decentralized.workers": 2}, ("training.microbatch", "64")),
        (
            {"decentralized.workers": 4, "training.microbatch": 32, "training.sequence_multiple": 6},
            ("training.sequence_multiple", "decentralized.workers = 4", "4 or 8"),
        ),
        ({"decentralized.adaptive.exclude": "("}, ("decentralized.adaptive.exclude", "regular expression")),
        (
            {"decentralized.adaptive.exclude": "a{99999999999}"},
            ("decentralized.adaptive.exclude", "regular expression"),
        ),
        ({"decentralized.adaptive.exclude": "[[a]"}, ("decentralized.adaptive.exclude", "regular expression")),
        ({"decentralized.adaptive.exclude": "(" * 3000 + ")" * 3000}, ("decentralized.adaptive.exclude", "no regular")),
        ({"decentralized.adaptive.mode": "target"}, ("decentralized.workers = 1", "target", "at least 2")),
        (TARGET | {"decentralized.topology": "disconnected"}, ("decentralized.topology = disconnected", "must mix")),
        (TARGET | {"decentralized.sync_every": 5}, ("decentralized.sync_every = 5", "an outer step", "equal")),
        (TARGET | {"decentralized.adaptive.min_gamma": 0.0}, ("decentralized.adaptive.min_gamma = 0.0", "0.0001")),
        (TARGET | {"decentralized.adaptive.rho": 0.0}, ("decentralized.adaptive.rho = 0.0", "(0, 100]")),
        (TARGET | {"decentralized.adaptive.kappa": 0.0}, ("decentralized.adaptive.kappa = 0.0", "(0, 2]")),
        ({"runtime.mesh_data": 2, "evaluation.batch_sequences": 3}, ("evaluation.batch_sequences", "2")),
        ({"runtime.deterministic": True, "model.attention": "xla"}, ("model.attention", "deterministic")),
        ({"runtime.deterministic": True, "model.head": "chunked"}, ("model.head", "deterministic")),
        (
            {"training.targets_per_parameter": None, "training.total_targets": 1023},
            ("training", "1 sequences of 1024 targets"),
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(overrides, parts):
    refused(overrides, *parts)


def test_a_microbatch_below_the_batch_is_accumulation():
    assert load(training__microbatch=32).derived.accumulation == 4


# Stored configs.


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_stored_config_round_trip(preset, tmp_path):
    loaded = config.load(preset)
    stored = config.to_dict(loaded)
    assert config.to_dict(config.from_dict(stored)) == stored
    assert config.to_dict(config.finalize(loaded)) == stored
    assert config.to_dict(config.finalize(config.finalize(loaded))) == stored
    for name, content in (("plain.json", stored), ("run.json", {"config": stored})):
        (tmp_path / name).write_text(json.dumps(content))
        assert config.to_dict(config.load(tmp_path / name)) == stored


def test_stored_config_takes_overrides(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(load())))
    again = config.load(tmp_path / "config.json", {"optimizer.lr": 0.004})
    assert config.diff(config.to_dict(load()), config.to_dict(again)) == [("optimizer.lr", 0.0056, 0.004)]


def test_stored_config_derives_its_numbers_afresh():
    stored = config.to_dict(load())
    stored["derived"]["total_targets"] = 1
    assert config.from_dict(stored).derived.total_targets == 408_070_144


def test_stored_config_with_missing_or_unknown_fields_is_refused():
    stored = config.to_dict(load())
    del stored["optimizer"]["beta2"]
    with pytest.raises(ConfigError, match=r"optimizer\.beta2"):
        config.from_dict(stored)
    stored = config.to_dict(load())
    stored["optimizer"]["beta3"] = 0.5
    with pytest.raises(ConfigError, match=r"optimizer\.beta3"):
        config.from_dict(stored)


def test_the_finalized_config_is_locked_and_its_source_unchanged():
    raw = config.default()
    finished = config.finalize(raw)
    assert "derived" not in raw
    with pytest.raises((AttributeError, KeyError)):
        finished.optimizer.new_field = 1


# Differences.


def test_diff_tells_recipe_from_execution():
    old = config.to_dict(load())
    new = config.to_dict(load(optimizer__lr=0.004, runtime__host_threads=2, seed=1, data__path="elsewhere"))
    recipe = [("seed", 42, 1), ("optimizer.lr", 0.0056, 0.004)]
    assert config.diff(old, new) == recipe
    assert sorted(config.diff(old, new, execution=True)) == sorted(
        [*recipe, ("data.path", "data/c4", "elsewhere"), ("runtime.host_threads", 8, 2)]
    )
    assert config.diff(old, old, execution=True) == []


def test_diff_sees_missing_fields_and_types_but_not_derived_numbers():
    old, new = config.to_dict(load()), config.to_dict(load())
    del new["model"]["remat"]
    new["model"]["tied"] = 1  # == True in Python, but another setting in JSON
    new["model"]["bias"] = True
    new["derived"]["total_targets"] = 0
    assert config.diff(old, new) == [
        ("model.tied", True, 1),
        ("model.remat", False, "absent"),
        ("model.bias", "absent", True),
    ]


# What a restart may change: everything else would change the model that is trained, or its rounding.
EXECUTION = """
name model.init_from data.path data.prefetch_groups
training.checkpoint_policy training.interval_epochs training.recovery_minutes
evaluation.batch_sequences evaluation.full_at_end log.every_updates log.consensus_every log.tensorboard log.wandb
runtime.device runtime.host_threads runtime.mesh_worker runtime.mesh_data runtime.compile_cache runtime.memory_fraction
"""


def test_execution_only_fields():
    assert {path for path, field in FIELDS.items() if field.execution} == set(EXECUTION.split())


# Command line.


def test_parse_arguments():
    file, overrides, rest = config.parse_arguments(
        ["--config=a.py", "--workdir=w", "--config.optimizer.lr=0.004", "--config.model.tied", "False", "-x", "word"]
    )
    assert (file, rest) == ("a.py", ["--workdir=w", "-x", "word"])
    assert overrides == {"optimizer.lr": "0.004", "model.tied": "False"}
    assert config.parse_arguments(["--config", "b.py"])[0] == "b.py"
    assert config.parse_arguments(["--config.data.path=a=b"])[1] == {"data.path": "a=b"}
    assert config.parse_arguments(["--configure=1"]) == (None, {}, ["--configure=1"])
    assert config.parse_arguments([]) == (None, {}, [])


@pytest.mark.parametrize("words", [["--config"], ["--config.optimizer.lr"], ["--config.optimizer.lr", "--workdir=w"]])
def test_parse_arguments_without_a_value(words):
    with pytest.raises(ConfigError, match="needs a value"):
        config.parse_arguments(words)


def test_text_overrides_take_the_type_of_their_field():
    loaded = config.load(
        C4_20M,
        {
            "optimizer.lr": "4e-3",
            "model.tied": "false",
            "model.remat": "1",
            "model.kv_heads": "1",
            "lr_schedule.warmup_steps": "None",
            "lr_schedule.warmup_fraction": "0.05",
            "data.path": "42",
            "seed": "7",
        },
    )
    assert (loaded.optimizer.lr, loaded.model.tied, loaded.model.remat, loaded.model.kv_heads) == (4e-3, False, True, 1)
    assert (loaded.lr_schedule.warmup_steps, loaded.lr_schedule.warmup_fraction) == (None, 0.05)
    assert (loaded.data.path, loaded.seed) == ("42", 7)
    for text in ("1e3", "3.5", "", "None", "12 000"):
        refused({"seed": text}, "seed", "integer")
    for text in ("maybe", "2", ""):
        refused({"model.tied": text}, "model.tied", "True or False")
