"""What a transformer puts on top of its blocks: the settings of its head."""

from typing import Literal

from pydantic import model_validator

from jaxtrain.config.base import Group
from jaxtrain.config.numbers import Fraction, Ids

# Keys that each kind of head reads, beside `kind`.
_READ = {
    "language_model": (),
    "masked_language_model": ("hidden", "bias"),
    "sequence": ("num_labels", "pooling", "hidden", "dropout", "bias"),
    "token": ("num_labels", "dropout", "bias"),
    "regression": ("num_labels", "pooling", "hidden", "dropout", "bias"),
    "embedding": ("pooling", "hidden", "normalize", "bias"),
}


class HeadConfig(Group):
    """What a transformer gives for a text: logits of tokens or labels, numbers, or an embedding."""

    kind: Literal["language_model", "masked_language_model", "sequence", "token", "regression", "embedding"] = (
        "language_model"
    )
    """Logits of the vocabulary, of labels per text (sequence) or token; numbers or an embedding per text."""
    num_labels: Ids | None = None
    """Labels, or numbers of a regression; null: those of the data."""
    pooling: Literal["first", "last", "mean"] = "first"
    """Which token stands for the text: the first, the last that is no padding, or the mean of all but padding."""
    hidden: Literal["none", "tanh", "relu", "gelu", "gelu_exact"] | None = None
    """Activation after a square layer before the output; null: none (masked_language_model: gelu_exact, and a norm)."""
    dropout: Fraction = 0.0
    """Dropout rate of what the output layer takes."""
    bias: bool = True
    """Add biases to the layers of the head."""
    normalize: bool = False
    """Divide an embedding by its Euclidean norm."""

    @property
    def has_labels(self) -> bool:
        """Whether the outputs are labels or numbers, as many as the config or the data says."""
        return "num_labels" in _READ[self.kind]

    @property
    def is_pooled(self) -> bool:
        """Whether there is one output per text."""
        return "pooling" in _READ[self.kind]

    @model_validator(mode="before")
    @classmethod
    def _one_way_to_say_it(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        if values.get("kind") == "masked_language_model":
            return values if values.get("hidden") else values | {"hidden": "gelu_exact"}
        return values | {"hidden": None} if values.get("hidden") == "none" else values

    @model_validator(mode="after")
    def _only_what_is_read(self) -> "HeadConfig":
        for key in type(self).model_fields:
            default = type(self).model_fields[key].default
            if key != "kind" and key not in _READ[self.kind] and getattr(self, key) != default:
                readers = ", ".join(kind for kind, keys in _READ.items() if key in keys)
                raise ValueError(f"{key} is for a head of kind {readers}, not {self.kind}; leave it out")
        if self.kind == "masked_language_model" and self.hidden == "none":
            raise ValueError(
                "hidden=none, but a masked_language_model head has a square layer; write gelu_exact, gelu, relu or "
                "tanh, or kind=language_model for the embedding alone"
            )
        return self
