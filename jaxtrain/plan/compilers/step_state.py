"""What the shapes of a step say without compiling: the bytes of its state and of its batch on one device."""

import math
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.plan.workload.record import Workload


@dataclass(frozen=True)
class StepState:
    """Bytes of one device.

    Attributes:
        num_parameters: of the model.
        parts: name -> bytes between steps.
        batch_bytes: of the batch.
        host_parts: name -> bytes in the host's memory for one device: what is offloaded.
    """

    num_parameters: int
    parts: dict[str, int]
    batch_bytes: int
    host_parts: dict[str, int] = field(default_factory=dict)


def step_state(config: Config, workload: Workload, devices: list[Any]) -> StepState:
    """Build the step of a config, and read the shapes and shardings of its state.

    Args:
        config: the run; its degrees multiply to the number of devices.
        workload: from `describe_workload`.
        devices: as many as the hardware has, of any kind.

    Raises:
        ConfigError: parts that do not fit together, or a layout that the model cannot take.
    """
    import jax

    from jaxtrain.plan.compilers.exact import planned_step, sharded_bytes

    step, batch = planned_step(config, workload, devices)
    state, on_host = step.abstract_state, step.state_on_host
    placed = step.batch_shardings(batch)
    each = zip(jax.tree.leaves(batch), jax.tree.leaves(placed), strict=True)
    names = {
        "parameters": ("params",),
        "optimizer state": ("optimizer_state",),
        "moving average": ("ema", "ema_model_state"),
        "model state": ("model_state",),
    }
    parts, host_parts = {}, {}
    for name, fields in names.items():
        trees, hosts = [getattr(state, one) for one in fields], [getattr(on_host, one) for one in fields]
        total = sharded_bytes(trees)
        moved = sharded_bytes(jax.tree.map(lambda leaf, host: leaf if host else None, trees, hosts))
        parts |= {name: total - moved} if total > moved else {}
        host_parts |= {name: moved} if moved else {}
    return StepState(
        num_parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        parts=parts,
        batch_bytes=sum(math.prod(where.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, where in each),
        host_parts=host_parts,
    )
