"""What users hand to a train step, checked before it is used."""

import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.config.arguments import check_kind
from jaxtrain.data.batches import check_bits
from jaxtrain.data.dataset import Data
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.model import Model
from jaxtrain.models.task import Task

_PARTS = {
    "model": (Model, "a jaxtrain.Model", "jaxtrain.from_nnx(Net), from_linen, from_functions or build_model"),
    "task": (Task, "a jaxtrain.Task", "jaxtrain.classification() or jaxtrain.Task('name', loss)"),
    "optimizer": (optax.GradientTransformation, "an optax transformation", "optax.adamw(1e-3)"),
    "data": (Data, "a jaxtrain.Data", "jaxtrain.open_data({'kind': ...})"),
}


def check_parts(**parts: Any) -> None:
    """Raise where a model, task, optimizer or data is something else; None stands for that of a config.

    Raises:
        ConfigError: what was given, what is wanted, and how to write it.
    """
    for name, value in parts.items():
        kind, takes, write = _PARTS[name]
        if value is not None:
            check_kind(value, kind, what=name, takes=takes, write=write)


def random_key(seed: Any, like: Any) -> jax.Array:
    """The typed key of a seed.

    Args:
        seed: an integer of 32 bits, Python's or NumPy's, or a typed key.
        like: shape and dtype of the keys that the step carries.

    Raises:
        ConfigError: no whole number, more bits, of which jax would drop some, or a key of another kind.
    """
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        if (seed.shape, seed.dtype) != (like.shape, like.dtype):
            raise ConfigError(f"the key is {seed.dtype}{list(seed.shape)}, but the step carries {like.dtype}")
        return seed
    seed = operator.index(seed)  # a TypeError where it is no whole number
    if not -(2**31) <= seed < 2**32:
        raise ConfigError(f"seed {seed} has more than 32 bits, of which jax would drop some; use a smaller one")
    # A seed is one number, which a user's guard need not ask about.
    with jax.transfer_guard("allow"):
        return jax.random.key(seed)


def check_ids(batch: Mapping[str, Any], *, limits: Mapping[str, int], where: str) -> None:
    """Raise where host arrays hold ids that the model does not have, or integers that jax would truncate to 32 bits.

    Args:
        batch: NumPy arrays; entries of other types are passed over.
        limits: entry -> number of ids it may hold. Negative `targets`, and those of weight 0, are ignored.
        where: the batch, in the message.

    Raises:
        DataError: the entry, the id, and the ids that there are.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(dict(batch)):
        if isinstance(leaf, np.ndarray) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            check_bits(leaf, f"{where} holds {path_name(path)}")
    for name, limit in limits.items():
        ids = batch.get(name)
        ids = ids.get("tokens") if isinstance(ids, Mapping) else ids
        if not isinstance(ids, np.ndarray) or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
            continue
        wrong = ids >= limit if name == "targets" else (ids >= limit) | (ids < 0)
        weights = batch.get("weights")
        if name == "targets" and isinstance(weights, np.ndarray) and weights.shape == ids.shape[: weights.ndim]:
            wrong &= weights.reshape(*weights.shape, *[1] * (ids.ndim - weights.ndim)) != 0
        if wrong.any():
            more = "; negative targets are ignored" if name == "targets" else ""
            raise DataError(
                f"{where} holds {name} of {int(ids[wrong][0])}, but the model has ids 0 to {limit - 1}{more}; "
                "mend the data, or give the model more outputs or a larger vocabulary"
            )
