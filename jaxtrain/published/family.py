"""What a published family is: the record that each file of families/ ends with. No jax here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.published.entries import Row
from jaxtrain.published.keys import Key


@dataclass(frozen=True, kw_only=True)
class Family:
    """One published family: its keys, its names and what translates both.

    Attributes:
        name: The family's name; a file of families/ is called so.
        model_type: The `model_type` of its config.json.
        keys: Declarations of every key of its config.json.
        from_published: The object in a config.json -> keys of our model group, `kind` included. Every key whose
            default of ours is not what the family means must be there, because keys left out take our defaults.
            Raises ConfigError for a value that is not supported.
        to_published: Our model group, every key of it, with num_kv_heads, head_dim and mlp_dim filled in -> the keys
            of config.json that `from_published` reads, and "architectures". What it cannot say it need not check:
            the caller compares `from_published(to_published(model))` with the model and names the key that differs.
        tensors: Our model group, as for `to_published` -> the rows of the name table.
        sizes: Published sizes: name -> keys of our model group.
    """

    name: str
    model_type: str
    keys: tuple[Key, ...]
    from_published: Callable[[Mapping[str, Any]], dict[str, Any]]
    to_published: Callable[[Mapping[str, Any]], dict[str, Any]]
    tensors: Callable[[Mapping[str, Any]], tuple[Row, ...]]
    sizes: Mapping[str, Mapping[str, Any]]
