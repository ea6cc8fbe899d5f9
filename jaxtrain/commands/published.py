"""`jaxtrain import` and `jaxtrain export`: a run made of a published model, and a published folder made of a run."""

from collections.abc import Sequence
from pathlib import Path

from jaxtrain.commands.output import print_text
from jaxtrain.config.saved_run import is_run
from jaxtrain.errors import ConfigError
from jaxtrain.interop.weights import is_published
from jaxtrain.run.export import export_folder, export_run
from jaxtrain.run.import_run import import_run
from jaxtrain.runtime import distributed


def run_import(
    path: str, overrides: Sequence[str], *, output: str | None, base: str | None, check: bool, emulate: int | None
) -> int:
    """Make a run of a published model, or compare it with transformers, or both.

    Args:
        path: the published folder or file, or the folder of an adapter.
        overrides: settings of the run.
        output: directory of the run; None: no run is made.
        base: the published model that an adapter is of.
        check: whether its outputs are compared with those of transformers.
        emulate: number of CPU devices to emulate; None: the devices of the machine.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: There is neither a directory nor something to check.
    """
    if check:
        _check_is_whole(path, instead="leave it out")
        _check_transformers()
    if output is None:
        if not check or overrides:
            given = f" for {overrides[0]}" if overrides else ""
            raise ConfigError(f"-o RUN_DIR is missing{given}: name the directory of the run, or write --check alone")
        distributed.start(emulate=emulate)
        _print_check(path)
        return 0
    run_dir = import_run(path, output, overrides=overrides, base=base, emulate=emulate)
    if distributed.is_main_process():
        print_text(str(run_dir))
    if check:
        _print_check(path)
    return 0


def named_folder(given: str | None, option: str | None) -> str:
    """The folder to make, which is named in one of two ways.

    Raises:
        ConfigError: it is named in neither, or in both.
    """
    if given is not None and option is not None:
        raise ConfigError(f"jaxtrain export: the folder is {given} and -o {option}; name one")
    folder = given if option is None else option
    if folder is None:
        raise ConfigError("jaxtrain export: the folder is missing; write jaxtrain export RUN_DIR -o FOLDER")
    return folder


def run_export_program(
    run_dir: str,
    folder: str,
    *,
    unused: Sequence[str],
    batch_size: int | None,
    step: int | None,
    emulate: int | None,
) -> int:
    """Write a checkpoint of a run as a portable program.

    Args:
        run_dir: directory of the run.
        folder: to make.
        unused: options that were given and have no meaning here.
        batch_size: rows of a call; None: any number where the model's program does not depend on it.
        step: step of the checkpoint; None: the newest intact one.
        emulate: number of CPU devices to emulate, of which one is used; None: the devices of the machine.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: An option is of published folders, or the model has no portable program.
    """
    if unused:
        raise ConfigError(f"{unused[0]} is for published folders, and --to stablehlo makes a program; leave it out")
    from jaxtrain.run.export import export_program

    distributed.start(emulate=emulate, compilation_cache=None)
    written = export_program(run_dir, folder, batch=batch_size, step=step)
    if distributed.is_main_process():
        print_text(str(written))
    return 0


def run_export(
    run_dir: str,
    *,
    output: str,
    batch_size: int | None = None,
    dtype: str | None,
    max_shard_size: str,
    step: int | None,
    merge: bool,
    base: str | None,
    check: bool,
    emulate: int | None,
) -> int:
    """Write a checkpoint of a run as a published folder, or its adapters as a folder of PEFT.

    Args:
        run_dir: directory of the run, or a published folder or file that is written again.
        output: the folder.
        batch_size: rows per call, which only a program has.
        dtype: of the tensors; None: that of the model that the run started from, else float32.
        max_shard_size: most bytes per file.
        step: step of the checkpoint; None: the newest intact one.
        merge: whether adapters are added to their base.
        base: nf4: linear layers are written in 4 bits; None: in floats.
        check: whether the folder's outputs are compared with those of transformers.
        emulate: number of CPU devices to emulate; None: the devices of the machine.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: An argument is for runs, and a published model is given.
    """
    if batch_size is not None:
        raise ConfigError(f"--batch {batch_size} is for programs, and weights have no batch; add --to stablehlo")
    if check:
        _check_transformers()
    if is_published(run_dir) and not is_run(Path(run_dir)):
        _check_for_runs(run_dir, step=step, merge=merge)
        distributed.start(emulate=emulate)
        folder = export_folder(run_dir, output, dtype=dtype, max_shard_size=max_shard_size, base=base)
    else:
        folder = export_run(
            run_dir,
            output,
            dtype=dtype,
            max_shard_size=max_shard_size,
            step=step,
            merge=merge,
            base=base,
            emulate=emulate,
        )
    if distributed.is_main_process():
        print_text(str(folder))
    if check:
        _check_is_whole(str(folder), instead="add --merge")
        _print_check(str(folder))
    return 0


def _check_for_runs(path: str, *, step: int | None, merge: bool) -> None:
    for given, word in ((merge, "--merge"), (step is not None, f"--step {step}")):
        if given:
            raise ConfigError(f"{word} is for runs, and {path} is a published model; leave it out")


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
