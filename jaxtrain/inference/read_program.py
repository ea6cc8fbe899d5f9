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


def load(folder: str | Path) -> Callable[[Mapping[str, Any]], dict[str, jax.Array]]:
    """Return the program as a function of named inputs; its first call for a batch size compiles it."""
    program = export.deserialize(bytearray((Path(folder) / "forward.bin").read_bytes()))
    weights = jax.device_put(read_weights(folder, program))
    forward = jax.jit(program.call)
    return lambda inputs: forward(weights, dict(inputs))


def read_weights(folder: str | Path, program: export.Exported) -> dict[str, np.ndarray]:
    """Return the first argument of the program, the arrays of weights.safetensors by name."""
    content = np.memmap(Path(folder) / "weights.safetensors", np.uint8, "r")
    start = 8 + int(content[:8].view("<u8")[0])
    entries = json.loads(bytes(content[8:start]))
    (specs, _), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    arrays = {}
    for name, spec in specs.items():
        begin, end = entries[name]["data_offsets"]
        raw = np.asarray(content[start + begin : start + end])
        arrays[name] = raw.view(spec.dtype).reshape(spec.shape)
    return arrays


if __name__ == "__main__":
    outputs: dict[str, Any] = dict(load(Path(__file__).parent)(np.load(sys.argv[1])))
    np.savez(sys.argv[2], **outputs)
