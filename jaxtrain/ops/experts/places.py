"""Where the rows of a buffer come from: tokens are copied into it and summed out of it.

Shapes: N tokens, K experts per token, D embed, R rows of the buffer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.layout.manual import vary_alike


class Places(NamedTuple):
    """Which pair of a token and an expert is in which row.

    Attributes:
        pair_R: int32, number of the pair (token * K + choice) in each row; N * K where there is none.
        row_NK: int32, row of each pair; R where the pair has none. The inverse of `pair_R`.
    """

    pair_R: jax.Array
    row_NK: jax.Array


def spread(x_ND: jax.Array, places: Places) -> jax.Array:
    """Copy each token into the rows of its pairs: [R, D] in the dtype of x, and 0 where there is no pair.

    The gradient is `collect`, and that of `collect` is `spread`: both are gathers, where autodiff would add up rows in
    a scatter, one after the other on CPU and in no fixed order on GPU.
    """
    # Tokens that every shard of experts has go to other rows on each, and their gradients are summed over the shards.
    x_ND, pair_R, row_NK = vary_alike(x_ND, *places)
    return _spread(x_ND, Places(pair_R, row_NK))


def collect(y_RD: jax.Array, places: Places) -> jax.Array:
    """Sum the rows of each token's pairs: float32 [N, D]; rows without a pair may hold anything."""
    return _collect(y_RD, places)


def pair_values(a_NK: jax.Array, places: Places) -> jax.Array:
    """The number of the pair of each row: [R], and 0 where there is no pair."""
    return a_NK.reshape(-1).at[places.pair_R].get(mode="fill", fill_value=0)


def _rows_of_tokens(x_ND: jax.Array, places: Places) -> jax.Array:
    choices = places.row_NK.shape[1]
    return x_ND.at[places.pair_R // choices].get(mode="fill", fill_value=0)


def _sums_of_rows(y_RD: jax.Array, places: Places) -> jax.Array:
    num_tokens, choices = places.row_NK.shape
    total_ND = jnp.zeros((num_tokens, y_RD.shape[1]), jnp.float32)
    for choice in range(choices):
        rows_ND = y_RD.at[places.row_NK[:, choice]].get(mode="fill", fill_value=0)
        total_ND = total_ND + rows_ND.astype(jnp.float32)
    return total_ND


@jax.custom_vjp
def _spread(x_ND: jax.Array, places: Places) -> jax.Array:
    return _rows_of_tokens(x_ND, places)


@jax.custom_vjp
def _collect(y_RD: jax.Array, places: Places) -> jax.Array:
    return _sums_of_rows(y_RD, places)


def _spread_forward(x_ND: jax.Array, places: Places) -> tuple[jax.Array, Places]:
    return _rows_of_tokens(x_ND, places), places


def _spread_backward(places: Places, gradient_RD: jax.Array) -> tuple[jax.Array, None]:
    return _sums_of_rows(gradient_RD, places).astype(gradient_RD.dtype), None


def _collect_forward(y_RD: jax.Array, places: Places) -> tuple[jax.Array, tuple[Places, jax.Array]]:
    # A gradient has the dtype of what it is of; an empty array carries it.
    return _sums_of_rows(y_RD, places), (places, y_RD[:0])


def _collect_backward(saved: tuple[Places, jax.Array], gradient_ND: jax.Array) -> tuple[jax.Array, None]:
    places, empty = saved
    return _rows_of_tokens(gradient_ND.astype(empty.dtype), places), None


_spread.defvjp(_spread_forward, _spread_backward)
_collect.defvjp(_collect_forward, _collect_backward)
