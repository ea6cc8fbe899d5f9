"""Cross-entropy of tokens: the plain reference over logits, and the same without whole logits ever in memory.

Shapes: B batch, L sequence, D embed, V vocabulary.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.layout.manual import divides, on_shards, spec_of
from jaxtrain.layout.rules import entry_axes
from jaxtrain.layout.sharding import Layout, constrain, current_layout
from jaxtrain.ops.linear import linear
from jaxtrain.ops.loss import blockwise
from jaxtrain.ops.loss.blocks import Logits, LossBlocks, choose_blocks
from jaxtrain.ops.loss.blockwise import Cut, Normalizer

_TOKENS = ("batch", "sequence")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeferredLogits:
    """Logits that are not computed yet: a loss that knows their factors need not hold them.

    Attributes:
        hidden: [B, L, D] in the compute dtype.
        kernel: [D, V] in the same dtype, or with `tied` a table [V, D]; whole over `fsdp`.
        tied: which of the two.
    """

    hidden: jax.Array
    kernel: jax.Array
    tied: bool = field(default=False, metadata={"static": True})

    def logits(self) -> jax.Array:
        """[B, L, V] in the compute dtype."""
        kernel = self.kernel.T if self.tied else self.kernel
        return constrain(linear(self.hidden, kernel), "batch", "sequence", "activation_vocab")

    @property
    def vocabulary(self) -> int:
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
    """A model's outputs with every `DeferredLogits` in them computed."""
    deferred = lambda leaf: isinstance(leaf, DeferredLogits)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.logits() if deferred(leaf) else leaf, outputs, is_leaf=deferred)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihood in float32: logits [..., V], int targets [...] -> [...]."""
    return _losses(logits, targets)[0]


def cross_entropy_sums(
    logits: jax.Array | DeferredLogits,
    targets_BL: jax.Array,
    weights_BL: jax.Array,
    *,
    z_loss: float | None = None,
    by: Logits | None = None,
    size: int | None = None,
) -> LossSums:
    """Weighted sums of the cross-entropy and of the z-loss, the weight of which is `z_loss`.

    The z-loss is z x logsumexp^2, which keeps logits from drifting (Chowdhery et al. 2022, section 5). Of deferred
    logits no more than a block is ever in memory, unless they are small; on a mesh each device works on its own tokens
    and ids, and the vocabulary's shards exchange two numbers a token.

    Args:
        logits: [B, L, V], or deferred; raised to float32.
        targets_BL: int32.
        weights_BL: float32; no gradient flows to them.
        z_loss: None: none.
        by, size: how deferred logits are cut, see `loss_blocks.py`; None: from their sizes.

    Raises:
        ConfigError: a cut was asked for, and batch, sequence or vocabulary do not divide by the mesh.
    """
    z_loss = z_loss or 0.0
    weights_BL = jax.lax.stop_gradient(weights_BL)
    if isinstance(logits, DeferredLogits):
        blocks = blocks_of(logits, by=by, size=size)
        if blocks.by != "whole":
            return _blockwise(logits, targets_BL, weights_BL, z_loss, blocks)
        logits = logits.logits()
    losses, logsumexp = _losses(logits, targets_BL)
    total = jnp.sum(losses * weights_BL)
    if not z_loss:
        return LossSums(total, jax.lax.stop_gradient(total), jnp.float32(0))
    z = z_loss * jnp.sum(jnp.square(logsumexp) * weights_BL)
    return LossSums(total + z, *jax.lax.stop_gradient((total, z)))


def blocks_of(logits: DeferredLogits, *, by: Logits | None = None, size: int | None = None) -> LossBlocks:
    """How these logits are cut on each device of the step that is being traced.

    Raises:
        ConfigError: a cut was asked for, and the sizes do not divide by the mesh.
    """
    layout = current_layout()
    tokens, width = math.prod(logits.hidden.shape[:-1]), logits.hidden.shape[-1]
    vocabulary = logits.vocabulary
    if _is_spread(layout):
        assert layout is not None
        shape = jax.ShapeDtypeStruct((*logits.hidden.shape[:-1], vocabulary), logits.hidden.dtype)
        if not divides(layout, shape, *_TOKENS, "activation_vocab"):
            if by not in (None, "whole"):
                raise ConfigError(
                    f"loss.logits={by}, but batch, sequence and vocabulary {shape.shape} do not divide by the mesh; "
                    "use loss.logits=whole"
                )
            by = "whole"
        spread = [_axes(layout, name) for name in (*_TOKENS, "activation_vocab")]
        degrees = [math.prod(layout.degree(axis) for axis in axes) for axes in spread]
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


def _losses(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood and logsumexp."""
    logits = logits.astype(jnp.float32)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - top
    # A masked sum instead of a gather: the compiler keeps it sharded when the vocabulary is.
    chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
    target_logits = jnp.sum(jnp.where(chosen, shifted, 0.0), axis=-1)
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    return log_sum - target_logits, log_sum + top[..., 0]


def _is_spread(layout: Layout | None) -> bool:
    return layout is not None and any(degree > 1 for degree in layout.degrees.values())


def _axes(layout: Layout, name: str) -> tuple[str, ...]:
    """The mesh axes of size above 1 that a logical axis is spread over."""
    return entry_axes(spec_of(layout, name)[0])


def _blockwise(
    logits: DeferredLogits, targets_BL: jax.Array, weights_BL: jax.Array, z_loss: float, blocks: LossBlocks
) -> LossSums:
    """The sums with their own gradient; forward and backward run on the shards, and are not differentiated through."""
    layout = current_layout() if _is_spread(current_layout()) else None
    cut = Cut(blocks.size, z_loss, logits.tied)
    hidden_spec = kernel_spec = tokens_spec = scalar = PartitionSpec()
    if layout is not None:
        vocabulary_axes = _axes(layout, "activation_vocab")
        cut = Cut(blocks.size, z_loss, logits.tied, vocabulary_axes, _axes(layout, "batch") + _axes(layout, "sequence"))
        hidden_spec, tokens_spec = spec_of(layout, *_TOKENS, None), spec_of(layout, *_TOKENS)
        kernel_spec = spec_of(layout, *(("activation_vocab", None) if logits.tied else (None, "activation_vocab")))
    inputs = (hidden_spec, kernel_spec, tokens_spec, tokens_spec)
    sums_spec = (scalar, scalar, scalar)

    def run(function: Any, in_specs: Any, out_specs: Any) -> Any:
        return function if layout is None else on_shards(function, layout, in_specs, out_specs)

    def flat(x_BLD: jax.Array) -> jax.Array:
        return x_BLD.reshape(-1, x_BLD.shape[-1])

    def sums(normalizer: Normalizer, losses_N: jax.Array, weights_N: jax.Array) -> tuple[jax.Array, ...]:
        nats = jnp.sum(losses_N * weights_N)
        z = z_loss * jnp.sum(jnp.square(normalizer.logsumexp) * weights_N) if z_loss else jnp.zeros_like(nats)
        found = (nats + z, nats, z)
        return jax.lax.psum(found, cut.token_axes) if cut.token_axes else found

    def forward(hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
        alone = blockwise.forward_cut(cut, targets.size, kernel.shape[0 if cut.tied else 1])
        ids_cut = cut if blocks.by == "vocabulary" else alone
        normalizer, losses_N = blockwise.forward(flat(hidden), kernel, targets.reshape(-1), ids_cut)
        found = sums(normalizer, losses_N, weights.reshape(-1))
        return found, normalizer.top.reshape(targets.shape), normalizer.log_sum.reshape(targets.shape)

    def backward(hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array, *saved: Any) -> Any:
        top, log_sum, push = saved
        normalizer = Normalizer(top.reshape(-1), log_sum.reshape(-1))
        d_hidden, d_kernel = blockwise.gradients_by_vocabulary(
            flat(hidden), kernel, targets.reshape(-1), normalizer, push * weights.reshape(-1), cut
        )
        return d_hidden.reshape(hidden.shape), d_kernel

    def both(hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
        weights_N = weights.reshape(-1)
        normalizer, losses_N, d_hidden, d_kernel = blockwise.by_tokens(
            flat(hidden), kernel, targets.reshape(-1), weights_N, cut
        )
        return sums(normalizer, losses_N, weights_N), d_hidden.reshape(hidden.shape), d_kernel

    @jax.custom_vjp
    def call(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        return run(forward, inputs, (sums_spec, tokens_spec, tokens_spec))(*arguments)[0]

    def call_forward(*arguments: jax.Array) -> tuple[tuple[jax.Array, ...], Any]:
        if blocks.by == "tokens":
            found, *gradients = run(both, inputs, (sums_spec, hidden_spec, kernel_spec))(*arguments)
            return found, gradients
        found, *normalizer = run(forward, inputs, (sums_spec, tokens_spec, tokens_spec))(*arguments)
        return found, (*arguments, *normalizer)

    def call_backward(saved: Any, cotangents: tuple[jax.Array, ...]) -> tuple[Any, Any, None, None]:
        push = cotangents[0]  # the other sums are for reports: nothing is differentiated through them
        if blocks.by == "tokens":
            scaled = [(gradient.astype(jnp.float32) * push).astype(logits.hidden.dtype) for gradient in saved]
            return scaled[0], scaled[1], None, None
        specs = (*inputs, tokens_spec, tokens_spec, scalar)
        return (*run(backward, specs, (hidden_spec, kernel_spec))(*saved, push), None, None)

    call.defvjp(call_forward, call_backward)
    with jax.named_scope("cross_entropy"):
        total, nats, z = call(logits.hidden, logits.kernel, targets_BL, weights_BL)
    return LossSums(total, *jax.lax.stop_gradient((nats, z)))
