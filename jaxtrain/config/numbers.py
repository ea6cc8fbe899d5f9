"""The bounded numbers that settings share, each with a least and a largest value. No jax here.

The bounds leave out what no computer trains: a wrong exponent is one line, and not a hang or an error of a library.
"""

from typing import Annotated

from pydantic import AfterValidator, Field

# Below it, numbers of float32 lose digits and then are 0, on some devices at once.
_SMALLEST_NORMAL = 2.0**-126
# Above it, float32 rounds to 1.
_LARGEST_BELOW_ONE = 1 - 2.0**-25


def _survives_float32(value: float) -> float:
    """Returns a number as it is.

    Raises:
        ValueError: The step computes in float32, where the number would be 0 or 1.
    """
    if 0 < abs(value) < _SMALLEST_NORMAL:
        raise ValueError(f"{value:g} would be 0 in float32; use at least 1.2e-38")
    if _LARGEST_BELOW_ONE < value < 1:
        raise ValueError(f"{value!r} would be 1 in float32; use at most 0.9999999")
    return value


_In32 = AfterValidator(_survives_float32)

PositiveInt = Annotated[int, Field(gt=0, le=10**9)]
"""Steps, rows, intervals."""
StepCount = Annotated[int, Field(ge=0, le=10**9)]
Layers = Annotated[int, Field(gt=0, le=10_000)]
Width = Annotated[int, Field(gt=0, le=2**20)]
"""Of a layer, in numbers; also columns of a table."""
Units = Annotated[int, Field(gt=0, le=2**16)]
"""Heads, experts, ranks, channels, and sides of images in pixels."""
Length = Annotated[int, Field(gt=0, le=2**24)]
"""Of a sequence, in tokens."""
Rows = Annotated[int, Field(gt=0, le=2**24)]
"""Of a batch, and of data that is made up."""
Ids = Annotated[int, Field(gt=0, le=2**24)]
"""Tokens of a vocabulary, classes."""
TokenId = Annotated[int, Field(ge=0, lt=2**24)]

Fraction = Annotated[float, Field(ge=0, lt=1), _In32]
Share = Annotated[float, Field(ge=0, le=1), _In32]
PositiveFloat = Annotated[float, Field(gt=0, le=1e30), _In32]
Finite = Annotated[float, Field(ge=-1e30, le=1e30), _In32]
NonNegative = Annotated[float, Field(ge=0, le=1e30), _In32]
Scale = Annotated[float, Field(gt=0, le=1e6), _In32]
"""Factors, learning rates, weights of a sum."""
Weight = Annotated[float, Field(ge=0, le=1e6), _In32]
PositiveShare = Annotated[float, Field(gt=0, le=1), _In32]
Epsilon = PositiveShare
"""Added to a divisor."""
