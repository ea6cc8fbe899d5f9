"""A model that is open, and what it gives: outputs of rows, answers to a file's rows, and texts.

Shapes: C classes.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config import Config
from jaxtrain.config.data import ImageFolderData, ImageRecordsData, LabelledTextData
from jaxtrain.config.files import recorded_parts
from jaxtrain.config.model import TransformerConfig
from jaxtrain.data import Batches, Data, Tokenizer
from jaxtrain.data.chat.templates import ChatFormat
from jaxtrain.data.files import decode_utf8, plain_suffix, read_file, require_file
from jaxtrain.data.formats.open import read_records, text_of
from jaxtrain.data.rows import ArrayRows, as_numbers
from jaxtrain.data.sources.images import centered_images, image_files, normalized
from jaxtrain.data.sources.tables import read_input_columns, scaled_like
from jaxtrain.data.sources.texts import framed_tokens, text_rows
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.inference.decoding import Writing
from jaxtrain.inference.generate import Written, write_texts
from jaxtrain.inference.prompts import SpecialTokens
from jaxtrain.inference.published import kept_published, published_classes
from jaxtrain.inference.sampling import Sampling
from jaxtrain.models.model import Model, ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.tasks import ERRORS
from jaxtrain.parallel.division import batch_shards
from jaxtrain.runtime.compiler import Value, choose_options
from jaxtrain.train.batch import batch_shardings, check_ids
from jaxtrain.train.state import EvaluationState

# What a row gives, by the head of a transformer, and by the task of another model.
_HEADS = {"sequence": "class", "regression": "number", "embedding": "embedding"}
_TASKS = {"classification": "class", **dict.fromkeys(("regression", *ERRORS), "number")}


class OpenedModel:
    """A model with its weights that is asked, opened by `open_run` or `open_model`; its parts are read when first used.

    Each kind of model says where it has these from.
    """

    path: Path
    config: Config
    info: Mapping[str, Any]  # run.json; empty where the model is of no run
    sharded_model: ShardedModel
    tokenizer: Tokenizer | None
    classes: Sequence[str] | None
    state: EvaluationState
    _texts: tuple[ChatFormat | None, SpecialTokens]
    _batch_axes: Mapping[str, Any]

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def step(self) -> int | None:
        """The step of the checkpoint that `params` are of; None: the model is of no run."""
        return self.state.step if self.info else None

    @property
    def params(self) -> Params:
        """The parameters as a nested dict of sharded arrays: their moving average where the run keeps one."""
        return self.state.evaluation_params

    @property
    def model_state(self) -> ModelState:
        """What changes without a gradient (batch statistics): its moving average where the run keeps one."""
        return self.state.evaluation_model_state

    @property
    def chat(self) -> ChatFormat | None:
        """The chat template that a run was trained with, or that of a published model; None: neither."""
        return self._texts[0]

    @property
    def special(self) -> SpecialTokens:
        """What is known of the special tokens of its texts."""
        return self._texts[1]

    @functools.cached_property
    def _predictor(self) -> "Predictor":
        return Predictor(self.sharded_model, self._batch_axes, self.config.compiler_options)

    def predict(self, inputs: Any, *, batch_size: int | None = None) -> Any:
        """What the model gives for any number of rows, in evaluation mode; no training data is needed.

        Args:
            inputs: an array [rows, ...], a nested dict of them, or rows with an index (`data.validation`), whose entry
                `inputs` is read as it is. Arrays hold what the model takes, with two exceptions: columns of a table
                are in their own units, and pixels for a run on images may be uint8.
            batch_size: the largest batch; None: a microbatch of the run. It is rounded up to divide by the mesh.

        Returns:
            NumPy arrays [rows, ...] in the structure of the model's outputs (logits of a classifier); floats are
            float32. Of several outputs, `logits` alone.

        Raises:
            ConfigError: a model from Python was not given.
            CheckpointError: there is no intact checkpoint.
            DataError: rows that the model does not take.
        """
        train = self.config.train
        size = batch_size or max(1, train.global_batch_size // train.accumulation_steps)
        rows = input_rows(inputs, self.info.get("data") or {}, self.sharded_model.model)
        outputs = self._predictor(self.params, self.model_state, rows, batch_size=size)
        offset = ((self.info.get("data") or {}).get("reading") or {}).get("target_offset")
        return outputs if offset is None else outputs.astype(np.float64) + offset

    def predict_file(
        self, path: str | Path, *, batch_size: int | None = None, probabilities: bool = False
    ) -> list[dict[str, Any]]:
        """One dict per row of a file or folder, in its order, as `jaxtrain predict` writes them (docs/predict.md).

        Raises:
            ConfigError: the model gives something else, such as the next token, or `probabilities` of no classes.
            DataError: the file or a row of it is not what the model reads.
        """
        name, kind = os.fspath(self), _kind(self)
        if probabilities and kind in ("number", "embedding"):
            raise ConfigError(f"{name} predicts {kind}s, which have no probabilities; leave --probabilities out")
        rows, files = _read_rows(self, Path(path).expanduser())
        outputs = self.predict(rows, batch_size=batch_size)
        if not isinstance(outputs, np.ndarray):
            raise ConfigError(f"the model of {name} gives several outputs and none is 'logits'; use run.predict")
        names = _class_names(self, outputs.shape[-1]) if kind == "class" else []
        found = [_answer(names, values, kind, probabilities=probabilities) for values in outputs]
        named = [{}] * len(found) if files is None else [{"file": str(file)} for file in files]
        return [{"row": i + 1, **named[i], **answer} for i, answer in enumerate(found)]

    def sample(
        self, prompts: str | Sequence[str], *, new_tokens: int | None = None, seed: int = 0, **sampling: Any
    ) -> Any:
        """Continue a text, or a list of texts in one batch.

        Args:
            prompts: a text, or a list of texts.
            new_tokens: tokens to add to each, at most; None: 200, or as many as the model has positions for.
            seed: of the random choices.
            sampling: of `Sampling`: temperature, top_k, top_p and the like.

        Returns:
            The prompt with its continuation, or a list of them.

        Raises:
            ConfigError: the model writes no text, or an option is out of range.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        found = [""] * len(texts)
        for piece in write(writer_of(self), texts, Writing(new_tokens, Sampling(**sampling), seed, piece=None)):
            found[piece.row] += piece.text
        return found[0] if isinstance(prompts, str) else found


class Predictor:
    """Applies a model to rows, in evaluation mode; `batch_axes` are those of its task."""

    def __init__(
        self, sharded_model: ShardedModel, batch_axes: Mapping[str, Any], options: Mapping[str, Value] | None = None
    ) -> None:
        self._model, self._batch_axes, mesh = sharded_model, batch_axes, sharded_model.mesh
        chosen = choose_options(mesh.devices.flat[0], mesh.size, options)
        replicated = NamedSharding(mesh, PartitionSpec())  # so that every process has all rows
        self._jitted = jax.jit(self._apply, out_shardings=replicated, compiler_options={**chosen.used} or None)

    def __call__(self, params: Params, model_state: ModelState, rows: grain.MapDataset, *, batch_size: int) -> Any:
        """Outputs of all rows, NumPy arrays [rows, ...]; the largest batch is rounded up to divide by the mesh."""
        layout, vocab_size = self._model.layout, self._model.model.vocab_size
        size = shards = batch_shards(layout.mesh.shape, layout.rules["batch"])
        while size < min(len(rows), batch_size):  # few different sizes, since each is compiled for
            size *= 2
        size = min(size, -(-batch_size // shards) * shards)
        batches = Batches(rows, size, seed=0, shuffle=False)
        spec = batches.spec()
        limits = {} if vocab_size is None else {"inputs": vocab_size}
        check = functools.partial(check_ids, limits=limits, where="predict")
        shardings, found = batch_shardings(spec, layout, self._batch_axes, {}), []
        for k in range(len(batches)):
            batch, left = batches.load(k, shardings, check=check), min(size, len(rows) - k * size)
            outputs = jax.device_get(self._jitted(params, model_state, batch["inputs"]))
            found.append(_per_row(outputs, size, left))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

    def _apply(self, params: Params, model_state: ModelState, inputs: Any) -> Any:
        with self._model.context():
            outputs, _ = self._model.apply(params, model_state, inputs, key=None, train=False)
        if isinstance(outputs, Mapping) and "logits" in outputs:
            outputs = outputs["logits"]  # what else a model with experts gives is for its loss
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


def check_read_alike(data: Any, trained_on: Mapping[str, Any]) -> None:
    """Raise a DataError where a `Data` has scales or class numbers of its own, and not those of the run."""
    saved, own = trained_on.get("reading"), json.loads(json.dumps(getattr(data, "reading", None)))
    if saved is None or own is None or saved["kind"] != own["kind"]:
        return
    other = [key for key in ("classes", "mean", "deviation", "target_offset") if saved.get(key) != own.get(key)]
    if other:
        raise DataError(
            f"the {', '.join(other)} of this data and of the run differ; write jaxtrain.open_data({{...}}, "
            'reading=run.info["data"]["reading"])'
        )


def input_rows(inputs: Any, trained_on: Mapping[str, Any], model: Model) -> grain.MapDataset:
    """What `OpenedModel.predict` takes as rows with an index; `trained_on` is the group `data` of run.json."""
    check_read_alike(inputs, trained_on)
    if isinstance(inputs, Data):
        if inputs.validation is not None:
            raise DataError("this Data has two sets; write run.predict(data.validation), or data.train")
        inputs = inputs.train
    if isinstance(inputs, grain.MapDataset):
        return inputs
    read = functools.partial(as_numbers, where="inputs")
    inputs = jax.tree.map(read, inputs, is_leaf=lambda leaf: isinstance(leaf, list))
    if isinstance(inputs, np.ndarray):
        reading, dtype = trained_on.get("reading") or {}, np.dtype(trained_on.get("input_dtype") or inputs.dtype)
        if reading.get("kind") == "table":
            inputs = scaled_like(reading, np.atleast_2d(inputs), label="the array")
        elif reading.get("kind") in ("image_folder", "images") and inputs.dtype == np.uint8:
            inputs = normalized(inputs)
        elif dtype.kind not in "iu":
            inputs = inputs.astype(dtype, copy=False)
        longest = None if model.decoder is None else model.decoder.max_length
        if longest is not None and inputs.ndim > 1 and inputs.shape[1] > longest:
            raise DataError(f"inputs has {inputs.shape[1]} tokens per row and the model {longest} positions; crop them")
    return ArrayRows({"inputs": inputs})


def _kind(model: OpenedModel) -> str:
    """What one row gives: class, number or embedding."""
    info, config = model.info, model.config.model
    task = info.get("task")
    kind = _TASKS.get(str(task))
    if isinstance(config, TransformerConfig) and recorded_parts(info)["model"] is None:
        kind = _HEADS.get(config.head_kind)
    if kind is None or task == "reward":  # which scores chats
        raise ConfigError(
            f"{os.fspath(model)} gives no class, number or embedding per row of a file; jaxtrain sample continues "
            "texts, and jaxtrain.open_run(...).predict(array) gives the outputs of any model"
        )
    return kind


def _class_names(model: OpenedModel, num_classes: int) -> list[str]:
    """The names that are known, then numbers."""
    known, origin = model.classes, kept_published(model.path)[0] if model.info else None
    if known is None and origin is not None:
        known = published_classes(origin.config, os.fspath(model))
    known = () if known is None or len(known) > num_classes else known
    return [*known, *map(str, range(len(known), num_classes))]


def _read_rows(model: OpenedModel, path: Path) -> tuple[Any, list[Path] | None]:
    """Read a file as the run read its own: columns, scales, tokens, images; and the file of each image."""
    data, trained_on = model.config.data, model.info.get("data") or {}
    reading, shape = trained_on.get("reading") or {}, trained_on.get("input_shape")
    if reading.get("kind") == "table":
        sizes = {"num_columns": trained_on["input_shape"][0], "target": getattr(data, "target", None)}
        return read_input_columns(str(path), reading.get("columns"), **sizes), None
    if isinstance(data, ImageFolderData | ImageRecordsData):
        files = [path] if path.is_file() else image_files(path)
        return centered_images(files, image_size=data.image_size), files
    if model.tokenizer is None:
        raise ConfigError(f"{os.fspath(model)} takes no table, text or image; use jaxtrain.open_run(...).predict")
    # Rows as long as in training; those of a published model, as long as the longest text needs.
    length = shape[-1] if shape else getattr(model.config.model, "max_sequence_length", 0)
    tokens = framed_tokens(model.tokenizer, getattr(data, "tokenizer", None) if shape else None)
    return text_rows(tokens, _read_texts(data, path), sequence_length=length, fit=not shape), None


def _read_texts(data: Any, path: Path) -> list[list[str]]:
    """One or two texts per row: of the columns that the run was trained on, or of the lines of a text file."""
    columns = ["text"]
    if isinstance(data, LabelledTextData):
        columns = [data.text, *([data.second_text] if data.second_text else [])]
    if plain_suffix(path) == ".txt" and len(columns) == 1:
        text = decode_utf8(read_file(require_file(path, what="the file")), path=path)
        return [[line.rstrip("\r")] for line in text.removeprefix("\ufeff").removesuffix("\n").split("\n")]
    return [
        [text_of(value, where=one.where, column=name) for name, value in zip(columns, one.values, strict=True)]
        for one in read_records(str(path), [(None, name) for name in columns], what="the file")
    ]


def _answer(names: Sequence[str], values: np.ndarray, kind: str, *, probabilities: bool) -> dict[str, Any]:
    """What is said of one row, by its outputs."""
    if kind == "embedding":
        return {"embedding": values}
    if kind == "number":
        plain = [float(str(value)) for value in values.ravel()]  # the shortest decimal number that is this one
        return {"number": plain[0]} if len(plain) == 1 else {"numbers": plain}
    raised_C = np.exp(values.astype(np.float64) - values.max())
    shares = [_plain(share) for share in raised_C / raised_C.sum()]
    best = int(values.argmax())
    more = {"probabilities": dict(zip(names, shares, strict=True))} if probabilities else {}
    return {"class": names[best], "probability": shares[best], **more}


def _plain(value: Any) -> float:
    """The shortest decimal number that is this one in float32."""
    return float(str(np.float32(value)))


def writer_of(model: OpenedModel, *, answers: bool = False) -> OpenedModel:
    """The model, if it writes texts, and with `answers` has a chat template."""
    if embeds(model) or model.sharded_model.model.decoder is None:
        name = model.sharded_model.model.name
        raise ConfigError(f"{os.fspath(model)} (model {name}) generates no text; use jaxtrain predict")
    if answers and model.chat is None:
        raise ConfigError(f"{os.fspath(model)} has no chat template; leave --chat out, and ask in plain text")
    return model


def tokenizer_of(model: OpenedModel) -> BpeTokenizer | ByteTokenizer:
    """The tokenizer of a model that is asked in texts."""
    if not isinstance(model.tokenizer, BpeTokenizer | ByteTokenizer):
        raise ConfigError(f"{os.fspath(model)} has no tokenizer.json; copy that of the model there")
    return model.tokenizer


def embeds(model: OpenedModel) -> bool:
    """Whether the model gives an embedding per text."""
    head = getattr(model.config.model, "head", None)
    return head is not None and head.kind == "embedding"


def write(writer: OpenedModel, texts: Sequence[str], writing: Writing, *, answers: bool = False) -> Iterator[Written]:
    """Continue texts in one batch, each given out before its continuation, or answer them by the chat template."""
    special, chat = (SpecialTokens(), writer.chat) if answers else (writer.special, None)
    writing = dataclasses.replace(writing, add_special_tokens=special.added, stop_tokens=special.stop)
    return write_texts(writer.sharded_model, writer.params, tokenizer_of(writer), texts, writing, chat)
