"""What a run costs: steps, hours, rent of devices that stay or may be taken away, electricity, buying instead.

No jax here. Prices are in USD and, unless a name says otherwise, of one device and one hour.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from jaxtrain.errors import ConfigError
from jaxtrain.plan.cost.spot import INTERRUPTIONS_PER_NODE_HOUR, Spot, spot_cost


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
        energy_kwh: all devices at board power for `hours`: an upper bound for them, and without hosts and cooling.
        energy_usd: price of that energy. Rent includes it, owning does not.
        purchase_usd: price of buying all devices.
        break_even_hours: hours of renting on demand after which buying would have been cheaper. None also where rent is
            free.
    """

    steps: int
    hours: float
    downtime: float
    device_hours: float
    rented_devices: int
    on_demand_usd: float | None
    spot: Spot | None
    energy_kwh: float | None
    energy_usd: float | None
    purchase_usd: float | None
    break_even_hours: float | None


def unplanned_downtime(num_devices: int) -> float:
    """Share of a run's wall time that is lost to failures of so many devices: lost work, restarts, waiting.

    Llama Team 2024 (arXiv 2407.21783), section 3.3.4: 419 unexpected interruptions in 54 days of 16,384 H100, and 90 %
    of the time spent on training, which is 18 minutes for each interruption. A job of fewer devices fails less often.
    """
    return 0.1 * num_devices / (0.1 * num_devices + 0.9 * 16_384)


def training_cost(
    *,
    step_seconds: float,
    steps: int,
    num_devices: int,
    watts: float | None,
    on_demand_usd_hour: float | None,
    spot_usd_hour: float | None,
    purchase_usd: float | None,
    save_seconds: float,
    restart_seconds: float,
    num_nodes: int = 1,
    rented_devices: int | None = None,
    interruptions_per_node_hour: float = INTERRUPTIONS_PER_NODE_HOUR,
    checkpoint_interval_seconds: float | None = None,
    usd_per_kwh: float = 0.12,
    downtime: float = 0.0,
) -> Cost:
    """Hours, money and energy of a run.

    One lost device stops the whole job, and a cloud takes nodes, not devices. So the job is interrupted `num_nodes`
    times as often as one node: exact where nodes are taken independently, too often where several go at once.

    Args:
        step_seconds: wall time of an optimizer step.
        steps: optimizer steps.
        num_devices: devices of the whole job.
        watts: board power of one device.
        on_demand_usd_hour: rent of one device, None if not known.
        spot_usd_hour: rent of one device that may be taken away, None if not known.
        purchase_usd: price of one device, None if not known.
        save_seconds: see `spot_efficiency`; so are the next three.
        restart_seconds: from an interruption until work goes on.
        num_nodes: what is taken away as a whole: machines with GPUs, or slices of TPUs.
        rented_devices: that rent is paid for; None: `num_devices`.
        interruptions_per_node_hour: rate at which one of them is taken.
        checkpoint_interval_seconds: work between two saves, None for the recommended.
        usd_per_kwh: price of electricity.
        downtime: unplanned, as a share of the wall time on devices that stay.
    """
    computing = step_seconds * steps / 3600
    hours = computing / (1 - downtime)
    device_hours = hours * num_devices
    rented = num_devices if rented_devices is None else rented_devices
    energy_kwh = None if watts is None else watts / 1000 * device_hours

    spot = None
    if spot_usd_hour is not None:
        spot = spot_cost(
            computing,
            usd_hour=spot_usd_hour,
            num_devices=rented,
            interruptions_per_hour=interruptions_per_node_hour * num_nodes,
            save_seconds=save_seconds,
            restart_seconds=restart_seconds,
            checkpoint_interval_seconds=checkpoint_interval_seconds,
        )

    break_even = None
    if purchase_usd is not None and on_demand_usd_hour:
        break_even = purchase_usd * num_devices / (on_demand_usd_hour * rented)

    return Cost(
        steps=steps,
        hours=hours,
        downtime=downtime,
        device_hours=device_hours,
        rented_devices=rented,
        on_demand_usd=None if on_demand_usd_hour is None else on_demand_usd_hour * hours * rented,
        spot=spot,
        energy_kwh=energy_kwh,
        energy_usd=None if energy_kwh is None else energy_kwh * usd_per_kwh,
        purchase_usd=None if purchase_usd is None else purchase_usd * num_devices,
        break_even_hours=break_even,
    )


def steps_for(
    *,
    tokens: float | None = None,
    epochs: float | None = None,
    rows_per_epoch: int | None = None,
    tokens_per_step: int | None = None,
    rows_per_step: int,
) -> int:
    """Optimizer steps that train on so many tokens or epochs, rounded up to whole steps.

    Args:
        tokens: to train on, with `tokens_per_step`; or
        epochs: to train for, with `rows_per_epoch`.
        rows_per_epoch: rows of the data.
        tokens_per_step: tokens of a global batch.
        rows_per_step: rows of a global batch.

    Returns:
        Steps.

    Raises:
        ConfigError: not exactly one of tokens and epochs, what it takes is missing.
    """
    if tokens is not None and epochs is None:
        if tokens_per_step is None:
            raise ConfigError(f"tokens {tokens:g} without tokens_per_step; give the tokens of a global batch")
        return math.ceil(_exact(tokens) / tokens_per_step)
    if epochs is not None and tokens is None:
        if rows_per_epoch is None:
            raise ConfigError(
                f"epochs {epochs:g} take the number of rows of the data too: --rows-per-epoch (rows_per_epoch=)"
            )
        return math.ceil(_exact(epochs) * rows_per_epoch / rows_per_step)
    raise ConfigError(f"tokens {tokens} and epochs {epochs}; give one of the two")


def _exact(number: float) -> Fraction:
    """The number as it is written: 0.1 times 30 is then 3, and not a little more, which would round up to 4."""
    return Fraction(str(number))
