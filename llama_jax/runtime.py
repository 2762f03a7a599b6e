"""Device set-up before JAX starts, and what `auto` in a config becomes on this machine."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llama_jax.errors import ConfigError, DeviceError, Error, Interrupted, Preempted, warn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
DETERMINISTIC_FLAGS = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
SLOW_SCATTER = ("0.10.2", "0.11.0")  # JAX versions whose float32 scatter-add on NVIDIA GPUs is a compare-and-swap loop
AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities


class Device(NamedTuple):
    """What the choices depend on: JAX's platform and device kind, and the compute capability of an NVIDIA GPU."""

    platform: str
    kind: str
    capability: tuple[int, int] | None = None


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
    if present().capability and jax.__version__ in SLOW_SCATTER:
        warn(f"JAX {jax.__version__} has a slow scatter-add on NVIDIA GPUs; take another, as scripts/setup.sh does")
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


def compiler_options(platform: str | None = None) -> dict[str, Any] | None:
    """XLA options of the training step on a platform; None: the present device's.

    On GPUs no product becomes a Triton kernel: XLA would tear what comes before it out of its fusion, to no gain
    (20M, 32 rows on an H200: 13.8 ms with this, 14.2 without). Small products of one input stay apart: merged, their
    results are copied out of the common one (13.5 ms merged, 13.4 apart).
    """
    if (platform or present().platform) != "gpu":
        return None
    return {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}


def present() -> Device:
    """The first device that JAX sees."""
    import jax

    device = jax.devices()[0]
    capability = None
    if device.platform == "gpu" and "cuda" in device.client.platform_version.lower():
        major, minor = str(device.compute_capability).split(".")
        capability = int(major), int(minor)
    return Device(device.platform, device.device_kind, capability)


def choose(config: Any, device: Device) -> tuple[dict[str, str], dict[str, str]]:
    """(what every `auto` of the model becomes on a device, by field; why the fastest form can't run, where it can't).

    A function of its arguments alone, so that a device can be asked about from anywhere. A requested form that can't
    run there is a ConfigError, never replaced by another.
    """
    from llama_jax import gate, rotary

    model, deterministic = config.model, config.runtime.deterministic
    reasons: dict[str, str] = {}
    compute = model.compute_dtype
    obstacle = bfloat16_obstacle(device)
    if compute == "auto":
        compute = "float32" if obstacle else "bfloat16"
        reasons |= {"compute_dtype": obstacle} if obstacle else {}
    residual = compute if model.residual_dtype == "compute" else model.residual_dtype

    def pick(field: str, fast: str, slow: str, plain: str, obstacle: str | None) -> str:
        chosen = model[field]
        if chosen == fast and obstacle:
            raise ConfigError(f"model.{field} = {fast} can't run here: {obstacle}; use auto or {slow}")
        if chosen != "auto":
            return chosen
        obstacle = "runtime.deterministic takes the plain twin" if deterministic else obstacle
        if obstacle:
            reasons[field] = obstacle
        return plain if deterministic else (slow if obstacle else fast)

    obstacle = _cudnn_obstacle(device, compute, config.derived.head_size)
    attention = pick("attention", "cudnn", "xla", "reference", obstacle)
    kernels = pick("kernels", "mosaic", "xla", "xla", _mosaic_obstacle(config, device, compute, residual))
    products = {  # each with kernels of its own, where the row kernels run
        "gate": gate.obstacle(model.width, model.ffn, model.context),
        "rotary": rotary.obstacle(model.width, model.heads, config.derived.kv_heads, model.context),
    }
    if kernels == "mosaic":
        reasons |= {name: obstacle for name, obstacle in products.items() if obstacle}
    return {
        "compute_dtype": compute,
        "residual_dtype": residual,
        "attention": attention,
        "head": pick("head", "chunked", "chunked", "plain", None),
        "kernels": kernels,
        **{name: "xla" if obstacle else kernels for name, obstacle in products.items()},
    }, reasons


def chunk_rows(config: Any) -> int:
    """Tokens of a chunk of the head of one worker: the workers of a device have their chunks in memory together."""
    return max(1, config.model.head_chunk_rows * config.runtime.mesh_worker // config.decentralized.workers)


def numerics(config: Any, choices: dict[str, str]) -> Any:
    """The model.Numerics of a finalized config with the choices of choose()."""
    import jax.numpy as jnp

    from llama_jax.model import Numerics

    return Numerics(
        compute=jnp.dtype(choices["compute_dtype"]),
        residual=jnp.dtype(choices["residual_dtype"]),
        attention=choices["attention"],
        head=choices["head"],
        head_chunk_rows=chunk_rows(config),
        kernels=choices["kernels"],
        gate=choices["gate"],
        rotary=choices["rotary"],
        remat=config.model.remat,
        scan_layers=config.model.scan_layers,
    )


def resolve(config: Any) -> tuple[Any, dict[str, Any]]:
    """(model.Numerics, the choices as JSON) of a finalized config on the present device. Raises ConfigError."""
    import jax

    needed = config.runtime.mesh_worker * config.runtime.mesh_data
    if needed > len(jax.devices()):
        raise ConfigError(
            f"runtime.mesh_worker x runtime.mesh_data = {needed}, but there are {len(jax.devices())} devices"
        )
    choices, _ = choose(config, present())
    return numerics(config, choices), choices


def bfloat16_obstacle(device: Device) -> str | None:
    """Why `auto` computes in float32, or None.

    Before Ampere XLA converts bfloat16 operands and multiplies in float32: rounding without speed (openxla/xla#12429).
    """
    if device.platform == "cpu":
        return "on a CPU bfloat16 only rounds"
    if device.capability is not None and device.capability < AMPERE:
        return f"{_with_capability(device)}, and below {_dotted(AMPERE)} bfloat16 only rounds"
    return None


def _mosaic_obstacle(config: Any, device: Device, compute: str, residual: str) -> str | None:
    """Why the row kernels can't run, or None."""
    from llama_jax import kernels

    if device.capability is None or device.capability[0] != HOPPER[0]:
        return f"the device is {device.kind}, not a Hopper GPU"
    if (compute, residual) != ("bfloat16", "bfloat16"):
        return "model.compute_dtype and model.residual_dtype must be bfloat16"
    return kernels.obstacle(config.model.width, config.model.vocab_size, config.model.context)


def _cudnn_obstacle(device: Device, compute: str, head_size: int) -> str | None:
    """Why cuDNN attention can't run, or None."""
    if device.capability is None:
        return f"the device is {device.kind}, not an NVIDIA GPU"
    if device.capability < AMPERE:
        return f"{_with_capability(device)}, {_dotted(AMPERE)} is needed"
    if compute != "bfloat16":
        return f"model.compute_dtype is {compute}, bfloat16 is needed"
    largest = 256 if device.capability >= HOPPER else 128
    if head_size % 8 or head_size > largest:
        return f"head size {head_size} isn't a multiple of 8 up to {largest}"
    return None


def _with_capability(device: Device) -> str:
    return f"{device.kind} has compute capability {_dotted(device.capability or (0, 0))}"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _backend_started() -> bool:
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()
