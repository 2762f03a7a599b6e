"""Writes one self-contained HTML page about one run or several: figures, a table, the differences, the environment.

    python scripts/report.py RUN... [--out=report.html]

RUN is a run folder, finished or not. Without --out the page of one run goes to RUN/report.html and that of several to
report.html beside the first. Each figure is also saved as SVG and PNG in the folder report_figures next to the page.
"""

import argparse
import html
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llama_jax import config as configs
from llama_jax.errors import ConfigError, run_command
from scripts import report_figures
from scripts.report_figures import Drawing, short
from scripts.report_runs import Run, read_run

CSS = Path(__file__).with_suffix(".css")
FINAL_UPDATES = 20  # the training loss of the table is a mean over this many last updates


def page(runs: Sequence[Run], drawings: Sequence[Drawing], folder: str) -> str:
    """The whole page as text; `folder` is the name of the folder with the figure files. Everything read is escaped."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    parts = [
        *head(f"{title}: llama_jax report"),
        f"<header><h1>{text(title)}</h1>{_subtitle(runs)}{_notes(runs)}</header>",
    ]
    if len(runs) == 1:
        parts.append(_tiles(runs[0]))
    if drawings:
        parts.append(f"<section><h2>Curves</h2>{figures(drawings)}")
        parts.append(f"<p>Each figure is also a file, as SVG and PNG, in <code>{text(folder)}</code>.</p></section>")
    else:
        parts.append("<section><h2>Curves</h2><p>No update has been logged yet.</p></section>")
    parts.append(f"<section><h2>{'Results' if len(runs) == 1 else 'Comparison'}</h2>{_comparison(runs)}</section>")
    parts.append(_settings(runs))
    parts.append(_environment(runs))
    parts.append("</body></html>\n")
    return "\n".join(parts)


def head(title: str) -> list[str]:
    """The beginning of a page, up to its open body."""
    return [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{text(title)}</title>",
        f"<style>\n{CSS.read_text(encoding='utf-8')}</style></head><body>",
    ]


def figures(drawings: Sequence[Drawing]) -> str:
    """The drawings side by side."""
    made = (
        f"<figure><h3>{text(d.title)}</h3>{d.inline}<figcaption>{text(d.caption)}</figcaption></figure>"
        for d in drawings
    )
    return f'<div class="figures">{"".join(made)}</div>'


def text(value: Any) -> str:
    """A value as escaped HTML text."""
    return html.escape(str(value), quote=True)


def show(value: Any, form: str | Callable[[Any], str] = ",") -> str:
    """A finite number in a format or through a function, or a dash for anything else."""
    if not _is_number(value):
        return "–"
    return format(value, form) if isinstance(form, str) else form(value)


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def facts(run: Run) -> dict[str, Any]:
    """The numbers of the table: from result.json where the run is done, else from its last lines."""
    result, last = run.result, run.train[-1] if run.train else {}
    loss, speed, mfu = run.series("loss"), run.series("targets_per_s"), run.series("mfu")
    full, subset = run.evaluations("validation"), run.evaluations("subset")
    bits = run.evaluations("validation", "bits_per_byte")

    def first(*values: Any) -> Any:
        return next((value for value in values if value is not None), None)

    targets = first(result.get("targets"), last.get("targets"))
    wall_s = first(result.get("wall_s"), last.get("wall_s"))
    return {
        "unique_params": first(result.get("unique_params"), run.setting("derived.unique_params")),
        "targets": targets,
        "updates": first(result.get("updates"), last.get("update")),
        "loss": float(loss.y[-FINAL_UPDATES:].mean()) if len(loss) else None,
        "subset_loss": float(subset.y[-1]) if len(subset) else None,
        "validation_loss": first(result.get("validation_loss"), float(full.y[-1]) if len(full) else None),
        "bits_per_byte": first(result.get("bits_per_byte"), float(bits.y[-1]) if len(bits) else None),
        "targets_per_s": first(result.get("targets_per_s"), float(np.median(speed.y)) if len(speed) else None),
        "targets_per_s_all": targets / wall_s if _is_number(targets) and _is_number(wall_s) and wall_s > 0 else None,
        "mfu": first(result.get("mfu"), float(np.median(mfu.y)) if len(mfu) else None),
        "peak_memory_bytes": result.get("peak_memory_bytes"),
        "wall_s": wall_s,
        "device": _device(first(result.get("device"), run.environment.get("device"))),
    }


COLUMNS: list[tuple[str, str, str | Callable[[Any], str]]] = [  # head, key of facts(), form
    ("parameters", "unique_params", ","),
    ("targets", "targets", ","),
    ("updates", "updates", ","),
    (f"training loss, last {FINAL_UPDATES} updates", "loss", ".4f"),
    ("subset loss, last", "subset_loss", ".4f"),
    ("validation loss", "validation_loss", ".4f"),
    ("bits per byte", "bits_per_byte", ".4f"),
    ("targets/s, training", "targets_per_s", ",.0f"),
    ("targets/s, all in", "targets_per_s_all", ",.0f"),
    ("MFU", "mfu", ".1%"),
    ("peak memory", "peak_memory_bytes", lambda v: f"{v / 2**30:.1f} GiB"),
    ("wall time", "wall_s", duration),
]


def _subtitle(runs: Sequence[Run]) -> str:
    kinds = sorted({f"config {run.setting('name')}" for run in runs if run.setting("name")})
    state = [run for run in runs if not run.result]
    done = "finished" if not state else "not finished" if len(runs) == 1 else f"{len(state)} of them not finished"
    return f"<p>llama_jax report · {text(', '.join(kinds) or 'config unknown')} · {done}</p>"


def _notes(runs: Sequence[Run]) -> str:
    lines = [(run.name if len(runs) > 1 else "", note) for run in runs for note in run.notes]
    return "".join(f'<p class="note">{text(f"{name}: {note}" if name else note)}</p>' for name, note in lines)


def _tiles(run: Run) -> str:
    values = facts(run)
    tiles: list[tuple[str, str, str | Callable[[Any], str]]] = [
        ("validation loss, nats", "validation_loss", ".4f"),
        ("bits per byte", "bits_per_byte", ".4f"),
        ("parameters", "unique_params", short),
        ("targets", "targets", short),
        ("targets per second", "targets_per_s", short),
        ("wall time", "wall_s", duration),
    ]
    cells = "".join(
        f'<div class="tile"><b>{show(values[key], form)}</b><span>{label}</span></div>' for label, key, form in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _comparison(runs: Sequence[Run]) -> str:
    heads = ["run", *(head for head, _, _ in COLUMNS), "device"]
    rows = []
    for run in runs:
        values = facts(run)
        rows.append([run.name, *(show(values[key], form) for _, key, form in COLUMNS), values["device"]])
    if len(runs) == 1:
        return table(["quantity", "value"], list(zip(heads[1:], rows[0][1:], strict=True)), "text")
    return table(heads, rows, "numbers", chips=True)


def _settings(runs: Sequence[Run]) -> str:
    """What differs: between the runs, or for a single one from the defaults; then each whole config."""
    known = [run for run in runs if run.config]
    if not known:
        return ""
    columns = [(run.name, run.config | {"resolved": run.resolved}) for run in known]
    if len(runs) == 1:
        columns = [("default", configs.to_dict(configs.default())), ("this run", columns[0][1])]
    differing = {field for _, one in columns for field, _, _ in configs.diff(columns[0][1], one, execution=True)}
    flat = [_flat(one) for _, one in columns]
    fields = [field for field in dict.fromkeys(key for one in flat for key in one) if field in differing]
    rows = [[field, *(_plain(one.get(field)) for one in flat)] for field in fields]
    title = "Settings that differ" + (" from the defaults" if len(runs) == 1 else "")
    body = table(["field", *(head for head, _ in columns)], rows, "text") if rows else "<p>None.</p>"
    for run in known:
        dump = json.dumps(run.config, indent=2, ensure_ascii=False)
        body += f"<details><summary>Whole config of {text(run.name)}</summary><pre>{text(dump)}</pre></details>"
    return f"<section><h2>{title}</h2>{body}</section>"


def _environment(runs: Sequence[Run]) -> str:
    flat = [_flat(run.environment) for run in runs]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    if not keys:
        return ""
    same = all(one == flat[0] for one in flat)
    shown = flat[:1] if same else flat
    heads = ["", *(["all runs" if len(runs) > 1 else "this run"] if same else [run.name for run in runs])]
    rows = [[key, *(_plain(one.get(key)) for one in shown)] for key in keys]
    return f"<section><h2>Environment</h2>{table(heads, rows, 'text')}</section>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], style: str, chips: bool = False) -> str:
    """An HTML table of texts, which are escaped; style: text or numbers; chips: a colour of the figures a row."""
    head = "".join(f"<th>{text(name)}</th>" for name in heads)
    body = ""
    for index, row in enumerate(rows):
        colour = index % len(report_figures.COLOURS)
        chip = f'<span class="chip" style="background:var(--run-{colour})"></span>' if chips else ""
        body += (
            "<tr>" + "".join(f"<td>{chip if i == 0 else ''}{text(cell)}</td>" for i, cell in enumerate(row)) + "</tr>"
        )
    return (
        f'<div class="scroll"><table class="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _device(value: Any) -> str:
    """A device as text; environment.json holds {"kind", "count", ...}."""
    if not isinstance(value, Mapping):
        return _plain(value)
    count, kind = value.get("count"), str(value.get("kind"))
    return kind if count in (None, 1) else f"{count} x {kind}"


def _plain(value: Any) -> str:
    """A config or environment value as a person writes it."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def write(directories: Sequence[str], out: str | None = None) -> Path:
    """Reads the runs and writes the page and the figure files. Returns the path of the page.

    Raises DataError for a folder that holds no run.
    """
    runs = [read_run(directory) for directory in directories]
    if out is not None:
        target = Path(out)
        if not target.name:
            raise ConfigError(f"--out={out} names no file")
    else:
        target = (runs[0].directory if len(runs) == 1 else runs[0].directory.resolve().parent) / "report.html"
    drawings = report_figures.draw(runs)
    folder = target.with_name(f"{target.stem}_figures")
    folder.mkdir(parents=True, exist_ok=True)
    for drawing in drawings:
        (folder / f"{drawing.name}.svg").write_text(drawing.svg, encoding="utf-8")
        (folder / f"{drawing.name}.png").write_bytes(drawing.png)
    target.write_text(page(runs, drawings, folder.name), encoding="utf-8", errors="xmlcharrefreplace")
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder")
    parser.add_argument("--out", help="the page to write")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    options = parser.parse_args(arguments)
    return run_command(lambda: print(f"report: {write(options.runs, options.out)}"), options.debug)


if __name__ == "__main__":
    sys.exit(main())
