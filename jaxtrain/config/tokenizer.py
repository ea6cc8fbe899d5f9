"""Settings of the tokenizer that a data group may have."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from jaxtrain.config.base import Group


class TokenizerConfig(Group):
    """How text becomes token ids."""

    kind: Literal["byte", "bpe", "file"] = "byte"
    """byte: ids 0 to 255; bpe: trained on the data and saved with the run; file: a saved tokenizer.json."""
    vocab_size: Annotated[int, Field(ge=257, le=1_000_000)] = 1024
    """Size of a BPE vocabulary trained here: 256 bytes, the end-of-text id, and one id per merge."""
    path: str | None = None
    """Path of a tokenizer.json, for kind file."""
    start: str | None = None
    """Token that begins a row of an encoder; null: the usual name that the tokenizer has ([CLS], <s>)."""
    end: str | None = None
    """Token that ends a text and, but for kind byte, a document; null: that of the files beside it, or a usual name."""
    mask: str | None = None
    """Token that hides another one, for data.corruption.kind=mask; null: the usual name ([MASK], <mask>)."""
    padding: str | None = None
    """Token that fills rows up; null: the usual name ([PAD], <pad>), else id 0."""

    @model_validator(mode="after")
    def _path_is_read(self) -> Self:
        if self.path is not None and self.kind != "file":
            raise ValueError(f"{self.path} is not read with kind={self.kind}; set kind=file, or leave the path out")
        return self
