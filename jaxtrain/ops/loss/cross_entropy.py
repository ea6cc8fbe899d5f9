"""Cross-entropy of tokens: the plain reference over logits, and the same without all logits ever in memory.

Shapes: B batch, L sequence, D embed, V vocabulary.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.arguments import refusal
from jaxtrain.config.schema import LossConfig
from jaxtrain.errors import ConfigError
from jaxtrain.layout.manual import divides
from jaxtrain.layout.sharding import constrain, current_layout
from jaxtrain.ops.attention.reference import capped
from jaxtrain.ops.loss.blocks import Logits, LossBlocks, choose_blocks
from jaxtrain.ops.loss.blockwise import BlockedLoss, OutputLayer
from jaxtrain.ops.loss.output_product import output_product
from jaxtrain.ops.loss.sharded import TOKENS, blockwise_losses, blockwise_sums, is_sharded, mesh_axes
from jaxtrain.ops.ranks import aligned


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeferredLogits:
    """Logits that are not computed yet: a loss that knows their factors need not hold them.

    Attributes:
        hidden: [B, L, D] in the compute dtype.
        kernel: [D, V] in the same dtype, or with `tied` a table [V, D]; replicated over `fsdp`.
        tied: which of the two.
        bias: [V] in the same dtype, added to hidden @ kernel; None: no bias.
        softcap: logits become softcap * tanh(logits / softcap), above 0 (Gemma 2); None: as they are.

    Raises:
        ConfigError: something else, or sizes that cannot be multiplied.

    Example:
        >>> logits = jt.DeferredLogits(jnp.ones((2, 3, 4)), jnp.ones((4, 16)))
        >>> logits.vocabulary, logits.logits().shape
        (16, (2, 3, 16))
    """

    hidden: jax.Array
    kernel: jax.Array
    tied: bool = field(default=False, metadata={"static": True})
    bias: jax.Array | None = None
    softcap: float | None = field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        write = "DeferredLogits(hidden, kernel, tied=False) with hidden [B, L, D] and kernel [D, V] (tied=True: [V, D])"
        with_bias = "DeferredLogits(hidden, kernel, bias=bias) with kernel [D, V] and bias [V], or bias=None"
        for name, value in (("hidden", self.hidden), ("kernel", self.kernel)):
            # JAX rebuilds the record with whatever a transformation puts in place of arrays.
            if value is None or isinstance(value, str | int | float | list | dict):
                raise ConfigError(refusal(f"DeferredLogits: {name}", "a float array", value, write))
        hidden, kernel = (tuple(getattr(value, "shape", ())) for value in (self.hidden, self.kernel))
        if len(hidden) > 1 and len(kernel) == 2 and hidden[-1] != kernel[1 if self.tied else 0]:
            takes = f"a float array {'[V, D]' if self.tied else '[D, V]'} with D = {hidden[-1]}"
            raise ConfigError(refusal("DeferredLogits: kernel", takes, self.kernel, write))
        bias = tuple(getattr(self.bias, "shape", ()))
        if isinstance(self.bias, str | int | float | list | dict):
            raise ConfigError(refusal("DeferredLogits: bias", "a float array [V], or None", self.bias, with_bias))
        if len(bias) == 1 and len(kernel) == 2 and bias[0] != kernel[0 if self.tied else 1]:
            takes = f"a float array [V] with V = {kernel[0 if self.tied else 1]}"
            raise ConfigError(refusal("DeferredLogits: bias", takes, self.bias, with_bias))
        cap = self.softcap
        if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < math.inf):
            capped = "DeferredLogits(hidden, kernel, softcap=30.0)"
            raise ConfigError(refusal("DeferredLogits: softcap", "a finite number above 0, or None", cap, capped))

    def logits(self) -> jax.Array:
        """Compute them: [B, L, V] in the compute dtype, sharded over `activation_vocab`."""
        product = output_product(self.hidden, self.kernel, self.bias, tied=self.tied)
        logits = constrain(product, "batch", "sequence", "activation_vocab")
        return logits if self.softcap is None else capped(logits.astype(jnp.float32), self.softcap).astype(logits.dtype)

    @property
    def vocabulary(self) -> int:
        """Ids of the vocabulary: V."""
        return self.kernel.shape[0 if self.tied else 1]


@dataclass(frozen=True)
class LossSums:
    """Sums over weighted tokens, float32 []; gradients flow through `total` only.

    Attributes:
        total: cross-entropy plus z-loss.
        cross_entropy: negative log-likelihood.
        z_loss: weighted.
    """

    total: jax.Array
    cross_entropy: jax.Array
    z_loss: jax.Array


def compute_logits(outputs: Any) -> Any:
    """Compute every `DeferredLogits` in a model's outputs, and leave the rest."""
    deferred = lambda leaf: isinstance(leaf, DeferredLogits)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.logits() if deferred(leaf) else leaf, outputs, is_leaf=deferred)


def cross_entropy(
    logits: jax.Array | DeferredLogits, targets: jax.Array, *, by: Logits | None = None, size: int | None = None
) -> jax.Array:
    """Compute the negative log-likelihood in float32.

    If the logits are deferred, only one block of them is in memory at a time (all, if they are small).

    Args:
        logits: [..., V], raised to float32; or deferred, of targets [B, L].
        targets: integers [...].
        by, size: how deferred logits are partitioned into blocks, see `ops/loss/blocks.py`; None: from their sizes.
            Blocks by tokens are computed by vocabulary, in the same memory.

    Returns:
        float32 [...]; NaN for an id from V on, which no logit has. What is given for a negative id means nothing:
        `target_weights` weighs it with 0.

    Raises:
        ConfigError: logits that are no floats, targets that are no integers of their shape, a block that means nothing,
            or blocks were asked for, and batch, sequence or vocabulary do not divide by the mesh.

    Example:
        >>> jt.cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3])).tolist()  # log 4, twice
        [1.386..., 1.386...]
    """
    unknown = _check_call("cross_entropy", logits, targets, by=by, size=size)
    if isinstance(logits, DeferredLogits):
        blocks = blocks_of(logits, by=by, size=size)
        if blocks.by != "whole":
            form = BlockedLoss(blocks.by, blocks.size, 0.0, logits.tied, logits.softcap)
            losses = blockwise_losses(logits.hidden, _output_layer(logits), targets, form)
            return jnp.where(unknown, jnp.nan, losses)
        logits = logits.logits()
    return jnp.where(unknown, jnp.nan, _losses(logits, targets)[0])


def cross_entropy_sums(
    logits: jax.Array | DeferredLogits,
    targets_BL: jax.Array,
    weights_BL: jax.Array,
    *,
    z_loss: float | None = None,
    by: Logits | None = None,
    size: int | None = None,
) -> LossSums:
    """Sum the weighted cross-entropy, and add `z_loss` times the weighted sum of logsumexp^2.

    The second term keeps logits from drifting (Chowdhery et al. 2022, section 5). If the logits are deferred, only one
    block of them is in memory at a time (all, if they are small). On a mesh each device computes its own tokens and
    ids; devices that share a vocabulary exchange two numbers per token.

    Args:
        logits: [B, L, V], or deferred; raised to float32.
        targets_BL: int32.
        weights_BL: float32; no gradient flows to them.
        z_loss: weight of the z-loss, 0 or more; None: without it.
        by, size: how deferred logits are partitioned into blocks, see `ops/loss/blocks.py`; None: from their sizes.

    Returns:
        The sums over the whole batch, the same on every device; NaN where an id from V on has a weight.

    Raises:
        ConfigError: an array of another kind or shape, or blocks were asked for, and batch, sequence or vocabulary do
            not divide by the mesh.

    Example:
        >>> sums = jt.cross_entropy_sums(jnp.zeros((1, 2, 4)), jnp.array([[0, 3]]), jnp.ones((1, 2)), z_loss=1e-4)
        >>> float(sums.total) > float(sums.cross_entropy)
        True
    """
    unknown_BL = _check_call("cross_entropy_sums", logits, targets_BL, by=by, size=size)
    if not isinstance(weights_BL, jax.Array | np.ndarray) or weights_BL.shape != targets_BL.shape:
        takes = f"weights of the shape of the targets, {list(targets_BL.shape)}"
        raise ConfigError(refusal("cross_entropy_sums: weights", takes, weights_BL, "target_weights(batch)"))
    z_loss = z_loss or 0.0
    weights_BL = jax.lax.stop_gradient(jnp.where(unknown_BL & (weights_BL != 0), jnp.nan, weights_BL))
    if isinstance(logits, DeferredLogits):
        blocks = blocks_of(logits, by=by, size=size)
        if blocks.by != "whole":
            arrays = (logits.hidden, _output_layer(logits), targets_BL, weights_BL)
            form = BlockedLoss(blocks.by, blocks.size, z_loss, logits.tied, logits.softcap)
            total, *parts = blockwise_sums(*arrays, form)
            return LossSums(total, *jax.lax.stop_gradient(parts))
        logits = logits.logits()
    losses, logsumexp = _losses(logits, targets_BL)
    total = jnp.sum(losses * weights_BL)
    if not z_loss:
        return LossSums(total, jax.lax.stop_gradient(total), jnp.float32(0))
    z = z_loss * jnp.sum(jnp.square(logsumexp) * weights_BL)
    return LossSums(total + z, *jax.lax.stop_gradient((total, z)))


def _output_layer(logits: DeferredLogits) -> OutputLayer:
    """Kernel and bias in the compute dtype."""
    bias = None if logits.bias is None else logits.bias.astype(logits.hidden.dtype)
    return OutputLayer(logits.kernel, bias)


def blocks_of(logits: DeferredLogits, *, by: Logits | None = None, size: int | None = None) -> LossBlocks:
    """Choose the blocks of these logits on each device of the step that is being traced.

    Args:
        logits: global arrays.
        by, size: see `choose_blocks`.

    Raises:
        ConfigError: blocks were asked for, and the sizes do not divide by the mesh.
    """
    layout = current_layout()
    tokens, width = math.prod(logits.hidden.shape[:-1]), logits.hidden.shape[-1]
    vocabulary = logits.vocabulary
    if is_sharded(layout):
        assert layout is not None
        shape = jax.ShapeDtypeStruct((*logits.hidden.shape[:-1], vocabulary), logits.hidden.dtype)
        if not divides(layout, shape, *TOKENS, "activation_vocab"):
            if by not in (None, "whole"):
                raise ConfigError(
                    f"loss.logits={by}, but batch, sequence and vocabulary {shape.shape} do not divide by the mesh; "
                    "use loss.logits=whole"
                )
            by = "whole"
        sharded = [mesh_axes(layout, name) for name in (*TOKENS, "activation_vocab")]
        degrees = [math.prod(layout.degree(axis) for axis in axes) for axes in sharded]
        tokens, vocabulary = tokens // (degrees[0] * degrees[1]), vocabulary // degrees[2]
    itemsize = logits.hidden.dtype.itemsize
    blocks = choose_blocks(tokens, width, vocabulary, itemsize=itemsize, by=by, size=size)
    if blocks.by == "tokens" and logits.hidden.dtype == jnp.float16:
        # Gradients made in the forward pass are rounded before the loss scale reaches them.
        if by == "tokens":
            raise ConfigError(
                "loss.logits=tokens rounds gradients before the loss scale of precision.policy=fp16 reaches them; "
                "use loss.logits=vocabulary or auto"
            )
        blocks = choose_blocks(tokens, width, vocabulary, itemsize=itemsize, by="vocabulary")
    return blocks


def _check_call(name: str, logits: Any, targets: Any, *, by: Logits | None, size: int | None) -> jax.Array:
    """Raise where logits and targets are of another kind or shape, or swapped, or blocks mean nothing.

    Returns:
        Which targets are ids that no logit has: bool, of the shape of the targets.
    """
    LossConfig(logits="auto" if by is None else by, block=size)
    write = f"{name}(logits, targets), with logits [..., V] and integer targets [...]"
    if isinstance(logits, DeferredLogits):
        shape = logits.hidden.shape[:-1]
    elif isinstance(logits, jax.Array | np.ndarray) and logits.ndim and jnp.issubdtype(logits.dtype, jnp.floating):
        shape = logits.shape[:-1]
    else:
        raise ConfigError(refusal(f"{name}: logits", "a float array [..., V]", logits, write))
    is_array = isinstance(targets, jax.Array | np.ndarray)
    if not is_array or not jnp.issubdtype(targets.dtype, jnp.integer) or targets.shape != shape:
        raise ConfigError(refusal(f"{name}: targets", f"integers {list(shape)}", targets, write))
    count = logits.vocabulary if isinstance(logits, DeferredLogits) else logits.shape[-1]
    # The number of ids may not fit into the 8 or 16 bits that targets are stored in.
    return jnp.asarray(targets).astype(jnp.int32) >= count


def _losses(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute negative log-likelihood and logsumexp, float32 [...] each."""
    logits = logits.astype(jnp.float32)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - top
    # A masked sum instead of a gather: the compiler keeps it sharded when the vocabulary is.
    chosen = aligned(jnp.arange(logits.shape[-1]), logits) == targets[..., None]
    target_logits = jnp.sum(jnp.where(chosen, shifted, 0.0), axis=-1)
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    return log_sum - target_logits, log_sum + top[..., 0]
