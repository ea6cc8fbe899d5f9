"""What the planner counts against what compiled steps multiply, send and hold.

`compiled_counts.json` holds what compilers said on one day, see `program_counts.py`; one row is compiled anew here.
"""

import json
from pathlib import Path

import pytest
from program_counts import compile_counts, tiny_config

from jaxtrain.config import load_config
from jaxtrain.ops.attention.rules import score_elements
from jaxtrain.plan.estimate import analyse
from jaxtrain.plan.hardware import measured_cpu
from jaxtrain.plan.layers import attention_work
from jaxtrain.plan.targets import parse_targets, target_of

ROWS = json.loads((Path(__file__).parent / "compiled_counts.json").read_text())["rows"]
# Of several axes, whose sums the file does not tell apart.
TWO_AXES = ("parallel.data=2", "parallel.tensor=2")
ONE_AXIS = [row for row in ROWS if row["all_to_all_bytes"] and not any(axis in row["config"] for axis in TWO_AXES)]
# Encoders on one device: every pair is computed and counted. Some have frozen parameters.
PLAIN = [row for row in ROWS if row["config"].startswith("1 model.causal=false") and "remat" not in row["config"]]


def planned(words):
    count, config = tiny_config(words)
    peaks = dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), 1e12)
    estimate = analyse(config, target_of(measured_cpu(peaks, 1e11, 2**40, count), count))
    assert estimate.time is not None
    return estimate


def expert_bytes(estimate):
    return next((one.bytes for one in estimate.time.traffic if one.axis == "expert"), 0.0)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["config"])
def test_flops_are_those_of_the_program(row):
    found = sum(block.flops for block in planned(row["config"]).time.blocks)
    # Programs that compute layers again leave out products whose results only the next layer needs, and the router.
    assert found == pytest.approx(row["flops"], rel=0.02 if "remat" in row["config"] else 1e-3)


@pytest.mark.parametrize("row", PLAIN, ids=lambda row: row["config"])
def test_model_flops_are_those_of_a_program_that_computes_nothing_twice(row):
    assert planned(row["config"]).time.model_flops == row["flops"]


@pytest.mark.parametrize("row", ONE_AXIS, ids=lambda row: row["config"])
def test_traffic_of_experts_is_that_of_the_program(row):
    estimate = planned(row["config"])
    shards = estimate.degrees["expert"]
    # A device keeps its own part of an all-to-all; a ring sums in two rounds. The sums hold a few metrics besides.
    sent = (shards - 1) / shards * (row["all_to_all_bytes"] + 2 * row["all_reduce_bytes"])
    assert expert_bytes(estimate) == pytest.approx(sent, rel=0.01)


@pytest.mark.long
def test_the_rows_are_what_compiling_gives():
    row = next(row for row in ROWS if "experts" not in row["config"] and "context" in row["config"])
    found = compile_counts(row["config"])
    counted = ("config", "flops", "all_to_all_bytes")
    assert {name: found[name] for name in counted} == {name: row[name] for name in counted}


@pytest.mark.parametrize("context", [2, 4, 8])
def test_a_causal_ring_computes_the_pairs_of_the_step(context):
    length = 131072
    words = [f"data.sequence_length={length}", "parallel.fsdp=1", f"parallel.context={context}"]
    batch = ["train.global_batch_size=1", "train.accumulation_steps=1"]
    (target,) = parse_targets(f"h100x{context}", None)
    config = load_config("llama3_8b", overrides=[*words, *batch]).config
    work = attention_work(config, config.model, target, length)
    for device in range(context):
        step = score_elements(device, size=context, length=length, causal=True)
        assert work.computed * length * length / context == step
    assert work.computed == 0.5 + 0.25 / context
