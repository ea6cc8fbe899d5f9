"""Tasks of lm-eval-harness, asked of a run or of a published model."""

import contextlib
import difflib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.config.files import is_run, read_run
from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.formats import ChatFormat, files_beside
from jaxtrain.errors import ConfigError, DataError, UserError
from jaxtrain.inference.harness.log_likelihood import scoring_decoder
from jaxtrain.inference.harness.results import result_rows
from jaxtrain.inference.harness.tokens import task_tokens
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.published.config_file import tokenizer_origin
from jaxtrain.published.peft import is_adapter_folder, open_adapter_folder
from jaxtrain.run.exported_texts import texts_beside
from jaxtrain.run.open_run import open_run
from jaxtrain.run.served import open_served
from jaxtrain.run.tokenizer import format_of_run, special_of_run

# Draws for standard errors that have no formula. The harness draws 100,000 times in processes that it forks, which a
# process with the threads of jax must not do.
_BOOTSTRAP = 1000
# The seed by which the harness chooses examples.
_SEED = 1234


@dataclass(frozen=True)
class TaskScores:
    """What a model reached.

    Attributes:
        step: of the checkpoint of a run; None: a published model.
        rows: one for each metric of each task, as `result_rows` makes them.
    """

    step: int | None
    rows: list[dict[str, Any]]


def evaluate_tasks(
    path: str | Path,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    shots: int | None = None,
    chat: bool = False,
    batch_size: int | None = None,
    overrides: Sequence[str] = (),
    step: int | None = None,
    quantize: str | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> TaskScores:
    """Evaluates a model on tasks of lm-eval-harness.

    Args:
        path: directory of a run, published folder, GGUF file, or folder of an adapter that names a base which is here.
        tasks: paths of task files (`.yaml`), or names of tasks, groups and tags of the harness.
        limit: documents of each task, at most; None: all.
        shots: examples before each question; None: as the task says.
        chat: whether questions are written by the chat template of the model.
        batch_size: rows of a batch, at most; None: chosen from their lengths.
        overrides: settings as on the command line ("parallel.tensor=8").
        step: of a run: which checkpoint; None: the newest intact one.
        quantize: number format of linear layers; None: as they are.
        report: receives lines on what is being computed.

    Raises:
        ConfigError: lm-eval is not installed, there is no such model or task, or the model cannot be asked.
        DataError: the data of a task cannot be had, or the task fails.
        CheckpointError: the files of the model are missing or damaged.

    Example:
        >>> evaluate_tasks("runs/first", ["colours.yaml"], limit=100).rows[0]["metric"]
        'acc'
    """
    check_installed()
    with _beside_jax():
        # Mistakes in tasks are found before parameters are read.
        opened = _opened(tasks, shots=shots)
        given, tokenizer, form, reached = _given(Path(path), overrides, step=step, quantize=quantize, report=report)
        scoring_decoder(given[0])
        if not chat:
            form = None
        elif form is None:
            raise ConfigError(f"{path} has no chat template; leave --chat out to ask in plain text")
        adds = not is_run(Path(path)) or special_of_run(read_run(path), Path(path), tokenizer).added
        tokens = task_tokens(tokenizer, _published_files(Path(path)), form, add_special_tokens=adds)

        from lm_eval.evaluator import evaluate  # pyright: ignore[reportMissingImports]

        from jaxtrain.inference.harness.model import HarnessModel

        model = HarnessModel(*given, tokens, form=form, rows=batch_size, report=report)
        with _task_errors(", ".join(tasks)):
            found = evaluate(
                lm=model,
                task_dict=opened,
                limit=limit,
                bootstrap_iters=_BOOTSTRAP,
                log_samples=False,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
            )
    assert found is not None  # only on further ranks of the harness, which there are none of
    return TaskScores(reached, result_rows(found))


def _given(
    path: Path,
    overrides: Sequence[str],
    *,
    step: int | None,
    quantize: str | None,
    report: Callable[[str], None],
) -> tuple[tuple[ShardedModel, Params, ModelState], Tokenizer | None, ChatFormat | None, int | None]:
    """Model, parameters and state, tokenizer, chat template and step of what stands at a path."""
    if is_run(path):
        run = open_run(path, step=step, overrides=overrides, quantize=quantize, report=report)
        # The model is checked before a checkpoint is read.
        scoring_decoder(run.sharded_model)
        return (run.sharded_model, run.params, run.model_state), run.tokenizer, format_of_run(run), run.step
    served = open_served(path, step=step, overrides=overrides, quantize=quantize)
    return (served.sharded_model, served.params, served.model_state), served.tokenizer, served.chat, None


def _published_files(path: Path) -> dict[str, str]:
    """The files of a published model that name its special tokens; empty for a model that was made by training."""
    if is_run(path):
        found = files_beside(path / "tokenizer.json")
    else:
        adapter = path if is_adapter_folder(path) else None
        base = str(path) if adapter is None else open_adapter_folder(adapter).config.base
        file = None if base is None else tokenizer_origin(Path(base).expanduser())
        found = {} if file is None else texts_beside(file, adapter)
    return found


def check_installed() -> None:
    """Raises where lm-eval is not installed.

    Raises:
        ConfigError: names the extra.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("--tasks needs the package lm-eval: pip install 'jaxtrain[harness]'")


def _opened(tasks: Sequence[str], *, shots: int | None) -> dict[str, Any]:
    """The tasks and groups with their data, as `TaskManager.load` gives them.

    Raises:
        ConfigError: there is no such file or name.
        DataError: the data of a task cannot be had.
    """
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    files = {task: Path(task).expanduser() for task in tasks if Path(task).suffix in (".yaml", ".yml")}
    for task, path in files.items():
        if not path.is_file():
            raise ConfigError(f"--tasks {task}: there is no such file; give a task file, or the name of a task")
    # Ten thousand files are read to know the names.
    manager = TaskManager(include_defaults=len(files) < len(tasks))
    opened: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for task in tasks:
        if task not in files and task not in manager.task_index:
            close = difflib.get_close_matches(task, manager.all_tasks, 1)
            guess = f"did you mean {close[0]}?" if close else "'lm-eval ls tasks' lists them"
            raise ConfigError(f"--tasks {task}: the harness has no such task, and it is no .yaml file; {guess}")
        with _task_errors(task):
            found = manager.load([str(files[task].resolve()) if task in files else task])
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
    """Gives an error of a task or of its data as one line.

    Raises:
        ConfigError: there are not as many examples as are wanted before a question.
        DataError: in place of another error that does not come from our own code.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if _is_ours(error):
            raise
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "it gives no reason")
        # Of `random.sample`, by which the harness draws them; the asked row is not among them.
        if said.startswith("Sample larger than population"):
            raise ConfigError(
                f"--tasks {tasks}: --shots (or num_fewshot in the task) asks for more examples than the task has rows "
                "to take them from; ask for fewer, or name a fewshot_split with more rows in the task"
            ) from error
        hub = _hub_error(error)
        raise DataError(
            f"--tasks {tasks}: {hub}{type(error).__name__}: {said[:300]}"
            + ("; give a task file whose data is on this machine (docs/evaluation_tasks.md)" if hub else "")
            + "; --debug shows the traceback"
        ) from error


def _hub_error(error: BaseException) -> str:
    """What to say first where data could not be fetched; empty for another error."""
    names = {type(one).__name__ for one in _chain(error)}
    offline = {"ConnectionError", "OfflineModeIsEnabled", "ConnectError", "LocalEntryNotFoundError", "ProxyError"}
    return "its data could not be fetched from the Hugging Face hub: " if names & offline else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _is_ours(error: BaseException) -> bool:
    """Whether an error was raised below our own code, which the harness called."""
    trace = error.__traceback__
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        if name.startswith("jaxtrain.") and name != __name__:
            return True
        trace = trace.tb_next
    return False


@contextlib.contextmanager
def _beside_jax() -> Iterator[None]:
    """Keeps the harness from printing among results, from remarks on defaults and retries, and from forking."""
    name, loggers = "DISABLE_MULTIPROC", [logging.getLogger(one) for one in ("lm_eval", "huggingface_hub")]
    before, levels = os.environ.get(name), [logger.level for logger in loggers]
    os.environ[name] = "1"
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
