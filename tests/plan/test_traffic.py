"""What one device sends over each axis, against volumes written out by hand; how context and fp8 change a step."""

import itertools
import re
import types

import pytest

from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError
from jaxtrain.layout import mesh
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.rules import AXES
from jaxtrain.layout.sharding import Layout
from jaxtrain.ops.attention.context import choose_context
from jaxtrain.ops.attention.rules import AttentionForm
from jaxtrain.plan.estimate import analyse
from jaxtrain.plan.layers import attention_work, context_way
from jaxtrain.plan.targets import parse_targets
from jaxtrain.plan.time import crossing

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


class Device:
    """A GPU of a host of 8."""

    platform = "gpu"

    def __init__(self, number: int):
        self.id, self.process_index = number, number // 8


def test_axes_cross_hosts_where_the_mesh_lays_them_out_so():
    num_devices = 72
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


@pytest.mark.parametrize("way", ["auto", "ring", "all_to_all", "gather"])
def test_the_way_of_attention_over_context_is_that_of_the_step(way):
    compared = 0
    for (pipe, tensor, context), heads in itertools.product([(1, 1, 8), (1, 2, 4), (2, 2, 2)], [4, 6, 8]):
        degrees = dict(pipe=pipe, tensor=tensor, context=context, data=1)
        keys = [f"parallel.{axis}={size}" for axis, size in degrees.items()]
        own = ["model.embed_dim=192", f"model.num_heads={heads}", f"parallel.context_attention={way}"]
        config = load_config("quickstart", overrides=[*keys, *own]).config
        there = Layout(make_mesh(**degrees), context_attention=way)
        try:
            chosen = choose_context(there, heads, heads, AttentionForm(True, None, None))
        except ConfigError as error:
            with pytest.raises(ConfigError, match=re.escape(str(error))):
                context_way(config, config.model)
            continue
        assert context_way(config, config.model) == chosen, (degrees, heads)
        compared += 1
    assert compared


def test_a_plan_refuses_attention_that_the_step_refuses():
    (target,) = parse_targets("mi300xx8", None)
    config = load_config("gpt2_124m", overrides=["model.attention=cudnn"]).config
    with pytest.raises(ConfigError, match="cudnn cannot run on mi300xx8: the platform is rocm;"):
        attention_work(config, config.model, target, 1024)
    (target,) = parse_targets("h100x8", None)
    config = load_config("llama3_8b", overrides=["model.size=llama4_scout_17b_16e", "model.attention=cudnn"]).config
    assert attention_work(config, config.model, target, 8192).name == "cudnn"
    with pytest.raises(ConfigError, match="cudnn cannot run on h100x8: documents or chunks are packed"):
        attention_work(config, config.model, target, 8320)


LLAMA = ["data.sequence_length=4096", "train.global_batch_size=64", "train.accumulation_steps=1"]
MIXTRAL = ["model.size=mixtral_8x7b", "parallel.expert=2", "parallel.fsdp=4"]

# target, more keys, (least, most) time of bf16 over that of fp8, part of the note about it. Rates of fp8 linear layers
# are twice those of bf16; attention, output layer and all elementwise work stay, and rounding comes on top. Published:
# 1.28 and 1.29 for Llama 3 8B on 8 and 128 H100 (torchtitan, December 2024).
FP8 = {
    "h100": ("h100x8", [], (1.2, 1.6), None),
    "experts": ("h100x8", MIXTRAL, (0.9, 1.15), "the experts' matmuls run in bf16"),
    "tpu": ("v5p-16", [], (0.7, 1.0), "no fp8 units that jaxtrain uses"),
}


@pytest.mark.parametrize(("target", "more", "ratios", "note"), FP8.values(), ids=FP8)
def test_fp8(target, more, ratios, note):
    found = {}
    for policy in ("bf16", "fp8"):
        config = load_config("llama3_8b", overrides=[*LLAMA, *more, f"precision.policy={policy}"]).config
        found[policy] = analyse(config, parse_targets(target)[0])
    assert found["fp8"].memory.parts == found["bf16"].memory.parts
    least, most = ratios
    assert least < found["bf16"].time.seconds / found["fp8"].time.seconds <= most
    about = [line for line in found["fp8"].notes if "fp8" in line]
    assert len(about) == (note is not None)
    assert note is None or note in about[0]
    assert not any("fp8" in line for line in found["bf16"].notes)
