"""Names of the leaves of a pytree, as people see them everywhere: `blocks/attention/query/kernel`."""

from typing import Any


def path_name(path: tuple[Any, ...]) -> str:
    """A path of `jax.tree_util` as text: field names, dictionary keys and indices, joined by `/`."""
    import jax

    return jax.tree_util.keystr(path, simple=True, separator="/")


def part_name(key: Any) -> str:
    """One key of a path as the part of a stored name, which may itself hold `/` or dots."""
    from jax import tree_util as kinds

    name = path_name((key,))
    if isinstance(key, kinds.GetAttrKey | kinds.DictKey | kinds.FlattenedIndexKey | kinds.SequenceKey):
        return name
    return name.strip(".[]'\"")  # a key of another kind shows itself as it is written in Python
