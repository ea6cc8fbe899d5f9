"""What a fine-tuning stores: adapters, and kernels in fewer bits, in place of a model's float kernels. No jax here.

Names and dims of axes come from the rules that adapt the model (`models/adapter_targets.py`).
"""

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from jaxtrain.config.model import ModelConfig, TransformerConfig
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.interop.formats.nf4 import BLOCK, NESTED_BLOCK
from jaxtrain.interop.settings import fresh_parts
from jaxtrain.layout.rules import AxesTable
from jaxtrain.models.adapter_targets import adapted_rows, check_train_also, find_targets, layer_sizes
from jaxtrain.models.shipped.shapes import Shapes, Tensors
from jaxtrain.optim.rules import check_patterns
from jaxtrain.precision.dtypes import POLICY_DTYPES

LOW_RANK = ("/lora_a", "/lora_b")
"""Ends of the paths of an adapter's factors."""
_FP32 = 4


@dataclass(frozen=True)
class Finetuned:
    """The parameters of a run as they are stored.

    Attributes:
        tensors: of the model, with the arrays that stand in the place of kernels.
        axes: logical axes of each.
        itemsizes: path -> bytes per element, of parameters that are not stored as trained ones are.
        frozen: paths of parameters that are not trained.
        adapters: kernel -> elements of its adapter, as a multiple of those of the kernel.
        quantized: kernel -> number of its elements, of those in fewer bits.
    """

    tensors: Tensors
    axes: AxesTable
    itemsizes: Mapping[str, int]
    frozen: frozenset[str]
    adapters: Mapping[str, float]
    quantized: Mapping[str, int]

    @property
    def trained(self) -> frozenset[str] | None:
        """Paths of the parameters that are trained; None: all."""
        return frozenset(self.tensors.params) - self.frozen if self.frozen else None


def finetuned(config: Config, tensors: Tensors) -> Finetuned:
    """What a config trains and keeps frozen of a model, whose tensors are given as floats.

    Raises:
        ConfigError: targets or a rank that the model cannot have, or patterns that freeze every parameter or none.
    """
    axes, lora = tensors.axes, config.finetune.lora
    if lora is None:
        check_patterns("optimizer.freeze", config.optimizer.freeze, in_step_order(tensors.params))
        frozen = frozenset(path for path in tensors.params if _matches(path, config.optimizer.freeze))
        if frozen and len(frozen) == len(tensors.params):
            raise ConfigError("optimizer.freeze matches every parameter; leave one to train")
        # What is frozen stays in the float32 that it is drawn in, under bf16_pure too.
        return Finetuned(tensors, axes, dict.fromkeys(frozen, _FP32), frozen, {}, {})
    linears, base = _linears(config.model, tensors.params), config.finetune.base
    found = find_targets(config.model.kind, linears, lora)
    kernels = linears if base else found
    # What is drawn may be model_state.
    fresh = [one for one in fresh_parts(config.model) if any(_matches(path, (one,)) for path in tensors.params)]
    also = (*lora.train_also, *fresh)
    check_train_also(also, tensors.params, found, kernels, base)
    params: Shapes = {}
    itemsizes: dict[str, int] = {}
    compute = POLICY_DTYPES[config.precision.policy].compute_bytes
    for path, shape in tensors.params.items():
        if path not in kernels:
            params[path] = shape
            if not _matches(path, also):
                itemsizes[path] = compute
            continue
        place = f"{path}/base" if path in found else path
        below = _base(base, shape, kernels[path], compute, double=config.finetune.double_quantization)
        for name, (part, itemsize) in below.items():
            params[f"{place}{name}"], itemsizes[f"{place}{name}"] = part, itemsize
        if path in found:
            first, after = len(shape) - sum(kernels[path]), len(shape) - kernels[path][1]
            params[f"{path}/lora_a"] = (*shape[:after], lora.rank)
            params[f"{path}/lora_b"] = (*shape[:first], lora.rank, *shape[after:])
    rows = dict(axes)
    nested = base == "nf4" and config.finetune.double_quantization
    for path, dims in kernels.items():
        num_dims, has_adapter = len(tensors.params[path]), path in found
        rows |= adapted_rows(path, num_dims, dims, axes, base=base, nested=nested, has_adapter=has_adapter)
    adapters = {
        path: sum(math.prod(params[f"{path}{factor}"]) for factor in LOW_RANK) / math.prod(tensors.params[path])
        for path in found
    }
    quantized = {path: math.prod(tensors.params[path]) for path in kernels} if base else {}
    stored = replace(tensors, params=params)
    return Finetuned(stored, rows, itemsizes, frozenset(itemsizes), adapters, quantized)


def in_step_order(paths: Iterable[str]) -> list[str]:
    """Paths of parameters as the step lists them, for the same message: jax sorts the keys of each dict."""
    return sorted(paths, key=lambda path: path.split("/"))


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _linears(config: ModelConfig, params: Shapes) -> dict[str, tuple[int, int]]:
    """The kernels of linear layers, as `Model.linears` has them: how many dims are inputs, how many outputs."""
    has_experts = isinstance(config, TransformerConfig) and config.experts is not None
    found = {}
    for path in params:
        group, layer, leaf = ("/", "", "", *path.split("/"))[-3:]
        if leaf != "kernel":
            continue
        if group in ("attention", "cross_attention"):
            found[path] = (2, 1) if layer == "output" else (1, 2)
        elif (group == "mlp" and not has_experts) or group == "layers":
            found[path] = (1, 1)
    return found


def _base(
    base: str | None, shape: tuple[int, ...], dims: tuple[int, int], compute: int, *, double: bool
) -> dict[str, tuple[tuple[int, ...], int]]:
    """The arrays of a frozen kernel with so many input and output dims: end of the path -> (shape, element bytes)."""
    if base is None:
        return {"": (shape, compute)}
    first, after = len(shape) - sum(dims), len(shape) - dims[1]
    stack, outputs = shape[:first], shape[after:]
    if base == "int8":
        return {"/values": (shape, 1), "/scale": ((*stack, *outputs), _FP32)}
    inputs, columns = layer_sizes(shape, *dims)
    blocks = math.ceil(inputs / BLOCK)
    codes = {"/codes": ((*stack, inputs // 2, *outputs), 1)}
    if not double:
        return codes | {"/absmax": ((*stack, blocks, *outputs), _FP32)}
    nested = math.ceil(blocks * columns / NESTED_BLOCK)
    scales = {"/absmax": ((*stack, blocks, *outputs), 1), "/nested_absmax": ((*stack, nested), _FP32)}
    return codes | scales | {"/offset": (stack, _FP32)}
