"""Rules for which mesh axes shard each dim of a parameter. No jax here: the planner asks for thousands of layouts.

A model gives each dim of its parameters a logical name in a path table; the rules say which mesh axes shard a logical
name. `sharding.py` makes jax's PartitionSpecs from what these functions return.
"""

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence

from jaxtrain.config.arguments import refusal
from jaxtrain.errors import ConfigError

# The mesh axes that shard one dim, as in a PartitionSpec; None: the dim is not sharded.
Entry = tuple[str, ...] | str | None
# Path of a parameter, or a pattern of paths -> logical name of each dim.
AxesTable = Mapping[str, tuple[str | None, ...]]


class FamilyTable(dict[str, tuple[str | None, ...]]):
    """The axes table of a family of models, in which a row may match no parameter of a variant (biases, a gate).

    In every other table a row that matches no parameter is an error.
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
"""Logical axis -> the mesh axes that shard it; `rules` of `make_train_step` adds to it and replaces single rows.

An axis that is not in the table has no rule, and naming it is an error; an empty row shards over nothing.

Example:
    >>> jt.DEFAULT_RULES["batch"]
    ('data', 'fsdp', 'expert')
    >>> jt.DEFAULT_RULES["mlp"]
    ('tensor',)
"""


def check_axes(axes: Mapping[str, object], *, what: str, write: str = "{'layer/kernel': ('embed', 'mlp')}") -> None:
    """Raises an error where something is no table of logical axes.

    Args:
        axes: What was given.
        what: Name of the argument, for the message.
        write: How such a table is written.

    Raises:
        ConfigError: A row is no tuple.
    """
    for path, row in axes.items():
        if not isinstance(row, tuple):
            example = f"{{{path!r}: ({row!r},)}}" if isinstance(row, str) else write
            raise ConfigError(refusal(f"{what}: {path}", "a tuple with the name of each dim", row, example))


def check_rules(rules: Mapping[str, object] | None, *, what: str) -> None:
    """Raises an error where something is no table of sharding rules.

    Args:
        rules: What was given; None stands for the default rules.
        what: Name of the argument, for the message.

    Raises:
        ConfigError: A row is no tuple of mesh axes.
    """
    if rules is None:
        return
    write = f"{what}={{'mlp': ('tensor',)}}"
    for name, axes in rules.items():
        if not isinstance(axes, tuple | list):
            example = f"{what}={{{name!r}: ({axes!r},)}}" if isinstance(axes, str) else write
            raise ConfigError(refusal(f"{what}: {name}", "a tuple of mesh axes", axes, example))


def entry_axes(entry: Entry) -> tuple[str, ...]:
    """Returns the mesh axes that shard a dim, as a tuple; an empty one where the dim is not sharded."""
    return (entry,) if isinstance(entry, str) else entry or ()


def entry_degree(entry: Entry, degrees: Mapping[str, int]) -> int:
    """Returns the number of shards of a dim.

    Args:
        entry: Mesh axes of the dim.
        degrees: Size of each mesh axis.
    """
    return degrees[entry] if isinstance(entry, str) else math.prod(degrees[name] for name in entry or ())


def logical_entries(
    names: Sequence[str | None], degrees: Mapping[str, int], rules: Mapping[str, tuple[str, ...]]
) -> list[Entry]:
    """Returns the mesh axes that shard each dim of an array.

    Args:
        names: Logical name of each dim; None: the dim is not sharded.
        degrees: Size of each mesh axis; axes of size 1 are left out of the result.
        rules: Logical name -> mesh axes.

    Returns:
        One entry per dim.

    Raises:
        ConfigError: A name has no rule, or two dims would be sharded over the same mesh axis.
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
    """Returns the nearest multiples of `multiple` below and above `size`, as text for a message: "8 or 12"."""
    low = size // multiple * multiple
    return " or ".join(str(number) for number in (low, low + multiple) if number)


def _nearest_degrees(size: int, entry: Entry, degree: int) -> str:
    """Returns the degrees nearest to this one by which a dim divides, as keys of a config."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    low = max(d for d in divisors if d < degree)
    high = [d for d in divisors if degree < d <= 2 * degree][:1]
    return f"parallel.{' x parallel.'.join(entry_axes(entry))}={' or '.join(map(str, [low, *high]))}"


def table_row(path: str, axes: AxesTable) -> tuple[str | None, ...] | None:
    """Returns the row of a path in an axes table.

    Args:
        path: Path of a parameter, such as `blocks/attention/query/kernel`.
        axes: The table.

    Returns:
        The logical name of each dim: the row of exactly this path, or else of the first pattern (`blocks_*/bias`) that
        matches; None where no row matches.
    """
    if path in axes:
        return axes[path]
    return next((row for pattern, row in axes.items() if "*" in pattern and fnmatch.fnmatchcase(path, pattern)), None)


def spread_axis(
    entries: list[Entry],
    shape: Sequence[int],
    axis: str,
    degrees: Mapping[str, int],
    skip: set[int],
    *,
    outermost: bool = False,
) -> list[Entry]:
    """Shards an array over one more mesh axis: in its largest unsharded dim that divides, or else in a sharded one.

    Args:
        entries: Mesh axes of each dim; changed in place.
        shape: Shape of the array.
        axis: The mesh axis to add; `fsdp` is put on an unsharded dim only.
        degrees: Size of each mesh axis.
        skip: Dims that must not be sharded over the axis.
        outermost: Whether to take the outermost dim that divides in place of the largest.

    Returns:
        `entries`; unchanged where no dim divides, and of an array without elements.
    """
    if 0 in shape:  # a collective over a dim of size 0 is no program
        return entries
    degree = degrees[axis]
    dims = [d for d in range(len(shape)) if d not in skip]
    fits = [d for d in dims if shape[d] % (degree * entry_degree(entries[d], degrees)) == 0]
    # fsdp shards are gathered for every use, which is slower where another axis shards the same dim.
    if axis == "fsdp":
        fits = [d for d in fits if entries[d] is None]
    if degree > 1 and fits:
        best = max(fits, key=lambda d: (entries[d] is None, -d if outermost else shape[d]))
        # In front, because an explicit reduce-scatter over an axis makes that axis the outermost of the dim.
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
    """Returns the mesh axes that shard each dim of a parameter as it is stored.

    A parameter with a row in the table is sharded as the row says. One without a row is sharded over `fsdp` in its
    largest dim that divides. `fsdp` only decides where bytes are stored, so if the row's dim does not divide by
    `fsdp`, another dim is sharded over it. For any other axis that is an error. Parameters of the layer stack are
    sharded over `pipe` in their layer dim; every other parameter over `pipe` in any dim that divides, or not at all.

    Args:
        path: Path of the parameter, such as `blocks/attention/query/kernel`.
        shape: Shape of the parameter.
        degrees: Size of each mesh axis; 1 for an axis that the code around handles itself (a manual region).
        axes: The model's axes table.
        rules: Logical name -> mesh axes.
        stack: Top-level path of the parameters that are stacked layer by layer; None: no such stack.
        also: More mesh axes to shard the parameter over where a dim divides (ZeRO shards optimizer state over `data`).

    Returns:
        One entry per dim.

    Raises:
        ConfigError: The row has another rank, or a dim does not divide by a mesh axis that changes the computation.
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
        # Each stage stores its own layers, also where the table does not name that dim.
        row = ("layers", *row[1:])
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
    for axis in (*more, *(() if stacked or layer_dims else ("pipe",))):
        entries = spread_axis(entries, shape, axis, degrees, layer_dims)
    for axis in also:
        # Collectives of NVIDIA gather and scatter the outermost dim in memory; for another one arrays are transposed.
        entries = spread_axis(entries, shape, axis, degrees, layer_dims, outermost=True)
    return entries


def check_replicated_share(replicated: Mapping[str, int], total: int, fsdp: int, max_fraction: float) -> None:
    """Checks that at most a fraction of the parameter bytes is replicated over `fsdp`.

    Args:
        replicated: Path -> bytes of each parameter that is not sharded over `fsdp`.
        total: Bytes of all parameters.
        fsdp: Degree of the axis, at least 2.
        max_fraction: Fraction of `total` that may be replicated.

    Raises:
        ConfigError: More is replicated; the message names the three largest parameters.
    """
    fraction = sum(replicated.values()) / max(total, 1)
    if fraction > max_fraction:
        largest = sorted(replicated, key=lambda name: -replicated[name])[:3]
        raise ConfigError(
            f"{fraction:.1%} of parameter bytes are replicated although parallel.fsdp={fsdp} "
            f"(largest: {', '.join(largest)}); give them dims that divide, lower parallel.fsdp, "
            f"or allow it with parallel.max_replicated_fraction={math.ceil(fraction * 100) / 100}"
        )


def check_tensor_used(
    sizes: Mapping[str, int], sharded: Collection[str], tensor: int, rules: Mapping[str, tuple[str, ...]], *, model: str
) -> None:
    """Checks that some parameter is sharded over `tensor`, which would else repeat the work of one device.

    Args:
        sizes: Path -> elements of each parameter.
        sharded: Paths of those that are sharded over `tensor`.
        tensor: Degree of the axis.
        rules: Logical name -> mesh axes.
        model: Name of the model, for the message.

    Raises:
        ConfigError: None is, although the degree is above 1.
    """
    if tensor == 1 or sharded:
        return
    largest = max(sizes, key=lambda path: sizes[path], default="")
    names = ", ".join(name for name, axes in rules.items() if "tensor" in axes and "activation" not in name)
    raise ConfigError(
        f"parallel.tensor={tensor}, but no parameter of the model {model} is sharded over it; give the model "
        f"axes, such as {{{largest!r}: ...}} with the names {names}, or use parallel.tensor=1"
    )
