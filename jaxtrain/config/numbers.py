"""The bounded numbers that settings share. No jax here."""

from typing import Annotated

from pydantic import Field

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0)]
StepCount = Annotated[int, Field(ge=0)]
