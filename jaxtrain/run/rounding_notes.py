"""What a run says before it starts of parameters in bf16 that its learning rate cannot move."""

import jax
import jax.numpy as jnp

from jaxtrain.config.optimizers import CalledOptimizer
from jaxtrain.layout.sharding import path_name
from jaxtrain.optim.rules import group_number
from jaxtrain.run.own_parts import OwnParts
from jaxtrain.train.assemble import Run

# bfloat16 has 8 bits: the number below 1 is 1 - 2^-8, and what changes 1 by half of that or less is rounded away.
_LOST = 2.0**-9
# Their steps are about as long as the learning rate; those of SGD are as long as the gradient makes them.
_BOUNDED = ("adamw", "lion", "muon", "adafactor")


def rounding_notes(run: Run, own: OwnParts) -> list[str]:
    """A line where norm scales in bf16 stay at 1, since every step of theirs is rounded away.

    Args:
        run: assembled from a config.
        own: the parts that came from Python.
    """
    optimizer = run.config.optimizer
    if run.step.policy.name != "bf16_pure":
        return []
    # Such scales are stored as their distance from 1.
    if own["model"] is None and getattr(run.config.model, "norm_offset", False):
        return []
    scales = _trained_scales(run)
    moves = "precision.policy=bf16 keeps parameters in fp32, which moves them"
    if own["optimizer"] is not None or isinstance(optimizer, CalledOptimizer):
        # How long its steps are is not known, only the rate that it may show.
        if not scales or _highest_shown(run) > _LOST:
            return []
        return [
            f"precision.policy=bf16_pure: bf16 rounds away what changes norm scales near 1 by less than 2e-3 in a "
            f"step; {moves}"
        ]
    matches = [group.match for group in optimizer.groups]
    rates = []
    for path in scales:
        number = group_number(path, matches)
        group = optimizer.groups[number] if number < len(matches) else None
        kind = optimizer.kind if group is None or group.optimizer is None else group.optimizer.kind
        if kind in _BOUNDED:
            rates.append(optimizer.learning_rate * (1.0 if group is None else group.learning_rate_factor))
    lost = [rate for rate in rates if rate <= _LOST]
    if not lost:
        return []
    return [
        f"precision.policy=bf16_pure: norm scales near 1 will not move, since bf16 rounds steps below 2e-3 away there "
        f"(learning rate {max(lost):g}); {moves}"
    ]


def _trained_scales(run: Run) -> list[str]:
    """Paths of the norm scales that are trained."""
    trained, found = run.step.program.settings.trainable, []
    for path, _ in jax.tree_util.tree_leaves_with_path(run.step.abstract_state.params):
        *parents, name = path_name(path).split("/")
        if name == "scale" and any("norm" in parent for parent in parents):
            found.append(path_name(path))
    return [path for path in found if trained is None or trained(path)]


def _highest_shown(run: Run) -> float:
    """The highest learning rate that the metrics will show, of 32 steps; 0: they show none."""
    rate, steps = run.step.program.settings.learning_rate, run.config.train.steps
    if rate is None:
        return 0.0
    return max(float(jnp.asarray(rate(jnp.int32(steps * part // 32)))) for part in range(32))
