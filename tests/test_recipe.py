"""The whole chain on the CPU: rows, two recipes trained by the real loop, component tests, checks, listing, page.

A tiny model, 8 rows of 32 tokens a step, in this process; the exit codes through the real command.
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from recipe_records import FIELDS

from bench import component, measure, recipe, recipe_fields, recipe_run, record
from data_pipeline import verify
from llama_jax import arena, config, data, export, model, rows
from llama_jax import step as steps
from llama_jax.errors import ConfigError, DataError, NonFiniteError

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ("--config.model.attention=reference", "--config.model.head=plain")
FAST = ("--config.model.attention=xla", "--config.model.head=chunked", "--config.model.head_chunk_rows=96")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with rows, a config, and the records of both recipes."""
    folder = tmp_path_factory.mktemp("recipes")
    drawn = np.cumsum(np.random.default_rng(0).integers(0, 4, (168, 32)), axis=1) % 64
    rows.write(folder / "rows.parquet", [drawn.astype(np.int32)], 32)
    (folder / "records").mkdir()
    lines = [f"    set_field(config, {path!r}, {value!r})" for path, value in FIELDS.items() if path != "data.path"]
    (folder / "tiny.py").write_text(
        "from llama_jax.config import default, set_field\n\n\ndef get_config():\n    config = default()\n"
        + "\n".join(lines)
        + "\n    return config\n"
    )
    run(folder, "reference", *REFERENCE, "--status=reference")
    run(folder, "fast", *FAST, "--config.training.microbatch=8", "--author-link=https://example.org/tool")
    return folder


def run(folder, name, *words):
    out = folder / "records" / f"{name}.json"
    given = [f"--config={folder / 'tiny.py'}", f"--rows={folder / 'rows.parquet'}", f"--out={out}", f"--id={name}"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        recipe.main(["run", *given, "--workload=8x32", "--commit=abc", *words])
    assert f"{name}.json: " in said.getvalue() and "tokens/s/GPU" in said.getvalue()
    return record.read(out)


def read(folder, name):
    return record.read(folder / "records" / f"{name}.json")


def test_a_record_says_what_ran(folder):
    measured = read(folder, "fast")["measured"]
    assert (measured["status"], measured["stack"]["commit"], measured["device"]["kind"]) == ("recipe", "abc", "cpu")
    assert measured["author"] == {"name": "The llama_jax authors", "link": "https://example.org/tool"}
    assert measured["config"]["data"]["path"] == "$SFT_DATA" and str(folder) not in json.dumps(measured["config"])
    assert "--rows=$SFT_DATA" in measured["command"] and "--out=$OUT" in measured["command"]
    assert measured["resolved"]["attention"] == "xla" and measured["resolved"]["head"] == "chunked"
    assert measured["run"]["tokens"] == [256] * 20 and measured["run"]["profiled_steps"] == []
    with contextlib.closing(rows.RowsFile(folder / "rows.parquet")) as file:
        assert measured["rows"]["rows_sha256"] == file.sha256(160) != file.sha256()  # of the rows that were read
    settings = record.stored_config(measured["config"])
    row_P = arena.to_row(model.init(settings.model, settings.seed), arena.make_layout(settings.model))
    assert measured["arm"]["init_sha256"] == hashlib.sha256(row_P.tobytes()).hexdigest()
    assert measured["stack"]["code_sha256"] != "d" * 64 and measured["stack"]["versions"]["jax"] == jax.__version__


def test_the_settings_of_jax_are_those_in_force(folder):
    found = read(folder, "fast")["measured"]["environment"]["jax"]
    assert found == {name: found[name] for name in recipe_run.JAX_SETTINGS} and "absent" not in found.values()
    assert (found["jax_enable_x64"], found["jax_disable_jit"]) == (False, False)
    with jax.default_matmul_precision("tensorfloat32"), jax.disable_jit():
        changed = recipe_run.environment()["jax"]
    differing = {name: changed[name] for name in found if changed[name] != found[name]}
    assert differing == {"jax_default_matmul_precision": "tensorfloat32", "jax_disable_jit": True}


def test_paths_of_this_machine_are_not_recorded(folder, tmp_path):
    assert str(folder) not in read(folder, "fast")["measured"]["command"]
    words = ["--config=/home/someone/a b.py", "/home/someone/x.json", "--id=/", "configs/a.py", "--out", "rel/x.json"]
    assert [recipe_fields.anonymous(word) for word in words] == [
        "--config=DIR/a b.py", "DIR/x.json", "--id=DIR/", "configs/a.py", "--out", "rel/x.json",
    ]  # fmt: skip
    assert recipe._said("--note=", {"data/rows": "$SFT_DATA"}) == "--note="


def test_rows_are_verified_against_a_record(folder, tmp_path, capsys):
    recorded = folder / "records" / "reference.json"
    verify.verify_rows(folder / "rows.parquet", recorded)  # 168 rows, of which the recipe read 160
    assert "8 more that it does not read" in capsys.readouterr().out
    with contextlib.closing(rows.RowsFile(folder / "rows.parquet")) as file:
        content = file.read(0, 160).copy()
    content[17, 5] += 1
    rows.write(tmp_path / "rows.parquet", [content], 32)
    with pytest.raises(verify.Different):
        verify.verify_rows(tmp_path / "rows.parquet", recorded)


def test_losses_are_those_of_the_steps(folder):
    """The same 20 updates once more, by the step itself on the rows in order."""
    measured = read(folder, "reference")["measured"]
    settings = record.stored_config(measured["config"])
    numerics = model.Numerics(np.dtype("float32"), np.dtype("float32"), "reference", "plain")
    mesh = steps.make_mesh(1, 1)
    row_P = arena.to_row(model.init(settings.model, settings.seed), arena.make_layout(settings.model))
    state, update = steps.init_state(row_P, 1, mesh), steps.make_step(settings, numerics, mesh)
    with contextlib.closing(rows.RowsFile(folder / "rows.parquet")) as file:
        for i in range(20):
            batch = steps.make_batch(file.read(8 * i, 8), 1, 2, 4)
            rate = np.asarray([measured["arm"]["learning_rates"][i]], np.float32)
            state, metrics = update(state, batch, rate)
            assert measured["arm"]["losses"][i] == pytest.approx(float(metrics.loss_sum[0]) / 248, rel=1e-6)
            assert measured["arm"]["grad_norms"][i] == pytest.approx(float(metrics.grad_norm[0]), rel=1e-6)


def test_swaps_are_tested_checked_and_ranked(folder, capsys):
    places = [str(folder / "records" / f"{name}.json") for name in ("reference", "fast")]
    tests = str(folder / "records" / "components.json")
    with pytest.raises(recipe.NotVerified, match="components"):
        recipe.main(["check", places[1], f"--reference={places[0]}", "--workload=8x32"])
    component.main([*places, f"--out={tests}", "--commit=abc"])
    words = ["check", places[1], f"--reference={places[0]}", "--components", tests]
    with pytest.raises(recipe.NotVerified, match="workload"):
        recipe.main(words)  # not 128 rows of 8,192
    recipe.main([*words, "--workload=8x32"])
    checks = read(folder, "fast")["checks"]
    assert checks["passed"] and {t["component"] for t in checks["components"]["tests"]} == {"attention", "head"}
    assert checks["convergence"]["correlation"] > 0.999 and checks["convergence"]["guards"] == []
    capsys.readouterr()
    recipe.main(["list", str(folder / "records"), "--workload=8x32"])
    assert "fastest    fast" in capsys.readouterr().out
    recipe.main(["page", str(folder / "records"), f"--out={folder / 'pages'}", "--workload=8x32"])
    assert (folder / "pages" / "tiny.html").stat().st_size > 10_000


def test_a_checkpoint_is_named_and_counted(folder, capsys):
    """The same initial weights from a Hugging Face folder: the same run, of the model called like the folder."""
    checkpoint = folder / "some-llama"
    export.main([f"--config={folder / 'tiny.py'}", f"--out={checkpoint}", "--dtype=float32"])
    made = run(folder, "loaded", *REFERENCE, f"--hf-ckpt={checkpoint}", "--revision=v1")["measured"]
    (folder / "records" / "loaded.json").unlink()
    reference = read(folder, "reference")["measured"]
    assert made["model"] == {**reference["model"], "name": "some-llama", "checkpoint": "$HF_CKPT", "revision": "v1"}
    assert made["config"]["model"]["init_from"] == "$HF_CKPT" and str(folder) not in made["command"].split("--rows")[1]
    assert made["arm"] == reference["arm"]


def test_a_trace_begins_after_the_measured_steps(folder, tmp_path, monkeypatch):
    began = []
    monkeypatch.setattr(recipe_run.jax.profiler, "trace", lambda place: began.append(place) or contextlib.nullcontext())
    made = run(folder, "traced", *FAST, f"--trace={tmp_path}")
    (folder / "records" / "traced.json").unlink()
    assert len(began) == 2 and began[1] == str(tmp_path)
    measured = made["measured"]
    assert measured["run"]["steps_per_run"] == 25 and measured["run"]["profiled_steps"] == [22, 23, 24]
    assert not measured["figures"]["convergence_arm"] and len(measured["arm"]["losses"]) == 20
    reference = read(folder, "reference")["measured"]["arm"]["losses"]
    np.testing.assert_allclose(measured["arm"]["losses"], reference, rtol=1e-5)


def test_waiting_for_rows_counts_and_times_telescope(folder, monkeypatch):
    """A loader that needs half a second of a fake clock, a step that is ready a second after it was dispatched."""
    clock = itertools.count(0, 1)
    now = {"ns": 0}

    class Slow(data.Loader):
        def next(self, n):
            now["ns"] += 500_000_000
            return super().next(n)

    def wait(outputs):
        state, metrics = outputs
        jax.block_until_ready(outputs)
        assert state.params_NP.is_ready() and metrics.loss_sum.is_ready()
        now["ns"] += 1_000_000_000

    real = measure.timed_steps
    monkeypatch.setattr(recipe_run.data, "Loader", Slow)
    monkeypatch.setattr(
        recipe_run.measure, "timed_steps", lambda update, steps: real(update, steps, wait, lambda: now["ns"])
    )
    made = run(folder, "slow", *FAST, f"--admitted={time.time() - 1e6}")["measured"]
    (folder / "records" / "slow.json").unlink()
    (stamps,) = made["run"]["stamps_ns"]
    assert next(clock) == 0 and stamps == [1_500_000_000 * i for i in range(21)]
    assert made["figures"]["step_seconds"] == 1.5 and made["figures"]["step_time_cv"] == 0
    assert made["figures"]["tokens_per_s_gpu"] == 15 * 256 / ((stamps[20] - stamps[5]) / 1e9)


REFUSED = {
    "--config.training.total_updates=19": "total_updates is 19",
    "--config.training.batch_targets=496": "16",
    "--config.model.context=16": "model.context is 16",
    "--config.data.source=synthetic": "data.source is synthetic",
    "--config.training.epoch_targets_per_parameter=1.1": "an update has",
    "--workload=128x8192": "needs 8192",
    "--config.runtime.mesh_data=3": "mesh_data",
    "--id=a b": "id 'a b'",
    "--author=": "author.name: it is empty",
    "--revision=": "model.revision: it is empty",
    "--network=": "network",
    "--admitted=99999999999": "admitted",
    "--admitted=nan": "admitted",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_is_no_recipe_is_refused(folder, word, monkeypatch):
    """Before anything is trained."""
    monkeypatch.delattr(recipe_run, "_train")
    whole = {"context": 480, "synthetic": 512}  # targets that are whole rows of these
    words = [word, *(f"--config.training.batch_targets={n}" for part, n in whole.items() if part in word)]
    with pytest.raises(ConfigError, match=REFUSED[word]):
        run(folder, "refused", *words)
    assert not (folder / "records" / "refused.json").exists()


def test_what_cannot_be_written_or_read_is_refused_before_the_training(folder, tmp_path, monkeypatch):
    monkeypatch.delattr(recipe_run, "_train")
    with pytest.raises(DataError, match="159 rows to train on, the 20 steps take 160"):
        run(folder, "held", "--config.data.validation_rows=9")  # of 168
    (tmp_path / "file").write_text("")
    places = [str(folder / "records" / f"{name}.json") for name in ("reference", "fast")]
    with pytest.raises(OSError, match="exists"):
        run(folder, "nowhere", f"--out={tmp_path / 'file' / 'x.json'}")
    with pytest.raises(OSError, match="exists"):
        component.main([*places, f"--out={tmp_path / 'file' / 'x.json'}"])
    with pytest.raises(IsADirectoryError):
        component.main([*places, f"--out={tmp_path}"])
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError):
        run(folder, "forbidden")
    for word in ("--rows=0", "--attention-rows=-1"):
        with pytest.raises(SystemExit):
            component.main([*places, f"--out={tmp_path / 'x.json'}", word])


def test_a_component_test_that_cannot_run_here_is_refused(folder, tmp_path):
    places = [str(folder / "records" / f"{name}.json") for name in ("reference", "fast")]
    with pytest.raises(ConfigError, match="cudnn can't run here"):
        component.main([*places, f"--out={tmp_path / 'x.json'}", "--also=attention"])
    assert not (tmp_path / "x.json").exists()


def test_runs_that_end_badly_leave_no_record(folder, monkeypatch):
    with pytest.raises(ConfigError, match="exists"):
        run(folder, "reference")
    real = recipe_run.build

    def broken(settings):
        built = real(settings)
        place = built.place

        class Built:
            def __getattr__(self, name):
                return getattr(built, name)

            def place(self, rows):
                batch = place(rows)
                return batch._replace(rows=batch.rows * np.nan)

        return Built()

    monkeypatch.setattr(recipe_run, "build", broken)
    with pytest.raises(NonFiniteError, match="step 0"):
        run(folder, "nan", *FAST)
    monkeypatch.undo()
    (folder / "rows.json").write_text(json.dumps({"rows": 160, "rows_sha256": "0" * 64}))
    with pytest.raises(DataError, match=r"rows"):
        run(folder, "others", *FAST)
    (folder / "rows.json").unlink()
    assert not list((folder / "records").glob("nan*")) and not list((folder / "records").glob("others*"))


def test_exit_codes(folder, tmp_path):
    def code(*words):
        done = subprocess.run(
            [sys.executable, "-m", "bench.recipe", *map(str, words)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr

    place = folder / "records" / "reference.json"
    own = tmp_path / "own.json"
    content = json.loads((folder / "records" / "fast.json").read_text())
    own.write_text(json.dumps({**content, "checks": None}))
    found, said = code("check", own, f"--reference={place}")
    assert found == 1 and said.startswith("error: ") and "not verified" in said and said.count("\n") == 1
    content["measured"]["figures"]["tokens_per_s_gpu"] *= 1.01
    own.write_text(json.dumps(content))
    found, said = code("list", own)
    assert found == 3 and "own.json" in said and "tokens_per_s_gpu" in said
    assert code("list", tmp_path / "nowhere.json")[0] == 3
    assert code("run", "--rows=x", "--out=y")[0] == 2
    assert config.default().data.source == "cache"
