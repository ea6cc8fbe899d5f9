"""`jaxtrain import` and `jaxtrain export`: a run made of a published model, and a published folder made of a run."""

import argparse
from pathlib import Path

from jaxtrain.commands.shared import print_text
from jaxtrain.config.files import is_run
from jaxtrain.errors import ConfigError
from jaxtrain.interop.check import compare_with_transformers, import_transformers
from jaxtrain.interop.weights import is_published
from jaxtrain.run.export import export_folder, export_program, export_run
from jaxtrain.run.import_run import import_run
from jaxtrain.runtime import distributed


def run_import(arguments: argparse.Namespace) -> int:
    """Make a run of a published model, or compare it with transformers, or both; 0."""
    path, overrides = arguments.path, arguments.overrides
    if arguments.check:
        import_transformers()  # before anything is made
    distributed.start(emulate=arguments.emulate)
    if arguments.output is not None:
        run_dir = import_run(path, arguments.output, overrides=overrides, base=arguments.base)
        if distributed.is_main_process():
            print_text(str(run_dir))
    elif overrides or not arguments.check:
        raise ConfigError("-o RUN_DIR is missing: name the directory of the run, or write --check alone")
    if arguments.check and distributed.is_main_process():
        print_text(compare_with_transformers(path))
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    """Write a checkpoint as a published folder, its adapters as a folder of PEFT, or its model as a program; 0."""
    run_dir, output = arguments.run_dir, arguments.output
    unused, made = ("batch",), "a published folder"
    published = is_published(run_dir) and not is_run(Path(run_dir))
    if arguments.to == "stablehlo":
        unused, made = ("dtype", "max_shard_size", "merge", "base", "check"), "a program"
    elif published:
        unused, made = ("batch", "merge", "step"), "a copy of a published model"
    for name in unused:
        if getattr(arguments, name) not in (None, False):
            raise ConfigError(f"--{name.replace('_', '-')} has no use for {made}; leave it out")
    if arguments.check:
        import_transformers()
    distributed.start(emulate=arguments.emulate, compilation_cache=None)
    weights = {"dtype": arguments.dtype, "base": arguments.base, "max_shard_size": arguments.max_shard_size or "5GB"}
    if arguments.to == "stablehlo":
        folder = export_program(run_dir, output, batch=arguments.batch, step=arguments.step)
    elif published:
        folder = export_folder(run_dir, output, **weights)
    else:
        folder = export_run(run_dir, output, **weights, step=arguments.step, merge=arguments.merge)
    if distributed.is_main_process():
        print_text(str(folder))
        if arguments.check:
            print_text(compare_with_transformers(str(folder)))
    return 0
