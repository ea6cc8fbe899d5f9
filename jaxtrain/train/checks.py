"""What users hand to a train step, checked before it is used: one line for each mistake."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import optax
from flax import linen, nnx

from jaxtrain.data.dataset import Data
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.models.model import Model
from jaxtrain.tasks import TASKS, Task


def check_parts(model: Any, task: Any, optimizer: Any) -> None:
    """Raise where a model, a task or an optimizer is something else.

    Raises:
        ConfigError: what was given, what is wanted, and how to write it.
    """
    check_model(model)
    check_task(task)
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ConfigError(
            f"the optimizer is {_name(optimizer)}, not an optax transformation; {_optimizer_hint(optimizer)}"
        )


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


def check_batch(batch: Any) -> None:
    """Raise where a batch is no dict with `inputs`.

    Raises:
        ConfigError: what the batch is or holds.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"the batch is {_name(batch)}, not a dict of arrays; "
            "write {'inputs': x, 'targets': y}, each with the rows as first dimension"
        )
    if "inputs" not in batch:
        found = ", ".join(map(str, batch)) or "nothing"
        raise ConfigError(f"the batch has no entry 'inputs', which the model takes; it holds {found}")


def check_ids(batch: Mapping[str, Any], *, limits: Mapping[str, int], where: str) -> None:
    """Raise where host arrays hold ids that the model does not have.

    Args:
        batch: NumPy arrays; entries of other types are passed over.
        limits: entry -> number of ids it may hold. Negative `targets`, and those of weight 0, are ignored.
        where: the batch, in the message.

    Raises:
        DataError: the entry, the id, and the ids that there are.
    """
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
    made = [name for name, make in TASKS.items() if make is task or name == task]
    if made:
        return f"write jaxtrain.{made[0]}()"
    if callable(task):
        return "write jaxtrain.Task('name', loss) with loss(outputs, batch) -> (sum, weight, metrics)"
    return f"write one of {', '.join(f'jaxtrain.{name}()' for name in TASKS)}, or jaxtrain.Task('name', loss)"


def _optimizer_hint(optimizer: Any) -> str:
    if isinstance(optimizer, nnx.Optimizer):
        return "pass the optax transformation that it was made of: optax.adamw(1e-3)"
    if inspect.isroutine(optimizer):
        return f"call it first: optax.{optimizer.__name__}(1e-3)"
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        return f"write optax.adamw({optimizer})"
    return "write optax.adamw(1e-3)"
