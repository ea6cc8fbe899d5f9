"""Initial values in exact arithmetic, so that they have the same bits on every mesh, compiler and backend.

The usual normal draw ends in a polynomial (the inverse error function) that compilers fuse differently for different
shapes of a shard: on jax 0.12, kernels in four shards differed in the last bit. Integers do not round.

On CPU, compiling the program that draws costs more than the draws (docs/benchmarks.md, "The first step of ResNets"):
`follow` evaluates it on the host. NumPy follows its equations, and one compiled function draws blocks of one size, with
the bits of the compiled program. Sums of floats are not followed: XLA rounds them otherwise.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Initializer = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]
INIT_STDDEV = 0.02
"""Of the kernels of transformers: GPT-2, Radford et al. 2019."""

WORDS = 4  # of 32 random bits, each two 16-bit integers
MEAN = WORDS * (2**16 - 1)
_STDDEV = math.sqrt(2 * WORDS * (2**32 - 1) / 12)
# Threefry-2x32 with 20 rounds: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_GROUPS = 5  # of four rounds
# Numbers per call of the compiled function. A small parameter takes a whole call, about a millisecond.
_BLOCK = 2**18
_CALLS = ("pjit", "jit")
_DRAWS = "jaxtrain_exact_normal"
_THREEFRY = "threefry2x32"  # keys that are followed


def normal(stddev: float) -> Initializer:
    """Make an initializer whose draws are close to normal: sums of eight 16-bit uniform integers, scaled once.

    By the central limit theorem (Irwin-Hall distribution) the draws have mean 0, exactly this variance and kurtosis
    2.85 (a normal distribution has 3), and none is beyond 4.9 standard deviations. The sum is below 2^24, so that
    float32 holds it exactly and the one multiplication is the only rounding.
    """

    def initialize(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return jaxtrain_exact_normal(key, jnp.float32(stddev / _STDDEV), shape=shape).astype(dtype)

    return initialize


@functools.partial(jax.jit, static_argnames="shape")
def jaxtrain_exact_normal(key: jax.Array, scale: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    """Draw centred sums of eight 16-bit uniform integers, times a scale; `follow` finds this function by its name."""

    def add(total: jax.Array, word_key: jax.Array) -> tuple[jax.Array, None]:
        word = jax.random.bits(word_key, shape, jnp.uint32)
        return total + (word & 0xFFFF).astype(jnp.int32) + (word >> 16).astype(jnp.int32), None

    # A loop, because each random draw adds a long program to compile.
    total, _ = jax.lax.scan(add, jnp.full(shape, -MEAN, jnp.int32), jax.random.split(key, WORDS))
    return total.astype(jnp.float32) * scale


def fan_in_normal(gain: float) -> Initializer:
    """Make `normal` with the variance gain / fan-in, where all dims except the last are inputs.

    Source: He et al. 2015, with gain 2 before a ReLU.
    """

    def initialize(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return normal(math.sqrt(gain / math.prod(shape[:-1])))(key, shape, dtype)

    return initialize


def threefry(first: Any, second: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """Hash pairs of words by pairs of words, uint32 arrays of jax or of NumPy whose shapes broadcast."""
    words = [first, second, first ^ second ^ np.uint32(_PARITY)]
    left, right = left + words[0], right + words[1]
    for group in range(_GROUPS):
        for rotation in _ROTATIONS[group % 2]:
            left = left + right
            right = ((right << np.uint32(rotation)) | (right >> np.uint32(32 - rotation))) ^ left
        left = left + words[(group + 1) % 3]
        right = right + words[(group + 2) % 3] + np.uint32(group + 1)
    return left, right


def can_draw(key: jax.Array) -> bool:
    """Whether the numbers that follow from a typed key are known here: those of threefry keys."""
    # Attributes of jax.config are made at run time.
    partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    return str(jax.random.key_impl(key)) == _THREEFRY and partitionable


class CannotFollowError(Exception):
    """A program has an equation that is not followed on the host."""


def follow(traced: Any, key: jax.Array) -> list[np.ndarray]:
    """Evaluate a traced function of a key; in place of keys it gives their words, uint32 [..., 2]."""
    # Wrapping around is what unsigned integers are for; NumPy warns of it for single numbers.
    with np.errstate(over="ignore"):
        return _evaluate(traced, [np.asarray(jax.random.key_data(key))])


def _follows(equation: Any) -> bool:
    """Whether NumPy gives the bits of an equation's results."""
    name, params = equation.primitive.name, equation.params
    given, into = ([variable.aval.dtype for variable in some] for some in (equation.invars, equation.outvars))
    match name:
        case "add":
            return jnp.issubdtype(into[0], jnp.integer)
        case "convert_element_type":  # of other conversions, rounding and what does not fit may differ
            return given[0] in (np.float32, np.int32, np.uint32) and jnp.issubdtype(into[0], jnp.floating)
        case "broadcast_in_dim":
            return not _is_key(into[0])
        case "random_wrap":
            return params["impl"].name == _THREEFRY
        case _:
            return name in (*_CALLS, "unstack") or name in _RULES


def _evaluate(traced: Any, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    program = traced.jaxpr
    constants = [_words(value) for value in traced.consts]
    values = dict(zip((*program.constvars, *program.invars), (*constants, *arguments), strict=True))

    def value_of(variable: Any) -> np.ndarray:
        if not hasattr(variable, "val"):  # which only literals have
            return values[variable]
        return _words(variable.val) if _is_key(variable.aval.dtype) else np.asarray(variable.val, variable.aval.dtype)

    for equation in program.eqns:
        given = [value_of(variable) for variable in equation.invars]
        name, into = equation.primitive.name, [variable.aval for variable in equation.outvars]
        if not _follows(equation):
            raise CannotFollowError(name)
        if name in _CALLS and equation.params["name"] == _DRAWS:
            found = [_normal(given[0], given[1], into[0].shape)]
        elif name in _CALLS:
            found = _evaluate(equation.params["jaxpr"], given)
        elif name == "unstack":  # of jax 0.12: the words or keys of a split, one by one
            found = list(np.moveaxis(given[0], equation.params["axis"], 0))
        else:
            found = [_RULES[name](equation.params, into[0], *given)]
        values.update(zip(equation.outvars, found, strict=True))
    return [value_of(variable) for variable in program.outvars]


def _normal(keys: np.ndarray, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """What `jaxtrain_exact_normal` draws from keys uint32 [..., 2]: float32 [..., *shape of the draws]."""
    stacked = keys.shape[:-1]
    # Two dims of one size may be those of the keys in another order; numbers of elements have one word.
    along = shape[: len(stacked)] == stacked and len(set(stacked)) == len(stacked) and not scale.shape
    if not along or math.prod(shape[len(stacked) :]) >= 2**32:
        raise CannotFollowError("draws that are not along the leading dims of a stack")
    drawn = np.empty((math.prod(stacked), math.prod(shape[len(stacked) :])), np.float32)
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


def _words(value: Any) -> np.ndarray:
    """A constant of a program as NumPy holds it: of a key, its words."""
    here = not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated
    is_key = _is_key(getattr(value, "dtype", None))
    if not here or (is_key and str(jax.random.key_impl(value)) != _THREEFRY):
        raise CannotFollowError("a constant that is not whole here, or keys of another kind")
    return np.asarray(jax.random.key_data(value) if is_key else value)


def _is_key(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


# Primitive -> (its parameters, its result as a shape, arguments) -> result. Keys are their words.
_RULES: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda params, into, x, y: np.add(x, y, dtype=into.dtype),
    "broadcast_in_dim": _broadcast,
    "convert_element_type": lambda params, into, x: x.astype(into.dtype),
    "copy": lambda params, into, x: x,
    "random_fold_in": lambda params, into, keys, numbers: _hash(keys, numbers),
    "random_split": lambda params, into, keys: _split(keys, params["shape"]),
    "random_unwrap": lambda params, into, x: x,
    "random_wrap": lambda params, into, x: x,
    "slice": _slice,
    "squeeze": lambda params, into, x: x.squeeze(params["dimensions"]),
    "transpose": _transpose,
}
