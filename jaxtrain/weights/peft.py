"""`load_adapter` and `save_adapter`: adapters as PEFT writes and reads them.

A module of PEFT that holds several of our kernels has one A for all of them. Kernels whose A differ are written as one
module of a rank that is larger by the number of kernels: their A one after the other, and B as blocks on a diagonal.
"""

import fnmatch
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.config.base import Group
from jaxtrain.config.fits import family_for
from jaxtrain.config.published import lora_settings, settings_of
from jaxtrain.config.schema import LoraConfig
from jaxtrain.errors import ConfigError
from jaxtrain.formats.peft_reading import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    AdapterConfig,
    factor_transforms,
    module_names,
    open_adapter_folder,
    read_adapter_arrays,
)
from jaxtrain.formats.rows import Entry, Position, Row, Tied, all_names, names_of, positions
from jaxtrain.formats.safetensors import write_safetensors
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.adapters import adapt
from jaxtrain.models.model import Model, Params
from jaxtrain.precision.kernels import LowRankKernel
from jaxtrain.runtime.distributed import on_main_process
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.weights.pretrained import Pretrained, load_pretrained, model_group
from jaxtrain.weights.read import by_path
from jaxtrain.weights.write import Origin, doing, name_folder, on_main_host, partial_folder, partial_of, write_files

# End of an architecture of transformers -> task_type of PEFT.
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "Model": "FEATURE_EXTRACTION",
}
# Names of heads that PEFT trains whole, and asks an adapter for, whatever its modules_to_save says.
_HEADS = {"SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score")}


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter's folder, its settings for `adapt`, and path of one of our parameters (.../lora_a) -> array."""

    path: Path
    lora: LoraConfig
    leaves: Mapping[str, np.ndarray]


def open_adapter(path: str | Path, rows: Sequence[Row]) -> OpenedAdapter:
    """Reads an adapter's folder; `rows` are the name table of the base's family, for the base.

    Raises:
        ConfigError: No adapter, or one of a kind that is not supported.
        CheckpointError: Its files are missing or damaged, or it is an adapter of another base.
    """
    folder = open_adapter_folder(path)
    found = read_adapter_arrays(folder, rows)
    leaves = dict(found.whole)
    for kernel, (lora_a, lora_b) in found.factors.items():
        leaves |= {f"{kernel}/lora_a": lora_a, f"{kernel}/lora_b": lora_b}
    return OpenedAdapter(Path(path), LoraConfig(**lora_settings(folder.config, found)), leaves)


def load_adapter(folder: str | Path, *, base: "Pretrained | str | Path") -> tuple[Model, Params]:
    """Open an adapter that PEFT, or `save_adapter`, wrote.

    Args:
        folder: The folder, with adapter_config.json and adapter_model.safetensors.
        base: The published model that it is an adapter of: its path, or what `load_pretrained` gave.

    Returns:
        The model with adapters, as `adapt` makes it, and its parameters on the first device: those of the base, the
        factors, float32, and what the adapter trains whole.

    Raises:
        ConfigError: There is no adapter, or it is of a kind that is not supported (DoRA, adapters of embeddings or of
            experts, biases).
        CheckpointError: Its files are missing or damaged, or it is an adapter of another base.

    Example:
        >>> params, _ = text_model.init(jax.random.key(0))
        >>> base = jt.load_pretrained(jt.save_pretrained("base", params, model={**small, "vocab_size": 256}))
        >>> adapted = jt.adapt(base.model, lora=jt.LoraConfig(rank=2, targets=("query", "value")))
        >>> params, _ = adapted.init(jax.random.key(1))
        >>> model, params = jt.load_adapter(jt.save_adapter("mine", params, model=adapted, base=base), base=base)
        >>> model.adapted.targets
        ('blocks/attention/query/kernel', 'blocks/attention/value/kernel')
    """
    pretrained = base if isinstance(base, Pretrained) else load_pretrained(base)
    rows = pretrained.published.family.tensors(settings_of(pretrained.config))
    opened = open_adapter(folder, rows)
    model = adapt(pretrained.model, lora=opened.lora)
    known, here = by_path(pretrained.params), jax.local_devices()[0]

    def one(path: tuple, like: jax.ShapeDtypeStruct) -> jax.Array:
        name = path_name(path)
        if name in opened.leaves:
            return jax.device_put(opened.leaves[name].astype(like.dtype), here)
        return known[name.removesuffix("/base")]

    drawn, _ = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    return model, jax.tree_util.tree_map_with_path(one, drawn)


def save_adapter(
    folder: str | Path, params: Params, *, model: Model, base: "Pretrained | Group | Mapping[str, Any]"
) -> Path:
    """Write the adapters of a model as a folder that PEFT opens.

    The base is not written; PEFT asks for it beside the folder.

    Args:
        folder: The folder to make; it may exist if it is empty.
        params: Parameters of the adapted model, sharded in any way; every process passes its own.
        model: The adapted model, from `adapt` or `load_adapter`.
        base: What it is an adapter of: what `load_pretrained` gave, or a model group of our config with its vocab_size.

    Returns:
        The folder.

    Raises:
        ConfigError: The folder is not empty, the model has no adapters, or no published family has it.

    Example:
        >>> adapted = jt.adapt(text_model, lora=jt.LoraConfig(rank=2, targets=("query", "value")))
        >>> params, _ = adapted.init(jax.random.key(0))
        >>> folder = jt.save_adapter("adapter", params, model=adapted, base={**small, "vocab_size": 256})
        >>> sorted(file.name for file in folder.iterdir())
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    group, origin, name = model_group(base), Origin(), None
    if isinstance(base, Pretrained):
        origin, name = Origin(base.published.source.config, base.published.source.files), str(base.path)
    return write_adapter(folder, settings_of(group), params, model=model, base=origin, base_name=name)


def write_adapter(
    folder: str | Path,
    settings: Mapping[str, Any],
    params: Params,
    *,
    model: Model,
    base: Origin,
    base_name: str | None,
) -> Path:
    """Writes an adapter's folder. Every process calls it, the main one writes.

    `settings` are our model group, from `settings_of`, `base` what is known of its base, and `base_name` where that is.

    Raises:
        ConfigError: The folder is not empty, the model has no adapters, or no published family has it.
    """
    folder = Path(folder)
    lora = None if model.adapted is None else model.adapted.lora
    if lora is None:
        raise ConfigError(f"the model {model.name} has no adapters to write; write all of it with save_pretrained")
    family = family_for(settings, model_type=base.config.get("model_type"))
    rows = family.tensors(settings)
    leaves = by_path(params, is_leaf=lambda leaf: isinstance(leaf, LowRankKernel))
    kernels = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, LowRankKernel)}
    others = {path: leaf for path, leaf in leaves.items() if path not in kernels}
    trained = {path for path in others if any(fnmatch.fnmatchcase(path, one) for one in lora.train_also)}
    architecture = str((base.config.get("architectures") or family.to_published(settings)["architectures"])[0])
    task = next((task for end, task in _TASKS.items() if architecture.endswith(end)), None)
    paths = _whole_paths(rows, trained, heads=_HEADS.get(task or "", ()))
    entries = [row for row in rows if isinstance(row, Entry)]
    named = paths | {row.path for row in entries if factor_transforms(row, 1) is not None}
    for nameless in sorted((trained | set(kernels)) - named):
        raise ConfigError(f"{nameless} is trained, but published files have no such parameter or linear layer")
    # Every process gathers; what is None elsewhere only the main one reads.
    factors: Any = {
        path: (on_main_host(leaf.lora_a, ()), on_main_host(leaf.lora_b, ())) for path, leaf in kernels.items()
    }
    whole: Any = {path: on_main_host(leaf, ()) for path, leaf in others.items() if path in paths}
    said = AdapterConfig(lora.rank, lora.alpha, lora.dropout, lora.rank_stabilised, base=base_name, task_type=task)

    def write() -> None:
        tensors, config = written_adapter(rows, factors, whole, said)
        # An export that is killed leaves nothing that looks like an adapter, and may be tried again.
        with partial_folder(folder):
            partial = partial_of(folder)
            shapes = {name: (array.shape, array.dtype) for name, array in tensors.items()}
            write_safetensors(partial / WEIGHTS, shapes, tensors.items())
            write_files(partial, base.files)
            write_json_atomic(partial / CONFIG, config)
            name_folder(folder, last=CONFIG)

    with on_main_process(doing(write), does="write the adapter"):
        pass
    return folder


def written_adapter(
    rows: Sequence[Row],
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]],
    whole: Mapping[str, np.ndarray],
    config: AdapterConfig,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the tensors of an adapter's folder, name -> float32 array, and its adapter_config.json.

    Args:
        rows: Name table of the base's family, for the base.
        factors: Path of the kernel -> (lora_a [*stack, *D, R], lora_b [*stack, R, *F]).
        whole: Path -> array of what is trained whole, and of what lies in the same module.
        config: What adapter_config.json is to say; its rank is R.
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
    tensors: dict[str, np.ndarray] = {}
    counts: dict[str, int] = {}
    transposed = False
    for module, parts in adapted.items():
        pairs = [(row, *_of_layer(factors.get(row.path), row, position, config.rank)) for row, position in parts]
        if not any(a.any() or b.any() for _, a, b in pairs):
            continue
        a, b, counts[module] = _joined(pairs, config.rank)
        tensors |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
        made = factor_transforms(parts[0][0], 1)
        transposed = transposed or (made is not None and made.transposed)
    _check_apart(counts, rows, whole)
    whole_modules, saved = _whole(rows, whole)
    # PEFT takes a head whole whatever it consists of: its parts may not be named beside it.
    named = _HEADS.get(config.task_type or "", ())
    heads = [head for head in named if any(_is_within(one, [head]) for one in whole_modules)]
    modules = [module for module in whole_modules if not _is_within(module, heads)]
    to_save = [*heads, *_saved_names(modules, [name for name in known if name not in whole_modules])]
    ranks, alphas = _patterns(counts, list(known), config)
    return tensors | saved, {
        "alpha_pattern": alphas,
        "auto_mapping": None,
        "base_model_name_or_path": config.base,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": _number(config.alpha),
        "lora_dropout": config.dropout,
        "modules_to_save": to_save or None,
        "peft_type": "LORA",
        "r": config.rank,
        "rank_pattern": ranks,
        "revision": None,
        "target_modules": shortest_names(list(counts), [name for name in known if name not in counts]),
        "task_type": config.task_type,
        "use_dora": False,
        "use_rslora": config.rank_stabilised,
    }


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


def _patterns(counts: Mapping[str, int], known: Sequence[str], config: AdapterConfig) -> tuple[dict, dict]:
    """rank_pattern and alpha_pattern, which keep the scale of modules whose rank is a multiple of R."""
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for count in sorted(set(counts.values()) - {1}):
        own = [module for module, times in counts.items() if times == count]
        for name in shortest_names(own, [module for module in known if module not in own]):
            ranks[name] = count * config.rank
            alphas[name] = _number(config.alpha * (count**0.5 if config.rank_stabilised else count))
    return ranks, alphas


def _check_apart(adapted: Iterable[str], rows: Sequence[Row], whole: Iterable[str]) -> None:
    """Raise a ConfigError where an adapted module lies in one that is trained whole: PEFT can say only one of them."""
    for row in (row for row in rows if isinstance(row, Entry) and row.path in whole):
        modules = tuple(names_of(row, at)[0].rpartition(".")[0] + "." for at in positions(row))
        if any(f"{one}.".startswith(modules) for one in adapted):
            raise ConfigError(
                f"PEFT cannot train {row.path} whole beside an adapter in the same module; export --merge writes the "
                "model with both"
            )


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
    for row in (row for row in rows if isinstance(row, Tied) and row.to in whole):
        name = names_of(row)[0]
        out = tensors.setdefault(PREFIX + name, np.zeros(row.transform.theirs, np.float32))
        row.transform.write(out, np.asarray(whole[row.to], np.float32))
        modules[name.rpartition(".")[0]] = None
    return list(modules), tensors


def _whole_paths(rows: Sequence[Row], wanted: set[str], *, heads: Sequence[str]) -> set[str]:
    """The paths of what is written whole: PEFT writes modules, and those whose names end as one of them does."""
    entries = [(row, all_names(row)[0].rpartition(".")[0]) for row in rows if isinstance(row, Entry) and not row.state]
    modules = {module for row, module in entries if row.path in wanted}
    known = {module for _, module in entries}
    ends = {*_saved_names(sorted(modules), sorted(known - modules)), *heads}
    return {row.path for row, module in entries if module in modules or _is_within(module, ends)}


def _is_within(module: str, ends: Iterable[str]) -> bool:
    """Whether a module, or one that it is a part of, has a name that ends so."""
    parts = module.split(".")
    return any(".".join(parts[:count]).endswith(tuple(ends)) for count in range(1, len(parts) + 1))


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
        if _matches(found, module):
            continue
        parts = module.split(".")
        # An end with the number of a layer in it would be one of many.
        ends = (parts[-count:] for count in range(1, len(parts)))
        plain = (".".join(end) for end in ends if not any(part.isdigit() for part in end))
        fitting = (end for end in plain if not any(_matches([end], other) for other in others))
        found.append(next(fitting, module))
    return sorted(found)


def _matches(ends: Sequence[str], module: str) -> bool:
    """Whether a module is one of these, as PEFT compares names."""
    return any(module == end or module.endswith(f".{end}") for end in ends)


def _number(value: float) -> float:
    """As an integer where it is one, because older readers want one."""
    return int(value) if float(value).is_integer() else value
