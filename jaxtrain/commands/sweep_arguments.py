"""Arguments of `jaxtrain sweep`. No jax here."""

import argparse

from jaxtrain.commands.arguments import count, process_count, step_number


def sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxtrain sweep`."""
    parser.add_argument("config", metavar="CONFIG", help="a shipped name (quickstart, ...) or a YAML file")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="+", help="for all trials, or v1,v2 or low..high[:log] for each"
    )
    parser.add_argument("--run-dir", metavar="DIR", help="directory of the sweep; default: runs/<name>-sweep")
    parser.add_argument("--trials", type=count, metavar="N", help="number of trials; default: all combinations")
    parser.add_argument("--jobs", type=process_count, default=1, metavar="N", help="trials at once; default: 1")
    parser.add_argument(
        "--random",
        type=step_number,
        metavar="SEED",
        help="draw values with this seed; default: 0 where there are ranges",
    )


def sweep(arguments: argparse.Namespace) -> int:
    """Runs `jaxtrain sweep`."""
    from jaxtrain.commands.sweep import run_sweep

    return run_sweep(
        arguments.config,
        arguments.overrides,
        run_dir=arguments.run_dir,
        num_trials=arguments.trials,
        jobs=arguments.jobs,
        seed=arguments.random,
    )
