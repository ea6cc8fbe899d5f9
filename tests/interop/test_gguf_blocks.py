"""Quantized blocks become the float32 that ggml's own package makes of them, to the last bit."""

from pathlib import Path

import numpy as np
import pytest

from jaxtrain.published.gguf_blocks import BLOCK_TYPES, dequantize

FIXTURE = Path(__file__).with_name("gguf_blocks.npz")
KINDS = {kind.name: kind for kind in BLOCK_TYPES.values() if kind.decode is not None}


@pytest.mark.parametrize("name", KINDS)
def test_blocks_equal_the_oracle_to_the_last_bit(name):
    with np.load(FIXTURE) as arrays:
        blocks, expected = arrays[f"{name}_blocks"], arrays[f"{name}_expected"]
    found = dequantize(blocks, KINDS[name])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_a_damaged_scale_gives_values_that_are_not_finite_and_no_warning():
    blocks = np.full((1, 18), 0xFF, np.uint8)  # The scale is not a number.
    assert np.isnan(dequantize(blocks, KINDS["Q4_0"])).all()
