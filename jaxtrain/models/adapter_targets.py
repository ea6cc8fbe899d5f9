"""Which kernels of a model get an adapter, and the axes of the arrays that stand in the place of a kernel.

No jax here: the planner asks too.
"""

import difflib
import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence

from jaxtrain.config.schema import LoraConfig
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import DEFAULT_RULES, AxesTable, table_row
from jaxtrain.optim.rules import check_patterns

Names = tuple[str | None, ...]


def find_targets(model: str, linears: Mapping[str, tuple[int, int]], lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """Find the kernels that get an adapter, among those of the linear layers of the model of this name.

    Returns:
        Path of each kernel, in the order of the model -> how many of its last dims are inputs, how many are outputs.
    """
    found: set[str] = set()
    for target in lora.targets:
        matched = [path for path in linears if _is_target(path, target)]
        if not matched:
            layers = [path.removesuffix("/kernel") for path in linears]
            names = list(dict.fromkeys(name for layer in layers for name in (layer.rsplit("/", 1)[-1], layer)))
            near = difflib.get_close_matches(target, names, n=3) or names[:8]
            raise ConfigError(
                f"lora.targets: {target!r} matches no linear layer of the model {model}; there are "
                f"{', '.join(near) or 'none'}"
            )
        found.update(matched)
    return {path: dims for path, dims in linears.items() if path in found}


def _is_target(path: str, target: str) -> bool:
    layer = path.removesuffix("/kernel")
    return any(fnmatch.fnmatchcase(name, target) for name in (path, layer)) or layer.rsplit("/", 1)[-1] == target


def check_train_also(
    patterns: Sequence[str],
    paths: Collection[str],
    targets: Collection[str],
    kernels: Collection[str],
    base: str | None,
) -> None:
    """Raise where a pattern of `lora.train_also` names nothing, or what is not trained whole."""
    check_patterns("lora.train_also", tuple(patterns), sorted(paths))
    for pattern in patterns:
        path = next((path for path in sorted(kernels) if fnmatch.fnmatchcase(path, pattern)), None)
        if path is not None:
            why = "has an adapter" if path in targets else f"is stored in {base}"
            raise ConfigError(
                f"lora.train_also: {pattern!r} matches {path}, which {why} and cannot be fully trained; leave it out"
            )


def layer_sizes(shape: tuple[int, ...], num_inputs: int, num_outputs: int) -> tuple[int, int]:
    """The number of inputs and of outputs of a layer whose kernel [*stack, *D, *F] has so many dims of D and of F."""
    first = len(shape) - num_inputs - num_outputs
    return math.prod(shape[first : first + num_inputs]), math.prod(shape[first + num_inputs :])


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
    """The axes of the arrays that stand in the place of a kernel; none where the kernel has no row."""
    row = table_row(path, table)
    if row is None:
        return {}
    first = num_dims - sum(dims)
    stack, inputs, outputs = row[:first], row[first : first + dims[0]], row[first + dims[0] :]
    place = f"{path}/base" if has_adapter else path
    if base is None:
        rows: dict[str, Names] = {place: row}
    elif base == "nf4":
        # Blocks of 64 inputs rarely divide by an axis that divides the inputs: their scales are sharded over fsdp only,
        # where a dim that does not divide gives way to another one.
        blocks = inputs[0] if inputs[0] is not None and DEFAULT_RULES.get(inputs[0]) == ("fsdp",) else None
        rows = {f"{place}/codes": (*stack, inputs[0], *outputs), f"{place}/absmax": (*stack, blocks, *outputs)}
        rows |= {f"{place}/nested_absmax": (*stack, None), f"{place}/offset": stack} if nested else {}
    else:
        rows = {f"{place}/values": row, f"{place}/scale": (*stack, *outputs)}
    if has_adapter:
        rows[f"{path}/lora_a"] = (*stack, *inputs, _rank_name(inputs, outputs))
        rows[f"{path}/lora_b"] = (*stack, _rank_name(outputs, inputs), *outputs)
    return rows


def _rank_name(own: Names, other: Names) -> str | None:
    """The name of the dim of the rank: of a factor without a dim on `fsdp` that of the other factor's dim there.

    Otherwise every shard of `fsdp` would store the whole factor.
    """
    stored, has_own = (
        [name for name in names if name is not None and "fsdp" in DEFAULT_RULES.get(name, ())] for names in (other, own)
    )
    return None if has_own or not stored else stored[0]
