"""Experts sharded over the mesh axis `expert`: tokens are sent to their experts and back.

Shapes: B batch, L sequence, N tokens of a device, D embed, F hidden width, E experts, K experts per token.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.layout.manual import run_manually, spec_of
from jaxtrain.layout.rules import Entry, entry_axes, entry_degree
from jaxtrain.layout.sharding import Layout, current_layout, sum_over_shards
from jaxtrain.ops.experts.compute import Kernels, count_tokens, grouped_experts
from jaxtrain.ops.experts.rounds import exchanged_experts


def expert_load(ids_BLK: jax.Array, num_experts: int, real_BL: jax.Array | None = None) -> jax.Array:
    """Compute the share of the routed slots that each expert got, over all devices.

    Args:
        ids_BLK: int32, experts of each token.
        num_experts: E.
        real_BL: bool, False for padding, which counts for no expert; None: there is none.

    Returns:
        float32 [E], replicated, with the sum 1 (0 where all is padding); no gradient flows through it.
    """
    if real_BL is not None:
        ids_BLK = jnp.where(real_BL[..., None], ids_BLK, num_experts)
    counts_E = sum_over_shards(count_tokens(ids_BLK, num_experts))
    total = jnp.sum(counts_E)
    total = total if real_BL is None else jnp.maximum(total, 1)
    load_E = counts_E.astype(jnp.float32) / total.astype(jnp.float32)
    return jax.lax.stop_gradient(load_E)


def experts_mlp(x_BLD: jax.Array, weights_BLK: jax.Array, ids_BLK: jax.Array, kernels: Kernels) -> jax.Array:
    """Sum weight times output over the experts of each token, on whichever device the experts are.

    No token is dropped: where tokens are sharded over `expert` they are exchanged in as many rounds as the routing
    needs (`rounds.py`), one where it is even.

    Args:
        x_BLD: tokens, sharded over "batch" and "sequence".
        weights_BLK: float32, differentiable, as from `route`.
        ids_BLK: int32, experts of each token, distinct.
        kernels: in the dtype of x; E is sharded over `expert`, F over `tensor`.

    Returns:
        [B, L, D] in the dtype of x, sharded as x.
    """
    layout = current_layout()
    if layout is None or all(layout.degree(axis) == 1 for axis in layout.mesh.axis_names):
        return _flat(x_BLD, weights_BLK, ids_BLK, kernels).astype(x_BLD.dtype)
    shards = layout.degree("expert")
    tokens = PartitionSpec(*_dividing(spec_of(layout, "batch", "sequence"), x_BLD.shape, layout), None)
    into, out_of = spec_of(layout, "experts", None, "mlp"), spec_of(layout, "experts", "mlp", None)
    kernel_specs = (into, None if kernels.gate is None else into, out_of)
    token_axes = {axis for entry in tokens for axis in entry_axes(entry)}
    summed = tuple(axis for axis in ("expert", "tensor") if layout.degree(axis) > 1 and axis not in token_axes)

    def local(
        x_BLD: jax.Array,
        weights_BLK: jax.Array,
        parts: tuple[jax.Array, jax.Array | None, jax.Array],
        ids_BLK: jax.Array,
        shard_1: jax.Array,
    ) -> jax.Array:
        kernels = Kernels(*parts)
        if "expert" in token_axes:
            y_BLD = _exchanged(x_BLD, weights_BLK, ids_BLK, kernels, shards)
        else:  # every shard of experts has these tokens
            y_BLD = _flat(x_BLD, weights_BLK, _local_ids(ids_BLK, shard_1[0], kernels), kernels)
        y_BLD = y_BLD.astype(x_BLD.dtype)
        return jax.lax.psum(y_BLD, summed) if summed else y_BLD

    return run_manually(
        local,
        layout,
        (x_BLD, weights_BLK, tuple(kernels)),
        (ids_BLK, jnp.arange(shards)),
        in_specs=(tokens, tokens, kernel_specs),
        constant_specs=(tokens, spec_of(layout, "experts")),
        out_specs=tokens,
    )


def _dividing(spec: PartitionSpec, shape: tuple[int, ...], layout: Layout) -> list[Entry]:
    """Replicate the dims that do not divide, as `constrain` does (a batch of one in sampling)."""
    return [entry if shape[d] % entry_degree(entry, layout.mesh.shape) == 0 else None for d, entry in enumerate(spec)]


def _flat(x_BLD: jax.Array, weights_BLK: jax.Array, ids_BLK: jax.Array, kernels: Kernels) -> jax.Array:
    """`grouped_experts` of local tokens: float32 [B, L, D]."""
    x_ND, weights_NK, ids_NK = (a.reshape(-1, a.shape[-1]) for a in (x_BLD, weights_BLK, ids_BLK))
    return grouped_experts(x_ND, weights_NK, ids_NK, kernels).reshape(x_BLD.shape)


def _local_ids(ids: jax.Array, shard: jax.Array | int, kernels: Kernels) -> jax.Array:
    """Ids as the given shard counts its experts; the number of its experts for one that is elsewhere."""
    num_local = kernels.up.shape[0]
    local = ids - shard * num_local
    return jnp.where((local >= 0) & (local < num_local), local, num_local)


def _exchanged(
    x_BLD: jax.Array, weights_BLK: jax.Array, ids_BLK: jax.Array, kernels: Kernels, shards: int
) -> jax.Array:
    """`exchanged_experts` of local tokens: float32 [B, L, D]."""
    x_ND, weights_NK, ids_NK = (a.reshape(-1, a.shape[-1]) for a in (x_BLD, weights_BLK, ids_BLK))
    return exchanged_experts(x_ND, weights_NK, ids_NK, kernels, shards).reshape(x_BLD.shape)
