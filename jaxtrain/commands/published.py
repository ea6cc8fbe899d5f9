"""`jaxtrain import` and `jaxtrain export`: a run made of a published model, and a published folder made of a run."""

import argparse
from pathlib import Path

from jaxtrain.commands.shared import print_text
from jaxtrain.config.files import is_run
from jaxtrain.errors import ConfigError
from jaxtrain.formats.hub import is_published
from jaxtrain.inference.export import export_folder, export_program, export_run
from jaxtrain.run.import_run import import_run
from jaxtrain.runtime import distributed


def run_import(arguments: argparse.Namespace) -> int:
    """Make a run of a published model; return 0."""
    distributed.start(emulate=arguments.emulate)
    run_dir = import_run(arguments.path, arguments.output, overrides=arguments.overrides, base=arguments.base)
    if distributed.is_main_process():
        print_text(str(run_dir))
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    """Write a checkpoint as a published folder, its adapters as a PEFT folder, or its model as a program; return 0."""
    run_dir = arguments.run_dir
    output = arguments.output
    max_shard_size = arguments.max_shard_size or "5GB"
    distributed.start(emulate=arguments.emulate, compilation_cache=None)
    if arguments.to == "stablehlo":
        _refuse(arguments, ("dtype", "max_shard_size", "merge"), "a program")
        folder = export_program(run_dir, output, batch=arguments.batch, step=arguments.step)
    elif is_published(run_dir) and not is_run(Path(run_dir)):
        _refuse(arguments, ("batch", "merge", "step"), "a copy of a published model")
        folder = export_folder(run_dir, output, dtype=arguments.dtype, max_shard_size=max_shard_size)
    else:
        _refuse(arguments, ("batch",), "a published folder")
        folder = export_run(
            run_dir,
            output,
            dtype=arguments.dtype,
            max_shard_size=max_shard_size,
            step=arguments.step,
            merge=arguments.merge,
        )
    if distributed.is_main_process():
        print_text(str(folder))
    return 0


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], what: str) -> None:
    """Refuse options that have no effect on what is written."""
    for name in names:
        if getattr(arguments, name) not in (None, False):
            raise ConfigError(f"--{name.replace('_', '-')} does not apply to {what}; leave it out")
