"""The rows of a family's name table: which tensors of the file are which parameters of ours. No jax here.

`tensors(model)` of a family returns a tuple of

    Entry("embedding", "model.embed_tokens.weight", copy(V, D))
    Entry("blocks/mlp/up/kernel", "model.layers.{layer}.mlp.up_proj.weight", linear((D,), (F,)), stack=(L,))
    Entry("blocks/mlp/up/kernel", "...{layer}.experts.{expert}.w3.weight", linear((D,), (F,)), stack=(L, E))
    Tied("lm_head.weight", to="embedding", transform=copy(V, D))   absent when tied; equal to the embedding if present
    Skipped(r"model\\.layers\\.\\d+\\.self_attn\\.rotary_emb\\.inv_freq", reason="computed from rope_theta")
    Constant("...num_batches_tracked", 0, shape=(), dtype="int64")  not read; written as this

`stack` gives the sizes of the leading dimensions of our parameter, which are one tensor each in the file: {layer} and
{expert} in the name count them. Our parameter has the shape `stack + transform.ours`.

Names: the first is the one that is written; the others are accepted when reading. `prefixed` and `renamed` add
accepted names to a whole table:

    prefixed(entries, written="transformer.", read=("transformer.", ""))   each name with any of the prefixes
    renamed(entries, {".weight": ".gamma"}, only="LayerNorm")              old words for the same tensors
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from jaxtrain.published.transforms import Shape, Transform, copy, vector


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
    """A tensor that some files repeat although it is the same as another parameter; it is not written.

    Attributes:
        names: Name or names of the tensor.
        to: Path of the parameter that it must be equal to.
        transform: How the tensor becomes that parameter.
        instead: What to set where the two differ, for the message.
    """

    names: str | tuple[str, ...]
    to: str
    transform: Transform
    instead: str = "model.tie_embeddings=false"


@dataclass(frozen=True)
class Skipped:
    """Tensors that are known and not read.

    Attributes:
        pattern: Regular expression of the whole name.
        reason: Why nothing is lost.
    """

    pattern: str
    reason: str


@dataclass(frozen=True)
class Constant:
    """A tensor that is not read, and written with one value because other readers ask for it."""

    names: str | tuple[str, ...]
    value: float
    shape: Shape
    dtype: str
    stack: Shape = ()


Row = Entry | Tied | Skipped | Constant


def names_of(row: Entry | Tied | Constant, position: Sequence[int] = ()) -> tuple[str, ...]:
    """Returns the names of one tensor of a row, the one to write first.

    Args:
        row: The row.
        position: Which layer (and expert), for a stacked row.
    """
    names = (row.names,) if isinstance(row.names, str) else row.names
    numbers = dict(zip(("layer", "expert"), position, strict=False))
    if position and isinstance(row, Entry):
        numbers["layer"] += row.first_layer
    return tuple(name.format(**numbers) for name in names)


def positions(row: Entry | Constant) -> Iterable[tuple[int, ...]]:
    """Returns every (layer, expert) of a row, in order; one empty tuple for a row that is not stacked."""
    return product(*map(range, row.stack))


def in_layers(rows: Iterable[Entry], prefix: str, layers: int) -> tuple[Entry, ...]:
    """Returns rows of one block stacked over the layers: what a family writes once for all blocks.

    Args:
        rows: Entries of one block; their own `stack` (experts) follows the layers.
        prefix: What stands before each name, with {layer}.
        layers: Number of layers.
    """

    def stacked(row: Entry) -> Entry:
        names = (row.names,) if isinstance(row.names, str) else row.names
        return replace(row, names=tuple(prefix + name for name in names), stack=(layers, *row.stack))

    return tuple(stacked(row) for row in rows)


def normed(path: str, name: str, width: int) -> list[Entry]:
    """Returns the rows of a LayerNorm: its scale and its bias.

    Args:
        path: Path of the norm in ours.
        name: Its name in theirs, where its parts are called weight and bias.
        width: Size of both.
    """
    return [Entry(f"{path}/scale", f"{name}.weight", copy(width)), Entry(f"{path}/bias", f"{name}.bias", copy(width))]


def biased(path: str, name: str, kernel: Transform, outputs: Shape) -> list[Entry]:
    """Returns the rows of a linear layer with a bias.

    Args:
        path: Path of the layer in ours.
        name: Its name in theirs, where its parts are called weight and bias.
        kernel: How the weight becomes our kernel.
        outputs: Dimensions of the output, and so of the bias.
    """
    return [Entry(f"{path}/kernel", f"{name}.weight", kernel), Entry(f"{path}/bias", f"{name}.bias", vector(*outputs))]


def prefixed(rows: Iterable[Row], *, written: str, read: Sequence[str]) -> tuple[Row, ...]:
    """Returns the rows with a prefix before every name: one is written, several are accepted.

    Args:
        rows: Rows whose names have no prefix.
        written: The prefix to write.
        read: The prefixes to accept; the one written need not be among them.
    """
    prefixes = dict.fromkeys([written, *read])

    def named(row: Row) -> Row:
        if isinstance(row, Skipped):
            alternatives = "|".join(one.replace(".", r"\.") for one in prefixes)
            return replace(row, pattern=f"(?:{alternatives}){row.pattern}")
        names = (row.names,) if isinstance(row.names, str) else row.names
        return replace(row, names=tuple(prefix + name for prefix in prefixes for name in names))

    return tuple(named(row) for row in rows)


def renamed(rows: Iterable[Row], words: Mapping[str, str], *, only: str = "") -> tuple[Row, ...]:
    """Returns the rows with further accepted names, in which words are replaced.

    Args:
        rows: The rows.
        words: Word of the name that is written -> the word that older files have in its place.
        only: Only names that hold this text get a second form.
    """

    def named(row: Row) -> Row:
        if isinstance(row, Skipped):
            return row
        names = (row.names,) if isinstance(row.names, str) else row.names
        older = []
        for name in names:
            other = name
            for new, old in words.items():
                other = other.replace(new, old)
            if only in name and other != name:
                older.append(other)
        return replace(row, names=(*names, *older))

    return tuple(named(row) for row in rows)
