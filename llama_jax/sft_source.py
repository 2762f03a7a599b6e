"""The rows of a recipe as a source of the loader: in the order of the file, once. Needs numpy and pyarrow.

A row is T = context tokens without a lookahead: T inputs and T - 1 targets, the last token being a target only.
Letters: T context, n rows.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llama_jax import rows
from llama_jax.errors import DataError, warn
from llama_jax.files import read_json, sha256_of_file
from llama_jax.hf_files import find_folder


class RowsSource:
    """The rows of a file, or of rows.parquet in a folder: the same attributes as data.CacheSource, in file order.

    The last `validation` rows are held out. All ids are read once, checked and hashed: `fingerprint` is the rows_sha256
    of the whole file. Raises DataError for another row length, ids outside the vocabulary, a hash or a number of rows
    that is not that of the rows.json beside it, and a file that has no rows to train on. Warns when rows.json names
    another tokenizer than the one in `model`, a Hugging Face folder.
    """

    def __init__(self, path: str | Path, context: int, vocab_size: int, validation: int = 0, model: str = "") -> None:
        path = Path(path)
        path = path / rows.FILE if path.is_dir() else path
        self._file, self._lock = rows.RowsFile(path), threading.Lock()
        if self._file.row_length != context:
            raise DataError(
                f"{path}: rows of {self._file.row_length} tokens, model.context is {context}; set model.context or "
                "build rows of that length"
            )
        if self._file.rows <= validation:
            raise DataError(
                f"{path}: {self._file.rows} rows, none beside data.validation_rows = {validation}; lower it"
            )
        self.context, self.targets, self.permuted = context, context - 1, False
        self.group_size = rows.BLOCK_ROWS
        self.vocab_size = vocab_size
        self.dtype = np.dtype("<i4")
        self.sequences, self.validation_sequences = self._file.rows - validation, validation
        self.groups = [
            (first, min(self.group_size, self.sequences - first)) for first in range(0, self.sequences, self.group_size)
        ]
        self.manifest: None = None
        self.bytes_per_token: float | None = None
        self.entropy: float | None = None
        self.fingerprint = rows.rows_sha256(self._checked(), self._file.rows, context)
        self._check_record(path.with_name(rows.RECORD), model)

    def load_group(self, group: int, threads: int = 1) -> np.ndarray:
        """Tokens of one group, [n * T]. Raises DataError naming the file."""
        return self._read(*self.groups[group]).reshape(-1)

    def validation_rows(self, indices: npt.ArrayLike) -> np.ndarray:
        """Held-out rows by index, [n, T]. Raises DataError naming the file."""
        indices = np.asarray(indices, np.int64)
        if indices.size and (indices.min() < 0 or indices.max() >= self.validation_sequences):
            raise DataError(f"{self._file.path}: row {indices.max()} of {self.validation_sequences} held out is wanted")
        found = [self._read(self.sequences + index, 1) for index in indices.tolist()]
        return np.concatenate([np.empty((0, self.context), self.dtype), *found])

    def _read(self, start: int, count: int) -> np.ndarray:
        with self._lock:  # the loader reads in the background
            return self._file.read(start, count)

    def _checked(self) -> Iterator[np.ndarray]:
        """All blocks in order; DataError for an id that the model does not have."""
        first = 0
        for block in self._file.blocks():
            if (wrong := np.flatnonzero((block >= self.vocab_size).any(axis=1))).size:
                row = int(wrong[0])
                raise DataError(
                    f"{self._file.path}: row {first + row} holds id {block[row].max()}, model.vocab_size is "
                    f"{self.vocab_size}; the rows were made with the tokenizer of another model"
                )
            first += len(block)
            yield block

    def _check_record(self, record: Path, model: str) -> None:
        """DataError where a rows.json beside the file speaks of other rows, a warning of another tokenizer."""
        try:
            content = read_json(record)
            said, tokenizer = (content["rows"], content["rows_sha256"]), content.get("tokenizer", {}).get("sha256")
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise DataError(f"{record}: damaged; build the rows again") from None
        if said != (self._file.rows, self.fingerprint):
            raise DataError(
                f"{self._file.path}: {self._file.rows} rows with rows_sha256 {self.fingerprint}, {record.name} says "
                f"{said[0]} with {said[1]}; build the rows again"
            )
        own = find_folder(model) / "tokenizer.json" if model else None
        if own and tokenizer and own.is_file() and sha256_of_file(own) != tokenizer:
            warn(f"{record}: the rows were made with another tokenizer than {own}: their ids mean something else")
