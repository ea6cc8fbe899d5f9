"""Equal blocks, stacked along a leading layer dim and scanned, so that 48 layers compile as fast as 6."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.arguments import check_whole
from jaxtrain.layout.gather import gather_parameters
from jaxtrain.layout.scatter import attach_sums, enter_stack, leave_stack
from jaxtrain.layout.sharding import platform
from jaxtrain.models.from_nnx import building, from_dict, maker_of, to_dict
from jaxtrain.remat.policy import Remat


def make_stack(make: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """Build a stack of equal layers: a module whose variables have a leading dim [num_layers].

    Args:
        make: rngs -> one layer.
        num_layers: layers of the stack; each is initialised from its own key.
        rngs: random streams; `params` gives the keys.

    Raises:
        ConfigError: `make` is no function of the random streams, or another argument is of another type.

    Example:
        >>> stack = jt.make_stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 12, nnx.Rngs(0))
        >>> stack.kernel.shape
        (12, 4, 4)
    """
    make = building(maker_of(make, of="make_stack"))
    example = "make_stack(make, 12, rngs)"
    num_layers = check_whole(num_layers, what="make_stack: num_layers", least=1, write=example)
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
