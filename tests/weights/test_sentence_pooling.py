"""A folder of sentence-transformers gives the embeddings that it says, and not those of its family's pooling."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.families.bert import read_sentence_head
from jaxtrain.families.table import read_settings
from jaxtrain.inference.open import open_model

PUBLISHED = Path(__file__).resolve().parent / "published" / "bert_base"
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
PLACE = "sentence_transformers.models."


def folder_of(folder, *, kinds=("Transformer", "Pooling", "Normalize"), pooling=MEAN):
    """The fixture of an encoder without a head, with the files of sentence-transformers and a tokenizer of bytes."""
    shutil.copytree(PUBLISHED, folder)
    modules = [{"idx": i, "name": str(i), "path": f"{i}_{kind}" * (i > 0), "type": PLACE + kind}
               for i, kind in enumerate(kinds)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))
    (folder / "tokenizer.json").write_text(json.dumps({"jaxtrain_tokenizer": "byte", "format_version": 1}))
    return folder


def head_of(folder):
    return read_sentence_head(folder, read_settings(json.loads((folder / "config.json").read_text())))


def test_embeddings_are_those_of_the_folder(tmp_path):
    folder, wanted = folder_of(tmp_path / "model"), dict(np.load(PUBLISHED / "expected.npz"))
    mask_BL1 = wanted["attention_mask"][..., None]
    mean_BD = (wanted["last_hidden_state"] * mask_BL1).sum(1) / mask_BL1.sum(1)
    mean_BD /= np.linalg.norm(mean_BD, axis=-1, keepdims=True)
    inputs = {"tokens": wanted["tokens"], "segments": wanted["attention_mask"], "token_types": wanted["token_type_ids"]}
    inputs = {name: jnp.asarray(array, jnp.int32) for name, array in inputs.items()}
    opened = open_model(folder)
    model = opened.sharded_model
    apply = jax.jit(lambda params, state: model.apply(params, state, inputs, key=None, train=False)[0])
    found = apply(opened.params, opened.model_state)
    np.testing.assert_allclose(found, mean_BD, atol=1e-5)  # float32


def test_the_head_that_a_folder_says(tmp_path):
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    folder = folder_of(tmp_path / "model", kinds=("Transformer", "Pooling"), pooling=pooling)
    assert head_of(folder) == {"kind": "embedding", "pooling": "first", "hidden": "none", "normalize": False}
    assert head_of(PUBLISHED) is None  # without modules, the family's pooling


UNKNOWN = {
    "a layer": ({"kinds": ("Transformer", "Pooling", "Dense")}, "modules .*Dense"),
    "the maximum": ({"pooling": {"pooling_mode_max_tokens": True}}, "pooling_mode_max_tokens"),
}


@pytest.mark.parametrize(("said", "named"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_is_one_line(tmp_path, said, named):
    with pytest.raises(ConfigError, match=named) as caught:
        head_of(folder_of(tmp_path / "model", **said))
    assert "\n" not in str(caught.value)
