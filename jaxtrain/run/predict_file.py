"""Predictions of a run for the rows of a file: classes by their names, numbers, embeddings, or a class per word.

Shapes: N rows, C classes, K numbers, D width of an embedding, L tokens per row.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config import Config
from jaxtrain.config.files import recorded_parts
from jaxtrain.config.model import EncoderDecoderConfig, TransformerConfig
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.published.heads import label_names
from jaxtrain.run.predict_rows import FileRows, RowReader, read_rows
from jaxtrain.run.published import FOLDER

# What a model gives that is no prediction for a row -> the command that uses it.
_ELSEWHERE = {
    "language_model": "gives the next token; jaxtrain sample continues texts",
    "masked_language_model": "gives hidden tokens; run.predict of jaxtrain.open_run gives their logits",
}


def run_reader(run_dir: Path, config: Config, info: Mapping[str, Any], tokenizer: Tokenizer | None) -> RowReader:
    """How the model of a run reads rows.

    Args:
        run_dir: Its directory.
        config: Its config.
        info: Content of its `run.json`.
        tokenizer: Its tokenizer.

    Raises:
        ConfigError: The run is of a published model that gives several classes per row.
    """
    trained_on = info.get("data") or {}
    classes = (trained_on.get("reading") or {}).get("classes")
    if classes is None and config.task not in ("regression", "reward"):  # whose outputs are numbers
        classes = published_classes(_published_config(run_dir / FOLDER / "config.json"), name=str(run_dir))
    own = recorded_parts(info)
    # The config of a run from Python holds defaults for the parts that were given.
    is_own_task = own["task"] is not None and info.get("task_is_shipped") is not True
    return RowReader(
        str(run_dir),
        None if own["model"] is not None else config.model,
        tokenizer,
        data=None if own["data"] is not None else config.data,
        task=None if is_own_task else config.task,
        trained_on=trained_on,
        classes=None if classes is None else tuple(classes),
    )


def predicted_rows(
    reader: RowReader, outputs_of: Callable[[Any], Any], path: str | Path, *, probabilities: bool
) -> list[dict[str, Any]]:
    """Predicts the rows of a file.

    Args:
        reader: How the model reads rows.
        outputs_of: Rows -> outputs of the model, as `OpenedRun.predict` gives them.
        path: See `read_rows`.
        probabilities: Whether classes come with the probability of each.

    Returns:
        One dict per row, in the order of the file: `row` (from 1 on), of images `file`, and

        - `class` and `probability`, with `probabilities` (class -> probability) where asked for;
        - `number`, or `numbers` where the model gives several;
        - `embedding`, float32 [D];
        - `words` and `classes`, with `probabilities` (one per word) where asked for; the class of a word that a
          truncated row has no token of is None.

    Raises:
        ConfigError: The model gives something else, such as the next token, or `probabilities` of no classes.
        DataError: The file or a row of it is not what the run reads.
    """
    kind, head = _kind(reader)
    if probabilities and kind in ("number", "embedding"):
        raise ConfigError(f"{reader.name} gives {kind}s, which have no probabilities; leave --probabilities out")
    rows = read_rows(reader, path, head=head)
    outputs = outputs_of(rows.inputs)
    outputs = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
    if not isinstance(outputs, np.ndarray):
        raise ConfigError(
            f"the model of {reader.name} gives several outputs and none is 'logits', so that nothing says which one is "
            "the prediction; jaxtrain.open_run(...).predict(array) gives them as they are"
        )
    return [
        {"row": number + 1, **({} if rows.files is None else {"file": rows.files[number]}), **found}
        for number, found in enumerate(_answers(reader, kind, rows, outputs, probabilities))
    ]


def _kind(reader: RowReader) -> tuple[str, str | None]:
    """What one row gives (class, number, embedding or words), and the kind of a transformer's head.

    Raises:
        ConfigError: Something else.
    """
    if isinstance(reader.model, EncoderDecoderConfig):
        raise ConfigError(f"{reader.name} writes texts, which is no prediction per row; use jaxtrain sample")
    if isinstance(reader.model, TransformerConfig):
        head = reader.model.head_kind
        if head in _ELSEWHERE:
            raise ConfigError(f"the model of {reader.name} {_ELSEWHERE[head]}")
        if reader.task == "reward":  # a score, whatever kind of head gives it
            return "number", head
        return {"sequence": "class", "token": "words", "regression": "number", "embedding": "embedding"}[head], head
    if reader.task not in ("classification", "regression"):
        raise ConfigError(
            f"{reader.name} was trained with a task of its own, which does not say what its outputs mean; "
            "jaxtrain.open_run(...).predict(array) gives them as they are"
        )
    return "class" if reader.task == "classification" else "number", None


def _answers(
    reader: RowReader, kind: str, rows: FileRows, outputs: np.ndarray, probabilities: bool
) -> Iterator[dict[str, Any]]:
    if kind == "number":
        for values in outputs.reshape(len(outputs), -1):
            several = {"numbers": [_plain(value) for value in values]}
            yield {"number": _plain(values[0])} if len(values) == 1 else several
        return
    if kind == "embedding":
        for values in outputs:
            yield {"embedding": values}
        return
    names = _class_names(reader.classes, outputs.shape[-1])
    if kind == "class":
        for logits in outputs:
            shares = _softmax(logits)
            best = int(shares.argmax())
            yield {"class": names[best], "probability": _plain(shares[best])} | (
                {"probabilities": _named(names, shares)} if probabilities else {}
            )
        return
    assert rows.words is not None
    assert rows.places is not None
    for logits_LC, words, places in zip(outputs, rows.words, rows.places, strict=True):
        shares = [None if place is None else _softmax(logits_LC[place]) for place in places]
        found = [None if share is None else names[int(share.argmax())] for share in shares]
        named = [None if share is None else _named(names, share) for share in shares]
        yield {"words": words, "classes": found} | ({"probabilities": named} if probabilities else {})


def _softmax(logits_C: np.ndarray) -> np.ndarray:
    """Probabilities [C]; float64, so that they sum to 1."""
    raised = np.exp(logits_C.astype(np.float64) - logits_C.max())
    return raised / raised.sum()


def _named(names: Sequence[str], shares: np.ndarray) -> dict[str, float]:
    return {name: _plain(share) for name, share in zip(names, shares, strict=True)}


def _plain(value: Any) -> float:
    """The shortest decimal number that is this one in float32."""
    return float(str(np.float32(value)))


def _class_names(names: Sequence[str] | None, num_classes: int) -> list[str]:
    """Names of the classes: those that are known, then their numbers."""
    if names is None or len(names) > num_classes:
        return [str(number) for number in range(num_classes)]
    # A class may be called by a number, and a published config may give two classes one name.
    known = [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names)]
    # A model may have more outputs than its data had classes.
    rest = (str(number) for number in range(len(names), num_classes))
    return [*known, *(f"output {name}" if name in names else name for name in rest)]


def _published_config(file: Path) -> Mapping[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def published_classes(config: Mapping[str, Any], *, name: str) -> tuple[str, ...] | None:
    """Names of the classes in a published config.json; None: it names none.

    Args:
        config: Its content.
        name: Of the model, for messages.

    Raises:
        ConfigError: A row may have several of them.
    """
    if config.get("problem_type") == "multi_label_classification":
        raise ConfigError(
            f"{name} gives each class a probability of its own (problem_type: multi_label_classification), and predict "
            "gives one class per row; the sigmoid of the logits is that probability (jaxtrain.load_pretrained)"
        )
    return label_names(config)
