"""An Equinox module as a `Model`; Equinox is imported when one is made."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import row_numbers
from jaxtrain.models.model import DrawsByRow, Model, ModelState, Params
from jaxtrain.runtime.tree import path_name

# (module, inputs, state or None, key or None) -> outputs, or (outputs, state) where the module has a state.
EquinoxCall = Callable[[Any, Any, Any, jax.Array | None], Any]
_WRITE = "write jaxtrain.from_equinox(lambda key: Net(key=key))"


def from_equinox(
    make: Callable[[jax.Array], Any],
    *,
    call: EquinoxCall | None = None,
    axes: Mapping[str, tuple[str | None, ...]] | None = None,
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
        ConfigError: Equinox is not installed, or `make` does not return a module.

    Example:
        >>> import equinox as eqx
        >>> model = jt.from_equinox(lambda key: eqx.nn.MLP(4, 3, 16, 2, key=key))
    """
    try:
        import equinox as eqx
    except ImportError:
        raise ConfigError("from_equinox needs Equinox, which is not installed; run pip install equinox") from None
    if isinstance(make, eqx.Module) or not callable(make):
        raise ConfigError(
            f"from_equinox takes a function from a key to a module, not an instance of {type(make).__name__}; {_WRITE}"
        )
    template = eqx.filter_eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
    module, state = template if isinstance(template, tuple) and len(template) == 2 else (template, None)
    if not isinstance(module, eqx.Module) or not (state is None or isinstance(state, eqx.nn.State)):
        raise ConfigError(
            f"from_equinox takes a function that returns an equinox.Module, or a module and its state, not "
            f"{type(template).__name__}; {_WRITE}"
        )
    applied = call or _over_rows(module)

    def init(key: jax.Array) -> tuple[Params, ModelState]:
        made = make(key)
        arrays = _named_arrays((made, None) if state is None else made)
        params = {path: leaf for path, leaf in arrays.items() if _is_parameter(path, leaf)}
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
        arrays = _named_arrays((None, after))
        return outputs, {**model_state, **_nested(arrays, "")}

    marked = DrawsByRow(apply) if call is None else apply
    return Model(name or type(module).__name__, init, marked, axes or {})


def _over_rows(module: Any) -> EquinoxCall:
    """The call of a module that takes one row."""
    takes_key = "key" in inspect.signature(type(module).__call__).parameters

    def call(module: Any, inputs: Any, state: Any, key: jax.Array | None) -> Any:
        size = jax.tree.leaves(inputs)[0].shape[0]
        keys = None if key is None else jax.vmap(lambda row: jax.random.fold_in(key, row))(row_numbers(size))

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


def _is_parameter(path: str, leaf: Any) -> bool:
    return path.startswith("module/") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _nested(arrays: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return unflatten_dict({tuple(path.removeprefix(prefix).split("/")): leaf for path, leaf in arrays.items()})
