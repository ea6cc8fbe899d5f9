"""The held-out rows of a run that is opened again: that they fit its model, and their metrics."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxtrain.config import Config
from jaxtrain.config.data import CalledData
from jaxtrain.data import Batches, Data, prefetch
from jaxtrain.data.evaluated import evaluated_rows
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.models.model import parameter_shapes
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.task import Task
from jaxtrain.parallel.division import batch_shards, step_microbatches
from jaxtrain.run.compared import limit_note
from jaxtrain.run.evaluation import Evaluator
from jaxtrain.train.assemble import check_fit, model_of, reading_threads
from jaxtrain.train.state import EvaluationState

if TYPE_CHECKING:
    import grain


@dataclass(frozen=True)
class HeldOutRows:
    """Rows to evaluate, and how many of them.

    Attributes:
        batches: of the rows, in their order.
        num_batches: how many are evaluated.
        num_rows: how many rows these hold.
        remarks: lines for people.
    """

    batches: Batches
    num_batches: int
    num_rows: int
    remarks: tuple[str, ...]


def held_out_rows(
    config: Config,
    rows: "Data | grain.MapDataset",
    sharded_model: ShardedModel,
    *,
    task: Task,
    max_batches: int | None,
) -> HeldOutRows:
    """The rows to evaluate, in batches that divide by the mesh.

    Args:
        config: of the run.
        rows: data, whose held-out rows are taken, or rows.
        sharded_model: that they are for.
        task: that is evaluated.
        max_batches: largest number of batches of the configured size; None: all.

    Raises:
        DataError: there are no held-out rows.
        ConfigError: the batch does not divide by the mesh, and the loss is not one of separate rows.
    """
    if isinstance(rows, Data):
        if rows.validation is None:
            raise DataError(
                f"the data of the run has no held-out rows; let the function of data.call={config.data.call} return "
                "{'train': {...}, 'validation': {...}}"
                if isinstance(config.data, CalledData)
                else "the data of the run has no held-out rows (data.validation_fraction=0); "
                "give other data, such as data.path=FILE data.validation_fraction=1"
            )
        rows = rows.validation
    size, remarks = _dividing_batch(config, sharded_model, task)
    # Counted in batches of the run: those that divide by this mesh may be larger.
    if max_batches is not None and (most := max_batches * config.train.global_batch_size) < len(rows):
        remarks = (limit_note(most, len(rows), max_batches), *remarks)
        rows = evaluated_rows(rows, most)
    batches = Batches(rows, size, seed=config.seed, shuffle=False, workers=reading_threads(config))
    return HeldOutRows(batches, len(batches), len(rows), remarks)


def evaluate_rows(evaluator: Evaluator, state: EvaluationState, held_out: HeldOutRows) -> dict[str, Any]:
    """The metrics of rows; of a task with separate rows they are exact whatever the batch is."""
    loaded = prefetch(evaluator.feed.loader(held_out.batches), 0, held_out.num_batches, depth=1)
    try:
        return evaluator(state, loaded)
    finally:
        loaded.close()


def check_data_fits(config: Config, data: Data, sharded_model: ShardedModel, *, own_task: bool) -> None:
    """Raise where the model of a config would be another one with this data, or where kinds contradict one another.

    Args:
        config: of the run.
        data: as it was opened.
        sharded_model: as it was trained, built from the config.
        own_task: whether the task came from Python.

    Raises:
        ConfigError: names the settings that contradict one another, or the sizes that differ.
    """
    rows: Any = data.train if data.validation is None else data.validation
    targets = rows[0].get("targets")
    if isinstance(targets, np.ndarray | np.generic):
        shape = jax.ShapeDtypeStruct(targets.shape, targets.dtype)
        check_fit(config, data, shape, own_task=own_task)
    sizes = {"input_shape": data.input_shape, "vocab_size": data.vocab_size, "num_outputs": data.num_outputs}
    found = parameter_shapes(model_of(config, **sizes))
    adapted = sharded_model.model.adapted
    trained = parameter_shapes(sharded_model.model if adapted is None else adapted.original)
    differ = [path for path in trained if path not in found or found[path].shape != trained[path].shape]
    if differ:
        shapes = [one[differ[0]].shape if differ[0] in one else None for one in (trained, found)]
        raise ConfigError(
            f"the data does not fit the run: its rows {list(data.input_shape)} with "
            f"{data.num_outputs or data.vocab_size} outputs make {differ[0]} {shapes[1]}, which was trained as "
            f"{shapes[0]}; give data of the same sizes"
        )


def _dividing_batch(config: Config, sharded_model: ShardedModel, task: Task) -> tuple[int, tuple[str, ...]]:
    """The smallest batch, from the configured one up, that divides by this machine's shards, and a remark on it.

    Means over separate rows are exact whatever the batch is, so an evaluation need not fail over it.

    Raises:
        ConfigError: another batch would be another loss, as the task compares its rows.
    """
    degrees = sharded_model.mesh.shape
    shards = batch_shards(degrees) * step_microbatches(config.parallel, degrees["pipe"], 1)
    asked = config.train.global_batch_size
    size = -(-asked // shards) * shards
    if size == asked:
        return size, ()
    if task.rows != "separate":
        fewer = max(number for number in range(1, shards + 1) if asked % number == 0)
        raise ConfigError(
            f"the loss of task {task.name!r} (rows={task.rows!r}) depends on the rows of a batch, and "
            f"train.global_batch_size={asked} does not divide by the {shards} shards of this mesh; use {fewer} "
            f"(open_run with mesh=jt.make_mesh(data={fewer}, devices=jax.devices()[:{fewer}]), or let only {fewer} "
            f"devices be visible), or train.global_batch_size={size}, whose loss is another"
        )
    return size, (f"batches of {size} rows instead of {asked}, to divide by {shards} parts",)
