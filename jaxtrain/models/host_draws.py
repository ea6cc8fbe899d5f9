"""Initial values evaluated on the host, so that no program is compiled for them.

The program that draws the parameters of a ResNet-50 and fills the rest of the first state has two hundred kernels of
its own, each of which runs once. On CPU compiling it took 12 s of processor time (jax 0.10.2). What it computes is
little: NumPy follows its equations, and the draws of `models/initializers.py` are made by one compiled function for
blocks of one size. They are sums of integers, scaled once, so that the bits are those of the compiled program. Sums of
floats are not followed: XLA multiplies and adds with one rounding, and leaves out roundings of short floats.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.models.initializers import MEAN, WORDS
from jaxtrain.models.unrolled_keys import threefry

# Numbers per call of the compiled function. A small parameter takes a whole call, about a millisecond.
_BLOCK = 2**18
_CALLS = ("pjit", "jit")
_DRAWS = "jaxtrain_exact_normal"  # the function of models/initializers.py, as traced programs name it
_IMPLEMENTATIONS = ("threefry2x32", "threefry2x32_unrolled")  # of keys; the other is that of models/unrolled_keys.py


class CannotFollowError(Exception):
    """A program has an equation that is not followed on the host."""


def can_draw(key: jax.Array) -> bool:
    """Return whether the numbers that follow from a typed key are known here: those of threefry keys.

    Args:
        key: typed key.
    """
    # Attributes of jax.config are made at run time.
    partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    return str(jax.random.key_impl(key)) == "threefry2x32" and partitionable


def follow(traced: Any, key: jax.Array) -> list[np.ndarray]:
    """Evaluate a traced function of a key.

    Args:
        traced: a `jax.core.ClosedJaxpr` with one argument.
        key: that argument, a threefry key.

    Returns:
        The results. In place of keys their words, uint32 [..., 2]; arrays may be views of one number.

    Raises:
        CannotFollowError: an equation of the program is none that initial values as a rule are made of; mostly found
            before anything is drawn.
    """
    _check(traced.jaxpr)
    # Wrapping around is what unsigned integers are for; NumPy warns of it for single numbers.
    with np.errstate(over="ignore"):
        return _evaluate(traced, [np.asarray(jax.random.key_data(key))])


def _check(program: Any) -> None:
    """Raise where an equation of a `jax.core.Jaxpr`, or of a function that it calls, is not followed."""
    for equation in program.eqns:
        name, params = equation.primitive.name, equation.params
        given, into = ([variable.aval.dtype for variable in some] for some in (equation.invars, equation.outvars))
        if name in _CALLS:
            if params["name"] != _DRAWS:
                _check(params["jaxpr"].jaxpr)
        elif name not in _RULES and name != "unstack":
            raise CannotFollowError(name)
        elif name == "add" and not jnp.issubdtype(into[0], jnp.integer):
            raise CannotFollowError(f"sum of {into[0]}")
        elif name == "convert_element_type":
            # Of other conversions than these, rounding and what does not fit may differ between NumPy and XLA.
            if given[0] not in (np.float32, np.int32, np.uint32) or not jnp.issubdtype(into[0], jnp.floating):
                raise CannotFollowError(f"conversion of {given[0]} to {into[0]}")
        elif name == "broadcast_in_dim" and _is_key(into[0]):
            raise CannotFollowError("an operation on keys")
        elif name == "random_wrap" and params["impl"].name not in _IMPLEMENTATIONS:
            raise CannotFollowError(f"keys of {params['impl'].name}")


def _evaluate(traced: Any, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    program = traced.jaxpr
    constants = [_words(value) for value in traced.consts]
    values = dict(zip((*program.constvars, *program.invars), (*constants, *arguments), strict=True))

    def value_of(variable: Any) -> np.ndarray:
        if not hasattr(variable, "val"):  # which only literals have
            return values[variable]
        key = _is_key(variable.aval.dtype)
        return _words(variable.val) if key else np.asarray(variable.val, variable.aval.dtype)

    for equation in program.eqns:
        given = [value_of(variable) for variable in equation.invars]
        name, into = equation.primitive.name, [variable.aval for variable in equation.outvars]
        if name in _CALLS and equation.params["name"] == _DRAWS:
            found = [_normal(given[0], given[1], into[0].shape)]
        elif name in _CALLS:
            found = _evaluate(equation.params["jaxpr"], given)
        elif name == "unstack":  # of jax 0.12: the words or keys of a split, one by one
            found = list(np.moveaxis(given[0], equation.params["axis"], 0))
        elif name in _RULES:
            found = [_RULES[name](equation.params, into[0], *given)]
        else:
            raise CannotFollowError(name)
        values.update(zip(equation.outvars, found, strict=True))
    return [value_of(variable) for variable in program.outvars]


def _normal(keys: np.ndarray, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """What `jaxtrain_exact_normal` draws from keys uint32 [..., 2]: float32 [..., *shape of the draws]."""
    stacked = keys.shape[:-1]
    # Two dims of one size may be those of the keys in another order.
    if shape[: len(stacked)] != stacked or len(set(stacked)) < len(stacked) or scale.shape:
        raise CannotFollowError("the layers of a stack are not drawn along its leading dims")
    drawn = np.empty((int(np.prod(stacked)), int(np.prod(shape[len(stacked) :]))), np.float32)
    if drawn.shape[1] >= 2**32:
        raise CannotFollowError("numbers of elements have more than one word")
    for row, key in zip(drawn, keys.reshape(-1, 2), strict=True):
        words = _split(key, (WORDS,))
        for first in range(0, row.size, _BLOCK):
            part = row[first : first + _BLOCK]
            part[:] = np.asarray(_draw_block(words, np.uint32(first), scale))[: part.size]
    return drawn.reshape(shape)


@jax.jit
def _draw_block(words: jax.Array, first: jax.Array, scale: jax.Array) -> jax.Array:
    """Numbers `first` to `first + _BLOCK` of a draw with keys of words uint32 [WORDS, 2]: float32 [_BLOCK]."""
    numbers = first + jax.lax.iota(jnp.uint32, _BLOCK)
    total = jnp.full(_BLOCK, -MEAN, jnp.int32)
    for index in range(WORDS):
        left, right = threefry(words[index, 0], words[index, 1], jnp.zeros_like(numbers), numbers)
        word = left ^ right
        total = total + (word & 0xFFFF).astype(jnp.int32) + (word >> 16).astype(jnp.int32)
    return total.astype(jnp.float32) * scale


def _hash(keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Keys from keys and numbers (uint32) whose shapes broadcast: uint32 [..., 2]."""
    return np.stack(threefry(keys[..., 0], keys[..., 1], np.zeros_like(numbers), numbers), axis=-1)


def _split(keys: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Split each key as `jax.random.split` does: uint32 [..., 2] -> uint32 [..., *shape, 2]."""
    numbers = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
    return _hash(keys.reshape(*keys.shape[:-1], *(1,) * len(shape), 2), numbers)


def _slice(params: Any, into: Any, x: np.ndarray) -> np.ndarray:
    steps = params["strides"] or (1,) * len(params["start_indices"])
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]


def _broadcast(params: Any, into: Any, x: np.ndarray, *sizes: np.ndarray) -> np.ndarray:
    widened = [1] * len(into.shape)
    for dim, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        widened[dim] = size
    return np.broadcast_to(x.reshape(widened), into.shape)


def _transpose(params: Any, into: Any, x: np.ndarray) -> np.ndarray:
    order = params["permutation"]
    return x.transpose(*order, *range(len(order), x.ndim))


def _convert(params: Any, into: Any, x: np.ndarray) -> np.ndarray:
    return x.astype(into.dtype)


def _copy(params: Any, into: Any, x: np.ndarray) -> np.ndarray:
    return x


def _words(value: Any) -> np.ndarray:
    """A constant of a program, which is a key where a model has one of its own, as NumPy holds it."""
    if isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated):
        raise CannotFollowError("a constant of which this process holds a part")
    if not _is_key(getattr(value, "dtype", None)):
        return np.asarray(value)
    if str(jax.random.key_impl(value)) not in _IMPLEMENTATIONS:
        raise CannotFollowError(f"keys of {jax.random.key_impl(value)}")
    return np.asarray(jax.random.key_data(value))


def _is_key(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


# Primitive -> (its parameters, its result as a shape, arguments) -> result. Keys are their words.
_RULES: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda params, into, x, y: np.add(x, y, dtype=into.dtype),
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _convert,
    "copy": _copy,
    "random_fold_in": lambda params, into, keys, numbers: _hash(keys, numbers),
    "random_split": lambda params, into, keys: _split(keys, params["shape"]),
    "random_unwrap": _copy,
    "random_wrap": _copy,
    "slice": _slice,
    "squeeze": lambda params, into, x: x.squeeze(params["dimensions"]),
    "transpose": _transpose,
}
