"""Folders of adapters as PEFT writes them: adapter_config.json, and which modules it means. No jax here.

The tensors of an adapter lie in adapter_model.safetensors. A linear layer whose weight a published folder calls
`model.layers.0.self_attn.q_proj.weight` has, with rank R, I inputs and O outputs,

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [R, I]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [O, R]

and its weight becomes W + scale * B A, where scale is alpha / R, or alpha / sqrt(R) if rank stabilised. What is trained
whole (a head) lies there too, as `base_model.model.score.weight`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.published.config_file import read_json
from jaxtrain.published.safetensors import StoredTensor, read_header

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# Shorthand for every linear layer but the output layer.
_ALL = "all-linear"

# Key -> the values that leave the arithmetic as it is, and what any other value would do.
_FIXED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((False, None), "it scales the columns of each kernel (DoRA)"),
    "use_qalora": ((False, None), "it pools the inputs of the adapter"),
    "use_bdlora": ((False, None), "it splits the factors into blocks"),
    "lora_bias": ((False, None), "it adds a bias to the adapter"),
    "bias": (("none", None), "it trains biases of the base"),
    "layer_replication": ((None, []), "it repeats layers of the base"),
    "target_parameters": ((None, []), "it adapts the experts of a mixture, or other stacked parameters"),
    "trainable_token_indices": ((None, [], {}), "it trains single rows of the embedding"),
    "alora_invocation_tokens": ((None, []), "it is applied from some token on only"),
    "arrow_config": ((None,), "it chooses among several adapters"),
    "kasa_config": ((None,), "it changes the base"),
    "monteclora_config": ((None,), "it draws the factors at random"),
    "velora_config": ((None,), "it compresses activations of the base"),
}
# Keys that are read, and keys that say how the factors were begun, or where they came from.
_READ = (
    "peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "use_rslora",
    "target_modules", "exclude_modules", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform",
    "layers_pattern", "init_lora_weights",
)  # fmt: skip
_NO_EFFECT = (
    "auto_mapping", "revision", "peft_version", "inference_mode", "fan_in_fan_out", "megatron_config", "megatron_core",
    "runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "ensure_weight_tying",
)  # fmt: skip
# Ways to begin that change the base too, so that the factors alone are not the adapter.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter_config.json says.

    Attributes:
        rank, alpha: Of every module that no pattern names.
        dropout: Share of an adapter's inputs that become 0 in training.
        rank_stabilised: Whether the scale is alpha / sqrt(rank) instead of alpha / rank.
        target_modules: Ends of module names, or one regular expression.
        rank_pattern, alpha_pattern: Regular expression of the end of a module's name -> its rank or alpha.
        layers: Indices of the layers that are adapted; None: all.
        layers_pattern: Names of lists of layers that `layers` counts; empty: any.
        exclude_modules: Ends of names, or one regular expression, of modules that are not adapted.
        modules_to_save: Ends of names of modules that are trained whole.
        base: Name of the base, or the path to it.
        task_type: CAUSAL_LM, SEQ_CLS, ...; None: not said.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    rank_stabilised: bool = False
    target_modules: tuple[str, ...] | str = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] | str = ()
    modules_to_save: tuple[str, ...] = ()
    base: str | None = None
    task_type: str | None = None

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by in modules that no pattern names."""
        return _scale(self.alpha, self.rank, self.rank_stabilised)


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter's folder, opened by `open_adapter_folder`; no tensor is read.

    Attributes:
        path: The folder.
        config: What its adapter_config.json says.
        stored: Name without the prefix -> tensor.
    """

    path: Path
    config: AdapterConfig
    stored: Mapping[str, StoredTensor]


def is_adapter_folder(path: str | Path) -> bool:
    """Whether a folder holds an adapter."""
    return (Path(path) / CONFIG).is_file()


def open_adapter_folder(path: str | Path) -> AdapterFolder:
    """Opens an adapter's folder; headers are read and checked, tensors are not.

    Raises:
        ConfigError: No such folder, no adapter in it, or an adapter of a kind that is not supported.
        CheckpointError: Its file of tensors is missing or damaged.
    """
    folder = Path(path)
    if not is_adapter_folder(folder):
        there = "has no" if folder.is_dir() else "is no folder with an"
        raise ConfigError(
            f"{folder} {there} {CONFIG}; name the folder of an adapter, as PEFT or jaxtrain export writes it"
        )
    config = _read_config(folder / CONFIG)
    if not (folder / WEIGHTS).is_file():
        pickle = (
            " (adapter_model.bin is a pickle, which can run code when read)" * (folder / "adapter_model.bin").is_file()
        )
        raise CheckpointError(f"{folder} lacks {WEIGHTS}{pickle}; save the adapter again with safe_serialization=True")
    stored = read_header(folder / WEIGHTS)
    strange = [name for name in stored if not name.startswith(PREFIX)]
    if strange:
        raise CheckpointError(f"{folder / WEIGHTS} holds {strange[0]}, but names of adapters begin with {PREFIX}")
    return AdapterFolder(folder, config, {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()})


def _read_config(file: Path) -> AdapterConfig:
    said = read_json(file, ConfigError)
    kind = said.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{file} has peft_type: {kind}; supported are adapters of type LORA")
    for key, (values, why) in _FIXED.items():
        if key in said and said[key] not in values:
            raise ConfigError(f"{file} has {key}: {said[key]}, which is not supported ({why}); {key}: {values[0]} is")
    known = {*_FIXED, *_READ, *_NO_EFFECT}
    # What is off by its value changes nothing, whatever it is.
    other = next((key for key, value in said.items() if key not in known and value not in (None, False, [], {})), None)
    if other is not None:
        raise ConfigError(
            f"{file} has the key {other} ({json.dumps(said[other])[:60]}), which is not known; remove it if it changes "
            "nothing in the adapter"
        )
    start = said.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ConfigError(
            f"{file} has init_lora_weights: {start}, which changes the base too; save it with PEFT's "
            "path_initial_model_for_weight_conversion, which makes it a plain adapter"
        )
    layers = _get(file, said, "layers_to_transform", (list, int), None)
    layers = [layers] if isinstance(layers, int) else layers
    return AdapterConfig(
        rank=_positive(file, "r", _get(file, said, "r", int, 8)),
        alpha=_positive(file, "lora_alpha", _get(file, said, "lora_alpha", (int, float), 8)),
        dropout=float(_get(file, said, "lora_dropout", (int, float), 0.0)),
        rank_stabilised=bool(_get(file, said, "use_rslora", bool, False)),
        target_modules=_names(file, said, "target_modules"),
        rank_pattern={key: _positive(file, "rank_pattern", one) for key, one in _patterns(file, said, "rank_pattern")},
        alpha_pattern={
            key: _positive(file, "alpha_pattern", one) for key, one in _patterns(file, said, "alpha_pattern")
        },
        layers=tuple(layers) if layers else None,
        layers_pattern=_list(_names(file, said, "layers_pattern")),
        exclude_modules=_names(file, said, "exclude_modules"),
        modules_to_save=_list(_names(file, said, "modules_to_save")),
        base=_get(file, said, "base_model_name_or_path", str, None),
        task_type=_get(file, said, "task_type", str, None),
    )


def _get(file: Path, said: Mapping[str, Any], key: str, kind: Any, default: Any) -> Any:
    value = said.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{file} has {key}: {json.dumps(value)}, which is no value of that key")
    return value


def _positive(file: Path, key: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{file} has {key}: {json.dumps(value)}; it takes numbers above 0")
    return value


def _names(file: Path, said: Mapping[str, Any], key: str) -> tuple[str, ...] | str:
    value = _get(file, said, key, (list, str), ())
    if isinstance(value, str):
        return value if key in ("layers_pattern", "modules_to_save") else _checked(file, key, value)
    if not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{file} has {key}: {json.dumps(value)}; it takes names of modules")
    return tuple(value)


def _patterns(file: Path, said: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    found = _get(file, said, key, dict, {})
    return [(_checked(file, key, pattern), value) for pattern, value in found.items()]


def _checked(file: Path, key: str, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{file} has {key}: {pattern!r}, which is no regular expression ({error})") from None
    return pattern


def _list(names: tuple[str, ...] | str) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) and names else tuple(names)


def targets_module(config: AdapterConfig, module: str) -> bool | None:
    """Whether an adapter_config.json gives a linear module an adapter; None where it leaves that to the model.

    Args:
        config: What it says.
        module: Name of the module, as in "model.layers.0.self_attn.q_proj".
    """
    if config.exclude_modules and _matches(config.exclude_modules, module):
        return False
    if any(re.match(rf"(^|.*\.){re.escape(name)}($|\..*)", module) for name in config.modules_to_save):
        return False
    if config.target_modules == _ALL:
        return None
    if not _matches(config.target_modules, module):
        return False
    if config.layers is None or isinstance(config.target_modules, str):
        return True
    lists = config.layers_pattern or ("[^.]*",)
    numbers = [re.match(rf"(?:^|.*?\.){name}\.(\d+)\.", module) for name in lists]
    first = next((int(found[1]) for found in numbers if found), None)
    return first is not None and first in config.layers


def _matches(targets: Sequence[str] | str, module: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == one or module.endswith(f".{one}") for one in targets)


def rank_and_scale(config: AdapterConfig, module: str) -> tuple[int, float]:
    """Returns the rank of a module, and what the product of its factors is multiplied by."""
    rank = _of(config.rank_pattern, module, config.rank)
    return int(rank), _scale(_of(config.alpha_pattern, module, config.alpha), rank, config.rank_stabilised)


def _of(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _scale(alpha: float, rank: float, rank_stabilised: bool) -> float:
    return alpha / (rank**0.5 if rank_stabilised else rank)


def shortest_names(chosen: Sequence[str], others: Sequence[str]) -> list[str]:
    """Returns few ends of names that match some modules and no others, as `target_modules` wants them.

    Args:
        chosen: Names of the modules to match.
        others: Names of the other modules of the model.
    """
    found: list[str] = []
    for module in chosen:
        if _matches(found, module):
            continue
        parts = module.split(".")
        # An end with the number of a layer in it would be one of many.
        ends = (parts[-count:] for count in range(1, len(parts)))
        plain = (".".join(end) for end in ends if not any(part.isdigit() for part in end))
        fitting = (end for end in plain if not any(_matches([end], other) for other in others))
        found.append(next(fitting, module))
    return sorted(found)


def config_json(config: AdapterConfig, *, fan_in_fan_out: bool) -> dict[str, Any]:
    """Returns the adapter_config.json of an adapter.

    Args:
        config: What it is to say; `target_modules` as a list.
        fan_in_fan_out: Whether the adapted layers of transformers are of its class Conv1D.
    """
    return {
        "alpha_pattern": {key: _number(value) for key, value in config.alpha_pattern.items()},
        "auto_mapping": None,
        "base_model_name_or_path": config.base,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": _number(config.alpha),
        "lora_dropout": config.dropout,
        "modules_to_save": list(config.modules_to_save) or None,
        "peft_type": "LORA",
        "r": config.rank,
        "rank_pattern": dict(config.rank_pattern),
        "revision": None,
        "target_modules": list(config.target_modules),
        "task_type": config.task_type,
        "use_dora": False,
        "use_rslora": config.rank_stabilised,
    }


def _number(value: float) -> float:
    """As an integer where it is one, because older readers want one."""
    return int(value) if float(value).is_integer() else value
