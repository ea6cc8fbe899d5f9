"""Settings of conversations, and of pairs of answers of which one is preferred."""

import datetime
from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxtrain.config.base import Group
from jaxtrain.config.numbers import Fraction, Length, Share
from jaxtrain.config.tokenizer import TokenizerConfig

# The path that names the conversations made from the documentation that every Python carries.
PYTHON_DOCS = "python_docs"
# Tokens that a tokenizer made for a run gets, as the built-in template chatml writes them.
TURN_BEGINS, TURN_ENDS = "<|im_start|>", "<|im_end|>"
# The tasks whose rows are pairs of answers.
_TASKS_OF_PAIRS = ("dpo", "reward")


class ChatData(Group):
    """Conversations, written as text by the model's chat template; the loss is on the answers."""

    kind: Literal["chat"] = "chat"
    """Which source this group describes."""
    path: str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = PYTHON_DOCS
    """.jsonl or .parquet files, folders or globs, one or a list; python_docs: built in, made of Python's docstrings."""
    validation_path: str | None = None
    """File, folder or glob with the conversations for evaluation; null: validation_fraction of path."""
    validation_fraction: Share = 0.05
    """Fraction of the conversations that is kept for evaluation; equal prompts stay together."""
    sequence_length: Length | None = None
    """Tokens per row; null: the model's max_sequence_length."""
    template: str | None = None
    """Chat template: a file, or chatml or plain (built in); null: that beside the tokenizer."""
    train_on: Literal["answers", "last", "all"] = "answers"
    """Tokens with a loss: those of every answer, those of the last one, or all."""
    packing: bool = True
    """Whether a row holds several conversations, which do not see each other; pairs have a row of their own."""
    too_long: Literal["cut", "drop", "error"] = "cut"
    """What happens to a conversation of more than sequence_length tokens."""
    pairs: bool | None = None
    """Whether rows are pairs of a chosen and a rejected answer; null: for the tasks dpo and reward."""
    stop: str | None = None
    """Token that ends an answer; null: those at which the model stops (generation_config.json, end of text)."""
    date: str = "2024-07-26"
    """Date that a template which asks for today gets, so that rows are the same every day."""
    on_bad_record: Literal["error", "skip"] = "error"
    """What happens to a row that is no conversation, or whose answer is empty: the command ends, or it is left out."""
    max_bad_fraction: Fraction = 1e-4
    """Largest fraction of rows that may be left out; above 0, one always may be."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""

    @model_validator(mode="after")
    def _check_values(self) -> "ChatData":
        if self.validation_path is not None and self.path == PYTHON_DOCS:
            raise ValueError(f"validation_path has no effect with path={PYTHON_DOCS}; set validation_fraction")
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError:
            raise ValueError(f"date={self.date} is no date; write it as in date=2024-07-26") from None
        return self


def gives_pairs(data: ChatData, task: object) -> bool:
    """Returns whether rows of chats are pairs of answers.

    Args:
        data: The chats.
        task: Name of the run's task; anything else says nothing.
    """
    return data.pairs if data.pairs is not None else task in _TASKS_OF_PAIRS
