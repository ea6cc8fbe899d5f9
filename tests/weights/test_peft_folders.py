"""Adapters that PEFT wrote give PEFT's logits here, and are written as they were read.

The folders and their expected.npz are made by scripts/make_peft_fixtures.py.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config.published import settings_in
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.formats.peft_reading import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    AdapterConfig,
    factor_transforms,
    open_adapter_folder,
    read_adapter_arrays,
)
from jaxtrain.formats.rows import Entry, interleaved
from jaxtrain.formats.safetensors import map_tensor, read_header, write_safetensors
from jaxtrain.weights.peft import written_adapter
from jaxtrain.weights.read import open_published

HERE = Path(__file__).parent
ADAPTERS = sorted(folder.name for folder in (HERE / "adapters").iterdir())
# Name of an array of expected.npz -> entry of our inputs.
ENTRIES = (
    ("tokens", "tokens"),
    ("attention_mask", "segments"),
    ("token_type_ids", "token_types"),
    ("decoder_tokens", "decoder_tokens"),
)
# One of each way in which a module becomes our kernels, and what is beside them.
PLAIN = ("gpt2", "llama_patterns")
LONG = ("bert_sequence", "gpt_neox", "llama_embedding_saved", "phi3", "t5")


def base_of(name):
    said = json.loads((HERE / "adapters" / name / "adapter_config.json").read_text())
    return HERE / "published" / said["base_model_name_or_path"]


def rows_of(path):
    published = open_published(path)
    return published.family.tensors(settings_in(path, published.settings))


def tensors_of(folder):
    return {name: map_tensor(one) for name, one in read_header(Path(folder) / "adapter_model.safetensors").items()}


def logits_of(model, params, name):
    arrays = dict(np.load(HERE / "adapters" / name / "expected.npz"))
    given = {ours: jnp.asarray(arrays[theirs], jnp.int32) for theirs, ours in ENTRIES if theirs in arrays}
    inputs = given["tokens"] if len(given) == 1 else given
    outputs = jax.jit(lambda params, x: model.apply(params, {}, x, key=None, train=False)[0])(params, inputs)
    return outputs, arrays["logits"]


@pytest.mark.parametrize("name", [*PLAIN, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_logits_are_those_of_peft_and_the_adapter_is_written_again(name, tmp_path):
    base = jt.load_pretrained(base_of(name), model={"attention": "reference"})
    model, params = jt.load_adapter(HERE / "adapters" / name, base=base)
    found, expected = logits_of(model, params, name)
    # As of the bases in test_families.py: float32 sums in another order.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.ptp(expected))
    folder = jt.save_adapter(tmp_path / "again", params, model=model, base=base)
    again, same = jt.load_adapter(folder, base=base)
    assert again.adapted.lora == model.adapted.lora
    jax.tree.map(np.testing.assert_array_equal, same, params)


@pytest.mark.parametrize("part", [range(3), 3, 4], ids=["queries", "key", "value"])
def test_factors_of_heads_that_share_a_module_in_groups(part):
    """Falcon: each of 2 groups holds 3 query heads, a key and a value of width 4; inputs of width 5."""
    weight, draw = interleaved((2, 5, 4), part, (5,)), np.random.default_rng(0)
    factors = factor_transforms(Entry("query/kernel", "module.weight", weight), 6)
    a, b = draw.normal(size=(6, 5)), draw.normal(size=(40, 6))
    ours = np.einsum("dr,rhk->dhk", factors.a.read_all(a), factors.b.read_all(b))
    heads = (b @ a).reshape(2, 5, 4, 5)[:, part if isinstance(part, int) else slice(3)].reshape(-1, 4, 5)
    np.testing.assert_allclose(ours, heads.transpose(2, 0, 1), rtol=1e-12)
    np.testing.assert_array_equal(weight.read_all(b @ a)[:, 1:], weight.read(b @ a, np.s_[:, 1:, :]))


def written(folder, tensors, config):
    """A folder of an adapter."""
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(config))
    shapes = {name: (one.shape, one.dtype) for name, one in tensors.items()}
    write_safetensors(folder / WEIGHTS, shapes, tensors.items())
    return folder


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "llama_patterns"])
def test_what_was_read_is_written_as_the_same_tensors(name):
    folder, rows = open_adapter_folder(HERE / "adapters" / name), rows_of(base_of(name))
    arrays = read_adapter_arrays(folder, rows)
    tensors, said = written_adapter(rows, arrays.factors, arrays.whole, folder.config)
    wanted = tensors_of(HERE / "adapters" / name)
    assert set(tensors) == set(wanted)
    for tensor, array in tensors.items():
        np.testing.assert_array_equal(array, wanted[tensor], err_msg=tensor)
    # The modules that the config names are those that the tensors are of.
    modules = {tensor.removeprefix(PREFIX).partition(".lora_")[0] for tensor in wanted if ".lora_" in tensor}
    ends = tuple(f".{end}" for end in said["target_modules"])
    assert all(f".{module}".endswith(ends) for module in modules)
    assert said["fan_in_fan_out"] == (name == "gpt2")


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_kernels_of_one_module_with_factors_of_their_own_are_written_as_blocks(name, tmp_path):
    rows, draw = rows_of(base_of(name)), np.random.default_rng(0)
    read = read_adapter_arrays(open_adapter_folder(HERE / "adapters" / name), rows)
    kernels = {path: read.factors[path] for path in (f"blocks/attention/{one}/kernel" for one in ("query", "value"))}
    factors = {
        path: tuple(draw.normal(size=one.shape).astype(np.float32) for one in pair) for path, pair in kernels.items()
    }
    config = AdapterConfig(rank=2, alpha=3.0, rank_stabilised=True)
    factors = {path: (a[..., :2], b[:, :2]) for path, (a, b) in factors.items()}
    tensors, said = written_adapter(rows, factors, {}, config)
    again = read_adapter_arrays(open_adapter_folder(written(tmp_path / "again", tensors, said)), rows)
    # Their module: scale * B A is what our kernels add, in a rank that is larger by the number of kernels.
    assert (again.rank, again.scale) == (6, config.scale)
    assert set(again.factors) == set(factors)
    for path, (a, b) in factors.items():
        other_a, other_b = again.factors[path]
        np.testing.assert_allclose(np.tensordot(a, b[0], 1)[0], np.tensordot(other_a, other_b[0], 1)[0], rtol=1e-6)
    assert {tensor.shape[0] for key, tensor in tensors.items() if "lora_A" in key} == {6}
    assert set(said["alpha_pattern"].values()) == {3.0 * 3**0.5}


def edited(tmp_path, config=None, tensors=None):
    """A copy of an adapter in which keys of the config and tensors are others (None: left out)."""
    said = json.loads((HERE / "adapters/llama" / CONFIG).read_text())
    held = tensors_of(HERE / "adapters/llama") | {PREFIX + key: value for key, value in (tensors or {}).items()}
    held = {key: value for key, value in held.items() if value is not None}
    return written(tmp_path / "adapter", held, said | (config or {}))


Q = "model.layers.0.self_attn.q_proj"
ZEROS = np.zeros((4, 16), np.float32)


@pytest.mark.parametrize(
    ("error", "said", "change"),
    [
        (ConfigError, "peft_type: IA3", dict(config={"peft_type": "IA3"})),
        (ConfigError, "use_dora: True", dict(config={"use_dora": True})),
        (ConfigError, "above 0", dict(config={"r": 0})),
        (CheckpointError, "need floats [8, 16]", dict(config={"r": 8})),
        (CheckpointError, "another base", dict(tensors={f"{Q}.lora_B.weight": None})),
        (CheckpointError, "DoRA", dict(tensors={f"{Q}.lora_magnitude_vector": ZEROS[0]})),
        (CheckpointError, "another base", dict(tensors={"model.embed_tokens.weight": ZEROS})),
    ],
    ids=lambda one: one.replace(" ", "_") if isinstance(one, str) else "",
)
def test_what_is_not_supported_is_refused_in_one_line(error, said, change, tmp_path):
    with pytest.raises(error, match=r"^[^\n]*$") as raised:
        read_adapter_arrays(open_adapter_folder(edited(tmp_path, **change)), rows_of(base_of("llama")))
    assert said in str(raised.value)


def test_an_adapter_of_another_family_is_refused():
    with pytest.raises(CheckpointError, match="another base"):
        jt.load_adapter(HERE / "adapters" / "gpt2", base=base_of("llama"))


@pytest.mark.parametrize("name", ["cohere", "gemma2"])
def test_an_embedding_that_is_trained_whole_is_the_output_layer_too_where_the_base_ties_it(name):
    rows = rows_of(HERE / "published" / name)
    entries = {row.path: row for row in rows if isinstance(row, Entry)}
    embedding = np.random.default_rng(0).normal(size=entries["embedding"].shape).astype(np.float32)
    query = entries["blocks/attention/query/kernel"]
    width, *heads = query.transform.ours
    pair = np.ones((*query.stack, width, 2), np.float32), np.ones((*query.stack, 2, *heads), np.float32)
    whole = {"embedding": embedding}
    tensors, said = written_adapter(rows, {query.path: pair}, whole, AdapterConfig(rank=2, alpha=4))
    assert said["modules_to_save"] == ["embed_tokens", "lm_head"]
    for module in ("model.embed_tokens", "lm_head"):
        np.testing.assert_array_equal(tensors[f"{PREFIX}{module}.weight"], embedding)


@pytest.mark.long
def test_a_tied_embedding_is_written_for_both_of_its_modules(tmp_path: Path) -> None:
    """PEFT 0.21.2 gives our logits to 1.2e-7 of such a folder, and is off by 0.3 without `lm_head`."""
    settings = dict(kind="transformer", num_layers=2, embed_dim=32, num_heads=4, vocab_size=64, tie_embeddings=True)
    plain = jt.build_model(settings, input_shape=(16,))
    params, _ = jax.jit(plain.init)(jax.random.key(0))
    base = jt.load_pretrained(jt.save_pretrained(tmp_path / "base", params, model=settings))
    lora = jt.LoraConfig(rank=2, targets=("query",), train_also=("embedding",))
    adapted = jt.adapt(base.model, lora=lora)
    params, _ = jax.jit(adapted.init)(jax.random.key(1))
    folder = jt.save_adapter(tmp_path / "adapter", params, model=adapted, base=base)
    said = json.loads((folder / "adapter_config.json").read_text())
    assert said["modules_to_save"] == ["embed_tokens", "lm_head"]
    stored = tensors_of(folder)
    head = "base_model.model.lm_head.weight"
    np.testing.assert_array_equal(stored[head], params["embedding"])
    np.testing.assert_array_equal(stored[head], stored["base_model.model.model.embed_tokens.weight"])
    _, read = jt.load_adapter(folder, base=base)
    np.testing.assert_array_equal(read["embedding"], params["embedding"])

    # What PEFT trains of the embedding alone is another model.
    del stored[head]
    folder = written(tmp_path / "alone", stored, said)
    with pytest.raises(ConfigError, match=r"embedding and lm_head\.weight, which the base ties"):
        jt.load_adapter(folder, base=base)
