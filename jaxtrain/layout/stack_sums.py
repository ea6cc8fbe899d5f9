"""Sums of gradients over microbatches, to which the backward pass of a stack of layers adds in place.

The gradient of a scan is an array of all layers, which exists beside the sum that it is added to. Here the sums pass
through the scan over the layers instead, unread. What is pulled back through them begins as the sums so far, and the
backward pass of each layer adds its gradient to its part of them: they are the carry of that loop, which compilers
update in place. So there are the sums, and the gradient of one layer.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtrain.layout.sharding import Params, path_name

# Path of a stacked parameter -> its sum, float32 [layers, ...]; and a number that gradients are multiplied by first.
Sums = tuple[dict[str, jax.Array], jax.Array]
# (path, gradient of one layer of this parameter on this device) -> what of it is added to the sum.
KeepPart = Callable[[str, jax.Array], jax.Array]


@dataclass
class StackSums:
    """The sums of the stack of the model that is being traced.

    Attributes:
        stack: path of the stack.
        begin: what enters the scan over its layers; the values are never read.
        keep_part: see `KeepPart`.
        entered: whether a scan has taken them. A second one over a stack of this path is another model's, which the
            head or the loss calls (a teacher).
        end: what left the scan; None before.
    """

    stack: str
    begin: Sums
    keep_part: KeepPart
    entered: bool = False
    end: Sums | None = None


# Of the step that is being traced. Set by `use_stack_sums` around a trace.
_sums: contextvars.ContextVar[StackSums | None] = contextvars.ContextVar("jaxtrain_stack_sums", default=None)


@contextlib.contextmanager
def use_stack_sums(sums: StackSums) -> Iterator[None]:
    """Let the scan over a stack pass these sums through, in a trace of a model that runs its stack once."""
    token = _sums.set(sums)
    try:
        yield
    finally:
        _sums.reset(token)


@contextlib.contextmanager
def hide_stack_sums() -> Iterator[None]:
    """Keep the sums from a stack of the same path that is run before the model's own, as by a teacher in `embed`."""
    token = _sums.set(None)
    try:
        yield
    finally:
        _sums.reset(token)


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
    """The parameters of one layer, whose gradients are added to the sums in the backward pass.

    Args:
        layer: parameters without the leading layer dim.
        passing: from the layer before; None: the gradients go to the parameters.
        index: int32 [], of the layer in the model.
        first_layer: index of the layer that the sums begin with.

    Returns:
        The parameters, and what passes on to the next layer.
    """
    sums = _sums.get()
    if passing is None:
        return layer, None
    assert sums is not None, "what passes through a stack comes from enter_stack"
    leaves, structure = jax.tree_util.tree_flatten_with_path(layer)
    names = [f"{sums.stack}/{path_name(path)}" for path, _ in leaves]
    found, passing = _attach([leaf for _, leaf in leaves], passing, index - first_layer, names, sums.keep_part)
    return jax.tree.unflatten(structure, found), passing


def _attach(
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
