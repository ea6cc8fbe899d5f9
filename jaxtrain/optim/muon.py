"""Muon: momentum whose matrices are made orthogonal (Jordan et al. 2024), spread over every device of the mesh.

Orthogonalising needs whole matrices, while they are stored in shards. So each stack of matrices changes places: mesh
axes go to the dims that count matrices (layers, experts) as far as these divide, and the others to the long side of
the matrices, where the product of X with its transpose costs one sum over them. No device ever holds a whole stack.
`optax.contrib.muon` has the same iteration and no place for these constraints.

Shapes: B... dims that count matrices, M the short side, N the long side.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxtrain.optimizer_rules import Matrix
from jaxtrain.rules import Entry, entry_axes, entry_degree
from jaxtrain.sharding import Layout, current_layout, parameter_spec, path_name

# Jordan et al. 2024: an odd polynomial with the steepest slope at 0 that brings singular values to 0.7 to 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Root mean square of an update, about that of AdamW's, so that one learning rate serves both (Liu et al. 2025).
_UPDATE_RMS = 0.2


def orthogonalize(
    matrix_of: Callable[[str, tuple[int, ...]], Matrix | None], steps: int
) -> optax.GradientTransformation:
    """Each matrix U S V^T of the updates as 0.2 sqrt(max(M, N)) U V^T, approximately.

    Args:
        matrix_of: (path, shape) -> where the matrices of an update are; it has them in every leaf.
        steps: Newton-Schulz iterations.
    """

    def update(updates: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        def one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            name = path_name(path)
            matrix = matrix_of(name, leaf.shape)
            assert matrix is not None, name
            return _orthogonal(leaf, name, matrix, steps)

        return jax.tree_util.tree_map_with_path(one, updates), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)  # pyright: ignore[reportArgumentType]


def newton_schulz(x: jax.Array, steps: int, constrain: Callable[[jax.Array], jax.Array] = lambda x: x) -> jax.Array:
    """Nearly U V^T of each x [B..., M, N] = U S V^T, M <= N: singular values come out between 0.7 and 1.2."""
    a, b, c = _COEFFICIENTS

    def step(_: int, x: jax.Array) -> jax.Array:
        product = x @ jnp.matrix_transpose(x)
        return constrain(a * x + (b * product + c * (product @ product)) @ x)

    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
    # Gradients of a part that is not used are 0, and stay so.
    return jax.lax.fori_loop(0, steps, step, constrain(x / jnp.maximum(norm, jnp.finfo(x.dtype).tiny)))


def _orthogonal(leaf: jax.Array, path: str, matrix: Matrix, steps: int) -> jax.Array:
    """One parameter's update, orthogonal, of the same shape."""
    rows, columns = (math.prod(leaf.shape[d] for d in dims) for dims in (matrix.rows, matrix.columns))
    short, long = (matrix.rows, matrix.columns) if rows <= columns else (matrix.columns, matrix.rows)
    order = (*matrix.batch, *short, *long)
    counts = tuple(leaf.shape[d] for d in matrix.batch)
    turned = jnp.transpose(leaf, order)
    x = turned.reshape(*counts, min(rows, columns), max(rows, columns))
    layout = current_layout()

    def constrain(x: jax.Array) -> jax.Array:
        if layout is None or layout.mesh.size == 1:
            return x
        stored = parameter_spec(path, leaf.shape, layout)
        entries = spread([stored[d] for d in matrix.batch], x.shape, layout)
        return jax.lax.with_sharding_constraint(x, layout.named(PartitionSpec(*entries)))

    with jax.named_scope("newton_schulz"):
        x = newton_schulz(x, steps, constrain) * (_UPDATE_RMS * math.sqrt(max(rows, columns)))
    x = jnp.transpose(x.reshape(turned.shape), sorted(range(len(order)), key=lambda dim: order[dim]))
    if layout is None or layout.mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, layout.named(parameter_spec(path, leaf.shape, layout)))


def spread(stored: list[Entry], shape: tuple[int, ...], layout: Layout) -> list[Entry]:
    """Mesh axes of the dims of x [B..., M, N], all of them where they divide.

    Args:
        stored: mesh axes of B... as the parameter is stored; they stay.
        shape: of x.
        layout: of the step.
    """
    entries: list[Entry] = [*stored, None, None]
    used = {axis for entry in stored for axis in entry_axes(entry)}
    for axis, degree in layout.degrees.items():
        if degree == 1 or axis in used:
            continue
        for dim in (*range(len(stored)), len(shape) - 1):
            if shape[dim] % (degree * entry_degree(entries[dim], layout.degrees)) == 0:
                entries[dim] = (*entry_axes(entries[dim]), axis)
                break
    return entries
