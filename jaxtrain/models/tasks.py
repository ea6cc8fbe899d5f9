"""Tasks: how a loss is computed. A task adds nothing to a model and knows no mesh; `task_sums.py` computes it.

A loss is a (weighted sum, weight) pair, normalised once by the global weight, so that accumulation, padding and
every mesh give the same number. Shapes: B batch, L sequence, V vocabulary, C classes, O targets.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.arguments import check_function, check_functions, check_number, refusal, shown
from jaxtrain.config.kinds import check_loss
from jaxtrain.config.loss import check_blocks
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import check_axes
from jaxtrain.ops.loss.cross_entropy import DeferredLogits, cross_entropy, cross_entropy_sums
from jaxtrain.runtime.card import card

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

    def __post_init__(self) -> None:
        call = "(outputs, batch) -> (sum, weight, metrics)"
        calls = {"train": (self.train, call), "evaluate": (self.evaluate, call)}
        check_functions(calls, of="LogitsLoss", write="LogitsLoss(train, evaluate)")

    def __call__(self, outputs: Any, batch: Batch) -> TaskSums:
        return self.train(outputs, batch)


@dataclass(frozen=True)
class CallingLoss:
    """A loss that calls the model itself; made by `Task.calling`.

    Attributes:
        function: (apply, batch, key) -> what `Task.loss` returns; `apply` is a `ModelCall`.
    """

    function: Callable[["ModelCall", Batch, jax.Array], Any]

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
        if self.num_classes is not None:
            takes, write = "a function of the outputs", "num_classes=lambda outputs: outputs.shape[-1]"
            check_function(self.num_classes, what="Task: num_classes", takes=takes, write=write)

    @classmethod
    def calling(
        cls,
        name: str,
        loss: Callable[["ModelCall", Batch, jax.Array], Any],
        *,
        batch_axes: Mapping[str, tuple[str | None, ...]] | None = None,
        reads_weights: bool = False,
        rows: Rows = "separate",
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

        Returns:
            The task. It is refused on a mesh with `pipe` > 1, whose stages run a model once.

        Raises:
            ConfigError: no name or no function.

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
        return cls(name, CallingLoss(loss), batch_axes or {}, reads_weights, rows=rows)

    @property
    def calls_model(self) -> bool:
        """Whether the loss calls the model itself."""
        return isinstance(self.loss, CallingLoss)

    def __repr__(self) -> str:
        return f"Task {self.name!r}"

    def _repr_html_(self) -> str:
        axes = {name: ", ".join(map(str, row)) for name, row in self.batch_axes.items()}
        return card(repr(self), axes)

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


def target_weights(batch: Batch) -> jax.Array:
    """Weigh each target of a batch: by its `weights` or 1, and by 0 where the target is negative.

    Args:
        batch: `targets` of any shape; integers below 0 (-100, say) are ignored, as everywhere in the field. Optional
            `weights` of the same shape, or of its first dimensions ([B] for targets [B, L]).

    Returns:
        float32, of the shape of the targets.

    Raises:
        ConfigError: no batch with an array of targets, or weights of another shape.

    Example:
        >>> jt.target_weights({"targets": jnp.array([2, -100, 0])}).tolist()
        [1.0, 0.0, 1.0]
    """
    write = "target_weights({'inputs': x, 'targets': y})"
    if not isinstance(batch, Mapping):
        raise ConfigError(refusal("target_weights", "a batch", batch, write))
    for name in ("targets", "weights"):
        value = batch.get(name)
        if value is not None and not isinstance(value, jax.Array | np.ndarray):
            raise ConfigError(refusal(f"target_weights: {name}", "an array", value, write))
    weights, targets = _weights(batch), batch["targets"]
    return jnp.where(targets < 0, 0.0, weights) if jnp.issubdtype(targets.dtype, jnp.integer) else weights


def _weights(batch: Batch) -> jax.Array:
    """The batch's `weights`, or 1, broadcast to the shape of the targets: float32."""
    if "targets" not in batch:
        raise ConfigError(f"the task needs an entry 'targets', but the batch holds {', '.join(batch) or 'nothing'}")
    shape, weights = batch["targets"].shape, batch.get("weights")
    if weights is None:
        return jnp.ones(shape, jnp.float32)
    if weights.shape != shape[: weights.ndim]:
        raise ConfigError(
            f"weights {list(weights.shape)} do not fit targets {list(shape)}; give one weight per target, or per row"
        )
    weights = jnp.asarray(weights, jnp.float32)
    return jnp.broadcast_to(weights.reshape(*weights.shape, *[1] * (len(shape) - weights.ndim)), shape)


def _checked_ids(task: str, logits: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Check and prepare the targets and weights of a loss over classes.

    Args:
        task: its name, for error messages.
        logits: [..., V], computed or deferred.
        batch: `targets` [...] and optional `weights`.

    Returns:
        int32 ids from 0 on, and float32 weights, NaN for an id that no logit has; both [...].

    Raises:
        ConfigError: logits, targets or weights of the wrong shape or dtype.
    """
    if isinstance(logits, DeferredLogits):
        shape, dtype = (*logits.hidden.shape[:-1], logits.vocabulary), logits.hidden.dtype
    elif isinstance(logits, (jax.Array, np.ndarray)):
        shape, dtype = logits.shape, logits.dtype
    else:
        raise ConfigError(f"{task} needs logits [B, ..., classes] from the model, which gives {shown(logits)}")
    weights = target_weights(batch)
    targets = batch["targets"]
    if jnp.issubdtype(targets.dtype, jnp.integer):
        # The number of classes may not fit into the 8 or 16 bits that ids are stored in.
        targets = targets.astype(jnp.int32)
    if not shape or not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigError(f"{task} needs logits [B, ..., classes], but the model gives {dtype.name}{list(shape)}")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ConfigError(
            f"{task} needs integer targets, but they are {targets.dtype.name}{list(targets.shape)}; "
            "give class numbers (int32), or use regression()"
        )
    if targets.shape != shape[:-1]:
        if targets.shape[-1:] == (1,) and targets.shape[:-1] == shape[:-1]:
            hint = "drop the last dimension: targets[..., 0]"
        else:
            hint = f"give integer targets {list(shape[:-1])}"
        raise ConfigError(f"{task}: targets {list(targets.shape)} do not fit logits {list(shape)}; {hint}")
    # Host arrays with such ids are refused when they are read. On the device a number cannot raise, but NaN is seen.
    weights = jnp.where((targets >= shape[-1]) & (weights != 0), jnp.nan, weights)
    return jnp.maximum(targets, 0), weights


def _num_classes(outputs: Any) -> int:
    """Read the number of classes off logits, alone or under the key "logits"."""
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs
    return logits.vocabulary if isinstance(logits, DeferredLogits) else logits.shape[-1]


def language_modeling(
    *,
    z_loss: float | None = None,
    logits: Literal["auto", "whole", "tokens", "vocabulary"] = "auto",
    block: int | None = None,
) -> Task:
    """Predict the next token: logits [B, L, V] or deferred, `targets` int32 [B, L], optional `weights` [B, L] or [B].

    Negative targets are ignored.

    A model with experts gives a dict: `logits`, `router_loss` [B, L] (added to the loss of each token, in training) and
    numbers that are reported as they are.

    Args:
        z_loss: weight of the squared logsumexp, in training; None: without it.
        logits: how deferred logits are partitioned into blocks (`ops/loss/blocks.py`); auto: from their sizes.
        block: tokens or ids of a block; None: from the sizes.

    Returns:
        The task.

    Raises:
        ConfigError: a block size for logits that are not partitioned, or a weight that is no number.

    Example:
        >>> task = jt.language_modeling(z_loss=1e-4)
        >>> task.batch_axes["targets"]
        ('batch', 'sequence')
    """
    check_blocks(logits, block)
    if z_loss is not None:
        check_number(z_loss, what="language_modeling: z_loss", takes="a number or None", write="z_loss=1e-4")

    def loss_with(z_loss: float | None, outputs: Any, batch: Batch) -> TaskSums:
        more = dict(outputs) if isinstance(outputs, Mapping) else {"logits": outputs}
        found = more.pop("logits", None)
        targets, weights = _checked_ids("language_modeling", found, batch)
        weight = jnp.sum(weights)
        by = None if logits == "auto" else logits
        sums = cross_entropy_sums(found, targets, weights, z_loss=z_loss, by=by, size=block)
        total, metrics = sums.total, {}
        if z_loss is not None:
            metrics["z_loss"] = (sums.z_loss, weight)
        if "router_loss" in more:
            router_loss = jnp.sum(more.pop("router_loss") * weights)
            metrics["router_loss"] = (router_loss, weight)
            total = total + router_loss
        if metrics:
            metrics["cross_entropy"] = (sums.cross_entropy, weight)
        return total, weight, {**metrics, **{name: (value, jnp.float32(1)) for name, value in more.items()}}

    axes = {key: ("batch", "sequence") for key in ("inputs", "targets", "weights")}
    loss = LogitsLoss(functools.partial(loss_with, z_loss), functools.partial(loss_with, None))
    return Task("language_modeling", loss, axes, reads_weights=True, num_classes=_num_classes)


def classification() -> Task:
    """Predict one class per row or position: logits [B, ..., C], `targets` int32 [B, ...], optional `weights`.

    Weights are of the shape of the targets, or [B]. Negative targets are ignored. The accuracy is reported.

    Returns:
        The task.

    Example:
        >>> step = jt.make_train_step(model, jt.classification(), optax.adamw(1e-3))
    """

    def loss(outputs: Any, batch: Batch) -> TaskSums:
        targets, weights = _checked_ids("classification", outputs, batch)
        weight = jnp.sum(weights)
        right = jnp.argmax(outputs, axis=-1) == targets
        accuracy = jnp.sum(jnp.where(right, weights, 0.0))
        return jnp.sum(cross_entropy(outputs, targets) * weights), weight, {"accuracy": (accuracy, weight)}

    return Task("classification", loss, reads_weights=True, num_classes=_num_classes)


def regression() -> Task:
    """Predict numbers: outputs [B, O], `targets` [B, O] or [B] of any real dtype, optional `weights` [B, O] or [B].

    The loss is the squared error; that of a row is its mean over O, and without weights every row counts 1.

    Returns:
        The task.

    Example:
        >>> step = jt.make_train_step(model, jt.regression(), optax.adamw(1e-3))  # targets [B, 3]
    """

    def loss(outputs: Any, batch: Batch) -> TaskSums:
        if not isinstance(outputs, (jax.Array, np.ndarray)):
            raise ConfigError(f"regression needs outputs [B, O] from the model, which gives {shown(outputs)}")
        weights, targets = _weights(batch), batch["targets"]
        if not jnp.issubdtype(targets.dtype, jnp.integer) and not jnp.issubdtype(targets.dtype, jnp.floating):
            raise ConfigError(f"regression needs real targets, but they are {targets.dtype.name}; give float32")
        if _without_last_one(outputs.shape) != _without_last_one(targets.shape):
            raise ConfigError(
                f"regression: targets {list(targets.shape)} do not fit outputs {list(outputs.shape)}; "
                "give the model as many outputs as a row has targets"
            )
        # A target that is missing (NaN) and weighs 0 counts nothing; 0 times NaN would.
        known = jnp.where(weights != 0, targets.astype(jnp.float32), 0.0)
        errors = jnp.square(outputs.astype(jnp.float32).reshape(targets.shape) - known)
        rows = targets.shape[0]
        by_row = (jnp.mean((x * weights).reshape(rows, -1), axis=-1) for x in (errors, jnp.ones_like(errors)))
        total, weight = map(jnp.sum, by_row)
        return total, weight, {}

    return Task("regression", loss, reads_weights=True)


def _without_last_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:-1] if len(shape) == 2 and shape[-1] == 1 else shape


def build_task(config: Config) -> Task:
    """Build the task that a config describes.

    Args:
        config: its `task` and `loss`.

    Raises:
        ConfigError: options of a loss that the task does not have.
    """
    if config.task == "language_modeling":
        return language_modeling(z_loss=config.loss.z_loss, logits=config.loss.logits, block=config.loss.block)
    check_loss(config)
    return TASKS[config.task]()


TASKS: Mapping[str, Callable[[], Task]] = {
    "language_modeling": language_modeling,
    "classification": classification,
    "regression": regression,
}
