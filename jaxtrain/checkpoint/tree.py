"""Any pytree as one flat table {name: leaf}, so that files on disk depend on no Python class.

Stored names join the parts of a path by dots (`params.mlp.kernel`), as all checkpoints have them; people see the same
path as everywhere else (`params/mlp/kernel`), by `shown_name`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy

from jaxtrain.errors import CheckpointError
from jaxtrain.runtime.tree import part_name

Leaves = Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class FlatTree:
    """Leaves by stored name, in the order of the tree, and the structure that puts them back."""

    leaves: dict[str, Any]
    structure: Any

    def rebuild(self, leaves: Mapping[str, Any]) -> Any:
        """Return a tree of this structure with the given leaves."""
        import jax

        return jax.tree.unflatten(self.structure, [leaves[path] for path in self.leaves])


def flatten(tree: Any, *, prefix: str | None = None) -> FlatTree:
    """Name every leaf of a tree by its field names, dictionary keys and indices, joined by dots, after a prefix."""
    import jax

    entries, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves: dict[str, Any] = {}
    for keys, leaf in entries:
        path = ".".join(([prefix] if prefix else []) + [part_name(key) for key in keys])
        if path in leaves:
            raise CheckpointError(f"two arrays of the state have the path {shown_name(path)}: rename one of them")
        leaves[path] = leaf
    return FlatTree(leaves, structure)


def shown_name(stored: str) -> str:
    """A stored name as people see tree paths: `params/mlp/kernel`."""
    return stored.replace(".", "/")


def stored_name(shown: str) -> str:
    """A tree path as people write it (`params/mlp/kernel`, or with dots) as the name that it is stored under."""
    return shown.replace("/", ".")


def is_inside(stored: str, prefix: str | None) -> bool:
    """Whether a stored name is that of a leaf below a prefix; None: of any leaf."""
    return not prefix or stored == prefix or stored.startswith(f"{prefix}.")


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is a typed random key (`jax.random.key`) or its abstract form."""
    import jax
    import jax.numpy as jnp

    known = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    return known and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_implementations(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Return path -> name of the generator for each random key, which cannot be read from its numbers."""
    import jax

    return {name: str(jax.random.key_impl(leaf)) for name, leaf in leaves.items() if is_key(leaf)}


def native(array: Any) -> Any:
    """A NumPy array in this machine's byte order: Orbax writes other orders and cannot read them back."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def describe(leaf: Any, path: str) -> tuple[tuple[int, ...], str]:
    """Return the shape and the name of the dtype of a leaf, without its byte order; an error where it has none."""
    import jax

    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return tuple(leaf.shape), str(leaf.dtype)
    array = native(numpy.asarray(leaf))
    if not isinstance(leaf, numpy.ndarray | numpy.generic) and array.dtype.kind not in "biufc":
        raise CheckpointError(
            f"{shown_name(path)} of the state is a {type(leaf).__name__}: only arrays and numbers can be saved"
        )
    return array.shape, str(array.dtype)


def difference(saved: Leaves, wanted: Leaves) -> tuple[set[str], str]:
    """Compare the shapes and dtypes of a checkpoint ("there") and of a target ("here").

    Returns:
        The top-level parts in which leaves differ (`params`), empty where the tables are equal, and a phrase with the
        number of leaves that differ and the first two.
    """
    found: dict[str, str] = {}
    for path in [*wanted, *(path for path in saved if path not in wanted)]:
        if path not in saved:
            found[path] = f"{shown_name(path)} is not saved ({_text(wanted[path])} is wanted)"
        elif path not in wanted:
            found[path] = f"{shown_name(path)} is saved as {_text(saved[path])} and not wanted"
        elif (tuple(saved[path][0]), saved[path][1]) != (tuple(wanted[path][0]), wanted[path][1]):
            found[path] = f"{shown_name(path)} is saved as {_text(saved[path])}, {_text(wanted[path])} is wanted"
    total = len(set(saved) | set(wanted))
    phrase = f"{len(found)} of {total} arrays differ, first {'; '.join(list(found.values())[:2])}"
    return {path.partition(".")[0] for path in found}, phrase


def _text(entry: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = entry
    return f"{tuple(shape)} {dtype}"
