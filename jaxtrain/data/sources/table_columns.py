"""Which columns of a table are asked for, and what readers of its formats return."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.errors import DataError


@dataclass(frozen=True)
class AskedColumns:
    """What is read of a table.

    Attributes:
        target: Column to predict; None: the last one.
        columns: Those that are inputs; None: all others.
        as_numbers: Whether the targets are numbers, so that a text is a bad row.
        are_known: Whether a model was trained on the columns of such a table.
        classes: Names of the classes that a model was trained on; None: those of the file, or there are none.
    """

    target: str | None
    columns: Sequence[str] | None
    as_numbers: bool = False
    are_known: bool = False
    classes: Sequence[str] | None = None


@dataclass(frozen=True)
class FirstText:
    """The first target of a file that is no number.

    Attributes:
        where: File, line and column, for messages.
        value: The text.
    """

    where: str
    value: str


@dataclass(frozen=True)
class TableRows:
    """The rows of a table that are not left out.

    Attributes:
        inputs: float64 [N, D].
        targets: Numbers, whole ones as int, or texts (N).
        columns: Names of the input columns.
        numbers: Number of each row in the file, from 0: int64 [N].
        target_numbers: The targets that are numbers, or that a .csv file writes as numbers.
        first_text: The first target that is a text; None: all are numbers.
    """

    inputs: np.ndarray
    targets: Sequence[float | str]
    columns: tuple[str, ...]
    numbers: np.ndarray
    target_numbers: Sequence[float]
    first_text: FirstText | None


def input_columns(there: Sequence[str], target: str, columns: Sequence[str] | None, *, where: str) -> tuple[str, ...]:
    """Returns the columns of a table that are inputs.

    Args:
        there: All columns.
        target: The one to predict.
        columns: Those that the user chose; None: all but the target.
        where: The file, for messages.

    Raises:
        DataError: One is missing, is the target, or was chosen twice.
    """
    for number, name in enumerate(columns or ()):
        if name not in there:
            raise DataError(f"{where} has no column '{name}' (it has: {', '.join(there)}); set data.columns to some")
        if name == target or name in (columns or ())[:number]:
            why = "is the target" if name == target else "stands there twice"
            raise DataError(f"data.columns names '{name}', which {why}; leave it out")
    return tuple(name for name in there if name != target) if columns is None else tuple(columns)
