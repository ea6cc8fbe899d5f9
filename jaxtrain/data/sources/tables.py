"""Tables from CSV files with a header, from NumPy archives, and from scikit-learn."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.data import TableData
from jaxtrain.data.archives import check_archive
from jaxtrain.data.files import COMPRESSED_SUFFIXES, check_is_text, require_file
from jaxtrain.data.permutation import split_examples
from jaxtrain.data.rows import ArrayRows, Examples, matching_reading
from jaxtrain.data.skipped import SkippedRecords, skipped_records
from jaxtrain.data.sources.table_columns import AskedColumns, TableRows
from jaxtrain.data.sources.table_csv import read_csv
from jaxtrain.data.sources.table_records import read_table_rows
from jaxtrain.data.sources.table_targets import (
    are_class_numbers,
    are_wanted_as_numbers,
    check_not_mixed,
    numbered_classes,
    target_array,
)
from jaxtrain.data.text.records import row_files
from jaxtrain.errors import DataError

_BUILTIN = "builtin:"


@dataclass(frozen=True)
class _Table:
    """A table as it was read.

    Attributes:
        label: Name of the table in messages.
        inputs: float64 [N, D].
        targets: Texts or numbers, [N] or [N, K].
        are_classes: Whether the targets are classes; None: their values decide.
        columns: Names of the input columns; None: the file has none.
        numbers: Number of each row in the file, from 0; None: no row of it was skipped.
        skipped: Counts the rows that were; None: a bad row is an error.
    """

    label: str
    inputs: np.ndarray
    targets: np.ndarray
    are_classes: bool | None
    columns: tuple[str, ...] | None = None
    numbers: np.ndarray | None = None
    skipped: SkippedRecords | None = None


def open_table(config: TableData, *, task: str | None = None, reading: Mapping[str, Any] | None = None) -> Examples:
    """Reads a table.

    Args:
        config: Which table.
        task: The task of the run. Under "regression", integers that could be classes are numbers; under
            "classification", which shipped configs set, the values decide.
        reading: Scales and class names of the rows that a model was trained on; None: those of this table.

    Returns:
        Rows of inputs float32 [D], and targets int32 [] for classes or float32 [K] for numbers.

    Raises:
        DataError: The file is missing, or a row or value is wrong, which the message locates by file and line; or the
            table has columns or classes that `reading` does not have.
    """
    reading = matching_reading(reading, kind="table")
    table = _read(config, task=task, reading=reading)
    if reading is not None:
        table = replace(_in_order(table, reading.get("columns")), are_classes=reading["classes"] is not None)
    elif config.task is not None:
        table = replace(table, are_classes=config.task == "classification")
    elif task == "regression" and table.are_classes is None:
        table = replace(table, are_classes=False)
    if len(table.inputs) == 0:
        raise DataError(f"{table.label} has no rows; give a table with at least one")
    targets, names = _targets(table, known=None if reading is None else reading["classes"], is_new=reading is None)
    train, validation = split_examples(len(targets), validation_fraction=config.validation_fraction, label=table.label)
    inputs = table.inputs
    _check_float32(inputs, label=table.label, what="input")
    if reading is None:
        mean, deviation = _scales(inputs[train]) if config.standardize else (None, None)
    else:
        mean, deviation = _saved_scales(reading, inputs, label=table.label, standardize=config.standardize)
    if mean is not None:
        inputs = (inputs - mean) / deviation
        _check_float32(inputs, label=table.label, what="standardized input")
    inputs = inputs.astype(np.float32)
    units = (None, None)
    if names is None:
        if reading is not None:
            units = (reading.get("target_mean"), reading.get("target_deviation"))
        elif config.standardize:
            units = tuple(each.tolist() for each in _moments(targets[train].astype(np.float64)))
        num_outputs = targets.shape[1]
        task = f"regression of {num_outputs} column{'s' if num_outputs > 1 else ''}"
    else:
        num_outputs = len(names)
        task = f"classification into {num_outputs} classes ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
    return Examples(
        train=ArrayRows({"inputs": inputs[train], "targets": targets[train]}),
        validation=ArrayRows({"inputs": inputs[validation], "targets": targets[validation]})
        if len(validation)
        else None,
        num_outputs=num_outputs,
        input_shape=(inputs.shape[1],),
        identity={
            "kind": "table",
            "content_sha256": hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest(),
            "standardize": config.standardize,
            # What a model's outputs are scaled by.
            **({} if units[0] is None else {"target_mean": units[0], "target_deviation": units[1]}),
        },
        description=(f"{table.label}: {inputs.shape[1]} input columns, {task}",),
        reading={
            "kind": "table",
            "classes": names,
            "mean": None if mean is None else mean.tolist(),
            "deviation": None if deviation is None else deviation.tolist(),
            # Of the numbers to predict, over the training rows; their units stay those of the table.
            "target_mean": units[0],
            "target_deviation": units[1],
            # By which other files are read, whatever the order of their columns is.
            "columns": None if table.columns is None else list(table.columns),
        },
        skipped=table.skipped,
    )


def _in_order(table: _Table, columns: Sequence[str] | None) -> _Table:
    """Returns a table with its inputs in the order of the columns that a model was trained on.

    Raises:
        DataError: One of as many columns has another name, so that nothing says what the model would take for it.
    """
    if columns is None or table.columns is None or len(columns) != len(table.columns):
        return table
    for name in columns:
        if name not in table.columns:
            there = ", ".join(table.columns)
            raise DataError(
                f"{table.label} has no input column '{name}', which the run was trained on (it has: {there}); rename "
                "one, or set data.target and data.columns"
            )
    places = [table.columns.index(name) for name in columns]
    return replace(table, inputs=table.inputs[:, places], columns=tuple(columns))


def scaled_like(reading: Mapping[str, Any], inputs: np.ndarray, *, label: str) -> np.ndarray:
    """Scales rows as those of the table that a model was trained on.

    Args:
        reading: `Data.reading` of that table.
        inputs: Numbers [N, D], the columns in their own units.
        label: Name of the rows in messages.

    Returns:
        float32 [N, D].

    Raises:
        DataError: There are other columns, or a number beyond float32.
    """
    inputs = inputs.astype(np.float64)
    mean, deviation = _saved_scales(reading, inputs, label=label, standardize=reading["mean"] is not None)
    if mean is not None:
        inputs = (inputs - mean) / deviation
    _check_float32(inputs, label=label, what="input")
    return inputs.astype(np.float32)


def _check_float32(values: np.ndarray, *, label: str, what: str) -> None:
    """Raises a DataError where float64 values [N, D] are beyond the range of float32, the dtype of a row."""
    bad = np.argwhere(~(np.abs(values) <= np.finfo(np.float32).max))
    if len(bad):
        row, column = bad[0].tolist()
        raise DataError(
            f"{label} has {what} {values[row, column]:.6g} in row {row + 1}, column {column + 1} of the {what}s, "
            "beyond what float32 holds (3.4e38); rescale the column or remove the row"
        )


def _scales(inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation [D] of inputs [N, D]."""
    mean, deviation = _moments(inputs)
    # A constant column becomes 0, because it holds no information; the squares of tiny differences may underflow to 0.
    return mean, np.where(deviation == 0, 1.0, deviation)


def _moments(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation [D] of numbers [N, D]; of a constant column its value and 0."""
    # Rounding would give it a mean beside its value and a deviation above 0.
    lowest, is_constant = numbers.min(axis=0), np.ptp(numbers, axis=0) == 0
    return np.where(is_constant, lowest, numbers.mean(axis=0)), np.where(is_constant, 0.0, numbers.std(axis=0))


def _saved_scales(
    reading: Mapping[str, Any], inputs: np.ndarray, *, label: str, standardize: bool
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns mean and standard deviation [D] of a saved reading, or None twice where inputs are not scaled.

    Raises:
        DataError: The table has other columns than the reading, or `standardize` differs from it.
    """
    if standardize != (reading["mean"] is not None):
        given, saved = str(standardize).lower(), str(not standardize).lower()
        raise DataError(f"data.standardize={given} differs from the run, which has {saved}; leave it out")
    if not standardize:
        return None, None
    if len(reading["mean"]) != inputs.shape[1]:
        raise DataError(
            f"{label} has {inputs.shape[1]} input columns, the run was trained on {len(reading['mean'])}; give a table "
            "with the same columns"
        )
    return np.array(reading["mean"], np.float64), np.array(reading["deviation"], np.float64)


def _targets(table: _Table, *, known: Sequence[str] | None, is_new: bool) -> tuple[np.ndarray, list[str] | None]:
    """Returns int32 [N] and the names of the classes, or float32 [N, K] and None.

    Args:
        table: The table.
        known: Names of the classes in the order of their numbers; None: the classes of the table, sorted.
        is_new: Whether a model is to be trained on them, and not one that was trained already to read them.
    """
    values = table.targets
    are_classes = table.are_classes
    if are_classes is None:
        are_classes = values.ndim == 1 and (values.dtype.kind == "U" or are_class_numbers(values, table.label))
    if not are_classes:
        if values.dtype.kind == "U":
            raise DataError(
                f"{table.label} target '{values[0]}' is not a number; set task=classification and "
                "data.task=classification"
            )
        columns = values.astype(np.float64).reshape(len(values), -1)
        _check_float32(columns, label=table.label, what="target")
        return columns.astype(np.float32), None
    return numbered_classes(values, table.label, known=known)


def _read(config: TableData, *, task: str | None, reading: Mapping[str, Any] | None) -> _Table:
    if config.path.startswith(_BUILTIN):
        return _read_builtin(config.path.removeprefix(_BUILTIN))
    asked = AskedColumns(
        target=config.target,
        columns=config.columns,
        as_numbers=are_wanted_as_numbers(config.task, task=task, reading=reading),
        are_known=reading is not None,
        classes=None if reading is None else reading["classes"],
    )
    is_decided = reading is not None or config.task is not None
    files = row_files(config.path, what="data.path")
    if files is not None:
        skipped = skipped_records(
            config.path, on_bad_record=config.on_bad_record, max_bad_fraction=config.max_bad_fraction
        )
        return _taken(read_table_rows(files, asked, skipped=skipped), config.path, skipped, is_decided=is_decided)
    path = require_file(config.path, what="data.path")
    if config.columns is not None and path.suffix not in (".csv", ".tsv"):
        raise DataError(f"data.columns chooses columns by name, and those of {path} have none; leave it out")
    if path.suffix == ".npz":
        return _read_npz(path)
    if path.suffix in (".csv", ".tsv"):
        skipped = skipped_records(
            str(path), on_bad_record=config.on_bad_record, max_bad_fraction=config.max_bad_fraction
        )
        return _taken(read_csv(path, asked, skipped=skipped), str(path), skipped, is_decided=is_decided)
    if path.suffix in COMPRESSED_SUFFIXES:
        check_is_text(path)
    raise DataError(f"data.path {path} is no .csv or .npz file; convert it, or use builtin:breast_cancer")


def _taken(found: TableRows, label: str, skipped: SkippedRecords | None, *, is_decided: bool) -> _Table:
    if not is_decided:
        check_not_mixed(found)
    return _Table(label, found.inputs, target_array(found.targets), None, found.columns, found.numbers, skipped)


def _read_builtin(name: str) -> _Table:
    # Name -> whether the targets are classes: those of diabetes are integers, but quantities.
    known = {"breast_cancer": True, "wine": True, "diabetes": False}
    if name not in known:
        raise DataError(f"data.path builtin:{name} is unknown; known are {', '.join(_BUILTIN + k for k in known)}")
    try:
        from sklearn import datasets
    except ImportError:
        raise DataError(f"data.path builtin:{name} needs scikit-learn; run: pip install scikit-learn") from None
    load = {
        "breast_cancer": datasets.load_breast_cancer,
        "wine": datasets.load_wine,
        "diabetes": datasets.load_diabetes,
    }[name]
    inputs, targets = load(return_X_y=True)
    return _Table(f"scikit-learn {name}", np.asarray(inputs), np.asarray(targets), are_classes=known[name])


def _read_npz(path: Path) -> _Table:
    check_archive(path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # zipfile, zlib and NumPy raise a dozen types of errors for a damaged archive.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path} is no .npz archive ({reason}); write it with numpy.savez") from None
    for name in ("inputs", "targets"):
        if name not in arrays:
            raise DataError(
                f"{path} has no array '{name}' (it has: {', '.join(arrays) or 'none'}); save it by that name"
            )
    inputs, targets = arrays["inputs"], arrays["targets"]
    if inputs.ndim != 2 or targets.ndim not in (1, 2) or len(inputs) != len(targets):
        raise DataError(
            f"{path} has inputs {inputs.shape} and targets {targets.shape}; they must be [rows, columns] and [rows] or "
            "[rows, columns] with as many rows"
        )
    for name, values in (("inputs", inputs), ("targets", targets)):
        if values.dtype.kind not in ("biuf" if name == "inputs" else "biufU"):
            raise DataError(f"{path} array '{name}' holds {values.dtype}, not numbers; convert it before saving")
        bad = np.argwhere(~np.isfinite(values)) if values.dtype.kind == "f" else np.empty((0, values.ndim))
        if len(bad):
            position = tuple(bad[0].tolist())
            raise DataError(f"{path} array '{name}' is {values[position]} at {list(position)}; remove or fill the row")
    # The author of the file chose the dtype of the targets: floats are numbers, integers may be classes.
    are_classes = None if targets.dtype.kind in "iu" and targets.ndim == 1 else targets.dtype.kind in "bU"
    return _Table(str(path), inputs.astype(np.float64), targets, are_classes=are_classes)
