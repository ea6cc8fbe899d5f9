"""An NNX module that declares its embedding, its stack of blocks and its head, as a `Model` that can be pipelined."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import check_axes
from jaxtrain.models.from_nnx import building, from_dict, linear_kernels, maker_of, metadata_axes, to_dict
from jaxtrain.models.model import DrawsByRow, Model, ModelState, Params, Parts, PartsApply, Rebuild
from jaxtrain.models.stack import scan_stack
from jaxtrain.remat.policy import Remat

# (module, inputs, key, train) -> carry; (block, carry, inputs, key, train) -> carry; (module, carry, train) -> outputs.
# The module is Any, because each caller's function names its own subclass of nnx.Module.
EmbedCall = Callable[[Any, Any, jax.Array | None, bool], Any]
BlockCall = Callable[..., Any]
HeadCall = Callable[[Any, Any, bool], Any]


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
        ConfigError: the module has no such stack, or it has variables that are not parameters.

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
    make = building(maker_of(make, of="from_stages"))
    if axes is not None:
        check_axes(axes, what="from_stages: axes")
    abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, template, rest = nnx.split(abstract, nnx.Param, ...)
    others = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(rest)]
    if others:
        raise ConfigError(
            f"a model of stages holds parameters only, but {others[0]} is not a parameter; draw random numbers from "
            "the key that embed and block get, make constants in block or wrap them in nnx.Param with trainable=..., "
            "and use from_nnx for batch statistics"
        )
    blocks = getattr(abstract, stack, None)
    if blocks is None:
        raise ConfigError(f"{type(abstract).__name__} has no attribute {stack!r}; stack names what make_stack built")
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

    def marked_as(given: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        return DrawsByRow(function) if isinstance(given, DrawsByRow) else function

    def init(key: jax.Array) -> tuple[Params, ModelState]:
        return to_dict(nnx.split(make(nnx.Rngs(key)))[1]), {}

    if axes is None:
        # The metadata of a stacked parameter names the dims of one layer only.
        axes = {
            path: ("layers", *row) if path.startswith(f"{stack}/") else row
            for path, row in metadata_axes(template).items()
        }
    parts = Parts(stack, num_layers, marked_as(embed, run_embed), marked_as(block, run_layers), run_head)
    apply = PartsApply(parts)
    built = Model(name or type(abstract).__name__, init, apply, axes, gathers_itself=(stack,), parts=parts)

    def rebuild(remat: Remat) -> Model:
        return from_stages(
            make,
            stack=stack,
            embed=embed,
            block=block,
            head=head,
            axes=axes,
            remat=remat,
            name=name,
            per_layer=per_layer,
        )

    again = Rebuild(apply, parts, rebuild)
    return dataclasses.replace(built, linears=linear_kernels(abstract), remat=remat, rebuild=again)
