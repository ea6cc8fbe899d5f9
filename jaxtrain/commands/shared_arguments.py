"""Arguments that several commands take. No jax here."""

import argparse

from jaxtrain.commands.command import process_count, step_number


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the config and the settings to change."""
    parser.add_argument("config", metavar="CONFIG", help="a shipped name (quickstart, ...), a YAML file or a run")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Adds the settings to change."""
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings to change, as in train.steps=100")


def add_emulate(parser: argparse.ArgumentParser) -> None:
    """Adds the number of CPU devices to emulate."""
    parser.add_argument("--emulate", type=process_count, metavar="N", help="emulate N CPU devices")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds the directory of a run."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of a run, as in runs/quickstart")


def add_step(parser: argparse.ArgumentParser) -> None:
    """Adds the step of a checkpoint."""
    parser.add_argument("--step", type=step_number, metavar="N", help="step to load; default: the newest intact one")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the flag for JSON."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_check(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that compares with transformers."""
    parser.add_argument("--check", action="store_true", help="compare outputs with those of transformers, if installed")


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """Adds the number format of linear layers."""
    parser.add_argument(
        "--quantize",
        choices=("int8", "int8_dynamic", "nf4"),
        help="weights of linear layers in int8, or their inputs too (int8_dynamic), or weights in 4 bits (nf4); "
        "default: as they were trained",
    )
