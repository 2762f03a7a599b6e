"""The description of a config: the 20M recipe by hand, every preset, refusals, and that no device is started."""

import itertools
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import harness
import jax
import pytest
from harness import ROOT, tiny, write_cache

from llama_jax import config as configs
from llama_jax import describe, optimizer
from llama_jax.errors import ConfigError
from llama_jax.runtime import Device

PRESETS = sorted((ROOT / "configs").glob("*.py"))
HEADINGS = ["model", "budget", "learning rate", "device", "memory of a device", "workers", "data"]


@pytest.fixture
def said(capsys, monkeypatch):
    """The command in this process, from the repository: (exit code, output, errors)."""
    monkeypatch.chdir(ROOT)

    def call(*arguments):
        code = describe.main(list(map(str, arguments)))
        return code, *capsys.readouterr()

    return call


def test_the_20m_recipe_by_hand(said):
    code, text, error = said("--config=configs/c4_20m.py", "--device=NVIDIA GH200 480GB", "--config.data.path=missing")
    assert (code, error) == (0, "")
    for line in (
        "model.embed_tokens.weight                           32000 x 320         10,240,000",
        "model.layers.0-7.mlp.down_proj.weight                 320 x 896        8 x 286,720",
        "20,403,520 unique parameters: 10,240,000 in vocabulary matrices (tied, counted once), 10,163,520 without them",
        "122,421,120 FLOPs per target (6 N;",
        "408,070,144 targets = 398,506 sequences of 1,024, 20 per parameter",
        "3,120 updates of 131,072 targets (workers x microbatches x sequences: 1 x 1 x 128), 40 of them shorter",
        "40 virtual epochs of 10,201,088 targets",
        "4.996e+16 FLOPs in all",
        "first update         update         1   1.79487e-05",  # 0.0056 / 312
        "end of the warm-up   update       313   0.0056",  # four short updates at the ends of four virtual epochs
        "last update          update     3,120   0.00056",
        "NVIDIA GH200 480GB, compute capability 9.0; mesh worker 1 x data 1: 1 device",
        "attention cudnn, head chunked, kernels mosaic",
        "peak 989 TFLOP/s each (16 bits, dense, data sheet): 0.014 h at an MFU of 100 %",
        "parameters             77.8 MiB",
        "needed: 408,070,145 training tokens for one pass; prepare --config makes 469,762,049",
        "present: nothing, missing/manifest.json is missing: python -m data_pipeline.prepare",
        "1: ordinary training",
    ):
        assert line in text, line


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
@pytest.mark.parametrize("device", ["NVIDIA H200", "Tesla T4", "TPU v5 lite", "cpu"])
def test_every_preset_on_every_kind_of_device(path, device, said):
    code, text, error = said(f"--config={path}", f"--device={device}")
    config = configs.load(path)
    if config.data.path and (ROOT / config.data.path).exists():
        pytest.skip("its data are here")
    assert (code, error) == (0, "")
    assert re.findall(r"^(\S.*)$", text, re.MULTILINE)[1:] == HEADINGS
    assert f"{config.derived.unique_params:,} unique parameters" in text
    assert ("peak of cpu unknown: no MFU" in text) == (device == "cpu")
    total = re.search(r"training, in all +([\d.]+) (MiB|GiB)", text)
    assert float(total[1]) > 0


def test_workers_and_their_topology(said):
    given = ["--config=configs/quickstart_packed.py", "--device=cpu", "--config.decentralized.worker_lr=1,2,1,2"]
    _, text, _ = said(*given)
    assert "4 workers, one_peer_exponential (directed), awc, adaptive consensus off" in text
    # One row of 4 x P bytes an update; two updates average four workers.
    assert "a cycle of 2 updates averages exactly; a worker receives from 1 others an update, 1.4 MiB" in text
    assert "for 4 workers" in text and "peak 1, 2" in text
    assert re.search(r"last update +update +300 +0\.1, 0\.2", text)
    _, text, _ = said(*given, "--config.decentralized.topology=one_peer_ring")
    assert "a cycle of 2 updates leaves up to 0.5 of the workers' distance" in text  # cos^2 of 45 degrees
    _, text, _ = said(
        "--config=configs/quickstart_packed.py", "--device=cpu", "--config.decentralized.network.dropout=0.2"
    )
    assert "network: dropout 0.2" in text


def test_the_data_that_is_there(said, tmp_path):
    cache = write_cache(tmp_path / "cache")
    path = harness.Commands(tmp_path).save(tiny(data__source="cache"))
    code, text, _ = said(f"--config={path}", "--device=cpu", f"--config.data.path={cache}")
    assert code == 0
    assert "needed: 2,241 training tokens for one pass" in text
    assert "present: 777 tokens, 48 sequences, so 2.92 passes" in text
    assert "validation: 40 sequences, 20 of them after each virtual epoch" in text
    code, text, error = said(
        f"--config={path}", "--device=cpu", f"--config.data.path={cache}", "--config.model.vocab_size=63"
    )
    assert code == 3 and "budget" in text and error.startswith("error: ") and "raise model.vocab_size" in error


def test_rows_of_conversations(said):
    _, text, _ = said("--config=configs/sft_8k.py", "--device=NVIDIA H200", "--config.data.path=missing")
    assert "20 updates of 1,048,448 targets (workers x microbatches x sequences: 1 x 128 x 1), 0 of them" in text
    assert "first update         update         1   5e-06" in text  # a warm-up of two updates
    assert "needed: 2,560 rows of 8,192 tokens" in text and "evaluating, in all        never" in text
    assert "present: nothing, missing is missing: python -m data_pipeline.sft_rows" in text


def test_where_updates_end():
    config = tiny()
    plan = configs.make_plan(config)
    ends = list(itertools.accumulate(plan.sizes()))
    for position in range(1, plan.total_sequences + 1):
        assert describe.update_end(plan, position) == next(end for end in ends if end >= position)
    lines = describe._rates(config)
    for line, update in zip(lines[1:], (1, 3, 5, 10), strict=True):  # half of 140 sequences is in the fifth update
        assert line.split()[-2:] == [str(update), f"{optimizer.learning_rate(config, 16 * ends[update - 1]):.6g}"]


# Devices.


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", Device("cpu", "cpu")),
        ("TPU v6 lite", Device("tpu", "TPU v6 lite")),
        ("NVIDIA H100 80GB HBM3", Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0))),
        ("NVIDIA L4", Device("gpu", "NVIDIA L4", (8, 9))),
        ("Tesla T4", Device("gpu", "Tesla T4", (7, 5))),
        ("NVIDIA X, 12.0", Device("gpu", "NVIDIA X", (12, 0))),
    ],
)
def test_devices_by_name(text, device):
    assert describe.device_named(text) == device


@pytest.mark.parametrize("text", ["NVIDIA L40S", "", "NVIDIA X,", ",9.0"])
def test_unknown_devices_are_refused(text, said):
    code, _, error = said("--config=configs/smoke.py", f"--device={text}")
    assert code == 2 and error.startswith(f"error: --device={text}: a GPU whose compute capability isn't known; add it")


def test_a_malformed_capability_is_refused(said):
    code, _, error = said("--config=configs/smoke.py", "--device=NVIDIA H100,9")
    assert (code, error) == (2, "error: --device=NVIDIA H100,9: '9' is no compute capability such as 9.0\n")


def test_an_unknown_peak_is_said_to_be_unknown(said):
    _, text, _ = said("--config=configs/smoke.py", "--device=NVIDIA L40S,8.9")
    assert "peak of NVIDIA L40S unknown: no MFU" in text and "NVIDIA L40S, compute capability 8.9" in text


def test_a_run_that_would_not_start_on_the_device(said):
    _, text, _ = said("--config=configs/smoke.py", "--device=cpu", "--config.runtime.device=tpu")
    assert "runtime.device = tpu: a run would not start on this cpu\n" in text
    _, text, _ = said("--config=configs/smoke.py", "--device=TPU v4", "--config.runtime.device=tpu")
    assert "would not start" not in text


@pytest.mark.parametrize(
    ("says", "device"),
    [
        ("NVIDIA GH200 480GB, 9.0\nNVIDIA GH200 480GB, 9.0", Device("gpu", "NVIDIA GH200 480GB", (9, 0))),
        ("NVIDIA-SMI has failed because it couldn't communicate", Device("cpu", "cpu")),
        ("", Device("cpu", "cpu")),
    ],
)
def test_the_device_of_this_machine(says, device, tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat <<'X'\n{says}\nX\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert describe.device_here() == device


def test_a_broken_nvidia_smi_is_no_gpu(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_bytes(b"\x7fELF of another architecture")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert describe.device_here() == Device("cpu", "cpu")

    def hang(words, timeout, **_):
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert describe.device_here() == Device("cpu", "cpu")


@pytest.mark.parametrize("name", ["/dev/accel0", "/dev/vfio/0"])
def test_a_tpu_is_known_by_the_files_of_its_chips(name, monkeypatch):
    monkeypatch.setattr(describe.shutil, "which", lambda _: None)
    monkeypatch.setattr(describe.os.path, "exists", lambda path: path == name)
    assert describe.device_here() == Device("tpu", "TPU")


def test_refusals(said):
    assert said("--device=cpu")[::2] == (
        2,
        "error: --config=FILE is required, for example --config=configs/c4_20m.py\n",
    )
    code, _, error = said("--config=configs/smoke.py", "--device=Tesla T4", "--config.model.attention=cudnn")
    assert code == 2 and "Tesla T4 has compute capability 7.5, 8.0 is needed; use auto or xla" in error
    with pytest.raises(ConfigError, match="reciprocal"):
        list(describe.sections(tiny(decentralized__topology="complete", decentralized__pairing="reciprocal",
                                    decentralized__workers=2, training__sequence_multiple=2,
                                    training__microbatch=8), Device("cpu", "cpu")))  # fmt: skip


PROBE = """
from llama_jax import describe
assert describe.main(["--config=configs/smoke.py"]) == 0
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""


def test_no_device_is_started():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "none"}  # which no device could start with
    ended = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "present: the synthetic language, entropy" in ended.stdout


def test_a_run_on_a_gpu_says_why_it_is_not_faster(monkeypatch):
    device = SimpleNamespace(
        platform="gpu",
        device_kind="Tesla T4",
        compute_capability="7.5",
        client=SimpleNamespace(platform_version="CUDA 13000"),
    )
    config = tiny()
    source = describe.data.open_source(config)
    built = SimpleNamespace(config=config, mesh=SimpleNamespace(size=1), resolved={"attention": "xla"})
    assert not [line for line in describe.before(built, source, 0, []) if line.startswith("auto: ")]
    monkeypatch.setattr(jax, "devices", lambda: [device])
    lines = describe.before(built, source, 0, [])
    assert lines[1].startswith("device Tesla T4 x 1")
    assert lines[2] == "auto: compute_dtype float32, because Tesla T4 has compute capability 7.5, and below 8.0 " \
        "bfloat16 only rounds"  # fmt: skip
    assert lines[3] == "auto: attention xla, because Tesla T4 has compute capability 7.5, 8.0 is needed"
