"""Figures that everyone quotes, from the planner's own functions, each with the reading that makes it true.

GB are 10^9 bytes here. Prices are in test_cost.py.
"""

import math

import pytest

from jaxtrain.config import load_config
from jaxtrain.layout.rules import AXES
from jaxtrain.models.shipped.shapes import Tensors
from jaxtrain.plan.estimate import analyse
from jaxtrain.plan.hardware import catalogue
from jaxtrain.plan.state import finetuned, shard_parameters, state_bytes
from jaxtrain.plan.step import device_step, with_degrees
from jaxtrain.plan.targets import target_of
from jaxtrain.plan.work import step_blocks
from jaxtrain.plan.workload import describe_workload, model_tensors

GB = 1e9
ONE = dict.fromkeys(AXES, 1)
# 7 billion parameters, whatever shape they have: one matrix of them.
SEVEN_BILLION = Tensors({"kernel": (7_000, 1_000_000)}, {})
TOKENS = (
    *("data.kind=synthetic", "data.task=tokens", "data.vocab_size=32000", "data.sequence_length=1024"),
    "model.max_sequence_length=1024",
)


def config_of(*overrides, name=None):
    return load_config(name, overrides=overrides).config


def state_of(config, tensors=None, **degrees):
    """Bytes of the train state on one device of a mesh, by part."""
    degrees = {**ONE, **degrees}
    stored = finetuned(config, tensors or model_tensors(config.model, describe_workload(config)))
    return state_bytes(config, stored, shard_parameters(config, stored, degrees), degrees)


def blocks_of(config):
    """The blocks of a step on one H100."""
    config = with_degrees(config, 1)
    return step_blocks(device_step(config, target_of(catalogue()["h100"], 1), describe_workload(config)))


def on(name, num_devices, *overrides, config=None):
    return analyse(config_of(*overrides, name=config), target_of(catalogue()[name], num_devices))


# id: (overrides, GB of parameters, GB of optimizer state)
SEVEN_BILLION_TAKE = {
    # 2 bytes a parameter, and two moments of 4 bytes: 56 come on top of the 14, not instead of them.
    "16 bits, adam in fp32": (["precision.policy=bf16_pure", "optimizer.kind=adamw"], 14, 56),
    # fp32 masters instead: the same 56 beside 28.
    "fp32 masters, adam": (["precision.policy=bf16", "optimizer.kind=adamw"], 28, 56),
    "one moment in fp32, lion": (["precision.policy=bf16_pure", "optimizer.kind=lion"], 14, 28),
}


@pytest.mark.parametrize(("overrides", "params", "optimizer"), SEVEN_BILLION_TAKE.values(), ids=SEVEN_BILLION_TAKE)
def test_state_of_7_billion_parameters(overrides, params, optimizer):
    state = state_of(config_of(*overrides), SEVEN_BILLION)
    assert (state.params, state.optimizer) == (params * GB, optimizer * GB)


def layers(count, remat, *overrides):
    """A transformer of some layers on one device, bf16."""
    sizes = ("model.embed_dim=1024", "model.num_heads=16", "model.mlp_dim=4096", f"model.num_layers={count}")
    return config_of(
        *TOKENS, *sizes, "precision.policy=bf16", "train.global_batch_size=8", f"remat.policy={remat}", *overrides
    )


def kept(count, remat):
    """Bytes from the forward pass for the backward pass, and what one block needs besides in its backward pass."""
    parts = analyse(layers(count, remat), target_of(catalogue()["h100"], 1)).memory.parts
    return parts["activations"], parts.get("block being computed", 0)


# Backward is twice the forward pass, which full remat runs again: 4/3 of the FLOPs; segments run it three times.
@pytest.mark.parametrize(("remat", "passes"), [("none", 3), ("full", 4), ("sqrt", 5)])
def test_checkpointing_costs_a_third_more_compute(remat, passes):
    # A fused kernel's backward pass makes scores again whatever the policy is; the figure is of plain attention.
    blocks = blocks_of(layers(12, remat, "model.attention=reference"))
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


# With two microbatches, whose sums are of g = 4 bytes, stage 1 keeps the gradient of a layer besides. Under fsdp a
# device casts its parts too: 2 more bytes of each, so that it has 16 bytes per parameter as in DeepSpeed's table.
EXPECTED = {1: {0: 16 / 64, 1: 2 + 14 / 64, 2: 2 + 14 / 64}, 2: {0: 18 / 64, 1: 6 + 12 / 64, 2: 2 + 16 / 64}}


@pytest.mark.parametrize("microbatches", EXPECTED)
@pytest.mark.parametrize(("zero", "data", "fsdp"), PER_DEVICE.values(), ids=PER_DEVICE)
def test_zero_over_64_devices_follows_the_formulas(zero, data, fsdp, microbatches):
    batch = (f"train.global_batch_size={64 * microbatches}", f"train.accumulation_steps={microbatches}")
    degrees = (f"parallel.zero={zero}", f"parallel.data={data}", f"parallel.fsdp={fsdp}")
    parts = on("h100", 64, *LARGE, *batch, *degrees, "optimizer.kind=adamw").memory.parts
    names = ("parameters", "optimizer state", "gradients", "parameters in compute dtype")
    config = config_of(*LARGE)
    count = sum(math.prod(shape) for shape in model_tensors(config.model, describe_workload(config)).params.values())
    assert count == pytest.approx(7.64e9, rel=0.001)
    assert sum(parts.get(name, 0) for name in names) == pytest.approx(EXPECTED[microbatches][zero] * count, rel=0.05)


# Size -> (billions of parameters as published, H100 that it is planned for).
SIZES = {
    "llama3_8b": (8.03, 8),
    "mixtral_8x7b": (46.70, 64),
    "qwen3_30b_a3b": (30.53, 64),
    "gemma3_27b": (27.01, 64),
    "phi3_medium_4k": (13.96, 8),
    "gpt_neox_20b": (20.55, 64),
}


@pytest.mark.parametrize("size", SIZES)
def test_a_published_decoder_has_a_plan_that_adds_up(size):
    billions, num_devices = SIZES[size]
    shared = ["train.accumulation_steps=1", "precision.policy=bf16", "remat.policy=full", "parallel.data=1"]
    tokens = "data={kind: tokens, path: elsewhere, sequence_length: 2048}"
    batch = [f"train.global_batch_size={num_devices}", f"parallel.fsdp={num_devices}"]
    found = on("h100", num_devices, *shared, *batch, f"model={{size: {size}}}", tokens, config="gpt2_124m")
    assert found.num_parameters / 1e9 == pytest.approx(billions, abs=0.006)
    # Parameters and two moments, 4 bytes each; what does not divide by the devices stands on each.
    assert found.memory.state_bytes == pytest.approx(12 * found.num_parameters / num_devices, rel=0.02)
    assert found.fits
    assert found.time.low_seconds < found.time.seconds < found.time.high_seconds
    # A step is slower than its model FLOPs alone; by far the most where it computes 16 times those in experts.
    assert 0.005 < found.time.model_flops_utilization < 0.8
