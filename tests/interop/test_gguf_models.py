"""A GGUF file says the same as the published folder that it was made from: every tensor, and every key of our model."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from gguf_files import gguf_bytes, metadata_of, tensors_of

import jaxtrain as jt
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.published.families.table import FAMILIES
from jaxtrain.published.folder import open_folder
from jaxtrain.published.gguf_source import open_gguf

PUBLISHED = Path(__file__).with_name("published")
NAMES = (
    *("llama", "llama31", "smollm2", "mistral", "mixtral", "qwen2", "qwen2_yarn", "qwen3", "qwen3_moe"),
    *("gemma2", "gemma3_text", "phi3", "phi3_longrope", "gpt2"),
)


def convert(name, folder, *, metadata=(), without=(), tensors=()):
    """The GGUF file of a published folder, with keys changed, left out, and tensors added."""
    source = open_folder(PUBLISHED / name)
    keys = metadata_of(source.config) | dict(metadata)
    arrays = tensors_of(source.config, {one: np.array(source.read(one)) for one in source.tensors}) | dict(tensors)
    path = folder / f"{name}.gguf"
    path.write_bytes(gguf_bytes({key: one for key, one in keys.items() if key not in without}, arrays))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_the_published_ones(name, tmp_path):
    expected, found = open_folder(PUBLISHED / name), open_gguf(convert(name, tmp_path))
    assert found.tensors == expected.tensors
    # Gemma's norms went through w + 1 - 1 in float32; everything else is moved and not computed.
    tolerance = 2**-23 if name.startswith("gemma") else 0
    for tensor, (shape, _) in expected.tensors.items():
        whole = np.array(expected.read(tensor))
        np.testing.assert_allclose(found.read(tensor), whole, rtol=0, atol=tolerance, err_msg=tensor)
        part = tuple(slice(size // 4, size - size // 3) for size in shape)
        np.testing.assert_allclose(found.read(tensor, part), whole[part], rtol=0, atol=tolerance, err_msg=tensor)


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_our_model_are_the_published_ones(name, tmp_path):
    published = dict(open_folder(PUBLISHED / name).config)
    if name.startswith("gemma"):
        # GGUF has no key for it; the fixture's own value is one that no published model has.
        published["query_pre_attn_scalar"] = published["head_dim"]
    family = FAMILIES[published["model_type"]]
    config = json.loads(json.dumps(open_gguf(convert(name, tmp_path)).config))
    assert family.from_published(config) == family.from_published(published)


def test_quantized_rows_are_put_back_in_order(tmp_path):
    """The rows of a quantized projection move as whole rows of blocks."""
    from gguf_files import q8_0

    weight = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    stored, values = q8_0(weight)
    config = json.loads((PUBLISHED / "llama" / "config.json").read_text())
    wide = {"llama.embedding_length": 32}
    path = convert("llama", tmp_path, metadata=wide, tensors={"blk.0.attn_q.weight": stored})
    heads = config["num_attention_heads"]
    expected = values.reshape(heads, -1, 2, 32).swapaxes(1, 2).reshape(32, 32)
    source = open_gguf(path)
    index = (slice(5, 20), slice(3, 30))
    np.testing.assert_array_equal(source.read("model.layers.0.self_attn.q_proj.weight", index), expected[index])


WRONG = {
    "no architecture": (
        dict(without=("general.architecture",)),
        ConfigError,
        "has general.architecture: None; the known",
    ),
    "an architecture": (
        dict(metadata={"general.architecture": "mamba"}),
        ConfigError,
        "architecture: 'mamba'; the known",
    ),
    "a part": (dict(metadata={"split.count": 3}), ConfigError, "is one of 3 parts of a model; merge them with"),
    "a missing key": (dict(without=("llama.block_count",)), ConfigError, "does not state llama.block_count"),
    "an unknown key": (
        dict(metadata={"llama.attention.scale": ("f32", 0.25)}),
        ConfigError,
        "has llama.attention.scale: 0.25, which is not supported; no family knows the key",
    ),
    "layers that differ": (
        dict(metadata={"llama.attention.head_count_kv": [1, 2]}),
        ConfigError,
        "has llama.attention.head_count_kv: [1, 2], which is not supported; one number for all layers is read",
    ),
    "no heads": (
        dict(metadata={"llama.attention.head_count": 0}),
        ConfigError,
        "has llama.attention.head_count: 0, which is not supported; it has to be a finite number above 0",
    ),
    "more heads than numbers": (
        dict(metadata={"llama.attention.head_count": 32}),
        ConfigError,
        "has llama.attention.head_count: 32, which is not supported; embedding_length is 16",
    ),
    "more layers than tensors": (
        dict(metadata={"llama.block_count": 2**32 - 1}),
        ConfigError,
        "has llama.block_count: 4294967295, which is not supported; the file holds 21 tensors",
    ),
    "more experts than there are": (
        dict(
            metadata={"llama.expert_count": 2**32 - 1, "llama.expert_used_count": 2},
            tensors={"blk.0.ffn_up_exps.weight": np.ones((4, 16, 16), np.float32)},
        ),
        CheckpointError,
        "blk.0.ffn_up_exps.weight has the shape [4, 16, 16], not 4294967295 experts first",
    ),
    "half a layer": (
        dict(metadata={"llama.block_count": ("f32", 1.5)}),
        ConfigError,
        "has llama.block_count: 1.5, which is not supported; it has to be a whole number",
    ),
    "a kind of scaling": (
        dict(metadata={"llama.rope.scaling.type": "su"}),
        ConfigError,
        "none, linear and yarn are read",
    ),
    "part of each head": (
        dict(metadata={"llama.rope.dimension_count": 2}),
        ConfigError,
        "it has to be attention.key_len",
    ),
    "a table of frequencies": (
        dict(tensors={"rope_freqs.weight": np.float32([1, 7, 2, 3])}),
        ConfigError,
        "has a table rope_freqs that is not of Llama 3",
    ),
    "a strange tensor": (
        dict(tensors={"blk.0.ssm_a.weight": np.ones(4, np.float32), "v.patch": np.ones(4, np.float32)}),
        CheckpointError,
        "holds 2 tensors that llama does not have: blk.0.ssm_a.weight, v.patch",
    ),
    "odd rows": (
        dict(tensors={"blk.0.attn_q.weight": np.ones((3, 16), np.float32)}),
        CheckpointError,
        "blk.0.attn_q.weight has 3 rows, not pairs of 4 heads",
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


# Gemma's fixtures have an attention scale that GGUF does not say; the keys are compared above.
LOGITS = [name for name in NAMES if not name.startswith("gemma")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "llama" else pytest.mark.long) for name in LOGITS]
)
def test_logits_are_those_of_transformers(name, tmp_path):
    with np.load(PUBLISHED / name / "expected.npz") as arrays:
        tokens, expected = arrays["tokens"], arrays["logits"]
    pretrained = jt.load_pretrained(convert(name, tmp_path), model={"attention": "reference"})
    apply = jax.jit(lambda params: pretrained.model.apply(params, {}, tokens, key=None, train=False)[0])
    found = apply(pretrained.params)
    # A mixture of experts also gives what its losses need.
    found = found["logits"] if isinstance(found, dict) else found
    # As for folders: float32 sums in another order, as a share of the range.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.ptp(expected))
