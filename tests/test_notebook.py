"""The notebook, executed from top to bottom on the CPU with few updates; nothing is stored in it but its source."""

import base64
import json
import os
import shutil
from pathlib import Path

import harness
import nbformat
import pytest
from nbclient import NotebookClient

from llama_jax import flops

NOTEBOOK = harness.ROOT / "scripts" / "colab_smoke.ipynb"
UPDATES = 12
pytestmark = pytest.mark.timeout(900)
FOLDERS = ("run", "one_peer_exponential", "one_peer_ring")


def test_no_outputs_are_stored():
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    nbformat.validate(nbformat.from_dict(stored))
    assert stored["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in stored["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None and cell["metadata"] == {}, cell["id"]


@pytest.mark.parametrize(
    ("says", "extra"),
    [("580.65.06", "cuda13"), ("550.54.15", "cuda12"), ("NVIDIA-SMI has failed because it couldn't. Stop", None)],
)
def test_the_accelerator_of_a_runtime(says, extra, tmp_path, monkeypatch):
    (cell,) = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if "def accelerator" in cell.source]
    (tmp_path / "nvidia-smi").write_text(f'#!/bin/sh\necho "{says}"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    names = {"Path": Path}
    exec(cell.source, names)  # llama_jax is there, so that it installs nothing
    assert names["accelerator"]() == extra


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """(the executed notebook, its folder); what Jupyter keeps of a user stays in a temporary folder too."""
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "text").mkdir()
    for name in FOLDERS:  # of an earlier execution with other settings
        (folder / "llama_jax_smoke" / name).mkdir(parents=True)
        (folder / "llama_jax_smoke" / name / "config.json").write_text("{}")
    for name in ("README.md", "LICENSE"):
        shutil.copy(harness.ROOT / name, folder / "text" / f"{name}.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMOKE_UPDATES", str(UPDATES))
        patch.setenv("SMOKE_TEXT", str(folder / "text"))
        variables, _ = harness.Commands(folder, quick=True).environment()  # a compile cache that its runs share
        for name, value in variables.items():
            patch.setenv(name, value)
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
            patch.setenv(name, str(folder / name))
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        client = NotebookClient(notebook, timeout=800, kernel_name="python3", resources={"metadata": {"path": folder}})
        yield client.execute(), folder


def printed(notebook, cell):
    (found,) = [each for each in notebook.cells if each.id == cell]
    return "".join(output.text for output in found.outputs if output.output_type == "stream")


def pictures(notebook, cell):
    (found,) = [each for each in notebook.cells if each.id == cell]
    kinds = [output.data for output in found.outputs if output.output_type == "display_data"]
    return [base64.b64decode(data["image/png"]) for data in kinds if "image/png" in data]


def test_it_trains_stops_and_continues(executed):
    notebook, folder = executed
    run = folder / "llama_jax_smoke" / "run"
    assert [line["update"] for line in harness.lines(run, "train")] == list(range(1, UPDATES + 1))
    starts = harness.strict((run / "environment.json").read_text())["starts"]
    assert len(starts) == 2 and "the same command continues" in printed(notebook, "train")
    losses = [line["loss"] for line in harness.lines(run, "train")]
    assert losses[-1] < losses[0] - 0.5
    assert "sample 2 of 2" in printed(notebook, "sample")
    assert "peak of cpu unknown" in printed(notebook, "config") and flops.peak_flops("cpu") is None


def test_it_draws(executed):
    notebook, _ = executed
    for cell, count in (("train", 1), ("resume", 1), ("packed", 2), ("consensus", 1)):
        found = pictures(notebook, cell)
        assert len(found) == count and all(png.startswith(b"\x89PNG") and len(png) > 5000 for png in found), cell


def test_four_workers_over_two_topologies(executed):
    notebook, folder = executed
    for name in FOLDERS:
        result = harness.strict((folder / "llama_jax_smoke" / name / "result.json").read_text())
        assert result["updates"] == UPDATES
        assert f"{name:<24}{UPDATES:>8}{result['subset_loss']:>18.4f}   cpu" in printed(notebook, "summary")
    last = [harness.lines(folder / "llama_jax_smoke" / name, "train")[-1] for name in FOLDERS[1:]]
    assert 0 < last[0]["consensus_distance"] < last[1]["consensus_distance"]  # exponential below ring
