"""Where metrics are written: one small protocol, a file that is always written, and TensorBoard events by choice."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from jaxtrain.config.arguments import check_kind, check_whole, local_path, refusal
from jaxtrain.config.schema import LoggingConfig
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.event_files import TensorBoardWriter
from jaxtrain.metrics.row_file import RowFile
from jaxtrain.runtime.files import is_number, plain_number, put_aside, write_lines_atomic

Scalars = Mapping[str, float | int | None]


def flat_scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten metrics to one number per name; entry i of a vector `name` becomes `name_i`, of a matrix `name_i_j`.

    Args:
        values: numbers, or arrays of NumPy or JAX on the host; None stays None.

    Raises:
        ConfigError: an entry of an array gets the name of another metric.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or np.ndim(value) == 0:
            found = {name: value if value is None or isinstance(value, (int, float)) else np.asarray(value).item()}
        else:
            entries = np.ndenumerate(np.asarray(value))
            found = {"_".join(map(str, (name, *index))): entry.item() for index, entry in entries}
        double = next((one for one in found if one in flat), None)
        if double is not None:
            raise ConfigError(f"two metrics are recorded as {double!r}, one an entry of an array; rename one of them")
        flat |= found
    return flat


class Writer(Protocol):
    """The interface of everything that records the metrics of a run; only one process of a run has a writer."""

    def scalars(self, step: int, values: Scalars) -> None:
        """Record numbers of one step.

        Args:
            step: number of the step.
            values: name -> number; None is a value that is not known.
        """
        ...

    def text(self, step: int, name: str, text: str | Mapping[str, Any]) -> None:
        """Record a text, a histogram or an image of one step; see `Text`."""
        ...

    def close(self) -> None:
        """Write what is buffered and close the target; a second call does nothing."""
        ...


class JsonlWriter:
    """Writes one strict JSON object per line, with `step` first; NaN and infinities become null.

    The file is opened at the first write and appended line by line, so that a run that is killed loses at most its
    last line.

    Args:
        path: the file of metrics.

    Raises:
        ConfigError: a path, a step or a value of another type.

    Example:
        >>> with jt.JsonlWriter("runs/mine/metrics.jsonl") as writer:
        ...     writer.scalars(1, {"loss": 2.5})
        >>> print(writer.path.read_text(), end="")
        {"step": 1, "loss": 2.5}
    """

    def __init__(self, path: str | Path):
        self.path = local_path(path, what="file of metrics")
        self.file = RowFile(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def scalars(self, step: int, values: Scalars) -> None:
        self.file.append(row_of(step, values))

    def text(self, step: int, name: str, text: str | Mapping[str, Any]) -> None:
        self.file.append(text_row_of(step, name, text))

    def truncate_after(self, step: int) -> None:
        """Drop the rows of steps after `step`, and incomplete lines; the file is replaced atomically.

        A run that resumes at `step` repeats the later steps, so that rows from before would be in the file twice.
        """
        step = _checked_step(step)
        self.close()
        put_aside(self.path)
        if not self.path.exists():
            return
        if any(not _is_kept(line, step) for line in self._lines()):
            write_lines_atomic(self.path, (line for line in self._lines() if _is_kept(line, step)))

    def close(self) -> None:
        self.file.close()

    def _lines(self) -> Iterator[str]:
        with self.path.open(encoding="utf-8", errors="replace") as file:
            yield from file


def _is_complex(value: object) -> bool:
    # Asked of NumPy and jax alone: a tensor of torch that needs a gradient is no array, and `float` takes it.
    dtype = getattr(value, "dtype", None)
    return isinstance(value, complex) or (isinstance(dtype, np.dtype) and dtype.kind == "c")


def row_of(step: int, values: Scalars) -> Mapping[str, object]:
    """Return the row of some numbers.

    Args:
        step: number of the step.
        values: name -> number; None is a value that is not known.

    Raises:
        ConfigError: a step or a value of another type.
    """
    step, write = _checked_step(step), "writer.scalars(int(state.step), {'loss': float(metrics['loss'])})"
    check_kind(values, Mapping, what="JsonlWriter.scalars: values", takes="a dict of numbers", write=write)
    for name, value in values.items():
        what = f"JsonlWriter.scalars: {name!r}"
        if value is not None and np.ndim(value):
            raise ConfigError(refusal(what, "one number", value, "float(...) of one entry, or a name per entry"))
        if value is not None and (_is_complex(value) or not is_number(value)):
            raise ConfigError(refusal(what, "one real number", value, "float(...), or None where it is not known"))
    return {"step": step} | {name: plain_number(value) for name, value in values.items()}


def text_row_of(step: int, name: str, text: str | Mapping[str, Any]) -> Mapping[str, object]:
    """Return the row of a text; see `row_of`."""
    return {"step": _checked_step(step), name: text}


def _checked_step(step: Any) -> int:
    return check_whole(step, what="JsonlWriter: step", least=0, write="int(state.step)")


class MultiWriter:
    """Gives every row to each of several writers.

    Args:
        writers: in the order in which they get a row.
    """

    def __init__(self, writers: Iterable[Writer]):
        self.writers: Sequence[Writer] = tuple(writers)

    def scalars(self, step: int, values: Scalars) -> None:
        for writer in self.writers:
            writer.scalars(step, values)

    def text(self, step: int, name: str, text: str | Mapping[str, Any]) -> None:
        for writer in self.writers:
            writer.text(step, name, text)

    def close(self) -> None:
        """Close every writer, even where closing one fails; the first failure is raised at the end."""
        failures: list[Exception] = []
        for writer in self.writers:
            try:
                writer.close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]


def open_writers(run_dir: Path, config: LoggingConfig, *, resumed_step: int) -> MultiWriter:
    """Open the writers of files that a config asks for; rows after the resumed step are dropped first.

    Only the process that holds the lock of the run directory should call it.

    Args:
        run_dir: an existing directory; it gets `metrics.jsonl` and `tensorboard/`.
        config: says whether there are TensorBoard events besides metrics.jsonl.
        resumed_step: steps done before this process; 0 for a fresh run.

    Returns:
        One writer that gives every row to all of them, that of metrics.jsonl first.
    """
    run_dir = Path(run_dir)
    jsonl = JsonlWriter(run_dir / "metrics.jsonl")
    jsonl.truncate_after(resumed_step)
    writers: list[Writer] = [jsonl]
    if config.tensorboard:
        writers.append(TensorBoardWriter(run_dir / "tensorboard", resumed_step=resumed_step, earlier=jsonl.path))
    return MultiWriter(writers)


def _is_kept(line: str, last_step: int) -> bool:
    """Return whether a line is a complete row of a step up to `last_step`."""
    try:
        row = json.loads(line) if line.endswith("\n") else None
    except ValueError:
        return False
    step = row.get("step") if isinstance(row, dict) else None
    return isinstance(step, int) and step <= last_step
