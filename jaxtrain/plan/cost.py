"""What a run costs: steps, hours and rent, in USD. No jax here.

Source:
    Llama Team 2024 (arXiv 2407.21783), section 3.3.4.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.plan.targets import Target, rented_devices
from jaxtrain.plan.workload import Workload


@dataclass(frozen=True)
class Cost:
    """What a run costs. Where a price is not known, what depends on it is None.

    Attributes:
        steps: optimizer steps.
        hours: wall time on devices that stay, with unplanned downtime.
        downtime: share of it in which nothing is trained.
        device_hours: `hours` of all devices.
        rented_devices: those that rent is paid for, with what comes along and is not used.
        on_demand_usd: rent of these for `hours`.
        spot_usd: the same at the price of devices that may be taken away, if none is.
    """

    steps: int
    hours: float
    downtime: float
    device_hours: float
    rented_devices: int
    on_demand_usd: float | None
    spot_usd: float | None


def unplanned_downtime(num_devices: int) -> float:
    """Share of a run's wall time that is lost to failures of so many devices: lost work, restarts, waiting.

    Llama Team 2024: 419 unexpected interruptions in 54 days of 16,384 H100, and 90 % of the time spent on training,
    which is 18 minutes for each interruption. A job of fewer devices fails less often.
    """
    return 0.1 * num_devices / (0.1 * num_devices + 0.9 * 16_384)


def run_cost(steps: int, step_seconds: float, target: Target) -> Cost:
    """Hours and money of a run of so many optimizer steps."""
    hardware, num_devices, rented = target.hardware, target.num_devices, rented_devices(target)
    downtime = unplanned_downtime(num_devices)
    hours = step_seconds * steps / 3600 / (1 - downtime)
    on_demand, spot = hardware.on_demand_usd_hour, hardware.spot_usd_hour
    return Cost(
        steps=steps,
        hours=hours,
        downtime=downtime,
        device_hours=hours * num_devices,
        rented_devices=rented,
        on_demand_usd=None if on_demand is None else on_demand * hours * rented,
        spot_usd=None if spot is None else spot * hours * rented,
    )


def with_tokens(config: Config, workload: Workload, tokens: float) -> Config:
    """The config with the steps that train on so many tokens, rounded up.

    Raises:
        ConfigError: a number that is not positive, or rows that have no tokens.
    """
    if not 0 < tokens < math.inf:
        raise ConfigError(f"tokens is {tokens}; give a positive number")
    if workload.tokens is None:
        raise ConfigError(f"tokens {tokens:g}, but data.kind={config.data.kind} has none; set train.steps instead")
    return with_steps(config, math.ceil(Fraction(str(tokens)) / workload.tokens))


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
