"""The state at step 0 on its devices: what was read for it becomes part of it, and is not copied by a program.

On CPU devices what is drawn is evaluated on the host, where that is known to give the same bits.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

from jaxtrain.models.initializers import CannotFollowError, can_draw, follow
from jaxtrain.runtime.tree import merge_leaves, path_name, paths_of
from jaxtrain.train.state import TrainState, select_leaves
from jaxtrain.weights.load import Start

# Each of several processes draws the whole state: up to this many numbers, which take it two seconds.
_MOST_DRAWN_BY_EACH = 2**29


class FirstState:
    """Makes the state at step 0 of a step.

    The results of a compiled program are arrays of their own: parameters that were read from files and passed through
    one would be on the devices twice for a moment, for which a large base has no room. Those that are as the state
    stores them are left out of the program's results and put in their places afterwards.
    """

    def __init__(self, create: Callable[..., TrainState], wanted: TrainState, shardings: TrainState):
        self._create = create
        self._shardings = shardings
        self._shapes = wanted
        self._devices = list(jax.tree.leaves(shardings)[0].mesh.devices.flat)
        self._wanted = paths_of(wanted.params)
        # What is left out -> the program.
        self._programs: dict[frozenset[str], Any] = {frozenset(): jax.jit(create, out_shardings=shardings)}

    def __call__(self, key: jax.Array, start: Start) -> TrainState:
        """The state from a typed key and a start, its arrays shared with nobody else."""
        if start.params is None and start.model_state is None and self._is_on_host(key):
            try:
                return self._drawn_on_host(key)
            except CannotFollowError:
                pass  # the program is compiled
        leaves = paths_of(start.params)
        placed = frozenset(path for path in start.ours if _fits(leaves[path], self._wanted[path]))
        # Moving averages and optimizers may read them, hence they are arguments; jax drops those that nothing reads.
        state: TrainState = self._program(placed)(key, params=start.params, model_state=start.model_state)
        if not placed:
            return state
        ready = jax.tree_util.tree_map_with_path(
            lambda path, _: leaves[path_name(path)] if path_name(path) in placed else None, self._shardings.params
        )
        return replace(state, params=merge_leaves(ready, state.params))

    def _is_on_host(self, key: jax.Array) -> bool:
        # Inside a function that is traced (jax.eval_shape, jax.vmap over seeds) a key has no numbers yet.
        if isinstance(key, Tracer) or any(device.platform != "cpu" for device in self._devices):
            return False
        processes = {device.process_index for device in self._devices}
        kinds = {leaf.dtype for leaf in jax.tree.leaves(self._shapes)}
        one_kind = all(kind == key.dtype for kind in kinds if jnp.issubdtype(kind, jax.dtypes.prng_key))
        few = sum(leaf.size for leaf in jax.tree.leaves(self._shapes.params)) <= _MOST_DRAWN_BY_EACH
        return jax.process_index() in processes and (len(processes) == 1 or few) and one_kind and can_draw(key)

    def _drawn_on_host(self, key: jax.Array) -> TrainState:
        traced = self._program(frozenset()).trace(key, params=None, model_state=None)
        shapes, structure = jax.tree.flatten(self._shapes)
        state: list[Any] = []
        here = next(device for device in self._devices if device.process_index == jax.process_index())
        # A program whose only argument is a key moves nothing to a device, whatever a user's guard says.
        with jax.default_device(here), jax.transfer_guard("allow"):
            drawn = follow(traced.jaxpr, key)[::-1]
            for like in shapes:
                state.append(_placed(drawn.pop(), like, key))
        return jax.tree.unflatten(structure, state)

    def _program(self, placed: frozenset[str]) -> Any:
        if placed not in self._programs:
            create = self._create

            def rest(key: jax.Array, *, params: Any, model_state: Any) -> TrainState:
                return _without(create(key, params=params, model_state=model_state), placed)

            self._programs[placed] = jax.jit(rest, out_shardings=_without(self._shardings, placed))
        return self._programs[placed]


def _placed(value: np.ndarray, like: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    """A value of the host on the devices of a sharding; of keys, which are of the kind of `key`, their words."""
    # A copy for each device: on CPU an aligned NumPy array is the buffer itself, also with may_alias=False (jax
    # 0.10.2), and parameters and their moving average may be one array here.
    kind = like.sharding.memory_kind
    shards = [
        jax.device_put(np.array(value[index]), SingleDeviceSharding(device, memory_kind=kind))
        for device, index in like.sharding.addressable_devices_indices_map(value.shape).items()
    ]
    placed = jax.make_array_from_single_device_arrays(value.shape, like.sharding, shards)
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(key))
    return placed


def _fits(leaf: jax.Array, like: jax.ShapeDtypeStruct) -> bool:
    return leaf.dtype == like.dtype and leaf.sharding == like.sharding


def _without(state: TrainState, placed: frozenset[str]) -> TrainState:
    """The state (arrays or shardings) with None in place of some parameters."""
    return replace(state, params=select_leaves(state.params, lambda path: path not in placed))
