"""Parameters and meshes in words and tables, as notebooks and `repr` show them."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxtrain.layout.rules import entry_axes
from jaxtrain.layout.sharding import Layout, path_name
from jaxtrain.runtime.card import table


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


def parameters_table(params: Any, *, layout: Layout | None = None, axes: Mapping[str, Any] | None = None) -> str:
    """An HTML table of parameters: path, shape, dtype, and where each is sharded, or the names of its dimensions.

    Args:
        params: a tree of arrays or shapes.
        layout: with the specs of these parameters; None: the names are shown.
        axes: see `Model.axes`.
    """
    rows = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path_name(path)
        names = ", ".join(one or "-" for one in (axes or {}).get(name, ()))
        last = names if layout is None else _spec(layout, name)
        rows.append((name, list(leaf.shape), leaf.dtype, last))
    return table(("parameter", "shape", "dtype", "dimensions" if layout is None else "sharded over"), rows)


def _spec(layout: Layout, name: str) -> str:
    specs = layout.parameters.get(name)
    if specs is None:
        return ""
    if not any(specs.stored):
        return "replicated"
    return ", ".join("-" if entry is None else " x ".join(entry_axes(entry)) for entry in specs.stored)
