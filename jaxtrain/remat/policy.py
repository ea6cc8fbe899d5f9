"""Which activations of a block the backward pass keeps, and where: policies by name, applied in one place."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config.schema import BLOCK_INPUT, Remat
from jaxtrain.layout.sharding import platform
from jaxtrain.remat.segments import segment_layers
from jaxtrain.runtime.compiler import note_choice

# What a fused attention's backward pass needs besides queries, keys and values: its result and the statistics of its
# softmax. Kept (or offloaded) where the attention output is, and under "dots", which would otherwise attend again.
KERNEL_RESIDUALS = "attention_kernel"
# Results of the experts' grouped matmuls, which are weight matmuls but no single operation: kept under "dots".
EXPERT_PRODUCTS = "expert_products"

# A nested structure of arrays. Its structure is the model's, so that no type describes it.
Tree = Any
# (carry, one layer) -> (carry, output), as `jax.lax.scan` takes it.
ScanBody = Callable[[Tree, Tree], tuple[Tree, Tree]]


# What a block without a policy has.
KEEP_ALL = Remat(policy="none")


def scan_blocks(remat: Remat, body: ScanBody, carry: Tree, layers: Tree, *, unroll: bool = False) -> tuple[Tree, Tree]:
    """Run `jax.lax.scan(body, carry, layers)` with a backward pass that keeps what a policy says.

    Args:
        remat: the policy.
        body: (carry, one layer) -> (carry, output).
        carry: into the first block.
        layers: arrays with a leading layer dim.
        unroll: write the blocks out instead of a loop (not under sqrt, whose segments are loops).

    Returns:
        The last carry and the outputs, stacked.
    """
    if remat.offload:
        on_cpu = [("a saving", "on CPU the host's memory is the device's")] if platform() == "cpu" else []
        note_choice("activations", f"{', '.join(remat.offload)} on the host", on_cpu)
    if remat.policy == "sqrt":
        return _scan_segments(body, carry, layers)
    block = _checkpointed(remat, body)
    if unroll:
        return _unrolled(block, carry, layers)
    return jax.lax.scan(block, carry, layers)


def _checkpointed(remat: Remat, body: ScanBody) -> ScanBody:
    """Checkpoint one block as every policy but sqrt does."""
    if remat.policy == "none":
        return body
    policies = jax.checkpoint_policies
    names: tuple[str, ...] = ()
    if remat.policy == "names":
        names = _with_residuals(remat.names)
    if remat.offload:
        keep = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(names),
            names_which_can_be_offloaded=list(_with_residuals(remat.offload)),
            offload_src="device",
            offload_dst="pinned_host",
        )
    elif remat.policy == "full":
        keep = policies.nothing_saveable
    elif remat.policy == "dots":
        # Weight matmuls have no batch dims; attention scores do, and are recomputed.
        keep = policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable,
            policies.save_only_these_names(KERNEL_RESIDUALS, EXPERT_PRODUCTS),
        )
    else:
        keep = policies.save_only_these_names(*names)
    if BLOCK_INPUT in remat.offload:
        # What a checkpointed function is given is kept where it is; what it names is not.
        def named(carry: Tree, layer: Tree) -> tuple[Tree, Tree]:
            return body(jax.tree.map(lambda x: checkpoint_name(x, BLOCK_INPUT), carry), layer)

        return jax.checkpoint(named, policy=keep, prevent_cse=False)
    # A scan already keeps forward and backward apart, so the barrier against CSE would only cost time.
    return jax.checkpoint(body, policy=keep, prevent_cse=False)


def _with_residuals(names: tuple[str, ...]) -> tuple[str, ...]:
    """Add what an attention kernel's backward pass needs where its output is named."""
    return (*names, KERNEL_RESIDUALS) if "attention_output" in names else names


def _scan_segments(body: ScanBody, carry: Tree, layers: Tree) -> tuple[Tree, Tree]:
    """Scan in segments that keep their inputs; while one is run again for its backward pass, its blocks keep theirs."""
    keep = jax.checkpoint_policies.nothing_saveable
    inner = jax.checkpoint(body, policy=keep, prevent_cse=False)

    def segment(carry: Tree, layers: Tree) -> tuple[Tree, Tree]:
        return jax.lax.scan(inner, carry, layers)

    segments = segment_layers(jax.tree.leaves(layers)[0].shape[0])
    outer = jax.checkpoint(segment, policy=keep, prevent_cse=False)
    full = segments.count * segments.length

    def split(x: jax.Array) -> jax.Array:
        return x[:full].reshape(segments.count, segments.length, *x.shape[1:])

    carry, outputs = jax.lax.scan(outer, carry, jax.tree.map(split, layers))
    outputs = jax.tree.map(lambda x: x.reshape(full, *x.shape[2:]), outputs)
    if segments.rest:
        # Its backward pass comes first, at once: only the head is between its two forward passes.
        last = jax.checkpoint(segment, policy=keep)
        carry, more = last(carry, jax.tree.map(lambda x: x[full:], layers))
        outputs = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), outputs, more)
    return carry, outputs


def _unrolled(body: ScanBody, carry: Tree, layers: Tree) -> tuple[Tree, Tree]:
    """Compute what `jax.lax.scan` does, without a loop in the program."""
    outputs = []
    leaves, structure = jax.tree.flatten(layers)
    # The gradient of a split is one concatenation; that of an index per block is a sum of arrays as large as the stack.
    parts = [jax.lax.split(leaf, (1,) * leaf.shape[0]) for leaf in leaves]
    for layer in zip(*parts, strict=True):
        carry, output = body(carry, structure.unflatten([jnp.squeeze(leaf, 0) for leaf in layer]))
        outputs.append(output)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)
