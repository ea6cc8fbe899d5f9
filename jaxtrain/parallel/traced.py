"""Reading the program that a function is traced to: its operations, inner programs included."""

from collections.abc import Callable, Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxtrain.parallel.microbatches import Tree


def operations(program: Jaxpr, times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """List every operation of a program with the number of times that it runs; loops of unknown length count once.

    Args:
        program: inner programs are listed too.
        times: how often the program itself runs.
    """
    for equation in program.eqns:
        yield equation, times
        repeated = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in _inner(tuple(equation.params.values())):
            yield from operations(inner, times * repeated)


def calls_back(program: Jaxpr) -> bool:
    """Whether a program calls Python while it runs: `jax.debug.print`, `jax.debug.callback`, `jax.pure_callback`."""
    names = {equation.primitive.name for equation, _ in operations(program)}
    return any("callback" in name or name.startswith("debug_") for name in names)


def traced(function: Callable[..., Tree], *arguments: Tree) -> tuple[Callable[..., Tree], Jaxpr]:
    """Trace a function, so that its program can be read before it is called; both share one trace.

    Args:
        function: of arrays.
        arguments: arrays that it will be called with, or their shapes.

    Returns:
        The function, to be called with these arguments, and its program.
    """
    jitted = jax.jit(function, inline=True)
    return jitted, jitted.trace(*arguments).jaxpr.jaxpr


def _inner(values: tuple[object, ...]) -> Iterator[Jaxpr]:
    """The programs among the parameters of an operation."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from _inner(tuple(value))
        elif isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
