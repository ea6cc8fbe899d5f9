"""What a state starts from: arrays of the user, or the checkpoint of another run, all of it or without some parts.

Both are first a table of paths, shapes and dtypes, compared with what the model draws; then arrays, read or moved
straight into the shardings of the step. Each kind of folder (checkpoints of a run, published weights) is a function
that gives a `Given`, chosen in `accept_start`.
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
from jaxtrain.checkpoint.directory import DamagedError
from jaxtrain.checkpoint.run_folder import find_checkpoint
from jaxtrain.config.arguments import is_store_address
from jaxtrain.config.published import settings_in
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.interop.formats.hub import is_published
from jaxtrain.interop.peft import OpenedAdapter, open_adapter
from jaxtrain.interop.weights import find_places, open_published
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.optim.rules import check_patterns
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.train.adapted_start import as_adapted, original_params, with_adapter
from jaxtrain.train.base import BaseRecord, base_of, run_of
from jaxtrain.train.checks import random_key
from jaxtrain.train.given_params import Given, given_tree, paths_of, published_part, saved_part
from jaxtrain.train.given_state import number_as

_PARTS = ("params", "model_state")


@dataclass(frozen=True)
class _Target:
    """What is to be filled.

    Attributes:
        sharded_model: whose parameters and model_state they are.
        drawn: what it draws, as shapes.
        only: parameter path -> whether it is wanted.
        trains: parameter path -> whether it is trained; None: all are.
    """

    sharded_model: ShardedModel
    drawn: tuple[Params, ModelState]
    only: Callable[[str], bool]
    trains: Callable[[str], bool] | None


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
        sharded_model: the model; the dtypes that it draws and those that it stores are accepted.
        only: parameter path -> whether it is taken; None: all are.
        trains: parameter path -> whether it is trained; None: all are. Frozen ones are cast to the dtype that they are
            stored in as soon as they are read.
        adapter: folder of an adapter of the published model that `params` names, or None.

    Raises:
        ConfigError: deleted arrays, another structure, shape or dtype, or a pattern that matches nothing; names the
            first.
        CheckpointError: no intact checkpoint at the path.
    """
    patterns = _checked_patterns(skip, anything=params is not None or model_state is not None)
    target = _Target(sharded_model, sharded_model.drawn_shapes(), only or (lambda path: True), trains)
    if isinstance(params, str | Path) and is_published(params):
        return _from_published(params, model_state, patterns, target, adapter)
    if adapter is not None:
        raise ConfigError(f"adapter={str(adapter)!r} without its base; name the published folder or file in params=")
    if isinstance(params, str | Path):
        return _from_checkpoint(params, model_state, patterns, target)
    trees = {"params": params, "model_state": model_state}
    given = {name: given_tree(name, tree) for name, tree in trees.items() if tree is not None}
    return _placed(given, patterns, target)


def _checked_patterns(skip: Any, *, anything: bool) -> tuple[str, ...]:
    if isinstance(skip, str) or not isinstance(skip, Sequence) or not all(isinstance(one, str) for one in skip):
        wanted = [skip] if isinstance(skip, str) else ["head/*"]
        raise ConfigError(f"skip={skip!r} is no list of patterns of parameter paths; write skip={_listed(wanted)}")
    if skip and not anything:
        raise ConfigError(f"skip={_listed(skip)} without anything to skip it in; give params=, or leave skip out")
    return tuple(skip)


def _from_published(
    path: str | Path, model_state: Any, patterns: tuple[str, ...], target: _Target, adapter: str | Path | None
) -> Start:
    """Parameters and model_state of a published folder or GGUF file, read in place."""
    published = open_published(path)
    settings = settings_in(path, published.settings)
    if "output" in paths_of(target.drawn[0]) and settings.get("tie_embeddings"):
        settings["tie_embeddings"] = False  # of a file that holds an output layer although its config.json ties it
    places = find_places(published, settings)
    known = original_params(target.sharded_model)
    known_state = paths_of(target.sharded_model.abstract_model_state)
    parts = {
        "params": published_part(f"the model in {path}", published, places.params, known),
        "model_state": published_part(f"the model in {path}", published, places.model_state, known_state),
    }
    if model_state is not None:
        parts["model_state"] = given_tree("model_state", model_state)
    if adapter is None:
        return _placed(parts, patterns, target)
    rows = published.family.tensors(settings)
    opened = open_adapter(adapter, rows, base=published, places=places.params)
    return _placed(parts, patterns, target, adapter=opened)


def _from_checkpoint(path: str | Path, model_state: Any, patterns: tuple[str, ...], target: _Target) -> Start:
    """Parameters and model_state of the newest intact step at a path, or of the step that the path names.

    A model_state of the user (not None) has precedence over that of the checkpoint.
    """
    found = find_checkpoint(path)
    damaged: list[str] = []
    with Checkpointer(found.directory, read_only=True) as checkpointer:
        for step in [found.step] if found.step is not None else checkpointer.steps()[::-1]:
            try:
                info = checkpointer.info(step)
                known = {**original_params(target.sharded_model), **paths_of(target.drawn[0])}
                names = zip(_PARTS, (known, paths_of(target.drawn[1])), strict=True)
                parts = {name: saved_part(name, path, info, checkpointer, known=paths) for name, paths in names}
                record = base_of(info.metadata)
                if record is not None:
                    parts["params"] = _with_base(parts["params"], path, record, target)
                if not parts["params"].leaves:
                    raise ConfigError(
                        f"step {step} of {path} was not saved from a TrainState: it holds no params/...; read it with "
                        "Checkpointer(folder).restore(target), and give the arrays as params="
                    )
                if model_state is not None:
                    parts["model_state"] = given_tree("model_state", model_state)
                taken = _placed(parts, patterns, target)
            except DamagedError as error:
                damaged.append(str(error))
                continue
            for line in damaged:
                print_remark(f"{line}; step {step} is used instead")
            return taken
    raise CheckpointError(damaged[0] if found.step is not None else f"no intact checkpoint in {path}: {damaged[0]}")


def _with_base(saved: Given, path: str | Path, record: BaseRecord, target: _Target) -> Given:
    """The parameters of an adapter run: what its checkpoint holds, and its base, from where that is."""
    model = target.sharded_model
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
        return {**own, **{name: leaf for name, leaf in paths_of(below).items()}}

    return Given(saved.name, {**saved.leaves, **known}, cast=True, fetch=fetch)


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
    source = moved_to or record.source(run_dir)
    asked, sharded_model = paths_of(sharded_model.abstract_params), _stored_as(sharded_model, record)
    start = Start()
    if source is not None:
        if not is_store_address(str(source)) and not Path(source).exists():
            raise CheckpointError(
                f"the base of {run_dir} is gone: {source} is not there, and a checkpoint of adapters does not hold it; "
                "put it back, or name where it is with model.from=PATH"
            )
        skip = record.skip
        try:
            start = accept_start(source, None, skip, sharded_model=sharded_model, only=only, trains=lambda path: False)
        except ConfigError as error:
            raise CheckpointError(f"{source} is not the base of {run_dir}: {error}") from None
    wanted = {path: leaf for path, leaf in paths_of(sharded_model.abstract_params).items() if only(path)}
    ready = paths_of(start.params)
    start = None  # it would keep what is cast below
    ready |= _drawn_again(
        sharded_model, record.seed, {path: leaf for path, leaf in wanted.items() if path not in ready}
    )
    record.check(ready, source=source, run_dir=run_dir)
    for path in ready:
        if ready[path].dtype != asked[path].dtype:
            ready[path] = ready[path].astype(asked[path].dtype)
    shapes = sharded_model.abstract_params
    return jax.tree_util.tree_map_with_path(lambda path, _: ready.get(path_name(path)), shapes)


def _stored_as(sharded_model: ShardedModel, record: BaseRecord) -> ShardedModel:
    """The model with the dtypes of a recorded base, whose digests are of these: a policy may ask for others."""

    def one(path: tuple, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = record.digests.get(path_name(path), (str(like.dtype),))[0]
        return jax.ShapeDtypeStruct(like.shape, jnp.dtype(dtype), sharding=like.sharding)

    return replace(sharded_model, abstract_params=jax.tree_util.tree_map_with_path(one, sharded_model.abstract_params))


def _drawn_again(sharded_model: ShardedModel, seed: int, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Parameters as `TrainStep.init` draws them from a seed."""
    if not wanted:
        return {}

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        params, _ = sharded_model.init(jax.random.split(key)[0])
        drawn = paths_of(params)
        return {path: drawn[path].astype(like.dtype) for path, like in wanted.items()}

    key = random_key(seed, jax.eval_shape(lambda: jax.random.key(0)))
    return jax.jit(draw, out_shardings={path: like.sharding for path, like in wanted.items()})(key)


def _placed(
    parts: Mapping[str, Given], patterns: tuple[str, ...], target: _Target, *, adapter: OpenedAdapter | None = None
) -> Start:
    """What is taken of each part, in the structure of the model, with None for what is to be drawn."""
    drawn, model = target.drawn, target.sharded_model
    paths = [paths_of(tree) for tree in drawn]
    known = [*paths[0], *paths[1], *(path for part in parts.values() for path in part.leaves)]
    check_patterns("skip", patterns, list(dict.fromkeys(known)))
    if "params" in parts and all(_matches(path, patterns) for path in paths[0]):
        raise ConfigError(f"skip={_listed(patterns)} matches every parameter; leave out params= to draw them all")
    params = start_state = None
    ours: frozenset[str] = frozenset()
    if "params" in parts:
        part, free = as_adapted(parts["params"], model, drawn[0])
        part = part if adapter is None else with_adapter(part, adapter, model)
        trains = target.trains or (lambda path: True)
        params = _taken(part, patterns, drawn[0], model.abstract_params, free=free, only=target.only, trains=trains)
        ours = frozenset(paths_of(params)) - part.theirs
    if "model_state" in parts:
        start_state = _taken(parts["model_state"], patterns, drawn[1], model.abstract_model_state)
    return Start(params, start_state, ours)


def _taken(
    given: Given,
    patterns: tuple[str, ...],
    drawn: Any,
    wanted: Any,
    *,
    free: frozenset[str] = frozenset(),
    only: Callable[[str], bool] = lambda path: True,
    trains: Callable[[str], bool] = lambda path: True,
) -> Any:
    """The given arrays in the structure of the model and the shardings of the step, None for those that are skipped.

    Args:
        given: parameters or model_state.
        patterns: of paths that are skipped.
        drawn: shapes of what the model draws.
        wanted: shapes and shardings that the model stores.
        free: paths that need not be given, and are drawn then.
        only: path -> whether it is taken.
        trains: path -> whether it is trained.
    """
    expected, stored = paths_of(drawn), paths_of(wanted)
    needed = [path for path in expected if path not in free and only(path) and not _matches(path, patterns)]
    missing = [path for path in needed if path not in given.leaves]
    if set(expected) != set(given.leaves) and "" in (*expected, *given.leaves):  # a path that no pattern can be of
        found, asked = ("one array" if "" in leaves else "a tree of arrays" for leaves in (given.leaves, expected))
        raise ConfigError(f"{given.name} does not fit the model of this step: it is {found}, wanted is {asked}")
    extra = [path for path in given.leaves if path not in expected and not _matches(path, patterns)]
    if missing or extra:
        count = f" ({len(missing)} missing, {len(extra)} too many)" if len(missing) + len(extra) > 1 else ""
        first = f"{missing[0]} is missing" if missing else f"{extra[0]} is not an array of it"
        raise ConfigError(
            f"{given.name} does not fit the model of this step: {first}{count}; to draw what is missing and leave out "
            f"what is too much, write skip={_listed([*patterns, *_patterns_of([*missing, *extra])])}"
        )
    chosen: dict[str, jax.ShapeDtypeStruct] = {}
    for path, like in expected.items():
        if _matches(path, patterns) or not only(path) or path not in given.leaves:
            continue
        leaf = given.leaves[path]
        chosen[path] = _checked(given, path, leaf, like, stored[path], patterns)
    # Arrays of a user are on the devices already.
    wide = [path for path in chosen if not trains(path) and path not in given.theirs]
    wide = [path for path in wide if chosen[path].dtype != stored[path].dtype]
    found = dict(given.fetch({path: like for path, like in chosen.items() if path not in wide}))
    found = {path: _in_dtype(leaf, expected[path], stored[path]) for path, leaf in found.items()}
    # One at a time: in the dtype of a run, which may take twice the bytes, frozen ones are never all on the devices.
    for path in wide:
        leaf = _in_dtype(given.fetch({path: chosen[path]})[path], expected[path], stored[path])
        found[path] = leaf.astype(stored[path].dtype)
    return jax.tree.unflatten(jax.tree.structure(drawn), [found.get(path) for path in expected])


def _checked(
    given: Given, path: str, leaf: Any, drawn: Any, stored: Any, patterns: tuple[str, ...]
) -> jax.ShapeDtypeStruct:
    """The shape, dtype and sharding with which an array is taken.

    Raises:
        ConfigError: no array, or of another shape or dtype.
    """
    leaf = number_as(leaf, drawn)
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        kind = type(leaf).__name__
        raise ConfigError(f"{given.name} holds a {kind} at {path}; give a jax or NumPy array")
    both_float = jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.issubdtype(drawn.dtype, jnp.floating)
    same_kind = leaf.dtype in (drawn.dtype, stored.dtype) or (given.cast and both_float)
    if leaf.shape != drawn.shape or not same_kind:
        instead = "cast it, or "
        if leaf.shape != drawn.shape:
            instead = ""
        pattern = _listed([*patterns, *_patterns_of([path])])
        raise ConfigError(
            f"{given.name} does not fit this step: {path} is {leaf.dtype}{list(leaf.shape)}, "
            f"wanted is {drawn.dtype}{list(drawn.shape)}; {instead}write skip={pattern} to draw it"
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=stored.sharding)


def _in_dtype(leaf: Any, drawn: Any, stored: Any) -> Any:
    """A saved array in a dtype that the step knows: a run of another policy stored another one."""
    return leaf if leaf.dtype in (drawn.dtype, stored.dtype) else leaf.astype(drawn.dtype)


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _patterns_of(paths: Sequence[str]) -> list[str]:
    """Few patterns that match these paths: the modules that they are in."""
    found = [f"{path.rsplit('/', 1)[0]}/*" if "/" in path else path for path in paths]
    return list(dict.fromkeys(found))[:4]


def _listed(patterns: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{pattern}"' for pattern in patterns) + "]"
