"""What one device sends over each axis, against volumes written out by hand."""

import itertools
import types

import pytest

from jaxtrain.config import load_config
from jaxtrain.layout import mesh
from jaxtrain.layout.degrees import AXES
from jaxtrain.plan.catalogue.hardware import parse_targets
from jaxtrain.plan.search.analyse import analyse
from jaxtrain.plan.time.step import crossing

SMALL = ["train.global_batch_size=8", "data.sequence_length=8192", "parallel.fsdp=1"]
# Llama 3 8B: 32 layers of width 4096, 8 key-value heads of 128; activations and gradients in bf16.
PARAMETERS = 8_030_261_248
LAYERS, STREAM, KEYS = 32, 2 * 8192 * 4096, 2 * 8192 * 2 * 8 * 128

# id: (overrides, axis, bytes)
TRAFFIC = {
    # Three passes (remat runs forward again) send 7 times keys and values of 8 heads and change the order of 32 + 8 + 8
    # + 32; gradients of keys and values go 8 times in float32. Every parameter is whole on every device, so that its
    # gradients are summed: 2 x 7/8.
    "ring": (
        ["parallel.context=8", "train.accumulation_steps=1"],
        "context",
        LAYERS * 8 * 2 * 8192 * 128 / 8 * (3 * (7 * 16 + 80) + 8 * 16 * 2) + 2 * 7 / 8 * 2 * PARAMETERS,
    ),
    # Of two devices each has half of its tokens in place.
    "ring of two": (
        ["parallel.data=4", "parallel.context=2", "train.accumulation_steps=1", "remat.policy=none"],
        "context",
        LAYERS * 2 * 2 * 8192 * 128 / 2 * (2 * (16 + 40) + 2 * 16 * 2) + 2 / 2 * 2 * PARAMETERS,
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


TABLES = 2 * 128_256 * 4096
# id: (overrides, activations in streams of one row, bytes of parameters and gradients)
PIPES = {
    # 1F1B exchanges in m + 2 (p - 1) ticks. Tables come in bf16, their gradients are summed in float32.
    "1f1b": (["parallel.pipe=4", "parallel.data=2"], 2 * (4 + 6), 10 * 3 / 4 * TABLES),
    # Half of four chunks are run by the stage that does not keep them.
    "interleaved": (
        ["parallel.pipe=2", "parallel.data=4", "parallel.schedule=interleaved_1f1b"],
        2 * 8,
        10 / 2 * TABLES + 6 / 2 * (PARAMETERS - TABLES) / 2,
    ),
}


@pytest.mark.parametrize(("overrides", "streams", "parameters"), PIPES.values(), ids=PIPES)
def test_a_pipeline_sends_parameters_too(overrides, streams, parameters):
    rows = 8 if "parallel.data=2" in overrides else 16
    more = [f"train.global_batch_size={rows}", "train.accumulation_steps=4", "data.sequence_length=8192"]
    loaded = load_config("llama3_8b", overrides=[*more, "parallel.fsdp=1", *overrides])
    estimate = analyse(loaded.config, parse_targets("h100x8")[0])
    assert estimate.time is not None
    sent = [one.bytes for one in estimate.time.traffic if one.axis == "pipe"]
    assert sent == pytest.approx([streams * STREAM, parameters], rel=1e-3)


def test_quantized_kernels_are_gathered_as_they_are_stored():
    sent = {}
    for base in ("int8", "bf16"):
        overrides = [
            f"finetune.base={'null' if base == 'bf16' else base}",
            "parallel.fsdp=4",
            "parallel.data=2",
            "train.accumulation_steps=2",
        ]
        estimate = analyse(
            load_config("llama3.1_8b_lora", overrides=overrides, weights=False).config, parse_targets("h100x8")[0]
        )
        assert estimate.time is not None
        (sent[base],) = [one.bytes for one in estimate.time.traffic if one.axis == "fsdp"]
    # Kernels are 6.98e9 of 8.03e9 parameters, and their scales are few.
    assert sent["int8"] / sent["bf16"] == pytest.approx((6.98 + 2 * 1.05) / (2 * 8.03), rel=0.03)


@pytest.mark.parametrize("zero", [0, 2])
def test_batch_statistics_reduce_the_gradients_of_each_microbatch(zero):
    sent = []
    for steps in (2, 8):
        overrides = [f"train.accumulation_steps={steps}", f"parallel.zero={zero}", "parallel.data=4"]
        config = load_config("resnet50_imagenet", overrides=["train.global_batch_size=256", *overrides]).config
        estimate = analyse(config, parse_targets("h100x4")[0])
        assert estimate.time is not None
        sent += [one.bytes for one in estimate.time.traffic if one.axis == "data"]
    parameters = 25_557_032 * 3 / 4
    if zero == 0:
        assert sent == pytest.approx([2 * 4 * steps * parameters for steps in (2, 8)], rel=0.01)
    else:
        assert sent[1] - sent[0] == pytest.approx(6 * 4 * parameters, rel=0.01)


class Device:
    """A GPU of a host of 8."""

    platform = "gpu"

    def __init__(self, number: int):
        self.id, self.process_index = number, number // 8


@pytest.mark.parametrize("num_devices", [24, 40, 48, 72])
def test_axes_cross_hosts_where_the_mesh_lays_them_out_so(num_devices):
    (target,) = parse_targets(f"h100x{num_devices}")
    devices = [Device(number) for number in range(num_devices)]
    found = 0
    for pipe, fsdp, tensor in itertools.product((1, 2, 3), (1, 2, 3, 4, 5, 6), (1, 2, 4, 6, 8)):
        degrees = dict.fromkeys(AXES, 1) | {"pipe": pipe, "fsdp": fsdp, "tensor": tensor}
        degrees["data"], rest = divmod(num_devices, pipe * fsdp * tensor)
        if rest:
            continue
        laid = mesh._lay_out(devices, tuple(degrees.values()))  # pyright: ignore[reportArgumentType] as devices
        real = mesh.crossing_axes(types.SimpleNamespace(devices=laid, axis_names=AXES))  # pyright: ignore[reportArgumentType]
        assert set(crossing(degrees, target)) == set(real)
        found += 1
    assert found > 20
