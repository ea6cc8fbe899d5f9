r"""The rows of a family's name table: which tensors of the file are which parameters of ours. No jax here.

`tensors(model)` of a family returns a tuple of

    Entry("embedding", "model.embed_tokens.weight", copy(V, D))
    Entry("blocks/mlp/up/kernel", "model.layers.{layer}.mlp.up_proj.weight", linear((D,), (F,)), stack=(L,))
    Entry("blocks/mlp/up/kernel", "...{layer}.experts.{expert}.w3.weight", linear((D,), (F,)), stack=(L, E))
    Tied("lm_head.weight", to="embedding", transform=copy(V, D))   absent when tied; equal to the embedding if present
    Skipped(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")   known and not read: it follows from the config
    Constant("...num_batches_tracked", 0, shape=(), dtype="int64")  not read; written as this

`stack` gives the sizes of the leading dimensions of our parameter, which are one tensor each in the file: {layer} and
{expert} in the name count them. Of several names the first is written; the others are accepted when reading.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from jaxtrain.interop.formats.transforms import Shape, Transform, copy, vector


@dataclass(frozen=True)
class Entry:
    """One parameter of ours, and where it lies in a published file.

    Attributes:
        path: Path of our parameter, parts separated by "/".
        names: Name of their tensor, or the names, the one to write first; {layer} and {expert} count `stack`.
        transform: How their tensor becomes ours (of one layer and expert).
        stack: Sizes of the leading dimensions of ours: () | (layers,) | (layers, experts).
        state: The path is one of model_state (running statistics), not of params.
        first_layer: What {layer} is for the first of the stack.
    """

    path: str
    names: str | tuple[str, ...]
    transform: Transform
    stack: Shape = ()
    state: bool = False
    first_layer: int = 0

    @property
    def shape(self) -> Shape:
        """Shape of our parameter."""
        return (*self.stack, *self.transform.ours)


@dataclass(frozen=True)
class Tied:
    """A tensor that some files repeat although it equals the parameter at path `to`; it is not written."""

    names: str | tuple[str, ...]
    to: str
    transform: Transform


@dataclass(frozen=True)
class Skipped:
    """Tensors that are known and not read: `pattern` is a regular expression of the whole name."""

    pattern: str


@dataclass(frozen=True)
class Constant:
    """A tensor that is not read, and written with one value because other readers ask for it."""

    names: str | tuple[str, ...]
    value: float
    shape: Shape
    dtype: str
    stack: Shape = ()


Row = Entry | Tied | Skipped | Constant


def all_names(row: Entry | Tied | Constant) -> tuple[str, ...]:
    """Returns the names of a row with {layer} and {expert} in them, the one to write first."""
    return (row.names,) if isinstance(row.names, str) else row.names


def names_of(row: Entry | Tied | Constant, position: Sequence[int] = ()) -> tuple[str, ...]:
    """Returns the names of the tensor at a position (layer, expert) of a row's stack, the one to write first."""
    numbers = dict(zip(("layer", "expert"), position, strict=False))
    if position and isinstance(row, Entry):
        numbers["layer"] += row.first_layer
    return tuple(name.format(**numbers) for name in all_names(row))


def positions(row: Row) -> Iterable[tuple[int, ...]]:
    """Returns every (layer, expert) of a row, in order; one empty tuple for a row that is not stacked."""
    return product(*map(range, row.stack if isinstance(row, Entry | Constant) else ()))


def in_layers(rows: Iterable[Entry], prefix: str, layers: int) -> tuple[Entry, ...]:
    """Returns rows of one block stacked over the layers; `prefix` stands before each name, with {layer}."""
    return tuple(
        replace(row, names=tuple(prefix + name for name in all_names(row)), stack=(layers, *row.stack)) for row in rows
    )


def normed(path: str, name: str, width: int) -> list[Entry]:
    """Returns the rows of a LayerNorm: its scale (weight) and its bias."""
    return [Entry(f"{path}/scale", f"{name}.weight", copy(width)), Entry(f"{path}/bias", f"{name}.bias", copy(width))]


def biased(path: str, name: str, kernel: Transform, outputs: Shape) -> list[Entry]:
    """Returns the rows of a linear layer (weight) with a bias of the shape `outputs`."""
    return [Entry(f"{path}/kernel", f"{name}.weight", kernel), Entry(f"{path}/bias", f"{name}.bias", vector(*outputs))]


def prefixed(rows: Iterable[Row], *, written: str, read: Sequence[str]) -> tuple[Row, ...]:
    """Returns the rows with a prefix before every name: `written` is written, those of `read` are accepted too."""
    prefixes = dict.fromkeys([written, *read])

    def named(row: Row) -> Row:
        if isinstance(row, Skipped):
            alternatives = "|".join(one.replace(".", r"\.") for one in prefixes)
            return replace(row, pattern=f"(?:{alternatives}){row.pattern}")
        return replace(row, names=tuple(prefix + name for prefix in prefixes for name in all_names(row)))

    return tuple(named(row) for row in rows)


def renamed(rows: Iterable[Row], words: Mapping[str, str]) -> tuple[Row, ...]:
    """Returns the rows with further accepted names: `words` are what is written -> what older files have instead."""

    def named(row: Row) -> Row:
        if isinstance(row, Skipped):
            return row
        found = dict.fromkeys(all_names(row))
        for new, old in words.items():
            found |= dict.fromkeys(name.replace(new, old) for name in all_names(row))
        return replace(row, names=tuple(found))

    return tuple(named(row) for row in rows)
