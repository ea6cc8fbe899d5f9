"""Parameters or model_state that are given: a table of paths, shapes and dtypes first, arrays when they are fetched."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import CheckpointInfo
from jaxtrain.checkpoint.kept_weights import read_kept_weights
from jaxtrain.checkpoint.tree import shown_name, stored_name
from jaxtrain.errors import ConfigError
from jaxtrain.interop.load import read_kernel, read_places
from jaxtrain.interop.weights import Place, PublishedModel
from jaxtrain.layout.sharding import path_name
from jaxtrain.runtime.tree import first_deleted
from jaxtrain.train.state import EvaluationState, TrainState

# Moving averages, which evaluation uses, stand in for what they are averages of.
_AVERAGES = {"params": "ema", "model_state": "ema_model_state"}


@dataclass(frozen=True)
class Given:
    """Parameters or model_state that are given.

    Attributes:
        name: what they are, in messages.
        leaves: path -> array, or the shape and dtype of a saved one.
        cast: whether floating dtypes may differ from the model's: those of a run are of its policy.
        fetch: path -> shape, dtype and sharding of what is taken; gives path -> array.
        fetch_quantized: path of a kernel, what is wanted of it as a quantized one (name of an array such as "codes" ->
            shape, dtype and sharding), and its numbers of input and output dims; gives name -> array. None: kernels
            are fetched as floats, whole.
        theirs: paths of arrays that a user holds: what is fetched for them may share their memory.
    """

    name: str
    leaves: Mapping[str, Any]
    cast: bool
    fetch: Callable[[Mapping[str, jax.ShapeDtypeStruct]], Mapping[str, Any]]
    fetch_quantized: (
        Callable[[str, Mapping[str, jax.ShapeDtypeStruct], tuple[int, int]], Mapping[str, jax.Array]] | None
    ) = None
    theirs: frozenset[str] = frozenset()


def paths_of(tree: Any) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def path_given(params: Any) -> Any:
    """The path that stands for a run which was opened or trained, and anything else as it is."""
    return os.fspath(params) if isinstance(params, os.PathLike) and not isinstance(params, Path) else params


def given_tree(name: str, tree: Any) -> Given:
    """Arrays that a user gives, after checks of what they are."""
    if isinstance(tree, TrainState):
        raise ConfigError(f"{name} is a TrainState; write params=state.params, model_state=state.model_state")
    if isinstance(tree, EvaluationState):
        raise ConfigError(
            f"{name} is an EvaluationState; write params=state.evaluation_params, "
            "model_state=state.evaluation_model_state"
        )
    if tree is None or isinstance(tree, str | bytes | int | float) or inspect.isroutine(tree):
        what = repr(tree) if isinstance(tree, str | int | float) else f"a {type(tree).__name__}"
        raise ConfigError(f"{name} is {what}; give a tree of arrays like that of model.init, or the path of a run")
    gone = first_deleted(tree)
    if gone is not None:
        raise ConfigError(f"{gone} of {name} is deleted, since a step took it over; copy arrays before that")
    leaves = paths_of(tree)
    if "" in leaves and not isinstance(tree, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        raise ConfigError(
            f"{name} is an instance of {type(tree).__name__}; give a tree of arrays like that of model.init, or the "
            "path of a run"
        )

    def fetch(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, Any]:
        return {path: jax.device_put(leaves[path], like.sharding) for path, like in wanted.items()}

    return Given(name, leaves, cast=False, fetch=fetch, theirs=frozenset(leaves))


def published_part(
    name: str, published: PublishedModel, places: Mapping[str, Place], known: Mapping[str, Any]
) -> Given:
    """Parameters or model_state of a published model.

    Args:
        name: what they are, in messages.
        published: the model.
        places: path -> where it lies in the model.
        known: path -> shape and dtype that they are stored in.
    """

    def fetch(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, Any]:
        return read_places(published, places, wanted)

    def fetch_quantized(
        path: str, wanted: Mapping[str, jax.ShapeDtypeStruct], dims: tuple[int, int]
    ) -> Mapping[str, jax.Array]:
        return read_kernel(published, places[path], wanted, dims)

    # Floats are cast while they are read, one slice at a time.
    leaves = {
        path: jax.ShapeDtypeStruct(place.shape, known[path].dtype if path in known else place.dtype)
        for path, place in places.items()
    }
    return Given(name, leaves, cast=True, fetch=fetch, fetch_quantized=fetch_quantized)


def saved_part(
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

    leaves = {inner: _shape(info.leaves[name]) for inner, name in sources.items()}
    return Given(f"{part} of {path}, step {info.step},", leaves, cast=True, fetch=fetch)


def _shape(entry: tuple[tuple[int, ...], str]) -> jax.ShapeDtypeStruct:
    shape, dtype = entry
    kind: Any = jax.eval_shape(lambda: jax.random.key(0)).dtype if dtype.startswith("key<") else jnp.dtype(dtype)
    return jax.ShapeDtypeStruct(shape, kind)
