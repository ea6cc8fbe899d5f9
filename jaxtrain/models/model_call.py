"""The model as a loss of `Task.calling` gets it."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxtrain.errors import ConfigError
from jaxtrain.models.model import Apply, ModelState, Params


@dataclass(frozen=True, eq=False)
class ModelCall:
    """A pure function of inputs, to be called inside a loss: `outputs = apply(inputs, key=key)`.

    It computes as the step does: in the compute dtype, sharded, with remat. Gradients flow to `params`; they stop where
    the loss says `jax.lax.stop_gradient`, and at the moving average.

    Attributes:
        apply_model: what computes: `ShardedModel.apply`.
        params: the parameters that are trained, with the frozen ones, as the state stores them; in evaluation, those
            that are evaluated.
        model_state: what the model changes without a gradient (batch statistics), before this batch.
        train: True in a train step, False in evaluation.
        step: int32 [], steps done before this one.
        key: what calls without a key of their own draw from.
        apply_deferred: what computes `deferred`: `ShardedModel.apply_deferred`; None: `apply_model` does.

    Example:
        >>> def loss(apply, batch, key):  # apply is a ModelCall
        ...     clean, noisy = apply(batch["inputs"]), apply(batch["inputs"] + jax.random.normal(key, (8, 4)))
        ...     return jnp.sum(jnp.square(clean - noisy)), jnp.float32(8), {}
        >>> step = jt.make_train_step(model, jt.Task.calling("smooth", loss), optax.adamw(1e-3))
    """

    apply_model: Apply
    params: Params
    model_state: ModelState
    train: bool
    step: jax.Array
    key: jax.Array
    _average: tuple[Params, ModelState] | None = None
    apply_deferred: Apply | None = None
    _calls: Iterator[int] = field(default_factory=itertools.count)

    @property
    def average(self) -> Params:
        """The moving average of the parameters, with the frozen ones; no gradient flows to it.

        Raises:
            ConfigError: the step keeps none.
        """
        return self._kept_average()[0]

    @property
    def average_model_state(self) -> ModelState:
        """The moving average of the model_state.

        Raises:
            ConfigError: the step keeps none.
        """
        return self._kept_average()[1]

    def _kept_average(self) -> tuple[Params, ModelState]:
        if self._average is None:
            raise ConfigError(
                "the loss reads the moving average of the parameters, but the step keeps none; pass ema_decay=0.999 to "
                "make_train_step, or set optimizer.ema_decay"
            )
        return jax.lax.stop_gradient(self._average)

    def __call__(
        self,
        inputs: Any,
        *,
        key: jax.Array | None = None,
        train: bool | None = None,
        params: Params | None = None,
        model_state: ModelState | None = None,
    ) -> Any:
        """The outputs of the model.

        Args:
            inputs: array or tree [batch, ...]; floats are cast to the compute dtype.
            key: typed key of dropout and the like; None: in training a key of this call's own, in evaluation none.
            train: whether dropout and batch statistics behave as in training; None: as the loss is called.
            params: other parameters of the same structure; None: `params`.
            model_state: another model_state; None: `model_state`.

        Raises:
            ConfigError: parameters of another structure.
        """
        return self.with_state(inputs, key=key, train=train, params=params, model_state=model_state)[0]

    def with_state(
        self,
        inputs: Any,
        *,
        key: jax.Array | None = None,
        train: bool | None = None,
        params: Params | None = None,
        model_state: ModelState | None = None,
    ) -> tuple[Any, ModelState]:
        """The outputs of the model, and its model_state after them; arguments as for a call."""
        return self._called(self.apply_model, inputs, key, train, params, model_state)

    def deferred(
        self,
        inputs: Any,
        *,
        key: jax.Array | None = None,
        train: bool | None = None,
        params: Params | None = None,
        model_state: ModelState | None = None,
    ) -> Any:
        """The outputs of the model with `DeferredLogits` in place of logits, where it has them.

        `cross_entropy` takes both and never holds more than a block of deferred logits. Arguments as for a call.
        """
        apply = self.apply_deferred or self.apply_model
        return self._called(apply, inputs, key, train, params, model_state)[0]

    def _called(
        self,
        apply: Apply,
        inputs: Any,
        key: jax.Array | None,
        train: bool | None,
        params: Params | None,
        model_state: ModelState | None,
    ) -> tuple[Any, ModelState]:
        train = self.train if train is None else train
        number = next(self._calls)
        if key is None and train:
            key = jax.random.fold_in(self.key, number)
        chosen = self.params if params is None else _like(params, self.params, "params")
        state = self.model_state if model_state is None else _like(model_state, self.model_state, "model_state")
        return apply(chosen, state, inputs, key=key, train=train)


def _like(given: Any, wanted: Any, what: str) -> dict[str, Any]:
    if jax.tree.structure(given) != jax.tree.structure(wanted):
        raise ConfigError(
            f"apply(inputs, {what}=...) takes a tree like apply.{what}, whose structure differs from the one given; "
            f"write {what}=jax.tree.map(function, apply.{what})"
        )
    return given
