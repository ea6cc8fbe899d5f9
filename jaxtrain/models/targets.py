"""What a batch says of its targets: the ids that a loss compares with, and what each of them weighs.

Shapes: B batch, V classes or vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.arguments import refusal, shown
from jaxtrain.errors import ConfigError
from jaxtrain.models.task import Batch
from jaxtrain.ops.loss.cross_entropy import DeferredLogits

RENAME = "write fit(columns={'inputs': 'image', 'targets': 'label'}), or rename the entries"


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
    weights, targets = broadcast_weights(batch), batch["targets"]
    return jnp.where(targets < 0, 0.0, weights) if jnp.issubdtype(targets.dtype, jnp.integer) else weights


def broadcast_weights(batch: Batch) -> jax.Array:
    """Broadcast the batch's `weights`, or 1, to the shape of the targets: float32.

    Raises:
        ConfigError: no targets, or weights of another shape.
    """
    if batch.get("targets") is None:
        held = ", ".join(name for name, leaf in batch.items() if leaf is not None)
        raise ConfigError(f"the task needs an entry 'targets', but the batch holds {held or 'nothing'}; {RENAME}")
    shape, weights = batch["targets"].shape, batch.get("weights")
    if weights is None:
        return jnp.ones(shape, jnp.float32)
    if weights.shape != shape[: weights.ndim]:
        raise ConfigError(
            f"weights {list(weights.shape)} do not fit targets {list(shape)}; give one weight per target, or per row"
        )
    weights = jnp.asarray(weights, jnp.float32)
    return jnp.broadcast_to(weights.reshape(*weights.shape, *[1] * (len(shape) - weights.ndim)), shape)


def checked_ids(task: str, logits: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Check and prepare the targets and weights of a loss over classes.

    Args:
        task: its name, for error messages.
        logits: [..., V], computed or deferred.
        batch: `targets` [...] and optional `weights`.

    Returns:
        int32 ids that logits have, and float32 weights, NaN where a target is an id that no logit has; both [...].

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
    return jnp.clip(targets, 0, shape[-1] - 1), weights


def num_classes(outputs: Any) -> int:
    """Read the number of classes off logits, alone or under the key "logits".

    Raises:
        ConfigError: outputs without logits.
    """
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
    if isinstance(logits, DeferredLogits):
        return logits.vocabulary
    shape = getattr(logits, "shape", ())
    if not shape:
        raise ConfigError(f"the task needs logits [B, ..., classes] from the model, which gives {shown(outputs)}")
    return shape[-1]
