"""What a run with parts from Python computes, as digests: parts of one name may compute different things.

A step is traced to equations, and these are digested with every number that they hold. Names, addresses and the text
of functions are left out, so that the same call gives the same digest in another process.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
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

OwnDigests = dict[str, str | None]

# What may differ while the step computes the same.
_APART_FROM_THE_STEP = (
    *("name", "seed", "data", "evaluation", "checkpoint", "logging", "profile", "compilation_cache"),
    "compiler_options",
)
# Where an equation comes from, and not what it computes.
_NO_CONTENT = ("name", "name_and_src_info", "debug_info", "debug", "ctx_mesh")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def own_digests(run: Run, own: OwnParts, own_step: OwnStep, traced: "jax.stages.Traced") -> OwnDigests | None:
    """The record for `run.json` and checkpoints; None for a run whose step is the config's.

    Args:
        run: assembled.
        own, own_step: what came from Python.
        traced: the step of the run.

    Returns:
        `program` (of the step), `drawn` (of the state that it starts from, if it is drawn), `params` (what it starts
        from, if it is given), `trainable` (the paths), and `under`: digests are alike only where that is.
    """
    is_own = [own["model"], own["task"], own["optimizer"], own_step.trainable, own_step.params, own_step.model_state]
    if all(part is None for part in is_own):
        return None
    key = jax.eval_shape(lambda: jax.random.key(0))
    drawn = jax.make_jaxpr(lambda key: create_state(run.step.program, key))(key)
    return {
        "program": program_digest(traced.jaxpr),
        "drawn": program_digest(drawn) if own_step.params is None else None,
        "params": _start_digest(own_step),
        "trainable": _trainable_digest(run, own_step),
        "under": _circumstances(run, own),
    }


def differing_parts(saved: Mapping[str, Any], current: OwnDigests | None) -> list[str]:
    """What computes something else than in the run of a checkpoint, in words; empty where that cannot be told.

    Args:
        saved: metadata of the checkpoint.
        current: the digests of the run that would go on.
    """
    before = saved.get("digests")
    if not isinstance(before, Mapping) or current is None:
        return []
    differ = {part for part in current if before.get(part) != current[part]}
    found = [f"{part}=" for part in ("params", "trainable") if part in differ]
    if "under" not in differ and "trainable" not in differ and "program" in differ:
        found.append("the model, task or optimizer from Python")
    elif "under" not in differ and differ == {"drawn"}:
        found.append("the initial state of the model or optimizer from Python")
    return found


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


def _start_digest(own_step: OwnStep) -> str | None:
    """Of the path, or of the numbers, that training starts from."""
    if own_step.params is None and own_step.model_state is None:
        return None
    lines = [f"skip {list(own_step.skip)}"]
    for given in (own_step.params, own_step.model_state):
        if isinstance(given, str | os.PathLike):
            lines.append(os.path.abspath(given))
        else:
            leaves = jax.tree_util.tree_leaves_with_path(given)
            lines += [f"{path_name(path)} {_array_text(leaf)}" for path, leaf in leaves]
    return _digest(lines)


def _trainable_digest(run: Run, own_step: OwnStep) -> str | None:
    if own_step.trainable is None:
        return None
    paths = jax.tree_util.tree_leaves_with_path(run.step.sharded_model.abstract_params)
    return _digest(sorted(name for path, _ in paths if own_step.trainable(name := path_name(path))))


def program_digest(closed: core.ClosedJaxpr, more: Iterable[str] = ()) -> str:
    """A digest of equations with every number that they hold, the same in another process.

    Args:
        closed: the equations.
        more: texts that are part of what is digested.
    """
    return _digest([*_closed_text(closed, {}), *more])


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _closed_text(closed: core.ClosedJaxpr, known: dict[int, str]) -> list[str]:
    return [*(_array_text(const) for const in closed.consts), *_equations_text(closed.jaxpr, known)]


def _equations_text(jaxpr: core.Jaxpr, known: dict[int, str]) -> list[str]:
    """The equations as lines, their variables numbered in the order in which they appear.

    Args:
        jaxpr: the equations.
        known: id of equations that were digested before -> digest, since a program calls the same ones many times.
    """
    numbers: dict[Any, int] = {}

    def shown(atom: Any) -> str:
        if isinstance(atom, core.Literal):
            return f"{atom.aval} {_array_text(atom.val)}"
        return f"{numbers.setdefault(atom, len(numbers))}:{_plain(atom.aval)}"

    lines = [" ".join(map(shown, (*jaxpr.constvars, *jaxpr.invars)))]
    for equation in jaxpr.eqns:
        params = [f"{name}={_param_text(equation.params[name], known)}" for name in sorted(equation.params)]
        kept = [text for text in params if text.partition("=")[0] not in _NO_CONTENT]
        ends = (" ".join(map(shown, atoms)) for atoms in (equation.invars, equation.outvars))
        lines.append(" | ".join([str(equation.primitive), *ends, *kept]))
    return [*lines, " ".join(map(shown, jaxpr.outvars))]


def _param_text(value: Any, known: dict[int, str]) -> str:
    if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
        if id(value) not in known:
            is_closed = isinstance(value, core.ClosedJaxpr)
            known[id(value)] = _digest(_closed_text(value, known) if is_closed else _equations_text(value, known))
        return known[id(value)]
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return f"({', '.join(_param_text(part, known) for part in value)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_param_text(part, known)}' for key, part in value.items())}}}"
    if isinstance(value, set | frozenset):
        return str(sorted(map(str, value)))
    if isinstance(value, np.ndarray | jax.Array):
        return _array_text(value)
    # A function's name and text say nothing of what it computes, which the equations do.
    return "function" if callable(value) and not isinstance(value, type) else _plain(value)


def _plain(value: Any) -> str:
    return _ADDRESS.sub("", str(value))


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
