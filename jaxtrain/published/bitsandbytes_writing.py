"""Tensors quantized to nf4 as bitsandbytes writes them into safetensors files. No jax here.

Names and parts are those of `jaxtrain.published.bitsandbytes`, which reads them.
"""

import json
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.published.bitsandbytes import STATE, PackedTensor
from jaxtrain.published.nf4_blocks import (
    BLOCK,
    LEVELS,
    NESTED_BLOCK,
    dynamic_map,
    quantize_magnitudes,
    quantize_rows,
)
from jaxtrain.published.transforms import Shape

Kind = tuple[Shape, np.dtype]
_BYTE, _FLOAT = np.dtype(np.uint8), np.dtype(np.float32)
# Above the length of any description: it holds two sizes and a float beside fixed words.
_LONGEST_STATE = 256


def pack_floats(weight: np.ndarray, *, double: bool) -> PackedTensor:
    """Quantizes a weight as bitsandbytes does: blocks run on from row to row where rows do not divide into them.

    Args:
        weight: [R, I] of any float dtype, R * I even.
        double: Whether the magnitudes are quantized too.

    Returns:
        Codes and magnitudes of R rows; of one long row where I does not divide by 64.
    """
    rows = weight if weight.shape[1] % BLOCK == 0 else weight.reshape(1, -1)
    codes, absmax = quantize_rows(rows)
    if not double:
        return PackedTensor(codes, absmax)
    small, nested, offset = quantize_magnitudes(absmax)
    return PackedTensor(codes, small, nested, float(offset))


def check_packable(name: str, shape: Shape) -> None:
    """Raises where a weight cannot be packed into bytes.

    Raises:
        ConfigError: It holds an odd number of weights.
    """
    if prod(shape) % 2:
        raise ConfigError(
            f"{name} has the shape {list(shape)}, an odd number of weights, and nf4 stores two in a byte; write floats"
        )


def packed_kinds(name: str, shape: Shape, *, double: bool) -> dict[str, Kind]:
    """Returns name -> shape and dtype of the tensors that a weight is stored as; its description may be shorter.

    Args:
        name: Of the weight.
        shape: [R, I].
        double: Whether the magnitudes are quantized too.
    """
    blocks = -(-prod(shape) // BLOCK)
    kinds: dict[str, Kind] = {
        name: ((prod(shape) // 2, 1), _BYTE),
        f"{name}.absmax": ((blocks,), _BYTE if double else _FLOAT),
        f"{name}.quant_map": ((len(LEVELS),), _FLOAT),
    }
    if double:
        kinds[f"{name}.nested_absmax"] = ((-(-blocks // NESTED_BLOCK),), _FLOAT)
        kinds[f"{name}.nested_quant_map"] = ((256,), _FLOAT)
    return {**kinds, state_name(name): ((_LONGEST_STATE,), _BYTE)}


def state_name(name: str) -> str:
    """Returns the name of the description of a quantized weight."""
    return f"{name}{STATE}nf4"


def packed_parts(name: str, packed: PackedTensor, shape: Shape, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Returns name and array of the tensors that a weight is stored as, in the order of `packed_kinds`.

    Args:
        name: Of the weight.
        packed: Its codes and magnitudes.
        shape: [R, I].
        dtype: float32, float16 or bfloat16: what readers turn it into.
    """
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": dtype, "shape": list(shape)}
    yield name, packed.codes.reshape(-1, 1)
    yield f"{name}.absmax", packed.absmax.reshape(-1)
    yield f"{name}.quant_map", np.array(LEVELS, np.float32)
    if packed.nested_absmax is not None and packed.offset is not None:
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(packed.offset)}
        yield f"{name}.nested_absmax", packed.nested_absmax
        yield f"{name}.nested_quant_map", dynamic_map() if packed.values is None else packed.values
    yield state_name(name), np.frombuffer(json.dumps(state).encode(), np.uint8)


def quantization_config(*, double: bool, dtype: str, skipped: Sequence[str] | None) -> dict[str, Any]:
    """Returns what a config.json says of such tensors.

    Args:
        double: Whether the magnitudes are quantized too.
        dtype: Dtype that other readers compute in.
        skipped: Names of the linear layers that are stored as floats; None: those that readers leave out unasked (the
            output layer).
    """
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": None if skipped is None else list(skipped),
    }
