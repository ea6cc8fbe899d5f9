"""States and parameters that a user gives to a step: checked on the host, and placed as the step's shardings say.

A compiled step donates its state. A buffer that is gone, or that is used at two places, ends the process on several
devices, and an array on other devices is an internal error: each is one line here, or is put right.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.model import Params
from jaxtrain.models.task import Batch
from jaxtrain.runtime.tree import first_deleted
from jaxtrain.train.state import TrainState

_GO_ON = "go on with what the step returns: state, metrics = step(state, batch)"


@dataclass(frozen=True)
class InitialState:
    """What is remembered of a state from `TrainStep.init`: which of its arrays belong together.

    Attributes:
        params: weak references to its parameters, in the order of the tree.
        average: weak references to the arrays of its moving average.
        optimizer: weak references to the arrays of its optimizer state.
        model_state: weak references to its batch statistics and the like.
        average_state: weak references to the arrays of their moving average.
        reads_parameters: whether the optimizer's first state depends on the numbers of the parameters.
    """

    params: tuple[weakref.ref[Any], ...]
    average: tuple[weakref.ref[Any], ...]
    optimizer: tuple[weakref.ref[Any], ...]
    model_state: tuple[weakref.ref[Any], ...]
    average_state: tuple[weakref.ref[Any], ...]
    reads_parameters: Callable[[], bool]


# Path of each leaf of a batch -> its shape and the name of its dtype.
LeafShapes = Mapping[str, tuple[tuple[int, ...], str]]


def check_not_donated(state: Any) -> None:
    """Raise where arrays of a state are gone.

    Raises:
        ConfigError: names the first of them.
    """
    gone = first_deleted(state)
    if gone is not None:
        raise ConfigError(
            f"this state was given to an earlier step, which takes over its arrays ({gone} is deleted); {_GO_ON}, "
            "or make the state again with step.init or Checkpointer.restore"
        )


def check_batch_not_deleted(batch: Any) -> None:
    """Raise where arrays of a batch are gone.

    Raises:
        ConfigError: names the first of them.
    """
    gone = first_deleted(batch)
    if gone is not None:
        raise ConfigError(
            f"{gone} of the batch is deleted (donated to another function, or freed); load the batch again"
        )


def leaf_shapes(batch: Any) -> LeafShapes:
    """Path of each leaf of a batch (arrays or shapes) -> its shape and dtype."""
    return {path: (leaf.shape, leaf.dtype.name) for path, leaf in _by_path(batch).items()}


def check_batch_shapes(batch: Batch, compiled: LeafShapes) -> None:
    """Raise where a batch has other leaves, shapes or dtypes than the step was compiled for.

    Raises:
        ConfigError: lists both.
    """
    shapes = leaf_shapes(batch)
    if shapes != compiled:
        raise ConfigError(
            f"the batch holds {_describe(shapes)}, but the step was compiled for {_describe(compiled)}; "
            "pad it, or call compile for this shape"
        )


def _describe(shapes: LeafShapes) -> str:
    return ", ".join(f"{name} {shape} {dtype}" for name, (shape, dtype) in sorted(shapes.items()))


def accept_state(
    state: Any, *, wanted: TrainState, initial: InitialState | None, last: TrainState | None
) -> TrainState:
    """A state with the step's structure, shapes, dtypes and shardings, safe to donate.

    Args:
        state: a `TrainState` of jax or NumPy arrays, anywhere; what is sharded as wanted is not copied.
        wanted: shapes and shardings of the step that takes it over.
        initial: what is remembered of the last state from the step's `init`.
        last: the state that the step returned last, which needs no checks.

    Raises:
        ConfigError: donated before, another structure, shape or dtype, one array at two places, or an average of other
            parameters; names the first.
    """
    if not isinstance(state, TrainState):
        raise ConfigError(f"the step takes a TrainState, and was given {_kind(state)}; make one with step.init(seed)")
    check_not_donated(state)
    if state is last:
        return state
    matched = match_leaves(state, wanted, what="the state")
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(wanted)]
    leaves, structure = jax.tree.flatten(wanted)
    placed = [_place(leaf, like) for leaf, like in zip(jax.tree.leaves(matched), leaves, strict=True)]
    _check_distinct(paths, placed)
    accepted: TrainState = jax.tree.unflatten(structure, placed)
    check_consistent(accepted, initial)
    return accepted


def match_leaves(given: Any, wanted: Any, *, what: str, also: Any = None) -> Any:
    """The given leaves in the wanted structure, by path; containers of another kind (a list for a tuple) do not matter.

    Args:
        given: tree of jax or NumPy arrays; Python numbers stand for scalars.
        wanted: tree of `ShapeDtypeStruct`s.
        what: the tree, in messages.
        also: a tree like `wanted` with dtypes that are accepted as well; None: `wanted` alone.

    Raises:
        ConfigError: names the first path that is missing, too much, or of another shape or dtype.
    """
    found = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(given)}
    expected = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)}
    others = {
        path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(wanted if also is None else also)
    }
    missing = [path for path in expected if path not in found]
    extra = [path for path in found if path not in expected]
    if missing or extra:
        count = f" ({len(missing)} missing, {len(extra)} too many)" if len(missing) + len(extra) > 1 else ""
        first = f"{missing[0]} is missing" if missing else f"{extra[0]} is not an array of it"
        raise ConfigError(f"{what} does not fit the model and optimizer of this step: {first}{count}")
    leaves = []
    for path, like in expected.items():
        leaf = number_as(found[path], like)
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            raise ConfigError(f"{what} holds {_kind(leaf)} at {path}; give a jax or NumPy array")
        if leaf.shape != like.shape or leaf.dtype not in (like.dtype, others[path].dtype):
            raise ConfigError(
                f"{what} does not fit this step: {path} is {leaf.dtype}{list(leaf.shape)}, "
                f"wanted is {like.dtype}{list(like.shape)}"
            )
        leaves.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(wanted), leaves)


def _by_path(tree: Any) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def number_as(leaf: Any, like: jax.ShapeDtypeStruct) -> Any:
    """A Python number as an array of the wanted dtype, where that loses nothing."""
    fits = isinstance(leaf, int) if jnp.issubdtype(like.dtype, jnp.integer) else isinstance(leaf, int | float)
    return np.asarray(leaf, like.dtype) if fits and not isinstance(leaf, bool | np.generic) else leaf


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _place(leaf: Any, like: jax.ShapeDtypeStruct) -> Any:
    if not isinstance(leaf, jax.Array):
        # A copy first: on CPU an aligned NumPy array is the buffer itself, also with may_alias=False (jax 0.10.2).
        return jax.device_put(np.array(leaf), like.sharding)
    if leaf.sharding == like.sharding:
        return leaf
    # Moving may share the buffer of a device that both have; donating it would take the user's array along.
    return jnp.copy(jax.device_put(leaf, like.sharding))


def _check_distinct(paths: list[str], leaves: list[Any]) -> None:
    """Raise where two places of a state share a buffer, which can be donated only once."""
    owners: dict[Any, str] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        for mark in _marks(leaf):
            if mark in owners:
                raise ConfigError(
                    f"{owners[mark]} and {path} of the state are the same array, but a step takes over and updates "
                    "each place on its own; copy one (jnp.copy), or let the model use one parameter twice"
                )
            owners[mark] = path


def _marks(leaf: jax.Array) -> list[Any]:
    marks: list[Any] = [("object", id(leaf))]
    is_plain = leaf.size and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if is_plain and leaf.addressable_shards:
        first = leaf.addressable_shards[0]
        # Two array objects may stand for one buffer. Where pointers are those of memory, they tell.
        if first.device.platform in ("cpu", "gpu"):
            marks.append((first.device.id, leaf.sharding.memory_kind, first.data.unsafe_buffer_pointer()))
    return marks


def remember(state: TrainState, *, reads_parameters: Callable[[], bool]) -> InitialState:
    """The record of a state that `init` made; `reads_parameters` as in `InitialState`."""
    parts = (state.params, state.ema, state.optimizer_state, state.model_state, state.ema_model_state)
    references = (tuple(weakref.ref(leaf) for leaf in jax.tree.leaves(part)) for part in parts)
    return InitialState(*references, reads_parameters=reads_parameters)


def check_consistent(state: TrainState, initial: InitialState | None) -> None:
    """Raise where parameters were replaced in a state from `init` and what was copied from the old ones was not.

    Raises:
        ConfigError: says which copies are stale and what to write instead.
    """
    if initial is None:
        return
    if (
        initial.average_state
        and _all_are(initial.average_state, state.ema_model_state)
        and not _all_are(initial.model_state, state.model_state)
    ):
        raise ConfigError(
            "the model_state of this state from step.init was replaced, but its moving average (ema_model_state) is "
            "that of the old one; use state = step.init(seed, params=params, model_state=model_state)"
        )
    if _all_are(initial.params, state.params):
        return
    what = "the parameters of this state from step.init were replaced, but"
    instead = "use state = step.init(seed, params=params), which makes all three consistent"
    if initial.average and _all_are(initial.average, state.ema):
        raise ConfigError(f"{what} its moving average is that of the old ones; {instead}")
    if _all_are(initial.optimizer, state.optimizer_state) and initial.reads_parameters():
        raise ConfigError(f"{what} its optimizer state holds copies of the old ones; {instead}")


def _all_are(remembered: tuple[weakref.ref[Any], ...], part: Any) -> bool:
    leaves = jax.tree.leaves(part)
    return len(leaves) == len(remembered) and all(a() is b for a, b in zip(remembered, leaves, strict=True))


def reads_numbers(function: Callable[[Params], Any], params: Params) -> bool:
    """Whether the results of a function depend on the numbers of its argument, not on its shapes alone.

    Args:
        function: traced, not run.
        params: its argument, arrays or shapes.
    """
    jaxpr = jax.make_jaxpr(function)(params).jaxpr
    known = {id(variable) for variable in jaxpr.invars}
    for equation in jaxpr.eqns:
        if any(id(variable) in known for variable in equation.invars):
            known.update(id(variable) for variable in equation.outvars)
    return any(id(variable) in known for variable in jaxpr.outvars)
