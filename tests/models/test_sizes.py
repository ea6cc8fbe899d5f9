"""Parameter counts of the published models, from shapes alone."""

import pytest

from jaxtrain.config.encoder_decoder import EncoderDecoderConfig
from jaxtrain.config.models import MLPConfig, ResNetConfig, TransformerConfig
from jaxtrain.config.vit import ViTConfig
from jaxtrain.errors import ConfigError
from jaxtrain.models.model import count_parameters
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.shipped.shapes import model_tensors

TRANSFORMERS = {
    # Radford et al. 2019, as released (tied embedding counted once).
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    # The safetensors index published with each model.
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3.1_8b": 8_030_261_248,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "llama3.1_70b": 70_553_706_496,
    "llama3.1_405b": 405_853_388_800,
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
}
# The safetensors index published with each model (the embedding counted once).
ENCODER_DECODERS = {
    "t5_small": 60_506_624,
    "t5_base": 222_903_552,
    "t5_large": 737_668_096,
    "t5_3b": 2_851_598_336,
    "t5_11b": 11_307_321_344,
    "flan_t5_small": 76_961_152,
    "flan_t5_base": 247_577_856,
    "flan_t5_large": 783_150_080,
    "flan_t5_xl": 2_849_757_184,
    "flan_t5_xxl": 11_135_332_352,
}
# The config.json and the safetensors file published with each model, with the head that its size names.
ENCODERS = {
    "bert_base": 109_514_298,
    "bert_base_cased": 108_340_804,
    "bert_large": 335_174_458,
    "roberta_base": 124_697_433,
    "roberta_large": 355_412_057,
    "distilbert_base": 66_985_530,
    # Without the pooling layer [384, 384], which sentence embeddings do not use.
    "minilm_l6": 22_713_216 - 384 * 385,
}
# timm's table of results.
VITS = {"vit_tiny": 5_717_416, "vit_small": 22_050_664, "vit_base": 86_567_656, "vit_large": 304_326_632}
# torchvision's table of weights.
RESNETS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}


@pytest.mark.parametrize(("size", "count"), [*TRANSFORMERS.items(), *ENCODERS.items()], ids=[*TRANSFORMERS, *ENCODERS])
def test_transformers_have_the_published_counts(size, count):
    assert count_parameters(build_model(TransformerConfig(size=size), input_shape=(8,))) == count


@pytest.mark.parametrize(("size", "count"), ENCODER_DECODERS.items(), ids=ENCODER_DECODERS)
def test_encoder_decoders_have_the_published_counts(size, count):
    """Counted without building them: tests/plan/test_parameters.py holds these shapes to those of the models."""
    config = EncoderDecoderConfig(size=size)
    shapes = model_tensors(config, input_shape=(8,), vocab_size=config.vocab_size, num_outputs=None)
    assert shapes.num_parameters == count


@pytest.mark.parametrize(("size", "count"), VITS.items(), ids=VITS)
def test_vision_transformers_have_the_published_counts(size, count):
    model = build_model(ViTConfig(size=size, num_classes=1000), input_shape=(224, 224, 3))
    assert count_parameters(model) == count


@pytest.mark.parametrize(("size", "count"), RESNETS.items(), ids=RESNETS)
def test_resnets_have_the_published_counts(size, count):
    model = build_model(ResNetConfig(size=size, num_classes=1000), input_shape=(224, 224, 3))
    assert count_parameters(model) == count


# config, input shape, what the data has, count
FROM_DATA = {
    "transformer vocabulary": (
        TransformerConfig(num_layers=1, embed_dim=4, num_heads=1, mlp_dim=4),
        (8,),
        dict(vocab_size=10),
        # embedding and output, four attention and three MLP matrices, three norms
        2 * 10 * 4 + 4 * 16 + 3 * 16 + 3 * 4,
    ),
    "config before data": (
        TransformerConfig(num_layers=1, embed_dim=4, num_heads=1, mlp_dim=4, vocab_size=20),
        (8,),
        dict(vocab_size=10),
        2 * 20 * 4 + 4 * 16 + 3 * 16 + 3 * 4,
    ),
    "mlp": (MLPConfig(hidden_dims=(5, 6)), (2, 3), dict(num_outputs=7), 6 * 5 + 5 + 5 * 6 + 6 + 6 * 7 + 7),
    "linear": (MLPConfig(hidden_dims=()), (4,), dict(num_outputs=2), 4 * 2 + 2),
    "resnet": (
        ResNetConfig(stage_blocks=(1,), width=4, stem="small"),
        (8, 8, 1),
        dict(num_outputs=3),
        9 * 4 + 2 * 9 * 16 + 3 * 2 * 4 + 4 * 3 + 3,
    ),
}


@pytest.mark.parametrize(("config", "shape", "known", "count"), FROM_DATA.values(), ids=FROM_DATA)
def test_sizes_that_the_data_gives(config, shape, known, count):
    assert count_parameters(build_model(config, input_shape=shape, **known)) == count


WRONG = {
    "no vocabulary": (
        TransformerConfig(),
        (8,),
        "model.vocab_size is not set and the data has no vocabulary; set model.vocab_size",
    ),
    "no classes": (
        ResNetConfig(),
        (8, 8, 1),
        "model.num_classes is not set and the data has no classes; set model.num_classes",
    ),
    "no outputs": (
        MLPConfig(),
        (8,),
        "model.num_outputs is not set and the data has no number of outputs; set model.num_outputs",
    ),
    "no image": (
        ResNetConfig(num_classes=3),
        (8,),
        "model.kind=resnet takes images, but a row of the data has shape (8,)",
    ),
}


@pytest.mark.parametrize(("config", "shape", "message"), WRONG.values(), ids=WRONG)
def test_wrong_sizes(config, shape, message):
    with pytest.raises(ConfigError) as caught:
        build_model(config, input_shape=shape)
    assert str(caught.value) == message
