"""What a run with parts from Python computes, as a digest: parts of one name may compute different things."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxtrain.metrics.runinfo import package_versions
from jaxtrain.run.agreed import package_digest
from jaxtrain.run.own_parts import OwnParts
from jaxtrain.runtime.tree_path import path_name
from jaxtrain.train.assemble import Run
from jaxtrain.train.own_step import OwnStep
from jaxtrain.train.program import create_state

OwnDigests = dict[str, str]

# What may differ while the step computes the same.
_APART_FROM_THE_STEP = (
    *("name", "seed", "data", "evaluation", "checkpoint", "logging", "profile", "compilation_cache"),
    "compiler_options",
)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_SET = re.compile(r"\{('[^{}:]*')\}")


def own_digests(run: Run, own: OwnParts, own_step: OwnStep, traced: "jax.stages.Traced") -> OwnDigests | None:
    """The record for `run.json` and checkpoints; None for a run whose step is the config's.

    Args:
        run: assembled.
        own, own_step: what came from Python.
        traced: the step of the run.

    Returns:
        `program`, of the equations of the step and of its first state, with the numbers that they hold, and of the
        parameters that are given; and `under`: digests of programs are compared only where that is the same.
    """
    is_own = [own["model"], own["task"], own["optimizer"], own_step.trainable, own_step.params, own_step.model_state]
    if all(part is None for part in is_own):
        return None
    key = jax.eval_shape(lambda: jax.random.key(0))
    drawn = jax.make_jaxpr(lambda key: create_state(run.step.program, key))(key)
    lines = [*_program_text(traced.jaxpr), *_program_text(drawn), *_start_text(own_step)]
    return {"program": _digest(lines), "under": _circumstances(run, own)}


def computes_otherwise(saved: Mapping[str, Any], current: OwnDigests | None) -> bool:
    """Whether the run of a checkpoint computed something else, as far as that can be told.

    Args:
        saved: metadata of the checkpoint.
        current: the digests of the run that would go on.
    """
    before = saved.get("digests")
    if not isinstance(before, Mapping) or current is None or before.get("under") != current["under"]:
        return False
    return before.get("program") != current["program"]


def _circumstances(run: Run, own: OwnParts) -> str:
    """A digest of what changes the equations, or may, without another part from Python."""
    config = {
        key: value for key, value in run.config.model_dump(mode="json").items() if key not in _APART_FROM_THE_STEP
    }
    # Only an optimizer of the config's has a schedule over the steps.
    apart = {"prefetch", "workers", *(() if own["optimizer"] is None else ("steps",))}
    config["train"] = {key: value for key, value in config["train"].items() if key not in apart}
    device = run.step.mesh.devices.flat[0]
    spec = {path_name(path): str(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(dict(run.batches.spec()))}
    # The library's own code of a task or layer is in the equations too: a version in development keeps its number.
    versions = [package_versions(), package_digest()]
    facts = [*versions, dict(run.step.mesh.shape), device.platform, device.device_kind, spec, config]
    return _digest([json.dumps(facts, sort_keys=True)])


def _start_text(own_step: OwnStep) -> list[str]:
    """The path, or the numbers, that training starts from."""
    lines = [f"skip {list(own_step.skip)}"]
    for given in (own_step.params, own_step.model_state):
        if isinstance(given, str | os.PathLike):
            lines.append(os.path.abspath(given))
        else:
            leaves = jax.tree_util.tree_leaves_with_path(given)
            lines += [f"{path_name(path)} {_array_text(leaf)}" for path, leaf in leaves]
    return lines


def _program_text(closed: core.ClosedJaxpr) -> list[str]:
    # The text of equations shortens arrays, has sets in an order that each process draws, and colours on a terminal.
    equations = closed.jaxpr.pretty_print(use_color=False)
    text = _SET.sub(lambda found: str(sorted(found[1].split(", "))), _ADDRESS.sub("", equations))
    return [text, *map(_array_text, _arrays(closed))]


def _arrays(program: Any) -> Iterator[Any]:
    """The arrays that equations hold, and those inside of them."""
    kinds = core.ClosedJaxpr | core.Jaxpr  # one and the same from jax 0.12 on
    if isinstance(program, kinds):
        yield from getattr(program, "consts", ())
        for equation in program.eqns:
            yield from (atom.val for atom in equation.invars if isinstance(atom, core.Literal) and np.ndim(atom.val))
            for value in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, kinds)):
                yield from _arrays(value)


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _array_text(value: Any) -> str:
    """Shape, dtype and content of an array or number; without the content where this process cannot read it."""
    if isinstance(value, jax.Array):
        if value.is_deleted() or not value.is_fully_addressable:
            return f"{value.dtype}{list(value.shape)}"
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
    array = np.asarray(value)
    if array.dtype == object:
        return f"{type(value).__name__}"
    content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return f"{array.dtype}{list(array.shape)} {content}"
