"""`jaxtrain plan` without a compiler: its forms, its state against that of the real step, each mistake as one line."""

import json
import re

import jax
import pytest

from jaxtrain.config import load_config
from jaxtrain.plan.compile import sharded_bytes
from jaxtrain.plan.step import with_degrees
from jaxtrain.plan.workload import describe_workload
from jaxtrain.train.build import build_step

PLAN = ("plan", "quickstart", "--analytic", "--on")


def plans(answer):
    """The plans of a `--json` answer."""
    assert answer.code == 0
    # Keys that a size replaces are told, and nothing else is.
    assert all(" is replaced by model.size (" in line for line in answer.err.splitlines()), answer.err
    return json.loads(answer.out)["plans"]


def test_several_targets_stand_side_by_side(cli):
    answer = cli(*PLAN, "h100,v5e-1,rtx4090")
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    # Five lines for each are the answer; then the table.
    for place, name in enumerate(("h100", "v5e-1", "rtx4090")):
        fits, step, speed, time, cost, empty = lines[6 * place : 6 * place + 6]
        assert re.fullmatch(rf"{name} fits: [\d.]+ MiB of [\d.]+ GiB, by formulas", fits)
        assert re.fullmatch(r"step: \S+ .s \(\S+ .s to \S+ .s\), bound by .*", step)
        assert re.fullmatch(r"speed: [\d.]+M tokens/s, MFU .*", speed)
        assert re.fullmatch(r"time: [\d.]+ s for 819k tokens in 800 steps", time)
        assert re.fullmatch(r"cost: \S.* on demand; \S.* at the spot price, if nothing is interrupted", cost)
        assert empty == ""
    assert re.split(r"  +", lines[18].strip()) == ["h100", "v5e-1", "rtx4090"]
    for title in ("memory of one device, at its peak", "step, predicted", "whole run", "assumptions"):
        assert f"\n{title}\n" in answer.out
    assert re.search(r"parameters +1\.61M \(1,608,800\)", answer.out)
    assert answer.out.count("fits: ") == 3  # once of each
    assert max(map(len, answer.out.splitlines())) <= 120


def test_json_holds_what_the_table_shows(cli):
    gpu, tpu = plans(cli(*PLAN, "h100x8,v5e-8", "--json", "--tokens", "1e6"))
    assert [one["target"]["name"] for one in (gpu, tpu)] == ["h100x8", "v5e-8"]
    assert gpu["degrees"]["data"] == tpu["degrees"]["data"] == 8
    for one in (gpu, tpu):
        assert one["fits"] is True
        assert one["exact"] is one["exact_missing"] is None
        assert sum(one["memory"]["parts_bytes"].values()) == one["memory"]["total_bytes"]
        assert one["time"]["low_seconds"] <= one["time"]["seconds"] <= one["time"]["high_seconds"]
        # A million tokens in batches of 8 rows of 128, rounded up.
        assert one["cost"]["steps"] == 977
        trained = one["cost"]["hours"] * 3600 * (1 - one["cost"]["downtime"])
        assert trained == pytest.approx(977 * one["time"]["seconds"])


def test_cost_follows_what_is_asked(cli, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("h100: {on_demand_usd_hour: 1.5, network_bandwidth: 1.0e+8}\n")

    def cost(*words):
        return plans(cli(*PLAN, "h100x8", "--json", *words))[0]["cost"]

    plain = cost()
    assert plain["steps"] == 800
    own = cost("--hardware", str(path))
    assert own["on_demand_usd"] == pytest.approx(1.5 * own["device_hours"])
    two_nodes = ("parallel.fsdp=16", "--on", "h100x16")
    assert cost(*two_nodes, "--hardware", str(path))["hours"] > cost(*two_nodes)["hours"]


# id: config, devices and overrides. The abstract state of the real step has the bytes that a run allocates.
LAYERS = "model.num_layers=4"
MIXTURE = "model.experts.num_experts=8 model.experts.experts_per_token=2"
GROUPS = '[{"match":["embedding"],"optimizer":{"kind":"sgd"}},{"match":["*/mlp/*"],"optimizer":{"kind":"muon"}}]'
STATES = {
    "one device": "quickstart 1",
    "all at once": f"quickstart 8 parallel.pipe=2 parallel.fsdp=2 parallel.tensor=2 {LAYERS} parallel.zero=1",
    "experts": f"quickstart 8 {MIXTURE} parallel.expert=4 parallel.fsdp=2",
    "adafactor, zero=1": "quickstart 8 optimizer.kind=adafactor parallel.zero=1 parallel.tensor=2 optimizer.b1=0.9",
    # 160 = 2 x 80 elements of a block do not divide by 8: their exponents are whole on each shard.
    "int8 moments": "quickstart 8 optimizer.moments=int8 parallel.fsdp=4 parallel.tensor=2 parallel.zero=1",
    "muon of experts": f"quickstart 8 {MIXTURE} optimizer.kind=muon parallel.expert=4 parallel.zero=1",
    "parameter groups": f"quickstart 8 optimizer.groups={GROUPS} parallel.fsdp=4",
    "tied, learned positions": "quickstart 1 model.size=gpt2 model.num_layers=2 data.sequence_length=64",
    "resnet": "digits_resnet 8 optimizer.ema_decay=0.9 parallel.fsdp=4 parallel.zero=1",
}


@pytest.mark.parametrize("words", STATES.values(), ids=STATES)
def test_state_bytes_are_those_of_the_step(cli, words):
    name, count, *overrides = words.split(" ")
    num_devices = int(count)
    target = f"h100x{num_devices}" if num_devices > 1 else "h100"
    (plan,) = plans(cli("plan", name, "--analytic", "--on", target, "--json", *overrides))
    config = load_config(name, overrides=overrides).config
    workload = describe_workload(config)
    step = build_step(
        with_degrees(config, num_devices),
        input_shape=workload.input_shape,
        vocab_size=workload.vocab_size,
        num_outputs=workload.num_outputs,
        devices=jax.devices()[:num_devices],
    )
    # What the analytic model leaves out are counters of a few bytes.
    assert plan["memory"]["state_bytes"] == pytest.approx(sharded_bytes(step.abstract_state), rel=0.01)


def test_search_ranks_and_explains(cli):
    answer = cli(*PLAN, "h100x8", "--search")
    assert answer.code == 0
    heading = r"\nh100x8: (\d+) of (\d+) layouts fit; the first by step time:\n"
    fit, total = map(int, re.search(heading, answer.out).groups())
    assert total > fit > 0
    ranked = re.findall(r"^ +(\d+)\. +([\d.,]+) µs +([\d.]+) MiB +(\S.*)$", answer.out, re.MULTILINE)
    assert [int(row[0]) for row in ranked] == list(range(1, 11))
    # Not "0 ms" for a model that takes less than one.
    times = [float(row[1]) for row in ranked]
    assert times == sorted(times)
    assert times[0] > 0
    assert re.search(r"^  \d+ refused: .*does not divide", answer.out, re.MULTILINE)
    assert answer.out.count("NVIDIA H100 SXM 80 GB") == 3


def test_the_largest_batch(cli):
    words = ("plan", "llama3_8b", "--on", "h100x8", "--analytic", "train.accumulation_steps=1")
    (largest,) = plans(cli(*words, "--largest-batch", "--json"))
    rows = largest["workload"]["rows"]
    assert largest["config"]["train"]["global_batch_size"] == rows
    assert re.search(rf"\n +batch +{rows} rows of", cli(*words, "--largest-batch").out)
    verdicts = [plans(cli(*words, "--json", f"train.global_batch_size={n}"))[0]["fits"] for n in (rows, rows + 8)]
    assert verdicts == [True, False]
    none = cli("plan", "llama3_8b", "--on", "rtx4090", "--analytic", "parallel.fsdp=1", "--largest-batch")
    assert none.out.startswith("rtx4090 does not fit: ")


def test_advice_is_shown_where_it_does_not_fit(cli):
    answer = cli("plan", "llama3_8b", "--on", "h100x8", "--analytic", "remat.policy=none")
    assert answer.code == 0
    first, second, *_ = answer.out.splitlines()
    assert re.fullmatch(r"h100x8 does not fit: [\d.]+ GiB of [\d.]+ GiB, by formulas", first)
    assert re.fullmatch(r"to change: remat\.policy=dots: [\d.]+ GiB, step [\d.]+ x as long", second)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--on", "h100x8", "parallel.fsdp=8"), id="as asked"),
        pytest.param(("--on", "v5e-8", "parallel=auto"), id="auto"),
        pytest.param(("--on", "h100", "--tokens", "1e6", "optimizer.schedule.warmup_steps=80"), id="tokens"),
    ],
)
def test_the_written_config_plans_the_same(cli, tmp_path, words):
    path = tmp_path / "planned.yaml"
    first = cli("plan", "quickstart", *words, "--analytic", "--json", "--config", str(path))
    assert first.code == 0
    assert first.err.endswith(f"wrote {path}\ntrain it: jaxtrain train {path}\n")
    planned = json.loads(first.out)["plans"][0]
    loaded = load_config(path)
    if "--tokens" in words:  # 977 of the 800 steps of the config
        written = loaded.config
        assert (written.train.steps, written.optimizer.schedule.warmup_steps) == (977, 97)
    assert loaded.config.model_dump(mode="json") == planned["config"]
    assert not loaded.config.parallel.auto
    assert path.read_text().startswith(f"# quickstart, planned for {words[1]}: ")
    (again,) = plans(cli("plan", str(path), "--on", words[1], "--analytic", "--json"))
    assert again == planned


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        pytest.param("llama3_8b --on h100x4", "fsdp=4, .*because .*fsdp=8 makes 8", id="fewer devices"),
        pytest.param("smollm2_lora --on h100x8", "fsdp=8, .*batch 8, because .*batch_size=4 does", id="a larger batch"),
    ],
)
def test_a_layout_that_the_devices_cannot_take_is_fitted_and_said(cli, words, taken):
    answer = cli("plan", *words.split(), "--analytic")
    assert (answer.code, answer.err) == (0, "")
    fits, _, _, _, _, fitted, *_ = answer.out.splitlines()
    assert " fits: " in fits
    assert re.match(f"layout: planned for h100.* with .*{taken}", fitted)


def test_passes_are_counted_by_runs_alone(cli):
    answer = cli("plan", "quickstart", "--analytic", "--on", "h100", "train.epochs=2")
    assert answer.code == 2
    assert answer.err.splitlines()[-1].startswith("jaxtrain: train.epochs needs the data, which a plan does not read")
