"""TensorBoard and Weights & Biases: asked for without being there, used, failing."""

import importlib
import sys
import types

import pytest

from llama_jax import trackers
from llama_jax.errors import ConfigError

TRAIN = {
    "kind": "train",
    "update": 7,
    "targets": 70,
    "loss": 2.5,
    "lr": None,
    "clipped": True,
    "norms": [1.0, None, 3.0],
}
EVAL = {"kind": "eval", "update": 7, "targets": 70, "split": "subset", "loss": 2.0}


def test_scalars():
    assert trackers.scalars(TRAIN) == {
        "train/targets": 70,
        "train/loss": 2.5,
        "train/norms/0": 1.0,
        "train/norms/2": 3.0,
    }
    assert trackers.scalars(EVAL) == {"eval/subset/targets": 70, "eval/subset/loss": 2.0}


@pytest.mark.parametrize("tensorboard, package", [(True, "tensorboardX"), (False, "wandb")])
def test_a_missing_extra_is_named(monkeypatch, tmp_path, tensorboard, package):
    monkeypatch.setitem(sys.modules, package, None)  # importing it raises ImportError
    extra = "tensorboard" if tensorboard else "wandb"
    with pytest.raises(
        ConfigError, match=rf"log.{extra}: {package} is not installed; pip install 'llama_jax\[{extra}\]'"
    ):
        trackers.open_trackers(tmp_path, tensorboard, not tensorboard, "run", {}, 0)
    assert trackers.open_trackers(tmp_path, False, False, "run", {}, 0) == []


class Fake:
    """Both packages at once: records calls, and fails from the third write on."""

    def __init__(self):
        self.calls = []
        self.module = types.SimpleNamespace(SummaryWriter=self.start, init=self.start)

    def start(self, **arguments):
        self.calls.append(("start", arguments))
        return types.SimpleNamespace(
            add_scalar=lambda name, value, global_step: self.write(name, value, global_step),
            log=lambda values, step: self.write(values, step),
            close=lambda: self.calls.append("close"),
            finish=lambda: self.calls.append("close"),
        )

    def write(self, *arguments):
        if len(self.calls) > 2:
            raise RuntimeError("the network\nis gone")
        self.calls.append(arguments)


def test_tensorboard_continues_behind_the_update(monkeypatch, tmp_path, capsys):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "tensorboardX", fake.module)
    (tracker,) = trackers.open_trackers(tmp_path, True, False, "run", {}, 6)
    tracker.write(EVAL)
    assert fake.calls == [
        ("start", {"logdir": str(tmp_path / "tensorboard"), "purge_step": 7}),
        ("eval/subset/targets", 70, 7),
        ("eval/subset/loss", 2.0, 7),
    ]
    tracker.write(EVAL)
    tracker.write(EVAL)
    tracker.close()
    assert capsys.readouterr().err == "warning: TensorBoard stopped: the network is gone\n", "said once, raised never"
    assert len(fake.calls) == 3


def test_wandb_keeps_its_identity_over_restarts(monkeypatch, tmp_path):
    identities = []
    for _ in range(2):
        fake = Fake()
        monkeypatch.setitem(sys.modules, "wandb", fake.module)
        (tracker,) = trackers.open_trackers(tmp_path, False, True, "run", {"seed": 42}, 6)
        tracker.write(TRAIN)
        tracker.close()
        (_, started), written, closed = fake.calls
        identities.append(started["id"])
        assert started["resume"] == "allow" and started["config"] == {"seed": 42} and started["dir"] == str(tmp_path)
        assert written == ({**trackers.scalars(TRAIN), "update": 7}, 7) and closed == "close"
    assert identities[0] == identities[1] != ""


def test_wandb_that_cannot_start_is_a_config_error(monkeypatch, tmp_path):
    def refuse(**arguments):
        raise RuntimeError("api_key not configured")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    with pytest.raises(ConfigError, match=r"log.wandb: api_key not configured"):
        trackers.open_trackers(tmp_path, False, True, "run", {}, 0)


def test_the_real_tensorboardx_writes_events(tmp_path):
    if importlib.util.find_spec("tensorboardX") is None:
        pytest.skip("tensorboardX is not installed")
    (tracker,) = trackers.open_trackers(tmp_path, True, False, "run", {}, 0)
    tracker.write(TRAIN)
    tracker.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()
