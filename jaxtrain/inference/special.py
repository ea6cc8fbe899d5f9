"""What is known of the special tokens of a model that writes texts. No jax here."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a model beside what its tokenizer knows.

    Attributes:
        added: whether what the tokenizer's file puts before a text (a beginning of text) stands before a prompt. A
            published model was trained so; rows of plain text, which a run was trained on, have none.
        stop: ids at which the model ends a text, beside the tokenizer's end of text.
        named: name of a special token in the published files (bos_token) -> its text.
    """

    added: bool = True
    stop: tuple[int, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
