"""Makes tests/interop/gguf_blocks.npz: random blocks of each quantized GGUF type, and their float32.

Run it in an environment with the package `gguf` (the extra `oracle`):

    python scripts/make_gguf_fixtures.py tests/interop/gguf_blocks.npz
"""

import sys

import gguf
import numpy as np

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
BLOCKS = 3


def main() -> None:
    rng = np.random.default_rng(13)
    arrays = {}
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        _, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
        # Scales of real sizes: random bytes would be infinite or too small to tell apart. One is negative.
        scales = np.array([[0.0123, 0.51], [-3.7, 0.002], [6e-8, 11.0]], np.float16).view(np.uint8)
        if name == "Q6_K":
            blocks[:, 208:] = scales[:, :2]
        elif name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
            blocks[:, :4] = scales
        else:
            blocks[:, :2] = scales[:, :2]
        arrays[f"{name}_blocks"] = blocks
        arrays[f"{name}_expected"] = gguf.dequantize(blocks, kind)
    np.savez_compressed(sys.argv[1], **arrays)


if __name__ == "__main__":
    main()
