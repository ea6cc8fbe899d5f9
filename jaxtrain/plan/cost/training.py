"""What a run costs: hours, rent of devices that stay or may be taken away, electricity, and when buying is cheaper.

Prices are in USD and, unless a name says otherwise, of one device and one hour.

Sources:
    Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17(9).
    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3).
    Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC21.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from jaxtrain.errors import ConfigError

# One a day for each node, on the careful side of what is published: Google's preemptible VMs always stop after 24 hours
# (cloud.google.com/compute/docs/instances/preemptible), while AWS's Spot Instance Advisor sorts instance types by the
# share of instances taken within a month, with "above 20 %" as its worst class.
INTERRUPTIONS_PER_NODE_HOUR = 1 / 24
# Below it a run on spot devices does not end in practice: 100 times as long as without interruptions.
_LEAST_EFFICIENCY = 0.01


@dataclass(frozen=True)
class Spot:
    """Training on devices that may be taken away at any time.

    Attributes:
        usd_hour: price of one device.
        checkpoint_interval_seconds: work between two saves: as asked for, or Young's.
        recommended_interval_seconds: Young's, see `young_interval`.
        efficiency: share of the wall time that is work that is kept, see `spot_efficiency`.
        hours: wall time, with lost work, saves and restarts.
        usd: for all devices. All of the wall time is paid for: an upper bound where restarting means waiting for a
            device that is not paid for yet.
        interruptions: expected number, those that hit a restart included.
    """

    usd_hour: float
    checkpoint_interval_seconds: float
    recommended_interval_seconds: float
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
        hours: wall time of computing, without saves and interruptions.
        device_hours: `hours` of all devices.
        on_demand_usd: rent of all devices for `hours`.
        spot: the same on devices that may be taken away.
        energy_kwh: all devices at board power for `hours`: an upper bound for them, and without hosts and cooling.
        energy_usd: price of that energy. Rent includes it, owning does not.
        purchase_usd: price of buying all devices.
        break_even_hours: hours of renting on demand after which buying would have been cheaper; the same for one
            device as for all. None also where renting is always cheaper.
    """

    steps: int
    hours: float
    device_hours: float
    on_demand_usd: float | None
    spot: Spot | None
    energy_kwh: float | None
    energy_usd: float | None
    purchase_usd: float | None
    break_even_hours: float | None


def young_interval(save_seconds: float, mean_seconds_between_interruptions: float) -> float:
    """Work between two saves that wastes the least: `sqrt(2 δ M)` (Young 1974).

    Balances saves, `δ / τ` of the time, with work that is lost, half an interval for each interruption: `τ / 2 M`. Of
    first order: good while a save takes much less time than passes between interruptions.

    Args:
        save_seconds: time that a save keeps the devices from computing (δ).
        mean_seconds_between_interruptions: of the whole job (M).

    Returns:
        Seconds of work.

    Raises:
        ConfigError: a time that is not positive.
    """
    _check_positive("save_seconds", save_seconds)
    _check_positive("mean_seconds_between_interruptions", mean_seconds_between_interruptions)
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

    No use is made of the notice that a cloud gives (two minutes at AWS): a run that saves on it loses less.

    Args:
        interval_seconds: work between two saves (τ).
        save_seconds: time that a save keeps the devices from computing (δ).
        restart_seconds: from an interruption until work goes on: waiting for a device, starting, compiling, restoring
            (R).
        mean_seconds_between_interruptions: of the whole job (M).

    Returns:
        Between 0 and 1; 0 itself only where the share is too small for a float.

    Raises:
        ConfigError: a time that is not positive; restarting may take none.
    """
    _check_positive("interval_seconds", interval_seconds)
    _check_positive("save_seconds", save_seconds)
    _check_not_negative("restart_seconds", restart_seconds)
    _check_positive("mean_seconds_between_interruptions", mean_seconds_between_interruptions)
    mean = mean_seconds_between_interruptions
    segment = (interval_seconds + save_seconds) / mean
    # 1 / (exp(x) - 1) written as exp(-x) / (1 - exp(-x)), which cannot overflow.
    return interval_seconds / mean * math.exp(-restart_seconds / mean - segment) / -math.expm1(-segment)


def break_even_hours(
    purchase_usd: float, usd_hour: float, *, watts: float = 0.0, usd_per_kwh: float = 0.0
) -> float | None:
    """Hours of renting a device after which buying it would have been cheaper.

    Args:
        purchase_usd: price of the device.
        usd_hour: rent, with electricity in it.
        watts: what the owned device draws while it computes.
        usd_per_kwh: price of electricity.

    Returns:
        Hours; None when renting is always cheaper, as electricity costs no less than the rent.

    Raises:
        ConfigError: a price or power that is negative.
    """
    _check_not_negative("purchase_usd", purchase_usd)
    _check_not_negative("usd_hour", usd_hour)
    _check_not_negative("usd_per_kwh", usd_per_kwh)
    saved_usd_hour = usd_hour - watts / 1000 * usd_per_kwh
    return purchase_usd / saved_usd_hour if saved_usd_hour > 0 else None


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
    interruptions_per_node_hour: float = INTERRUPTIONS_PER_NODE_HOUR,
    checkpoint_interval_seconds: float | None = None,
    usd_per_kwh: float = 0.12,
    break_even_with_power: bool = False,
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
        interruptions_per_node_hour: rate at which one of them is taken.
        checkpoint_interval_seconds: work between two saves, None for Young's.
        usd_per_kwh: price of electricity.
        break_even_with_power: whether buying is charged with the electricity too, at board power.

    Returns:
        The cost.

    Raises:
        ConfigError: a time, count or rate that is not positive, a price that is negative, more nodes than devices, or
            interruptions so frequent that the job would never end.
    """
    _check_positive("step_seconds", step_seconds)
    _check_count("steps", steps)
    _check_count("num_devices", num_devices)
    _check_count("num_nodes", num_nodes)
    if num_nodes > num_devices:
        raise ConfigError(f"num_nodes {num_nodes} is more than num_devices {num_devices}; each node has a device")
    _check_not_negative("usd_per_kwh", usd_per_kwh)
    for name, number in [
        ("on_demand_usd_hour", on_demand_usd_hour),
        ("spot_usd_hour", spot_usd_hour),
        ("purchase_usd", purchase_usd),
        ("watts", watts),
    ]:
        if number is not None:
            _check_not_negative(name, number)

    hours = step_seconds * steps / 3600
    device_hours = hours * num_devices
    energy_kwh = None if watts is None else watts / 1000 * device_hours

    spot = None
    if spot_usd_hour is not None:
        _check_positive("interruptions_per_node_hour", interruptions_per_node_hour)
        spot = _spot_cost(
            hours,
            usd_hour=spot_usd_hour,
            num_devices=num_devices,
            interruptions_per_hour=interruptions_per_node_hour * num_nodes,
            save_seconds=save_seconds,
            restart_seconds=restart_seconds,
            checkpoint_interval_seconds=checkpoint_interval_seconds,
        )

    break_even = None
    if purchase_usd is not None and on_demand_usd_hour is not None:
        owned_watts = watts or 0.0 if break_even_with_power else 0.0
        break_even = break_even_hours(purchase_usd, on_demand_usd_hour, watts=owned_watts, usd_per_kwh=usd_per_kwh)

    return Cost(
        steps=steps,
        hours=hours,
        device_hours=device_hours,
        on_demand_usd=None if on_demand_usd_hour is None else on_demand_usd_hour * device_hours,
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
        ConfigError: not exactly one of tokens and epochs, what it takes is missing, or a number is not positive.
    """
    _check_count("rows_per_step", rows_per_step)
    if tokens is not None and epochs is None:
        _check_positive("tokens", tokens)
        if tokens_per_step is None:
            raise ConfigError(f"tokens {tokens:g} without tokens_per_step; give the tokens of a global batch")
        _check_count("tokens_per_step", tokens_per_step)
        return math.ceil(_exact(tokens) / tokens_per_step)
    if epochs is not None and tokens is None:
        _check_positive("epochs", epochs)
        if rows_per_epoch is None:
            raise ConfigError(f"epochs {epochs:g} without rows_per_epoch; give the number of rows of the data")
        _check_count("rows_per_epoch", rows_per_epoch)
        return math.ceil(_exact(epochs) * rows_per_epoch / rows_per_step)
    raise ConfigError(f"tokens {tokens} and epochs {epochs}; give one of the two")


def training_days(
    tokens: float,
    parameters: float,
    *,
    num_devices: int,
    flops_per_second: float,
    flops_per_parameter_token: float = 6.0,
) -> float:
    """Days that a language model trains, from its size alone: `c T P / (n X)`, with c = 8 in Narayanan et al. 2021.

    Args:
        tokens: to train on (T).
        parameters: of a dense model (P). The FLOPs of attention and logits come on top, few in a large model.
        num_devices: n.
        flops_per_second: that a device reaches, not its peak (X).
        flops_per_parameter_token: c, two for each pass: 6 for forward and backward (the backward counts twice), 8 where
            full recomputation runs the forward again and `flops_per_second` counts it.

    Returns:
        Days.

    Raises:
        ConfigError: a number that is not positive.
    """
    _check_positive("tokens", tokens)
    _check_positive("parameters", parameters)
    _check_count("num_devices", num_devices)
    _check_positive("flops_per_second", flops_per_second)
    _check_positive("flops_per_parameter_token", flops_per_parameter_token)
    return flops_per_parameter_token * tokens * parameters / (num_devices * flops_per_second) / 86400


def _spot_cost(
    work_hours: float,
    *,
    usd_hour: float,
    num_devices: int,
    interruptions_per_hour: float,
    save_seconds: float,
    restart_seconds: float,
    checkpoint_interval_seconds: float | None,
) -> Spot:
    mean_seconds = 3600 / interruptions_per_hour
    recommended = young_interval(save_seconds, mean_seconds)
    interval = recommended
    if checkpoint_interval_seconds is not None:
        _check_positive("checkpoint_interval_seconds", checkpoint_interval_seconds)
        interval = checkpoint_interval_seconds
    # A run that is shorter than the interval saves at its end.
    segment = min(interval, work_hours * 3600)
    efficiency = spot_efficiency(segment, save_seconds, restart_seconds, mean_seconds)
    hours = work_hours / efficiency if efficiency > 0 else math.inf
    usd = hours * num_devices * usd_hour
    if not math.isfinite(usd):
        raise ConfigError(
            f"with an interruption every {mean_seconds:g} s no work gets done between a restart of {restart_seconds:g} "
            f"s and a save after {segment:g} s; save more often (Young: every {recommended:g} s) or use fewer nodes"
        )
    return Spot(
        usd_hour=usd_hour,
        checkpoint_interval_seconds=interval,
        recommended_interval_seconds=recommended,
        efficiency=efficiency,
        hours=hours,
        usd=usd,
        interruptions=hours * interruptions_per_hour,
    )


def _exact(number: float) -> Fraction:
    """The number as it is written: 0.1 times 30 is then 3, and not a little more, which would round up to 4."""
    return Fraction(str(number))


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value}; give a positive number")


def _check_not_negative(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} is {value}; give zero or a positive number")


def _check_count(name: str, value: int) -> None:
    if not 1 <= value < math.inf or value != int(value):
        raise ConfigError(f"{name} is {value}; give a whole number, at least 1")
