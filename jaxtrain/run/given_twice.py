"""What arguments of `fit` set, `overrides` may not set otherwise: only one of the two would be what is trained."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config import Config
from jaxtrain.errors import ConfigError
from jaxtrain.run.agreed import flat

# Arguments that are one key of a config.
ONE_KEY = {
    "steps": "train.steps",
    "batch_size": "train.global_batch_size",
    "accumulation_steps": "train.accumulation_steps",
    "policy": "precision.policy",
    "clip_norm": "optimizer.clip_norm",
    "ema_decay": "optimizer.ema_decay",
    "offload_optimizer": "optimizer.offload",
    "seed": "seed",
}


def check_given_once(asked: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Any], config: Config) -> None:
    """Raise where `overrides` set what an argument sets to another value.

    Args:
        asked: argument -> the keys that it sets, dotted or nested, without those at their defaults.
        overrides: the same of `overrides`.
        config: with both.

    Raises:
        ConfigError: names the argument and both values.
    """
    overridden, found = flat(overrides), flat(config.model_dump())
    for argument, keys in asked.items():
        for key, value in flat(keys).items():
            if key in overridden and found.get(key, value) != value:
                said = f"{argument}={value}" if argument in ONE_KEY else f"{argument} sets {key}={value}"
                raise ConfigError(f"{said}, and overrides set {key}={found[key]}; leave one of them out")
