"""Metrics by their names in the field, as pairs of a sum and a weight. Shapes: B batch, C classes."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.errors import ConfigError
from jaxtrain.models.task import Sums
from jaxtrain.ops.loss.cross_entropy import weight_of_right

# Of one number per target.
ERRORS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "mse": lambda outputs, targets: jnp.square(outputs - targets),
    "mae": lambda outputs, targets: jnp.abs(outputs - targets),
    "huber": optax.losses.huber_loss,
}
# Beginning of the name of a metric [C] of which the mean over classes is reported.
MACRO = "macro_"
Pair = tuple[jax.Array, jax.Array]


def _counts(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights of the targets [C] that were named rightly, that were named, and that there are, of each class."""
    classes = logits.shape[-1]
    said, meant = (jax.nn.one_hot(ids, classes) for ids in (jnp.argmax(logits, axis=-1), targets))
    sums = (jnp.einsum("...c,...->c", one, weights) for one in (said * meant, said, meant))
    # Of two classes, people mean the second one.
    right, named, there = (one[1] if classes == 2 else one for one in sums)
    return right, named, there


def _precision(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> Pair:
    right, named, _ = _counts(logits, targets, weights)
    return right, named


def _recall(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> Pair:
    right, _, there = _counts(logits, targets, weights)
    return right, there


def _f1(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> Pair:
    right, named, there = _counts(logits, targets, weights)
    return 2 * right, named + there


def _top(k: int) -> Callable[[jax.Array, jax.Array, jax.Array], Pair]:
    def top(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> Pair:
        _, best = jax.lax.top_k(logits, k)
        right = jnp.any(best == targets[..., None], axis=-1)
        return jnp.sum(jnp.where(right, weights, 0.0)), jnp.sum(weights)

    return top


_OF_CLASSES: dict[str, Callable[[jax.Array, jax.Array, jax.Array], Pair]] = {
    "accuracy": lambda logits, targets, weights: (weight_of_right(logits, targets, weights), jnp.sum(weights)),
    "precision": _precision,
    "recall": _recall,
    "f1": _f1,
}


def class_metrics(names: Iterable[str], logits: Any, targets: jax.Array, weights: jax.Array) -> Sums:
    """Compute metrics of classes.

    Args:
        names: accuracy, top_K (top_5), precision, recall or f1; the last three are of class 1 where there are two
            classes, else of each, under names whose mean over classes is reported (`macro_f1`).
        logits: [B, ..., C].
        targets: int32 [B, ...].
        weights: float32 [B, ...].
    """
    found: Sums = {}
    for name in names:
        if name not in _OF_CLASSES and int(name[4:]) >= logits.shape[-1]:
            raise ConfigError(f"{name}: the model has {logits.shape[-1]} classes; use a smaller number")
        total, weight = (_OF_CLASSES.get(name) or _top(int(name[4:])))(logits, targets, weights)
        found[name if total.ndim == 0 else f"{MACRO}{name}"] = (total, weight)
    return found


def check_metrics(names: Any, *, of: str) -> tuple[str, ...]:
    """Return names of metrics as a tuple.

    Args:
        names: what was given, one name or several.
        of: the task that takes them: "classification" or "regression".

    Raises:
        ConfigError: a name that is unknown to the task.
    """
    names = (names,) if isinstance(names, str) else tuple(names)
    known = tuple(ERRORS) if of == "regression" else tuple(_OF_CLASSES)
    for name in names:
        if name not in known and not (of != "regression" and str(name)[:4] == "top_" and str(name)[4:].isdigit()):
            more = "" if of == "regression" else ", top_5"
            raise ConfigError(f"{of}: there is no metric {name!r}; use {', '.join(known)}{more}")
    return names
