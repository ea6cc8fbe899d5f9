"""Which mesh axes shard each dim of a parameter and of optimizer state. No jax here: the planner asks for thousands.

`sharding.py` makes jax's PartitionSpecs from what these functions return.
"""

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from jaxtrain.config.schema import AXES, Parallelism
from jaxtrain.errors import ConfigError

# The mesh axes that shard one dim, as in a PartitionSpec; None: the dim is not sharded.
Entry = tuple[str, ...] | str | None
# Path of a parameter, or a pattern of paths -> logical name of each dim.
AxesTable = Mapping[str, tuple[str | None, ...]]


class FamilyTable(dict[str, tuple[str | None, ...]]):
    """The axes table of a family of models; a row may match no parameter of a variant, elsewhere an error."""


DEFAULT_RULES: Mapping[str, tuple[str, ...]] = {
    # parameters
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "head_dim": (),
    "layers": ("pipe",),
    "leading_layers": (),
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

# Logical names of dims that count equal arrays: each layer or expert of a stack is a separate array of the model.
COUNTING = ("layers", "leading_layers", "experts")
# Mesh axes that decide only where a parameter is stored, not what is computed with it.
_STORAGE = ("fsdp", "pipe", "data")
# Elements of a large gradient that are summed in float32 at once: 64 MiB.
PIECE = 2**24


# --- Degrees. ---


def resolve_degrees(degrees: Mapping[str, int | Literal["auto"]], num_devices: int) -> dict[str, int]:
    """The degree of each of the six axes, in mesh order, whose product is the number of devices of all processes.

    An axis that is left out has degree 1; one may be auto. Another product is a `ConfigError`.
    """
    autos = [axis for axis in AXES if degrees.get(axis, 1) == "auto"]
    if len(autos) > 1:
        raise ConfigError(f"parallel.{autos[0]} and parallel.{autos[1]} are both auto; at most one axis can be")
    fixed = {axis: int(degrees.get(axis, 1)) for axis in AXES if axis not in autos}
    product = math.prod(fixed.values())
    if num_devices % product if autos else product != num_devices:
        shown = " x ".join(f"{axis}={degree}" for axis, degree in fixed.items() if degree > 1) or "all degrees 1"
        works = f"use degrees that multiply to {num_devices}, or parallel.data=auto for what the other axes leave"
        if product > num_devices:
            works = f"lower a degree, or use {product} devices (on CPU: --emulate {product})"
        elif autos:
            works = f"use {' or '.join(map(str, _near_divisors(num_devices, product)))}"
        verb = "does not divide" if autos else "is not"
        raise ConfigError(
            f"parallel: {shown} makes {product}, which {verb} the number of devices ({num_devices}); {works}"
        )
    return {axis: fixed[axis] if axis in fixed else num_devices // product for axis in AXES}


def config_degrees(config: Parallelism) -> dict[str, int | Literal["auto"]]:
    """Returns the degrees of all six axes, in mesh order, as the group `parallel` says; one of them may be auto.

    `data` is auto unless another axis is. ZeRO stage 3 over `data` is what the axis `fsdp` does: with `zero=3` the
    degree of `data` moves to `fsdp` unless that is set.
    """
    degrees: dict[str, int | Literal["auto"]] = {axis: getattr(config, axis) for axis in AXES}
    others_auto = any(degrees[axis] == "auto" for axis in AXES if axis != "data")
    if others_auto and "data" not in config.model_fields_set:
        degrees["data"] = 1
    if config.zero == 3 and "fsdp" not in config.model_fields_set:
        degrees["fsdp"], degrees["data"] = degrees["data"], 1
    return degrees


# --- Axes tables and rules. ---


def check_axes(axes: Mapping[str, object], *, what: str, write: str = "{'layer/kernel': ('embed', 'mlp')}") -> None:
    """Raise a `ConfigError` where a row of a table of logical axes is no tuple, as a lone string is none."""
    for path, row in axes.items():
        if not isinstance(row, tuple):
            raise ConfigError(f"{what}: {path} takes a tuple with the name of each dim, not {row!r}; write {write}")


def entry_axes(entry: Entry) -> tuple[str, ...]:
    """Returns the mesh axes that shard a dim, as a tuple; an empty one where the dim is not sharded."""
    return (entry,) if isinstance(entry, str) else entry or ()


def entry_degree(entry: Entry, degrees: Mapping[str, int]) -> int:
    """Returns the number of shards of a dim."""
    return degrees[entry] if isinstance(entry, str) else math.prod(degrees[name] for name in entry or ())


def logical_entries(
    names: Sequence[str | None], degrees: Mapping[str, int], rules: Mapping[str, tuple[str, ...]]
) -> list[Entry]:
    """Returns the mesh axes, but those of size 1, that shard each dim of an array, by the logical names of its dims.

    A `ConfigError` where a name has no rule, or two dims would be sharded over the same mesh axis.
    """
    used: dict[str, str] = {}
    entries: list[Entry] = []
    for name in names:
        if name is None:
            entries.append(None)
            continue
        if name not in rules:
            raise ConfigError(
                f"no sharding rule for logical axis {name!r} of {names}; known: {', '.join(rules)}; rename it, or give "
                f"make_train_step a rule such as rules={{{name!r}: ('tensor',)}}"
            )
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


def _near_divisors(number: int, degree: int) -> list[int]:
    """The divisors of a number nearest to a degree that is none: the one below, and the one above."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return [max(d for d in divisors if d < degree), *[d for d in divisors if d > degree][:1]]


def table_row(path: str, axes: AxesTable) -> tuple[str | None, ...] | None:
    """Returns the row of exactly this path, or else of the first pattern (`blocks_*/bias`) that matches, or None."""
    if path in axes:
        return axes[path]
    return next((row for pattern, row in axes.items() if "*" in pattern and fnmatch.fnmatchcase(path, pattern)), None)


def is_stacked(path: str, stack: str | None) -> bool:
    """Returns whether a parameter belongs to the stack of layers, which is given by its top-level path."""
    return stack is not None and path.startswith(f"{stack}/")


def named_dims(path: str, shape: Sequence[int], axes: AxesTable, stack: str | None) -> tuple[str | None, ...] | None:
    """Returns the logical name of each dim of a parameter, the first of a stacked one "layers"; None: no such row."""
    row = table_row(path, axes)
    if row is None or len(row) != len(shape):
        return None
    return ("layers", *row[1:]) if is_stacked(path, stack) and row[:1] == (None,) else tuple(row)


def counting_dims(path: str, shape: Sequence[int], axes: AxesTable, *, stack: str | None = None) -> tuple[int, ...]:
    """Returns the dims of a global shape that count layers and experts; each index is a separate array of the model."""
    row = named_dims(path, shape, axes, stack)
    if row is None:
        return (0,) if is_stacked(path, stack) and shape else ()
    return tuple(dim for dim, name in enumerate(row) if name in COUNTING)


# --- Parameters and optimizer state. ---


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

    `entries` are changed in place, unless no dim divides; dims in `skip` stay. `fsdp` is put on an unsharded dim only.
    With `outermost` the outermost dim that divides is taken in place of the largest.
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
    """The mesh axes that shard each dim of a parameter as it is stored.

    A parameter with a row in the table is sharded as the row says; one without a row, or whose dim does not divide by
    `fsdp`, over `fsdp` in its largest dim that divides. For any other axis that is a `ConfigError`. Parameters of the
    layer stack are sharded over `pipe` in their layer dim; others over `pipe` in any dim that divides, or not at all.

    Args:
        path: Path of the parameter, such as `blocks/attention/query/kernel`.
        shape: Shape of the parameter.
        degrees: Size of each mesh axis; 1 for an axis that the code around handles itself (a manual region).
        axes, rules: The model's axes table, and logical name -> mesh axes.
        stack: Top-level path of the parameters that are stacked layer by layer; None: no such stack.
        also: More mesh axes to shard the parameter over where a dim divides (ZeRO shards optimizer state over `data`).
    """
    row = table_row(path, axes)
    stacked = is_stacked(path, stack)
    wants_fsdp = row is None
    if row is None:
        row = ("layers", *[None] * (len(shape) - 1)) if stacked else (None,) * len(shape)
    elif len(row) != len(shape):
        raise ConfigError(f"axes table: {path} has shape {shape} but the row {row} names {len(row)} axes")
    if stacked and row[:1] == (None,):
        # Each stage stores its own layers, also where the table does not name that dim.
        row = ("layers", *row[1:])
    entries = logical_entries(row, degrees, rules)
    wants_fsdp = wants_fsdp or any("fsdp" in entry_axes(entry) for entry in entries)
    for dim, entry in enumerate(entries):
        degree = entry_degree(entry, degrees)
        if shape[dim] % degree == 0:
            continue
        if entry != "fsdp":
            divisors = [d for d in _near_divisors(shape[dim], degree) if d <= 2 * degree]
            raise ConfigError(
                f"{row[dim]} of {path} is {shape[dim]}, which does not divide by {entry}={degree}; make it "
                f"{nearest_multiples(shape[dim], degree)}, or use parallel.{' x parallel.'.join(entry_axes(entry))}="
                f"{' or '.join(map(str, divisors))}"
            )
        entries[dim] = None
    layer_dims = {dim for dim, name in enumerate(row) if name in ("layers", "leading_layers")}
    more = ("fsdp",) if wants_fsdp and not any("fsdp" in entry_axes(entry) for entry in entries) else ()
    for axis in (*more, *(() if stacked or "layers" in row else ("pipe",))):
        entries = spread_axis(entries, shape, axis, degrees, layer_dims)
    for axis in also:
        # Collectives of NVIDIA gather and scatter the outermost dim in memory; for another one arrays are transposed.
        entries = spread_axis(entries, shape, axis, degrees, layer_dims, outermost=True)
    return entries


def block_entries(entries: Sequence[Entry], num_blocks: int, degrees: Mapping[str, int]) -> tuple[Entry, ...]:
    """Returns how one number per block of a parameter's last dim is sharded: as that, if the blocks divide."""
    last = entries[-1] if num_blocks % entry_degree(entries[-1], degrees) == 0 else None
    return (*entries[:-1], last)


def kept_entries(
    entries: Sequence[Entry],
    shape: Sequence[int],
    kept: Sequence[int],
    *,
    degrees: Mapping[str, int],
    counting: Sequence[int],
) -> tuple[Entry, ...] | None:
    """Returns how statistics of shape `kept`, which lack one dim of their parameter, are sharded, as its others are.

    Of several dims of equal size the last is taken for the missing one; None where none can be it. Mesh axes that store
    the missing dim shard another dim instead, if one divides; `counting` dims are not sharded over more axes.
    """
    for gone in reversed(range(len(shape))):
        if (*shape[:gone], *shape[gone + 1 :]) == tuple(kept):
            found = [*entries[:gone], *entries[gone + 1 :]]
            skip = {dim - (dim > gone) for dim in counting}
            lost = [axis for axis in _STORAGE if axis in entry_axes(entries[gone])]
            if "fsdp" in lost:
                # fsdp needs a dim of its own: the storage axes that take one make room and are put beside it.
                beside = [dim for dim, entry in enumerate(found) if entry in ("pipe", "data") and dim not in skip]
                lost += [axis for dim in beside for axis in entry_axes(found[dim])]
                found = [None if dim in beside else entry for dim, entry in enumerate(found)]
            for axis in lost:
                found = spread_axis(found, kept, axis, degrees, skip)
            return tuple(found)
    return None


def stage_over_data(zero: int) -> int:
    """The ZeRO stage (Rajbhandari et al. 2020) over `data`: 0, 1 or 2; stage 3 is the `fsdp` axis."""
    return 0 if zero == 3 else zero


def zero_axes(zero: int) -> tuple[str, ...]:
    """Mesh axes that stored parameters, optimizer state and moving average are sharded over besides those of a step."""
    return ("data",) if stage_over_data(zero) else ()


def num_pieces(elements: int, size: int) -> int:
    """In how many equal pieces an array of so many elements is summed over a dim of this size: of at most 64 MiB."""
    wanted = max(1, -(-elements // PIECE))
    return next((count for count in range(wanted, min(4 * wanted, size) + 1) if size % count == 0), 1)


# --- What a layout must not leave replicated. ---


def check_replicated_share(replicated: Mapping[str, int], total: int, fsdp: int, max_fraction: float) -> None:
    """Raise a `ConfigError` where more than a fraction of parameter bytes (`replicated`, by path) is so over `fsdp`."""
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
    """Raise a `ConfigError` where no parameter (path -> elements) is sharded over `tensor`, which would repeat work."""
    if tensor == 1 or sharded:
        return
    largest = max(sizes, key=lambda path: sizes[path], default="")
    names = ", ".join(name for name, axes in rules.items() if "tensor" in axes and "activation" not in name)
    raise ConfigError(
        f"parallel.tensor={tensor}, but no parameter of the model {model} is sharded over it; give the model "
        f"axes, such as {{{largest!r}: ...}} with the names {names}, or use parallel.tensor=1"
    )
