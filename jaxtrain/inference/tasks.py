"""Tasks of lm-eval-harness, asked of a run or of a published model."""

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.errors import ConfigError, DataError, UserError, first_line
from jaxtrain.inference.open import open_model

# Draws for standard errors that have no formula. The harness draws 100,000 times in processes that it forks, which a
# process with the threads of jax must not do.
_BOOTSTRAP = 1000


def evaluate_tasks(
    path: str | Path,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    shots: int | None = None,
    chat: bool = False,
    batch_size: int | None = None,
    report: Callable[[str], None] = print,
    **how: Any,
) -> tuple[int | None, list[dict[str, Any]]]:
    """Score a model on tasks of the harness.

    Args:
        path: of the model, for `open_model`.
        tasks: names of the harness, or .yaml files.
        limit: most documents of a task; None: all.
        shots: examples before each question; None: as the task says.
        chat: whether to ask through the chat template of the model.
        batch_size: most rows of a batch; None: by their length.
        report: receives how much is done.
        how: further arguments of `open_model`.

    Returns:
        The step of a run's checkpoint, and one row for each metric of each task, see `result_rows`.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("--tasks needs the package lm-eval: pip install '.[harness]'")
    # Nothing is printed among results, nothing is forked, and remarks on defaults and retries are left out.
    os.environ["DISABLE_MULTIPROC"] = "1"
    for name in ("lm_eval", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr), _task_errors(", ".join(tasks)):
        from jaxtrain.inference.harness import HarnessModel

        names, manager = _find_tasks(tasks)
        opened = open_model(path, **how)
        harness: Any = importlib.import_module("lm_eval")
        # Parameters are read at the first question: mistakes in tasks are found before.
        results = harness.simple_evaluate(
            model=HarnessModel(opened, chat=chat, batch_size=batch_size, report=report),
            tasks=names,
            task_manager=manager,
            num_fewshot=shots,
            limit=limit,
            bootstrap_iters=_BOOTSTRAP,
            log_samples=False,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
        )
    return opened.step, result_rows(results)


def _find_tasks(tasks: Sequence[str]) -> tuple[list[str], Any]:
    """The names and resolved files of tasks, and the manager of the harness that knows them."""
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    files = [task for task in tasks if Path(task).suffix in (".yaml", ".yml")]
    # Ten thousand files are read to know the names.
    manager = TaskManager(include_defaults=len(files) < len(tasks))
    names = []
    for task in tasks:
        if task in files:
            names.append(str(Path(task).expanduser().resolve()))
        elif task in manager.task_index:
            names.append(task)
        else:
            raise ConfigError(f"--tasks {task}: no such task; give a .yaml file, or a name of 'lm-eval ls tasks'")
    return names, manager


@contextlib.contextmanager
def _task_errors(tasks: str) -> Iterator[None]:
    """Give an error of a task or of its data as one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise DataError(
            f"--tasks {tasks}: {type(error).__name__}: {first_line(error)}; docs/evaluation_tasks.md has tasks "
            "that need no network, and --debug shows the traceback"
        ) from error


def result_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each metric of each task and group, in the order of the harness.

    Args:
        results: what `lm_eval.simple_evaluate` returns.

    Returns:
        Rows with `task`, `version`, `filter`, `shots`, `metric`, `value`, `stderr`, `rows` (documents that were asked)
        and `higher_is_better`; an entry that the harness does not give is None.
    """
    rows = []
    for task, metrics in {**results["results"], **results.get("groups", {})}.items():
        for key, value in metrics.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            stderr = metrics.get(f"{metric}_stderr,{filter_name}")
            rows.append(
                {
                    "task": task,
                    "version": results["versions"].get(task),
                    "filter": filter_name,
                    "shots": results["n-shot"].get(task),
                    "metric": metric,
                    "value": value,
                    # The harness writes N/A where there is none.
                    "stderr": stderr if isinstance(stderr, float) else None,
                    "rows": results["n-samples"].get(task, {}).get("effective"),
                    "higher_is_better": results["higher_is_better"].get(task, {}).get(metric),
                }
            )
    return rows
