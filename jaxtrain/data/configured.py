"""The data that a whole config describes, and its batches of training."""

from jaxtrain.config.schema import Config
from jaxtrain.data import Batches, Data, open_data
from jaxtrain.data.stream import BatchStream


def open_run_data(config: Config) -> Data:
    """Open the data of a config, with the model's sequence length where the data leaves its own out."""
    length = getattr(config.model, "max_sequence_length", None)
    task = config.task if isinstance(config.task, str) else None
    return open_data(config.data, sequence_length=length, seed=config.seed, task=task)


def reading_threads(config: Config) -> int | None:
    """Return what `Batches` takes as `workers`."""
    return None if config.train.workers == "auto" else config.train.workers


def training_batches(config: Config, data: Data) -> Batches | BatchStream:
    """Return the batches of a config's training rows; an iterable of batches is its own."""
    if isinstance(data.train, BatchStream):
        return data.train
    size = config.train.global_batch_size
    return Batches(data.train, size, seed=config.seed, shuffle=True, workers=reading_threads(config))
