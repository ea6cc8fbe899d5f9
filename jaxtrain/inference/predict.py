"""Predictions: rows of arrays and of files as a model reads them, its outputs, and what is written of each row.

Shapes: C classes.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config import Config
from jaxtrain.config.base import Group
from jaxtrain.config.data import ImageFolderData, ImageRecordsData, LabelledTextData
from jaxtrain.config.files import recorded_parts
from jaxtrain.config.model import TransformerConfig
from jaxtrain.data import Batches, Data, Tokenizer
from jaxtrain.data.files import decode_utf8, plain_suffix, read_file, require_file
from jaxtrain.data.formats.open import read_records, text_of
from jaxtrain.data.rows import ArrayRows, as_numbers
from jaxtrain.data.sources.images import centered_images, image_files, normalized
from jaxtrain.data.sources.tables import read_input_columns, scaled_like
from jaxtrain.data.sources.texts import framed_tokens, text_rows
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.tasks import ERRORS
from jaxtrain.parallel.division import batch_shards
from jaxtrain.precision.policy import cast_floats
from jaxtrain.runtime.compiler import Value, choose_options
from jaxtrain.train.batch import batch_shardings, check_ids

# What a row gives, by the head of a transformer, and by the task of another model.
_HEADS = {"sequence": "class", "regression": "number", "embedding": "embedding"}
_TASKS = {"classification": "class", **dict.fromkeys(("regression", *ERRORS), "number")}
# What two readings of one kind of data must have in common.
_SCALES = ("classes", "mean", "deviation", "target_offset")


class Predictor:
    """Applies a function of a model to any number of rows, in batches.

    Args:
        sharded_model: the model.
        apply: (params, model_state, inputs) -> outputs [rows, ...]; traced.
        batch_axes: those of the model's task.
        options: for XLA, over those of `jaxtrain/runtime/compiler.py`.
    """

    def __init__(
        self,
        sharded_model: ShardedModel,
        apply: Callable[[Params, ModelState, Any], Any],
        *,
        batch_axes: Mapping[str, Any],
        options: Mapping[str, Value] | None = None,
    ) -> None:
        self._sharded_model = sharded_model
        self._batch_axes = batch_axes
        mesh = sharded_model.mesh
        chosen = choose_options(mesh.devices.flat[0], mesh.size, options)
        self._jitted = jax.jit(
            apply,
            # Replicated, so that every process has all rows.
            out_shardings=NamedSharding(mesh, PartitionSpec()),
            compiler_options=dict(chosen.used) or None,
        )

    def __call__(
        self,
        params: Params,
        model_state: ModelState,
        rows: grain.MapDataset,
        *,
        batch_size: int,
    ) -> Any:
        """Return the outputs of all rows, NumPy arrays [rows, ...].

        Args:
            params, model_state: of the model.
            rows: whose entry `inputs` is read.
            batch_size: most rows at once; it is rounded up to divide by the mesh.
        """
        layout = self._sharded_model.layout
        shards = batch_shards(layout.mesh.shape, layout.rules["batch"])
        largest = -(-batch_size // shards) * shards
        size = shards
        # Doubled, so that few sizes are compiled for.
        while size < len(rows):
            size *= 2
        size = min(size, largest)
        batches = Batches(rows, size, seed=0, shuffle=False)
        shardings = batch_shardings(batches.spec(), layout, self._batch_axes, {})
        vocab_size = self._sharded_model.model.vocab_size
        limits = {} if vocab_size is None else {"inputs": vocab_size}
        check = functools.partial(check_ids, limits=limits, where="a row")
        parts = []
        for k in range(len(batches)):
            batch = batches.load(k, shardings, check=check)
            parts.append(jax.device_get(self._jitted(params, model_state, batch["inputs"])))
        # The last batch is filled up.
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(rows)], *parts)


def model_outputs(sharded_model: ShardedModel, params: Params, model_state: ModelState, inputs: Any) -> Any:
    """Apply a model in evaluation mode: its outputs in float32, `logits` alone of several."""
    with sharded_model.context():
        outputs, _ = sharded_model.apply(params, model_state, inputs, key=None, train=False)
    if isinstance(outputs, Mapping) and "logits" in outputs:
        # The other outputs of a model with experts are for its loss.
        outputs = outputs["logits"]
    # NumPy has no bfloat16 of its own.
    return cast_floats(outputs, "float32")


def check_read_alike(data: Any, reading: Mapping[str, Any]) -> None:
    """Raise a DataError where a `Data` has scales or class numbers of its own, and not those of the run (`reading`)."""
    if not isinstance(data, Data) or data.reading is None or not reading:
        return
    other = json.loads(json.dumps(data.reading))
    different = [key for key in _SCALES if reading.get(key) != other.get(key)]
    if different and reading["kind"] == other["kind"]:
        raise DataError(
            f"the {', '.join(different)} of this data and of the run differ; write jaxtrain.open_data({{...}}, "
            'reading=run.info["data"]["reading"])'
        )


def input_rows(inputs: Any, trained_on: Mapping[str, Any], *, max_length: int | None) -> grain.MapDataset:
    """Make rows with an index of what `OpenedModel.predict` takes.

    Args:
        inputs: arrays, or rows with an index.
        trained_on: what run.json says of the data.
        max_length: tokens that a row may have; None: any number.
    """
    reading = trained_on.get("reading") or {}
    check_read_alike(inputs, reading)
    if isinstance(inputs, Data):
        inputs = inputs.train
    if isinstance(inputs, grain.MapDataset):
        return inputs
    if isinstance(inputs, Mapping):
        return ArrayRows({"inputs": inputs})
    inputs = as_numbers(inputs, where="inputs")
    kind = reading.get("kind")
    dtype = np.dtype(trained_on.get("input_dtype") or inputs.dtype)
    if kind == "table":
        inputs = scaled_like(reading, np.atleast_2d(inputs), label="the array")
    elif kind in ("image_folder", "images") and inputs.dtype == np.uint8:
        inputs = normalized(inputs)
    elif dtype.kind not in "iu":
        inputs = inputs.astype(dtype, copy=False)
    if max_length is not None and inputs.ndim > 1 and inputs.shape[1] > max_length:
        raise DataError(f"inputs has {inputs.shape[1]} tokens per row and the model {max_length} positions; crop them")
    return ArrayRows({"inputs": inputs})


def answer_kind(model: Group, info: Mapping[str, Any]) -> str | None:
    """What a model gives for one row: class, number or embedding; None: something else.

    Args:
        model: group of the config.
        info: run.json; empty for a published model.
    """
    task = info.get("task")
    if task == "reward":  # which scores chats
        return None
    if isinstance(model, TransformerConfig) and recorded_parts(info)["model"] is None:
        return _HEADS.get(model.head_kind)
    return _TASKS.get(str(task))


def read_file_rows(
    path: Path, config: Config, trained_on: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[Any, list[Path] | None]:
    """Read a file as the run read its own (columns, scales, tokens, images), and the file of each image, if any."""
    data = config.data
    reading = trained_on.get("reading") or {}
    if reading.get("kind") == "table":
        columns = read_input_columns(
            str(path),
            reading.get("columns"),
            num_columns=trained_on["input_shape"][0],
            target=getattr(data, "target", None),
        )
        return columns, None
    if isinstance(data, ImageFolderData | ImageRecordsData):
        files = [path] if path.is_file() else image_files(path)
        return centered_images(files, image_size=data.image_size), files
    if tokenizer is None:
        raise ConfigError("the model takes no table, text or image; use predict(array)")
    texts = _read_texts(data, path)
    shape = trained_on.get("input_shape")
    if shape:
        tokens = framed_tokens(tokenizer, getattr(data, "tokenizer", None))
        return text_rows(tokens, texts, sequence_length=shape[-1]), None
    # Rows of a published model are as long as the longest text needs.
    tokens = framed_tokens(tokenizer, None)
    return text_rows(tokens, texts, sequence_length=getattr(config.model, "max_sequence_length", 0), fit=True), None


def _read_texts(data: Group, path: Path) -> list[list[str]]:
    """One or two texts per row: of the columns that the run was trained on, or of the lines of a text file."""
    columns = ["text"]
    if isinstance(data, LabelledTextData):
        columns = [data.text]
        if data.second_text:
            columns.append(data.second_text)
    if plain_suffix(path) == ".txt" and len(columns) == 1:
        text = decode_utf8(read_file(require_file(path, what="the file")), path=path)
        text = text.removeprefix("\ufeff").removesuffix("\n")
        return [[line.rstrip("\r")] for line in text.split("\n")]
    texts = []
    for record in read_records(str(path), [(None, name) for name in columns], what="the file"):
        values = zip(columns, record.values, strict=True)
        texts.append([text_of(value, where=record.where, column=name) for name, value in values])
    return texts


def answers(
    outputs: np.ndarray,
    kind: str,
    classes: Sequence[str] | None,
    files: Sequence[Path] | None,
    *,
    probabilities: bool,
) -> list[dict[str, Any]]:
    """What `jaxtrain predict` writes of each row.

    Args:
        outputs: [rows, ...], logits of classes.
        kind: class, number or embedding.
        classes: names of the first classes, where there are not more than outputs; the others have numbers.
        files: of the rows; None: they are rows of one file.
        probabilities: whether those of all classes are given.
    """
    names = [str(number) for number in range(outputs.shape[-1])]
    if classes is not None and len(classes) <= len(names):
        names[: len(classes)] = classes
    rows = []
    for number, values in enumerate(outputs):
        row: dict[str, Any] = {"row": number + 1}
        if files is not None:
            row["file"] = str(files[number])
        if kind == "embedding":
            row["embedding"] = values
        elif kind == "number":
            numbers = list(map(_plain, values.ravel()))
            if len(numbers) == 1:
                row["number"] = numbers[0]
            else:
                row["numbers"] = numbers
        else:
            raised_C = np.exp(values.astype(np.float64) - values.max())
            shares = [_plain(np.float32(share)) for share in raised_C / raised_C.sum()]
            best = int(values.argmax())
            row["class"] = names[best]
            row["probability"] = shares[best]
            if probabilities:
                row["probabilities"] = dict(zip(names, shares, strict=True))
        rows.append(row)
    return rows


def _plain(value: np.floating) -> float:
    """The shortest decimal number that is this one in its dtype."""
    return float(str(value))
