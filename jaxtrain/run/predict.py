"""Predictions of a run or of a published model for any number of rows: arrays, or the rows of a file.

Shapes: C classes, L tokens per row.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config import Config
from jaxtrain.config.base import Group
from jaxtrain.config.data import ImageFolderData, ImageRecordsData, LabelledTextData, TaggedTextData
from jaxtrain.config.files import recorded_parts
from jaxtrain.config.model import EncoderDecoderConfig, TransformerConfig
from jaxtrain.config.published import published_settings
from jaxtrain.data import Batches, Data, Tokenizer, load_tokenizer
from jaxtrain.data.files import decode_utf8, require_file
from jaxtrain.data.rows import ArrayRows
from jaxtrain.data.sources.images import centered_images, image_files, normalized
from jaxtrain.data.sources.published_images import published_images
from jaxtrain.data.sources.table_rows import read_input_columns
from jaxtrain.data.sources.tables import scaled_like
from jaxtrain.data.text.framed import framed_tokens, framed_words, text_rows, word_rows
from jaxtrain.data.text.records import list_of, read_records, text_of
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.interop.families.bert import read_sentence_head
from jaxtrain.interop.families.family import label_names
from jaxtrain.interop.families.vit import PROCESSOR_FILE, ImageProcessing, read_image_processing
from jaxtrain.interop.formats.hub import published_place
from jaxtrain.interop.pretrained import load_pretrained
from jaxtrain.models.model import Model, ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.tasks import classification
from jaxtrain.parallel.division import batch_shards
from jaxtrain.run.published import FOLDER
from jaxtrain.runtime.compiler import Value, choose_options
from jaxtrain.train.batch import batch_shardings
from jaxtrain.train.checks import check_ids
from jaxtrain.train.parallelism import shard_model

_BATCH = 32  # of a published model
_ROWS = "the file"
# What a row gives, by the head of a transformer.
_HEADS = {"sequence": "class", "token": "words", "regression": "number", "embedding": "embedding"}


class Predictor:
    """Applies a model to rows, in evaluation mode; `batch_axes` are those of its task."""

    def __init__(
        self,
        sharded_model: ShardedModel,
        *,
        batch_axes: Mapping[str, tuple[str | None, ...]],
        compiler_options: Mapping[str, Value] | None = None,
    ) -> None:
        self._model, self._batch_axes, mesh = sharded_model, batch_axes, sharded_model.mesh
        options = choose_options(mesh.devices.flat[0], mesh.size, compiler_options)
        replicated = NamedSharding(mesh, PartitionSpec())  # so that every process has all rows
        self._jitted = jax.jit(self._apply, out_shardings=replicated, compiler_options={**options.used} or None)

    def __call__(self, params: Params, model_state: ModelState, rows: grain.MapDataset, *, batch_size: int) -> Any:
        """Outputs of all rows, NumPy arrays [rows, ...]; the largest batch is rounded up to divide by the mesh."""
        layout, vocab_size = self._model.layout, self._model.model.vocab_size
        size = shards = batch_shards(layout.mesh.shape, layout.rules["batch"])
        while size < min(len(rows), batch_size):  # few different sizes, since each is compiled for
            size *= 2
        size = min(size, -(-batch_size // shards) * shards)
        batches = Batches(rows, size, seed=0, shuffle=False)
        spec = batches.spec()
        if "inputs" not in spec:
            raise DataError(f"the rows hold {', '.join(spec)}; predict reads their entry 'inputs'")
        limits = {} if vocab_size is None else {"inputs": vocab_size}
        check = functools.partial(check_ids, limits=limits, where="predict")
        shardings, found = batch_shardings(spec, layout, self._batch_axes, {}), []
        for k in range(len(batches)):
            batch, left = batches.load(k, shardings, check=check), min(size, len(rows) - k * size)
            try:
                outputs = jax.device_get(self._jitted(params, model_state, batch["inputs"]))
            except ConfigError as error:  # of the sharded model, which names the inputs
                raise DataError(str(error)) from error
            found.append(_per_row(outputs, size, left))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

    def _apply(self, params: Params, model_state: ModelState, inputs: Any) -> Any:
        with self._model.context():
            outputs, _ = self._model.apply(params, model_state, inputs, key=None, train=False)
        # NumPy has no bfloat16 of its own.
        return jax.tree.map(
            lambda leaf: leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, outputs
        )


def _per_row(outputs: Any, size: int, left: int) -> Any:
    """The first rows of outputs, without the entries that have no value per row."""
    if isinstance(outputs, Mapping):
        found = {name: _per_row(value, size, left) for name, value in outputs.items()}
        return {name: value for name, value in found.items() if value is not None}
    return jax.tree.map(lambda leaf: leaf[:left] if leaf.shape[:1] == (size,) else None, outputs)


def input_rows(inputs: Any, trained_on: Mapping[str, Any], model: Model, *, scaled: bool) -> grain.MapDataset:
    """What `OpenedRun.predict` takes as rows with an index, arrays as the model was trained on (`data` in run.json)."""
    if isinstance(inputs, Data):
        if inputs.validation is not None:
            raise DataError("this Data has two sets; write run.predict(data.validation), or data.train")
        inputs = inputs.train
    if isinstance(inputs, grain.MapDataset):
        return inputs
    inputs = jax.tree.map(np.asarray, inputs, is_leaf=lambda leaf: isinstance(leaf, list))
    if isinstance(inputs, np.ndarray):
        reading, dtype = trained_on.get("reading") or {}, np.dtype(trained_on.get("input_dtype") or inputs.dtype)
        if reading.get("kind") == "table" and not scaled:
            inputs = scaled_like(reading, np.atleast_2d(inputs), label="the array")
        elif reading.get("kind") in ("image_folder", "images") and inputs.dtype == np.uint8:
            inputs = normalized(inputs)
        elif dtype.kind not in "iu":
            inputs = inputs.astype(dtype, copy=False)
        longest = None if model.decoder is None else model.decoder.max_length
        if longest is not None and inputs.ndim > 1 and inputs.shape[1] > longest:
            raise DataError(f"inputs has {inputs.shape[1]} tokens per row and the model {longest} positions; crop them")
    return ArrayRows({"inputs": inputs})


@dataclass(frozen=True)
class RowReader:
    """How a model reads the rows of a file; what came from Python, or a published model does not say, is None.

    `trained_on` is the entry `data` of a run's `run.json`, and `images` says how a published model wants its images.
    """

    name: str
    model: Group | None
    tokenizer: Tokenizer | None
    data: Group | None = None
    task: Any = None
    trained_on: Mapping[str, Any] = field(default_factory=dict)
    classes: Sequence[str] | None = None
    images: ImageProcessing | None = None


def run_reader(run_dir: Path, config: Config, info: Mapping[str, Any], tokenizer: Tokenizer | None) -> RowReader:
    """How the model of a run reads rows, from its config, run.json and tokenizer."""
    trained_on, own = info.get("data") or {}, recorded_parts(info)
    classes = (trained_on.get("reading") or {}).get("classes")
    published = run_dir / FOLDER / "config.json"
    if classes is None and config.task not in ("regression", "reward") and published.is_file():
        classes = _published_classes(json.loads(published.read_text(encoding="utf-8")), name=str(run_dir))
    # The config of a run from Python holds defaults for the parts that were given.
    is_own_task = own["task"] is not None and info.get("task_is_shipped") is not True
    return RowReader(
        str(run_dir),
        None if own["model"] is not None else config.model,
        tokenizer,
        data=None if own["data"] is not None else config.data,
        task=None if is_own_task else config.task,
        trained_on=trained_on,
        classes=classes,
    )


def predict_published(
    path: str | Path, file: str | Path, *, batch_size: int | None = None, probabilities: bool = False
) -> list[dict[str, Any]]:
    """Predicts the rows of a file with a published folder, in float32 and on all devices; see `predicted_rows`."""
    path = Path(published_place(path, what="published folder"))
    head = read_sentence_head(path, published_settings(str(path)))
    pretrained = load_pretrained(path, model=None if head is None else {"head": head})
    is_text = isinstance(pretrained.config, TransformerConfig)
    reader = RowReader(
        str(path),
        pretrained.config,
        None if pretrained.tokenizer_path is None else load_tokenizer(pretrained.tokenizer_path),
        # A model of images has classes; how pixels become its numbers is in a file of its own.
        task=None if is_text else "classification",
        classes=_published_classes(pretrained.published.source.config, name=str(path)),
        images=None if is_text else read_image_processing(path),
    )

    def outputs_of(inputs: Any) -> Any:
        sharded_model = shard_model(pretrained.model)
        predictor = Predictor(sharded_model, batch_axes=classification().batch_axes)
        rows = input_rows(inputs, {}, pretrained.model, scaled=True)
        return predictor(*pretrained.read(sharded_model), rows, batch_size=batch_size or _BATCH)

    return predicted_rows(reader, outputs_of, file, probabilities=probabilities)


def predicted_rows(
    reader: RowReader, outputs_of: Callable[[Any], Any], path: str | Path, *, probabilities: bool
) -> list[dict[str, Any]]:
    """Predicts the rows of a file, one dict per row in its order; docs/predict.md lists the forms of both.

    Raises:
        ConfigError: The model gives something else, such as the next token, or `probabilities` of no classes.
        DataError: The file or a row of it is not what the run reads.
    """
    kind = _kind(reader)
    if probabilities and kind in ("number", "embedding"):
        raise ConfigError(f"{reader.name} gives {kind}s, which have no probabilities; leave --probabilities out")
    rows = _read_rows(reader, Path(path).expanduser(), kind)
    outputs = outputs_of(rows.inputs)
    outputs = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
    if not isinstance(outputs, np.ndarray):
        raise ConfigError(f"the model of {reader.name} gives several outputs and none is 'logits'; use run.predict")
    if kind in ("class", "words"):
        answers = _class_answers(_class_names(reader.classes, outputs.shape[-1]), rows, outputs, probabilities)
    else:
        answers = _number_answers(outputs, kind)
    return [
        {"row": number + 1, **({} if rows.files is None else {"file": str(rows.files[number])}), **found}
        for number, found in enumerate(answers)
    ]


def _kind(reader: RowReader) -> str:
    """What one row gives: class, number, embedding or words."""
    kind, tasks = None, {"classification": "class", "regression": "number"}
    if isinstance(reader.model, TransformerConfig):
        kind = "number" if reader.task == "reward" else _HEADS.get(reader.model.head_kind)
    elif isinstance(reader.task, str) and not isinstance(reader.model, EncoderDecoderConfig):
        kind = tasks.get(reader.task)
    if kind is None:
        raise ConfigError(
            f"{reader.name} gives no class, number or embedding per row; jaxtrain sample continues texts, and "
            "jaxtrain.open_run(...).predict(array) gives the outputs of any model"
        )
    return kind


def _number_answers(outputs: np.ndarray, kind: str) -> Iterator[dict[str, Any]]:
    for values in outputs:
        if kind == "embedding":
            yield {"embedding": values}
        else:
            plain = [_plain(value) for value in values.ravel()]
            yield {"number": plain[0]} if len(plain) == 1 else {"numbers": plain}


def _class_answers(
    names: Sequence[str], rows: "_FileRows", outputs: np.ndarray, probabilities: bool
) -> Iterator[dict[str, Any]]:
    raised = np.exp(outputs.astype(np.float64) - outputs.max(-1, keepdims=True))
    shares = raised / raised.sum(-1, keepdims=True)

    def named(share_C: np.ndarray) -> dict[str, float]:
        return {name: _plain(share) for name, share in zip(names, share_C, strict=True)}

    if rows.words is None or rows.places is None:
        for share_C in shares:
            best = int(share_C.argmax())
            more = {"probabilities": named(share_C)} if probabilities else {}
            yield {"class": names[best], "probability": _plain(share_C[best]), **more}
        return
    for share_LC, words, places in zip(shares, rows.words, rows.places, strict=True):
        found = [None if place is None else share_LC[place] for place in places]
        classes = [None if share is None else names[int(share.argmax())] for share in found]
        more = [None if share is None else named(share) for share in found]
        yield {"words": words, "classes": classes} | ({"probabilities": more} if probabilities else {})


def _plain(value: Any) -> float:
    """The shortest decimal number that is this one in float32."""
    return float(str(np.float32(value)))


def _class_names(names: Sequence[str] | None, num_classes: int) -> list[str]:
    """The names that are known, then numbers."""
    known = () if names is None or len(names) > num_classes else names
    return [*known, *map(str, range(len(known), num_classes))]


def _published_classes(config: Mapping[str, Any], *, name: str) -> Sequence[str] | None:
    if config.get("problem_type") == "multi_label_classification":
        raise ConfigError(f"{name} gives several classes per row (problem_type); jaxtrain.load_pretrained gives logits")
    return label_names(config)


@dataclass(frozen=True)
class _FileRows:
    """Rows without targets: of images with their files, of words with the place of the first token of each."""

    inputs: Any
    files: Sequence[Path] | None = None
    words: list[list[str]] | None = None
    places: list[list[int | None]] | None = None


def _read_rows(reader: RowReader, path: Path, kind: str) -> _FileRows:
    """Reads the rows of a file as the run read its own: columns, scales, tokens, images."""
    data, shape = reader.data, reader.trained_on.get("input_shape")
    reading = reader.trained_on.get("reading") or {}
    if path.suffix in (".npy", ".npz"):
        return _FileRows(_read_array(path))
    if reading.get("kind") == "table":
        names, target = reading.get("columns"), getattr(data, "target", None)
        return _FileRows(read_input_columns(str(path), names, num_columns=(shape or [0])[0], target=target))
    if isinstance(data, ImageFolderData | ImageRecordsData):
        files = _image_paths(path)
        return _FileRows(centered_images(files, image_size=data.image_size), files)
    if reader.images is not None:
        files = _image_paths(path)
        return _FileRows(published_images(files, reader.images), files)
    if isinstance(reader.model, TransformerConfig) and reader.task != "reward":  # which scores chats
        return _read_texts(reader, path, of_words=kind == "words")
    more = "" if reader.trained_on else f"{PROCESSOR_FILE}, which says how an image becomes numbers, or "
    raise ConfigError(f"{reader.name} cannot read {path}; it takes {more}a .npy file of rows as the model takes them")


def _read_array(path: Path) -> np.ndarray:
    file = require_file(path, what=_ROWS)
    try:
        found = np.load(file, allow_pickle=False)
        return found if isinstance(found, np.ndarray) else found["inputs"]
    except Exception as error:  # zipfile, zlib and NumPy raise a dozen types of errors for a damaged file
        reason = str(error).partition("\n")[0]
        raise DataError(f"{file} holds no array of inputs ({reason}); write it with numpy.save") from None


def _image_paths(path: Path) -> list[Path]:
    """The images of a folder, of a list of paths, or the one that is named."""
    if path.is_dir():
        return image_files(path)
    file = require_file(path, what=_ROWS)
    if file.suffix != ".txt":
        return [file]
    found = [file.parent / Path(line.strip()).expanduser() for line in _lines(file)]
    for number, image in enumerate(found, start=1):
        if not image.is_file():
            raise DataError(f"{file}:{number} names {image.name}, which is no file; paths are seen from {file.parent}")
    return found


def _read_texts(reader: RowReader, path: Path, *, of_words: bool) -> _FileRows:
    """Rows as long as in training; those of a published model, as long as the longest text needs."""
    data, shape = reader.data, reader.trained_on.get("input_shape")
    if reader.tokenizer is None:
        raise ConfigError(f"{reader.name} has no tokenizer.json, so it cannot read texts; give a .npy file of tokens")
    length = shape[-1] if shape else getattr(reader.model, "max_sequence_length", 0)
    tokens = framed_tokens(reader.tokenizer, getattr(data, "tokenizer", None))
    columns = ["words" if of_words else "text"]
    if isinstance(data, TaggedTextData):
        columns = [data.words]
    elif isinstance(data, LabelledTextData):
        columns = [data.text, *([data.second_text] if data.second_text else [])]
    cells: list[list[Any]]
    if path.suffix == ".txt":
        if len(columns) > 1:
            raise DataError(f"{path} has one text per line, and the run reads the columns {' and '.join(columns)}")
        cells = [[line.split() if of_words else line] for line in _lines(require_file(path, what=_ROWS))]
    else:
        read, records = (
            list_of if of_words else text_of,
            read_records(str(path), [(None, name) for name in columns], what=_ROWS),
        )
        cells = [
            [read(value, where=one.where, column=name) for name, value in zip(columns, one.values, strict=True)]
            for one in records
        ]
    if not of_words:
        return _FileRows(text_rows(tokens, cells, sequence_length=length, fit=not shape))
    words = [[str(word) for word in row] for (row,) in cells]
    found = framed_words(tokens, words, sequence_length=length)
    rows = word_rows(tokens, found, sequence_length=length, fit=not shape)
    return _FileRows(rows, words=words, places=found.places)


def _lines(file: Path) -> list[str]:
    """The lines of a text file without their ends; a file of one line end has one empty line."""
    text = decode_utf8(file.read_bytes(), path=file).removeprefix("\ufeff")
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")
