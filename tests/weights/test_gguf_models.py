"""A GGUF file says the same as the published folder that it was made from: every tensor, and every key of our model."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from gguf_files import gguf_bytes, metadata_of, q8_0, string, tensors_of

import jaxtrain as jt
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.families.table import FAMILIES
from jaxtrain.formats.gguf import BLOCK_TYPES, dequantize, read_gguf, read_tensor
from jaxtrain.formats.gguf_model import open_gguf
from jaxtrain.formats.safetensors import open_folder

PUBLISHED = Path(__file__).with_name("published")
NAMES = (
    *("llama", "llama31", "smollm2", "mistral", "mixtral", "qwen2", "qwen2_yarn", "qwen3", "qwen3_moe"),
    *("gemma2", "gemma3_text", "phi3", "phi3_longrope", "gpt2"),
)


def convert(name, folder, *, metadata=(), tensors=()):
    """The GGUF file of a published folder, with keys changed and tensors added."""
    source = open_folder(PUBLISHED / name)
    arrays = tensors_of(source.config, {one: np.array(source.read(one)) for one in source.tensors}) | dict(tensors)
    path = folder / f"{name}.gguf"
    path.write_bytes(gguf_bytes(metadata_of(source.config) | dict(metadata), arrays))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_tensors_and_keys_are_the_published_ones(name, tmp_path):
    expected, found = open_folder(PUBLISHED / name), open_gguf(convert(name, tmp_path))
    published = dict(expected.config)
    if name.startswith("gemma"):
        # GGUF has no key for it; the fixture's own value is one that no published model has.
        published["query_pre_attn_scalar"] = published["head_dim"]
    family = FAMILIES[published["model_type"]]
    assert family.from_published(json.loads(json.dumps(found.config))) == family.from_published(published)
    assert found.tensors == expected.tensors
    # Gemma's norms went through w + 1 - 1 in float32; everything else is moved and not computed.
    tolerance = 2**-23 if name.startswith("gemma") else 0
    for tensor in expected.tensors:
        whole = np.array(expected.read(tensor))
        np.testing.assert_allclose(found.read(tensor), whole, rtol=0, atol=tolerance, err_msg=tensor)


WRONG = {
    "an architecture": (dict(metadata={"general.architecture": "mamba"}), ConfigError, "mamba; the known"),
    "a part": (dict(metadata={"split.count": 3}), ConfigError, "is a part of a model; merge the parts with"),
    "layers that differ": (
        dict(metadata={"llama.attention.head_count_kv": [1, 2]}),
        ConfigError,
        "has llama.attention.head_count_kv: [1, 2], which is not supported; it must be one number above 0",
    ),
    "a table of frequencies": (
        dict(tensors={"rope_freqs.weight": np.float32([1, 7, 2, 3])}),
        ConfigError,
        "has a table rope_freqs that is not of Llama 3",
    ),
    "a strange tensor": (
        dict(tensors={"blk.0.ssm_a.weight": np.ones(4, np.float32), "v.patch": np.ones(4, np.float32)}),
        CheckpointError,
        "holds the tensor blk.0.ssm_a.weight, which llama does not have",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_is_not_supported_is_one_line(change, error, message, tmp_path):
    path = convert("llama", tmp_path, **change)
    with pytest.raises(error) as caught:
        open_gguf(path)
    told = str(caught.value)
    assert str(path) in told
    assert message in told
    assert "\n" not in told


def test_logits_are_those_of_transformers(tmp_path):
    """Of one family: the tensors and keys of all are compared above."""
    with np.load(PUBLISHED / "llama" / "expected.npz") as arrays:
        tokens, expected = arrays["tokens"], arrays["logits"]
    pretrained = jt.load_pretrained(convert("llama", tmp_path), model={"attention": "reference"})
    found = jax.jit(lambda params: pretrained.model.apply(params, {}, tokens, key=None, train=False)[0])(
        pretrained.params
    )
    # As for folders: float32 sums in another order, as a share of the range.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.ptp(expected))


MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)
TWO = {"a": MATRIX, "b": np.float16(MATRIX)}


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_are_read(tmp_path, version):
    metadata = {"name": "it", "yes": True, "many": ["x", "é"], "numbers": [3, 4]}
    numbers = {"eps": ("f32", 1e-5), "big": ("u64", 2**40)}
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes(metadata | numbers, TWO, version=version))
    file = read_gguf(path)
    assert file.metadata == metadata | {"eps": 1e-5, "big": 2**40}
    assert {name: (one.shape, one.kind.name) for name, one in file.tensors.items()} == {
        "a": ((3, 4), "F32"),
        "b": ((3, 4), "F16"),
    }
    for name, array in TWO.items():
        found = read_tensor(file, name)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


def test_an_expert_of_blocks_is_read_alone(tmp_path):
    tensor, expected = q8_0(np.random.default_rng(0).normal(size=(2, 6, 96)).astype(np.float32))
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes({}, {"w": tensor}))
    np.testing.assert_array_equal(read_tensor(read_gguf(path), "w", 1), expected[1])


def entry(name="a", shape=(3, 4), kind=0, offset=0):
    return gguf_bytes({}, TWO, entries=[(name, shape, kind, offset)])


def changed(given, old, new):
    return gguf_bytes({"k": given}, {}).replace(old, new)


WRONG_FILES = {
    "another format": (b"{}" * 20, "supported is GGUF version 2 or 3, little-endian"),
    "a string past the end": (changed("v", string("v"), b"\0\0\1\0\0\0\0\0v"), "65536 bytes at byte"),
    "a type that is not read": (entry(kind=16), "the tensor a is stored in ggml's type 16; supported types: F32"),
    "an alignment of 0": (gguf_bytes({"general.alignment": 0}, TWO), "is missing or damaged"),
    "an alignment that is a text": (gguf_bytes({"general.alignment": "32"}, TWO), "is missing or damaged"),
    "no sizes": (entry(shape=()), "is missing or damaged"),
    "half a block": (entry(kind=8), "the tensor a Q8_0[3, 4] is not stored as whole blocks"),
    "a huge shape": (entry(shape=(2**62, 2**62)), "is not stored as whole blocks"),
    "a truncated file": (gguf_bytes({}, TWO)[:-8], "the tensor b F16[3, 4] is not stored as"),
}


@pytest.mark.parametrize(("content", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_wrong_file_is_one_line(tmp_path, content, message):
    path = tmp_path / "wrong.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    told = str(caught.value)
    assert str(path) in told
    assert message in told
    assert "\n" not in told


FIXTURE = Path(__file__).with_name("gguf_blocks.npz")
KINDS = {kind.name: kind for kind in BLOCK_TYPES.values() if kind.decode is not None}


def test_blocks_equal_the_oracle_to_the_last_bit():
    """The float32 that ggml's own package makes of each type of blocks."""
    with np.load(FIXTURE) as arrays:
        for name, kind in KINDS.items():
            expected = arrays[f"{name}_expected"]
            found = dequantize(arrays[f"{name}_blocks"].reshape(-1), kind).reshape(expected.shape)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32), err_msg=name)
