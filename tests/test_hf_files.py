"""The reader of safetensors headers and indices, against the safetensors library and against damaged files."""

import json
import os
import random

import numpy as np
import pytest
import safetensors.numpy
from fake_checkpoints import encode

from llama_jax import hf_files
from llama_jax.errors import CheckpointError
from llama_jax.hf_files import Tensor, read_header, read_headers, weight_files


def file_of(tmp_path, header, data=b"", length=None):
    """A file with this header (JSON text, bytes, or what becomes JSON) and these bytes behind it."""
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype="BF16", shape=(2, 3), offsets=(0, 12)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_golden_header(tmp_path):
    """The example whose bytes were worked out by hand: 58 characters, padded to 64."""
    raw = b'{"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}'
    assert len(raw) == 58
    head, size = encode({"w": Tensor("BF16", (2, 3))}, metadata=False)
    assert head == bytes.fromhex("4000000000000000") + raw + b" " * 6
    assert size == 12
    path = tmp_path / "model.safetensors"
    path.write_bytes(head + bytes(12))
    assert read_header(path) == {"w": Tensor("BF16", (2, 3))}


def test_files_of_the_library(tmp_path):
    tensors = {
        "scalar": np.array(1, np.float32),
        "empty": np.zeros((0, 5), np.float16),
        "bytes": np.arange(3, dtype=np.uint8),
        "table": np.arange(12, dtype=np.int64).reshape(3, 4),
        "truth": np.array([True, False]),
        "wide": np.zeros((2, 2, 2), np.float64),
    }
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    expected = {"scalar": "F32", "empty": "F16", "bytes": "U8", "table": "I64", "truth": "BOOL", "wide": "F64"}
    assert read_header(path) == {name: Tensor(expected[name], array.shape) for name, array in tensors.items()}


@pytest.mark.parametrize("dtype", hf_files.BITS)
def test_the_library_agrees_on_every_dtype(tmp_path, dtype):
    """Its own reader takes the sizes that follow from BITS, and no others."""
    head, size = encode({"w": Tensor(dtype, (8,))})
    path = tmp_path / "model.safetensors"
    path.write_bytes(head + bytes(size))
    assert read_header(path) == {"w": Tensor(dtype, (8,))}
    with safetensors.safe_open(path, framework="np") as file:
        assert file.get_slice("w").get_dtype() == dtype and list(file.get_slice("w").get_shape()) == [8]


TWO = {"a": entry(), "b": entry("F32", (2,), (12, 20))}
DAMAGED = {
    "unknown dtype": ({"a": entry("F12")}, 12),
    "does not fill the bytes": ({"a": entry(shape=(2, 4))}, 12),
    "F4.*does not fill": ({"a": entry("F4", (3,), (0, 2))}, 2),
    "starts at byte 16 instead of 12": (TWO | {"b": entry("F32", (2,), (16, 24))}, 24),
    "starts at byte 8 instead of 12": (TWO | {"b": entry("F32", (2,), (8, 16))}, 16),
    "a starts at byte 4 instead of 0": ({"a": entry(offsets=(4, 16))}, 16),
    "has 85 bytes, its header asks for 86": ({"a": entry()}, 11),
    "has 87 bytes, its header asks for 86": ({"a": entry()}, 13),
    "a has not just dtype, shape and data_offsets": ({"a": entry() | {"x": 1}}, 12),
    "a has not just": ({"a": [1]}, 12),
    "no valid shape and offsets": ({"a": entry(shape=(-2, -3))}, 12),
    "a has no valid shape": ({"a": entry() | {"shape": [2, 3.0]}}, 12),
    "has no valid shape and": ({"a": entry() | {"shape": [True, 6]}}, 12),
    "has no valid shape and offsets": ({"a": entry() | {"data_offsets": [0, 6, 12]}}, 12),
    "fill the bytes 12 to 0": ({"a": entry(offsets=(12, 0))}, 12),
    "__metadata__ is not text": ({"__metadata__": {"x": 1}, "a": entry()}, 12),
    "__metadata__ is not": ({"__metadata__": [], "a": entry()}, 12),
    "no name of a tensor": ({"": entry()}, 12),
    r"'\\x1b\[2J' is no name": ({"\x1b[2J": entry()}, 12),
    "names a twice": ('{"a":%s,"a":%s}' % ((json.dumps(entry()),) * 2), 12),
    "names shape twice": ('{"a":{"dtype":"BF16","shape":[9],"shape":[2,3],"data_offsets":[0,12]}}', 12),
    "header is not JSON": ('{"a":NaN}', 0),
    "is not JSON": ('{"a":', 0),
    "the header is not JSON": (b'{"\xff":1}', 0),
    "header is not": ('{"a":' + "[" * 100_000, 0),
    "no safetensors header": ("[]", 0),
    "has no safetensors header": ('  {"a":1}', 0),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_damaged_headers(tmp_path, message):
    header, size = DAMAGED[message]
    path = file_of(tmp_path, header, bytes(size))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_lengths(tmp_path):
    for data in (b"", b"\x02", b"\x02" + bytes(7), b"\x02" + bytes(7) + b"{"):
        (tmp_path / "short").write_bytes(data)
        with pytest.raises(CheckpointError, match="too short"):
            read_header(tmp_path / "short")
    with pytest.raises(CheckpointError, match="over the limit of 100000000"):
        read_header(file_of(tmp_path, {"a": entry()}, bytes(12), length=100_000_001))
    with pytest.raises(CheckpointError, match="cut off"):
        read_header(file_of(tmp_path, {"a": entry()}, length=100_000_000))
    huge = '{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,1]}}' % ("9" * 10_000)
    with pytest.raises(CheckpointError, match="not JSON"):
        read_header(file_of(tmp_path, huge))
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "absent")
    with pytest.raises(CheckpointError):
        read_header(tmp_path)
    assert read_header(file_of(tmp_path, {})) == {}


def test_headers_only(tmp_path):
    path = file_of(tmp_path, TWO)
    with pytest.raises(CheckpointError, match="its header asks for"):
        read_header(path)
    assert list(read_header(path, headers_only=True)) == ["a", "b"]
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="its header asks for"):
        read_header(path, headers_only=True)


def test_every_cut_and_random_damage_is_one_error(tmp_path):
    head, size = encode({"a": Tensor("BF16", (2, 3)), "b": Tensor("U8", (5,))})
    whole = head + bytes(size)
    path = tmp_path / "model.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_header(path)
    draw = random.Random(1)
    refused = 0
    for _ in range(500):
        data = bytearray(whole)
        data[draw.randrange(len(head))] = draw.randrange(256)
        path.write_bytes(data)
        try:
            read_header(path)
        except CheckpointError:
            refused += 1
    assert refused > 300  # the others changed a name, the metadata, or white space


def index(folder, weight_map):
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    (folder / hf_files.INDEX).write_text(text)


def shards(folder):
    """Two files with a tensor each, and their index."""
    weight_map = {}
    for name in ("a", "b"):
        file = f"{name}.safetensors"
        (folder / file).write_bytes(encode({name: Tensor("U8", (3,))})[0] + bytes(3))
        weight_map[name] = file
    index(folder, weight_map)
    return weight_map


def test_shards(tmp_path):
    weight_map = shards(tmp_path)
    assert read_headers(weight_files(tmp_path)) == {name: Tensor("U8", (3,)) for name in "ab"}
    for change in ({"a": "b.safetensors"}, {"c": "a.safetensors"}):
        index(tmp_path, weight_map | change)
        with pytest.raises(CheckpointError, match="is not where the index says"):
            read_headers(weight_files(tmp_path))
    index(tmp_path, {"a": "a.safetensors"})  # the index may leave a file out, but not a tensor of a file that it names
    assert list(read_headers(weight_files(tmp_path))) == ["a"]
    files = weight_files(tmp_path)
    (tmp_path / "again.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="a is stored in another file too"):
        read_headers(files | {tmp_path / "again.safetensors": set()})


@pytest.mark.parametrize(
    "name, message",
    [
        ("../a.safetensors", "not the plain name"),
        ("/etc/a.safetensors", "not the plain name"),
        ("sub/a.safetensors", "not the plain name"),
        ("sub\\a.safetensors", "not the plain name"),
        ("a.bin", "not the plain name"),
        ("", "not the plain name"),
        ("c.safetensors", "does not exist"),
        ("link.safetensors", "is a link out of its folder"),
        ("folder.safetensors", "does not exist"),
        ("pipe.safetensors", "does not exist"),
    ],
)
def test_names_that_lead_elsewhere(tmp_path, name, message):
    folder = tmp_path / "folder"
    (folder / "folder.safetensors").mkdir(parents=True)
    weight_map = shards(folder)
    (tmp_path / "a.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    (folder / "link.safetensors").symlink_to(tmp_path / "a.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    index(folder, weight_map | {"a": name})
    with pytest.raises(CheckpointError, match=message):
        weight_files(folder)


def test_indices_that_are_none(tmp_path):
    for text in ("", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": NaN}}', '{"a":' * 9):
        index(tmp_path, text)
        with pytest.raises(CheckpointError, match="is not the index of a sharded model"):
            weight_files(tmp_path)
    index(tmp_path, '{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}')
    with pytest.raises(CheckpointError, match="names a twice"):
        weight_files(tmp_path)
