"""A Flax Linen module as a `Model`."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.errors
import jax
from flax import linen, nnx
from flax.linen.module import InterceptorContext
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from jaxtrain.config.arguments import refusal
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import check_axes
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.model import Model, ModelState, Params

# Arguments that switch a module to training -> their value in training; evaluation uses the opposite.
_TRAINING_ARGUMENTS = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}


def _changes_in_training(module: linen.Module) -> bool:
    """Return whether a layer computes something else in training than in evaluation."""
    if isinstance(module, linen.MultiHeadDotProductAttention):
        return module.dropout_rate > 0
    return isinstance(module, linen.BatchNorm) or (isinstance(module, linen.Dropout) and module.rate > 0)


def _shape(value: Any) -> object:
    """Describe a variable's value by its structure, shapes and dtypes; a sown value is a tuple."""
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), value), jax.tree.structure(value)


def from_linen(
    module: linen.Module,
    example_inputs: Any,
    *,
    axes: Mapping[str, tuple[str | None, ...]] | None = None,
    name: str | None = None,
) -> Model:
    """Make a model from a Linen module.

    Args:
        module: its `__call__` takes the inputs, and training is switched on by the keywords `train`, `training`,
            `is_training`, `deterministic` or `use_running_average`; every one that `__call__` takes is given. Where
            `__call__` takes none of them, the module's fields of these names are set. A module without dropout and
            batch norm needs none.
        example_inputs: inputs (arrays or `ShapeDtypeStruct`s) of the right shape, for `init`.
        axes: parameter path -> logical axes. None: the partitioning metadata of the parameters
            (`with_logical_partitioning`, `with_partitioning`), and the default sharding for parameters that have none.
        name: the name that messages show; None: the name of the class.

    Returns:
        The model. Its params are the collection "params"; its model_state holds all other collections, except values
        that each call adds to (`self.sow`), which are dropped.

    Raises:
        ConfigError: `module` is not a Linen module; or it holds dropout or batch norm, and no argument or field
            switches it between training and evaluation.

    Example:
        >>> model = jt.from_linen(linen.Dense(3), np.zeros((1, 4), np.float32), axes={"kernel": ("embed", "mlp")})
    """
    if not isinstance(module, linen.Module):
        if isinstance(module, nnx.Module):
            kind = type(module).__name__
            write = f"from_nnx(lambda rngs: {kind}(..., rngs=rngs)) for a module of flax.nnx"
            raise ConfigError(refusal("from_linen", "a module of flax.linen", module, write))
        given = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        made = f"{module.__name__}()" if isinstance(module, type) else "Module()"
        raise ConfigError(
            f"from_linen takes a module of flax.linen, not {given}; write from_linen({made}, example_inputs)"
        )
    if axes is not None:
        check_axes(axes, what="from_linen: axes")
    for leaf in jax.tree.leaves(example_inputs):
        if getattr(leaf, "shape", None) is None or getattr(leaf, "dtype", None) is None:
            takes, write = "inputs with shape and dtype", "np.zeros((1, 28, 28, 1), np.float32)"
            raise ConfigError(refusal("from_linen: example_inputs", takes, leaf, write))
    taken = inspect.signature(type(module).__call__).parameters
    arguments = {name: value for name, value in _TRAINING_ARGUMENTS.items() if name in taken}
    own_fields = {field.name for field in dataclasses.fields(module)}
    fields = {name: value for name, value in _TRAINING_ARGUMENTS.items() if name in own_fields and not arguments}

    def module_for(train: bool) -> linen.Module:
        values: dict[str, Any] = {name: value == train for name, value in fields.items()}
        return module.clone(**values) if values else module

    def arguments_for(train: bool) -> dict[str, Any]:
        return {name: value == train for name, value in arguments.items()}

    def create(key: jax.Array) -> dict[str, Any]:
        inputs = jax.tree.map(jax.numpy.zeros_like, example_inputs)
        keys = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        return dict(module_for(False).init(keys, inputs, **arguments_for(False)))

    def init(key: jax.Array) -> tuple[Params, ModelState]:
        # Boxes with partitioning names are taken off: the axes table holds the names.
        variables = linen.meta.unbox(create(key))
        return variables.pop("params", {}), without_sown(variables)

    changing: list[str] = []

    def watch(
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: InterceptorContext,
    ) -> Any:
        if _changes_in_training(context.module):
            changing.append(type(context.module).__name__)
        return call(*args, **kwargs)

    with linen.intercept_methods(watch):
        shapes = jax.eval_shape(create, jax.eval_shape(lambda: jax.random.key(0)))
    if changing and not arguments and not fields:
        raise ConfigError(
            f"{type(module).__name__} holds {changing[0]}, but no argument switches it between training and "
            "evaluation: its __call__ takes neither train nor deterministic; add `train: bool` to __call__ and pass "
            + ("use_running_average=not train" if changing[0] == "BatchNorm" else "deterministic=not train")
        )

    # The structure of the state never changes: values that grow with a call, as sown ones do, are not state.
    def after_call(variables: Mapping[str, Any]) -> Any:
        inputs = jax.tree.map(jax.numpy.zeros_like, example_inputs)
        rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        mutable = [name for name in variables if name != "params"]
        return module_for(False).apply(variables, inputs, rngs=rngs, mutable=mutable, **arguments_for(False))[1]

    unboxed = linen.meta.unbox(shapes)
    before = flatten_dict({name: value for name, value in unboxed.items() if name != "params"})
    after = flatten_dict(jax.eval_shape(after_call, unboxed)) if before else {}
    state_paths = {path for path, value in before.items() if _shape(value) == _shape(after.get(path))}

    def without_sown(variables: Mapping[str, Any]) -> ModelState:
        return unflatten_dict({path: value for path, value in flatten_dict(variables).items() if path in state_paths})

    def apply(
        params: Params, model_state: ModelState, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, ModelState]:
        keywords = arguments_for(train)
        # Flax uses "params" for every stream that is not given by its name ("noise", "droppath").
        rngs = {"params": jax.random.fold_in(key, 1), "dropout": key} if key is not None else None
        variables = {"params": params, **model_state}
        if not train:
            try:
                return module_for(train).apply(variables, inputs, rngs=rngs, **keywords), model_state
            except flax.errors.InvalidRngError as error:
                raise ConfigError(
                    f"{type(module).__name__} draws random numbers in evaluation, where it gets no key "
                    f"({str(error).split('(http')[0].strip()}); draw them only in training"
                ) from None
        outputs, changed = module_for(train).apply(variables, inputs, rngs=rngs, mutable=list(model_state), **keywords)
        return outputs, {**model_state, **without_sown(changed)}

    if axes is None:
        specs = linen.get_partition_spec(shapes.get("params", {}))
        named = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        axes = {path_name(path): tuple(spec) for path, spec in named if spec}
    return Model(name or type(module).__name__, init, apply, axes)
