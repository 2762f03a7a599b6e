"""Device set-up before JAX starts, and what `auto` in a config becomes on this machine."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llama_jax.errors import ConfigError, DeviceError, Error, Interrupted, Preempted, warn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
DETERMINISTIC_FLAGS = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"


def watch_signals() -> Callable[[], Error | None]:
    """Turns SIGTERM, SIGUSR1 and SIGINT into a question that the loop asks: which error should end the run, if any.

    Call it before JAX starts: the signals are blocked for every later thread and read by a thread of their own, so that
    they count during a long compilation too. A second signal ends the process at once.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    received: list[int] = []

    def wait() -> None:
        while True:
            number = signal.sigwait(STOP_SIGNALS)
            if received:
                os._exit(128 + number)
            received.append(number)

    threading.Thread(target=wait, daemon=True, name="signals").start()

    def stop() -> Error | None:
        if not received:
            return None
        name = signal.Signals(received[0]).name
        return Interrupted(name) if received[0] == signal.SIGINT else Preempted(name)

    return stop


def prepare(config: Any) -> None:
    """Sets what must be set before the JAX backend starts: platform, memory share, determinism, compile cache.

    Raises ConfigError when determinism is asked for after the backend has started, DeviceError when the required
    platform isn't there.
    """
    runtime = config.runtime
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(runtime.memory_fraction))
    if runtime.deterministic and DETERMINISTIC_FLAGS not in os.environ.get("XLA_FLAGS", ""):
        if _backend_started():
            raise ConfigError("runtime.deterministic = True must be set before the JAX backend starts")
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC_FLAGS}".strip()
    import jax

    if runtime.device == "cpu" and not _backend_started():
        jax.config.update("jax_platforms", "cpu")
    try:
        platform = jax.devices()[0].platform
    except (RuntimeError, AssertionError) as error:  # JAX asserts when JAX_PLATFORMS names only what it lacks
        reason = " ".join(str(error).split()) or f"JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS')}"
        raise DeviceError(f"JAX {jax.__version__} finds no device: {reason}") from error
    if runtime.device not in ("auto", platform):
        raise DeviceError(
            f"runtime.device = {runtime.device}, but JAX {jax.__version__} sees only {platform}: "
            "install the matching extra (scripts/setup.sh --cuda13, --cuda12 or --tpu) or change the field"
        )
    if platform == "cpu" and runtime.device == "auto" and Path("/dev/nvidiactl").exists():
        warn("there is an NVIDIA GPU, but this JAX has no CUDA support; running on the CPU")
    folder = runtime.compile_cache or os.environ.get("LLAMA_JAX_COMPILE_CACHE")
    if folder or platform != "cpu":
        version = f"jax-{jax.__version__}-{jax.devices()[0].device_kind.replace(' ', '_')}"
        try:
            cache = Path(folder or Path.home() / ".cache" / "llama_jax") / version
            cache.mkdir(parents=True, exist_ok=True)
            jax.config.update("jax_compilation_cache_dir", str(cache))
        except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
            reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
            warn(f"runtime.compile_cache: {reason}; compiling without a cache")


@contextlib.contextmanager
def device_errors(advice: str) -> Iterator[None]:
    """Turns what the device runs into, such as lack of memory, into a DeviceError that ends with `advice`."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise DeviceError(f"{' '.join(str(error).split())[:600]}; {advice}") from error


def compiler_options() -> dict[str, Any] | None:
    """XLA options of the training step on the present device.

    On GPUs no product becomes a Triton kernel: XLA would tear what comes before it out of its fusion, to no gain
    (20M, 32 rows on an H200: 13.8 ms with this, 14.2 without). Small products of one input stay apart: merged, their
    results are copied out of the common one (13.5 ms merged, 13.4 apart).
    """
    import jax

    if jax.devices()[0].platform != "gpu":
        return None
    return {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}


def resolve(config: Any) -> tuple[Any, dict[str, Any]]:
    """(model.Numerics, the choices as JSON) of a finalized config on the present device.

    A requested attention that can't run here is a ConfigError, never replaced by another.
    """
    import jax
    import jax.numpy as jnp

    from llama_jax import gate
    from llama_jax.model import Numerics

    device, model = jax.devices()[0], config.model
    needed = config.runtime.mesh_worker * config.runtime.mesh_data
    if needed > len(jax.devices()):
        raise ConfigError(
            f"runtime.mesh_worker x runtime.mesh_data = {needed}, but there are {len(jax.devices())} devices"
        )
    compute = model.compute_dtype
    if compute == "auto":
        compute = "float32" if device.platform == "cpu" else "bfloat16"
    reason = _cudnn_obstacle(device, compute, config.derived.head_size)
    attention = model.attention
    if attention == "cudnn" and reason:
        raise ConfigError(f"model.attention = cudnn can't run here: {reason}; use auto or xla")
    if attention == "auto":
        attention = "reference" if config.runtime.deterministic else ("xla" if reason else "cudnn")
    head = model.head
    if head == "auto":
        head = "plain" if config.runtime.deterministic else "chunked"
    residual = compute if model.residual_dtype == "compute" else model.residual_dtype
    kernels = model.kernels
    obstacle = _mosaic_obstacle(config, device, compute, residual)
    if kernels == "mosaic" and obstacle:
        raise ConfigError(f"model.kernels = mosaic can't run here: {obstacle}; use auto or xla")
    if kernels == "auto":
        kernels = "xla" if obstacle or config.runtime.deterministic else "mosaic"
    sizes = (config.model.width, config.model.ffn, config.model.context)
    gate_form = "mosaic" if kernels == "mosaic" and gate.obstacle(*sizes) is None else "xla"
    numerics = Numerics(
        compute=jnp.dtype(compute),
        residual=jnp.dtype(residual),
        attention=attention,
        head=head,
        # The step is vmapped over the workers of a device, whose chunks are in memory together.
        head_chunk_rows=max(1, model.head_chunk_rows * config.runtime.mesh_worker // config.decentralized.workers),
        kernels=kernels,
        gate=gate_form,
        remat=model.remat,
        scan_layers=model.scan_layers,
    )
    return numerics, {
        "compute_dtype": compute,
        "residual_dtype": residual,
        "attention": attention,
        "head": head,
        "kernels": kernels,
        "gate": gate_form,
    }


def _mosaic_obstacle(config: Any, device: Any, compute: str, residual: str) -> str | None:
    """Why the row kernels can't run, or None."""
    from llama_jax import kernels

    if device.platform != "gpu" or not str(getattr(device, "compute_capability", "")).startswith("9."):
        return f"the device is {device.device_kind}, not a Hopper GPU"
    if (compute, residual) != ("bfloat16", "bfloat16"):
        return "model.compute_dtype and model.residual_dtype must be bfloat16"
    return kernels.obstacle(config.model.width, config.model.vocab_size, config.model.context)


def _cudnn_obstacle(device: Any, compute: str, head_size: int) -> str | None:
    """Why cuDNN attention can't run, or None."""
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return f"the device is {device.device_kind}, not an NVIDIA GPU"
    capability = tuple(int(part) for part in str(getattr(device, "compute_capability", "0.0")).split("."))
    if capability < (8, 0):
        return f"{device.device_kind} has compute capability {capability[0]}.{capability[1]}, 8.0 is needed"
    if compute != "bfloat16":
        return f"model.compute_dtype is {compute}, bfloat16 is needed"
    largest = 256 if capability >= (9, 0) else 128
    if head_size % 8 or head_size > largest:
        return f"head size {head_size} isn't a multiple of 8 up to {largest}"
    return None


def _backend_started() -> bool:
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()
