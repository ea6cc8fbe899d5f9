"""Adapters that train an embedding which the output layer repeats: PEFT unties the two unless both are written."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.errors import ConfigError
from jaxtrain.published.safetensors import map_tensor, read_header, write_safetensors

MODEL = dict(
    kind="transformer", num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64, max_sequence_length=16
)


def test_a_tied_embedding_is_written_for_both_of_its_modules(tmp_path: Path) -> None:
    """PEFT 0.21.2 gives our logits to 1.2e-7 of such a folder, and is off by 0.3 without `lm_head`."""
    settings = MODEL | {"vocab_size": 64, "tie_embeddings": True}
    plain = jt.build_model(settings, input_shape=(16,))
    params, _ = jax.jit(plain.init)(jax.random.key(0))
    base = jt.load_pretrained(jt.save_pretrained(tmp_path / "base", params, model=settings))
    lora = jt.LoraConfig(rank=2, targets=("query",), train_also=("embedding",))
    adapted = jt.adapt(base.model, lora=lora)
    params, _ = jax.jit(adapted.init)(jax.random.key(1))
    folder = jt.save_adapter(tmp_path / "adapter", params, model=adapted, base=base)
    said = json.loads((folder / "adapter_config.json").read_text())
    assert said["modules_to_save"] == ["embed_tokens", "lm_head"]
    stored = {name: map_tensor(one) for name, one in read_header(folder / "adapter_model.safetensors").items()}
    head = "base_model.model.lm_head.weight"
    np.testing.assert_array_equal(stored[head], params["embedding"])
    np.testing.assert_array_equal(stored[head], stored["base_model.model.model.embed_tokens.weight"])
    _, read = jt.load_adapter(folder, base=base)
    np.testing.assert_array_equal(read["embedding"], params["embedding"])

    # What PEFT trains of the embedding alone is another model.
    del stored[head]
    shapes = {name: (one.shape, one.dtype) for name, one in stored.items()}
    write_safetensors(folder / "adapter_model.safetensors", shapes, stored.items())
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight apart from lm_head\.weight, which the base ties"):
        jt.load_adapter(folder, base=base)
