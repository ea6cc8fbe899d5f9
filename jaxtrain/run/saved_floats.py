"""Reading parameters whose checkpoint has them in other dtypes than a model that is opened would train them in."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint.tree import Leaves, stored_name
from jaxtrain.models.model import Params
from jaxtrain.runtime.tree import path_name


def with_saved_floats(wanted: Params, saved: Leaves) -> Params:
    """Parameters as shapes, in float32 where a checkpoint has them so, and the model fewer bits.

    Such are the frozen parameters of a run of `bf16_pure`, which stay as they were drawn.

    Args:
        wanted: shapes with shardings, None in place of what is not wanted.
        saved: stored name -> shape and dtype, of the whole state.
    """

    def one(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        _, dtype = saved.get(stored_name(f"params/{path_name(path)}"), ((), ""))
        is_narrower = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
        if dtype != "float32" or not is_narrower:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)

    return jax.tree_util.tree_map_with_path(one, wanted)


def in_dtypes(params: Params, wanted: Params) -> Params:
    """Restored parameters, cast where they were saved in another dtype than they are wanted in.

    Args:
        params: arrays, None in place of those that a checkpoint does not hold.
        wanted: shapes with shardings of all parameters.
    """
    known: Mapping[str, Any] = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)}

    def one(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
        like = known[path_name(path)]
        if leaf.dtype == like.dtype:
            return leaf
        return jax.jit(lambda leaf: leaf.astype(like.dtype), out_shardings=like.sharding)(leaf)

    return jax.tree_util.tree_map_with_path(one, params)
