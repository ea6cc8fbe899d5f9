"""Reads GGUF files: metadata, and any slice of any tensor. No jax here.

GGUF (versions 2 and 3, little-endian) is a header, typed metadata, a table of tensors, and their bytes; the format is
specified in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file comes from anywhere, so nothing it states
is believed: every length is checked against the file before anything of that length is made.
"""

import itertools
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.errors import CheckpointError
from jaxtrain.published.gguf_blocks import BLOCK_TYPES, OTHER_TYPES, BlockType, dequantize

# Far above what published models have (a vocabulary of 262,144 tokens, 3,000 tensors, 100 keys), far below what would
# take memory or minutes to refuse.
_MOST_KEYS = 2**16
_MOST_TENSORS = 2**18
_MOST_ELEMENTS = 2**24
_LONGEST_STRING = 2**26
_LONGEST_NAME = 2**10
_MOST_DIMS = 4
_LARGEST_ALIGNMENT = 2**20

_NUMBERS = {
    **{0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4")},
    **{5: np.dtype("<i4"), 6: np.dtype("<f4"), 10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8")},
}
_BOOL, _STRING, _ARRAY = 7, 8, 9

Value = bool | int | float | str | list


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies in its file.

    Attributes:
        shape: Dimensions, the slowest first: the reverse of what the file lists.
        kind: How its elements are stored.
        start: First byte in the file.
        num_bytes: Bytes in the file.
    """

    shape: tuple[int, ...]
    kind: BlockType
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that is open for reading.

    Attributes:
        path: The file.
        metadata: Key -> value, as in the file; arrays are lists.
        tensors: Name in the file -> tensor.
        content: The bytes of the file, uint8 [bytes], mapped and not read.
    """

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    content: np.ndarray


def read_gguf(path: str | Path) -> GgufFile:
    """Opens a GGUF file and reads everything but its tensors.

    Raises:
        CheckpointError: The file is missing, is not GGUF, or states what cannot be true of it.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:  # An empty file cannot be mapped.
        raise CheckpointError(f"{path} is not a GGUF file: it is empty") from None
    cursor = _Cursor(path, content)
    if content[:4].tobytes() != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
    cursor.at = 4
    version = cursor.number("<I")
    if version not in (2, 3):
        told = "a big-endian file" if version in (0x02000000, 0x03000000) else f"version {version}"
        raise CheckpointError(f"{path} is {told} of GGUF; versions 2 and 3, little-endian, are read")
    num_tensors = cursor.count("tensors", _MOST_TENSORS)
    num_keys = cursor.count("keys of metadata", _MOST_KEYS)
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = cursor.name("a key")
        if key in metadata:
            raise cursor.damaged(f"the key {key!r} is there twice")
        metadata[key] = cursor.value(key)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment is {alignment!r}, not a power of two up to {_LARGEST_ALIGNMENT}")
    tensors = _place(cursor, dict(_table(cursor, num_tensors)), alignment)
    return GgufFile(path, metadata, tensors, content)


def read_tensor(
    file: GgufFile, name: str, index: tuple[slice, ...] | None = None, rows: np.ndarray | None = None
) -> np.ndarray:
    """Returns a part of a tensor; only the blocks that hold it are read and dequantized.

    Args:
        file: From `read_gguf`.
        name: Name of the tensor in the file.
        index: One slice of step 1 per dimension of the tensor's shape; None: the whole tensor.
        rows: Indices into the first dimension, int [R], in place of `index[0]`.

    Returns:
        The part, in the dtype of `GgufTensor.kind`: float32 for quantized tensors. It is writable by nobody where it
        views the file.
    """
    tensor = file.tensors[name]
    kind = tensor.kind
    index = index or tuple(slice(None) for _ in tensor.shape)
    raw = file.content[tensor.start : tensor.start + tensor.num_bytes]
    lead: tuple[slice | np.ndarray, ...] = index[:-1]
    if kind.decode is None:
        whole = raw.view(kind.dtype).reshape(tensor.shape)
        return whole[index if rows is None else (rows, *index[1:])]
    if rows is not None:
        lead = (rows, *lead[1:])
    # Whole blocks around the columns, then the columns.
    start, stop, _ = index[-1].indices(tensor.shape[-1])
    first, last = start // kind.elements, -(-stop // kind.elements)
    packed = raw.reshape(*tensor.shape[:-1], -1)[(*lead, slice(first * kind.bytes, max(first, last) * kind.bytes))]
    return dequantize(packed, kind)[..., start - first * kind.elements : stop - first * kind.elements]


@dataclass
class _Cursor:
    """Reads one value after another, none of them past the end of the file."""

    path: Path
    content: np.ndarray
    at: int = 0

    def damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {reason}")

    def take(self, size: int, what: str) -> bytes:
        if size > self.content.size - self.at:
            raise self.damaged(f"{what} of {size} bytes at byte {self.at} goes past the end, byte {self.content.size}")
        self.at += size
        return self.content[self.at - size : self.at].tobytes()

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form), "a number"))[0]

    def count(self, what: str, most: int) -> int:
        count = self.number("<Q")
        if count > most:
            raise self.damaged(f"it states {count} {what}, more than {most}")
        return count

    def string(self, what: str, longest: int = _LONGEST_STRING) -> str:
        text = self.take(self.count(f"bytes for {what}", longest), what)
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"{what} before byte {self.at} is not UTF-8") from None

    def name(self, what: str) -> str:
        """Returns a string that can stand in a message of one line."""
        name = self.string(what, _LONGEST_NAME)
        if not name.isprintable():
            raise self.damaged(f"{what} before byte {self.at} has characters that are no part of a name")
        return name

    def value(self, key: str) -> Value:
        kind = self.number("<I")
        if kind != _ARRAY:
            return self.numbers(key, kind, 1)[0]
        kind = self.number("<I")
        return self.numbers(key, kind, self.count(f"elements for {key}", _MOST_ELEMENTS))

    def numbers(self, key: str, kind: int, count: int) -> list:
        """Returns `count` values of one type."""
        if kind == _STRING:
            # A string takes 8 bytes at least, so the list cannot grow past an eighth of the file.
            return [self.string(f"a string of {key}") for _ in range(count)]
        if kind == _BOOL:
            found = self.take(count, key)
            if set(found) - {0, 1}:
                raise self.damaged(f"{key} is neither true nor false")
            return [bool(byte) for byte in found]
        if kind not in _NUMBERS:
            raise self.damaged(f"{key} has the type {kind}, which GGUF does not have (or an array of arrays)")
        dtype = _NUMBERS[kind]
        found = np.frombuffer(self.take(count * dtype.itemsize, key), dtype)
        # The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06.
        return [float(str(x)) for x in found] if dtype == np.float32 else found.tolist()


def _table(cursor: _Cursor, num_tensors: int):
    """Yields each tensor's name with its shape, type and offset, as stated."""
    seen = set()
    for _ in range(num_tensors):
        name = cursor.name("a tensor's name")
        if name in seen:
            raise cursor.damaged(f"the tensor {name} is there twice")
        seen.add(name)
        num_dims = cursor.number("<I")
        if num_dims > _MOST_DIMS:
            raise cursor.damaged(f"the tensor {name} has {num_dims} dimensions, more than {_MOST_DIMS}")
        shape = tuple(reversed([cursor.number("<Q") for _ in range(num_dims)]))
        kind, offset = cursor.number("<I"), cursor.number("<Q")
        if kind not in BLOCK_TYPES:
            known = ", ".join(one.name for one in BLOCK_TYPES.values())
            found = OTHER_TYPES.get(kind, f"number {kind}")
            raise CheckpointError(f"{cursor.path}: the tensor {name} is stored as {found}; the types read are {known}")
        yield name, (shape, BLOCK_TYPES[kind], offset)


def _place(cursor: _Cursor, stated: dict, alignment: int) -> dict[str, GgufTensor]:
    """Returns where the tensors lie, after checking that each is inside the file and outside all others."""
    base = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, (shape, kind, offset) in stated.items():
        if not shape or math.prod(shape) == 0:
            raise cursor.damaged(f"the tensor {name} has the shape {list(shape)}, which holds nothing")
        if shape[-1] % kind.elements:
            raise cursor.damaged(f"the rows of {name}, {shape[-1]} elements, are not whole blocks of {kind.name}")
        if offset % alignment:
            raise cursor.damaged(f"the tensor {name} begins at {offset}, not a multiple of {alignment}")
        num_bytes = math.prod(shape) // kind.elements * kind.bytes
        if base + offset + num_bytes > cursor.content.size:
            last = base + offset + num_bytes
            raise cursor.damaged(f"the tensor {name} ends at byte {last}, but the file has {cursor.content.size}")
        tensors[name] = GgufTensor(shape, kind, base + offset, num_bytes)
    ordered = sorted(tensors, key=lambda name: tensors[name].start)
    for before, after in itertools.pairwise(ordered):
        if tensors[before].start + tensors[before].num_bytes > tensors[after].start:
            raise cursor.damaged(f"the tensors {before} and {after} overlap")
    return tensors
