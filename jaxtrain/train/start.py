"""What a state starts from: arrays of the user, or the checkpoint of another run, all of it or without some parts.

Both are first a table of paths, shapes and dtypes, compared with what the model draws; then arrays, read or moved
straight into the shardings of the step. Each kind of folder (checkpoints of a run, published weights) is a function
that gives a `_Given`, chosen in `accept_start`.
"""

import fnmatch
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import CheckpointInfo, DamagedError
from jaxtrain.checkpoint.find import find_checkpoint
from jaxtrain.checkpoint.kept_weights import read_kept_weights
from jaxtrain.checkpoint.tree import shown_name, stored_name
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.interop.load import read_places
from jaxtrain.interop.settings import settings_in
from jaxtrain.interop.weights import Place, PublishedModel, find_places, is_published, open_published
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.model import ModelState, Params
from jaxtrain.optim.masks import check_patterns
from jaxtrain.runtime.donation import first_deleted
from jaxtrain.runtime.remarks import print_remark
from jaxtrain.train.given_state import number_as
from jaxtrain.train.state import TrainState

_PARTS = ("params", "model_state")
# Moving averages, which evaluation uses, stand in for what they are averages of.
_AVERAGES = {"params": "ema", "model_state": "ema_model_state"}


@dataclass(frozen=True)
class _Given:
    """Parameters or model_state that are given.

    Attributes:
        name: what they are, in messages.
        leaves: path -> array, or the shape and dtype of a saved one.
        cast: whether floating dtypes may differ from the model's: those of a run are of its policy.
        fetch: path -> shape, dtype and sharding of what is taken; gives path -> array.
    """

    name: str
    leaves: Mapping[str, Any]
    cast: bool
    fetch: Callable[[Mapping[str, jax.ShapeDtypeStruct]], Mapping[str, Any]]


def accept_start(
    params: Any,
    model_state: Any,
    skip: Sequence[str],
    *,
    drawn: tuple[Params, ModelState],
    wanted: TrainState,
) -> dict[str, Any]:
    """Parameters and model state to start from, in the structure and the shardings of the step.

    Args:
        params: tree of jax or NumPy arrays, path of a run, of a checkpoint or of a published model, or None.
        model_state: tree of jax or NumPy arrays, or None.
        skip: patterns of paths that are drawn, whatever is given.
        drawn: shapes of what the model draws, whose dtypes are accepted.
        wanted: shapes and shardings of the state that they become a part of, whose dtypes are accepted too.

    Returns:
        What was given, by name, with None for each array that is to be drawn.

    Raises:
        ConfigError: deleted arrays, another structure, shape or dtype, or a pattern that matches nothing; names the
            first.
        CheckpointError: no intact checkpoint at the path.
    """
    patterns = _checked_patterns(skip, anything=params is not None or model_state is not None)
    if isinstance(params, str | Path) and is_published(params):
        return _from_published(params, model_state, patterns, drawn=drawn, wanted=wanted)
    if isinstance(params, str | Path):
        return _from_checkpoint(params, model_state, patterns, drawn=drawn, wanted=wanted)
    trees = {"params": params, "model_state": model_state}
    given = {name: _given_tree(name, tree) for name, tree in trees.items() if tree is not None}
    return _placed(given, patterns, drawn, wanted)


def _checked_patterns(skip: Any, *, anything: bool) -> tuple[str, ...]:
    if isinstance(skip, str) or not isinstance(skip, Sequence) or not all(isinstance(one, str) for one in skip):
        wanted = [skip] if isinstance(skip, str) else ["head/*"]
        raise ConfigError(f"skip={skip!r} is no list of patterns of parameter paths; write skip={_listed(wanted)}")
    if skip and not anything:
        raise ConfigError(f"skip={_listed(skip)} without anything to skip it in; give params=, or leave skip out")
    return tuple(skip)


def _given_tree(name: str, tree: Any) -> _Given:
    """Arrays that a user gives, after checks of what they are."""
    if isinstance(tree, TrainState):
        raise ConfigError(f"{name} is a TrainState; write params=state.params, model_state=state.model_state")
    if tree is None or isinstance(tree, str | bytes | int | float) or inspect.isroutine(tree):
        what = repr(tree) if isinstance(tree, str | int | float) else f"a {type(tree).__name__}"
        raise ConfigError(f"{name} is {what}; give a tree of arrays like that of model.init, or the path of a run")
    gone = first_deleted(tree)
    if gone is not None:
        raise ConfigError(f"{gone} of {name} is deleted, since a step took it over; copy arrays before that")
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    def fetch(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, Any]:
        return {path: jax.device_put(leaves[path], like.sharding) for path, like in wanted.items()}

    return _Given(name, leaves, cast=False, fetch=fetch)


def _from_published(
    path: str | Path,
    model_state: Any,
    patterns: tuple[str, ...],
    *,
    drawn: tuple[Params, ModelState],
    wanted: TrainState,
) -> dict[str, Any]:
    """Parameters and model_state of a published folder or GGUF file, read in place."""
    published = open_published(path)
    settings = settings_in(path, published.settings)
    if "output" in _paths(drawn[0]) and settings.get("tie_embeddings"):
        settings["tie_embeddings"] = False  # of a file that holds an output layer although its config.json ties it
    places = find_places(published, settings)
    parts = {
        "params": _published_part(f"the model in {path}", published, places.params, wanted.params),
        "model_state": _published_part(f"the model in {path}", published, places.model_state, wanted.model_state),
    }
    if model_state is not None:
        parts["model_state"] = _given_tree("model_state", model_state)
    return _placed(parts, patterns, drawn, wanted)


def _published_part(name: str, published: PublishedModel, places: Mapping[str, Place], stored: Any) -> _Given:
    known = _paths(stored)

    def fetch(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, Any]:
        return read_places(published, places, wanted)

    # Floats are cast while they are read, one slice at a time.
    leaves = {
        path: jax.ShapeDtypeStruct(place.shape, known[path].dtype if path in known else place.dtype)
        for path, place in places.items()
    }
    return _Given(name, leaves, cast=True, fetch=fetch)


def _from_checkpoint(
    path: str | Path,
    model_state: Any,
    patterns: tuple[str, ...],
    *,
    drawn: tuple[Params, ModelState],
    wanted: TrainState,
) -> dict[str, Any]:
    """Parameters and model_state of the newest intact step at a path, or of the step that the path names.

    A model_state of the user (not None) has precedence over that of the checkpoint.
    """
    found = find_checkpoint(path)
    damaged: list[str] = []
    with Checkpointer(found.directory, read_only=True) as checkpointer:
        for step in [found.step] if found.step is not None else checkpointer.steps()[::-1]:
            try:
                info = checkpointer.info(step)
                parts = {
                    name: _saved_part(name, path, info, checkpointer, known=_paths(tree))
                    for name, tree in zip(_PARTS, drawn, strict=True)
                }
                if not parts["params"].leaves:
                    raise ConfigError(
                        f"step {step} of {path} was not saved from a TrainState: it holds no params/...; read it with "
                        "Checkpointer(folder).restore(target), and give the arrays as params="
                    )
                if model_state is not None:
                    parts["model_state"] = _given_tree("model_state", model_state)
                taken = _placed(parts, patterns, drawn, wanted)
            except DamagedError as error:
                damaged.append(str(error))
                continue
            for line in damaged:
                print_remark(f"{line}; step {step} is used instead")
            return taken
    raise CheckpointError(damaged[0] if found.step is not None else f"no intact checkpoint in {path}: {damaged[0]}")


def _saved_part(
    part: str, path: str | Path, info: CheckpointInfo, checkpointer: Checkpointer, *, known: Mapping[str, Any]
) -> _Given:
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

    leaves = {inner: _shape(info.leaves[name]) for inner, name in sources.items()}
    return _Given(f"{part} of {path}, step {info.step},", leaves, cast=True, fetch=fetch)


def _shape(entry: tuple[tuple[int, ...], str]) -> jax.ShapeDtypeStruct:
    shape, dtype = entry
    kind: Any = jax.eval_shape(lambda: jax.random.key(0)).dtype if dtype.startswith("key<") else jnp.dtype(dtype)
    return jax.ShapeDtypeStruct(shape, kind)


def _placed(
    parts: Mapping[str, _Given], patterns: tuple[str, ...], drawn: tuple[Params, ModelState], wanted: TrainState
) -> dict[str, Any]:
    """What is taken of each part, in the structure of the model, with None for what is to be drawn."""
    paths = [_paths(tree) for tree in drawn]
    known = [*paths[0], *paths[1], *(path for part in parts.values() for path in part.leaves)]
    check_patterns("skip", patterns, list(dict.fromkeys(known)))
    if "params" in parts and all(_matches(path, patterns) for path in paths[0]):
        raise ConfigError(f"skip={_listed(patterns)} matches every parameter; leave out params= to draw them all")
    taken = {}
    for (name, own), like in zip(zip(_PARTS, drawn, strict=True), (wanted.params, wanted.model_state), strict=True):
        if name in parts:
            taken[name] = _taken(parts[name], patterns, own, like)
    return taken


def _taken(given: _Given, patterns: tuple[str, ...], drawn: Any, wanted: Any) -> Any:
    """The given arrays in the structure of the model and the shardings of the step, None for those that are skipped."""
    expected, stored = _paths(drawn), _paths(wanted)
    missing = [path for path in expected if path not in given.leaves and not _matches(path, patterns)]
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
        if _matches(path, patterns):
            continue
        leaf = given.leaves[path]
        chosen[path] = _checked(given, path, leaf, like, stored[path], patterns)
    found = given.fetch(chosen)
    leaves = [_in_dtype(found[path], like, stored[path]) if path in chosen else None for path, like in expected.items()]
    return jax.tree.unflatten(jax.tree.structure(drawn), leaves)


def _checked(
    given: _Given, path: str, leaf: Any, drawn: Any, stored: Any, patterns: tuple[str, ...]
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


def _paths(tree: Any) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _patterns_of(paths: Sequence[str]) -> list[str]:
    """Few patterns that match these paths: the modules that they are in."""
    found = [f"{path.rsplit('/', 1)[0]}/*" if "/" in path else path for path in paths]
    return list(dict.fromkeys(found))[:4]


def _listed(patterns: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{pattern}"' for pattern in patterns) + "]"
