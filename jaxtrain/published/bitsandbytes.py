"""Tensors that bitsandbytes quantized to nf4, in safetensors files: read as floats or as they are. No jax here.

A weight [out, in] is stored as

    NAME                                    uint8 [out * in / 2, 1]   packed codes, row by row
    NAME.absmax                             float32 [blocks], or uint8 [blocks] with double quantization
    NAME.quant_map                          float32 [16]              the levels
    NAME.nested_absmax                      float32 [N]               double quantization only, as is the next
    NAME.nested_quant_map                   float32 [256]             the 8-bit map
    NAME.quant_state.bitsandbytes__nf4      uint8                     JSON: shape, dtype, block sizes, nested_offset
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.errors import CheckpointError
from jaxtrain.published.folder import FolderSource
from jaxtrain.published.json_text import parse_json
from jaxtrain.published.nf4_blocks import (
    BLOCK,
    LEVELS,
    NESTED_BLOCK,
    dequantize_magnitudes,
    dequantize_rows,
    dynamic_map,
)
from jaxtrain.published.safetensors import DTYPES
from jaxtrain.published.transforms import Shape

# What stands before the kind in the name of a description.
STATE = ".quant_state.bitsandbytes__"
_DTYPES = {"float32": DTYPES["F32"], "float16": DTYPES["F16"], "bfloat16": DTYPES["BF16"]}
# Maps that torch makes on different CPUs differ in the last bit of some values.
_SAME_MAP = 1e-6


@dataclass(frozen=True)
class PackedTensor:
    """A quantized weight [R, I] as it is stored.

    Attributes:
        codes: uint8 [R, I / 2].
        absmax: float32 [R, I / 64], or uint8 with double quantization.
        nested_absmax: float32 [N]; None without double quantization.
        offset: What was taken off the magnitudes; None without double quantization.
        values: The 8-bit map, float32 [256]; None without double quantization.
    """

    codes: np.ndarray
    absmax: np.ndarray
    nested_absmax: np.ndarray | None = None
    offset: float | None = None
    values: np.ndarray | None = None

    @property
    def magnitudes(self) -> np.ndarray:
        """float32 [R, I / 64]: the largest magnitudes of the blocks."""
        if self.nested_absmax is None or self.offset is None:
            return self.absmax
        return dequantize_magnitudes(self.absmax, self.nested_absmax, self.offset, self.values)

    @property
    def has_usual_map(self) -> bool:
        """Whether the 8-bit map is the published one."""
        return self.values is None or bool(np.abs(self.values - dynamic_map()).max() <= _SAME_MAP)


@dataclass(frozen=True)
class _Stored:
    """What a tensor's JSON says."""

    shape: tuple[int, int]
    dtype: np.dtype
    offset: float | None


@dataclass(frozen=True)
class QuantizedSource:
    """A published folder with quantized tensors, which reads as one of floats; a `Source` made by `with_quantized`.

    Attributes:
        folder: The folder as it is stored.
        quantized: Names of the quantized tensors.
    """

    folder: FolderSource
    quantized: Mapping[str, _Stored]

    @property
    def config(self) -> Mapping[str, Any]:
        """What the config.json says."""
        return self.folder.config

    @property
    def files(self) -> dict[str, bytes]:
        """Name -> bytes of the files beside config and tensors."""
        return self.folder.files

    @property
    def tensors(self) -> dict[str, tuple[Shape, np.dtype]]:
        """Name -> shape and dtype of what `read` returns."""
        found: dict[str, tuple[Shape, np.dtype]] = {}
        for name, kind in self.folder.tensors.items():
            if name in self.quantized:
                found[name] = (self.quantized[name].shape, self.quantized[name].dtype)
            elif _owner(name) not in self.quantized:
                found[name] = kind
        return found

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Returns a tensor, or a part of it; the floats of a quantized one are rounded to its dtype."""
        if name not in self.quantized:
            return self.folder.read(name, index)
        stored = self.quantized[name]
        if stored.shape[1] % BLOCK:
            flat = self.as_stored(name)
            whole = dequantize_rows(flat.codes, flat.magnitudes).reshape(stored.shape)
            return (whole if index is None else whole[index]).astype(stored.dtype)
        packed = self.packed(name)
        rows, inputs = (slice(None), slice(None)) if index is None else index
        return dequantize_rows(packed.codes[rows], packed.magnitudes[rows], inputs).astype(stored.dtype)

    def as_stored(self, name: str) -> PackedTensor:
        """Returns a quantized tensor; of one long row where blocks run on from row to row.

        Raises:
            CheckpointError: Its parts do not fit each other.
        """
        rows, inputs = self.quantized[name].shape
        return self._packed(name, (1, rows * inputs) if inputs % BLOCK else (rows, inputs))

    def packed(self, name: str) -> PackedTensor:
        """Returns a quantized tensor as it is stored.

        Raises:
            CheckpointError: Its rows do not divide into blocks, or its parts do not fit each other.
        """
        shape = self.quantized[name].shape
        if shape[1] % BLOCK:
            raise CheckpointError(
                f"{self.folder.folder}: {name} has rows of {shape[1]} weights, over whose ends blocks of {BLOCK} run "
                "on; read it as floats, without finetune.base=nf4"
            )
        return self._packed(name, shape)

    def _packed(self, name: str, shape: tuple[int, int]) -> PackedTensor:
        blocks, offset = -(-shape[1] // BLOCK), self.quantized[name].offset
        codes = self._part(name, "", "uint8", (shape[0] * shape[1] // 2, 1)).reshape(shape[0], -1)
        levels = self._part(name, ".quant_map", "float32", (16,))
        if not np.array_equal(levels, np.array(LEVELS, np.float32)):
            raise CheckpointError(f"{self.folder.folder}: {name}.quant_map holds other levels than those of nf4")
        count = shape[0] * blocks
        if offset is None:
            return PackedTensor(codes, self._part(name, ".absmax", "float32", (count,)).reshape(shape[0], blocks))
        absmax = self._part(name, ".absmax", "uint8", (count,)).reshape(shape[0], blocks)
        nested = self._part(name, ".nested_absmax", "float32", (-(-count // NESTED_BLOCK),))
        values = self._part(name, ".nested_quant_map", "float32", (256,))
        return PackedTensor(codes, absmax, nested, offset, values)

    def _part(self, name: str, part: str, dtype: str, shape: Shape) -> np.ndarray:
        found = self.folder.tensors.get(name + part)
        if found is None or found != (shape, np.dtype(dtype)):
            has = "is missing" if found is None else f"is {found[1]}{list(found[0])}"
            raise CheckpointError(f"{self.folder.folder}: {name}{part} {has}; nf4 wants {dtype}{list(shape)} there")
        return self.folder.read(name + part)


def with_quantized(folder: FolderSource) -> FolderSource | QuantizedSource:
    """Returns a folder as a source of floats, whether or not some of its tensors are quantized.

    Raises:
        CheckpointError: A tensor is quantized in another way than nf4 in blocks of 64.
    """
    found = {}
    for name in folder.stored:
        owner, mark, kind = name.partition(STATE)
        if mark:
            found[owner] = _state(folder, name, kind)
    return QuantizedSource(folder, found) if found else folder


def _owner(name: str) -> str:
    """The weight that a part belongs to."""
    for part in (STATE, ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"):
        if part in name:
            return name.partition(part)[0]
    return name


def _state(folder: FolderSource, name: str, kind: str) -> _Stored:
    try:
        state = parse_json(bytes(folder.read(name).astype(np.uint8)).decode())
        rows, inputs = state["shape"]
        dtype, blocks = _DTYPES.get(state["dtype"]), state["blocksize"]
        offset, nested = state.get("nested_offset"), state.get("nested_blocksize", NESTED_BLOCK)
        if type(rows) is not int or type(inputs) is not int or min(rows, inputs) < 1 or rows * inputs % 2:
            raise ValueError
        offset = None if offset is None else float(offset)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{folder.folder}: {name} is no description of a quantized tensor") from None
    if kind != "nf4" or (blocks, nested) != (BLOCK, NESTED_BLOCK) or dtype is None:
        raise CheckpointError(
            f"{folder.folder}: {name} says {kind} of {state['dtype']} in blocks of {blocks} (scales in blocks of "
            f"{nested}); only nf4 in blocks of {BLOCK} and {NESTED_BLOCK} is read: save the model with these"
        )
    return _Stored((rows, inputs), dtype, offset)
