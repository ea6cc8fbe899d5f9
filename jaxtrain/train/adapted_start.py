"""Parameters of a model without adapters as the base of the adapted one that was made of it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.interop.peft import OpenedAdapter
from jaxtrain.layout.sharding import parameter_spec, path_name
from jaxtrain.models.adapters import quantized_kernel
from jaxtrain.models.model import Params, parameter_shapes
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.precision.kernels import LowRankKernel, is_kernel, is_quantized
from jaxtrain.train.state import paths_of


@dataclass(frozen=True)
class Given:
    """Parameters or model_state that are given.

    Attributes:
        name: what they are, in messages.
        leaves: path -> array, or the shape and dtype of a saved one.
        fetch: path -> shape, dtype and sharding of what is taken; gives path -> array.
        fetch_quantized: path of a kernel, what is wanted of it as a quantized one (name of an array such as "codes" ->
            shape, dtype and sharding), and its numbers of input and output dims; gives name -> array. None: kernels
            are fetched as floats, whole.
        theirs: paths of arrays that a user holds: what is fetched for them may share their memory.
    """

    name: str
    leaves: Mapping[str, Any]
    fetch: Callable[[Mapping[str, jax.ShapeDtypeStruct]], Mapping[str, Any]]
    fetch_quantized: (
        Callable[[str, Mapping[str, jax.ShapeDtypeStruct], tuple[int, int]], Mapping[str, jax.Array]] | None
    ) = None
    theirs: frozenset[str] = frozenset()


def original_params(sharded_model: ShardedModel) -> dict[str, jax.ShapeDtypeStruct]:
    """The parameters of the model that an adapted one was made of, in the dtypes and shardings to read them in.

    Args:
        sharded_model: adapted, or not: then these are its own parameters.

    Returns:
        Path -> shape, dtype and sharding; kernels that the model stores quantized are float32.
    """
    adapted = sharded_model.model.adapted
    if adapted is None:
        return paths_of(sharded_model.abstract_params)
    shapes, layout, found = parameter_shapes(adapted.original), sharded_model.layout, {}
    for name, leaf in _kernels(sharded_model.abstract_params).items():
        base = leaf.base if isinstance(leaf, LowRankKernel) else leaf
        if is_quantized(base):
            shape = shapes[name].shape
            sharding = layout.named(parameter_spec(name, shape, layout))
            base = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        found[name] = base
    return found


def as_adapted(given: Given, sharded_model: ShardedModel, drawn: Params) -> tuple[Given, frozenset[str]]:
    """What is given for a model or for the one that it was made of, by the paths of the model.

    Args:
        given: parameters.
        sharded_model: the model.
        drawn: what it draws, as shapes.

    Returns:
        The parameters, kernels quantized when they are fetched; and the paths that need not be given: adapters.

    Raises:
        ConfigError: a kernel that is to be quantized has another shape.
    """
    adapted = sharded_model.model.adapted
    if adapted is None:
        return given, frozenset()
    floats = original_params(sharded_model)
    renamed: dict[str, str] = {}
    quantized: dict[str, str] = {}
    leaves = dict(given.leaves)
    free: set[str] = set()
    for name, leaf in _kernels(drawn).items():
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

    def fetch(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, Any]:
        below = {path: place for path in wanted for place in [path.rsplit("/", 1)[0]] if place in quantized}
        plain = {renamed.get(path, path): like for path, like in wanted.items() if path not in below}
        read = given.fetch(plain)
        found = {path: read[renamed.get(path, path)] for path in wanted if path not in below}
        # One kernel at a time: its floats are gone before those of the next are read.
        for place in dict.fromkeys(below.values()):
            name = quantized[place]
            inside = {path.removeprefix(f"{place}/"): wanted[path] for path in below if below[path] == place}
            if given.fetch_quantized is None:
                kernel = given.fetch({name: floats[name]})[name]
                parts = _quantized(kernel, name, inside, sharded_model)
            else:
                parts = given.fetch_quantized(name, inside, sharded_model.model.linears[name])
            found |= {f"{place}/{inner}": array for inner, array in parts.items()}
        return found

    # The integers of a kernel are made from the user's floats, and are not theirs.
    theirs = frozenset(path for path in leaves if renamed.get(path, path) in given.theirs)
    return Given(given.name, leaves, fetch, theirs=theirs), frozenset(free)


def with_adapter(given: Given, adapter: OpenedAdapter, sharded_model: ShardedModel) -> Given:
    """What is given, with the factors of an adapter and what it trains whole in the place of its own.

    Args:
        given: from `as_adapted`.
        adapter: read against the base that is given.
        sharded_model: the adapted model.

    Raises:
        ConfigError: the model has no adapters, or their rank or what their products are multiplied by is another.
    """
    adapted = sharded_model.model.adapted
    lora = None if adapted is None else adapted.lora
    if lora is None:
        raise ConfigError(
            f"{adapter.path} is an adapter, and the model {sharded_model.model.name} has none; make it with adapt, or "
            "set finetune.adapter"
        )
    if lora.rank != adapter.lora.rank or not math.isclose(lora.scale, adapter.lora.scale, rel_tol=1e-6):
        raise ConfigError(
            f"{adapter.path} has factors of rank {adapter.lora.rank} times {adapter.lora.scale:g}, and finetune.lora "
            f"of rank {lora.rank} times {lora.scale:g}; leave rank, alpha and rank_stabilised to the adapter"
        )

    def fetch(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, Any]:
        own = {path: like for path, like in wanted.items() if path in adapter.leaves}
        found = given.fetch({path: like for path, like in wanted.items() if path not in own})
        return {**found, **{path: _from_host(adapter.leaves[path], like) for path, like in own.items()}}

    # The factors may be a part of the file that is mapped into memory: a state has its own.
    theirs = given.theirs | frozenset(adapter.leaves)
    return Given(given.name, {**given.leaves, **adapter.leaves}, fetch, theirs=theirs)


def _from_host(array: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
    assert like.sharding is not None
    return jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])


def _quantized(
    kernel: jax.Array, name: str, wanted: Mapping[str, jax.ShapeDtypeStruct], sharded_model: ShardedModel
) -> dict[str, jax.Array]:
    """The arrays of a quantized kernel by their names in it, in their shardings."""
    model = sharded_model.model
    assert model.adapted is not None
    dims, adapted = model.linears[name], model.adapted

    def quantize(kernel: jax.Array) -> dict[str, jax.Array]:
        small = paths_of(quantized_kernel(kernel, dims, adapted.base, adapted.double_quantization))
        return {inner: small[inner] for inner in wanted}

    shardings = {inner: like.sharding for inner, like in wanted.items()}
    return jax.jit(quantize, out_shardings=shardings)(kernel)


def _kernels(params: Params) -> dict[str, Any]:
    """Path -> leaf, where what stands in the place of a kernel is one leaf."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_kernel)}
