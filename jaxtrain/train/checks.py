"""What users hand to a train step, checked before it is used: one line for each mistake."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from jaxtrain.data.batches import check_bits
from jaxtrain.data.sources.dataset import Data
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.model import Model
from jaxtrain.models.task import RENAME, Task
from jaxtrain.models.tasks import TASKS


def check_parts(model: Any, task: Any, optimizer: Any) -> None:
    """Raise where a model, a task or an optimizer is something else.

    Raises:
        ConfigError: what was given, what is wanted, and how to write it.
    """
    check_model(model)
    check_task(task)
    check_optimizer(optimizer)


def check_optimizer(optimizer: Any) -> None:
    """Raise where something is no optax transformation.

    Raises:
        ConfigError: what was given, and how to make an optimizer of it.
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ConfigError(
            f"the optimizer is {_name(optimizer)}, not an optax transformation; {_optimizer_hint(optimizer)}"
        )


def check_options(accumulation_steps: Any, clip_norm: Any, ema_decay: Any, trainable: Any) -> None:
    """Raise where an option of `make_train_step` is of another type or out of range.

    Raises:
        ConfigError: the option, its value, and what would work.
    """
    if not isinstance(accumulation_steps, int) or isinstance(accumulation_steps, bool) or accumulation_steps < 1:
        raise ConfigError(f"accumulation_steps={accumulation_steps!r}; use a whole number from 1")
    if clip_norm is not None and not (_is_number(clip_norm) and clip_norm > 0):
        raise ConfigError(f"clip_norm={clip_norm!r}; use a number above 0, or None for no clipping")
    if ema_decay is not None and not (_is_number(ema_decay) and 0 <= ema_decay < 1):
        raise ConfigError(f"ema_decay={ema_decay!r}; use a number from 0 to below 1, such as 0.999, or None")
    if trainable is not None and not callable(trainable):
        raise ConfigError(
            f"trainable is {_name(trainable)}, not a function of a parameter's path; "
            "write trainable=lambda path: path.startswith('head')"
        )


def random_key(seed: Any, like: Any) -> jax.Array:
    """The typed key of a seed.

    Args:
        seed: an integer of 32 bits, Python's or NumPy's, or a typed key.
        like: shape and dtype of the keys that the step carries.

    Raises:
        ConfigError: another type, more bits, or a key of another kind.
    """
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        if (seed.shape, seed.dtype) != (like.shape, like.dtype):
            raise ConfigError(
                f"the key is {seed.dtype}{list(seed.shape)}, but the step carries {like.dtype}; use a seed"
            )
        return seed
    if isinstance(seed, bool) or np.ndim(seed) or not np.issubdtype(np.asarray(seed).dtype, np.integer):
        raise ConfigError(f"the seed is {_name(seed)}; give a whole number or jax.random.key(0)")
    if not -(2**31) <= int(seed) < 2**32:
        raise ConfigError(f"seed {int(seed)} has more than 32 bits, of which jax would drop some; use a smaller one")
    # A seed is one number, which a user's guard need not ask about.
    with jax.transfer_guard("allow"):
        return jax.random.key(int(seed))


def check_model(model: Any) -> None:
    """Raise where something is no `Model`.

    Raises:
        ConfigError: what was given, and how to make a model of it.
    """
    if not isinstance(model, Model):
        raise ConfigError(f"the model is {_name(model)}, not a jaxtrain.Model; {_model_hint(model)}")


def check_task(task: Any) -> None:
    """Raise where something is no `Task`.

    Raises:
        ConfigError: what was given, and how to make a task of it.
    """
    if not isinstance(task, Task):
        raise ConfigError(f"the task is {_name(task)}, not a jaxtrain.Task; {_task_hint(task)}")


def check_data(data: Any) -> None:
    """Raise where something is no `Data`.

    Raises:
        ConfigError: what was given, and how to make data of it.
    """
    if not isinstance(data, Data):
        raise ConfigError(
            f"the data is {_name(data)}, not a jaxtrain.Data; write jaxtrain.open_data({{'kind': ...}}), and for rows "
            "of your own dataclasses.replace(data, train=rows, validation=None, fingerprint={'name': 'mine'})"
        )


def check_batch(batch: Any, *, needs_inputs: bool = True) -> None:
    """Raise where a batch is no dict of named entries, is empty, or has no entry `inputs` that the model takes.

    Raises:
        ConfigError: what the batch is or holds.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"the batch is {_name(batch)}, not a dict of arrays; "
            "write {'inputs': x, 'targets': y}, each with the rows as first dimension"
        )
    if not batch:
        raise ConfigError("the batch is an empty dict; give it arrays, each with the rows as first dimension")
    named = [name for name in batch if not isinstance(name, str)]
    if named:
        raise ConfigError(f"the batch has an entry {named[0]!r}, which is no text; name entries as in {{'inputs': x}}")
    if needs_inputs and "inputs" not in batch:
        found = ", ".join(batch)
        raise ConfigError(f"the batch has no entry 'inputs', which the model takes; it holds {found}; {RENAME}")


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
        if not wrong.any():
            continue
        weights = batch.get("weights")
        if name == "targets" and isinstance(weights, np.ndarray) and weights.shape == ids.shape[: weights.ndim]:
            wrong &= weights.reshape(*weights.shape, *[1] * (ids.ndim - weights.ndim)) != 0
            if not wrong.any():
                continue
        more = "; negative targets are ignored" if name == "targets" else ""
        raise DataError(
            f"{where} holds {name} of {int(ids[wrong][0])}, but the model has ids 0 to {limit - 1}{more}; "
            "mend the data, or give the model more outputs or a larger vocabulary"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _name(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    return f"an instance of {type(value).__name__}"


def _model_hint(model: Any) -> str:
    kind = model if isinstance(model, type) else type(model)
    if issubclass(kind, nnx.Module):
        return f"write jaxtrain.from_nnx(lambda rngs: {kind.__name__}(..., rngs=rngs))"
    if issubclass(kind, linen.Module):
        return f"write jaxtrain.from_linen({kind.__name__}(...), example_inputs)"
    if inspect.isroutine(model):
        return "write jaxtrain.from_functions(init, apply)"
    return "write jaxtrain.from_nnx, from_linen, from_functions or build_model"


def _task_hint(task: Any) -> str:
    made = [name for name, make in TASKS.items() if make is inspect.unwrap(task)]
    if made:
        return f"write jaxtrain.{made[0]}()"
    if callable(task):
        return "write jaxtrain.Task('name', loss) with loss(outputs, batch) -> (sum, weight, metrics)"
    return f"write one of {', '.join(f'jaxtrain.{name}()' for name in TASKS)}, or jaxtrain.Task('name', loss)"


def _optimizer_hint(optimizer: Any) -> str:
    if isinstance(optimizer, optax.MultiSteps):
        return "call its gradient_transformation(), or use accumulation_steps"
    if isinstance(optimizer, nnx.Optimizer):
        return "pass the optax transformation that it was made of: optax.adamw(1e-3)"
    if inspect.isroutine(optimizer):
        return f"call it first: optax.{optimizer.__name__}(1e-3)"
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        return f"write optax.adamw({optimizer})"
    return "write optax.adamw(1e-3)"
