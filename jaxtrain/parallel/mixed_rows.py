"""Whether a program mixes the rows of a batch, read from its operations: a shard of `data` has some of the rows only.

Of every array the dims that count rows are followed from the inputs on. An operation that adds up, contracts, sorts or
picks along such a dim mixes rows; what no result depends on is passed over. Nothing is proved: rows that are sorted and
brought back into their order count as mixed, and where an operation of another shape is not known, it is followed no
further.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

# Dims of an array that count rows.
Dims = frozenset[int]
_NONE: Dims = frozenset()
# (operation, dims of its operands) -> dims of its results.
_Rule = Callable[[JaxprEqn, Sequence[Dims]], Sequence[Dims]]


class _MixedError(Exception):
    """An operation mixes rows."""


def mixes_rows(program: Jaxpr, rows: Sequence[bool]) -> bool:
    """Whether a program is found to mix rows.

    Args:
        program: of a model.
        rows: of each of its inputs, whether the first dim counts rows.
    """
    try:
        _follow(program, [frozenset((0,)) if has_rows else _NONE for has_rows in rows])
    except _MixedError:
        return True
    except (AttributeError, IndexError, KeyError, ValueError):
        # Another version of jax may write an operation in another way, which the tests of each version show. A run goes
        # on as if nothing had been found.
        return False
    return False


def _follow(program: Jaxpr, inputs: Sequence[Dims]) -> list[Dims]:
    """The dims of the results of a program that count rows, from those of its inputs."""
    known: dict[Any, Dims] = dict(zip(program.invars, inputs, strict=True))

    def dims(variable: Any) -> Dims:
        return _NONE if isinstance(variable, Literal) else known.get(variable, _NONE)

    for equation in _live(program):
        given = [dims(variable) for variable in equation.invars]
        if any(given):
            rule = _RULES.get(equation.primitive.name, _other)
            known.update(zip(equation.outvars, rule(equation, given), strict=True))
    return [dims(variable) for variable in program.outvars]


def _live(program: Jaxpr) -> list[JaxprEqn]:
    """The operations that results depend on, in order."""
    used, found = {id(variable) for variable in program.outvars}, []
    for equation in reversed(program.eqns):
        if any(id(variable) in used for variable in equation.outvars):
            used.update(id(variable) for variable in equation.invars)
            found.append(equation)
    return found[::-1]


def _mixed_over(dims: Dims, axes: Sequence[int]) -> None:
    if dims & frozenset(axes):
        raise _MixedError


def _moved(dims: Dims, to: Mapping[int, int]) -> Dims:
    return frozenset(to[dim] for dim in dims if dim in to)


def _other(equation: JaxprEqn, given: Sequence[Dims]) -> Sequence[Dims]:
    """One that holds a program of its own, or any other: rows stay where a result of as many dims has as many."""
    inner = next((found for found in map(_program, equation.params.values()) if _fits(found, equation)), None)
    if inner is not None:
        return _follow(inner, given)
    shapes = [_shape(variable) if dims else () for variable, dims in zip(equation.invars, given, strict=True)]

    def stays(shape: tuple[int, ...]) -> Dims:
        pairs = [(one, dims) for one, dims in zip(shapes, given, strict=True) if len(one) == len(shape)]
        return frozenset(dim for one, dims in pairs for dim in dims if one[dim] == shape[dim])

    return [stays(_shape(variable)) for variable in equation.outvars]


def _program(value: Any) -> Jaxpr | None:
    value = value.jaxpr if isinstance(value, ClosedJaxpr) else value
    return value if isinstance(value, Jaxpr) else None


def _fits(program: Jaxpr | None, equation: JaxprEqn) -> bool:
    """Whether a program takes and gives the arrays of the operation that holds it."""
    if program is None:
        return False
    inside, outside = ([list(map(_shape, some)) for some in (one.invars, one.outvars)] for one in (program, equation))
    return inside == outside


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(getattr(variable.aval, "shape", ()))


def _dims(variable: Any) -> range:
    return range(len(_shape(variable)))


def _reduce(equation: JaxprEqn, given: Sequence[Dims]) -> Sequence[Dims]:
    axes = equation.params["axes"]
    _mixed_over(given[0], axes)
    left = [dim for dim in _dims(equation.invars[0]) if dim not in axes]
    return [_moved(given[0], {dim: index for index, dim in enumerate(left)})] * len(equation.outvars)


def _along(name: str) -> _Rule:
    """An operation along the dims that an argument names."""

    def rule(equation: JaxprEqn, given: Sequence[Dims]) -> Sequence[Dims]:
        named = equation.params[name]
        for dims in given:
            _mixed_over(dims, named if isinstance(named, tuple) else (named,))
        return _other(equation, given)

    return rule


def _collective(equation: JaxprEqn, given: Sequence[Dims]) -> Sequence[Dims]:
    """A sum over mesh axes, which has numbers in place of their names where `jax.vmap` maps over rows."""
    for dims in given:
        _mixed_over(dims, [axis for axis in equation.params["axes"] if isinstance(axis, int)])
    return _other(equation, given)


def _pick(equation: JaxprEqn, given: Sequence[Dims]) -> Sequence[Dims]:
    """A part of an array."""
    shapes = (_shape(equation.invars[0]), _shape(equation.outvars[0]))
    _mixed_over(given[0], [dim for dim, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b])
    return [given[0]] * len(equation.outvars)


def _broadcast(equation: JaxprEqn, given: Sequence[Dims]) -> Sequence[Dims]:
    return [_moved(given[0], dict(enumerate(equation.params["broadcast_dimensions"])))]


def _transpose(equation: JaxprEqn, given: Sequence[Dims]) -> Sequence[Dims]:
    return [_moved(given[0], {dim: index for index, dim in enumerate(equation.params["permutation"])})]


def _squeeze(equation: JaxprEqn, given: Sequence[Dims]) -> Sequence[Dims]:
    left = [dim for dim in _dims(equation.invars[0]) if dim not in equation.params["dimensions"]]
    return [_moved(given[0], {dim: index for index, dim in enumerate(left)})]


def _reshape(equation: JaxprEqn, given: Sequence[Dims]) -> Sequence[Dims]:
    """A dim goes to the dim that begins at the same place in memory order: rows are the outermost of what they join."""
    starts = [_starts(_shape(variable)) for variable in (equation.invars[0], equation.outvars[0])]
    places = {start: dim for dim, start in reversed(starts[1].items())}
    return [_moved(given[0], {dim: places[start] for dim, start in starts[0].items() if start in places})]


def _starts(shape: Sequence[int]) -> dict[int, int]:
    """Dim, of more than one element -> the product of the dims before it."""
    found, product = {}, 1
    for dim, size in enumerate(shape):
        if size != 1:
            found[dim] = product
        product *= size
    return found


def _product(equation: JaxprEqn, given: Sequence[Dims]) -> Sequence[Dims]:
    contracted, batch = equation.params["dimension_numbers"]
    place, found = len(batch[0]), _NONE
    for side, dims in enumerate(given[:2]):
        _mixed_over(dims, contracted[side])
        to = {dim: index for index, dim in enumerate(batch[side])}
        for dim in _dims(equation.invars[side]):
            if dim not in batch[side] and dim not in contracted[side]:
                to[dim] = place
                place += 1
        found |= _moved(dims, to)
    return [found]


def _convolution(equation: JaxprEqn, given: Sequence[Dims]) -> Sequence[Dims]:
    numbers = equation.params["dimension_numbers"]
    return [_moved(given[0], {numbers.lhs_spec[0]: numbers.out_spec[0]})]


def _gather(equation: JaxprEqn, given: Sequence[Dims]) -> Sequence[Dims]:
    numbers = equation.params["dimension_numbers"]
    sizes = zip(_shape(equation.invars[0]), equation.params["slice_sizes"], strict=True)
    picked = [dim for dim, (size, part) in enumerate(sizes) if part < size and dim not in numbers.operand_batching_dims]
    if not given[1]:  # else each row picks by numbers of its own: `x[jnp.arange(rows), last]`
        _mixed_over(given[0], picked)
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [dim for dim in _dims(equation.invars[0]) if dim not in gone]
    batch = [dim for dim in _dims(equation.outvars[0]) if dim not in numbers.offset_dims]
    found = _moved(given[1], dict(enumerate(batch)))
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    to = {operand: batch[index] for operand, index in pairs} | dict(zip(kept, numbers.offset_dims, strict=True))
    return [found | _moved(given[0], to)]


def _scan(equation: JaxprEqn, given: Sequence[Dims]) -> Sequence[Dims]:
    """A loop over the first dim of some operands; where that is the dim of rows, each turn has one row."""
    body = _program(equation.params["jaxpr"])
    assert body is not None, "a scan has a body"
    # Those that are looped over lack their first dim in the body. (What else says so differs between versions of jax.)
    carried = sum(map(_has_equal_rank, body.outvars, equation.outvars))
    consts = sum(map(_has_equal_rank, body.invars, equation.invars)) - carried
    each = [frozenset(dim - 1 for dim in dims if dim) for dims in given[consts + carried :]]
    carry = list(given[consts : consts + carried])
    while True:
        results = _follow(body, [*given[:consts], *carry, *each])
        grown = [before | after for before, after in zip(carry, results[:carried], strict=True)]
        if grown == carry:
            return [*carry, *(frozenset(dim + 1 for dim in dims) for dims in results[carried:])]
        carry = grown


def _has_equal_rank(one: Any, other: Any) -> bool:
    return len(_shape(one)) == len(_shape(other))


def _cond(equation: JaxprEqn, given: Sequence[Dims]) -> Sequence[Dims]:
    branches = map(_program, equation.params["branches"])
    found = [_follow(branch, given[1:]) for branch in branches if branch is not None]
    return [frozenset().union(*dims) for dims in zip(*found, strict=True)]


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"),
        _reduce,
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    **dict.fromkeys(("psum", "pmax", "pmin"), _collective),
    **dict.fromkeys(("slice", "dynamic_slice"), _pick),
    "sort": _along("dimension"),
    "rev": _along("dimensions"),
    "split": _along("axis"),
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "scan": _scan,
    "cond": _cond,
}
