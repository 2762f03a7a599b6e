"""Atomic writes and strict reading."""

import os
import stat

import pytest

from llama_jax import files


def test_old_or_new_content_never_half(tmp_path, monkeypatch):
    path = tmp_path / "é x.json"
    files.write_json_atomic(path, {"a": 1, "ü": [10**30, None, 0.1]})
    assert files.read_json(path) == {"a": 1, "ü": [10**30, None, 0.1]}
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, name, fail)
            with pytest.raises(OSError, match="No space"):
                files.write_json_atomic(path, {"a": 2})
        assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


def test_the_content_is_on_the_disk_before_it_has_the_name(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        files.os, "fsync", lambda fd: (events.append(("sync", stat.S_ISDIR(os.fstat(fd).st_mode))), fsync(fd))
    )
    monkeypatch.setattr(
        files.os, "replace", lambda a, b: (events.append(("rename", a.parent == b.parent)), replace(a, b))
    )
    files.write_atomic(tmp_path / "x", b"1")
    assert events == [("sync", False), ("rename", True), ("sync", True)]


def test_a_killed_write_leaves_one_file_that_the_next_one_reuses(tmp_path):
    (tmp_path / "x.tmp").write_bytes(b"a longer half")
    files.write_atomic(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new" and os.listdir(tmp_path) == ["x"]


def test_a_planted_link_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "x.tmp").symlink_to(target)
    with pytest.raises(OSError):
        files.write_atomic(tmp_path / "x", b"new")
    assert target.read_bytes() == b"precious"


def test_the_mode_follows_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        files.write_atomic(tmp_path / "x", b"1")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


@pytest.mark.parametrize("text", ["NaN", '{"a": Infinity}', "[-Infinity]", "{", b"\xff", "[" * 100_000])
def test_what_is_not_json_is_refused(text):
    with pytest.raises(ValueError):
        files.parse_json(text)


def test_nan_is_not_written(tmp_path):
    with pytest.raises(ValueError):
        files.write_json_atomic(tmp_path / "x", {"a": float("nan")})
    assert os.listdir(tmp_path) == []


def test_canonical_json_does_not_depend_on_order():
    assert files.canonical_json({"b": [1, 2], "a": "é"}) == b'{"a":"\\u00e9","b":[1,2]}'


def test_sha256(tmp_path):
    (tmp_path / "x").write_bytes(b"abc" * 1_000_000)
    (tmp_path / "y").write_bytes(b"abc")
    # the test vector of FIPS 180-2
    assert files.sha256_of_file(tmp_path / "y") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert files.sha256_of_file(tmp_path / "x", sync=True) != files.sha256_of_file(tmp_path / "y")


def test_removing_a_tree_spares_what_links_point_to(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").write_text("1")
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "link").symlink_to(tmp_path / "kept")
    (tree / "sub" / "link").symlink_to(tmp_path / "kept")
    files.remove_tree(tree)
    assert os.listdir(tmp_path) == ["kept"] and (tmp_path / "kept" / "x").exists()


def test_the_last_entry_goes_last(tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("a", "m", "z"):
        (tree / name).write_text("1")
    real = type(tree).unlink

    def stop_at_z(path, missing_ok=False):
        if path.name == "z":
            raise OSError("killed here")
        real(path, missing_ok)

    monkeypatch.setattr(type(tree), "unlink", stop_at_z)
    with pytest.raises(OSError, match="killed"):
        files.remove_tree(tree, last="m")
    assert sorted(os.listdir(tree)) == ["m", "z"]
