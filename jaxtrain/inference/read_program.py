"""Runs the program of this folder: `python read.py INPUTS.npz OUTPUTS.npz`, or `load(folder)` from Python.

It needs jax and flatbuffers alone. program.json says what the program takes and gives.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

_DTYPES = {"F": "float", "I": "int", "U": "uint"}
_OTHERS = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool"}


def read_weights(file: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file by name; no byte is read before it is used."""
    content = np.memmap(file, np.uint8, "r")
    start = 8 + int(content[:8].view("<u8")[0])
    entries = json.loads(bytes(content[8:start]))
    entries.pop("__metadata__", None)
    arrays = {}
    for name, entry in entries.items():
        kind = entry["dtype"]
        dtype = jax.numpy.dtype(_OTHERS.get(kind) or _DTYPES[kind[0]] + kind[1:])
        begin, end = entry["data_offsets"]
        raw = np.asarray(content[start + begin : start + end])
        arrays[name] = raw.view(dtype).reshape(entry["shape"])
    return arrays


def load(folder: str | Path) -> Callable[[Mapping[str, Any]], dict[str, jax.Array]]:
    """Return the program as a function of named inputs; its first call for a batch size compiles it."""
    program = export.deserialize(bytearray((Path(folder) / "forward.bin").read_bytes()))
    weights = jax.device_put(read_weights(Path(folder) / "weights.safetensors"))
    forward = jax.jit(program.call)
    return lambda inputs: forward(weights, dict(inputs))


if __name__ == "__main__":
    outputs: dict[str, Any] = dict(load(Path(__file__).parent)(np.load(sys.argv[1])))
    np.savez(sys.argv[2], **outputs)
