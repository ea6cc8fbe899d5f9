"""A Flax NNX module as a `Model`: the module is split once, so that no NNX object crosses a `jit` boundary."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from jaxtrain.config.arguments import shown
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import shard_key
from jaxtrain.models.layers import Linear
from jaxtrain.models.model import DrawsByRow, Model, ModelState, Params, by_row_as

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
    """Make an NNX state of a template's structure with the values of a nested dict: the inverse of `to_dict`."""
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

    A stream keeps its shape: stacked layers (`nnx.split_rngs`, `nnx.scan`) hold one key and one count per layer.
    """
    key = jax.random.key(0) if key is None else key
    flat = []
    for index, (path, variable) in enumerate(nnx.to_flat_state(template)):
        like = variable.get_value()
        if isinstance(variable, nnx.RngKey):
            value = jax.random.fold_in(key, index)
            value = jax.random.split(value, like.shape) if like.shape else value
        else:
            value = jnp.zeros(like.shape, like.dtype)
        flat.append((path, variable.replace(value)))
    return nnx.from_flat_state(flat)


def metadata_axes(template: nnx.State) -> dict[str, tuple[str | None, ...]]:
    """Read the axes table from the partitioning metadata of variables (`nnx.with_partitioning`)."""
    return {
        "/".join(map(str, path)): tuple(variable.get_value())
        for path, variable in nnx.to_flat_state(nnx.get_partition_spec(template))
        if variable.get_value()
    }


def maker_of(make: Any) -> Callable[[nnx.Rngs], nnx.Module]:
    """What builds a module from its random streams: of a class, a function, or a module, whose values it starts from.

    The module may name logical axes, which Flax would otherwise look for in a mesh, and hold arrays as attributes.
    """
    build = make
    if isinstance(make, nnx.Module):
        build = lambda rngs: nnx.clone(make)  # noqa: E731
    elif callable(make):
        # Flax's metaclass hides what a class takes.
        signature = inspect.signature(make.__init__ if isinstance(make, type) else make)
        if "rngs" in signature.parameters:
            build = lambda rngs: make(rngs=rngs)  # noqa: E731

    def made(rngs: nnx.Rngs) -> nnx.Module:
        with nnx.use_eager_sharding(False):
            module = build(rngs) if callable(build) else build
        if not isinstance(module, nnx.Module):
            raise ConfigError(
                f"a flax.nnx module is made by a class, or by lambda rngs: Net(..., rngs=rngs), not by {shown(make)}; "
                "for a module of Linen write from_linen(module, example_inputs)"
            )
        # Flax marks the arrays that are plain attributes as data outside a trace alone; static they would outlive it.
        for _, node in list(nnx.iter_graph(module)):
            for name, value in list(vars(node).items()) if isinstance(node, nnx.Pytree) else ():
                if isinstance(value, Tracer):
                    setattr(node, name, nnx.data(value))
        return module

    return made


def linear_kernels(module: nnx.Module) -> dict[str, tuple[int, int]]:
    """Find the kernels of the `Linear` layers of a whole model's module: the value of `Model.linears`."""
    return {
        "/".join(map(str, (*path, "kernel"))): (node.num_input_dims, node.num_output_dims)
        for path, node in nnx.iter_graph(module)
        if isinstance(node, Linear) and node.low_precision
    }


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
        ConfigError: `make` does not make a module of flax.nnx.

    Example:
        >>> model = jt.from_nnx(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
    """
    make = maker_of(make)
    abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, param_template, rng_template, state_template = nnx.split(abstract, nnx.Param, nnx.RngState, ...)
    state_paths = {path for path, _ in nnx.to_flat_state(state_template)}

    def init(key: jax.Array) -> tuple[Params, ModelState]:
        _, params, _, model_state = nnx.split(make(nnx.Rngs(key)), nnx.Param, nnx.RngState, ...)
        return to_dict(params), to_dict(model_state)

    def apply(
        params: Params, model_state: ModelState, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, ModelState]:
        # Random numbers that the module draws itself never follow from a row's number.
        own_key = shard_key(key) if key is not None and isinstance(call, DrawsByRow) else key
        streams = _reseed(rng_template, own_key)
        module: Any = nnx.merge(
            graph, from_dict(param_template, params), streams, from_dict(state_template, model_state)
        )
        module.train() if train else module.eval()
        outputs = module(inputs) if call is None else call(module, inputs, key, train)
        after = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Any(nnx.Param, nnx.RngState))))
        # Variables that a call adds (sown values) are dropped, because the structure of the state never changes.
        kept = [(path, variable) for path, variable in after if path in state_paths]
        return outputs, to_dict(nnx.from_flat_state(kept))

    axes = metadata_axes(param_template) if axes is None else axes
    linears = linear_kernels(abstract)
    marked = by_row_as(apply, call) if call is not None else apply
    return Model(name or type(abstract).__name__, init, marked, axes, gathers_itself, linears=linears)
