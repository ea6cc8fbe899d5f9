"""Decode steps whose layers are written out, as on GPUs, give the tokens of those that scan them."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.inference.generate import generate_ids
from jaxtrain.models.shipped import cache

SMALL = dict(num_layers=2, embed_dim=16, num_heads=4, mlp_dim=32, max_sequence_length=640)
MODELS = {
    "grouped heads": dict(kind="transformer", **SMALL, num_kv_heads=2, position="rotary"),
    "windows": dict(
        kind="transformer", **SMALL, position="rotary", local_layers=dict(pattern=(1, 0), window=16, rope_theta=1000.0)
    ),
    "an encoder": dict(kind="encoder_decoder", **SMALL),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype"), [("grouped heads", None), ("windows", "int8"), ("an encoder", None)])
def test_tokens_are_those_of_scanned_layers(monkeypatch, name: str, dtype: str | None) -> None:
    model = jt.build_model(MODELS[name], input_shape=(640,), vocab_size=97)
    params, _ = jax.jit(model.init)(jax.random.key(3))
    # A prompt beyond two blocks, so that the scanned layers read the cache in blocks and the others at once.
    prompts = [np.arange(560, dtype=np.int32) % 89, np.arange(3, dtype=np.int32)]
    found = []
    for platforms in ((), ("cpu",)):
        monkeypatch.setattr(cache, "UNROLLED_ON", platforms)
        sharded = jt.shard_model(model)  # programs are kept per sharded model
        found.append(
            generate_ids(sharded, params, prompts, new_tokens=8, sampling=jt.Sampling(temperature=0), cache_dtype=dtype)
        )
    np.testing.assert_array_equal(*found)
