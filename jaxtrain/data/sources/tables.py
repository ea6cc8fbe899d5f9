"""Tables of numbers: files of rows (CSV, Parquet, Arrow, JSON lines), NumPy archives, and those of scikit-learn."""

import hashlib
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
# Columns in which pandas writes the numbers of the rows: they tell the class of a row in a table sorted by class.
_INDEX = re.compile(r"|__index_level_\d+__")
# What pandas calls a column without a name, such as one with the numbers of the rows that it reads.
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

    `are_classes` is whether the targets are classes, or None if the source leaves that open. `columns` are the names
    of the inputs, or None if they have none.
    """

    label: str
    inputs: np.ndarray
    targets: np.ndarray
    are_classes: bool | None = None
    columns: tuple[str, ...] | None = None


def open_table(config: TableData, *, task: str | None = None, reading: Mapping[str, Any] | None = None) -> Data:
    """Reads a table; `reading` holds the scales and class names of the table that a model was trained on.

    The task of the run decides about `data.task=None` only if it is "regression": integers that could be classes are
    then numbers. Under "classification", which shipped configs set, the values decide.

    Returns:
        Rows of inputs float32 [D], and targets int32 [] for classes or float32 [K] for numbers.
    """
    if reading is not None and reading.get("kind") != "table":
        reading = None
    table = _read(config, task=task, reading=reading)
    names: list[str] | None = None
    offset: dict[str, list[float]] = {}
    if _are_classes(table, config, task, reading):
        known = None if reading is None else reading["classes"]
        targets, names = _number_classes(table.targets, table.label, known=known)
    else:
        values = table.targets.astype(np.float64).reshape(len(table.targets), -1)
        values, offset = without_offset(values, reading, label=table.label)
        targets = _as_float32(values, f"{table.label} target")
    sides = split_examples(len(targets), validation_fraction=config.validation_fraction, label=table.label)
    train, _ = sides
    # Mean and standard deviation [D] of the inputs and [K] of the numbers to predict, over the training rows. The
    # numbers themselves stay in the units of the table.
    scales: dict[str, Any] = dict.fromkeys(("mean", "deviation", "target_mean", "target_deviation"))
    if reading is not None:
        scales = {key: reading.get(key) for key in scales}
    elif config.standardize:
        mean, deviation = _moments(table.inputs[train])
        scales["mean"] = mean.tolist()
        # A constant column holds no information: it becomes 0.
        scales["deviation"] = np.where(deviation == 0, 1.0, deviation).tolist()
        if names is None:
            mean, deviation = _moments(targets[train].astype(np.float64))
            scales["target_mean"] = (mean + offset.get("target_offset", 0.0)).tolist()
            scales["target_deviation"] = deviation.tolist()
    if scales["mean"] is None:
        check_differences(table.inputs, f"{table.label} input")
    inputs = scaled_like(scales, table.inputs, label=table.label)
    num_outputs = targets.shape[1] if names is None else len(names)
    kind = f"regression of {num_outputs} column{'s' if num_outputs > 1 else ''}"
    if names is not None:
        kind = f"classification into {num_outputs} classes ({few(names)})"
    columns = [{"inputs": inputs[side], "targets": targets[side]} for side in sides]
    return example_data(
        *map(ArrayRows, columns),
        identity={
            "kind": "table",
            "content_sha256": hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest(),
            "standardize": config.standardize,
            # What a model's outputs are scaled by.
            **{key: scales[key] for key in ("target_mean", "target_deviation") if scales[key] is not None},
        },
        description=(f"{table.label}: {inputs.shape[1]} input columns, {kind}",),
        num_outputs=num_outputs,
        input_shape=(inputs.shape[1],),
        reading={
            "kind": "table",
            "classes": names,
            **scales,
            **offset,
            # Other files are read by these names, whatever the order of their columns is.
            "columns": None if table.columns is None else list(table.columns),
        },
    )


def scaled_like(scales: Mapping[str, Any], inputs: np.ndarray, *, label: str) -> np.ndarray:
    """Scales rows [N, D], in their own units, by `mean` and `deviation` of a `Data.reading`: float32 [N, D]."""
    if scales["mean"] is not None:
        _check_columns(label, inputs.shape[1], len(scales["mean"]))
        inputs = (inputs - np.array(scales["mean"])) / np.array(scales["deviation"])
    return _as_float32(inputs, f"{label} input")


def _check_columns(label: str, count: int, trained: int) -> None:
    if count != trained:
        raise DataError(f"{label} has {count} input columns, the run was trained on {trained}; give the same ones")


def _as_float32(values: np.ndarray, what: str) -> np.ndarray:
    bad = np.argwhere(~(np.abs(values) <= np.finfo(np.float32).max))
    if len(bad):
        row, column = bad[0].tolist()
        raise DataError(f"{what} is {values[row, column]:.6g} in row {row + 1}, beyond float32; rescale or remove it")
    return values.astype(np.float32)


def _moments(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation [D] of numbers [N, D]; of a constant column its value and 0."""
    # Rounding would move the mean of a constant column, and give it a deviation above 0.
    is_constant = np.ptp(numbers, axis=0) == 0
    mean = np.where(is_constant, numbers[0], numbers.mean(axis=0))
    return mean, np.where(is_constant, 0.0, numbers.std(axis=0))


def _read(config: TableData, *, task: str | None, reading: Mapping[str, Any] | None) -> _Table:
    if config.path.startswith(_BUILTIN):
        return _read_builtin(config.path.removeprefix(_BUILTIN))
    if config.path.lower().endswith(".npz"):
        return _read_npz(require_file(config.path, what="data.path"))
    if reading is None:
        return _read_rows(config, as_numbers=(config.task or task) == "regression", keeps_codes=False)
    if reading.get("columns"):
        config = config.model_copy(update={"columns": tuple(reading["columns"])})
    return _read_rows(config, as_numbers=reading["classes"] is None, keeps_codes=True)


def _are_classes(table: _Table, config: TableData, task: str | None, reading: Mapping[str, Any] | None) -> bool:
    """Returns whether targets are classes; a DataError if neither a setting nor the values decide."""
    if reading is not None:
        return reading["classes"] is not None
    if config.task is not None:
        return config.task == "classification"
    if table.are_classes is not None:
        return table.are_classes
    values = table.targets
    if task == "regression" or values.ndim > 1:
        return False
    if values.dtype.kind == "U":
        _check_not_mixed(table)
        return True
    if values.dtype.kind == "f" and not np.all(values == np.round(values)):
        return False
    distinct = len(np.unique(values))
    if distinct * _ROWS_PER_CLASS > len(values) or distinct > _MAX_CLASSES:
        return False
    if distinct <= _CERTAIN_CLASSES:
        return True
    raise DataError(
        f"{table.label} has {distinct} distinct integers as targets of {len(values)} rows, which could be quantities "
        f"or classes; {_SAY_TASK}"
    )


def _read_rows(config: TableData, *, as_numbers: bool, keeps_codes: bool) -> _Table:
    """Reads the columns of files of rows into memory.

    With `as_numbers` a target that is not a number is an error. With `keeps_codes` the texts 01 and 1 of a CSV file
    are different targets, as the classes that a model was trained on may be.
    """
    files = find_rows(config.path, what="data.path")
    target, names = _chosen_columns(config, files)
    classes = None if as_numbers else named_classes(files[0], target)
    key = "columns" if config.columns else None
    values = array("d")
    targets = []
    for where, row in pass_over_files(files, [*((key, name) for name in names), ("target", target)]):
        values.extend(number_of(row[name], where=where, column=name) for name in names)
        value = with_names(row[target], classes)
        if classes is not None and isinstance(value, int):
            raise wrong_value(value, "a class that the file names", where=where, column=target)
        targets.append(_target(value, where=where, column=target, as_numbers=as_numbers))
    if files[0].format == "csv" and not as_numbers and not keeps_codes:
        numbers = [number_in(text) for text in targets]
        if None not in numbers:
            targets = numbers
    inputs = np.array(values, np.float64).reshape(len(targets), len(names))
    if config.columns is None:
        row_numbers = np.arange(len(inputs))
        index = []
        for i, name in enumerate(names):
            if _UNNAMED.fullmatch(name) and np.array_equal(np.sort(inputs[:, i]), row_numbers):
                index.append(i)
        if index:
            add_note(f"{config.path}: {few([names[i] for i in index])} numbers the rows and is left out")
            inputs = np.delete(inputs, index, axis=1)
            names = np.delete(names, index).tolist()
    return _Table(config.path, inputs, _array(targets), columns=tuple(names))


def _chosen_columns(config: TableData, files: Sequence[DataFile]) -> tuple[str, list[str]]:
    """Returns the column to predict and the input columns."""
    header = list(next(pass_over_files(files, None))[1])
    file = str(files[0].path)
    _check_header(file, header, files[0].format, least=2)
    columns = [name for name in header if not _INDEX.fullmatch(name)]
    target = columns[-1]
    if config.target is not None:
        target = _find_column("target", config.target, file, header)
    if config.columns is not None:
        columns = [_find_column("columns", name, file, header) for name in config.columns]
        if target in columns:
            raise DataError(f"{file}: '{target}' is both an input and the target; set data.target or data.columns")
    return target, [name for name in columns if name != target]


def _find_column(key: str, name: str, file: str, header: Sequence[str]) -> str:
    """Returns the name of a column in the header, which has no spaces around it."""
    for column in (name, name.strip()):
        if column in header:
            return column
    raise missing_column(file, key, name.strip(), header)


def _check_header(file: str, header: Sequence[str], format: str, *, least: int) -> None:
    if len(header) < least or (format == "csv" and all(number_in(name) is not None for name in header)):
        raise DataError(f"{file}:1 holds {few(header)}; the first line must name the columns, at least {least}")


def _target(value: Any, *, where: str, column: str, as_numbers: bool) -> float | str:
    """Returns a target as a text without spaces around it, or as a number, an int if it is an integer."""
    if isinstance(value, str):
        if not as_numbers and value.strip().lower() not in ("", "nan"):
            return plain_name(value)
        number = number_in(value)
    else:
        number = exact_number(value)
    if number is None:
        wanted = "a number (or a class: task=classification and data.task=classification)"
        raise wrong_value(value, wanted, where=where, column=column)
    return number


def _array(values: Sequence[Any]) -> np.ndarray:
    """Returns targets as an array [N], of texts if any is a text.

    Integers are int64 (Python's int beyond it), so that no two become equal; numbers are float64 otherwise.
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
    """Raises a DataError if texts would be quantities, all of them or without a few, such as NA."""
    texts = table.targets.tolist()
    values = [number_in(text) for text in texts]
    numbers = [value for value in values if value is not None]
    if 2 * len(numbers) <= len(texts) or len(set(numbers)) * _ROWS_PER_CLASS <= len(numbers):
        return
    if len(numbers) == len(texts):
        raise DataError(f"{table.label} has numbers as targets, written as texts; {_SAY_TASK}")
    raise DataError(
        f"{table.label} has {len(numbers):,} numbers among {len(texts):,} targets, beside "
        f"{texts[values.index(None)]!r}; fix or remove the row, or {_SAY_TASK}"
    )


def _number_classes(values: np.ndarray, label: str, *, known: Sequence[str] | None) -> tuple[np.ndarray, list[str]]:
    """Returns the number of each class, int32 [N], and the names of the classes: `known`, or those of the table."""
    distinct, classes = np.unique(values, return_inverse=True)
    if values.ndim != 1 or len(distinct) > _MAX_CLASSES:
        raise DataError(
            f"{label} has targets {list(values.shape)} of {len(distinct)} values, not classes (one column, at "
            f"most {_MAX_CLASSES}); set data.target, or task=regression and data.task=regression"
        )
    names = [str(value) for value in distinct]
    if distinct.dtype.kind == "f":
        names = [name.removesuffix(".0") for name in names]
    if known is None:
        check_classes(names, label=label)
        return classes.astype(np.int32), names
    numbers = {name: number for number, name in enumerate(known)}
    # A code that is written differently (01) is the class of the same number.
    class_numbers = [numbers.get(name, numbers.get(str(number_in(name)))) for name in names]
    if None in class_numbers:
        raise DataError(
            f"{label} has class '{names[class_numbers.index(None)]}', which the run was not trained on (its classes: "
            f"{few(known)}); remove these rows or rename the class"
        )
    return np.array(class_numbers, np.int32)[classes], list(known)


def _read_builtin(name: str) -> _Table:
    # Name -> whether the targets are classes: those of diabetes are integers, but quantities.
    tables = {"breast_cancer": True, "wine": True, "diabetes": False}
    if name not in tables:
        raise DataError(f"data.path builtin:{name} is unknown; known are {', '.join(_BUILTIN + key for key in tables)}")
    datasets = scikit_learn(f"data.path builtin:{name}")
    inputs, targets = getattr(datasets, f"load_{name}")(return_X_y=True)
    return _Table(f"scikit-learn {name}", inputs, targets, are_classes=tables[name])


def _read_npz(path: Path) -> _Table:
    with reading(path), path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    inputs = arrays.get("inputs", np.zeros(()))
    targets = arrays.get("targets", np.zeros(()))
    if inputs.ndim != 2 or targets.ndim not in (1, 2) or len(inputs) != len(targets):
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items()) or "nothing"
        raise DataError(f"{path} holds {shapes}; save inputs [rows, columns] and targets [rows] or [rows, columns]")
    for name, values in (("inputs", inputs), ("targets", targets)):
        bad = np.argwhere(~np.isfinite(values)).tolist() if values.dtype.kind == "f" else []
        if bad:
            raise DataError(f"{path} array '{name}' is {values[*bad[0]]} at {bad[0]}; remove or fill the row")
    # The author of the file chose the dtype: floats are numbers, and texts classes, but integers may be either.
    are_classes = None
    if targets.ndim > 1 or targets.dtype.kind not in "iu":
        are_classes = targets.dtype.kind in "bU"
    return _Table(str(path), inputs.astype(np.float64), targets, are_classes)


def read_input_columns(path: str, columns: Sequence[str] | None, *, num_columns: int, target: str | None) -> np.ndarray:
    """Reads the inputs of a model from a file without targets, in their own units: float64 [N, num_columns].

    `columns` are those that the model was trained on, in their order. None: they had no names, and the model takes all
    columns of the file except `target` in its order.
    """
    if columns is None:
        files = find_rows(path, what="the table")
        header = list(next(pass_over_files(files, None))[1])
        _check_header(path, header, files[0].format, least=1)
        columns = [name for name in header if name != target]
        _check_columns(path, len(columns), num_columns)
    rows = []
    for record in read_records(path, [(None, name) for name in columns], what="the table"):
        values = zip(columns, record.values, strict=True)
        rows.append([number_of(value, where=record.where, column=name) for name, value in values])
    return np.array(rows, np.float64)
