"""Does a recipe train like its reference? Two verdicts on the losses of their arms of 20 steps.

validate() decides as Megatron-Bridge's validate_convergence does (scripts/performance/utils/evaluate.py at COMMIT),
written anew from its rules; a recipe is verified by it and by guards(), since it lets NaN, short and constant curves
pass. strict() is this project's own check, shown as a flag beside the verdict. compare() is what a record stores.

The profile is a choice of ours: "pipeline" has the values that Megatron-Bridge's argument parser and README give,
"function" those the function has where nobody passes any. They differ in the final loss and in the skipped steps.
"""

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.measure import STEPS, MeasureError

COMMIT = "067f987df03b8355b03192d88d70f1709fedf51a"
_SHARED = {
    "correlation_threshold": 0.95,
    "high_loss_tolerance": 0.10,
    "medium_loss_tolerance": 0.05,
    "low_loss_tolerance": 0.02,
    "max_outlier_ratio": 0.1,
    "outlier_threshold": 3.0,
}
PROFILES = {
    "pipeline": {**_SHARED, "final_loss_tolerance": 0.05, "skip_first_percent_loss": 0.20},
    "function": {**_SHARED, "final_loss_tolerance": 0.03, "skip_first_percent_loss": 0.0},
}
HIGH_LOSS, MEDIUM_LOSS = 2.0, 0.5  # losses above them have the high and the medium tolerance
SHOWN = 5  # pointwise failures that `details` lists

FLOOR = 1e-3  # of the reference's loss: what differs less is never held against an arm
SIGMAS = 3.0
GRAD_NORM = 0.05  # relative difference that gradient norms may have
AA_ARMS = 4  # reference runs that a noise estimate takes


def validate(current: npt.ArrayLike, golden: npt.ArrayLike, profile: str = "pipeline") -> dict[str, Any]:
    """Megatron-Bridge's check of a loss curve against a reference, [n] each, in FP64: the same decision, number for
    number, blind spots included (see guards).

    The first int(n * skip_first_percent_loss) points are dropped; then four checks, all with strict comparisons, so
    that a value on its threshold passes and a NaN does too: "correlation" (Pearson) below its threshold;
    "point_wise_tolerance", the share of points whose relative difference is above the tolerance of the reference's loss
    there; "final_loss", |c - g| / g of the last point with the sign of g (|c| where g is 0); "outliers", the share of
    differences further from their mean than outlier_threshold population standard deviations.

    -> passed, failed_metrics, summary, details, metrics {correlation, point_wise_failures, total_points,
    final_loss_current, final_loss_golden, final_loss_diff, outlier_count, outlier_ratio}: the keys of Megatron-Bridge
    with plain Python values; the texts are ours, and count four checks. Raises MeasureError for an unknown profile and
    for curves that can't be compared at all: not numbers, not two lists of one length, empty.
    """
    if profile not in PROFILES:
        raise MeasureError(f"profile {profile!r}: {' or '.join(PROFILES)}")
    limits = PROFILES[profile]
    c, g = _curve("current", current), _curve("golden", golden)
    if len(c) != len(g) or not len(c):
        raise MeasureError(f"current has {len(c)} losses, golden {len(g)}: as many are needed, at least one")
    skipped = max(0, int(len(c) * limits["skip_first_percent_loss"]))
    c, g = c[skipped:], g[skipped:]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of constant or single points, whose correlation is NaN
        correlation = float(np.corrcoef(c, g)[0, 1])
        relative = np.where(g != 0, np.abs(c - g) / np.abs(g), np.abs(c))
        final = float(abs(c[-1] - g[-1]) / g[-1] if g[-1] != 0 else abs(c[-1]))
        residual = c - g
        outlying = np.abs(residual - residual.mean()) > limits["outlier_threshold"] * residual.std()
    names = ("high_loss_tolerance", "medium_loss_tolerance", "low_loss_tolerance")
    tolerance = np.select([g > HIGH_LOSS, g > MEDIUM_LOSS], [limits[name] for name in names[:2]], limits[names[2]])
    apart, outliers = np.flatnonzero(relative > tolerance), int(outlying.sum())
    failed = {
        "correlation": correlation < limits["correlation_threshold"],
        "point_wise_tolerance": len(apart) / len(c) > limits["max_outlier_ratio"],
        "final_loss": final > limits["final_loss_tolerance"],
        "outliers": outliers / len(c) > limits["max_outlier_ratio"],
    }
    names_failed = [name for name, is_failed in failed.items() if is_failed]
    lines = [
        f"step {skipped + i}: {c[i]:.6f} against {g[i]:.6f}, {relative[i]:.4f} apart, {tolerance[i]:g} allowed"
        for i in apart[:SHOWN]
    ]
    lines += [f"and {len(apart) - SHOWN} more"] if len(apart) > SHOWN else []
    return {
        "passed": not names_failed,
        "failed_metrics": names_failed,
        "summary": f"{len(names_failed)} of 4 checks failed" if names_failed else "all 4 checks passed",
        "details": "\n".join(lines) if names_failed else "",
        "metrics": {
            "correlation": correlation,
            "point_wise_failures": len(apart),
            "total_points": len(c),
            "final_loss_current": float(c[-1]),
            "final_loss_golden": float(g[-1]),
            "final_loss_diff": final,
            "outlier_count": outliers,
            "outlier_ratio": outliers / len(c),
        },
    }


def guards(current: npt.ArrayLike, golden: npt.ArrayLike) -> list[str]:
    """Why validate() may not be believed here: "length" (not 20 losses each), "finite", "constant", or none of them."""
    curves = [_curve("current", current), _curve("golden", golden)]
    found = {
        "length": any(len(curve) != STEPS for curve in curves),
        "finite": not all(np.isfinite(curve).all() for curve in curves),
        "constant": any(len(curve) > 0 and (curve == curve[0]).all() for curve in curves),
    }
    return [name for name, is_found in found.items() if is_found]


class Arm(NamedTuple):
    """A run of 20 steps as a convergence check sees it, [20] each.

    losses: mean over all targets of the step, in FP32, before its update. grad_norms: before the clip. learning_rates:
    that the updates used. rows_sha256, init_sha256, image: of the rows, of the initial weights, and what names the
    software (an image digest, the hash of a lock file).
    """

    losses: npt.ArrayLike
    grad_norms: npt.ArrayLike
    learning_rates: npt.ArrayLike
    rows_sha256: str
    init_sha256: str
    image: str


def read_arm(record: Mapping[str, Any]) -> Arm:
    """The arm of a JSON object with exactly the fields of Arm; null stands for a loss that wasn't finite."""
    if not isinstance(record, Mapping) or set(record) != set(Arm._fields):
        raise MeasureError(f"a convergence arm has the fields {', '.join(Arm._fields)} and no others")
    arm = Arm(**{name: record[name] for name in Arm._fields})
    for name in Arm._fields[:3]:
        _curve(name, getattr(arm, name))
    for name in Arm._fields[3:]:
        if not isinstance(getattr(arm, name), str) or not getattr(arm, name):
            raise MeasureError(f"{name} of a convergence arm: a text that is not empty is needed")
    return arm


def strict(current: Arm, golden: Arm, s_aa: float | None = None) -> dict[str, Any]:
    """This project's check of an arm against the reference's, with d = current - golden losses of the 20 steps.

    s_aa: standard deviation of d between reference runs, of aa_noise(); None where none were made. Fails by
    "length", "finite"    not 20 losses, gradient norms and learning rates, or one isn't finite; nothing else is judged
    "constant"            losses that are all the same
    "rounded"             losses that all are bfloat16 numbers: logged with 0.4 % of rounding
    "rows", "init", "image", "learning_rates"   the arms don't share them; learning rates to the last bit
    "step_0"              |d_0| > FLOOR g_0: the weights are the same, so the forward pass is not
    "loss_points"         some |d_i| > max(3 s_aa, FLOOR g_i)
    "loss_mean"           |mean d| > max(3 s_aa, FLOOR mean g) / sqrt(20)
    "grad_norms"          some gradient norm more than 5 % away
    A value on its limit passes.

    Decisions: the floor stands for noise in the mean too. Without that a swap that changes nothing but rounding would
    fail wherever the kernels are nearly deterministic (s_aa close to 0). With s_aa of 0 or None the floor alone
    counts, which is the strictest setting: an arm that passes uncalibrated passes with any noise.

    -> passed, failed (names), summary, calibrated (s_aa is given), metrics {s_aa, step_0, loss_points, loss_mean,
    grad_norms}: the worst of each over its limit, so above 1 fails, and `step`, where the losses are furthest apart; no
    more than s_aa when lengths or finiteness fail. Raises MeasureError for arms that aren't lists of numbers, s_aa < 0.
    """
    if s_aa is not None and not (math.isfinite(s_aa) and s_aa >= 0):
        raise MeasureError(f"s_aa {s_aa}: a standard deviation in nats is needed, 0 or more")
    arms = [[_curve(name, getattr(arm, name)) for name in Arm._fields[:3]] for arm in (current, golden)]
    curves = [curve for arm in arms for curve in arm]
    metrics: dict[str, Any] = {"s_aa": s_aa}
    if any(len(curve) != STEPS for curve in curves):
        return _strict(["length"], metrics)
    if not all(np.isfinite(curve).all() for curve in curves):
        return _strict(["finite"], metrics)
    (c, c_norms, c_rates), (g, g_norms, g_rates) = arms
    d, noise, floor = c - g, SIGMAS * (s_aa or 0.0), FLOOR * np.abs(g)
    with np.errstate(divide="ignore", invalid="ignore"):  # a reference of 0 allows nothing, not even 0
        points = np.abs(d) / np.maximum(noise, floor)
        metrics["step_0"] = float(np.abs(d[0]) / floor[0])
        metrics["loss_points"] = float(points.max())
        metrics["loss_mean"] = float(np.abs(d.mean()) / (np.maximum(noise, floor.mean()) / math.sqrt(STEPS)))
        metrics["grad_norms"] = float((np.abs(c_norms - g_norms) / (GRAD_NORM * np.abs(g_norms))).max())
    failed = {
        "constant": bool((c == c[0]).all() or (g == g[0]).all()),
        "rounded": _is_bfloat16(c) or _is_bfloat16(g),
        "rows": current.rows_sha256 != golden.rows_sha256,
        "init": current.init_sha256 != golden.init_sha256,
        "image": current.image != golden.image,
        "learning_rates": not np.array_equal(c_rates, g_rates),
        **{name: not metrics[name] <= 1 for name in ("step_0", "loss_points", "loss_mean", "grad_norms")},
    }
    metrics["step"] = int(points.argmax())
    return _strict([name for name, is_failed in failed.items() if is_failed], metrics)


def aa_noise(arms: Sequence[Arm]) -> dict[str, Any]:
    """What the reference differs from itself by: four or more runs of it, in processes of their own.

    s_aa: root mean square of d over all pairs of arms and all steps, in nats, which is sqrt(2) standard deviations of a
    single run. One number for all steps, although such noise grows from step to step: `pairs_refused` of `pairs` says
    how often strict() with this s_aa refuses the reference against itself. Three sigma of independent noise at 20 steps
    refuse 5 % of the pairs; many more mean that these limits don't suit the run.
    largest: of |d| / g. -> JSON. Raises MeasureError for fewer arms, and for arms that strict() wouldn't compare.
    """
    if len(arms) < AA_ARMS:
        raise MeasureError(f"{len(arms)} reference arms: a noise estimate takes {AA_ARMS} or more")
    losses = [_curve("losses", arm.losses) for arm in arms]
    if any(len(curve) != STEPS or not np.isfinite(curve).all() for curve in losses):
        raise MeasureError(f"reference arms have {STEPS} finite losses each")
    pairs = list(itertools.combinations(range(len(arms)), 2))
    differences = np.stack([losses[i] - losses[j] for i, j in pairs])
    s_aa = float(np.sqrt(np.mean(differences**2)))
    return {
        "arms": len(arms),
        "s_aa": s_aa,
        "largest": float(max(np.max(np.abs(losses[i] - losses[j]) / np.abs(losses[j])) for i, j in pairs)),
        "pairs": len(pairs),
        "pairs_refused": sum(not strict(arms[i], arms[j], s_aa)["passed"] for i, j in pairs),
    }


def compare(current: Arm, golden: Arm, s_aa: float | None = None, profile: str = "pipeline") -> dict[str, Any]:
    """The convergence check of a record, JSON: the verdict that counts (validate() and guards()), and strict() beside.

    passed, guards, correlation, final_loss_diff, point_wise_failures; megatron_bridge {profile, commit, thresholds,
    passed, failed_metrics, metrics}, None where the curves can't be compared; strict. What isn't finite is null.
    """
    found = guards(current.losses, golden.losses)
    comparable = _curve("current", current.losses).size == _curve("golden", golden.losses).size > 0
    ported = validate(current.losses, golden.losses, profile) if comparable else None
    metrics = ported["metrics"] if ported else {}
    whole = {
        "passed": bool(ported and ported["passed"]) and not found,
        "guards": found,
        **{name: metrics.get(name) for name in ("correlation", "final_loss_diff", "point_wise_failures")},
        "megatron_bridge": ported
        and {"profile": profile, "commit": COMMIT, "thresholds": dict(PROFILES[profile]), **ported},
        "strict": strict(current, golden, s_aa),
    }
    return _finite(whole)


def _strict(failed: list[str], metrics: dict[str, Any]) -> dict[str, Any]:
    return {
        "passed": not failed,
        "failed": failed,
        "summary": f"failed: {', '.join(failed)}" if failed else "passed",
        "calibrated": metrics["s_aa"] is not None,
        "metrics": metrics,
    }


def _curve(name: str, values: Any) -> np.ndarray:
    """Numbers as float64 [n]; None, a JSON null, becomes NaN."""
    try:
        curve = np.asarray(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise MeasureError(f"{name}: a list of numbers is needed") from None
    if curve.ndim != 1 or np.asarray(values).dtype.kind in "USb":
        raise MeasureError(f"{name}: a list of numbers is needed")
    return curve


def _is_bfloat16(curve: np.ndarray) -> bool:
    """Whether every value has at most the 8 significant bits of bfloat16."""
    mantissas = np.frexp(curve)[0] * 256
    return bool((mantissas == np.round(mantissas)).all())


def _finite(value: Any) -> Any:
    """JSON content with None for numbers that aren't finite."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
