"""Fixtures of the encoder-decoders, of the models of images, and of CLIP."""

# pyright: reportMissingImports=false
from typing import Any

import numpy as np
import torch
import transformers as tf
from published_fixtures.fixture import IGNORED, Arrays, Fixture, generate, near_the_dip, outputs_of, padded

VOCABULARY = 40
NEW_TOKENS = 12
END = 30


def sequence_to_sequence(fixture: Fixture, model: Any, generator: np.random.Generator) -> Arrays:
    """Make an encoder's rows with padding, a decoder's rows that start with the pad token, and greedy answers."""
    arrays = padded(generator, fixture.length, VOCABULARY, 0)
    targets = generator.integers(4, VOCABULARY, (2, fixture.length - 3))
    arrays["decoder_tokens"] = np.concatenate([np.zeros((2, 1), np.int64), targets[:, :-1]], axis=1)
    arrays["labels"] = targets.copy()
    arrays["labels"][1, -3:] = IGNORED
    tokens, mask = (torch.from_numpy(arrays[name]) for name in ("tokens", "attention_mask"))
    arrays["generated"] = generate(model, tokens, length=NEW_TOKENS, attention_mask=mask)
    return arrays | outputs_of(model, arrays)


def images(fixture: Fixture, model: Any, generator: np.random.Generator) -> Arrays:
    """Make the logits of two images with a label each; running statistics in place of those of the batch."""
    size = fixture.length
    pixels = generator.standard_normal((2, 3, size, size)).astype(np.float32)
    arrays = {"pixel_values": pixels, "labels": generator.integers(0, 3, 2)}
    return arrays | outputs_of(model, arrays)


def pairs(fixture: Fixture, model: Any, generator: np.random.Generator) -> Arrays:
    """Make the similarities of three images and texts; the texts end at different places, with larger ids behind."""
    tokens = generator.integers(4, VOCABULARY, (3, fixture.length))
    tokens[[0, 1, 1, 2], [4, 6, 9, 11]] = END
    pixels = generator.standard_normal((3, 3, 8, 8)).astype(np.float32)
    arrays = {"tokens": tokens, "pixel_values": pixels, "labels": np.tile(np.arange(3), (2, 1))}
    return arrays | outputs_of(model, arrays)


def as_long_ago(config: dict[str, Any]) -> dict[str, Any]:
    """Write what counts of a CLIP's config a second time, beside an older form with other values."""
    parts = {f"{name}_dict": config[name] for name in ("text_config", "vision_config")}
    return (
        config | parts | {name: {**config[name], "hidden_act": "gelu_new"} for name in ("text_config", "vision_config")}
    )


def untie(model: Any) -> None:
    """Give the model an output of its own: transformers 5 ties that of every T5 until a file says otherwise."""
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))


def as_flan(config: dict[str, Any]) -> dict[str, Any]:
    """Write the config of an untied T5 as its published files do: outputs that are not tied are not scaled."""
    without = {name: value for name, value in config.items() if name != "scale_decoder_outputs"}
    return without | {"tie_word_embeddings": False}


# More layers in the encoder than in the decoder: transformers 5.23 makes its cache by the number of the former.
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 3, "num_decoder_layers": 2,
    "num_heads": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
# A large embedding, tied, would repeat the last token for ever, and so would a weak bias of positions.
_EMBEDDING = {"shared.weight": (0.0, 0.25), "relative_attention_bias.weight": (0.0, 2.0)}
_CLIP_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 16, "eos_token_id": END, "hidden_act": "quick_gelu",
}  # fmt: skip
_CLIP_IMAGE: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8,
    "patch_size": 4, "hidden_act": "quick_gelu",
}  # fmt: skip
_CLIP_CHANGES = ({"hidden_act": "gelu"}, {"layer_norm_eps": 1e-2}, {"num_attention_heads": 1})
_RESNET: dict[str, Any] = {"num_labels": 3, "depths": [2, 1], "embedding_size": 8}

FIXTURES = (
    Fixture(
        "t5", tf.T5ForConditionalGeneration, tf.T5Config(**_T5), sequence_to_sequence, length=20,
        special=_EMBEDDING,
        gradients=("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "shared.weight",
                   "decoder.block.1.layer.1.EncDecAttention.k.weight"),
        matters=({"relative_attention_max_distance": 8}, {"scale_decoder_outputs": False}),
    ),
    Fixture(
        "t5_v11", tf.T5ForConditionalGeneration,
        tf.T5Config(**_T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False), sequence_to_sequence, length=20,
        special=_EMBEDDING,
        gradients=("decoder.block.0.layer.2.DenseReluDense.wi_0.weight", "lm_head.weight"), prepare=untie,
        published=as_flan, matters=({"relative_attention_max_distance": 8}, {"scale_decoder_outputs": True}),
    ),
    Fixture(
        "vit_classification", tf.ViTForImageClassification,
        tf.ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, image_size=16,
                     patch_size=4, num_labels=3), images, length=16, matters=({"hidden_act": "gelu_new"},),
        gradients=("vit.encoder.layer.0.attention.attention.query.weight", "vit.embeddings.cls_token",
                   "vit.embeddings.patch_embeddings.projection.weight"),
        special=near_the_dip("mlp.fc1", "mlp.fc2"),
    ),
    Fixture(
        "clip", tf.CLIPModel, tf.CLIPConfig(text_config=_CLIP_TEXT, vision_config=_CLIP_IMAGE, projection_dim=8), pairs,
        special={"logit_scale": (1.5, 0.1)},
        gradients=("logit_scale", "text_model.embeddings.token_embedding.weight", "visual_projection.weight",
                   "vision_model.pre_layrnorm.bias", "vision_model.embeddings.patch_embedding.weight"),
        matters=(
            {"text_config": {**_CLIP_TEXT, "eos_token_id": 2}},
            *({"text_config": {**_CLIP_TEXT, **change}} for change in _CLIP_CHANGES),
            *({"vision_config": {**_CLIP_IMAGE, **change}} for change in _CLIP_CHANGES),
        ),
    ),
    Fixture(
        "clip_largest_id", tf.CLIPModel,
        tf.CLIPConfig(text_config={**_CLIP_TEXT, "eos_token_id": 2, "hidden_act": "gelu"},
                      vision_config={**_CLIP_IMAGE, "hidden_act": "gelu"}, projection_dim=8), pairs,
        special={"logit_scale": (1.5, 0.1)}, gradients=("logit_scale", "text_projection.weight"),
        matters=({"text_config": {**_CLIP_TEXT, "hidden_act": "gelu"}},), published=as_long_ago,
    ),
    Fixture(
        "resnet_basic", tf.ResNetForImageClassification,
        tf.ResNetConfig(**_RESNET, hidden_sizes=[8, 16], layer_type="basic"), images, length=16,
        gradients=("resnet.embedder.embedder.convolution.weight", "classifier.1.weight"),
    ),
    Fixture(
        "resnet_bottleneck", tf.ResNetForImageClassification,
        tf.ResNetConfig(**_RESNET, hidden_sizes=[32, 64], layer_type="bottleneck"), images, length=16,
        gradients=("resnet.encoder.stages.0.layers.0.shortcut.convolution.weight",),
        matters=({"downsample_in_bottleneck": True},),
    ),
)  # fmt: skip
