"""A Flax NNX module as a `Model`, and stacks of equal layers.

A module is split once, so that no NNX object crosses a `jit` boundary. Equal layers are stacked along a leading layer
dim and scanned, so that 48 layers compile as fast as 6.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from jaxtrain.config.arguments import shown
from jaxtrain.config.schema import Remat
from jaxtrain.errors import ConfigError
from jaxtrain.layout.gather import gather_parameters
from jaxtrain.layout.keys import shard_key
from jaxtrain.layout.scatter import attach_sums, enter_stack, leave_stack
from jaxtrain.models.layers import Linear
from jaxtrain.models.model import Model, ModelState, Params, Parts, PartsApply, by_row_as
from jaxtrain.remat.policy import KEEP_ALL, scan_blocks

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
    """Seed the random streams of a module (dropout), each with its own fold of the step's key, in its shape."""
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
    specs = nnx.to_flat_state(nnx.get_partition_spec(template))
    return {"/".join(map(str, path)): tuple(spec.get_value()) for path, spec in specs if spec.get_value()}


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
        own_key = None if key is None else shard_key(key)
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


def make_stack(make: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """Build a stack of equal layers: a module whose variables have a leading dim [num_layers].

    Args:
        make: rngs -> one layer.
        num_layers: layers of the stack; each is initialised from its own key.
        rngs: random streams; `params` gives the keys.

    Example:
        >>> stack = jt.make_stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 12, nnx.Rngs(0))
        >>> stack.kernel.shape
        (12, 4, 4)
    """
    make = maker_of(make)
    graph, template = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    keys = jax.random.split(rngs.params(), num_layers)
    layers = jax.vmap(lambda key: to_dict(nnx.state(make(nnx.Rngs(key)))))(keys)
    return nnx.merge(graph, from_dict(template, layers))


def scan_stack(
    stack: nnx.Module,
    call: Callable[..., tuple[Any, Any]],
    carry: Any,
    *,
    path: str,
    remat: Remat,
    per_layer: Any = None,
    first_layer: jax.Array | int = 0,
) -> tuple[Any, Any]:
    """Run the layers of a stack in order; variables that are not parameters (batch statistics) are updated in place.

    Args:
        stack: a stack that `make_stack` built, or a range of its layers, of which `first_layer` is the first one.
        call: (block, carry, index int32 [], slice of per_layer) -> (carry, output of this layer).
        carry: tree of arrays that each layer takes from the layer before it.
        path: of the stack inside the model.
        remat: what the backward pass keeps of each layer.
        per_layer: a tree whose leaves have a leading layer dim, of which each layer gets its slice.

    Returns:
        The carry after the last layer, and the layers' outputs, stacked along a leading layer dim.
    """
    graph, params, rest = nnx.split(stack, nnx.Param, ...)
    stacked_params, stacked_rest = to_dict(params), to_dict(rest)
    num_layers = jax.tree.leaves(stacked_params)[0].shape[0]

    def block(carry: tuple[Any, Any], layer: tuple[Any, Any, jax.Array, Any]) -> tuple[Any, Any]:
        (carry, passing), (layer_params, layer_rest, index, extra) = carry, layer
        layer_params, passing = attach_sums(layer_params, passing, index, first_layer)
        layer_params = gather_parameters(layer_params, prefix=path, num_layers=num_layers)
        module = nnx.merge(graph, from_dict(params, layer_params), from_dict(rest, layer_rest))
        carry, output = call(module, carry, index, extra)
        return (carry, passing), (output, to_dict(nnx.state(module, nnx.Not(nnx.Param))))

    layers = (stacked_params, stacked_rest, first_layer + jnp.arange(num_layers), per_layer)
    (carry, passed), (outputs, changed) = scan_blocks(remat, block, (carry, enter_stack(path)), layers)
    leave_stack(passed)
    nnx.update(stack, from_dict(rest, changed))
    return carry, outputs


def from_stages(
    make: Callable[[nnx.Rngs], nnx.Module],
    *,
    stack: str,
    embed: Callable[..., Any],
    block: Callable[..., Any],
    head: Callable[..., Any],
    axes: Mapping[str, tuple[str | None, ...]] | None = None,
    remat: Remat | None = None,
    name: str | None = None,
    per_layer: Any = None,
) -> Model:
    """Make a model from an NNX module whose equal blocks `make_stack` built; the model works on every mesh axis.

    Args:
        make: rngs -> module. The module holds parameters only; random numbers come from the keys that `embed` and
            `block` get.
        stack: name of the attribute of the module that holds the stack.
        embed: (module, inputs, key, train) -> carry, a tree of arrays. It must not use the stack of the module.
        block: (block, carry, inputs, key, train) -> carry of the same shapes and dtypes.
        head: (module, carry, train) -> outputs, which may hold `DeferredLogits`. It must not use the stack of the
            module.
        axes: the table of logical axes (see `Model.axes`), where rows of the stack begin with "layers". None: the
            table of the partitioning metadata.
        remat: what the backward pass keeps of each block; None: everything.
        name: the name that messages show; None: the name of the class.
        per_layer: a tree of constant arrays [num_layers, ...], which are no parameters; `block` gets the entries of
            its layer as a last argument. None: `block` takes none.

    Returns:
        The model with its parts. `embed` and `block` get the same key on every shard where they are marked as
        `DrawsByRow`.

    Raises:
        ConfigError: the module has variables that are not parameters.

    Example:
        >>> class Net(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.blocks = jt.make_stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 2, rngs)
        ...         self.head = nnx.Linear(4, 3, rngs=rngs)
        >>> model = jt.from_stages(
        ...     Net,
        ...     stack="blocks",
        ...     embed=lambda net, inputs, key, train: inputs,
        ...     block=lambda layer, carry, inputs, key, train: nnx.relu(layer(carry)),
        ...     head=lambda net, carry, train: net.head(carry),
        ... )
        >>> model.parts.num_layers
        2
    """
    make = maker_of(make)
    abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, template, rest = nnx.split(abstract, nnx.Param, ...)
    for path, _ in nnx.to_flat_state(rest):
        raise ConfigError(
            f"a model of stages holds parameters only, but {'/'.join(map(str, path))} is not a parameter; draw random "
            "numbers from the key that embed and block get, wrap constants in nnx.Param, or use from_nnx"
        )
    stages = _Stages(stack, graph, template, *nnx.split(getattr(abstract, stack)), remat or KEEP_ALL, per_layer)
    if axes is None:
        # The metadata of a stacked parameter names the dims of one layer only.
        axes = {
            path: ("layers", *row) if path.startswith(f"{stack}/") else row
            for path, row in metadata_axes(template).items()
        }
    parts = stages.parts(embed, block, head)
    return Model(
        name or type(abstract).__name__,
        lambda key: (to_dict(nnx.split(make(nnx.Rngs(key)))[1]), {}),
        PartsApply(parts),
        axes,
        gathers_itself=(stack,),
        parts=parts,
        linears=linear_kernels(abstract),
        remat=remat,
    )


@dataclasses.dataclass(frozen=True)
class _Stages:
    """A module of stages and its stack, split into their structures and the shapes of their parameters."""

    stack: str
    graph: Any
    template: Any
    stack_graph: Any
    stack_template: Any
    remat: Remat
    per_layer: Any

    def parts(self, embed: Callable[..., Any], block: Callable[..., Any], head: Callable[..., Any]) -> Parts:
        """The parts of a model, which call these functions."""
        abstract_stack = to_dict(self.template)[self.stack]

        def module(params: Params) -> nnx.Module:
            # The stack in this module has shapes only: a call that used it would fail.
            return nnx.merge(self.graph, from_dict(self.template, {**params, self.stack: abstract_stack}))

        def run_embed(params: Params, inputs: Any, *, key: jax.Array | None, train: bool) -> Any:
            return embed(module(params), inputs, None if key is None else jax.random.fold_in(key, 0), train)

        def run_layers(
            layers: Params, carry: Any, inputs: Any, *, first_layer: jax.Array | int, key: jax.Array | None, train: bool
        ) -> Any:
            key = None if key is None else jax.random.fold_in(key, 1)

            def call(layer: nnx.Module, carry: Any, index: jax.Array, entries: Any) -> tuple[Any, None]:
                more = () if self.per_layer is None else (entries,)
                layer_key = None if key is None else jax.random.fold_in(key, index)
                return block(layer, carry, inputs, layer_key, train, *more), None

            blocks = nnx.merge(self.stack_graph, from_dict(self.stack_template, layers))
            # A stage of a pipeline holds a range of the layers.
            numbers = first_layer + jnp.arange(jax.tree.leaves(layers)[0].shape[0])
            entries = jax.tree.map(lambda values: jnp.asarray(values)[numbers], self.per_layer)
            return scan_stack(
                blocks, call, carry, path=self.stack, remat=self.remat, per_layer=entries, first_layer=first_layer
            )[0]

        def run_head(params: Params, carry: Any, *, train: bool) -> Any:
            return head(module(params), carry, train)

        num_layers = jax.tree.leaves(to_dict(self.stack_template))[0].shape[0]
        return Parts(self.stack, num_layers, by_row_as(run_embed, embed), by_row_as(run_layers, block), run_head)
