"""Training on devices that may be taken away: how often to save, and what is lost. No jax here.

Sources:
    Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17(9).
    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3).
"""

import math
from dataclasses import dataclass

# One a day for each node, on the careful side of what is published: Google's preemptible VMs always stop after 24 hours
# (cloud.google.com/compute/docs/instances/preemptible), while AWS's Spot Instance Advisor sorts instance types by the
# share of instances taken within a month, with "above 20 %" as its worst class.
INTERRUPTIONS_PER_NODE_HOUR = 1 / 24
# Between two saves: more often, and hosts and storage do little else; more rarely, and a failure costs half a day.
_LEAST_INTERVAL, _MOST_INTERVAL = 300.0, 6 * 3600.0
# Below it a run on spot devices does not end in practice: 100 times as long as without interruptions.
_LEAST_EFFICIENCY, _NO_EFFICIENCY = 0.01, 1e-12


@dataclass(frozen=True)
class Spot:
    """Training on devices that may be taken away at any time.

    Attributes:
        usd_hour: price of one device.
        checkpoint_interval_seconds: work between two saves: as asked for, or the recommended.
        recommended_interval_seconds: that of `young_interval`, within 5 minutes and 6 hours.
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

    No use is made of the notice that a cloud gives (two minutes at AWS): a run that saves on it loses less.

    Args:
        interval_seconds: work between two saves (τ).
        save_seconds: time that a save keeps the devices from computing (δ).
        restart_seconds: from an interruption until work goes on: waiting for a device, starting, compiling, restoring
            (R).
        mean_seconds_between_interruptions: of the whole job (M).

    Returns:
        Between 0 and 1; 0 itself only where the share is too small for a float.
    """
    mean = mean_seconds_between_interruptions
    segment = (interval_seconds + save_seconds) / mean
    # 1 / (exp(x) - 1) written as exp(-x) / (1 - exp(-x)), which cannot overflow.
    return interval_seconds / mean * math.exp(-restart_seconds / mean - segment) / -math.expm1(-segment)


def spot_cost(
    work_hours: float,
    *,
    usd_hour: float,
    num_devices: int,
    interruptions_per_hour: float,
    save_seconds: float,
    restart_seconds: float,
    checkpoint_interval_seconds: float | None,
) -> Spot:
    """What a run costs on devices that may be taken away.

    Args:
        work_hours: wall time of computing alone.
        usd_hour: rent of one device.
        num_devices: devices of the whole job.
        interruptions_per_hour: of the whole job.
        save_seconds, restart_seconds: see `spot_efficiency`.
        checkpoint_interval_seconds: work between two saves; None: the recommended.
    """
    mean_seconds = 3600 / interruptions_per_hour
    recommended = min(max(young_interval(save_seconds, mean_seconds), _LEAST_INTERVAL), _MOST_INTERVAL)
    interval = checkpoint_interval_seconds or recommended
    # A run that is shorter than the interval saves at its end.
    segment = min(interval, work_hours * 3600)
    # What does not end is no endless number: `is_sensible` says it.
    efficiency = max(spot_efficiency(segment, save_seconds, restart_seconds, mean_seconds), _NO_EFFICIENCY)
    hours = work_hours / efficiency
    return Spot(
        usd_hour=usd_hour,
        checkpoint_interval_seconds=interval,
        recommended_interval_seconds=recommended,
        efficiency=efficiency,
        hours=hours,
        usd=hours * num_devices * usd_hour,
        interruptions=hours * interruptions_per_hour,
    )
