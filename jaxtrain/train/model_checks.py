"""What somebody asks of their own model and would not get: one line for each, before anything compiles."""

import fnmatch
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import FamilyTable, entry_axes
from jaxtrain.layout.sharding import Layout, parameter_spec, path_name
from jaxtrain.models.model import Apply, Model
from jaxtrain.parallel.traced import operations
from jaxtrain.precision.policy import Policy
from jaxtrain.runtime.choices import note_choice
from jaxtrain.train.state import TrainState

# Share of the multiply-adds in float32 from which a low-precision run says so.
_NOTED_SHARE = 0.1


def check_axes(params: Any, model: Model, layout: Layout) -> None:
    """Raise where an axes table, or a mesh axis that needs one, would do nothing.

    Args:
        params: the model's parameters (arrays or shapes).
        model: with the table.
        layout: of the step.

    Raises:
        ConfigError: a row that matches no parameter, or `tensor` > 1 although no parameter is sharded over it.
    """
    shapes = {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    if not isinstance(model.axes, FamilyTable):
        for row in model.axes:
            if row not in shapes and not ("*" in row and any(fnmatch.fnmatchcase(path, row) for path in shapes)):
                raise ConfigError(
                    f"axes of the model {model.name}: {row!r} matches no parameter; there are {_some(shapes)}"
                )
    tensor = layout.mesh.shape["tensor"]
    specs = (parameter_spec(path, shape, layout) for path, shape in shapes.items())
    if tensor > 1 and not any("tensor" in entry_axes(entry) for spec in specs for entry in spec):
        largest = max(shapes, key=lambda path: math.prod(shapes[path]), default="")
        names = ", ".join(name for name, axes in layout.rules.items() if "tensor" in axes and "activation" not in name)
        raise ConfigError(
            f"parallel.tensor={tensor}, but no parameter of the model {model.name} is sharded over it; give the model "
            f"axes, such as {{{largest!r}: ...}} with the names {names}, or use parallel.tensor=1"
        )


def check_trainable(params: Any, trainable: Callable[[str], bool] | None) -> None:
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
            f"there are {_some(paths)}"
        )


def _split(shape: tuple[int, ...], microbatches: int) -> tuple[int, ...]:
    """The shape in one microbatch; a scalar goes to each."""
    return (shape[0] // microbatches, *shape[1:]) if shape else ()


def check_compute_dtype(
    apply: Apply, state: TrainState, inputs: Any, model: Model, policy: Policy, microbatches: int
) -> None:
    """Raise where a policy of fewer bits changes no matmul of a model; note it where it leaves some in float32.

    Modules that were given `dtype=float32` cast parameters and inputs back up, whatever dtype they come in.

    Args:
        apply: the model in the compute dtype; it is traced, not run.
        state: of the step, arrays or shapes.
        inputs: of the whole batch, arrays or shapes.
        model: it belongs to.
        policy: of the step.
        microbatches: into which the rows are divided.

    Raises:
        ConfigError: every matmul runs in float32.
    """
    # Layers of ours compute in the dtype that they are given: no need to trace a model of them twice.
    ours = bool(model.linears) or isinstance(model.axes, FamilyTable)
    if jnp.dtype(policy.compute_dtype).itemsize >= 4 or ours:
        return
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(_split(x.shape, microbatches), x.dtype), inputs)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)

    def forward(state: TrainState, rows: Any) -> Any:
        return apply(state.params, state.model_state, rows, key=state.key, train=True)

    wide, narrow = _multiply_adds(jax.make_jaxpr(forward)(state, rows).jaxpr)
    if wide and not narrow:
        raise ConfigError(
            f"precision.policy={policy.name}, but every matmul of the model {model.name} runs in float32: its layers "
            "ask for it (dtype=float32) or cast what they are given; leave dtype out, or use precision.policy=fp32"
        )
    if wide > _NOTED_SHARE * (wide + narrow):
        share = wide / (wide + narrow)
        note_choice("matmuls", f"{share:.0%} of the multiply-adds in float32, as layers of {model.name} ask", [])


def _some(paths: Any) -> str:
    paths = list(paths)
    return ", ".join(paths[:6]) + (", ..." if len(paths) > 6 else "")


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
