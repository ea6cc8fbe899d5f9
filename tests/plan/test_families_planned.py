"""Published models of 7 to 70 billion parameters, and each kind of model, have a plan that adds up."""

import pytest

from jaxtrain.config import load_config
from jaxtrain.plan.estimate import Estimate, analyse
from jaxtrain.plan.targets import parse_targets

# Size -> (billions of parameters as published, H100 that it is planned for).
SIZES = {
    "llama3_8b": (8.03, 8),
    "mixtral_8x7b": (46.70, 64),
    "qwen3_30b_a3b": (30.53, 64),
    "gemma2_27b": (27.23, 64),
    "gemma3_27b": (27.01, 64),
    "phi3_medium_4k": (13.96, 8),
    "gpt_neox_20b": (20.55, 64),
}
TOKENS = "data={kind: tokens, path: elsewhere, sequence_length: 4096}"
# Kind -> what the command line says of it.
KINDS = {
    "encoder-decoder": [
        "model={kind: encoder_decoder, size: flan_t5_xl}",
        "data={kind: synthetic, task: tokens, vocab_size: 32000, sequence_length: 512, corruption: {kind: spans}}",
        "task=sequence_to_sequence",
    ],
    "vision transformer": [
        "model={kind: vit, size: vit_large}",
        "data={kind: synthetic, task: images, image_size: 224, num_classes: 1000}",
        "task=classification",
    ],
    "masked language model": [
        "model={size: bert_large, head: {kind: masked_language_model}}",
        "data={kind: synthetic, task: tokens, vocab_size: 30000, sequence_length: 512, corruption: {kind: mask}}",
        "task=masked_language_modeling",
    ],
}


def planned(words: list[str], num_devices: int) -> Estimate:
    shared = ["train.accumulation_steps=1", "precision.policy=bf16", "remat.policy=full", "parallel.data=1"]
    batch = [f"train.global_batch_size={4 * num_devices}", f"parallel.fsdp={num_devices}"]
    (target,) = parse_targets(f"h100x{num_devices}", None)
    return analyse(load_config("gpt2_124m", overrides=[*shared, *batch, *words]).config, target)


def check(found: Estimate) -> None:
    # Parameters and two moments, 4 bytes each; what does not divide by the devices stands on each.
    assert found.memory.state_bytes == pytest.approx(12 * found.num_parameters / found.target.num_devices, rel=0.02)
    assert found.memory.total_bytes > found.memory.state_bytes
    assert found.time.low_seconds < found.time.seconds < found.time.high_seconds
    # A step is slower than its model FLOPs alone; by far the most where it computes 16 times those in experts.
    assert 0.005 < found.time.model_flops_utilization < 0.8


@pytest.mark.parametrize("size", SIZES)
def test_a_published_decoder_is_planned(size: str) -> None:
    billions, num_devices = SIZES[size]
    # Every row meets each of 128 experts on a GPU, which fits with fewer rows.
    experts = ["train.global_batch_size=64"] if size == "qwen3_30b_a3b" else []
    # Longer rows than it takes are refused.
    tokens = TOKENS.replace("4096", "2048") if size == "gpt_neox_20b" else TOKENS
    found = planned([f"model={{size: {size}}}", tokens, *experts], num_devices)
    assert found.num_parameters / 1e9 == pytest.approx(billions, abs=0.006)
    assert found.fits
    check(found)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_planned(kind: str) -> None:
    check(planned(KINDS[kind], 8))
