"""The figures of the report: drawn once with matplotlib, used inline in the page and saved as SVG and PNG files."""

import functools
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from scripts.report_runs import SMOOTHING, Run, smoothed

# Colours of the runs, in order; readable on white and told apart by most colour-blind readers. The page replaces each
# of these by a variable of its own, so that one drawing serves the light and the dark theme.
COLOURS = ["#0b6fb8", "#cc5500", "#00805a", "#b0408c", "#8a6d00", "#5b4fc4", "#3c7d8c", "#a03030"]
INK, RULE = "#1c2024", "#d9dce1"
VARIABLES = {colour: f"var(--run-{i})" for i, colour in enumerate(COLOURS)} | {INK: "var(--ink)", RULE: "var(--rule)"}
DASHES = ["-", "--", ":", "-."]
STYLE: dict[str, Any] = {
    "figure.figsize": (5.2, 3.3),
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "font.size": 9,
    "text.parse_math": False,  # names of runs are text, whatever they hold
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@dataclass(frozen=True)
class Drawing:
    """A figure in its three forms; `inline` takes its colours from the page."""

    name: str
    title: str
    caption: str
    svg: str
    inline: str
    png: bytes


def draw(runs: Sequence[Run]) -> list[Drawing]:
    """All figures that the runs have data for, deterministic to the byte for one version of matplotlib."""
    plans: list[tuple[str, str, Callable[[Axes, Sequence[Run]], str]]] = [
        ("loss", "Loss", _loss),
        ("lr", "Learning rate", _lr),
        ("grad_norm", "Gradient norm", _grad_norm),
        ("throughput", "Throughput", _throughput),
        ("workers", "Mean model and workers", _workers),
        ("consensus", "Consensus distance", _consensus),
        ("gamma", "Mixing strength", _gamma),
        ("bytes", "Loss against simulated bytes", _bytes),
        ("time", "Loss against simulated time", _time),
    ]
    made = (drawing(name, title, functools.partial(_of_runs, plot, runs)) for name, title, plot in plans)
    return [found for found in made if found is not None]


def _of_runs(plot: Callable[[Axes, Sequence[Run]], str], runs: Sequence[Run], axes: Axes) -> str:
    caption = plot(axes, runs)
    axes.set_xlabel(axes.get_xlabel() or "targets")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    return caption


def drawing(name: str, title: str, plot: Callable[[Axes], str]) -> Drawing | None:
    """One figure in the style of the page; plot(axes) draws it and returns its caption. None where it draws no data."""
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):  # ids differ between the figures of one page
        figure = Figure()
        axes = figure.add_subplot()
        caption = plot(axes)
        if not axes.has_data():
            return None
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[1]:
            axes.legend()
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        figure.savefig(png, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return Drawing(name, title, caption, svg.getvalue(), _inline(svg.getvalue(), name, title), png.getvalue())


def short(value: float) -> str:
    """A count with a unit: 408070144 is 408M."""
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{suffix}"
    return f"{value:.3g}"


def look(index: int) -> dict[str, Any]:
    """Colour and dash pattern of run number `index`."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index // len(COLOURS) % len(DASHES)]}


def _loss(axes: Axes, runs: Sequence[Run]) -> str:
    several, top, width, marked, banded = len(runs) > 1, [], 1, False, False
    for index, run in enumerate(runs):
        train, style = run.series("loss"), look(index)
        if len(train):
            mean, width = smoothed(train)
            if width > 1:
                axes.plot(train.x, train.y, color=style["color"], linewidth=0.5, alpha=0.35)
            if (train.high > train.low).any():
                axes.fill_between(train.x, train.low, train.high, color=style["color"], alpha=0.15, linewidth=0)
                banded = True
            axes.plot(train.x, mean, label=run.name if several else "training", **style)
            top.append(mean[min(len(mean) - 1, len(mean) // 20)])
        for split, marker, size in (("subset", "o", 3.5), ("validation", "D", 6)):
            points = run.evaluations(split)
            if len(points):
                label = None if several else ("validation subset" if split == "subset" else "full validation")
                colour = style["color"] if several else COLOURS[1]
                axes.plot(points.x, points.y, marker, markersize=size, color=colour, label=label, zorder=3)
                marked = True
    for entropy in sorted({float(value) for run in runs if (value := run.result.get("entropy"))}):
        _mark(axes, entropy, "entropy of the language")
    # The first updates fall from ln V and would flatten the rest: the axis starts where a twentieth of the run is done.
    low, high = axes.get_ylim()
    if top and max(top) < high:
        axes.set_ylim(top=min(high, max(top) + 0.25 * (max(top) - low)))
    axes.set_ylabel("nats per target")
    caption = "Mean next-token loss of each update"
    caption += f" (thin) and its moving mean over {2 * SMOOTHING:.0%} of the run (thick)" if width > 1 else ""
    caption += "; band: from the lowest worker to the highest" if banded else ""
    return caption + ("; dots: validation subset, diamond: full validation." if marked else ".")


def _lr(axes: Axes, runs: Sequence[Run]) -> str:
    _lines(axes, runs, "lr")
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)
    return "Learning rate at the end position of each update."


def _grad_norm(axes: Axes, runs: Sequence[Run]) -> str:
    _lines(axes, runs, "grad_norm", thin=True)
    clips = sorted({float(clip) for run in runs if (clip := run.setting("optimizer.clip_norm"))})
    for clip in clips if axes.has_data() else []:
        _mark(axes, clip, f"clip {clip:g}")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("global norm")
    return "Global norm of the gradient before clipping" + ("; the dashed line is the clip." if clips else ".")


def _throughput(axes: Axes, runs: Sequence[Run]) -> str:
    _lines(axes, runs, "targets_per_s")
    axes.set_ylabel("targets per second")
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.15)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    return "Targets per second of training, without evaluations and checkpoints."


def _workers(axes: Axes, runs: Sequence[Run]) -> str:
    for index, run in enumerate(runs):
        lines = [line for line in run.evals if line.get("split") == "subset" and line.get("local_loss")]
        if lines:
            targets, colour = [line["targets"] for line in lines], look(index)["color"]
            low, high = ([line["local_loss"][key] for line in lines] for key in ("min", "max"))
            axes.fill_between(targets, low, high, color=colour, alpha=0.2, linewidth=0)
            names = (None, run.name) if len(runs) > 1 else ("local models", "mean model")
            means, losses = [line["local_loss"]["mean"] for line in lines], [line["loss"] for line in lines]
            axes.plot(targets, means, ":", color=colour, linewidth=1, label=names[0])
            axes.plot(targets, losses, "o-", markersize=3, color=colour, label=names[1])
    axes.set_ylabel("nats per target")
    return "Validation subset: the mean model (solid), the local models' mean (dotted) and their range (band)."


def _consensus(axes: Axes, runs: Sequence[Run]) -> str:
    for index, run in enumerate(runs):
        measured, predicted = run.series("consensus_distance"), run.series("consensus_predicted")
        if len(measured):
            axes.plot(measured.x, measured.y, label=run.name if len(runs) > 1 else "measured", **look(index))
        if len(predicted):
            style = look(index) | {"linestyle": (0, (4, 3)), "linewidth": 0.8}
            axes.plot(predicted.x, predicted.y, label=None if len(runs) > 1 else "independent updates", **style)
    if axes.has_data():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("mean squared distance")
    return (
        "Mean squared distance of the workers from their mean; dashed: where it would settle if the workers' updates "
        "were noise of their present size, independent of each other and of the updates before. Momentum makes updates "
        "alike, so the measured distance lies above, and the more so the weaker the mixing."
    )


def _gamma(axes: Axes, runs: Sequence[Run]) -> str:
    _lines(axes, runs, "gamma")
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("gamma")
    return "Share of the topology's averaging that each update applies; the rest keeps the worker's own parameters."


def _bytes(axes: Axes, runs: Sequence[Run]) -> str:
    _losses(axes, runs, "simulated_bytes")
    axes.set_xlabel("bytes received by a worker")
    return "Training loss against the bytes that a worker would have received, were each a machine of its own."


def _time(axes: Axes, runs: Sequence[Run]) -> str:
    _losses(axes, runs, "simulated_s")
    axes.set_xlabel("simulated seconds")
    return "Training loss against the time that the run would have taken, were each worker a machine of its own."


def _losses(axes: Axes, runs: Sequence[Run], against: str) -> None:
    """Moving means of the training losses, over the runs in which `against` grows."""
    for index, run in enumerate(runs):
        series = run.series("loss", against)
        if len(series) and series.x[-1] > series.x[0]:
            axes.plot(series.x, smoothed(series)[0], label=run.name if len(runs) > 1 else None, **look(index))
    axes.set_ylabel("nats per target")


def _mark(axes: Axes, y: float, label: str) -> None:
    """A dashed line across the figure, with its name at the right end."""
    axes.axhline(y, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.annotate(label, (1, y), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)


def _lines(axes: Axes, runs: Sequence[Run], field: str, thin: bool = False) -> None:
    for index, run in enumerate(runs):
        series, style = run.series(field), look(index)
        if not len(series):
            continue
        if (series.high > series.low).any():
            axes.fill_between(series.x, series.low, series.high, color=style["color"], alpha=0.2, linewidth=0)
        if thin:
            axes.plot(series.x, series.y, color=style["color"], linewidth=0.5, alpha=0.35)
        axes.plot(
            series.x, smoothed(series)[0] if thin else series.y, label=run.name if len(runs) > 1 else None, **style
        )


def _inline(svg: str, name: str, title: str) -> str:
    """The drawing as an element of an HTML page: no prolog, no namespaces, own ids, the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style[^>]*>(.*?)</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'xlink:href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    head = re.match(r"<svg[^>]*>", svg)
    assert head is not None
    box = re.search(r'viewBox="[^"]*"', head.group())
    assert box is not None
    return f'<svg {box.group()} role="img" aria-label="{title}">' + svg[head.end() :].strip()
