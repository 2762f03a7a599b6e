"""Trains a config: python -m llama_jax.main --config=configs/c4_20m.py [--workdir=DIR] [--config.FIELD=VALUE ...]

The same command continues an interrupted run. Exit codes: 0 done, 2 configuration, 3 data, 4 checkpoint or run folder,
5 non-finite update, 6 device, 75 saved and preempted, 130 saved and interrupted.
"""

import sys
from collections.abc import Sequence

from llama_jax import config as configs
from llama_jax import runtime
from llama_jax.errors import ConfigError, run_command
from llama_jax.fields import command_parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = command_parser("llama_jax.main", __doc__)
    parser.add_argument("--workdir", help="run folder; default runs/<name of the config>")
    parser.add_argument("--debug", action="store_true", help="print a traceback with an error")

    def command() -> None:
        file, overrides, rest = configs.parse_arguments(arguments)
        options = parser.parse_args(rest)
        if file is None:
            raise ConfigError("--config=FILE is required, for example --config=configs/smoke.py")
        if options.workdir == "":
            raise ConfigError("--workdir is empty; name a folder, or leave it out for runs/<name of the config>")
        config = configs.load(file, overrides)
        stop = runtime.watch_signals()
        runtime.prepare(config)
        from llama_jax import train  # after prepare(): importing it may start the backend

        train.run(config, options.workdir or f"runs/{config.name}", stop)

    return run_command(command, debug="--debug" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
