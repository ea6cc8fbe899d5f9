"""A model's forward pass as one portable program: StableHLO for CPU, GPU and TPU, its weights as an argument."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from jaxtrain.errors import ConfigError, UserError
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.runtime.tree import path_name

PLATFORMS = ("cpu", "cuda", "tpu")
BATCH = "batch"


@dataclass(frozen=True)
class Program:
    """A program and its weights.

    Attributes:
        exported: weights and inputs by name -> outputs by name.
        weights: name -> array, parameters as `params/...` and the rest as `model_state/...`.
        batch: rows of a call; None: any number.
        reason: why the number of rows is fixed although none was asked for; None: it is not.
    """

    exported: export.Exported
    weights: dict[str, jax.Array]
    batch: int | None
    reason: str | None


def make_program(
    sharded_model: ShardedModel,
    params: Params,
    model_state: ModelState,
    rows: Mapping[str, jax.ShapeDtypeStruct],
    *,
    batch: int | None,
) -> Program:
    """Export the forward pass in evaluation mode.

    Args:
        sharded_model: on a mesh of one CPU device, whose kernels every platform has.
        params, model_state: of this model.
        rows: name -> shape and dtype of one row of the inputs. The one name `inputs` stands for an array alone, and
            other names for the entries of a dict.
        batch: rows of a call; None: any number, or 1 where the model's program depends on it.

    Raises:
        ConfigError: the model cannot be exported: jax's own reason is in the message.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path({"params": params, "model_state": model_state})
    weights = {path_name(path): leaf for path, leaf in leaves}

    def forward(weights: Mapping[str, jax.Array], inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        tree = jax.tree.unflatten(structure, [weights[path_name(path)] for path, _ in leaves])
        given = inputs["inputs"] if list(inputs) == ["inputs"] else dict(inputs)
        with sharded_model.context():
            outputs, _ = sharded_model.apply(tree["params"], tree["model_state"], given, key=None, train=False)
        return _by_name(outputs)

    shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in weights.items()}

    def exported(size: Any) -> export.Exported:
        inputs = {name: jax.ShapeDtypeStruct((size, *row.shape), row.dtype) for name, row in rows.items()}
        return export.export(jax.jit(forward), platforms=PLATFORMS)(shapes, inputs)

    if batch is not None:
        return Program(_exported(exported, batch, sharded_model), weights, batch, None)
    try:
        return Program(exported(export.symbolic_shape(BATCH)[0]), weights, None, None)
    except Exception as error:  # shapes without a number raise whatever code that asks for one raises
        cause = error.__cause__ if isinstance(error, UserError) else error
        reason = (str(cause or error).splitlines() or [type(error).__name__])[0][:200]
    return Program(_exported(exported, 1, sharded_model), weights, 1, reason)


def _exported(exported: Any, size: int, sharded_model: ShardedModel) -> export.Exported:
    try:
        return exported(size)
    except UserError:
        raise
    except Exception as error:  # jax refuses what it does not keep stable in several types
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise ConfigError(
            f"the model {sharded_model.model.name} has no portable program: {reason}; export it without --to as a "
            "published folder"
        ) from error


def _by_name(outputs: Any) -> dict[str, jax.Array]:
    """The outputs by name, in float32 where they are floats: NumPy has no bfloat16 of its own."""
    if isinstance(outputs, Mapping) and "logits" in outputs:
        outputs = {"logits": outputs["logits"]}  # what else a model with experts gives is for its loss
    named = outputs if isinstance(outputs, Mapping) else {"outputs": outputs}
    found = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(named)}
    return {
        name: leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        for name, leaf in found.items()
    }
