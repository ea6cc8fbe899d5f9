"""How a batch reaches the mesh: its shardings, and the ids that its entries may hold."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config.arguments import shown
from jaxtrain.config.schema import IGNORED
from jaxtrain.data.batches import check_bits
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.layout.sharding import Layout, logical_spec, path_name
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.task import RENAME, CallingLoss, Task
from jaxtrain.parallel.division import check_rows, check_sequence


class BatchSource(Protocol):
    """What `BatchFeed.loader` needs of `data.Batches`; `check` gets the rows as NumPy arrays before they are placed."""

    def spec(self) -> Mapping[str, Any]: ...

    def load(
        self, k: int, shardings: Mapping[str, Any], *, check: Callable[[Mapping[str, Any]], None] | None = None
    ) -> dict[str, Any]: ...


class BatchFeed:
    """How batches reach a model on its mesh: sharded, and with ids that the model has."""

    def __init__(self, sharded_model: ShardedModel, task: Task, microbatches: Mapping[str, int]):
        self.sharded_model, self.task, self.microbatches = sharded_model, task, microbatches
        self._known_limits: dict[str, int] | None = None
        self._known_shardings: tuple[Any, list[NamedSharding]] | None = None

    def check(self, batch: Any) -> None:
        """Raise a `ConfigError` where something is no batch that the task can take."""
        if not isinstance(batch, Mapping) or not batch:
            raise ConfigError(f"a batch is a dict of arrays such as {{'inputs': x, 'targets': y}}, not {shown(batch)}")
        if not self.task.calls_model and "inputs" not in batch:
            raise ConfigError(
                f"the batch has no entry 'inputs', which the model takes; it holds {', '.join(batch)}; {RENAME}"
            )

    def shardings(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """See `TrainStep.batch_shardings`."""
        self.check(batch)
        return batch_shardings(batch, self.sharded_model.layout, self.task.batch_axes, self.microbatches)

    def is_placed(self, batch: Mapping[str, Any]) -> bool:
        """Whether every entry of a batch is an array on the mesh, sharded as a compiled step takes it."""
        leaves, structure = jax.tree.flatten(dict(batch))
        if not all(isinstance(leaf, jax.Array) and leaf.committed for leaf in leaves):
            return False
        shapes = (structure, [leaf.shape for leaf in leaves])
        if self._known_shardings is None or self._known_shardings[0] != shapes:
            self._known_shardings = (shapes, jax.tree.leaves(self.shardings(batch)))
        wanted = self._known_shardings[1]
        return all(
            leaf.sharding.is_equivalent_to(sharding, leaf.ndim) for leaf, sharding in zip(leaves, wanted, strict=True)
        )

    def loader(self, batches: BatchSource) -> Callable[[int], dict[str, Any]]:
        """See `TrainStep.loader`."""
        spec = batches.spec()
        shardings, limits = self.shardings(spec), self._limits(spec)

        def load(k: int) -> dict[str, Any]:
            return batches.load(k, shardings, check=functools.partial(check_ids, limits=limits, where=f"batch {k}"))

        return load

    def place(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """See `TrainStep.place`; host arrays may be refilled afterwards."""
        self.check(batch)
        # Copied: `device_put` may read a NumPy array later, or keep it as the array on the device (CPU).
        batch = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.array(leaf), dict(batch))
        shardings = self.shardings(batch)
        check_ids(batch, limits=self._limits(batch), where="the batch")
        return jax.device_put(batch, shardings)

    def num_classes(self, batch: Mapping[str, Any]) -> int | None:
        """The number of classes or tokens that the task chooses among; None for another task, or where it is unknown.

        `batch` may be arrays or shapes.
        """
        return self._limits(batch).get("targets")

    def _limits(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Entry of a batch -> number of ids that it may hold, found once: it may take a trace of the model."""
        if self._known_limits is None:
            self._known_limits = _id_limits(self.sharded_model, self.task, batch)
        return self._known_limits


def batch_shardings(
    batch: Mapping[str, Any],
    layout: Layout,
    batch_axes: Mapping[str, tuple[str | None, ...]],
    microbatches: Mapping[str, int],
) -> dict[str, NamedSharding]:
    """Rows sharded over the batch axes; scalars are replicated.

    `batch` are arrays or shapes, global; `batch_axes` those of the task; `microbatches` their number, by which the rows
    divide, under the name that people know it by.
    """
    mesh = layout.mesh

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        if leaf.ndim == 0:
            return NamedSharding(mesh, PartitionSpec())
        check_rows(leaf.shape[0], mesh.shape, microbatches, layout.rules["batch"])
        names = batch_axes.get(path_name(path[:1]), ("batch",))
        names = (*names, *[None] * leaf.ndim)[: leaf.ndim]
        if "sequence" in names:
            check_sequence(leaf.shape[names.index("sequence")], mesh.shape, layout.rules["residual_sequence"])
        return NamedSharding(mesh, logical_spec(names, layout))

    return jax.tree_util.tree_map_with_path(sharding, dict(batch))


def _id_limits(sharded_model: ShardedModel, task: Task, batch: Mapping[str, Any]) -> dict[str, int]:
    """Entry of a batch -> number of ids that it may hold, where that is known.

    The model is traced where it does not say its number of outputs; `batch` may be arrays or shapes.
    """
    model = sharded_model.model
    if task.calls_model:
        # What the model is given is known inside the loss alone, but a loss may say which entries hold ids.
        ids = task.loss.ids if isinstance(task.loss, CallingLoss) else ()
        return {} if model.vocab_size is None else dict.fromkeys(ids, model.vocab_size)
    limits = {} if model.vocab_size is None else {"inputs": model.vocab_size}
    if task.num_classes is None:
        return limits
    if model.num_outputs is not None:
        return {**limits, "targets": task.num_classes(jax.ShapeDtypeStruct((1, model.num_outputs), jnp.float32))}

    def outputs(params: Params, model_state: ModelState, inputs: Any, key: jax.Array) -> Any:
        return sharded_model.apply(params, model_state, inputs, key=key, train=True)[0]

    inputs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), batch["inputs"]
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    found = jax.eval_shape(outputs, sharded_model.abstract_params, sharded_model.abstract_model_state, inputs, key)
    return {**limits, "targets": task.num_classes(found)}


def check_ids(batch: Mapping[str, Any], *, limits: Mapping[str, int], where: str) -> None:
    """Raise a `DataError` at ids that the model does not have, or integers that jax would truncate to 32 bits.

    Of NumPy arrays alone. `limits`: entry -> number of ids it may hold; `targets` of -100, and those of weight 0, are
    ignored. `where` is the batch in the message.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(dict(batch)):
        if isinstance(leaf, np.ndarray) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            check_bits(leaf, f"{where} holds {path_name(path)}")
    for name, limit in limits.items():
        ids = batch.get(name)
        ids = ids.get("tokens") if isinstance(ids, Mapping) else ids
        if not isinstance(ids, np.ndarray) or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
            continue
        wrong = (ids >= limit) | (ids < 0)
        remedy = "fix the data, or give the model more outputs or a larger vocabulary"
        if name == "targets":
            wrong &= ids != IGNORED
            weights = batch.get("weights")
            if isinstance(weights, np.ndarray) and weights.shape == ids.shape[: weights.ndim]:
                wrong &= weights.reshape(*weights.shape, *[1] * (ids.ndim - weights.ndim)) != 0
            if (ids[wrong] < 0).any():
                remedy = (
                    "write -100 where there is no target, and number classes from 0, as "
                    "np.unique(labels, return_inverse=True)[1] does"
                )
        if wrong.any():
            raise DataError(
                f"{where} holds {name} of {int(ids[wrong][0])}, but the model has ids 0 to {limit - 1}; {remedy}"
            )
