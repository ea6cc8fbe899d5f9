"""Our factors as the tensors and the adapter_config.json of an adapter's folder. No jax here.

A module that holds several of our kernels has one A for all of them. Kernels whose A differ are written as one module
of a rank that is larger by the number of kernels: their A one after the other, and B as blocks on a diagonal.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.interop.formats.peft_reading import (
    PREFIX,
    AdapterConfig,
    Position,
    factor_transforms,
    matches,
    module_names,
)
from jaxtrain.interop.formats.rows import Entry, Row, Tied, all_names, names_of, positions


@dataclass(frozen=True)
class WrittenAdapter:
    """What an adapter's folder is to hold.

    Attributes:
        config: What its adapter_config.json says.
        fan_in_fan_out: Whether the adapted layers of transformers are of its class Conv1D.
        tensors: Name -> float32 array.
    """

    config: AdapterConfig
    fan_in_fan_out: bool
    tensors: Mapping[str, np.ndarray]


def written_adapter(
    rows: Sequence[Row],
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]],
    whole: Mapping[str, np.ndarray],
    config: AdapterConfig,
) -> WrittenAdapter:
    """Returns the tensors of an adapter's folder, and its config with the modules that they are of.

    Args:
        rows: Name table of the base's family, for the base.
        factors: Path of the kernel -> (lora_a [*stack, *D, R], lora_b [*stack, R, *F]).
        whole: Path -> array of what is trained whole, and of what lies in the same module.
        config: What adapter_config.json is to say; its rank is R, and it names no modules.

    Raises:
        ConfigError: An array is of no linear layer of the family.
    """
    adapted: dict[str, list[tuple[Entry, Position]]] = defaultdict(list)
    known: dict[str, None] = {}
    for row in rows:
        if isinstance(row, Tied):
            known |= dict.fromkeys(module_names(row, ()))
        if not isinstance(row, Entry) or row.state:
            continue
        for position in positions(row):
            named = module_names(row, position)[:1]
            known |= dict.fromkeys(named)
            if named and factor_transforms(row, 1) is not None:
                adapted[named[0]].append((row, position))
    unknown = set(factors) - {row.path for parts in adapted.values() for row, _ in parts}
    if unknown:
        raise ConfigError(
            f"{min(unknown)} is no linear layer of published files, so that its adapter has no name there"
        )
    tensors: dict[str, np.ndarray] = {}
    stacked: dict[str, int] = {}
    transposed = False
    for module, parts in adapted.items():
        pairs = [(row, *_of_layer(factors.get(row.path), row, position, config.rank)) for row, position in parts]
        if not any(a.any() or b.any() for _, a, b in pairs):
            continue
        a, b, count = _joined(pairs, config.rank)
        tensors |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
        if count > 1:
            stacked[module] = count
        made = factor_transforms(parts[0][0], 1)
        transposed = transposed or (made is not None and made.transposed)
    chosen = [name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in tensors if "lora_A" in name]
    whole_modules, saved = _whole(rows, whole)
    # PEFT takes a head whole whatever it consists of: its parts may not be named beside it.
    heads = [
        head for head in _HEADS.get(config.task_type or "", ()) if any(_is_within(one, [head]) for one in whole_modules)
    ]
    modules = [module for module in whole_modules if not _is_within(module, heads)]
    said = replace(
        config,
        target_modules=tuple(shortest_names(chosen, [name for name in known if name not in chosen])),
        modules_to_save=tuple([*heads, *_saved_names(modules, [name for name in known if name not in whole_modules])]),
        **_patterns(stacked, list(known), config),
    )
    return WrittenAdapter(said, transposed, {**tensors, **saved})


def _of_layer(
    pair: tuple[np.ndarray, np.ndarray] | None, row: Entry, position: Position, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    if pair is not None:
        return np.asarray(pair[0][position], np.float32), np.asarray(pair[1][position], np.float32)
    made = factor_transforms(row, rank)
    assert made is not None
    return np.zeros(made.a.ours, np.float32), np.zeros(made.b.ours, np.float32)


def _joined(pairs: Sequence[tuple[Entry, np.ndarray, np.ndarray]], rank: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The two tensors of a module, and how many times R their rank is."""
    first = pairs[0][1]
    same = all(np.array_equal(a, first) for _, a, _ in pairs)
    count = 1 if same else len(pairs)
    made = [factor_transforms(row, count * rank) for row, _, _ in pairs]
    assert made[0] is not None
    theirs_a = np.zeros(made[0].a.theirs, np.float32)
    theirs_b = np.zeros(made[0].b.theirs, np.float32)
    made[0].a.write(theirs_a, first if same else np.concatenate([a for _, a, _ in pairs], axis=-1))
    for at, (transforms, (_, _, b)) in enumerate(zip(made, pairs, strict=True)):
        assert transforms is not None
        own = b
        if not same:
            own = np.zeros((count * rank, *b.shape[1:]), np.float32)
            own[at * rank : (at + 1) * rank] = b
        transforms.b.write(theirs_b, own)
    return theirs_a, theirs_b, count


def _patterns(stacked: Mapping[str, int], known: Sequence[str], config: AdapterConfig) -> dict[str, dict]:
    """rank_pattern and alpha_pattern, which keep the scale of modules whose rank is a multiple of R."""
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for count in sorted(set(stacked.values())):
        own = [module for module, times in stacked.items() if times == count]
        for name in shortest_names(own, [module for module in known if module not in own]):
            ranks[name] = count * config.rank
            alphas[name] = config.alpha * (count**0.5 if config.rank_stabilised else count)
    return dict(rank_pattern=ranks, alpha_pattern=alphas)


def _whole(rows: Sequence[Row], whole: Mapping[str, np.ndarray]) -> tuple[list[str], dict[str, np.ndarray]]:
    """The modules that are trained whole, and their tensors, with all that lies in these modules."""
    entries = [(row, at, names_of(row, at)[0]) for row in rows if isinstance(row, Entry) for at in positions(row)]
    modules = dict.fromkeys(name.rpartition(".")[0] for row, _, name in entries if row.path in whole)
    tensors: dict[str, np.ndarray] = {}
    for row, position, name in entries:
        if not row.state and name.rpartition(".")[0] in modules:
            out = tensors.setdefault(PREFIX + name, np.zeros(row.transform.theirs, np.float32))
            row.transform.write(out, np.asarray(whole[row.path][position], np.float32))
    # PEFT copies the modules that it trains whole, and so unties them: what repeats one is written too.
    tied = [row for row in rows if isinstance(row, Tied)]
    for row in tied:
        if row.to not in whole:
            continue
        name = names_of(row)[0]
        module = name.rpartition(".")[0]
        apart = [one for one in tied if names_of(one)[0].rpartition(".")[0] == module and one.to not in whole]
        if apart:
            raise ConfigError(
                f"{row.to} is trained whole, and published files repeat it in {module}, whose {names_of(apart[0])[0]} "
                f"is not; PEFT cannot say that: name {apart[0].to} in lora.train_also too, or export with --merge"
            )
        out = tensors.setdefault(PREFIX + name, np.zeros(row.transform.theirs, np.float32))
        row.transform.write(out, np.asarray(whole[row.to], np.float32))
        modules[module] = None
    return list(modules), tensors


# Names of heads that PEFT trains whole, and asks an adapter for, whatever its modules_to_save says.
_HEADS = {"SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score")}


def whole_paths(rows: Sequence[Row], paths: Iterable[str], *, task_type: str | None) -> set[str]:
    """Returns the paths of what is written whole: PEFT writes modules, and those whose names end as one of them does.

    Args:
        rows: The name table.
        paths: Paths of parameters that are trained whole.
        task_type: That of the adapter.
    """
    wanted = set(paths)
    entries = [(row, _module(row)) for row in rows if isinstance(row, Entry) and not row.state]
    heads = _HEADS.get(task_type or "", ())
    modules = {module for row, module in entries if row.path in wanted}
    known = {module for _, module in entries}
    ends = {*_saved_names(sorted(modules), sorted(known - modules)), *heads}
    return {row.path for row, module in entries if module in modules or _is_within(module, ends)}


def _is_within(module: str, ends: Iterable[str]) -> bool:
    """Whether a module, or one that it is a part of, has a name that ends so."""
    parts = module.split(".")
    return any(".".join(parts[:count]).endswith(tuple(ends)) for count in range(1, len(parts) + 1))


def _module(row: Entry) -> str:
    return all_names(row)[0].rpartition(".")[0]


def _saved_names(modules: Sequence[str], others: Sequence[str]) -> list[str]:
    """Ends of names for modules_to_save, which PEFT compares letter by letter, whatever stands before them."""
    found: list[str] = []
    for module in modules:
        parts = module.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        fitting = (end for end in ends if not any(other.endswith(end) for other in others))
        found.append(next((end for end in fitting if not end[0].isdigit()), module))
    return sorted(set(found))


def shortest_names(chosen: Sequence[str], others: Sequence[str]) -> list[str]:
    """Returns few ends of names that match the chosen modules and no others, as `target_modules` wants them."""
    found: list[str] = []
    for module in chosen:
        if matches(found, module):
            continue
        parts = module.split(".")
        # An end with the number of a layer in it would be one of many.
        ends = (parts[-count:] for count in range(1, len(parts)))
        plain = (".".join(end) for end in ends if not any(part.isdigit() for part in end))
        fitting = (end for end in plain if not any(matches([end], other) for other in others))
        found.append(next(fitting, module))
    return sorted(found)


def config_json(written: WrittenAdapter) -> dict[str, Any]:
    """Returns the adapter_config.json of an adapter."""
    config = written.config
    return {
        "alpha_pattern": {key: _number(value) for key, value in config.alpha_pattern.items()},
        "auto_mapping": None,
        "base_model_name_or_path": config.base,
        "bias": "none",
        "fan_in_fan_out": written.fan_in_fan_out,
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
