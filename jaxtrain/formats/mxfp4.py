"""Weights of experts in MXFP4, as gpt-oss is published. No jax here.

32 numbers along the input share a power of two (an exponent less 127 in a byte), and each is a code of 4 bits (sign,
two bits of exponent, one of mantissa), two to a byte, the first in its low half. A tensor NAME [E, I, O] is stored as

    NAME_blocks   uint8 [E, O, I / 32, 16]
    NAME_scales   uint8 [E, O, I / 32]

Source: Open Compute Project, OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxtrain.formats.rows import Kind
from jaxtrain.formats.safetensors import FolderSource

_BLOCK = 32
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_BLOCKS, _SCALES = "_blocks", "_scales"


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the numbers, bfloat16 [E, I, O], of blocks [E, O, I / 32, 16] and their scales [E, O, I / 32]."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, _BLOCK)
    numbers = np.ldexp(_VALUES[codes], scales.astype(np.int32)[..., None] - 127).astype(ml_dtypes.bfloat16)
    return numbers.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


@dataclass(frozen=True)
class Mxfp4Source(FolderSource):
    """A published folder that reads as one of floats."""

    @property
    def tensors(self) -> dict[str, Kind]:
        """Name -> shape and dtype of what `read` returns."""
        found = {}
        for name, (shape, dtype) in super().tensors.items():
            if name.endswith(_BLOCKS):
                experts, outputs, blocks, _ = shape
                dtype = np.dtype(ml_dtypes.bfloat16)
                found[name.removesuffix(_BLOCKS)] = ((experts, blocks * _BLOCK, outputs), dtype)
            elif not name.endswith(_SCALES):
                found[name] = (shape, dtype)
        return found

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor; the floats of a quantized one are bfloat16."""
        if name in self.stored:
            return super().read(name)
        # In one piece: what reads it asks for a tensor at a time.
        return np.ascontiguousarray(dequantize(super().read(name + _BLOCKS), super().read(name + _SCALES)))


def with_mxfp4(folder: FolderSource) -> FolderSource:
    """Returns a folder as a source of floats."""
    quantized = any(name.endswith(_BLOCKS) for name in folder.stored)
    return Mxfp4Source(folder.folder, folder.config, folder.stored) if quantized else folder
