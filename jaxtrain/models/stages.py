"""An NNX module that declares its embedding, its stack of blocks and its head, as a `Model` that can be pipelined."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from jaxtrain.errors import ConfigError
from jaxtrain.models.from_nnx import building, from_dict, linear_kernels, metadata_axes, to_dict
from jaxtrain.models.model import DrawsByRow, Model, Params, Parts, PartsApply, Rebuild
from jaxtrain.models.stack import scan_stack
from jaxtrain.remat.policy import Remat

# (module, inputs, key, train) -> carry; (block, carry, inputs, key, train) -> carry; (module, carry, train) -> outputs
EmbedCall = Callable[[Any, Any, jax.Array | None, bool], Any]
BlockCall = Callable[[Any, Any, Any, jax.Array | None, bool], Any]
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
) -> Model:
    """A model from an NNX module whose equal blocks were made by `make_stack`; it works on every mesh axis.

    Args:
        make: rngs -> module; it holds parameters only, random numbers come from the keys below.
        stack: attribute of the module that holds the stack.
        embed: (module, inputs, key, train) -> carry, a tree of arrays.
        block: (block, carry, inputs, key, train) -> carry of the same shapes and dtypes.
        head: (module, carry, train) -> outputs, which may hold `DeferredLogits`. In `embed` and `head` the stack of the
            module must not be used.
            Those of `embed` and `block` that are marked as `DrawsByRow` get the same key on every shard.
        axes: see `Model.axes`; rows of the stack begin with "layers". None: those of the partitioning metadata.
        remat: what the backward pass keeps of each block; None: everything.
        name: for people; None: the class name.

    Raises:
        ConfigError: the module has no such stack, or variables that are not parameters.

    Example:
        >>> model = from_stages(make, stack="blocks", embed=lambda m, tokens, key, train: m.embedding(tokens), ...)
    """
    make = building(make)
    abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, template, rest = nnx.split(abstract, nnx.Param, ...)
    others = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(rest)]
    if others:
        raise ConfigError(
            f"a model of stages holds parameters only, but {others[0]} is none; draw random numbers from the key that "
            "embed and block get, make constants in block or wrap them in nnx.Param with trainable=..., and use "
            "from_nnx for batch statistics"
        )
    if not hasattr(abstract, stack):
        raise ConfigError(f"{type(abstract).__name__} has no attribute {stack!r}; stack names what make_stack built")
    stack_graph, stack_template = nnx.split(getattr(abstract, stack))
    num_layers = jax.tree.leaves(to_dict(stack_template))[0].shape[0]
    abstract_stack = to_dict(template)[stack]

    def module(params: Params) -> nnx.Module:
        # What stands in for the stack has shapes only: a call that used it would fail.
        return nnx.merge(graph, from_dict(template, {**params, stack: abstract_stack}))

    def run_embed(params: Params, inputs: Any, *, key: jax.Array | None, train: bool) -> Any:
        return embed(module(params), inputs, None if key is None else jax.random.fold_in(key, 0), train)

    def run_layers(
        layers: Params, carry: Any, inputs: Any, *, first_layer: jax.Array | int, key: jax.Array | None, train: bool
    ) -> Any:
        def call(layer: Any, carry: Any, layer_key: jax.Array | None, _: Any) -> tuple[Any, None]:
            return block(layer, carry, inputs, layer_key, train), None

        blocks = nnx.merge(stack_graph, from_dict(stack_template, layers))
        key = None if key is None else jax.random.fold_in(key, 1)
        policy = remat or Remat()
        return scan_stack(blocks, call, carry, path=stack, remat=policy, key=key, first_layer=first_layer)[0]

    def run_head(params: Params, carry: Any, *, train: bool) -> Any:
        return head(module(params), carry, train)

    def marked_as(given: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        return DrawsByRow(function) if isinstance(given, DrawsByRow) else function

    def init(key: jax.Array) -> tuple[Params, dict[str, Any]]:
        return to_dict(nnx.split(make(nnx.Rngs(key)))[1]), {}

    if axes is None:
        # The blocks of a stack have names for the dims of one layer.
        axes = {
            path: ("layers", *row) if path.startswith(f"{stack}/") else row
            for path, row in metadata_axes(template).items()
        }
    parts = Parts(stack, num_layers, marked_as(embed, run_embed), marked_as(block, run_layers), run_head)
    apply = PartsApply(parts)
    built = Model(name or type(abstract).__name__, init, apply, axes, gathers_itself=(stack,), parts=parts)

    def rebuild(remat: Remat) -> Model:
        return from_stages(make, stack=stack, embed=embed, block=block, head=head, axes=axes, remat=remat, name=name)

    again = Rebuild(apply, parts, rebuild)
    return dataclasses.replace(built, linears=linear_kernels(abstract), remat=remat, rebuild=again)
