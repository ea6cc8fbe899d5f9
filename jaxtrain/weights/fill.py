"""Fills a model with the arrays of a source: a table of paths, shapes and dtypes, and a function that reads them.

The table is compared with the model before anything is read. A source of the model that an adapted one was made of
gives the base below its adapters.
"""

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.layout.sharding import parameter_spec
from jaxtrain.models.adapters import quantized_kernel
from jaxtrain.models.model import parameter_shapes
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.optim.rules import check_patterns
from jaxtrain.precision.kernels import LowRankKernel, is_kernel, is_quantized
from jaxtrain.runtime.tree import path_name, paths_of
from jaxtrain.train.first_state import Weights, check_leaves
from jaxtrain.weights.read import by_path

# Path -> shape, dtype and sharding of an array to read.
Abstract = Mapping[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class Source:
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
class Target:
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


def fill(target: Target, params: Source | None, model_state: Source | None) -> Weights:
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
            owned = arrays.keys() - match.paths.keys()  # kernels that were quantized here
        weights = replace(weights, params=as_tree(arrays, model.abstract_params), owned=frozenset(owned))
    if model_state is not None:
        match = _Match({path: path for path in model_state.leaves})
        every = Target(model, trains=lambda path: False, skip=target.skip)
        arrays = _take(model_state, match, paths_of(model.abstract_model_state), every)
        weights = replace(weights, model_state=as_tree(arrays, model.abstract_model_state))
    return weights


def as_tree(arrays: Mapping[str, Any], like: Any) -> Any:
    """Return the arrays in a structure, with None for those that are missing."""
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays.get(path_name(path)), like)


@dataclass(frozen=True)
class _Match:
    """What the arrays of a model are called in a source.

    Attributes:
        paths: path in the model -> path in the source, of arrays that are taken as they are.
        kernels: path of a quantized kernel in the model -> path of its floats in the source.
        adapters: paths in the model that a source may lack.
    """

    paths: dict[str, str]
    kernels: dict[str, str] = field(default_factory=dict)
    adapters: set[str] = field(default_factory=set)


def _match(source: Source, model: ShardedModel) -> _Match:
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
            match.adapters.update([f"{path}/lora_a", f"{path}/lora_b"])
        if not is_kernel(kernel) or path not in source.leaves:
            continue
        del match.paths[path]
        if is_quantized(base):
            match.kernels[base_path] = path
        else:
            match.paths[base_path] = path
    return match


def _take(source: Source, match: _Match, abstract: Abstract, target: Target) -> dict[str, Any]:
    """Read the arrays of a source that a model takes.

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
    chosen: dict[str, jax.ShapeDtypeStruct] = {}
    kernels: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}  # path of a quantized kernel -> its arrays by name
    for path, like in abstract.items():
        if not target.only(path) or target.skips(path):
            continue
        base_path, _, name = path.rpartition("/")
        if base_path in match.kernels:
            kernels.setdefault(base_path, {})[name] = like
        else:
            chosen[path] = like
    leaves = {path: source.leaves[name] for path, name in match.paths.items() if not target.skips(path)}
    optional = match.adapters | (abstract.keys() - chosen.keys())
    check_leaves(source.name, leaves, abstract, optional=optional, skip=target.skip)
    arrays: dict[str, Any] = {}
    together: dict[str, jax.ShapeDtypeStruct] = {}
    for path, like in chosen.items():
        if path not in leaves:
            continue
        leaf = leaves[path]
        saved = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding)
        if leaf.dtype == like.dtype or target.trains(path) or source.is_borrowed:
            together[match.paths[path]] = saved
        else:
            # One by one: a source may hold frozen arrays in twice the bytes, for which devices need no room.
            array = source.read({match.paths[path]: saved})[match.paths[path]]
            arrays[path] = array.astype(like.dtype)
    read = source.read(together)
    for path in leaves:
        if match.paths[path] in together:
            arrays[path] = read[match.paths[path]]
    for base_path, parts in kernels.items():
        kernel = _read_quantized(source, match.kernels[base_path], parts, target.model)
        arrays |= {f"{base_path}/{name}": array for name, array in kernel.items()}
    return arrays


def _read_quantized(source: Source, path: str, parts: Abstract, model: ShardedModel) -> Mapping[str, jax.Array]:
    """Read the floats of one kernel and quantize them, so that they are gone before those of the next are read.

    Args:
        source: where the floats are.
        path: of the kernel there.
        parts: the arrays of the quantized kernel by their names.
        model: the adapted model.
    """
    adapted = model.model.adapted
    assert adapted is not None
    dims = model.model.linears[path]
    floats = {path: original_params(model)[path]}
    check_leaves(source.name, {path: source.leaves[path]}, floats)
    if source.read_quantized is not None:
        return source.read_quantized(path, parts, dims)

    def quantize(kernel: jax.Array) -> dict[str, jax.Array]:
        quantized = paths_of(quantized_kernel(kernel, dims, adapted.base, adapted.double_quantization))
        return {name: quantized[name] for name in parts}

    shardings = {name: like.sharding for name, like in parts.items()}
    return jax.jit(quantize, out_shardings=shardings)(source.read(floats)[path])


def original_params(model: ShardedModel) -> dict[str, jax.ShapeDtypeStruct]:
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
