"""What a state starts from: arrays of the user, another run, or a published model; all of it or without some parts.

Each is first a table of paths, shapes and dtypes (`_Source`), compared with what the model draws; then arrays, read or
moved straight into the shardings of the step. What is given for the model that an adapted one was made of becomes the
base below its adapters.
"""

import fnmatch
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from jaxtrain.formats.hub import is_published
from jaxtrain.layout.sharding import parameter_spec
from jaxtrain.models.adapters import quantized_kernel
from jaxtrain.models.model import ModelState, Params, parameter_shapes
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.optim.rules import check_patterns
from jaxtrain.precision.kernels import LowRankKernel, is_kernel, is_quantized
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.runtime.tree import path_name, paths_of
from jaxtrain.train.state import random_key
from jaxtrain.weights.base import BaseRecord, base_of
from jaxtrain.weights.peft import OpenedAdapter, open_adapter
from jaxtrain.weights.read import Place, PublishedModel, by_path, find_places, open_published, read_kernel, read_places

# Path -> shape, dtype and sharding of what is wanted.
Wanted = Mapping[str, jax.ShapeDtypeStruct]

# Moving averages, which evaluation uses, stand in for what they are averages of.
_AVERAGES = {"params": "ema", "model_state": "ema_model_state"}


@dataclass(frozen=True)
class Start:
    """What a state starts from, in the structure and the shardings of a model.

    Attributes:
        params: parameters, None for each that is to be drawn; None: all are.
        model_state: batch statistics and the like, in the same form.
        ours: paths of parameters that were read or quantized for this start, so that nobody else holds the arrays. What
            a user gave stays the user's: a step takes over the arrays of its state.
    """

    params: Params | None = None
    model_state: ModelState | None = None
    ours: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Target:
    """A model to fill: what it draws as shapes, patterns of what stays drawn, which are wanted, which are trained."""

    model: ShardedModel
    drawn: tuple[Params, ModelState]
    skip: tuple[str, ...]
    only: Callable[[str], bool]
    trains: Callable[[str], bool]

    def skips(self, path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.skip)


@dataclass(frozen=True)
class _Source:
    """Parameters or model_state that are given.

    Attributes:
        name: what they are, in messages.
        leaves: path -> array, or the shape and dtype of a saved one.
        fetch: gives path -> array.
        fetch_quantized: path of a kernel, what is wanted of it as a quantized one (by the names of its arrays), and its
            numbers of input and output dims; gives name -> array. None: kernels are fetched whole, as floats.
        theirs: paths of arrays that a user holds: what is fetched for them may share their memory.
    """

    name: str
    leaves: Mapping[str, Any]
    fetch: Callable[[Wanted], Mapping[str, Any]]
    fetch_quantized: Callable[[str, Wanted, tuple[int, int]], Mapping[str, jax.Array]] | None = None
    theirs: frozenset[str] = frozenset()


def accept_start(
    params: Any,
    model_state: Any,
    skip: Sequence[str],
    *,
    sharded_model: ShardedModel,
    only: Callable[[str], bool] = lambda path: True,
    trains: Callable[[str], bool] | None = None,
    adapter: str | Path | None = None,
) -> Start:
    """Parameters and model state to start from, in the structure and the shardings of a model.

    Args:
        params, model_state, skip, adapter: see `TrainStep.init`.
        sharded_model: the model.
        only: parameter path -> whether it is taken.
        trains: parameter path -> whether it is trained; None: all are. Frozen ones are cast to the dtype that they are
            stored in as soon as they are read.
    """
    target = _Target(sharded_model, sharded_model.drawn_shapes(), tuple(skip), only, trains or (lambda path: True))
    own = None if model_state is None else _given_tree("model_state", model_state)
    if isinstance(params, str | Path) and is_published(params):
        return _from_published(params, own, target, adapter)
    if adapter is not None:
        raise ConfigError(f"adapter={str(adapter)!r} without its base; name the published folder or file in params=")
    if isinstance(params, str | Path):
        return _from_checkpoint(params, own, target)
    return _placed(None if params is None else _given_tree("params", params), own, target)


def _placed(
    params: _Source | None, state: _Source | None, target: _Target, adapter: OpenedAdapter | None = None
) -> Start:
    """What is taken of each part, in the structure of the model, with None for what is to be drawn."""
    drawn, model = target.drawn, target.model
    known = [path for tree in drawn for path in paths_of(tree)]
    known += [path for part in (params, state) if part is not None for path in part.leaves]
    check_patterns("skip", target.skip, list(dict.fromkeys(known)))
    start = Start()
    if params is not None:
        part, free = _as_adapted(params, model, drawn[0])
        part = part if adapter is None else _with_adapter(part, adapter, model)
        taken = _taken(part, drawn[0], model.abstract_params, free, target)
        start = replace(start, params=taken, ours=frozenset(paths_of(taken)) - part.theirs)
    if state is not None:
        whole = replace(target, only=lambda path: True, trains=lambda path: True)
        start = replace(start, model_state=_taken(state, drawn[1], model.abstract_model_state, (), whole))
    return start


def _taken(given: _Source, drawn: Any, wanted: Any, free: Collection[str], target: _Target) -> Any:
    """The given arrays in the structure (`drawn`) and the shardings (`wanted`) of the model, None where skipped.

    Paths in `free` need not be given.
    """
    expected, stored = paths_of(drawn), paths_of(wanted)
    chosen = [path for path in expected if target.only(path) and not target.skips(path)]
    missing = [path for path in chosen if path not in free and path not in given.leaves]
    extra = [path for path in given.leaves if path not in expected and not target.skips(path)]
    if missing or extra:
        count = f" ({len(missing)} missing, {len(extra)} too many)" if len(missing) + len(extra) > 1 else ""
        first = f"{missing[0]} is missing" if missing else f"{extra[0]} is not an array of it"
        raise ConfigError(
            f"{given.name} does not fit the model of this step: {first}{count}; to initialize what is missing and skip "
            f"what is extra, write skip={_listed(target.skip, [*missing, *extra])}"
        )
    asked: dict[str, jax.ShapeDtypeStruct] = {}
    for path in chosen:
        if path in given.leaves:
            leaf, like = given.leaves[path], expected[path]
            floats = all(jnp.issubdtype(one.dtype, jnp.floating) for one in (leaf, like))
            if leaf.shape != like.shape or not (floats or leaf.dtype in (like.dtype, stored[path].dtype)):
                raise ConfigError(
                    f"{given.name} does not fit this step: {path} is {leaf.dtype}{list(leaf.shape)}, not "
                    f"{like.dtype}{list(like.shape)}; write skip={_listed(target.skip, [path])} to initialize it"
                )
            asked[path] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=stored[path].sharding)

    def known(leaf: Any, path: str) -> Any:
        # A run of another policy stored another dtype.
        kinds = (expected[path].dtype, stored[path].dtype)
        return leaf if leaf.dtype in kinds else leaf.astype(kinds[0])

    # One at a time: in the dtype of a run, which may take twice the bytes, frozen ones are never all on the devices.
    wide = [
        path
        for path, like in asked.items()
        if like.dtype != stored[path].dtype and not target.trains(path) and path not in given.theirs
    ]
    found = dict(given.fetch({path: like for path, like in asked.items() if path not in wide}))
    found = {path: known(leaf, path) for path, leaf in found.items()}
    for path in wide:
        found[path] = known(given.fetch({path: asked[path]})[path], path).astype(stored[path].dtype)
    return jax.tree.unflatten(jax.tree.structure(drawn), [found.get(path) for path in expected])


def _listed(patterns: Sequence[str], paths: Sequence[str] = ()) -> str:
    """The patterns, and few more that match the paths: the modules that they are in."""
    modules = [f"{path.rsplit('/', 1)[0]}/*" if "/" in path else path for path in paths]
    return "[" + ", ".join(f'"{one}"' for one in (*patterns, *list(dict.fromkeys(modules))[:4])) + "]"


# --- From arrays, a published model, or a checkpoint. ---


def _given_tree(name: str, tree: Any) -> _Source:
    """Arrays of a user."""
    leaves = {path: leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for path, leaf in paths_of(tree).items()}

    def fetch(wanted: Wanted) -> Mapping[str, Any]:
        return {path: jax.device_put(leaves[path], like.sharding) for path, like in wanted.items()}

    return _Source(name, leaves, fetch, theirs=frozenset(leaves))


def _from_published(path: str | Path, own: _Source | None, target: _Target, adapter: str | Path | None) -> Start:
    """Parameters and model_state of a published folder or GGUF file, read in place."""
    published = open_published(path)
    settings = settings_in(path, published.settings)
    if "output" in paths_of(target.drawn[0]) and settings.get("tie_embeddings"):
        settings["tie_embeddings"] = False  # of a file that holds an output layer although its config.json ties it
    if "vocab_size" in settings:
        settings["vocab_size"] = max(settings["vocab_size"], target.model.model.vocab_size or 0)
    places = find_places(published, settings)
    params = _published_part(path, published, places.params, _original_params(target.model))
    state = _published_part(path, published, places.model_state, paths_of(target.model.abstract_model_state))
    rows = None if adapter is None else published.family.tensors(settings)
    opened = None if rows is None else open_adapter(adapter or "", rows)
    return _placed(params, own or state, target, opened)


def _published_part(
    path: str | Path, published: PublishedModel, places: Mapping[str, Place], known: Mapping[str, Any]
) -> _Source:
    """Parameters or model_state of a published model, in the dtypes (`known`) that they are stored in."""

    def fetch_quantized(path: str, wanted: Wanted, dims: tuple[int, int]) -> Mapping[str, jax.Array]:
        return read_kernel(published, places[path], wanted, dims)

    # Floats are cast while they are read, one slice at a time.
    leaves = {
        name: jax.ShapeDtypeStruct(place.shape, known[name].dtype if name in known else place.dtype)
        for name, place in places.items()
    }
    return _Source(
        f"the model in {path}", leaves, lambda wanted: read_places(published, places, wanted), fetch_quantized
    )


def _from_checkpoint(path: str | Path, own: _Source | None, target: _Target) -> Start:
    """Parameters and model_state of the newest intact step at a path, or of the step that the path names."""
    checkpoint = find_checkpoint(path)
    known = {**_original_params(target.model), **paths_of(target.drawn[0])}
    damaged: list[str] = []
    with Checkpointer(checkpoint.directory, read_only=True) as checkpointer:
        for step in [checkpoint.step] if checkpoint.step is not None else checkpointer.steps()[::-1]:
            try:
                info = checkpointer.info(step)
                params = _saved_part("params", path, info, checkpointer, known)
                state = _saved_part("model_state", path, info, checkpointer, paths_of(target.drawn[1]))
                record = base_of(info.metadata)
                if record is not None:
                    params = _with_base(params, path, record, target)
                start = _placed(params, own or state, target)
            except DamagedError as error:
                damaged.append(str(error))
                continue
            for line in damaged:
                print_remark(f"{line}; step {step} is used instead")
            return start
    if checkpoint.step is not None:
        raise CheckpointError(damaged[0])
    raise CheckpointError(f"no intact checkpoint in {path}: {damaged[0]}")


def _saved_part(
    part: str, path: str | Path, info: CheckpointInfo, checkpointer: Checkpointer, known: Mapping[str, Any]
) -> _Source:
    """One part of a saved state, by the paths that the model (`known`) has for it, which may hold dots."""
    own = {stored_name(inner): inner for inner in known}
    sources: dict[str, str] = {}
    for place in (f"{part}.", f"{_AVERAGES[part]}."):
        inside = {name: name.removeprefix(place) for name in info.leaves if name.startswith(place)}
        sources |= {own.get(inner, shown_name(inner)): name for name, inner in inside.items()}

    def fetch(wanted: Wanted) -> Mapping[str, Any]:
        read = checkpointer.read({sources[inner]: like for inner, like in wanted.items()}, step=info.step)
        return {inner: read[sources[inner]] for inner in wanted}

    key: Any = jax.eval_shape(lambda: jax.random.key(0)).dtype
    saved = {inner: info.leaves[name] for inner, name in sources.items()}
    leaves = {
        inner: jax.ShapeDtypeStruct(shape, key if dtype.startswith("key<") else jnp.dtype(dtype))
        for inner, (shape, dtype) in saved.items()
    }
    return _Source(f"{part} of {path}, step {info.step},", leaves, fetch)


# --- The base below adapters. ---


def _with_base(saved: _Source, path: str | Path, record: BaseRecord, target: _Target) -> _Source:
    """The parameters of an adapter run: what its checkpoint holds, and its base, from where that is."""
    model = target.model
    if model.model.adapted is None:
        raise ConfigError(
            f"{path} holds adapters of {record.shown}, and not its weights; adapt the model with the same settings, or "
            f"write the merged weights with jaxtrain export {path} FOLDER --merge"
        )
    paths = {name: leaf for name, leaf in paths_of(model.abstract_params).items() if name not in saved.leaves}
    known = {name: leaf for name, leaf in paths.items() if name in record.digests}

    def fetch(wanted: Wanted) -> Mapping[str, Any]:
        own = saved.fetch({name: like for name, like in wanted.items() if name in saved.leaves})
        only = wanted.keys() & known.keys()
        return {**own, **paths_of(restore_base(model, record, run_dir=path, only=only.__contains__))}

    return _Source(saved.name, {**saved.leaves, **known}, fetch)


def restore_base(
    sharded_model: ShardedModel,
    record: BaseRecord,
    *,
    run_dir: str | Path,
    only: Callable[[str], bool],
    moved_to: str | None = None,
) -> Params:
    """The frozen parameters of an adapter run (`run_dir`, in messages), once their digests are compared.

    A tree like the parameters of the adapted model in its shardings, None in place of those that are not wanted
    (`only`), from `moved_to` or where the run took them. A `CheckpointError` where the base is gone or another one.
    """
    record.check_scale(sharded_model.model, run_dir=run_dir)
    source = moved_to or record.path
    asked = paths_of(sharded_model.abstract_params)

    def recorded(path: tuple, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # In the dtypes whose digests were recorded: a policy may ask for others.
        dtype, *_ = record.digests.get(path_name(path), (str(like.dtype),))
        return jax.ShapeDtypeStruct(like.shape, jnp.dtype(dtype), sharding=like.sharding)

    shapes = jax.tree_util.tree_map_with_path(recorded, sharded_model.abstract_params)
    sharded_model = replace(sharded_model, abstract_params=shapes)
    ready: dict[str, Any] = {}
    if source is not None:
        if not is_store_address(str(source)) and not Path(source).exists():
            raise CheckpointError(
                f"the base of {run_dir} is gone: {source} is not there, and a checkpoint of adapters does not hold it; "
                "put it back, or name where it is with model.from=PATH"
            )
        try:
            start = accept_start(
                source, None, record.skip, sharded_model=sharded_model, only=only, trains=lambda path: False
            )
        except ConfigError as error:
            raise CheckpointError(f"{source} is not the base of {run_dir}: {error}") from None
        ready = paths_of(start.params)
        del start  # it would keep what is cast below
    missing = {path: leaf for path, leaf in paths_of(shapes).items() if only(path) and path not in ready}
    ready |= _drawn_again(sharded_model, record.seed, missing)
    record.check(ready, source=source, run_dir=run_dir)
    for path in ready:
        if ready[path].dtype != asked[path].dtype:
            ready[path] = ready[path].astype(asked[path].dtype)
    return jax.tree_util.tree_map_with_path(lambda path, _: ready.get(path_name(path)), shapes)


def _drawn_again(sharded_model: ShardedModel, seed: int, wanted: Wanted) -> dict[str, jax.Array]:
    """Parameters as `TrainStep.init` draws them from a seed."""
    if not wanted:
        return {}

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        drawn = paths_of(sharded_model.init(jax.random.split(key)[0])[0])
        return {path: drawn[path].astype(like.dtype) for path, like in wanted.items()}

    return jax.jit(draw, out_shardings={path: like.sharding for path, like in wanted.items()})(random_key(seed))


def _original_params(sharded_model: ShardedModel) -> dict[str, jax.ShapeDtypeStruct]:
    """What to read for a model or the one that it was made of; kernels that are stored quantized as float32."""
    adapted = sharded_model.model.adapted
    if adapted is None:
        return paths_of(sharded_model.abstract_params)
    shapes, layout, found = parameter_shapes(adapted.original), sharded_model.layout, {}
    for name, leaf in by_path(sharded_model.abstract_params, is_leaf=is_kernel).items():
        base = leaf.base if isinstance(leaf, LowRankKernel) else leaf
        if is_quantized(base):
            shape = shapes[name].shape
            sharding = layout.named(parameter_spec(name, shape, layout))
            base = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        found[name] = base
    return found


def _as_adapted(given: _Source, sharded_model: ShardedModel, drawn: Params) -> tuple[_Source, frozenset[str]]:
    """What is given, by the paths of an adapted model, and the paths that need not be given: its adapters.

    Kernels are quantized when they are fetched.
    """
    if sharded_model.model.adapted is None:
        return given, frozenset()
    floats = _original_params(sharded_model)
    renamed: dict[str, str] = {}
    quantized: dict[str, str] = {}
    leaves = dict(given.leaves)
    free: set[str] = set()
    for name, leaf in by_path(drawn, is_leaf=is_kernel).items():
        has_adapter = isinstance(leaf, LowRankKernel)
        if has_adapter:
            free |= {f"{name}/lora_a", f"{name}/lora_b"}
        base, place = (leaf.base, f"{name}/base") if has_adapter else (leaf, name)
        if name not in given.leaves or not is_kernel(leaf):
            continue
        found = leaves.pop(name)
        if not is_quantized(base):
            leaves[place], renamed[place] = found, name
            continue
        if found.shape != floats[name].shape:
            raise ConfigError(
                f"{given.name} does not fit the model of this step: {name} is {found.dtype}{list(found.shape)}, wanted "
                f"is {list(floats[name].shape)}"
            )
        quantized[place] = name
        leaves |= {f"{place}/{inner}": shape for inner, shape in paths_of(base).items()}

    def fetch(wanted: Wanted) -> Mapping[str, Any]:
        below = {path: place for path in wanted for place in [path.rsplit("/", 1)[0]] if place in quantized}
        read = given.fetch({renamed.get(path, path): like for path, like in wanted.items() if path not in below})
        found = {path: read[renamed.get(path, path)] for path in wanted if path not in below}
        # One kernel at a time: its floats are gone before those of the next are read.
        for place in dict.fromkeys(below.values()):
            name = quantized[place]
            inside = {path.removeprefix(f"{place}/"): wanted[path] for path in below if below[path] == place}
            if given.fetch_quantized is None:
                parts = _quantized(given.fetch({name: floats[name]})[name], name, inside, sharded_model)
            else:
                parts = given.fetch_quantized(name, inside, sharded_model.model.linears[name])
            found |= {f"{place}/{inner}": array for inner, array in parts.items()}
        return found

    # The integers of a kernel are made from the user's floats, and are not theirs.
    theirs = frozenset(path for path in leaves if renamed.get(path, path) in given.theirs)
    return _Source(given.name, leaves, fetch, theirs=theirs), frozenset(free)


def _quantized(kernel: jax.Array, name: str, wanted: Wanted, sharded_model: ShardedModel) -> dict[str, jax.Array]:
    """The arrays of a quantized kernel by their names in it, in their shardings."""
    dims, adapted = sharded_model.model.linears[name], sharded_model.model.adapted
    assert adapted is not None

    def quantize(kernel: jax.Array) -> dict[str, jax.Array]:
        small = paths_of(quantized_kernel(kernel, dims, adapted.base, adapted.double_quantization))
        return {inner: small[inner] for inner in wanted}

    shardings = {inner: like.sharding for inner, like in wanted.items()}
    return jax.jit(quantize, out_shardings=shardings)(kernel)


def _with_adapter(given: _Source, adapter: OpenedAdapter, sharded_model: ShardedModel) -> _Source:
    """What is given, with the factors of an adapter and what it trains whole in the place of its own."""
    adapted = sharded_model.model.adapted
    lora = None if adapted is None else adapted.lora
    wanted, own = ((0, 0.0) if one is None else (one.rank, one.scale) for one in (adapter.lora, lora))
    if wanted[0] != own[0] or not math.isclose(wanted[1], own[1], rel_tol=1e-6):
        raise ConfigError(
            f"{adapter.path} has rank {wanted[0]} and scale {wanted[1]:g}, but finetune.lora has rank "
            f"{own[0]} and scale {own[1]:g}; leave out rank, alpha and rank_stabilised"
        )

    def place(array: np.ndarray, like: Any) -> jax.Array:
        return jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])

    def fetch(wanted: Wanted) -> Mapping[str, Any]:
        own = {path: place(adapter.leaves[path], like) for path, like in wanted.items() if path in adapter.leaves}
        return {**given.fetch({path: like for path, like in wanted.items() if path not in own}), **own}

    # The factors may be a part of the file that is mapped into memory: a state has its own.
    theirs = given.theirs | frozenset(adapter.leaves)
    return _Source(given.name, {**given.leaves, **adapter.leaves}, fetch, theirs=theirs)
