"""The units of a model's outputs, from the table whose numbers it predicts."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.model import MLPConfig, OutputScale
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError


def with_output_scale(config: Config, reading: Mapping[str, Any] | None, *, task: object) -> Config:
    """The config that a model is built from: with the scale of the targets as that of the outputs, if it has none.

    A layer that begins with outputs of size 1 takes thousands of steps of Adam to reach prices. The config of a run
    stays without it, because a run on another table takes the scale of that.

    Args:
        config: the run.
        reading: `Data.reading` of the data that it is trained on.
        task: name of the shipped task; anything else: it is one of the user's, whose outputs may be no numbers.

    Raises:
        ConfigError: the config has a scale, and its task is not of numbers.
    """
    model = config.model
    if not isinstance(model, MLPConfig) or not isinstance(task, str):
        return config
    if model.output_scale is not None:
        if task != "regression":
            raise ConfigError(f"model.output_scale is of numbers, and task={task} has none; leave it out")
        return config
    mean, deviation = ((reading or {}).get(name) for name in ("target_mean", "target_deviation"))
    if task != "regression" or mean is None or deviation is None:
        return config
    try:
        # A constant is learned as it is.
        scale = OutputScale(mean=tuple(mean), deviation=tuple(one or 1.0 for one in deviation))
    except ConfigError:  # numbers near the ends of float32, which nothing brings to size 1
        return config
    return config.model_copy(update={"model": model.model_copy(update={"output_scale": scale})})
