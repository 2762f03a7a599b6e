"""Recipes of SFT throughput: measure one, check it against its reference, rank them, make pages.

    python -m bench.recipe run --config=configs/sft_360m.py --rows=$SFT_DATA --hf-ckpt=$HF_CKPT --out=recipe.json
    python -m bench.recipe check recipe.json --reference=reference.json --components=components.json
    python -m bench.recipe list bench/recipes
    python -m bench.recipe page bench/recipes --out=bench/recipes

run     trains 20 steps on 128 rows of 8,192 tokens each and writes the record of the run, which is the recipe's
        convergence arm too. --status=reference for the recipe that others are tuned from, calibration for further runs
        of it (three or more calibrate the strict check). --trace=DIR goes on for a profiler trace and is no such arm.
check   compares the settings, the component tests (python -m bench.component) and the losses with those of the
        reference, writes the verdict into the record and prints it. Exit code 1 when the recipe is not verified.
list    ranks the verified recipes of each pair of model and GPU type by tokens/s per GPU.
page    writes one HTML page a model.

Everything shown is computed from the recorded arrays; a record that contradicts itself is refused (exit code 3).
--workload=ROWSxLENGTH takes the place of 128x8192 for experiments among themselves.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import recipe_fields
from llama_jax import config as configs
from llama_jax.errors import ConfigError, Error, run_command
from llama_jax.files import reserve

STARTED = time.time()  # of the process, nearly


class NotVerified(Error):
    """A recipe that doesn't pass its checks."""

    exit_code = 1


def _run(options: argparse.Namespace, overrides: dict[str, str], words: Sequence[str]) -> None:
    if options.config is None:
        raise ConfigError("--config=FILE is required, for example --config=configs/sft_360m.py")
    trace = str(options.trace or "")
    names = {options.rows: "$SFT_DATA", options.hf_ckpt: "$HF_CKPT", options.out: "$OUT", trace: "$TRACE"}
    variables = {path: name for path, name in names.items() if path}
    if options.hf_ckpt:
        overrides = {**overrides, "model.init_from": options.hf_ckpt}
    config = configs.load(options.config, {**overrides, "data.path": options.rows})
    if Path(options.out).exists():
        raise ConfigError(f"--out={options.out} exists; a run has a record of its own")
    reserve(options.out)
    from llama_jax import runtime

    runtime.prepare(config)
    from bench import measure, recipe_run, record  # after prepare(): importing them may start the backend

    about = recipe_run.About(
        id=options.id,
        status=options.status,
        author=options.author,
        author_link=options.author_link,
        reference_public=not options.not_public,
        model=options.model,
        revision=options.revision,
        commit=options.commit,
        network=options.network,
        notes=options.note,
        command=" ".join(["python -m bench.recipe run", *(_said(word, variables) for word in words)]),
        admitted=options.admitted,
        started=STARTED,
        trace=options.trace,
    )
    made = recipe_run.run(config, about, record.parse_workload(options.workload))
    record.write(options.out, made)
    figures = measure.figures(made["measured"]["run"])
    losses = made["measured"]["arm"]["losses"]
    print(
        f"{options.out}: {figures['tokens_per_s_gpu']:,.1f} tokens/s/GPU, {figures['step_seconds']:.3f} s a step "
        f"(CV {figures['step_time_cv']:.2%}), loss {losses[0]:.6f} to {losses[-1]:.6f}"
    )


def _said(word: str, variables: dict[str, str]) -> str:
    """A word of the command line as a record says it: paths of this machine are variables."""
    name, equals, value = word.partition("=")
    if equals and value in variables:
        return f"{name}={variables[value]}"
    return variables[word] if word in variables else shlex.quote(recipe_fields.anonymous(word))


def _check(options: argparse.Namespace) -> None:
    from bench import component, recipe_checks, record

    recipe, reference = record.read(options.record), record.read(options.reference)
    against = recipe_checks.Against(
        reference,
        [record.read(path) for path in options.calibration],
        [component.read(path) for path in options.components],
    )
    checks = recipe_checks.check(recipe, against, record.parse_workload(options.workload))
    record.write(options.record, {**recipe, "checks": checks})
    print(f"{recipe['measured']['id']}: " + "\n".join(recipe_checks.summary(checks)))
    if not checks["passed"]:
        raise NotVerified(f"{options.record}: not verified: {', '.join(checks['failed'])}")


def _pairs(options: argparse.Namespace) -> tuple[Any, Any]:
    from bench import gpus, ranking, record

    known = gpus.read(options.rate)
    folder = ranking.read_folder(options.paths)
    if not folder.recipes:
        raise ConfigError(f"{', '.join(map(str, options.paths))}: no records of recipes")
    return ranking.ranking(folder, known, record.parse_workload(options.workload)), known


def _list(options: argparse.Namespace) -> None:
    from bench import ranking

    pairs, _ = _pairs(options)
    print(ranking.table(pairs))


def _page(options: argparse.Namespace) -> None:
    pairs, known = _pairs(options)
    from bench import recipe_page

    for path in recipe_page.write(pairs, known, options.out):
        print(path)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.recipe", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--workload", default="128x8192", metavar="ROWSxLENGTH", help="of a step (default: %(default)s)"
    )
    shared.add_argument("--debug", action="store_true", help="traceback for an error")
    commands = made.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", parents=[shared], allow_abbrev=False, help="measure a recipe")
    run.add_argument("--config", metavar="FILE", help="a file of configs/; --config.FIELD=VALUE sets a field")
    run.add_argument("--rows", required=True, metavar="PATH", help="rows.parquet or its folder")
    run.add_argument("--hf-ckpt", default="", metavar="DIR", help="Hugging Face folder (default: weights by the seed)")
    run.add_argument("--out", required=True, help="JSON file of the record, which must not exist")
    run.add_argument("--status", default="recipe", choices=("reference", "recipe", "calibration"))
    run.add_argument("--id", help="name of the record (default: config and time)")
    run.add_argument("--model", help="name of the model (default: of the folder or the config)")
    run.add_argument("--revision", help="of the checkpoint")
    run.add_argument("--author", default="The llama_jax authors", help="GitHub handle, or name of a tool")
    run.add_argument("--author-link", help="link of a tool")
    run.add_argument("--not-public", action="store_true", help="the reference is not published")
    run.add_argument("--commit", help="of the checkout, where there is no git")
    run.add_argument("--network", default="not pinned", help="between nodes")
    run.add_argument("--note", action="append", default=[], help="what the record should say")
    run.add_argument("--admitted", type=float, help="when the scheduler admitted the run, seconds since 1970")
    run.add_argument("--trace", type=Path, metavar="DIR", help="go on for a profiler trace; no convergence arm")

    check = commands.add_parser("check", parents=[shared], allow_abbrev=False, help="check a recipe")
    check.add_argument("record", help="record of the recipe; the verdict is written into it")
    check.add_argument("--reference", required=True, help="record of the reference")
    check.add_argument("--calibration", nargs="+", default=[], help="records of further runs of the reference")
    check.add_argument("--components", nargs="+", default=[], help="records of component tests")

    for name, words in (("list", "rank recipes"), ("page", "write pages")):
        command = commands.add_parser(name, parents=[shared], allow_abbrev=False, help=words)
        command.add_argument("paths", nargs="+", type=Path, help="records, or folders of them")
        command.add_argument("--rate", action="append", default=[], metavar="TYPE=DOLLARS", help="per GPU-hour")
        if name == "page":
            command.add_argument("--out", type=Path, required=True, help="folder of the pages")
    return made


def main(arguments: Sequence[str]) -> None:
    words = list(arguments)
    if words[:1] == ["run"]:
        file, overrides, rest = configs.parse_arguments(words)
        options = parser().parse_args(rest)
        options.config = file
        _run(options, overrides, words[1:])
        return
    options = parser().parse_args(words)
    {"check": _check, "list": _list, "page": _page}[options.command](options)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv))
