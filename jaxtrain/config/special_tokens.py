"""The special tokens that a tokenizer gets where it is made for a run. No jax here: the planner asks too."""

from jaxtrain.config.base import Group
from jaxtrain.config.chat import TURN_BEGINS, TURN_ENDS, ChatData
from jaxtrain.config.data import (
    Corruption,
    LabelledTextData,
    MaskCorruption,
    SpanCorruption,
    TaggedTextData,
    TextPairData,
)

_ENCODER_TOKENS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
NUM_SENTINELS = 100  # as T5 has them (Raffel et al. 2020)


def sentinel_name(k: int) -> str:
    """Returns the name of sentinel k, which stands for the k-th span of a row."""
    return f"<extra_id_{k}>"


def added_tokens(config: Group) -> tuple[str, ...]:
    """Returns the special tokens that a data group adds to a tokenizer that is made here, in the order of their ids.

    Args:
        config: A data group.
    """
    corruption: Corruption | None = getattr(config, "corruption", None)
    if isinstance(config, LabelledTextData | TaggedTextData) or isinstance(corruption, MaskCorruption):
        return _ENCODER_TOKENS
    if isinstance(config, TextPairData) or isinstance(corruption, SpanCorruption):
        return ("<pad>", "</s>", *(sentinel_name(k) for k in reversed(range(NUM_SENTINELS))))
    if isinstance(config, ChatData):
        return ("<pad>", TURN_BEGINS, TURN_ENDS)
    return ()
