"""Tasks of lm-eval-harness, asked of a run or of a published model."""

import contextlib
import difflib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.errors import ConfigError, DataError, UserError, first_line
from jaxtrain.inference.harness import AskedModel, result_rows, task_tokens
from jaxtrain.inference.open import open_model
from jaxtrain.inference.predict import tokenizer_of, writer_of

# Draws for standard errors that have no formula. The harness draws 100,000 times in processes that it forks, which a
# process with the threads of jax must not do.
_BOOTSTRAP = 1000
_SEED = 1234  # by which the harness chooses examples


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
    """Score a model (`how` are further arguments of `open_model`) on task files, or tasks of the harness by name.

    The result is the step of a run's checkpoint, and one row for each metric of each task, as `result_rows` makes them.
    `limit` bounds the documents of a task, `shots` are the examples before each question (None: as the task says),
    `batch_size` bounds the rows of a batch, and `report` receives lines on what is computed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("--tasks needs the package lm-eval: pip install '.[harness]'")
    # Nothing is printed among results, nothing is forked, and remarks on defaults and retries are left out.
    os.environ["DISABLE_MULTIPROC"] = "1"
    for name in ("lm_eval", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr):
        found_tasks = _tasks(tasks, shots=shots)  # mistakes in tasks are found before parameters are read
        opened = writer_of(open_model(path, **how), answers=chat)
        from lm_eval.evaluator import evaluate  # pyright: ignore[reportMissingImports]

        from jaxtrain.inference.harness_model import HarnessModel

        form = opened.chat if chat else None
        tokens = task_tokens(tokenizer_of(opened), opened.special, form)
        held = opened.sharded_model, opened.params, opened.model_state
        model = HarnessModel(AskedModel(*held, tokens, rows=batch_size, report=report), form)
        options: dict[str, Any] = {"limit": limit, "bootstrap_iters": _BOOTSTRAP, "log_samples": False}
        options |= {"apply_chat_template": chat, "fewshot_as_multiturn": chat}
        with _task_errors(", ".join(tasks)):
            found = evaluate(lm=model, task_dict=found_tasks, **options)
    assert found is not None  # only on further ranks of the harness, which there are none of
    return opened.step, result_rows(found)


def _tasks(tasks: Sequence[str], *, shots: int | None) -> dict[str, Any]:
    """The tasks and groups with their data, as `TaskManager.load` gives them."""
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    files = {task: Path(task).expanduser().resolve() for task in tasks if Path(task).suffix in (".yaml", ".yml")}
    # Ten thousand files are read to know the names.
    manager = TaskManager(include_defaults=len(files) < len(tasks))
    opened: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for task in tasks:
        if not files[task].is_file() if task in files else task not in manager.task_index:
            close = difflib.get_close_matches(task, manager.all_tasks, 1)
            guess = f"did you mean {close[0]}?" if close else "give a .yaml file, or a name of 'lm-eval ls tasks'"
            raise ConfigError(f"--tasks {task}: there is no such file or task; {guess}")
        with _task_errors(task):
            found = manager.load([str(files.get(task, task))])
        for part, members in opened.items():
            members.update(found.get(part, {}))
    for one in opened["tasks"].values():
        said = one.get_config("num_fewshot")
        # A task that says 0 is asked without examples, whatever is wanted.
        if said is None or (shots is not None and said != 0):
            one.set_config(key="num_fewshot", value=shots or 0)
        one.set_fewshot_seed(seed=_SEED)
    return opened


@contextlib.contextmanager
def _task_errors(tasks: str) -> Iterator[None]:
    """Gives an error of a task or of its data as one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise DataError(
            f"--tasks {tasks}: {type(error).__name__}: {first_line(error)}; docs/evaluation_tasks.md has tasks "
            "that need no network, and --debug shows the traceback"
        ) from error
