"""A family of another package is found by its entry point, and read and written as those of this one."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.errors import ConfigError
from jaxtrain.formats.safetensors import open_folder

HERE = Path(__file__).parent
KEYS = {"model_type": "scaled_llama", "embedding_factor": 12.0, "score_factor": 0.25, "logits_divisor": 8.0}


def scaled_llama(folder):
    """The Llama fixture with keys of scales."""
    folder.mkdir()
    config = json.loads((HERE / "published/llama/config.json").read_text()) | KEYS
    del config["pretraining_tp"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((HERE / "published/llama/model.safetensors").read_bytes())
    return folder


def test_a_family_of_another_package(tmp_path, monkeypatch):
    folder = scaled_llama(tmp_path / "in")
    with pytest.raises(ConfigError, match=r"model_type: scaled_llama, .* is llama, but for keys embedding_factor"):
        jt.load_pretrained(folder)
    monkeypatch.syspath_prepend(HERE / "outside")
    pretrained = jt.load_pretrained(folder)
    said = pretrained.config.model_dump()
    assert (said["embedding_scale"], said["attention_scale"], said["logits_scale"]) == (12.0, 0.25, 0.125)
    again = open_folder(jt.save_pretrained(tmp_path / "out", pretrained.params, model=pretrained))
    assert {key: again.config[key] for key in KEYS} == KEYS
    for name in open_folder(folder).tensors:
        assert again.read(name).tobytes() == open_folder(folder).read(name).tobytes()
    tokens = np.arange(8, dtype=np.int32)[None]
    found, plain = (
        one.model.apply(one.params, {}, tokens, key=None, train=False)[0]
        for one in (pretrained, jt.load_pretrained(HERE / "published/llama"))
    )
    assert not np.allclose(found, plain)  # the scales are at work
    jax.tree.map(np.testing.assert_array_equal, jt.load_pretrained(tmp_path / "out").params, pretrained.params)
