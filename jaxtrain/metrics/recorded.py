"""What is recorded of a step, as trackers get it, and what metrics.jsonl holds of it. No jax here."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """Numbers of one step.

    Attributes:
        step: number of the step.
        seconds: when they were recorded, in seconds since 1970.
        values: name -> number; None is a value that is not known, NaN and infinities are values that are not finite.
    """

    step: int
    seconds: float
    values: Mapping[str, float | int | None]


@dataclass(frozen=True)
class Text:
    """A text of one step, such as a generated sample, or a histogram or image.

    Attributes:
        step: number of the step.
        name: of the text.
        text: its content; {"counts": ..., "edges": ...} of a histogram, {"png": base64} of an image.
    """

    step: int
    name: str
    text: str | Mapping[str, Any]


def read_items(path: Path, num_bytes: int) -> Iterator[Row | Text]:
    """The rows and texts of a metrics.jsonl; when they were recorded is not known any more.

    Args:
        path: of the file; one that cannot be read has none.
        num_bytes: only the lines that lie in the first bytes are read.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in file:
            num_bytes -= len(line)
            if num_bytes < 0:
                return
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                step = found.pop("step", None) if isinstance(found, dict) else None
                if not isinstance(step, int):
                    continue
                yield from (Text(step, name, text) for name, text in found.items() if isinstance(text, str | dict))
                numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
                if numbers:
                    yield Row(step, time.time(), numbers)
