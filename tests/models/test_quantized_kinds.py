"""Which kernels `quantize` stores in 8 bits in models of other structures: those of blocks, and of nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxtrain as jt
from jaxtrain.config.encoder_decoder import EncoderDecoderConfig
from jaxtrain.config.transformer import TransformerConfig
from jaxtrain.config.vit import ViTConfig
from jaxtrain.models.shipped.build import build_model

SIZES: dict[str, Any] = {"num_layers": 2, "embed_dim": 16, "num_heads": 2}
ATTENTION = {f"attention/{name}/kernel" for name in ("query", "key", "value", "output")}
GATED = {f"mlp/{name}/kernel" for name in ("up", "gate", "down")}
TOKENS = jnp.ones((1, 8), jnp.int32)
# Kind -> (config, shape of a row, inputs, paths of the kernels).
KINDS = {
    "encoder-decoder: cross-attention too": (
        EncoderDecoderConfig(**SIZES, vocab_size=64),
        (8,),
        {"tokens": TOKENS, "decoder_tokens": TOKENS[:, :4]},
        {f"{side}/blocks/{name}" for side in ("encoder", "decoder") for name in ATTENTION | GATED}
        | {f"decoder/blocks/cross_{name}" for name in ATTENTION},
    ),
    "vision transformer: neither patches nor head": (
        ViTConfig(**SIZES, patch_size=4),
        (8, 8, 3),
        jnp.ones((1, 8, 8, 3)),
        {f"blocks/{name}" for name in ATTENTION | GATED if "gate" not in name},
    ),
    "masked language model: no head": (
        TransformerConfig.model_validate(
            {**SIZES, "vocab_size": 64, "causal": False, "head": {"kind": "masked_language_model"}}
        ),
        (8,),
        TOKENS,
        {f"blocks/{name}" for name in ATTENTION | GATED},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_blocks_alone_are_quantized(kind: str) -> None:
    config, shape, inputs, paths = KINDS[kind]
    model = build_model(config, input_shape=shape, vocab_size=64, num_outputs=3)
    assert set(model.linears) == paths
    params, state = jax.jit(model.init)(jax.random.key(0))
    small = jt.quantize(params, model)
    apply = jax.jit(lambda params: model.apply(params, state, inputs, key=None, train=False)[0])
    plain, found = apply(params), apply(small)
    # Half of 1/127 of the largest weight of a column, through two blocks beside the residual stream.
    assert jnp.max(jnp.abs(found - plain)) <= 0.03 * jnp.max(jnp.abs(plain))
    assert not jnp.array_equal(found, plain)
