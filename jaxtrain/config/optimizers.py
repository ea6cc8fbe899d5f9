"""The group `optimizer` of a config: what updates the parameters, and the learning rate over the steps. No jax here."""

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field

from jaxtrain.config.base import (
    Call,
    Count,
    Fraction,
    Group,
    Names,
    NonNegative,
    Positive,
    PositiveInt,
    Ratio,
    Share,
    SomeNames,
    kind_or,
)
from jaxtrain.config.errors import AlsoCalled
from jaxtrain.errors import ConfigError


class ScheduleConfig(Group):
    """The learning rate at each step: a linear warmup, then a decay of the chosen shape."""

    kind: Annotated[Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"], AlsoCalled("schedule")] = "cosine"
    """Shape after warmup; wsd (warmup, stable, decay) holds the peak and decays linearly at the end."""
    warmup_steps: Annotated[Count, AlsoCalled("warmup")] = 0
    """Steps of linear warmup to the peak, from peak / (warmup_steps + 1) in step 0."""
    decay_steps: PositiveInt | None = None
    """wsd: steps of the final decay (null: 10 % of the run); other kinds: step at which decay ends (null: the last)."""
    final_fraction: Share = 0.1
    """Learning rate at the end, as a fraction of the peak."""


def check_schedule(config: ScheduleConfig, steps: int) -> None:
    """Raises a ConfigError where a decay does not fit between the warmup and the end of a run of so many steps."""
    warmup, decay = config.warmup_steps, config.decay_steps
    if decay is not None and (warmup + decay > steps if config.kind == "wsd" else decay <= warmup):
        raise ConfigError(
            f"optimizer.schedule: decay_steps={decay} does not fit between warmup_steps={warmup} and "
            f"train.steps={steps}"
        )


class _Update(Group):
    """The settings that every optimizer has, one from Python too."""

    clip_norm: Annotated[Positive | None, AlsoCalled("max_grad_norm", "grad_clip")] = 1.0
    """Largest global norm of the gradient; null: no clipping."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Largest decay of the moving average (EMA) of parameters and batch statistics, used by evaluation; null: none."""
    freeze: Names = ()
    """Parameters that are not trained, as path patterns such as 'blocks/*'."""
    offload: bool = False
    """Keep the optimizer state in host memory between steps; it is updated on the device, in slices where possible."""


class SGDDirection(Group):
    """Stochastic gradient descent with momentum."""

    kind: Literal["sgd"] = "sgd"
    momentum: Fraction = 0.9
    """Decay of the momentum."""
    nesterov: bool = False
    """Use Nesterov momentum."""


class AdamWDirection(Group):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017)."""

    kind: Literal["adamw"] = "adamw"
    b1: Fraction = 0.9
    """Decay of the first moment."""
    b2: Fraction = 0.95
    """Decay of the second moment."""
    epsilon: Ratio = 1e-8
    """Added to the square root of the second moment."""
    moments: Literal["float32", "bfloat16", "int8"] = "float32"
    """Number format of both moments, which take 8, 4 or about 2 bytes per parameter together."""


class MuonDirection(Group):
    """Orthogonal momentum for matrices (Jordan et al. 2024), AdamW for the rest; both have the same learning rate."""

    kind: Literal["muon"] = "muon"
    momentum: Fraction = 0.95
    """Decay of the momentum of matrices."""
    b1: Fraction = 0.9
    """Decay of AdamW's first moment."""
    b2: Fraction = 0.95
    """Decay of AdamW's second moment."""
    epsilon: Ratio = 1e-8
    """Added to the square root of AdamW's second moment."""


class LionDirection(Group):
    """Updates by the sign of a momentum (Chen et al. 2023); needs about a tenth of AdamW's learning rate."""

    kind: Literal["lion"] = "lion"
    b1: Fraction = 0.9
    """Weight of the momentum in the update; the gradient has the rest."""
    b2: Fraction = 0.99
    """Decay of the momentum."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Number format of the momentum, which takes 4 or 2 bytes per parameter."""


class AdafactorDirection(Group):
    """Factored second moments (Shazeer and Stern 2018)."""

    kind: Literal["adafactor"] = "adafactor"
    min_dim_size_to_factor: PositiveInt = 128
    """Matrices with both sides at least this long keep a factored second moment."""
    b1: Fraction | None = None
    """Decay of the first moment; null: no first moment, which saves its memory."""


# What makes the direction that a learning rate scales.
DirectionConfig = Annotated[
    SGDDirection | AdamWDirection | MuonDirection | LionDirection | AdafactorDirection, Field(discriminator="kind")
]


class ParameterGroup(Group):
    """Parameters with their own optimizer settings; a parameter belongs to the first group that matches it."""

    match: SomeNames
    """Which parameters: path patterns such as 'head/*' or '*/lora_b'."""
    learning_rate_factor: Positive = 1.0
    """Their learning rate at every step, as a multiple of the optimizer's."""
    weight_decay: NonNegative | None = None
    """Their decoupled weight decay; null: the optimizer's."""
    optimizer: DirectionConfig | None = None
    """Their optimizer, such as {kind: sgd, momentum: 0.9}; null: the run's."""


class _Optimizer(_Update):
    """The settings of the optimizers that a config describes by their kind."""

    learning_rate: Annotated[Positive, AlsoCalled("lr")] = 1e-3
    """Peak learning rate."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How the learning rate changes over the steps."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, multiplied by the learning rate; applied to matrices, not to biases and norm scales."""
    groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False)] = ()
    """Parameters with another learning rate, weight decay or optimizer: [{match: ['head/*'], weight_decay: 0}, ...]."""


class SGDConfig(SGDDirection, _Optimizer):
    """Stochastic gradient descent as the optimizer of a run."""


class AdamWConfig(AdamWDirection, _Optimizer):
    """AdamW as the optimizer of a run."""


class MuonConfig(MuonDirection, _Optimizer):
    """Muon as the optimizer of a run."""


class LionConfig(LionDirection, _Optimizer):
    """Lion as the optimizer of a run."""


class AdafactorConfig(AdafactorDirection, _Optimizer):
    """Adafactor as the optimizer of a run."""


class CalledOptimizer(_Update, Call):
    """An optimizer of your own: a function that returns an optax transformation."""

    kind: Literal["called"] = "called"
    learning_rate: Positive | None = None
    """Peak of the schedule that the function gets as learning_rate; null: the function sets its own learning rate."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How that learning rate changes over the steps."""


OptimizerConfig = Annotated[
    SGDConfig | AdamWConfig | MuonConfig | LionConfig | AdafactorConfig | CalledOptimizer,
    Field(discriminator="kind"),
    kind_or("adamw"),
]


def is_replaced(key: str, parts: Collection[str]) -> bool:
    """Return whether a dotted key says nothing, since the part that it describes is among the `parts` from Python."""
    group, _, rest = key.partition(".")
    # These hold beside an optimizer from Python.
    if group == "optimizer" and rest.partition(".")[0] in _Update.model_fields:
        return False
    return group in parts or (group == "loss" and "task" in parts)
