"""The evaluate command: one loss for a run, for its export and in result.json; messages for what is missing."""

import json
import shutil

import harness
import numpy as np
import pytest
from harness import tiny

from llama_jax import evaluate, validation


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return harness.write_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache):
    """A finished run on a cache, with an interval checkpoint, and its result."""
    folder = tmp_path_factory.mktemp("trained")
    changes = {"data.source": "cache", "data.path": str(cache), "training.checkpoint_policy": "interval"}
    return folder, harness.run(tiny(changes), folder)


@pytest.fixture
def call(capsys):
    """The command in this process: (exit code, the JSON it printed or None, standard error)."""

    def run(*arguments):
        capsys.readouterr()
        code = evaluate.main([str(argument) for argument in arguments])
        text = capsys.readouterr()
        return code, harness.strict(text.out) if text.out else None, text.err

    return run


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Compiles the evaluation of each model and batch size once."""
    make = validation.make_evaluator

    def make_kept(config, numerics, mesh):
        key = ["evaluate", dict(config.model), config.evaluation.batch_sequences]
        return harness.KEPT.keep(key, make(config, numerics, mesh))

    monkeypatch.setattr(validation, "make_evaluator", make_kept)


def test_a_run_gives_the_loss_of_its_result(trained, call):
    folder, result = trained
    before = harness.tree(folder)
    code, found, error = call(f"--run={folder}")
    assert (code, error) == (0, "")
    assert found["loss"] == result["validation_loss"] and found["bits_per_byte"] == result["bits_per_byte"]
    assert (found["split"], found["targets"], found["update"]) == ("validation", 640, 10)
    assert found["unique_params"] == 3632 and found["attention"] == "xla"
    assert harness.tree(folder) == before


def test_the_subset_and_an_older_update(trained, call):
    folder, result = trained
    logged = {line["update"]: line["loss"] for line in harness.lines(folder, "eval") if line["split"] == "subset"}
    code, found, _ = call(f"--run={folder}", "--split=subset")
    assert code == 0 and found["loss"] == logged[10] == result["subset_loss"] and found["targets"] == 320
    code, found, _ = call(f"--run={folder}", "--split=subset", "--update=4")
    assert code == 0 and found["loss"] == logged[4] and found["update"] == 4
    code, found, error = call(f"--run={folder}", "--update=5")
    assert (code, found) == (4, None) and "no checkpoint of update 5, there are: [4, 8, 10]" in error


@pytest.mark.parametrize("size", [1, 7])
def test_the_batch_size_changes_the_loss_by_rounding_only(size, trained, call):
    folder, result = trained
    code, found, _ = call(f"--run={folder}", f"--batch={size}")
    assert code == 0 and found["loss"] == pytest.approx(result["validation_loss"], abs=1e-6)


def test_an_export_gives_the_same_loss(trained, call, cache):
    folder, result = trained
    code, found, error = call(f"--model={folder / 'exports/final'}", f"--data={cache}", "--batch=16")
    assert (code, error) == (0, "")
    assert found["loss"] == result["validation_loss"] and found["bits_per_byte"] == result["bits_per_byte"]
    assert "update" not in found
    code, found, _ = call(f"--model={folder / 'exports/update-4'}", f"--data={cache}", "--batch=16", "--split=subset")
    # The default subset of 1024 is the whole split here.
    assert code == 0 and found["targets"] == 640 and found["loss"] != result["validation_loss"]
    code, found, _ = call(f"--model={folder / 'exports/final'}", f"--data={cache}", "--batch=16", "--context=8")
    assert code == 0 and found["targets"] == 648 and abs(found["loss"] - result["validation_loss"]) > 1e-4


def test_other_data_must_be_named(trained, call, tmp_path, cache):
    folder, result = trained
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    other = harness.write_cache(tmp_path / "other", seed=5)
    stored = json.loads((run / "config.json").read_text())
    stored["config"]["data"]["path"] = str(other)
    (run / "config.json").write_text(json.dumps(stored))
    code, found, error = call(f"--run={run}")
    assert (code, found) == (3, None) and "is not the data that" in error and "--data" in error
    code, found, _ = call(f"--run={run}", f"--data={other}")
    assert code == 0 and found["loss"] != result["validation_loss"]
    code, found, _ = call(f"--run={run}", f"--data={cache}")
    assert code == 0 and found["loss"] == result["validation_loss"]


def test_a_run_on_the_synthetic_language(call, tmp_path, cache):
    result = harness.run(tiny(), tmp_path)
    code, found, _ = call(f"--run={tmp_path}")
    assert code == 0 and found["loss"] == result["validation_loss"] and found["bits_per_byte"] is None
    code, found, _ = call(f"--run={tmp_path}", f"--data={cache}")  # a named cache is used whatever the run's source
    assert code == 0 and found["loss"] != result["validation_loss"] and found["bits_per_byte"] is not None


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--model={run}/exports/final"], 2, "--model needs --data"),
        (["--model={tmp}", "--data={cache}"], 4, "{tmp}/config.json"),
        (["--model={run}/exports/final", "--data={tmp}"], 3, "no finished token cache"),
        (["--run={tmp}"], 4, "is {tmp} a run folder?"),
        (["--run="], 4, "config.json: No such file"),
        (["--run={run}", "--data={tmp}/none"], 3, "{tmp}/none"),
        (["--run={run}", "--batch=0"], 2, "evaluation.batch_sequences = 0 is not an integer in [1, 1048576]"),
        (["--model={run}/exports/final", "--data={cache}", "--context=7"], 3, "model.context = 7"),
        (["--model={run}/exports/final", "--data={cache}", "--context=0"], 2, "model.context = 0"),
    ],
)
def test_what_is_missing_is_named_in_one_line(words, code, message, trained, cache, call, tmp_path):
    names = {"run": trained[0], "tmp": tmp_path, "cache": cache}
    found = call(*(word.format(**names) for word in words))
    assert found[:2] == (code, None)
    assert found[2].startswith("error: ") and found[2].count("\n") == 1
    assert message.format(**names) in found[2]


def test_a_damaged_checkpoint_is_not_evaluated(trained, call, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    path = max((run / "checkpoints/10").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    content = np.fromfile(path, np.uint8)
    content[content.size // 2] ^= 4
    content.tofile(path)
    before = harness.tree(run)
    code, found, error = call(f"--run={run}")
    assert (code, found) == (4, None) and "checkpoints/10" in error
    assert call(f"--run={run}", "--update=8")[0] == 0
    assert harness.tree(run) == before


def test_one_source_is_required(call):
    for words in ([], ["--run=a", "--model=b"]):
        with pytest.raises(SystemExit) as caught:
            call(*words)
        assert caught.value.code == 2


def test_a_run_is_evaluated_with_another_forward_pass(trained, call):
    folder, result = trained
    code, found, _ = call(f"--run={folder}", "--config.model.attention=reference", "--config.runtime.device=cpu")
    assert code == 0 and found["attention"] == "reference"
    assert found["loss"] == pytest.approx(result["validation_loss"], rel=1e-5)
    code, found, error = call(f"--run={folder}", "--config.model.width=8")
    assert code == 2 and "--config.model.width can't be changed here" in error


def test_data_of_another_tokenizer_is_named(trained, cache, tmp_path, call):
    folder, _ = trained
    export = tmp_path / "export"
    shutil.copytree(folder / "exports" / "final", export)
    (export / "tokenizer.json").write_text("{}")
    other = tmp_path / "cache"
    shutil.copytree(cache, other)
    (other / "tokenizer.json").write_text('{"another": "tokenizer"}')
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["tokenizer"]["file"] = "tokenizer.json"
    (other / "manifest.json").write_text(json.dumps(manifest))
    code, _, error = call(f"--model={export}", f"--data={other}")
    assert code == 0 and "warning: the tokenizer of" in error
    code, _, error = call(f"--model={folder / 'exports' / 'final'}", f"--data={cache}")
    assert (code, error) == (0, "")
