"""Muon: momentum whose matrices are made orthogonal (Jordan et al. 2024), with the work sharded over the whole mesh.

To make a matrix orthogonal a device needs all of it, while matrices are stored in shards. Therefore the matrices of a
stack are resharded: each device gets some complete matrices, computes without communication, and the results are
resharded to where they are stored. Where the number of matrices does not divide by the devices, some devices get a
matrix of zeros. The matrices are resharded over one mesh axis after the other, because XLA's partitioner replicates the
stack on every device where two axes change at once (jaxlib 0.10.2); so no device ever holds all matrices of a stack.
`optax.contrib.muon` has the same iteration, but no place for these constraints.

Shapes: M the short side of a matrix, N the long side.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxtrain.layout.rules import Entry, entry_axes, entry_degree
from jaxtrain.layout.sharding import Layout, current_layout, parameter_specs, path_name
from jaxtrain.optim.rules import Matrix

# Jordan et al. 2024: an odd polynomial with the steepest slope at 0 that brings singular values to 0.7 to 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Root mean square of an update: about that of AdamW, so that one learning rate serves both (Liu et al. 2025).
_UPDATE_RMS = 0.2
# Added to the norm of a matrix; the value is optax.contrib.muon's.
_NORM_EPSILON = 1e-8


def orthogonalize(
    matrix_of: Callable[[str, tuple[int, ...]], Matrix | None], steps: int
) -> optax.GradientTransformation:
    """Make each matrix U S V^T of the updates orthogonal: approximately 0.2 sqrt(max(M, N)) U V^T.

    `matrix_of`: (path, shape) -> the dims of the matrices of an update, which every leaf must have.
    """

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        def one(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
            name = path_name(path)
            matrix = matrix_of(name, leaf.shape)
            assert matrix is not None, name
            return _orthogonal(leaf, name, matrix, steps)

        return jax.tree_util.tree_map_with_path(one, updates), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)  # pyright: ignore[reportArgumentType]


def newton_schulz(x: jax.Array, steps: int) -> jax.Array:
    """Approximately U V^T of each x = U S V^T, float32 [..., M, N], M <= N: singular values between 0.7 and 1.2."""
    a, b, c = _COEFFICIENTS

    def step(_: int, x: jax.Array) -> jax.Array:
        product = x @ jnp.matrix_transpose(x)
        return a * x + (b * product + c * (product @ product)) @ x

    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
    # Epsilon is added and not a lower bound, so that an update shrinks with its momentum where no gradients come any
    # more, and 0 stays 0.
    return jax.lax.fori_loop(0, steps, step, x / (norm + _NORM_EPSILON))


def _orthogonal(leaf: jax.Array, path: str, matrix: Matrix, steps: int) -> jax.Array:
    """Make the matrices of one parameter's update orthogonal; the shape stays the same."""
    rows, columns = (math.prod(leaf.shape[d] for d in dims) for dims in (matrix.rows, matrix.columns))
    sides = (matrix.rows, matrix.columns) if rows <= columns else (matrix.columns, matrix.rows)
    order = (*matrix.batch, *sides[0], *sides[1])
    layout = current_layout()

    def run(x: jax.Array) -> jax.Array:
        """Make x [..., dims of the short side, dims of the long side] orthogonal."""
        lead = x.shape[: x.ndim - len(sides[0]) - len(sides[1])]
        found = newton_schulz(x.reshape(*lead, min(rows, columns), max(rows, columns)), steps)
        return (found * (_UPDATE_RMS * math.sqrt(max(rows, columns)))).reshape(x.shape)

    with jax.named_scope("newton_schulz"):
        x = jnp.transpose(leaf, order)
        if layout is None or layout.mesh.size == 1 or not matrix.batch:
            x = run(x)  # a matrix alone stays sharded as it is; the compiler places the collectives
        else:
            stored = parameter_specs(path, leaf.shape, layout).optimizer_state
            x = _dealt(run, x, len(matrix.batch), [stored[d] for d in order], layout)
        return jnp.transpose(x, sorted(range(x.ndim), key=lambda dim: order[dim]))


def _dealt(
    run: Callable[[jax.Array], jax.Array], x: jax.Array, num_counts: int, stored: list[Entry], layout: Layout
) -> jax.Array:
    """Apply `run` to complete matrices of x [counts..., dims of a matrix...], each of which is on one device.

    `stored` are the mesh axes of every dim of x; those of the `num_counts` dims that count matrices stay there.
    """
    parts = [entry_degree(entry, layout.degrees) for entry in stored[:num_counts]]
    # [counts...] as [parts..., matrices of a part], then the matrices of a part over one axis after the other.
    split = [size for count, n in zip(x.shape, parts, strict=False) for size in (n, count // n)]
    dims, rest = range(len(split)), x.shape[num_counts:]
    front = (*dims[::2], *dims[1::2], *range(len(split), len(split) + len(rest)))
    turned = jnp.transpose(x.reshape(*split, *rest), front)
    flat = turned.reshape(*parts, -1, *rest)

    kept = {axis for entry in stored[:num_counts] for axis in entry_axes(entry)}
    free = [axis for axis, degree in layout.degrees.items() if degree > 1 and axis not in kept]
    count = flat.shape[num_counts]
    missing = -count % entry_degree(tuple(free), layout.degrees)
    flat = jnp.pad(flat, [(0, missing if dim == num_counts else 0) for dim in range(flat.ndim)])

    def constrain(flat: jax.Array, moved: list[str]) -> jax.Array:
        sides = [
            tuple(axis for axis in entry_axes(entry) if axis not in moved) or None for entry in stored[num_counts:]
        ]
        spec = PartitionSpec(*stored[:num_counts], tuple(moved) or None, *sides)
        return jax.lax.with_sharding_constraint(flat, layout.named(spec))

    # The first constraint is the stored sharding, because the partitioner would otherwise shard the momentum like the
    # work and then reshard it back.
    for number in range(len(free) + 1):
        flat = constrain(flat, free[:number])
    flat = run(flat)
    for number in reversed(range(len(free) + 1)):
        flat = constrain(flat, free[:number])
    flat = jax.lax.slice_in_dim(flat, 0, count, axis=num_counts)
    return jnp.transpose(flat.reshape(turned.shape), sorted(range(len(front)), key=lambda dim: front[dim])).reshape(
        x.shape
    )
