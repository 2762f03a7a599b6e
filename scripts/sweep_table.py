"""What a finished sweep shows: a table with its caveats, two CSV files, the response of the loss and heat maps."""

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llama_jax.files import write_atomic
from scripts import sweep_plan
from scripts.report_figures import INK, STYLE, look
from scripts.sweep_plan import Sweep, Values

RESULTS = ("bits_per_byte", "subset_loss", "targets", "updates", "targets_per_s", "wall_s")


class Outcome(Protocol):
    """A run that is done, as scripts/sweep.py gives it."""

    @property
    def name(self) -> str: ...
    @property
    def folder(self) -> Path: ...
    @property
    def seed(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def result(self) -> dict[str, Any]: ...


Found = Mapping[Values, Sequence[Outcome]]


def write(sweep: Sweep, found: Sequence[Found], out: Path) -> str:
    """Writes table.md, runs.csv, points.csv and figures into `out`; returns the table."""
    text = table(sweep, found)
    write_atomic(out / "table.md", text.encode())
    write_atomic(out / "runs.csv", runs_csv(sweep, found).encode())
    write_atomic(out / "points.csv", points_csv(sweep, found).encode())
    (out / "figures").mkdir(exist_ok=True)
    for name, figure in draw(sweep, found):
        for form, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 160, "facecolor": "white"})):
            image = io.BytesIO()
            with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):
                figure.savefig(image, format=form, **options)
            write_atomic(out / "figures" / f"{name}.{form}", image.getvalue())
    return f"{text}\nTable, CSV files and figures: {out}"


def table(sweep: Sweep, found: Sequence[Found]) -> str:
    """All stages as Markdown tables, best point first, and what they do not show."""
    lines = [f"# {sweep.name}", ""]
    for stage, part in enumerate(sweep.stages):
        fields, promoted = sweep.fields(stage), _promoted(sweep, found, stage)
        lines += [f"## {part.name}: {sweep.count(stage)} runs of {part.config}", ""]
        lines.append("| " + " | ".join(["", *(field.split(".")[-1] for field in fields), *_heads(sweep), ""]) + " |")
        lines.append("| ---: |" + " ---: |" * (len(fields) + len(_heads(sweep))) + " --- |")
        for place, (point, mean) in enumerate(sweep_plan.rank(sweep, _losses(found[stage])), 1):
            numbers = [outcome.loss for outcome in found[stage][point]]
            cells = [str(place), *(sweep_plan.text(value) for _, value in point), _loss(mean)]
            if len(sweep.seeds) > 1:
                cells += [_spread(numbers), ", ".join(map(_loss, numbers))]
            lines.append("| " + " | ".join([*cells, "promoted" if point in promoted else ""]) + " |")
        lines.append("")
    return "\n".join([*lines, *caveats(sweep)]) + "\n"


def caveats(sweep: Sweep) -> list[str]:
    """What the numbers do not show, as sentences."""
    several = len(sweep.seeds) > 1
    text = ["Loss in nats per target on the full validation split after the last update" + (
        f": mean and sample standard deviation over {len(sweep.seeds)} seeds." if several else "."
    )]  # fmt: skip
    if not several:
        text.append("One seed: this shows no robustness over seeds.")
    if "training.batch_targets" not in sweep.fields(len(sweep.stages) - 1):
        text.append("The batch was not varied: this shows no batch-size optimum.")
    text.append("The validation split was used to select, so its losses are no unbiased estimate of a test loss.")
    return text


def runs_csv(sweep: Sweep, found: Sequence[Found]) -> str:
    """One line a run."""
    fields = sweep.fields(len(sweep.stages) - 1)
    rows: list[list[Any]] = [["stage", "run", *fields, "seed", "state", "validation_loss", *RESULTS, "folder"]]
    for part, points in zip(sweep.stages, found, strict=True):
        for point, outcomes in points.items():
            values = dict(point)
            for outcome in outcomes:
                done = math.isfinite(outcome.loss)
                row = [part.name, outcome.folder.name, *(values.get(field, "") for field in fields), outcome.seed]
                row += ["done" if done else "diverged", outcome.loss if done else ""]
                rows.append([*row, *(outcome.result.get(key, "") for key in RESULTS), str(outcome.folder)])
    return _csv(rows)


def points_csv(sweep: Sweep, found: Sequence[Found]) -> str:
    """One line a point, best first in its stage."""
    fields = sweep.fields(len(sweep.stages) - 1)
    rows: list[list[Any]] = [["stage", "rank", *fields, "seeds", "mean_loss", "sample_sd", "promoted"]]
    for stage, part in enumerate(sweep.stages):
        promoted = _promoted(sweep, found, stage)
        for place, (point, mean) in enumerate(sweep_plan.rank(sweep, _losses(found[stage])), 1):
            values, numbers = dict(point), [outcome.loss for outcome in found[stage][point]]
            spread = statistics.stdev(numbers) if len(numbers) > 1 and math.isfinite(mean) else ""
            cells = [values.get(field, "") for field in fields]
            finite = mean if math.isfinite(mean) else ""
            rows.append([part.name, place, *cells, len(numbers), finite, spread, int(point in promoted)])
    return _csv(rows)


def draw(sweep: Sweep, found: Sequence[Found]) -> list[tuple[str, Figure]]:
    """(name, figure): the response of every stage in one figure, and heat maps of stages with two fields or more."""
    figures = []
    with matplotlib.rc_context(STYLE):
        count = len(sweep.stages)
        figure = Figure(figsize=(1 + 4.2 * count, 3.3))
        for number, (part, axes) in enumerate(
            zip(sweep.stages, figure.subplots(1, count, squeeze=False)[0], strict=True)
        ):
            _response(axes, sweep.fields(number), _losses(found[number]))
            axes.set_title(part.name, fontsize=9)
        figures.append(("response", figure))
        for number, part in enumerate(sweep.stages):
            varied = [field for field in sweep.fields(number) if len(_values(found[number], field)) > 1]
            if len(varied) > 1:
                figure = Figure()
                _heat(figure, varied[0], varied[1], _losses(found[number]))
                figures.append((f"heat-{part.name}", figure))
    return figures


def _response(axes: Axes, fields: Sequence[str], losses: Mapping[Values, Sequence[float]]) -> None:
    """Mean loss against the field with most values, one line for each combination of the others; bars: deviation."""
    field = max(fields, key=lambda name: len(_values(losses, name)))
    along = _values(losses, field)
    numeric = all(isinstance(value, int | float) for value in along)
    lines: dict[tuple, list[tuple[float, Sequence[float]]]] = {}
    for point, numbers in losses.items():
        rest = tuple((name, value) for name, value in point if name != field and len(_values(losses, name)) > 1)
        x = float(dict(point)[field]) if numeric else float(along.index(dict(point)[field]))
        lines.setdefault(rest, []).append((x, numbers))
    for index, (rest, points) in enumerate(lines.items()):
        shown = [
            (x, numbers) for x, numbers in sorted(points, key=lambda item: item[0]) if all(map(math.isfinite, numbers))
        ]
        label = ", ".join(f"{name.split('.')[-1]} {sweep_plan.text(value)}" for name, value in rest)
        bars = [statistics.stdev(numbers) if len(numbers) > 1 else 0.0 for _, numbers in shown]
        means = [statistics.fmean(numbers) for _, numbers in shown]
        axes.errorbar(
            [x for x, _ in shown], means, bars, marker="o", markersize=3, capsize=2, label=label or None, **look(index)
        )
    if numeric and len(along) > 1 and min(along) > 0 and max(along) / min(along) >= 5:
        axes.set_xscale("log")
    axes.set_xticks(
        [float(value) for value in along] if numeric else range(len(along)), list(map(sweep_plan.text, along))
    )
    axes.minorticks_off()
    axes.set_xlabel(field)
    axes.set_ylabel("nats per target")
    if axes.get_legend_handles_labels()[1]:
        axes.legend()


def _heat(figure: Figure, across: str, down: str, losses: Mapping[Values, Sequence[float]]) -> None:
    """Mean loss over two fields; where others vary too, the lowest. Cells without a point stay empty."""
    columns, rows = _values(losses, across), _values(losses, down)
    cells = [[math.nan] * len(columns) for _ in rows]
    for point, numbers in losses.items():
        values, mean = dict(point), statistics.fmean(numbers)
        i, j = rows.index(values[down]), columns.index(values[across])
        cells[i][j] = mean if math.isnan(cells[i][j]) else min(mean, cells[i][j])
    axes = figure.add_subplot()
    finite = [cell for row in cells for cell in row if math.isfinite(cell)]
    image = axes.imshow(
        [[c if math.isfinite(c) else math.nan for c in row] for row in cells], "viridis_r", aspect="auto"
    )
    for i, row in enumerate(cells):
        for j, cell in enumerate(row):
            dark = math.isfinite(cell) and cell > (min(finite) + max(finite)) / 2
            label = "" if math.isnan(cell) else _loss(cell)
            axes.text(j, i, label, ha="center", va="center", color="white" if dark else INK)
    axes.set_xticks(range(len(columns)), list(map(sweep_plan.text, columns)))
    axes.set_yticks(range(len(rows)), list(map(sweep_plan.text, rows)))
    axes.set_xlabel(across)
    axes.set_ylabel(down)
    axes.grid(False)
    others = any(name not in (across, down) and len(_values(losses, name)) > 1 for point in losses for name, _ in point)
    figure.colorbar(image, label="nats per target" + (", lowest over the other fields" if others else ""))


def _values(points: Mapping[Values, Any], field: str) -> list[Any]:
    """The different values of a field, in order where they are numbers."""
    found = list(dict.fromkeys(dict(point)[field] for point in points))
    return sorted(found) if all(isinstance(value, int | float) for value in found) else found


def _losses(found: Found) -> dict[Values, list[float]]:
    return {point: [outcome.loss for outcome in outcomes] for point, outcomes in found.items()}


def _promoted(sweep: Sweep, found: Sequence[Found], stage: int) -> list[Values]:
    last = stage + 1 == len(sweep.stages)
    return [] if last else sweep_plan.promote(sweep, stage, _losses(found[stage]))


def _heads(sweep: Sweep) -> list[str]:
    return ["validation loss"] if len(sweep.seeds) == 1 else ["mean loss", "sample sd", "each seed"]


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "diverged"


def _spread(numbers: Sequence[float]) -> str:
    return f"{statistics.stdev(numbers):.4f}" if all(map(math.isfinite, numbers)) else "none"


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
