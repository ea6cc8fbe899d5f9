"""`jaxtrain eval`: evaluates a checkpoint of a run on held-out rows."""

from collections.abc import Sequence
from typing import Any

from jaxtrain.commands.output import print_json, print_table
from jaxtrain.commands.own_code import own_code
from jaxtrain.config.data import CalledData
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.writers import flat_scalars
from jaxtrain.run.open_run import OpenedRun, open_run, saved_config
from jaxtrain.runtime import distributed

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
    config = saved_config(run_dir, overrides=overrides).config
    for override in overrides:
        if not override.removeprefix("--").startswith(_MAY_CHANGE):
            allowed = ", ".join(f"{prefix}*" if prefix.endswith(".") else prefix for prefix in _MAY_CHANGE)
            raise ConfigError(f"{override} cannot change for a trained run; eval takes {allowed}")
    distributed.start(emulate=emulate, compilation_cache=config.compilation_cache)
    main = distributed.is_main_process()
    with own_code(config), Progress(process_index=0 if main else 1) as progress:
        with progress.phase("opening the run"):
            run = open_run(run_dir, overrides=overrides, step=step, quantize=quantize, report=progress.message)
        for remark in run.remarks:
            progress.message(remark)
        with progress.phase("evaluating") as phase:
            metrics, num_rows = _evaluate(run)
            data = run.config.data
            phase.note(f"{num_rows:,} rows of {data.call if isinstance(data, CalledData) else data.kind}")
    if not main:
        return 0
    answer = {"run_dir": run_dir, "step": run.checkpoint_step, "rows": num_rows, **metrics}
    if as_json:
        print_json(answer)
    else:
        shown = {name: f"{value:.6g}" for name, value in metrics.items()}
        print_table(("step", "rows", *shown), [(str(run.checkpoint_step), str(num_rows), *shown.values())])
    return 0


def _evaluate(run: OpenedRun) -> tuple[dict[str, Any], int]:
    from jaxtrain.data import Batches, prefetch
    from jaxtrain.train.assemble import reading_threads

    assert run.data is not None
    assert run.evaluator is not None
    data = run.config.data
    if run.data.validation is None:
        raise DataError(
            f"the data of the run has no held-out rows; let the function of data.call={data.call} return "
            "{'train': {...}, 'validation': {...}}"
            if isinstance(data, CalledData)
            else "the data of the run has no held-out rows (data.validation_fraction=0); "
            "give other data, such as data.path=FILE data.validation_fraction=0.5"
        )
    config = run.config
    size = config.train.global_batch_size
    batches = Batches(run.data.validation, size, seed=config.seed, shuffle=False, workers=reading_threads(config))
    count = min(len(batches), config.evaluation.max_batches or len(batches))
    loaded = prefetch(run.evaluator.feed.loader(batches), 0, count, depth=1)
    try:
        metrics = flat_scalars(run.evaluator(run.state, (batch for batch, _ in loaded)))
    finally:
        loaded.close()
    return metrics, min(count * size, len(run.data.validation))
