"""scripts/report.py on run folders written here: what it reads, that the page is whole, escaped and self-contained."""

import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from llama_jax import config as configs
from llama_jax.errors import ConfigError, DataError
from scripts import report, report_figures
from scripts.report_runs import Series, read_run, smoothed

ROOT = Path(__file__).resolve().parent.parent
BATCH = 131072
VOID = {"meta", "br", "hr", "img", "link", "input"}


def write_run(directory, updates=200, finished=True, lr=0.0056, workers=1, tail="\n", environment=None):
    """A run folder as training writes it; its loss is 3 + 7 exp(-update / 40)."""
    directory.mkdir()
    cfg = configs.default()
    cfg.name = directory.name
    cfg.training.targets_per_parameter = None
    cfg.training.total_updates = 200
    cfg.lr_schedule.warmup_steps = 20
    cfg.optimizer.lr = lr
    stored = {"config": configs.to_dict(configs.finalize(cfg)), "resolved": {"attention": "xla"}, "data": {}}
    (directory / "config.json").write_text(json.dumps(stored))
    start = environment or {"versions": {"jax": "0.99"}, "device": {"kind": "TFRT", "count": 4}}
    (directory / "environment.json").write_text(json.dumps({"starts": [{"versions": {"jax": "0.1"}}, start]}))
    lines = []
    for update in range(1, updates + 1):
        loss = 3 + 7 * math.exp(-update / 40)
        line = {"kind": "train", "update": update, "targets": update * BATCH, "lr": lr * min(1, update / 20)}
        line |= {"loss": loss, "grad_norm": 1 + 1 / update, "targets_per_s": 1000.0 + update, "mfu": 0.4}
        if workers > 1:
            line |= {"worker_loss": [loss + i - (workers - 1) / 2 for i in range(workers)], "gamma": update / 200}
            line |= {"consensus_distance": 4.0, "consensus_predicted": 8.0} if update % 20 == 0 else {}
        lines.append(line)
        if update % 50 == 0:
            line = {"kind": "eval", "update": update, "targets": update * BATCH, "split": "subset", "loss": 3.5}
            lines.append(line | ({"local_loss": {"mean": 4.0, "min": 3.75, "max": 4.5}} if workers > 1 else {}))
    if finished:
        place = {"kind": "eval", "update": updates, "targets": updates * BATCH}
        lines.append(place | {"split": "validation", "loss": 3.25, "bits_per_byte": 1.1})
        done = {"unique_params": 20403520, "targets": updates * BATCH, "updates": updates, "validation_loss": 3.25}
        done |= {"bits_per_byte": 1.1, "wall_s": 3725.2, "device": "test device"}
        done |= {"entropy": 2.5, "peak_memory_bytes": 3 * 2**30}
        (directory / "result.json").write_text(json.dumps(done))
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + tail)
    return directory


class Page(HTMLParser):
    """Checks that tags close in order, and collects tags, attributes and text."""

    def __init__(self, content):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend((tag, key, value) for key, value in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend((tag, key, value) for key, value in attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


def render(*directories, out):
    return Page(report.write([str(directory) for directory in directories], str(out)).read_text(encoding="utf-8"))


def test_page_of_one_run(tmp_path):
    run = write_run(tmp_path / "run")
    target = report.write([str(run)])
    assert target == run / "report.html"
    page = Page(target.read_text(encoding="utf-8"))
    assert page.tags.count("svg") == page.tags.count("figure") == 4
    for expected in (
        "3.2500",
        "1.1000",
        "20,403,520",
        f"{200 * BATCH:,}",
        "1:02:05",
        "test device",
        "40.0%",
        "3.0 GiB",
        "1,100",
    ):
        assert expected in page.text, expected
    last = np.mean([3 + 7 * math.exp(-update / 40) for update in range(181, 201)])
    assert f"{last:.4f}" in page.text
    assert f"{200 * BATCH / 3725.2:,.0f}" in page.text
    assert "entropy of the language" in page.text
    assert "· finished" in page.text
    assert re.search(r"training\.total_updates\s+–\s+200", page.text)
    assert re.search(r"resolved\.attention\s+–\s+xla", page.text)
    assert re.search(r"versions\.jax\s+0\.99", page.text)
    assert re.search(r"starts\s+2", page.text)


def test_page_needs_nothing_from_outside(tmp_path):
    page = render(write_run(tmp_path / "a"), write_run(tmp_path / "b"), out=tmp_path / "page.html")
    content = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "//" not in re.sub(r"<pre>.*?</pre>", "", content, flags=re.DOTALL)
    assert "@import" not in content
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(page.tags)
    for tag, key, value in page.attributes:
        if key in ("href", "src", "xlink:href", "srcset", "data", "action"):
            assert value.startswith("#"), (tag, key, value)
        assert not key.startswith("on")
    assert all(inside.startswith("#") for inside in re.findall(r"url\(([^)]*)\)", content))


def test_ids_are_unique_and_resolve(tmp_path):
    page = render(write_run(tmp_path / "run"), out=tmp_path / "page.html")
    content = (tmp_path / "page.html").read_text(encoding="utf-8")
    ids = [value for _, key, value in page.attributes if key == "id"]
    assert ids
    assert len(ids) == len(set(ids))
    used = {value[1:] for _, key, value in page.attributes if key == "href"} | set(
        re.findall(r"url\(#([^)]*)\)", content)
    )
    assert used
    assert used <= set(ids)


def test_everything_read_is_escaped(tmp_path):
    evil = '<script>alert("1")</script>&amp;'
    run = write_run(tmp_path / "<b>&amp;", environment={evil: {evil: evil}})
    stored = json.loads((run / "config.json").read_text())
    stored["config"]["data"]["path"] = evil
    (run / "config.json").write_text(json.dumps(stored))
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"device": evil, "wall_s": evil, "targets": evil}))
    for others in ((), (write_run(tmp_path / "a $x"),)):
        page = render(run, *others, out=tmp_path / "page.html")
        assert "script" not in page.tags
        assert "b" not in page.tags[: page.tags.index("h1") + 2]
        assert evil in page.text
        assert "<b>&amp;" in page.text


def test_comparison(tmp_path):
    a, b = write_run(tmp_path / "first"), write_run(tmp_path / "second", lr=0.003, updates=120, finished=False)
    page = render(a, b, out=tmp_path / "page.html")
    assert "2 runs compared" in page.text
    assert "second: unfinished: 120 of 200 updates so far" in page.text
    assert re.search(r"optimizer\.lr\s+0\.0056\s+0\.003", page.text)
    assert "optimizer.beta1 " not in re.sub(r"Whole config.*", "", page.text)
    assert re.search(r"second\s+20,403,520\s+15,728,640\s+120\s+", page.text)
    assert "4 x TFRT" in page.text
    assert report.write([str(a), str(b)]) == tmp_path / "report.html"


def test_figures_are_files_too(tmp_path):
    run = write_run(tmp_path / "run", workers=3)
    report.write([str(run)], str(tmp_path / "out" / "page.html"))
    folder = tmp_path / "out" / "page_figures"
    names = ["consensus", "gamma", "grad_norm", "loss", "lr", "throughput", "workers"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{n}.{e}" for n in names for e in ("png", "svg"))
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert ElementTree.parse(folder / f"{name}.svg").getroot().tag.endswith("}svg")
    assert "clip 1" in (folder / "grad_norm.svg").read_text(encoding="utf-8")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    page = (tmp_path / "out" / "page.html").read_bytes()
    report.write([str(run)], str(tmp_path / "out" / "page.html"))
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert page == (tmp_path / "out" / "page.html").read_bytes()


def test_figures_of_workers(tmp_path):
    """Loss of each update with the band of the workers, local models, measured and predicted distance, gamma."""
    one, three = (read_run(write_run(tmp_path / f"run{n}", workers=n)) for n in (1, 3))
    assert {drawing.name for drawing in report_figures.draw([one])} == {"loss", "lr", "grad_norm", "throughput"}
    axes = {}
    for name, plot in (
        ("loss", report_figures._loss),
        ("workers", report_figures._workers),
        ("consensus", report_figures._consensus),
        ("gamma", report_figures._gamma),
    ):
        axes[name] = Figure().add_subplot()
        plot(axes[name], [three])
    band = axes["loss"].collections[0].get_paths()[0].vertices
    update = 100 * BATCH
    loss = 3 + 7 * math.exp(-100 / 40)
    assert sorted({y for x, y in band if x == update}) == pytest.approx([loss - 1, loss + 1])
    band = axes["workers"].collections[0].get_paths()[0].vertices
    assert {y for x, y in band if x == update} == {3.75, 4.5}
    assert [set(line.get_ydata()) for line in axes["workers"].get_lines()] == [{4.0}, {3.5}]
    assert [line.get_label() for line in axes["consensus"].get_lines()] == ["measured", "independent updates"]
    assert [set(line.get_ydata()) for line in axes["consensus"].get_lines()] == [{4.0}, {8.0}]
    (gamma,) = axes["gamma"].get_lines()
    np.testing.assert_array_equal(gamma.get_ydata(), np.arange(1, 201) / 200)
    page = render(three.directory, out=tmp_path / "page.html")
    assert "Consensus distance" in page.text and "Mixing strength" in page.text


def test_colours_follow_the_theme(tmp_path):
    drawings = report_figures.draw([read_run(write_run(tmp_path / "run"))])
    css = (ROOT / "scripts" / "report.css").read_text(encoding="utf-8")
    for drawing in drawings:
        assert "var(--run-0)" in drawing.inline
        assert not re.search(r"(stroke|fill): #(?!fff)", drawing.inline), drawing.name
        for variable in set(re.findall(r"var\((--[\w-]+)\)", drawing.inline)):
            assert css.count(f"{variable}:") == 2, f"{variable} has no light or no dark value"


@pytest.mark.parametrize("tail", ['\n{"kind": "train", "update": 61, "targ', '\n{"kind": "train", "update": 61}'])
def test_torn_last_line(tmp_path, tail):
    run = read_run(write_run(tmp_path / "run", updates=60, finished=False, tail=tail))
    assert run.notes == ("unfinished: 60 of 200 updates so far", "metrics.jsonl: the last line is cut off")
    assert [line["update"] for line in run.train] == list(range(1, 61))
    assert "cut off" in render(run.directory, out=tmp_path / "page.html").text


def test_broken_lines_are_named_and_repeats_count_once(tmp_path):
    directory = write_run(tmp_path / "run", updates=3)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    again = json.dumps(json.loads(lines[1]) | {"loss": 9.0})
    (directory / "metrics.jsonl").write_text("\n".join([lines[0], "garbage", *lines[1:], again]) + "\n")
    run = read_run(directory)
    assert run.notes == ("metrics.jsonl: line 2 is broken",)
    assert [line["update"] for line in run.train] == [1, 2, 3]
    assert run.series("loss").y[1] == 9.0


def test_values_that_are_not_numbers_are_left_out(tmp_path):
    directory = write_run(tmp_path / "run", updates=4, finished=False)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    lines[1] |= {"loss": None, "nonfinite": ["loss"]}
    lines[2] |= {"loss": 2.0, "worker_loss": [1.0, 3.5, 1.5]}
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    loss = read_run(directory).series("loss")
    np.testing.assert_array_equal(loss.x, np.array([1, 3, 4]) * BATCH)
    assert (loss.y[1], loss.low[1], loss.high[1]) == (2.0, 1.0, 3.5)
    assert loss.low[0] == loss.y[0] == loss.high[0]


def test_run_that_has_just_started(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.json").write_text("{")
    (directory / "metrics.jsonl").write_text("")
    page = render(directory, out=tmp_path / "page.html")
    assert "No update has been logged yet" in page.text
    assert "config.json is not valid JSON" in page.text
    assert "environment.json is missing" in page.text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[" * 100_000),
        ("config.json", '{"config": [1], "resolved": [2]}'),
        ("config.json", '{"config": {"derived": {"total_updates": "x"}}}'),
        ("config.json", '{"config": {"derived": 3, "name": "half \\ud800"}}'),
        ("environment.json", '{"starts": [1]}'),
        ("environment.json", '{"starts": {"a": 1}}'),
        ("metrics.jsonl", "[" * 100_000 + "\n"),
        ("metrics.jsonl", '{"kind": "train", "update": 1e400, "targets": 1, "loss": 1}\n'),
        ("metrics.jsonl", '{"kind": "train", "update": 1, "targets": 1%s, "loss": 1}\n' % ("0" * 400)),
        ("metrics.jsonl", '{"kind": "train", "update": 1, "targets": 1, "loss": 1%s}\n' % ("0" * 400)),
        ("result.json", '{"targets": 1%s, "validation_loss": "x", "mfu": []}' % ("0" * 400)),
    ],
)
def test_odd_content_is_left_out(name, content, tmp_path):
    directory = write_run(tmp_path / "run", updates=4, finished=False)
    (directory / name).write_text(content)
    assert "llama_jax report" in render(directory, out=tmp_path / "page.html").text


def test_a_folder_in_place_of_a_file_is_noted(tmp_path):
    directory = write_run(tmp_path / "run", updates=4)
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    assert "config.json was left out: Is a directory" in render(directory, out=tmp_path / "page.html").text


def test_an_empty_out_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--out= names no file"):
        render(write_run(tmp_path / "run", updates=4), out="")


def test_not_a_run_folder(tmp_path):
    with pytest.raises(DataError, match="is not a run folder"):
        read_run(tmp_path)
    command = [sys.executable, "scripts/report.py", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 3
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_command(tmp_path):
    run = write_run(tmp_path / "run", updates=5)
    command = [sys.executable, str(ROOT / "scripts/report.py"), "run", "--out=page.html"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "report: page.html\n"), result.stderr
    assert "run" in Page((tmp_path / "page.html").read_text(encoding="utf-8")).text
    assert sorted(path.name for path in run.iterdir()) == [
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "result.json",
    ]


def test_smoothing():
    y = np.random.default_rng(0).normal(size=500)
    mean, width = smoothed(Series(np.arange(500.0), y, y, y))
    assert width == 11
    for index in (0, 1, 3, 5, 250, 497, 499):
        before = min(5, index)
        expected = y[index - before : min(500, index + before + 1)].mean()
        assert mean[index] == pytest.approx(expected, rel=1e-12, abs=1e-12), index
    few = Series(np.arange(9.0), y[:9], y[:9], y[:9])
    assert smoothed(few) == (few.y, 1)
