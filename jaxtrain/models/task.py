"""What a task is: how a loss is computed. A task adds nothing to a model and knows no mesh.

A loss is a (weighted sum, weight) pair, normalised once by the global weight, so that accumulation, padding and
every mesh give the same number. `tasks.py` has the shipped ones, `task_sums.py` computes them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp

from jaxtrain.config.arguments import shown
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import check_axes

if TYPE_CHECKING:
    from jaxtrain.models.model_call import ModelCall

Batch = Mapping[str, Any]
# name -> (sum, weight), or (total, None) for what is not divided.
Sums = dict[str, tuple[jax.Array, jax.Array | None]]
# Weighted sum of the loss and its weight, float32 [], and metric sums.
TaskSums = tuple[jax.Array, jax.Array, Sums]
# A user's may return other forms, which `task_sums` brings into this one.
Loss = Callable[[Any, Batch], TaskSums]
Rows = Literal["separate", "global", "microbatch"]
_ROWS = get_args(Rows)


@dataclass(frozen=True)
class LogitsLoss:
    """A loss that takes `DeferredLogits` where outputs hold logits, and may differ in evaluation.

    A `Task.loss` that is a plain function gets computed logits, and training and evaluation both call it.

    Attributes:
        train: as `Task.loss`.
        evaluate: the same without terms that only training needs (z-loss).
        has_separate_rows: whether the loss of a row is known to depend on that row alone. If not, a step with
            microbatches tries it.

    Example:
        >>> def loss(logits, batch, *, z_loss=1e-4):
        ...     weights = jt.target_weights(batch)
        ...     sums = jt.cross_entropy_sums(logits, batch["targets"], weights, z_loss=z_loss)
        ...     return sums.total, jnp.sum(weights), {}
        >>> plain = lambda logits, batch: loss(logits, batch, z_loss=None)
        >>> task = jt.Task("mine", jt.LogitsLoss(loss, plain), reads_weights=True)
    """

    train: Loss
    evaluate: Loss
    has_separate_rows: bool = False

    def __call__(self, outputs: Any, batch: Batch) -> TaskSums:
        return self.train(outputs, batch)


@dataclass(frozen=True)
class CallingLoss:
    """A loss that calls the model itself; made by `Task.calling`.

    Attributes:
        function: (apply, batch, key) -> what `Task.loss` returns; `apply` is a `ModelCall`.
        reference: see `Task.calling`.
        has_separate_rows: as of `LogitsLoss`.
        ids: entries of a batch that hold ids of the model's vocabulary; larger ones are refused when a batch is read.
    """

    function: Callable[["ModelCall", Batch, jax.Array], Any]
    reference: Callable[["ModelCall", Batch], jax.Array] | None = None
    has_separate_rows: bool = False
    ids: tuple[str, ...] = ()

    def __call__(self, outputs: Any, batch: Batch) -> TaskSums:
        raise ConfigError("the loss of Task.calling calls the model: it takes (apply, batch, key) and no outputs")


@dataclass(frozen=True)
class Task:
    """How the outputs of a model are compared with a batch: the loss and its metrics.

    Attributes:
        name: for people and for `run.json`.
        loss: (outputs, batch) -> (weighted sum float32 [], weight float32 [], metrics), or (losses [B, ...], metrics),
            which the weights of the batch weigh. Each metric is name -> (sum, weight) of its own, both scalars or
            arrays; name -> (total, None), which is added up and not divided (counts, a confusion matrix); or, beside
            losses per row, an array of their shape. A batch with `targets` always has `weights`; rows without weights
            count 1. No gradient flows through the weight. If the loss is a `LogitsLoss`, it receives `DeferredLogits`
            in place of logits.
        batch_axes: batch key -> logical axes of its dims; keys left out have ("batch",) first and the rest replicated.
        reads_weights: whether the loss uses the batch's `weights`. If not, evaluation removes the padding rows of the
            last batch before it calls the loss.
        num_classes: outputs -> how many ids `targets` may hold; None: targets are not ids. A batch with a larger id is
            refused when it is read.
        rows: what the loss of a row depends on. separate: on that row alone (with accumulation, a loss that mixes rows
            is refused). global: on all rows of the batch, such as contrastive losses; with accumulation the model then
            runs twice, once for the outputs of all rows and once for the gradients. microbatch: on the rows of the same
            microbatch, so that accumulation changes the loss.

    Example:
        >>> def brier(outputs, batch):
        ...     errors = jnp.square(jax.nn.softmax(outputs) - jax.nn.one_hot(batch["targets"], 3))
        ...     return jnp.sum(errors, axis=-1), {}
        >>> step = jt.make_train_step(model, jt.Task("brier", brier), optax.adamw(1e-3))
    """

    name: str
    loss: Loss | CallingLoss
    batch_axes: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    reads_weights: bool = False
    num_classes: Callable[[Any], int] | None = None
    rows: Rows = "separate"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not callable(self.loss):
            raise ConfigError(
                f"Task takes a name and a loss function, not {shown(self.name)} and {shown(self.loss)}; "
                "write Task('name', loss) with loss(outputs, batch) -> (sum, weight, metrics)"
            )
        if self.rows not in _ROWS:
            raise ConfigError(f"Task: rows={self.rows!r}; use {', '.join(_ROWS[:-1])} or {_ROWS[-1]}")
        check_axes(self.batch_axes, what="Task: batch_axes", write="batch_axes={'inputs': ('batch', 'sequence')}")

    @classmethod
    def calling(
        cls,
        name: str,
        loss: Callable[["ModelCall", Batch, jax.Array], Any],
        *,
        batch_axes: Mapping[str, tuple[str | None, ...]] | None = None,
        reads_weights: bool = False,
        rows: Rows = "separate",
        reference: Callable[["ModelCall", Batch], jax.Array] | None = None,
    ) -> "Task":
        """A task whose loss calls the model itself, as often as it likes, also with other parameters.

        Args:
            name: for people and for `run.json`.
            loss: (apply, batch, key) -> as `Task.loss`, or with the model_state as a further entry at the end where the
                model has one (batch statistics). `apply(inputs, *, key, train, params, model_state)` gives the model's
                outputs; see `ModelCall`, which also holds the parameters, their moving average and the step number.
                `batch` is any dict of arrays; it needs no entry `inputs`. `key` is of the step and the microbatch; in
                evaluation, of the batch's number. Its numbers are drawn for all rows at once, the same on every mesh.
            batch_axes, reads_weights, rows: as in `Task`; with accumulation, `rows="global"` is refused.
            reference: (apply, batch) -> float32 [B, ...], numbers of each row by the parameters that training starts
                from, such as log-probabilities. A run computes them once, keeps them in its directory, and gives them
                to the loss as the entry `reference`. None: there are none.

        Returns:
            The task. It is refused on a mesh with `pipe` > 1, whose stages run a model once.

        Raises:
            ConfigError: no name, no function, or a `reference` that is no function.

        Example:
            >>> def loss(apply, batch, key):
            ...     noise = jax.random.normal(key, batch["inputs"].shape)
            ...     return jnp.mean((apply(batch["inputs"] + noise) - noise) ** 2, axis=-1), {}
            >>> task = Task.calling("denoise", loss)
        """
        if not isinstance(name, str) or not callable(loss):
            raise ConfigError(
                f"Task.calling takes a name and a loss function, not {shown(name)} and {shown(loss)}; "
                "write Task.calling('name', loss) with loss(apply, batch, key) -> (sum, weight, metrics)"
            )
        return cls(name, CallingLoss(loss, reference), batch_axes or {}, reads_weights, rows=rows)

    @property
    def calls_model(self) -> bool:
        """Whether the loss calls the model itself."""
        return isinstance(self.loss, CallingLoss)

    @property
    def reference(self) -> Callable[["ModelCall", Batch], jax.Array] | None:
        """What computes the entry `reference` of each row before training; None: the loss needs none."""
        return self.loss.reference if isinstance(self.loss, CallingLoss) else None

    def __repr__(self) -> str:
        return f"Task {self.name!r}"

    @property
    def evaluation(self) -> Loss:
        """The loss that evaluation computes."""
        return self.loss.evaluate if isinstance(self.loss, LogitsLoss) else self.loss

    @property
    def takes_deferred_logits(self) -> bool:
        """Whether the loss takes `DeferredLogits` where outputs hold logits."""
        return isinstance(self.loss, LogitsLoss)


def divisor(weight: jax.Array) -> jax.Array:
    """Choose what a sum is divided by to be a mean: float32 [], the weight (a negative one too), or 1 where it is 0."""
    return jnp.where(weight != 0, weight, 1)
