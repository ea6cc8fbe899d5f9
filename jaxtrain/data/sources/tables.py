"""Tables of numbers: files of rows (CSV, Parquet, Arrow, JSON lines), NumPy archives, and those of scikit-learn."""

import hashlib
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.data import TableData
from jaxtrain.data.dataset import Data, example_data
from jaxtrain.data.files import add_note, few, reading, require_file
from jaxtrain.data.formats.arrow import with_names
from jaxtrain.data.formats.open import (
    DataFile,
    check_classes,
    exact_number,
    find_rows,
    named_classes,
    number_in,
    number_of,
    pass_over_files,
    plain_name,
    read_records,
    wrong_value,
)
from jaxtrain.data.formats.reader import missing_column
from jaxtrain.data.permutation import split_examples
from jaxtrain.data.rows import ArrayRows, check_differences, without_offset
from jaxtrain.data.sources.builtin import scikit_learn
from jaxtrain.errors import DataError

_BUILTIN = "builtin:"
# What pandas writes of the numbers of its rows, by which a table in the order of its classes is learned by heart.
_INDEX = re.compile(r"|__index_level_\d+__")
# What pandas calls a column without a name, such as those numbers once they were read again.
_UNNAMED = re.compile(r"Unnamed: \d+(\.\d+)*")
_MAX_CLASSES = 1000
# A column of integers holds classes where it has few distinct values with several rows each, and quantities where most
# rows have a value of their own; in between (ages, years, labels of 100 classes) only the user knows.
_CERTAIN_CLASSES = 20
_ROWS_PER_CLASS = 2
_SAY_TASK = "set task=regression and data.task=regression, or task=classification and data.task=classification"


@dataclass(frozen=True)
class _Table:
    """A table as it was read: `inputs` float64 [N, D], `targets` texts or numbers, [N] or [N, K].

    `are_classes`: whether the targets are; None: their values decide. `columns` name the inputs, where the file does.
    """

    label: str
    inputs: np.ndarray
    targets: np.ndarray
    are_classes: bool | None
    columns: tuple[str, ...] | None = None


def open_table(config: TableData, *, task: str | None = None, reading: Mapping[str, Any] | None = None) -> Data:
    """Reads a table; `reading` has the scales and class names of the rows that a model was trained on.

    Under the task "regression", integers that could be classes are numbers; under "classification", which shipped
    configs set, the values decide.

    Returns:
        Rows of inputs float32 [D], and targets int32 [] for classes or float32 [K] for numbers.
    """
    reading = reading if reading is not None and reading.get("kind") == "table" else None
    table = _read(config, task=task, reading=reading)
    targets, names, offset = _targets(table, reading=reading)
    sides = split_examples(len(targets), validation_fraction=config.validation_fraction, label=table.label)
    train = sides[0]
    mean = deviation = None
    units: tuple[Any, Any] = (None, None)
    if reading is not None:
        mean, deviation = reading["mean"], reading["deviation"]
        units = (reading.get("target_mean"), reading.get("target_deviation"))
    elif config.standardize:
        mean, deviation = (each.tolist() for each in _moments(table.inputs[train]))
        # A constant column becomes 0, because it holds no information.
        deviation = [each or 1.0 for each in deviation]
        if names is None:
            center, spread = _moments(targets[train].astype(np.float64))
            units = ((center + offset.get("target_offset", 0.0)).tolist(), spread.tolist())
    if mean is None:
        check_differences(table.inputs, f"{table.label} input")
    inputs = _scaled(table.inputs, mean, deviation, label=table.label)
    if names is None:
        num_outputs = targets.shape[1]
        kind = f"regression of {num_outputs} column{'s' if num_outputs > 1 else ''}"
    else:
        num_outputs = len(names)
        kind = f"classification into {num_outputs} classes ({few(names)})"
    columns = [{"inputs": inputs[side], "targets": targets[side]} for side in sides]
    return example_data(
        *map(ArrayRows, columns),
        identity={
            "kind": "table",
            "content_sha256": hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest(),
            "standardize": config.standardize,
            # What a model's outputs are scaled by.
            **({} if units[0] is None else {"target_mean": units[0], "target_deviation": units[1]}),
        },
        description=(f"{table.label}: {inputs.shape[1]} input columns, {kind}",),
        num_outputs=num_outputs,
        input_shape=(inputs.shape[1],),
        reading={
            "kind": "table",
            "classes": names,
            "mean": mean,
            "deviation": deviation,
            # Of the numbers to predict, over the training rows; their units stay those of the table.
            "target_mean": units[0],
            "target_deviation": units[1],
            **offset,
            # By which other files are read, whatever the order of their columns is.
            "columns": None if table.columns is None else list(table.columns),
        },
    )


def scaled_like(reading: Mapping[str, Any], inputs: np.ndarray, *, label: str) -> np.ndarray:
    """Scales rows [N, D], in their own units, as those of the table whose `Data.reading` is given: float32 [N, D]."""
    return _scaled(inputs.astype(np.float64), reading["mean"], reading["deviation"], label=label)


def _scaled(inputs: np.ndarray, mean: Any, deviation: Any, *, label: str) -> np.ndarray:
    if mean is not None:
        _check_columns(label, inputs.shape[1], len(mean))
        inputs = (inputs - np.array(mean)) / np.array(deviation)
    return _as_float32(inputs, f"{label} input")


def _check_columns(label: str, found: int, trained: int) -> None:
    if found != trained:
        raise DataError(f"{label} has {found} input columns, the run was trained on {trained}; give the same ones")


def _as_float32(values: np.ndarray, what: str) -> np.ndarray:
    bad = np.argwhere(~(np.abs(values) <= np.finfo(np.float32).max))
    if len(bad):
        row, column = bad[0].tolist()
        raise DataError(f"{what} is {values[row, column]:.6g} in row {row + 1}, beyond float32; rescale or remove it")
    return values.astype(np.float32)


def _moments(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation [D] of numbers [N, D]; of a constant column its value and 0."""
    # Rounding would give it a mean beside its value and a deviation above 0.
    lowest, is_constant = numbers.min(axis=0), np.ptp(numbers, axis=0) == 0
    return np.where(is_constant, lowest, numbers.mean(axis=0)), np.where(is_constant, 0.0, numbers.std(axis=0))


def _read(config: TableData, *, task: str | None, reading: Mapping[str, Any] | None) -> _Table:
    if config.path.startswith(_BUILTIN):
        table = _read_builtin(config.path.removeprefix(_BUILTIN))
    elif config.path.lower().endswith(".npz"):
        table = _read_npz(require_file(config.path, what="data.path"))
    else:
        chosen = config.task or task
        if reading is not None and reading.get("columns"):
            config = config.model_copy(update={"columns": tuple(reading["columns"])})
        # Where numbers are wanted, a text is a bad row.
        as_numbers = chosen == "regression" if reading is None else reading["classes"] is None
        table = _read_rows(config, as_numbers=as_numbers, keeps_codes=reading is not None)
        if reading is None and config.task is None and table.targets.dtype.kind == "U":
            _check_not_mixed(table)
    if reading is not None:
        return replace(table, are_classes=reading["classes"] is not None)
    if config.task is not None:
        return replace(table, are_classes=config.task == "classification")
    return replace(table, are_classes=False) if task == "regression" and table.are_classes is None else table


def _read_rows(config: TableData, *, as_numbers: bool, keeps_codes: bool) -> _Table:
    """Reads the columns of files of rows into memory.

    With `as_numbers` a target that is no number is an error; with `keeps_codes` 01 and 1 of a CSV file stay apart, for
    classes that a model was trained on.
    """
    files = find_rows(config.path, what="data.path")
    target, names = _chosen_columns(config, files)
    classes = None if as_numbers else named_classes(files[0], target)
    wanted = [*(("columns" if config.columns else None, name) for name in names), ("target", target)]
    values, targets = array("d"), []
    for where, row in pass_over_files(files, wanted):
        values.extend(number_of(row[name], where=where, column=name) for name in names)
        value = with_names(row[target], classes)
        if classes is not None and isinstance(value, int):
            raise wrong_value(value, "a class that the file names", where=where, column=target)
        targets.append(_target(value, where=where, column=target, as_numbers=as_numbers))
    if files[0].format == "csv" and not (as_numbers or keeps_codes):
        found = [number_in(text) for text in targets]
        targets = targets if None in found else found  # a column of numbers alone: 01 is 1
    inputs = np.array(values, np.float64).reshape(len(targets), len(names))
    numbers = np.arange(len(inputs))
    index = [
        name
        for name, column in zip(names, inputs.T, strict=True)
        if _UNNAMED.fullmatch(name) and np.array_equal(np.sort(column), numbers)
    ]
    if index and config.columns is None:
        add_note(f"{config.path}: {few(index)} numbers the rows and is left out")
        inputs = inputs[:, [name not in index for name in names]]
        names = tuple(name for name in names if name not in index)
    return _Table(config.path, inputs, _array(targets), None, names)


def _chosen_columns(config: TableData, files: Sequence[DataFile]) -> tuple[str, tuple[str, ...]]:
    """Returns the column to predict and the input columns."""
    there, file = list(next(pass_over_files(files, None))[1]), str(files[0].path)
    _check_header(file, there, files[0].format, least=2)
    usual = [name for name in there if not _INDEX.fullmatch(name)]
    target = usual[-1] if config.target is None else _named(config.target, there)
    if config.columns is None:
        columns = tuple(name for name in usual if name != target)
    else:
        columns = tuple(_named(name, there) for name in config.columns)
    for key, name in [("target", target), *(("columns", name) for name in columns)]:
        if name not in there:
            raise missing_column(file, key, name, there)
    if target in columns:
        raise DataError(f"{file}: '{target}' is both an input and the target; set data.target or data.columns")
    return target, columns


def _check_header(file: str, there: Sequence[str], format: str, *, least: int) -> None:
    if len(there) < least or (format == "csv" and all(number_in(name) is not None for name in there)):
        raise DataError(f"{file}:1 holds {few(there)}; the first line must name the columns, at least {least}")


def _named(name: str, there: Sequence[str]) -> str:
    return name if name in there else name.strip()


def _target(value: Any, *, where: str, column: str, as_numbers: bool) -> float | str:
    """Returns a target: a text without spaces around it, or a number, whole ones as int."""
    is_text = isinstance(value, str) and value.strip().lower() not in ("", "nan")
    number = number_in(value) if isinstance(value, str) else exact_number(value)
    if is_text and not as_numbers:
        return plain_name(value)
    if number is not None:
        return number
    wanted = "a number (or a class: task=classification and data.task=classification)"
    raise wrong_value(value, wanted, where=where, column=column)


def _array(values: Sequence[Any]) -> np.ndarray:
    """Returns targets as an array [N]; beside a text, a number is the class of its text.

    Numbers are int64 (beyond it Python's int) where all are whole, so that no two become one, and float64 otherwise.
    """
    if any(isinstance(value, str) for value in values):
        return np.array([str(value) for value in values])
    if not all(isinstance(value, int) for value in values):
        return np.array(values, np.float64)
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array(values, object)


def _check_not_mixed(table: _Table) -> None:
    """Raises a DataError where most targets are numbers that would be quantities but for a few texts, such as NA."""
    numbers = [number for text in table.targets.tolist() if (number := number_in(text)) is not None]
    if 2 * len(numbers) <= len(table.targets) or len(set(numbers)) * _ROWS_PER_CLASS <= len(numbers):
        return
    first = next(text for text in table.targets.tolist() if number_in(text) is None)
    raise DataError(
        f"{table.label} has {len(numbers):,} numbers among {len(table.targets):,} targets, beside {first!r}; fix or "
        f"remove the row, or {_SAY_TASK}"
    )


def _targets(
    table: _Table, *, reading: Mapping[str, Any] | None
) -> tuple[np.ndarray, list[str] | None, dict[str, list[float]]]:
    """Returns int32 [N] and the names of the classes, or float32 [N, K], None and what was subtracted from them."""
    values = table.targets
    are_classes = table.are_classes
    if are_classes is None:
        are_classes = values.ndim == 1 and (values.dtype.kind == "U" or _are_class_numbers(values, table.label))
    if are_classes:
        known = None if reading is None else reading["classes"]
        return *_numbered_classes(values, table.label, known=known), {}
    columns = values.astype(np.float64).reshape(len(values), -1)
    columns, offset = without_offset(columns, reading, label=table.label)
    return _as_float32(columns, f"{table.label} target"), None, offset


def _are_class_numbers(values: np.ndarray, label: str) -> bool:
    """Returns whether numeric targets [N] are classes; a DataError where they could be quantities as well."""
    if values.dtype.kind == "f" and not np.all(values == np.round(values)):
        return False
    distinct = len(np.unique(values))
    if distinct * _ROWS_PER_CLASS > len(values) or distinct > _MAX_CLASSES:
        return False
    if distinct <= _CERTAIN_CLASSES:
        return True
    raise DataError(
        f"{label} has {distinct} distinct integers as targets of {len(values)} rows, which could be quantities or "
        f"classes; {_SAY_TASK}"
    )


def _numbered_classes(values: np.ndarray, label: str, *, known: Sequence[str] | None) -> tuple[np.ndarray, list[str]]:
    """Returns the number of each class, int32 [N], and the names of the classes: `known`, or those of the table."""
    distinct, classes = np.unique(values, return_inverse=True)
    if values.ndim != 1 or len(distinct) > _MAX_CLASSES:
        raise DataError(
            f"{label} has targets {list(values.shape)} of {len(distinct)} values, not classes (one column, at "
            f"most {_MAX_CLASSES}); set data.target, or task=regression and data.task=regression"
        )
    names = [
        str(int(value)) if distinct.dtype.kind == "f" and value == int(value) else str(value) for value in distinct
    ]
    if known is None:
        check_classes(names, label=label)
        return classes.astype(np.int32), names
    numbers = {name: number for number, name in enumerate(known)}
    # Of a code that is not written so, the class of the same number.
    found = [numbers.get(name, numbers.get(str(number_in(name)))) for name in names]
    if None in found:
        raise DataError(
            f"{label} has class '{names[found.index(None)]}', which the run was not trained on (its classes: "
            f"{few(known)}); remove these rows or rename the class"
        )
    return np.array(found, np.int32)[classes], list(known)


def _read_builtin(name: str) -> _Table:
    # Name -> whether the targets are classes: those of diabetes are integers, but quantities.
    known = {"breast_cancer": True, "wine": True, "diabetes": False}
    if name not in known:
        raise DataError(f"data.path builtin:{name} is unknown; known are {', '.join(_BUILTIN + k for k in known)}")
    datasets = scikit_learn(f"data.path builtin:{name}")
    inputs, targets = getattr(datasets, f"load_{name}")(return_X_y=True)
    return _Table(f"scikit-learn {name}", inputs, targets, are_classes=known[name])


def _read_npz(path: Path) -> _Table:
    with reading(path), path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    inputs, targets = (arrays.get(name, np.zeros(())) for name in ("inputs", "targets"))
    if inputs.ndim != 2 or targets.ndim not in (1, 2) or len(inputs) != len(targets):
        shown = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items()) or "nothing"
        raise DataError(f"{path} holds {shown}; save inputs [rows, columns] and targets [rows] or [rows, columns]")
    for name, values in (("inputs", inputs), ("targets", targets)):
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            place = tuple(np.argwhere(~np.isfinite(values))[0].tolist())
            raise DataError(f"{path} array '{name}' is {values[place]} at {list(place)}; remove or fill the row")
    # The author of the file chose the dtype of the targets: floats are numbers, integers may be classes.
    are_classes = None if targets.dtype.kind in "iu" and targets.ndim == 1 else targets.dtype.kind in "bU"
    return _Table(str(path), inputs.astype(np.float64), targets, are_classes=are_classes)


def read_input_columns(path: str, columns: Sequence[str] | None, *, num_columns: int, target: str | None) -> np.ndarray:
    """Reads the columns that a model takes, in their own units, of a file without targets: float64 [N, num_columns].

    `columns` are those that the model was trained on, in their order; None: they had no names, and all columns of the
    file but `target` are taken in its order.
    """
    if columns is None:
        files = find_rows(path, what="the table")
        there = list(next(pass_over_files(files, None))[1])
        _check_header(path, there, files[0].format, least=1)
        columns = [name for name in there if name != target]
        _check_columns(path, len(columns), num_columns)
    records = read_records(path, [(None, name) for name in columns], what="the table")
    values = [
        [number_of(value, where=one.where, column=name) for name, value in zip(columns, one.values, strict=True)]
        for one in records
    ]
    return np.array(values, np.float64)
