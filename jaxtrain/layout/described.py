"""Parameters and meshes in words and tables, as notebooks and `repr` show them."""

import math
from typing import Any

import jax
from jax.sharding import Mesh


def mesh_text(mesh: Mesh) -> str:
    """The axes of a mesh that have more than one device: `data=2 fsdp=4`, or `one device`."""
    return " ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one device"


def parameters_text(params: Any) -> str:
    """The number of parameters and of their arrays: `85,002 parameters in 6 arrays`.

    Args:
        params: a tree of arrays or shapes.
    """
    leaves = jax.tree.leaves(params)
    arrays = f"{len(leaves)} array{'' if len(leaves) == 1 else 's'}"
    return f"{sum(math.prod(leaf.shape) for leaf in leaves):,} parameters in {arrays}"
