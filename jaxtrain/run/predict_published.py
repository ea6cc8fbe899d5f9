"""Predictions of a published model for the rows of a file: a classifier, tagger or encoder that is no run."""

from pathlib import Path
from typing import Any

from jaxtrain.config.arguments import local_path
from jaxtrain.config.model import TransformerConfig
from jaxtrain.config.published import published_settings
from jaxtrain.data import load_tokenizer
from jaxtrain.interop.pretrained import load_pretrained
from jaxtrain.models.tasks import classification
from jaxtrain.published.hub import published_place
from jaxtrain.published.image_processor import read_image_processing
from jaxtrain.published.sentence_pooling import read_sentence_head
from jaxtrain.run.predict import Predictor
from jaxtrain.run.predict_file import predicted_rows, published_classes
from jaxtrain.run.predict_rows import RowReader
from jaxtrain.train.parallelism import shard_model

_BATCH = 32


def predict_published(
    path: str | Path, file: str | Path, *, batch_size: int | None = None, probabilities: bool = False
) -> list[dict[str, Any]]:
    """Predicts the rows of a file with a published model, in float32 and on all devices.

    Texts are in the column `text`, words in the column `words`; images become numbers as preprocessor_config.json says.
    See `predicted_rows`.

    Args:
        path: The folder of the model, with its tokenizer or its preprocessor_config.json.
        file: See `read_rows`.
        batch_size: The largest batch; None: 32.
        probabilities: Whether classes come with the probability of each.

    Raises:
        ConfigError: The family is unknown, or its model gives something else, such as the next token or
            several classes.
        CheckpointError: The files of the model are missing or damaged.
        DataError: The file or a row of it is not what the model reads.
    """
    path = local_path(published_place(path, what="published folder"), what="published folder")
    head = read_sentence_head(path, published_settings(str(path)))
    pretrained = load_pretrained(path, model=None if head is None else {"head": head})
    tokenizer = pretrained.tokenizer_path
    config = pretrained.published.source.config
    is_text = isinstance(pretrained.config, TransformerConfig)
    reader = RowReader(
        str(path),
        pretrained.config,
        None if tokenizer is None else load_tokenizer(tokenizer),
        # A model of images has classes; how pixels become its numbers is in a file of its own.
        task=None if is_text else "classification",
        classes=published_classes(config, name=str(path)),
        images=None if is_text else read_image_processing(path),
    )

    def outputs_of(inputs: Any) -> Any:
        sharded_model = shard_model(pretrained.model)
        predictor = Predictor(sharded_model, batch_axes=classification().batch_axes, trained_on={})
        params, model_state = pretrained.read(sharded_model)
        return predictor(params, model_state, inputs, batch_size=batch_size or _BATCH)

    return predicted_rows(reader, outputs_of, file, probabilities=probabilities)
