"""Which evaluations of a run can be compared: those over the same number of its held-out rows.

The rows themselves stay the same, since a run goes on with its own data alone; `evaluation.max_batches` may change, and
then early stopping and `keep_best` begin anew. What is noted here is part of the metadata of every checkpoint.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.config.schema import Config
from jaxtrain.metrics.runinfo import EVALUATED_ROWS, compared_after
from jaxtrain.train.assemble import Run


def most_evaluated(config: Config) -> int | None:
    """How many held-out rows an evaluation takes at most; None: all. Batches are counted as the run makes them."""
    batches = config.evaluation.max_batches
    return None if batches is None else batches * config.train.global_batch_size


def _count(run: Run) -> int:
    num_rows, most = len(run.data.validation or ()), most_evaluated(run.config)
    return num_rows if most is None else min(num_rows, most)


def limit_note(count: int, num_rows: int, max_batches: int) -> str:
    """Which rows are evaluated where some are left out."""
    return (
        f"evaluation: {count:,} of {num_rows:,} held-out rows, spread over all of them "
        f"(evaluation.max_batches={max_batches}); evaluation.max_batches=null takes all"
    )


def compared_rows(run: Run, checkpointer: Checkpointer, start: int | None) -> tuple[dict[str, Any], str | None]:
    """What to note of the evaluations from here on, and a line for people where earlier ones are of other rows.

    Every process calls this.

    Args:
        run: that begins or goes on.
        checkpointer: of it.
        start: the step that it goes on from; None: it begins.

    Returns:
        What belongs into the metadata of its checkpoints, and the line.
    """
    rows, config = run.data.validation, run.config
    before = {} if start is None else checkpointer.metadata(start)
    former = before.get(EVALUATED_ROWS)
    if rows is None:
        return {} if former is None else {EVALUATED_ROWS: former}, None
    count = _count(run)
    if start is None or former is None:
        return {EVALUATED_ROWS: {"count": count, "after": 0}}, None
    if former["count"] == count:
        return {EVALUATED_ROWS: {"count": count, "after": compared_after(before)}}, None
    # Where the state after this step was not evaluated, it will be, over the rows of now.
    is_evaluated = bool(from_process_0(lambda: int(checkpointer.info(start).eval_loss is not None)))
    after = start if is_evaluated else start - 1
    comparing = ["early stopping"] if config.evaluation.early_stopping is not None else []
    comparing += ["checkpoint.keep_best"] if config.checkpoint.keep_best else []
    line = (
        f"evaluations are of {count} held-out rows from here on, and were of {former['count']} before: "
        f"{' and '.join(comparing)} {'begin' if len(comparing) > 1 else 'begins'} to compare anew"
    )
    return {EVALUATED_ROWS: {"count": count, "after": after}}, line if comparing else None


def gone_back(metadata: Mapping[str, Any], step: int) -> dict[str, Any]:
    """What to note once the run went back to a step: the evaluations after it are all of the rows of now."""
    noted = metadata.get(EVALUATED_ROWS)
    if noted is None:
        return {}
    return {EVALUATED_ROWS: {**noted, "after": min(compared_after(metadata), step)}}
