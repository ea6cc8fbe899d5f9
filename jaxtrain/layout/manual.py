"""Code that schedules its own communication, inside a step whose other axes the compiler handles.

On emulated devices one exchange comes after the other there (`needs_order`, `after`, `turn_of`): XLA's CPU backend runs
operations that do not depend on one another at the same time, among them a loop beside what follows it, and tells
exchanges between the same devices apart by a number that is the same for all that `jax.lax` writes in a manual region.
Two at a time may then meet one another's partners: the process ends (jax 0.10.2), or numbers of one are taken for those
of the other. GPUs and TPUs run the exchanges of a program in its order. An `optimization_barrier` orders nothing here:
it leaves no operation that waits.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.layout.sharding import Layout, current_layout, logical_spec, use_layout

Specs = Any


def run_manually(
    function: Callable[..., Any],
    layout: Layout,
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...] = (),
    *,
    in_specs: tuple[Specs, ...],
    out_specs: Specs,
    check_vma: bool = True,
) -> Any:
    """`function(*arguments, *constants)` on the local shards of every mesh axis, differentiable in `arguments`.

    Inside another manual region (a pipeline stage, accumulation over `data`) only the remaining axes are entered, and
    the backward pass computes the forward again: `jax.shard_map` cannot be differentiated inside `jax.shard_map`
    (jax 0.10.2 to 0.12.0: its residuals name an axis that the outer one holds already).

    Args:
        function: of local shards, with collectives over any axis that no enclosing region holds and branches on.
        layout: of the code that calls this.
        arguments, constants: trees of float arrays that gradients flow to, and of arrays without gradients.
        in_specs, out_specs: a `PartitionSpec` (or tree) for each of both, without axes of `layout.manual`.
        check_vma: let jax follow over which axes values vary. Without it every axis of more than one device must be in
            every spec, or gradients of what is replicated over it miss a sum.
    """
    forward = _enter(function, layout, in_specs, out_specs, check_vma=check_vma)
    if not layout.manual:
        return forward(*arguments, *constants)

    @jax.custom_vjp
    def call(arguments: tuple[Any, ...], constants: tuple[Any, ...]) -> Any:
        return forward(*arguments, *constants)

    def call_forward(arguments: tuple[Any, ...], constants: tuple[Any, ...]) -> tuple[Any, Any]:
        return _opaque(forward)(*arguments, *constants), (arguments, constants)

    def call_backward(saved: tuple[Any, Any], gradient: Any) -> tuple[Any, None]:
        arguments, constants = saved

        def pull(arguments: Any, constants: Any, gradient: Any) -> Any:
            if not needs_order(current_layout()):
                return jax.vjp(lambda *args: function(*args, *constants), *arguments)[1](gradient)

            def again(*args: Any) -> Any:
                # What remat has computed again until now, perhaps this very function, comes first.
                args, given = after((args, constants), jax.tree.leaves(gradient)[0])
                return function(*args, *given)

            result, pull_back = jax.vjp(again, *arguments)
            return pull_back(after(gradient, jax.tree.leaves(result)[0]))

        count = len(arguments)
        specs = (in_specs[:count], in_specs[count:], out_specs)
        pulled = _enter(pull, layout, specs, in_specs[:count], check_vma=check_vma)
        return _opaque(pulled)(arguments, constants, gradient), None

    call.defvjp(call_forward, call_backward)
    return call(arguments, constants)


def on_shards(function: Callable[..., Any], layout: Layout, in_specs: Specs, out_specs: Specs) -> Callable[..., Any]:
    """The function on the local shards of every mesh axis that no enclosing region holds; not differentiable.

    For the two halves of a `jax.custom_vjp`, which run on shards one after the other without being differentiated.
    """
    # Unchecked: the check serves differentiation, and would ask for casts of every scan's first carry.
    entered = _enter(function, layout, in_specs, out_specs, check_vma=False)
    return _opaque(entered) if layout.manual else entered


def _enter(
    function: Callable[..., Any], layout: Layout, in_specs: Specs, out_specs: Specs, *, check_vma: bool
) -> Callable[..., Any]:
    """`jax.shard_map` over the axes that no enclosing region holds."""
    inside = dataclasses.replace(layout, manual=frozenset(layout.mesh.axis_names))

    def local(*args: Any) -> Any:
        with use_layout(inside):
            return function(*args)

    return jax.shard_map(
        local,
        mesh=jax.sharding.get_abstract_mesh() if layout.manual else layout.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=frozenset(layout.mesh.axis_names) - layout.manual,
        check_vma=check_vma,
    )


def _opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one operation that a scan cannot take loop constants out of.

    Those would leave a region inside another one with a spec that names the outer axes too, which does not lower
    (jax 0.10.2 to 0.12.0); a `custom_vmap` is the public wrapper that partial evaluation does not look into.
    """
    opaque = jax.custom_batching.custom_vmap(function)

    @opaque.def_vmap
    def _(*_: Any) -> Any:
        raise NotImplementedError("run_manually inside another manual region cannot be mapped over by jax.vmap")

    return opaque


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Let jax follow all arrays as varying over the mesh axes that any of them varies over.

    For the arguments of a `jax.custom_vjp` and of loops inside a manual region, so that gradients are summed over axes.
    """
    axes = frozenset[str]().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))
    return tuple(_vary(array, axes) for array in arrays)


def vary_like(array: jax.Array, other: jax.Array) -> jax.Array:
    """The array as varying over the mesh axes that the other one varies over, such as the first carry of a loop."""
    return _vary(array, jax.typeof(other).manual_axis_type.varying)


def manual_type(array: jax.Array) -> Any:
    """What jax knows of the manual mesh axes of an array, for the shape of a kernel's result like it."""
    return jax.typeof(array).manual_axis_type


def _vary(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - jax.typeof(array).manual_axis_type.varying))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def spec_of(layout: Layout, *names: str | None) -> PartitionSpec:
    """The spec of an activation's logical axes, for `in_specs` and `out_specs`."""
    return logical_spec(names, layout)


def divides(layout: Layout, x: Any, *names: str | None) -> bool:
    """Whether the dims of an activation divide by the mesh axes of their logical names."""
    degrees = [math.prod(layout.degree(axis) for axis in layout.rules[name]) if name else 1 for name in names]
    return all(size % degree == 0 for size, degree in zip(x.shape, degrees, strict=False))


def needs_order(layout: Layout | None) -> bool:
    """Whether exchanges of the code being traced, manual over all axes, have to wait for one another: on CPU."""
    if layout is None or not _is_cpu(layout):
        return False
    several = {axis for axis, degree in layout.mesh.shape.items() if degree > 1}
    return bool(several) and several <= layout.manual


def after(tree: Any, done: jax.Array) -> Any:
    """The tree with the same values, none of which (but keys) is there before `done`, an array of a device, is."""
    is_there = _turn(done) == 0

    def wait(leaf: jax.Array) -> jax.Array:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return leaf if is_key else jnp.where(is_there, leaf, jnp.zeros_like(leaf))

    return jax.tree.map(wait, tree)


def turn_of(done: jax.Array, layout: Layout | None) -> jax.Array | None:
    """On CPU devices 0, int32 [], which nobody knows before `done` (one number) is there; elsewhere None."""
    return _turn(done) if layout is not None and _is_cpu(layout) else None


def _turn(done: jax.Array) -> jax.Array:
    first = jax.lax.convert_element_type(done.reshape(-1)[0], jnp.float32)
    # Of 32 bits at most 32 are set.
    return (jax.lax.population_count(jax.lax.bitcast_convert_type(first, jnp.uint32)) >> 6).astype(jnp.int32)


def _is_cpu(layout: Layout) -> bool:
    return layout.mesh.devices.flat[0].platform == "cpu"
