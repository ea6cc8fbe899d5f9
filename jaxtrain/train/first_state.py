"""The state at step 0 on its devices: what the model draws, or arrays to start from.

Compiling a program that draws takes longer than drawing (`models/initializers.py`). Hence on CPU devices of one process
the host evaluates its trace, where that gives the same bits.
"""

import contextlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

from jaxtrain.errors import ConfigError
from jaxtrain.models.initializers import CannotFollowError, can_draw, follow
from jaxtrain.models.model import ModelState, Params
from jaxtrain.runtime.tree import merge_leaves, path_name, paths_of
from jaxtrain.train.state import TrainState, select_leaves


@dataclass(frozen=True)
class Weights:
    """What a state starts from, in the structure and the shardings of the model of a step: see `load_weights`.

    Attributes:
        params: the parameters, None in place of each that the model draws; None: it draws all.
        model_state: batch statistics and the like, in the same form.
        owned: paths of the parameters that nobody else holds. A state takes these arrays over, so that one state can
            start from them.

    Example:
        >>> weights = jt.load_weights(step, {"kernel": np.ones((4, 3)), "bias": np.zeros(3)})
        >>> state = step.init(0, weights)
    """

    params: Params | None = None
    model_state: ModelState | None = None
    owned: frozenset[str] = frozenset()


class FirstState:
    """Creates the state at step 0 of a step.

    Parameters that were read from files and are already as the state stores them bypass the compiled program: its
    results are arrays of their own, so that a large base would be on the devices twice for a moment.
    """

    def __init__(
        self,
        create: Callable[..., TrainState],
        drawn: jax.stages.Traced,
        abstract: TrainState,
    ):
        self._create = create
        self._drawn = drawn
        self._abstract = abstract
        sharding = jax.tree.leaves(abstract)[0].sharding
        self._device = sharding.mesh.devices.flat[0]
        self._is_local_cpu = self._device.platform == "cpu" and sharding.is_fully_addressable
        self._jitted: dict[frozenset[str], Any] = {}

    def __call__(self, key: jax.Array, weights: Weights) -> TrainState:
        """Return the state from a typed key and weights, its arrays shared with nobody else."""
        if weights.params is None and weights.model_state is None and self._can_follow(key):
            # What the host cannot follow is compiled.
            with contextlib.suppress(CannotFollowError):
                return self._draw_on_host(key)
        leaves = paths_of(weights.params)
        abstract = paths_of(self._abstract.params)
        placed = frozenset(path for path in weights.owned if _fits(leaves[path], abstract[path]))
        # Moving averages and optimizers may read them, hence they are arguments; jax drops those that nothing reads.
        state: TrainState = self.jitted(placed)(key, params=weights.params, model_state=weights.model_state)
        if not placed:
            return state
        params = select_leaves(weights.params, placed.__contains__)
        return replace(state, params=merge_leaves(params, state.params))

    def jitted(self, placed: frozenset[str]) -> Any:
        """Return the compiled function that creates a state without the parameters at the paths `placed`."""
        if placed not in self._jitted:

            def create(key: jax.Array, *, params: Any, model_state: Any) -> TrainState:
                return _without(self._create(key, params=params, model_state=model_state), placed)

            shardings = jax.tree.map(lambda like: like.sharding, _without(self._abstract, placed))
            self._jitted[placed] = jax.jit(create, out_shardings=shardings)
        return self._jitted[placed]

    def _can_follow(self, key: jax.Array) -> bool:
        """Return whether the devices are CPUs of this process, and the key is one that the host can follow."""
        # Inside a function that is traced (jax.eval_shape, jax.vmap over seeds) a key has no numbers yet.
        return self._is_local_cpu and not isinstance(key, Tracer) and can_draw(key)

    def _draw_on_host(self, key: jax.Array) -> TrainState:
        shapes, structure = jax.tree.flatten(self._abstract)
        leaves = []
        # A program whose only argument is a key moves nothing to a device, whatever a user's guard says.
        with jax.default_device(self._device), jax.transfer_guard("allow"):
            values = follow(self._drawn.jaxpr, key)
            for like in shapes:
                leaves.append(_on_devices(values.pop(0), like, key))  # the host's copy is freed once it is placed
        return jax.tree.unflatten(structure, leaves)


def _on_devices(value: np.ndarray, like: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    """Place a value of the host as a leaf of the state; `value` of a key are its words, and `key` says its kind."""
    # A copy for each device: on CPU an aligned NumPy array is the buffer itself, also with may_alias=False (jax
    # 0.10.2), and parameters and their moving average may be one array here.
    shards = []
    for device, index in like.sharding.addressable_devices_indices_map(value.shape).items():
        sharding = SingleDeviceSharding(device, memory_kind=like.sharding.memory_kind)
        shards.append(jax.device_put(np.array(value[index]), sharding))
    array = jax.make_array_from_single_device_arrays(value.shape, like.sharding, shards)
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(key))
    return array


def _fits(leaf: jax.Array, like: jax.ShapeDtypeStruct) -> bool:
    return leaf.dtype == like.dtype and leaf.sharding == like.sharding


def _without(state: TrainState, placed: frozenset[str]) -> TrainState:
    """Return the state (arrays or shapes) without the parameters at the paths `placed`."""
    return replace(state, params=select_leaves(state.params, lambda path: path not in placed))


# --- Arrays that a user gives. ---


def place_tree(name: str, tree: Any, abstract: Any) -> Any:
    """Place a tree of arrays on the devices of a model.

    Args:
        name: what the tree is, in messages.
        tree: NumPy or jax arrays, in any containers; None, also in place of single leaves: nothing is given.
        abstract: the shapes, dtypes and shardings of the model.

    Returns:
        The arrays in the structure and the shardings of the model, None where nothing is given.

    Raises:
        ConfigError: another structure or shape, or a path in place of a tree.
    """
    if tree is None:
        return None
    if isinstance(tree, str | os.PathLike):
        path = os.fspath(tree)
        raise ConfigError(f'{name} takes arrays, not a path; write step.init(seed, jt.load_weights(step, "{path}"))')
    leaves = {}
    drawn = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: leaf is None):
        if leaf is None:
            drawn.append(path_name(path))
        else:
            leaves[path_name(path)] = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    check_leaves(name, leaves, paths_of(abstract), optional=drawn)

    def place(path: tuple[Any, ...], like: jax.ShapeDtypeStruct) -> jax.Array | None:
        leaf = leaves.get(path_name(path))
        return None if leaf is None else jax.device_put(leaf, like.sharding)

    return jax.tree_util.tree_map_with_path(place, abstract)


def check_leaves(
    name: str,
    leaves: Mapping[str, Any],
    abstract: Mapping[str, Any],
    *,
    optional: Collection[str] = (),
    skip: Sequence[str] = (),
) -> None:
    """Compare arrays with those of a model, by their paths; float dtypes may differ.

    Args:
        name: what the arrays are, in messages.
        leaves: the arrays, or their shapes and dtypes.
        abstract: those of the model.
        optional: paths that may be missing.
        skip: patterns that were skipped, which the message repeats.

    Raises:
        ConfigError: names the first path that differs, and the patterns that leave out all that do.
    """
    problems = {}
    for path, like in abstract.items():
        leaf = leaves.get(path)
        if leaf is None:
            if path not in optional:
                problems[path] = f"{path} is missing"
        elif leaf.shape != like.shape or not _has_dtype_like(leaf, like):
            problems[path] = f"{path} is {leaf.dtype}{list(leaf.shape)}, not {like.dtype}{list(like.shape)}"
    for path in leaves:
        if path not in abstract:
            problems[path] = f"{path} is not an array of the model"
    if not problems:
        return
    modules = dict.fromkeys(f"{path.rpartition('/')[0]}/*" if "/" in path else path for path in problems)
    patterns = [*skip, *[*modules][:4]]
    first = next(iter(problems.values()))
    raise ConfigError(
        f"{name} does not fit the model of this step: {first} ({len(problems)} in all differ); to initialize what "
        f"differs, write skip={json.dumps(patterns)}"
    )


def _has_dtype_like(leaf: Any, like: jax.ShapeDtypeStruct) -> bool:
    """Return whether an array can be cast to the dtype of the model: floats to floats, all others are equal."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.issubdtype(like.dtype, jnp.floating)
    return leaf.dtype == like.dtype
