"""A Flax Linen module as a `Model`."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen

from jaxtrain.models.model import Model, ModelState, Params


def from_linen(
    module: linen.Module,
    example_inputs: Any,
    *,
    axes: Mapping[str, tuple[str | None, ...]] | None = None,
    name: str | None = None,
) -> Model:
    """A model from a Linen module.

    Args:
        module: its `__call__` takes inputs and, if it has one, a keyword `train`.
        example_inputs: inputs (arrays or `ShapeDtypeStruct`s) of the right shape, for `init`.
        axes: parameter path -> logical axes; None: the default sharding for every parameter.
        name: for people; None: the class name.

    Returns:
        The record; collection "params" is its params, every other collection its model_state.
    """
    takes_train = "train" in inspect.signature(type(module).__call__).parameters

    def arguments_for(train: bool) -> dict[str, Any]:
        return {"train": train} if takes_train else {}

    def init(key: jax.Array) -> tuple[Params, ModelState]:
        inputs = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), example_inputs)
        keys = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        # Boxes with partitioning names are taken off: the axes table says how parameters lie.
        variables = linen.meta.unbox(dict(module.init(keys, inputs, **arguments_for(False))))
        return variables.pop("params", {}), variables

    def apply(
        params: Params, model_state: ModelState, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, ModelState]:
        arguments = arguments_for(train)
        rngs = {"dropout": key} if key is not None else None
        variables = {"params": params, **model_state}
        if not train:
            return module.apply(variables, inputs, rngs=rngs, **arguments), model_state
        outputs, changed = module.apply(variables, inputs, rngs=rngs, mutable=list(model_state), **arguments)
        return outputs, {**model_state, **changed}

    return Model(name or type(module).__name__, init, apply, axes or {})
