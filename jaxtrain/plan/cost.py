"""What a run costs: steps, hours, rent of devices that stay or may be taken away.

No jax here. Prices are in USD and, unless a name says otherwise, of one device and one hour.

Sources:
    Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17(9).
    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3).
    Llama Team 2024 (arXiv 2407.21783), section 3.3.4.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.plan.targets import Target, rented_devices
from jaxtrain.plan.workload import Workload

# One a day for each node, on the careful side of what is published: Google's preemptible VMs always stop after 24 hours
# (cloud.google.com/compute/docs/instances/preemptible), while AWS's Spot Instance Advisor sorts instance types by the
# share of instances taken within a month, with "above 20 %" as its worst class.
INTERRUPTIONS_PER_NODE_HOUR = 1 / 24
# Between two saves: more often, and hosts and storage do little else; more rarely, and a failure costs half a day.
_LEAST_INTERVAL, _MOST_INTERVAL = 300.0, 6 * 3600.0
# Below it a run on spot devices does not end in practice: 100 times as long as without interruptions.
_LEAST_EFFICIENCY, _NO_EFFICIENCY = 0.01, 1e-12
# What cloud disks and object stores take of one host. Saves are written while training goes on, so this is the most
# that one can cost.
_SAVE_BYTES_PER_SECOND = 1e9
_LEAST_SAVE_SECONDS = 5.0
# A new machine, the program compiled or read from the cache, the state read.
_RESTART_SECONDS = 300.0


@dataclass(frozen=True)
class Spot:
    """Training on devices that may be taken away at any time.

    Attributes:
        usd_hour: price of one device.
        checkpoint_interval_seconds: work between two saves: that of `young_interval`, within 5 minutes and 6 hours.
        efficiency: share of the wall time that is work that is kept, see `spot_efficiency`.
        hours: wall time, with lost work, saves and restarts.
        usd: for all devices. All of the wall time is paid for: an upper bound where restarting means waiting for a
            device that is not paid for yet.
        interruptions: expected number, those that hit a restart included.
    """

    usd_hour: float
    checkpoint_interval_seconds: float
    efficiency: float
    hours: float
    usd: float
    interruptions: float

    @property
    def is_sensible(self) -> bool:
        """Whether enough work is kept for the figures to mean anything."""
        return self.efficiency >= _LEAST_EFFICIENCY


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
        spot: the same on devices that may be taken away.
    """

    steps: int
    hours: float
    downtime: float
    device_hours: float
    rented_devices: int
    on_demand_usd: float | None
    spot: Spot | None


def young_interval(save_seconds: float, mean_seconds_between_interruptions: float) -> float:
    """Work between two saves that wastes the least: `sqrt(2 δ M)` (Young 1974).

    Balances saves, `δ / τ` of the time, with work that is lost, half an interval for each interruption: `τ / 2 M`. Of
    first order: good while a save takes much less time than passes between interruptions.

    Args:
        save_seconds: time that a save keeps the devices from computing (δ).
        mean_seconds_between_interruptions: of the whole job (M).

    Returns:
        Seconds of work.
    """
    return math.sqrt(2 * save_seconds * mean_seconds_between_interruptions)


def spot_efficiency(
    interval_seconds: float,
    save_seconds: float,
    restart_seconds: float,
    mean_seconds_between_interruptions: float,
) -> float:
    """Share of the wall time that is work that is kept, when interruptions come at random.

    Daly's complete cost function (Daly 2006), by which work of `T` seconds takes
    `T / τ · M exp(R / M) (exp((τ + δ) / M) - 1)`. It is exact for interruptions that are a Poisson process and may come
    during work, saves and restarts. The first-order cost, `1 - δ / τ - τ / 2 M - R / M`, becomes negative where
    interruptions are as frequent as saves; this one does not.

    Args:
        interval_seconds: work between two saves (τ).
        save_seconds: as `young_interval` takes them (δ), and so are the last (M).
        restart_seconds: from an interruption until work goes on: a device, start, compile, restore (R).
        mean_seconds_between_interruptions: of the whole job.

    Returns:
        Between 0 and 1; 0 itself only where the share is too small for a float.
    """
    mean = mean_seconds_between_interruptions
    segment = (interval_seconds + save_seconds) / mean
    # 1 / (exp(x) - 1) written as exp(-x) / (1 - exp(-x)), which cannot overflow.
    return interval_seconds / mean * math.exp(-restart_seconds / mean - segment) / -math.expm1(-segment)


def unplanned_downtime(num_devices: int) -> float:
    """Share of a run's wall time that is lost to failures of so many devices: lost work, restarts, waiting.

    Llama Team 2024: 419 unexpected interruptions in 54 days of 16,384 H100, and 90 % of the time spent on training,
    which is 18 minutes for each interruption. A job of fewer devices fails less often.
    """
    return 0.1 * num_devices / (0.1 * num_devices + 0.9 * 16_384)


def run_cost(steps: int, step_seconds: float, target: Target, saved_bytes: int) -> Cost:
    """Hours and money of a run of so many optimizer steps, whose checkpoints have so many bytes."""
    hardware, num_devices, rented = target.hardware, target.num_devices, rented_devices(target)
    downtime = unplanned_downtime(num_devices)
    computing = step_seconds * steps / 3600
    hours = computing / (1 - downtime)
    rent = hardware.on_demand_usd_hour
    return Cost(
        steps=steps,
        hours=hours,
        downtime=downtime,
        device_hours=hours * num_devices,
        rented_devices=rented,
        on_demand_usd=None if rent is None else rent * hours * rented,
        spot=_spot(computing, target, saved_bytes),
    )


def _spot(work_hours: float, target: Target, saved_bytes: int) -> Spot | None:
    """What so many hours of computing cost on devices that may be taken away; None: they have no price.

    One lost device stops the whole job, and a cloud takes nodes or slices, not devices. So the job is interrupted as
    many times as often as one node as it has nodes: exact where nodes are taken independently, too often where several
    go at once.
    """
    hardware = target.hardware
    if hardware.spot_usd_hour is None:
        return None
    # All hosts write at once, each its part; what is replicated is written once.
    machines = max(target.num_hosts, math.ceil(target.num_devices / hardware.devices_per_host))
    save_seconds = max(_LEAST_SAVE_SECONDS, saved_bytes / machines / _SAVE_BYTES_PER_SECOND)
    interruptions_per_hour = INTERRUPTIONS_PER_NODE_HOUR * target.num_hosts
    mean_seconds = 3600 / interruptions_per_hour
    interval = min(max(young_interval(save_seconds, mean_seconds), _LEAST_INTERVAL), _MOST_INTERVAL)
    # A run that is shorter than the interval saves at its end.
    segment = min(interval, work_hours * 3600)
    # What does not end is no endless number: `is_sensible` says it.
    efficiency = max(spot_efficiency(segment, save_seconds, _RESTART_SECONDS, mean_seconds), _NO_EFFICIENCY)
    hours = work_hours / efficiency
    return Spot(
        usd_hour=hardware.spot_usd_hour,
        checkpoint_interval_seconds=interval,
        efficiency=efficiency,
        hours=hours,
        usd=hours * rented_devices(target) * hardware.spot_usd_hour,
        interruptions=hours * interruptions_per_hour,
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
