"""Validation loss of a run, an export or a Hugging Face folder; one JSON line on standard output.

python -m llama_jax.evaluate --run=runs/c4_20m [--update=U] [--data=data/c4] [--split=validation|subset]
python -m llama_jax.evaluate --model=HUGGING_FACE_FOLDER --data=data/c4 [--context=T]

--config.FIELD=VALUE changes how it is computed here: --config.runtime.device=cpu, --config.model.attention=xla.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from llama_jax import arena, data, hf, network, resume, run_folder, runtime
from llama_jax import config as configs
from llama_jax import step as steps
from llama_jax import validation as validations
from llama_jax.errors import ConfigError, DataError, run_command, warn
from llama_jax.fields import find
from llama_jax.files import sha256_of_file

# What changes the forward pass by rounding only, so that a run can be evaluated on another device.
FORWARD = {f"model.{name}" for name in ("attention", "head", "head_chunk_rows", "compute_dtype", "residual_dtype")}


def load_run(path: str | Path, config: Any, update: int | None = None) -> tuple[jax.Array, int]:
    """(mean parameter row [P], update) of a run's newest or given checkpoint, verified; config: the run's.

    Raises CheckpointError. Changes nothing in the folder.
    """
    found = resume.read_params(path, config, update)
    return validations.mean_row(found.arrays["params"], network.present(config, found.update)), found.update


def load_model(folder: str | Path, context: int | None = None) -> tuple[Any, jax.Array]:
    """(config, parameter row [P]) of a Hugging Face Llama folder; the other fields of the config are defaults.

    context: targets of a sequence; None: the model's own, at most 1024.
    """
    fields, params = hf.load_folder(folder)
    context = min(fields["context"], 1024) if context is None else context
    config = configs.default()
    # Only the model matters for an evaluation; a budget of one update satisfies the checks of the other fields.
    settings = {
        **{f"model.{name}": value for name, value in fields.items()},
        "model.context": context,
        "training.targets_per_parameter": None,
        "training.total_updates": 1,
        "training.batch_targets": context,
        "training.microbatch": 1,
        "lr_schedule.warmup_steps": 0,
    }
    for name, value in settings.items():
        configs.set_field(config, name, value)
    config = configs.finalize(config)
    return config, jax.numpy.asarray(arena.to_row(params, arena.make_layout(config.model)))


def evaluate(config: Any, source: data.Source, row_P: jax.Array, split: str) -> dict[str, Any]:
    """Loss of a parameter row on the whole validation split or the fixed subset of a source."""
    if not source.validation_sequences:
        raise DataError(f"{config.data.path}: no rows are held out for validation (data.validation_rows)")
    numerics, resolved = runtime.resolve(config)
    evaluator = validations.make_evaluator(config, numerics, steps.make_mesh(1, config.runtime.mesh_data))
    indices = np.arange(source.validation_sequences)
    if split == "subset":
        indices = validations.subset_indices(
            source.validation_sequences, config.evaluation.subset_sequences, config.evaluation.subset_seed
        )
    rows = validations.batches(source.validation_rows, indices, config.evaluation.batch_sequences)
    loss = evaluator(row_P, rows)
    return {
        "split": split,
        "loss": loss.mean,
        "bits_per_byte": loss.bits_per_byte(source.bytes_per_token),
        "targets": loss.targets,
        "data": source.fingerprint,
        "unique_params": config.derived.unique_params,
        "device": jax.devices()[0].device_kind,
        **resolved,
    }


def _with(config: Any, settings: Mapping[str, Any]) -> Any:
    """The config with fields set. Raises ConfigError."""
    for field, value in settings.items():
        configs.set_field(config, field, value)
    return config


def _same_tokenizer(folder: Path, source: data.Source) -> bool:
    """False when a Hugging Face folder holds a tokenizer and the source was made with another one."""
    files = [folder / name for name in ("tokenizer.json", "tokenizer.model") if (folder / name).is_file()]
    if not files or source.manifest is None or source.manifest.tokenizer["file"] is None:
        return True
    return source.manifest.tokenizer["sha256"] in [sha256_of_file(file) for file in files]


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m llama_jax.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", help="run folder")
    which.add_argument("--model", help="Hugging Face Llama folder, for example exports/final of a run")
    parser.add_argument("--update", type=int, help="checkpoint of the run; default the newest")
    parser.add_argument("--data", help="token cache; default the one of the run")
    parser.add_argument("--split", choices=("validation", "subset"), default="validation")
    parser.add_argument("--context", type=int, help="with --model: targets a sequence; default its own, at most 1024")
    parser.add_argument("--batch", type=int, help="sequences of one forward pass")
    parser.add_argument("--debug", action="store_true", help="print a traceback with an error")
    parser.add_argument("--config.FIELD", metavar="VALUE", help="an execution field, or a choice of the forward pass")

    def command() -> None:
        file, overrides, words = configs.parse_arguments(arguments)
        options = parser.parse_args(words)
        fixed = [field for field in overrides if not (find(field).execution or field in FORWARD)]
        if file or fixed:
            raise ConfigError(
                f"--config{'.' + fixed[0] if fixed else ''} can't be changed here: it belongs to the model"
            )
        if options.model and not options.data:
            raise ConfigError("--model needs --data=CACHE, a cache made with the model's tokenizer")
        if options.run is not None:
            stored = run_folder.read_run(options.run)
            config = configs.from_dict(stored["config"])
            runtime.prepare(_with(config, overrides))
            row_P, update = load_run(options.run, config, options.update)
        else:
            runtime.prepare(_with(configs.default(), overrides))
            config, row_P = load_model(options.model, options.context)
            stored, update = None, None
        # On one device, whatever the run had.
        settings: dict[str, Any] = {"runtime.mesh_worker": 1, "runtime.mesh_data": 1}
        if options.data is not None:
            kind = "rows" if config.data.source == "rows" else "cache"
            settings |= {"data.source": kind, "data.path": options.data}
        if options.batch is not None:
            settings |= {"evaluation.batch_sequences": options.batch}
        config = configs.finalize(_with(config, settings | overrides))
        source = data.open_source(config)
        if stored and options.data is None and source.fingerprint != stored["data"].get("tokens"):
            raise DataError(
                f"{config.data.path} is not the data that {options.run} was trained on; restore it, or name it with "
                "--data to evaluate on it all the same"
            )
        with runtime.device_errors(f"lower --batch (now {config.evaluation.batch_sequences})"):
            folder = Path(options.model or Path(options.run) / "exports" / "final")
        if not _same_tokenizer(folder, source):
            warn(f"the tokenizer of {config.data.path} is not the one in {folder}: the loss means little")
        found = evaluate(config, source, row_P, options.split)
        print(json.dumps(found if update is None else {"update": update, **found}), flush=True)

    return run_command(command, "--debug" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
