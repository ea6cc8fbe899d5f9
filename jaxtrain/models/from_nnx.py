"""A Flax NNX module as a `Model`: the module is split once, so that no NNX object crosses a `jit` boundary."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen, nnx
from jax.core import Tracer

from jaxtrain.config.arguments import check_kind, shown
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import check_axes
from jaxtrain.layout.sharding import shard_key
from jaxtrain.models.layers import Linear
from jaxtrain.models.model import DrawsByRow, Model, ModelState, Params

Call = Callable[[nnx.Module, Any, jax.Array | None, bool], Any]


def to_dict(state: nnx.State) -> dict[str, Any]:
    """Convert an NNX state to a plain nested dict of arrays, in which every key is a string."""
    nested: dict[str, Any] = {}
    for path, variable in nnx.to_flat_state(state):
        node = nested
        for part in path[:-1]:
            node = node.setdefault(str(part), {})
        node[str(path[-1])] = variable.get_value() if isinstance(variable, nnx.Variable) else variable
    return nested


def from_dict(template: nnx.State, nested: Mapping[str, Any]) -> nnx.State:
    """Make an NNX state from a nested dict: the inverse of `to_dict`.

    Args:
        template: a state of the same structure, whose variables get the values.
        nested: nested dict of arrays.
    """
    flat = []
    for path, variable in nnx.to_flat_state(template):
        node: Any = nested  # a dict, at the end of the path an array
        for part in path:
            node = node[str(part)]
        # An array that is a plain attribute has no variable around it.
        flat.append((path, variable.replace(node) if isinstance(variable, nnx.Variable) else node))
    return nnx.from_flat_state(flat)


def _reseed(template: nnx.State, key: jax.Array | None) -> nnx.State:
    """Seed the random streams of a module (dropout), each with its own fold of the step's key.

    A stream keeps its shape: stacked layers (`nnx.split_rngs`, `nnx.vmap`, `nnx.scan`) hold one key and one count per
    layer.
    """
    key = jax.random.key(0) if key is None else key
    flat = []
    for index, (path, variable) in enumerate(nnx.to_flat_state(template)):
        like = variable.get_value()
        if isinstance(variable, nnx.RngKey):
            value = jax.random.fold_in(key, index)
            value = jax.random.split(value, like.shape) if like.shape else value
        else:
            value = jax.numpy.zeros(like.shape, like.dtype)
        flat.append((path, variable.replace(value)))
    return nnx.from_flat_state(flat)


def metadata_axes(template: nnx.State) -> dict[str, tuple[str | None, ...]]:
    """Read the axes table from the partitioning metadata of variables (`nnx.with_partitioning`)."""
    return {
        "/".join(map(str, path)): tuple(variable.get_value())
        for path, variable in nnx.to_flat_state(nnx.get_partition_spec(template))
        if variable.get_value()
    }


def building(make: Callable[[nnx.Rngs], nnx.Module]) -> Callable[[nnx.Rngs], nnx.Module]:
    """Wrap `make` so that its module may name logical axes and may hold plain arrays as attributes.

    Without it Flax would look for the name of each logical axis in a mesh when it makes the variable.
    """

    def made(rngs: nnx.Rngs) -> nnx.Module:
        with nnx.use_eager_sharding(False):
            module = make(rngs)
        if isinstance(module, nnx.Module):
            _mark_arrays(module)
        return module

    return made


def _mark_arrays(module: nnx.Module) -> None:
    """Mark the arrays that are plain attributes of a module as data (`nnx.data`).

    Flax does this itself outside a trace. Inside one it treats them as static, and they would outlive their trace.

    Raises:
        ConfigError: an array is in a container that Flax treats as static.
    """
    for path, node in list(nnx.iter_graph(module)):
        if not isinstance(node, nnx.Pytree):
            continue
        for name, value in list(vars(node).items()):
            if isinstance(value, Tracer):
                setattr(node, name, nnx.data(value))
            elif isinstance(value, tuple | list | dict) and any(
                isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value, is_leaf=_is_node)
            ):
                where = "/".join(map(str, (*path, name)))
                raise ConfigError(
                    f"{where} of the module is a {type(value).__name__} that holds an array; wrap the array in "
                    "nnx.Variable (or nnx.Param), and the container in nnx.List or nnx.Dict"
                )


def _is_node(value: object) -> bool:
    return isinstance(value, nnx.Variable | nnx.Pytree)


def linear_kernels(module: nnx.Module) -> dict[str, tuple[int, int]]:
    """Find the kernels of a model's `Linear` layers: the value of `Model.linears`.

    Args:
        module: the module of the whole model, so that paths in it are those of the parameters.

    Returns:
        Path of the kernel -> its number of input dims and of output dims.
    """
    return {
        "/".join(map(str, (*path, "kernel"))): (node.num_input_dims, node.num_output_dims)
        for path, node in nnx.iter_graph(module)
        if isinstance(node, Linear) and node.low_precision
    }


def maker_of(make: Any, *, of: str) -> Callable[[nnx.Rngs], nnx.Module]:
    """What builds a module from its random streams alone, which it may take as `rngs`, by position or by name.

    Args:
        make: a class, a function, or, for `from_nnx`, a module: its values are what each build starts from.
        of: the function that takes it.

    Raises:
        ConfigError: it is none of these, or takes more than the streams.
    """
    kind = make if isinstance(make, type) else type(make)
    if isinstance(make, nnx.Module) and of == "from_nnx":
        if any(isinstance(leaf, jax.ShapeDtypeStruct | Tracer) for leaf in jax.tree.leaves(nnx.state(make))):
            raise ConfigError(f"{kind.__name__} holds shapes without values; write from_nnx(lambda rngs: ...)")
        return lambda rngs: nnx.clone(make)
    if isinstance(make, linen.Module) or issubclass(kind, linen.Module):
        raise ConfigError(
            f"{of} takes a module of flax.nnx; {kind.__name__} is of Linen: write from_linen(module, example_inputs)"
        )
    if isinstance(make, nnx.Module) or not callable(make):
        raise ConfigError(f"{of} takes a function rngs -> module, not {shown(make)}")
    build: Any = make
    try:
        # Flax's metaclass hides what a class takes.
        signature = inspect.signature(functools.partial(make.__init__, None) if isinstance(make, type) else make)
    except ValueError:  # a callable written in C has no signature: the call itself raises
        return build
    if _binds(signature, rngs=None):
        return lambda rngs: build(rngs=rngs)
    if _binds(signature, None):
        return build
    name = getattr(make, "__name__", kind.__name__)
    needed = [one.name for one in signature.parameters.values() if one.default is one.empty and one.name != "rngs"]
    raise ConfigError(
        f"{of} gives {name} the random streams alone, but it takes {signature}; write "
        f"{of}(lambda rngs: {name}({', '.join(f'{one}={one}' for one in needed)}, rngs=rngs))"
    )


def _binds(signature: inspect.Signature, *arguments: Any, **keywords: Any) -> bool:
    with contextlib.suppress(TypeError):
        signature.bind(*arguments, **keywords)
        return True
    return False


def from_nnx(
    make: Callable[..., nnx.Module] | nnx.Module,
    *,
    axes: Mapping[str, tuple[str | None, ...]] | None = None,
    call: Call | None = None,
    name: str | None = None,
    gathers_itself: tuple[str, ...] = (),
) -> Model:
    """Make a model from an NNX module, its class, or a function that builds it.

    Args:
        make: a class or function that needs nothing but `rngs`: it is called once abstractly here and once inside the
            sharded init. Or a module, which is not changed: training starts from its values, whatever the seed.
        axes: parameter path -> logical axes (see `Model.axes`). None: the partitioning metadata of the parameters
            (`nnx.with_partitioning`), and the default sharding for parameters that have none.
        call: (module, inputs, key, train) -> outputs; None: `module(inputs)`. It is called after `module.train()` or
            `module.eval()`, with dropout streams seeded from the step's key. Where it is marked as `DrawsByRow`, it
            gets the same key on every shard.
        name: the name that messages show; None: the name of the class.
        gathers_itself: see `Model.gathers_itself`.

    Returns:
        The model. Its params are the `nnx.Param`s of the module; its model_state holds the arrays that are plain
        attributes, and all other variables except random streams.

    Raises:
        ConfigError: `make` takes more than the random streams or does not return a module, or the module holds an
            array in a plain container.

    Example:
        >>> model = jt.from_nnx(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
    """
    make = building(maker_of(make, of="from_nnx"))
    if axes is not None:
        check_axes(axes, what="from_nnx: axes")
    takes = "a tuple of top-level names of parameters"
    write = f"gathers_itself=({gathers_itself!r},)" if isinstance(gathers_itself, str) else "gathers_itself=('blocks',)"
    check_kind(gathers_itself, tuple, what="from_nnx: gathers_itself", takes=takes, write=write)
    abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    if not isinstance(abstract, nnx.Module):
        raise ConfigError(f"from_nnx takes a function that returns an nnx.Module, not {type(abstract).__name__}")
    graph, param_template, rng_template, state_template = nnx.split(abstract, nnx.Param, nnx.RngState, ...)
    state_paths = {path for path, _ in nnx.to_flat_state(state_template)}

    def init(key: jax.Array) -> tuple[Params, ModelState]:
        module = make(nnx.Rngs(key))
        _, params, _, model_state = nnx.split(module, nnx.Param, nnx.RngState, ...)
        return to_dict(params), to_dict(model_state)

    def apply(
        params: Params, model_state: ModelState, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, ModelState]:
        # Random numbers that the module draws itself never follow from a row's number.
        own_key = shard_key(key) if key is not None and isinstance(call, DrawsByRow) else key
        streams = _reseed(rng_template, own_key)
        module = nnx.merge(graph, from_dict(param_template, params), streams, from_dict(state_template, model_state))
        module.train() if train else module.eval()
        if call is not None:
            outputs = call(module, inputs, key, train)
        else:
            outputs = module(inputs)  # type: ignore[operator]  # a user's module is callable
        after = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Any(nnx.Param, nnx.RngState))))
        # Variables that a call adds (sown values) are dropped, because the structure of the state never changes.
        kept = [(path, variable) for path, variable in after if path in state_paths]
        return outputs, to_dict(nnx.from_flat_state(kept))

    linears = linear_kernels(abstract)
    marked = DrawsByRow(apply) if isinstance(call, DrawsByRow) else apply
    axes = metadata_axes(param_template) if axes is None else axes
    return Model(name or type(abstract).__name__, init, marked, axes, gathers_itself, linears=linears)
