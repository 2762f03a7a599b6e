"""rows: golden hashes, files that other tools rewrote, and every way in which a file can fail to hold rows."""

import hashlib
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llama_jax import rows
from llama_jax.errors import DataError

GOLDEN = np.array([[6, 7, 8, 9], [0, 1, 2, 3]], np.int32)
GOLDEN_SHA256 = "f38b09c917362d4654c7d7fad88af9cfc8ab95ee6330398df60176719c9f44bb"


def random_rows(n, length=16, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, (n, length), np.int32)


def plain(table_rows, kind=None):
    return pa.table({"input_ids": pa.array([list(map(int, row)) for row in table_rows], kind or pa.list_(pa.int32()))})


def test_golden_hash():
    assert hashlib.sha256(GOLDEN.astype("<i4").tobytes()).hexdigest() == (
        "50a77be48ac176fc517f5cc96e6df7f7906ab51d1b9ee512da4009e64950bf53"
    )
    assert rows.header(2, 4) == b"llama_jax.rows.v1\0" + bytes([2, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0])
    assert rows.rows_sha256([GOLDEN], 2, 4) == GOLDEN_SHA256
    assert rows.rows_sha256([GOLDEN[:1], GOLDEN[1:]], 2, 4) == GOLDEN_SHA256
    assert rows.rows_sha256([np.asfortranarray(GOLDEN)], 2, 4) == GOLDEN_SHA256
    as_int64 = hashlib.sha256(GOLDEN.astype("<i8").tobytes()).hexdigest()
    assert as_int64.startswith("514d21adb56268d7")
    for wrong in (GOLDEN.astype(np.int64), GOLDEN.reshape(4, 2), GOLDEN.reshape(-1)):
        with pytest.raises(ValueError, match=r"rows are int32 \[n, 4\]"):
            rows.rows_sha256([wrong], 2, 4)
    with pytest.raises(ValueError, match="2 rows instead of 3"):
        rows.rows_sha256([GOLDEN], 3, 4)


def test_every_flip_changes_the_hash():
    ids = random_rows(4, 8)
    hashes = {rows.rows_sha256([ids], 4, 8), rows.rows_sha256([ids.reshape(8, 4)], 8, 4)}
    for index in np.ndindex(ids.shape):
        changed = ids.copy()
        changed[index] ^= 1
        hashes.add(rows.rows_sha256([changed], 4, 8))
    hashes.add(rows.rows_sha256([ids[[1, 0, 2, 3]]], 4, 8))
    assert len(hashes) == 2 + ids.size + 1


@pytest.mark.parametrize("n", [1, 128, 300])
def test_round_trip(tmp_path, n):
    ids, path = random_rows(n), tmp_path / "rows.parquet"
    assert rows.write(path, (ids[i : i + 100] for i in range(0, n, 100)), 16) == n
    assert list(tmp_path.iterdir()) == [path]
    file = rows.RowsFile(path)
    assert (file.rows, file.row_length) == (n, 16)
    assert np.array_equal(np.concatenate(list(file.blocks())), ids)
    assert (
        file.sha256() == hashlib.sha256(b"llama_jax.rows.v1\0" + struct.pack("<QQ", n, 16) + ids.tobytes()).hexdigest()
    )
    draw = np.random.default_rng(1)
    for start in draw.integers(0, n, 8).tolist():
        count = int(draw.integers(0, n - start + 1))
        part = file.read(start, count)
        assert part.dtype == np.int32 and np.array_equal(part, ids[start : start + count])
        assert file.sha256(count) == rows.rows_sha256([ids[:count]], count, 16)
    for start, count in ((n, 1), (-1, 1), (0, n + 1)):
        with pytest.raises(DataError, match="wanted, it has"):
            file.read(start, count)
    with pytest.raises(DataError, match=f"{n + 1} rows wanted, it has {n}"):
        file.sha256(n + 1)


def test_other_files_with_the_same_rows_have_the_same_hash(tmp_path):
    ids, path = random_rows(300), tmp_path / "rows.parquet"
    rows.write(path, [ids], 16)
    table = pq.read_table(path)
    variants = {
        "snappy": lambda p: pq.write_table(table, p, compression="snappy", row_group_size=7),
        "plain": lambda p: pq.write_table(table, p, compression="none", use_dictionary=True),
        "list": lambda p: pq.write_table(plain(ids), p),
        "large": lambda p: pq.write_table(plain(ids, pa.large_list(pa.int32())), p, row_group_size=50),
        "more": lambda p: pq.write_table(table.append_column("n", pa.array(range(300))), p),
    }
    for name, write in variants.items():
        other = tmp_path / name
        write(other)
        file = rows.RowsFile(other)
        assert other.read_bytes() != path.read_bytes()
        assert file.sha256() == rows.rows_sha256([ids], 300, 16), name
        assert np.array_equal(file.read(95, 110), ids[95:205]), name


def test_broken_content(tmp_path):
    path = tmp_path / "rows.parquet"
    cases = [
        (plain([[1, 2, 3, 4], [5, 6, 7]]), "row 1 has 3 tokens, the first one 4"),
        (plain([[1, 2], [3, 4]], pa.list_(pa.int64())), "holds int64, rows hold int32"),
        (plain([[1, 2], [3, -4]]), "row 1 holds a negative id"),
        (pa.table({"input_ids": pa.array([[1, 2], None], pa.list_(pa.int32(), 2))}), "row 1 is null"),
        (pa.table({"input_ids": pa.array([[1, 2], [3, None]], pa.list_(pa.int32()))}), "row 1 lacks ids"),
    ]
    for table, message in cases:
        pq.write_table(table, path)
        with pytest.raises(rows.Misshapen, match=message) as error:
            rows.RowsFile(path).sha256()
        assert str(path) in str(error.value)


def test_no_rows_file(tmp_path):
    path = tmp_path / "rows.parquet"
    with pytest.raises(DataError, match=r"no such file; python -m data_pipeline\.sft_rows"):
        rows.RowsFile(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="can't be read as parquet"):
        rows.RowsFile(path)
    for table, message in (
        (pa.table({"text": ["a"]}), r"no column input_ids \(columns: text\)"),
        (pa.table({"input_ids": ["a"]}), "column input_ids is string, not a list"),
    ):
        pq.write_table(table, path)
        with pytest.raises(DataError, match=message) as error:
            rows.RowsFile(path)
        assert not isinstance(error.value, rows.Misshapen)
    rows.write(path, [random_rows(300)], 16)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="can't be read as parquet"):
        rows.RowsFile(path)
    broken = bytearray(data)
    broken[100:2000] = bytes(1900)
    path.write_bytes(broken)
    with pytest.raises(DataError):
        rows.RowsFile(path).sha256()


def test_nothing_half_written_keeps_the_name(tmp_path):
    def blocks():
        yield random_rows(200)
        raise DataError("the source is damaged")

    path = tmp_path / "rows.parquet"
    with pytest.raises(DataError, match="the source is damaged"):
        rows.write(path, blocks(), 16)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="it was not written"):
        rows.write(tmp_path / "nowhere" / "rows.parquet", [random_rows(1)], 16)
