"""Arguments of the commands that train: in this process, in a process that is watched, or in several. No jax here."""

import argparse
from pathlib import Path

from jaxtrain.commands.command import process_count, step_number
from jaxtrain.commands.shared_arguments import add_config, add_emulate
from jaxtrain.errors import ConfigError

_RESTARTS = "start again after a failure, at most N times, from the newest intact checkpoint; default: 0"


def train_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxtrain train`."""
    add_config(parser)
    parser.add_argument("--run-dir", metavar="DIR", help="directory of the run; default: runs/<name>, or that run")
    parser.add_argument(
        "--resume",
        default="auto",
        choices=("auto", "must", "never"),
        help="resume from the newest checkpoint where there is one (auto, the default), always (must), or never",
    )
    parser.add_argument("--restarts", type=step_number, default=0, metavar="N", help=_RESTARTS)
    add_emulate(parser)


def train(arguments: argparse.Namespace) -> int:
    """Runs `jaxtrain train`."""
    from jaxtrain.commands.train import run_restarted_train, run_train

    if not arguments.restarts:
        return run_train(
            arguments.config,
            arguments.overrides,
            run_dir=arguments.run_dir,
            resume=arguments.resume,
            emulate=arguments.emulate,
        )
    return run_restarted_train(
        arguments.config,
        arguments.overrides,
        run_dir=arguments.run_dir,
        resume=arguments.resume,
        emulate=arguments.emulate,
        restarts=arguments.restarts,
    )


def launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxtrain launch`."""
    parser.usage = (
        "jaxtrain launch --processes N [--emulate M] [--restarts R] -- COMMAND\n\n"
        "COMMAND: train CONFIG ..., python my.py ..."
    )
    parser.add_argument(
        "--processes", type=process_count, required=True, metavar="N", help="how many processes to start"
    )
    parser.add_argument("--emulate", type=process_count, metavar="M", help="emulate M CPU devices in each process")
    parser.add_argument("--restarts", type=step_number, default=0, metavar="R", help=_RESTARTS.replace("N", "R"))
    parser.add_argument(
        "--min-processes",
        type=process_count,
        metavar="K",
        help="where a run fails twice in a row at one step, restart with a process less, down to K; default: all",
    )


def launch(arguments: argparse.Namespace) -> int:
    """Runs `jaxtrain launch`."""
    words, num_processes = arguments.command, arguments.processes
    if arguments.min_processes is not None and not arguments.restarts:
        raise ConfigError("--min-processes is about restarts, and there are none; add --restarts 3")
    if arguments.min_processes is not None and arguments.min_processes > num_processes:
        raise ConfigError(f"--min-processes {arguments.min_processes} is above --processes {num_processes}; lower it")
    if arguments.restarts and not arguments.is_program and words[0] != "train":
        raise ConfigError(f"--restarts goes with train and with programs of your own, and {words[0]!r} is neither")
    run_dir = _run_dir(words) if arguments.restarts and not arguments.is_program else None
    from jaxtrain.commands.launch import JAXTRAIN, run_launch

    return run_launch(
        words,
        num_processes=num_processes,
        program=() if arguments.is_program else JAXTRAIN,
        emulate=arguments.emulate if arguments.is_program else None,
        restarts=arguments.restarts,
        min_processes=arguments.min_processes,
        run_dir=run_dir,
    )


def _run_dir(words: list[str]) -> Path:
    """The directory of the run of a command line of `train`, which was checked before.

    Raises:
        ConfigError: the command line has restarts of its own.
    """
    from jaxtrain.config import load_config
    from jaxtrain.run.folder import folder_of

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    train_arguments(parser)
    found, left = parser.parse_known_intermixed_args(words[1:])
    if found.restarts:
        raise ConfigError("--restarts stands twice; write it before '--', since all processes start again together")
    # --train.steps=5 is train.steps=5.
    overrides = [*found.overrides, *(word.removeprefix("--") for word in left if "=" in word)]
    return folder_of(load_config(found.config, overrides=overrides), found.run_dir)
