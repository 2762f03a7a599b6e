"""The tokenizer beside a model: its files in an export, and encoding and decoding for people who sample text.

Preparing data has its own module; this one needs the packages `tokenizers` or `sentencepiece` only when it is used.
"""

import importlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llama_jax.errors import CheckpointError, ConfigError

FILES = ("tokenizer.json", "tokenizer.model")
# What else says in a Hugging Face folder how its tokenizer is used.
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


class Tokenizer(NamedTuple):
    """encode: text to ids, nothing added, control tokens in the text are text. decode: ids to text without them."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def load(directory: str | os.PathLike[str]) -> Tokenizer | None:
    """The tokenizer in a Hugging Face folder, None where there is none (a model of the synthetic language).

    Raises ConfigError when the package that reads it is missing, CheckpointError when the file is damaged.
    """
    path = next((Path(directory) / name for name in FILES if (Path(directory) / name).is_file()), None)
    if path is None:
        return None
    library = _import("tokenizers" if path.suffix == ".json" else "sentencepiece")
    try:
        if path.suffix == ".json":
            engine = library.Tokenizer.from_str(path.read_bytes().decode("utf-8"))
        else:
            engine = library.SentencePieceProcessor(model_proto=path.read_bytes())
    except Exception as error:  # the libraries raise bare Exception and RuntimeError
        raise CheckpointError(f"{path} is not a tokenizer: {' '.join(str(error).split())[:150]}") from None
    if path.suffix == ".json":
        engine.encode_special_tokens = True
        engine.no_truncation()
        engine.no_padding()
        return Tokenizer(lambda text: engine.encode(text, add_special_tokens=False).ids, engine.decode)
    return Tokenizer(lambda text: engine.encode(text, add_bos=False, add_eos=False), engine.decode)


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(f"this tokenizer needs the package {package}: pip install 'llama_jax[prepare]'") from None


def export_files(
    source: str | os.PathLike[str] | None, bos_id: int | None, eos_id: int | list[int] | None, context: int
) -> dict[str, bytes]:
    """Files of an export by name: the tokenizer's own, unchanged, and tokenizer_config.json. Empty without a `source`.

    AutoTokenizer then gives the ids of the file itself: always for tokenizer.json; for tokenizer.model in transformers
    4, while transformers 5 converts it and splits runs of spaces another way. Raises ConfigError for a file that is
    neither .json nor .model.
    """
    if source is None:
        return {}
    path = Path(source)
    name = "tokenizer" + path.suffix
    if name not in FILES or not path.is_file():
        raise ConfigError(f"export: the tokenizer {path} is not a .json or .model file")
    data = path.read_bytes()
    settings: dict[str, Any] = {"model_max_length": context, "clean_up_tokenization_spaces": False}
    if path.suffix == ".model":
        settings |= {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": False}
    else:
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        try:
            content = json.loads(data)
            pieces = {token["id"]: token["content"] for token in content["added_tokens"]}
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"export: {path} is not a Hugging Face tokenizer.json") from None
        for key, token in (("bos_token", bos_id), ("eos_token", eos_id)):
            if isinstance(token, int) and token in pieces:
                settings[key] = pieces[token]
    return {name: data, "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode()}


def files_of(directory: str | os.PathLike[str]) -> dict[str, bytes]:
    """The files of the tokenizer of a Hugging Face folder by name, chat template included, for an export of its model.

    Raises CheckpointError.
    """
    paths = [Path(directory) / name for name in FILES + SETTINGS]
    try:
        return {path.name: path.read_bytes() for path in paths if path.is_file()}
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from None
