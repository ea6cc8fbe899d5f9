"""Equal blocks, stacked along a leading layer dim and scanned, so that 48 layers compile as fast as 6."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import ConfigError
from jaxtrain.layout.gather import gather_parameters
from jaxtrain.layout.scatter import attach_sums, enter_stack, leave_stack
from jaxtrain.layout.sharding import platform
from jaxtrain.models.from_nnx import from_dict, linear_kernels, maker_of, metadata_axes, to_dict
from jaxtrain.models.model import Model, ModelState, Params, Parts, PartsApply, Rebuild, by_row_as
from jaxtrain.remat.policy import Remat

# (module, inputs, key, train) -> carry; (block, carry, inputs, key, train) -> carry; (module, carry, train) -> outputs.
# The module is Any, because each caller's function names its own subclass of nnx.Module.
EmbedCall = Callable[[Any, Any, jax.Array | None, bool], Any]
BlockCall = Callable[..., Any]
HeadCall = Callable[[Any, Any, bool], Any]


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
    key: jax.Array | None = None,
    per_layer: Any = None,
    unroll_on: tuple[str, ...] = (),
    first_layer: jax.Array | int = 0,
) -> tuple[Any, Any]:
    """Run the layers of a stack in order; variables that are not parameters (batch statistics) are updated in place.

    Args:
        stack: a stack that `make_stack` built.
        call: (block, carry, key, slice of per_layer) -> (carry, output of this layer).
        carry: tree of arrays that each layer takes from the layer before it.
        path: path of the stack inside the model, as in its axes table.
        remat: what the backward pass keeps of each layer.
        key: folded with the index of each layer; None: no randomness.
        per_layer: a tree whose leaves have a leading layer dim; each layer gets its slice.
        unroll_on: platforms whose compiler is slow on the body of a scan; there the layers are unrolled.
        first_layer: index of the first layer in the model's stack, where `stack` holds a range of its layers.

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
        layer_key = None if key is None else jax.random.fold_in(key, index)
        carry, output = call(module, carry, layer_key, extra)
        return (carry, passing), (output, to_dict(nnx.state(module, nnx.Not(nnx.Param))))

    layers = (stacked_params, stacked_rest, first_layer + jnp.arange(num_layers), per_layer)
    start = (carry, enter_stack(path))
    (carry, passed), (outputs, changed) = remat.scan(block, start, layers, unroll=platform() in unroll_on)
    leave_stack(passed)
    nnx.update(stack, from_dict(rest, changed))
    return carry, outputs


def from_stages(
    make: Callable[[nnx.Rngs], nnx.Module],
    *,
    stack: str,
    embed: EmbedCall,
    block: BlockCall,
    head: HeadCall,
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
    others = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(rest)]
    if others:
        raise ConfigError(
            f"a model of stages holds parameters only, but {others[0]} is not a parameter; draw random numbers from "
            "the key that embed and block get, wrap constants in nnx.Param, and use from_nnx for batch statistics"
        )
    blocks = getattr(abstract, stack)
    stack_graph, stack_template = nnx.split(blocks)
    num_layers = jax.tree.leaves(to_dict(stack_template))[0].shape[0]
    abstract_stack = to_dict(template)[stack]

    def module(params: Params) -> nnx.Module:
        # The stack in this module has shapes only: a call that used it would fail.
        return nnx.merge(graph, from_dict(template, {**params, stack: abstract_stack}))

    def run_embed(params: Params, inputs: Any, *, key: jax.Array | None, train: bool) -> Any:
        return embed(module(params), inputs, None if key is None else jax.random.fold_in(key, 0), train)

    def run_layers(
        layers: Params, carry: Any, inputs: Any, *, first_layer: jax.Array | int, key: jax.Array | None, train: bool
    ) -> Any:
        def call(layer: nnx.Module, carry: Any, layer_key: jax.Array | None, entries: Any) -> tuple[Any, None]:
            more = () if per_layer is None else (entries,)
            return block(layer, carry, inputs, layer_key, train, *more), None

        blocks = nnx.merge(stack_graph, from_dict(stack_template, layers))
        # A stage of a pipeline holds a range of the layers.
        numbers = first_layer + jnp.arange(jax.tree.leaves(layers)[0].shape[0])
        entries = jax.tree.map(lambda values: jnp.asarray(values)[numbers], per_layer)
        key = None if key is None else jax.random.fold_in(key, 1)
        policy = remat or Remat()
        return scan_stack(
            blocks, call, carry, path=stack, remat=policy, key=key, per_layer=entries, first_layer=first_layer
        )[0]

    def run_head(params: Params, carry: Any, *, train: bool) -> Any:
        return head(module(params), carry, train)

    def init(key: jax.Array) -> tuple[Params, ModelState]:
        return to_dict(nnx.split(make(nnx.Rngs(key)))[1]), {}

    if axes is None:
        # The metadata of a stacked parameter names the dims of one layer only.
        axes = {
            path: ("layers", *row) if path.startswith(f"{stack}/") else row
            for path, row in metadata_axes(template).items()
        }
    parts = Parts(stack, num_layers, by_row_as(run_embed, embed), by_row_as(run_layers, block), run_head)
    apply = PartsApply(parts)
    built = Model(name or type(abstract).__name__, init, apply, axes, gathers_itself=(stack,), parts=parts)

    def rebuild(remat: Remat) -> Model:
        options: Any = dict(axes=axes, remat=remat, name=name, per_layer=per_layer)
        return from_stages(make, stack=stack, embed=embed, block=block, head=head, **options)

    again = Rebuild(apply, parts, rebuild)
    return dataclasses.replace(built, linears=linear_kernels(abstract), remat=remat, rebuild=again)
