"""Figures that everyone quotes, from the planner's own functions, each with the reading that makes it true.

GB are 10^9 bytes here. Prices, GPT-3's 34 days and ResNet-50 at published rates are in test_cost.py.
"""

import math

import pytest

from jaxtrain.config import load_config
from jaxtrain.layout.degrees import AXES
from jaxtrain.models.shipped.shapes import Tensors
from jaxtrain.plan.catalogue.hardware import find, target_of
from jaxtrain.plan.cost.training import steps_for
from jaxtrain.plan.search.analyse import analyse
from jaxtrain.plan.work.attention import attention_work
from jaxtrain.plan.work.block import DeviceBatch
from jaxtrain.plan.work.blocks import step_blocks
from jaxtrain.plan.work.state import shard_parameters, state_bytes
from jaxtrain.plan.workload.describe import describe_workload
from jaxtrain.plan.workload.parameters import model_tensors

GB, HOUR = 1e9, 3600
ONE = dict.fromkeys(AXES, 1)
# 7 billion parameters, whatever shape they have: one matrix of them.
SEVEN_BILLION = Tensors({"kernel": (7_000, 1_000_000)}, {})
RESNET = ("data.kind=synthetic", "data.task=images", "data.image_size=224", "data.num_classes=1000")
TOKENS = (
    *("data.kind=synthetic", "data.task=tokens", "data.vocab_size=32000", "data.sequence_length=1024"),
    "model.max_sequence_length=1024",
)
GPT3_13B = ("model.size=gpt3_13b", *TOKENS[:2], "data.sequence_length=512", "train.global_batch_size=1")


def config_of(*overrides, name=None):
    return load_config(name, overrides=overrides).config


def state_of(config, tensors=None, **degrees):
    """Bytes of the train state on one device of a mesh, by part."""
    degrees = {**ONE, **degrees}
    tensors = tensors or model_tensors(config.model, describe_workload(config))
    return state_bytes(config, tensors, shard_parameters(config, tensors, degrees), degrees)


def on(name, num_devices, *overrides, config=None):
    return analyse(config_of(*overrides, name=config), target_of(find(name), num_devices))


# id: (overrides, GB of parameters, GB of optimizer state)
SEVEN_BILLION_TAKE = {
    # 2 bytes a parameter, and two moments of 4 bytes: 56 come on top of the 14, not instead of them.
    "16 bits, adam in fp32": (["precision.policy=bf16_pure", "optimizer.kind=adamw"], 14, 56),
    # fp32 masters instead: the same 56 beside 28.
    "fp32 masters, adam": (["precision.policy=bf16", "optimizer.kind=adamw"], 28, 56),
    # "28 in 16 bits" is two moments of 2 bytes. The library keeps every moment in float32, because a second moment in
    # bf16 stands still (train/step.py), so that 28 is here what an optimizer with one moment takes.
    "one moment in fp32, lion": (["precision.policy=bf16_pure", "optimizer.kind=lion"], 14, 28),
    "one moment in fp32, momentum": (["precision.policy=bf16_pure", "optimizer.kind=sgd"], 14, 28),
}


@pytest.mark.parametrize(("overrides", "params", "optimizer"), SEVEN_BILLION_TAKE.values(), ids=SEVEN_BILLION_TAKE)
def test_state_of_7_billion_parameters(overrides, params, optimizer):
    state = state_of(config_of(*overrides), SEVEN_BILLION)
    assert (state.params, state.optimizer) == (params * GB, optimizer * GB)


def test_resnet50_takes_100_megabytes_a_copy():
    # 25.6 M parameters of 4 bytes: "about 100 MB" is 102, and Adam's two moments are twice that. Gradients are whole
    # where nothing is accumulated.
    estimate = on("a100-40", 1, *RESNET, "optimizer.kind=adamw", "precision.policy=fp32", config="resnet50_imagenet")
    assert estimate.num_parameters == 25_557_032
    parts = estimate.memory.parts
    copy = 4 * 25_557_032
    assert (parts["parameters"], parts["gradients"], parts["optimizer state"]) == (copy, copy, 2 * copy)
    assert copy == pytest.approx(100e6, rel=0.03)


def layers(count, remat, *overrides):
    """A transformer of some layers on one device, bf16."""
    sizes = ("model.embed_dim=1024", "model.num_heads=16", "model.mlp_dim=4096", f"model.num_layers={count}")
    return config_of(
        *TOKENS, *sizes, "precision.policy=bf16", "train.global_batch_size=8", f"remat.policy={remat}", *overrides
    )


def kept(count, remat):
    """Bytes from the forward pass for the backward pass, and what one block needs besides in its backward pass."""
    parts = analyse(layers(count, remat), target_of(find("h100"), 1)).memory.parts
    return parts["activations"], parts.get("block being computed", 0)


@pytest.mark.parametrize(
    ("remat", "passes"),
    [
        # Backward is twice the forward pass.
        pytest.param("none", 3, id="nothing is computed twice"),
        # The forward pass runs again: 4/3 of the FLOPs, "a third more compute".
        pytest.param("full", 4, id="the forward pass is computed twice"),
        pytest.param("sqrt", 5, id="and three times in segments"),
    ],
)
def test_checkpointing_costs_a_third_more_compute(remat, passes):
    # A fused kernel's backward pass makes scores again whatever the policy is; the figure is of plain attention.
    config = layers(12, remat, "model.attention=reference")
    attention = attention_work(config, config.model, target_of(find("h100"), 1), 1024)
    blocks = step_blocks(config, describe_workload(config), DeviceBatch(1, 8, ONE, (attention,)))
    staged = [block for block in blocks if block.stage]
    assert len(staged) == 4
    assert [block.total_flops for block in staged] == [passes * block.count * block.flops for block in staged]
    # Of the whole step a little less: the output layer is not computed again.
    rest = [block for block in blocks if not block.stage]
    assert [block.total_flops for block in rest] == [3 * block.count * block.flops for block in rest]


def test_full_remat_keeps_block_inputs_only():
    # O(N) still, but of one tensor a layer (rows x length x width of 2 bytes) in place of everything inside a block.
    inputs, inner = kept(24, "full")
    assert inputs == 24 * 2 * (8 * 1024 * 1024)
    assert kept(48, "full") == (2 * inputs, inner)
    assert kept(48, "none")[0] == 2 * kept(24, "none")[0]
    assert kept(24, "none")[0] > 20 * inputs


@pytest.mark.parametrize("count", [16, 64, 256])
def test_checkpoints_every_sqrt_n_layers_take_sqrt_n(count):
    """O(sqrt N) of Chen et al. 2016 keeps inputs of s segments and all of one segment of N/s layers.

    Policy sqrt keeps inputs alone inside a segment too, which is the quoted reading: a layer keeps as much as its input
    takes. What one layer keeps is the planner's.
    """
    one_input, one_layer = kept(1, "full")[0], kept(1, "none")[0]
    assert kept(count, "sqrt")[0] == 2 * math.isqrt(count) * one_input
    assert kept(count, "full")[0] == count * one_input

    def segmented(segments, cost=one_layer):
        return segments * one_input + count / segments * cost

    sizes = range(1, count + 1)
    # Then sqrt(N) segments are best, of 2 sqrt(N) inputs.
    best = min(sizes, key=lambda segments: segmented(segments, one_input))
    assert best == math.isqrt(count)
    assert segmented(best, one_input) == 2 * math.isqrt(count) * one_input
    # With all that layers keep in place of their inputs, sqrt(N x layer / input) segments are, but no more than there
    # are layers: up to some 30 layers `full` would be the best there is.
    best = min(sizes, key=segmented)
    assert best == pytest.approx(min(count, math.sqrt(count * one_layer / one_input)), rel=0.05)


# id: (overrides, degrees, times less of parameters, of optimizer state)
SHARDED = {
    "stage 0": ([], dict(data=8), 1, 1),
    "stage 1": (["parallel.zero=1"], dict(data=8), 8, 8),
    "stage 2": (["parallel.zero=2"], dict(data=8), 8, 8),
    "stage 3, which is fsdp": ([], dict(fsdp=8), 8, 8),
    "half of it": ([], dict(data=2, fsdp=4), 4, 4),
    "both": (["parallel.zero=1"], dict(data=2, fsdp=4), 8, 8),
}


@pytest.mark.parametrize("size", ["gpt2", "llama3_8b", "mixtral_8x7b"])
@pytest.mark.parametrize(("overrides", "degrees", "params", "optimizer"), SHARDED.values(), ids=SHARDED)
def test_zero_takes_up_to_8_times_less_on_8(size, overrides, degrees, params, optimizer):
    config = config_of(f"model.size={size}", *TOKENS, *overrides)
    alone, spread = state_of(config), state_of(config, **degrees)
    # Less than 8 where a dim does not divide: it stays whole.
    assert alone.params / spread.params == pytest.approx(params, rel=0.01)
    assert alone.optimizer / spread.optimizer == pytest.approx(optimizer, rel=0.01)


# Bytes per device of 7.64 billion parameters over 64 devices, in bf16 without accumulation, by the formulas with
# gradients of g = 2 bytes: (2 + g) P + 12 P / N, 2 P + (12 + g) P / N, (12 + g) P / N. DeepSpeed's table has 31.4, 16.6
# and 1.9 GB for 7.5 billion. Here both stages scatter the gradient of each layer as soon as it is there, so that stage
# 1 needs no more than stage 2. Besides there are two layers of gradients that are not scattered yet.
LARGE = (
    *TOKENS,
    "model.num_layers=32",
    "model.embed_dim=4096",
    "model.mlp_dim=13312",
    "model.num_heads=32",
    "precision.policy=bf16",
)
PER_DEVICE = {"stage 1": (1, 64, 1), "stage 2": (2, 64, 1), "stage 3, which is fsdp": (0, 1, 64)}


@pytest.mark.parametrize(("zero", "data", "fsdp"), PER_DEVICE.values(), ids=PER_DEVICE)
def test_zero_over_64_devices_follows_the_formulas(zero, data, fsdp):
    batch = ("train.global_batch_size=64", "train.accumulation_steps=1", "optimizer.kind=adamw")
    degrees = (f"parallel.zero={zero}", f"parallel.data={data}", f"parallel.fsdp={fsdp}")
    parts = on("h100", 64, *LARGE, *batch, *degrees).memory.parts
    names = ("parameters", "optimizer state", "gradients", "parameters in compute dtype")
    found = sum(parts.get(name, 0) for name in names)
    config = config_of(*LARGE)
    count = sum(math.prod(shape) for shape in model_tensors(config.model, describe_workload(config)).params.values())
    # Under fsdp a device casts its parts besides, so that it has 16 bytes per parameter, as in DeepSpeed's table.
    assert count == pytest.approx(7.64e9, rel=0.001)
    expected = 2 * count + 14 * count / 64 if zero else 16 * count / 64
    assert found == pytest.approx(expected, rel=0.05)


# The same with two microbatches, whose sums are of g = 4 bytes. Stage 1 keeps the gradient of a layer besides.
@pytest.mark.parametrize(("zero", "data", "fsdp"), PER_DEVICE.values(), ids=PER_DEVICE)
def test_zero_with_microbatches_over_64_devices_follows_the_formulas(zero, data, fsdp):
    batch = ("train.global_batch_size=128", "train.accumulation_steps=2", "optimizer.kind=adamw")
    degrees = (f"parallel.zero={zero}", f"parallel.data={data}", f"parallel.fsdp={fsdp}")
    parts = on("h100", 64, *LARGE, *batch, *degrees).memory.parts
    names = ("parameters", "optimizer state", "gradients", "parameters in compute dtype")
    config = config_of(*LARGE)
    count = sum(math.prod(shape) for shape in model_tensors(config.model, describe_workload(config)).params.values())
    # Under fsdp a device casts its parts besides: 2 more bytes of each.
    expected = {0: (18 / 64), 1: 6 + 12 / 64, 2: 2 + 16 / 64}[zero] * count
    assert sum(parts.get(name, 0) for name in names) == pytest.approx(expected, rel=0.05)


# id: (precision, hours that NVIDIA measured for the 90 epochs, on an A100 of 80 GB; see test_cost.py)
RESNET_DAYS = {"bf16": 13, "tf32": 34}


@pytest.mark.parametrize(("policy", "measured"), RESNET_DAYS.items(), ids=RESNET_DAYS)
def test_resnet50_on_imagenet_is_of_the_order_of_a_day(policy, measured):
    rows = 256
    steps = steps_for(epochs=90, rows_per_epoch=1_281_167, rows_per_step=rows)
    overrides = (f"train.global_batch_size={rows}", f"train.steps={steps}", f"precision.policy={policy}")
    estimate = on("a100-40", 1, *overrides, config="resnet50_imagenet")
    assert estimate.fits
    assert 6 <= estimate.cost.hours <= 48
    # Predicted before it was compared: within a factor of two, as the issue asks of every predicted time.
    assert measured / 2 < estimate.cost.hours < measured * 2
    assert estimate.time.low_seconds < estimate.time.seconds < estimate.time.high_seconds


SAVERS = (
    "precision.policy=bf16_pure",
    "optimizer.kind=adafactor",
    "remat.policy=full",
    "finetune.lora={rank: 1, targets: [query]}",
)
# id: (savers, GB of state, GB in all by the analytic model at most, fits)
THIRTEEN_BILLION_ON_24_GB = {
    "fp32 and adam": ((), 155.2, 215, False),
    "no fp32 masters": (SAVERS[:1], 129.4, 190, False),
    "and factored second moments": (SAVERS[:2], 26.0, 82, False),
    "and block inputs only": (SAVERS[:3], 26.0, 80, False),
    # No gradients of what is frozen: all but the weights is gone, and they alone are more than the card has.
    "and only adapters trained": (SAVERS, 25.7, 28, False),
}


@pytest.mark.parametrize(
    ("savers", "state", "most", "fits"), THIRTEEN_BILLION_ON_24_GB.values(), ids=THIRTEEN_BILLION_ON_24_GB
)
def test_13_billion_parameters_on_24_gigabytes(savers, state, most, fits):
    estimate = on("rtx4090", 1, *GPT3_13B, *savers)
    assert estimate.num_parameters == pytest.approx(13e9, rel=0.01)
    assert estimate.memory.state_bytes == pytest.approx(state * GB, rel=0.01)
    assert estimate.memory.state_bytes < estimate.memory.total_bytes < most * GB
    assert estimate.fits is fits


def test_13_billion_parameters_need_weights_below_16_bits_or_two_cards():
    """The memory savers by name: frozen weights in 8 or 4 bits under adapters, or a second card for those in 16."""
    config = config_of(*GPT3_13B, *SAVERS)
    weights, capacity = state_of(config).params, find("rtx4090").memory_bytes
    assert weights > capacity
    # A half of it in 8 bits, a quarter in 4, leaves 12 and 18 GB for the rest; no function of the planner says it.
    assert weights / 2 < capacity / 1.9
    two = on("rtx4090", 2, *GPT3_13B, *SAVERS, "train.global_batch_size=2", "parallel.fsdp=auto")
    assert two.degrees["fsdp"] == 2
    assert two.fits


def test_a_matmul_of_1024_is_2_billion_operations():
    # A multiply and an add for each of 1024^3 products: 2.1 billion, forward.
    table = ("task=classification", "data.kind=synthetic", "data.task=table", "data.num_columns=1024")
    config = config_of(*table, "model.kind=mlp", "model.hidden_dims=[1024]", "train.global_batch_size=1024")
    first = step_blocks(config, describe_workload(config), DeviceBatch(1, 1024, ONE))[0]
    assert first.flops == 2 * 1024**3
    assert first.flops == pytest.approx(2e9, rel=0.08)
