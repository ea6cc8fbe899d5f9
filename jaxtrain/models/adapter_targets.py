"""Which kernels of a model get an adapter: what names and patterns of layers match, and what cannot have one.

No jax here: the planner asks too.
"""

import difflib
import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jaxtrain.config.schema import LoraConfig
from jaxtrain.errors import ConfigError
from jaxtrain.optim.rules import check_patterns


@dataclass(frozen=True)
class Layers:
    """What a model says of its layers.

    Attributes:
        name: of the model.
        shapes: path -> shape of every parameter.
        linears: path of each kernel of our linear layers -> how many of its last dims are inputs, how many are outputs.
        stack: top-level path of the layers that are stacked; None: there are none.
        has_experts: whether some layers are experts.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    linears: Mapping[str, tuple[int, int]]
    stack: str | None
    has_experts: bool


def find_targets(model: Layers, lora: LoraConfig, *, from_folder: bool = False) -> dict[str, tuple[int, int]]:
    """Find the kernels that get an adapter.

    Args:
        model: the model without adapters.
        lora: settings of the adapters.
        from_folder: whether an adapter's folder gave them; then the rank may exceed dims. It is that of the folder's
            widest module, whose factors are filled up with zeros elsewhere, and PEFT takes any.

    Returns:
        Path of each kernel, in the order of the model -> how many of its last dims are inputs, how many are outputs.

    Raises:
        ConfigError: a target matches no layer, or experts, or the rank exceeds a dim.
    """
    shapes = model.shapes
    kernels = dict(model.linears) or _matrices(model)
    names = {path: _layer(path) for path in kernels}
    found: set[str] = set()
    for target in lora.targets:
        if target == "*":
            _check_every_layer(model, lora)
        matched = [path for path in kernels if _is_target(path, names[path], target)]
        found.update(matched)
        _check_experts(model, target, kernels)
        if not matched:
            known = list(dict.fromkeys([*(name.rsplit("/", 1)[-1] for name in names.values()), *names.values()]))
            near = difflib.get_close_matches(target, known, n=3) or known[:8]
            raise ConfigError(
                f"lora.targets: {target!r} matches no linear layer of the model {model.name}; there are "
                f"{', '.join(near) or 'none'}"
            )
    for path in kernels:
        if path in found and not from_folder:
            _check_rank(names[path], shapes[path], kernels[path], lora.rank)
    return {path: dims for path, dims in kernels.items() if path in found}


def _layer(path: str) -> str:
    """The layer that a kernel belongs to."""
    return path.removesuffix("/kernel")


def _is_target(path: str, layer: str, target: str) -> bool:
    return any(fnmatch.fnmatchcase(name, target) for name in (path, layer)) or layer.rsplit("/", 1)[-1] == target


def _matrices(model: Layers) -> dict[str, tuple[int, int]]:
    """The parameters of a model without linear layers of ours that a low-rank product can be added to."""
    stack = None if model.stack is None else f"{model.stack}/"
    dims = {path: len(shape) - (stack is not None and path.startswith(stack)) for path, shape in model.shapes.items()}
    return {path: (1, 1) for path, count in dims.items() if count == 2}


def _check_every_layer(model: Layers, lora: LoraConfig) -> None:
    """Raise where '*' would not be every linear layer."""
    if not model.linears:
        raise ConfigError(
            f"lora.targets='*' is for models of our linear layers (jaxtrain.models.layers.Linear), and the model "
            f"{model.name} has none; name its kernels, such as targets=('layers/*/kernel',)"
        )
    if model.has_experts:
        names = ", ".join(dict.fromkeys(repr(_layer(path).rsplit("/", 1)[-1]) for path in model.linears))
        raise ConfigError(
            f"lora.targets='*' includes the experts of the model {model.name}, which cannot have adapters; write "
            f"targets=({names})"
        )


def _check_experts(model: Layers, target: str, kernels: Mapping[str, tuple[int, int]]) -> None:
    """Raise where a target names experts, which no adapter is added to."""
    if not model.has_experts:
        return
    experts = [path for path in model.shapes if path.rsplit("/", 1)[-1] == "kernel" and path not in kernels]
    named = [path for path in experts if _is_target(path, _layer(path), target)]
    if named:
        layers = ", ".join(dict.fromkeys(_layer(path).rsplit("/", 1)[-1] for path in kernels))
        raise ConfigError(
            f"lora.targets: {target!r} matches {_layer(named[0])} of the experts of the model {model.name}, which "
            f"cannot have adapters; use {layers}"
        )


def _check_rank(layer: str, shape: tuple[int, ...], dims: tuple[int, int], rank: int) -> None:
    inputs, outputs = layer_sizes(shape, *dims)
    if rank > min(inputs, outputs):
        raise ConfigError(
            f"lora.rank={rank} exceeds a dim of {layer} ({inputs} inputs, {outputs} outputs); use "
            f"rank={min(inputs, outputs)} or less, or leave the layer out of lora.targets"
        )


def check_train_also(
    patterns: Sequence[str],
    paths: Collection[str],
    targets: Collection[str],
    kernels: Collection[str],
    base: str | None,
) -> None:
    """Raise where a pattern of `lora.train_also` names nothing, or what is not trained whole.

    Args:
        patterns: of paths.
        paths: of every parameter of the model without adapters.
        targets: the kernels with an adapter.
        kernels: these, and the quantized ones.
        base: format of the kernels; None: floats.

    Raises:
        ConfigError: names the pattern, and the kernel that it matches.
    """
    check_patterns("lora.train_also", tuple(patterns), sorted(paths))
    for pattern in patterns:
        path = next((path for path in sorted(kernels) if fnmatch.fnmatchcase(path, pattern)), None)
        if path is not None:
            why = "has an adapter" if path in targets else f"is stored in {base}"
            raise ConfigError(
                f"lora.train_also: {pattern!r} matches {path}, which {why} and is not trained whole; leave it out of "
                "lora.train_also" + (", or the layer out of lora.targets" if path in targets and base is None else "")
            )


def layer_sizes(shape: tuple[int, ...], num_inputs: int, num_outputs: int) -> tuple[int, int]:
    """The number of inputs and of outputs of a layer.

    Args:
        shape: of its kernel, [*stack, *D, *F].
        num_inputs, num_outputs: dims of D and of F.
    """
    first = len(shape) - num_inputs - num_outputs
    return math.prod(shape[first : first + num_inputs]), math.prod(shape[first + num_inputs :])
