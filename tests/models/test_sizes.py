"""Parameter counts of the published models, from shapes alone.

The planner's shapes are counted for each size; `tests/plan/test_parameters.py` holds them to those of the models, and
one size of each kind is counted on the model here.
"""

import pytest

from jaxtrain.config.model import (
    TRANSFORMER_SIZES,
    CLIPConfig,
    EncoderDecoderConfig,
    MLPConfig,
    ResNetConfig,
    TransformerConfig,
    ViTConfig,
)
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
    # Those of Gemma 3 from 4B on are of the text part, with the 262,208 rows that its embedding has.
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1.7b": 1_711_376_384,
    "mistral_7b_v0.1": 7_241_732_096,
    "mistral_7b_v0.3": 7_248_023_552,
    "mistral_nemo_12b": 12_247_782_400,
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2.5_3b": 3_085_938_688,
    "qwen2.5_7b": 7_615_616_512,
    "qwen2.5_14b": 14_770_033_664,
    "qwen2.5_32b": 32_763_876_352,
    "qwen2.5_72b": 72_706_203_648,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "gemma3_12b": 11_766_034_176,
    "gemma3_27b": 27_009_346_304,
    "phi1.5_1.3b": 1_418_270_720,
    "phi2_2.7b": 2_779_683_840,
    "phi3_mini_4k": 3_821_079_552,
    "phi3_medium_4k": 13_960_238_080,
    "pythia_70m": 70_426_624,
    "pythia_160m": 162_322_944,
    "pythia_410m": 405_334_016,
    "pythia_1b": 1_011_781_632,
    "pythia_1.4b": 1_414_647_808,
    "pythia_2.8b": 2_775_208_960,
    "pythia_6.9b": 6_857_302_016,
    "pythia_12b": 11_846_072_320,
    "gpt_neox_20b": 20_554_567_680,
    # mesh-transformer-jax counts 6,053,381,344: norms, biases of attention and embedding once for each of its 8 shards.
    "gptj_6b": 6_050_882_784,
    # Zhang et al. 2022, table 1, with the 50,272 rows of the published embeddings.
    "opt_125m": 125_239_296,
    "opt_1.3b": 1_315_758_080,
    "opt_2.7b": 2_651_596_800,
    "opt_6.7b": 6_658_473_984,
    "opt_13b": 12_853_473_280,
    "opt_30b": 29_974_540_288,
    "opt_66b": 65_719_701_504,
    # The safetensors index holds an output layer that repeats the embedding of 65,024 rows.
    "falcon_7b": 7_217_189_760 - 65024 * 4544,
    "falcon_40b": 41_303_293_952,
    "falcon_180b": 179_522_565_120 - 65024 * 14848,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "starcoder2_3b": 3_030_371_328,
    "starcoder2_7b": 7_173_923_840,
    "starcoder2_15b": 15_957_889_024,
    # Of the tensors; the pages of StableLM 2 say 1,644,417,024 and 12,143,605,760, which differ by norms alone.
    "stablelm_3b_4e1t": 2_795_443_200,
    "stablelm_2_1.6b": 1_644_515_328,
    "stablelm_2_12b": 12_143_185_920,
    "command_r_35b": 34_980_831_232,
    "command_r_32b": 32_296_476_672,
    "command_r_plus_104b": 103_810_674_688,
    "aya_23_8b": 8_028_033_024,
    "aya_23_35b": 34_980_831_232,
    "command_r7b": 8_028_033_024,
    "command_a_111b": 111_057_580_032,
    # Of the shapes; published as 9.4B and 32.6B.
    "glm4_9b": 9_400_279_040,
    "glm4_32b": 32_566_081_536,
    # DeepSeek V3 without the layer that predicts the token after the next one.
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_419_200,
    # Without the part that sees images.
    "llama4_scout_17b_16e": 108_641_793_536 - 871_932_416,
    "moonlight_16b_a3b": 15_960_110_208,
    "qwen2_0.5b": 494_032_768,
    "qwen2_1.5b": 1_543_714_304,
    "qwen2_7b": 7_615_616_512,
    "qwen2_72b": 72_706_203_648,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "olmo2_13b": 13_716_198_400,
    "olmo2_32b": 32_234_279_936,
    "olmo3_7b": 7_298_011_136,
    "olmo3_32b": 32_233_522_176,
    "granite3.0_2b": 2_533_531_648,
    "granite3.0_8b": 8_170_848_256,
    "granite3.3_2b": 2_533_539_840,
    "granite3.3_8b": 8_170_864_640,
    "smollm3_3b": 3_075_098_624,
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
    # The discriminators.
    "electra_small": 13_549_057,
    "electra_base": 109_483_009,
    "electra_large": 335_142_913,
    "modernbert_base": 149_655_232,
    "modernbert_large": 395_881_664,
    # Without the pooling layer [384, 384], which sentence embeddings do not use.
    "minilm_l6": 22_713_216 - 384 * 385,
}
# timm's table of results.
VITS = {"vit_tiny": 5_717_416, "vit_small": 22_050_664, "vit_base": 86_567_656, "vit_large": 304_326_632}
# The config.json and the safetensors file published with each model.
CLIPS = {
    "clip_vit_b32": 151_277_313,
    "clip_vit_b16": 149_620_737,
    "clip_vit_l14": 427_616_513,
    "clip_vit_l14_336": 427_944_193,
}
# torchvision's table of weights.
RESNETS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}


IMAGE = (224, 224, 3)
# kind -> what makes a config of a size, shape of a row, table, sizes whose models are built
KINDS = {
    "transformer": (
        TransformerConfig,
        (8,),
        {**TRANSFORMERS, **ENCODERS},
        ("gpt2", "llama3.2_1b", "mixtral_8x7b", "bert_base"),
    ),
    "encoder_decoder": (EncoderDecoderConfig, (8,), ENCODER_DECODERS, ("t5_small",)),
    "vit": (lambda size: ViTConfig(size=size, num_classes=1000), IMAGE, VITS, ("vit_tiny",)),
    "clip": (lambda size: CLIPConfig(size=size), IMAGE, CLIPS, ("clip_vit_b32",)),
    "resnet": (lambda size: ResNetConfig(size=size, num_classes=1000), IMAGE, RESNETS, ("resnet18", "resnet50")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_models_have_the_published_counts(kind):
    make, shape, table, built = KINDS[kind]
    found = {}
    for size in table:
        config = make(size=size)
        vocabulary = getattr(config, "vocab_size", None)
        outputs = 1000 if shape == IMAGE else None
        shapes = model_tensors(config, input_shape=shape, vocab_size=vocabulary, num_outputs=outputs)
        found[size] = shapes.num_parameters
    assert found == table
    for size in built:
        assert count_parameters(build_model(make(size=size), input_shape=shape)) == table[size], size


def test_every_published_size_names_its_mlp_width():
    # Or that of a config's own model would stay beside model.size=NAME.
    assert [name for name, size in TRANSFORMER_SIZES.items() if "mlp_dim" not in size] == []


def test_every_published_size_has_its_count():
    counted = {*TRANSFORMERS, *ENCODERS}
    assert set(TRANSFORMER_SIZES) == counted


# config, input shape, what the data has, count
FROM_DATA = {
    "transformer vocabulary": (
        TransformerConfig(num_layers=1, embed_dim=4, num_heads=1, mlp_dim=4),
        (8,),
        dict(vocab_size=10),
        # embedding and output, four attention and three MLP matrices, three norms
        2 * 10 * 4 + 4 * 16 + 3 * 16 + 3 * 4,
    ),
    "mlp": (MLPConfig(hidden_dims=(5, 6)), (2, 3), dict(num_outputs=7), 6 * 5 + 5 + 5 * 6 + 6 + 6 * 7 + 7),
}


@pytest.mark.parametrize(("config", "shape", "known", "count"), FROM_DATA.values(), ids=FROM_DATA)
def test_sizes_that_the_data_gives(config, shape, known, count):
    assert count_parameters(build_model(config, input_shape=shape, **known)) == count


def test_sizes_that_nothing_gives_are_refused():
    with pytest.raises(ConfigError, match=r"^model\.vocab_size is not set"):
        build_model(TransformerConfig(), input_shape=(8,))
    with pytest.raises(ConfigError, match=r"^model\.kind=resnet takes images, but a row of the data has shape \(8,\)"):
        build_model(ResNetConfig(num_classes=3), input_shape=(8,))
