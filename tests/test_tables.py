"""The measured tables of the README are those of the records."""

import json

import pytest

from bench import tables


def test_readme_is_made_from_the_records():
    readme = (tables.ROOT / "README.md").read_text(encoding="utf-8")
    places = [name for _, name, _ in tables.PLACE.findall(readme)] + tables.PENDING.findall(readme)
    assert sorted(places) == sorted(tables.TABLES)
    assert tables.render(readme) == readme, "run python -m bench.tables"


def test_an_edited_number_is_noticed():
    readme = (tables.ROOT / "README.md").read_text(encoding="utf-8")
    start = readme.index("<!-- results:")
    digit = next(i for i in range(start + 40, len(readme)) if readme[i].isdigit())
    edited = readme[:digit] + str((int(readme[digit]) + 1) % 10) + readme[digit + 1 :]
    assert tables.render(edited) == readme


def test_a_pending_table_appears_with_its_record(tmp_path, monkeypatch):
    text = "before\n<!-- pending: ladder -->\nbetween\n<!-- pending: peer -->\nafter\n"
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.render(text) == text
    record = {"environment": {"device": "NVIDIA H200", "versions": {"jax": "0.11.2"}}, "command": "c", "measured": {}}
    rungs = [{"rung": "plain JAX", "rows": 32, "error": "out of memory"}]
    rungs += [{"rung": "ours", "rows": 128, "update_ms": 50.0, "targets_per_s": 2.5e6, "peak_bytes": 3 << 30}]
    rungs += [{"rung": "faster", "rows": 128, "update_ms": 40.0, "targets_per_s": 3e6, "peak_bytes": 2 << 30}]
    (tmp_path / "ladder_h200.json").write_text(json.dumps({**record, "ladder": rungs}))
    made = tables.render(text)
    assert "<!-- pending: peer -->" in made and "<!-- pending: ladder -->" not in made
    assert "| + faster | 128 | 40.00 ms | 3.00 M | 1.20 x | 2.0 GiB |" in made and "out of memory" in made
    assert tables.render(made) == made
    (tmp_path / "ladder_h200.json").unlink()
    with pytest.raises(OSError):
        tables.render(made)
