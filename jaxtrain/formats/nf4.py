"""4-bit normal floats (Dettmers et al. 2023, arXiv 2305.14314) in NumPy, and as bitsandbytes stores them in files.
No jax here.

A row of weights is divided into blocks of 64. A block is stored as its largest magnitude (`absmax`) and a code of 4
bits per weight: the nearest of 16 levels between -1 and 1, which are quantiles of a normal distribution. Two codes
share a byte, the first in its high half. Double quantization stores the magnitudes in 8 bits too: less their mean
(`offset`), in blocks of 256, each a code of the dynamic 8-bit map times the block's own largest magnitude
(`nested_absmax`).

Codes and magnitudes equal those of bitsandbytes 0.50.2 on CPU to the last bit wherever I divides by 64; elsewhere
bitsandbytes lets blocks run on into the next row, and ours end with theirs. The mean is the exact one, rounded; that of
torch depends on the CPU and its threads in the last bit. Magnitudes below 2**-126 count as 0.

In a safetensors file a weight [out, in] is

    NAME                                    uint8 [out * in / 2, 1]   packed codes, row by row
    NAME.absmax                             float32 [blocks], or uint8 [blocks] with double quantization
    NAME.quant_map                          float32 [16]              the levels
    NAME.nested_absmax                      float32 [N]               double quantization only, as is the next
    NAME.nested_quant_map                   float32 [256]             the 8-bit map
    NAME.quant_state.bitsandbytes__nf4      uint8                     JSON: shape, dtype, block sizes, nested_offset

Shapes: R rows (outputs), I inputs, B = ceil(I / 64) blocks of a row, N = ceil(R B / 256) blocks of blocks.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from jaxtrain.errors import CheckpointError
from jaxtrain.formats.rows import Kind, Shape
from jaxtrain.formats.safetensors import DTYPES, FolderSource

BLOCK = 64
NESTED_BLOCK = 256
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 levels, as the paper's code publishes them."""
SMALLEST = np.finfo(np.float32).smallest_normal


@cache
def level_bounds() -> np.ndarray:
    """Returns the middles of neighbouring levels: float32 [15]; a weight above a middle takes the upper level."""
    levels = np.array(LEVELS, np.float32)
    return (levels[:-1] + levels[1:]) / 2


@cache
def dynamic_map() -> np.ndarray:
    """Returns the signed dynamic 8-bit map (Dettmers 2015, arXiv 1511.04561): float32 [256], increasing.

    For each of seven decades, 10**-6 to 1, it holds the middles of 2**i equal parts of the interval from 0.1 to 1, i
    the number of the decade, with both signs; and 0 and 1.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        # In float32, as torch's linspace has it: an edge is reckoned from the nearer end and rounded once.
        count = 2**decade
        tenth, place = np.float32(0.1), np.arange(count + 1)
        step = np.float64((np.float32(1) - tenth) / np.float32(count))
        edges = np.where(place < (count + 1) // 2, tenth + step * place, 1 - step * (count - place)).astype(np.float32)
        middles = (edges[:-1] + edges[1:]) / np.float32(2) * np.float32(10.0 ** (decade - 6))
        found += [*middles.tolist(), *(-middles).tolist()]
    return np.sort(np.array(found, np.float32))


@cache
def dynamic_bounds() -> np.ndarray:
    """Returns the smallest number that gets each code of `dynamic_map` but the first: float32 [255], not decreasing.

    bitsandbytes rounds a number from -1 to 1 to a grid of 2**16 points first and takes the nearest value of the map
    then, so that some values near 0 are never taken. The bounds are found by bisection over float32.
    """
    grid = np.arange(2**16) / 32767.5 - 1
    values = dynamic_map().astype(np.float64)
    right = np.clip(np.searchsorted(values, grid), 1, 255)
    nearest = np.where(values[right] - grid < grid - values[right - 1], right, right - 1)

    def code(numbers: np.ndarray) -> np.ndarray:
        point = (numbers + np.float32(1)) * np.float32(32767.5) + np.float32(0.5)
        return nearest[np.clip(point.astype(np.int64), 0, 2**16 - 1)]

    wanted = np.arange(1, 256)
    # Places of -1 and of 1 among all float32, in their order.
    one = int(np.float32(1).view(np.int32))
    low, high = np.full(255, -one), np.full(255, one)
    while np.any(high - low > 1):
        middle = (low + high) // 2
        reached = code(_number(middle)) >= wanted
        low, high = np.where(reached, low, middle), np.where(reached, middle, high)
    return _number(high)


def _number(order: np.ndarray) -> np.ndarray:
    """The float32 of each place among all float32."""
    return np.where(order < 0, -order + 2**31, order).astype(np.uint32).view(np.float32)


def dequantize_magnitudes(codes: np.ndarray, nested_absmax: np.ndarray, offset: float) -> np.ndarray:
    """Returns the magnitudes, float32 [R, B], that codes, uint8 [R, B], nested ones, float32 [N], and offset mean."""
    scales = np.repeat(nested_absmax, NESTED_BLOCK)[: codes.size].reshape(codes.shape)
    return dynamic_map()[codes] * scales + np.float32(offset)


def dequantize_rows(codes: np.ndarray, absmax: np.ndarray) -> np.ndarray:
    """Returns the weights, float32 [R, I], of packed codes, uint8 [R, I / 2], and magnitudes, float32 [R, B]."""
    levels = np.array(LEVELS, np.float32)
    pairs = np.stack([np.repeat(levels, 16), np.tile(levels, 16)], axis=1)
    rows = pairs[codes].reshape(len(codes), -1)
    return rows * absmax[:, np.arange(rows.shape[1]) // BLOCK]


@dataclass(frozen=True)
class PackedTensor:
    """A quantized weight [R, I] as it is stored.

    Attributes:
        codes: uint8 [R, I / 2].
        absmax: float32 [R, I / 64], or uint8 with double quantization.
        nested_absmax: float32 [N]; None without double quantization, as is the next.
        offset: What was taken off the magnitudes.
    """

    codes: np.ndarray
    absmax: np.ndarray
    nested_absmax: np.ndarray | None = None
    offset: float | None = None

    @property
    def magnitudes(self) -> np.ndarray:
        """float32 [R, I / 64]: the largest magnitudes of the blocks."""
        if self.nested_absmax is None or self.offset is None:
            return self.absmax
        return dequantize_magnitudes(self.absmax, self.nested_absmax, self.offset)


# What stands before the kind in the name of a description, and the other parts of a weight.
_STATE = ".quant_state.bitsandbytes__"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_DTYPES = {"float32": DTYPES["F32"], "float16": DTYPES["F16"], "bfloat16": DTYPES["BF16"]}


@dataclass(frozen=True)
class QuantizedSource(FolderSource):
    """A published folder that reads as one of floats: quantized name -> shape, dtype, offset of its magnitudes."""

    quantized: Mapping[str, tuple[Shape, np.dtype, float | None]]

    @property
    def tensors(self) -> dict[str, Kind]:
        """Name -> shape and dtype of what `read` returns."""
        parts = {name + part for name in self.quantized for part in (*_PARTS, f"{_STATE}nf4")}
        plain = {name: kind for name, kind in super().tensors.items() if name not in parts}
        return plain | {name: (shape, dtype) for name, (shape, dtype, _) in self.quantized.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor; the floats of a quantized one are rounded to its dtype."""
        if name not in self.quantized:
            return super().read(name)
        shape, dtype, _ = self.quantized[name]
        packed = self.packed(name)
        return dequantize_rows(packed.codes, packed.magnitudes).reshape(shape).astype(dtype)

    def packed(self, name: str) -> PackedTensor:
        """Returns a quantized tensor; of one long row where blocks run on from row to row."""
        (rows, inputs), _, offset = self.quantized[name]
        rows, inputs = (1, rows * inputs) if inputs % BLOCK else (rows, inputs)
        blocks = -(-inputs // BLOCK)
        codes = self._part(name, "", "uint8", (rows * inputs // 2, 1)).reshape(rows, -1)
        self._part(name, ".quant_map", "float32", (16,), np.array(LEVELS, np.float32))
        dtype = "float32" if offset is None else "uint8"
        absmax = self._part(name, ".absmax", dtype, (rows * blocks,)).reshape(rows, blocks)
        if offset is None:
            return PackedTensor(codes, absmax)
        nested = self._part(name, ".nested_absmax", "float32", (-(-rows * blocks // NESTED_BLOCK),))
        # torch's 8-bit map differs in the last bit of some values by the CPU.
        self._part(name, ".nested_quant_map", "float32", (256,), dynamic_map())
        return PackedTensor(codes, absmax, nested, offset)

    def _part(self, name: str, part: str, dtype: str, shape: Shape, levels: np.ndarray | None = None) -> np.ndarray:
        found = super().tensors.get(name + part)
        array = super().read(name + part) if found == (shape, np.dtype(dtype)) else None
        if array is None or (levels is not None and np.abs(array - levels).max() > 1e-6):
            raise CheckpointError(
                f"{self.folder}: {name}{part} is {found or 'missing'}; nf4 wants {dtype}{list(shape)} there, "
                "and its own levels"
            )
        return array


def with_quantized(folder: FolderSource) -> FolderSource | QuantizedSource:
    """Returns a folder as a source of floats; a CheckpointError where tensors are quantized otherwise than in nf4."""
    found = {}
    for name in folder.stored:
        owner, mark, kind = name.partition(_STATE)
        if not mark:
            continue
        state = json.loads(folder.read(name).tobytes())
        (rows, inputs), dtype, offset = state["shape"], _DTYPES[state["dtype"]], state.get("nested_offset")
        sizes = (state["blocksize"], state.get("nested_blocksize", NESTED_BLOCK))
        if kind != "nf4" or sizes != (BLOCK, NESTED_BLOCK):
            raise CheckpointError(
                f"{folder.folder}: {name} says {kind} in blocks of {sizes}; only nf4 in blocks of {BLOCK} and "
                f"{NESTED_BLOCK} is supported: save the model with these"
            )
        found[owner] = ((rows, inputs), dtype, None if offset is None else float(offset))
    return QuantizedSource(folder.folder, folder.config, folder.stored, found) if found else folder
