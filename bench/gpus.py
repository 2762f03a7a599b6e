"""GPU types of recipes, from gpus.yaml: what a device is called there, its hourly rate, its peak."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llama_jax.errors import ConfigError

FILE = Path(__file__).with_name("gpus.yaml")


class Gpu(NamedTuple):
    """A type. rate: $ per GPU-hour; peak_flops: dense bf16 FLOP/s; None where it isn't known."""

    type: str
    rate: float | None
    peak_flops: float | None
    instance: str | None = None


class Gpus(NamedTuple):
    """All types by what their devices call themselves; fetched and source are of the rates."""

    by_name: Mapping[str, Gpu]
    fetched: str
    source: str

    def of(self, device_kind: str) -> Gpu:
        """The type of a device; one that isn't listed is a type of its own without rate and peak."""
        return self.by_name.get(device_kind, Gpu(device_kind, None, None))


def read(rates: Sequence[str] = (), file: Path = FILE) -> Gpus:
    """The types of gpus.yaml, with the rates of words like "H200=7.5" instead of theirs. Raises ConfigError."""
    try:
        import yaml
    except ImportError:
        raise ConfigError("gpus.yaml needs the package pyyaml: pip install 'llama_jax[report]'") from None
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        types = {name: (entry["names"], _gpu(name, entry)) for name, entry in content["types"].items()}
        fetched, source = str(content["fetched"]), str(content["source"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{file}: can't be read: {' '.join(str(error).split())[:150]}") from None
    for word in rates:
        name, _, text = word.partition("=")
        try:
            rate = float(text)
        except ValueError:
            rate = math.nan
        if not rate > 0 or math.isinf(rate):
            raise ConfigError(f"--rate={word}: TYPE=DOLLARS per GPU-hour, such as H200=7.912")
        names, gpu = types.get(name, ([name], Gpu(name, None, None)))
        types[name] = (names, gpu._replace(rate=rate))
        fetched, source = "given on the command line", "--rate"
    return Gpus({device: gpu for names, gpu in types.values() for device in names}, fetched, source)


def _gpu(name: str, entry: Mapping[str, Any]) -> Gpu:
    rate, peak = entry["rate"], entry["peak_tflops"]
    return Gpu(name, rate and float(rate), peak and float(peak) * 1e12, entry["instance"])
