"""The planner's shapes, which it knows without jax, are those that the models create."""

import jax
import pytest

from jaxtrain.config.model import (
    CLIPConfig,
    EncoderDecoderConfig,
    ExpertsConfig,
    LatentConfig,
    MLPConfig,
    ResNetConfig,
    TransformerConfig,
    ViTConfig,
)
from jaxtrain.config.rope import StateSpaceConfig
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.shipped.build import build_model
from jaxtrain.plan.workload import Workload, model_tensors

TOKENS = Workload("tokens", (64,), 512, None, 8, 1.0)
IMAGES = Workload("examples", (32, 32, 3), None, 10, 8, 1.0)
# One of each family: sizes of a family differ in numbers only.
MODELS = {
    **{size: (TransformerConfig(size=size), TOKENS) for size in ("gpt2", "llama3.2_1b", "mixtral_8x7b")},
    "default": (TransformerConfig(), TOKENS),
    "flan_t5_small": (EncoderDecoderConfig(size="flan_t5_small"), TOKENS),
    "encoder_decoder with biases": (
        EncoderDecoderConfig(num_decoder_layers=2, position="none", norm="layernorm", bias=True, num_kv_heads=2),
        TOKENS,
    ),
    "sandwich, norms of heads, biases of queries, keys and values": (
        TransformerConfig(block="sandwich", qk_norm=True, bias="qkv", activation="geglu"),
        TOKENS,
    ),
    "post, norm and types of embeddings, position offset": (
        TransformerConfig(
            block="post",
            norm="layernorm",
            bias=True,
            activation="gelu_exact",
            position="learned",
            position_offset=2,
            embedding_norm=True,
            token_types=2,
            tie_embeddings=True,
        ),
        TOKENS,
    ),
    "norms of outputs, and over all heads": (
        TransformerConfig(block="output", qk_norm="whole", num_kv_heads=2),
        TOKENS,
    ),
    "one norm, scales per head, biases of the MLP, norms and output": (
        TransformerConfig(
            block="parallel_one_norm",
            norm="layernorm",
            qk_norm="per_head",
            bias="mlp",
            norm_bias=True,
            output_bias=True,
        ),
        TOKENS,
    ),
    "norm of embeddings in the first layer, a gate": (
        TransformerConfig(
            embedding_norm="first_layer",
            activation="geglu_exact",
            causal=False,
            head=dict(kind="sequence", num_labels=3, hidden="gelu_exact", hidden_norm=True, bias="output"),
        ),
        TOKENS,
    ),
    "embeddings of another width, labels": (
        TransformerConfig(
            embedding_width=24,
            embedding_norm=True,
            position="learned",
            causal=False,
            head=dict(kind="token", num_labels=3),
        ),
        TOKENS,
    ),
    "embeddings of another width, masked tokens": (
        TransformerConfig(
            embedding_width=24, tie_embeddings=True, causal=False, head=dict(kind="masked_language_model")
        ),
        TOKENS,
    ),
    "experts with biases, and sinks": (
        TransformerConfig(
            experts=ExpertsConfig(score_bias=True, shared_dim=20),
            bias=True,
            activation="clamped_swiglu",
            attention_sinks=True,
        ),
        TOKENS,
    ),
    "latents, blocks before those with experts": (
        TransformerConfig(
            experts=ExpertsConfig(dense_layers=2, dense_dim=20),
            latent=LatentConfig(query_rank=40, key_value_rank=24, nope_dim=16, rope_dim=8, value_dim=12),
        ),
        TOKENS,
    ),
    "state space": (TransformerConfig(position="none", state_space=StateSpaceConfig(groups=2)), TOKENS),
    "clip": (CLIPConfig(), IMAGES),
    "vit with a norm, without biases around": (ViTConfig(embedding_norm=True, outer_bias=False), IMAGES),
    "resnet50": (ResNetConfig(size="resnet50"), IMAGES),
    "deep mlp": (MLPConfig(hidden_dims=(64, 32, 16)), IMAGES),
}


@pytest.mark.parametrize("name", MODELS)
def test_shapes_are_the_model_s(name: str) -> None:
    config, workload = MODELS[name]
    vocabulary = getattr(config, "vocab_size", None) or workload.vocab_size
    workload = Workload(workload.unit, workload.input_shape, vocabulary, workload.num_outputs, 8, 1.0)
    model = build_model(
        config, input_shape=workload.input_shape, vocab_size=vocabulary, num_outputs=workload.num_outputs
    )
    params, state = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    found = model_tensors(config, workload)

    def shapes(tree: object) -> dict[str, tuple[int, ...]]:
        return {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    assert found.params == shapes(params)
    assert found.model_state == shapes(state)
    assert found.stack == (None if model.parts is None else model.parts.stack)
    assert found.axes == model.axes
