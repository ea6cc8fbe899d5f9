"""Safetensors files, read by memory mapping and written in one pass. No jax here.

A file is eight bytes (the length of the header, little endian), the header (JSON: name -> dtype, shape and the offsets
of its bytes in what follows), and the bytes. A file from somewhere else may say anything there, so that everything it
says is checked before any of it is used.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain.errors import CheckpointError
from jaxtrain.published.json_text import parse_json
from jaxtrain.published.transforms import Shape

# Name in the header -> dtype.
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "I16": np.dtype("int16"),
    "I8": np.dtype("int8"),
    "U64": np.dtype("uint64"),
    "U32": np.dtype("uint32"),
    "U16": np.dtype("uint16"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The published limit of the format; a header of thousands of tensors is far below it.
_MOST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        file: The file.
        dtype: Its dtype.
        shape: Its shape.
        start: Offset of its first byte in the file.
    """

    file: Path
    dtype: np.dtype
    shape: Shape
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Returns name -> tensor of a safetensors file; no tensor is read.

    Raises:
        CheckpointError: The file is missing, cut off, or says of itself what cannot be true.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little") if size >= 8 else 0
            if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
                raise CheckpointError(
                    f"{file} is no whole safetensors file: it has {size} bytes and says that its header has {length} "
                    f"(at most {_MOST_HEADER_BYTES} are accepted); fetch the file again"
                )
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror or error}); fetch the file again") from None
    try:
        header = parse_json(text.decode("utf-8"))
        if not isinstance(header, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise CheckpointError(f"{file}: the header is no JSON of a safetensors file ({error})") from None
    start = 8 + length
    tensors, spans = {}, []
    for name, entry in header.items():
        if not name.isprintable():
            raise CheckpointError(f"{file}: the header has the name {name!r}, which holds characters that are none")
        if name != "__metadata__":
            tensors[name], begin, end = _tensor(file, name, entry, start)
            spans.append((begin, end, name))
    _check_spans(file, sorted(spans), size - start)
    return tensors


def _tensor(file: Path, name: str, entry: Any, start: int) -> tuple[StoredTensor, int, int]:
    """The tensor of one entry of the header, and its offsets."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or not all(
            type(number) is int and 0 <= number < 2**63 for number in (*shape, begin, end)
        ):
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{file}: the header's entry of {name} is no dtype, shape and data_offsets") from None
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: {name} has the dtype {dtype!r}; known are {', '.join(DTYPES)}")
    found = StoredTensor(file, DTYPES[dtype], tuple(shape), start + begin)
    if end - begin != found.num_bytes:
        raise CheckpointError(
            f"{file}: {name} is {dtype}{list(shape)}, which takes {found.num_bytes} bytes, but its data_offsets "
            f"[{begin}, {end}] hold {end - begin}"
        )
    return found, begin, end


def _check_spans(file: Path, spans: list[tuple[int, int, str]], size: int) -> None:
    """Raises where tensors overlap, leave holes, or end elsewhere than the file."""
    at, before = 0, "the header"
    for begin, end, name in spans:
        if begin < at:
            raise CheckpointError(f"{file}: {name} overlaps {before}; the file is damaged or made to mislead")
        if begin > at:
            raise CheckpointError(f"{file}: {begin - at} bytes between {before} and {name} belong to no tensor")
        at, before = end, name
    if at != size:
        what = "is cut off" if at > size else "has bytes of no tensor at its end"
        raise CheckpointError(f"{file} {what}: its tensors end at {at} of {size} bytes; fetch the file again")


def map_tensor(tensor: StoredTensor) -> np.ndarray:
    """Returns a read-only array over the bytes of the file; what is not touched is not read."""
    if not tensor.num_bytes:
        return np.zeros(tensor.shape, tensor.dtype)
    raw = np.memmap(tensor.file, np.uint8, "r", tensor.start, (tensor.num_bytes,))
    return np.asarray(raw).view(tensor.dtype).reshape(tensor.shape)


def write_safetensors(
    file: Path, shapes: Mapping[str, tuple[Shape, np.dtype]], tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes a safetensors file, one tensor in memory at a time.

    Args:
        file: The file to write; it appears when it is whole.
        shapes: Name -> shape and dtype, in the order of the file. Of vectors of bytes at its end this is the most that
            they may hold.
        tensors: Name and array, in any order; vectors that hold less come last, in the order of `shapes`.
    """
    # Shorter vectors make no number of the header longer: its place is kept free until all is known.
    reserved, starts = _header(shapes), _starts(shapes)
    written: dict[str, tuple[Shape, np.dtype]] = {}
    less = 0
    partial = file.with_name(f".{file.name}.partial")
    try:
        with partial.open("wb") as stream:
            for name, array in tensors:
                shape, dtype = shapes[name]
                assert array.dtype == dtype, name
                assert array.shape == shape or array.ndim == dtype.itemsize == 1, name
                stream.seek(8 + len(reserved) + starts[name] - less)
                stream.write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data if array.size else b"")
                less += prod(shape) - array.size
                written[name] = (array.shape, dtype)
            assert written.keys() == shapes.keys(), file
            header = _header({name: written[name] for name in shapes}).ljust(len(reserved))
            stream.seek(0)
            stream.write(len(header).to_bytes(8, "little") + header)
        partial.replace(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written ({error.strerror or error})") from None
    finally:
        partial.unlink(missing_ok=True)


def _starts(shapes: Mapping[str, tuple[Shape, np.dtype]]) -> dict[str, int]:
    found, at = {}, 0
    for name, (shape, dtype) in shapes.items():
        found[name] = at
        at += prod(shape) * dtype.itemsize
    return found


def _header(shapes: Mapping[str, tuple[Shape, np.dtype]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (shape, dtype) in shapes.items():
        end = at + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Other readers map the file and want the tensors at multiples of 8.
    return text + b" " * (-len(text) % 8)
