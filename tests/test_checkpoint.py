"""Checkpoints: exact round trips, every kind of damage, every moment of death, retention, full disks."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import checkpoint, integrity
from llama_jax.checkpoint import Checkpoints
from llama_jax.errors import CheckpointError

ROOT = Path(__file__).resolve().parent.parent
FINGERPRINT = {"layout": [["a.weight", 0, [2, 3], True], ["norm.weight", 6, [3], False]], "loader_version": 2}


def numbers(update):
    """The state of `update` in numpy: awkward bits included, so that equality means equality of bits."""
    rng = np.random.default_rng(update)
    params = rng.integers(0, 2**32, (2, 257), dtype=np.uint32).view(np.float32)
    params[0, :4] = np.array([-0.0, 1e-42, np.inf, np.nan], np.float32)
    return {
        "params": params,
        "mu": rng.standard_normal((2, 257)).astype(np.float32),
        "count": np.array([16777217, update], np.int32),
        "ok": np.array(update % 2 == 0),
    }


def arrays(update):
    return {name: jnp.asarray(value) for name, value in numbers(update).items()}


def meta(update):
    return {"update": update, "targets": 10**12 + update, "sequences": 10**30 + update, "loader": {"seed": 42}}


def templates():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in numbers(0).items()}


def assert_is(restored, update, kind="recovery"):
    assert restored is not None
    assert (restored.update, restored.kind, restored.meta) == (update, kind, meta(update))
    expected = numbers(update)
    assert restored.arrays.keys() == expected.keys()
    for name, value in expected.items():
        found = np.asarray(restored.arrays[name])
        assert found.dtype == value.dtype and found.shape == value.shape, name
        assert found.tobytes() == value.tobytes(), name


def saved(directory, *updates, kind="interval"):
    checkpoints = Checkpoints(directory, FINGERPRINT)
    for update in updates:
        assert checkpoints.save(update, arrays(update), meta(update), kind)
    checkpoints.finish()
    return checkpoints


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def largest(step):
    files = [path for path in step.rglob("*") if path.is_file() and path.name != integrity.MANIFEST]
    return max(files, key=lambda path: path.stat().st_size)


# Round trips


def test_round_trip_is_bitwise(tmp_path):
    directory = tmp_path / "a run, with spaces: é漢" / "checkpoints"
    saved(directory, 7)
    restored = Checkpoints(directory, FINGERPRINT).restore_latest(templates())
    assert_is(restored, 7, "interval")
    assert int(restored.arrays["count"][0]) == 16777217


def test_restored_arrays_have_the_sharding_of_the_templates(tmp_path):
    saved(tmp_path, 1)
    mesh = jax.make_mesh((1, 1), ("worker", "data"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("worker"))
    wanted = templates() | {"params": jax.ShapeDtypeStruct((2, 257), jnp.float32, sharding=sharding)}
    assert Checkpoints(tmp_path, FINGERPRINT).restore_latest(wanted).arrays["params"].sharding == sharding


def test_buffers_may_be_donated_right_after_save(tmp_path):
    step = jax.jit(lambda x: x * np.float32(1.0) + np.float32(1.0), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path, FINGERPRINT)
    x = jnp.zeros((2, 50_000), jnp.float32)
    for update in range(1, 9):
        x = step(x)
        assert checkpoints.save(update, {"x": x}, meta(update), "interval")
        for _ in range(3):
            x = step(x)  # writes into the donated memory while the save is in flight
    checkpoints.finish()
    for update in range(1, 9):
        found = np.asarray(checkpoints.read(update).arrays["x"])
        assert (found == 4 * (update - 1) + 1).all()


def test_checksum_against_python_integers():
    values = np.array([[1.5, -2.0, 0.0], [np.nan, 3.0, 16777217.0]], np.float32)

    def oracle(words):
        first = second = 0
        for i, word in enumerate(words):
            m = ((word ^ (i * 0x9E3779B1 % 2**32)) * 0x85EBCA6B) % 2**32
            m = ((m ^ (m >> 13)) * 0xC2B2AE35) % 2**32
            m ^= m >> 16
            first, second = (first + m) % 2**32, (second + m * (i | 1)) % 2**32
        return f"{first:08x}{second:08x}"

    for array in (values, values.view(np.int32), np.array([True, False]), np.array(7, np.int32)):
        words = array.reshape(-1)
        words = words.astype(int) if words.dtype == bool else words.view(np.uint32)
        expected = oracle([int(word) for word in words])
        assert integrity.checksum_on_host(array) == expected
        assert integrity.checksum_text(integrity.checksum_on_device(jnp.asarray(array))) == expected
    swapped = values[:, ::-1]
    assert integrity.checksum_on_host(swapped) != integrity.checksum_on_host(values)


def test_only_plain_dtypes_and_json(tmp_path):
    checkpoints = Checkpoints(tmp_path, FINGERPRINT)
    with pytest.raises(ValueError, match="bfloat16"):
        checkpoints.save(1, {"x": jnp.zeros(3, jnp.bfloat16)}, {}, "recovery")
    with pytest.raises(ValueError, match="JSON"):
        checkpoints.save(1, {"x": jnp.zeros(3)}, {"best": float("nan")}, "recovery")
    with pytest.raises(ValueError, match="kind"):
        checkpoints.save(1, {"x": jnp.zeros(3)}, {}, "weekly")
    assert names(tmp_path) == []


# Damage


def flip_bit(step):
    path = largest(step)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    return path.name


def truncate(step):
    path = largest(step)
    path.write_bytes(path.read_bytes()[:-1])
    return path.name


def remove_file(step):
    path = largest(step)
    path.unlink()
    return path.name


def remove_manifest(step):
    (step / integrity.MANIFEST).unlink()
    return integrity.MANIFEST


def edit_meta(step):
    path = step / integrity.MANIFEST
    content = json.loads(path.read_text())
    content["meta"]["targets"] += 1
    path.write_text(json.dumps(content))
    return integrity.MANIFEST


def tear_manifest(step):
    path = step / integrity.MANIFEST
    path.write_bytes(path.read_bytes()[:-20])
    return integrity.MANIFEST


def other_update(step):
    content = json.loads((step / integrity.MANIFEST).read_text())
    integrity.write_manifest(step, {**content, "update": 3})
    return "of update 3"


def replace_by_link(step):
    path = largest(step)
    elsewhere = step.parent.parent / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)
    return path.name


def empty_step(step):
    shutil.rmtree(step)
    step.mkdir()
    return integrity.MANIFEST


DAMAGE = [
    flip_bit,
    truncate,
    remove_file,
    remove_manifest,
    edit_meta,
    tear_manifest,
    other_update,
    replace_by_link,
    empty_step,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damaged_newest_is_named_set_aside_and_the_older_used(tmp_path, capsys, damage):
    directory = tmp_path / "checkpoints"
    saved(directory, 1, 2)
    what = damage(directory / "2")
    after = sorted(path.name for path in (directory / "2").rglob("*"))
    checkpoints = Checkpoints(directory, FINGERPRINT)
    assert_is(checkpoints.restore_latest(templates()), 1, "interval")
    warning = capsys.readouterr().err
    assert f"{directory}/2" in warning and what in warning and "damaged/2" in warning, warning
    assert sorted(path.name for path in (directory / "damaged" / "2").rglob("*")) == after
    assert checkpoints.save(2, arrays(2), meta(2), "interval", wait=True)  # the run goes on over the same update
    assert_is(Checkpoints(directory, FINGERPRINT).restore_latest(templates()), 2, "interval")


@pytest.mark.parametrize("damage", [flip_bit, remove_manifest], ids=lambda damage: damage.__name__)
def test_with_none_left_the_run_stops(tmp_path, damage):
    directory = tmp_path / "checkpoints"
    saved(directory, 1)
    what = damage(directory / "1")
    for _ in range(2):  # and stops again; nothing is moved, so that a repaired copy is found
        with pytest.raises(CheckpointError, match="no usable checkpoint") as error:
            Checkpoints(directory, FINGERPRINT).restore_latest(templates())
        assert what in str(error.value) and "\n" not in str(error.value)
    assert (directory / "1").is_dir()


def test_removed_checkpoints_are_no_fresh_start(tmp_path):
    saved(tmp_path, 1)
    shutil.rmtree(tmp_path / "1")
    with pytest.raises(CheckpointError, match="had been some"):
        Checkpoints(tmp_path, FINGERPRINT).restore_latest(templates())


def test_what_is_not_a_checkpoint_is_no_reason_to_stop(tmp_path, capsys):
    assert Checkpoints(tmp_path, FINGERPRINT).restore_latest(templates()) is None
    (tmp_path / "5").mkdir()
    (tmp_path / "4.orbax-checkpoint-tmp-99").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    checkpoints = Checkpoints(tmp_path, FINGERPRINT)
    assert checkpoints.restore_latest(templates()) is None
    for update in (3, 4, 5):
        assert checkpoints.save(update, arrays(update), meta(update), "interval", wait=True)
    assert_is(checkpoints.restore_latest(templates()), 5, "interval")
    assert names(tmp_path) == ["3", "4", "5", "damaged", "notes.txt", "saved.json"]
    assert names(tmp_path / "damaged") == ["4.orbax-checkpoint-tmp-99", "5"], "moved, never deleted"
    assert "in the way" in capsys.readouterr().err


def test_foreign_things_set_aside_before_the_first_checkpoint_do_not_count_as_checkpoints(tmp_path, monkeypatch):
    (tmp_path / "1").mkdir()
    checkpoints = Checkpoints(tmp_path, FINGERPRINT)
    monkeypatch.setenv("LLAMA_JAX_TEST_FAULT", "enospc@before_save:1")
    assert not checkpoints.save(1, arrays(1), meta(1), "recovery")
    assert names(tmp_path) == ["damaged"]
    assert Checkpoints(tmp_path, FINGERPRINT).restore_latest(templates()) is None


def test_a_left_over_tmp_directory_of_a_killed_save_is_cleaned(tmp_path):
    left = tmp_path / "4.orbax-checkpoint-tmp"
    left.mkdir()
    (left / "half").write_text("x")
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "half").write_text("x")
    (tmp_path / "4.saving").write_text("{}")
    (tmp_path / "2.retired").mkdir()
    assert Checkpoints(tmp_path, FINGERPRINT).restore_latest(templates()) is None
    assert names(tmp_path) == []


def test_a_retired_name_without_our_manifest_is_not_deleted(tmp_path):
    (tmp_path / "2.retired").mkdir()
    (tmp_path / "2.retired" / "thesis.tex").write_text("x")
    Checkpoints(tmp_path, FINGERPRINT)
    assert (tmp_path / "2.retired" / "thesis.tex").exists()


def test_manifest_names_stay_inside_the_step(tmp_path, capsys):
    saved(tmp_path, 1, 2)
    secret = tmp_path / "secret"
    secret.write_text("x")
    content = integrity.read_manifest(tmp_path / "2")
    for name in ("../secret", str(secret)):
        entry = {"file": name, "bytes": 1, "sha256": "0"}
        integrity.write_manifest(tmp_path / "2", {**content, "files": [entry]})
        with pytest.raises(CheckpointError, match="plain relative name"):
            Checkpoints(tmp_path, FINGERPRINT, read_only=True).read(2)


# What belongs to another run is refused and left in place


def test_other_fingerprint_is_refused_by_name(tmp_path):
    saved(tmp_path, 1, 2)
    other_layout = json.loads(json.dumps(FINGERPRINT))
    other_layout["layout"][1][3] = True
    cases = {"layout[1][3]: false -> true": other_layout, "loader_version: 2 -> 3": FINGERPRINT | {"loader_version": 3}}
    for text, fingerprint in cases.items():
        with pytest.raises(CheckpointError) as error:
            Checkpoints(tmp_path, fingerprint).restore_latest(templates())
        assert text in str(error.value)
    assert names(tmp_path) == ["1", "2", "saved.json"]


def test_another_format_version_is_refused_not_set_aside(tmp_path):
    """What a newer program saved isn't damaged: going on from an older checkpoint would throw its work away."""
    saved(tmp_path, 1, 2)
    content = json.loads((tmp_path / "2" / integrity.MANIFEST).read_text())
    integrity.write_manifest(tmp_path / "2", {**content, "format_version": 99})
    with pytest.raises(CheckpointError, match="format version 99 is refused"):
        Checkpoints(tmp_path, FINGERPRINT).restore_latest(templates())
    assert [entry.update for entry in Checkpoints(tmp_path, None, read_only=True).entries()] == [1]
    assert names(tmp_path) == ["1", "2", "saved.json"]


def test_other_shape_dtype_or_names_are_refused(tmp_path):
    saved(tmp_path, 1)
    base = templates()
    cases = {
        "params is float32[2, 257], this run needs float32[2, 258]": base
        | {"params": jax.ShapeDtypeStruct((2, 258), jnp.float32)},
        "count is int32[2], this run needs float32[2]": base | {"count": jax.ShapeDtypeStruct((2,), jnp.float32)},
        "lacks nu": base | {"nu": base["mu"]},
        "holds mu in excess": {name: base[name] for name in ("params", "count", "ok")},
    }
    for text, wanted in cases.items():
        with pytest.raises(CheckpointError) as error:
            Checkpoints(tmp_path, FINGERPRINT).restore_latest(wanted)
        assert text in str(error.value)


def test_a_copied_directory_works(tmp_path):
    saved(tmp_path / "a", 1, 2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert_is(Checkpoints(tmp_path / "b", FINGERPRINT).restore_latest(templates()), 2, "interval")
    assert names(tmp_path / "b") == names(tmp_path / "a")


def test_reading_beside_the_trainer(tmp_path, capsys):
    saved(tmp_path, 1, 2)
    before = names(tmp_path)
    reader = Checkpoints(tmp_path, None, read_only=True)
    assert [(entry.update, entry.kind) for entry in reader.entries()] == [(1, "interval"), (2, "interval")]
    one = reader.read(1, names=["params"])
    assert one.update == 1 and list(one.arrays) == ["params"]
    assert np.asarray(one.arrays["params"]).tobytes() == numbers(1)["params"].tobytes()
    with pytest.raises(CheckpointError, match=r"no checkpoint of update 9, there are: \[1, 2\]"):
        reader.read(9)
    with pytest.raises(CheckpointError, match="not nu"):
        reader.read(names=["nu"])
    flip_bit(tmp_path / "2")
    with pytest.raises(CheckpointError, match="SHA-256"):
        reader.read()
    remove_manifest(tmp_path / "2")
    (tmp_path / "2.saving").write_text("{}")
    assert reader.read().update == 1 and capsys.readouterr().err == "", "the trainer is writing update 2"
    (tmp_path / "2.saving").unlink()
    assert reader.read().update == 1 and "has no sound integrity.json" in capsys.readouterr().err
    assert names(tmp_path) == before, "a reader moves nothing"


# What is kept


def test_two_recovery_checkpoints_until_the_final_one(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3, kind="recovery")
    assert names(tmp_path) == ["2", "3", "saved.json"]
    assert checkpoints.save(4, arrays(4), meta(4), "interval")
    assert checkpoints.save(5, arrays(5), meta(5), "recovery")
    checkpoints.finish()
    assert names(tmp_path) == ["3", "4", "5", "saved.json"]
    assert checkpoints.save(6, arrays(6), meta(6), "final")
    assert names(tmp_path) == ["4", "6", "saved.json"], "final returns when all is done"
    assert_is(Checkpoints(tmp_path, FINGERPRINT).restore_latest(templates()), 6, "final")


def test_saving_an_update_again_renews_kind_and_meta(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, kind="recovery")
    inode = largest(tmp_path / "2").stat().st_ino
    assert checkpoints.save(2, arrays(2), meta(2) | {"evaluated": True}, "interval")
    assert checkpoints.save(2, arrays(2), meta(2), "recovery"), "never lowered"
    restored = Checkpoints(tmp_path, FINGERPRINT).restore_latest(templates())
    assert_is(restored, 2, "interval")
    assert largest(tmp_path / "2").stat().st_ino == inode, "the arrays were not written again"
    with pytest.raises(CheckpointError, match="already saved with other arrays"):
        checkpoints.save(2, arrays(3), meta(2), "recovery", wait=True)
    flip_bit(tmp_path / "2")
    assert checkpoints.save(2, arrays(2), meta(2), "final"), "a damaged one is set aside and written anew"
    assert_is(checkpoints.restore_latest(templates()), 2, "final")
    assert names(tmp_path) == ["2", "damaged", "saved.json"]


# Full disks and other failures


def test_a_failed_recovery_is_reported_and_the_next_one_works(tmp_path, capsys, monkeypatch):
    checkpoints = saved(tmp_path, 1, kind="recovery")
    monkeypatch.setenv("LLAMA_JAX_TEST_FAULT", "enospc@before_manifest:1,enospc@before_save:2")
    monkeypatch.setenv("LLAMA_JAX_TEST_FAULT_FIRED", str(tmp_path / "fired"))
    assert checkpoints.save(2, arrays(2), meta(2), "recovery"), "it fails in the background"
    assert not checkpoints.save(3, arrays(3), meta(3), "recovery"), "it fails at once"
    warning = capsys.readouterr().err
    assert "update 2" in warning and "update 3" in warning and "no space" in warning
    assert (tmp_path / "fired").read_text().split() == ["enospc@before_manifest:1", "enospc@before_save:2"]
    assert names(tmp_path) == ["1", "fired", "saved.json"], "what the failed saves wrote is removed"
    assert checkpoints.save(4, arrays(4), meta(4), "recovery")
    checkpoints.finish()
    assert_is(checkpoints.restore_latest(templates()), 4)


def test_a_failed_final_raises_and_keeps_the_older_ones(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 1, 2, kind="recovery")
    monkeypatch.setenv("LLAMA_JAX_TEST_FAULT", "enospc@after_orbax_commit:1")
    with pytest.raises(CheckpointError, match=r"final checkpoint of update 3 .* no space left") as error:
        checkpoints.save(3, arrays(3), meta(3), "final")
    assert "\n" not in str(error.value)
    assert_is(Checkpoints(tmp_path, FINGERPRINT).restore_latest(templates()), 2)


def test_a_lost_interval_checkpoint_ends_the_run_with_an_error(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, FINGERPRINT)
    monkeypatch.setenv("LLAMA_JAX_TEST_FAULT", "enospc@before_manifest:1")
    assert checkpoints.save(1, arrays(1), meta(1), "interval")
    assert checkpoints.save(2, arrays(2), meta(2), "final"), "training goes on"
    with pytest.raises(CheckpointError, match="interval checkpoint of update 1"):
        checkpoints.finish()


def test_space_is_checked_first(tmp_path, monkeypatch, capsys):
    checkpoints = Checkpoints(tmp_path, FINGERPRINT)
    usage = shutil.disk_usage(tmp_path)
    needed = sum(value.nbytes for value in numbers(1).values())
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage._replace(free=int(1.19 * needed)))
    assert not checkpoints.save(1, arrays(1), meta(1), "recovery")
    assert "MB are needed" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="MB are needed"):
        checkpoints.save(1, arrays(1), meta(1), "recovery", wait=True)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage._replace(free=int(1.21 * needed)))
    assert checkpoints.save(1, arrays(1), meta(1), "recovery", wait=True)


def test_what_is_on_the_disk_is_compared_with_what_was_in_memory(tmp_path, monkeypatch):
    """The seeded defect: the disk gives back other numbers than were written, which hashing the files alone blesses."""
    read = checkpoint._read

    def wrong(directory, update, wanted):
        found = read(directory, update, wanted)
        return {name: np.nextafter(x, np.inf, dtype=x.dtype) if name == "mu" else x for name, x in found.items()}

    monkeypatch.setattr(checkpoint, "_read", wrong)
    with pytest.raises(CheckpointError, match="mu reads back different"):
        Checkpoints(tmp_path, FINGERPRINT).save(1, arrays(1), meta(1), "recovery", wait=True)
    assert names(tmp_path) == []


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file"):
        Checkpoints(tmp_path / "file" / "checkpoints", FINGERPRINT)


# Death at any moment: a process of its own saves update after update

VICTIM = """
import resource, sys
sys.path[:0] = [{root!r}, {tests!r}]
from test_checkpoint import *
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
checkpoints = Checkpoints(sys.argv[1], FINGERPRINT)
print("ready", flush=True)
for update in range(1, 500):
    checkpoints.save(update, arrays(update), meta(update), "recovery", wait=len(sys.argv) > 2)
"""


def victim(directory, *arguments, **environment):
    code = VICTIM.format(root=str(ROOT), tests=str(ROOT / "tests"))
    return subprocess.Popen(
        [sys.executable, "-c", code, str(directory), *map(str, arguments)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "point, expected", [("before_save", 3), ("after_orbax_commit", 3), ("before_manifest", 3), ("after_manifest", 4)]
)
def test_killed_in_a_save(tmp_path, point, expected):
    directory = tmp_path / "checkpoints"
    fired = tmp_path / "fired"
    process = victim(directory, LLAMA_JAX_TEST_FAULT=f"kill@{point}:4", LLAMA_JAX_TEST_FAULT_FIRED=str(fired))
    process.communicate(timeout=120)
    assert process.returncode == -9 and fired.read_text() == f"kill@{point}:4\n"
    assert (directory / "4.saving").exists()
    checkpoints = Checkpoints(directory, FINGERPRINT)
    assert not list(directory.glob("*.saving")) and not list(directory.glob("*tmp*"))
    assert_is(checkpoints.restore_latest(templates()), expected)
    assert not (directory / "damaged").exists()
    for update in range(expected + 1, 7):
        assert checkpoints.save(update, arrays(update), meta(update), "recovery", wait=True)
    assert names(directory) == ["5", "6", "saved.json"]


def test_killed_at_any_time(tmp_path):
    process = victim(tmp_path)
    assert process.stdout.readline() == "ready\n"
    for _ in range(600):
        if (tmp_path / "saved.json").exists():
            break
        time.sleep(0.05)
    time.sleep(0.733)
    process.kill()
    process.communicate(timeout=60)
    newest = json.loads((tmp_path / "saved.json").read_text())["newest"]
    restored = Checkpoints(tmp_path, FINGERPRINT).restore_latest(templates())
    assert restored.update in (newest, newest + 1)
    assert_is(restored, restored.update)
    assert not (tmp_path / "damaged").exists()


def test_a_write_that_the_system_refuses(tmp_path):
    """RLIMIT_FSIZE makes the writes of Orbax's own threads fail, as a full disk does."""
    saved(tmp_path / "checkpoints", 1)
    process = victim(tmp_path / "other", 3000)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1 and "CheckpointError: recovery checkpoint of update 1" in stderr, stderr[-2000:]
    assert names(tmp_path / "other") == []


def test_a_failed_write_is_one_line(tmp_path):
    """Of all that Orbax and its threads have to say of it; files may have 4 KiB here."""
    code = (
        "import sys, resource, numpy, jax\n"
        "from llama_jax.checkpoint import Checkpoints\n"
        "from llama_jax.errors import run_command\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "saved = Checkpoints(sys.argv[1], {})\n"
        "x = jax.numpy.asarray(numpy.random.default_rng(0).normal(size=9999).astype(numpy.float32))\n"
        "sys.exit(run_command(lambda: saved.save(1, {'x': x}, {}, 'final')))"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], capture_output=True, text=True)
    assert ended.returncode == 4 and ended.stderr.startswith("error: final checkpoint of update 1"), ended.stderr
    assert ended.stderr.count("\n") == 1 and list((tmp_path / "c").iterdir()) == []
