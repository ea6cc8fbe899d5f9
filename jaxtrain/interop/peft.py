"""`load_adapter` and `save_adapter`: adapters as PEFT writes and reads them."""

import contextlib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.config.base import Group
from jaxtrain.config.published import lora_settings, settings_of
from jaxtrain.config.schema import LoraConfig
from jaxtrain.errors import ConfigError
from jaxtrain.interop.formats.peft_reading import (
    CONFIG,
    WEIGHTS,
    AdapterConfig,
    open_adapter_folder,
    read_adapter_arrays,
)
from jaxtrain.interop.formats.peft_writing import config_json, whole_paths, written_adapter
from jaxtrain.interop.formats.rows import Row
from jaxtrain.interop.formats.safetensors import write_safetensors
from jaxtrain.interop.load import by_path
from jaxtrain.interop.pretrained import Pretrained, load_pretrained, model_group
from jaxtrain.interop.save import Origin, name_folder, partial_folder, partial_of, write_files
from jaxtrain.interop.settings import family_for
from jaxtrain.interop.tensors import on_main_host
from jaxtrain.interop.weights import Place, PublishedModel
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.adapters import adapt
from jaxtrain.models.model import Model, Params
from jaxtrain.precision.kernels import LowRankKernel
from jaxtrain.runtime.distributed import on_main_process
from jaxtrain.runtime.files import write_json_atomic

_KERNEL = "/kernel"
# End of an architecture of transformers -> task_type of PEFT.
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "Model": "FEATURE_EXTRACTION",
}


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter, read against the base that it is of.

    Attributes:
        path: The folder.
        config: What its adapter_config.json says.
        lora: The same as settings of `adapt`.
        leaves: Path of one of our parameters (blocks/attention/query/kernel/lora_a, or what is trained whole) -> array.
    """

    path: Path
    config: AdapterConfig
    lora: LoraConfig
    leaves: Mapping[str, np.ndarray]


def open_adapter(
    path: str | Path, rows: Sequence[Row], *, base: PublishedModel, places: Mapping[str, Place]
) -> OpenedAdapter:
    """Reads an adapter's folder.

    Args:
        path: The folder.
        rows: Name table of the base's family, for the base.
        base: The published model that is to be its base.
        places: Path -> where each parameter lies in the base.

    Raises:
        ConfigError: No adapter, or one of a kind that is not supported.
        CheckpointError: Its files are missing or damaged, or it is an adapter of another base.
    """
    folder = open_adapter_folder(path)
    found = read_adapter_arrays(folder, rows)
    said = folder.config
    kernels, whole = tuple(found.factors), tuple(found.whole)
    lora = LoraConfig(**lora_settings(said, rank=found.rank, scale=found.scale, kernels=kernels, whole=whole))
    leaves = dict(found.whole)
    for kernel, (lora_a, lora_b) in found.factors.items():
        leaves |= {f"{kernel}/lora_a": lora_a, f"{kernel}/lora_b": lora_b}
    return OpenedAdapter(Path(path), said, lora, leaves)


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
    opened = open_adapter(folder, rows, base=pretrained.published, places=pretrained.places.params)
    check_linears(opened, pretrained.model)
    model = adapt(pretrained.model, lora=opened.lora)
    return model, place_leaves(model, pretrained.params, opened)


def check_linears(opened: OpenedAdapter, model: Model) -> None:
    """Raises where an adapter adapts a layer that the model cannot adapt.

    Args:
        opened: The adapter.
        model: The model without adapters.

    Raises:
        ConfigError: Names the layer.
    """
    for target in opened.lora.targets:
        if target + _KERNEL not in model.linears:
            raise ConfigError(f"{opened.path} adapts {target}, which is none of the linear layers that can be adapted")


def place_leaves(model: Model, params: Params, opened: OpenedAdapter) -> Params:
    """Returns the parameters of an adapted model, on the first device.

    Args:
        model: The adapted model, with floating-point kernels.
        params: Parameters of the model that it was made of.
        opened: The adapter.
    """
    known = by_path(params)
    here = jax.local_devices()[0]

    def one(path: tuple, like: jax.ShapeDtypeStruct) -> jax.Array:
        name = path_name(path)
        if name in opened.leaves:
            return jax.device_put(opened.leaves[name].astype(like.dtype), here)
        return known[name.removesuffix("/base")]

    drawn, _ = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(one, drawn)


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
    group, origin, name = model_group(base, what="save_adapter: base"), Origin(), None
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

    Args:
        folder: The folder to make; it may exist if it is empty.
        settings: Our model group, from `settings_of`.
        params: Parameters of the adapted model.
        model: The adapted model.
        base: What is known of its base; empty where there is none.
        base_name: Path or name of the base.

    Raises:
        ConfigError: The folder is not empty, the model has no adapters, or no published family has it.
    """
    folder = Path(folder)
    lora = None if model.adapted is None else model.adapted.lora
    if lora is None:
        raise ConfigError(f"the model {model.name} has no adapters to write; write all of it with save_pretrained")
    family = family_for(settings, model_type=base.config.get("model_type"))
    rows = family.tensors(settings)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, LowRankKernel))
    kernels = {path_name(path): leaf for path, leaf in leaves if isinstance(leaf, LowRankKernel)}
    others = {path_name(path): leaf for path, leaf in leaves if not isinstance(leaf, LowRankKernel)}
    trained = {path for path in others if any(fnmatch.fnmatchcase(path, one) for one in lora.train_also)}
    architecture = str((base.config.get("architectures") or family.to_published(settings)["architectures"])[0])
    task = next((task for end, task in _TASKS.items() if architecture.endswith(end)), None)
    paths = whole_paths(rows, trained, task_type=task)
    nameless = sorted(trained - set(paths))
    if nameless:
        raise ConfigError(f"{nameless[0]} is trained whole, and published files have no such parameter")
    # Every process gathers; what is None elsewhere only the main one reads.
    factors = {path: (on_main_host(leaf.lora_a, ()), on_main_host(leaf.lora_b, ())) for path, leaf in kernels.items()}
    whole = {path: on_main_host(leaf, ()) for path, leaf in others.items() if path in paths}
    said = AdapterConfig(
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        rank_stabilised=lora.rank_stabilised,
        base=base_name,
        task_type=task,
    )
    writing = _written(folder, rows, factors, whole, said, base.files)
    with on_main_process(writing, does="write the adapter"):
        pass
    return folder


@contextlib.contextmanager
def _written(
    folder: Path,
    rows: Sequence[Row],
    factors: Mapping[str, Any],
    whole: Mapping[str, Any],
    config: AdapterConfig,
    files: Mapping[str, str | bytes],
) -> Iterator[None]:
    """Writes the files of an adapter on entering."""
    written = written_adapter(rows, factors, whole, config)
    # An export that is killed leaves nothing that looks like an adapter, and may be tried again.
    with partial_folder(folder):
        partial = partial_of(folder)
        shapes = {name: (array.shape, array.dtype) for name, array in written.tensors.items()}
        write_safetensors(partial / WEIGHTS, shapes, written.tensors.items())
        write_files(partial, files)
        write_json_atomic(partial / CONFIG, config_json(written))
        name_folder(folder, last=CONFIG)
    yield
