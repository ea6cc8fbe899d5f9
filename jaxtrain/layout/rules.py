"""Which mesh axes a parameter's dims are spread over. No jax here: the planner asks for thousands of layouts.

A model names the axes of its parameters in a path table; the rules say which mesh axes a name is spread over.
`sharding.py` makes specs of jax from what these functions give.
"""

import fnmatch
import math
from collections.abc import Mapping, Sequence

from jaxtrain.errors import ConfigError

# The mesh axes of one dim, as in a PartitionSpec.
Entry = tuple[str, ...] | str | None
AxesTable = Mapping[str, tuple[str | None, ...]]


class FamilyTable(dict[str, tuple[str | None, ...]]):
    """The axes table of a family of models: rows that a variant does not have (biases, a gate) match nothing.

    In any other table a row that matches nothing is a mistake.
    """


DEFAULT_RULES: Mapping[str, tuple[str, ...]] = {
    # parameters
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "head_dim": (),
    "layers": ("pipe",),
    "experts": ("expert",),
    "channels_in": ("fsdp",),
    "channels_out": ("tensor",),
    # mesh axes by their own names, as partitioning metadata of Flax gives them
    "fsdp": ("fsdp",),
    "tensor": ("tensor",),
    # activations
    "batch": ("data", "fsdp", "expert"),
    "sequence": ("context",),
    "residual_sequence": ("context",),
    "activation_embed": (),
    "activation_heads": ("tensor",),
    "activation_kv_heads": ("tensor",),
    "activation_mlp": ("tensor",),
    "activation_vocab": ("tensor",),
}


def entry_axes(entry: Entry) -> tuple[str, ...]:
    """The mesh axes of one dim of a spec."""
    return (entry,) if isinstance(entry, str) else entry or ()


def entry_degree(entry: Entry, degrees: Mapping[str, int]) -> int:
    """In how many parts a dim is."""
    return math.prod(degrees[name] for name in entry_axes(entry))


def logical_entries(
    names: Sequence[str | None], degrees: Mapping[str, int], rules: Mapping[str, tuple[str, ...]]
) -> list[Entry]:
    """The mesh axes of each logical name.

    Raises:
        ConfigError: a name without a rule, or two dims on one mesh axis.
    """
    used: dict[str, str] = {}
    entries: list[Entry] = []
    for name in names:
        if name is None:
            entries.append(None)
            continue
        if name not in rules:
            raise ConfigError(f"no sharding rule for logical axis {name!r}; known: {', '.join(rules)}")
        mesh_axes = tuple(axis for axis in rules[name] if degrees[axis] > 1)
        for axis in mesh_axes:
            if axis in used:
                raise ConfigError(f"logical axes {used[axis]!r} and {name!r} of {names} both want mesh axis {axis!r}")
            used[axis] = name
        entries.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
    return entries


def nearest_multiples(size: int, multiple: int) -> str:
    """The sizes next to `size` that divide, for an error message: "8 or 12"."""
    low = size // multiple * multiple
    return " or ".join(str(number) for number in (low, low + multiple) if number)


def _nearest_degrees(size: int, entry: Entry, degree: int) -> str:
    """The degrees next to this one that divide a dim, as keys of a config."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    low = max(d for d in divisors if d < degree)
    high = [d for d in divisors if degree < d <= 2 * degree][:1]
    return f"parallel.{' x parallel.'.join(entry_axes(entry))}={' or '.join(map(str, [low, *high]))}"


def table_row(path: str, axes: AxesTable) -> tuple[str | None, ...] | None:
    """The row of a path in a table: exact, else the first pattern (`blocks_*/bias`) that matches."""
    if path in axes:
        return axes[path]
    return next((row for pattern, row in axes.items() if "*" in pattern and fnmatch.fnmatchcase(path, pattern)), None)


def spread_axis(
    entries: list[Entry], shape: Sequence[int], axis: str, degrees: Mapping[str, int], skip: set[int]
) -> list[Entry]:
    """Put one more mesh axis on the largest dim that divides: a free one, else beside the axes that a dim has."""
    degree = degrees[axis]
    dims = [d for d in range(len(shape)) if d not in skip]
    fits = [d for d in dims if shape[d] % (degree * entry_degree(entries[d], degrees)) == 0]
    if axis == "fsdp":  # gathered for every use, which another axis on the same dim would make slower
        fits = [d for d in fits if entries[d] is None]
    if degree > 1 and fits:
        best = max(fits, key=lambda d: (entries[d] is None, shape[d]))
        # In front, because what is scattered by hand over an axis has that axis outermost.
        entries[best] = axis if entries[best] is None else (axis, *entry_axes(entries[best]))
    return entries


def parameter_entries(
    path: str,
    shape: Sequence[int],
    *,
    degrees: Mapping[str, int],
    axes: AxesTable,
    rules: Mapping[str, tuple[str, ...]] = DEFAULT_RULES,
    stack: str | None = None,
    also: tuple[str, ...] = (),
) -> list[Entry]:
    """How a parameter is stored.

    A path in the table follows its row; an unknown one puts its largest dim that divides on `fsdp`. `fsdp` only
    says where bytes live, so where the row's dim does not divide by it, another dim takes its place. A stack of
    layers is split over `pipe` by layers; what stands outside it is stored in `pipe` parts wherever a dim divides.

    Args:
        path: `blocks/attention/query/kernel`.
        shape: the parameter's shape.
        degrees: size of each mesh axis; 1 for one that the traced code handles itself.
        axes: the model's table.
        rules: logical axis -> mesh axes.
        stack: top-level path of the parameters that are stacked layer by layer.
        also: further mesh axes to spread it over where a dim divides (ZeRO puts optimizer state on `data`).

    Raises:
        ConfigError: the row has another rank, or a dim does not divide by an axis that changes the computation.
    """
    row = table_row(path, axes)
    stacked = stack is not None and path.startswith(f"{stack}/")
    for name in row or ():
        if name is not None and name not in rules:
            raise ConfigError(
                f"no sharding rule for logical axis {name!r} of {path}; known: {', '.join(rules)}; give the model "
                f"axes of these names, or make_train_step a rule such as rules={{{name!r}: ('tensor',)}}"
            )
    if row is None:
        row = ("layers", *[None] * (len(shape) - 1)) if stacked else (None,) * len(shape)
        wants_fsdp = True
    elif len(row) != len(shape):
        raise ConfigError(f"axes table: {path} has shape {shape} but the row {row} names {len(row)} axes")
    else:
        wants_fsdp = any("fsdp" in entry_axes(entry) for entry in logical_entries(row, degrees, rules))
    if stacked and row[:1] == (None,):
        row = ("layers", *row[1:])  # a stage holds its own layers, whether the table says so or not
    entries = list(logical_entries(row, degrees, rules))
    for dim, entry in enumerate(entries):
        degree = entry_degree(entry, degrees)
        if shape[dim] % degree == 0:
            continue
        if entry != "fsdp":
            near = nearest_multiples(shape[dim], degree)
            raise ConfigError(
                f"{row[dim]} of {path} is {shape[dim]}, which does not divide by {entry}={degree}; "
                f"make it {near}, or use {_nearest_degrees(shape[dim], entry, degree)}"
            )
        entries[dim] = None
    layer_dims = {dim for dim, name in enumerate(row) if name == "layers"}
    more = ("fsdp",) if wants_fsdp and not any("fsdp" in entry_axes(entry) for entry in entries) else ()
    for axis in (*more, *(() if stacked or layer_dims else ("pipe",)), *also):
        entries = spread_axis(entries, shape, axis, degrees, layer_dims)
    return entries


def check_replicated_share(replicated: Mapping[str, int], total: int, fsdp: int, max_fraction: float) -> None:
    """Raise where more than `max_fraction` of the parameters is replicated on every `fsdp` shard.

    Args:
        replicated: path -> size of the parameters that are not sharded over `fsdp`.
        total: size of all parameters, in the same unit.
        fsdp: degree of the axis, above 1.
        max_fraction: share of the sizes that may be replicated.

    Raises:
        ConfigError: names the largest of them.
    """
    fraction = sum(replicated.values()) / max(total, 1)
    if fraction > max_fraction:
        largest = sorted(replicated, key=lambda name: -replicated[name])[:3]
        raise ConfigError(
            f"{fraction:.1%} of parameter bytes stay whole although parallel.fsdp={fsdp} "
            f"(largest: {', '.join(largest)}); give them dims that divide, lower parallel.fsdp, "
            f"or allow it with parallel.max_replicated_fraction={math.ceil(fraction * 100) / 100}"
        )
