"""What one device sends over each axis, against volumes written out by hand."""

import pytest

from jaxtrain.config import load_config
from jaxtrain.plan.catalogue.hardware import parse_targets
from jaxtrain.plan.search.analyse import analyse

SMALL = ["train.global_batch_size=8", "data.sequence_length=8192", "parallel.fsdp=1"]
# Llama 3 8B: 32 layers of width 4096, 8 key-value heads of 128; activations and gradients in bf16.
PARAMETERS = 8_030_261_248
LAYERS, STREAM, KEYS = 32, 2 * 8192 * 4096, 2 * 8192 * 2 * 8 * 128

# id: (overrides, axis, bytes)
TRAFFIC = {
    # Keys and values round forward, again for remat, and with float32 gradients backward: 1 + 1 + 3. Every parameter
    # is whole on every device, so that its gradients are summed: 2 x 7/8.
    "ring": (
        ["parallel.context=8", "train.accumulation_steps=1"],
        "context",
        LAYERS * 5 * 8 * KEYS / 8 * 7 + 2 * 7 / 8 * 2 * PARAMETERS,
    ),
    # Queries and outputs (32 heads), keys and values (8 each): 10 widths of a head and device, 3 passes.
    "all_to_all": (
        ["parallel.context=8", "train.accumulation_steps=1", "parallel.context_attention=all_to_all"],
        "context",
        LAYERS * 3 * 8 * 2 * (32 + 8) * 128 * 2 * 8192 / 8 * 7 / 8 + 2 * 7 / 8 * 2 * PARAMETERS,
    ),
    "gather": (
        ["parallel.context=8", "train.accumulation_steps=1", "parallel.context_attention=gather"],
        "context",
        LAYERS * 3 * 8 * KEYS / 8 * 7 + 2 * 7 / 8 * 2 * PARAMETERS,
    ),
    # Two all-reduces forward, two backward; one sends 2 x 3/4 of the stream.
    "tensor": (
        ["parallel.data=2", "parallel.tensor=4", "remat.policy=dots", "train.accumulation_steps=1"],
        "tensor",
        LAYERS * 4 * 4 * STREAM * 2 * 3 / 4,
    ),
    "tensor, remat": (
        ["parallel.data=2", "parallel.tensor=4", "train.accumulation_steps=1"],
        "tensor",
        LAYERS * 6 * 4 * STREAM * 2 * 3 / 4,
    ),
    # A stage runs forward once more before its backward: 8 microbatches of 16 layers.
    "tensor, pipeline": (
        *(["parallel.data=1", "parallel.pipe=2", "parallel.tensor=4", "remat.policy=dots"], "tensor"),
        LAYERS / 2 * 6 * 8 * STREAM * 2 * 3 / 4,
    ),
}


@pytest.mark.parametrize(("overrides", "axis", "expected"), TRAFFIC.values(), ids=TRAFFIC)
def test_traffic(overrides, axis, expected):
    estimate = analyse(load_config("llama3_8b", overrides=[*SMALL, *overrides]).config, parse_targets("h100x8")[0])
    assert estimate.time is not None
    (sent,) = [one for one in estimate.time.traffic if one.axis == axis]
    assert sent.bytes == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("pipe", "times"), [(1, 3), (2, 4)], ids=["no pipeline", "pipeline"])
def test_parameters_are_gathered_for_every_pass(pipe, times):
    overrides = ["parallel.data=1", f"parallel.fsdp={8 // pipe}", f"parallel.pipe={pipe}", "train.accumulation_steps=4"]
    loaded = load_config("llama3_8b", overrides=["train.global_batch_size=32", *overrides])
    estimate = analyse(loaded.config, parse_targets("h100x8")[0])
    assert estimate.time is not None
    (sent,) = [one for one in estimate.time.traffic if one.axis == "fsdp"]
    # Embedding and output layer are spread over the stages as the layers are; the norms' vectors are too small to see.
    assert sent.bytes == pytest.approx(times * 4 * 2 * PARAMETERS / pipe * (1 - pipe / 8), rel=1e-4)
