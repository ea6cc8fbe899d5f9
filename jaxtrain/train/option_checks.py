"""Options of a train step, checked before anything is made of them: one line for each mistake."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config.arguments import check_kind, refusal, shown
from jaxtrain.errors import ConfigError
from jaxtrain.precision.policy import LossScaling


def check_settings(learning_rate: Any, loss_scaling: Any) -> None:
    """Raise where an option of `make_train_step` is of another type.

    Raises:
        ConfigError: what was given, what is wanted, and how to write it.
    """
    if callable(learning_rate):
        _check_schedule(learning_rate)
    if loss_scaling is not None:
        initial = loss_scaling if isinstance(loss_scaling, int | float) else 32768
        write = f"loss_scaling=LossScaling(initial={initial})"
        takes = "the rule of a loss scale"
        check_kind(loss_scaling, LossScaling, what="make_train_step: loss_scaling", takes=takes, write=write)


def _check_schedule(schedule: Callable[..., Any]) -> None:
    """Raise where a function is no schedule: of a step that is being traced it must give one number.

    Raises:
        ConfigError: what it gave or raised.
    """
    what = "make_train_step: learning_rate is a schedule, a function from the step (int32 [], traced) to a rate, which"
    write = "write optax.cosine_decay_schedule(1e-3, steps), or jnp.where in place of `if`"
    try:
        rate = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:  # whatever a user's function raises
        said = (str(error).splitlines() or [""])[0].rstrip(".")
        if isinstance(error, jax.dtypes.TypePromotionError):  # the schedules of optax raise it too
            write = "leave jax_numpy_dtype_promotion at 'standard', or compute from step.astype(jnp.float32)"
        raise ConfigError(f"{what} raised {type(error).__name__}: {said}; {write}") from error
    if getattr(rate, "shape", None) != ():
        raise ConfigError(f"{what} gave {shown(rate)}; {write}")


def check_jit() -> None:
    """Raise where nothing is compiled.

    Raises:
        ConfigError: jax_disable_jit is on.
    """
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue] made when jax is imported
        raise ConfigError(
            "jax_disable_jit is on, and a step that is compiled ahead of time, as fit and runs do, cannot be called "
            "without jit; switch it off, or call step(state, batch) of a step that was not compiled"
        )


def check_compiled(compiled: Any) -> None:
    """Raise where something is no compiled program, or none may be called.

    Raises:
        ConfigError: what was given, and how to make one.
    """
    check_jit()
    if not isinstance(compiled, jax.stages.Compiled):
        raise ConfigError(
            refusal("TrainStep.use", "a compiled step", compiled, "step.use(step.lower(batch).compile())")
        )
