"""Rows of tokens in a parquet file: write, read, hash. Needs numpy, and pyarrow when a file is touched.

A file has one column `input_ids`, a list of exactly `row_length` int32 ids per row: full rows, no padding. What
identifies rows is `rows_sha256`, taken over canonical bytes and never over the file, whose bytes change with the
version of pyarrow, the codec and the row groups: b"llama_jax.rows.v1\\0", the number of rows and the row length as
little-endian uint64, then all ids as little-endian int32, row by row. Nothing but the ids may follow from a file.
"""

import contextlib
import hashlib
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llama_jax.errors import ConfigError, DataError
from llama_jax.files import TMP_SUFFIX, publish

FORMAT = "llama_jax.rows.v1"
ROW_LENGTH = 8192
COLUMN = "input_ids"
FILE = "rows.parquet"
RECORD = "rows.json"  # beside a rows file: what the rows were made of, and their hash
BLOCK_ROWS = 128  # rows that are written, read and hashed at a time: one row group, one global batch of the protocol


class Misshapen(DataError):
    """A file that can be read and whose content breaks the format: another type, length or range of ids."""


def header(rows: int, row_length: int) -> bytes:
    """The bytes that come before the ids of `rows` rows in the hash."""
    return FORMAT.encode() + b"\0" + struct.pack("<QQ", rows, row_length)


def rows_sha256(blocks: Iterable[np.ndarray], rows: int, row_length: int) -> str:
    """The hex `rows_sha256` of int32 blocks [n, row_length], `rows` rows together; ValueError if they are not that."""
    digest, seen = hashlib.sha256(header(rows, row_length)), 0
    for block in blocks:
        if block.dtype != np.int32 or block.ndim != 2 or block.shape[1] != row_length:
            raise ValueError(f"rows are int32 [n, {row_length}], not {block.dtype} {list(block.shape)}")
        digest.update(np.ascontiguousarray(block, "<i4").data)
        seen += len(block)
    if seen != rows:
        raise ValueError(f"{seen} rows instead of {rows}")
    return digest.hexdigest()


def write(path: Path, blocks: Iterable[np.ndarray], row_length: int) -> int:
    """Writes int32 blocks [n, row_length] as a rows file and returns the number of rows.

    The file is `path`.tmp until it is complete and on the disk, and gone after an error. Raises DataError naming it.
    """
    pa, parquet = _pyarrow()
    temporary = path.with_name(path.name + TMP_SUFFIX)
    schema = pa.schema([pa.field(COLUMN, pa.list_(pa.field("element", pa.int32(), False), row_length), False)])
    count = 0
    try:
        with _disk(path), open(temporary, "wb") as file:
            with parquet.ParquetWriter(file, schema, compression="zstd", use_dictionary=False) as writer:
                for block in blocks:
                    flat = pa.array(np.ascontiguousarray(block, np.int32).reshape(-1))
                    rows = pa.FixedSizeListArray.from_arrays(flat, type=schema.field(COLUMN).type)
                    writer.write_table(pa.table([rows], schema=schema), row_group_size=max(1, len(block)))
                    count += len(block)
            publish(file, temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return count


class RowsFile:
    """An open rows file: `rows` and `row_length` from its footer, ids when asked for. One thread at a time.

    Raises DataError when the file can't be read as rows, Misshapen (a DataError) when its content breaks the format.
    """

    def __init__(self, path: Path) -> None:
        pa, parquet = _pyarrow()
        self.path = Path(path)
        with _readable(self.path):
            self._file = parquet.ParquetFile(self.path)
            schema = self._file.schema_arrow
        if COLUMN not in schema.names:
            found = ", ".join(schema.names[:5]) or "none"
            raise DataError(f"{self.path}: no column {COLUMN} (columns: {found}), so it holds no rows")
        kind = schema.field(COLUMN).type
        fixed = pa.types.is_fixed_size_list(kind)
        if not (fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            raise DataError(f"{self.path}: column {COLUMN} is {kind}, not a list of ids, so it holds no rows")
        if kind.value_type != pa.int32():
            raise Misshapen(f"{self.path}: column {COLUMN} holds {kind.value_type}, rows hold int32")
        self.rows = int(self._file.metadata.num_rows)
        groups = (self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups))
        self._ends = np.cumsum([0, *groups])
        # Tools that rewrite parquet may make plain lists of the rows; the first row then says how long they are.
        self.row_length = int(kind.list_size) if fixed else self._first_length()

    def read(self, start: int, count: int) -> np.ndarray:
        """Rows start to start + count as int32 [count, row_length]; decodes the row groups that they lie in."""
        if start < 0 or count < 0 or start + count > self.rows:
            raise DataError(f"{self.path}: rows {start} to {start + count} wanted, it has {self.rows}")
        if not count:
            return np.empty((0, self.row_length), np.int32)
        first = int(np.searchsorted(self._ends, start, "right")) - 1
        last = int(np.searchsorted(self._ends, start + count, "left"))
        with _readable(self.path):
            table = self._file.read_row_groups(list(range(first, last)), columns=[COLUMN])
            column = table.column(COLUMN).slice(start - int(self._ends[first]), count).combine_chunks()
        return self._array(column, start)

    def blocks(self, count: int | None = None) -> Iterator[np.ndarray]:
        """The first `count` rows (all with None) in order as int32 [1 to 128, row_length], a few MB in memory."""
        left, start = self.rows if count is None else count, 0
        if left > self.rows:
            raise DataError(f"{self.path}: {left} rows wanted, it has {self.rows}")
        with _readable(self.path):
            batches = self._file.iter_batches(batch_size=BLOCK_ROWS, columns=[COLUMN])
        while left:
            with _readable(self.path):
                column = next(batches).column(0)[:left]
            yield self._array(column, start)
            left, start = left - len(column), start + len(column)

    def sha256(self, count: int | None = None) -> str:
        """`rows_sha256` of the first `count` rows, of all with None."""
        count = self.rows if count is None else count
        return rows_sha256(self.blocks(count), count, self.row_length)

    def close(self) -> None:
        self._file.close()

    def _first_length(self) -> int:
        if not self.rows:
            return 0
        with _readable(self.path):
            first = next(self._file.iter_batches(batch_size=1, columns=[COLUMN])).column(0)[0].as_py()
        return len(first or ())

    def _array(self, column: Any, start: int) -> np.ndarray:
        """A pyarrow list array, whose first row is number `start` of the file, as int32 [n, row_length]."""
        import pyarrow.compute as pc

        if column.null_count:
            raise Misshapen(f"{self.path}: row {start + column.is_null().index(True).as_py()} is null")
        lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
        if (wrong := np.flatnonzero(lengths != self.row_length)).size:
            row, length = start + int(wrong[0]), int(lengths[wrong[0]])
            raise Misshapen(f"{self.path}: row {row} has {length} tokens, the first one {self.row_length}")
        flat = column.flatten()
        if flat.null_count:
            raise Misshapen(
                f"{self.path}: row {start + flat.is_null().index(True).as_py() // self.row_length} lacks ids"
            )
        ids = flat.to_numpy(zero_copy_only=False).reshape(len(column), self.row_length)
        if (negative := np.flatnonzero((ids < 0).any(axis=1))).size:
            raise Misshapen(f"{self.path}: row {start + int(negative[0])} holds a negative id")
        return ids


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("rows files need the package pyarrow: pip install 'llama_jax[prepare]'") from None
    return pyarrow, pyarrow.parquet


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Errors of pyarrow and of the disk as one DataError naming the file."""
    pa, _ = _pyarrow()
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; python -m data_pipeline.sft_rows makes one") from None
    except StopIteration:
        raise DataError(f"{path}: ends before its last row; build it again") from None
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:150]
        raise DataError(f"{path}: can't be read as parquet ({reason}); build it again") from None


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())[:150]
        raise DataError(f"{path}: it was not written ({reason}); free space or fix permissions and repeat") from None
