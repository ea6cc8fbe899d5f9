"""Which dimension of a model's outputs counts rows, found from shapes: with twice the rows it is twice as large."""

from collections.abc import Callable
from typing import Any

import jax

# Dimension of an output that counts rows; None: it has no rows; "mixed": several dimensions do, or in another way.
RowDim = int | None | str


def doubled(inputs: Any, rows: int) -> Any:
    """Shapes like these inputs (arrays or shapes), with twice the rows in every leaf that has them."""

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = leaf.shape
        twice = (2 * rows, *shape[1:]) if len(shape) and shape[0] == rows else shape
        return jax.ShapeDtypeStruct(twice, jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(one, inputs)


def row_dims(outputs: Callable[[Any], Any], inputs: Any, rows: int) -> tuple[list[RowDim], Any]:
    """Find the dimension that counts rows in each leaf of a model's outputs.

    Args:
        outputs: inputs -> outputs; traced, not run.
        inputs: arrays or shapes [rows, ...].
        rows: of the inputs.

    Returns:
        A dimension for each leaf, and the outputs as shapes.
    """
    once = jax.eval_shape(
        outputs, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), inputs)
    )
    twice = jax.eval_shape(outputs, doubled(inputs, rows))
    return [
        _row_dim(a.shape, b.shape) for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True)
    ], once


def _row_dim(once: tuple[int, ...], twice: tuple[int, ...]) -> RowDim:
    if once == twice:
        return None
    if len(once) != len(twice):
        return "mixed"
    changed = [dim for dim, (a, b) in enumerate(zip(once, twice, strict=True)) if a != b]
    return changed[0] if len(changed) == 1 and twice[changed[0]] == 2 * once[changed[0]] else "mixed"
