"""Adafactor's statistics, one set per layer of a stack (Shazeer and Stern 2018).

The paper's statistics are those of one matrix: the sums over rows and columns, the root mean square (RMS) that clips an
update, and the RMS of the parameter that scales it. `optax` treats an array as one matrix, so that the layers of a
stack would share them. Here the dims that count layers and experts are never averaged over. Everything else is the same
as in `optax.adafactor`. Reductions keep the other dims, so that a stack stays sharded over layers without a gather.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.layout.sharding import path_name
from jaxtrain.optim.rules import factored_dims

# (path, shape) -> the dims that count layers and experts.
Counting = Callable[[str, tuple[int, ...]], tuple[int, ...]]

# Shazeer and Stern 2018, section 6 and algorithm 4: the number added to squared gradients, the least RMS of a
# parameter, the largest RMS of an update, and the exponent of the second moment's decay, 1 - t^-0.8.
_SQUARE_EPSILON = 1e-30
_LEAST_RMS = 1e-3
_LARGEST_RMS = 1.0
_DECAY_EXPONENT = 0.8


class FactoredState(NamedTuple):
    """The state of `scale_by_factored_rms`, in trees like the parameters; zeros [1] where one has no such statistics.

    Attributes:
        count: updates done, int32 [].
        v_row, v_col: mean squares over the larger and the smaller of the two factored dims, float32, without that dim.
        v: mean squares of parameters that are not factored, float32.
    """

    count: jax.Array
    v_row: optax.Params
    v_col: optax.Params
    v: optax.Params


def scale_by_factored_rms(counting: Counting, min_dim_size_to_factor: int) -> optax.GradientTransformation:
    """Divide updates (float32) by the root of their second moment, which matrices keep as means of rows and of columns.

    A layer is factored over its two largest dims where both have at least the given size.
    """

    def dims_of(path: jax.tree_util.KeyPath, shape: tuple[int, ...]) -> tuple[int, int] | None:
        return factored_dims(shape, counting(path_name(path), shape), min_dim_size_to_factor)

    def init(params: optax.Params) -> FactoredState:
        def one(path: jax.tree_util.KeyPath, leaf: jax.Array) -> tuple[jax.Array, ...]:
            dims, unused = dims_of(path, leaf.shape), jnp.zeros((1,), jnp.float32)
            if dims is None:
                return unused, unused, jnp.zeros(leaf.shape, jnp.float32)
            means = (jnp.zeros((*leaf.shape[:gone], *leaf.shape[gone + 1 :]), jnp.float32) for gone in reversed(dims))
            return *means, unused

        found = jax.tree_util.tree_map_with_path(one, params)
        statistics = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0)), found)
        return FactoredState(jnp.int32(0), *statistics)

    def update(
        updates: optax.Updates, state: FactoredState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, FactoredState]:
        decay = 1 - (state.count + 1).astype(jnp.float32) ** -_DECAY_EXPONENT

        def one(
            path: jax.tree_util.KeyPath, g: jax.Array, row: jax.Array, col: jax.Array, v: jax.Array
        ) -> tuple[jax.Array, ...]:
            squares = jnp.square(g) + _SQUARE_EPSILON
            dims = dims_of(path, g.shape)
            if dims is None:
                v = decay * v + (1 - decay) * squares
                return g * v**-0.5, row, col, v
            smaller, larger = dims
            row = decay * row + (1 - decay) * jnp.mean(squares, axis=larger)
            col = decay * col + (1 - decay) * jnp.mean(squares, axis=smaller)
            mean = jnp.mean(row, axis=smaller - (smaller > larger), keepdims=True)
            factors = jnp.expand_dims((row / mean) ** -0.5, larger), jnp.expand_dims(col**-0.5, smaller)
            return g * factors[0] * factors[1], row, col, v

        found = jax.tree_util.tree_map_with_path(one, updates, state.v_row, state.v_col, state.v)
        scaled, *statistics = jax.tree.transpose(jax.tree.structure(updates), jax.tree.structure((0, 0, 0, 0)), found)
        return scaled, FactoredState(jnp.asarray(optax.safe_increment(state.count)), *statistics)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def clip_and_scale(counting: Counting) -> optax.GradientTransformation:
    """Clip updates to an RMS of 1 over each layer, then multiply them by the parameter's RMS there (at least 1e-3)."""

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        def one(path: jax.tree_util.KeyPath, update: jax.Array, parameter: jax.Array) -> jax.Array:
            dims = counting(path_name(path), update.shape)
            clipped = update / jnp.maximum(1.0, _rms(update, dims) / _LARGEST_RMS)
            return clipped * jnp.maximum(_rms(parameter.astype(jnp.float32), dims), _LEAST_RMS)

        return jax.tree_util.tree_map_with_path(one, updates, params), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)  # pyright: ignore[reportArgumentType]


def _rms(x: jax.Array, counting: tuple[int, ...]) -> jax.Array:
    """Compute the root mean square over all dims that do not count layers or experts; they stay, with size 1."""
    dims = tuple(dim for dim in range(x.ndim) if dim not in counting)
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=dims, keepdims=True))
