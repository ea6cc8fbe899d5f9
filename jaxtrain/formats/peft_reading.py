"""Folders of adapters as PEFT writes them: adapter_config.json and the tensors, as factors of our kernels.
No jax here.

The tensors lie in adapter_model.safetensors. A linear layer whose weight a published folder calls
`model.layers.0.self_attn.q_proj.weight` has, with rank R, I inputs and O outputs,

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [R, I]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [O, R]

and its weight becomes W + scale * B A, where scale is alpha / R, or alpha / sqrt(R) if rank stabilised. What is trained
whole (a head) lies there too, as `base_model.model.score.weight`.

The rows that name a family's weights name its adapters: a module whose weight becomes the kernel `.../kernel` has
factors that become `.../kernel/lora_a` [*stack, *D, R] and `.../kernel/lora_b` [*stack, R, *F] (D input dims, F output
dims), whatever the module is: torch's Linear, GPT-2's Conv1D, or one that holds several of our kernels. Such a module
(c_attn, query_key_value, qkv_proj, gate_up_proj) has one A for all of them, and B by rows: every kernel gets that A.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.formats.hub import read_json
from jaxtrain.formats.rows import Entry, Position, Row, Tied, Transform, names_of, positions
from jaxtrain.formats.safetensors import StoredTensor, map_tensor, read_header

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
# Keys that are read, that the tensors say too, or that say how the factors were begun, or where they came from. Any
# other key (DoRA, biases, stacked parameters, ...) changes the arithmetic unless its value is off.
_KNOWN = (
    "peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "use_rslora",
    "target_modules", "exclude_modules", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform",
    "layers_pattern", "init_lora_weights", "auto_mapping", "revision", "peft_version", "inference_mode",
    "fan_in_fan_out", "megatron_config", "megatron_core", "runtime_config", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "qalora_group_size", "ensure_weight_tying",
)  # fmt: skip
_OFF = (None, False, [], {}, "none")
# Ways to begin that change the base too, so that the factors alone are not the adapter.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Rounding of alpha / sqrt(rank) in double precision is far below this; two settings that differ are far above.
_SAME_SCALE = 1e-9


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter_config.json says.

    Attributes:
        rank, alpha: Of every module that no pattern names.
        dropout: Share of an adapter's inputs that become 0 in training.
        rank_stabilised: Whether the scale is alpha / sqrt(rank) instead of alpha / rank.
        rank_pattern, alpha_pattern: Regular expression of the end of a module's name -> its rank or alpha.
        base: Name of the base, or the path to it.
        task_type: CAUSAL_LM, SEQ_CLS, ...; None: not said.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    rank_stabilised: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    base: str | None = None
    task_type: str | None = None

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by in modules that no pattern names."""
        return _scale(self.alpha, self.rank, self.rank_stabilised)


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter's folder, opened by `open_adapter_folder`; `stored` is name without the prefix -> tensor, not read."""

    path: Path
    config: AdapterConfig
    stored: Mapping[str, StoredTensor]


def is_adapter_folder(path: str | Path) -> bool:
    """Whether a folder holds an adapter."""
    return (Path(path) / CONFIG).is_file()


def open_adapter_folder(path: str | Path) -> AdapterFolder:
    """Opens an adapter's folder; headers are read and checked, tensors are not.

    Raises:
        ConfigError: No adapter there, or an adapter of a kind that is not supported.
        CheckpointError: Its file of tensors is missing or damaged.
    """
    folder = Path(path)
    if not is_adapter_folder(folder):
        raise ConfigError(f"{folder} has no {CONFIG}; give an adapter folder of PEFT or of jaxtrain export")
    config = _read_config(folder / CONFIG)
    stored = read_header(folder / WEIGHTS)
    return AdapterFolder(folder, config, {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()})


def _read_config(file: Path) -> AdapterConfig:
    said = read_json(file)
    wrong = next((key for key, value in said.items() if key not in _KNOWN and value not in _OFF), None)
    if said.get("peft_type") != "LORA":
        wrong = "peft_type"
    if str(said.get("init_lora_weights")).lower().startswith(_CHANGES_BASE):
        wrong = "init_lora_weights"
    if wrong is not None:
        raise ConfigError(f"{file} has {wrong}: {said.get(wrong)}, but only plain LoRA adapters are supported")

    def patterns(key: str, kind: type) -> dict[str, Any]:
        return {pattern: kind(value) for pattern, value in (said.get(key) or {}).items() if re.compile(pattern)}

    try:
        config = AdapterConfig(
            rank=int(said.get("r", 8)),
            alpha=said.get("lora_alpha", 8),
            dropout=float(said.get("lora_dropout") or 0),
            rank_stabilised=bool(said.get("use_rslora")),
            rank_pattern=patterns("rank_pattern", int),
            alpha_pattern=patterns("alpha_pattern", float),
            base=said.get("base_model_name_or_path"),
            task_type=said.get("task_type"),
        )
        if not min(config.rank, config.alpha, *config.rank_pattern.values(), *config.alpha_pattern.values()) > 0:
            raise ValueError("ranks and alphas are numbers above 0")
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise ConfigError(f"{file} has a value that cannot be read: {error}") from None
    return config


def rank_and_scale(config: AdapterConfig, module: str) -> tuple[int, float]:
    """Returns the rank of a module, and what the product of its factors is multiplied by."""

    def of(patterns: Mapping[str, Any], default: Any) -> Any:
        return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)

    rank = of(config.rank_pattern, config.rank)
    return rank, _scale(of(config.alpha_pattern, config.alpha), rank, config.rank_stabilised)


def _scale(alpha: float, rank: float, rank_stabilised: bool) -> float:
    return alpha / (rank**0.5 if rank_stabilised else rank)


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


def factor_transforms(row: Row, rank: int) -> Factors | None:
    """Returns how the factors of a module become those of a row's kernel, or None where it is no linear layer."""
    if not isinstance(row, Entry) or row.state or not row.path.endswith("/kernel"):
        return None
    weight = row.transform
    if len(weight.theirs) != 2 or 0 in weight.merges:
        return None
    first = len(weight.splits[0])
    remaining = [at for at, pick in enumerate(weight.picked) if isinstance(pick, range)]
    # Which dim of theirs each of our dims comes from; inputs come first in ours.
    owners = [int(remaining[one] >= first) for one in weight.order]
    inputs = owners[0]
    if owners != sorted(owners, key=lambda owner: owner != inputs) or len(set(owners)) != 2:
        return None
    # How many of our dims are of the inputs, each of which may merge some.
    outputs, ends = 1 - inputs, list(accumulate(weight.merges))
    if owners.count(inputs) not in ends:
        return None
    num_inputs = 1 + ends.index(owners.count(inputs))
    a = Transform(
        theirs=(rank, weight.theirs[inputs]),
        start=(0, weight.start[inputs]),
        block=(rank, weight.block[inputs]),
        splits=((rank,), weight.splits[inputs]),
        picks=(),
        order=(*(1 + at for at in _order(weight.order, owners, inputs)), 0),
        merges=(*weight.merges[:num_inputs], 1),
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
        merges=(1, *weight.merges[num_inputs:]),
    )
    return Factors(a, b, transposed=inputs == 0)


def _order(order: Sequence[int], owners: Sequence[int], owner: int) -> list[int]:
    """The order of the dims of one of theirs among themselves."""
    own = [at for at, one in zip(order, owners, strict=True) if one == owner]
    return [sorted(own).index(at) for at in own]


def module_names(row: Entry | Tied, position: Position) -> list[str]:
    """Returns the names of the module whose weight a row holds, the one to write first."""
    return [name.removesuffix(".weight") for name in names_of(row, position) if name.endswith(".weight")]


@dataclass(frozen=True)
class AdapterArrays:
    """The arrays of an adapter in our words.

    Attributes:
        rank: R of all factors; those of smaller ranks are filled up with zeros, which stay zeros in training.
        scale: What the product of every pair of factors is multiplied by.
        factors: Path of the kernel -> (lora_a [*stack, *D, R], lora_b [*stack, R, *F]), float32.
        whole: Path -> array of what is trained whole, float32.
    """

    rank: int
    scale: float
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]]
    whole: Mapping[str, np.ndarray]


def read_adapter_arrays(folder: AdapterFolder, rows: Sequence[Row]) -> AdapterArrays:
    """Reads the arrays of an adapter, whose tensors say what it adapts; `rows` are the base's name table.

    Raises:
        CheckpointError: The tensors do not fit the base.
    """
    modules: dict[str, list[tuple[Entry, Position]]] = defaultdict(list)
    for row in rows:
        if not isinstance(row, Entry) or factor_transforms(row, 1) is None or len(row.stack) > 1:
            continue
        for position in positions(row):
            names = module_names(row, position)
            module = next((name for name in names if name + _A in folder.stored), names[0])
            if {module + _A, module + _B} <= folder.stored.keys():
                modules[module].append((row, position))
    used = {module + end for module in modules for end in (_A, _B)}
    whole = _read_whole(folder, rows, used)
    rest = [name for name in folder.stored if name not in used]
    if rest or not modules:
        raise CheckpointError(
            f"{folder.path} holds {rest[0] if rest else 'no factors'}: it belongs to another base, or is not supported "
            "(DoRA; adapters of embeddings, experts, biases or the output layer)"
        )
    found = {module: _factors(folder, module, parts) for module, parts in modules.items()}
    scales = {module: rank_and_scale(folder.config, module)[1] for module in modules}
    rank = max(a.shape[-1] for pairs in found.values() for a, _ in pairs)
    widest = next(module for module, pairs in found.items() if pairs[0][0].shape[-1] == rank)
    scale = folder.config.scale
    if not isclose(scales[widest], scale, rel_tol=_SAME_SCALE):
        scale = scales[widest]
    factors: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for module, parts in modules.items():
        same = isclose(scales[module], scale, rel_tol=_SAME_SCALE)
        for (row, position), (a, b) in zip(parts, found[module], strict=True):
            if row.path not in factors:
                shapes = ((*row.stack, *a.shape[:-1], rank), (*row.stack, rank, *b.shape[1:]))
                factors[row.path] = (np.zeros(shapes[0], np.float32), np.zeros(shapes[1], np.float32))
            own = factors[row.path]
            own[0][position][..., : a.shape[-1]] = a
            # The kernels of one model share a scale: what another one has goes into B.
            own[1][position][: b.shape[0]] = b if same else b * np.float32(scales[module] / scale)
    # A kernel that a module holds beside adapted ones gets zeros in B, and has no adapter.
    kept = {path: pair for path, pair in factors.items() if pair[1].any()}
    return AdapterArrays(rank, scale, kept or factors, whole)


def _factors(
    folder: AdapterFolder, module: str, parts: Sequence[tuple[Entry, Position]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The factors of each kernel of one module: [*D, R], [R, *F]."""
    rank, _ = rank_and_scale(folder.config, module)
    made = [one for row, _ in parts if (one := factor_transforms(row, rank)) is not None]
    a, b = (_floats(folder, module + end, one) for end, one in ((_A, made[0].a), (_B, made[0].b)))
    return [(one.a.read_all(a), one.b.read_all(b)) for one in made]


def _floats(folder: AdapterFolder, name: str, transform: Transform) -> np.ndarray:
    stored = folder.stored[name]
    if stored.shape != transform.theirs or stored.dtype.kind in "iub":
        raise CheckpointError(
            f"{folder.path}: {name} is {stored.dtype}{list(stored.shape)}, but its config and the base need "
            f"floats {list(transform.theirs)}; the adapter belongs to another base, or to model.vocab_size of it"
        )
    return map_tensor(stored).astype(np.float32)


def _read_whole(folder: AdapterFolder, rows: Sequence[Row], used: set[str]) -> dict[str, np.ndarray]:
    """What is trained whole: path -> array; adds the names that are read to `used`."""
    found: dict[str, np.ndarray] = {}
    for row in rows:
        if not isinstance(row, Entry) or row.state:
            continue
        names = {at: next((one for one in names_of(row, at) if one in folder.stored), None) for at in positions(row)}
        if not all(names.values()):
            continue  # what is trained whole in some layers only is left for the message
        array = np.empty(row.shape, np.float32)
        for position, name in names.items():
            array[position] = row.transform.read_all(_floats(folder, str(name), row.transform))
            used.add(str(name))
        found[row.path] = array
    for row in rows:
        if not isinstance(row, Tied):
            continue
        name = next((one for one in names_of(row) if one in folder.stored), None)
        # PEFT trains a copy, and what repeats the base's goes on as it was.
        if (name is None) != (row.to not in found) or (
            name is not None
            and not np.array_equal(row.transform.read_all(_floats(folder, name, row.transform)), found[row.to])
        ):
            raise ConfigError(f"{folder.path} trains {row.to} and {names_of(row)[0]}, which the base ties")
        used.update([name] if name else ())
    return found
