"""What a run says before it starts of parameters in bf16 that its learning rate cannot move."""

import jax

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
    optimizer, precision = run.config.optimizer, run.config.precision
    if precision.policy != "bf16_pure" or own["optimizer"] is not None or isinstance(optimizer, CalledOptimizer):
        return []
    # Such scales are stored as their distance from 1.
    if own["model"] is None and getattr(run.config.model, "norm_offset", False):
        return []
    trained, matches = run.step.program.settings.trainable, [group.match for group in optimizer.groups]
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(run.step.abstract_state.params)]
    rates = []
    for path in paths:
        *parents, name = path.split("/")
        if name != "scale" or not any("norm" in parent for parent in parents) or not (trained is None or trained(path)):
            continue
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
        f"(learning rate {max(lost):g}); precision.policy=bf16 keeps parameters in fp32, which moves them"
    ]
