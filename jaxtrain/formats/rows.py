r"""The rows of a family's name table: which tensors of its files are which parameters of ours, and how. No jax here.

`tensors(model)` of a family returns a tuple of

    Entry("embedding", "model.embed_tokens.weight", copy(V, D))
    Entry("blocks/mlp/up/kernel", "model.layers.{layer}.mlp.up_proj.weight", linear((D,), (F,)), stack=(L,))
    Entry("blocks/mlp/up/kernel", "...{layer}.experts.{expert}.w3.weight", linear((D,), (F,)), stack=(L, E))
    Tied("lm_head.weight", to="embedding", transform=copy(V, D))   absent when tied; equal to the embedding if present
    Skipped(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")   known and not read: it follows from the config
    Constant("...num_batches_tracked", 0, shape=(), dtype="int64")  not read; written as this

`stack` gives the sizes of the leading dimensions of our parameter, which are one tensor each in the file: {layer} and
{expert} in the name count them. Of several names the first is written; the others are accepted when reading.

A `Transform` says how one tensor becomes one parameter and back, as views, never by arithmetic: take a block of one
dimension, split dimensions, pick an index of some, put the rest in our order, and merge neighbours. All but the merging
are views of one array, so that one description reads (a copy out of the view), writes (an assignment into the view) and
answers a slice. Letters: D width, H query heads, G key and value heads, K width of a head, F hidden width of the MLP, V
vocabulary, L layers, P positions.

    copy(V, D)                  theirs [V, D] -> ours [V, D]                (embeddings, norms, biases of one dim)
    linear((D,), (H, K))        theirs [H*K, D] -> ours [D, H, K]           (torch Linear: weight is [out, in])
    linear((H, K), (D,))        theirs [D, H*K] -> ours [H, K, D]           (an output projection)
    conv1d((D,), (H, K))        theirs [D, H*K] -> ours [D, H, K]           (GPT-2's Conv1D: weight is [in, out])
    vector(H, K)                theirs [H*K] -> ours [H, K]                 (biases of projections)
    reshaped((1, 1, D), (D,))   theirs [1, 1, D] -> ours [D]
    convolution(O, I, P, P)     theirs [O, I, P, P] -> ours [P, P, I, O]
    patches(D, C, P)            theirs [D, C, P, P] -> ours [P*P*C, D]

One tensor that holds several parameters is one `Entry` per parameter, each with its part of it:

    block(linear((D,), (G, K)), dim=0, start=H * K, of=(H + 2 * G) * K)     q|k|v one after the other: this is k
    interleaved((H, 3, K), 1, (D,))                                         q, k, v of each head in turn: this is k
    interleaved((H, 3, K), 1)                                               the same of their bias [H*3*K]
    interleaved((G, H // G + 2, K), range(H // G), (D,))                    queries, k, v of each group: the queries
    pairs((E, D, F), 1)                                                     two in turn along the last dim [E, D, 2*F]
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Shape = tuple[int, ...]
# Shape and dtype.
Kind = tuple[Shape, "np.dtype"]
# Index in each dimension of a stack: (), (layer,) or (layer, expert).
Position = tuple[int, ...]


@dataclass(frozen=True)
class Transform:
    """How their tensor is looked at as our parameter; made by the functions of this module.

    Attributes:
        theirs: Shape of their tensor.
        start: Where the block begins, in each dimension of theirs.
        block: Shape of the block.
        splits: Per dimension of theirs, the sizes into which it is split (their product is the block's size).
        picks: Split dimension -> index that is picked, whose dimension disappears, or range that is.
        order: Order of the split dimensions that remain, as positions among those that remain.
        merges: Per dimension of ours, how many of the ordered dimensions it merges; 0: a dimension of size 1.
    """

    theirs: Shape
    start: Shape
    block: Shape
    splits: tuple[Shape, ...]
    picks: tuple[tuple[int, int | range], ...]
    order: Shape
    merges: Shape

    @property
    def fine(self) -> Shape:
        """Sizes of the view's dimensions, before the merging."""
        left = [len(pick) for pick in self.picked if isinstance(pick, range)]
        return tuple(left[at] for at in self.order)

    @property
    def picked(self) -> tuple[int | range, ...]:
        """What is picked of each split dimension: an index, or a range."""
        sizes, picks = (size for split in self.splits for size in split), dict(self.picks)
        return tuple(picks.get(at, range(size)) for at, size in enumerate(sizes))

    @property
    def ours(self) -> Shape:
        """Shape of our parameter (of one layer)."""
        sizes, shape, at = self.fine, [], 0
        for count in self.merges:
            shape.append(prod(sizes[at : at + count]))
            at += count
        return tuple(shape)

    def view(self, tensor: "np.ndarray") -> "np.ndarray":
        """Returns their tensor, C-contiguous, as a view with the dimensions of `fine`; writing to it writes theirs."""
        # The dots keep an array of a tensor without dimensions.
        block = tensor[(*(slice(at, at + size) for at, size in zip(self.start, self.block, strict=True)), ...)]
        # Splitting a dimension needs no copy, whatever the strides are.
        block = block.reshape([size for split in self.splits for size in split])
        picked = (slice(one.start, one.stop) if isinstance(one, range) else one for one in self.picked)
        return block[(*picked, ...)].transpose(self.order)

    def read(self, tensor: "np.ndarray", index: Sequence[slice]) -> "np.ndarray":
        """Returns the slice `index` (of step 1) of our parameter; of a mapped file no more is read than it needs."""
        view, at, inner, shape = self.view(tensor), 0, [], []
        cut: list[slice] = []
        for count, size, one in zip(self.merges, self.ours, index, strict=True):
            start, stop, _ = one.indices(size)
            if count:
                # Of merged dimensions the first is sliced to what covers the range; the rest is cut after the copy.
                step = prod(self.fine[at + 1 : at + count])
                first, last = start // step, -(-stop // step)
                cut += [slice(first, last), *[slice(None)] * (count - 1)]
                inner.append(slice(start - first * step, stop - first * step))
                shape.append((last - first) * step)
            else:
                inner.append(slice(start, stop))
                shape.append(1)
            at += count
        return view[tuple(cut)].reshape(shape)[tuple(inner)]

    def read_all(self, tensor: "np.ndarray") -> "np.ndarray":
        """Returns our whole parameter."""
        return self.view(tensor).reshape(self.ours)

    def write(self, tensor: "np.ndarray", ours: "np.ndarray") -> None:
        """Writes our parameter (of one layer) into its place in their tensor, casting to its dtype."""
        self.view(tensor)[...] = ours.reshape(self.fine)


def _whole(
    splits: Sequence[Shape], order: Shape, merges: Shape, picks: tuple[tuple[int, int | range], ...] = ()
) -> Transform:
    theirs = tuple(prod(split) for split in splits)
    return Transform(theirs, (0,) * len(theirs), theirs, tuple(splits), picks, order, merges)


def copy(*shape: int) -> Transform:
    """Their tensor as it is, of this shape."""
    return _whole([(size,) for size in shape], tuple(range(len(shape))), (1,) * len(shape))


def vector(*sizes: int) -> Transform:
    """Theirs [product of the sizes] -> ours [sizes]: the bias of a projection to heads."""
    return _whole([sizes], tuple(range(len(sizes))), (1,) * len(sizes))


def linear(inputs: Shape, outputs: Shape) -> Transform:
    """Theirs [outputs, inputs] (the weight of torch's Linear), each flat -> ours [*inputs, *outputs]."""
    count = len(outputs)
    order = (*range(count, count + len(inputs)), *range(count))
    return _whole([outputs, inputs], order, (1,) * (len(inputs) + len(outputs)))


def conv1d(inputs: Shape, outputs: Shape) -> Transform:
    """Theirs [inputs, outputs] (GPT-2's Conv1D), each flat -> ours [*inputs, *outputs]."""
    count = len(inputs) + len(outputs)
    return _whole([inputs, outputs], tuple(range(count)), (1,) * count)


def reshaped(theirs: Shape, ours: Shape) -> Transform:
    """Theirs -> ours where they differ in dimensions of size 1 only ([1, 1, D] -> [D])."""
    picks = tuple((at, 0) for at, size in enumerate(theirs) if size == 1)
    left = len(theirs) - len(picks)
    return _whole([(size,) for size in theirs], tuple(range(left)), tuple(int(size != 1) for size in ours), picks)


def convolution(outputs: int, inputs: int, height: int, width: int) -> Transform:
    """Theirs [out, in, height, width] -> ours [height, width, in, out]."""
    return _whole([(outputs,), (inputs,), (height,), (width,)], (2, 3, 1, 0), (1, 1, 1, 1))


def patches(width: int, channels: int, size: int) -> Transform:
    """Theirs [width, channels, size, size] -> ours [size * size * channels, width]; channels run fastest."""
    return _whole([(width,), (channels,), (size,), (size,)], (2, 3, 1, 0), (3, 1))


def depthwise(width: int, *channels: int) -> Transform:
    """Theirs [channels, 1, width] (a convolution of each channel by itself) -> ours [width, *channels]."""
    dims = len(channels)
    return _whole([channels, (1,), (width,)], (dims, *range(dims)), (1,) * (dims + 1), ((dims, 0),))


def block(part: Transform, *, dim: int, start: int, of: int) -> Transform:
    """A part, from `start` on, of a tensor that holds several one after the other along `dim`, of size `of`."""
    theirs = tuple(of if at == dim else size for at, size in enumerate(part.theirs))
    return replace(part, theirs=theirs, start=tuple(start if at == dim else 0 for at in range(len(theirs))))


def interleaved(sizes: tuple[int, int, int], index: int | range, inputs: Shape | None = None) -> Transform:
    """Parameter `index` of those that follow each other within each head (GPT-NeoX), or a range of heads (Falcon).

    `sizes` are (heads, number of parameters, width of a head), the split of the output dimension: theirs [out, inputs]
    -> ours [*inputs, heads, width]; of their bias where `inputs` is None. Of a range, ours has heads x its length.
    """
    heads, merges = ((0, 1, 2), (2, 1)) if isinstance(index, range) else ((0, 1), (1, 1))
    if inputs is None:
        return _whole([sizes], heads, merges, ((1, index),))
    order = (*range(len(heads), len(heads) + len(inputs)), *heads)
    return _whole([sizes, inputs], order, ((1,) * len(inputs) + merges), ((1, index),))


def pairs(ours: Shape, index: int) -> Transform:
    """Theirs [..., 2 * last] -> ours, every second number of the last dimension from `index` on (gpt-oss)."""
    dims = len(ours)
    order = tuple(range(dims))
    return _whole([*((size,) for size in ours[:-1]), (ours[-1], 2)], order, (1,) * dims, ((dims, index),))


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
        first_names: Names of the tensor of the first of the stack, where it has others.
    """

    path: str
    names: str | tuple[str, ...]
    transform: Transform
    stack: Shape = ()
    state: bool = False
    first_layer: int = 0
    first_names: tuple[str, ...] = ()

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

    names: str
    value: float
    shape: Shape
    dtype: str


Row = Entry | Tied | Skipped | Constant
_DIMS = {
    **{"D": "embed_dim", "H": "num_heads", "G": "num_kv_heads", "K": "head_dim", "F": "mlp_dim"},
    **{"L": "num_layers", "V": "vocab_size", "P": "max_sequence_length"},
}


def dims(model: Mapping[str, Any], letters: str) -> tuple[int, ...]:
    """Returns sizes of a model group by the letters of this module: dims(model, "DF")."""
    return tuple(int(model[_DIMS[letter]]) for letter in letters)


def all_names(row: Entry | Tied | Constant) -> tuple[str, ...]:
    """Returns the names of a row with {layer} and {expert} in them, the one to write first."""
    return (row.names,) if isinstance(row.names, str) else row.names


def names_of(row: Entry | Tied | Constant, position: Position = ()) -> tuple[str, ...]:
    """Returns the names of the tensor at a position (layer, expert) of a row's stack, the one to write first."""
    numbers = dict(zip(("layer", "expert"), position, strict=False))
    if position and isinstance(row, Entry):
        numbers["layer"] += row.first_layer
        if row.first_names and not any(position):
            return row.first_names
    return tuple(name.format(**numbers) for name in all_names(row))


def positions(row: Row) -> Iterable[Position]:
    """Returns every (layer, expert) of a row, in order; one empty tuple for a row that is not stacked."""
    return product(*map(range, row.stack if isinstance(row, Entry) else ()))


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


def output_row(model: Mapping[str, Any], names: str | tuple[str, ...]) -> Row:
    """Returns the row of the output layer, which may be the embedding."""
    D, V = dims(model, "DV")
    if model["tie_embeddings"]:
        return Tied(names, "embedding", copy(V, D))
    return Entry("output", names, linear((D,), (V,)))


def block_rows(
    model: Mapping[str, Any],
    names: Mapping[str, str],
    *,
    prefix: str = "blocks/",
    kernel: Callable[[Shape, Shape], Transform] = linear,
    beside: bool = False,
) -> list[Entry]:
    """Returns the rows of one block of a transformer, whose shapes and biases follow from the model group.

    Args:
        model: Our model group; `norm`, `bias` and `qk_norm` say which biases and norms there are.
        names: Part of our block ("attention/query", "mlp_norm", ...) -> name of the module in the file.
        prefix: What stands before the parts in our paths.
        kernel: How a linear layer is stored: `linear` or `conv1d`.
        beside: Whether a bias is written after its kernel; else after all kernels, those of norms last.
    """
    (D, H, G, K), shapes = dims(model, "DHGK"), _kernels(model)
    rows: list[Entry] = []
    biases: list[Entry] = []
    of_norms: list[Entry] = []
    for ours, theirs in names.items():
        part = ours.rpartition("/")[2]
        if part in shapes:
            inputs, outputs = shapes[part]
            rows.append(Entry(f"{prefix}{ours}/kernel", f"{theirs}.weight", kernel(inputs, outputs)))
            biased_part = has_bias(model["bias"], part)
        elif part not in ("query_norm", "key_norm") or model["qk_norm"] not in (False, "rotated"):
            outputs = {"query_norm": (H, K), "key_norm": (G, K)}.get(part, (D,))
            outputs = (K,) if outputs != (D,) and model["qk_norm"] is True else outputs
            scale = copy(*outputs) if model.get("qk_norm") == "per_head" else vector(*outputs)
            rows.append(Entry(f"{prefix}{ours}/scale", f"{theirs}.weight", scale))
            biased_part = outputs == (D,) and norm_has_bias(model["norm"], model["bias"], model.get("norm_bias"))
        else:
            continue
        if biased_part:
            place = rows if beside else biases if part in shapes else of_norms
            place.append(Entry(f"{prefix}{ours}/bias", f"{theirs}.bias", vector(*outputs)))
    return rows + biases + of_norms


def _kernels(model: Mapping[str, Any]) -> dict[str, tuple[Shape, Shape]]:
    """Inputs and outputs of the linear layers of a block."""
    D, H, G, K, F = dims(model, "DHGKF")
    shapes = {"query": ((D,), (H, K)), "key": ((D,), (G, K)), "value": ((D,), (G, K)), "output": ((H, K), (D,))}
    return shapes | {"gate": ((D,), (F,)), "up": ((D,), (F,)), "down": ((F,), (D,))}


def fused(model: Mapping[str, Any], name: str, *parts: str) -> list[Entry]:
    """Returns the rows of layers of a block ("mlp/gate", "mlp/up") whose kernels follow each other in one tensor."""
    kernels = _kernels(model)
    return in_turn(name, {f"blocks/{part}/kernel": linear(*kernels[part.rpartition("/")[2]]) for part in parts})


def in_turn(name: str, parts: Mapping[str, Transform]) -> list[Entry]:
    """Returns the rows of parameters, by path, that follow each other along the first dim of one tensor."""
    sizes = [part.theirs[0] for part in parts.values()]
    starts = accumulate(sizes[:-1], initial=0)
    places = [
        block(part, dim=0, start=start, of=sum(sizes)) for part, start in zip(parts.values(), starts, strict=True)
    ]
    return [Entry(path, name, place) for path, place in zip(parts, places, strict=True)]


def has_bias(bias: bool | str, part: str) -> bool:
    """Whether a linear layer of a block (query, key, value, output, up, gate, down) has a bias; `bias` is our key."""
    return bias is True or part in _BIASED.get(str(bias), ())


def norm_has_bias(norm: str, bias: bool | str, norm_bias: bool | None) -> bool:
    """Whether the norms of the residual stream have biases; the arguments are our keys of these names."""
    return norm == "layernorm" and (bias is True if norm_bias is None else norm_bias)


# What the key `bias` says -> the linear layers of a block that have one.
_QKV = ("query", "key", "value")
_BIASED = {"qkv": _QKV, "attention": (*_QKV, "output"), "mlp": ("up", "gate", "down")}


def renamed(rows: Iterable[Row], words: Mapping[str, str]) -> tuple[Row, ...]:
    """Returns the rows with further accepted names: `words` are what is written -> what older files have instead."""

    def names(row: Entry | Tied | Constant) -> tuple[str, ...]:
        older = (name.replace(new, old) for new, old in words.items() for name in all_names(row))
        return tuple(dict.fromkeys([*all_names(row), *older]))

    return tuple(row if isinstance(row, Skipped) else replace(row, names=names(row)) for row in rows)


def prefixed(rows: Iterable[Row], *, written: str, read: Sequence[str]) -> tuple[Row, ...]:
    """Returns the rows with a prefix before every name: `written` is written, those of `read` are accepted too."""
    prefixes = dict.fromkeys([written, *read])

    def named(row: Row) -> Row:
        if isinstance(row, Skipped):
            alternatives = "|".join(one.replace(".", r"\.") for one in prefixes)
            return replace(row, pattern=f"(?:{alternatives}){row.pattern}")
        names = tuple(prefix + name for prefix in prefixes for name in all_names(row))
        if isinstance(row, Entry) and row.first_names:
            row = replace(row, first_names=tuple(prefix + name for prefix in prefixes for name in row.first_names))
        return replace(row, names=names)

    return tuple(named(row) for row in rows)
