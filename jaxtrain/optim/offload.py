"""Optimizer state in the host's memory: brought to the device slice by slice for the update, and back.

An update that treats every number on its own (AdamW, Lion, momentum) is the same whether it sees an array whole or a
slice of it, so large arrays pass in a loop over slices of their first dim, in place, and only a few slices are on the
device at once. Without the loop compilers bring all of the state before they update any of it (seen of libtpu 0.0.51
and of XLA's GPU compiler of jax 0.10.2). Other updates (Adafactor's sums over rows, norms) must see whole arrays.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.layout.sharding import Layout, optimizer_shardings, parameter_shardings, path_name, platform
from jaxtrain.optim import update_slices
from jaxtrain.optim.update_slices import num_slices
from jaxtrain.runtime.choices import note_choice

HOST_MEMORY = "pinned_host"

_Space = jax.memory.Space
# (gradients, optimizer state, parameters, scalars) -> (parameters, optimizer state); trees with None in some places.
Advance = Callable[[Any, Any, Any, Any], tuple[Any, Any]]

_ELEMENTWISE = frozenset(
    {"abs", "add", "add_any", "and", "convert_element_type", "copy", "div", "eq", "erf", "exp", "floor", "ge", "gt"}
    | {"integer_pow", "is_finite", "le", "log", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow"}
    | {"round", "rsqrt", "select_n", "sign", "sqrt", "square", "stop_gradient", "sub", "tanh", "xor"}
)
_CALLS = ("pjit", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call")


def lives_on_host(leaf: Any) -> bool:
    """Whether a leaf of an offloaded optimizer state (a shape) is kept on the host: counts stay where they are."""
    return leaf.ndim > 0


def owners(optimizer_state: Any, params: Any) -> dict[str, str]:
    """Path of a leaf of optimizer state -> path of the parameter that it mirrors, for those that mirror one."""
    shapes = {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(optimizer_state):
        parts = path_name(path).split("/")
        for start in range(len(parts)):
            owner = "/".join(parts[start:])
            if shapes.get(owner) == leaf.shape:
                found[path_name(path)] = owner
                break
    return found


def is_elementwise(optimizer: optax.GradientTransformation, params: Any) -> bool:
    """Whether every number of an update depends on the same number of gradient, state and parameter only.

    Read off the traced update: arrays meet nothing but elementwise operations and scalars. An operation that is not
    known to be elementwise counts as not.

    Args:
        optimizer: gradients, state, parameters -> updates, state.
        params: shapes of the trainable parameters, None where one is frozen.
    """
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    gradients = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
    state = jax.eval_shape(optimizer.init, gradients)
    mirrored = owners(state, params)
    if any(leaf.ndim and path_name(path) not in mirrored for path, leaf in jax.tree_util.tree_leaves_with_path(state)):
        return False
    update = optax.with_extra_args_support(optimizer).update
    program = jax.make_jaxpr(lambda *trees: update(*trees[:3], value=trees[3]))(
        gradients, state, params, jnp.float32(0)
    )
    return _all_elementwise(program.jaxpr)


def _all_elementwise(jaxpr: Jaxpr) -> bool:
    for equation in jaxpr.eqns:
        inner = [value for value in equation.params.values() if isinstance(value, ClosedJaxpr)]
        if inner and equation.primitive.name in _CALLS:
            if not all(_all_elementwise(one.jaxpr) for one in inner):
                return False
            continue
        ranks = [_rank(variable.aval) for variable in (*equation.invars, *equation.outvars)]
        if not any(ranks) or equation.primitive.name in _ELEMENTWISE:
            continue
        # A scalar made an array of equal numbers.
        if equation.primitive.name == "broadcast_in_dim" and not any(ranks[: len(equation.invars)]):
            continue
        return False
    return True


def _rank(aval: Any) -> int:
    return aval.ndim if isinstance(aval, ShapedArray) else 1


def update_on_host(
    advance: Advance,
    gradients: Any,
    optimizer_state: Any,
    params: Any,
    scalars: Any,
    *,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    also: tuple[str, ...],
) -> tuple[Any, Any]:
    """`advance`, with the arrays of the optimizer state on the host before and after.

    Args:
        advance: the update by `optimizer`; where that is elementwise it is called on parts of the trees and on slices.
        gradients, params: of the trainable parameters, on the device, laid out as the optimizer state is.
        optimizer_state: arrays on the host, scalars on the device.
        scalars: a tree of scalars that `advance` reads besides.
        optimizer: tells whether slices may be advanced alone.
        layout: of the step.
        also: mesh axes that optimizer state is spread over besides its parameter's.

    Returns:
        Parameters on the device, and optimizer state as it came.
    """
    if all(leaf.ndim == 0 for leaf in jax.tree.leaves(optimizer_state)):
        note_choice("optimizer state", "on the device: it has counts alone", [])
        return advance(gradients, optimizer_state, params, scalars)
    on_cpu = [("a saving", "on CPU the host's memory is the device's")] if platform() == "cpu" else []
    if not is_elementwise(optimizer, params):
        note_choice(
            "optimizer state",
            "on the host, whole arrays pass by the device",
            [
                ("slices", "its update is not elementwise"),
                *on_cpu,
            ],
        )
        params, state = advance(gradients, _to_device(optimizer_state), params, scalars)
        return params, to_host(state)

    note_choice("optimizer state", "on the host, slices pass by the device", on_cpu)
    if layout.mesh.size == 1:
        return _stream(advance, gradients, optimizer_state, params, scalars)
    lies = jax.tree.map(lambda one: one.spec, parameter_shardings(params, layout, also=also))
    state_lies = jax.tree.map(lambda one: one.spec, optimizer_shardings(optimizer_state, params, layout, also=also))
    whole = jax.tree.map(lambda _: PartitionSpec(), scalars)
    # Nothing crosses devices: each updates what it holds. Unchecked, because the loops' carries differ by device.
    return jax.shard_map(
        partial(_stream, advance),
        mesh=layout.mesh,
        in_specs=(lies, state_lies, lies, whole),
        out_specs=(lies, state_lies),
        check_vma=False,
    )(gradients, optimizer_state, params, scalars)


def _stream(advance: Advance, gradients: Any, optimizer_state: Any, params: Any, scalars: Any) -> tuple[Any, Any]:
    """An elementwise update, group by group and slice by slice; everything is local to a device."""
    mirrored = owners(optimizer_state, params)
    paths = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def select(tree: Any, chosen: set[str], *, of_state: bool = False) -> Any:
        def one(path: tuple[Any, ...], leaf: Any) -> Any:
            name = path_name(path)
            return leaf if (mirrored.get(name) if of_state else name) in chosen else None

        return jax.tree_util.tree_map_with_path(one, tree)

    # Scalars (counts) advance by themselves, once.
    nothing = select(params, set())
    old_counts = jax.tree_util.tree_map_with_path(
        lambda path, leaf: None if path_name(path) in mirrored else leaf, optimizer_state
    )
    _, counts = advance(nothing, old_counts, nothing, scalars)
    new_params, new_state, before = nothing, counts, None
    for group in _groups(paths):
        some = (select(gradients, group), select(optimizer_state, group, of_state=True), select(params, group))
        # One group after the other: a compiler would fetch the state of all at once.
        some, _ = jax.lax.optimization_barrier((some, before))
        moved_params, moved_state = _advance_group(advance, *some, old_counts, scalars)
        before = moved_params
        new_params = _fill(new_params, moved_params)
        new_state = _fill(new_state, moved_state)
    return new_params, new_state


def _groups(leaves: dict[str, Any]) -> list[set[str]]:
    """Paths that are updated together: large arrays alone, small ones up to the size of a slice."""
    large = [path for path, leaf in leaves.items() if 4 * leaf.size > update_slices.SLICE_BYTES]
    groups: list[set[str]] = []
    room = 0
    for path, leaf in leaves.items():
        if path in large:
            continue
        if 4 * leaf.size > room:
            groups.append(set())
            room = update_slices.SLICE_BYTES
        groups[-1].add(path)
        room -= 4 * leaf.size
    return [*({path} for path in large), *groups]


def _advance_group(
    advance: Advance, gradients: Any, state: Any, params: Any, counts: Any, scalars: Any
) -> tuple[Any, Any]:
    leaves = jax.tree.leaves(params)
    count = num_slices(leaves[0].shape) if len(leaves) == 1 else 1

    def slice_of(x: jax.Array, index: jax.Array) -> jax.Array:
        if count == 1:
            return x
        return jax.lax.dynamic_slice_in_dim(x, index * (x.shape[0] // count), x.shape[0] // count)

    def put(whole: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
        if count == 1:
            return part
        return jax.lax.dynamic_update_slice_in_dim(whole, part, index * (whole.shape[0] // count), 0)

    def body(index: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        params, state = carry
        part = [jax.tree.map(lambda x: slice_of(x, index), tree) for tree in (gradients, state, params)]
        moved, new = advance(part[0], _fill(counts, _to_device(part[1])), part[2], scalars)
        # The counts are advanced elsewhere.
        new = to_host(jax.tree.map(lambda old, x: None if old is None else x, state, new, is_leaf=_is_none))
        return (
            jax.tree.map(lambda whole, x: put(whole, x, index), params, moved),
            jax.tree.map(lambda whole, x: put(whole, x, index), state, new),
        )

    return jax.lax.fori_loop(0, count, body, (params, to_host(state)))


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _fill(tree: Any, other: Any) -> Any:
    """The tree with `other`'s leaves where it has None."""
    return jax.tree.map(lambda a, b: b if a is None else a, tree, other, is_leaf=_is_none)


def _to_device(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, _Space.Device) if lives_on_host(x) else x, tree)


def to_host(tree: Any) -> Any:
    """The arrays of an optimizer state, while it is traced, in the host's memory."""

    def one(x: jax.Array) -> jax.Array:
        stays = not lives_on_host(x) or jax.typeof(x).memory_space == _Space.Host
        return x if stays else jax.device_put(x, _Space.Host)

    return jax.tree.map(one, tree)


def on_host(shardings: Any, shapes: Any) -> Any:
    """Shardings of an optimizer state with its arrays in the host's memory."""

    def one(sharding: NamedSharding, leaf: Any) -> NamedSharding:
        return sharding.with_memory_kind(HOST_MEMORY) if lives_on_host(leaf) else sharding

    return jax.tree.map(one, shardings, shapes)
