"""What a published folder may hold: everything it says of itself is checked, and each mistake is one line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.published import parse_settings, settings_of
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.families.bert import read_sentence_head
from jaxtrain.formats.safetensors import (
    INDEX,
    SINGLE,
    open_folder,
    read_header,
    write_safetensors,
)
from jaxtrain.weights.read import find_places, open_published

LLAMA = Path(__file__).parent / "published" / "llama"


def write_raw(file, header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


# What the file holds -> what its line says.
DAMAGED = {
    "header longer than the file": ((b"{}", b"", 100), "its header claims 100 of 10 bytes"),
    "no JSON": ((b"\xff{", b""), "model.safetensors is missing or damaged"),
    "negative sizes": (({"a": entry(0, 8, (-1, -2))}, bytes(8)), r"a float32\[-1, -2\] does not match bytes 0 to 8"),
    "sizes with a point": (({"a": entry(0, 8, (2.0,))}, bytes(8)), "damaged"),
    "offsets with a point": (({"a": entry(0.0, 8.0)}, bytes(8)), "damaged"),
    "a dtype that is a list": (({"a": entry(0, 8, dtype=["F32"])}, bytes(8)), "damaged"),
    "a list": (([1], b""), "damaged"),
    "offsets of another size": (({"a": entry(0, 4)}, bytes(4)), "does not match bytes 0 to 4"),
    "hole": (({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)), "does not match bytes 12 to 20"),
    "cut off": (({"a": entry(0, 8)}, bytes(4)), "its tensors end at byte"),
}


@pytest.mark.parametrize(("content", "said"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_refused(tmp_path, content, said):
    file = tmp_path / SINGLE
    write_raw(file, *content[:2], length=content[2] if len(content) > 2 else None)
    with pytest.raises(CheckpointError, match=said) as caught:
        read_header(file)
    assert "\n" not in str(caught.value)


def sharded(folder):
    """The tensors of the fixture in two files with an index."""
    source = open_folder(LLAMA)
    shutil.copy(LLAMA / "config.json", folder / "config.json")
    names = sorted(source.tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        arrays = {name: np.array(source.read(name)) for name in part}
        write_safetensors(folder / file, {name: (one.shape, one.dtype) for name, one in arrays.items()}, arrays.items())
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / INDEX).write_text(json.dumps(index))
    return index["weight_map"]


def test_shards_are_read_as_one(tmp_path):
    sharded(tmp_path)
    whole, parts = open_folder(LLAMA), open_folder(tmp_path)
    assert parts.tensors == whole.tensors
    for name in whole.tensors:
        np.testing.assert_array_equal(parts.read(name), whole.read(name))


# File of the folder, content -> what its line says; all have values of another kind than is expected.
OTHER_KINDS = {
    "names of shards": (INDEX, {"weight_map": 5}, CheckpointError, "damaged"),
    "a list of shards": (INDEX, {"weight_map": ["a.safetensors"]}, CheckpointError, "damaged"),
    "an index that is a number": (INDEX, 5, CheckpointError, "damaged"),
    "a model_type": ("config.json", {"model_type": []}, ConfigError, "no config.json with a model_type"),
    "a quantization": ("config.json", {"model_type": "llama", "quantization_config": 4}, CheckpointError, "damaged"),
    "modules": ("modules.json", [5], CheckpointError, "damaged"),
}


def opened(folder):
    read_sentence_head(folder, {"head": {"kind": "embedding"}})
    open_folder(folder)


@pytest.mark.parametrize(("name", "content", "error", "said"), OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_values_of_another_kind_are_one_line(tmp_path, name, content, error, said):
    shutil.copy(LLAMA / "config.json", tmp_path / "config.json")
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(error, match=f"^[^\n]*{said}[^\n]*$") as caught:
        opened(tmp_path)
    assert str(tmp_path) in str(caught.value)


NAME = "model.norm.weight"


@pytest.mark.parametrize("file", ["../a.safetensors", "c.safetensors"], ids=["parent", "missing"])
def test_indices_that_mislead_are_refused(tmp_path, file):
    names = sharded(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**names, NAME: file}}))
    with pytest.raises(CheckpointError, match="download"):
        open_folder(tmp_path)


def test_index_and_shards_must_agree(tmp_path):
    names = sharded(tmp_path)
    other = {"a.safetensors": "b.safetensors", "b.safetensors": "a.safetensors"}[names[NAME]]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**names, NAME: other}}))
    with pytest.raises(CheckpointError, match="does not match the files"):
        open_folder(tmp_path)


def test_what_holds_the_weights_is_said(tmp_path):
    shutil.copy(LLAMA / "config.json", tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="holds 0 safetensors files; it needs"):
        open_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
        open_folder(tmp_path)


def changed(folder, *, tensors=None, **config):
    """The fixture with other tensors (None: left out) and other keys of its config.json."""
    source = open_folder(LLAMA)
    arrays = {name: np.array(source.read(name)) for name in source.tensors}
    for name, array in (tensors or {}).items():
        arrays[name] = array
    arrays = {name: array for name, array in arrays.items() if array is not None}
    shapes = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    write_safetensors(folder / SINGLE, shapes, arrays.items())
    (folder / "config.json").write_text(json.dumps({**source.config, **config}))
    return folder


def places_of(folder):
    published = open_published(folder)
    return find_places(published, settings_of(parse_settings(published.settings)))


Q, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
TENSORS = {
    "missing": ({Q: None, NORM: None}, rf"lacks \(2\): {NORM}, {Q}|lacks \(2\): {Q}, {NORM}"),
    "too many": ({"model.other.weight": np.ones(3, np.float32)}, r"has too many \(1\): model\.other\.weight"),
    "another shape": ({NORM: np.ones(17, np.float32)}, rf"dtypes \(1\): {NORM} is float32\[17\], not floats \[16\]"),
}


@pytest.mark.parametrize(("tensors", "said"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_do_not_fit_are_named(tmp_path, tensors, said):
    with pytest.raises(CheckpointError, match=said):
        places_of(changed(tmp_path, tensors=tensors))


def test_a_tied_output_may_be_there_if_it_is_equal(tmp_path):
    embedding = np.array(open_folder(LLAMA).read("model.embed_tokens.weight"))
    changed(tmp_path, tensors={"lm_head.weight": embedding}, tie_word_embeddings=True)
    assert "output" not in places_of(tmp_path).params
    changed(tmp_path, tensors={"lm_head.weight": embedding + 1}, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"differs from model\.embed_tokens\.weight.*tie_embeddings=false"):
        places_of(tmp_path)


CONFIGS = {
    "unknown key": ({"frobnicate": 3}, "the key frobnicate .*value 3"),
    "unsupported value": ({"pretraining_tp": 2}, "pretraining_tp: 2"),
    "unsupported rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "type dynamic"),
}


@pytest.mark.parametrize(("keys", "said"), CONFIGS.values(), ids=CONFIGS)
def test_configs_that_are_not_supported_are_named(tmp_path, keys, said):
    with pytest.raises(ConfigError, match=said) as caught:
        open_published(changed(tmp_path, **keys))
    assert str(caught.value).startswith(str(tmp_path))


def test_a_key_left_out_has_the_default_of_the_family(tmp_path):
    changed(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("num_key_value_heads", "rms_norm_eps", "head_dim", "rope_parameters", "tie_word_embeddings"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = open_published(tmp_path).settings
    keys = ("num_kv_heads", "norm_epsilon", "head_dim", "rope_theta", "tie_embeddings")
    assert [settings[key] for key in keys] == [4, 1e-6, 4, 10000.0, False]
