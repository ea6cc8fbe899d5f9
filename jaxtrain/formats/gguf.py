"""GGUF files: metadata, and tensors as float32 where they are quantized. No jax here.

GGUF (versions 2 and 3, little-endian) is a header, typed metadata, a table of tensors, and their bytes; the format is
specified in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A quantized tensor is a row-major array of
blocks along its last dimension; a block holds 32 or 256 elements with their scales, in the layouts of ggml
(`ggml-common.h`). Each decoder takes the bytes of blocks, uint8 [N, bytes of a block], and returns their elements,
float32 [N, elements of a block], by the same float32 operations in the same order as ggml, so that the elements are
equal to the last bit. `d` and `m` are a block's scale and offset, `q` are the small integers.

The package `gguf` takes 6.2 s for the header of a vocabulary of 128,256 tokens where this takes 0.3 s (one core).
"""

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain.errors import reading_published

# Elements dequantized at once: bounds what a large tensor takes beside its result to a few times 4 MiB.
_PIECE_ELEMENTS = 2**20


@dataclass(frozen=True)
class BlockType:
    """How a GGUF file stores the elements of a tensor.

    Attributes:
        name: Name in ggml, such as `Q4_K`.
        elements: Elements per block; 1 for plain numbers.
        bytes: Bytes per block.
        dtype: What reading gives: the stored dtype of plain numbers, float32 for quantized blocks.
        decode: Blocks, uint8 [N, bytes] -> float32 [N, elements]; None for plain numbers.
    """

    name: str
    elements: int
    bytes: int
    dtype: np.dtype
    decode: Callable[[np.ndarray], np.ndarray] | None = None


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies in its file, in bytes; its shape is the reverse of what the file lists, the slowest first."""

    shape: tuple[int, ...]
    kind: BlockType
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that is open for reading: its content, uint8 [bytes], is mapped and not read."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    content: np.ndarray


def read_gguf(path: str | Path) -> GgufFile:
    """Opens a GGUF file and reads everything but its tensors.

    Raises:
        CheckpointError: The file is missing, is not GGUF, is damaged, or stores tensors in a type that is not read.
    """
    path = Path(path)
    with reading_published(path):
        with path.open("rb") as file:
            content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        return _Reader(content).file(path)


class _Reader:
    """Reads one value after another."""

    def __init__(self, content: np.ndarray):
        self.content, self.at = content, 0

    def file(self, path: Path) -> GgufFile:
        if (start := (self.take(4), self.number("<I"))) not in ((b"GGUF", 2), (b"GGUF", 3)):
            raise ValueError(f"it begins with {start}; supported is GGUF version 2 or 3, little-endian")
        num_tensors, num_keys = self.number("<Q"), self.number("<Q")
        metadata = {}
        for _ in range(num_keys):
            key = self.text()
            metadata[key] = self.value()
        alignment = metadata.get("general.alignment", 32)
        stated = [self.stated() for _ in range(num_tensors)]
        base = -(-self.at // alignment) * alignment
        tensors = {}
        for name, shape, number, offset in stated:
            kind = BLOCK_TYPES.get(number)
            if kind is None:
                known = ", ".join(one.name for one in BLOCK_TYPES.values())
                raise ValueError(f"the tensor {name} is stored in ggml's type {number}; supported types: {known}")
            num_bytes = math.prod(shape) // kind.elements * kind.bytes
            if not num_bytes or shape[-1] % kind.elements or base + offset + num_bytes > self.content.size:
                raise ValueError(f"the tensor {name} {kind.name}{list(shape)} is not stored as whole blocks")
            tensors[name] = GgufTensor(shape, kind, base + offset, num_bytes)
        return GgufFile(path, metadata, tensors, self.content)

    def take(self, size: int) -> bytes:
        if size > self.content.size - self.at:
            raise ValueError(f"{size} bytes at byte {self.at} go past the end, byte {self.content.size}")
        self.at += size
        return self.content[self.at - size : self.at].tobytes()

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8")

    def value(self) -> Any:
        kind = self.number("<I")
        if kind != _ARRAY:
            return self.values(kind, 1)[0]
        kind = self.number("<I")
        return self.values(kind, self.number("<Q"))

    def values(self, kind: int, count: int) -> list:
        """Returns `count` values of one type."""
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        dtype = np.dtype(_NUMBERS[kind])
        found = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        # The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06.
        return [float(str(x)) for x in found] if dtype == np.float32 else found.tolist()

    def stated(self) -> tuple[str, tuple[int, ...], int, int]:
        """Returns name, shape, number of the type and offset of a tensor."""
        name = self.text()
        shape = tuple(reversed([self.number("<Q") for _ in range(self.number("<I"))]))
        return name, shape, self.number("<I"), self.number("<Q")


# Type of metadata -> dtype.
_NUMBERS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4"},
    **{6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"},
}
_STRING, _ARRAY = 8, 9


def read_tensor(file: GgufFile, name: str, at: int | None = None) -> np.ndarray:
    """Returns a tensor, or what stands at an index (`at`) of its first dimension; only that is read and dequantized.

    The numbers have the dtype of `GgufTensor.kind`: float32 for quantized tensors; others view the file.
    """
    tensor = file.tensors[name]
    kind, shape = tensor.kind, tensor.shape
    raw = file.content[tensor.start : tensor.start + tensor.num_bytes]
    if at is not None:
        raw, shape = raw.reshape(shape[0], -1)[at], shape[1:]
    if kind.decode is None:
        return raw.view(kind.dtype).reshape(shape)
    return dequantize(raw, kind).reshape(shape)


def dequantize(blocks: np.ndarray, kind: BlockType) -> np.ndarray:
    """Returns the elements, float32 [N * kind.elements], of blocks of a quantized type, uint8 [N * kind.bytes]."""
    assert kind.decode is not None
    rows = blocks.reshape(-1, kind.bytes)
    out = np.empty((len(rows), kind.elements), np.float32)
    step = _PIECE_ELEMENTS // kind.elements
    # A damaged scale may be infinite or not a number; the tensor then says so, as it would unquantized.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(rows), step):
            out[start : start + step] = kind.decode(rows[start : start + step])
    return out.reshape(-1)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """Returns the float16 at byte `at` of each block as float32 [N, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Returns all low nibbles, then all high ones: uint8 [N, B] -> uint8 [N, 2 * B]."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """Returns bit `i` of the 32-bit word at byte `at`, moved to bit 4, for i = 0 to 31: uint8 [N, 32]."""
    return np.unpackbits(np.ascontiguousarray(blocks[:, at : at + 4]), axis=1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:18]).astype(np.int8) - np.int8(8)).astype(np.float32)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:20]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    q = _nibbles(blocks[:, 6:22]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (q.astype(np.int8) - np.int8(16)).astype(np.float32)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    q = _nibbles(blocks[:, 8:24]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * q.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * np.ascontiguousarray(blocks[:, 2:34]).view(np.int8).astype(np.float32)


def _six_bit_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the 8 scales and 8 offsets that a K block packs in 12 bytes as 6-bit integers, float32 [N, 8] each."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 0x0F) | ((low >> 6) << 4)], axis=1)
    offsets = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scales.astype(np.float32), offsets.astype(np.float32)


def _scaled_groups(blocks: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Returns d * scale * q - dmin * offset for the 8 groups of 32 of a K block; q is uint8 [N, 8, 32]."""
    scales, offsets = _six_bit_scales(blocks[:, 4:16])
    d, least = _half(blocks, 0) * scales, _half(blocks, 2) * offsets
    return (d[:, :, None] * q.astype(np.float32) - least[:, :, None]).reshape(-1, 256)


def _group_nibbles(packed: np.ndarray) -> np.ndarray:
    """Returns uint8 [N, 8, 32]: each 32 bytes hold two groups, in their low and in their high nibbles."""
    bytes_N4x32 = packed.reshape(-1, 4, 32)
    return np.stack([bytes_N4x32 & 0x0F, bytes_N4x32 >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _scaled_groups(blocks, _group_nibbles(blocks[:, 16:144]))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    # Bit g of byte i is the fifth bit of element i of group g.
    fifth = (blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1
    return _scaled_groups(blocks, _group_nibbles(blocks[:, 48:176]) | (fifth << 4))


_PAIRS = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    # Two halves of 128 elements; a half has 64 bytes of low nibbles and 32 bytes of two high bits of 4 elements each.
    low = blocks[:, 0:128].reshape(-1, 2, 64)
    low = np.concatenate([low & 0x0F, low >> 4], axis=2)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _PAIRS
    q = (low | ((high & 3) << 4).reshape(-1, 2, 128)).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    d = _half(blocks, 208) * scales
    return (d[:, :, None] * q.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)


_FLOAT32 = np.dtype(np.float32)

# ggml's number of a type -> how it is stored.
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4, np.dtype("<f4")),
    1: BlockType("F16", 1, 2, np.dtype("<f2")),
    2: BlockType("Q4_0", 32, 18, _FLOAT32, _q4_0),
    3: BlockType("Q4_1", 32, 20, _FLOAT32, _q4_1),
    6: BlockType("Q5_0", 32, 22, _FLOAT32, _q5_0),
    7: BlockType("Q5_1", 32, 24, _FLOAT32, _q5_1),
    8: BlockType("Q8_0", 32, 34, _FLOAT32, _q8_0),
    12: BlockType("Q4_K", 256, 144, _FLOAT32, _q4_k),
    13: BlockType("Q5_K", 256, 176, _FLOAT32, _q5_k),
    14: BlockType("Q6_K", 256, 210, _FLOAT32, _q6_k),
    30: BlockType("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
}
