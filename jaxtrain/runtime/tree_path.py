"""Names of the leaves of a pytree, as people see them everywhere: `blocks/attention/query/kernel`."""

from typing import Any


def path_name(path: tuple[Any, ...]) -> str:
    """A path of `jax.tree_util` as text: field names, dictionary keys and indices, joined by `/`."""
    import jax

    return jax.tree_util.keystr(path, simple=True, separator="/")
