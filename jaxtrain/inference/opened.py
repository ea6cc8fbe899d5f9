"""A model with its weights, and what it gives: outputs, answers to the rows of a file, metrics, and texts."""

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain.config import Config
from jaxtrain.config.fits import fresh_parts
from jaxtrain.config.published import published_family, published_settings, settings_in, settings_of
from jaxtrain.data import Batches, Data, Tokenizer, load_tokenizer
from jaxtrain.data.chat.templates import ChatFormat
from jaxtrain.data.sources.given import rows_of
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.families.family import label_names
from jaxtrain.formats.hub import read_published_config, tokenizer_origin
from jaxtrain.formats.rows import Entry
from jaxtrain.inference.decoding import Writing
from jaxtrain.inference.generate import Written, joined, write_texts
from jaxtrain.inference.predict import (
    Predictor,
    answer_kind,
    answers,
    check_read_alike,
    input_rows,
    model_outputs,
    read_file_rows,
)
from jaxtrain.inference.prompts import SpecialTokens
from jaxtrain.inference.published import read_texts, texts_beside
from jaxtrain.inference.sampling import Sampling
from jaxtrain.metrics.evaluation import TO_HOLD_OUT, Evaluator, dividing_batch, evaluate_batches, held_out_batches
from jaxtrain.models.adapters import quantize
from jaxtrain.models.model import ModelState, Params, parameter_shapes
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.task import Task
from jaxtrain.models.tasks import build_task
from jaxtrain.train.build import build_sharded_model
from jaxtrain.train.state import EvaluationState
from jaxtrain.weights.load import load_weights

_BATCH_SIZE = 64


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class OpenedModel:
    """A published model, opened by `open_model`; a run is an `OpenedRun`. Each part is read when it is first used.

    Attributes:
        path: its folder or file.
        config: the model group as it was published, and the settings of this machine.
        own_task: from Python; None: the task of the config.
        mesh: devices; None: as the config says.
        quantize: format of the linear layers; None: as they are stored.
        report: receives one line for each thing that is worth a remark.
        adapter: folder of an adapter over it; None: there is none.
    """

    path: Path
    config: Config
    own_task: Task | None
    mesh: Mesh | None
    quantize: str | None
    report: Callable[[str], None]
    adapter: Path | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Model {self.path}"

    @property
    def info(self) -> Mapping[str, Any]:
        """The content of `run.json`; empty for a published model."""
        return {}

    @property
    def trained_on(self) -> Mapping[str, Any]:
        """What `run.json` says of the data; empty for a published model."""
        return self.info.get("data") or {}

    @property
    def reading(self) -> Mapping[str, Any]:
        """How the data of the run became numbers: scales, names of columns and classes; empty where that is plain."""
        return self.trained_on.get("reading") or {}

    @functools.cached_property
    def sharded_model(self) -> ShardedModel:
        """The model on its mesh."""
        settings = settings_of(self.config.model)
        size = settings.get("image_size") or 224
        shape = (size, size, 3)
        if "vocab_size" in settings:
            shape = (int(settings["max_sequence_length"]),)
        return build_sharded_model(self.config, input_shape=shape, mesh=self.mesh, task=self.own_task)

    @functools.cached_property
    def state(self) -> EvaluationState:
        """Parameters and model state on the mesh, as an `Evaluator` reads them."""
        path = str(self.path)
        settings = settings_in(path, published_settings(path))
        names = [row.path for row in published_family(path).tensors(settings) if isinstance(row, Entry)]
        names += parameter_shapes(self.sharded_model.model)
        # A published head is not read where the config has another one.
        skip = [pattern for pattern in fresh_parts(self.config.model) if fnmatch.filter(names, pattern)]
        start = load_weights(self.sharded_model, path, skip=skip, adapter=self.adapter)
        params = start.params
        if params is None or jax.tree.structure(params) != jax.tree.structure(self.sharded_model.abstract_params):
            raise ConfigError(f"{path} has no weights for the requested head; leave model.head out")
        return EvaluationState(self._quantized(params), start.model_state or {})

    def _quantized(self, params: Params) -> Params:
        """Parameters with the kernels of linear layers in the format `quantize`, on their devices."""
        if self.quantize is None:
            return params
        return jax.jit(functools.partial(quantize, model=self.sharded_model.model, format=self.quantize))(params)

    @property
    def step(self) -> int | None:
        """The step of the checkpoint that `params` are of; None for a published model."""
        return None

    @property
    def params(self) -> Params:
        """The parameters as a nested dict of sharded arrays: their moving average if a run keeps one."""
        return self.state.evaluation_params

    @property
    def model_state(self) -> ModelState:
        """What changes without a gradient (batch statistics): its moving average if a run keeps one."""
        return self.state.evaluation_model_state

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """What turns texts into tokens; None: there is nothing that does."""
        file = tokenizer_origin(self.path)
        return None if file is None else load_tokenizer(file)

    @property
    def chat(self) -> ChatFormat | None:
        """The chat template that a run was trained with, or that of a published model; None: neither."""
        return self._texts[0]

    @property
    def special(self) -> SpecialTokens:
        """The special tokens of its texts."""
        return self._texts[1]

    @functools.cached_property
    def _texts(self) -> tuple[ChatFormat | None, SpecialTokens]:
        file = tokenizer_origin(self.path)
        files = {} if file is None else texts_beside(file, self.adapter)
        return read_texts(files, self.tokenizer, where=str(self.adapter or self.path), added=True)

    @property
    def published_config(self) -> Mapping[str, Any]:
        """The config.json of the published model that this is, or that the run started from; empty: there is none."""
        return read_published_config(self.path)

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of the classes in the order of the outputs; None: they have no names, or rows have several."""
        if self.published_config.get("problem_type") == "multi_label_classification":
            return None
        return label_names(self.published_config)

    @functools.cached_property
    def task(self) -> Task:
        """What outputs are compared with."""
        return self.own_task or build_task(self.config)

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """Computes the metrics of the task: `model.evaluator(model.state, batches)`."""
        return Evaluator(
            self.sharded_model,
            self.task,
            parallelism=self.config.parallel,
            compiler_options=self.config.compiler_options,
        )

    @property
    def data(self) -> Data:
        """The data of a run; a published model has none."""
        raise DataError(f"{self.path} is a published model, which comes without data; write evaluate(rows)")

    def evaluate(self, data: Any = None) -> dict[str, Any]:
        """The metrics of the task: `eval_loss` and the others as `eval_*`.

        Args:
            data: a `Data`, whose held-out rows are used, or rows in another form of `fit`, such as a dict of arrays, of
                which all count. None: the held-out rows of the run, as many as `evaluation.max_batches` says.

        Raises:
            ConfigError: a part from Python was not given, or it does not fit the data.
            DataError: the data is not there, or has no held-out rows.
        """
        batches = self.held_out(data)
        # A mistake in the data is found before parameters are read.
        self.evaluator.feed.shardings(batches.spec())
        return evaluate_batches(self.evaluator, self.state, batches)

    def held_out(self, data: Any = None) -> Batches:
        """The rows that `evaluate` takes, in batches that divide by the mesh."""
        max_batches = None
        if data is None:
            data = self.data
            max_batches = self.config.evaluation.max_batches
        check_read_alike(data, self.reading)
        if isinstance(data, Data):
            rows = data.validation
            if rows is None:
                raise DataError(f"the data of the run has no held-out rows; {TO_HOLD_OUT}")
        elif isinstance(data, grain.MapDataset):
            rows = data
        elif "mean" in self.reading:
            raise DataError("a run on a table is evaluated on jaxtrain.open_data({...}, reading=...), not on arrays")
        else:
            rows = rows_of(data)
        size = dividing_batch(self.config, self.sharded_model, self.task)
        return held_out_batches(self.config, rows, size=size, max_batches=max_batches)

    @functools.cached_property
    def _predictor(self) -> Predictor:
        return Predictor(
            self.sharded_model,
            functools.partial(model_outputs, self.sharded_model),
            batch_axes=(self.own_task or build_task(self.config)).batch_axes,
            options=self.config.compiler_options,
        )

    def predict(self, inputs: Any, *, batch_size: int | None = None) -> Any:
        """What the model gives for any number of rows, in evaluation mode; no training data is needed.

        Args:
            inputs: an array [rows, ...], a nested dict of them, or rows with an index (`data.validation`), whose entry
                `inputs` is read as it is. Arrays hold what the model takes, with two exceptions: columns of a table
                are in their own units, and pixels for a run on images may be uint8.
            batch_size: the largest batch, which is rounded up to divide by the mesh; None: 64.

        Returns:
            NumPy arrays [rows, ...] in the structure of the model's outputs (logits of a classifier); floats are
            float32. Of several outputs, `logits` alone.

        Raises:
            ConfigError: a model from Python was not given.
            CheckpointError: there is no intact checkpoint.
            DataError: rows that the model does not take.
        """
        decoder = self.sharded_model.model.decoder
        rows = input_rows(inputs, self.trained_on, max_length=None if decoder is None else decoder.max_length)
        outputs = self._predictor(self.params, self.model_state, rows, batch_size=batch_size or _BATCH_SIZE)
        offset = self.reading.get("target_offset")
        return outputs if offset is None else outputs.astype(np.float64) + offset

    def predict_file(
        self, path: str | Path, *, batch_size: int | None = None, probabilities: bool = False
    ) -> list[dict[str, Any]]:
        """One dict per row of a file or folder, in its order, as `jaxtrain predict` writes them (docs/predict.md).

        Raises:
            ConfigError: the model gives something else, such as the next token, or `probabilities` of no classes.
            DataError: the file or a row of it is not what the model reads.
        """
        kind = answer_kind(self.config.model, self.info)
        # Its rows have several classes, and so no `classes`.
        is_multi_label = self.published_config.get("problem_type") == "multi_label_classification"
        if kind is None or (is_multi_label and self.classes is None):
            raise ConfigError(
                f"{self.path} gives no class, number or embedding per row of a file; jaxtrain sample continues "
                "texts, and jaxtrain.open_model(...).predict(array) gives the outputs of any model"
            )
        if probabilities and kind != "class":
            raise ConfigError(f"{self.path} predicts {kind}s, which have no probabilities; leave --probabilities out")
        classes = self.classes or label_names(self.published_config)
        rows, files = read_file_rows(Path(path).expanduser(), self.config, self.trained_on, self.tokenizer)
        outputs = self.predict(rows, batch_size=batch_size)
        return answers(outputs, kind, classes, files, probabilities=probabilities)

    def sample(
        self,
        prompts: str | Sequence[str],
        *,
        new_tokens: int | None = None,
        seed: int = 0,
        chat: bool = False,
        **sampling: Any,
    ) -> Any:
        """Continue a text, or a list of texts in one batch; with `chat` answer them.

        Args:
            prompts: a text, or a list of texts.
            new_tokens: tokens to add to each, at most; None: 200, or as many as the model has positions for.
            seed: of the random choices.
            chat: whether each text is a question, which the model answers by its chat template.
            sampling: of `Sampling`: temperature, top_k, top_p and the like.

        Returns:
            The prompt with its continuation, or the answer alone; a list of them for a list.

        Raises:
            ConfigError: the model writes no text, or an option is out of range.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        writing = Writing(new_tokens, Sampling(**sampling), seed)
        results = joined(self.write(texts, writing, chat=chat), len(texts))
        return results[0] if isinstance(prompts, str) else results

    def write(self, texts: Sequence[str], writing: Writing, *, chat: bool = False) -> Iterator[Written]:
        """Continue texts in one batch, each given out before its continuation; with `chat` answer them."""
        tokenizer = self.text_tokenizer(chat=chat)
        special = self.special
        if chat:
            # The template writes all special tokens, and says where an answer ends.
            special = SpecialTokens()
        writing = dataclasses.replace(writing, add_special_tokens=special.added, stop_tokens=special.stop)
        return write_texts(self.sharded_model, self.params, tokenizer, texts, writing, self.chat if chat else None)

    def text_tokenizer(self, *, chat: bool = False) -> BpeTokenizer | ByteTokenizer:
        """The tokenizer of a model that writes texts, and that has a chat template if `chat` asks for one.

        Raises:
            ConfigError: it writes no text, has no tokenizer or no chat template.
        """
        model = self.sharded_model.model
        if model.decoder is None:
            raise ConfigError(f"{self.path} (model {model.name}) generates no text; use jaxtrain predict")
        if not isinstance(self.tokenizer, BpeTokenizer | ByteTokenizer):
            raise ConfigError(f"{self.path} has no tokenizer.json; copy that of the model there")
        if chat and self.chat is None:
            raise ConfigError(f"{self.path} has no chat template; leave --chat out, and ask in plain text")
        return self.tokenizer
