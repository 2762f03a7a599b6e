"""The measured tables of the README are those of the records."""

from bench import tables


def test_readme_is_made_from_the_records():
    readme = (tables.ROOT / "README.md").read_text(encoding="utf-8")
    assert {name for _, name, _ in tables.PLACE.findall(readme)} == set(tables.TABLES)
    assert tables.render(readme) == readme, "run python -m bench.tables"


def test_an_edited_number_is_noticed():
    readme = (tables.ROOT / "README.md").read_text(encoding="utf-8")
    start = readme.index("<!-- results:")
    digit = next(i for i in range(start + 40, len(readme)) if readme[i].isdigit())
    edited = readme[:digit] + str((int(readme[digit]) + 1) % 10) + readme[digit + 1 :]
    assert tables.render(edited) == readme
