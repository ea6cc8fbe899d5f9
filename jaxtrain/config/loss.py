"""Ways to hold the logits of a batch in memory, and which settings of them go together. No jax here."""

from typing import Literal

from jaxtrain.errors import ConfigError

Logits = Literal["whole", "tokens", "vocabulary"]


def check_blocks(by: str, size: int | None) -> None:
    """Raise where a cut is unknown, or a size of a block is given for no cut that it could be of.

    Args:
        by: auto or a way to cut.
        size: tokens or ids of a block; None: from the sizes.

    Raises:
        ConfigError: another way to cut, a size for auto or whole, or a size that is no whole number from 1.
    """
    if by not in ("auto", "whole", "tokens", "vocabulary"):
        raise ConfigError(f"loss.logits={by}: use auto, whole, tokens or vocabulary")
    if size is not None and (not isinstance(size, int) or size < 1):
        raise ConfigError(f"loss.block={size}: use a whole number from 1, or leave it out")
    if size is not None and by in ("auto", "whole"):
        raise ConfigError(f"loss.block={size} says nothing of loss.logits={by}; set that to tokens or vocabulary")
