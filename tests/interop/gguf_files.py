"""Writes small GGUF files, right and wrong, byte by byte: the reader under test has no writer."""

import math
import struct

import numpy as np

NUMBERS = {"u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "u64": (10, "<Q")}


def string(text):
    encoded = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value(given):
    """The type and the bytes of a value; ("f32", 0.5) says which number it is."""
    if isinstance(given, bool):
        return struct.pack("<IB", 7, given)
    if isinstance(given, str):
        return struct.pack("<I", 8) + string(given)
    if isinstance(given, tuple):
        number, form = NUMBERS[given[0]]
        return struct.pack("<I", number) + struct.pack(form, given[1])
    if isinstance(given, list):
        parts = [value(one) for one in given]
        return struct.pack("<I", 9) + parts[0][:4] + struct.pack("<Q", len(given)) + b"".join(one[4:] for one in parts)
    return value(("u32", given) if isinstance(given, int) else ("f32", given))


def gguf_bytes(metadata, tensors, *, version=3, alignment=32, entries=None, letters=b"GGUF", counts=None):
    """The bytes of a file.

    Args:
        metadata: Key -> value, or a list of pairs.
        tensors: Name -> array: float32, float16, or (number of a ggml type, shape, bytes).
        entries: In place of the table of tensors: (name, shape, type, offset) each.
        counts: In place of the numbers of tensors and of keys.
    """
    pairs = list(metadata.items()) if isinstance(metadata, dict) else metadata
    table, content = [], b""
    for name, array in tensors.items():
        if isinstance(array, tuple):
            kind, shape, data = array
        else:
            kind, shape, data = (
                {np.dtype(np.float32): 0, np.dtype(np.float16): 1}[array.dtype],
                array.shape,
                array.tobytes(),
            )
        content += bytes(-len(content) % alignment)
        table.append((name, shape, kind, len(content)))
        content += data
    table = table if entries is None else entries
    num_tensors, num_keys = counts or (len(table), len(pairs))
    out = letters + struct.pack("<IQQ", version, num_tensors, num_keys)
    for key, given in pairs:
        out += string(key) + value(given)
    for name, shape, kind, offset in table:
        out += string(name) + struct.pack("<I", len(shape))
        out += b"".join(struct.pack("<Q", size) for size in reversed(shape)) + struct.pack("<IQ", kind, offset)
    return out + bytes(-len(out) % alignment) + content


def q8_0(array):
    """A tensor as Q8_0 blocks and the float32 values that these blocks stand for."""
    groups = array.reshape(-1, 32)
    scales = (np.abs(groups).max(axis=1, keepdims=True) / 127).astype(np.float16)
    q = np.round(groups / scales.astype(np.float32)).astype(np.int8)
    blocks = np.concatenate([scales.view(np.uint8), q.view(np.uint8)], axis=1)
    assert blocks.size == math.prod(array.shape) // 32 * 34
    return (8, array.shape, blocks.tobytes()), (q * scales.astype(np.float32)).reshape(array.shape)
