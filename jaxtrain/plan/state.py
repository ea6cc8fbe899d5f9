"""The parameters that a run stores, each on the mesh, and the bytes of its train state on one device. No jax here.

A fine-tuning stores adapters, and kernels in fewer bits, in place of a model's float kernels, by the rules that adapt
the model (`models/adapter_targets.py`); each tensor is sharded by `rules.parameter_entries`, as in the step.
"""

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxtrain.config.fits import fresh_parts
from jaxtrain.config.kinds import READS_REFERENCE
from jaxtrain.config.model import ModelConfig, TransformerConfig
from jaxtrain.config.optimizers import (
    AdafactorDirection,
    AdamWDirection,
    CalledOptimizer,
    DirectionConfig,
    LionDirection,
    MuonDirection,
    SGDDirection,
)
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.formats.nf4 import BLOCK, NESTED_BLOCK
from jaxtrain.layout.rules import (
    AxesTable,
    Entry,
    block_entries,
    counting_dims,
    entry_axes,
    entry_degree,
    kept_entries,
    parameter_entries,
    zero_axes,
)
from jaxtrain.models.adapter_targets import adapted_rows, check_train_also, find_targets, layer_sizes
from jaxtrain.models.shipped.shapes import Shapes, Tensors
from jaxtrain.optim.rules import (
    NEWTON_SCHULZ_STEPS,
    as_matrix,
    check_groups,
    check_patterns,
    directions,
    factored_dims,
    group_number,
    is_stored,
    moment_block,
)
from jaxtrain.precision.dtypes import POLICY_DTYPES

_FP32 = 4
LOW_RANK = ("/lora_a", "/lora_b")
"""Ends of the paths of an adapter's factors."""


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


@dataclass(frozen=True)
class Parameter:
    """One parameter and how it is sharded on a mesh.

    Attributes:
        path, shape: of the whole parameter.
        entries: mesh axes of each dim during a step.
        state_entries: the same for its optimizer state, which ZeRO shards over `data` too, with the parameter as it is
            stored if it is trained.
        trained: whether it has gradients and optimizer state.
        stacked: whether its first dim counts layers that a pipeline may divide.
        itemsize: bytes per element, as stored.
        scan: path of the stack of layers that it is in; None: it stands outside.
    """

    path: str
    shape: tuple[int, ...]
    entries: tuple[Entry, ...]
    state_entries: tuple[Entry, ...]
    trained: bool
    stacked: bool
    itemsize: int
    scan: str | None

    def is_over(self, axis: str) -> bool:
        """Whether it is sharded over a mesh axis during a step."""
        return any(axis in entry_axes(entry) for entry in self.entries)


@dataclass(frozen=True)
class StateBytes:
    """Of one device, by part; of the parameters, `frozen` are never written, and nor is the `reference`."""

    params: int
    optimizer: int
    average: int
    model_state: int
    frozen: int = 0
    reference: int = 0

    @property
    def total(self) -> int:
        """The train state."""
        return self.params + self.optimizer + self.average + self.model_state + self.reference


def shard_parameters(config: Config, stored: Finetuned, degrees: Mapping[str, int]) -> list[Parameter]:
    """Every parameter of a config on a mesh of these degrees.

    Raises:
        ConfigError: a dim does not divide by an axis that changes the computation.
    """
    stack, also = stored.tensors.stack, zero_axes(config.parallel.zero)
    dtype_bytes = POLICY_DTYPES[config.precision.policy].param_bytes
    placed = []
    for path, shape in stored.tensors.params.items():
        entries = tuple(parameter_entries(path, shape, degrees=degrees, axes=stored.axes, stack=stack))
        for_state = entries
        if also:
            for_state = tuple(parameter_entries(path, shape, degrees=degrees, axes=stored.axes, stack=stack, also=also))
        stacked = stack is not None and path.startswith(f"{stack}/")
        itemsize, scan = stored.itemsizes.get(path, dtype_bytes), stored.tensors.scan_of(path)
        placed.append(Parameter(path, shape, entries, for_state, path not in stored.frozen, stacked, itemsize, scan))
    return placed


def local_size(shape: Sequence[int], entries: Sequence[Entry], degrees: Mapping[str, int]) -> int:
    """Elements of one device's part."""
    return math.prod(
        size if entry is None else size // entry_degree(entry, degrees)
        for size, entry in zip(shape, entries, strict=True)
    )


def state_bytes(
    config: Config, stored: Finetuned, placed: Sequence[Parameter], degrees: Mapping[str, int]
) -> StateBytes:
    """Bytes of the train state on one device.

    Raises:
        ConfigError: a pattern of the optimizer matches no parameter.
    """
    _check_matches(config, placed)
    params = frozen = optimizer = average = reference = 0
    compute_bytes = POLICY_DTYPES[config.precision.policy].compute_bytes
    for one in placed:
        if not one.trained:
            frozen += one.itemsize * local_size(one.shape, one.entries, degrees)
            continue
        size = local_size(one.shape, one.state_entries, degrees)
        params += one.itemsize * size
        optimizer += _optimizer_bytes(config, stored, one, size, degrees)
        average += _FP32 * size
        reference += compute_bytes * size
    model_state = _FP32 * sum(map(math.prod, stored.tensors.model_state.values()))
    average = 0 if config.optimizer.ema_decay is None else average + model_state
    reference = reference + model_state if config.task in READS_REFERENCE else 0
    return StateBytes(params + frozen, optimizer, average, model_state, frozen, reference)


def _check_matches(config: Config, placed: Sequence[Parameter]) -> None:
    """Raise where a pattern of `optimizer.groups` matches no trained parameter."""
    if not isinstance(config.optimizer, CalledOptimizer):
        matches = [group.match for group in config.optimizer.groups]
        check_groups("optimizer.groups.{}.match", matches, [one.path for one in placed if one.trained])


def _direction(config: Config, one: Parameter) -> DirectionConfig:
    """What updates a parameter; the state of an optimizer of the user's own is read off the step."""
    optimizer = config.optimizer
    assert not isinstance(optimizer, CalledOptimizer)
    return directions(optimizer)[group_number(one.path, [group.match for group in optimizer.groups])]


def _optimizer_bytes(config: Config, stored: Finetuned, one: Parameter, size: int, degrees: Mapping[str, int]) -> int:
    """Bytes of optimizer state that one device keeps for a parameter of which it has `size` elements."""
    optimizer = _direction(config, one)
    match optimizer:
        case SGDDirection():
            return _FP32 * size if optimizer.momentum else 0
        case AdamWDirection():
            return 2 * _moment_bytes(optimizer.moments, one, size, degrees)
        case MuonDirection():
            matrix = as_matrix(one.path, one.shape, stored.axes)
            return _FP32 * size * (2 if matrix is None else 1)
        case LionDirection():
            return _moment_bytes(optimizer.moments, one, size, degrees)
        case AdafactorDirection():
            numbers = _adafactor_numbers(stored, one, degrees, optimizer.min_dim_size_to_factor)
            return _FP32 * (numbers + (size if optimizer.b1 else 0))


def _moment_bytes(moments: str, one: Parameter, size: int, degrees: Mapping[str, int]) -> int:
    """Of one moment, in the format in which it is stored."""
    if moments == "bfloat16" and is_stored(one.shape):
        return 2 * size
    block = moment_block(one.shape) if moments == "int8" else None
    if block is None:
        return _FP32 * size
    blocks = (*one.shape[:-1], one.shape[-1] // block)
    return size + local_size(blocks, block_entries(one.state_entries, blocks[-1], degrees), degrees)


def _adafactor_numbers(stored: Finetuned, one: Parameter, degrees: Mapping[str, int], smallest: int) -> int:
    """Row and column sums over the two largest dims if both are large enough, else a second moment.

    There are three trees, and one number where a tree does not apply. Sums are sharded as the dims that they keep.
    """
    factored = factored_dims(one.shape, smallest)
    if factored is None:
        return 2 + local_size(one.shape, one.state_entries, degrees)
    numbers, counting = 1, counting_dims(one.path, one.shape, stored.axes, stack=stored.tensors.stack)
    for gone in factored:
        shape = tuple(size for dim, size in enumerate(one.shape) if dim != gone)
        entries = kept_entries(one.state_entries, one.shape, shape, degrees=degrees, counting=counting)
        assert entries is not None, one.path
        numbers += local_size(shape, entries, degrees)
    return numbers


def update_flops(config: Config, stored: Finetuned, placed: Sequence[Parameter], degrees: Mapping[str, int]) -> float:
    """Operations of one device in matmuls of an update: Muon's, which deals whole matrices to the devices.

    An iteration makes X X^T, its square, and a product of their sum with X, of X [M, N] with M <= N.
    """
    flops = 0.0
    for one in placed:
        # The factors of adapters are too small to count.
        if not one.trained or one.path.endswith(LOW_RANK):
            continue
        optimizer = _direction(config, one)
        if not isinstance(optimizer, MuonDirection):
            continue
        matrix = as_matrix(one.path, one.shape, stored.axes)
        if matrix is None:
            continue
        short, long = sorted(math.prod(one.shape[d] for d in dims) for dims in (matrix.rows, matrix.columns))
        parts = math.prod(entry_degree(one.entries[d], degrees) for d in matrix.batch)
        devices = math.prod(degrees.values()) / parts
        count = math.prod(one.shape[d] for d in matrix.batch) / parts
        each = math.ceil(count / devices) if matrix.batch else count / devices
        flops += each * NEWTON_SCHULZ_STEPS * (4 * short**2 * long + 2 * short**3)
    return flops
