"""Cross-entropy of tokens: the plain reference over logits, and the same without all logits ever in memory.

Shapes: B batch, L sequence, N tokens or blocks, D embed, V vocabulary, C ids or positions of a block. A kernel is
[D, V], or tied [V, D].
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxtrain.config.schema import IGNORED, Logits
from jaxtrain.errors import ConfigError
from jaxtrain.layout.manual import divides
from jaxtrain.layout.sharding import constrain, current_layout
from jaxtrain.ops.attention.reference import capped
from jaxtrain.ops.elementwise import aligned
from jaxtrain.ops.linear import linear
from jaxtrain.ops.loss.blocks import LossBlocks, choose_blocks
from jaxtrain.ops.loss.blockwise import (
    TOKENS,
    BlockedLoss,
    OutputLayer,
    blockwise_losses,
    blockwise_sums,
    is_sharded,
    mesh_axes,
)

# Bytes of the logits of a block whose largest are sought, over all devices.
_BLOCK_BYTES = 2**28


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

    Example:
        >>> logits = jt.DeferredLogits(jnp.ones((2, 3, 4)), jnp.ones((4, 16)))
        >>> logits.vocabulary, logits.logits().shape
        (16, (2, 3, 16))
    """

    hidden: Array
    kernel: Array
    tied: bool = field(default=False, metadata={"static": True})
    bias: Array | None = None
    softcap: float | None = field(default=None, metadata={"static": True})

    def logits(self) -> Array:
        """Compute them: [B, L, V] in the compute dtype, sharded over `activation_vocab`."""
        product = linear(self.hidden, self.kernel.T if self.tied else self.kernel, self.bias)
        logits = constrain(product, "batch", "sequence", "activation_vocab")
        return logits if self.softcap is None else capped(logits.astype(jnp.float32), self.softcap).astype(logits.dtype)

    def output_layer(self) -> OutputLayer:
        """Kernel and bias in the compute dtype."""
        return OutputLayer(self.kernel, None if self.bias is None else self.bias.astype(self.hidden.dtype))

    @property
    def vocabulary(self) -> int:
        """Ids of the vocabulary: V."""
        return self.kernel.shape[0 if self.tied else 1]


@dataclass(frozen=True)
class LossSums:
    """Sums over weighted tokens, float32 []; gradients flow through `total`, cross-entropy plus z-loss, only."""

    total: Array
    cross_entropy: Array
    z_loss: Array


def compute_logits(outputs: Any) -> Any:
    """Compute every `DeferredLogits` in a model's outputs, and leave the rest."""
    deferred = lambda leaf: isinstance(leaf, DeferredLogits)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.logits() if deferred(leaf) else leaf, outputs, is_leaf=deferred)


def cross_entropy(
    logits: Array | DeferredLogits, targets: Array, *, by: Logits | None = None, size: int | None = None
) -> Array:
    """Compute the negative log-likelihood in float32.

    If the logits are deferred, only one block of them is in memory at a time (all, if they are small).

    Args:
        logits: [..., V], raised to float32; or deferred, of targets [B, L].
        targets: integers [...].
        by, size: how deferred logits are partitioned into blocks, see `ops/loss/blocks.py`; None: from their sizes.
            Blocks by tokens are computed by vocabulary, in the same memory.

    Returns:
        float32 [...]; 0 for a target of -100, NaN for another id that no logit has.

    Raises:
        ConfigError: targets of another shape than the logits, or blocks were asked for, and batch, sequence or
            vocabulary do not divide by the mesh.

    Example:
        >>> jt.cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3])).tolist()  # log 4, twice
        [1.386..., 1.386...]
    """
    weights = id_weights(targets, jnp.float32(1), num_ids=_num_ids(logits, targets))
    if isinstance(logits, DeferredLogits):
        blocks = blocks_of(logits, by=by, size=size)
        if blocks.by != "whole":
            form = BlockedLoss(blocks.by, blocks.size, 0.0, logits.tied, logits.softcap)
            losses = blockwise_losses(logits.hidden, logits.output_layer(), targets, form)
            return jnp.where(weights == 1, losses, weights)
        logits = logits.logits()
    return jnp.where(weights == 1, _losses(logits, targets)[0], weights)


def cross_entropy_sums(
    logits: Array | DeferredLogits,
    targets_BL: Array,
    weights_BL: Array,
    *,
    z_loss: float | None = None,
    by: Logits | None = None,
    size: int | None = None,
) -> LossSums:
    """Sum the weighted cross-entropy, and add `z_loss` times the weighted sum of logsumexp^2.

    The second term keeps logits from drifting (Chowdhery et al. 2022, section 5). Deferred logits are computed as by
    `cross_entropy`; on a mesh, devices that share a vocabulary exchange two numbers per token.

    Args:
        logits: [B, L, V], or deferred; raised to float32.
        targets_BL: int32.
        weights_BL: float32; no gradient flows to them, and those of targets of -100 are taken for 0.
        z_loss: weight of the z-loss, 0 or more; None: without it.
        by, size: as of `cross_entropy`.

    Returns:
        The sums over the whole batch, the same on every device; NaN where another id that no logit has weighs anything.

    Raises:
        ConfigError: as of `cross_entropy`.

    Example:
        >>> sums = jt.cross_entropy_sums(jnp.zeros((1, 2, 4)), jnp.array([[0, 3]]), jnp.ones((1, 2)), z_loss=1e-4)
        >>> float(sums.total) > float(sums.cross_entropy)
        True
    """
    z_loss = z_loss or 0.0
    num_ids = _num_ids(logits, targets_BL)
    weights_BL = jax.lax.stop_gradient(id_weights(targets_BL, weights_BL, num_ids=num_ids))
    if isinstance(logits, DeferredLogits):
        blocks = blocks_of(logits, by=by, size=size)
        if blocks.by != "whole":
            arrays = (logits.hidden, logits.output_layer(), targets_BL, weights_BL)
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


def blocks_of(logits: DeferredLogits, *, by: Logits | None = None, size: int | None = None) -> LossBlocks:
    """Choose the blocks of these logits on each device; a ConfigError if blocks were asked for and cannot be made."""
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


def id_weights(targets: Array, weights: Array, *, num_ids: int) -> Array:
    """Weights of integer targets [...]: 0 where a target is -100, NaN where another one with a weight is no id."""
    # The number of ids may not fit into the 8 or 16 bits that targets are stored in.
    ids = jnp.asarray(targets).astype(jnp.int32)
    weights = jnp.where(ids == IGNORED, 0.0, weights)
    return jnp.where(((ids < 0) | (ids >= num_ids)) & (weights != 0), jnp.nan, weights)


def _num_ids(logits: Array | DeferredLogits, targets: Array) -> int:
    """Number of ids that logits have; a ConfigError where the targets are not of their shape."""
    deferred = isinstance(logits, DeferredLogits)
    shape = (logits.hidden if deferred else logits).shape[:-1]
    if targets.shape != shape:  # jax would broadcast some others
        raise ConfigError(f"cross-entropy takes integer targets {list(shape)}, not {list(targets.shape)}")
    return logits.vocabulary if deferred else logits.shape[-1]


def _losses(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Compute negative log-likelihood and logsumexp, float32 [...] each."""
    logits = logits.astype(jnp.float32)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - top
    # A masked sum instead of a gather: the compiler keeps it sharded when the vocabulary is.
    chosen = aligned(jnp.arange(logits.shape[-1]), logits) == targets[..., None]
    target_logits = jnp.sum(jnp.where(chosen, shifted, 0.0), axis=-1)
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    return log_sum - target_logits, log_sum + top[..., 0]


def weight_of_right(logits: Array | DeferredLogits, targets: Array, weights: Array) -> Array:
    """Sum the weights of the tokens whose largest logit is that of the target: float32 []; not differentiated.

    Deferred logits are computed for some positions at a time. Targets are int32, weights float32 [B, L].
    """
    if not isinstance(logits, DeferredLogits):
        return _sum_right(logits, targets, weights)
    logits = jax.lax.stop_gradient(logits)
    size = _block_size(logits)
    if size == targets.shape[1]:
        return _sum_right(logits.logits(), targets, weights)

    def blocks(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    def add(total: Array, block: tuple[Array, Array, Array]) -> tuple[Array, None]:
        hidden_BCD, targets_BC, weights_BC = block
        found = dataclasses.replace(logits, hidden=hidden_BCD).logits()
        return total + _sum_right(found, targets_BC, weights_BC), None

    return jax.lax.scan(add, jnp.float32(0), (blocks(logits.hidden), blocks(targets), blocks(weights)))[0]


def _sum_right(logits: Array, targets: Array, weights: Array) -> Array:
    return jnp.sum(jnp.where(jnp.argmax(logits, axis=-1) == targets, weights, 0.0))


def _block_size(logits: DeferredLogits) -> int:
    """The most positions of a block that divide the sequence and are sharded as it is."""
    (batch, length, _), layout = logits.hidden.shape, current_layout()
    shards = 1 if layout is None else math.prod(map(layout.degree, mesh_axes(layout, "sequence")))
    wanted = max(1, _BLOCK_BYTES // (4 * batch * logits.vocabulary))
    sizes = [size for size in range(1, length + 1) if length % size == 0 and size % shards == 0]
    return max((size for size in sizes if size <= wanted), default=min(sizes, default=length))
