"""What somebody asks of their own model and would not get: one line for each, before anything compiles."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import FamilyTable
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.model import Params
from jaxtrain.models.sharded import ShardedModel, listed
from jaxtrain.parallel.mixed_rows import mixes_rows
from jaxtrain.parallel.traced import operations
from jaxtrain.runtime.compiler import note_choice
from jaxtrain.train.state import TrainState

# Share of the multiply-adds in float32 from which a low-precision run says so.
_NOTED_SHARE = 0.1


def check_trainable(params: Params, trainable: Callable[[str], bool] | None) -> None:
    """Raise where a predicate over paths makes no difference, or lets something train that has no gradient.

    Raises:
        ConfigError: it selects no parameter, or all of them, or (as none at all does) one of integers.
    """
    dtypes = {path_name(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    paths = list(dtypes)
    fixed = [path for path in paths if not jnp.issubdtype(dtypes[path], jnp.inexact)]
    for path in fixed:
        if trainable is None or trainable(path):
            rule = f"path != {path!r}" if len(fixed) == 1 else f"path not in ({', '.join(map(repr, fixed))})"
            raise ConfigError(
                f"the parameter {path} holds {dtypes[path]}, which has no gradient; keep it in the model_state, or "
                f"pass trainable=lambda path: {rule}"
            )
    if trainable is None:
        return
    chosen = sum(map(bool, map(trainable, paths)))
    if chosen in (0, len(paths)):
        advice = "leave one to train" if chosen == 0 else "leave it out to train all"
        raise ConfigError(
            f"trainable selects {'no parameter' if chosen == 0 else 'every parameter'}; {advice}; "
            f"there are {listed(paths)}"
        )


def _split(shape: tuple[int, ...], microbatches: int) -> tuple[int, ...]:
    """The shape in one microbatch; a scalar goes to each."""
    return (shape[0] // microbatches, *shape[1:]) if shape else ()


def check_compute_dtype(
    sharded_model: ShardedModel,
    forward: Callable[[TrainState, Any], Any],
    state: TrainState,
    batch: Any,
    microbatches: int,
) -> None:
    """Raise where a policy of fewer bits changes no matmul of a model; note it where it leaves some in float32.

    Modules that were given `dtype=float32` cast parameters and inputs back up, whatever dtype they come in.

    Args:
        sharded_model: that is trained.
        forward: what a step computes of a microbatch; traced, not run.
        state: of the step, arrays or shapes.
        batch: of all rows, arrays or shapes.
        microbatches: into which the rows are divided.

    Raises:
        ConfigError: every matmul runs in float32.
    """
    model, policy = sharded_model.model, sharded_model.policy
    # Layers of ours compute in the dtype that they are given: no need to trace a model of them twice.
    ours = bool(model.linears) or isinstance(model.axes, FamilyTable)
    if jnp.dtype(policy.compute_dtype).itemsize >= 4 or ours:
        return
    state, rows = _shapes_of(state, batch, microbatches)
    wide, narrow = _multiply_adds(jax.make_jaxpr(forward)(state, rows).jaxpr)
    if wide and not narrow:
        raise ConfigError(
            f"precision.policy={policy.name}, but every matmul of the model {model.name} runs in float32: its layers "
            "ask for it (dtype=float32) or cast what they are given; leave dtype out, or use precision.policy=fp32"
        )
    if wide > _NOTED_SHARE * (wide + narrow):
        share = wide / (wide + narrow)
        note_choice("matmuls", f"{share:.0%} of the multiply-adds in float32, as layers of {model.name} ask", [])


def model_mixes_rows(sharded_model: ShardedModel, state: TrainState, batch: Any, microbatches: int) -> bool:
    """Whether what a model makes of a row is found to depend on other rows, and not by a model_state alone.

    Such a model takes the mean over its rows, say. On a shard of `data` it would see only some of them.

    Args:
        sharded_model: that is trained.
        state: of the step, arrays or shapes.
        batch: of all rows, arrays or shapes.
        microbatches: into which the rows are divided.
    """
    model = sharded_model.model
    # Models of ours add up over the shards what they count. Those with a model_state do not run on shards.
    if isinstance(model.axes, FamilyTable) or jax.tree.leaves(state.model_state):
        return False
    state, rows = _shapes_of(state, batch, microbatches)
    inputs, structure = jax.tree.flatten(rows["inputs"])

    def forward(inputs: list[jax.Array], params: Params, key: jax.Array) -> Any:
        rows = jax.tree.unflatten(structure, inputs)
        return sharded_model.apply(params, {}, rows, key=key, train=True)[0]

    program = jax.make_jaxpr(forward)(inputs, state.params, state.key).jaxpr
    others = len(program.invars) - len(inputs)
    found = mixes_rows(program, [*(bool(leaf.shape) for leaf in inputs), *[False] * others])
    if found:
        why = f"the model {model.name} makes of a row what depends on other rows, of which a shard of data has some"
        note_choice("accumulation", "gradients cross data in every microbatch", [("once a step", why)])
    return found


def _shapes_of(state: TrainState, batch: Any, microbatches: int) -> tuple[TrainState, Any]:
    """The shapes of a state, and those of a microbatch."""
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(_split(x.shape, microbatches), x.dtype), dict(batch))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state), rows


def _multiply_adds(program: Jaxpr) -> tuple[float, float]:
    """Multiply-adds of matmuls and convolutions with float32 operands, and with narrower ones."""
    wide = narrow = 0.0
    for equation, times in operations(program):
        if equation.primitive.name not in ("dot_general", "conv_general_dilated", "ragged_dot_general"):
            continue
        left, right = operands = tuple(_typed(variable) for variable in equation.invars[:2])
        if not all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in operands):
            continue
        count = times * math.prod(_typed(equation.outvars[0]).shape) * _summed_over(equation, left, right)
        if max(left.dtype.itemsize, right.dtype.itemsize) >= 4:
            wide += count
        else:
            narrow += count
    return wide, narrow


def _typed(variable: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)


def _summed_over(equation: Any, left: Any, right: Any) -> float:
    """Products that are summed for a number of the result."""
    numbers = equation.params.get("dimension_numbers")
    if equation.primitive.name == "dot_general":
        return math.prod(left.shape[dim] for dim in numbers[0][0])
    if equation.primitive.name == "conv_general_dilated":
        return math.prod(right.shape) / right.shape[numbers.rhs_spec[0]]
    return left.shape[-1]
