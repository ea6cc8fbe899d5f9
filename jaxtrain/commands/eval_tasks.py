"""`jaxtrain eval --tasks`: evaluates a checkpoint of a run on tasks of lm-eval-harness."""

from collections.abc import Sequence

from jaxtrain.commands.eval import evaluated_config
from jaxtrain.commands.output import print_json, print_table
from jaxtrain.commands.own_code import own_code
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.progress import Progress
from jaxtrain.run.open_run import open_run
from jaxtrain.runtime import distributed


def run_eval_tasks(
    run_dir: str,
    overrides: Sequence[str],
    *,
    tasks: str,
    limit: int | None,
    shots: int | None,
    chat: bool,
    rows: int | None,
    quantize: str | None,
    step: int | None,
    emulate: int | None,
    as_json: bool,
) -> int:
    """Print the metrics of a checkpoint on tasks.

    Args:
        run_dir: directory of the run.
        overrides: as for `run_eval`.
        tasks: task files or names, with commas between them.
        limit: documents of each task, at most; None: all.
        shots: examples before each question; None: as the task says.
        chat: whether questions are written by the chat template of the run.
        rows: rows of a batch; None: chosen from their lengths.
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
    config = evaluated_config(run_dir, overrides)
    from jaxtrain.run.harness import check_installed, evaluate_tasks

    check_installed()
    distributed.start(emulate=emulate, compilation_cache=config.compilation_cache)
    main = distributed.is_main_process()
    from jaxtrain.inference.harness.results import HEADER, shown_rows

    with own_code(config), Progress(process_index=0 if main else 1) as progress:
        run = open_run(run_dir, overrides=overrides, step=step, quantize=quantize, report=progress.message)
        with progress.phase("evaluating") as phase:
            found = evaluate_tasks(run, listed, limit=limit, shots=shots, chat=chat, rows=rows, report=phase.note)
    if not main:
        return 0
    if as_json:
        print_json({"run_dir": run_dir, "step": run.step, "tasks": found})
    else:
        print_table(HEADER, shown_rows(found))
    return 0
