"""The axes table of an adapted model: a row for each array that stands in the place of a kernel.

No jax here: the planner asks too.
"""

import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import DEFAULT_RULES, AxesTable, FamilyTable, table_row

if TYPE_CHECKING:
    from jaxtrain.models.model import Model

Names = tuple[str | None, ...]


def adapted_axes(
    model: "Model",
    kernels: Mapping[str, tuple[int, int]],
    shapes: Mapping[str, Any],
    *,
    base: str | None,
    nested: bool,
    targets: tuple[str, ...],
) -> AxesTable:
    """The axes table of an adapted model.

    Args:
        model: the model without adapters.
        kernels: path of each kernel that something else stands in the place of -> its number of input and output dims.
        shapes: path -> shape of every parameter of the model.
        base: format of the kernels; None: floats.
        nested: whether the scales of nf4 kernels are quantized too.
        targets: paths of the kernels that have an adapter.

    Raises:
        ConfigError: a row of the model's own table matches no parameter.
    """
    if not isinstance(model.axes, FamilyTable):
        for row in model.axes:
            if not any(path == row or fnmatch.fnmatchcase(path, row) for path in shapes):
                raise ConfigError(f"axes of the model {model.name}: {row!r} matches no parameter")
    # Rows of the original kernels stay: a model may still ask how such an array is sharded.
    axes: dict[str, Names] = dict(model.axes)
    for path, dims in kernels.items():
        num_dims = len(shapes[path].shape)
        has_adapter = path in targets
        axes |= adapted_rows(path, num_dims, dims, model.axes, base=base, nested=nested, has_adapter=has_adapter)
    return FamilyTable(axes)


def adapted_rows(
    path: str,
    num_dims: int,
    dims: tuple[int, int],
    table: AxesTable,
    *,
    base: str | None,
    nested: bool,
    has_adapter: bool,
) -> dict[str, Names]:
    """The rows of the arrays that stand in the place of a kernel; none where the kernel has no row.

    Args:
        path: of the kernel.
        num_dims: of the kernel.
        dims: how many of its last dims are inputs, how many are outputs.
        table: of the model without adapters.
        base: format of the kernel; None: floats.
        nested: whether the scales of an nf4 kernel are quantized too.
        has_adapter: whether the kernel has an adapter.
    """
    row = table_row(path, table)
    if row is None:
        return {}
    first = num_dims - sum(dims)
    stack, inputs, outputs = row[:first], row[first : first + dims[0]], row[first + dims[0] :]
    rows = base_rows(f"{path}/base" if has_adapter else path, stack, inputs, outputs, base=base, nested=nested)
    if has_adapter:
        rows[f"{path}/lora_a"] = (*stack, *inputs, _rank_name(inputs, outputs))
        rows[f"{path}/lora_b"] = (*stack, _rank_name(outputs, inputs), *outputs)
    return rows


def base_rows(
    place: str, stack: Names, inputs: Names, outputs: Names, *, base: str | None, nested: bool
) -> dict[str, Names]:
    """The rows of what a kernel is stored as.

    Args:
        place: path of the kernel, or of the base below an adapter.
        stack, inputs, outputs: names of the dims that count layers, and of the input and output dims.
        base: format of the kernel; None: floats.
        nested: whether the scales of an nf4 kernel are quantized too.
    """
    if base is None:
        return {place: (*stack, *inputs, *outputs)}
    if base == "nf4":
        # Blocks of 64 inputs rarely divide by an axis that divides the inputs: their scales are sharded over fsdp only,
        # where a dim that does not divide gives way to another one.
        blocks = inputs[0] if _is_stored_only(inputs[0]) else None
        rows = {f"{place}/codes": (*stack, inputs[0], *outputs), f"{place}/absmax": (*stack, blocks, *outputs)}
        return rows | ({f"{place}/nested_absmax": (*stack, None), f"{place}/offset": stack} if nested else {})
    return {f"{place}/values": (*stack, *inputs, *outputs), f"{place}/scale": (*stack, *outputs)}


def _is_stored_only(name: str | None) -> bool:
    """Whether a name stands for `fsdp` alone, which only decides where bytes are stored."""
    return name is not None and DEFAULT_RULES.get(name) == ("fsdp",)


def _rank_name(own: Names, other: Names) -> str | None:
    """The name of the dim of the rank: of a factor without a dim on `fsdp` that of the other factor's dim there.

    Otherwise every shard of `fsdp` would store the whole factor.
    """
    stored = [name for name in other if name is not None and "fsdp" in DEFAULT_RULES.get(name, ())]
    has_own = any(name is not None and "fsdp" in DEFAULT_RULES.get(name, ()) for name in own)
    return None if has_own or not stored else stored[0]
