"""The two convergence verdicts: what Megatron-Bridge decides, and what ours must refuse.

Sources: golden vectors G5 of the recipe protocol; tests/golden/convergence_vectors.jsonl, random curves and what
Megatron-Bridge's own function said of them (its first line names the commit); a tiny model trained with known defects.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bench import convergence, defects, sensitivity
from bench.convergence import Arm, aa_noise, compare, guards, read_arm, strict, validate
from bench.measure import MeasureError
from llama_jax.files import parse_json

LINE = 4 - 0.1 * np.arange(20)  # G5: all above 2
KEYS = ["correlation", "point_wise_failures", "total_points"]
KEYS += ["final_loss_current", "final_loss_golden", "final_loss_diff", "outlier_count", "outlier_ratio"]


def changed(**at):
    """LINE times a factor at some steps: step_10=1.11."""
    curve = LINE.copy()
    for name, factor in at.items():
        curve[int(name.removeprefix("step_"))] *= factor
    return curve


def both(current, golden):
    return [validate(current, golden, profile) for profile in ("pipeline", "function")]


def failures(current, golden):
    return [found["failed_metrics"] for found in both(current, golden)]


def test_golden_verdicts():
    pipeline, function = both(1.02 * LINE, LINE)
    assert pipeline["passed"] and function["passed"]
    assert pipeline["metrics"]["final_loss_diff"] == pytest.approx(0.02)
    assert failures(1.04 * LINE, LINE) == [[], ["final_loss"]]
    found = validate(LINE + 0.2, LINE)
    assert found["failed_metrics"] == ["final_loss"]
    assert found["metrics"]["final_loss_diff"] == pytest.approx(2 / 21)
    assert found["metrics"]["correlation"] == pytest.approx(1)
    assert (found["metrics"]["point_wise_failures"], found["metrics"]["total_points"]) == (0, 16)

    pipeline, function = both(changed(step_10=1.11, step_11=1.11), LINE)
    assert pipeline["failed_metrics"] == ["point_wise_tolerance"] and function["passed"]
    assert pipeline["metrics"]["point_wise_failures"] == function["metrics"]["point_wise_failures"] == 2
    assert pipeline["metrics"]["correlation"] == pytest.approx(0.9750502, abs=1e-7)
    assert function["metrics"]["correlation"] == pytest.approx(0.9858195, abs=1e-7)

    found = validate(changed(step_10=1.11), LINE)
    assert found["passed"] and found["metrics"]["correlation"] == pytest.approx(0.9858242, abs=1e-7)
    assert (found["metrics"]["point_wise_failures"], found["metrics"]["outlier_count"]) == (1, 1)
    assert found["metrics"]["outlier_ratio"] == 1 / 16

    start = np.concatenate([[99, 98, 97, 96], LINE[4:]])
    assert failures(start, LINE) == [[], ["correlation", "point_wise_tolerance"]]
    assert validate(start, LINE, "function")["metrics"]["correlation"] == pytest.approx(0.7025173, abs=1e-7)
    assert failures(np.full(20, np.nan), LINE) == [[], []]


def test_keys_and_texts_of_a_result():
    found = validate(changed(step_8=1.5, step_9=1.5), LINE)
    assert list(found) == ["passed", "failed_metrics", "summary", "details", "metrics"]
    assert list(found["metrics"]) == KEYS
    assert found["passed"] is False and found["summary"] == "2 of 4 checks failed"
    assert found["details"].splitlines()[0].startswith("step 8: 4.800000 against 3.200000, 0.5000 apart")
    assert validate(LINE, LINE)["details"] == "" and validate(LINE, LINE)["summary"] == "all 4 checks passed"
    many = validate(2 * LINE, LINE)["details"].splitlines()
    assert len(many) == 6 and many[-1] == "and 11 more"
    json.dumps(found, allow_nan=False)


def test_thresholds():
    pipeline, function = convergence.PROFILES["pipeline"], convergence.PROFILES["function"]
    shared = {"correlation_threshold": 0.95, "high_loss_tolerance": 0.1, "medium_loss_tolerance": 0.05}
    shared |= {"low_loss_tolerance": 0.02, "max_outlier_ratio": 0.1, "outlier_threshold": 3.0}
    assert pipeline == {**shared, "final_loss_tolerance": 0.05, "skip_first_percent_loss": 0.2}
    assert function == {**shared, "final_loss_tolerance": 0.03, "skip_first_percent_loss": 0.0}


def on_threshold(tolerance, low, high):
    """(golden, current) whose relative difference is exactly the tolerance in FP64."""
    for golden in np.linspace(low, high, 2000)[1:]:
        current = golden * (1 + tolerance)
        if abs(current - golden) / golden == tolerance:
            return golden, current
    raise AssertionError("none found")


@pytest.mark.parametrize(("tolerance", "low", "high"), [(0.10, 2.0, 9.0), (0.05, 0.5, 2.0), (0.02, 0.1, 0.5)])
def test_a_point_on_its_tolerance_passes(tolerance, low, high):
    golden, current = on_threshold(tolerance, low, high)
    curve = np.full(10, golden)
    for value, count in [(current, 0), (np.nextafter(current, 99), 1), (2 * golden - current * (1 + 1e-9), 1)]:
        moved = curve.copy()
        moved[5] = value
        assert validate(moved, curve, "function")["metrics"]["point_wise_failures"] == count


def test_a_loss_on_a_border_has_the_smaller_tolerance():
    for golden, tolerance in [(2.0, 0.05), (np.nextafter(2.0, 3), 0.10), (0.5, 0.02), (np.nextafter(0.5, 1), 0.05)]:
        curve = np.full(10, golden)
        for share, count in [(0.99, 0), (1.01, 1)]:
            moved = curve.copy()
            moved[5] *= 1 + share * tolerance
            assert validate(moved, curve, "function")["metrics"]["point_wise_failures"] == count


def test_a_tenth_of_the_points_may_fail():
    assert validate(changed(step_3=1.11, step_4=1.11), LINE, "function")["passed"]  # 2 of 20
    three = validate(changed(step_3=1.11, step_4=1.11, step_5=1.11), LINE, "function")
    assert "point_wise_tolerance" in three["failed_metrics"]


def test_a_correlation_on_its_threshold_passes(monkeypatch):
    current = changed(step_10=1.11)
    own = validate(current, LINE)["metrics"]["correlation"]
    for threshold, failed in [(own, []), (np.nextafter(own, 1), ["correlation"])]:
        limits = {**convergence.PROFILES["pipeline"], "correlation_threshold": threshold}
        monkeypatch.setitem(convergence.PROFILES, "pipeline", limits)
        assert validate(current, LINE)["failed_metrics"] == failed


def test_the_final_loss_on_its_tolerance_passes_and_keeps_the_sign():
    golden, current = on_threshold(0.05, 0.5, 2.0)
    curve = golden + 1 - np.arange(20) / 19
    ended = np.append(curve[:-1], current)
    curve[-1] = golden
    assert "final_loss" not in validate(ended, curve)["failed_metrics"]
    assert "final_loss" in validate(np.append(curve[:-1], np.nextafter(current, 9)), curve)["failed_metrics"]
    assert validate(-2 * LINE, -LINE)["metrics"]["final_loss_diff"] == pytest.approx(-1)  # passes, as there
    assert validate(np.append(LINE[:-1], 0.04), np.append(LINE[:-1], 0))["metrics"]["final_loss_diff"] == 0.04


def test_steps_are_skipped_by_a_rounded_down_share():
    for n, left in [(1, 1), (4, 4), (5, 4), (14, 12), (19, 16), (20, 16), (25, 20)]:
        curve = 4 - 0.01 * np.arange(n)
        assert validate(curve, curve)["metrics"]["total_points"] == left
        assert validate(curve, curve, "function")["metrics"]["total_points"] == n


def stored():
    lines = (Path(__file__).parent / "golden" / "convergence_vectors.jsonl").read_text().splitlines()
    head, *vectors = map(parse_json, lines)
    return head["verdict"], vectors


def test_random_curves_are_judged_as_by_megatron_bridge():
    names, vectors = stored()
    assert len(vectors) >= 90

    def numbers(curve):
        return [math.nan if x is None else float(x) for x in curve]

    seen = set()
    for vector in vectors:
        for profile in ("pipeline", "function"):
            expected = dict(zip(names, vector[profile], strict=True))
            found = validate(numbers(vector["current"]), numbers(vector["golden"]), profile)
            assert (found["passed"], found["failed_metrics"]) == (expected["passed"], expected["failed"])
            for name in names[2:]:
                true = math.nan if expected[name] is None else expected[name]
                value = found["metrics"][name]
                assert value == pytest.approx(true, rel=1e-9, nan_ok=True) or not (math.isfinite(value) or true == true)
            seen.update(found["failed_metrics"] or ["none"])
    assert seen == {"none", "correlation", "point_wise_tolerance", "final_loss", "outliers"}


@pytest.mark.parametrize(
    ("current", "golden", "profile"),
    [
        (LINE, LINE, "strict"),
        (LINE[:19], LINE, "pipeline"),
        ([], [], "pipeline"),
        (4.0, 4.0, "pipeline"),
        (np.ones((2, 20)), np.ones((2, 20)), "pipeline"),
        (["4"] * 20, LINE, "pipeline"),
        ("text", LINE, "pipeline"),
        ([[1], [1, 2]], LINE, "pipeline"),
        ({"a": 1}, LINE, "pipeline"),
        ([True] * 20, LINE, "pipeline"),
    ],
)
def test_what_cannot_be_compared_is_refused(current, golden, profile):
    with pytest.raises(MeasureError) as caught:
        validate(current, golden, profile)
    assert "\n" not in str(caught.value)


# Ours.

NORMS = 1 + 0.1 * np.cos(np.arange(20))
RATES = np.linspace(1e-6, 1e-5, 20)


def arm(losses=LINE, norms=NORMS, rates=RATES, rows="r", init="i", image="m"):
    return Arm(losses, norms, rates, rows, init, image)


REFERENCE = arm()


def tail_of(value):
    return np.where(np.arange(20) < 15, LINE, value)


BLIND = {  # what Megatron-Bridge's check lets pass, and why ours doesn't
    "NaN throughout": (np.full(20, np.nan), LINE, "finite"),
    "NaN at the end": (tail_of(np.nan), LINE, "finite"),
    "NaN in the reference": (LINE, tail_of(np.nan), "finite"),
    "constant": (np.full(20, 2.3), np.full(20, 2.3), "constant"),
    "constant against falling slowly": (np.full(20, 2.3), 2.3 - 1e-9 * np.arange(20), "constant"),
    "14 steps": (LINE[:14], LINE[:14], "length"),
    "25 steps": (np.append(LINE, [2] * 5), np.append(LINE, [2] * 5), "length"),
}


@pytest.mark.parametrize("name", BLIND)
def test_blind_spots_are_guarded(name):
    current, golden, reason = BLIND[name]
    if name != "constant against falling slowly":
        assert validate(current, golden)["passed"]
    assert guards(current, golden) == [reason]
    found = strict(arm(current), arm(golden))
    assert not found["passed"] and reason in found["failed"]
    whole = compare(arm(current), arm(golden))
    assert whole["passed"] is False and whole["guards"] == [reason]
    json.dumps(whole, allow_nan=False)


def test_guards_pass_a_proper_pair():
    assert guards(1.02 * LINE, LINE) == []


def test_strict_passes_an_equal_arm_and_one_on_its_limits():
    assert strict(arm(), REFERENCE)["passed"]
    sign = np.where(np.arange(20) % 2, 1, -1)
    near = arm(LINE * (1 + 0.999e-3 * sign), NORMS * 1.0499)
    found = strict(near, REFERENCE)
    assert found["passed"] and found["summary"] == "passed" and found["calibrated"] is False
    assert found["metrics"]["loss_points"] == pytest.approx(0.999)
    assert found["metrics"]["grad_norms"] == pytest.approx(0.998)
    above = strict(arm(LINE * (1 + 1.001e-3 * sign), NORMS * 1.0501), REFERENCE)
    assert above["failed"] == ["step_0", "loss_points", "grad_norms"]


def bumped(step, share):
    return LINE + np.where(np.arange(20) == step, share * LINE, 0)


SMALL = 2.5e-4 * LINE.mean()  # above FLOOR / sqrt(20) = 2.236e-4 of the mean
REFUSED = {
    "NaN gradient norm": (arm(norms=np.where(np.arange(20) == 3, np.nan, NORMS)), ["finite"]),
    "gradient norms of 19 steps": (arm(norms=NORMS[:19]), ["length"]),
    "no gradient norms": (arm(norms=[]), ["length"]),
    "infinite loss": (arm(tail_of(np.inf)), ["finite"]),
    "other rows": (arm(rows="s"), ["rows"]),
    "other weights": (arm(init="j"), ["init"]),
    "other image": (arm(image="n"), ["image"]),
    "learning rates one bit apart": (arm(rates=np.append(RATES[:-1], np.nextafter(1e-5, 1))), ["learning_rates"]),
    "step 0": (arm(bumped(0, 1.1e-3)), ["step_0", "loss_points"]),
    "one step": (arm(bumped(12, -1.1e-3)), ["loss_points"]),
    "a small bias throughout": (arm(LINE + SMALL), ["loss_mean"]),
    "a small bias downwards": (arm(LINE - SMALL), ["loss_mean"]),
    "one gradient norm": (arm(norms=np.where(np.arange(20) == 3, 1.06 * NORMS, NORMS)), ["grad_norms"]),
    "a smaller gradient norm": (arm(norms=np.where(np.arange(20) == 3, 0.94 * NORMS, NORMS)), ["grad_norms"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_strict_refuses(name):
    current, failed = REFUSED[name]
    assert strict(current, REFERENCE)["failed"] == failed
    assert strict(REFERENCE, current)["failed"] == failed


def test_strict_refuses_losses_logged_in_bfloat16():
    import jax.numpy as jnp

    rounded = np.asarray(jnp.asarray(LINE, jnp.bfloat16), np.float64)
    assert "rounded" in strict(arm(rounded), arm(rounded))["failed"]
    assert strict(arm(rounded + 1e-6), arm(rounded + 1e-6))["passed"]


def test_strict_refuses_a_reference_of_zeros():
    zeros = np.append(LINE[:-1], 0)
    assert "loss_points" in strict(arm(zeros), arm(zeros))["failed"]
    assert "grad_norms" in strict(arm(norms=np.zeros(20)), arm(norms=np.zeros(20)))["failed"]


def test_noise_of_the_reference_widens_the_limits():
    sign = np.where(np.arange(20) % 2, 1, -1)
    noisy = arm(np.append(LINE[:1], LINE[1:] + 0.02 * sign[1:]))
    assert strict(noisy, REFERENCE)["failed"] == ["loss_points", "loss_mean"]
    found = strict(noisy, REFERENCE, s_aa=0.01)
    assert found["passed"] and found["calibrated"] is True
    assert found["metrics"]["loss_points"] == pytest.approx(0.02 / 0.03)
    biased = arm(np.append(LINE[:1], LINE[1:] + 0.01))  # inside three sigma everywhere, but always above
    assert strict(biased, REFERENCE, s_aa=0.01)["failed"] == ["loss_mean"]
    assert "step_0" in strict(arm(LINE + 0.02 * sign), REFERENCE, s_aa=0.01)["failed"]  # noise is no excuse at step 0
    for s_aa in (0.0, 1e-9):  # next to nothing is not stricter than nothing
        for name, (current, failed) in REFUSED.items():
            assert strict(current, REFERENCE, s_aa=s_aa)["failed"] == failed, name
    for s_aa in (-1e-3, math.nan, math.inf):
        with pytest.raises(MeasureError):
            strict(REFERENCE, REFERENCE, s_aa)


def noisy_arms(count, sigma, seed=0):
    random = np.random.RandomState(seed)
    return [arm(LINE + sigma * np.append(0, random.standard_normal(19))) for _ in range(count)]


def test_noise_of_reference_arms():
    found = aa_noise(noisy_arms(8, 0.01))
    assert found["s_aa"] == pytest.approx(math.sqrt(2) * 0.01 * math.sqrt(19 / 20), rel=0.1)
    assert (found["arms"], found["pairs"]) == (8, 28) and found["pairs_refused"] <= 4
    assert 0.01 < found["largest"] < 0.05
    curves = np.stack([one.losses for one in noisy_arms(4, 0.01)])
    expected = math.sqrt(2 * np.var(curves, axis=0, ddof=1).mean())  # of differences, from the sample variance
    assert aa_noise(noisy_arms(4, 0.01))["s_aa"] == pytest.approx(expected, rel=1e-12)
    assert aa_noise([REFERENCE] * 4) == {"arms": 4, "s_aa": 0, "largest": 0, "pairs": 6, "pairs_refused": 0}


def test_a_reference_that_drifts_is_told():
    drifting = [arm(LINE + bias * np.append(0, np.ones(19))) for bias in (-0.01, 0, 0.01, 0.02)]
    assert aa_noise(drifting)["pairs_refused"] > 0


@pytest.mark.parametrize("arms", [[REFERENCE] * 3, [REFERENCE] * 3 + [arm(tail_of(np.nan))], [arm(LINE[:14])] * 4])
def test_noise_needs_four_whole_arms(arms):
    with pytest.raises(MeasureError):
        aa_noise(arms)


def test_what_a_record_stores():
    found = compare(arm(1.02 * LINE), REFERENCE, s_aa=0.001)
    assert found["passed"] is True and found["guards"] == []
    assert found["final_loss_diff"] == pytest.approx(0.02) and found["point_wise_failures"] == 0
    assert found["correlation"] == pytest.approx(1)
    bridge = found["megatron_bridge"]
    assert bridge["profile"] == "pipeline" and bridge["thresholds"] == convergence.PROFILES["pipeline"]
    assert bridge["commit"] == convergence.COMMIT and bridge["passed"] is True
    assert found["strict"]["failed"] == ["step_0", "loss_points", "loss_mean"]
    assert compare(arm(1.04 * LINE), REFERENCE, profile="function")["passed"] is False
    unequal = compare(arm(LINE[:19]), REFERENCE)
    assert unequal["megatron_bridge"] is None and unequal["passed"] is False and unequal["guards"] == ["length"]
    nan = compare(arm(np.full(20, np.nan)), REFERENCE)
    assert nan["megatron_bridge"]["passed"] is True and nan["correlation"] is None and nan["passed"] is False


def test_arms_of_a_record():
    fields = {name: list(value) if np.ndim(value) else value for name, value in REFERENCE._asdict().items()}
    assert strict(read_arm(parse_json(json.dumps(fields))), REFERENCE)["passed"]
    assert strict(read_arm({**fields, "losses": [None] * 20}), REFERENCE)["failed"] == ["finite"]
    wrong = [{**fields, "more": 1}, {k: v for k, v in fields.items() if k != "image"}, {**fields, "image": ""}]
    wrong += [{**fields, "rows_sha256": None}, {**fields, "losses": "text"}, {**fields, "grad_norms": 1.0}, [1]]
    for one in wrong:
        with pytest.raises(MeasureError):
            read_arm(one)


# Known defects.


# Left to the committed record: each is one more program to compile.
ONLY_RECORDED = {"recomputed layers", "norm epsilon 1e-5 -> 1e-2"}
CAUGHT = {start: [name for name in names if name not in ONLY_RECORDED] for start, names in defects.CAUGHT.items()}


@pytest.fixture(scope="module")
def trained():
    """The arms of controls and of the defects that strict() must refuse."""
    controls = [change.name for change in defects.CHANGES if change.control]
    caught = [name for names in CAUGHT.values() for name in names]
    return defects.train({*controls, *caught} - ONLY_RECORDED)


def by_change(rows, start):
    return {row["change"]: row for row in rows if row["start"] == start}


def test_trained_defects_are_refused_and_controls_pass(trained):
    rows = sensitivity.table(trained)
    for start in defects.STARTS:
        found = by_change(rows, start)
        assert [name for name in CAUGHT[start] if not found[name]["strict"]] == []
        controls = [row for row in found.values() if row["control"]]
        assert len(controls) == 6
        for row in controls:
            assert row["strict"] == [] and row["passed"], row
        noise = aa_noise([read_arm(trained[start]["reference"]), *map(read_arm, trained[start]["again"])])
        assert 0 < noise["s_aa"] < 1e-3 and noise["pairs_refused"] == 0


def test_defects_show_in_the_curves_and_not_only_in_what_an_arm_states(trained):
    for start, names in CAUGHT.items():
        golden = read_arm(trained[start]["reference"])
        for name in names:
            current = read_arm(trained[start]["changed"][name])
            hidden = current._replace(learning_rates=golden.learning_rates, init_sha256=golden.init_sha256)
            if (start, name) not in defects.STATED:
                assert not strict(hidden, golden)["passed"], (start, name)


def test_the_losses_of_an_arm_are_those_before_its_updates(trained):
    scratch = trained["from scratch"]
    start = np.log(defects.FIELDS["model.vocab_size"])
    assert scratch["reference"]["losses"][0] == pytest.approx(start, abs=0.05)
    assert scratch["changed"]["learning rate one update late"]["losses"][:2] == pytest.approx(
        [scratch["reference"]["losses"][0], scratch["reference"]["losses"][1]], abs=0.05
    )
    assert trained["fine-tuning"]["reference"]["losses"][0] < start - 0.8


def test_the_command_writes_curves_and_prints_verdicts(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(defects, "train", lambda: trained)
    sensitivity.main([f"--out={tmp_path}/made.json"])
    record = parse_json((tmp_path / "made.json").read_bytes())
    assert record["arms"] == trained and record["fields"] == defects.FIELDS
    assert record["command"] == "python -m bench.sensitivity --out=bench/results/made.json"
    assert capsys.readouterr().out.strip() == sensitivity.sensitivity(record).strip()


def test_drawn_curves():
    found = by_change(sensitivity.table({}), "drawn")
    passing = {name for name, row in found.items() if not row["strict"]}
    assert passing == set()
    blind = {name for name, row in found.items() if not row["megatron_bridge"]}
    assert {"falls with tau 3 instead of 6", "falls with tau 10 instead of 6", "NaN throughout"} <= blind
    assert found["falls with tau 15 instead of 6"]["megatron_bridge"] == ["point_wise_tolerance", "final_loss"]
    assert found["flat, the same but for noise of 0.01"]["megatron_bridge"] == ["correlation"]  # a correct arm


def test_the_committed_table():
    path = Path(sensitivity.__file__).parent / "results" / "sensitivity_cpu.json"
    record = parse_json(path.read_bytes())
    rows = sensitivity.table(record["arms"])
    for start in defects.STARTS:
        found = by_change(rows, start)
        assert {change.name for change in defects.CHANGES} < set(found)
        assert all(found[name]["strict"] for name in defects.CAUGHT[start])
        assert not any(row["strict"] for row in found.values() if row["control"])
    text = sensitivity.sensitivity(record)
    assert text.count("\n| ") == len(rows) + 2 and record["command"] in text
    record["arms"]["fine-tuning"]["changed"]["two microbatches"]["losses"][7] *= 1.01
    assert sensitivity.sensitivity(record) != text
