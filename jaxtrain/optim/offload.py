"""Optimizer state in the host's memory: brought to the device slice by slice for the update, and back.

An update that treats every number on its own (AdamW, Lion, momentum) is the same for an array and for its slices, so
large arrays pass in a loop over slices of their first dim, in place, and only a few slices are on the device at once.
Without this loop, compilers copy the whole state to the device before they update any of it (seen with libtpu 0.0.51
and with XLA's GPU compiler of jax 0.10.2). Only an update that is declared elementwise (`jt.elementwise`) runs in
slices; for any other (Adafactor's sums over rows, norms, unknown ones) whole arrays are copied.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.layout.sharding import (
    Layout,
    optimizer_shardings,
    parameter_shardings,
    platform,
    possible_owners,
)
from jaxtrain.optim import rules
from jaxtrain.optim.rules import num_slices
from jaxtrain.optim.wrappers import ElementwiseTransformation
from jaxtrain.runtime.compiler import note_choice
from jaxtrain.runtime.tree import merge_leaves, path_name, paths_of

HOST_MEMORY = "pinned_host"

_Space = jax.memory.Space
# A nested structure of arrays with None in some places. Its structure is the model's, so that no type describes it.
Tree = Any
# (gradients, optimizer state, parameters, scalars) -> (parameters, optimizer state)
Advance = Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree]]


def lives_on_host(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether an array or number of an offloaded optimizer state is kept on the host: numbers stay on the device."""
    return leaf.ndim > 0


def owners(optimizer_state: Tree, params: Tree) -> dict[str, str]:
    """Path in an optimizer state -> the parameter that its array mirrors: one whose path ends its own, of its shape."""
    shapes = {path: leaf.shape for path, leaf in paths_of(params).items()}
    possible, found = possible_owners(optimizer_state, params), {}
    for path, leaf in paths_of(optimizer_state).items():
        fitting = [owner for owner in possible[path] if shapes[owner] == leaf.shape]
        found |= {path: fitting[0]} if fitting else {}
    return found


def why_not_in_slices(optimizer: optax.GradientTransformation, optimizer_state: Tree, params: Tree) -> str | None:
    """Why the arrays (or shapes) of an optimizer state may not be updated slice by slice, or None where they may."""
    if not isinstance(optimizer, ElementwiseTransformation):
        return "its update is not declared elementwise"
    mirrored = owners(optimizer_state, params)
    alone = (path for path, leaf in paths_of(optimizer_state).items() if leaf.ndim and path not in mirrored)
    return next((f"{path} of its state has no parameter's path and shape" for path in alone), None)


def update_on_host(
    advance: Advance,
    gradients: Tree,
    optimizer_state: Tree,
    params: Tree,
    scalars: Tree,
    *,
    optimizer: optax.GradientTransformation,
    layout: Layout,
) -> tuple[Tree, Tree]:
    """Run `advance`; the arrays of the optimizer state are in host memory before and after.

    Args:
        advance: the update by `optimizer`. If that is elementwise, it is called several times, each time on a part.
        gradients, params: of the trainable parameters, on the device, sharded as the optimizer state is.
        optimizer_state: arrays on the host, scalars on the device.
        scalars: a tree of scalars that `advance` also reads.
        optimizer, layout: of the step.
    """
    on_cpu = [("a saving", "on CPU the host's memory is the device's")] if platform() == "cpu" else []
    why = why_not_in_slices(optimizer, optimizer_state, params)
    if why is not None:
        note_choice("optimizer state", "on the host, updated on the device as whole arrays", [("slices", why), *on_cpu])
        params, state = advance(gradients, _to_device(optimizer_state), params, scalars)
        return params, to_host(state)

    note_choice("optimizer state", "on the host, updated on the device in slices", on_cpu)
    if layout.mesh.size == 1:
        return _stream(advance, gradients, optimizer_state, params, scalars)
    specs = jax.tree.map(lambda one: one.spec, parameter_shardings(params, layout))
    state_specs = jax.tree.map(lambda one: one.spec, optimizer_shardings(optimizer_state, params, layout))
    replicated = jax.tree.map(lambda _: PartitionSpec(), scalars)
    # Nothing crosses devices: each updates what it holds. Unchecked, because the loops' carries differ by device.
    return jax.shard_map(
        partial(_stream, advance),
        mesh=layout.mesh,
        in_specs=(specs, state_specs, specs, replicated),
        out_specs=(specs, state_specs),
        check_vma=False,
    )(gradients, optimizer_state, params, scalars)


def _stream(advance: Advance, gradients: Tree, optimizer_state: Tree, params: Tree, scalars: Tree) -> tuple[Tree, Tree]:
    """Run an elementwise update group by group and slice by slice; everything is local to a device."""
    mirrored = owners(optimizer_state, params)
    paths = paths_of(params)
    own = {name: name for name in paths}

    # Scalars (counts) advance by themselves, once.
    nothing = _select(params, own, set())
    old_counts = jax.tree_util.tree_map_with_path(
        lambda path, leaf: None if path_name(path) in mirrored else leaf, optimizer_state
    )
    _, counts = advance(nothing, old_counts, nothing, scalars)
    new_params, new_state, before = nothing, counts, None
    for group in _groups(paths):
        some = (
            _select(gradients, own, group),
            _select(optimizer_state, mirrored, group),
            _select(params, own, group),
        )
        # One group after the other: a compiler would fetch the state of all at once.
        some, _ = jax.lax.optimization_barrier((some, before))
        moved_params, moved_state = _advance_group(advance, *some, old_counts, scalars)
        before = moved_params
        new_params = merge_leaves(new_params, moved_params)
        new_state = merge_leaves(new_state, moved_state)
    return new_params, new_state


def _select(tree: Tree, owner: dict[str, str], chosen: set[str]) -> Tree:
    """A tree with None for every array that belongs to no chosen parameter; `owner`: path in the tree -> parameter."""

    def one(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array | None:
        return leaf if owner.get(path_name(path)) in chosen else None

    return jax.tree_util.tree_map_with_path(one, tree)


def _groups(leaves: dict[str, jax.Array]) -> list[set[str]]:
    """Paths that are updated together: large arrays alone, small ones up to the size of a slice."""
    large = [path for path, leaf in leaves.items() if 4 * leaf.size > rules.SLICE_BYTES]
    groups: list[set[str]] = []
    room = 0
    for path, leaf in leaves.items():
        if path in large:
            continue
        if 4 * leaf.size > room:
            groups.append(set())
            room = rules.SLICE_BYTES
        groups[-1].add(path)
        room -= 4 * leaf.size
    return [*({path} for path in large), *groups]


def _advance_group(
    advance: Advance, gradients: Tree, state: Tree, params: Tree, counts: Tree, scalars: Tree
) -> tuple[Tree, Tree]:
    """Advance the arrays of one group (the others are None) in a loop over slices, in place."""
    leaves = jax.tree.leaves(params)
    count = num_slices(leaves[0].shape) if len(leaves) == 1 else 1

    def body(number: jax.Array, carry: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        params, state = carry
        part = [jax.tree.map(lambda x: _slice(x, number, count), tree) for tree in (gradients, state, params)]
        moved, new = advance(part[0], merge_leaves(counts, _to_device(part[1])), part[2], scalars)
        # The counts are advanced elsewhere.
        new = to_host(
            jax.tree.map(lambda old, x: None if old is None else x, state, new, is_leaf=lambda leaf: leaf is None)
        )
        return (
            jax.tree.map(lambda array, x: _put(array, x, number, count), params, moved),
            jax.tree.map(lambda array, x: _put(array, x, number, count), state, new),
        )

    return jax.lax.fori_loop(0, count, body, (params, to_host(state)))


def _slice(x: jax.Array, number: jax.Array, count: int) -> jax.Array:
    if count == 1:
        return x
    return jax.lax.dynamic_slice_in_dim(x, number * (x.shape[0] // count), x.shape[0] // count)


def _put(array: jax.Array, part: jax.Array, number: jax.Array, count: int) -> jax.Array:
    if count == 1:
        return part
    return jax.lax.dynamic_update_slice_in_dim(array, part, number * (array.shape[0] // count), 0)


def _to_device(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.device_put(x, _Space.Device) if lives_on_host(x) else x, tree)


def to_host(tree: Tree) -> Tree:
    """Move the arrays of an optimizer state, while it is traced, to the host's memory; scalars stay."""

    def one(x: jax.Array) -> jax.Array:
        stays = not lives_on_host(x) or jax.typeof(x).memory_space == _Space.Host
        return x if stays else jax.device_put(x, _Space.Host)

    return jax.tree.map(one, tree)


def on_host(shardings: Tree, shapes: Tree) -> Tree:
    """The shardings of an optimizer state (of these shapes), those of arrays with the host's kind of memory."""

    def one(sharding: NamedSharding, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        return sharding.with_memory_kind(HOST_MEMORY) if lives_on_host(leaf) else sharding

    return jax.tree.map(one, shardings, shapes)
