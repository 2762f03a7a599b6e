"""The listing of recipes: a ranking for each pair of model and GPU type, made of records alone.

Everything is computed anew from the arrays of the records: figures, and the checks from the records they name. Recipes
of different pairs are never compared. A recipe is ranked when it is verified; the reference stands in the list without
a rank, and so do further runs of it and what isn't verified, with the reason.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import component, measure, recipe_checks, record
from bench.gpus import Gpu, Gpus
from bench.recipe_checks import Against
from bench.recipe_fields import BOOKKEEPING, class_of, settings
from bench.record import PROTOCOL, RecordError, Workload
from llama_jax.files import PathLike, read_json

MOST_RUNS = 3  # runs of one recipe from which their spread is shown
TIE = 2.0  # differences of scores below so many standard deviations between runs are ties


class Entry(NamedTuple):
    """A recipe of the listing. figures, cost and mfu are computed from its arrays; checks: anew, None if not checked.

    runs: scores of all runs of this recipe, its own among them. rank: from 1, None for what isn't ranked.
    tie: whether its distance to the fastest is within the spread between runs.
    """

    record: Mapping[str, Any]
    figures: Mapping[str, Any]
    gpu: Gpu
    cost: float | None
    mfu: float | None
    checks: Mapping[str, Any] | None
    runs: tuple[float, ...]
    rank: int | None = None
    tie: bool = False

    @property
    def measured(self) -> Mapping[str, Any]:
        return self.record["measured"]

    @property
    def score(self) -> float:
        return float(self.figures["tokens_per_s_gpu"])


class Pair(NamedTuple):
    """All recipes of a model on a GPU type and workload: ranked ones first, then references, then the others."""

    model: str
    gpu: Gpu
    workload: Workload
    rows_sha256: str
    entries: tuple[Entry, ...]


class Folder(NamedTuple):
    """What the files of a folder hold, by their sha256."""

    recipes: dict[str, Mapping[str, Any]]
    components: dict[str, Mapping[str, Any]]


def read_folder(paths: Iterable[PathLike]) -> Folder:
    """The records of files and folders (their *.json), verified. Raises RecordError for a file that is none."""
    recipes: dict[str, Mapping[str, Any]] = {}
    components: dict[str, Mapping[str, Any]] = {}
    names: dict[str, Path] = {}
    for path in map(Path, paths):
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            try:
                form = read_json(file).get("format")
            except (OSError, ValueError, AttributeError) as error:
                raise RecordError(f"{file}: {' '.join(str(error).split())}") from None
            found = component.read(file) if form == component.FORMAT else record.read(file)
            (components if form == component.FORMAT else recipes)[found["sha256"]] = found
            if form != component.FORMAT:
                name = found["measured"]["id"]
                if names.setdefault(name, file) != file:
                    raise RecordError(f"{file}: {names[name]} has the id {name} too")
    return Folder(recipes, components)


def against(found: Mapping[str, Any], folder: Folder) -> Against:
    """The records that the checks of a record name. Raises RecordError where one isn't there."""
    checks = found["checks"]
    try:
        return Against(
            folder.recipes[checks["reference"]],
            [folder.recipes[name] for name in checks["calibration"]],
            [folder.components[name] for name in checks["component_records"]],
        )
    except (KeyError, TypeError) as error:
        raise RecordError(f"{found['measured']['id']}: its checks name a record that isn't here: {error}") from None


def ranking(folder: Folder, gpus: Gpus, workload: Workload = PROTOCOL) -> list[Pair]:
    """The pairs, by model and GPU type, each ranked by score; ties by the earlier date, then by id.

    Raises RecordError where the checks of a record are not those that follow from the records.
    """
    pairs: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for found in folder.recipes.values():
        pairs.setdefault(recipe_checks.pair(found["measured"]), []).append(found)
    made = []
    for members in pairs.values():
        entries = [_entry(found, members, folder, gpus) for found in members]
        first = members[0]["measured"]
        ranked = sorted((entry for entry in entries if _verified(entry, workload)), key=_order)
        best = ranked[0] if ranked else None
        ranked = [entry._replace(rank=n, tie=n > 1 and _tied(entry, best)) for n, entry in enumerate(ranked, 1)]
        others = sorted((entry for entry in entries if not _verified(entry, workload)), key=_order)
        others.sort(key=lambda entry: entry.measured["status"] != "reference")
        own, gpu = Workload(**first["workload"]), entries[0].gpu
        made.append(Pair(first["model"]["name"], gpu, own, first["rows"]["rows_sha256"], (*ranked, *others)))
    return sorted(made, key=lambda pair: (pair.model, pair.gpu.type, pair.workload, pair.rows_sha256))


def _entry(found: Mapping[str, Any], members: Sequence[Mapping[str, Any]], folder: Folder, gpus: Gpus) -> Entry:
    measured = found["measured"]
    figures, gpu = measure.figures(measured["run"]), gpus.of(measured["device"]["kind"])
    score = figures["tokens_per_s_gpu"]
    checks = None
    if found["checks"] is not None:
        try:
            checks = recipe_checks.recomputed(found, against(found, folder))
        except RecordError as error:
            raise RecordError(f"{measured['id']}: {error}") from None
    same_recipe = recipe_id(measured)
    runs = [
        measure.figures(other["measured"]["run"])["tokens_per_s_gpu"]
        for other in members
        if recipe_id(other["measured"]) == same_recipe
    ]
    cost = measure.cost_per_million_tokens(gpu.rate, score)
    mfu = measure.mfu(measured["model"]["active_params"], score, gpu.peak_flops)
    return Entry(found, figures, gpu, cost, mfu, checks, tuple(sorted(runs)))


def recipe_id(measured: Mapping[str, Any]) -> str:
    """What the runs of one recipe share: a hash of all settings but bookkeeping."""
    return record.digest({path: x for path, x in settings(measured).items() if class_of(path) != BOOKKEEPING})


def _verified(entry: Entry, workload: Workload) -> bool:
    checks = entry.checks
    if entry.measured["status"] != "recipe" or checks is None or not checks["passed"]:
        return False
    return bool(checks["required_workload"] == workload._asdict())


def _order(entry: Entry) -> tuple[float, Any, str]:
    return (-entry.score, record.created(entry.measured), entry.measured["id"])


def _tied(entry: Entry, best: Entry | None) -> bool:
    """Whether a recipe is within TIE standard deviations of the fastest, where the runs of either show any."""
    spreads = [statistics.stdev(e.runs) for e in (entry, best) if e is not None and len(e.runs) >= MOST_RUNS]
    return bool(best and spreads and best.score - entry.score < TIE * max(spreads))


def verdict(entry: Entry) -> str:
    """What a recipe is, in a word or two."""
    status = entry.measured["status"]
    if entry.rank is not None:
        return "fastest" if entry.rank == 1 else f"{entry.rank}, tie with 1" if entry.tie else str(entry.rank)
    if status != "recipe":
        return status
    if entry.checks is None:
        return "not checked"
    if entry.checks["passed"]:
        return f"other workload: {Workload(**entry.measured['workload'])}"
    return "not verified: " + ", ".join(entry.checks["failed"])


def strict_flag(entry: Entry) -> str:
    if entry.checks is None:
        return "-"
    found = entry.checks["convergence"]["strict"]
    return "passed" if found["passed"] else ", ".join(found["failed"])


HEAD = ("rank", "recipe", "tokens/s/GPU", "CV", "s/step", "$ / 1M tokens", "MFU", "GPUs", "GPU-hours", "strict", "date")


def cells(entry: Entry) -> list[str]:
    """The columns HEAD of a recipe; what isn't known is a dash. Several runs: median and range beside the score."""
    figures, measured = entry.figures, entry.measured
    score = f"{entry.score:,.1f}"
    if len(entry.runs) >= MOST_RUNS:
        low, median, high = entry.runs[0], statistics.median(entry.runs), entry.runs[-1]
        score += f" ({len(entry.runs)} runs: {median:,.0f}, {low:,.0f}-{high:,.0f})"
    return [
        verdict(entry),
        measured["id"],
        score,
        f"{figures['step_time_cv']:.2%}",
        f"{figures['step_seconds']:.3f}",
        "-" if entry.cost is None else f"{entry.cost:.4f}",
        "-" if entry.mfu is None else f"{entry.mfu:.1%}",
        str(figures["n_gpus"]),
        f"{record.gpu_hours(measured):.3f}",
        strict_flag(entry),
        measured["created"][:10],
    ]


def table(pairs: Sequence[Pair]) -> str:
    """The listing as text."""
    lines: list[str] = []
    for pair in pairs:
        lines.append(f"{pair.model} on {pair.gpu.type}, {pair.workload}, rows {pair.rows_sha256[:12]}")
        rows = [list(HEAD), *(cells(entry) for entry in pair.entries)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            padded = (
                cell.ljust(width) if i in (0, 1, 9) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  " + "  ".join(padded).rstrip())
        lines.append("")
    return "\n".join(lines).rstrip()
