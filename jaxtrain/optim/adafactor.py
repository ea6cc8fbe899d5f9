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
    """The state of `scale_by_factored_rms`, in trees like the parameters.

    Attributes:
        count: updates done, int32 [].
        v_row: mean squares over the larger of the two factored dims, float32, without that dim; zeros [1] for
            parameters that are not factored.
        v_col: mean squares over the smaller of the two, without that dim; zeros [1] for parameters that are not
            factored.
        v: mean squares of parameters that are not factored, float32; zeros [1] for those that are.
    """

    count: jax.Array
    v_row: optax.Params
    v_col: optax.Params
    v: optax.Params


def scale_by_factored_rms(counting: Counting, min_dim_size_to_factor: int) -> optax.GradientTransformation:
    """Divide updates by the root of their second moment, which matrices keep as means of rows and of columns.

    Args:
        counting: (path, shape) -> the dims that count layers and experts.
        min_dim_size_to_factor: a layer is factored over its two largest dims where both have at least this size.

    Returns:
        gradients (float32) -> updates of the same shapes, with a `FactoredState`.
    """

    def dims_of(path: jax.tree_util.KeyPath, shape: tuple[int, ...]) -> tuple[int, int] | None:
        return factored_dims(shape, counting(path_name(path), shape), min_dim_size_to_factor)

    def init(params: optax.Params) -> FactoredState:
        def zeros(which: int) -> optax.Params:
            def one(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
                dims = dims_of(path, leaf.shape)
                if dims is None:
                    return jnp.zeros(leaf.shape if which == 2 else (1,), jnp.float32)
                if which == 2:
                    return jnp.zeros((1,), jnp.float32)
                averaged = dims[1 - which]
                return jnp.zeros((*leaf.shape[:averaged], *leaf.shape[averaged + 1 :]), jnp.float32)

            return jax.tree_util.tree_map_with_path(one, params)

        return FactoredState(jnp.int32(0), zeros(0), zeros(1), zeros(2))

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


def clip_by_rms(counting: Counting) -> optax.GradientTransformation:
    """Clip updates: those whose RMS over one layer is above 1 are divided by it.

    Args:
        counting: (path, shape) -> the dims that count layers and experts.
    """

    def one(path: str, update: jax.Array, parameter: jax.Array) -> jax.Array:
        return update / jnp.maximum(1.0, _rms(update, counting(path, update.shape)) / _LARGEST_RMS)

    return _stateless(one)


def scale_by_parameter_rms(counting: Counting) -> optax.GradientTransformation:
    """Multiply updates by the RMS of the parameter over one layer, or by 1e-3 where that is larger.

    Args:
        counting: (path, shape) -> the dims that count layers and experts.
    """

    def one(path: str, update: jax.Array, parameter: jax.Array) -> jax.Array:
        rms = _rms(parameter.astype(jnp.float32), counting(path, parameter.shape))
        return update * jnp.maximum(rms, _LEAST_RMS)

    return _stateless(one)


def _rms(x: jax.Array, counting: tuple[int, ...]) -> jax.Array:
    """Compute the root mean square over all dims that do not count layers or experts; they stay, with size 1."""
    dims = tuple(dim for dim in range(x.ndim) if dim not in counting)
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=dims, keepdims=True))


def _stateless(one: Callable[[str, jax.Array, jax.Array], jax.Array]) -> optax.GradientTransformation:
    """Make a transformation without state from a function (path, update, parameter) -> update."""

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        def named(path: jax.tree_util.KeyPath, leaf: jax.Array, parameter: jax.Array) -> jax.Array:
            return one(path_name(path), leaf, parameter)

        return jax.tree_util.tree_map_with_path(named, updates, params), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)  # pyright: ignore[reportArgumentType]
