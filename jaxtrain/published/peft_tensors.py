"""The tensors of an adapter's folder as factors of our kernels, and back. No jax here.

The rows that name a family's weights name its adapters: a module whose weight becomes the kernel `.../kernel` has
factors that become `.../kernel/lora_a` [*stack, *D, R] and `.../kernel/lora_b` [*stack, R, *F] (D input dims, F output
dims, R rank), whatever the module is: torch's Linear, GPT-2's Conv1D, or one that holds several of our kernels.

A module that holds several kernels (c_attn, query_key_value, qkv_proj, gate_up_proj) has one A for all of them, and B
by rows. It is read as it is: every kernel gets that A. Kernels whose A differ are written as one module of a rank that
is larger by the number of kernels: their A one after the other, and B as blocks on a diagonal.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose

import numpy as np

from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.published.entries import Entry, Row, Tied, names_of, positions
from jaxtrain.published.peft import AdapterFolder, rank_and_scale, targets_module
from jaxtrain.published.safetensors import map_tensor
from jaxtrain.published.transforms import Transform

_A, _B = ".lora_A.weight", ".lora_B.weight"
# Rounding of alpha / sqrt(rank) in double precision is far below this; two settings that differ are far above.
_SAME_SCALE = 1e-9

Position = tuple[int, ...]


@dataclass(frozen=True)
class Factors:
    """How a module's factors become those of one of our kernels.

    Attributes:
        a: Theirs [R, inputs] -> ours [*D, R].
        b: Theirs [outputs, R] -> ours [R, *F].
        transposed: The module stores its weight as [inputs, outputs].
    """

    a: Transform
    b: Transform
    transposed: bool


@dataclass(frozen=True)
class AdapterArrays:
    """The arrays of an adapter in our words.

    Attributes:
        rank: R of all factors; those of smaller ranks are filled up with zeros, which stay zeros in training.
        scale: What the product of every pair of factors is multiplied by.
        factors: Path of the kernel -> (lora_a, lora_b), float32.
        whole: Path -> array of what is trained whole, float32.
    """

    rank: int
    scale: float
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]]
    whole: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class _Part:
    """A kernel of ours, of one layer, in a module of theirs."""

    row: Entry
    position: Position


def factor_transforms(row: Entry, rank: int) -> Factors | None:
    """Returns how the factors of a module become those of a kernel, or None where the row is no linear layer.

    Args:
        row: Row of the kernel.
        rank: R.
    """
    weight = row.transform
    if row.state or not row.path.endswith("/kernel") or len(weight.theirs) != 2 or set(weight.merges) != {1}:
        return None
    first = len(weight.splits[0])
    picked = dict(weight.picks)
    remaining = [at for at in range(first + len(weight.splits[1])) if at not in picked]
    # Which dim of theirs each of our dims comes from; inputs come first in ours.
    owners = [int(remaining[one] >= first) for one in weight.order]
    inputs = owners[0]
    if owners != sorted(owners, key=lambda owner: owner != inputs) or len(set(owners)) != 2:
        return None
    outputs, num_inputs = 1 - inputs, owners.count(inputs)
    a = Transform(
        theirs=(rank, weight.theirs[inputs]),
        start=(0, weight.start[inputs]),
        block=(rank, weight.block[inputs]),
        splits=((rank,), weight.splits[inputs]),
        picks=(),
        order=(*(1 + at for at in _order(weight.order, owners, inputs)), 0),
        merges=(1,) * (num_inputs + 1),
    )
    out = _order(weight.order, owners, outputs)
    shift = first if outputs == 1 else 0
    b = Transform(
        theirs=(weight.theirs[outputs], rank),
        start=(weight.start[outputs], 0),
        block=(weight.block[outputs], rank),
        splits=(weight.splits[outputs], (rank,)),
        picks=tuple((at - shift, index) for at, index in weight.picks),
        order=(len(out), *out),
        merges=(1,) * (len(out) + 1),
    )
    return Factors(a, b, transposed=inputs == 0)


def _order(order: Sequence[int], owners: Sequence[int], owner: int) -> list[int]:
    """The order of the dims of one of theirs among themselves."""
    own = [at for at, one in zip(order, owners, strict=True) if one == owner]
    return [sorted(own).index(at) for at in own]


def module_names(row: Entry | Tied, position: Position) -> list[str]:
    """Returns the names of the module whose weight a row holds, the one to write first."""
    return [name.removesuffix(".weight") for name in names_of(row, position) if name.endswith(".weight")]


def read_adapter_arrays(folder: AdapterFolder, rows: Sequence[Row]) -> AdapterArrays:
    """Reads the arrays of an adapter.

    Args:
        folder: The adapter.
        rows: Name table of the base's family, for the base.

    Raises:
        ConfigError: The adapter adapts what is no linear layer.
        CheckpointError: The tensors do not fit the base, or not adapter_config.json.
    """
    modules: dict[str, list[_Part]] = defaultdict(list)
    used: set[str] = set()
    for row in rows:
        if not isinstance(row, Entry) or factor_transforms(row, 1) is None:
            continue
        for position in positions(row):
            names = module_names(row, position)
            module = next((name for name in names if name + _A in folder.stored), names[0])
            _check_targeted(folder, row, module)
            if module + _A in folder.stored:
                modules[module].append(_Part(row, position))
                used |= {module + _A, module + _B}
    whole = _read_whole(folder, rows, used)
    _refuse_rest(folder, used)
    if not modules:
        raise CheckpointError(f"{folder.path} holds no factors of linear layers; it is no adapter of this base")
    found = {module: list(_factors(folder, module, parts)) for module, parts in modules.items()}
    scales = {module: rank_and_scale(folder.config, module)[1] for module in modules}
    rank = max(a.shape[-1] for parts in found.values() for _, a, _ in parts)
    widest = next(module for module, parts in found.items() if parts[0][1].shape[-1] == rank)
    scale = folder.config.scale
    if not isclose(scales[widest], scale, rel_tol=_SAME_SCALE):
        scale = scales[widest]
    factors: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for module, parts in found.items():
        same = isclose(scales[module], scale, rel_tol=_SAME_SCALE)
        for part, a, b in parts:
            own = factors.setdefault(part.row.path, _zeros(part.row, rank))
            own[0][part.position][..., : a.shape[-1]] = a
            # The kernels of one model share a scale: what another one has goes into B.
            own[1][part.position][: b.shape[0]] = b if same else b * np.float32(scales[module] / scale)
    # A kernel that a module holds beside adapted ones is written as zeros, and has no adapter.
    kept = {path: pair for path, pair in factors.items() if pair[0].any() or pair[1].any()}
    return AdapterArrays(rank, scale, kept or factors, whole)


def _zeros(row: Entry, rank: int) -> tuple[np.ndarray, np.ndarray]:
    made = factor_transforms(row, rank)
    assert made is not None
    return np.zeros((*row.stack, *made.a.ours), np.float32), np.zeros((*row.stack, *made.b.ours), np.float32)


def _check_targeted(folder: AdapterFolder, row: Entry, module: str) -> None:
    """Raises where adapter_config.json and the tensors do not name the same modules."""
    has, wanted = module + _A in folder.stored, targets_module(folder.config, module)
    if has and len(row.stack) > 1:
        raise ConfigError(
            f"{folder.path} adapts {module}, an expert of a mixture; adapters of experts are not supported"
        )
    if has and module + _B not in folder.stored:
        raise CheckpointError(f"{folder.path} holds {module}{_A} without {_B[1:]}; save the adapter again")
    if has and wanted is False:
        raise CheckpointError(
            f"{folder.path} holds {module}{_A}, but target_modules of its adapter_config.json leaves that module out; "
            "the two are not of one adapter"
        )
    if wanted and not has and len(row.stack) < 2:
        raise CheckpointError(
            f"{folder.path} holds no {module}{_A}, although target_modules of its adapter_config.json names that "
            "module of the base; it is an adapter of another base, or not whole"
        )


def _factors(
    folder: AdapterFolder, module: str, parts: Sequence[_Part]
) -> Iterator[tuple[_Part, np.ndarray, np.ndarray]]:
    """The factors of each kernel of one module: (which, [*D, R], [R, *F])."""
    rank, _ = rank_and_scale(folder.config, module)
    made = [factor_transforms(part.row, rank) for part in parts]
    assert made[0] is not None
    theirs = {}
    for end, transform in ((_A, made[0].a), (_B, made[0].b)):
        stored = folder.stored[module + end]
        if stored.shape != transform.theirs:
            raise CheckpointError(
                f"{folder.path}: {module}{end} is {list(stored.shape)}, but rank {rank} of its adapter_config.json and "
                f"the base ask for {list(transform.theirs)}; it is an adapter of another base"
            )
        if stored.dtype.kind in "iub":
            raise CheckpointError(f"{folder.path}: {module}{end} holds integers; save the adapter in a float dtype")
        theirs[end] = map_tensor(stored).astype(np.float32)
    pairs = []
    for one in made:
        assert one is not None
        a, b = ((transform, theirs[end]) for transform, end in ((one.a, _A), (one.b, _B)))
        pairs.append(tuple(transform.read(tensor, [slice(None)] * len(transform.ours)) for transform, tensor in (a, b)))
    own = _blocks(pairs, folder.config.rank)
    for part, (a, b) in zip(parts, own or pairs, strict=True):
        yield part, a, b


def _blocks(pairs: Sequence[tuple[np.ndarray, ...]], rank: int) -> list[tuple[np.ndarray, ...]] | None:
    """The factors of kernels that share a module as `stack_factors` writes them, each of its own rank; else None."""
    count = len(pairs)
    if count == 1 or pairs[0][0].shape[-1] != count * rank:
        return None
    found = []
    for at, (a, b) in enumerate(pairs):
        own = slice(at * rank, (at + 1) * rank)
        if b[: own.start].any() or b[own.stop :].any():
            return None
        found.append((a[..., own], b[own]))
    return found


def _read_whole(folder: AdapterFolder, rows: Sequence[Row], used: set[str]) -> dict[str, np.ndarray]:
    """What is trained whole: path -> array; adds the names that are read to `used`."""
    found: dict[str, np.ndarray] = {}
    for row in rows:
        if isinstance(row, Tied):
            _check_tied(folder, row, rows, used)
        if not isinstance(row, Entry) or row.state:
            continue
        names = {at: next((one for one in names_of(row, at) if one in folder.stored), None) for at in positions(row)}
        if not any(names.values()):
            continue
        array = np.empty(row.shape, np.float32)
        for position, name in names.items():
            if name is None:
                raise CheckpointError(
                    f"{folder.path} trains {row.path} whole in some layers only; supported is all layers or none"
                )
            stored = folder.stored[name]
            if stored.shape != row.transform.theirs:
                raise CheckpointError(
                    f"{folder.path}: {name} is {list(stored.shape)}, but {list(row.transform.theirs)} in the base; it "
                    "is an adapter of another base, or of one whose vocabulary was changed"
                )
            array[position] = row.transform.read(map_tensor(stored), [slice(None)] * len(row.transform.ours))
            used.add(name)
        found[row.path] = array
    return found


def _check_tied(folder: AdapterFolder, row: Tied, rows: Sequence[Row], used: set[str]) -> None:
    """Raises where an adapter unties what the base ties."""
    name = next((one for one in names_of(row) if one in folder.stored), None)
    to = next(names_of(one)[0] for one in rows if isinstance(one, Entry) and one.path == row.to)
    other = folder.stored.get(to)
    if name is None and other is None:
        return
    if name is None:
        # PEFT trains a copy, and what repeats the base's goes on as it was.
        raise ConfigError(
            f"{folder.path} trains {to} apart from {names_of(row)[0]}, which the base ties; this is not supported"
        )
    if other is None or not np.array_equal(map_tensor(folder.stored[name]), map_tensor(other)):
        raise ConfigError(f"{folder.path} trains {name} apart from {to}, which the base ties; this is not supported")
    used.add(name)


def _refuse_rest(folder: AdapterFolder, used: set[str]) -> None:
    """Raises where tensors are left that nothing read: dropping them would change the adapter."""
    rest = [name for name in folder.stored if name not in used]
    if not rest:
        return
    name = rest[0]
    whys = {
        "lora_embedding": "an adapter of an embedding",
        "lora_magnitude_vector": "of the kind DoRA",
        ".experts": "an adapter of the experts of a mixture",
        ".bias": "a bias of the base that is trained",
        "lm_head.lora": "an adapter of the output layer",
    }
    why = next((why for part, why in whys.items() if part in name), None)
    if why is not None:
        raise ConfigError(f"{folder.path} holds {name}, {why}; this is not supported")
    raise CheckpointError(f"{folder.path} holds {name}, which the base has no linear layer for; it is of another base")
