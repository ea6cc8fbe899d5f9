"""Logical axes to mesh axes: the only place that builds a PartitionSpec for a parameter.

A model names the axes of its parameters in a path table and of its activations by `constrain`; `Rules` say which
mesh axes a name is spread over. Parameters are *stored* over `fsdp` and *gathered* for compute, a layer at a time.
"""

import contextlib
import contextvars
import fnmatch
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.errors import ConfigError

AxesTable = Mapping[str, tuple[str | None, ...]]

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


@dataclass(frozen=True)
class Layout:
    """A mesh, the rules, and the path table of the model on it.

    Attributes:
        mesh: six axes, always all present.
        axes: parameter path -> logical axes.
        rules: logical axis -> mesh axes.
        stack: top-level path of the parameters that are stacked layer by layer; their first dim goes to `pipe`.
        context_attention: how attention works on a sequence spread over `context`: ring, all_to_all, gather or auto.
        manual: mesh axes that the code being traced handles itself (inside `jax.shard_map`); they leave every spec.
    """

    mesh: Mesh
    axes: AxesTable = field(default_factory=dict)
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DEFAULT_RULES)
    stack: str | None = None
    context_attention: str = "auto"
    manual: frozenset[str] = frozenset()

    def degree(self, axis: str) -> int:
        """Size of a mesh axis that the compiler handles; 1 for one that the traced code handles itself."""
        return 1 if axis in self.manual else self.mesh.shape[axis]

    def named(self, spec: PartitionSpec) -> NamedSharding:
        """A sharding usable where this layout is traced."""
        return NamedSharding(jax.sharding.get_abstract_mesh() if self.manual else self.mesh, spec)


def path_name(path: tuple[Any, ...]) -> str:
    """A tree path as text: `blocks/attention/query/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def logical_spec(names: tuple[str | None, ...], layout: Layout) -> PartitionSpec:
    """The mesh axes of each logical name.

    Raises:
        ConfigError: a name without a rule, or two dims on one mesh axis.
    """
    used: dict[str, str] = {}
    entries: list[tuple[str, ...] | str | None] = []
    for name in names:
        if name is None:
            entries.append(None)
            continue
        if name not in layout.rules:
            raise ConfigError(f"no sharding rule for logical axis {name!r}; known: {', '.join(layout.rules)}")
        mesh_axes = tuple(axis for axis in layout.rules[name] if layout.degree(axis) > 1)
        for axis in mesh_axes:
            if axis in used:
                raise ConfigError(f"logical axes {used[axis]!r} and {name!r} of {names} both want mesh axis {axis!r}")
            used[axis] = name
        entries.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
    return PartitionSpec(*entries)


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one dim of a spec."""
    return (entry,) if isinstance(entry, str) else entry or ()


def _degree(entry: Any, mesh: Mesh) -> int:
    return math.prod(mesh.shape[name] for name in _names(entry))


def nearest_multiples(size: int, multiple: int) -> str:
    """The sizes next to `size` that divide, for an error message: "8 or 12"."""
    low = size // multiple * multiple
    return " or ".join(str(number) for number in (low, low + multiple) if number)


def _nearest_degrees(size: int, entry: Any, degree: int) -> str:
    """The degrees next to this one that divide a dim, as keys of a config."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    low = max(d for d in divisors if d < degree)
    high = [d for d in divisors if degree < d <= 2 * degree][:1]
    return f"parallel.{' x parallel.'.join(_names(entry))}={' or '.join(map(str, [low, *high]))}"


def table_row(path: str, axes: AxesTable) -> tuple[str | None, ...] | None:
    """The row of a path in a table: exact, else the first pattern (`blocks_*/bias`) that matches."""
    if path in axes:
        return axes[path]
    return next((row for pattern, row in axes.items() if "*" in pattern and fnmatch.fnmatchcase(path, pattern)), None)


def _spread(entries: list[Any], shape: tuple[int, ...], axis: str, layout: Layout, skip: set[int]) -> list[Any]:
    """Put one more mesh axis on the largest dim that divides: a free one, else beside the axes that a dim has."""
    degree = layout.degree(axis)
    dims = [d for d in range(len(shape)) if d not in skip]
    fits = [d for d in dims if shape[d] % (degree * _degree(entries[d], layout.mesh)) == 0]
    if axis == "fsdp":  # gathered for every use, which another axis on the same dim would make slower
        fits = [d for d in fits if entries[d] is None]
    if degree > 1 and fits:
        best = max(fits, key=lambda d: (entries[d] is None, shape[d]))
        # In front, because what is scattered by hand over an axis has that axis outermost.
        entries[best] = axis if entries[best] is None else (axis, *_names(entries[best]))
    return entries


def parameter_spec(path: str, shape: tuple[int, ...], layout: Layout, *, also: tuple[str, ...] = ()) -> PartitionSpec:
    """How a parameter is stored.

    A path in the table follows its row; an unknown one puts its largest dim that divides on `fsdp`. `fsdp` only
    says where bytes live, so where the row's dim does not divide by it, another dim takes its place. A stack of
    layers is split over `pipe` by layers; what stands outside it is stored in `pipe` parts wherever a dim divides.

    Args:
        path: `blocks/attention/query/kernel`.
        shape: the parameter's shape.
        layout: mesh, rules and table.
        also: further mesh axes to spread it over where a dim divides (ZeRO puts optimizer state on `data`).

    Raises:
        ConfigError: the row has another rank, or a dim does not divide by an axis that changes the computation.
    """
    mesh, row = layout.mesh, table_row(path, layout.axes)
    stacked = layout.stack is not None and path.startswith(f"{layout.stack}/")
    if row is None:
        row = ("layers", *[None] * (len(shape) - 1)) if stacked else (None,) * len(shape)
        wants_fsdp = True
    elif len(row) != len(shape):
        raise ConfigError(f"axes table: {path} has shape {shape} but the row {row} names {len(row)} axes")
    else:
        wants_fsdp = any("fsdp" in _names(entry) for entry in logical_spec(row, layout))
    if stacked and row[:1] == (None,):
        row = ("layers", *row[1:])  # a stage holds its own layers, whether the table says so or not
    entries = list(logical_spec(row, layout))
    for dim, entry in enumerate(entries):
        degree = _degree(entry, mesh)
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
    more = ("fsdp",) if wants_fsdp and not any("fsdp" in _names(entry) for entry in entries) else ()
    for axis in (*more, *(() if stacked or layer_dims else ("pipe",)), *also):
        entries = _spread(entries, shape, axis, layout, layer_dims)
    return PartitionSpec(*entries)


def parameter_shardings(params: Any, layout: Layout, *, also: tuple[str, ...] = ()) -> Any:
    """Storage shardings of a tree of parameters (arrays or shapes), leaf for leaf; `also` as in `parameter_spec`."""

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return layout.named(parameter_spec(path_name(path), leaf.shape, layout, also=also))

    return jax.tree_util.tree_map_with_path(sharding, params)


def optimizer_shardings(optimizer_state: Any, params: Any, layout: Layout, *, also: tuple[str, ...] = ()) -> Any:
    """Shardings of optimizer state: a leaf that mirrors a parameter lies as it does, another by the default rule.

    Optimizers keep trees of the parameters' structure inside their states, so a leaf belongs to the parameter whose
    path ends its own; factored statistics have other shapes and take the default (largest dim that divides).
    """
    shapes = {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    unknown = Layout(layout.mesh, {}, layout.rules)

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        parts = path_name(path).split("/")
        for start in range(len(parts)):
            owner = "/".join(parts[start:])
            if shapes.get(owner) == leaf.shape:
                return NamedSharding(layout.mesh, parameter_spec(owner, leaf.shape, layout, also=also))
        return NamedSharding(layout.mesh, parameter_spec("", leaf.shape, unknown, also=also))

    return jax.tree_util.tree_map_with_path(sharding, optimizer_state)


def check_replicated(params: Any, shardings: Any, mesh: Mesh, max_fraction: float) -> None:
    """Fail when more than `max_fraction` of the parameter bytes stay whole on every `fsdp` shard.

    Raises:
        ConfigError: names the largest of them.
    """
    if mesh.shape["fsdp"] == 1:
        return
    whole: dict[str, int] = {}
    total = 0
    for (path, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
    ):
        size = leaf.size * leaf.dtype.itemsize
        total += size
        if not any("fsdp" in _names(entry) for entry in sharding.spec):
            whole[path_name(path)] = size
    fraction = sum(whole.values()) / max(total, 1)
    if fraction > max_fraction:
        largest = sorted(whole, key=lambda name: -whole[name])[:3]
        raise ConfigError(
            f"{fraction:.1%} of parameter bytes stay whole although parallel.fsdp={mesh.shape['fsdp']} "
            f"(largest: {', '.join(largest)}); give them dims that divide, lower parallel.fsdp, "
            f"or allow it with parallel.max_replicated_fraction={math.ceil(fraction * 100) / 100}"
        )


# The layout of the step that is being traced. Set by `use_layout` around a trace, never globally.
_layout: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("jaxtrain_layout", default=None)


@contextlib.contextmanager
def use_layout(layout: Layout | None) -> Iterator[None]:
    """Give `constrain` and `gather_parameters` a layout while a model is traced."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def current_layout() -> Layout | None:
    """The layout of the step that is being traced."""
    return _layout.get()


def platform() -> str:
    """The platform of the step that is being traced, else of the process."""
    layout = _layout.get()
    return jax.default_backend() if layout is None else layout.mesh.devices.flat[0].platform


def row_numbers(count: int) -> jax.Array:
    """Where the rows of an activation [count, ...] stand in their (micro)batch over all devices: int32 [count]."""
    layout = _layout.get()
    manual = layout is not None and "data" in layout.manual
    return jnp.arange(count) + (jax.lax.axis_index("data") * count if manual else 0)


def splits_sequence() -> bool:
    """Whether the sequence dim of activations is spread over a mesh axis that the compiler handles."""
    layout = _layout.get()
    if layout is None:
        return False
    return any(layout.degree(axis) > 1 for name in ("sequence", "residual_sequence") for axis in layout.rules[name])


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Lay an activation out as its logical axes say; outside a sharded step, the array itself."""
    layout = _layout.get()
    if layout is None or layout.mesh.size == 1 or layout.manual == frozenset(layout.mesh.axis_names):
        return x
    spec = list(logical_spec(names, layout))
    # A dim that does not divide (a batch of one in sampling) stays whole: this changes speed, never results.
    spec = [entry if x.shape[d] % _degree(entry, layout.mesh) == 0 else None for d, entry in enumerate(spec)]
    return jax.lax.with_sharding_constraint(x, layout.named(PartitionSpec(*spec)))


def _without_fsdp(spec: PartitionSpec) -> PartitionSpec:
    def keep(entry: Any) -> Any:
        names = tuple(name for name in _names(entry) if name != "fsdp")
        return names[0] if len(names) == 1 else names or None

    return PartitionSpec(*(keep(entry) for entry in spec))


def gather_parameters(
    params: Any, *, prefix: str = "", num_layers: int | None = None, skip: tuple[str, ...] = ()
) -> Any:
    """Parameters whole over `fsdp` for compute; their gradients go back to the stored layout.

    Called inside a scanned block it gathers one layer at a time, in the forward and again in the backward pass.

    Args:
        params: a tree of parameters.
        prefix: path of the tree inside the model ("blocks").
        num_layers: given when the leaves are one layer of parameters stored with a leading dim of this size.
        skip: top-level sub-trees of `params` that are left as stored (they are gathered inside their own scans).
    """
    layout = _layout.get()
    if layout is None or layout.mesh.shape["fsdp"] == 1:
        return params

    def gather(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        name = path_name(path)
        if name.split("/")[0] in skip:
            return leaf
        full = f"{prefix}/{name}" if prefix else name
        if num_layers is None:
            stored = parameter_spec(full, leaf.shape, layout)
        else:
            stored = PartitionSpec(*parameter_spec(full, (num_layers, *leaf.shape), layout)[1:])
        whole, lies = (layout.named(spec) for spec in (_without_fsdp(stored), stored))
        return _gather(leaf, whole, lies, sum_whole=num_layers is None or not any(whole.spec))

    return jax.tree_util.tree_map_with_path(gather, params)


def constrain_parameters(tree: Any) -> Any:
    """Parameters, or their gradients, laid out as `gather_parameters` gives them: whole over `fsdp`."""
    layout = _layout.get()
    if layout is None or layout.mesh.size == 1:
        return tree

    def constrain_one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        spec = _without_fsdp(parameter_spec(path_name(path), leaf.shape, layout))
        return jax.lax.with_sharding_constraint(leaf, layout.named(spec))

    return jax.tree_util.tree_map_with_path(constrain_one, tree)


def _gather(x: jax.Array, whole: NamedSharding, stored: NamedSharding, *, sum_whole: bool) -> jax.Array:
    """Gather in the forward pass; bring the gradient back to the stored layout in the backward pass.

    `sum_whole` sums a gradient first and slices it then (a reduce-scatter in the end). That of an embedding is a
    scatter, which the partitioner cannot split as it is stored without gathering what it scatters; that of a norm's
    scale or a router, which no other axis spreads, it would split over `tensor` and then permute to `fsdp`, which a
    pipeline stage must not do.
    """

    @jax.custom_vjp
    def gather(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, whole)

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return gather(x), None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        if sum_whole:
            gradient = jax.lax.with_sharding_constraint(gradient, whole)
        return (jax.lax.with_sharding_constraint(gradient, stored),)

    gather.defvjp(forward, backward)
    return gather(x)
