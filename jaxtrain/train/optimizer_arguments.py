"""What an optimizer is given besides gradients, state and parameters, and which optimizers a step refuses."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.arguments import shown
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.model import Params

# Trained parameters, float32 -> mean loss of the step's batch, float32 [].
MeanLoss = Callable[[Params], jax.Array]
# Python's words for a keyword that a function gets and does not know, or wants and does not get.
_UNWANTED = re.compile(r"got an unexpected keyword argument '(\w+)'")
# What Python and jax raise of a function that does not fit its arguments.
_MISTAKES = (TypeError, ValueError, KeyError, IndexError, AttributeError)
_MISSING = re.compile(r"missing \d+ required keyword-only argument")


def extra_arguments(value: jax.Array, grad: Params, mean_loss: MeanLoss) -> dict[str, Any]:
    """What optimizers of optax may read, by the names that optax has for it.

    Args:
        value: float32 [], the mean loss of the batch.
        grad: its gradient, float32, before clipping.
        mean_loss: the same loss at other parameters; costs nothing where it is not called.

    Returns:
        `value`, `grad`, `value_fn` (line searches), `obj_fn` (Sophia) and `grad_fn` (SAM in one step).
    """

    # Line searches of optax raise where an argument is none of theirs and none of the function's.
    def value_fn(params: Params, obj_fn: Any = None, grad_fn: Any = None) -> jax.Array:
        del obj_fn, grad_fn
        return mean_loss(params)

    def grad_fn(params: Params, index: int) -> Params:
        del index
        return jax.grad(mean_loss)(params)

    return {"value": value, "grad": grad, "value_fn": value_fn, "obj_fn": mean_loss, "grad_fn": grad_fn}


def update_optimizer(
    optimizer: optax.GradientTransformation,
    gradients: Params,
    optimizer_state: optax.OptState,
    params: Params,
    extra: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Updates and next state of an optimizer, which is given of `extra` what it accepts.

    Raises:
        ConfigError: its `update` wants an argument that a step does not have, fails, or returns something else.
    """
    update, given = optax.with_extra_args_support(optimizer).update, dict(extra)
    while True:
        try:
            found = update(gradients, optimizer_state, params, **given)
            _check_moved(found, gradients, optimizer_state)
            return found
        except _MISTAKES as error:
            # Some of optax, also deep inside a chain, take one of these names and no other.
            unwanted = _UNWANTED.search(str(error))
            if unwanted is not None and unwanted[1] in given:
                del given[unwanted[1]]
                continue
            if _MISSING.search(str(error)) is None:
                raise ConfigError(f"the optimizer cannot be updated: {_first_line(error)}") from error
            raise ConfigError(
                f"the optimizer cannot be updated: {error}; a train step gives {', '.join(extra)}: bind what else it "
                "needs when it is made"
            ) from None


def _check_moved(found: Any, gradients: Params, optimizer_state: optax.OptState) -> None:
    """Raise where an update is no pair of trees like the gradients and like the state: a step keeps their shapes."""
    must = "the optimizer's update must return (updates, state)"
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise ConfigError(f"{must}, but it returned {shown(found)}")
    for name, new, old in (("updates", found[0], gradients), ("state", found[1], optimizer_state)):
        like = "the gradients" if name == "updates" else "the state that it was given"
        if jax.tree.structure(new) != jax.tree.structure(old):
            raise ConfigError(f"{must}, but its {name} has not the structure of {like}; use jax.tree.map over that")
        for (path, leaf), wanted in zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True):
            if jnp.shape(leaf) != wanted.shape:
                where = f" at {path_name(path)}" if path else ""
                raise ConfigError(
                    f"{must}, but its {name} is {list(jnp.shape(leaf))}{where}, and {like} {list(wanted.shape)}"
                )


def start_optimizer(optimizer: optax.GradientTransformation, params: Params) -> optax.OptState:
    """The state of an optimizer at step 0.

    Raises:
        ConfigError: its `init` fails on these parameters.
    """
    try:
        return optimizer.init(params)
    except _MISTAKES as error:
        paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        some = ", ".join(paths[:6]) + (", ..." if len(paths) > 6 else "")
        raise ConfigError(
            f"the optimizer cannot start from the trained parameters ({some}): {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def check_optimizer_state(optimizer_state: Any) -> None:
    """Raise where an optimizer expects other parameters or gradients than a step has.

    Args:
        optimizer_state: arrays or shapes.

    Raises:
        ConfigError: optax's lookahead, or one that wants the gradient of every row.
    """
    foreign = (optax.LookaheadState, optax.contrib.DifferentiallyPrivateAggregateState)
    for node in jax.tree.leaves(optimizer_state, is_leaf=lambda node: isinstance(node, foreign)):
        if isinstance(node, optax.LookaheadState):
            raise ConfigError(
                "optax.lookahead wants parameters in pairs (fast and slow), which a model does not have; write "
                "jaxtrain.lookahead(optax.adamw(1e-3), sync_period=6, slow_step_size=0.5)"
            )
        if isinstance(node, optax.contrib.DifferentiallyPrivateAggregateState):
            raise ConfigError(
                "optax.contrib.dpsgd and differentially_private_aggregate want the gradient of every row, but a step "
                "has the mean over the batch; write optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2)) where "
                "no privacy is claimed"
            )
