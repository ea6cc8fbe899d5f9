"""The group `finetune` of a config: adapters, and the number format of the weights below them. No jax here."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from jaxtrain.config.base import Group
from jaxtrain.config.numbers import Fraction, Scale, Units
from jaxtrain.errors import ConfigError


class _OneLine(type(Group)):
    """Makes a mistake in a call of the class one line; a mistake inside a config stays pydantic's, with its place."""

    def __call__(cls: Any, **values: Any) -> Any:
        try:
            return super().__call__(**values)
        except ValidationError as error:
            found = error.errors()[0]
            key = ".".join(map(str, found["loc"]))
            if found["type"] == "extra_forbidden":
                raise ConfigError(f"{cls.__name__} has no {key!r}; it takes {', '.join(cls.model_fields)}") from None
            reason = found["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
            raise ConfigError(f"{cls.__name__}: {key}={found['input']!r}; {reason}") from None


class LoraConfig(Group, metaclass=_OneLine):
    """Low-rank adapters of linear layers (Hu et al. 2021): a kernel W becomes W + scale * A B, and only A, B train.

    Example:
        >>> jt.LoraConfig(rank=8, targets=("query", "value")).alpha
        32.0
    """

    rank: Units = 16
    """Columns of A and rows of B."""
    alpha: Scale = 32.0
    """The product A B is multiplied by alpha / rank."""
    dropout: Fraction = 0.0
    """Share of an adapter's inputs that become 0 in training."""
    targets: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = ("*",)
    """Linear layers that get an adapter: names such as query, or patterns of paths such as 'blocks/mlp/*'; '*': all."""
    rank_stabilised: bool = False
    """Multiply by alpha / sqrt(rank) instead (Kalajdzievski 2023)."""
    train_also: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Parameters that are trained whole beside the adapters, as path patterns such as 'head/*'."""

    @property
    def scale(self) -> float:
        """What the product A B is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)


class FinetuneConfig(Group):
    """How a pretrained model is trained further; without adapters, all of it is."""

    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights; null: train the weights."""
    adapter: str | None = None
    """Folder of an adapter, from PEFT or `jaxtrain export`, to begin with; it gives lora, model.from is its base."""
    base: Literal["int8", "nf4"] | None = None
    """Number format of the frozen linear layers below the adapters; null: the dtype of the computation."""
    double_quantization: bool = True
    """nf4: quantize the scales of the blocks too, which takes 4.127 instead of 4.5 bits per weight."""

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if self.base is not None and self.lora is None:
            raise ValueError(
                f"base={self.base} without lora: kernels of {self.base} are not trained; set lora.rank, such as 16, or "
                "leave base out"
            )
        return self


def check_freeze(finetune: FinetuneConfig, freeze: Sequence[str]) -> None:
    """Raises where a config freezes parameters that adapters freeze already.

    Args:
        finetune: The group `finetune`.
        freeze: The key `optimizer.freeze`.

    Raises:
        ConfigError: Both say what is trained.
    """
    if finetune.lora is not None and freeze:
        raise ConfigError(
            f"optimizer.freeze={list(freeze)} beside finetune.lora, which trains its adapters and "
            "finetune.lora.train_also alone; leave optimizer.freeze out"
        )
