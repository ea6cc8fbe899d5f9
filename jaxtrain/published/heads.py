"""The heads of published encoders: which one the `architectures` of a config.json mean, and back. No jax here."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.published.keys import Key, Own

# What follows the name of the family in an architecture -> kind of our head. The first of each kind is written.
_KINDS = {
    "Model": "embedding",
    "ForMaskedLM": "masked_language_model",
    "ForPreTraining": "masked_language_model",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
}
# The head that transformers gives a model whose config.json says nothing about labels.
_DEFAULT_LABELS = 2

HEAD_KEYS: tuple[Key, ...] = (
    Own("architectures", default=None),
    Own("id2label", default=None),
    Own("num_labels", default=None, other_names=("_num_labels",)),
    Own("problem_type", default=None),
)


def read_kind(file: Mapping[str, Any], *, prefix: str) -> str:
    """Returns the kind of the head that a config.json asks for; without architectures, an embedding.

    Args:
        file: Values of the declared keys, from `read_keys`.
        prefix: What the names of the family's architectures begin with ("Bert").

    Raises:
        ConfigError: Its architecture has a head that is not supported.
    """
    architecture = next(iter(file["architectures"] or ()), f"{prefix}Model")
    kind = _KINDS.get(str(architecture).removeprefix(prefix))
    if kind is None:
        known = ", ".join(prefix + suffix for suffix in _KINDS)
        raise ConfigError(f"config.json has architectures: {architecture}, which is not supported; known are {known}")
    if kind == "sequence" and (file["problem_type"] == "regression" or read_labels(file) == 1):
        return "regression"
    return kind


def read_labels(file: Mapping[str, Any]) -> int:
    """Returns the number of labels that a config.json says.

    Args:
        file: Values of the declared keys, from `read_keys`.
    """
    if file["id2label"]:
        return len(file["id2label"])
    return file["num_labels"] or _DEFAULT_LABELS


def label_names(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Returns the names of the labels in a config.json, in the order of the outputs; None: it names none.

    Args:
        config: Its content.
    """
    labels = config.get("id2label")
    if not isinstance(labels, Mapping):
        return None
    numbers = [str(number) for number in range(len(labels))]
    return tuple(str(labels[number]) for number in numbers) if all(number in labels for number in numbers) else None


def read_head(
    file: Mapping[str, Any], *, prefix: str, masked: str | None, text: str | None, pooled: str | None, dropout: float
) -> dict[str, Any]:
    """Returns our head for a config.json.

    Args:
        file: Values of the declared keys, from `read_keys`.
        prefix: What the names of the family's architectures begin with.
        masked: Activation in the head of the masked language model.
        text: Activation in the head that classifies texts.
        pooled: Activation of the pooled first token of the model without a head; None: it has no layer for it.
        dropout: Dropout rate before the layer that classifies.

    Raises:
        ConfigError: Its architecture has a head that is not supported.
    """
    kind = read_kind(file, prefix=prefix)
    head: dict[str, Any] = dict(kind=kind)
    match kind:
        case "masked_language_model":
            return head | dict(hidden=masked)
        case "embedding":
            return head | dict(pooling="first", hidden=pooled)
        case "token":
            return head | dict(num_labels=read_labels(file), dropout=dropout)
        case _:
            return head | dict(num_labels=read_labels(file), pooling="first", hidden=text, dropout=dropout)


def write_head(model: Mapping[str, Any], *, prefix: str) -> dict[str, Any]:
    """Returns the keys of a config.json that say which head a model has, the inverse of `read_head`.

    Args:
        model: Our model group, every key of it.
        prefix: What the names of the family's architectures begin with.

    Raises:
        ConfigError: The model has a head that published encoders do not have.
    """
    kind = head_kind(model)
    written = "sequence" if kind == "regression" else kind
    suffix = next((suffix for suffix, known in _KINDS.items() if known == written), None)
    if suffix is None:
        raise ConfigError(f"model.head.kind is {kind}, but this family knows only {', '.join(_KINDS.values())}")
    said: dict[str, Any] = dict(architectures=[prefix + suffix])
    if kind in ("sequence", "token", "regression"):
        labels = range(model["head"]["num_labels"])
        said |= dict(
            id2label={str(label): f"LABEL_{label}" for label in labels},
            label2id={f"LABEL_{label}": label for label in labels},
        )
    return said | (dict(problem_type="regression") if kind == "regression" else {})


def head_kind(model: Mapping[str, Any]) -> str:
    """Returns the kind of a model's head."""
    return "language_model" if model["head"] is None else model["head"]["kind"]
