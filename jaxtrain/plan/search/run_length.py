"""A config of other steps: those that train on the tokens or epochs that a plan is asked for. No jax here."""

import math
from fractions import Fraction

from jaxtrain.config.schema import Config
from jaxtrain.plan.cost.training import steps_for
from jaxtrain.plan.workload.record import Workload


def with_length(
    config: Config,
    workload: Workload,
    *,
    tokens: float | None = None,
    epochs: float | None = None,
    rows_per_epoch: int | None = None,
) -> Config:
    """The config with the steps that train on so many tokens or epochs; as it is where neither is asked for.

    Args:
        config: the run.
        workload: its rows; a pair of answers is one row of the data and of the global batch, and two of these.
        tokens: to train on.
        epochs: to train for, with `rows_per_epoch`.
        rows_per_epoch: rows of the data.

    Raises:
        ConfigError: tokens and epochs both, tokens of rows that have none, or a number that is not positive.
    """
    if tokens is None and epochs is None:
        return config
    steps = steps_for(
        tokens=tokens,
        epochs=epochs,
        rows_per_epoch=rows_per_epoch,
        tokens_per_step=workload.tokens,
        rows_per_step=config.train.global_batch_size,
    )
    return with_steps(config, steps)


def with_steps(config: Config, steps: int) -> Config:
    """The config with another number of steps, and the lengths of its learning rate's schedule in proportion."""
    if steps == config.train.steps:
        return config
    schedule, scale = config.optimizer.schedule, Fraction(steps, config.train.steps)
    # Rounded down, so that what fits into the run still does; a short run keeps a step of its warm-up.
    least = 1 if schedule.warmup_steps and steps > 2 else 0
    warmup, decay = max(math.floor(schedule.warmup_steps * scale), least), schedule.decay_steps
    if decay is not None:
        decay = max(math.floor(decay * scale), 1 if schedule.kind == "wsd" else warmup + 1)
    schedule = schedule.model_copy(update={"warmup_steps": warmup, "decay_steps": decay})
    train = config.train.model_copy(update={"steps": steps})
    return config.model_copy(
        update={"train": train, "optimizer": config.optimizer.model_copy(update={"schedule": schedule})}
    )
