"""`parallel: auto`: the layout that the analytic search finds for the devices at hand, with its reasons."""

import dataclasses

from jaxtrain.config.load import Loaded
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import AXES
from jaxtrain.plan.catalogue.hardware import Target
from jaxtrain.plan.catalogue.here import this_machine
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.search.layouts import Found, describe_layout, search, why_not
from jaxtrain.plan.search.own_step import check_can_estimate
from jaxtrain.plan.workload.describe import RowSizes

_GIB = 2**30
# Remat, batch, precision and optimizer stay as the user wrote them.
VARIED_BY_AUTO = ("mesh", "zero", "schedule")


def choose_layout(loaded: Loaded, *, own_model: bool = False, sizes: RowSizes | None = None) -> Loaded:
    """The config with the group `parallel` chosen for the devices of this process' run.

    Args:
        loaded: the config.
        own_model: whether a model from Python takes the place of the config's.
        sizes: of data from Python that takes the place of the config's.

    Raises:
        ConfigError: a model from Python, a degree set besides auto, devices that are not in the catalogue, or no
            layout that fits.
    """
    if own_model:
        # Neither the memory that its backward pass keeps nor its FLOPs are known from its shapes.
        raise ConfigError(
            "parallel.auto plans the model of the config, but model= is your own, which the planner does not know; "
            "set a degree instead: parallel.data=auto replicates its parameters, parallel.fsdp=auto shards them"
        )
    check_can_estimate(loaded.config, "parallel.auto")
    target = this_machine()
    if target is None:
        import jax

        raise ConfigError(
            f"parallel.auto: the planner does not know {jax.devices()[0].device_kind!r}; set degrees, as in "
            "parallel.fsdp=auto, or see jaxtrain plan --list"
        )
    config, reasons = chosen(loaded.config, target, sizes)
    return dataclasses.replace(loaded, config=config, notes=(*loaded.notes, *reasons))


def chosen(config: Config, target: Target, sizes: RowSizes | None = None) -> tuple[Config, list[str]]:
    """The config with the fastest layout that is predicted to fit, and lines that say why.

    Args:
        config: the run.
        target: hardware and count.
        sizes: of data that takes the place of the config's.

    Raises:
        ConfigError: a degree is set besides auto, or no layout fits.
    """
    check_auto(config)
    found = search(config, target, vary=VARIED_BY_AUTO, sizes=sizes)
    if not found.ranked:
        reasons = why_not(found)
        raise ConfigError(
            f"parallel.auto: no layout of {target.name} fits: {reasons[0] if reasons else 'none was possible'}; "
            "see jaxtrain plan --search"
        )
    best = found.ranked[0]
    picked = best.config.parallel.model_copy(update={"auto": False})
    return config.model_copy(update={"parallel": picked}), _reasons(best, found)


def check_auto(config: Config) -> None:
    """Raise where a degree is set besides auto."""
    also = [axis for axis in AXES if axis in config.parallel.model_fields_set]
    if also:
        raise ConfigError(f"parallel.auto chooses every degree, but parallel.{also[0]} is set; leave one of them out")


def _reasons(best: Estimate, found: Found) -> list[str]:
    layout = describe_layout(best.config)
    memory = f"{best.memory.total_bytes / _GIB:.2f} GiB"
    time = "" if best.time is None else f", {best.time.seconds * 1e3:.0f} ms a step bound by {best.time.bound}"
    lines = [
        f"parallel.auto chose {layout} out of {found.tried} layouts for {best.target.name}: predicted {memory} a device"
        f"{time}"
    ]
    if len(found.ranked) > 1 and best.time is not None:
        other = found.ranked[1]
        assert other.time is not None
        slower = f"{other.time.seconds / best.time.seconds:.2f} x the time"
        lines.append(f"the next: {describe_layout(other.config)}, {slower}, {other.memory.total_bytes / _GIB:.2f} GiB")
    if found.too_large:
        lines.append(why_not(found)[0])
    return lines
