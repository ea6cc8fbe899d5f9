"""Gradients that are scattered over `data` layer by layer, in code that handles that axis itself (ZeRO-2).

There a parameter is replicated. What is differentiated is not the parameter but an array of the shape of a device's
part, which is attached to the parameter where it is used: there the backward pass sums the gradient over `data`, and
keeps the part. So only one layer at a time has a whole gradient.
"""

import contextlib
import contextvars
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.layout.manual import after, needs_order
from jaxtrain.layout.rules import num_pieces
from jaxtrain.layout.sharding import Params, current_layout, during_trace, path_name


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scattered:
    """A stack [layers, ...], whose layers are attached inside its scan to `part`, float32, a shard of `dim` of it."""

    whole: jax.Array
    part: jax.Array
    dim: int = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Waiting:
    """A parameter at a path that is read after the stack only, and is attached there, by `attach_after`."""

    whole: jax.Array
    path: str = field(metadata={"static": True})


# What a sum is multiplied by before it is added: the two factors one after the other, float32 [].
Factors = tuple[jax.Array, jax.Array]


@dataclass
class Parts:
    """What is differentiated in place of the parameters of the step that is being traced, by path.

    Attributes:
        parts: (part, dim) of each; of a stack, its gradients are what is pulled back to them. A dim of None: what a
            device sums is not scattered before the last microbatch (ZeRO-1).
        sums: where the sum of a parameter outside the stack enters. Nothing reads it: what is pulled back through it
            begins as the sum so far, to which the backward pass adds, so that no part stands beside the sum.
        factors: enter with them, and are pulled back likewise.
        ends: where the sums that are attached leave, with the factors.
    """

    parts: Mapping[str, tuple[jax.Array, int | None]]
    sums: Mapping[str, jax.Array]
    factors: Factors
    ends: dict[str, tuple[jax.Array, Factors]] = field(default_factory=dict)


# Set by `use_parts` around a trace.
_parts: contextvars.ContextVar[Parts | None] = contextvars.ContextVar("jaxtrain_parts", default=None)


def use_parts(parts: Parts) -> contextlib.AbstractContextManager[None]:
    """Give `attach_parts` what is differentiated while a model is traced."""
    return during_trace(_parts, parts)


def has_parts() -> bool:
    parts = _parts.get()
    return parts is not None and bool(parts.parts)


def attach_parts(params: Params, *, skip: tuple[str, ...], later: Collection[str] = ()) -> Params:
    """The parameters attached to their parts, where `use_parts` gave any.

    Layers of sub-trees in `skip` are attached one at a time, by `attach_layers`; their arrays come as `Scattered`. The
    factors of an adapter, which are small and read before that, are attached at once, and so is a stack that is
    scattered over its layers. Paths in `later` come as `Waiting`, for `attach_after`.
    """
    given = _parts.get()
    if given is None:
        return params

    def attach(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array | Scattered | Waiting:
        name = path_name(path)
        if name not in given.parts:
            return leaf
        part, dim = given.parts[name]
        is_array = all(isinstance(key, jax.tree_util.DictKey) for key in path)
        if dim is not None and dim > 0 and is_array and any(name == one or name.startswith(f"{one}/") for one in skip):
            return Scattered(leaf, part, dim)
        if name in later:
            return Waiting(leaf, name)
        return _attach_sums([], {name: leaf})[1][name]

    return jax.tree_util.tree_map_with_path(attach, params)


def attach_layers(params: Params) -> Params:
    """One layer of each parameter, attached to its part where `attach_parts` left it to the scan."""

    def attach(leaf: jax.Array | Scattered) -> jax.Array:
        return _attach(leaf.whole, leaf.part, leaf.dim - 1) if isinstance(leaf, Scattered) else leaf

    return jax.tree.map(attach, params, is_leaf=lambda leaf: isinstance(leaf, Scattered))


def is_waiting(leaf: object) -> bool:
    return isinstance(leaf, Waiting)


def waiting_paths(params: Params) -> tuple[str, ...]:
    return tuple(leaf.path for leaf in jax.tree.leaves(params, is_leaf=is_waiting) if is_waiting(leaf))


def without_parts(params: Params) -> Params:
    """Parameters as arrays, for code that reads none of those that wait."""
    return jax.tree.map(lambda leaf: leaf.whole if is_waiting(leaf) else leaf, params, is_leaf=is_waiting)


def attach_after(carry: Any, params: Params) -> tuple[Any, Params]:
    """The carry that leaves a stack, and parameters of which those that wait are attached to their sums.

    The backward pass adds their gradients to the sums before that of the carry goes on to the stack: a compiler may do
    so last, and the gradient of an output layer would be whole while those of the layers are computed.
    """
    carried, structure = jax.tree.flatten(carry)
    # Python numbers stay what they are: a head may branch on them.
    arrays = [(index, leaf) for index, leaf in enumerate(carried) if isinstance(leaf, jax.Array)]
    floats = [index for index, leaf in arrays if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    waiting = {leaf.path: leaf.whole for leaf in jax.tree.leaves(params, is_leaf=is_waiting) if is_waiting(leaf)}
    left, attached = _attach_sums([carried[index] for index in floats], waiting)
    for index, leaf in zip(floats, left, strict=True):
        carried[index] = leaf
    params = jax.tree.map(lambda leaf: attached[leaf.path] if is_waiting(leaf) else leaf, params, is_leaf=is_waiting)
    return jax.tree.unflatten(structure, carried), params


def _attach_sums(carry: list[jax.Array], whole: dict[str, jax.Array]) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """Parameters whose gradients are added to their sums, before that of a carry goes on."""
    given = _parts.get()
    assert given is not None, "parameters wait for the parts of the step that is being traced"
    dims = {name: given.parts[name][1] for name in whole}
    # Where a model is applied twice, the second sum goes on from the first.
    starts = {name: given.ends.get(name, (given.sums[name], given.factors)) for name in whole}
    ordered = needs_order(current_layout())

    @jax.custom_vjp
    def attach(carry: list[jax.Array], whole: dict[str, jax.Array], starts: dict[str, Any]) -> Any:
        return carry, whole, starts

    def forward(*arguments: Any) -> tuple[Any, None]:
        return jax.tree.map(lambda leaf: leaf.value, arguments), None

    def backward(_: None, pulled: Any) -> tuple[Any, Any, Any]:
        carry, gradients, ends = pulled
        sums = {
            name: total if _is_zero(gradients[name]) else _add_part(gradients[name], dims[name], total, factors)
            for name, (total, factors) in ends.items()
        }
        carry = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if _is_zero(leaf) else leaf, carry)
        if carry:
            carry, sums = jax.lax.optimization_barrier((carry, sums))
            for total in sums.values() if ordered else ():
                carry = after(carry, total)
        added = {name: (sums[name], factors) for name, (_, factors) in ends.items()}
        return carry, None, added

    attach.defvjp(forward, backward, symbolic_zeros=True)
    carry, whole, ends = attach(carry, whole, starts)
    given.ends.update(ends)
    return carry, whole


def _attach(whole: jax.Array, part: jax.Array, dim: int) -> jax.Array:
    """`whole`, whose gradient goes to `part`: summed over `data` in float32 and scattered over a dim."""

    @jax.custom_vjp
    def attach(whole: jax.Array, part: jax.Array) -> jax.Array:
        return whole

    def forward(whole: jax.Array, part: jax.Array) -> tuple[jax.Array, None]:
        return whole, None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros_like(gradient), sum_and_scatter(gradient, part.dtype, dim)

    attach.defvjp(forward, backward)
    return attach(whole, part)


def _is_zero(gradient: Any) -> bool:
    """Whether jax knows that a gradient is zeros."""
    return isinstance(gradient, jax.custom_derivatives.SymbolicZero)


def sum_and_scatter(gradient: jax.Array, dtype: Any, dim: int | None) -> jax.Array:
    """Sum a gradient over `data` in another dtype, and keep a device's part of a dim; None: only change the dtype."""
    if dim is None:
        return gradient.astype(dtype)
    return jax.lax.psum_scatter(gradient.astype(dtype), "data", scatter_dimension=dim, tiled=True)


def _add_part(gradient: jax.Array, dim: int | None, total: jax.Array, factors: Factors) -> jax.Array:
    """Add a device's part of a gradient, summed over `data` and times the factors, to a sum.

    Of a large gradient (an embedding's) a piece at a time, so that a copy of it in float32 is never whole.
    """
    return _in_pieces(gradient, dim, total, lambda total, part: total + part * factors[0] * factors[1])


def scatter_in_pieces(total: jax.Array, dim: int) -> jax.Array:
    """Sum an array over `data` and keep a device's part of a dim, a piece at a time.

    Beside a large sum its pieces alone stand: libtpu makes a reduce-scatter an all-reduce into another array.
    """
    shape = list(total.shape)
    shape[dim] //= jax.lax.axis_size("data")
    return _in_pieces(total, dim, jnp.zeros(shape, total.dtype), lambda _, part: part)


def _in_pieces(
    whole: jax.Array, dim: int | None, into: jax.Array, put: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """`put` (what stands in `into`, a device's part of a piece summed over `data`) in the place of each piece."""
    split, count = (0, 1) if dim is None else _pieces(whole, dim)
    if count == 1:
        return put(into, sum_and_scatter(whole, into.dtype, dim))
    width = whole.shape[split] // count

    def one(into: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        piece = jax.lax.dynamic_slice_in_dim(whole, start, width, axis=split)
        before = jax.lax.dynamic_slice_in_dim(into, start, width, axis=split)
        after = put(before, sum_and_scatter(piece, into.dtype, dim))
        return jax.lax.dynamic_update_slice_in_dim(into, after, start, axis=split), None

    return jax.lax.scan(one, into, jnp.arange(count) * width)[0]


def _pieces(gradient: jax.Array, dim: int) -> tuple[int, int]:
    """The dim over which a gradient is taken in pieces, and their number; 1 where it is scattered at once."""
    layout = current_layout()
    # Pieces of what is sharded over another axis would be gathered over it.
    if layout is None or layout.mesh.size > layout.mesh.shape["data"]:
        return dim, 1
    others = [(size, other) for other, size in enumerate(gradient.shape) if other != dim]
    size, split = max(others, default=(1, dim))
    return split, num_pieces(gradient.size, size)


# --- The stack: sums to which the backward pass of each layer adds in place. ---

# Path of a stacked parameter -> its sum, float32 [layers, ...]; and a number that gradients are multiplied by first.
Sums = tuple[dict[str, jax.Array], jax.Array]
# (path, gradient of one layer of this parameter on this device) -> what of it is added to the sum.
KeepPart = Callable[[str, jax.Array], jax.Array]


@dataclass
class StackSums:
    """The sums of the stack, at a path, of the model that is being traced.

    Attributes:
        begin, end: what enters the scan over its layers, of which the values are never read, and what left it.
        keep_part: see `KeepPart`.
        entered: whether a scan has taken them. A second one over a stack of this path is another model's (a teacher).
    """

    stack: str
    begin: Sums
    keep_part: KeepPart
    entered: bool = False
    end: Sums | None = None


# Of the step that is being traced. Set by `use_stack_sums` around a trace.
_sums: contextvars.ContextVar[StackSums | None] = contextvars.ContextVar("jaxtrain_stack_sums", default=None)


def use_stack_sums(sums: StackSums) -> contextlib.AbstractContextManager[None]:
    """Let the scan over a stack pass these sums through, in a trace of a model that runs its stack once."""
    return during_trace(_sums, sums)


def hide_stack_sums() -> contextlib.AbstractContextManager[None]:
    """Keep the sums from a stack of the same path that is run before the model's own, as by a teacher in `embed`."""
    return during_trace(_sums, None)


def enter_stack(path: str) -> Sums | None:
    """What passes through the scan over the stack at a path besides its own carry; None: nothing does."""
    sums = _sums.get()
    if sums is None or sums.stack != path or sums.entered:
        return None
    sums.entered = True
    return sums.begin


def leave_stack(passed: Sums | None) -> None:
    """Give back what has passed through the scan."""
    sums = _sums.get()
    if passed is not None:
        assert sums is not None, "what passes through a stack comes from enter_stack"
        sums.end = passed


def attach_sums(
    layer: Params, passing: Sums | None, index: jax.Array, first_layer: jax.Array | int
) -> tuple[Params, Sums | None]:
    """The parameters of one layer, whose gradients are added to the sums in the backward pass, and what passes on.

    `passing` is from the layer before; None: the gradients go to the parameters. `index` (int32 []) is that of the
    layer in the model, `first_layer` that of the layer that the sums begin with.
    """
    sums = _sums.get()
    if passing is None:
        return layer, None
    assert sums is not None, "what passes through a stack comes from enter_stack"
    leaves, structure = jax.tree_util.tree_flatten_with_path(layer)
    names = [f"{sums.stack}/{path_name(path)}" for path, _ in leaves]
    found, passing = _attach_stack([leaf for _, leaf in leaves], passing, index - first_layer, names, sums.keep_part)
    return jax.tree.unflatten(structure, found), passing


def _attach_stack(
    layer: list[jax.Array], passing: Sums, index: jax.Array, names: list[str], keep_part: KeepPart
) -> tuple[list[jax.Array], Sums]:
    @jax.custom_vjp
    def attach(layer: list[jax.Array], passing: Sums, index: jax.Array) -> tuple[list[jax.Array], Sums]:
        return layer, passing

    def forward(
        layer: list[jax.Array], passing: Sums, index: jax.Array
    ) -> tuple[tuple[list[jax.Array], Sums], jax.Array]:
        return (layer, passing), index

    def backward(index: jax.Array, pulled: tuple[list[jax.Array], Sums]) -> tuple[list[jax.Array], Sums, None]:
        gradients, (totals, factor) = pulled
        added = dict(totals)
        for name, gradient in zip(names, gradients, strict=True):
            if name in totals:
                part = keep_part(name, gradient.astype(totals[name].dtype))
                total = jax.lax.dynamic_index_in_dim(totals[name], index, keepdims=False)
                added[name] = jax.lax.dynamic_update_index_in_dim(totals[name], total + part * factor, index, 0)
        # Those that have a sum are not differentiated; of the others the gradient goes on.
        rest = [jnp.zeros_like(g) if name in totals else g for name, g in zip(names, gradients, strict=True)]
        return rest, (added, factor), None

    attach.defvjp(forward, backward)
    return attach(layer, passing, index)
