"""Counts the active parameters per token of a checkpoint, from config.json and the headers of its safetensors files.

    python bench/active_params.py FOLDER_OR_INDEX [--json] [--headers-only]

N, the number that the MFU of a recipe uses, is every weight that the text model applies to each token in a matrix
multiplication, routed experts at top-k of their number; the last lines of the table say how it counts the rest. Every
tensor must be known by name: a matrix that isn't, or one that a layer lacks, is an error and never a guess. What is not
counted is not asked for: a checkpoint without its biases has the same N. Needs no JAX and reads no weights.
"""

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.active_rules import CONVENTIONS, COUNTED, EXCLUDED
from bench.active_weights import Model, Weight, check_head, check_layers, classify, read_model
from llama_jax import flops
from llama_jax.errors import CheckpointError, ConfigError, run_command
from llama_jax.hf_config import to_hf_config
from llama_jax.hf_files import Tensor, find_folder, read_config, read_headers, weight_files

QUANTIZATION = "hf_quant_config.json"  # where older exports of NVIDIA's ModelOpt say what config.json doesn't


def active_params(path: str | Path, headers_only: bool = False) -> dict[str, Any]:
    """Counts a Hugging Face folder, a run with exports/final, or the index of a sharded checkpoint.

    The result is plain JSON: `active_parameters` (N), `parameters` (all stored weights, unpacked), `classes`
    {class: {tensors, parameters, active}}, `groups` of equal tensors, `conventions`, and what identifies the model.
    With `headers_only` the files may end behind their headers. Raises ConfigError for a model that isn't known or a
    config.json that contradicts itself or the tensors, CheckpointError for files or tensors.
    """
    path = Path(path)
    index = path if path.name.endswith(".index.json") and path.is_file() else None
    folder = path.parent if index else find_folder(path)
    files = weight_files(folder, index)
    tensors = read_headers(files, headers_only)
    config = read_config(folder)
    other = read_config(folder, QUANTIZATION) if (folder / QUANTIZATION).is_file() else {}
    try:
        counted = count(tensors, config, other)
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"{index or folder}: {error}") from None
    return {"checkpoint": str(index or folder), "files": len(files)} | counted


def active_of_model(model: Any) -> int:
    """N of the `model` section of a config, by the same rules from the shapes that its export has."""
    tensors = {name: Tensor("F32", shape) for name, shape in flops.parameter_shapes(model).items()}
    return int(count(tensors, to_hf_config(model, None, None))["active_parameters"])


def count(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], quantization: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Counts tensors by name as in a checkpoint with this config.json; see `active_params`."""
    model = read_model(config, quantization or {})
    weights = check_head(model, classify(tensors, model))
    check_layers(model, weights)
    groups: dict[tuple[str, str, Tensor], list[Weight]] = defaultdict(list)
    for weight in weights:
        groups[weight.kind, weight.pattern, weight.stored].append(weight)
    rows: list[dict[str, Any]] = []
    for (kind, pattern, stored), members in groups.items():
        size = sum(weight.size for weight in members)
        rows.append(
            {
                "class": kind,
                "name": pattern,
                "dtype": stored.dtype,
                "shape": list(stored.shape),
                "tensors": len(members),
                "parameters": size,
                "active": _active(model, kind, size),
            }
        )
    order = {kind: place for place, kind in enumerate((*COUNTED, *EXCLUDED))}
    rows.sort(key=lambda row: (order[row["class"]], row["name"], row["dtype"], row["shape"]))
    classes: dict[str, dict[str, int]] = {}
    for row in rows:
        total = classes.setdefault(row["class"], {"tensors": 0, "parameters": 0, "active": 0})
        for key in total:
            total[key] += row[key]
    return {
        "model_type": model.config["model_type"],
        "active_parameters": sum(row["active"] for row in rows),
        "parameters": sum(row["parameters"] for row in rows),
        "tensors": len(weights),
        "layers": model.layers,
        "experts": model.experts,
        "experts_per_token": model.top_k,
        "tied_head": bool(model.tied),
        "classes": classes,
        "conventions": list(CONVENTIONS),
        "groups": rows,
    }


def _active(model: Model, kind: str, size: int) -> int:
    if kind not in COUNTED:
        return 0
    if kind != "routed":
        return size
    if size * model.top_k % model.experts:
        raise CheckpointError(f"{size} weights of experts do not divide among {model.experts} experts")
    return size * model.top_k // model.experts


# What people see.


def table(counted: Mapping[str, Any]) -> str:
    """The count as text: a line per group of equal tensors, totals per class, and the conventions."""
    rows = [["class", "tensors", "name", "stored as", "parameters", "active"]]
    for row in counted["groups"]:
        stored = f"{row['dtype']} {'x'.join(map(str, row['shape'])) or 'scalar'}"
        rows.append([row["class"], f"{row['tensors']:,}", row["name"], stored, *_numbers(row)])
    rows.append([])
    for kind, total in counted["classes"].items():
        rows.append([kind, f"{total['tensors']:,}", "", "", *_numbers(total)])
    everything = {"parameters": counted["parameters"], "active": counted["active_parameters"]}
    rows.append(["total", f"{counted['tensors']:,}", "", "", *_numbers(everything)])
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    lines = [
        "  ".join(cell.ljust(width) if i in (0, 2, 3) else cell.rjust(width) for i, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=False)) for row in rows)
    ]
    experts = f", {counted['experts_per_token']} of {counted['experts']} experts" if counted["experts"] else ""
    tied = ", tied output projection" if counted["tied_head"] else ""
    lines += [
        "",
        *(f"- {convention}" for convention in counted["conventions"]),
        "",
        f"{counted['model_type']}, {counted['layers']} layers{experts}{tied}: "
        f"N = {counted['active_parameters']:,} active parameters per token",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _numbers(row: Mapping[str, int]) -> list[str]:
    return [f"{row['parameters']:,}", f"{row['active']:,}" if row["active"] else "-"]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", metavar="FOLDER_OR_INDEX")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--headers-only", action="store_true", help="files may end behind their headers")
    parser.add_argument("--debug", action="store_true", help="traceback for an error")
    options = parser.parse_args(arguments)
    counted = active_params(options.path, options.headers_only)
    print(json.dumps(counted, indent=2) if options.json else table(counted))


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv))
