"""What a step takes from Python where its config has a place for it, or none."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optax
from jax.sharding import Mesh

from jaxtrain.models.model import ModelState, Params


@dataclass(frozen=True)
class OwnStep:
    """Parts of a step that came from Python; None: what the config says.

    Attributes:
        optimizer: in place of that of the config.
        learning_rate: the rate that the metrics show, of such an optimizer; step -> rate, or a number.
        trainable: parameter path -> whether it is trained.
        rules: logical axes -> mesh axes, added to the default rules.
        mesh: in place of one over all devices.
        params, model_state, skip: what training starts from, in place of what the model draws; see `TrainStep.init`.
    """

    optimizer: optax.GradientTransformation | None = None
    learning_rate: optax.Schedule | float | None = None
    trainable: Callable[[str], bool] | None = None
    rules: Mapping[str, tuple[str, ...]] | None = None
    mesh: Mesh | None = None
    params: Params | Any = None
    model_state: ModelState | Any = None
    skip: Sequence[str] = ()
