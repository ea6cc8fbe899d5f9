"""Model FLOPs against published counts, and the table of peaks."""

import functools
import json
from pathlib import Path

import pytest

from jaxtrain.config import load_config
from jaxtrain.config.model import (
    CLIPConfig,
    EncoderDecoderConfig,
    MLPConfig,
    ResNetConfig,
    TransformerConfig,
    ViTConfig,
)
from jaxtrain.data.configured import open_run_data
from jaxtrain.metrics.flops import model_flops_per_row
from jaxtrain.metrics.utilization import step_flops
from jaxtrain.run.assemble import assemble
from jaxtrain.run.spec import RunSpec
from jaxtrain.runtime.devices import peak_flops

_flops = functools.partial(
    model_flops_per_row, sequence_length=None, input_shape=None, num_outputs=None, vocab_size=None
)


@pytest.mark.parametrize(
    ("size", "multiply_adds"),
    # torchvision's model pages (GFLOPS column, which counts multiply-adds), two decimals.
    [("resnet18", 1.81e9), ("resnet50", 4.09e9)],
)
def test_resnets_take_the_published_multiply_adds(size, multiply_adds):
    flops = _flops(ResNetConfig(size=size), input_shape=(224, 224, 3), num_outputs=1000)
    # 0.005e9 is the rounding of the published figure.
    assert flops is not None
    assert flops / 6 == pytest.approx(multiply_adds, abs=0.0051e9)


@pytest.mark.parametrize(
    ("size", "sequence_length", "num_parameters", "not_multiplied"),
    [
        # Not in a matmul: learned positions; biases and norms are below the tolerance. The tied embedding counts
        # once, as the output layer.
        pytest.param("gpt2", 1024, 124_439_808, 1024 * 768, id="gpt2-124m"),
        # Not in a matmul: the untied embedding.
        pytest.param("llama3.1_8b", 8192, 8_030_261_248, 128256 * 4096, id="llama3.1-8b"),
        # The 12.9e9 parameters that a token meets: two of eight experts a layer, and the router.
        pytest.param("mixtral_8x7b", 8192, 12_879_925_248, 32000 * 4096, id="mixtral-8x7b active"),
    ],
)
def test_transformer_takes_six_flops_a_weight_plus_attention(size, sequence_length, num_parameters, not_multiplied):
    config = TransformerConfig(size=size)
    query_dim = config.num_heads * (config.head_dim or config.embed_dim // config.num_heads)
    attention = 6 * config.num_layers * query_dim * sequence_length
    per_token = 6 * (num_parameters - not_multiplied) + attention
    # GPT-2's biases and norms are 0.1 % of its parameters.
    assert _flops(config, sequence_length=sequence_length) == pytest.approx(per_token * sequence_length, rel=1.1e-3)


def test_a_state_space_counts_what_is_written_and_read():
    config = TransformerConfig(size="mamba2_130m")
    weights = 24 * (768 * (2 * 1536 + 2 * 128 + 24) + 1536 * 768) + 50288 * 768
    assert _flops(config, sequence_length=64) == 64 * (6 * weights + 12 * 24 * 1536 * 128)


def test_llama_70b_is_the_count_that_maxtext_reports():
    # MaxText's published logs of Llama-3.1-70B at 8192 tokens: TFLOP/s over tokens/s is 449.22e9 a token.
    assert _flops(TransformerConfig(size="llama3.1_70b"), sequence_length=8192) == pytest.approx(
        449.22e9 * 8192, rel=1e-4
    )


def test_experts_count_their_router_and_those_chosen():
    one = dict(embed_dim=8, num_heads=1, num_layers=1, mlp_dim=16, vocab_size=32, activation="gelu")
    mixture = TransformerConfig.model_validate(one | dict(experts=dict(num_experts=4, experts_per_token=3)))
    more = _flops(mixture, sequence_length=10) - _flops(TransformerConfig.model_validate(one), sequence_length=10)
    assert more == 6 * 10 * (2 * 2 * 8 * 16 + 8 * 4)


@pytest.mark.parametrize(
    ("form", "pairs"),
    [
        pytest.param({}, 1024**2 / 2, id="causal"),
        pytest.param({"causal": False}, 1024**2, id="encoder"),
        # A query sees itself and the 63 before it; the first 63 see fewer.
        pytest.param({"sliding_window": 64}, sum(min(query + 1, 64) for query in range(1024)), id="window"),
        pytest.param(
            {"sliding_window": 64, "causal": False},
            sum(abs(query - key) < 64 for query in range(1024) for key in range(1024)),
            id="window on both sides",
        ),
        pytest.param(
            {"local_layers": {"pattern": [1], "window": 400, "chunked": True}},
            sum(query % 400 + 1 for query in range(1024)),
            id="chunks",
        ),
    ],
)
def test_attention_counts_the_pairs_that_see_each_other(form, pairs):
    config = TransformerConfig.model_validate(dict(embed_dim=64, num_heads=4, num_layers=3, vocab_size=32) | form)
    weights = 3 * (4 * 64 * 64 + 3 * 64 * (config.mlp_dim or 256)) + 64 * 32
    attention = _flops(config, sequence_length=1024) - 6 * 1024 * weights
    # Pairs are counted as areas, so that the diagonal is half.
    assert attention == pytest.approx(12 * 3 * 64 * pairs, rel=0.01)


@pytest.mark.parametrize(
    ("size", "multiply_adds"),
    # torchvision's model pages (GFLOPS column, which counts multiply-adds), two decimals, patches of 16 pixels.
    [("vit_base", 17.56e9)],
)
def test_vision_transformers_take_the_published_multiply_adds(size, multiply_adds):
    flops = _flops(ViTConfig(size=size), input_shape=(224, 224, 3), num_outputs=1000)
    assert flops is not None
    # 0.005e9 is the rounding of the published figure.
    assert flops / 6 == pytest.approx(multiply_adds, abs=0.0051e9)


@pytest.mark.parametrize(
    ("size", "flops"),
    # open_clip's table of profiles, two per multiply-add; it counts causal attention in full, half a percent more.
    [("clip_vit_b32", 14.78e9), ("clip_vit_b16", 41.09e9), ("clip_vit_l14", 175.33e9)],
)
def test_clip_takes_the_published_flops(size, flops):
    found = _flops(CLIPConfig(size=size))
    assert found is not None
    assert found / 3 == pytest.approx(flops, rel=0.01)


def test_an_encoder_decoder_counts_both_sides_and_what_crosses():
    config = EncoderDecoderConfig(num_layers=3, num_decoder_layers=2, embed_dim=8, num_heads=2, mlp_dim=16)
    read, written, vocabulary = 32, 12, 64
    found = _flops(config, sequence_length=read, decoder_length=written, vocab_size=vocabulary)
    projections, mlp = 4 * 8 * 8, 3 * 8 * 16
    encoder = 3 * (read * (projections + mlp) + 2 * 8 * read**2)
    decoder = 2 * (written * (projections + mlp) + 2 * 8 * written**2 / 2)
    crossed = 2 * (2 * 8 * 8 * (written + read) + 2 * 8 * read * written)
    assert found == 6 * (encoder + decoder + crossed + written * 8 * vocabulary)


@pytest.mark.parametrize(
    ("head", "more"),
    [
        pytest.param({"kind": "masked_language_model"}, 64 * 8 * 8, id="a square layer for every token"),
        pytest.param({"kind": "token", "num_labels": 5}, 64 * (8 * 5 - 8 * 32), id="labels of tokens, no vocabulary"),
        pytest.param(
            {"kind": "sequence", "hidden": "tanh", "num_labels": 5},
            8 * 8 + 8 * 5 - 64 * 8 * 32,
            id="labels of a text, of one position",
        ),
        pytest.param({"kind": "embedding"}, -64 * 8 * 32, id="an embedding"),
    ],
)
def test_a_head_counts_its_layers(head, more):
    sizes = {"embed_dim": 8, "num_heads": 2, "vocab_size": 32, "causal": False}
    found = _flops(TransformerConfig.model_validate({**sizes, "head": head}), sequence_length=64)
    plain = _flops(TransformerConfig.model_validate(sizes), sequence_length=64)
    assert found is not None
    assert plain is not None
    assert found - plain == 6 * more


def test_embeddings_of_another_width_count_the_layer_after_them_and_a_narrower_output():
    sizes = {"embed_dim": 8, "num_heads": 2, "vocab_size": 32, "causal": False, "tie_embeddings": True}
    sizes |= {"head": {"kind": "masked_language_model"}}
    found = _flops(TransformerConfig.model_validate({**sizes, "embedding_width": 3}), sequence_length=64)
    plain = _flops(TransformerConfig.model_validate(sizes), sequence_length=64)
    assert found is not None
    assert plain is not None
    # The projection and the layer of the head are 3 x 8, the output 32 x 3.
    assert found - plain == 6 * 64 * (3 * 8 + (3 - 8) * 8 + (3 - 8) * 32)


def test_an_mlp_with_frozen_layers_counts_what_is_left_of_the_backward_pass():
    config, sizes = MLPConfig(hidden_dims=(16, 32)), dict(input_shape=(64,), num_outputs=10)
    first, second, output = 2 * 64 * 16, 2 * 16 * 32, 2 * 32 * 10
    assert _flops(config, **sizes, trained={"output/kernel"}) == first + second + 2 * output
    assert _flops(config, **sizes, trained={"layers/1/bias"}) == first + second + 2 * output
    assert _flops(config, **sizes, trained={"layers/0/kernel"}) == 3 * first + 2 * second + 2 * output


@pytest.mark.parametrize(
    ("kind", "policy", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H200", "tf32", 494.7e12),
        ("NVIDIA H200", "fp8", 1978.9e12),
        ("NVIDIA A100-SXM4-80GB", "fp8", 312e12),  # in bf16, as on every device without such units
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("TPU v5 lite", "bf16", 197e12),
        ("cpu", "fp32", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
    ],
)
def test_peaks(kind, policy, peak):
    assert peak_flops(kind, policy) == peak


def test_a_pair_of_answers_counts_two_texts_and_the_reference(tmp_path):
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (tmp_path / "pairs.jsonl").write_text("\n".join([json.dumps(pair)] * 8))
    words = [
        *("task=dpo", "data.kind=chat", f"data.path={tmp_path}/pairs.jsonl", "data.template=chatml"),
        *("data.tokenizer.kind=byte", "data.validation_fraction=0", "train.global_batch_size=8"),
        *("model.kind=transformer", "model.num_layers=1", "model.embed_dim=8", "model.num_heads=2"),
    ]
    spec = RunSpec(load_config(None, overrides=[*words, "model.max_sequence_length=64"]), Path("runs/unused"))
    config = spec.config
    run = assemble(spec, open_run_data(spec.config))
    by_text = _flops(config.model, sequence_length=64, vocab_size=run.data.vocab_size)
    assert by_text is not None
    # Forward, twice that backward, and forward again in the model that training started from.
    assert (
        step_flops(run.config, run.step.model, run.data, reference=run.step.task.reads_reference)
        == 8 * 2 * by_text / 3 * 4
    )


def test_a_run_counts_what_it_trains():
    words = ["data.kind=digits", "model.kind=mlp", "model.hidden_dims=[16]", "task=classification"]
    found = []
    for freeze in ([], ["optimizer.freeze=[layers/*]"]):
        spec = RunSpec(
            load_config(None, overrides=[*words, *freeze, "train.global_batch_size=32"]), Path("runs/unused")
        )
        run = assemble(spec, open_run_data(spec.config))
        found.append(step_flops(run.config, run.step.model, run.data))
    layer, output = 64 * 16, 16 * 10
    assert found == [32 * 6 * (layer + output), 32 * 2 * (layer + 2 * output)]
