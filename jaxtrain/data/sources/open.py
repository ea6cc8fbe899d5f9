"""Opens the data of a config: one case for each kind, whose file is imported when it is opened (grain takes long)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtrain.config import load_config
from jaxtrain.config.data import (
    CalledData,
    ChatData,
    DataConfig,
    DigitsData,
    ImageFolderData,
    ImageRecordsData,
    LabelledTextData,
    SyntheticData,
    TableData,
    TaggedTextData,
    TextPairData,
)
from jaxtrain.data.dataset import Data
from jaxtrain.data.files import data_notes, with_local_paths
from jaxtrain.errors import DataError
from jaxtrain.runtime.call import call_function


def open_data(
    config: DataConfig | Mapping[str, Any],
    *,
    sequence_length: int | None = None,
    seed: int = 0,
    task: str | None = None,
    reading: Mapping[str, Any] | None = None,
) -> Data:
    """Opens the data of a config.

    Args:
        config: Which data: a data group, or its keys as a mapping ({"kind": "digits"}).
        sequence_length: Tokens per row where `config` does not say it.
        seed: Decides random augmentation; the split into training and validation never depends on it.
        task: The task of the run ("classification", "regression"), for tables whose targets could be either.
        reading: `Data.reading` of the data that a model was trained on: tables and image folders use its class numbers
            and scales instead of their own. A reading of another kind of data is ignored.

    Raises:
        ConfigError: A key or value of a mapping is wrong.
        DataError: The data is missing, empty or corrupt, or has too few tokens for a row.

    Example:
        >>> data = jt.open_data({"kind": "synthetic", "task": "images", "image_size": 8})
        >>> batches = jt.Batches(data.train, 8, seed=0, shuffle=True)
    """
    if isinstance(config, Mapping):
        config = load_config({"data": config}).config.data
    with data_notes() as notes:
        data = _opened(with_local_paths(config), sequence_length, seed=seed, task=task, reading=reading)
    return dataclasses.replace(data, description=(*data.description, *notes))


def _opened(
    opened: Any, sequence_length: int | None, *, seed: int, task: str | None, reading: Mapping[str, Any] | None
) -> Data:
    match opened:
        case DigitsData():
            from jaxtrain.data.sources.builtin import open_digits

            return open_digits(opened)
        case SyntheticData(task="images" | "table"):
            from jaxtrain.data.sources.builtin import open_synthetic_examples

            return open_synthetic_examples(opened)
        case ImageFolderData():
            from jaxtrain.data.sources.images import open_image_folder

            return open_image_folder(opened, seed=seed, reading=reading)
        case ImageRecordsData():
            from jaxtrain.data.sources.images import open_image_records

            return open_image_records(opened, seed=seed, reading=reading)
        case TableData():
            from jaxtrain.data.sources.tables import open_table

            return open_table(opened, task=task, reading=reading)
        case CalledData():
            from jaxtrain.data.sources.given import called_data

            made = call_function("data", opened.call, opened.args, error=DataError)
            return called_data(made, label=opened.call)
    length = opened.sequence_length or sequence_length
    if length is None:
        raise DataError("data.sequence_length is null and the model has no max_sequence_length; set it, such as 256")
    from jaxtrain.data.sources import texts

    match opened:
        case LabelledTextData():
            return texts.open_labelled_text(opened, sequence_length=length, task=task, reading=reading)
        case TaggedTextData():
            return texts.open_tagged_text(opened, sequence_length=length, reading=reading)
        case TextPairData():
            return texts.open_text_pairs(opened, sequence_length=length)
        case ChatData():
            from jaxtrain.data.chat.rows import open_chat

            return open_chat(opened, sequence_length=length, task=task, reading=reading)
    from jaxtrain.data.sources.streams import open_streams

    return open_streams(opened, sequence_length=length, seed=seed)
