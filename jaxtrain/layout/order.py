"""One exchange between emulated devices after the other.

XLA's CPU backend runs operations that do not depend on one another at the same time, among them a loop beside what
follows it. Exchanges of one kind between the same devices are told apart by a number there, which is the same for all
that `jax.lax` writes in a manual region. Two at a time may then meet one another's partners: the process ends
("Id can't be larger than the number of participating threads", jax 0.10.2), or numbers of one are taken for those of
the other. GPUs and TPUs run the exchanges of a program in its order. An `optimization_barrier` orders nothing here: it
leaves no operation that waits.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.layout.sharding import Layout

Tree = Any


def needs_order(layout: Layout | None) -> bool:
    """Whether exchanges of the code being traced have to wait for one another: on several CPU devices.

    Args:
        layout: of that code, which is manual over every axis of several devices: elsewhere an array is of all devices,
            and looking at a number of it would be another exchange.
    """
    if layout is None or not _is_cpu(layout):
        return False
    several = {axis for axis, degree in layout.mesh.shape.items() if degree > 1}
    return bool(several) and several <= layout.manual


def after(tree: Tree, done: jax.Array) -> Tree:
    """The tree, none of which is there before `done` is.

    Args:
        tree: arrays; they come as they are, and vary over the mesh axes that `done` varies over too. Keys do not wait.
        done: array of a device, with at least one number.

    Returns:
        The same values.
    """
    is_there = _turn(done) == 0

    def wait(leaf: jax.Array) -> jax.Array:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return leaf if is_key else jnp.where(is_there, leaf, jnp.zeros_like(leaf))

    return jax.tree.map(wait, tree)


def turn_of(done: jax.Array, layout: Layout | None) -> jax.Array | None:
    """On CPU devices 0, int32 [], which nobody knows before `done` is there; elsewhere None.

    Args:
        done: one number: what it is there for may be an array of all devices.
        layout: of the code being traced.
    """
    return _turn(done) if layout is not None and _is_cpu(layout) else None


def _turn(done: jax.Array) -> jax.Array:
    first = jax.lax.convert_element_type(done.reshape(-1)[0], jnp.float32)
    # Of 32 bits at most 32 are set.
    return (jax.lax.population_count(jax.lax.bitcast_convert_type(first, jnp.uint32)) >> 6).astype(jnp.int32)


def _is_cpu(layout: Layout) -> bool:
    return layout.mesh.devices.flat[0].platform == "cpu"
