"""Arguments of the commands that look at data or encode it. No jax here."""

import argparse

from jaxtrain.commands.command import count
from jaxtrain.commands.shared_arguments import add_config, add_json


def prepare_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxtrain data prepare`."""
    add_config(parser)
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="folder for the files of tokens")
    parser.add_argument(
        "--tokens-per-shard", type=count, default=2**27, metavar="N", help="tokens per file; default: 2**27"
    )
    parser.add_argument(
        "--workers",
        type=count,
        metavar="N",
        help="processes that encode; default: the cores, where there is enough text",
    )


def prepare(arguments: argparse.Namespace) -> int:
    """Runs `jaxtrain data prepare`."""
    from jaxtrain.commands.data import run_data_prepare

    return run_data_prepare(
        arguments.config,
        arguments.overrides,
        output=arguments.output,
        tokens_per_shard=arguments.tokens_per_shard,
        workers=arguments.workers,
    )


def show_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxtrain data show`."""
    add_config(parser)
    parser.add_argument("--rows", type=count, default=2, metavar="N", help="how many rows; default: 2")
    add_json(parser)


def show(arguments: argparse.Namespace) -> int:
    """Runs `jaxtrain data show`."""
    from jaxtrain.commands.data_show import run_data_show

    return run_data_show(arguments.config, arguments.overrides, rows=arguments.rows, as_json=arguments.json)
