"""What a step takes from Python where its config has a place for it, or none."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optax
from jax.sharding import Mesh

from jaxtrain.errors import ConfigError
from jaxtrain.models.model import ModelState, Params


def check_shown(learning_rate: Any, rules: Any = None) -> None:
    """Raise where what goes with an optimizer from Python is of another type.

    Raises:
        ConfigError: the rate is neither a number nor a schedule, or the rules are no dict.
    """
    is_number = isinstance(learning_rate, (int, float)) and not isinstance(learning_rate, bool)
    if not (learning_rate is None or is_number or callable(learning_rate)):
        raise ConfigError(
            f"learning_rate={learning_rate!r} is no rate; give the number or the schedule that the optimizer has"
        )
    if rules is not None and not isinstance(rules, Mapping):
        raise ConfigError(f"rules={rules!r} is not a dict; write rules={{'mlp': ('tensor',)}}")


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
