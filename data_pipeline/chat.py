"""Conversations as token ids: the chat template and the tokenizer.json of a Hugging Face model folder.

The text is the one that transformers' `apply_chat_template` makes with its defaults (no tools, no generation prompt),
and the ids are those that it then gives, with no BOS or EOS but what the template writes: the same sandboxed Jinja
environment and functions, the same variables, the same places where templates and tokens are looked for. Tests compare
both with transformers. transformers itself is not needed: what it adds is a few lines, while the package is large and
its rendering changes between releases; with it, rows would depend on more than the versions of Jinja and tokenizers.

Three things are decided here. A template that asks for today's date (`strftime_now`) gets a date that is recorded,
by default the one that Llama's templates write where no clock is at hand: rows must not change with the day. Control
tokens written in a conversation become control ids, as in transformers. And only tokenizer.json will do, since ids from
a tokenizer.model depend on how a version of transformers converts it.
"""

import datetime
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import numpy as np
import tokenizers as library

from data_pipeline import packages, tokenizers
from llama_jax.errors import ConfigError, DataError
from llama_jax.files import sha256_of_file

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
DATE = "2024-07-26"
# The common template of OpenAI's ChatML, for folders of base models and for tokenizers made here.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_END = "<|endoftext|>"
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing; the first is what templates read
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


class Refused(Exception):
    """A conversation that the template does not accept, or makes nothing of; the text says why."""


@dataclass(frozen=True)
class Chat:
    """`vocab_size` is the largest id of the tokenizer plus one, `model_vocab_size` what config.json says or None.

    `record` is what identifies it all: hashes of template and tokenizer, the date, EOS.
    """

    eos_id: int
    vocab_size: int
    model_vocab_size: int | None
    record: dict[str, Any]
    template: jinja2.Template = field(repr=False)
    variables: dict[str, str] = field(repr=False)
    engine: Any = field(repr=False)

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The text of a conversation. Raises Refused."""
        plain = [_aliased({key: value for key, value in m.items() if value is not None}) for m in messages]
        try:
            text = self.template.render(
                messages=plain, tools=None, documents=None, add_generation_prompt=False, **self.variables
            )
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Refused(f"lone surrogate \\u{ord(error.object[error.start]):04x} in its text") from None
        except _TEMPLATE_ERRORS as error:
            raise Refused(f"the chat template refuses it ({' '.join(str(error).split())[:150]})") from None
        return text

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of rendered texts as int32 arrays. Raises ConfigError for ids that the model's vocabulary lacks."""
        rows = [np.array(e.ids, np.int32) for e in self.engine.encode_batch_fast(list(texts), add_special_tokens=False)]
        largest = max((int(row.max()) for row in rows if row.size), default=0)
        if self.model_vocab_size is not None and largest >= self.model_vocab_size:
            raise ConfigError(
                f"the tokenizer gives id {largest}, the model's config.json has vocab_size {self.model_vocab_size}; "
                "the folder mixes two models"
            )
        return rows


def load(folder: Path, template: str = "", eos_token: str = "", date: str = DATE) -> Chat:
    """The chat template and tokenizer of a model folder.

    `template` is a file or "chatml", for folders without one or to take another; `eos_token` the token between
    conversations where tokenizer_config.json names none or another is wanted; `date` is YYYY-MM-DD. Raises ConfigError
    or DataError naming the file.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        other = " (tokenizer.model alone is not enough: save the folder again with transformers)"
        raise ConfigError(f"--model={folder}: no {TOKENIZER}{other if (folder / 'tokenizer.model').is_file() else ''}")
    try:
        engine = library.Tokenizer.from_str(path.read_bytes().decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path}: not a tokenizer ({' '.join(str(error).split())[:150]})") from None
    engine.no_truncation()
    engine.no_padding()
    settings = _object(folder / SETTINGS)
    named, extra = _special_tokens(folder, settings)
    _add_tokens(engine, folder, settings, [*named.values(), *extra])
    vocabulary = engine.get_vocab(with_added_tokens=True)
    eos = eos_token or named.get("eos_token", "")
    if eos not in vocabulary:
        said = f"--eos_token={eos} is not in {path}" if eos else f"{folder / SETTINGS} names no eos_token"
        raise ConfigError(f"{said}; name the token between conversations with --eos_token")
    text, origin = _find_template(folder, settings, template)
    record = {
        "eos": {"id": vocabulary[eos], "token": eos},
        "tokenizer": {"sha256": sha256_of_file(path), "vocab_size": max(vocabulary.values()) + 1},
        "chat_template": {
            "origin": origin,
            "sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
            "date": date if "strftime_now" in text else None,
        },
        "special_tokens": named,
    }
    size = _object(folder / "config.json").get("vocab_size")
    model_vocab_size = size if isinstance(size, int) and not isinstance(size, bool) else None
    compiled = _compile(text, _date(date), origin)
    return Chat(vocabulary[eos], max(vocabulary.values()) + 1, model_vocab_size, record, compiled, named, engine)


def make_tokenizer(folder: Path, texts: Iterable[str], vocab_size: int, scratch: Path) -> int:
    """Writes a byte-level BPE of at most `vocab_size` ids, trained on `texts`, with the ChatML template into `folder`.

    For models with generated weights. The same texts give the same bytes, so repeating it changes nothing; a folder
    with another tokenizer is refused (ConfigError). Returns the number of ids, which a small corpus can keep lower.
    """
    control = (_END, "<|im_start|>", "<|im_end|>")
    if not 256 + len(control) <= vocab_size <= 1_000_000:
        raise ConfigError(f"--make_tokenizer={vocab_size} is not from {256 + len(control)} to 1000000")
    tokenizers.train_bpe(texts, vocab_size, scratch / TOKENIZER, control)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": _END, "eos_token": _END,
        "clean_up_tokenization_spaces": False, "chat_template": CHATML,
    }  # fmt: skip
    made = (scratch / TOKENIZER).read_bytes()
    files = {TOKENIZER: made, SETTINGS: (json.dumps(settings, indent=2) + "\n").encode()}
    for name, data in files.items():
        if (folder / name).exists() and (folder / name).read_bytes() != data:
            raise ConfigError(
                f"{folder / name} is of another tokenizer; leave out --make_tokenizer, or name another --model"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        packages.publish(folder / name, data)
    return int(library.Tokenizer.from_str(made.decode("utf-8")).get_vocab_size())


def _aliased(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose reasoning, under whichever name it came, stands under the names that templates read."""
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, {} where there is none. Raises DataError."""
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else {}
    except (ValueError, RecursionError):
        raise DataError(f"{path}: not JSON") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a JSON object")
    return content


def _content(token: Any) -> str | None:
    """The text of a special token, which is stored as text or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Special tokens with a name, which templates can use as variables, and those without.

    special_tokens_map.json counts where tokenizer_config.json has no table of added tokens, as in transformers.
    """
    merged = settings if "added_tokens_decoder" in settings else settings | _object(folder / "special_tokens_map.json")
    more = merged.get("extra_special_tokens") or merged.get("additional_special_tokens") or []
    named = {key: value for key, value in merged.items() if key.endswith("_token")}
    if isinstance(more, dict):
        named |= more
        more = []
    texts = {key: text for key, value in named.items() if (text := _content(value)) is not None}
    return texts, [text for value in more if (text := _content(value)) is not None]


def _add_tokens(engine: Any, folder: Path, settings: dict[str, Any], special: Sequence[str]) -> None:
    """Adds what tokenizer_config.json has and tokenizer.json lacks: added tokens, and special ones as such.

    Raises ConfigError when a token then has another id than the file says, DataError for an entry that is none.
    """
    known = {repr(token) for token in engine.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder") or {}
    try:
        table = sorted((int(index), library.AddedToken(**token)) for index, token in listed.items())
    except (TypeError, ValueError, AttributeError):
        raise DataError(f"{folder / SETTINGS}: added_tokens_decoder is not a table of tokens") from None
    missing = [token for _, token in table if repr(token) not in known]
    have = {token.content for token in [*engine.get_added_tokens_decoder().values(), *missing]}
    missing += [library.AddedToken(text, special=True) for text in dict.fromkeys(special) if text not in have]
    if missing:
        engine.add_tokens(missing)
    for index, token in table:
        if engine.token_to_id(token.content) != index:
            raise ConfigError(
                f"{folder / SETTINGS}: {token.content!r} has id {index}, in {TOKENIZER} "
                f"{engine.token_to_id(token.content)}; the folder mixes two tokenizers"
            )


def _find_template(folder: Path, settings: dict[str, Any], given: str) -> tuple[str, str]:
    """(template, where it is from): the one given, the folder's files, or its tokenizer_config.json, in that order."""
    if given == "chatml":
        return CHATML, "chatml"
    if given:
        path = Path(given)
        if not path.is_file():
            raise ConfigError(f"--chat_template={given}: no such file; expected one, or chatml")
        return _text(path), path.name
    files = {"default": folder / TEMPLATE} if (folder / TEMPLATE).is_file() else {}
    files |= {path.stem: path for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    stored: Any = {name: _text(path) for name, path in files.items()} or settings.get("chat_template")
    origin = TEMPLATE if files else SETTINGS
    if isinstance(stored, list):
        stored = {str(entry.get("name")): entry.get("template") for entry in stored if isinstance(entry, dict)}
    text = stored.get("default") if isinstance(stored, dict) else stored
    if not isinstance(text, str):
        what = f"no default among its chat templates ({', '.join(sorted(stored))})" if stored else "no chat template"
        raise ConfigError(f"--model={folder}: {what}; give one with --chat_template=FILE, or --chat_template=chatml")
    return text, origin


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}") from None


def _date(text: str) -> datetime.datetime:
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%d")
    except ValueError:
        raise ConfigError(f"--date={text}: expected YYYY-MM-DD") from None


class _Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %}, which marks what the assistant said, and adds nothing to the text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block of its own scope, as a macro's body is: what is set inside is not seen behind it.
        return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> str:
        return str(caller())


def _compile(text: str, now: datetime.datetime, origin: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = tojson  # Jinja's own escapes for HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise DataError(f"{origin}: not a chat template ({' '.join(str(error).split())[:150]})") from None
