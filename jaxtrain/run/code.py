"""Digests of the code of a step, by which a run that resumes notices another model, loss or optimizer.

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
from jax.extend.core import Literal

from jaxtrain.train.step import TrainStep

PARTS = ("model", "loss", "optimizer", "initial state")
# Parameters of equations that tell where code is, what it is called, or how it would be differentiated further.
_WITHOUT_EFFECT = {
    "name",
    "debug_info",
    "name_and_src_info",
    "origin",
    "policy",
    "fwd_jaxpr_thunk",
    "bwd",
    "jvp_jaxpr_fun",
}
_NAMES = re.compile(r"<function \S+|<bound method \S+|0x[0-9a-f]+")


def step_code(step: TrainStep, traced: jax.stages.Traced, *, versions: str, draws_parameters: bool) -> dict[str, str]:
    """Return the digests of a traced step, of each of its `PARTS`, and of the conditions that change its program.

    The digest `step` is of all outputs except the learning rate, which is only displayed, and `gradients` of all that
    the optimizer gets. Both include the initial state. The digest of a part is of its equations without the connections
    between them: it tells which part changed when the steps differ.
    """
    reader = _Reader()
    # The leaves of state and metrics; effects follow them.
    outputs = reader.outputs(traced.jaxpr, "model")
    leaves = jax.tree_util.tree_leaves_with_path(traced.out_info)
    compared = [
        output
        for output, (path, _) in zip(outputs, leaves, strict=False)
        if jax.tree_util.keystr(path) != "[1]['learning_rate']"
    ]
    initial = []
    if draws_parameters:
        initial = reader.outputs(step.drawn.jaxpr, "initial state")
    return {
        "step": _digest(*compared, *initial),
        "gradients": _digest(*reader.before_optimizer, *initial),
        **{part: _digest(*equations) for part, equations in reader.parts.items()},
        "conditions": _digest(f"{versions} {step.mesh.devices.flat[0].device_kind} {step.state_shardings.params}"),
    }


class _Reader:
    """Reads the equations of a trace.

    Attributes:
        parts: a digest of each equation, by the part it belongs to.
        before_optimizer: digests of how the values that the optimizer reads from the other parts are computed.
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
        values: dict[Any, str] = {}
        for index, variable in enumerate([*jaxpr.constvars, *jaxpr.invars]):
            values[variable] = f"{index} {variable.aval}"
        for variable, const in zip(jaxpr.constvars, getattr(program, "consts", ()), strict=False):
            values[variable] = self._text(const, part)
            self.parts[part].append(values[variable])

        def value_of(atom: Any) -> str:
            return self._text(atom.val, part) if isinstance(atom, Literal) else values[atom]

        effects = []
        computed = set()
        for equation in jaxpr.eqns:
            equation_part = _part_of(str(equation.source_info.name_stack), part)
            text = f"{equation.primitive.name} {self._text(equation.params, equation_part)}"
            literals = [value_of(atom) for atom in equation.invars if isinstance(atom, Literal)]
            self.parts[equation_part].append(_digest(text, *literals))
            digest = _digest(text, *map(value_of, equation.invars))
            for index, variable in enumerate(equation.outvars):
                values[variable] = f"{index} {digest}"
            if equation_part == "optimizer":
                self.before_optimizer += [value for value in map(value_of, equation.invars) if value in computed]
            else:
                computed |= {values[variable] for variable in equation.outvars}
            # A kernel has no outputs: it writes into memory, which is an effect.
            if any("Debug" not in type(effect).__name__ for effect in equation.effects):
                effects.append(digest)
        self._done[key] = [*map(value_of, jaxpr.outvars), *effects]
        return self._done[key]

    def _text(self, value: Any, part: str) -> str:
        """Return a parameter, constant or literal of an equation as a text that is the same in every process."""
        if hasattr(value, "eqns"):
            return _digest(*self.outputs(value, part))
        if is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, Mapping):
            keys = sorted(value.keys() - _WITHOUT_EFFECT, key=str)
            return str([f"{key}={self._text(value[key], part)}" for key in keys])
        if isinstance(value, tuple | list):
            return str([self._text(item, part) for item in value])
        if isinstance(value, set | frozenset):
            return str(sorted(self._text(item, part) for item in value))
        if isinstance(value, np.ndarray | jax.Array):
            return _array_digest(value)
        return _NAMES.sub("", repr(value))


def _part_of(scopes: str, part: str) -> str:
    """Return the part that an equation in these named scopes belongs to, by default `part`."""
    names = re.split(r"[/()]+", scopes)
    if names[0] == "optimizer":
        return "optimizer"
    return "loss" if "loss" in names else part


def _array_digest(array: np.ndarray | jax.Array) -> str:
    if isinstance(array, jax.Array):
        if not array.is_fully_addressable:
            return str(array.aval)  # reading it would be a collective of all processes
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
    content = np.asarray(jax.device_get(array))
    return f"{content.dtype} {content.shape} {hashlib.sha256(content.tobytes()).hexdigest()}"


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
