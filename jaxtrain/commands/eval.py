"""`jaxtrain eval`: evaluates a checkpoint of a run on held-out rows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtrain.commands.output import print_json, print_table
from jaxtrain.commands.own_code import own_code
from jaxtrain.config import Config
from jaxtrain.config.data import CalledData
from jaxtrain.config.saved_run import read_run
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.writers import flat_scalars
from jaxtrain.run.open_run import OpenedRun, open_run, saved_config
from jaxtrain.runtime import distributed

if TYPE_CHECKING:
    from jaxtrain.run.evaluation import Evaluator
    from jaxtrain.run.held_out_rows import HeldOutRows
    from jaxtrain.train.state import EvaluationState

# Keys that eval may change; the others describe the parameters that were trained.
_MAY_CHANGE = ("data.", "evaluation.", "parallel.", "train.global_batch_size", "compilation_cache")


def run_eval(
    run_dir: str,
    overrides: Sequence[str],
    *,
    quantize: str | None,
    step: int | None,
    emulate: int | None,
    as_json: bool,
) -> int:
    """Print the metrics of a checkpoint on held-out rows.

    Args:
        run_dir: directory of the run.
        overrides: `key=value` settings of data, evaluation and parallel that replace those of the run's config.
        quantize: number format of the linear layers; None: the one in which they were trained.
        step: step of the checkpoint; None: the newest intact one.
        emulate: number of CPU devices to emulate; None: the devices of the machine.
        as_json: whether one JSON object is printed.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: an override changes a key that describes the trained parameters.
        DataError: the data has no held-out rows.
    """
    config = evaluated_config(run_dir, overrides)
    distributed.start(emulate=emulate, compilation_cache=config.compilation_cache)
    main = distributed.is_main_process()
    from jaxtrain.run.held_out_rows import evaluate_rows

    with own_code(config), Progress(process_index=0 if main else 1) as progress:
        with progress.phase("opening the run"):
            run = open_run(run_dir, overrides=overrides, step=step, quantize=quantize, report=progress.message)
            evaluator, held_out, state = _opened(run)
            for remark in held_out.remarks:
                progress.message(remark)
        with progress.phase("evaluating") as phase:
            metrics = flat_scalars(evaluate_rows(evaluator, state, held_out))
            data = run.config.data
            phase.note(f"{held_out.num_rows:,} rows of {data.call if isinstance(data, CalledData) else data.kind}")
    if not main:
        return 0
    answer = {"run_dir": run_dir, "step": run.step, "rows": held_out.num_rows, **metrics}
    if as_json:
        print_json(answer)
    else:
        shown = {name: f"{value:.6g}" for name, value in metrics.items()}
        print_table(("step", "rows", *shown), [(str(run.step), str(held_out.num_rows), *shown.values())])
    return 0


def evaluated_config(run_dir: str, overrides: Sequence[str]) -> Config:
    """The config of a run with the settings that an evaluation changes.

    Raises:
        ConfigError: an override changes a key that describes the trained parameters.
    """
    config = saved_config(run_dir, overrides=overrides).config
    # The base of adapters may have moved.
    may_change = (*_MAY_CHANGE, "model.from") if read_run(run_dir).get("base") else _MAY_CHANGE
    for override in overrides:
        if not override.removeprefix("--").startswith(may_change):
            allowed = ", ".join(f"{prefix}*" if prefix.endswith(".") else prefix for prefix in may_change)
            raise ConfigError(f"{override} cannot change for a trained run; eval takes {allowed}")
    return config


def _opened(run: OpenedRun) -> "tuple[Evaluator, HeldOutRows, EvaluationState]":
    """What an evaluation needs; mistakes in the config and the data are found before anything is restored."""
    evaluator, held_out = run.evaluator, run.held_out()
    evaluator.feed.shardings(held_out.batches.spec())
    return evaluator, held_out, run.state
