"""The listing and the page of recipes, from records made here: who is ranked, in which order, with which numbers."""

import itertools
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from recipe_records import LOSSES, WORKLOAD, checked, component_record, edited, measured, recipe, reference, write
from recipe_records import config as config_of

from bench import component_draws, gpus, ranking, recipe_page, record
from bench import recipe as command
from bench.record import RecordError
from llama_jax.errors import ConfigError, DataError
from llama_jax.flops import peak_flops

GPUS = gpus.read()
GOLDEN = reference()
N = 64 * 16 + 16 * 16 * 2 + 8 * 16 * 2 + 3 * 24 * 16  # active parameters of the tiny model


def listed(*records, workload=WORKLOAD):
    recipes = {found["sha256"]: found for found in records if found["format"] == record.FORMAT}
    components = {found["sha256"]: found for found in records if found["sha256"] not in recipes}
    return ranking.ranking(ranking.Folder(recipes, components), GPUS, workload)


def verdicts(pair):
    return {entry.measured["id"]: ranking.verdict(entry) for entry in pair.entries}


def fast(name="fast", seconds=1.0, golden=GOLDEN, fields=None, **given):
    """A checked recipe that differs from those of other names, so that they are not runs of one."""
    fields = fields or {"runtime.host_threads": 5 + sum(map(ord, name)) % 1000}
    return checked(recipe(name, seconds=seconds, fields=fields, **given), golden)


def test_verified_recipes_are_ranked_by_score():
    unchecked = recipe("unchecked", seconds=0.5)
    (pair,) = listed(fast("slower", 1.5), GOLDEN, fast("fast"), unchecked)
    assert verdicts(pair) == {"fast": "fastest", "slower": "2", "reference": "reference", "unchecked": "not checked"}
    assert [entry.measured["id"] for entry in pair.entries] == ["fast", "slower", "reference", "unchecked"]
    best = pair.entries[0]
    assert best.score == 256 and pair.gpu.type == "H200"
    assert best.cost == pytest.approx(7.912 / (256 * 3600) * 1e6)
    assert best.mfu == pytest.approx(6 * N * 256 / 989e12)


def test_the_order_of_the_files_changes_nothing():
    records = [GOLDEN, fast("b"), fast("a"), fast("c", 2.0), fast("d", created="2026-01-30T12:00:00Z")]
    orders = itertools.islice(itertools.permutations(records), 0, None, 13)
    tables = {ranking.table(listed(*order)) for order in orders}
    assert len(tables) == 1
    order = re.findall(r"^ +(?:fastest|\d) +(\w)", tables.pop(), re.MULTILINE)
    assert order == ["d", "a", "b", "c"]  # equal scores: the earlier date, then the id


def test_pairs_are_never_mixed():
    other_gpu = reference(kind="NVIDIA B200")
    other_model = reference(model="another")

    def other_rows(found):
        found["rows"]["rows_sha256"] = "9" * 64

    rows = reference(change=other_rows)
    pairs = listed(
        *(GOLDEN, fast(), other_gpu, fast("b200", 3.0, other_gpu, kind="NVIDIA B200"), other_model),
        *(fast("model", 4.0, other_model, model="another"), rows, fast("rows", 5.0, rows, change=other_rows)),
    )
    assert len(pairs) == 4
    assert all(list(verdicts(pair).values()) == ["fastest", "reference"] for pair in pairs)
    assert sorted(entry.measured["id"] for pair in pairs for entry in pair.entries if entry.rank == 1) == [
        *("b200", "fast", "model", "rows")
    ]
    assert {pair.gpu.type for pair in pairs} == {"H200", "B200"}


def test_what_is_not_verified_is_not_ranked():
    other = [x + 0.4 for x in LOSSES]
    assert verdicts(listed(GOLDEN, fast("drifts", losses=other))[0])["drifts"] == "not verified: convergence"
    nan = [*LOSSES[:-1], None]
    assert verdicts(listed(GOLDEN, fast("nan", losses=nan))[0])["nan"] == "not verified: convergence"
    found = fast("recipe", fields={"optimizer.beta2": 0.99})
    assert verdicts(listed(GOLDEN, found)[0])["recipe"] == "not verified: configuration"
    assert verdicts(listed(GOLDEN, fast("traced", steps=25))[0])["traced"] == "not verified: run"
    tiny = checked(recipe(), GOLDEN, workload=record.PROTOCOL)
    assert verdicts(listed(GOLDEN, tiny, workload=record.PROTOCOL)[0])["fast"] == "not verified: workload"
    # verified among small workloads is not verified by the protocol
    assert verdicts(listed(GOLDEN, fast(), workload=record.PROTOCOL)[0])["fast"].startswith("other workload")


def test_swaps_need_their_component_tests():
    found = recipe(resolved={"attention": "cudnn", "head": "chunked", "kernels": "mosaic"})
    passed = component_record(found)
    assert verdicts(listed(GOLDEN, checked(found, GOLDEN))[0])["fast"] == "not verified: components"
    good = checked(found, GOLDEN, components=[passed])
    assert good["checks"]["passed"] and len(good["checks"]["components"]["tests"]) == 3
    assert verdicts(listed(GOLDEN, good, passed)[0])["fast"] == "fastest"
    with pytest.raises(RecordError, match="isn't here"):
        listed(GOLDEN, good)
    for name, other in {
        "failed": component_record(found, error=3e-3),
        "of another device": component_record(recipe(kind="NVIDIA B200", resolved=found["measured"]["resolved"])),
        "of another software": component_record(
            recipe(resolved=found["measured"]["resolved"], change=lambda f: f["stack"].update(code_sha256="0" * 64))
        ),
        "of another compiler settings": component_record(
            recipe(
                resolved=found["measured"]["resolved"],
                change=lambda f: f["environment"]["xla_flags"].update(xla_gpu_autotune_level="0"),
            )
        ),
        "of another shape": component_record(found, layer_shape={"rows": 4}),
        "of another dtype": component_record(found, dtype="float32"),
        "of another seeds": component_record(found, seeds=[1, 1, 1]),
        "of another inputs": component_record(found, errors={"normal": {"y": {"a": [1e-3] * 3, "b": [1e-3] * 3}}}),
    }.items():
        checks = checked(found, GOLDEN, components=[other])["checks"]
        assert not checks["passed"] and {t["reason"] for t in checks["components"]["tests"]} == {name}, name
    short = recipe(resolved={"head": "chunked"}, fields={"model.head_chunk_rows": 64})  # half of a microbatch
    for rows, reason in ((4, None), (3, None), (2, "of another rows")):
        shape = component_draws.shape_of("head", config_of().model, rows)
        checks = checked(short, GOLDEN, components=[component_record(short, layer_shape=shape)])["checks"]
        assert [t["reason"] for t in checks["components"]["tests"]] == [reason], rows
    again = checked(found, GOLDEN, components=[component_record(found, error=3e-3), passed])
    assert again["checks"]["passed"]  # the failed one is kept in the record beside the passed one


def test_checks_are_made_anew():
    good = fast()
    for change in (
        {"passed": False},
        {"failed": ["convergence"]},
        {"convergence": {**good["checks"]["convergence"], "correlation": 0.99}},
        {"calibration": ["0" * 64]},
        {"reference": "0" * 64},
        {"required_workload": {"rows": 1, "row_length": 32}},
        {"required_workload": None},
    ):
        with pytest.raises(RecordError):
            listed(GOLDEN, {**good, "checks": {**good["checks"], **change}})
    bad = fast("drifts", losses=[x + 0.4 for x in LOSSES])
    with pytest.raises(RecordError, match="check the recipe again"):
        listed(GOLDEN, {**bad, "checks": good["checks"]})


def test_further_runs_of_the_reference_calibrate_the_strict_flag():
    rng = np.random.RandomState(0)

    def noisy(name, size, **given):
        return {"name": name, "losses": [x + size * rng.standard_normal() for x in LOSSES], **given}

    again = [reference(**noisy(f"again{i}", 0.004, status="calibration", seconds=2 + i / 10)) for i in range(3)]
    found = recipe(**noisy("fast", 0.004))
    alone, calibrated = checked(found, GOLDEN), checked(found, GOLDEN, again)
    assert alone["checks"]["passed"] and calibrated["checks"]["passed"]  # a flag, not the verdict
    assert not alone["checks"]["convergence"]["strict"]["passed"]
    assert calibrated["checks"]["convergence"]["strict"]["passed"]
    assert calibrated["checks"]["convergence"]["calibration"]["arms"] == 4
    (pair,) = listed(GOLDEN, *again, calibrated)
    assert verdicts(pair) == {"fast": "fastest", "reference": "reference"} | {
        f"again{i}": "calibration" for i in (0, 1, 2)
    }
    golden = next(entry for entry in pair.entries if entry.measured["id"] == "reference")
    assert golden.runs == pytest.approx((256 / 2.2, 256 / 2.1, 256 / 2.0, 256 / 2.0))
    assert "4 runs: 125, 116-128" in ranking.table([pair])


def test_a_run_calibrates_once():
    again = [reference(name=f"again{i}", status="calibration", seconds=2 + i / 10) for i in range(3)]
    found = fast()

    def elsewhere(measured):
        measured["device"]["driver"] = "580.2"
        measured["environment"]["variables"]["NCCL_NVLS_ENABLE"] = "0"

    other_machine = reference(name="elsewhere", status="calibration", change=elsewhere)
    assert checked(found, GOLDEN, [*again[:2], other_machine])["checks"]["convergence"]["calibration"]["arms"] == 4
    with pytest.raises(RecordError, match="not another run of the reference"):
        checked(found, GOLDEN, [*again[:2], reference(name="r", status="calibration", fields={"model.remat": True})])
    same_settings = record.new(measured("likewise", "recipe"))
    for arms in ([again[0], again[1], again[0]], [*again, GOLDEN]):
        with pytest.raises(RecordError, match="once"):
            checked(found, GOLDEN, arms)
    with pytest.raises(RecordError, match="the recipe itself"):
        checked(same_settings, GOLDEN, [*again, same_settings])


def test_differences_within_the_spread_are_ties():
    runs = [fast(f"a{i}", 1 + i / 100, fields={"model.remat": True}) for i in range(3)]
    other = [fast(f"b{i}", 1.015, fields={"training.microbatch": 8}) for i in range(1)]
    (pair,) = listed(GOLDEN, *runs, *other)
    assert verdicts(pair)["b0"] == "3, tie with 1"
    (pair,) = listed(GOLDEN, *runs[:2], *other)
    assert verdicts(pair)["b0"] == "3"  # two runs show no spread


def test_gpu_types_and_rates():
    assert {gpu.type: gpu.rate for gpu in GPUS.by_name.values()} == {
        "H100": 6.88, "H200": 7.912, "B200": 14.2416, "GH200": None
    }  # fmt: skip
    for name, gpu in GPUS.by_name.items():
        assert gpu.peak_flops == peak_flops(name)
    assert GPUS.of("NVIDIA GH200 480GB").type == "GH200"
    unknown = GPUS.of("NVIDIA H200 NVL")
    assert (unknown.type, unknown.rate, unknown.peak_flops) == ("NVIDIA H200 NVL", None, None)
    changed = gpus.read(["H200=5", "cpu=0.05"])
    assert changed.of("NVIDIA H200").rate == 5 and changed.of("cpu").rate == 0.05
    assert changed.of("NVIDIA B200").rate == 14.2416 and changed.fetched == "given on the command line"
    for word in ("H200", "H200=free", "H200=-1", "H200=inf", "H200=nan"):
        with pytest.raises(ConfigError, match="--rate"):
            gpus.read([word])
    (pair,) = listed(reference(kind="cpu"))
    assert pair.entries[0].cost is None and pair.entries[0].mfu is None
    assert " -  " in ranking.table([pair])


class Page(HTMLParser):
    """Tags must close in order; collects the text and what a page refers to."""

    def __init__(self, content):
        super().__init__(convert_charrefs=True)
        self.open, self.words, self.references = [], [], []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.references += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "br", "hr", "img", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.references += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_is_whole_and_its_numbers_are_recomputed(tmp_path):
    b200 = reference(kind="NVIDIA B200", name="reference-b200", seconds=1.0)
    hostile = checked(edited(recipe(), "notes", ["<script>alert(1)</script>"]), GOLDEN)
    records = (GOLDEN, hostile, b200, fast("fast-b200", 0.25, b200, kind="NVIDIA B200"), reference(model="another/one"))
    pairs = listed(*records)
    paths = recipe_page.write(pairs, GPUS, tmp_path / "pages")
    assert sorted(path.name for path in paths) == ["another_one.html", "tiny.html"]
    content = (tmp_path / "pages" / "tiny.html").read_text(encoding="utf-8")
    page = Page(content)
    text = " ".join(page.words)
    assert "<script" not in content and "alert(1)" in text
    assert all(reference.startswith("#") for reference in page.references)
    assert "url(" not in content.replace("url(#", "")
    for seconds, rate, peak in ((1.0, 7.912, 989e12), (0.25, 14.2416, 2250e12)):
        score = 256 / seconds
        assert f"{score:,.1f}" in text and f"{rate / (score * 3600) * 1e6:.4f}" in text
        assert f"{6 * N * score / peak:.1%}" in text
    assert "2.00 x" in text and "4.00 x" in text and "Prices change" in text and "one pair" in text
    assert content.count("<svg") == 3 + 2 * 3
    assert "not the protocol's" in text
    again = recipe_page.page("tiny", [pair for pair in pairs if pair.model == "tiny"], GPUS)
    assert again == content  # nothing of the moment is in it
    alike = listed(reference(model="another/one"), reference(model="another_one"))
    with pytest.raises(DataError, match=r"another_one\.html"):
        recipe_page.write(alike, GPUS, tmp_path / "pages")


def test_the_command_lists_checks_and_draws(tmp_path, capsys):
    found = recipe(resolved={"attention": "cudnn"})
    place = write(tmp_path / "recipes", GOLDEN, found, component_record(found))
    words = ["check", f"{place}/1.json", f"--reference={place}/0.json", "--workload=8x32"]
    with pytest.raises(command.NotVerified, match="components"):
        command.main(words)
    command.main([*words, "--components", f"{place}/2.json"])
    assert "fast: verified" in capsys.readouterr().out
    command.main(["list", str(place), "--workload=8x32", "--rate=H200=3.6"])
    said = capsys.readouterr().out
    assert "fastest" in said and f"{3.6 / (256 * 3600) * 1e6:.4f}" in said
    command.main(["list", str(place)])
    assert "fastest" not in capsys.readouterr().out  # 8 rows of 32 tokens are not the protocol's
    command.main(["page", str(place), f"--out={tmp_path / 'pages'}", "--workload=8x32"])
    assert (tmp_path / "pages" / "tiny.html").is_file()
    content = json.loads((place / "1.json").read_text())
    content["checks"]["convergence"]["final_loss_diff"] += 1e-6
    (place / "1.json").write_text(json.dumps(content))
    with pytest.raises(RecordError, match="final_loss_diff"):
        command.main(["list", str(place)])
    with pytest.raises(ConfigError, match="no records"):
        command.main(["list", str(write(tmp_path / "empty"))])
    (place / "3.json").write_text((place / "0.json").read_text())
    with pytest.raises(RecordError, match="has the id"):
        command.main(["list", str(place)])
    (place / "3.json").write_text("{}")
    with pytest.raises(RecordError, match=r"3\.json"):
        command.main(["list", str(place)])
