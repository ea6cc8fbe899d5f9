"""Bytes of the train state on one device, by the rules that lay it out. No jax here.

The sharding of each tensor comes from `rules.parameter_entries`, which the step uses too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from jaxtrain.layout.rules import (
    Entry,
    block_entries,
    counting_dims,
    entry_axes,
    entry_degree,
    kept_entries,
    parameter_entries,
    zero_axes,
)
from jaxtrain.optim.rules import (
    NEWTON_SCHULZ_STEPS,
    adamw_patterns,
    as_matrix,
    check_groups,
    check_patterns,
    directions,
    factored_dims,
    group_number,
    is_stored,
    moment_block,
)
from jaxtrain.plan.finetuned import LOW_RANK, Finetuned, in_step_order
from jaxtrain.precision.dtypes import POLICY_DTYPES

_FP32 = 4


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
    """Of one device, by part; of the parameters, `frozen` are never written."""

    params: int
    optimizer: int
    average: int
    model_state: int
    frozen: int = 0

    @property
    def total(self) -> int:
        """The train state."""
        return self.params + self.optimizer + self.average + self.model_state


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
    params = frozen = optimizer = average = 0
    for one in placed:
        if not one.trained:
            frozen += one.itemsize * local_size(one.shape, one.entries, degrees)
            continue
        size = local_size(one.shape, one.state_entries, degrees)
        params += one.itemsize * size
        optimizer += _optimizer_bytes(config, stored, one, size, degrees)
        average += _FP32 * size
    model_state = _FP32 * sum(map(math.prod, stored.tensors.model_state.values()))
    average = 0 if config.optimizer.ema_decay is None else average + model_state
    return StateBytes(params + frozen, optimizer, average, model_state, frozen)


def _check_matches(config: Config, placed: Sequence[Parameter]) -> None:
    """Raise where a pattern of `optimizer.groups` matches no trained parameter, or one of `adamw` none at all."""
    for key, patterns in adamw_patterns(config.optimizer).items():
        check_patterns(key, patterns, in_step_order(one.path for one in placed))
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
            matrix = as_matrix(one.path, one.shape, stored.axes, exclude=optimizer.adamw)
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
    """Row and column sums of each layer over its two largest dims if both are large enough, else a second moment.

    There are three trees, and one number where a tree does not apply. Sums are sharded as the dims that they keep.
    """
    counting = counting_dims(one.path, one.shape, stored.axes, stack=stored.tensors.stack)
    factored = factored_dims(one.shape, counting, smallest)
    if factored is None:
        return 2 + local_size(one.shape, one.state_entries, degrees)
    numbers = 1
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
        matrix = as_matrix(one.path, one.shape, stored.axes, exclude=optimizer.adamw)
        if matrix is None:
            continue
        short, long = sorted(math.prod(one.shape[d] for d in dims) for dims in (matrix.rows, matrix.columns))
        parts = math.prod(entry_degree(one.entries[d], degrees) for d in matrix.batch)
        devices = math.prod(degrees.values()) / parts
        count = math.prod(one.shape[d] for d in matrix.batch) / parts
        each = math.ceil(count / devices) if matrix.batch else count / devices
        flops += each * NEWTON_SCHULZ_STEPS * (4 * short**2 * long + 2 * short**3)
    return flops
