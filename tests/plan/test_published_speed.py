"""Planned speeds beside published ones (published_speeds.yaml): most are near, and all in the planner's range."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
import yaml

from jaxtrain.config import load_config
from jaxtrain.plan.estimate import analyse
from jaxtrain.plan.targets import parse_targets

TABLE = yaml.safe_load(Path(__file__).with_name("published_speeds.yaml").read_text(encoding="utf-8"))
SPEEDS = {f"{row[2]} of {row[3]} on {row[1]}, {row[0]}": row for row in TABLE["speeds"]}


def planned(row):
    """The estimate of a row, and the seconds that its published figure makes of a step."""
    source, on, model, length, rows, accumulation, layout, remat, figure = row
    groups = {
        "model": TABLE["models"].get(model, {"size": model}),
        "remat": TABLE["remat"].get(remat, {"policy": remat}),
        "parallel": {"data": 1, "fsdp": 1} | {axis: int(size) for axis, size in (x.split("=") for x in layout.split())},
    }
    # A pipeline has its microbatches; elsewhere they are accumulated.
    pipe = "pipe" in groups["parallel"]
    overrides = [f"{group}.{key}={json.dumps(value)}" for group, keys in groups.items() for key, value in keys.items()]
    overrides += ["model.size=null"] if "size" not in groups["model"] else []
    overrides += [f"model.max_sequence_length={length}", f"data.sequence_length={length}"]
    overrides += [f"train.global_batch_size={rows}", f"train.accumulation_steps={1 if pipe else accumulation}"]
    overrides += [f"parallel.microbatches={accumulation}"] if pipe else []
    (target,) = parse_targets(on)
    rate = TABLE["sources"][source].get("network_bandwidth", target.hardware.network_bandwidth)
    target = dataclasses.replace(target, hardware=dataclasses.replace(target.hardware, network_bandwidth=rate))
    estimate = analyse(load_config("llama3_8b", overrides=overrides).config, target)
    number, unit = figure.split()
    devices_share = rows * length / target.num_devices
    if unit == "tokens/s":
        return estimate, devices_share / float(number)
    # MaxText's count before 2025-07: attention to all positions, causal or not.
    blocks = estimate.config.model
    multiplied = estimate.num_parameters - blocks.vocab_size * blocks.embed_dim
    flops = 6 * multiplied + 12 * blocks.num_layers * blocks.num_heads * blocks.head_width * length
    return estimate, devices_share * flops / (float(number) * 1e12)


@pytest.fixture(scope="module")
def ratios():
    """name -> planned speed over the published one: likely, least, most."""
    found = {}
    for name, row in SPEEDS.items():
        estimate, published = planned(row)
        time = estimate.time
        found[name] = tuple(published / each for each in (time.seconds, time.high_seconds, time.low_seconds))
    return found


def test_likely_speeds_are_within_a_quarter_of_most_published_ones(ratios):
    far = {name: round(likely, 2) for name, (likely, _, _) in ratios.items() if abs(likely - 1) > 0.25}
    assert len(far) <= 0.2 * len(ratios), far


def test_published_speeds_are_in_the_range(ratios):
    outside = {name: found for name, found in ratios.items() if not found[1] <= 1 <= found[2]}
    assert not outside


def test_no_kind_of_hardware_is_planned_too_fast_or_too_slow(ratios):
    of_kind = {}
    for name, (likely, _, _) in ratios.items():
        of_kind.setdefault(parse_targets(SPEEDS[name][1])[0].hardware.name, []).append(likely)
    medians = {kind: round(statistics.median(found), 2) for kind, found in of_kind.items()}
    assert all(0.85 < median < 1.15 for median in medians.values()), medians
