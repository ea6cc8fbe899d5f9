"""How a batch reaches the mesh: its shardings, and the ids that its entries may hold."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config.arguments import shown
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import Layout, logical_spec, path_name
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.targets import RENAME
from jaxtrain.models.task import CallingLoss, Task
from jaxtrain.parallel.division import check_rows, check_sequence
from jaxtrain.train.checks import check_ids


class BatchSource(Protocol):
    """What `BatchFeed.loader` needs of `data.Batches`; `check` gets the rows as NumPy arrays before they are placed."""

    def spec(self) -> Mapping[str, Any]: ...

    def load(
        self, k: int, shardings: Mapping[str, Any], *, check: Callable[[Mapping[str, Any]], None] | None = None
    ) -> dict[str, Any]: ...


class BatchFeed:
    """How batches reach a model on its mesh: sharded, and with ids that the model has.

    Args:
        sharded_model: that takes them.
        task: that reads them.
        microbatches: their number, by which the rows divide, under the name that people know it by.
    """

    def __init__(self, sharded_model: ShardedModel, task: Task, microbatches: Mapping[str, int]):
        self.sharded_model, self.task, self.microbatches = sharded_model, task, microbatches
        self._known_limits: dict[str, int] | None = None
        self._known_shardings: tuple[Any, list[NamedSharding]] | None = None

    def check(self, batch: Any) -> None:
        """Raise where something is no batch that the task can take.

        Raises:
            ConfigError: what it is or holds.
        """
        if not isinstance(batch, Mapping) or not batch:
            raise ConfigError(f"a batch is a dict of arrays such as {{'inputs': x, 'targets': y}}, not {shown(batch)}")
        if not self.task.calls_model and "inputs" not in batch:
            raise ConfigError(
                f"the batch has no entry 'inputs', which the model takes; it holds {', '.join(batch)}; {RENAME}"
            )

    def shardings(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """How a batch (arrays or shapes, global) is sharded: rows over the batch axes; scalars are replicated.

        Raises:
            ConfigError: no entry `inputs`, or a batch that does not divide by the devices or by the microbatches.
        """
        self.check(batch)
        return batch_shardings(batch, self.sharded_model.layout, self.task.batch_axes, self.microbatches)

    def is_placed(self, batch: Mapping[str, Any]) -> bool:
        """Whether every entry of a batch is an array on the mesh, sharded as a compiled step takes it.

        Raises:
            ConfigError: as `shardings`, of a batch of arrays on devices.
        """
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
        """k -> batch k on the mesh, for `prefetch`; each process reads only the rows of its own devices.

        Loading raises a `DataError` where a row holds an id that the model does not have.

        Raises:
            ConfigError: batches that do not divide by the devices or the microbatches.
        """
        spec = batches.spec()
        shardings, limits = self.shardings(spec), self._limits(spec)

        def load(k: int) -> dict[str, Any]:
            return batches.load(k, shardings, check=functools.partial(check_ids, limits=limits, where=f"batch {k}"))

        return load

    def place(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch of host arrays, numbers or arrays elsewhere, on the mesh; host arrays may be refilled afterwards.

        Raises:
            ConfigError: no dict with `inputs`, or sizes that do not divide.
            DataError: a host array with an id that the model does not have.
        """
        self.check(batch)
        # Copied: `device_put` may read a NumPy array later, or keep it as the array on the device (CPU).
        batch = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.array(leaf), dict(batch))
        shardings = self.shardings(batch)
        check_ids(batch, limits=self._limits(batch), where="the batch")
        return jax.device_put(batch, shardings)

    def num_classes(self, batch: Mapping[str, Any]) -> int | None:
        """The number of classes or tokens that the task chooses among; None for another task, or where it is unknown.

        Args:
            batch: arrays or shapes.
        """
        return self._limits(batch).get("targets")

    def _limits(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Entry of a batch -> number of ids that it may hold, found once: it may take a trace of the model."""
        if self._known_limits is None:
            self._known_limits = id_limits(self.sharded_model, self.task, batch)
        return self._known_limits


def batch_shardings(
    batch: Mapping[str, Any],
    layout: Layout,
    batch_axes: Mapping[str, tuple[str | None, ...]],
    microbatches: Mapping[str, int],
) -> dict[str, NamedSharding]:
    """Rows sharded over the batch axes; scalars are replicated.

    Args:
        batch: arrays or shapes, global.
        layout: of the step.
        batch_axes: see `Task.batch_axes`.
        microbatches: their number under the name that people know it by.

    Raises:
        ConfigError: sizes that do not divide by the devices or by the microbatches.
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


def id_limits(sharded_model: ShardedModel, task: Task, batch: Mapping[str, Any]) -> dict[str, int]:
    """Entry of a batch -> number of ids that it may hold, where that is known.

    Args:
        sharded_model: traced where the model does not say its number of outputs.
        task: may know the number of classes.
        batch: arrays or shapes.
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
