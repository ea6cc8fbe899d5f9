"""From a config to its data and its batches; and settings of the config that only the data decides."""

import math
from typing import Any

from jaxtrain.config.schema import Config, TrainConfig
from jaxtrain.data import Batches, Data, open_data
from jaxtrain.data.stream import BatchStream
from jaxtrain.errors import ConfigError

# Entries of `stream_of` that come from the config; the others describe the data.
BATCH_KEYS = ("seed", "global_batch_size")


def open_run_data(config: Config) -> Data:
    """Open the data of a config, with the model's sequence length where the data leaves its own out."""
    length = getattr(config.model, "max_sequence_length", None)
    task = config.task if isinstance(config.task, str) else None
    return open_data(config.data, sequence_length=length, seed=config.seed, task=task)


def reading_threads(config: Config) -> int | None:
    """Return the number of threads that read rows, or None: `Batches` chooses."""
    return None if config.train.workers == "auto" else config.train.workers


def training_batches(config: Config, data: Data) -> Batches | BatchStream:
    """Return the batches of a config's training rows; an iterable of batches is taken as it is."""
    if isinstance(data.train, BatchStream):
        return data.train
    size = config.train.global_batch_size
    return Batches(data.train, size, seed=config.seed, shuffle=True, workers=reading_threads(config))


def stream_of(config: Config, data: Data) -> dict[str, Any]:
    """Return the settings that decide which rows batch k holds: the fingerprint of the data, and `BATCH_KEYS`.

    Checkpoints and run.json record them, and a run with others does not resume.
    """
    return {**data.fingerprint, "seed": config.seed, "global_batch_size": config.train.global_batch_size}


def with_counted_steps(config: Config, data: Data) -> Config:
    """Return a config whose `train.epochs` are steps; the last batch may go beyond the last pass.

    Raises:
        ConfigError: epochs of an iterable of batches.
    """
    epochs = config.train.epochs
    if epochs is None:
        return config
    if isinstance(data.train, BatchStream):
        raise ConfigError(f"epochs={epochs:g}, but an iterable of batches has no known length; give steps=")
    steps = epochs * len(data.train) / config.train.global_batch_size
    # A product of floats may lie a hair above the whole number that is meant: 1.1 * 100 is 110.00000000000001.
    if math.isclose(steps, round(steps), rel_tol=1e-12):
        steps = round(steps)
    settings = {**vars(config.train), "epochs": None, "steps": math.ceil(steps)}
    return config.model_copy(update={"train": TrainConfig(**settings)})


def with_batch_size(config: Config, data: Data, *, is_set: bool) -> Config:
    """Return a config with the batch size of an iterable of batches, which alone knows it.

    Raises:
        ConfigError: another size is set (`is_set`).
    """
    if not isinstance(data.train, BatchStream):
        return config
    size = data.train.batch_size
    if is_set and config.train.global_batch_size != size:
        raise ConfigError(
            f"batch_size={config.train.global_batch_size}, but the iterable gives batches of {size} rows; leave it out"
        )
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": size})})
