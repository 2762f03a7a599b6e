"""The checks of a recipe against its reference: configuration, component tests, convergence, and what they come to.

A recipe is verified when its workload is the protocol's, every changed setting is eligible, every swap has a passed
component test of this shape, device and software, the invariants are equal, and Megatron-Bridge's convergence check
passes with its guards. The stricter convergence check is a flag beside the verdict.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench import component, recipe_fields
from bench.convergence import AA_ARMS, aa_noise, compare, read_arm
from bench.measure import STEPS
from bench.recipe_fields import BOOKKEEPING, STRUCTURAL, SWAP, same
from bench.record import PROTOCOL, RecordError, Workload, stored_config

OF_A_MACHINE = ("device/driver", "variables/NCCL_")  # may differ between runs of a reference on machines of one type
ELIGIBLE = (BOOKKEEPING, STRUCTURAL, SWAP)
Record = Mapping[str, Any]


class Against(NamedTuple):
    """What a recipe is checked against: the reference's record, further runs of it, records of component tests."""

    reference: Record
    calibration: Sequence[Record] = ()
    components: Sequence[Record] = ()


def check(recipe: Record, against: Against, workload: Workload = PROTOCOL) -> dict[str, Any]:
    """The `checks` of a record, JSON. Raises RecordError where two records can't be compared at all."""
    measured, reference = recipe["measured"], against.reference["measured"]
    for one in (reference, *(other["measured"] for other in against.calibration)):
        if pair(one) != pair(measured):
            raise RecordError(f"{one['id']} and {measured['id']}: of another model, GPU type or workload")
    if reference["status"] != "reference":
        raise RecordError(f"{reference['id']}: its status is {reference['status']}, a reference is needed")
    arms = [against.reference["sha256"], *(other["sha256"] for other in against.calibration)]
    if len(set(arms)) != len(arms) or recipe["sha256"] in arms[1:]:
        raise RecordError("calibration: each run of the reference counts once, and none is the recipe itself")
    for other in against.calibration:
        found = configuration(reference, other["measured"])
        others = [change["field"] for change in found["changes"] if change["class"] != BOOKKEEPING]
        if found["invariants"] or not all(field.startswith(OF_A_MACHINE) for field in others):
            raise RecordError(f"{other['measured']['id']}: not another run of the reference, its settings differ")
    parts = {
        "workload": {"passed": Workload(**measured["workload"]) == workload},
        "run": {"passed": measured["run"]["steps_per_run"] <= STEPS},  # no trace; old runs have an arm of their own
        "configuration": configuration(reference, measured),
        "components": components(reference, measured, against.components),
        "convergence": convergence(reference, measured, [other["measured"] for other in against.calibration]),
    }
    return {
        "reference": against.reference["sha256"],
        "calibration": [other["sha256"] for other in against.calibration],
        "component_records": [other["sha256"] for other in against.components],
        "required_workload": workload._asdict(),
        "passed": all(part["passed"] for part in parts.values()),
        "failed": [name for name, part in parts.items() if not part["passed"]],
        **parts,
    }


def pair(measured: Mapping[str, Any]) -> tuple[Any, ...]:
    """What recipes must share to be compared: model, device, rows, workload, token count rule."""
    workload = measured["workload"]
    return (
        measured["model"]["name"],
        measured["device"]["kind"],
        measured["rows"]["rows_sha256"],
        workload["rows"],
        workload["row_length"],
        measured["run"]["tokens_counted"],
    )


def configuration(reference: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """passed, changes [field, from, to, class], invariants: names of those that differ."""
    changes = recipe_fields.changes(reference, recipe)
    before, after = reference["invariants"], recipe["invariants"]
    differing = [name for name in sorted(before.keys() | after.keys()) if not same(before.get(name), after.get(name))]
    eligible = all(change["class"] in ELIGIBLE for change in changes)
    return {"passed": eligible and not differing, "changes": changes, "invariants": differing}


def components(reference: Mapping[str, Any], recipe: Mapping[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """passed, tests: for each that the swaps need, where its best record is and what it found, or why there is none."""
    settings = stored_config(recipe["config"]).model
    tests = []
    for wanted in recipe_fields.needed(reference, recipe):
        entry: dict[str, Any] = {**wanted, "passed": False, "reason": "no test", "worst_error": None, "record": None}
        for record in records:
            for found in record["measured"]["tests"]:
                if not all(same(found[key], wanted[key]) for key in wanted):
                    continue
                reason = component.valid(found, record, recipe, settings)
                passed = found["passed"] and reason is None
                if passed or not entry["passed"]:
                    reason = reason or (None if passed else "failed")
                    entry |= {"passed": passed, "reason": reason, "worst_error": found["worst_error"]}
                    entry["record"] = record["sha256"]
        tests.append(entry)
    return {"passed": all(entry["passed"] for entry in tests), "tests": tests}


def convergence(
    reference: Mapping[str, Any], recipe: Mapping[str, Any], calibration: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """convergence.compare of the two arms; calibrated by further runs of the reference where there are enough."""
    golden = read_arm(reference["arm"])
    arms = [golden, *(read_arm(other["arm"]) for other in calibration)]
    noise = aa_noise(arms) if len(arms) >= AA_ARMS else None
    found = compare(read_arm(recipe["arm"]), golden, noise["s_aa"] if noise else None)
    return {**found, "calibration": noise}


def recomputed(record: Record, against: Against) -> dict[str, Any]:
    """The checks of a record made anew; RecordError unless they are those it states."""
    stated = record["checks"]
    try:
        workload = Workload(**stated["required_workload"])
    except (KeyError, TypeError):
        raise RecordError("checks: required_workload is missing; check the recipe again") from None
    found = check(record, against, workload)
    if where := _differs(stated, found):
        raise RecordError(f"checks: {where} is not what the records give; check the recipe again")
    return found


def summary(checks: Mapping[str, Any]) -> list[str]:
    """The checks as lines of text."""
    configured, converged = checks["configuration"], checks["convergence"]
    lines = [f"{'verified' if checks['passed'] else 'NOT verified: ' + ', '.join(checks['failed'])}"]
    for change in configured["changes"]:
        if change["class"] != BOOKKEEPING:
            lines.append(f"  {change['class']}: {change['field']}: {change['from']!r} -> {change['to']!r}")
    lines += [f"  invariant {name} differs" for name in configured["invariants"]]
    for entry in checks["components"]["tests"]:
        a, b = ("/".join(map(str, entry[side].values())) for side in "ab")
        error = "" if entry["worst_error"] is None else f", worst error {entry['worst_error']:.2e}"
        verdict = "passed" if entry["passed"] else f"not passed ({entry['reason']})"
        lines.append(f"  component {entry['component']}: {a} -> {b}: {verdict}{error}")
    if converged["correlation"] is not None and converged["final_loss_diff"] is not None:
        lines.append(
            f"  convergence: {'passed' if converged['passed'] else 'FAILED'}, correlation "
            f"{converged['correlation']:.6f}, final loss differs by {converged['final_loss_diff']:.2e}, "
            f"pointwise failures {converged['point_wise_failures']}"
        )
    if converged["guards"]:
        lines.append(f"  convergence guards: {', '.join(converged['guards'])}")
    strict, noise = converged["strict"], converged["calibration"]
    how = f"noise of {noise['arms']} reference runs {noise['s_aa']:.2e} nats" if noise else "not calibrated"
    lines.append(f"  strict flag: {strict['summary']} ({how})")
    return lines


def _differs(stated: Any, found: Any, where: str = "checks") -> str | None:
    """The first place where two JSON values differ, floats to a relative 1e-9: linear algebra differs by machine."""
    if isinstance(stated, dict) and isinstance(found, dict):
        if stated.keys() != found.keys():
            return where
        return next((at for key in found if (at := _differs(stated[key], found[key], f"{where}.{key}"))), None)
    if isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        pairs = enumerate(zip(stated, found, strict=True))
        return next((at for i, (a, b) in pairs if (at := _differs(a, b, f"{where}[{i}]"))), None)
    close = type(stated) is float and type(found) is float and math.isclose(stated, found, rel_tol=1e-9, abs_tol=1e-15)
    return None if close or same(stated, found) else where
