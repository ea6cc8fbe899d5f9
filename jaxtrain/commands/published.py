"""`jaxtrain import` and `jaxtrain export`: a run made of a published model, and a published folder made of a run."""

import argparse
from pathlib import Path

from jaxtrain.commands.shared import print_text
from jaxtrain.config.saved_run import is_run
from jaxtrain.errors import ConfigError
from jaxtrain.interop.weights import is_published
from jaxtrain.run.import_run import export_folder, export_run, import_run
from jaxtrain.runtime import distributed


def run_import(arguments: argparse.Namespace) -> int:
    """Make a run of a published model, or compare it with transformers, or both; 0."""
    path, overrides, emulate = arguments.path, arguments.overrides, arguments.emulate
    if arguments.check:
        _check_is_whole(path, instead="leave it out")
        _check_transformers()
    if arguments.output is not None:
        run_dir = import_run(path, arguments.output, overrides=overrides, base=arguments.base, emulate=emulate)
        if distributed.is_main_process():
            print_text(str(run_dir))
    elif overrides or not arguments.check:
        raise ConfigError("-o RUN_DIR is missing: name the directory of the run, or write --check alone")
    else:
        distributed.start(emulate=emulate)
    if arguments.check:
        _print_check(path)
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    """Write a checkpoint as a published folder, its adapters as a folder of PEFT, or its model as a program; 0."""
    run_dir, step = arguments.run_dir, arguments.step
    weights = {"dtype": arguments.dtype, "base": arguments.base}
    if arguments.to == "stablehlo":
        only_weights = (*weights.values(), arguments.max_shard_size, arguments.merge, arguments.check)
        if any(only_weights):
            raise ConfigError(
                "--to stablehlo makes a program; leave out --dtype, --max-shard-size, --merge, --base, --check"
            )
        from jaxtrain.run.export_program import export_program

        distributed.start(emulate=arguments.emulate, compilation_cache=None)
        folder = export_program(run_dir, arguments.output, batch=arguments.batch, step=step)
    else:
        if arguments.batch is not None:
            raise ConfigError("--batch is for programs, and weights have no batch; add --to stablehlo")
        if arguments.check:
            _check_transformers()
        weights["max_shard_size"] = arguments.max_shard_size or "5GB"
        if is_published(run_dir) and not is_run(Path(run_dir)):
            if arguments.merge or step is not None:
                option = "--merge" if arguments.merge else "--step"
                raise ConfigError(f"{option} is for runs, and {run_dir} is a published model; leave it out")
            distributed.start(emulate=arguments.emulate)
            folder = export_folder(run_dir, arguments.output, **weights)
        else:
            folder = export_run(
                run_dir, arguments.output, **weights, step=step, merge=arguments.merge, emulate=arguments.emulate
            )
    if distributed.is_main_process():
        print_text(str(folder))
    if arguments.check:
        _check_is_whole(str(folder), instead="add --merge")
        _print_check(str(folder))
    return 0


def _check_is_whole(path: str, *, instead: str) -> None:
    from jaxtrain.published.peft import is_adapter_folder

    if is_adapter_folder(path):
        raise ConfigError(f"--check compares whole models, and {path} is an adapter; {instead}")


def _check_transformers() -> None:
    from jaxtrain.interop.check import import_transformers

    import_transformers()


def _print_check(path: str) -> None:
    from jaxtrain.interop.check import compare_with_transformers

    if distributed.is_main_process():
        print_text(compare_with_transformers(path))
