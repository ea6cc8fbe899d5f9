"""The units of a model's outputs, from the table whose numbers it predicts."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from jaxtrain.config.models import MLPConfig, OutputScale
from jaxtrain.config.schema import Config


def with_output_scale(config: Config, reading: Mapping[str, Any] | None) -> Config:
    """The config with the scale of the targets as that of the outputs, where it has none and its data says one.

    A layer that begins with outputs of size 1 takes thousands of steps of Adam to reach prices.

    Args:
        config: the run.
        reading: `Data.reading` of its data.
    """
    model = config.model
    if config.task != "regression" or not isinstance(model, MLPConfig) or model.output_scale is not None:
        return config
    mean, deviation = ((reading or {}).get(name) for name in ("target_mean", "target_deviation"))
    if mean is None or deviation is None:
        return config
    try:
        scale = OutputScale(mean=tuple(mean), deviation=tuple(deviation))
    except ValidationError:  # numbers near the ends of float32, which nothing brings to size 1
        return config
    return config.model_copy(update={"model": model.model_copy(update={"output_scale": scale})})
