"""Models of modules of Flax Linen and Equinox, of two functions, and of several models."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from jaxtrain.config.arguments import shown
from jaxtrain.errors import ConfigError
from jaxtrain.layout.keys import row_keys
from jaxtrain.layout.sharding import current_layout, layout_of_part, use_layout
from jaxtrain.models.model import DrawsByRow, Model, ModelState, Params, Parts, PartsApply, key_for
from jaxtrain.runtime.tree import path_name

Axes = Mapping[str, tuple[str | None, ...]]
# (module, inputs, state or None, key or None) -> outputs, or (outputs, state) where the module has a state.
EquinoxCall = Callable[[Any, Any, Any, jax.Array | None], Any]

# Arguments that switch a Linen module to training -> their value in training; evaluation uses the opposite.
_TRAINING_ARGUMENTS = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}


def from_functions(
    init: Callable[[jax.Array], Params],
    apply: Callable[[Params, Any], Any] | None = None,
    *,
    axes: Axes | None = None,
    name: str = "functions",
    parts: Parts | None = None,
) -> Model:
    """A model from two pure functions without state or randomness, or from an init and its parts.

    Args:
        init: key -> params, a nested dict of float32 arrays.
        apply: (params, inputs) -> outputs.
        axes: see `Model.axes`.
        name: for people.
        parts: the model partitioned for a pipeline; they take the place of `apply`.

    Example:
        >>> init = lambda key: {"w": jax.random.normal(key, (4, 3))}
        >>> model = jt.from_functions(init, lambda params, inputs: inputs @ params["w"])
    """

    def apply_model(
        params: Params, model_state: ModelState, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, ModelState]:
        assert apply is not None
        return apply(params, inputs), model_state

    applied = apply_model if parts is None else PartsApply(parts)
    return Model(name, lambda key: (init(key), {}), applied, axes or {}, parts=parts)


def from_linen(
    module: linen.Module, example_inputs: Any, *, axes: Axes | None = None, name: str | None = None
) -> Model:
    """Make a model from a Linen module.

    Args:
        module: its `__call__` takes the inputs, and training is switched on by the keywords `train`, `training`,
            `is_training`, `deterministic` or `use_running_average`; every one that `__call__` takes is given. Where
            `__call__` takes none of them, the module's fields of these names are set.
        example_inputs: inputs (arrays or `ShapeDtypeStruct`s) of the right shape, for `init`.
        axes: parameter path -> logical axes. None: the partitioning metadata of the parameters
            (`with_logical_partitioning`, `with_partitioning`), and the default sharding for parameters that have none.
        name: the name that messages show; None: the name of the class.

    Returns:
        The model. Its params are the collection "params"; its model_state holds all other collections, except tuples,
        which are what each call adds to (`self.sow`).

    Raises:
        ConfigError: `module` is not an instance of a Linen module.

    Example:
        >>> model = jt.from_linen(linen.Dense(3), np.zeros((1, 4), np.float32), axes={"kernel": ("embed", "mlp")})
    """
    if not isinstance(module, linen.Module):
        raise ConfigError(
            f"from_linen takes a module of flax.linen, not {shown(module)}; write from_linen(Net(), example_inputs), "
            "or from_nnx(Net) for a module of flax.nnx"
        )
    taken = inspect.signature(type(module).__call__).parameters
    arguments = {name: value for name, value in _TRAINING_ARGUMENTS.items() if name in taken}
    own_fields = {field.name for field in dataclasses.fields(module)}
    fields = {name: value for name, value in _TRAINING_ARGUMENTS.items() if name in own_fields and not arguments}

    def call(method: str, train: bool, *given: Any, **options: Any) -> Any:
        values: dict[str, Any] = {name: value == train for name, value in fields.items()}
        chosen = module.clone(**values) if values else module
        return getattr(chosen, method)(*given, **options, **{name: value == train for name, value in arguments.items()})

    def create(key: jax.Array) -> dict[str, Any]:
        inputs = jax.tree.map(jnp.zeros_like, example_inputs)
        return dict(call("init", False, {"params": key, "dropout": jax.random.fold_in(key, 1)}, inputs))

    def init(key: jax.Array) -> tuple[Params, ModelState]:
        # Boxes with partitioning names are taken off: the axes table holds the names.
        variables = linen.meta.unbox(create(key))
        return variables.pop("params", {}), _without_sown(variables)

    def apply(
        params: Params, model_state: ModelState, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, ModelState]:
        # Flax uses "params" for every stream that is not given by its name ("noise", "droppath").
        rngs = {"params": jax.random.fold_in(key, 1), "dropout": key} if key is not None else None
        variables = {"params": params, **model_state}
        if not train:
            return call("apply", False, variables, inputs, rngs=rngs), model_state
        outputs, changed = call("apply", True, variables, inputs, rngs=rngs, mutable=list(model_state))
        return outputs, {**model_state, **_without_sown(changed)}

    if axes is None:
        shapes = jax.eval_shape(create, jax.eval_shape(lambda: jax.random.key(0)))
        specs = linen.get_partition_spec(shapes.get("params", {}))
        named = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        axes = {path_name(path): tuple(spec) for path, spec in named if spec}
    return Model(name or type(module).__name__, init, apply, axes)


def _without_sown(variables: Mapping[str, Any]) -> ModelState:
    """The variables without sown values, which are tuples: the structure of the state never changes."""
    return unflatten_dict({path: one for path, one in flatten_dict(variables).items() if not isinstance(one, tuple)})


def from_equinox(
    make: Callable[[jax.Array], Any],
    *,
    call: EquinoxCall | None = None,
    axes: Axes | None = None,
    name: str | None = None,
) -> Model:
    """Make a model from a function that builds an Equinox module.

    Args:
        make: key -> module, or (module, state) as `equinox.nn.make_with_state` gives them. It is called once abstractly
            here and once inside the sharded init.
        call: (module, inputs [B, ...], state, key) -> outputs, or (outputs, state) for a module with a state. None: the
            module takes one row, as Equinox has it: it is mapped over the rows with `axis_name="batch"`, gets
            `key=` with a key of each row where it takes one, and the state as its second argument. Random numbers
            are then the same on every mesh.
        axes: parameter path -> logical axes (see `Model.axes`); None: the default sharding.
        name: for people; None: the name of the class.

    Returns:
        The model. Its params are the floating-point arrays of the module under the names of their fields
        (`layers/0/weight`); its model_state holds other arrays and the state. Layers are in inference mode
        (`equinox.nn.inference_mode`) outside training.

    Raises:
        ConfigError: Equinox is not installed, or `make` does not make a module.

    Example:
        >>> import equinox as eqx
        >>> model = jt.from_equinox(lambda key: eqx.nn.MLP(4, 3, 16, 2, key=key))
    """
    try:
        import equinox as eqx
    except ImportError:
        raise ConfigError("from_equinox needs Equinox, which is not installed; run pip install equinox") from None
    make = make if callable(make) and not isinstance(make, eqx.Module) else lambda key: None
    template = eqx.filter_eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
    module, state = template if isinstance(template, tuple) and len(template) == 2 else (template, None)
    if not isinstance(module, eqx.Module):
        raise ConfigError(
            f"from_equinox takes a function from a key to an equinox.Module, not {shown(make)}; write "
            "jaxtrain.from_equinox(lambda key: Net(key=key))"
        )
    applied = call or _over_rows(module)

    def init(key: jax.Array) -> tuple[Params, ModelState]:
        made = make(key)
        arrays = _named_arrays((made, None) if state is None else made)
        floats = {path: leaf for path, leaf in arrays.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
        params = {path: leaf for path, leaf in floats.items() if path.startswith("module/")}
        others = {path: leaf for path, leaf in arrays.items() if path not in params}
        return _nested(params, "module/"), _nested(others, "")

    def apply(
        params: Params, model_state: ModelState, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, ModelState]:
        given = {f"module/{path}": leaf for path, leaf in flatten_dict(params, sep="/").items()}
        given |= flatten_dict(model_state, sep="/")

        def filled(path: tuple[Any, ...], leaf: Any) -> Any:
            return given[_name(path)] if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

        whole, own_state = jax.tree_util.tree_map_with_path(filled, (module, state))
        found = applied(eqx.nn.inference_mode(whole, value=not train), inputs, own_state, key)
        if own_state is None:
            return found, model_state
        outputs, after = found
        return outputs, {**model_state, **_nested(_named_arrays((None, after)), "")}

    marked = DrawsByRow(apply) if call is None else apply
    return Model(name or type(module).__name__, init, marked, axes or {})


def _over_rows(module: Any) -> EquinoxCall:
    """The call of a module that takes one row."""
    takes_key = "key" in inspect.signature(type(module).__call__).parameters

    def call(module: Any, inputs: Any, state: Any, key: jax.Array | None) -> Any:
        size = jax.tree.leaves(inputs)[0].shape[0]
        keys = None if key is None else row_keys(key, size)

        def one(row: Any, state: Any, key: jax.Array | None) -> Any:
            arguments = (row,) if state is None else (row, state)
            return module(*arguments, key=key) if takes_key else module(*arguments)

        mapped = (0, None, None if keys is None else 0)
        outputs = 0 if state is None else (0, None)
        return jax.vmap(one, in_axes=mapped, out_axes=outputs, axis_name="batch")(inputs, state, keys)

    return call


def _name(path: tuple[Any, ...]) -> str:
    """Path of a leaf of (module, state): `module/layers/0/weight`."""
    first, _, rest = path_name(path).partition("/")
    return f"{('module', 'state')[int(first)]}/{rest}"


def _named_arrays(tree: Any) -> dict[str, Any]:
    """Name -> array of (module, state)."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {_name(path): leaf for path, leaf in leaves if isinstance(leaf, jax.Array)}


def _nested(arrays: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return unflatten_dict({tuple(path.removeprefix(prefix).split("/")): leaf for path, leaf in arrays.items()})


def from_models(models: Mapping[str, Model], *, name: str | None = None) -> Model:
    """Make one model of several, whose parameters are theirs under their names.

    Inputs and outputs are dicts by these names; a model without inputs is not called. Each keeps its own axes table,
    remat and model_state, and its random numbers do not depend on the others. The whole runs with parallel.pipe=1.

    Args:
        models: name -> model; a name holds no "/". None of them is adapted: adapt the whole.
        name: for people; None: the names joined by "+".

    Returns:
        A model: `apply({"student": x})` inside a loss gives `{"student": outputs}`.

    Raises:
        ConfigError: a model that is adapted, whose base the whole would train.

    Example:
        >>> pair = jt.from_models({"student": model, "teacher": text_model})
        >>> sorted(pair.init(jax.random.key(0))[0])
        ['student', 'teacher']
    """
    models, numbers = dict(models), {part: i for i, part in enumerate(models)}
    for part, model in models.items():
        if model.adapted is not None:
            raise ConfigError(
                f"from_models: the model {part!r} has adapters already, but the whole would train its base; adapt the "
                f"whole: jt.adapt(from_models(...), lora=jt.LoraConfig(targets=('{part}/*',)))"
            )

    def init(key: jax.Array) -> tuple[Params, ModelState]:
        made = {part: model.init(jax.random.fold_in(key, i)) for i, (part, model) in enumerate(models.items())}
        params = {part: params for part, (params, _) in made.items()}
        return params, {part: state for part, (_, state) in made.items() if jax.tree.leaves(state)}

    def apply(
        params: Params, model_state: ModelState, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[dict[str, Any], ModelState]:
        outputs, states = {}, dict(model_state)
        layout = current_layout()
        for part in inputs:
            i, model = numbers[part], models[part]
            part_key = None if key is None else key_for(model.apply, jax.random.fold_in(key, i))
            with use_layout(None if layout is None else layout_of_part(layout, part, model.axes)):
                outputs[part], state = model.apply(
                    params[part], model_state.get(part, {}), inputs[part], key=part_key, train=train
                )
            if part in states:
                states[part] = state
        return outputs, states

    return Model(
        name or "+".join(models),
        init,
        DrawsByRow(apply),  # each part gets the key that it asks for
        {f"{part}/{row}": axes for part, model in models.items() for row, axes in model.axes.items()},
        gathers_itself=tuple(f"{part}/{tree}" for part, model in models.items() for tree in model.gathers_itself),
        has_experts=any(model.has_experts for model in models.values()),
        linears={f"{part}/{path}": dims for part, model in models.items() for path, dims in model.linears.items()},
    )
