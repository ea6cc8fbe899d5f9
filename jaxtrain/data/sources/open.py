"""Opens the data of a config: one case for each kind, whose file is imported when it is opened (grain takes long)."""

import math
from collections.abc import Mapping
from typing import Any

from jaxtrain.config import load_config
from jaxtrain.config.data import (
    CalledData,
    ChatData,
    DataConfig,
    DigitsData,
    DocumentsData,
    ImageFolderData,
    ImageRecordsData,
    LabelledTextData,
    SyntheticData,
    TableData,
    TaggedTextData,
    TextPairData,
    gives_pairs,
)
from jaxtrain.data.remote import with_local_paths
from jaxtrain.data.sources.dataset import Data
from jaxtrain.errors import ConfigError, DataError
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
    if not hasattr(config, "kind"):
        raise ConfigError(f"open_data takes a dict with the kind of data ({{'kind': 'digits'}}), not {config!r:.60}")
    opened: Any = with_local_paths(config)
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
    match opened:
        case DocumentsData(rows="document"):
            from jaxtrain.data.sources.texts import open_document_rows

            return open_document_rows(opened, sequence_length=length)
        case LabelledTextData() | TaggedTextData() | TextPairData():
            return _text_data(opened, length, task=task, reading=reading)
        case ChatData():
            return _chat_data(opened, length, task=task, reading=reading)
        case _:
            from jaxtrain.data.sources.streams import open_streams

            return open_streams(opened, sequence_length=length, seed=seed)


def _text_data(config: Any, sequence_length: int, *, task: str | None, reading: Mapping[str, Any] | None) -> Data:
    """The data of a table of texts."""
    from jaxtrain.data.text.labelled import open_labelled_text, open_tagged_text, open_text_pairs

    if isinstance(config, LabelledTextData):
        found = open_labelled_text(config, sequence_length=sequence_length, task=task, reading=reading)
    elif isinstance(config, TaggedTextData):
        found = open_tagged_text(config, sequence_length=sequence_length, reading=reading)
    else:
        found = open_text_pairs(config, sequence_length=sequence_length)
    return _encoded_data(found, (sequence_length,))


def _chat_data(config: ChatData, sequence_length: int, *, task: object, reading: Mapping[str, Any] | None) -> Data:
    """The data of conversations or of pairs of answers."""
    from jaxtrain.data.chat.rows import open_chat

    pairs = gives_pairs(config, task)
    scored = pairs and task == "reward"
    found = open_chat(config, sequence_length=sequence_length, pairs=pairs, scored=scored, reading=reading)
    return _encoded_data(found, (2, sequence_length) if pairs else (sequence_length,))


def _encoded_data(found: Any, input_shape: tuple[int, ...]) -> Data:
    """The data of rows of padded tokens."""
    return Data(
        train=found.train,
        validation=found.validation,
        fingerprint=found.identity,
        vocab_size=found.tokenizer.vocab_size,
        num_outputs=found.num_outputs,
        input_shape=input_shape,
        unit="tokens",
        units_per_row=math.prod(input_shape) + (found.decoder_length or 0),
        tokenizer=found.tokenizer,
        description=found.description,
        reading=found.reading,
        decoder_length=found.decoder_length,
        counts=found.counts,
    )
