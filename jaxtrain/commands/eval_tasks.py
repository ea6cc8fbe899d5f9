"""`jaxtrain eval --tasks`: evaluates a run or a published model on tasks of lm-eval-harness."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.commands.eval import evaluated_config
from jaxtrain.commands.output import print_json, print_table
from jaxtrain.commands.own_code import own_code
from jaxtrain.config.files import is_run
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.progress import Progress
from jaxtrain.runtime import distributed


def run_eval_tasks(
    path: str,
    overrides: Sequence[str],
    *,
    tasks: str,
    limit: int | None,
    shots: int | None,
    chat: bool,
    batch_size: int | None,
    quantize: str | None,
    step: int | None,
    emulate: int | None,
    as_json: bool,
) -> int:
    """Print the metrics of a checkpoint or of a published model on tasks.

    Args:
        path: a run, a published folder or GGUF file, or an adapter that names its base.
        overrides: as for `run_eval`.
        tasks: task files or names, with commas between them.
        limit: documents of each task, at most; None: all.
        shots: examples before each question; None: as the task says.
        chat: whether questions are written by the chat template of the run.
        batch_size: rows of a batch; None: chosen from their lengths.
        quantize: number format of the linear layers; None: the one in which they were trained.
        step: step of the checkpoint; None: the newest intact one.
        emulate: number of CPU devices to emulate; None: the devices of the machine.
        as_json: whether one JSON object is printed.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: no tasks, or see `evaluate_tasks`.
        DataError: see `evaluate_tasks`.
    """
    listed = [task.strip() for task in tasks.split(",") if task.strip()]
    if not listed:
        raise ConfigError("jaxtrain eval: --tasks is empty; give a task file, or names with commas between them")
    # What was trained is not changed; a published model has no config of its own.
    config = evaluated_config(path, overrides) if is_run(Path(path)) else None
    from jaxtrain.run.harness import check_installed, evaluate_tasks

    check_installed()
    distributed.start(emulate=emulate, compilation_cache="auto" if config is None else config.compilation_cache)
    main = distributed.is_main_process()
    from jaxtrain.inference.harness.results import HEADER, shown_rows

    own = contextlib.nullcontext() if config is None else own_code(config)
    with own, Progress(process_index=0 if main else 1) as progress, progress.phase("evaluating") as phase:
        found = evaluate_tasks(
            path,
            listed,
            limit=limit,
            shots=shots,
            chat=chat,
            batch_size=batch_size,
            overrides=overrides,
            step=step,
            quantize=quantize,
            report=phase.note,
        )
    if not main:
        return 0
    if as_json:
        print_json({"run_dir": path, "step": found.step, "tasks": found.rows})
    else:
        print_table(HEADER, shown_rows(found.rows))
    return 0
