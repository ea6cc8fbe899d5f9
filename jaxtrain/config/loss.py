"""Settings of losses: which of them go together, and what they may be. No jax here."""

from typing import Any, Literal

from jaxtrain.config.arguments import check_number, refusal
from jaxtrain.errors import ConfigError

Logits = Literal["whole", "tokens", "vocabulary"]


def check_blocks(by: str, size: int | None) -> None:
    """Checks that the settings of the loss's blocks go together.

    Args:
        by: The value of `loss.logits`: "auto", "whole" (all logits at once), or the dimension that is partitioned into
            blocks, "tokens" or "vocabulary".
        size: The value of `loss.block`: tokens or ids per block; None: chosen from the sizes.

    Raises:
        ConfigError: `by` is another text, `size` is not an integer of at least 1, or a size is given although `by` is
            "auto" or "whole".
    """
    if by not in ("auto", "whole", "tokens", "vocabulary"):
        raise ConfigError(f"loss.logits={by}: use auto, whole, tokens or vocabulary")
    if size is not None and (not isinstance(size, int) or size < 1):
        raise ConfigError(f"loss.block={size}: use an integer of at least 1, or leave it out")
    if size is not None and by in ("auto", "whole"):
        raise ConfigError(f"loss.block={size} has no effect with loss.logits={by}; set that to tokens or vocabulary")


def check_z_loss(z_loss: Any, *, of: str) -> None:
    """Checks the weight of a z-loss.

    Args:
        z_loss: What was given; None: no z-loss.
        of: Name of the function that takes it.

    Raises:
        ConfigError: It is no number of 0 or more.
    """
    if z_loss is None:
        return
    what, takes, write = f"{of}: z_loss", "a number of 0 or more, or None", "z_loss=1e-4"
    check_number(z_loss, what=what, takes=takes, write=write)
    if z_loss < 0:
        raise ConfigError(refusal(what, takes, z_loss, write))


def check_preference(beta: float, label_smoothing: float) -> None:
    """Checks the settings of the loss of preferred answers.

    Args:
        beta: The value of `loss.beta`.
        label_smoothing: The value of `loss.label_smoothing`.

    Raises:
        ConfigError: `beta` is not above 0, or `label_smoothing` is not from 0 to below 0.5.
    """
    if not beta > 0:
        raise ConfigError(f"loss.beta={beta:g}: use a number above 0, such as 0.1")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"loss.label_smoothing={label_smoothing:g}: use a number from 0 to below 0.5, such as 0.1")
