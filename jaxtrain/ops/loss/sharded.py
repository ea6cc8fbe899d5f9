"""The blockwise loss on the shards of a mesh, with its own gradient.

Forward and backward each run on local shards and are not differentiated through. `_sums` and what stands beside it see
global arrays, `_local_sums` and what stands beside it the flat shards of one device.

Shapes: B batch, L sequence, D embed, V vocabulary, N = B L tokens of one device. The kernel of an output layer is
[D, V], or a tied table [V, D]; its bias [V], or None.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxtrain.layout.manual import on_shards, spec_of
from jaxtrain.layout.rules import entry_axes
from jaxtrain.layout.sharding import Layout, current_layout
from jaxtrain.ops.loss import blockwise
from jaxtrain.ops.loss.blockwise import BlockedLoss, Normalizer, OutputLayer

TOKENS = ("batch", "sequence")
# Total, cross-entropy and z-loss: float32 [].
_Sums = tuple[Array, Array, Array]


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Trains:
    """Whether the gradient of the output layer's kernel is asked for; a static part of what a backward pass needs."""

    kernel: bool


@dataclass(frozen=True)
class _OnMesh:
    """The loss, and the layout of the code that is being traced where that is sharded."""

    form: BlockedLoss
    layout: Layout | None = None

    def run(self, function: Callable, inputs: str, outputs: str, *arguments: Any) -> tuple:
        """Call a function of the form and flat local arrays with global arrays.

        Inputs and outputs have a letter for each array: h hidden states [B, L, D] ([N, D] inside), which come first, o
        an output layer, t numbers of tokens [B, L] ([N] inside), s a scalar.
        """

        def local(*arrays: Any) -> tuple:
            rows = arrays[0].shape[:2]
            flat = {"h": (-1, arrays[0].shape[-1]), "t": (-1,)}
            full = {"h": arrays[0].shape, "t": rows}
            given = (x.reshape(flat[kind]) if kind in flat else x for kind, x in zip(inputs, arrays, strict=True))
            found = function(self.form, *given)
            return tuple(x.reshape(full[kind]) if kind in full else x for kind, x in zip(outputs, found, strict=True))

        layout = self.layout
        if layout is None:
            return local(*arguments)
        kernel = ("activation_vocab", None) if self.form.tied else (None, "activation_vocab")
        specs = {
            "h": spec_of(layout, *TOKENS, None),
            "o": OutputLayer(spec_of(layout, *kernel), spec_of(layout, "activation_vocab")),
            "t": spec_of(layout, *TOKENS),
            "s": PartitionSpec(),
        }
        places = (tuple(specs[kind] for kind in kinds) for kinds in (inputs, outputs))
        return on_shards(local, layout, *places)(*arguments)


def is_sharded(layout: Layout | None) -> bool:
    """Whether the compiler shards anything in the code that is being traced."""
    return layout is not None and any(degree > 1 for degree in layout.degrees.values())


def mesh_axes(layout: Layout, name: str) -> tuple[str, ...]:
    """The mesh axes of size above 1 that a logical axis is sharded over."""
    return entry_axes(spec_of(layout, name)[0])


def blockwise_sums(
    hidden_BLD: Array, output: OutputLayer, targets_BL: Array, weights_BL: Array, form: BlockedLoss
) -> _Sums:
    """Sum the weighted loss with one block of logits in memory at a time.

    Args:
        hidden_BLD, output: in the compute dtype.
        targets_BL, weights_BL: int32, and float32 that no gradient flows to.
        form: of one device; its mesh axes are those of the step that is being traced.

    Returns:
        Total, cross-entropy and z-loss over all devices; gradients flow through the total only.
    """
    where = _on_mesh(form)
    call = jax.custom_vjp(partial(_sums, where))
    call.defvjp(partial(_sums_and_saved, where), partial(_gradients, where), symbolic_zeros=True)
    with jax.named_scope("cross_entropy"):
        return call(hidden_BLD, output, targets_BL, weights_BL)


def blockwise_losses(hidden_BLD: Array, output: OutputLayer, targets_BL: Array, form: BlockedLoss) -> Array:
    """Compute the loss of each token, float32 [B, L], with one block of logits in memory at a time, by vocabulary.

    Arguments are those of `blockwise_sums`, without z-loss. Blocks by tokens become blocks by vocabulary, since the
    gradients of single tokens' losses are not known before the backward pass.
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
    # Whether a device keeps a part only of the kernel's gradient, summed over devices with other tokens.
    kept_by = {*mesh_axes(layout, "embed"), *(axis for axis in layout.state_axes if layout.degree(axis) > 1)}
    form = replace(
        form,
        vocabulary_axes=mesh_axes(layout, "activation_vocab"),
        token_axes=token_axes,
        sums_each_block=bool(token_axes) and not kept_by & set(token_axes),
    )
    return _OnMesh(form, layout)


# --- On global arrays: the loss, the loss with what its backward pass needs, and the backward pass. ---


def _sums(where: _OnMesh, *arguments: Any) -> _Sums:
    total, nats, z, *_ = where.run(_local_sums, "hott", "ssstt", *arguments)
    return total, nats, z


def _sums_and_saved(where: _OnMesh, *given: Any) -> tuple[_Sums, tuple[Any, ...]]:
    """The sums, and by tokens both gradients, or by vocabulary the arguments and the normalizer."""
    arguments, trains = _opened(given)
    if where.form.by == "tokens":
        total, nats, z, *gradients = where.run(_local_sums_and_gradients, "hott", "sssho", *arguments)
        return (total, nats, z), tuple(gradients)
    total, nats, z, *normalizer = where.run(_local_sums, "hott", "ssstt", *arguments)
    return (total, nats, z), (trains, *arguments, *normalizer)


def _gradients(where: _OnMesh, saved: tuple[Any, ...], cotangents: _Sums) -> tuple[Array, OutputLayer, None, None]:
    push = _array(cotangents[0])  # the other sums are for reports: nothing is differentiated through them
    if where.form.by == "tokens":
        dtype = saved[0].dtype
        d_hidden, d_output = jax.tree.map(lambda x: (x.astype(jnp.float32) * push).astype(dtype), saved)
        return d_hidden, d_output, None, None
    trains, *arguments = saved
    d_hidden, d_output = _for_gradients(where, trains).run(_local_gradients, "hotttts", "ho", *arguments, push)
    return d_hidden, d_output, None, None


def _losses(where: _OnMesh, *arguments: Any) -> Array:
    return where.run(_local_losses, "hot", "ttt", *arguments)[0]


def _losses_and_saved(where: _OnMesh, *given: Any) -> tuple[Array, tuple[Any, ...]]:
    """The losses, and the arguments with the normalizer."""
    arguments, trains = _opened(given)
    losses_BL, *normalizer = where.run(_local_losses, "hot", "ttt", *arguments)
    return losses_BL, (trains, *arguments, *normalizer)


def _loss_gradients(where: _OnMesh, saved: tuple[Any, ...], push_BL: Array) -> tuple[Array, OutputLayer, None]:
    trains, *arguments = saved
    where = _for_gradients(where, trains)
    d_hidden, d_output = where.run(_local_loss_gradients, "hotttt", "ho", *arguments, _array(push_BL))
    return d_hidden, d_output, None


def _opened(given: tuple[Any, ...]) -> tuple[tuple[Any, ...], _Trains]:
    """The arguments that jax hands over with whether each is differentiated, and what of it matters here."""
    return jax.tree.map(lambda leaf: leaf.value, given), _Trains(given[1].kernel.perturbed)


def _for_gradients(where: _OnMesh, trains: _Trains) -> _OnMesh:
    """How gradients are computed: that of a frozen kernel is summed at once, a sum that compilers leave out.

    A sum inside the loop over blocks they keep, because each turn writes into the array that the next one reads.
    """
    return replace(where, form=replace(where.form, sums_each_block=where.form.sums_each_block and trains.kernel))


def _array(cotangent: Any) -> Array:
    """A gradient that jax may hand over as the shape of zeros."""
    if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return cotangent
    shape, dtype = (getattr(cotangent, name) for name in ("shape", "dtype"))
    return jnp.zeros(shape, dtype)


# --- On the flat shards of one device. ---


def _local_losses(form: BlockedLoss, h_ND: Array, output: OutputLayer, targets_N: Array) -> tuple:
    """The losses and the two parts of the normalizer, [N] each."""
    form = blockwise.for_forward(form, targets_N.size, output.kernel.shape[form.vocabulary_dim])
    normalizer, losses_N = blockwise.forward(h_ND, output, targets_N, form)
    return losses_N, normalizer.top, normalizer.log_sum


def _local_sums(form: BlockedLoss, h_ND: Array, output: OutputLayer, targets_N: Array, weights_N: Array) -> tuple:
    """The sums, and the two parts of the normalizer [N]."""
    losses_N, *parts = _local_losses(form, h_ND, output, targets_N)
    return *_weighted(form, Normalizer(*parts), losses_N, weights_N), *parts


def _local_sums_and_gradients(
    form: BlockedLoss, h_ND: Array, output: OutputLayer, targets_N: Array, weights_N: Array
) -> tuple:
    """The sums, and the gradients of hidden states and output layer."""
    normalizer, losses_N, d_h_ND, d_output = blockwise.by_tokens(h_ND, output, targets_N, weights_N, form)
    return *_weighted(form, normalizer, losses_N, weights_N), d_h_ND, d_output


def _local_gradients(form: BlockedLoss, *arrays: Any) -> tuple[Array, OutputLayer]:
    """The gradients of hidden states and output layer from the normalizer and the gradient of the total, float32 []."""
    h_ND, output, targets_N, weights_N, *parts, push = arrays
    return blockwise.gradients_by_vocabulary(h_ND, output, targets_N, Normalizer(*parts), push * weights_N, form)


def _local_loss_gradients(form: BlockedLoss, *arrays: Any) -> tuple[Array, OutputLayer]:
    """The gradients of hidden states and output layer from the gradient of each token's loss."""
    h_ND, output, targets_N, *parts, push_N = arrays
    form = blockwise.for_forward(form, targets_N.size, output.kernel.shape[form.vocabulary_dim])
    return blockwise.gradients_by_vocabulary(h_ND, output, targets_N, Normalizer(*parts), push_N, form)


def _weighted(form: BlockedLoss, normalizer: Normalizer, losses_N: Array, weights_N: Array) -> _Sums:
    """Weight the losses and sum them over all tokens."""
    nats = jnp.sum(losses_N * weights_N)
    z = form.z_loss * jnp.sum(jnp.square(normalizer.logsumexp) * weights_N) if form.z_loss else jnp.zeros_like(nats)
    sums = (nats + z, nats, z)
    return jax.lax.psum(sums, form.token_axes) if form.token_axes else sums
