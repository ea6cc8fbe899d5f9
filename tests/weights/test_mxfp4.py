"""MXFP4 of gpt-oss: the numbers of a block by its definition, and a folder that reads as one of floats."""

import json

import numpy as np

from jaxtrain.formats.mxfp4 import with_mxfp4
from jaxtrain.formats.safetensors import open_folder, write_safetensors


def number(code: int, scale: int) -> float:
    """Sign, two bits of exponent with a bias of 1, one of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = (-1) ** (code >> 3), (code >> 1) & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return sign * magnitude * 2.0 ** (scale - 127)


def test_a_folder_of_blocks_and_scales_reads_as_floats(tmp_path):
    draws = np.random.default_rng(0)
    blocks = draws.integers(0, 256, (2, 3, 2, 16), dtype=np.uint8)
    scales = draws.integers(120, 135, (2, 3, 2), dtype=np.uint8)
    name, plain = "model.layers.0.mlp.experts.down_proj", np.ones(3, np.float32)
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales, "plain": plain}
    kinds = {name: (array.shape, array.dtype) for name, array in tensors.items()}
    write_safetensors(tmp_path / "model.safetensors", kinds, tensors.items())
    said = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    source = with_mxfp4(open_folder(tmp_path))
    assert source.tensors.keys() == {name, "plain"}
    assert "quantization_config" not in source.config
    found = source.read(name)
    assert (found.shape, found.dtype) == source.tensors[name]
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(2, 3, 64)
    for expert, output, at in np.ndindex(codes.shape):
        wanted = number(int(codes[expert, output, at]), int(scales[expert, output, at // 32]))
        assert float(found[expert, at, output]) == wanted
    np.testing.assert_array_equal(source.read("plain"), plain)
