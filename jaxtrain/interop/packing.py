"""Kernels of linear layers as the quantized tensors of a published folder, one tensor at a time.

Floats are quantized as they are written, as bitsandbytes would quantize the same folder in floats. A kernel that is in
nf4 already is written as it is. Where several kernels are one tensor of the file (Phi-3, GPT-NeoX), their scales come
from double quantizations of their own, which one tensor cannot hold: such a tensor gets its scales in float32.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.interop.gather import on_main_host
from jaxtrain.interop.quantize import rows_of_outputs
from jaxtrain.precision.nf4 import Nf4Kernel
from jaxtrain.published.bitsandbytes import PackedTensor
from jaxtrain.published.bitsandbytes_writing import check_packable, quantization_config
from jaxtrain.published.entries import Entry, Row, Tied, names_of, positions
from jaxtrain.published.nf4_blocks import BLOCK, dequantize_magnitudes

Dims = tuple[int, int]
# One layer of an nf4 kernel on the host: codes, absmax, and with double quantization nested_absmax and offset.
Arrays = Mapping[str, np.ndarray]
# Row of the family's table, and position in its stack.
Part = tuple[Any, tuple[int, ...]]
KEPT: dict[str, tuple[str, ...]] = {"t5": (".wo.weight",)}
"""Family -> ends of names of weights that transformers keeps in float32."""


@dataclass(frozen=True)
class Packing:
    """Which kernels are written in nf4, and how.

    Attributes:
        linears: `Model.linears` of the model that is written: path of a kernel -> numbers of its input and output dims.
        double: Whether the scales of kernels that are floats are quantized too.
        kept: Ends of names of weights that readers keep in floats, whatever the folder says (see `KEPT`).
    """

    linears: Mapping[str, Dims]
    double: bool = True
    kept: tuple[str, ...] = ()

    def takes(self, name: str, parts: Sequence[Part]) -> bool:
        """Whether a tensor that is made of these rows is quantized: all of them are linear layers."""
        known = all(isinstance(row, Entry) and row.path in self.linears for row, _ in parts)
        return known and not name.endswith(self.kept or "\0")

    def doubles(self, parts: Sequence[Part], held: Mapping[str, Any]) -> bool:
        """Whether the scales of a tensor are written in 8 bits.

        Args:
            parts: Rows and positions that it is made of.
            held: Path -> parameter.
        """
        kernels = [held[row.path] for row, _ in parts]
        if not any(isinstance(kernel, Nf4Kernel) for kernel in kernels):
            return self.double
        (row, _), *others = parts
        return not others and kernels[0].offset is not None and _is_whole(row, self.linears[row.path])

    def check(self, name: str, parts: Sequence[Part], held: Mapping[str, Any]) -> None:
        """Raises where a tensor cannot be written in nf4.

        Raises:
            ConfigError: Its blocks are not those of our kernel, or it holds an odd number of weights.
        """
        for row, _ in parts:
            check_packable(name, row.transform.theirs)
            inputs = row.transform.theirs[1]
            if rows_of_outputs(row.transform, self.linears[row.path]) is None:
                raise ConfigError(
                    f"{name} holds a row for each input, and transformers quantizes such a layer (Conv1D) the other "
                    "way round, which is not written; leave --base (base=) out"
                )
            if isinstance(held[row.path], Nf4Kernel) and inputs % BLOCK:
                raise ConfigError(
                    f"{name} has rows of {inputs} weights, over whose ends blocks of {BLOCK} run on in files, and in "
                    f"the nf4 kernel {row.path} they do not; leave --base (base=) out to write floats"
                )
        if len({isinstance(held[row.path], Nf4Kernel) for row, _ in parts}) > 1:
            raise ConfigError(f"{name} is made of floats and of nf4 kernels; give one kind to write it in nf4")


def config_of(packing: Packing, rows: tuple[Row, ...], *, dtype: str, has_head: bool) -> dict[str, Any]:
    """Returns the `quantization_config` of a config.json.

    Args:
        packing: What is written in nf4.
        rows: The family's name table.
        dtype: Dtype of what is written in floats, and of what readers turn the rest into.
        has_head: Whether the model's last layer is one over its vocabulary, which readers leave out unasked.
    """
    skipped = None if has_head else sorted(set(_float_layers(packing, rows)))
    return quantization_config(double=packing.double, dtype=dtype, skipped=skipped)


def _float_layers(packing: Packing, rows: Iterable[Row]) -> Iterable[str]:
    """Names of what may be a linear layer and is not quantized."""
    for row in rows:
        if isinstance(row, Entry | Tied) and len(row.transform.theirs) == 2:
            for position in positions(row) if isinstance(row, Entry) else [()]:
                name = names_of(row, position)[0]
                if isinstance(row, Tied) or not packing.takes(name, [(row, position)]):
                    yield name.removesuffix(".weight")


def gather_kernel(kernel: Nf4Kernel, position: tuple[int, ...]) -> Arrays | None:
    """Returns one layer of a kernel on the main process, and None on the others; every process calls this."""
    names = ("codes", "absmax") if kernel.offset is None else ("codes", "absmax", "nested_absmax", "offset")
    found = {name: on_main_host(getattr(kernel, name), position) for name in names}
    return {name: array for name, array in found.items() if array is not None} or None


def join_kernels(parts: Sequence[tuple[Entry, Arrays]], linears: Mapping[str, Dims]) -> PackedTensor:
    """Returns the quantized tensor that layers of nf4 kernels are: each of them takes rows of it.

    Args:
        parts: Row and arrays of each.
        linears: Path -> numbers of input and output dims.
    """
    row, arrays = parts[0]
    if len(parts) == 1 and _is_whole(row, linears[row.path]):
        codes, absmax = _by_output(arrays["codes"]), _by_output(arrays["absmax"])
        if "offset" not in arrays:
            return PackedTensor(codes, absmax)
        return PackedTensor(codes, absmax, arrays["nested_absmax"], float(arrays["offset"]))
    outputs, inputs = row.transform.theirs
    codes = np.zeros((outputs, inputs // 2), np.uint8)
    absmax = np.zeros((outputs, inputs // BLOCK), np.float32)
    for row, arrays in parts:
        rows = rows_of_outputs(row.transform, linears[row.path])
        codes[rows], magnitudes = _by_output(arrays["codes"]), _by_output(arrays["absmax"])
        if "offset" in arrays:
            magnitudes = dequantize_magnitudes(magnitudes, arrays["nested_absmax"], float(arrays["offset"]))
        absmax[rows] = magnitudes
    return PackedTensor(codes, absmax)


def _by_output(array: np.ndarray) -> np.ndarray:
    """[n, *F] -> [F, n]."""
    return np.ascontiguousarray(array.reshape(len(array), -1).T)


def _is_whole(row: Entry, dims: Dims) -> bool:
    """Whether the outputs of a kernel are all rows of its tensor, in order."""
    rows = rows_of_outputs(row.transform, dims)
    return rows is not None and np.array_equal(rows, np.arange(row.transform.theirs[0]))
