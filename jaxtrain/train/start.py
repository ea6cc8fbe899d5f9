"""What a state starts from: arrays of the user, another run, or a published model; all of it or without some parts.

Each is first a table of paths, shapes and dtypes (`Given`), compared with what the model draws; then arrays, read or
moved straight into the shardings of the step.
"""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import CheckpointInfo, DamagedError
from jaxtrain.checkpoint.kept_weights import read_kept_weights
from jaxtrain.checkpoint.run_folder import find_checkpoint
from jaxtrain.checkpoint.tree import shown_name, stored_name
from jaxtrain.config.arguments import is_store_address
from jaxtrain.config.published import settings_in
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.interop.formats.hub import is_published
from jaxtrain.interop.load import read_kernel, read_places
from jaxtrain.interop.peft import open_adapter
from jaxtrain.interop.weights import Place, PublishedModel, find_places, open_published
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.optim.rules import check_patterns
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.train.adapted_start import Given, as_adapted, original_params, with_adapter
from jaxtrain.train.base import BaseRecord, base_of, run_of
from jaxtrain.train.checks import random_key
from jaxtrain.train.state import paths_of

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
    """A model to fill: what it draws as shapes, which parameters are wanted, and which of them are trained."""

    model: ShardedModel
    drawn: tuple[Params, ModelState]
    only: Callable[[str], bool]
    trains: Callable[[str], bool]


def accept_start(
    params: Any,
    model_state: Any,
    skip: Sequence[str],
    *,
    sharded_model: ShardedModel,
    only: Callable[[str], bool] | None = None,
    trains: Callable[[str], bool] | None = None,
    adapter: str | Path | None = None,
) -> Start:
    """Parameters and model state to start from, in the structure and the shardings of a model.

    What is given for the model that an adapted one was made of becomes the base below its adapters, which are drawn.

    Args:
        params: tree of jax or NumPy arrays, path of a run, of a checkpoint or of a published model, or None.
        model_state: tree of jax or NumPy arrays, or None.
        skip: patterns of paths that are drawn, whatever is given.
        sharded_model: the model.
        only: parameter path -> whether it is taken; None: all are.
        trains: parameter path -> whether it is trained; None: all are. Frozen ones are cast to the dtype that they are
            stored in as soon as they are read.
        adapter: folder of an adapter of the published model that `params` names, or None.

    Raises:
        ConfigError: another structure, shape or dtype, or a pattern that matches nothing; names the first.
        CheckpointError: no intact checkpoint at the path.
    """
    if skip and params is None and model_state is None:
        raise ConfigError(f"skip={_listed(skip)} without anything to skip it in; give params=, or leave skip out")
    target = _Target(sharded_model, sharded_model.drawn_shapes(), only or _all, trains or _all)
    own = None if model_state is None else _given_tree("model_state", model_state)
    if isinstance(params, str | Path) and is_published(params):
        return _from_published(params, own, tuple(skip), target, adapter)
    if adapter is not None:
        raise ConfigError(f"adapter={str(adapter)!r} without its base; name the published folder or file in params=")
    if isinstance(params, str | Path):
        return _from_checkpoint(params, own, tuple(skip), target)
    return _placed(None if params is None else _given_tree("params", params), own, tuple(skip), target)


def _all(path: str) -> bool:
    del path
    return True


def _given_tree(name: str, tree: Any) -> Given:
    """Arrays of a user."""
    leaves = {path: leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for path, leaf in paths_of(tree).items()}

    def fetch(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, Any]:
        return {path: jax.device_put(leaves[path], like.sharding) for path, like in wanted.items()}

    return Given(name, leaves, fetch, theirs=frozenset(leaves))


def _from_published(
    path: str | Path, own: Given | None, skip: tuple[str, ...], target: _Target, adapter: str | Path | None
) -> Start:
    """Parameters and model_state of a published folder or GGUF file, read in place."""
    published = open_published(path)
    settings = settings_in(path, published.settings)
    if "output" in paths_of(target.drawn[0]) and settings.get("tie_embeddings"):
        settings["tie_embeddings"] = False  # of a file that holds an output layer although its config.json ties it
    places = find_places(published, settings)
    params = _published_part(path, published, places.params, original_params(target.model))
    state = _published_part(path, published, places.model_state, paths_of(target.model.abstract_model_state))
    rows = None if adapter is None else published.family.tensors(settings)
    opened = None if rows is None else open_adapter(adapter or "", rows, base=published, places=places.params)
    return _placed(params, own or state, skip, target, adapter=opened)


def _published_part(
    path: str | Path, published: PublishedModel, places: Mapping[str, Place], known: Mapping[str, Any]
) -> Given:
    """Parameters or model_state of a published model, in the dtypes (`known`) that they are stored in."""

    def fetch(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, Any]:
        return read_places(published, places, wanted)

    def fetch_quantized(
        path: str, wanted: Mapping[str, jax.ShapeDtypeStruct], dims: tuple[int, int]
    ) -> Mapping[str, jax.Array]:
        return read_kernel(published, places[path], wanted, dims)

    # Floats are cast while they are read, one slice at a time.
    leaves = {
        name: jax.ShapeDtypeStruct(place.shape, known[name].dtype if name in known else place.dtype)
        for name, place in places.items()
    }
    return Given(f"the model in {path}", leaves, fetch, fetch_quantized)


def _from_checkpoint(path: str | Path, own: Given | None, skip: tuple[str, ...], target: _Target) -> Start:
    """Parameters and model_state of the newest intact step at a path, or of the step that the path names."""
    found = find_checkpoint(path)
    known = {**original_params(target.model), **paths_of(target.drawn[0])}
    damaged: list[str] = []
    with Checkpointer(found.directory, read_only=True) as checkpointer:
        for step in [found.step] if found.step is not None else checkpointer.steps()[::-1]:
            try:
                info = checkpointer.info(step)
                params = _saved_part("params", path, info, checkpointer, known=known)
                state = _saved_part("model_state", path, info, checkpointer, known=paths_of(target.drawn[1]))
                record = base_of(info.metadata)
                if record is not None:
                    params = _with_base(params, path, record, target)
                if not params.leaves:
                    raise ConfigError(
                        f"step {step} of {path} was not saved from a TrainState: it holds no params/...; read it with "
                        "Checkpointer(folder).restore(target), and give the arrays as params="
                    )
                start = _placed(params, own or state, skip, target)
            except DamagedError as error:
                damaged.append(str(error))
                continue
            for line in damaged:
                print_remark(f"{line}; step {step} is used instead")
            return start
    raise CheckpointError(damaged[0] if found.step is not None else f"no intact checkpoint in {path}: {damaged[0]}")


def _saved_part(
    part: str, path: str | Path, info: CheckpointInfo, checkpointer: Checkpointer, *, known: Mapping[str, Any]
) -> Given:
    """One part of a saved state, by the paths that the model (`known`) has for it, which may hold dots."""
    own = {stored_name(inner): inner for inner in known}
    sources: dict[str, str] = {}
    for place in (f"{part}.", f"{_AVERAGES[part]}."):
        inside = {name: name.removeprefix(place) for name in info.leaves if name.startswith(place)}
        sources |= {own.get(inner, shown_name(inner)): name for name, inner in inside.items()}

    def fetch(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, Any]:
        read = checkpointer.read({sources[inner]: like for inner, like in wanted.items()}, step=info.step)
        found = {inner: read[sources[inner]] for inner in wanted}
        return found if part != "params" else read_kept_weights(checkpointer, found, step=info.step)

    def shape(entry: tuple[tuple[int, ...], str]) -> jax.ShapeDtypeStruct:
        is_key = entry[1].startswith("key<")
        kind: Any = jax.eval_shape(lambda: jax.random.key(0)).dtype if is_key else jnp.dtype(entry[1])
        return jax.ShapeDtypeStruct(entry[0], kind)

    leaves = {inner: shape(info.leaves[name]) for inner, name in sources.items()}
    return Given(f"{part} of {path}, step {info.step},", leaves, fetch)


def _with_base(saved: Given, path: str | Path, record: BaseRecord, target: _Target) -> Given:
    """The parameters of an adapter run: what its checkpoint holds, and its base, from where that is."""
    model = target.model
    if model.model.adapted is None:
        raise ConfigError(
            f"{path} holds adapters of {record.shown}, and not its weights; adapt the model with the same settings, or "
            f"write the merged weights with jaxtrain export {path} FOLDER --merge"
        )
    paths = {name: leaf for name, leaf in paths_of(model.abstract_params).items() if name not in saved.leaves}
    known = {name: leaf for name, leaf in paths.items() if name in record.digests}

    def fetch(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, Any]:
        own = saved.fetch({name: like for name, like in wanted.items() if name in saved.leaves})
        below = restore_base(model, record, run_dir=run_of(path), only=lambda name: name in wanted and name in known)
        return {**own, **paths_of(below)}

    return Given(saved.name, {**saved.leaves, **known}, fetch)


def restore_base(
    sharded_model: ShardedModel,
    record: BaseRecord,
    *,
    run_dir: Path,
    only: Callable[[str], bool],
    moved_to: str | None = None,
) -> Params:
    """The frozen parameters of an adapter run, from where it took them, once their digests are compared.

    Args:
        sharded_model: the adapted model, into whose shardings they are read.
        record: what a checkpoint of the run says of them.
        run_dir: directory of the run.
        only: parameter path -> whether it is wanted.
        moved_to: where the base is; None: where it was.

    Returns:
        A tree like the parameters, None in place of those that are not wanted.

    Raises:
        CheckpointError: the base is gone, or is another one than the adapters were trained on.
    """
    record.check_scale(sharded_model.model, run_dir=run_dir)
    source = moved_to or record.path
    asked = paths_of(sharded_model.abstract_params)

    def recorded(path: tuple, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # In the dtypes whose digests were recorded: a policy may ask for others.
        dtype = record.digests.get(path_name(path), (str(like.dtype),))[0]
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
    ready |= _drawn_again(
        sharded_model, record.seed, {path: leaf for path, leaf in paths_of(shapes).items() if only(path)}, ready
    )
    record.check(ready, source=source, run_dir=run_dir)
    for path in ready:
        if ready[path].dtype != asked[path].dtype:
            ready[path] = ready[path].astype(asked[path].dtype)
    return jax.tree_util.tree_map_with_path(lambda path, _: ready.get(path_name(path)), shapes)


def _drawn_again(
    sharded_model: ShardedModel, seed: int, wanted: Mapping[str, Any], ready: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Wanted parameters that are not ready, as `TrainStep.init` draws them from a seed."""
    wanted = {path: like for path, like in wanted.items() if path not in ready}
    if not wanted:
        return {}

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        drawn = paths_of(sharded_model.init(jax.random.split(key)[0])[0])
        return {path: drawn[path].astype(like.dtype) for path, like in wanted.items()}

    key = random_key(seed, jax.eval_shape(lambda: jax.random.key(0)))
    return jax.jit(draw, out_shardings={path: like.sharding for path, like in wanted.items()})(key)


def _placed(
    params: Given | None, state: Given | None, skip: tuple[str, ...], target: _Target, *, adapter: Any = None
) -> Start:
    """What is taken of each part, in the structure of the model, with None for what is to be drawn."""
    drawn, model = target.drawn, target.model
    known = [path for tree in drawn for path in paths_of(tree)]
    known += [path for part in (params, state) if part is not None for path in part.leaves]
    check_patterns("skip", skip, list(dict.fromkeys(known)))
    start = Start()
    if params is not None:
        part, free = as_adapted(params, model, drawn[0])
        part = part if adapter is None else with_adapter(part, adapter, model)
        taken = _taken(part, skip, drawn[0], model.abstract_params, free, target)
        start = replace(start, params=taken, ours=frozenset(paths_of(taken)) - part.theirs)
    if state is not None:
        whole = replace(target, only=_all, trains=_all)
        start = replace(start, model_state=_taken(state, skip, drawn[1], model.abstract_model_state, (), whole))
    return start


def _taken(
    given: Given, skip: tuple[str, ...], drawn: Any, wanted: Any, free: Sequence[str] | frozenset[str], target: _Target
) -> Any:
    """The given arrays in the structure of the model and the shardings of the step, None for those that are skipped.

    Args:
        given: parameters or model_state.
        skip: patterns of paths that are drawn.
        drawn: shapes of what the model draws.
        wanted: shapes and shardings that the model stores.
        free: paths that need not be given, and are drawn then.
        target: says which are wanted, and which are trained.
    """

    def skipped(path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in skip)

    expected, stored = paths_of(drawn), paths_of(wanted)
    chosen = [path for path in expected if target.only(path) and not skipped(path)]
    missing = [path for path in chosen if path not in free and path not in given.leaves]
    extra = [path for path in given.leaves if path not in expected and not skipped(path)]
    if missing or extra:
        count = f" ({len(missing)} missing, {len(extra)} too many)" if len(missing) + len(extra) > 1 else ""
        first = f"{missing[0]} is missing" if missing else f"{extra[0]} is not an array of it"
        raise ConfigError(
            f"{given.name} does not fit the model of this step: {first}{count}; to draw what is missing and leave out "
            f"what is too much, write skip={_listed([*skip, *_patterns_of([*missing, *extra])])}"
        )
    asked: dict[str, jax.ShapeDtypeStruct] = {}
    for path in chosen:
        if path in given.leaves:
            leaf, like = given.leaves[path], expected[path]
            floats = all(jnp.issubdtype(one.dtype, jnp.floating) for one in (leaf, like))
            if leaf.shape != like.shape or not (floats or leaf.dtype in (like.dtype, stored[path].dtype)):
                raise ConfigError(
                    f"{given.name} does not fit this step: {path} is {leaf.dtype}{list(leaf.shape)}, wanted is "
                    f"{like.dtype}{list(like.shape)}; write skip={_listed([*skip, *_patterns_of([path])])} to draw it"
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


def _patterns_of(paths: Sequence[str]) -> list[str]:
    """Few patterns that match these paths: the modules that they are in."""
    found = [f"{path.rsplit('/', 1)[0]}/*" if "/" in path else path for path in paths]
    return list(dict.fromkeys(found))[:4]


def _listed(patterns: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{pattern}"' for pattern in patterns) + "]"
