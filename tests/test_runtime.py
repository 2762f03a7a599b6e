"""Device set-up: what `auto` becomes, what is refused and why, and runs under other execution settings."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import harness
import jax
import numpy as np
import pytest
from harness import tiny

from llama_jax import runtime
from llama_jax.errors import ConfigError, DeviceError
from llama_jax.runtime import Device


@pytest.fixture
def environment(monkeypatch):
    """Variables that prepare() may set, restored afterwards."""
    for name in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


# What auto becomes.


def test_auto_on_a_cpu():
    numerics, resolved = runtime.resolve(tiny())
    assert resolved == {
        "compute_dtype": "float32",
        "residual_dtype": "float32",
        "attention": "xla",
        "head": "chunked",
        "kernels": "xla",
        "gate": "xla",
        "rotary": "xla",
    }
    assert (numerics.compute, numerics.residual) == (np.float32, np.float32)
    assert (numerics.attention, numerics.head) == ("xla", "chunked")
    assert (numerics.remat, numerics.scan_layers, numerics.head_chunk_rows) == (False, False, 32768)


def test_what_is_asked_for_is_taken():
    config = tiny(
        model__compute_dtype="bfloat16",
        model__residual_dtype="float32",
        model__attention="reference",
        model__head="plain",
        model__head_chunk_rows=7,
        model__remat=True,
        model__scan_layers=True,
    )
    numerics, resolved = runtime.resolve(config)
    assert resolved == {
        "compute_dtype": "bfloat16",
        "residual_dtype": "float32",
        "attention": "reference",
        "head": "plain",
        "kernels": "xla",
        "gate": "xla",
        "rotary": "xla",
    }
    assert (numerics.remat, numerics.scan_layers, numerics.head_chunk_rows) == (True, True, 7)
    assert runtime.resolve(tiny(model__compute_dtype="bfloat16"))[1]["residual_dtype"] == "bfloat16"


def test_deterministic_takes_the_plain_twins():
    assert runtime.resolve(tiny(runtime__deterministic=True))[1] == {
        "compute_dtype": "float32",
        "residual_dtype": "float32",
        "attention": "reference",
        "head": "plain",
        "kernels": "xla",
        "gate": "xla",
        "rotary": "xla",
    }


def gpu(capability="9.0", version="CUDA 13000"):
    """What JAX shows of a GPU."""
    return SimpleNamespace(
        platform="gpu",
        device_kind="Test GPU",
        compute_capability=capability,
        client=SimpleNamespace(platform_version=version),
    )


CPU, TPU, T4 = Device("cpu", "cpu"), Device("tpu", "TPU v5 lite"), Device("gpu", "Tesla T4", (7, 5))
AMPERE, HOPPER, BLACKWELL = (Device("gpu", "Test GPU", (number, 0)) for number in (8, 9, 10))
ROCM = Device("gpu", "gfx90a")
WIDE = {"model__width": 64, "model__heads": 1, "model__vocab_size": 512}  # sizes that have row kernels


@pytest.mark.parametrize(
    ("device", "compute", "attention", "kernels"),
    [
        (CPU, "float32", "xla", "xla"),
        (TPU, "bfloat16", "xla", "xla"),
        (T4, "float32", "xla", "xla"),
        (AMPERE, "bfloat16", "cudnn", "xla"),
        (HOPPER, "bfloat16", "cudnn", "mosaic"),
        (BLACKWELL, "bfloat16", "cudnn", "xla"),
        (ROCM, "bfloat16", "xla", "xla"),
    ],
    ids=lambda value: value.kind if isinstance(value, Device) else None,
)
def test_what_auto_becomes(device, compute, attention, kernels):
    expected = {"compute_dtype": compute, "residual_dtype": compute, "attention": attention, "head": "chunked"}
    products = {"gate": "xla", "rotary": "xla"}  # the tiny context has none
    choices, reasons = runtime.choose(tiny(**WIDE), device)
    assert choices == {**expected, **products, "kernels": kernels}
    fastest = {"compute_dtype": "bfloat16", "attention": "cudnn", "kernels": "mosaic"}
    slower = {field for field, value in fastest.items() if choices[field] != value}
    assert reasons.keys() == slower | (set(products) if kernels == "mosaic" else set())
    plain, _ = runtime.choose(tiny(**WIDE, runtime__deterministic=True), device)
    assert plain == {**expected, **products, "attention": "reference", "head": "plain", "kernels": "xla"}


def test_reasons_name_the_device():
    assert runtime.choose(tiny(**WIDE), T4)[1] == {
        "compute_dtype": "Tesla T4 has compute capability 7.5, and below 8.0 bfloat16 only rounds",
        "attention": "Tesla T4 has compute capability 7.5, 8.0 is needed",
        "kernels": "the device is Tesla T4, not a Hopper GPU",
    }
    assert runtime.choose(tiny(**WIDE, model__compute_dtype="bfloat16"), T4)[0]["compute_dtype"] == "bfloat16"
    with pytest.raises(ConfigError, match=r"cudnn can't run here: Tesla T4 has .* 7\.5, 8\.0 is needed"):
        runtime.choose(tiny(model__attention="cudnn"), T4)


def test_the_present_device(monkeypatch):
    assert runtime.present() == Device("cpu", jax.devices()[0].device_kind)
    for device, expected in (
        (gpu("7.5"), Device("gpu", "Test GPU", (7, 5))),
        (gpu("10.3"), Device("gpu", "Test GPU", (10, 3))),
        (gpu("gfx90a", "rocm 7"), Device("gpu", "Test GPU")),
        (SimpleNamespace(platform="tpu", device_kind="TPU v4"), Device("tpu", "TPU v4")),
    ):
        monkeypatch.setattr(jax, "devices", lambda device=device: [device])
        assert runtime.present() == expected
        assert runtime.compiler_options() == runtime.compiler_options(expected.platform)
    assert runtime.compiler_options("gpu")["xla_gpu_enable_triton_gemm"] is False
    assert runtime.compiler_options("tpu") is None


@pytest.mark.parametrize(
    ("device", "compute", "head_size", "reason"),
    [
        (HOPPER, "bfloat16", 64, None),
        (HOPPER, "bfloat16", 256, None),
        (BLACKWELL, "bfloat16", 256, None),
        (AMPERE, "bfloat16", 128, None),
        (AMPERE, "bfloat16", 256, "head size 256 isn't a multiple of 8 up to 128"),
        (HOPPER, "bfloat16", 264, "head size 264 isn't a multiple of 8 up to 256"),
        (HOPPER, "bfloat16", 20, "head size 20 isn't a multiple of 8"),
        (HOPPER, "float32", 64, "model.compute_dtype is float32, bfloat16 is needed"),
        (T4, "bfloat16", 64, "has compute capability 7.5, 8.0 is needed"),
        (ROCM, "bfloat16", 64, "not an NVIDIA GPU"),
        (TPU, "bfloat16", 64, "not an NVIDIA GPU"),
        (CPU, "bfloat16", 64, "not an NVIDIA GPU"),
    ],
)
def test_when_cudnn_attention_can_run(device, compute, head_size, reason):
    found = runtime._cudnn_obstacle(device, compute, head_size)
    assert (found is None) == (reason is None) and (reason or "") in (found or "")


def test_auto_on_a_gpu_takes_cudnn_only_where_it_runs(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [gpu()])
    assert runtime.resolve(tiny())[1] == {
        "compute_dtype": "bfloat16",
        "residual_dtype": "bfloat16",
        "attention": "cudnn",
        "head": "chunked",
        "kernels": "xla",  # the tiny widths have none
        "gate": "xla",
        "rotary": "xla",
    }
    assert runtime.resolve(tiny(model__compute_dtype="float32"))[1]["attention"] == "xla"
    assert runtime.resolve(tiny(model__attention="xla"))[1]["attention"] == "xla"


def test_mosaic_kernels_are_taken_on_hopper_alone(monkeypatch):
    assert runtime.resolve(tiny(**WIDE))[1]["kernels"] == "xla"  # here
    for capability, expected in (("9.0", "mosaic"), ("8.0", "xla"), ("10.0", "xla")):
        monkeypatch.setattr(jax, "devices", lambda capability=capability: [gpu(capability)])
        numerics, resolved = runtime.resolve(tiny(**WIDE))
        assert numerics.kernels == resolved["kernels"] == expected
        assert (resolved["gate"], resolved["rotary"]) == ("xla", "xla")  # the tiny context
        numerics, resolved = runtime.resolve(tiny(**WIDE, model__ffn=128, model__context=64, training__microbatch=4))
        assert numerics.gate == numerics.rotary == resolved["gate"] == resolved["rotary"] == expected
    monkeypatch.setattr(jax, "devices", lambda: [gpu()])
    for other in ({"model__kernels": "xla"}, {"model__residual_dtype": "float32"}, {"model__compute_dtype": "float32"}):
        assert runtime.resolve(tiny(**WIDE, **other))[1]["kernels"] == "xla"


# Refusals.


def test_requested_kernels_that_cannot_run_are_an_error(monkeypatch):
    with pytest.raises(
        ConfigError, match=r"model\.kernels = mosaic can't run here: the device is .*, not a Hopper GPU"
    ):
        runtime.resolve(tiny(model__kernels="mosaic"))
    monkeypatch.setattr(jax, "devices", lambda: [gpu()])
    with pytest.raises(ConfigError, match=r"can't run here: model\.width must be a multiple of 64; use auto or xla"):
        runtime.resolve(tiny(model__kernels="mosaic"))
    with pytest.raises(ConfigError, match=r"model\.compute_dtype and model\.residual_dtype must be bfloat16"):
        runtime.resolve(tiny(**WIDE, model__kernels="mosaic", model__residual_dtype="float32"))


def test_a_requested_attention_that_cannot_run_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.attention = cudnn can't run here: the device is .*, not an NVIDIA"):
        harness.run(tiny(model__attention="cudnn"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_mesh_larger_than_the_devices_is_an_error():
    count = len(jax.devices())
    config = tiny(runtime__mesh_data=16)
    assert count < 16
    with pytest.raises(ConfigError, match=rf"runtime.mesh_worker x runtime.mesh_data = 16, but there are {count} dev"):
        runtime.resolve(config)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_another_platform_than_the_required_one_is_an_error(platform, environment):
    with pytest.raises(DeviceError, match=f"runtime.device = {platform}, but JAX .* sees only cpu: install") as caught:
        runtime.prepare(tiny(runtime__device=platform))
    assert caught.value.exit_code == 6
    runtime.prepare(tiny(runtime__device="cpu"))


def test_determinism_must_come_before_the_backend(environment):
    jax.devices()
    with pytest.raises(ConfigError, match=r"runtime\.deterministic = True must be set before"):
        runtime.prepare(tiny(runtime__deterministic=True))
    assert "XLA_FLAGS" not in os.environ
    environment.setenv("XLA_FLAGS", runtime.DETERMINISTIC_FLAGS)
    runtime.prepare(tiny(runtime__deterministic=True))  # they were there in time


def test_memory_fraction_leaves_a_set_variable_alone(environment):
    runtime.prepare(tiny(runtime__memory_fraction=0.5))
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    runtime.prepare(tiny(runtime__memory_fraction=0.7))
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"


def test_the_compile_cache_is_made_or_done_without(environment, monkeypatch, tmp_path, capsys):
    before = jax.config.jax_compilation_cache_dir
    try:
        runtime.prepare(tiny())
        assert jax.config.jax_compilation_cache_dir == before  # a CPU compiles without one unless asked
        (tmp_path / "file").touch()
        runtime.prepare(tiny(runtime__compile_cache=str(tmp_path / "file")))
        assert "Not a directory; compiling without a cache" in capsys.readouterr().err
        assert jax.config.jax_compilation_cache_dir == before
        runtime.prepare(tiny(runtime__compile_cache=str(tmp_path / "cache")))
        (folder,) = (tmp_path / "cache").iterdir()
        assert jax.config.jax_compilation_cache_dir == str(folder) and jax.__version__ in folder.name
        monkeypatch.setenv("LLAMA_JAX_COMPILE_CACHE", str(tmp_path / "site"))
        runtime.prepare(tiny())
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "site" / f"jax-{jax.__version__}-cpu")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_user_without_a_home_compiles_without_a_cache(environment, monkeypatch, capsys):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(jax, "devices", lambda: [gpu()])
    monkeypatch.setattr(runtime, "SLOW_SCATTER", ())
    monkeypatch.setattr(runtime.Path, "home", homeless)
    runtime.prepare(tiny())
    assert "Could not determine home directory.; compiling without a cache" in capsys.readouterr().err
    assert jax.config.jax_compilation_cache_dir == before


def test_a_jax_with_the_slow_scatter_is_named_on_nvidia_alone(environment, monkeypatch, capsys, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(runtime, "SLOW_SCATTER", (jax.__version__,))
    runtime.prepare(tiny())
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(jax, "devices", lambda: [gpu()])
    try:
        runtime.prepare(tiny(runtime__compile_cache=str(tmp_path)))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert f"JAX {jax.__version__} has a slow scatter-add on NVIDIA GPUs" in capsys.readouterr().err


def test_errors_of_the_device_get_advice():
    with pytest.raises(DeviceError, match=r"^out of memory on it; use less$"), runtime.device_errors("use less"):
        raise jax.errors.JaxRuntimeError("out of memory\n on it")


# Real runs.


def test_without_jit_a_run_is_the_same_to_rounding(tmp_path):
    # One update and one batch of the same shape: operation by operation, each shape compiles some 400 programs.
    changes = {"training.total_targets": 256, "lr_schedule.warmup_steps": 0, "lr_schedule.name": "constant"}
    changes |= {"evaluation.subset_sequences": 16, "evaluation.full_at_end": False}
    for name, jit in (("slow", False), ("fast", True)):
        harness.run(tiny(changes, runtime__jit=jit), tmp_path / name)
    slow, fast = (np.frombuffer(harness.arrays(tmp_path / name)["params"], np.float32) for name in ("slow", "fast"))
    assert np.abs(slow).max() > 0.05
    np.testing.assert_allclose(slow, fast, rtol=1e-4, atol=2e-6)
    for a, b in zip(harness.lines(tmp_path / "slow"), harness.lines(tmp_path / "fast"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    sizes = [harness.KEPT(tiny(changes, runtime__jit=jit)).step._cache_size() for jit in (False, True)]
    assert sizes[0] == 0 < sizes[1]  # the fast one may have served other tests too


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    return harness.Commands(tmp_path_factory.mktemp("commands"))


def test_a_deterministic_run_and_a_missing_platform(commands, tmp_path):
    config = tiny(runtime__deterministic=True, training__total_targets=1000)
    process = commands.start_train(config, tmp_path / "run", XLA_FLAGS="--xla_cpu_enable_fast_math=false")
    missing = commands.train(tiny(), tmp_path / "none", JAX_PLATFORMS="cuda")
    ended = commands.end(process)
    assert (ended.code, ended.err) == (0, "") and "attention reference, head plain" in ended.out
    stored = harness.strict((tmp_path / "run/environment.json").read_text())["starts"][0]
    flags = stored["variables"]["XLA_FLAGS"]
    assert flags == f"--xla_cpu_enable_fast_math=false {runtime.DETERMINISTIC_FLAGS}"
    assert missing.code == 6 and not (tmp_path / "none").exists()
    assert missing.err.startswith(f"error: JAX {jax.__version__} finds no device: ") and missing.err.count("\n") == 1


WATCH = """
import os, signal, sys, threading, time
from llama_jax import runtime
stop = runtime.watch_signals()
assert stop() is None
threading.Thread(target=lambda: time.sleep(60), daemon=True).start()  # a later thread must not catch them
for number in map(int, sys.argv[1:]):
    os.kill(os.getpid(), number)
    for _ in range(500):
        if stop() is not None:
            break
        time.sleep(0.01)
    print(type(stop()).__name__, stop(), flush=True)
    assert "jax" not in sys.modules
"""


@pytest.mark.parametrize(
    ("numbers", "code", "text"),
    [
        ([signal.SIGTERM], 0, "Preempted SIGTERM\n"),
        ([signal.SIGUSR1], 0, "Preempted SIGUSR1\n"),
        ([signal.SIGINT], 0, "Interrupted SIGINT\n"),
        ([signal.SIGHUP], -signal.SIGHUP, ""),
    ],
)
def test_signals_become_a_question(numbers, code, text):
    words = [sys.executable, "-c", WATCH, *(str(int(number)) for number in numbers)]
    ended = subprocess.run(words, cwd=harness.ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, text, "")
