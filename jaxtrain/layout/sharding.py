"""Logical axes to mesh axes: the only place that builds a PartitionSpec for a parameter.

A model names the axes of its parameters in a path table and of its activations by `constrain`; the rules say over
which mesh axes a name is sharded. Parameters are *stored* sharded over `fsdp`, and with ZeRO over `data`; they are
*held* during a step, and *gathered* over `fsdp` for compute, one layer at a time (`gather.py`).

Code that a step calls takes the layout as an argument. Code that a model or an optimizer calls, whose signature is not
ours to extend, reads that of the trace (`current_layout`, and what is built on it), which `use_layout` sets.
"""

import collections
import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.layout.rules import (
    DEFAULT_RULES,
    AxesTable,
    Entry,
    block_entries,
    counting_dims,
    entry_axes,
    entry_degree,
    kept_entries,
    logical_entries,
    parameter_entries,
)
from jaxtrain.runtime.tree import path_name, paths_of

# A nested dict of arrays, shapes or shardings, one per parameter.
Params = Any


@dataclass(frozen=True)
class ParameterSpecs:
    """How one parameter is sharded in each of its uses.

    Attributes:
        shape: of the parameter.
        stored: in the train state; with ZeRO a trained parameter is sharded over `data` too, as its optimizer state is.
        held: during a step: as the rules say, and replicated over `data`.
        gathered: for compute: as held, but replicated over `fsdp`.
        optimizer_state: of optimizer state of the parameter's shape: as held, and with ZeRO over `data` too.
    """

    shape: tuple[int, ...]
    stored: PartitionSpec
    held: PartitionSpec
    gathered: PartitionSpec
    optimizer_state: PartitionSpec

    def map(self, change: Callable[[PartitionSpec], PartitionSpec], shape: tuple[int, ...]) -> "ParameterSpecs":
        """The specs changed, of a parameter of this shape."""
        return ParameterSpecs(shape, *map(change, (self.stored, self.held, self.gathered, self.optimizer_state)))


@dataclass(frozen=True)
class Layout:
    """A mesh, the rules, and the path table of the model on it.

    Attributes:
        mesh: six axes, always all present.
        axes, rules: parameter path -> logical axes -> mesh axes.
        stack: top-level path of the parameters that are stacked layer by layer; their first dim goes to `pipe`.
        context_attention: how attention works on a sequence sharded over `context`: ring, all_to_all, gather or auto.
        state_axes: mesh axes that ZeRO shards trained parameters and their optimizer state over.
        holds: whether the traced code gets parameters that are replicated over these, as in a train step.
        manual: mesh axes that the code being traced handles itself (inside `jax.shard_map`); they leave every spec.
        parameters: path -> specs of each parameter of the model; empty before `with_parameters`.
    """

    mesh: Mesh
    axes: AxesTable = field(default_factory=dict)
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DEFAULT_RULES)
    stack: str | None = None
    context_attention: str = "auto"
    state_axes: tuple[str, ...] = ()
    holds: bool = False
    manual: frozenset[str] = frozenset()
    parameters: Mapping[str, ParameterSpecs] = field(default_factory=dict)

    def degree(self, axis: str) -> int:
        """Size of a mesh axis that the compiler handles; 1 for one that the traced code handles itself."""
        return 1 if axis in self.manual else self.mesh.shape[axis]

    @property
    def degrees(self) -> dict[str, int]:
        """`degree` of every axis."""
        return {axis: self.degree(axis) for axis in self.mesh.shape}

    def named(self, spec: PartitionSpec) -> NamedSharding:
        """A sharding usable where this layout is traced."""
        return NamedSharding(jax.sharding.get_abstract_mesh() if self.manual else self.mesh, spec)


def logical_spec(names: tuple[str | None, ...], layout: Layout) -> PartitionSpec:
    """The mesh axes of each logical name, as a spec."""
    return PartitionSpec(*logical_entries(names, layout.degrees, layout.rules))


def with_parameters(layout: Layout, params: Params, *, trained: Callable[[str], bool] | None = None) -> Layout:
    """The layout of a model with the specs of every parameter; ZeRO shards those that are `trained` (None: all)."""
    found = {
        name: _derive_specs(name, leaf.shape, layout, trained=trained is None or trained(name))
        for name, leaf in paths_of(params).items()
    }
    return replace(layout, parameters=found)


def layout_of_part(layout: Layout, name: str, axes: AxesTable) -> Layout:
    """The layout of a model that is a part of another one, whose paths begin with the part's name: "teacher"."""
    prefix = f"{name}/"
    known = {path.removeprefix(prefix): specs for path, specs in layout.parameters.items() if path.startswith(prefix)}
    return replace(layout, axes=axes, parameters=known)


def parameter_specs(path: str, shape: tuple[int, ...], layout: Layout) -> ParameterSpecs:
    """The specs of a parameter; one that is not in the table (parts of a quantized kernel) follows the rules."""
    known = layout.parameters.get(path)
    if known is None or known.shape != tuple(shape):
        return _derive_specs(path, shape, layout)
    return _outside(known, layout.manual)


def layer_specs(path: str, shape: tuple[int, ...], layout: Layout, *, num_layers: int) -> ParameterSpecs:
    """The specs of one layer (of this shape) of a parameter that is stacked, by its own number, layer by layer."""
    known = layout.parameters.get(path)
    if known is None or known.shape[1:] != tuple(shape):
        known = _derive_specs(path, (num_layers, *shape), layout)
    return _outside(known, layout.manual).map(lambda spec: PartitionSpec(*spec[1:]), tuple(shape))


def parameter_spec(path: str, shape: tuple[int, ...], layout: Layout) -> PartitionSpec:
    """How a parameter is stored."""
    return parameter_specs(path, shape, layout).stored


def state_spec(path: str, shape: tuple[int, ...], layout: Layout) -> PartitionSpec:
    """How optimizer state of a parameter's shape is stored."""
    return parameter_specs(path, shape, layout).optimizer_state


def _derive_specs(path: str, shape: tuple[int, ...], layout: Layout, *, trained: bool = True) -> ParameterSpecs:
    held = _derive_spec(path, shape, layout)
    state = _derive_spec(path, shape, layout, also=layout.state_axes) if layout.state_axes else held
    return ParameterSpecs(tuple(shape), state if trained else held, held, without_axes(held, {"fsdp"}), state)


def _derive_spec(path: str, shape: tuple[int, ...], layout: Layout, *, also: tuple[str, ...] = ()) -> PartitionSpec:
    entries = parameter_entries(
        path, shape, degrees=layout.degrees, axes=layout.axes, rules=layout.rules, stack=layout.stack, also=also
    )
    return PartitionSpec(*entries)


def _outside(specs: ParameterSpecs, manual: frozenset[str]) -> ParameterSpecs:
    return specs.map(lambda spec: without_axes(spec, manual), specs.shape) if manual else specs


def without_axes(spec: PartitionSpec, axes: Set[str]) -> PartitionSpec:
    """The spec, replicated over these mesh axes."""

    def keep(entry: Any) -> Any:
        names = tuple(name for name in entry_axes(entry) if name not in axes)
        return names[0] if len(names) == 1 else names or None

    return PartitionSpec(*(keep(entry) for entry in spec))


def parameter_shardings(params: Params, layout: Layout) -> Any:
    """Storage shardings of a tree of parameters (arrays or shapes), leaf for leaf."""

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return layout.named(parameter_spec(path_name(path), leaf.shape, layout))

    return jax.tree_util.tree_map_with_path(sharding, params)


def optimizer_shardings(optimizer_state: Any, params: Params, layout: Layout) -> Any:
    """Shardings of optimizer state: a leaf that mirrors a parameter is sharded like it, another by the default rule.

    Optimizers keep trees of the parameters' structure inside their states, so a leaf belongs to the parameter whose
    path ends its own. One number per block of the last dim is sharded as the blocks are, and sums over one dim
    (Adafactor's) as the other dims are, so that a stack of layers meets its statistics on the devices that hold it.
    """
    shapes = {path: leaf.shape for path, leaf in paths_of(params).items()}
    owners = possible_owners(optimizer_state, params)
    unknown = Layout(layout.mesh, {}, layout.rules, state_axes=layout.state_axes)

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        for owner in owners[path_name(path)]:
            shape = shapes[owner]
            spec = state_spec(owner, shape, layout)
            if shape == leaf.shape:
                return NamedSharding(layout.mesh, spec)
            entries = _statistics_entries(owner, shape, leaf.shape, spec, layout)
            if entries is not None:
                return NamedSharding(layout.mesh, PartitionSpec(*entries))
        return NamedSharding(layout.mesh, state_spec("", leaf.shape, unknown))

    return jax.tree_util.tree_map_with_path(sharding, optimizer_state)


def possible_owners(optimizer_state: Any, params: Params) -> dict[str, list[str]]:
    """Path in an optimizer's state -> the parameters whose path ends it, that of the largest tree in the state first.

    The moment `mu/head` is that of `head`, also where there is a parameter `mu/head`.
    """
    known, found = paths_of(params), dict[str, list[tuple[str, str]]]()
    for path in paths_of(optimizer_state):
        parts = path.split("/")
        splits = [("/".join(parts[:start]), "/".join(parts[start:])) for start in range(len(parts))]
        found[path] = [(tree, owner) for tree, owner in splits if owner in known]
    sizes = collections.Counter(tree for splits in found.values() for tree, _ in splits)
    return {
        path: [owner for _, owner in sorted(splits, key=lambda split: -sizes[split[0]])]
        for path, splits in found.items()
    }


def _statistics_entries(
    path: str, shape: tuple[int, ...], kept: tuple[int, ...], spec: PartitionSpec, layout: Layout
) -> tuple[Entry, ...] | None:
    """Mesh axes of each dim of statistics of shape `kept` of a parameter; None: they do not look like statistics."""
    entries = (*spec, *[None] * len(shape))[: len(shape)]
    if shape and kept and shape[:-1] == kept[:-1] and shape[-1] % kept[-1] == 0:
        return block_entries(entries, kept[-1], layout.degrees)
    if shape and len(kept) == len(shape) - 1:
        counting = counting_dims(path, shape, layout.axes, stack=layout.stack)
        return kept_entries(entries, shape, kept, degrees=layout.degrees, counting=counting)
    return None


# The layout of the step that is being traced. Set by `use_layout` around a trace, never globally.
_layout: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("jaxtrain_layout", default=None)


@contextlib.contextmanager
def during_trace(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a variable of the trace inside a `with`."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def use_layout(layout: Layout | None) -> contextlib.AbstractContextManager[None]:
    """Give `constrain`, `gather_parameters` and the like a layout while a model is traced."""
    return during_trace(_layout, layout)


def current_layout() -> Layout | None:
    """The layout of the step that is being traced."""
    return _layout.get()


def platform() -> str:
    """The platform of the step that is being traced, else of the process."""
    layout = _layout.get()
    return jax.default_backend() if layout is None else layout.mesh.devices.flat[0].platform


def sum_over_shards(x: jax.Array) -> jax.Array:
    """Sum an array over those shards of a batch that the code being traced handles itself; `pipe` splits no batch."""
    layout = _layout.get()
    if layout is None:
        return x
    split = (*layout.rules["batch"], *layout.rules["sequence"])
    axes = tuple(axis for axis in split if axis in layout.manual and layout.mesh.shape[axis] > 1)
    return jax.lax.psum(x, axes) if axes else x


def splits_sequence() -> bool:
    """Whether the sequence dim of activations is sharded over a mesh axis that the compiler handles."""
    layout = _layout.get()
    if layout is None:
        return False
    return any(layout.degree(axis) > 1 for name in ("sequence", "residual_sequence") for axis in layout.rules[name])


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """The activation, sharded as its logical axes say; outside a sharded step, the array itself."""
    layout = _layout.get()
    if layout is None or layout.mesh.size == 1:
        return x
    # The backward pass of a `custom_vjp` inside a manual region is traced after `use_layout` has been left.
    if layout.manual.union(jax.sharding.get_abstract_mesh().manual_axes) == frozenset(layout.mesh.axis_names):
        return x
    spec = list(logical_spec(names, layout))
    # A dim that does not divide (a batch of one in sampling) is replicated: this changes speed, never results.
    spec = [entry if x.shape[d] % entry_degree(entry, layout.mesh.shape) == 0 else None for d, entry in enumerate(spec)]
    return jax.lax.with_sharding_constraint(x, layout.named(PartitionSpec(*spec)))
