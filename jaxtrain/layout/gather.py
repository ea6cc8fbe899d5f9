"""Parameters between the layouts of their uses: from the state to a step (`hold`), from a step to compute (`gather`).

Under ZeRO 1 and 2 the state stores trained parameters sharded over `data`. A step takes a copy in the compute dtype,
which is replicated over `data`, once, before its first microbatch; what the gradient of each layer becomes, as soon as
it is there, is sharded as the parameter is stored. Over `fsdp` (ZeRO-3) parameters are gathered one layer at a time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.layout.rules import counting_dims
from jaxtrain.layout.scatter import attach_after, attach_layers, is_waiting
from jaxtrain.layout.sharding import (
    Layout,
    Params,
    current_layout,
    layer_specs,
    parameter_specs,
    path_name,
    platform,
)


def hold_parameters(params: Params) -> Params:
    """Parameters, stored or cast, replicated over the mesh axes of ZeRO unless they are held already.

    Their gradients go back to the stored layout.
    """
    layout = current_layout()
    if layout is None or layout.holds or not _shards_state(layout):
        return params

    def hold(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        specs = parameter_specs(path_name(path), leaf.shape, layout)
        if specs.stored == specs.held or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        stored, held = layout.named(specs.stored), layout.named(specs.held)
        counting = counting_dims(path_name(path), leaf.shape, layout.axes, stack=layout.stack)
        if platform() == "gpu" and 0 in counting and specs.held[0] is None:
            stored, held = (layout.named(PartitionSpec(*spec[1:])) for spec in (specs.stored, specs.held))
            return _place(leaf, partial(_layer_by_layer, (stored, held)), (layout.named(specs.stored),))
        # As stored first, or the compiler gathers what the leaf was cast from: twice the bytes, and a copy in float32.
        return _place(leaf, partial(_constrain, (stored, held)), (stored,))

    return jax.tree_util.tree_map_with_path(hold, params)


def _layer_by_layer(shardings: tuple[NamedSharding, ...], x: jax.Array) -> jax.Array:
    """`_constrain` of each layer of a stack [layers, ...].

    Of a stack that is gathered over another dim than the outermost, the compiler for NVIDIA keeps two copies during the
    step, one of them transposed (seen with jax 0.10.2); layers it transposes one at a time.
    """
    return jax.lax.map(partial(_constrain, shardings), x)


def gather_parameters(
    params: Params, *, prefix: str = "", num_layers: int | None = None, skip: tuple[str, ...] = ()
) -> Params:
    """Parameters (as held) replicated over `fsdp`; their gradients go back to the stored layout.

    Called inside a scanned block it gathers one layer at a time, in the forward and again in the backward pass.

    Args:
        params: as `hold_parameters` gives them.
        prefix: path of the tree inside the model ("blocks").
        num_layers: given when the leaves are one layer of parameters stored with a leading dim of this size.
        skip: sub-trees ("blocks", "teacher/blocks") that are left as stored (they are gathered inside their own scans).
    """
    if num_layers is not None:
        params = attach_layers(params)
    layout = current_layout()
    if layout is None or (layout.mesh.shape["fsdp"] == 1 and not _shards_state(layout)):
        return params

    def gather(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        name = path_name(path)
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # the same on every device
        if is_key or any(name == one or name.startswith(f"{one}/") for one in skip):
            return leaf
        full = f"{prefix}/{name}" if prefix else name
        if num_layers is None:
            specs = parameter_specs(full, leaf.shape, layout)
        else:
            specs = layer_specs(full, leaf.shape, layout, num_layers=num_layers)
        if layout.mesh.shape["fsdp"] == 1 and specs.stored == specs.held:
            return leaf
        stored, held, gathered = (layout.named(spec) for spec in (specs.stored, specs.held, specs.gathered))
        # Some gradients are summed first and sliced then (a reduce-scatter in the end). That of an embedding is a
        # scatter, which the partitioner cannot shard as it is stored without gathering what it scatters; that of a
        # norm's scale or a router, which no other axis shards, it would shard over `tensor` and then permute to `fsdp`,
        # which a pipeline stage must not do.
        sum_first = num_layers is None or not any(specs.gathered)
        # As held first, or the compiler gathers what the leaf was cast from: twice the bytes, and a copy in float32.
        forward = () if layout.mesh.shape["fsdp"] == 1 else (held, gathered)
        return _place(leaf, partial(_constrain, forward), (gathered, stored) if sum_first else (stored,))

    return jax.tree_util.tree_map_with_path(gather, params)


def gather_after(carry: Any, params: Params) -> tuple[Any, Params]:
    """The carry that leaves a stack, and the parameters that wait for `attach_after`, gathered for what follows."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_waiting)
    gathered = tuple(path_name(path) for path, leaf in leaves if not is_waiting(leaf))
    if len(gathered) == len(leaves):
        return carry, params
    carry, params = attach_after(carry, params)
    return carry, gather_parameters(params, skip=gathered)


def constrain_parameters(tree: Params) -> Params:
    """Parameters, or their gradients, sharded as `gather_parameters` gives them: replicated over `fsdp`."""
    layout = current_layout()
    if layout is None or layout.mesh.size == 1:
        return tree

    def constrain_one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        spec = parameter_specs(path_name(path), leaf.shape, layout).gathered
        return jax.lax.with_sharding_constraint(leaf, layout.named(spec))

    return jax.tree_util.tree_map_with_path(constrain_one, tree)


def _shards_state(layout: Layout) -> bool:
    """Whether ZeRO shards parameters over an axis that the compiler handles."""
    return any(layout.degree(axis) > 1 for axis in layout.state_axes)


def _constrain(shardings: tuple[NamedSharding, ...], x: jax.Array) -> jax.Array:
    """Constrain an array to one sharding after the other."""
    for sharding in shardings:
        x = jax.lax.with_sharding_constraint(x, sharding)
    return x


def _place(x: jax.Array, place: Callable[[jax.Array], jax.Array], backward: tuple[NamedSharding, ...]) -> jax.Array:
    """Place an array in the forward pass, and constrain its gradient to other shardings in the backward pass."""
    placed = jax.custom_vjp(place)

    # `place` and not `placed`, so that a gradient can be differentiated forward.
    def run_forward(x: jax.Array) -> tuple[jax.Array, None]:
        return place(x), None

    def run_backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (_constrain(backward, gradient),)

    placed.defvjp(run_forward, run_backward)
    return placed(x)
