"""README tables of the speed benchmarks, from their records."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Record = dict[str, Any]


class Table(NamedTuple):
    """A table of the README: its record in bench/results, the part of the record that it needs, what makes it."""

    file: str
    part: str
    make: Callable[[Record], str]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def number(value: float | None, form: str = ".2f", scale: float = 1.0, unit: str = "") -> str:
    return "-" if value is None else format(value / scale, form) + unit


def million(value: float | None) -> str:
    return number(value, ".2f", 1e6, " M")


def gib(value: float | None) -> str:
    return number(value, ".1f", 2**30, " GiB")


def head(record: Record) -> str:
    """Device, versions and command of a record."""
    environment = record["environment"]
    versions = environment["versions"]
    torch = f", torch {versions['torch']}" if "torch" in versions and "peer " in " ".join(record["measured"]) else ""
    return f"One {environment['device']}, JAX {versions['jax']}{torch}; `{record['command']}`."


def peer(record: Record) -> str:
    """Our step against the compiled PyTorch peer."""
    rows = []
    for case, found in record["cases"].items():
        noise = max([found[f"{side}_noise"] or 0 for side in ("ours", "peer")])
        heads = [million(found["other_heads"].get(ce)) for ce in ("liger", "cce")]
        rows.append(
            [
                f"{case.split('/')[0].upper()}, {case.split('/')[1]} rows",
                million(found["ours_targets_per_s"]),
                million(found["peer_targets_per_s"]),
                f"**{number(found['ratio'])}**",
                number(noise, ".1%"),
                *(gib(found[f"{side}_peak_bytes"]) for side in ("ours", "peer")),
                *(number(found[f"{side}_compile_s"], ".0f", unit=" s") for side in ("ours", "peer")),
                found["mode"],
                " / ".join(heads) if set(heads) != {"-"} else "-",
            ]
        )
    names = ["case", "targets/s", "PyTorch", "ratio", "noise", "memory", "PyTorch", "compiling", "PyTorch"]
    packages = sorted(
        {run["package"] for run in record["measured"].values() if "package" in run and "error" not in run}
    )
    others = f" Other heads of PyTorch's: {', '.join(packages)}." if packages else ""
    return f"{head(record)}{others}\n\n" + markdown([*names, "its mode", "liger / cce"], rows)


def packed_rows(record: Record) -> str:
    """Packed workers over one worker at equal rows."""
    rows = [
        [
            f"N = {found['workers']}, {found['workers']} x {found['rows'] // found['workers']} rows",
            million(found["targets_per_s"]),
            million(found["one_worker_targets_per_s"]),
            number(found["ratio"]),
            gib(found["peak_bytes"]),
        ]
        for found in record["packed"].values()
    ]
    return f"{head(record)}\n\n" + markdown(["packed", "targets/s", "one worker", "ratio", "memory"], rows)


def ladder(record: Record) -> str:
    """From plain JAX to the default step, one field a rung."""
    rows, before = [], None
    for rung in record["ladder"]:
        rate = rung.get("targets_per_s")
        gain = f"{rate / before:.2f} x" if rate and before else "-"
        name = rung["rung"] if before is None else f"+ {rung['rung']}"
        memory = rung.get("error") or gib(rung.get("peak_bytes"))
        rows.append([name, str(rung["rows"]), number(rung.get("update_ms"), unit=" ms"), million(rate), gain, memory])
        before = rate or before
    return f"{head(record)}\n\n" + markdown(["20M", "rows", "update", "targets/s", "gain", "memory"], rows)


def packed(record: Record) -> str:
    """Packed against sequential workers, and the components of the packed step."""
    cases = sorted(record["cases"].values(), key=lambda found: (found["rows"], found["workers"]))
    compared = [
        [
            f"N = {found['workers']}, {found['rows']} rows in all",
            million(found["packed_targets_per_s"]),
            number(found["packed_ms"], unit=" ms"),
            number(found["sequential_ms"], unit=" ms"),
            number(found["sequential_mixed_ms"], unit=" ms"),
            f"**{number(found['over_sequential'], unit=' x')}**",
            number(found["noise"], ".1%"),
            f"{gib(found['packed_peak_bytes'])} / {gib(found['sequential_peak_bytes'])}",
        ]
        for found in cases
        if found["workers"] > 1
    ]
    names = ["", "targets/s", "packed", "sequential", "and mixing", "packed is", "windows differ by", "memory"]
    text = f"{head(record)}\n\n" + markdown(names, compared)
    parts = ("forward_backward", "update", "clip", "mix", "adamw", "measure")
    components = [
        [
            f"N = {found['workers']}, {found['rows']} rows",
            *(number(found[f"{part}_ms"], unit=" ms") for part in parts),
            number(found["measure_share"], ".2%"),
        ]
        for found in cases
        if found["forward_backward_ms"] is not None
    ]
    names = [
        "",
        "forward, backward",
        "the rest",
        "clip alone",
        "mix alone",
        "AdamW alone",
        "measuring",
        "its share",
    ]
    return text + ("\n" + markdown(names, components) if components else "")


def scaling(record: Record) -> str:
    """Lines over workers, context and rows."""
    names = {"workers": "workers", "context": "context"}
    text = head(record) + "\n"
    for line, keys in record["lines"].items():
        rows = []
        for key in keys:
            found = record["measured"][key]
            point = str(found[line]) if line in names else f"{found['rows']}"
            ended = [found["error"], "-", "-", "-"] if "error" in found else None
            rows.append(
                [point]
                + (
                    ended
                    or [
                        million(found["targets_per_s"]),
                        number(found["update_ms"], unit=" ms"),
                        number(found["mfu"], ".1%"),
                        gib(found["peak_bytes"]),
                    ]
                )
            )
        first = names.get(line, f"{line.upper()}: rows")
        text += "\n" + markdown([first, "targets/s", "update", "MFU", "memory"], rows)
    return text


def golden(record: Record) -> str:
    """Differences of the fast and the reference path against the noise of the reference runs."""
    found, settings = record["comparison"], record["settings"]
    verdict = "within" if found["within_noise"] else "NOT within"
    names = ("fast_reference_mean", "fast_reference_max", "reference_mean", "reference_max", "fast_mean")
    rows = [
        [
            f"{window['first_update']} to {min(window['first_update'] + 19, settings['updates'])}",
            *(number(window[name], ".4f") for name in (*names, "signed_mean", "limit")),
        ]
        for window in found["windows"]
    ]
    columns = ["updates", "fast - reference, mean", "largest", "two reference runs, mean", "largest", "two fast runs"]
    return (
        f"{head(record)} {settings['updates']} updates of `{settings['config']}`, differences in nats: the fast path "
        f"is **{verdict}** the noise of the reference path.\n\n" + markdown([*columns, "signed", "limit"], rows)
    )


def startup(record: Record) -> str:
    """Seconds until the first update, and evaluation beside the forward pass of training."""
    measured = record["measured"]
    found = measured.get("evaluation", {"error": "not measured"})
    row = [number(measured[name].get("first_update_s"), ".1f", unit=" s") for name in ("empty cache", "warm cache")]
    row += [number(found.get(f"{name}_ms"), unit=" ms") for name in ("update", "forward", "evaluation")]
    row.append("-" if "error" in found else number(found["forward_ms"] / found["evaluation_ms"]))
    columns = ["first update, empty cache", "warm cache", "update", "its forward part", "evaluation", "evaluation is"]
    return f"{head(record)}\n\n" + markdown(["", *columns], [["", *row]])


SPEED = {
    "peer": Table("peer_h200.json", "cases", peer),
    "packed_rows": Table("peer_h200.json", "packed", packed_rows),
    "ladder": Table("ladder_h200.json", "ladder", ladder),
    "packed": Table("packed_h200.json", "cases", packed),
    "scaling": Table("scaling_h200.json", "lines", scaling),
    "startup": Table("startup_h200.json", "measured", startup),
    "golden": Table("golden_h200.json", "comparison", golden),
}
