"""Predicted steps beside published ones: the published time is in the range, and near the prediction."""

import pytest

from jaxtrain.config import load_config
from jaxtrain.plan.catalogue.hardware import parse_targets
from jaxtrain.plan.search.analyse import analyse

# id: (config, overrides, target, published seconds a step, the prediction over it: least, most)
PUBLISHED = {
    # Narayanan et al. 2021, table 1 and section 5.1: 140 TFLOP/s a GPU, 34 days for 300 B tokens in steps of 1,536
    # rows. They recompute all activations, as a stage does here.
    "GPT-3 175B on 1,024 A100": (
        "llama3_8b",
        [
            *("model.size=gpt3_175b", "model.vocab_size=51200", "data.sequence_length=2048", "remat.policy=none"),
            *("parallel.tensor=8", "parallel.pipe=16", "parallel.data=8", "parallel.fsdp=1"),
            *("train.global_batch_size=1536", "train.accumulation_steps=1", "parallel.microbatches=192"),
        ],
        "a100-80x1024",
        34 * 86400 / (300e9 / (1536 * 2048)),
        (0.9, 1.1),
    ),
    # torchtitan, as the header of configs/llama3_8b.yaml says: 5,762 tokens/s a GPU, without compiling.
    "Llama 3 8B on 8 H100": ("llama3_8b", [], "h100x8", 64 * 8192 / (8 * 5762), (0.65, 1.0)),
}


@pytest.mark.parametrize(("name", "overrides", "target", "seconds", "ratios"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_step(name, overrides, target, seconds, ratios):
    time = analyse(load_config(name, overrides=overrides).config, parse_targets(target)[0]).time
    assert time is not None
    assert time.low_seconds < seconds < time.high_seconds
    assert ratios[0] < time.seconds / seconds < ratios[1]
