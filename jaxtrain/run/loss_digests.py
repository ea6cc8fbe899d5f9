"""Digests of the losses of a task from Python: runs whose tasks have one name may have other losses.

Of the task alone, so that runs with other optimizers or learning rates have the same ones.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.task import LogitsLoss, Task
from jaxtrain.models.task_sums import task_sums
from jaxtrain.models.tasks import is_shipped
from jaxtrain.run.own_program import program_digest
from jaxtrain.train.assemble import Run
from jaxtrain.train.step import TrainStep


def loss_digests(run: Run, metadata: Mapping[str, Any]) -> dict[str, str] | None:
    """What tells the losses of a task from others of its name; None where the config says it, or it is not known.

    Args:
        run: assembled.
        metadata: what a checkpoint of the run says of it: which parts came from Python.

    Returns:
        `train` and `evaluation`. They are alike only where shapes of outputs and batches are, too. Of a task that calls
        the model they would be of the model's equations as well, which take as long to trace as a step: not known. Nor
        are those of several processes, one of which computes this, and which may hold parts of what a loss reads.
    """
    task = run.step.task
    # A shipped task without options has the losses of its name.
    if metadata["from_python"]["task"] is None or (is_shipped(task) and not isinstance(task.loss, LogitsLoss)):
        return None
    if task.calls_model or jax.process_count() > 1:
        return None
    spec = {
        name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), value)
        for name, value in run.batches.spec().items()
    }
    try:
        found = {name: _traced_loss(run.step, spec, train=name == "train") for name in ("train", "evaluation")}
    except Exception:  # any of one's own code, which may fail without the mesh: the run trains all the same
        return None
    # What the host computes is in no equation.
    if any(call in str(traced) for traced in found.values() for call in ("pure_callback[", "io_callback[")):
        return None
    # Evaluation leaves padding out in another way where a task does not read the weights.
    return {name: program_digest(traced, [f"{task.reads_weights}"]) for name, traced in found.items()}


def _traced_loss(step: TrainStep, spec: Mapping[str, Any], *, train: bool) -> core.ClosedJaxpr:
    """The loss as equations of outputs and a batch, without the model and the mesh."""

    def apply(params: Params, model_state: ModelState, inputs: Any) -> Any:
        return step.sharded_model.apply(params, model_state, inputs, key=None, train=False)[0]

    model = step.sharded_model
    outputs = jax.eval_shape(apply, model.abstract_params, model.abstract_model_state, spec["inputs"])
    plain = jax.tree.map(_without_precision, outputs)
    task: Task = step.task
    return jax.make_jaxpr(lambda outputs, batch: task_sums(task, outputs, batch, train=train))(plain, dict(spec))


def _without_precision(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """In float32 where it is floating: runs of other number formats have the same loss."""
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype)
