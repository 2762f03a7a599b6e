"""Writes the model of a run as a Hugging Face folder with its tokenizer: the mean of the workers, or one, or each.

Or, of a config, the weights that a run of it begins with.

python -m llama_jax.export --run=runs/c4_20m_packed4 --out=FOLDER [--update=U] [--worker=I] [--dtype=bfloat16]
python -m llama_jax.export --run=runs/c4_20m_packed4 --out=FOLDER --worker=all      # FOLDER/worker-0, ...
python -m llama_jax.export --config=configs/sft_360m.py --out=FOLDER [--dtype=bfloat16] [--config.FIELD=VALUE ...]

Reads a verified checkpoint, also while the run trains, and never changes the run folder. Works on the CPU.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_jax import config as configs
from llama_jax import data, hf, model, network, resume, run_folder, runtime
from llama_jax import validation as validations
from llama_jax.errors import CheckpointError, ConfigError, DataError, run_command


def export(
    run: str | Path,
    out: str | Path,
    update: int | None = None,
    worker: int | str = "mean",
    cache: str | None = None,
    dtype: str = "float32",
) -> tuple[list[Path], int]:
    """(folders written, update) of the newest or a given checkpoint of a run.

    worker: "mean" (of float32 numbers, in float32), a number, or "all" for out/worker-0 and so on. cache: where the
    token cache of the run is now. Raises ConfigError for a worker that isn't there, CheckpointError for a
    damaged checkpoint or a folder in use, DataError for other data than the run's.
    """
    run, out = Path(run), Path(out)
    stored = run_folder.read_run(run)
    config = configs.from_dict(stored["config"])
    workers = config.decentralized.workers
    chosen: dict[Path, int | None] = {out: None}
    if worker == "all":
        chosen = {out / f"worker-{number}": number for number in range(workers)}
    elif worker != "mean":
        if str(worker) not in map(str, range(workers)):
            raise ConfigError(f"--worker={worker} is none of {run}: 0 to {workers - 1}, or all")
        chosen = {out: int(worker)}
    _refuse_in_use(run, out)
    if cache is not None:
        configs.set_field(config, "data.source", "rows" if config.data.source == "rows" else "cache")
        configs.set_field(config, "data.path", cache)
    source = data.open_source(config)
    if source.fingerprint != stored["data"].get("tokens"):
        where = config.data.path or "the synthetic language"
        raise DataError(f"{where} is not the data that {run} was trained on; restore it, or name it with --data")
    found = resume.read_params(run, config, update)
    params_NP, position = found.arrays["params"], found.meta["progress"]["position"]
    present_N = network.present(config, found.update)
    for folder, number in chosen.items():
        row_P = validations.mean_row(params_NP, present_N) if number is None else params_NP[number]
        resume.export_row(folder, config, source, row_P, found.update, position, number, dtype)
    return list(chosen), found.update


def export_initial(config: Any, out: str | Path, dtype: str = "float32") -> Path:
    """The folder written with the weights that are drawn by the seed of a config. ConfigError, CheckpointError."""
    if config.model.init_from:
        raise ConfigError(f"the config begins with the weights of {config.model.init_from}, which are a folder already")
    out = Path(out)
    _refuse_used(out)
    origin = {"config": config.name, "seed": config.seed}
    return hf.export_model(out, model.init(config.model, config.seed), config.model, dtype=dtype, origin=origin)


def _refuse_in_use(run: Path, out: Path) -> None:
    """ConfigError when `out` is part of the run, CheckpointError when there is something in it."""
    if out.resolve().is_relative_to(run.resolve()):
        raise ConfigError(f"--out={out} lies in {run}, which this command never changes; choose another folder")
    _refuse_used(out)


def _refuse_used(out: Path) -> None:
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise CheckpointError(f"--out={out} exists and is not an empty folder; choose another one")


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m llama_jax.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--run", help="run folder")
    parser.add_argument("--config", metavar="FILE", help="instead of a run: a file of configs/")
    parser.add_argument("--config.FIELD", metavar="VALUE", help="with --config: sets a field")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="new or empty folder")
    parser.add_argument("--update", type=int, help="checkpoint of the run; default the newest")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--mean", dest="worker", action="store_const", const="mean", help="float32 mean (the default)")
    which.add_argument("--worker", metavar="I", help="one worker from 0, or all: FOLDER/worker-0, ...")
    parser.add_argument("--data", help="where the token cache of the run is now; default where it was")
    parser.add_argument("--dtype", choices=tuple(hf.DTYPES), default="float32", help="of the weights; bfloat16 rounds")
    parser.add_argument("--debug", action="store_true", help="print a traceback with an error")
    parser.set_defaults(worker="mean")

    def command() -> None:
        file, overrides, words = configs.parse_arguments(arguments)
        options = parser.parse_args(words)
        if (file is None) == (options.run is None) or (overrides and file is None):
            parser.error("--run=RUN or --config=FILE is required, and not both")
        config = configs.default() if file is None else configs.load(file, overrides)
        configs.set_field(config, "runtime.device", "cpu")  # beside a run that has the accelerator's memory
        runtime.prepare(config)
        if file is not None:
            if (options.update, options.worker, options.data) != (None, "mean", None):
                parser.error("--update, --worker and --data belong to --run")
            print(f"initial weights: {export_initial(config, options.out, options.dtype)}", flush=True)
            return
        folders, update = export(options.run, options.out, options.update, options.worker, options.data, options.dtype)
        for folder in folders:
            print(f"update {update}: {folder}", flush=True)

    return run_command(command, "--debug" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
