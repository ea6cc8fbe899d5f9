"""Digests of the code of a step, by which a run that resumes knows that its model, loss or optimizer is another one.

A digest is of what the trace of the step computes: primitives, their parameters, literals, and the values of arrays
that functions close over. Names, source lines, debug prints and equations that no output needs are not in it.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.train.step import TrainStep

PARTS = ("model", "loss", "optimizer", "initial state")
# Parameters of equations that say where code is, what it is called, or how it would be differentiated further.
_NO_NUMBERS = {
    *("name", "debug_info", "name_and_src_info", "origin", "policy", "fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_fun"),
}
_NAMES = re.compile(r"<function \S+|<bound method \S+|0x[0-9a-f]+")


def step_code(step: TrainStep, traced: jax.stages.Traced, *, versions: str, draws_parameters: bool) -> dict[str, str]:
    """Return digests of a traced step (`step`), of its parts, and of what else changes its program (`conditions`).

    The digest of the step is of everything that it returns but the rate, which is only shown; that of the `gradients`
    of all that the optimizer gets. Both are also of the initial state. The digest of a part is of its equations without
    what connects them: it tells which part differs where the steps do.
    """
    reader = _Reader()
    outputs = reader.outputs(traced.jaxpr, "model")
    leaves = jax.tree_util.tree_leaves_with_path(traced.out_info)
    # Of state and metrics; effects follow the outputs.
    numbers = [
        output
        for output, (path, _) in zip(outputs, leaves, strict=False)
        if jax.tree_util.keystr(path) != "[1]['learning_rate']"
    ]
    initial = reader.outputs(step.drawn.jaxpr, "initial state") if draws_parameters else []
    return {
        "step": _digest(*numbers, *initial),
        "gradients": _digest(*reader.before_optimizer, *initial),
        **{part: _digest(*equations) for part, equations in reader.parts.items()},
        "conditions": _digest(f"{versions} {step.mesh.devices.flat[0].device_kind} {step.state_shardings.params}"),
    }


class _Reader:
    """Reads the equations of one trace; `parts` collects a digest of each equation.

    `before_optimizer` collects how what equations of the optimizer read is computed by others.
    """

    def __init__(self) -> None:
        self.parts: dict[str, list[str]] = {part: [] for part in PARTS}
        self.before_optimizer: list[str] = []
        self._done: dict[tuple[Any, str], list[str]] = {}

    def outputs(self, program: Any, part: str) -> list[str]:
        """Return a digest of how each output is computed, then those of equations with effects, in their order."""
        key = program, part
        if key in self._done:
            return self._done[key]
        jaxpr = getattr(program, "jaxpr", program)
        variables = [*jaxpr.constvars, *jaxpr.invars]
        values = {variable: f"{index} {variable.aval}" for index, variable in enumerate(variables)}
        for variable, const in zip(jaxpr.constvars, getattr(program, "consts", ()), strict=False):
            values[variable] = self._text(const, part)
            self.parts[part].append(values[variable])

        def value_of(atom: Any) -> str:
            return self._text(atom.val, part) if hasattr(atom, "val") else values[atom]

        effects = []
        computed = set()
        for equation in jaxpr.eqns:
            equation_part = _part_of(str(equation.source_info.name_stack), part)
            text = f"{equation.primitive.name} {self._text(equation.params, equation_part)}"
            inputs = [value_of(atom) for atom in equation.invars]
            literals = [value for atom, value in zip(equation.invars, inputs, strict=True) if hasattr(atom, "val")]
            self.parts[equation_part].append(_digest(text, *literals))
            digest = _digest(text, *inputs)
            for index, variable in enumerate(equation.outvars):
                values[variable] = f"{index} {digest}"
            if equation_part == "optimizer":
                self.before_optimizer += [value for value in inputs if value in computed]
            else:
                computed |= {values[variable] for variable in equation.outvars}
            # A kernel returns nothing: it writes.
            if any("Debug" not in type(effect).__name__ for effect in equation.effects):
                effects.append(digest)
        self._done[key] = [*map(value_of, jaxpr.outvars), *effects]
        return self._done[key]

    def _text(self, value: Any, part: str) -> str:
        """Return the parameter of an equation as a text that is the same in every process."""
        if hasattr(value, "eqns"):
            return _digest(*self.outputs(value, part))
        if is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, Mapping):
            return str([f"{key}={self._text(value[key], part)}" for key in sorted(value.keys() - _NO_NUMBERS, key=str)])
        if isinstance(value, set | frozenset):
            value = sorted(value, key=str)
        if isinstance(value, tuple | list):
            return str([self._text(item, part) for item in value])
        if isinstance(value, np.ndarray | jax.Array):
            return _array_digest(value)
        return _NAMES.sub("", repr(value))


def _part_of(scopes: str, part: str) -> str:
    """Return the part that an equation in these named scopes belongs to; `part` is that of the equations around it."""
    names = re.split(r"[/()]+", scopes)
    if names[0] == "optimizer":
        return "optimizer"
    return "loss" if "loss" in names else part


def _array_digest(array: np.ndarray | jax.Array) -> str:
    if isinstance(array, jax.Array):
        if not array.is_fully_addressable:
            return str(array.aval)  # to read it, all processes would have to meet
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
    content = np.asarray(array)
    return f"{content.dtype} {content.shape} {hashlib.sha256(content.tobytes()).hexdigest()}"


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
