"""Reads the weights that training starts from into the shardings of a step: arrays, a run, or a published model.

Each is a `_Source`: a table of paths, shapes and dtypes, and a function that reads them. It is compared with the model
before anything is read. A source of the model that an adapted one was made of gives the base below its adapters.
"""

import fnmatch
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import CheckpointInfo, DamagedError
from jaxtrain.checkpoint.run_folder import find_checkpoint
from jaxtrain.checkpoint.tree import shown_name, stored_name
from jaxtrain.config.arguments import is_store_address
from jaxtrain.config.published import settings_in
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.formats.hub import is_published, published_place
from jaxtrain.formats.rows import Row
from jaxtrain.layout.sharding import parameter_spec
from jaxtrain.models.adapters import quantized_kernel
from jaxtrain.models.model import ModelState, Params, parameter_shapes
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.optim.rules import check_patterns
from jaxtrain.precision.kernels import LowRankKernel, is_kernel, is_quantized
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.runtime.tree import path_name, paths_of
from jaxtrain.train.first_state import Weights, check_leaf, check_structure
from jaxtrain.train.state import random_key
from jaxtrain.train.step import TrainStep
from jaxtrain.weights.base import BaseRecord, base_of
from jaxtrain.weights.peft import open_adapter
from jaxtrain.weights.read import Place, PublishedModel, by_path, find_places, open_published, read_kernel, read_places

# Path -> shape, dtype and sharding of an array to read.
Abstract = Mapping[str, jax.ShapeDtypeStruct]
Read = TypeVar("Read")

# Moving averages, which evaluation uses, stand in for what they are averages of.
_AVERAGES = {"params": "ema", "model_state": "ema_model_state"}


@dataclass(frozen=True)
class _Source:
    """Parameters or model_state that something holds.

    Attributes:
        name: what it is, in messages.
        leaves: path -> array, or the shape and dtype of a saved one.
        read: gives path -> array.
        read_quantized: path of a kernel, its arrays as a quantized one by their names, and its numbers of input and
            output dims; gives name -> array. None: kernels are read as floats.
        is_borrowed: whether the user holds the arrays, whose memory may be shared with what is read.
    """

    name: str
    leaves: Mapping[str, Any]
    read: Callable[[Abstract], Mapping[str, Any]]
    read_quantized: Callable[[str, Abstract, tuple[int, int]], Mapping[str, jax.Array]] | None = None
    is_borrowed: bool = False


@dataclass(frozen=True)
class _Target:
    """A model to fill.

    Attributes:
        model: the model.
        trains: parameter path -> whether it is trained; frozen ones are cast to the dtype that they are stored in as
            soon as they are read.
        skip: patterns of paths that stay drawn.
        only: parameter path -> whether it is read.
    """

    model: ShardedModel
    trains: Callable[[str], bool]
    skip: tuple[str, ...] = ()
    only: Callable[[str], bool] = lambda path: True

    def skips(self, path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.skip)


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
        target = _Target(step.sharded_model, step.program.settings.trainable or (lambda path: True), tuple(skip))
    else:
        target = _Target(step, lambda path: False, tuple(skip))
    state = None if model_state is None else _tree_source("model_state", model_state)
    if isinstance(source, str | os.PathLike):
        return _load_path(source, target, state, adapter)
    if adapter is not None:
        raise ConfigError(f"adapter={str(adapter)!r} without its base; name the published folder or file as the source")
    return _fill(target, None if source is None else _tree_source("params", source), state)


def _load_path(
    source: str | os.PathLike[str],
    target: _Target,
    model_state: _Source | None,
    adapter: str | os.PathLike[str] | None = None,
) -> Weights:
    path = os.fspath(published_place(source, what="load_weights"))
    if is_published(path):
        params, published_state = _published_sources(path, target.model, adapter)
        return _fill(target, params, model_state or published_state)
    if adapter is not None:
        raise ConfigError(f"adapter={str(adapter)!r} is for a published model, which {path} is not")
    return _load_checkpoint(path, target, model_state)


def _fill(target: _Target, params: _Source | None, model_state: _Source | None) -> Weights:
    """Read what a model takes of the sources, in its structure, with None for what is drawn."""
    model = target.model
    paths = [*paths_of(model.abstract_params), *paths_of(model.abstract_model_state)]
    for source in (params, model_state):
        if source is not None:
            paths += source.leaves
    check_patterns("skip", target.skip, list(dict.fromkeys(paths)))
    weights = Weights()
    if params is not None:
        match = _match(params, model)
        arrays = _take(params, match, paths_of(model.abstract_params), target)
        owned = arrays.keys()
        if params.is_borrowed:
            owned = [path for path in arrays if path not in match.paths]  # what was quantized here
        weights = replace(weights, params=_as_tree(arrays, model.abstract_params), owned=frozenset(owned))
    if model_state is not None:
        every = _Target(model, trains=lambda path: True, skip=target.skip)
        match = _Match({path: path for path in model_state.leaves})
        arrays = _take(model_state, match, paths_of(model.abstract_model_state), every)
        weights = replace(weights, model_state=_as_tree(arrays, model.abstract_model_state))
    return weights


def _as_tree(arrays: Mapping[str, Any], like: Any) -> Any:
    """Return the arrays in a structure, with None for those that are missing."""
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays.get(path_name(path)), like)


@dataclass(frozen=True)
class _Match:
    """What the arrays of a model are in a source.

    Attributes:
        paths: path in the model -> path in the source, of arrays that are taken as they are.
        quantized: path of a quantized kernel in the model -> path of its floats in the source.
        parts: path of a quantized kernel in the model -> its arrays by their names.
        optional: paths in the model that a source may lack: its adapters.
    """

    paths: dict[str, str]
    quantized: dict[str, str] = field(default_factory=dict)
    parts: dict[str, dict[str, jax.ShapeDtypeStruct]] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)


def _match(source: _Source, model: ShardedModel) -> _Match:
    """Find the parameters of a model in a source, which may be that of the model before it was adapted."""
    match = _Match({path: path for path in source.leaves})
    if model.model.adapted is None:
        return match
    for path, kernel in by_path(model.abstract_params, is_leaf=is_kernel).items():
        base = kernel
        base_path = path
        if isinstance(kernel, LowRankKernel):
            base = kernel.base
            base_path = f"{path}/base"
            match.optional.update([f"{path}/lora_a", f"{path}/lora_b"])
        if not is_kernel(kernel) or path not in source.leaves:
            continue
        del match.paths[path]
        if is_quantized(base):
            match.quantized[base_path] = path
            match.parts[base_path] = paths_of(base)
        else:
            match.paths[base_path] = path
    return match


def _take(source: _Source, match: _Match, abstract: Abstract, target: _Target) -> dict[str, Any]:
    """Read arrays of a source.

    Args:
        source: where they are.
        match: what they are called there.
        abstract: every array of the model, as it is stored.
        target: which of them are taken.

    Returns:
        Path in the model -> array in its sharding. Those that are trained, or that the user holds, keep their dtypes.

    Raises:
        ConfigError: paths or shapes of the source are not those of the model.
    """
    chosen = [path for path in abstract if target.only(path) and not target.skips(path)]
    given = {*match.paths}
    for base_path, parts in match.parts.items():
        given |= {f"{base_path}/{name}" for name in parts}
    given = [path for path in (*match.paths, *abstract) if path in given and not target.skips(path)]
    optional = match.optional | (abstract.keys() - set(chosen))
    check_structure(source.name, given, abstract, optional=optional, skip=target.skip)
    arrays: dict[str, Any] = {}
    together: dict[str, jax.ShapeDtypeStruct] = {}
    for path in chosen:
        if path not in match.paths:
            continue
        source_path = match.paths[path]
        leaf = source.leaves[source_path]
        check_leaf(source.name, path, leaf, abstract[path], skip=target.skip)
        like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=abstract[path].sharding)
        if leaf.dtype == abstract[path].dtype or target.trains(path) or source.is_borrowed:
            together[path] = like
        else:
            # One by one: a source may hold frozen arrays in twice the bytes, for which devices need no room.
            array = source.read({source_path: like})[source_path]
            arrays[path] = array.astype(abstract[path].dtype)
    read = source.read({match.paths[path]: like for path, like in together.items()})
    for path in together:
        arrays[path] = read[match.paths[path]]
    for base_path, source_path in match.quantized.items():
        parts = {
            name: abstract[f"{base_path}/{name}"] for name in match.parts[base_path] if f"{base_path}/{name}" in chosen
        }
        if parts:
            kernel = _quantize(source, source_path, parts, target.model)
            arrays |= {f"{base_path}/{name}": array for name, array in kernel.items()}
    return arrays


def _quantize(source: _Source, path: str, parts: Abstract, model: ShardedModel) -> Mapping[str, jax.Array]:
    """Read the floats of a kernel and quantize them, so that they are gone before those of the next are read.

    Args:
        source: where the floats are.
        path: of the kernel there.
        parts: the arrays of the quantized kernel by their names.
        model: the adapted model.
    """
    adapted = model.model.adapted
    assert adapted is not None
    dims = model.model.linears[path]
    floats = _original_params(model)[path]
    check_leaf(source.name, path, source.leaves[path], floats)
    if source.read_quantized is not None:
        return source.read_quantized(path, parts, dims)

    def quantize(kernel: jax.Array) -> dict[str, jax.Array]:
        quantized = paths_of(quantized_kernel(kernel, dims, adapted.base, adapted.double_quantization))
        return {name: quantized[name] for name in parts}

    kernel = source.read({path: floats})[path]
    return jax.jit(quantize, out_shardings={name: like.sharding for name, like in parts.items()})(kernel)


def _original_params(model: ShardedModel) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the parameters of a model, or of the one that it was made of; quantized kernels as float32."""
    if model.model.adapted is None:
        return paths_of(model.abstract_params)
    shapes = parameter_shapes(model.model.adapted.original)
    floats = {}
    for path, leaf in by_path(model.abstract_params, is_leaf=is_kernel).items():
        base = leaf.base if isinstance(leaf, LowRankKernel) else leaf
        if is_quantized(base):
            shape = shapes[path].shape
            sharding = model.layout.named(parameter_spec(path, shape, model.layout))
            base = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        floats[path] = base
    return floats


# --- Arrays, a published model, a checkpoint. ---


def _tree_source(name: str, tree: Any) -> _Source:
    leaves = {path: leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for path, leaf in paths_of(tree).items()}

    def read(abstract: Abstract) -> Mapping[str, Any]:
        return {path: jax.device_put(leaves[path], like.sharding) for path, like in abstract.items()}

    return _Source(name, leaves, read, is_borrowed=True)


def _published_sources(
    path: str, model: ShardedModel, adapter: str | os.PathLike[str] | None
) -> tuple[_Source, _Source]:
    """Return the parameters and the model_state of a published folder or GGUF file."""
    published = open_published(path)
    settings = settings_in(path, published.settings)
    known = _original_params(model)
    if "output" in known and settings.get("tie_embeddings"):
        settings["tie_embeddings"] = False  # of a file that holds an output layer although its config.json ties it
    if "vocab_size" in settings:
        settings["vocab_size"] = max(settings["vocab_size"], model.model.vocab_size or 0)
    places = find_places(published, settings)
    params = _published_source(published, places.params, known)
    if adapter is not None:
        params = _with_adapter(params, adapter, published.family.tensors(settings), model)
    return params, _published_source(published, places.model_state, paths_of(model.abstract_model_state))


def _published_source(published: PublishedModel, places: Mapping[str, Place], known: Mapping[str, Any]) -> _Source:
    def read(abstract: Abstract) -> Mapping[str, jax.Array]:
        return read_places(published, places, abstract)

    def read_quantized(path: str, parts: Abstract, dims: tuple[int, int]) -> Mapping[str, jax.Array]:
        return read_kernel(published, places[path], parts, dims)

    leaves = {}
    for path, place in places.items():
        # Floats are cast to what the model stores while they are read, one slice at a time.
        dtype = known[path].dtype if path in known else place.dtype
        leaves[path] = jax.ShapeDtypeStruct(place.shape, dtype)
    return _Source(f"the model in {published.path}", leaves, read, read_quantized)


def _with_adapter(base: _Source, adapter: str | os.PathLike[str], rows: Sequence[Row], model: ShardedModel) -> _Source:
    """Return a source with the factors of an adapter, and with what else it trains, in place of those of its base."""
    opened = open_adapter(os.fspath(adapter), rows)
    lora = None if model.model.adapted is None else model.model.adapted.lora
    rank = 0 if lora is None else lora.rank
    scale = 0.0 if lora is None else lora.scale
    if opened.lora.rank != rank or not math.isclose(opened.lora.scale, scale, rel_tol=1e-6):
        raise ConfigError(
            f"{opened.path} has rank {opened.lora.rank} and scale {opened.lora.scale:g}, but finetune.lora has rank "
            f"{rank} and scale {scale:g}; leave out rank, alpha and rank_stabilised"
        )

    def read(abstract: Abstract) -> Mapping[str, Any]:
        arrays = dict(base.read({path: like for path, like in abstract.items() if path not in opened.leaves}))
        for path, like in abstract.items():
            if path in opened.leaves:
                # A copy: the factors may be a part of the file that is mapped into memory.
                arrays[path] = jax.device_put(np.array(opened.leaves[path]), like.sharding)
        return arrays

    return replace(base, leaves={**base.leaves, **opened.leaves}, read=read)


def _load_checkpoint(path: str, target: _Target, model_state: _Source | None) -> Weights:
    """Read the newest intact step at a path, or the step that the path names."""
    checkpoint = find_checkpoint(path)
    model = target.model
    known = {**_original_params(model), **paths_of(model.abstract_params)}
    with Checkpointer(checkpoint.directory, read_only=True) as checkpointer:

        def read(step: int) -> Weights:
            info = checkpointer.info(step)
            params = _saved_source("params", path, info, checkpointer, known)
            base = base_of(info.metadata)
            if base is not None:
                params = _with_base(params, path, base, model)
            state = _saved_source("model_state", path, info, checkpointer, paths_of(model.abstract_model_state))
            return _fill(target, params, model_state or state)

        if checkpoint.step is not None:
            return read(checkpoint.step)
        return read_newest_intact(checkpointer, read, report=print_remark)


def read_newest_intact(
    checkpointer: Checkpointer, read: Callable[[int], Read], *, report: Callable[[str], None]
) -> Read:
    """Read the newest step that is intact: all that is read must be of one step.

    Args:
        checkpointer: where the steps are.
        read: step -> what is read of it.
        report: called with a line for each damaged step that is passed over.

    Raises:
        CheckpointError: there is no step, or none is intact.
    """
    damaged: list[DamagedError] = []
    for step in reversed(checkpointer.steps()):
        try:
            content = read(step)
        except DamagedError as error:
            damaged.append(error)
            continue
        for error in damaged:
            report(f"{error}; step {step} is used instead")
        return content
    if damaged:
        raise CheckpointError(f"no intact checkpoint is left in {checkpointer.directory}: {damaged[0]}")
    raise CheckpointError(f"no checkpoint in {checkpointer.directory}; the run saves one at its end or on a signal")


def _saved_source(
    part: str, path: str, info: CheckpointInfo, checkpointer: Checkpointer, known: Mapping[str, Any]
) -> _Source:
    """Return one part of a saved state, by the paths that the model (`known`) has for it, which may hold dots."""
    model_paths = {stored_name(inner): inner for inner in known}
    names: dict[str, str] = {}  # path in the model -> stored name
    for prefix in (f"{part}.", f"{_AVERAGES[part]}."):
        for name in info.leaves:
            if name.startswith(prefix):
                inner = name.removeprefix(prefix)
                names[model_paths.get(inner, shown_name(inner))] = name

    def read(abstract: Abstract) -> Mapping[str, Any]:
        arrays = checkpointer.read({names[inner]: like for inner, like in abstract.items()}, step=info.step)
        return {inner: arrays[names[inner]] for inner in abstract}

    leaves = {}
    for inner, name in names.items():
        shape, dtype = info.leaves[name]
        leaves[inner] = jax.ShapeDtypeStruct(shape, _saved_dtype(dtype))
    return _Source(f"{part} of {path}, step {info.step},", leaves, read)


def _saved_dtype(name: str) -> Any:
    if name.startswith("key<"):
        return jax.eval_shape(lambda: jax.random.key(0)).dtype
    return jnp.dtype(name)


# --- The base below adapters. ---


def _with_base(saved: _Source, path: str, record: BaseRecord, model: ShardedModel) -> _Source:
    """Return the parameters of an adapter run: what its checkpoint holds, and its base, from where that is."""
    if model.model.adapted is None:
        raise ConfigError(
            f"{path} holds adapters of {record.text}, and not its weights; adapt the model with the same settings, or "
            f"write the merged weights with jaxtrain export {path} FOLDER --merge"
        )
    base = {}
    for name, leaf in paths_of(model.abstract_params).items():
        if name in record.digests and name not in saved.leaves:
            base[name] = leaf

    def read(abstract: Abstract) -> Mapping[str, Any]:
        arrays = dict(saved.read({name: like for name, like in abstract.items() if name in saved.leaves}))
        frozen = abstract.keys() & base.keys()
        return arrays | paths_of(restore_base(model, record, run_dir=path, only=frozen.__contains__))

    return _Source(saved.name, {**saved.leaves, **base}, read)


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
    target = _Target(replace(model, abstract_params=recorded), lambda path: False, record.skip, only)
    source = moved_to or record.path
    arrays = {} if source is None else paths_of(_load_base(source, target, run_dir).params)
    drawn = {path: like for path, like in paths_of(recorded).items() if only(path) and path not in arrays}
    if drawn:
        arrays |= _draw_again(model, record.seed, drawn)
    record.check(arrays, source=source, run_dir=run_dir)
    for path, like in paths_of(model.abstract_params).items():
        if path in arrays and arrays[path].dtype != like.dtype:
            arrays[path] = arrays[path].astype(like.dtype)
    return _as_tree(arrays, recorded)


def _load_base(source: str, target: _Target, run_dir: str | Path) -> Weights:
    if not is_store_address(source) and not Path(source).exists():
        raise CheckpointError(
            f"the base of {run_dir} is gone: {source} is not there, and a checkpoint of adapters does not hold it; put "
            "it back, or name where it is with model.from=PATH"
        )
    try:
        return _load_path(source, target, None)
    except ConfigError as error:
        raise CheckpointError(f"{source} is not the base of {run_dir}: {error}") from None


def _draw_again(model: ShardedModel, seed: int, abstract: Abstract) -> dict[str, jax.Array]:
    """Draw parameters as `TrainStep.init` draws them from a seed."""

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        drawn = paths_of(model.init(jax.random.split(key)[0])[0])
        return {path: drawn[path].astype(like.dtype) for path, like in abstract.items()}

    return jax.jit(draw, out_shardings={path: like.sharding for path, like in abstract.items()})(random_key(seed))
