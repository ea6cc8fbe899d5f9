"""Leaves of a pytree: their names (`blocks/attention/query/kernel`), deleted arrays, integers that are too large."""

from typing import Any

from jaxtrain.errors import DataError


def path_name(path: tuple[Any, ...]) -> str:
    """A path of `jax.tree_util` as text: field names, dictionary keys and indices, joined by `/`."""
    import jax

    return jax.tree_util.keystr(path, simple=True, separator="/")


def paths_of(tree: Any) -> dict[str, Any]:
    """Path of each leaf -> the leaf."""
    import jax

    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def merge_leaves(chosen: Any, rest: Any) -> Any:
    """The tree whose leaves come from `chosen`, and from `rest` where `chosen` has None."""
    import jax

    return jax.tree.map(lambda a, b: b if a is None else a, chosen, rest, is_leaf=lambda leaf: leaf is None)


def part_name(key: Any) -> str:
    """One key of a path as the part of a stored name, which may itself hold `/` or dots."""
    from jax import tree_util as kinds

    name = path_name((key,))
    if isinstance(key, kinds.GetAttrKey | kinds.DictKey | kinds.FlattenedIndexKey | kinds.SequenceKey):
        return name
    return name.strip(".[]'\"")  # a key of another kind shows itself as it is written in Python


def first_deleted(tree: Any) -> str | None:
    """The path of the first array of a tree whose buffers were deleted, or None; takes 25 ns per array."""
    import jax

    if not any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(tree)):
        return None
    return next(
        path_name(path) or "the array"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(leaf, jax.Array) and leaf.is_deleted()
    )


def check_bits(leaf: Any, where: str) -> None:
    """Raise a `DataError` where integers of a NumPy array (`where`) do not fit into the type that jax holds them in."""
    import jax
    import numpy as np

    if not np.issubdtype(leaf.dtype, np.integer) or not leaf.size:
        return
    limits = np.iinfo(jax.dtypes.canonicalize_dtype(leaf.dtype))
    largest = max(int(leaf.max()), int(leaf.min()), key=abs)
    if not limits.min <= largest <= limits.max:
        raise DataError(f"{where} of {largest}, outside the range of {limits.dtype}; store them as float32")
