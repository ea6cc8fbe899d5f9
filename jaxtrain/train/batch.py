"""How a batch reaches the mesh: its shardings, and the ids that its entries may hold."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.layout.sharding import Layout, logical_spec, path_name
from jaxtrain.models.model import Apply, Model
from jaxtrain.models.tasks import Task
from jaxtrain.parallel.division import check_rows, check_sequence
from jaxtrain.train.state import TrainState


class BatchSource(Protocol):
    """What `TrainStep.loader` needs of `data.Batches`; `check` gets the rows as NumPy arrays before they are placed."""

    def spec(self) -> Mapping[str, Any]: ...

    def load(
        self, k: int, shardings: Mapping[str, Any], *, check: Callable[[Mapping[str, Any]], None] | None = None
    ) -> dict[str, Any]: ...


def batch_shardings(
    batch: Mapping[str, Any],
    layout: Layout,
    batch_axes: Mapping[str, tuple[str | None, ...]],
    microbatches: Mapping[str, int],
) -> dict[str, Any]:
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


def is_placed(batch: Any, mesh: Mesh) -> bool:
    """Whether every entry of a batch is an array on all devices of the mesh."""
    return all(
        isinstance(leaf, jax.Array) and leaf.committed and len(leaf.sharding.device_set) == mesh.size
        for leaf in jax.tree.leaves(batch)
    )


def id_limits(model: Model, task: Task, apply: Apply, state: TrainState, batch: Mapping[str, Any]) -> dict[str, int]:
    """Entry of a batch -> number of ids that it may hold, where that is known.

    Args:
        model, task: of the step.
        apply: the model in the compute dtype; traced where the model does not say its number of outputs.
        state: shapes.
        batch: arrays or shapes.
    """
    limits = {} if model.vocab_size is None else {"inputs": model.vocab_size}
    if task.num_classes is None:
        return limits
    if model.num_outputs is not None:
        return {**limits, "targets": task.num_classes(jax.ShapeDtypeStruct((1, model.num_outputs), jnp.float32))}

    def outputs(params: Any, model_state: Any, inputs: Any, key: jax.Array) -> Any:
        return apply(params, model_state, inputs, key=key, train=True)[0]

    inputs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), batch["inputs"]
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    found = jax.eval_shape(outputs, state.params, state.model_state, inputs, key)
    return {**limits, "targets": task.num_classes(found)}
