"""The export command: rows of a checkpoint bit for bit, their losses, and a run folder that stays as it is."""

import json
import shutil

import harness
import numpy as np
import pytest
from harness import tiny

from llama_jax import arena, evaluate, export, hf, validation
from llama_jax.errors import Preempted

THREE = {
    "name": "three",
    "decentralized.workers": 3,
    "training.sequence_multiple": 3,
    "training.batch_targets": 240,
    "training.microbatch": 5,
    "training.checkpoint_policy": "interval",
    "evaluation.subset_sequences": 1024,  # all 40: what llama_jax.evaluate takes as the subset of a folder
    "data.source": "cache",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return harness.write_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache):
    """The folder of a finished run of three workers, with interval checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    harness.run(tiny(THREE, data__path=str(cache)), folder)
    return folder


@pytest.fixture
def call(capsys):
    """A command in this process: (exit code, standard output, standard error)."""

    def run(*arguments, command=export):
        capsys.readouterr()
        code = command.main([str(argument) for argument in arguments])
        text = capsys.readouterr()
        return code, text.out, text.err

    return run


def rows(folder, update=None):
    """Parameter rows of a checkpoint by name, read past the command."""
    chosen = tiny(THREE)
    layout = arena.make_layout(chosen.model)
    params_NP = np.frombuffer(harness.arrays(folder, update)["params"], np.float32).reshape(3, layout.padded)
    return [arena.from_row(row_P, layout) for row_P in params_NP]


def bits(params):
    return {name: tensor.tobytes() for name, tensor in params.items()}


def origin(folder):
    return json.loads((folder / hf.MARKER).read_text())["origin"]


def test_the_mean_is_that_of_the_run(trained, call, tmp_path):
    before = harness.tree(trained)
    assert call(f"--run={trained}", f"--out={tmp_path / 'a'}") == (0, f"update 10: {tmp_path / 'a'}\n", "")
    assert call(f"--run={trained}", "--mean", "--update=4", f"--out={tmp_path / 'b'}")[0] == 0
    assert harness.tree(trained) == before
    final, fourth = trained / "exports" / "final", trained / "exports" / "update-4"
    assert harness.tree(tmp_path / "a") == harness.tree(final)
    assert harness.tree(tmp_path / "b") == harness.tree(fourth)
    for name, tensor in hf.load_folder(tmp_path / "a")[1].items():
        mean = np.mean([one[name].astype(np.float64) for one in rows(trained)], axis=0)
        np.testing.assert_allclose(tensor, mean, rtol=0, atol=2e-7 * np.abs(mean).max())


@pytest.mark.parametrize("update", [None, 8])
def test_workers_are_the_rows_of_the_checkpoint(update, trained, call, tmp_path):
    before, chosen = harness.tree(trained), [] if update is None else [f"--update={update}"]
    code, said, error = call(f"--run={trained}", "--worker=all", f"--out={tmp_path / 'all'}", *chosen)
    assert (code, error) == (0, "")
    assert said == "".join(f"update {update or 10}: {tmp_path}/all/worker-{worker}\n" for worker in range(3))
    assert call(f"--run={trained}", "--worker=1", f"--out={tmp_path / 'one'}", *chosen)[0] == 0
    assert harness.tree(trained) == before
    expected = rows(trained, update)
    assert len({tuple(bits(one).values()) for one in expected}) == 3
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == [f"worker-{worker}" for worker in range(3)]
    for worker in range(3):
        folder = tmp_path / "all" / f"worker-{worker}"
        assert bits(hf.load_folder(folder)[1]) == bits(expected[worker])
        targets = 138 * 16 if update is None else 111 * 16
        assert origin(folder) == {"run": "three", "update": update or 10, "targets": targets, "worker": worker}
        assert (folder / "tokenizer.json").read_bytes() == b'{"added_tokens": []}'
    assert harness.tree(tmp_path / "one") == harness.tree(tmp_path / "all" / "worker-1")


def test_losses_of_the_log_are_those_of_the_exports(trained, cache, call, tmp_path, monkeypatch):
    make = validation.make_evaluator

    def kept(config, numerics, mesh):
        return harness.KEPT.keep(["evaluate", dict(config.model)], make(config, numerics, mesh))

    monkeypatch.setattr(validation, "make_evaluator", kept)
    logged = {line["update"]: line for line in harness.lines(trained, "eval") if line["split"] == "subset"}
    assert sorted(logged) == [4, 8, 10]
    for update, line in logged.items():
        out, losses = tmp_path / str(update), []
        assert call(f"--run={trained}", f"--update={update}", "--worker=all", f"--out={out}")[0] == 0
        for worker in range(3):
            words = f"--model={out / f'worker-{worker}'}", f"--data={cache}", "--batch=16", "--split=subset"
            code, said, error = call(*words, command=evaluate)
            assert (code, error) == (0, "")
            losses.append(harness.strict(said)["loss"])
        assert len(set(losses)) == 3
        numbers = {"mean": sum(losses) / 3, "min": min(losses), "max": max(losses)}
        assert line["local_loss"] == {**numbers, "workers": losses}


def test_transformers_loads_a_worker(trained, call, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    assert call(f"--run={trained}", "--worker=2", f"--out={tmp_path / 'two'}")[0] == 0
    theirs, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "two", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = theirs.state_dict()
    for name, tensor in rows(trained)[2].items():
        np.testing.assert_array_equal(state[name].to(torch.float32).numpy(), tensor)


def test_bfloat16_rounds(trained, call, tmp_path):
    assert call(f"--run={trained}", "--worker=0", "--dtype=bfloat16", f"--out={tmp_path / 'short'}")[0] == 0
    short = hf.load_folder(tmp_path / "short")[1]
    for name, tensor in rows(trained)[0].items():
        np.testing.assert_array_equal(short[name], tensor.astype(hf.DTYPES["bfloat16"]).astype(np.float32))


def test_a_run_of_one_worker_on_the_synthetic_language(call, tmp_path):
    harness.run(tiny(), tmp_path / "run")
    for word in ("--mean", "--worker=0"):
        assert call(f"--run={tmp_path / 'run'}", word, f"--out={tmp_path / word}")[0] == 0
        weights = (tmp_path / word / hf.WEIGHTS).read_bytes()
        assert weights == (tmp_path / "run" / "exports" / "final" / hf.WEIGHTS).read_bytes()
    assert not (tmp_path / "--mean" / "tokenizer.json").exists()


def test_a_run_that_trains(cache, call, tmp_path):
    """The lock is held and checkpoints come and go; the export is that of the fourth update."""
    folder, out, asked = tmp_path / "run", tmp_path / "out", 0

    def stop():
        nonlocal asked
        asked += 1
        if harness.kept(folder)[-1:] and harness.kept(folder)[-1][0] == 6 and not out.exists():
            assert call(f"--run={folder}", "--update=4", "--worker=0", f"--out={out}")[0] == 0
            assert call(f"--run={folder}", f"--out={tmp_path / 'newest'}")[0] == 0

    harness.run(tiny(THREE, data__path=str(cache), training__recovery_minutes=0.0), folder, stop)
    assert asked > 10 and bits(hf.load_folder(out)[1]) == bits(rows(folder, 4)[0])
    assert origin(tmp_path / "newest")["update"] == 6


def test_a_run_that_was_stopped(cache, call, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Preempted):
        harness.run(tiny(THREE, data__path=str(cache)), folder, harness.StopAfter(2))
    assert call(f"--run={folder}", "--worker=1", f"--out={tmp_path / 'out'}")[0] == 0
    assert bits(hf.load_folder(tmp_path / "out")[1]) == bits(rows(folder)[1])


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--run={run}", "--out={new}", "--worker=3"], 2, "--worker=3 is none of {run}: 0 to 2, or all"),
        (["--run={run}", "--out={new}", "--worker=-1"], 2, "--worker=-1 is none of"),
        (["--run={run}", "--out={new}", "--worker=one"], 2, "--worker=one is none of"),
        (["--run={run}", "--out={run}/exports/worker-0"], 2, "lies in {run}, which this command never changes"),
        (["--run={run}", "--out={full}"], 4, "--out={full} exists and is not an empty folder"),
        (["--run={run}", "--out={full}", "--worker=all"], 4, "is not an empty folder"),
        (["--run={run}", "--out={full}/thesis.tex"], 4, "is not an empty folder"),
        (["--run={run}", "--out={new}", "--update=5"], 4, "no checkpoint of update 5, there are: [4, 8, 10]"),
        (["--run={full}", "--out={new}"], 4, "is {full} a run folder?"),
        (["--run={run}", "--out={new}", "--data={other}"], 3, "{other} is not the data that {run} was trained on"),
        (["--run={run}", "--out={new}", "--data={full}"], 3, "no finished token cache"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(words, code, message, trained, call, tmp_path):
    names = {"run": trained, "new": tmp_path / "new", "full": tmp_path / "full", "other": tmp_path / "other"}
    names["full"].mkdir()
    (names["full"] / "thesis.tex").write_text("mine")
    harness.write_cache(names["other"], seed=5)
    before = harness.tree(trained), harness.tree(tmp_path)
    found = call(*(word.format(**names) for word in words))
    assert found[:2] == (code, "")
    assert found[2].startswith("error: ") and found[2].count("\n") == 1
    assert message.format(**names) in found[2]
    assert (harness.tree(trained), harness.tree(tmp_path)) == before


def test_an_empty_folder_and_moved_data_are_taken(trained, cache, call, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    stored = json.loads((run / "config.json").read_text())
    stored["config"]["data"]["path"] = str(tmp_path / "gone")
    (run / "config.json").write_text(json.dumps(stored))
    (tmp_path / "out").mkdir()
    code, _, error = call(f"--run={run}", f"--out={tmp_path / 'out'}")
    assert code == 3 and str(tmp_path / "gone") in error
    assert call(f"--run={run}", f"--data={cache}", f"--out={tmp_path / 'out'}")[0] == 0
    assert harness.tree(tmp_path / "out") == harness.tree(trained / "exports" / "final")


def damage(step):
    path = max(step.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    content = np.fromfile(path, np.uint8)
    content[content.size // 2] ^= 4
    content.tofile(path)


@pytest.mark.parametrize("unfinished", [True, False])
def test_a_checkpoint_that_does_not_verify_is_not_exported(unfinished, trained, call, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(trained, run)
    if unfinished:
        (run / "checkpoints" / "10" / "integrity.json").unlink()
    else:
        damage(run / "checkpoints" / "10")
    before = harness.tree(run)
    code, said, error = call(f"--run={run}", "--worker=all", "--update=10", f"--out={out}")
    assert (code, said) == (4, "") and "checkpoints" in error and error.count("\n") == 1
    assert not out.exists()
    assert call(f"--run={run}", "--update=8", f"--out={out}")[0] == 0
    assert harness.tree(run) == before


def test_run_and_out_are_required(call, capsys):
    for words in (["--run=a"], ["--out=b"], ["--run=a", "--out=b", "--mean", "--worker=1"]):
        with pytest.raises(SystemExit) as caught:
            call(*words)
        assert caught.value.code == 2


@pytest.mark.parametrize(
    ("field", "value", "code", "said"),
    [
        ("workers", 1, 4, "its checkpoint has 3 workers, its config.json 1; one was changed"),
        ("outages", "9:1-2", 2, "must be a worker below 3"),
    ],
)
@pytest.mark.parametrize("command", [export, evaluate])
def test_an_edited_config_is_an_error_of_one_line(trained, call, tmp_path, command, field, value, code, said):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    stored = json.loads((folder / "config.json").read_text())
    section = stored["config"]["decentralized"]
    (section if field in section else section["network"])[field] = value
    (folder / "config.json").write_text(json.dumps(stored))
    words = [f"--run={folder}"] + ([f"--out={tmp_path / 'new'}"] if command is export else [])
    found, _, error = call(*words, command=command)
    assert found == code and said in error and error.count("\n") == 1, error
