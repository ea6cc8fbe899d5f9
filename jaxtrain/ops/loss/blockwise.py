"""Cross-entropy with its own gradient, one block of logits at a time, on the shards of a mesh.

Forward and backward each run on local shards and are not differentiated through. Collectives run only over the axes
that `BlockedLoss` names, so that one device needs none.

Shapes: B batch, L sequence, N = B L tokens of one device, D embed, V vocabulary, C ids or tokens of a block. A kernel
is [D, V], or a tied table [V, D]; a bias is [V].
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxtrain.config.schema import Logits
from jaxtrain.layout.manual import on_shards, spec_of
from jaxtrain.layout.rules import entry_axes
from jaxtrain.layout.sharding import Layout, current_layout
from jaxtrain.ops.attention.reference import capped
from jaxtrain.ops.loss.blocks import ids_at_once

TOKENS = ("batch", "sequence")


class OutputLayer(NamedTuple):
    """What turns hidden states into logits: arrays (bias None: without), or for each its gradient or its spec."""

    kernel: Any
    bias: Any


# Total, cross-entropy and z-loss: float32 [].
_Sums = tuple[Array, Array, Array]
# Of tokens [N], float32: the largest logit, the sum of exponentials below it, and the target's logit.
_Statistics = tuple[Array, Array, Array]
# Normalizer, loss and gradient of the hidden states of the tokens that are done, and the gradient of the output layer.
_ByTokens = tuple[Array, Array, Array, Array, OutputLayer]


@dataclass(frozen=True)
class BlockedLoss:
    """What is known of the loss before anything runs.

    Attributes:
        by: tokens or vocabulary, of which a block has some.
        size: tokens or ids of a block.
        z_loss: weight of the squared logsumexp.
        tied: whether the kernel is a table [V, D].
        softcap: logits become softcap * tanh(logits / softcap); None: as they are.
        vocabulary_axes: mesh axes that V is sharded over, to sum over.
        token_axes: those that N is sharded over.
    """

    by: Logits
    size: int
    z_loss: float
    tied: bool
    softcap: float | None = None
    vocabulary_axes: tuple[str, ...] = ()
    token_axes: tuple[str, ...] = ()

    @property
    def vocabulary_dim(self) -> int:
        """The dim of the kernel that counts ids."""
        return 0 if self.tied else 1


@dataclass(frozen=True)
class Normalizer:
    """The logsumexp of each token as largest logit plus logarithm of the sum above it, which loses no digits; [N]."""

    top: Array
    log_sum: Array

    @property
    def logsumexp(self) -> Array:
        return self.top + self.log_sum


def forward(h_ND: Array, output: OutputLayer, targets_N: Array, form: BlockedLoss) -> tuple[Normalizer, Array]:
    """Compute normalizer and negative log-likelihood, float32 [N], of each token, one block of ids at a time.

    Hidden states and this device's shard of the output layer are in the compute dtype, targets are int32 global ids.
    """
    size, ids = form.size, _own_ids(output.kernel, form)

    def step(carry: _Statistics, number: Array) -> tuple[_Statistics, None]:
        top_N, sum_N, target_N = carry
        start, fresh_C = _block(number, size, ids.size)
        logits_NC = _logits(h_ND, _slice(output, start, size, form), form)
        ids_C = jax.lax.dynamic_slice_in_dim(ids, start, size)
        if fresh_C is not None:
            logits_NC = jnp.where(fresh_C, logits_NC, -jnp.inf)
        target_N = target_N + _of_target(logits_NC, ids_C, targets_N, fresh_C)
        higher_N = jnp.maximum(top_N, jnp.max(logits_NC, axis=1))
        sum_N = sum_N * jnp.exp(top_N - higher_N) + jnp.sum(jnp.exp(logits_NC - higher_N[:, None]), axis=1)
        return (higher_N, sum_N, target_N), None

    zero_N = jnp.zeros(h_ND.shape[:1], jnp.float32)
    start = (zero_N - jnp.inf, zero_N, zero_N)
    (top_N, sum_N, target_N), _ = jax.lax.scan(step, start, jnp.arange(-(-ids.size // size)))
    return _over_shards(top_N, sum_N, target_N, form)


def gradients_by_vocabulary(
    h_ND: Array, output: OutputLayer, targets_N: Array, normalizer: Normalizer, push_N: Array, form: BlockedLoss
) -> tuple[Array, OutputLayer]:
    """Compute the gradients of sum(push x (negative log-likelihood + z-loss)) for hidden states and output layer.

    Logits are computed a second time. The kernel's gradient takes the place of the kernel block by block: zeros to
    begin with a compiler would make early and keep (two arrays of 1 GiB for Llama 8B on an H100, jax 0.10.2).

    Args:
        h_ND, output, targets_N, normalizer, form: as of `forward`, and from it.
        push_N: float32, the gradient of the total for each token's loss.

    Returns:
        Gradients of h_ND and output in their dtypes, summed over shards.
    """
    kernel, bias = output
    size, ids = form.size, _own_ids(kernel, form)
    dim = form.vocabulary_dim

    def step(carry: tuple[Array, OutputLayer], number: Array) -> tuple[tuple[Array, OutputLayer], None]:
        d_h_ND, (mixed, d_bias) = carry
        start, fresh_C = _block(number, size, ids.size)
        block, block_bias = _slice(OutputLayer(mixed, bias), start, size, form)
        ids_C = jax.lax.dynamic_slice_in_dim(ids, start, size)
        logits_NC = _logits(h_ND, OutputLayer(block, block_bias), form)
        d_logits_NC = _logit_gradient(logits_NC, ids_C, targets_N, normalizer, push_N, form)
        if fresh_C is not None:  # the others have been done, and their part of the block is gradient by now
            d_logits_NC = jnp.where(fresh_C, d_logits_NC, 0.0)
        d_h, d_block = _pull(h_ND, block, d_logits_NC.astype(h_ND.dtype), form)
        d_block = d_block.astype(kernel.dtype)
        if fresh_C is not None:
            d_block = jnp.where(fresh_C[:, None] if form.tied else fresh_C, d_block, block)
        mixed = jax.lax.dynamic_update_slice_in_dim(mixed, d_block, start, dim)
        if d_bias is not None:
            done = jax.lax.dynamic_slice_in_dim(d_bias, start, size)
            d_bias = jax.lax.dynamic_update_slice_in_dim(d_bias, done + jnp.sum(d_logits_NC, axis=0), start, 0)
        return (d_h_ND + d_h, OutputLayer(mixed, d_bias)), None

    d_bias = None if bias is None else jnp.zeros(bias.shape, jnp.float32)
    start = (jnp.zeros(h_ND.shape, jnp.float32), OutputLayer(kernel, d_bias))
    (d_h_ND, (d_kernel, d_bias)), _ = jax.lax.scan(step, start, jnp.arange(-(-ids.size // size)))
    d_h_ND = _sum(d_h_ND.astype(h_ND.dtype), form.vocabulary_axes)
    if bias is not None and d_bias is not None:
        d_bias = _sum(d_bias, form.token_axes).astype(bias.dtype)
    # fp16 could overflow in the sum. bf16 cannot, is summed so by the compiler too, and the full output layer would
    # become an array of float32: 1.5 GiB more for Llama 8B on 8 H100. After the loop, where compilers turn the sum into
    # one of which each device keeps a part, and leave out that of a frozen kernel.
    summed_in = jnp.float32 if kernel.dtype == jnp.float16 else kernel.dtype
    d_kernel = _sum(d_kernel.astype(summed_in), form.token_axes).astype(kernel.dtype)
    return d_h_ND, OutputLayer(d_kernel, d_bias)


def by_tokens(
    h_ND: Array, output: OutputLayer, targets_N: Array, weights_N: Array, form: BlockedLoss
) -> tuple[Normalizer, Array, Array, OutputLayer]:
    """Compute what `forward` returns, and both gradients for push = weights, of h_ND in its dtype, else in float32."""
    size, count = form.size, h_ND.shape[0]
    ids = _own_ids(output.kernel, form)

    def step(carry: _ByTokens, number: Array) -> tuple[_ByTokens, None]:
        top_N, log_sum_N, loss_N, d_h_ND, d_output = carry
        start, fresh_C = _block(number, size, count)

        def rows(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, size)

        def put(into: Array, x: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(into, x, start, 0)

        h_CD, targets_C, push_C = rows(h_ND), rows(targets_N), rows(weights_N)
        logits_CV = _logits(h_CD, output, form)
        top_C = jnp.max(logits_CV, axis=1)
        sum_C = jnp.sum(jnp.exp(logits_CV - top_C[:, None]), axis=1)
        normalizer, loss_C = _over_shards(top_C, sum_C, _of_target(logits_CV, ids, targets_C, None), form)
        if fresh_C is not None:
            push_C = jnp.where(fresh_C, push_C, 0.0)
        d_logits_CV = _logit_gradient(logits_CV, ids, targets_C, normalizer, push_C, form)
        d_h_CD, d_kernel = _pull(h_CD, output.kernel, d_logits_CV.astype(h_ND.dtype), form)
        d_h_CD = d_h_CD.astype(h_ND.dtype)
        if fresh_C is not None:  # the tokens of the block before have theirs
            d_h_CD = d_h_CD + rows(d_h_ND)
        numbers = (put(top_N, normalizer.top), put(log_sum_N, normalizer.log_sum), put(loss_N, loss_C))
        d_bias = None if d_output.bias is None else d_output.bias + jnp.sum(d_logits_CV, axis=0)
        return (*numbers, put(d_h_ND, d_h_CD), OutputLayer(d_output.kernel + d_kernel, d_bias)), None

    zero_N = jnp.zeros((count,), jnp.float32)
    d_output = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), output)
    start = (zero_N, zero_N, zero_N, jnp.zeros_like(h_ND), d_output)
    (top, log_sum, loss_N, d_h_ND, d_output), _ = jax.lax.scan(step, start, jnp.arange(-(-count // size)))
    over_tokens = partial(_sum, axes=form.token_axes)
    return Normalizer(top, log_sum), loss_N, _sum(d_h_ND, form.vocabulary_axes), jax.tree.map(over_tokens, d_output)


def for_forward(form: BlockedLoss, tokens: int, vocabulary: int) -> BlockedLoss:
    """The form in which `forward` computes the same loss for N tokens and V ids of this device: by vocabulary."""
    if form.by == "vocabulary":
        return form
    return replace(form, by="vocabulary", size=min(ids_at_once(tokens), vocabulary))


def _own_ids(kernel: Array, form: BlockedLoss) -> Array:
    """The ids whose columns this shard of the kernel has: int32 [C]."""
    count = kernel.shape[form.vocabulary_dim]
    first = jax.lax.axis_index(form.vocabulary_axes) * count if form.vocabulary_axes else 0
    return first + jnp.arange(count)


def _block(number: Array, size: int, total: int) -> tuple[Array, Array | None]:
    """Start of a block, and which of its entries no earlier block had; None where blocks divide."""
    start = number * size
    if total % size == 0:
        return start, None
    inside = jnp.minimum(start, total - size)
    return inside, inside + jnp.arange(size) >= start


def _slice(output: OutputLayer, start: Array, size: int, form: BlockedLoss) -> OutputLayer:
    kernel = jax.lax.dynamic_slice_in_dim(output.kernel, start, size, form.vocabulary_dim)
    return OutputLayer(kernel, None if output.bias is None else jax.lax.dynamic_slice_in_dim(output.bias, start, size))


def _product(a: Array, b: Array, a_dim: int, b_dim: int) -> Array:
    """Contract one dim of each matrix; float32, whatever they are in."""
    return jax.lax.dot_general(a, b, (((a_dim,), (b_dim,)), ((), ())), preferred_element_type=jnp.float32)


def _logits(h_ND: Array, output: OutputLayer, form: BlockedLoss) -> Array:
    logits = _product(h_ND, output.kernel, 1, 1 - form.vocabulary_dim)
    if output.bias is not None:
        logits = logits + output.bias.astype(jnp.float32)
    return capped(logits, form.softcap)


def _pull(h_ND: Array, kernel: Array, d_logits: Array, form: BlockedLoss) -> tuple[Array, Array]:
    """Gradients of both factors of the logits, float32."""
    d_h_ND = _product(d_logits, kernel, 1, form.vocabulary_dim)
    return d_h_ND, _product(d_logits, h_ND, 0, 0) if form.tied else _product(h_ND, d_logits, 0, 0)


def _of_target(logits: Array, ids: Array, targets: Array, fresh: Array | None) -> Array:
    """The target's logit of each token; 0 where it is not among these ids."""
    chosen = ids[None] == targets[:, None]
    return jnp.sum(jnp.where(chosen if fresh is None else chosen & fresh, logits, 0.0), axis=1)


def _logit_gradient(
    logits: Array, ids: Array, targets: Array, normalizer: Normalizer, push: Array, form: BlockedLoss
) -> Array:
    """The gradient for the logits before the softcap: push x (softmax x (1 + 2 z logsumexp) - target); float32."""
    softmax = jnp.exp(logits - normalizer.top[:, None] - normalizer.log_sum[:, None])
    factor = push * (1 + 2 * form.z_loss * normalizer.logsumexp) if form.z_loss else push
    gradient = softmax * factor[:, None] - jnp.where(ids[None] == targets[:, None], push[:, None], 0.0)
    return gradient if form.softcap is None else gradient * (1 - jnp.square(logits / form.softcap))


def _over_shards(top: Array, total: Array, target: Array, form: BlockedLoss) -> tuple[Normalizer, Array]:
    """Normalizer and loss over all shards of the vocabulary from those of each."""
    highest = jax.lax.pmax(top, form.vocabulary_axes) if form.vocabulary_axes else top
    log_sum = jnp.log(_sum(total * jnp.exp(top - highest), form.vocabulary_axes))
    # The difference of the large numbers first: an offset of all logits costs no digits.
    return Normalizer(highest, log_sum), log_sum + (highest - _sum(target, form.vocabulary_axes))


def _sum(x: Array, axes: tuple[str, ...]) -> Array:
    return jax.lax.psum(x, axes) if axes else x


def _local_losses(form: BlockedLoss, h_ND: Array, output: OutputLayer, targets_N: Array) -> tuple:
    """The losses and the two parts of the normalizer, [N] each."""
    form = for_forward(form, targets_N.size, output.kernel.shape[form.vocabulary_dim])
    normalizer, losses_N = forward(h_ND, output, targets_N, form)
    return losses_N, normalizer.top, normalizer.log_sum


def _local_sums(form: BlockedLoss, h_ND: Array, output: OutputLayer, targets_N: Array, weights_N: Array) -> tuple:
    """The sums, and the two parts of the normalizer [N]."""
    losses_N, *parts = _local_losses(form, h_ND, output, targets_N)
    return *_weighted(form, Normalizer(*parts), losses_N, weights_N), *parts


def _local_sums_and_gradients(
    form: BlockedLoss, h_ND: Array, output: OutputLayer, targets_N: Array, weights_N: Array
) -> tuple:
    """The sums, and the gradients of hidden states and output layer."""
    normalizer, losses_N, d_h_ND, d_output = by_tokens(h_ND, output, targets_N, weights_N, form)
    return *_weighted(form, normalizer, losses_N, weights_N), d_h_ND, d_output


def _local_gradients(form: BlockedLoss, *arrays: Any) -> tuple[Array, OutputLayer]:
    """The gradients of hidden states and output layer from the normalizer and the gradient of the total, float32 []."""
    h_ND, output, targets_N, weights_N, *parts, push = arrays
    return gradients_by_vocabulary(h_ND, output, targets_N, Normalizer(*parts), push * weights_N, form)


def _local_loss_gradients(form: BlockedLoss, *arrays: Any) -> tuple[Array, OutputLayer]:
    """The gradients of hidden states and output layer from the gradient of each token's loss."""
    h_ND, output, targets_N, *parts, push_N = arrays
    form = for_forward(form, targets_N.size, output.kernel.shape[form.vocabulary_dim])
    return gradients_by_vocabulary(h_ND, output, targets_N, Normalizer(*parts), push_N, form)


def _weighted(form: BlockedLoss, normalizer: Normalizer, losses_N: Array, weights_N: Array) -> _Sums:
    """Weight the losses and sum them over all tokens."""
    nats = jnp.sum(losses_N * weights_N)
    z = form.z_loss * jnp.sum(jnp.square(normalizer.logsumexp) * weights_N) if form.z_loss else jnp.zeros_like(nats)
    sums = (nats + z, nats, z)
    return jax.lax.psum(sums, form.token_axes) if form.token_axes else sums


# --- On global arrays. ---


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
    call.defvjp(partial(_sums_and_saved, where), partial(_gradients, where))
    with jax.named_scope("cross_entropy"):
        return call(hidden_BLD, output, targets_BL, weights_BL)


def blockwise_losses(hidden_BLD: Array, output: OutputLayer, targets_BL: Array, form: BlockedLoss) -> Array:
    """Compute the loss of each token, float32 [B, L], as `blockwise_sums` without z-loss, always by vocabulary."""
    where = _on_mesh(form)
    call = jax.custom_vjp(partial(_losses, where))
    call.defvjp(partial(_losses_and_saved, where), partial(_loss_gradients, where))
    with jax.named_scope("cross_entropy"):
        return call(hidden_BLD, output, targets_BL)


def _on_mesh(form: BlockedLoss) -> _OnMesh:
    """Find how the loss is sharded in the step that is being traced."""
    layout = current_layout()
    if layout is None or not is_sharded(layout):
        return _OnMesh(form)
    token_axes = mesh_axes(layout, "batch") + mesh_axes(layout, "sequence")
    form = replace(form, vocabulary_axes=mesh_axes(layout, "activation_vocab"), token_axes=token_axes)
    return _OnMesh(form, layout)


# --- On global arrays: the loss, the loss with what its backward pass needs, and the backward pass. ---


def _sums(where: _OnMesh, *arguments: Any) -> _Sums:
    total, nats, z, *_ = where.run(_local_sums, "hott", "ssstt", *arguments)
    return total, nats, z


def _sums_and_saved(where: _OnMesh, *arguments: Any) -> tuple[_Sums, tuple[Any, ...]]:
    """The sums, and by tokens both gradients, or by vocabulary the arguments and the normalizer."""
    if where.form.by == "tokens":
        total, nats, z, *gradients = where.run(_local_sums_and_gradients, "hott", "sssho", *arguments)
        return (total, nats, z), tuple(gradients)
    total, nats, z, *normalizer = where.run(_local_sums, "hott", "ssstt", *arguments)
    return (total, nats, z), (*arguments, *normalizer)


def _gradients(where: _OnMesh, saved: tuple[Any, ...], cotangents: _Sums) -> tuple[Array, OutputLayer, None, None]:
    push = cotangents[0]  # the other sums are for reports: nothing is differentiated through them
    if where.form.by == "tokens":
        dtype = saved[0].dtype
        d_hidden, d_output = jax.tree.map(lambda x: (x.astype(jnp.float32) * push).astype(dtype), saved)
        return d_hidden, d_output, None, None
    d_hidden, d_output = where.run(_local_gradients, "hotttts", "ho", *saved, push)
    return d_hidden, d_output, None, None


def _losses(where: _OnMesh, *arguments: Any) -> Array:
    return where.run(_local_losses, "hot", "ttt", *arguments)[0]


def _losses_and_saved(where: _OnMesh, *arguments: Any) -> tuple[Array, tuple[Any, ...]]:
    """The losses, and the arguments with the normalizer."""
    losses_BL, *normalizer = where.run(_local_losses, "hot", "ttt", *arguments)
    return losses_BL, (*arguments, *normalizer)


def _loss_gradients(where: _OnMesh, saved: tuple[Any, ...], push_BL: Array) -> tuple[Array, OutputLayer, None]:
    d_hidden, d_output = where.run(_local_loss_gradients, "hotttt", "ho", *saved, push_BL)
    return d_hidden, d_output, None
