"""The blockwise loss on the shards of a mesh, with its own gradient.

Forward and backward each run on local shards and are not differentiated through. `_sums` and what stands beside it see
global arrays, `_local_sums` and what stands beside it the shards of one device.

Shapes: B batch, L sequence (of one device inside), D embed, V vocabulary, N = B L tokens. The kernel of an output layer
is [D, V], or a tied table [V, D]; its bias [V], or None.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.layout.manual import on_shards, spec_of
from jaxtrain.layout.rules import entry_axes
from jaxtrain.layout.sharding import Layout, current_layout
from jaxtrain.ops.loss import blockwise
from jaxtrain.ops.loss.blockwise import BlockedLoss, Normalizer, OutputLayer

TOKENS = ("batch", "sequence")
# Total, cross-entropy and z-loss: float32 [].
_Sums = tuple[jax.Array, jax.Array, jax.Array]
_REPLICATED = PartitionSpec()
_REPLICATED_OUTPUT = OutputLayer(_REPLICATED, _REPLICATED)
_SUMS_SPECS = (_REPLICATED, _REPLICATED, _REPLICATED)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Trains:
    """Whether the gradient of the output layer's kernel is asked for; a static part of what a backward pass needs."""

    kernel: bool


@dataclass(frozen=True)
class _OnMesh:
    """The loss and how its arrays are sharded.

    Attributes:
        form: of the loss on one device.
        layout: of the code that is being traced; None: one device.
        hidden, output, tokens: specs of hidden states [B, L, D], of the output layer, and of what is [B, L].
    """

    form: BlockedLoss
    layout: Layout | None = None
    hidden: PartitionSpec = _REPLICATED
    output: OutputLayer = _REPLICATED_OUTPUT
    tokens: PartitionSpec = _REPLICATED

    @property
    def inputs(self) -> tuple[PartitionSpec | OutputLayer, ...]:
        """Specs of hidden states, output layer, targets and weights."""
        return (self.hidden, self.output, self.tokens, self.tokens)


def is_sharded(layout: Layout | None) -> bool:
    """Whether the compiler shards anything in the code that is being traced."""
    return layout is not None and any(degree > 1 for degree in layout.degrees.values())


def mesh_axes(layout: Layout, name: str) -> tuple[str, ...]:
    """The mesh axes of size above 1 that a logical axis is sharded over."""
    return entry_axes(spec_of(layout, name)[0])


def blockwise_sums(
    hidden_BLD: jax.Array,
    output: OutputLayer,
    targets_BL: jax.Array,
    weights_BL: jax.Array,
    form: BlockedLoss,
) -> _Sums:
    """Sum the weighted loss with one block of logits in memory at a time.

    Args:
        hidden_BLD: in the compute dtype.
        output: in the same dtype.
        targets_BL: int32.
        weights_BL: float32; no gradient flows to them.
        form: by tokens or vocabulary, of one device; its mesh axes are those of the step that is being traced.

    Returns:
        Total, cross-entropy and z-loss over all devices; gradients flow through the total only.
    """
    where = _on_mesh(form)
    call = jax.custom_vjp(partial(_sums, where))
    call.defvjp(partial(_sums_and_saved, where), partial(_gradients, where), symbolic_zeros=True)
    with jax.named_scope("cross_entropy"):
        return call(hidden_BLD, output, targets_BL, weights_BL)


def blockwise_losses(hidden_BLD: jax.Array, output: OutputLayer, targets_BL: jax.Array, form: BlockedLoss) -> jax.Array:
    """Compute the loss of each token with one block of logits in memory at a time, partitioned by vocabulary.

    Args:
        hidden_BLD, output, targets_BL: as of `blockwise_sums`.
        form: as of `blockwise_sums`, without z-loss; blocks by tokens become blocks by vocabulary, since the gradients
            of single tokens' losses are not known before the backward pass.

    Returns:
        Negative log-likelihood, float32 [B, L].
    """
    where = _on_mesh(form)
    call = jax.custom_vjp(partial(_losses, where))
    call.defvjp(partial(_losses_and_saved, where), partial(_loss_gradients, where), symbolic_zeros=True)
    with jax.named_scope("cross_entropy"):
        return call(hidden_BLD, output, targets_BL)


def _on_mesh(form: BlockedLoss) -> _OnMesh:
    """Find how the loss is sharded in the step that is being traced."""
    layout = current_layout()
    if layout is None or not is_sharded(layout):
        return _OnMesh(form)
    token_axes = mesh_axes(layout, "batch") + mesh_axes(layout, "sequence")
    form = replace(
        form,
        vocabulary_axes=mesh_axes(layout, "activation_vocab"),
        token_axes=token_axes,
        sums_each_block=bool(token_axes) and not _keeps_part(layout, token_axes),
    )
    kernel = ("activation_vocab", None) if form.tied else (None, "activation_vocab")
    output = OutputLayer(spec_of(layout, *kernel), spec_of(layout, "activation_vocab"))
    return _OnMesh(form, layout, spec_of(layout, *TOKENS, None), output, spec_of(layout, *TOKENS))


def _keeps_part(layout: Layout, token_axes: tuple[str, ...]) -> bool:
    """Whether a device keeps a part only of the kernel's gradient, summed over devices with other tokens."""
    kept_by = {*mesh_axes(layout, "embed"), *(axis for axis in layout.state_axes if layout.degree(axis) > 1)}
    return bool(kept_by & set(token_axes))


# --- On global arrays: the loss, the loss with what its backward pass needs, and the backward pass. ---


def _sums(where: _OnMesh, *arguments: Any) -> _Sums:
    return _run(where, _local_sums, where.inputs, (_SUMS_SPECS, where.tokens, where.tokens))(*arguments)[0]


def _sums_and_saved(where: _OnMesh, *given: Any) -> tuple[_Sums, tuple[Any, ...]]:
    """The sums, and by tokens both gradients, or by vocabulary the arguments and the normalizer."""
    arguments, trains = _opened(given)
    if where.form.by == "tokens":
        outputs = (_SUMS_SPECS, where.hidden, where.output)
        sums, *gradients = _run(where, _local_sums_and_gradients, where.inputs, outputs)(*arguments)
        return sums, tuple(gradients)
    sums, *normalizer = _run(where, _local_sums, where.inputs, (_SUMS_SPECS, where.tokens, where.tokens))(*arguments)
    return sums, (trains, *arguments, *normalizer)


def _gradients(where: _OnMesh, saved: tuple[Any, ...], cotangents: _Sums) -> tuple[jax.Array, OutputLayer, None, None]:
    push = _array(cotangents[0])  # the other sums are for reports: nothing is differentiated through them
    if where.form.by == "tokens":
        dtype = saved[0].dtype
        scale = lambda gradient: (gradient.astype(jnp.float32) * push).astype(dtype)  # noqa: E731
        d_hidden, d_output = jax.tree.map(scale, saved)
        return d_hidden, d_output, None, None
    trains, *arguments = saved
    where, inputs = _for_gradients(where, trains), (*where.inputs, where.tokens, where.tokens, _REPLICATED)
    d_hidden, d_output = _run(where, _local_gradients, inputs, (where.hidden, where.output))(*arguments, push)
    return d_hidden, d_output, None, None


def _losses(where: _OnMesh, *arguments: Any) -> jax.Array:
    return _losses_and_normalizer(where, *arguments)[0]


def _losses_and_normalizer(where: _OnMesh, *arguments: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _run(where, _local_losses, where.inputs[:3], (where.tokens, where.tokens, where.tokens))(*arguments)


def _losses_and_saved(where: _OnMesh, *given: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    """The losses, and the arguments with the normalizer."""
    arguments, trains = _opened(given)
    losses_BL, *normalizer = _losses_and_normalizer(where, *arguments)
    return losses_BL, (trains, *arguments, *normalizer)


def _loss_gradients(where: _OnMesh, saved: tuple[Any, ...], push_BL: jax.Array) -> tuple[jax.Array, OutputLayer, None]:
    trains, *arguments = saved
    where, inputs = _for_gradients(where, trains), (*where.inputs[:3], where.tokens, where.tokens, where.tokens)
    places = (where.hidden, where.output)
    d_hidden, d_output = _run(where, _local_loss_gradients, inputs, places)(*arguments, _array(push_BL))
    return d_hidden, d_output, None


def _opened(given: tuple[Any, ...]) -> tuple[tuple[Any, ...], _Trains]:
    """The arguments that jax hands over with whether each is differentiated, and what of it matters here."""
    return jax.tree.map(lambda leaf: leaf.value, given), _Trains(given[1].kernel.perturbed)


def _for_gradients(where: _OnMesh, trains: _Trains) -> _OnMesh:
    """How gradients are computed: that of a frozen kernel is summed at once, a sum that compilers leave out.

    A sum inside the loop over blocks they keep, because each turn writes into the array that the next one reads.
    """
    return replace(where, form=replace(where.form, sums_each_block=where.form.sums_each_block and trains.kernel))


def _array(cotangent: Any) -> jax.Array:
    """A gradient that jax may hand over as the shape of zeros."""
    if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return cotangent
    shape, dtype = (getattr(cotangent, name) for name in ("shape", "dtype"))
    return jnp.zeros(shape, dtype)


def _run(where: _OnMesh, function: Callable, inputs: tuple, outputs: tuple) -> Callable:
    """A function of the form and local arrays as one of global arrays, with specs of its inputs and outputs."""
    local = partial(function, where.form)
    return local if where.layout is None else on_shards(local, where.layout, inputs, outputs)


# --- On the shards of one device. ---


def _local_sums(
    form: BlockedLoss, hidden_BLD: jax.Array, output: OutputLayer, targets_BL: jax.Array, weights_BL: jax.Array
) -> tuple[_Sums, jax.Array, jax.Array]:
    """The sums, and the two parts of the normalizer [B, L]."""
    form = blockwise.for_forward(form, targets_BL.size, output.kernel.shape[form.vocabulary_dim])
    normalizer, losses_N = blockwise.forward(_flat(hidden_BLD), output, targets_BL.reshape(-1), form)
    sums = _weighted(form, normalizer, losses_N, weights_BL.reshape(-1))
    return sums, normalizer.top.reshape(targets_BL.shape), normalizer.log_sum.reshape(targets_BL.shape)


def _local_sums_and_gradients(
    form: BlockedLoss, hidden_BLD: jax.Array, output: OutputLayer, targets_BL: jax.Array, weights_BL: jax.Array
) -> tuple[_Sums, jax.Array, OutputLayer]:
    """The sums, and the gradients of hidden states and output layer."""
    weights_N = weights_BL.reshape(-1)
    normalizer, losses_N, d_h_ND, d_output = blockwise.by_tokens(
        _flat(hidden_BLD), output, targets_BL.reshape(-1), weights_N, form
    )
    return _weighted(form, normalizer, losses_N, weights_N), d_h_ND.reshape(hidden_BLD.shape), d_output


def _local_gradients(
    form: BlockedLoss,
    hidden_BLD: jax.Array,
    output: OutputLayer,
    targets_BL: jax.Array,
    weights_BL: jax.Array,
    top_BL: jax.Array,
    log_sum_BL: jax.Array,
    push: jax.Array,
) -> tuple[jax.Array, OutputLayer]:
    """The gradients of hidden states and output layer from the normalizer and the gradient of the total, float32 []."""
    normalizer = Normalizer(top_BL.reshape(-1), log_sum_BL.reshape(-1))
    d_h_ND, d_output = blockwise.gradients_by_vocabulary(
        _flat(hidden_BLD), output, targets_BL.reshape(-1), normalizer, push * weights_BL.reshape(-1), form
    )
    return d_h_ND.reshape(hidden_BLD.shape), d_output


def _local_losses(
    form: BlockedLoss, hidden_BLD: jax.Array, output: OutputLayer, targets_BL: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The losses and the two parts of the normalizer, [B, L] each."""
    form = blockwise.for_forward(form, targets_BL.size, output.kernel.shape[form.vocabulary_dim])
    normalizer, losses_N = blockwise.forward(_flat(hidden_BLD), output, targets_BL.reshape(-1), form)
    losses_BL, top_BL, log_sum_BL = (
        of_tokens.reshape(targets_BL.shape) for of_tokens in (losses_N, normalizer.top, normalizer.log_sum)
    )
    return losses_BL, top_BL, log_sum_BL


def _local_loss_gradients(
    form: BlockedLoss,
    hidden_BLD: jax.Array,
    output: OutputLayer,
    targets_BL: jax.Array,
    top_BL: jax.Array,
    log_sum_BL: jax.Array,
    push_BL: jax.Array,
) -> tuple[jax.Array, OutputLayer]:
    """The gradients of hidden states and output layer from the gradient of each token's loss."""
    form = blockwise.for_forward(form, targets_BL.size, output.kernel.shape[form.vocabulary_dim])
    return _local_gradients(form, hidden_BLD, output, targets_BL, push_BL, top_BL, log_sum_BL, jnp.float32(1))


def _weighted(form: BlockedLoss, normalizer: Normalizer, losses_N: jax.Array, weights_N: jax.Array) -> _Sums:
    """Weight the losses and sum them over all tokens."""
    nats = jnp.sum(losses_N * weights_N)
    z = form.z_loss * jnp.sum(jnp.square(normalizer.logsumexp) * weights_N) if form.z_loss else jnp.zeros_like(nats)
    sums = (nats + z, nats, z)
    return jax.lax.psum(sums, form.token_axes) if form.token_axes else sums


def _flat(x_BLD: jax.Array) -> jax.Array:
    return x_BLD.reshape(-1, x_BLD.shape[-1])
