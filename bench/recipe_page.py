"""One self-contained HTML page about a model: its recipes on each GPU type, with tokens/s, cost, MFU, times and losses.

Every number is computed from the arrays of the records (bench.ranking); nothing is read from what they state.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import measure
from bench.gpus import Gpus
from bench.ranking import HEAD, Entry, Pair, cells
from bench.recipe_checks import summary
from bench.record import PROTOCOL
from llama_jax.errors import DataError
from llama_jax.files import write_atomic
from scripts import report, report_figures
from scripts.report import text
from scripts.report_figures import Drawing, look

PRICES = "Prices change; recompute them for your region and commitment."
MFU_NOTE = (
    "MFU is 6 N tokens/s/GPU over the dense bf16 peak. Attention scores and recomputation are not counted, so it "
    "compares recipes of one pair of model and GPU type, and lies below the rate of the hardware."
)


def page(model: str, pairs: Sequence[Pair], gpus: Gpus) -> str:
    """The page of the pairs of one model as text. Everything read is escaped."""
    first = pairs[0].entries[0].measured["model"]
    about = f"{first['active_params']:,} active and {first['parameters']:,} parameters"
    revision = first["revision"] or "no revision"
    where = f"checkpoint {first['checkpoint']}, {revision}" if first["checkpoint"] else "initial weights by seed"
    parts = [
        *report.head(f"{model}: recipes"),
        f"<header><h1>{text(model)}</h1><p>llama_jax recipes · {text(about)} · {text(where)}</p></header>",
        f"<section><h2>GPU types</h2>{_types(pairs)}{report.figures(_bars(pairs))}",
        f"<p>{text(MFU_NOTE)}</p><p>Rates: {text(gpus.source)}, {text(gpus.fetched)}. {PRICES}</p></section>",
    ]
    for number, pair in enumerate(pairs):
        head = f"{pair.gpu.type}, {pair.workload}"
        if pair.workload != PROTOCOL:
            head += f" (not the protocol's {PROTOCOL})"
        parts.append(
            f"<section><h2>{text(head)}</h2>{report.table(HEAD, list(map(cells, pair.entries)), 'numbers', True)}"
        )
        parts.append(f"<p>Rows <code>{text(pair.rows_sha256)}</code></p>")
        parts.append(report.figures(_curves(pair, number)))
        parts.extend(_details(entry) for entry in pair.entries)
        parts.append("</section>")
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _types(pairs: Sequence[Pair]) -> str:
    heads = ["GPU", "workload", "fastest verified", "tokens/s/GPU", "over reference", "$ / 1M tokens", "MFU", "GPUs"]
    rows = []
    for pair in pairs:
        best, reference = _best(pair), _reference(pair)
        entry = best or reference
        if entry is None:
            continue
        gain = f"{best.score / reference.score:.2f} x" if best and reference else "–"
        rows.append(
            [
                pair.gpu.type,
                str(pair.workload),
                best.measured["id"] if best else f"none; reference {entry.measured['id']}",
                f"{entry.score:,.1f}",
                gain,
                report.show(entry.cost, ".4f"),
                report.show(entry.mfu, ".1%"),
                str(entry.figures["n_gpus"]),
            ]
        )
    return report.table(heads, rows, "numbers")


def _best(pair: Pair) -> Entry | None:
    return next((entry for entry in pair.entries if entry.rank == 1), None)


def _reference(pair: Pair) -> Entry | None:
    return next((entry for entry in pair.entries if entry.measured["status"] == "reference"), None)


def _bars(pairs: Sequence[Pair]) -> list[Drawing]:
    """Tokens/s, cost and MFU of the fastest and the reference of each pair."""
    shown = [
        (f"{pair.gpu.type}, {name}", entry, colour)
        for pair in pairs
        for name, entry, colour in (("reference", _reference(pair), 1), ("fastest", _best(pair), 0))
        if entry is not None
    ]
    plans = [
        ("recipe_tokens", "Throughput", "tokens/s/GPU", ",.0f", lambda entry: entry.score),
        ("recipe_cost", "Cost", "$ per million tokens", ".4f", lambda entry: entry.cost),
        ("recipe_mfu", "MFU", "fraction of the dense bf16 peak", ".3f", lambda entry: entry.mfu),
    ]

    def plotter(unit: str, form: str, value: Any) -> Any:
        def plot(axes: Any) -> str:
            for name, entry, colour in shown:
                size = value(entry)
                if size is not None:
                    axes.barh(name, size, color=report_figures.COLOURS[colour], alpha=0.75, height=0.5)
                    place = {"xytext": (-4, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
                    axes.annotate(format(size, form), (size, name), **place)
            axes.set_xlabel(unit)
            axes.invert_yaxis()
            return f"{unit}, over the measured window."

        return plot

    made = (report_figures.drawing(name, title, plotter(unit, form, of)) for name, title, unit, form, of in plans)
    return [found for found in made if found is not None]


def _curves(pair: Pair, number: int) -> list[Drawing]:
    """Step times and losses of all recipes of a pair."""
    first, end = measure.WINDOW

    def times(axes: Any) -> str:
        longest = 0.0
        for index, entry in enumerate(pair.entries):
            seconds = measure.read_run(entry.measured["run"]).seconds
            longest = max(longest, *seconds[first:])
            axes.plot(range(len(seconds)), seconds, label=entry.measured["id"], marker=".", **look(index))
        axes.axvspan(first - 0.5, end - 0.5, color=report_figures.COLOURS[0], alpha=0.06, linewidth=0)
        axes.set_ylim(0, 1.25 * longest)
        _steps(axes)
        axes.set_ylabel("seconds")
        return f"Steps {first} to {end - 1} are measured; compilation, in the first, is cut off."

    def losses(axes: Any) -> str:
        for index, entry in enumerate(pair.entries):
            arm = entry.measured["arm"]["losses"]
            axes.plot(
                range(len(arm)), [math.nan if x is None else x for x in arm], label=entry.measured["id"], **look(index)
            )
        _steps(axes)
        axes.set_ylabel("nats")
        return "Mean loss of a step over all its targets, before its update."

    def apart(axes: Any) -> str:
        reference = _reference(pair)
        for index, entry in enumerate(pair.entries):
            if reference is not None and entry is not reference:
                arms = (one.measured["arm"]["losses"] for one in (entry, reference))
                differences = [a - b if None not in (a, b) else math.nan for a, b in zip(*arms, strict=True)]
                axes.plot(range(len(differences)), differences, label=entry.measured["id"], **look(index))
        _steps(axes)
        axes.set_ylabel("nats")
        return "Loss of a step minus that of the reference."

    plans = (
        (f"recipe_times_{number}", "Step time", times),
        (f"recipe_losses_{number}", "Loss", losses),
        (f"recipe_apart_{number}", "Loss against the reference", apart),
    )
    made = (report_figures.drawing(name, title, plot) for name, title, plot in plans)
    return [found for found in made if found is not None]


def _steps(axes: Any) -> None:
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _details(entry: Entry) -> str:
    measured = entry.measured
    stack, author, device = measured["stack"], measured["author"], measured["device"]
    link = f" ({author['link']})" if author["link"] else ""
    public = "" if measured["status"] != "reference" or measured["reference_public"] else ", not public"
    facts = [
        ("status", measured["status"] + public),
        ("author", author["name"] + link),
        ("command", measured["command"]),
        ("GPUs", f"{device['count']} x {device['kind']}, {device['per_node']} a node, network {device['network']}"),
        ("driver", device["driver"] or "not pinned"),
        ("framework", f"{stack['framework']}, commit {stack['commit']}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in stack["versions"].items())),
        ("XLA flags", " ".join(f"{k}={v}" for k, v in measured["environment"]["xla_flags"].items()) or "none"),
        (
            "clocks, temperature, power",
            f"{device['before'] or 'not known'} before, {device['after'] or 'not known'} after",
        ),
        ("conventions", "; ".join(f"{name}: {value}" for name, value in measured["conventions"].items())),
        *(("note", note) for note in measured["notes"]),
    ]
    checks = "" if entry.checks is None else f"<pre>{text(chr(10).join(summary(entry.checks)))}</pre>"
    body = report.table(["", measured["id"]], [[name, str(value)] for name, value in facts], "text")
    return f"<details><summary>{text(measured['id'])}: stack, command, checks</summary>{body}{checks}</details>"


def write(pairs: Sequence[Pair], gpus: Gpus, out: Path) -> list[Path]:
    """Writes a page for each model into a folder -> their paths."""
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for model in sorted({pair.model for pair in pairs}):
        path = out / f"{''.join(c if c.isalnum() or c in '-_.' else '_' for c in model)}.html"
        if path in written:
            raise DataError(f"{path}: the pages of two models have this name; give the recipes of {model!r} another")
        write_atomic(path, page(model, [pair for pair in pairs if pair.model == model], gpus).encode())
        written.append(path)
    return written
