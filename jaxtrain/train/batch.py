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
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.layout.sharding import Layout, logical_spec, path_name
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.task import RENAME, Batch, CallingLoss, Task
from jaxtrain.parallel.division import check_rows, check_sequence
from jaxtrain.runtime.tree import check_bits, paths_of


class BatchSource(Protocol):
    """What `BatchFeed.loader` needs of `data.Batches`; `check` gets the rows as NumPy arrays before they are placed."""

    def spec(self) -> Mapping[str, Any]: ...

    def load(
        self,
        k: int,
        shardings: Mapping[str, Any],
        *,
        check: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> dict[str, Any]: ...


class BatchFeed:
    """How batches reach a model on its mesh: sharded, and with ids that the model has.

    Args:
        sharded_model: what takes the batches.
        task: what compares its outputs with them.
        microbatches: name of a setting -> number of microbatches, by which the rows of a shard must divide.
    """

    def __init__(self, sharded_model: ShardedModel, task: Task, microbatches: Mapping[str, int]):
        self.sharded_model = sharded_model
        self.task = task
        self.microbatches = microbatches
        self._known_limits: dict[str, int] | None = None
        self._placed_like: Any = None
        self._placed_shardings: list[NamedSharding] = []

    def _check(self, batch: Any) -> None:
        """Raise a `ConfigError` where something is not a batch that the task can take."""
        if not isinstance(batch, Mapping) or not batch:
            raise ConfigError(f"a batch is a dict of arrays such as {{'inputs': x, 'targets': y}}, not {shown(batch)}")
        if not self.task.calls_model and "inputs" not in batch:
            raise ConfigError(
                f"the batch has no entry 'inputs', which the model takes; it holds {', '.join(batch)}; {RENAME}"
            )

    def shardings(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """See `TrainStep.batch_shardings`."""
        self._check(batch)
        return batch_shardings(batch, self.sharded_model.layout, self.task.batch_axes, self.microbatches)

    def accept(self, batch: Batch) -> Batch:
        """Return a batch on the mesh: as it is, if a compiled step can take it, else placed."""
        return batch if self._is_placed(batch) else self.place(batch)

    def _is_placed(self, batch: Batch) -> bool:
        """Return whether all arrays of a batch are sharded as a compiled step takes them."""
        leaves, structure = jax.tree.flatten(batch)
        for leaf in leaves:
            if not isinstance(leaf, jax.Array) or not leaf.committed:
                return False
        like = (structure, [leaf.shape for leaf in leaves])
        if like != self._placed_like:
            self._placed_shardings = jax.tree.leaves(self.shardings(batch))
            self._placed_like = like
        for leaf, sharding in zip(leaves, self._placed_shardings, strict=True):
            if not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                return False
        return True

    def loader(self, batches: BatchSource) -> Callable[[int], dict[str, Any]]:
        """See `TrainStep.loader`."""
        spec = batches.spec()
        shardings = self.shardings(spec)
        limits = self._limits(spec)

        def load(k: int) -> dict[str, Any]:
            check = functools.partial(check_ids, limits=limits, where=f"batch {k}")
            return batches.load(k, shardings, check=check)

        return load

    def place(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """See `TrainStep.place`; host arrays may be refilled afterwards."""
        self._check(batch)

        def copied(leaf: Any) -> Any:
            # `device_put` may read a NumPy array later, or keep it as the array on the device (CPU).
            return leaf if isinstance(leaf, jax.Array) else np.array(leaf)

        batch = jax.tree.map(copied, dict(batch))
        shardings = self.shardings(batch)
        check_ids(batch, limits=self._limits(batch), where="the batch")
        return jax.device_put(batch, shardings)

    def num_classes(self, batch: Mapping[str, Any]) -> int | None:
        """Return the number of classes or tokens that the task chooses among; None: it chooses none, or is unknown.

        `batch` may be arrays or shapes.
        """
        return self._limits(batch).get("targets")

    def _limits(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Return entry of a batch -> number of ids that it may hold; it may take a trace of the model, so only once."""
        if self._known_limits is None:
            self._known_limits = _id_limits(self.sharded_model, self.task, batch)
        return self._known_limits


def batch_shardings(
    batch: Mapping[str, Any],
    layout: Layout,
    batch_axes: Mapping[str, tuple[str | None, ...]],
    microbatches: Mapping[str, int],
) -> dict[str, NamedSharding]:
    """Return the sharding of each entry: rows over the batch axes; scalars are replicated.

    Args:
        batch: arrays or shapes, global.
        layout: of the model.
        batch_axes: of the task.
        microbatches: name of a setting -> number of microbatches, by which the rows of a shard must divide.
    """
    mesh = layout.mesh

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        if leaf.ndim == 0:
            return NamedSharding(mesh, PartitionSpec())
        check_rows(leaf.shape[0], mesh.shape, microbatches, layout.rules["batch"])
        entry = path_name(path[:1])
        names = batch_axes.get(entry, ("batch",))[: leaf.ndim]
        if "sequence" in names:
            length = leaf.shape[names.index("sequence")]
            check_sequence(length, mesh.shape, layout.rules["residual_sequence"])
        return NamedSharding(mesh, logical_spec(names, layout))

    return jax.tree_util.tree_map_with_path(sharding, dict(batch))


def _id_limits(sharded_model: ShardedModel, task: Task, batch: Mapping[str, Any]) -> dict[str, int]:
    """Return entry of a batch -> number of ids that it may hold, as far as that is known.

    The model is traced where it does not say its number of outputs; `batch` may be arrays or shapes.
    """
    model = sharded_model.model
    limits: dict[str, int] = {}
    if task.calls_model:
        # What the model is given is known inside the loss alone, but a loss may say which entries hold ids.
        if model.vocab_size is not None and isinstance(task.loss, CallingLoss):
            limits = dict.fromkeys(task.loss.ids, model.vocab_size)
        return limits
    if model.vocab_size is not None:
        limits["inputs"] = model.vocab_size
    if task.num_classes is None:
        return limits
    if model.num_outputs is None:
        outputs = _output_shapes(sharded_model, batch["inputs"])
    else:
        outputs = jax.ShapeDtypeStruct((1, model.num_outputs), jnp.float32)
    limits["targets"] = task.num_classes(outputs)
    return limits


def _output_shapes(sharded_model: ShardedModel, inputs: Any) -> Any:
    """Return the outputs of a model in training as shapes; `inputs` may be arrays or shapes."""

    def apply(params: Params, model_state: ModelState, inputs: Any, key: jax.Array) -> Any:
        return sharded_model.apply(params, model_state, inputs, key=key, train=True)[0]

    return jax.eval_shape(
        apply,
        sharded_model.abstract_params,
        sharded_model.abstract_model_state,
        inputs,
        jax.eval_shape(lambda: jax.random.key(0)),
    )


def check_ids(batch: Mapping[str, Any], *, limits: Mapping[str, int], where: str) -> None:
    """Check the NumPy arrays of a batch; others are left alone.

    Args:
        batch: the batch.
        limits: entry -> number of ids it may hold; `targets` of -100, and those of weight 0, are ignored.
        where: the batch in the message.

    Raises:
        DataError: ids that the model does not have, or integers that jax would truncate to 32 bits.
    """
    for name, leaf in paths_of(dict(batch)).items():
        if not isinstance(leaf, np.ndarray):
            continue
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            check_bits(leaf, f"{where} holds {name}")
    for name, limit in limits.items():
        ids = batch.get(name)
        if isinstance(ids, Mapping):
            ids = ids.get("tokens")
        if not isinstance(ids, np.ndarray) or not np.issubdtype(ids.dtype, np.integer):
            continue
        is_wrong = (ids >= limit) | (ids < 0)
        if name == "targets":
            is_wrong &= _counts(ids, batch.get("weights"))
        if not is_wrong.any():
            continue
        wrong = ids[is_wrong]
        first = int(wrong[0])
        remedy = "fix the data, or give the model more outputs or a larger vocabulary"
        if name == "targets" and (wrong < 0).any():
            remedy = (
                "write -100 where there is no target, and number classes from 0, as "
                "np.unique(labels, return_inverse=True)[1] does"
            )
        raise DataError(f"{where} holds {name} of {first}, but the model has ids 0 to {limit - 1}; {remedy}")


def _counts(targets: np.ndarray, weights: Any) -> np.ndarray:
    """Return which targets a loss counts: bool, of the shape of the targets."""
    counts = targets != IGNORED
    if isinstance(weights, np.ndarray) and weights.shape == targets.shape[: weights.ndim]:
        other_dims = range(weights.ndim, targets.ndim)
        counts &= np.expand_dims(weights, tuple(other_dims)) != 0
    return counts
