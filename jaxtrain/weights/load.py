"""Reads the weights that training starts from into the shardings of a step: arrays, a run, or a published model."""

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import DamagedError
from jaxtrain.checkpoint.run_folder import find_checkpoint
from jaxtrain.checkpoint.tree import shown_name, stored_name
from jaxtrain.config.arguments import is_store_address
from jaxtrain.config.published import settings_in
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.formats.hub import is_published, published_place
from jaxtrain.formats.rows import Row
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.runtime.tree import path_name, paths_of
from jaxtrain.train.first_state import Weights
from jaxtrain.train.state import random_key
from jaxtrain.train.step import TrainStep
from jaxtrain.weights.base import BaseRecord, base_of
from jaxtrain.weights.fill import Abstract, Source, Target, as_tree, fill, original_params
from jaxtrain.weights.peft import open_adapter
from jaxtrain.weights.read import Place, PublishedModel, find_places, open_published, read_kernel, read_places

# Moving averages, which evaluation uses, stand in for what they are averages of.
_AVERAGES = {"params": "ema", "model_state": "ema_model_state"}


def load_weights(
    step: TrainStep | ShardedModel,
    source: Params | str | os.PathLike[str] | None,
    *,
    skip: Sequence[str] = (),
    adapter: str | os.PathLike[str] | None = None,
    model_state: ModelState | None = None,
) -> Weights:
    """Read the weights that training starts from, straight into the shardings of a step.

    Args:
        step: the train step, or a sharded model.
        source: what holds the parameters.
            A run ("runs/x"), its `checkpoints` folder, or one step in it ("runs/x/checkpoints/400"): its newest intact
            step, or that one. Of a run with a moving average the average is taken where a parameter has one; its
            model_state comes along. What `open_run` and `fit` return stands for the path of its run, or of the step
            that was opened.
            A published model: a folder, a GGUF file, or OWNER/NAME on the Hugging Face hub.
            A tree of jax or NumPy arrays like that of `model.init`, of an adapted model also like that of the model
            below the adapters; None: the parameters are drawn.
        skip: patterns of paths of parameters (and of model_state), with `*`, that are not taken from the source but
            drawn: `["head/*"]` for another number of classes.
        adapter: folder of an adapter (see `load_adapter`) whose factors an adapted model starts from, over the
            published model that is the source; None: adapters begin at 0.
        model_state: batch statistics and the like, a tree like that of `model.init`; None: those of the source.

    Raises:
        ConfigError: another structure, shape or dtype, or a pattern that matches nothing; names the first path that
            differs, and the pattern to write.
        CheckpointError: no checkpoint at that path, or none that is intact.

    Example:
        >>> weights = jt.load_weights(step, {"kernel": np.ones((4, 3), np.float32)}, skip=["bias"])
        >>> state = step.init(0, weights)
    """
    if isinstance(step, TrainStep):
        target = Target(step.sharded_model, step.program.settings.trainable or (lambda path: True), tuple(skip))
    else:
        target = Target(step, lambda path: False, tuple(skip))
    state = None if model_state is None else _tree_source("model_state", model_state)
    return _load(source, target, state, adapter)


def _load(
    source: Params | str | os.PathLike[str] | None,
    target: Target,
    model_state: Source | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> Weights:
    """Read what a target takes of a source: arrays, a published model, or a run."""
    path = None
    if isinstance(source, str | os.PathLike):
        path = os.fspath(published_place(source, what="load_weights"))
    if path is not None and is_published(path):
        params, published_state = _published_sources(path, target.model, adapter)
        return fill(target, params, model_state or published_state)
    if adapter is not None:
        raise ConfigError(f"adapter={str(adapter)!r} without its base; name the published folder or file as the source")
    if path is None:
        return fill(target, None if source is None else _tree_source("params", source), model_state)
    checkpoint = find_checkpoint(path)
    with Checkpointer(checkpoint.directory, read_only=True) as checkpointer:
        _, weights = read_step(checkpointer, checkpoint.step, target, path=path, model_state=model_state)
        return weights


# --- Arrays, a published model, a checkpoint. ---


def _tree_source(name: str, tree: Any) -> Source:
    """Return the arrays of a tree that the user gives."""
    leaves = {path: leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for path, leaf in paths_of(tree).items()}

    def read(abstract: Abstract) -> Mapping[str, Any]:
        return {path: jax.device_put(leaves[path], like.sharding) for path, like in abstract.items()}

    return Source(name, leaves, read, is_borrowed=True)


def _published_sources(path: str, model: ShardedModel, adapter: str | os.PathLike[str] | None) -> tuple[Source, Source]:
    """Return the parameters and the model_state of a published folder or GGUF file."""
    published = open_published(path)
    settings = settings_in(path, published.settings)
    abstract = original_params(model)
    if "output" in abstract and settings.get("tie_embeddings"):
        settings["tie_embeddings"] = False  # of a file that holds an output layer although its config.json ties it
    if "vocab_size" in settings:
        settings["vocab_size"] = max(settings["vocab_size"], model.model.vocab_size or 0)
    places = find_places(published, settings)
    params = _published_source(published, places.params, abstract)
    if adapter is not None:
        params = _with_adapter(params, adapter, published.family.tensors(settings), model)
    return params, _published_source(published, places.model_state, paths_of(model.abstract_model_state))


def _published_source(published: PublishedModel, places: Mapping[str, Place], abstract: Abstract) -> Source:
    """Return the arrays of a published model that have places, for a model that stores its own as `abstract` says."""

    def read(requested: Abstract) -> Mapping[str, jax.Array]:
        return read_places(published, places, requested)

    def read_quantized(path: str, parts: Abstract, dims: tuple[int, int]) -> Mapping[str, jax.Array]:
        return read_kernel(published, places[path], parts, dims)

    leaves = {}
    for path, place in places.items():
        # Floats are cast to what the model stores while they are read, one slice at a time.
        dtype = abstract[path].dtype if path in abstract else place.dtype
        leaves[path] = jax.ShapeDtypeStruct(place.shape, dtype)
    return Source(f"the model in {published.path}", leaves, read, read_quantized)


def _with_adapter(base: Source, adapter: str | os.PathLike[str], rows: Sequence[Row], model: ShardedModel) -> Source:
    """Return a source with the factors of an adapter, and with what else it trains, in place of those of its base."""
    opened = open_adapter(os.fspath(adapter), rows)
    saved = opened.lora
    lora = None if model.model.adapted is None else model.model.adapted.lora
    if lora is not None and not (saved.rank == lora.rank and math.isclose(saved.scale, lora.scale, rel_tol=1e-6)):
        raise ConfigError(
            f"{opened.path} has rank {saved.rank} and scale {saved.scale:g}, but finetune.lora has rank {lora.rank} "
            f"and scale {lora.scale:g}; leave out rank, alpha and rank_stabilised"
        )

    def read(abstract: Abstract) -> Mapping[str, Any]:
        arrays = dict(base.read({path: like for path, like in abstract.items() if path not in opened.leaves}))
        for path, like in abstract.items():
            if path in opened.leaves:
                # A copy: the factors may be a part of the file that is mapped into memory.
                array = np.array(opened.leaves[path])
                arrays[path] = jax.make_array_from_callback(array.shape, like.sharding, array.__getitem__)
        return arrays

    return replace(base, leaves={**base.leaves, **opened.leaves}, read=read)


def read_step(
    checkpointer: Checkpointer,
    step: int | None,
    target: Target,
    *,
    path: str,
    model_state: Source | None = None,
    moved_to: str | None = None,
    report: Callable[[str], None] = print_remark,
) -> tuple[int, Weights]:
    """Read what a model takes of one step, and the number of that step.

    Args:
        checkpointer: where the steps are.
        step: number of the step; None: the newest one that is intact.
        target: what is read.
        path: of the run, in messages.
        model_state: in place of that of the step.
        moved_to: where the base of an adapter run is; None: where the run took it from.
        report: called with a line for each damaged step that is passed over.

    Raises:
        CheckpointError: there is no step, or none is intact.
    """
    if step is not None:
        params, saved_state = _saved_sources(checkpointer, step, target.model, path=path, moved_to=moved_to)
        return step, fill(target, params, model_state or saved_state)
    damaged: list[DamagedError] = []
    for number in reversed(checkpointer.steps()):
        try:
            result = read_step(checkpointer, number, target, path=path, model_state=model_state, moved_to=moved_to)
        except DamagedError as error:
            damaged.append(error)
            continue
        for error in damaged:
            report(f"{error}; step {number} is used instead")
        return result
    if damaged:
        raise CheckpointError(f"no intact checkpoint is left in {path}: {damaged[0]}")
    raise CheckpointError(f"no checkpoint in {checkpointer.directory}; the run saves one at its end or on a signal")


def _saved_sources(
    checkpointer: Checkpointer, step: int, model: ShardedModel, *, path: str, moved_to: str | None
) -> tuple[Source, Source]:
    """Return the parameters and the model_state that a checkpoint holds or names."""
    paths = {**original_params(model), **paths_of(model.abstract_params)}
    params = _saved_source("params", path, checkpointer, step, paths)
    base = base_of(checkpointer.metadata(step))
    if base is not None:
        params = _with_base(params, base, model, run_dir=path, moved_to=moved_to)
    return params, _saved_source("model_state", path, checkpointer, step, paths_of(model.abstract_model_state))


def _saved_source(part: str, path: str, checkpointer: Checkpointer, step: int, paths: Collection[str]) -> Source:
    """Return one part of a saved state by the paths that the model has for it, which may hold dots."""
    saved = checkpointer.info(step).leaves
    model_paths = {stored_name(inner): inner for inner in paths}
    names: dict[str, str] = {}  # path in the model -> stored name
    for prefix in (f"{part}.", f"{_AVERAGES[part]}."):
        for name in saved:
            if name.startswith(prefix):
                inner = name.removeprefix(prefix)
                names[model_paths.get(inner, shown_name(inner))] = name

    def read(abstract: Abstract) -> Mapping[str, Any]:
        arrays = checkpointer.read({names[inner]: like for inner, like in abstract.items()}, step=step)
        return {inner: arrays[names[inner]] for inner in abstract}

    leaves = {}
    for inner, name in names.items():
        shape, dtype = saved[name]
        leaves[inner] = jax.ShapeDtypeStruct(shape, _key_dtype() if dtype.startswith("key<") else jnp.dtype(dtype))
    return Source(f"{part} of {path}, step {step},", leaves, read)


def _key_dtype() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0)).dtype


# --- The base below adapters. ---


def _with_base(saved: Source, record: BaseRecord, model: ShardedModel, *, run_dir: str, moved_to: str | None) -> Source:
    """Return the parameters of an adapter run: what its checkpoint holds, and its base, from where that is."""
    if model.model.adapted is None:
        raise ConfigError(
            f"{run_dir} holds adapters of {record.text}, and not its weights; adapt the model with the same settings, "
            f"or write the merged weights with jaxtrain export {run_dir} FOLDER --merge"
        )
    base = {}
    for name, leaf in paths_of(model.abstract_params).items():
        if name in record.digests and name not in saved.leaves:
            base[name] = leaf

    def read(abstract: Abstract) -> Mapping[str, Any]:
        arrays = dict(saved.read({name: like for name, like in abstract.items() if name in saved.leaves}))
        frozen = abstract.keys() & base.keys()
        if not frozen:
            return arrays
        params = restore_base(model, record, run_dir=run_dir, only=frozen.__contains__, moved_to=moved_to)
        return arrays | paths_of(params)

    return Source(saved.name, {**saved.leaves, **base}, read)


def restore_base(
    model: ShardedModel,
    record: BaseRecord,
    *,
    run_dir: str | Path,
    only: Callable[[str], bool],
    moved_to: str | None = None,
) -> Params:
    """Read the frozen parameters of an adapter run, and compare them with their digests.

    Args:
        model: the adapted model.
        record: of the run.
        run_dir: directory of the run, in messages.
        only: parameter path -> whether it is read.
        moved_to: where the base is; None: where the run took it from.

    Returns:
        A tree like the parameters of the model, in its shardings, None in place of those that are not read.

    Raises:
        CheckpointError: the base is gone, or another one.
    """
    record.check_scale(model.model, run_dir=run_dir)

    def as_recorded(path: tuple[Any, ...], like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # In the dtypes whose digests were recorded: a policy may ask for others.
        dtype, *_ = record.digests.get(path_name(path), (like.dtype,))
        return jax.ShapeDtypeStruct(like.shape, jnp.dtype(dtype), sharding=like.sharding)

    recorded = jax.tree_util.tree_map_with_path(as_recorded, model.abstract_params)
    target = Target(replace(model, abstract_params=recorded), lambda path: False, record.skip, only)
    source = moved_to or record.path
    arrays = {} if source is None else paths_of(_load_base(source, target, run_dir).params)
    drawn = {path: like for path, like in paths_of(recorded).items() if only(path) and path not in arrays}
    if drawn:
        arrays |= _draw_again(model, record.seed, drawn)
    record.check(arrays, source=source, run_dir=run_dir)
    for path, like in paths_of(model.abstract_params).items():
        if path in arrays and arrays[path].dtype != like.dtype:
            arrays[path] = arrays[path].astype(like.dtype)
    return as_tree(arrays, recorded)


def _load_base(source: str, target: Target, run_dir: str | Path) -> Weights:
    if not is_store_address(source) and not Path(source).exists():
        raise CheckpointError(
            f"the base of {run_dir} is gone: {source} is not there, and a checkpoint of adapters does not hold it; put "
            "it back, or name where it is with model.from=PATH"
        )
    try:
        return _load(source, target)
    except ConfigError as error:
        raise CheckpointError(f"{source} is not the base of {run_dir}: {error}") from None


def _draw_again(model: ShardedModel, seed: int, abstract: Abstract) -> dict[str, jax.Array]:
    """Draw parameters as `TrainStep.init` draws them from a seed."""

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        drawn = paths_of(model.init(jax.random.split(key)[0])[0])
        return {path: drawn[path].astype(like.dtype) for path, like in abstract.items()}

    return jax.jit(draw, out_shardings={path: like.sharding for path, like in abstract.items()})(random_key(seed))
