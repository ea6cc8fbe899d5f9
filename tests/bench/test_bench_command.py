"""`jaxtrain bench` on a tiny model: everything is there and makes sense; mistakes are one line. No time is asserted."""

import contextlib
import json
import math

import pytest

from jaxtrain.bench.limits import Limits
from jaxtrain.bench.measure import PARTS, measure
from jaxtrain.bench.picture import draw
from jaxtrain.bench.whole_step import WholeStep
from jaxtrain.cli import main
from jaxtrain.config import load_config
from jaxtrain.plan.workload.describe import describe_workload

TINY = ["model.num_layers=2", "model.embed_dim=32", "model.num_heads=2", "model.max_sequence_length=32"]
TINY_RUN = [*TINY, "train.global_batch_size=8", "data.kind=synthetic", "data.num_rows=64"]

# id: (words, blocks that must be timed, unit)
CONFIGS = {
    "transformer": (["bench_cpu", *TINY_RUN], ["embedding", "attention", "MLP", "norm", "head and loss"], "tokens"),
    "sandwich": (
        ["bench_cpu", *TINY_RUN, "model.block=sandwich", "model.local_layers={pattern: [1, 0], window: 8}"],
        ["embedding", "attention", "MLP", "norm", "head and loss"],
        "tokens",
    ),
    "classifier": (
        ["minilm_classify", *TINY, "data.sequence_length=16", "train.global_batch_size=8"],
        ["whole model"],
        "tokens",
    ),
    "encoder-decoder": (
        ["t5_small", *TINY, "model.head_dim=16", "model.mlp_dim=32", "data.sequence_length=16"],
        ["whole model"],
        "tokens",
    ),
    "vision transformer": (
        ["vit_digits", "model.embed_dim=32", "model.num_layers=2", "train.global_batch_size=16"],
        ["whole model"],
        "examples",
    ),
    "mlp": (
        ["digits_mlp", "data.kind=synthetic", "data.task=table", "data.num_rows=64", "train.global_batch_size=16"],
        ["whole model"],
        "examples",
    ),
}


def positive(value) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(name, marks=pytest.mark.long) for name in CONFIGS if name != "mlp")]
)
def test_what_is_measured_makes_sense(tmp_path, capsys, name):
    words, blocks, unit = CONFIGS[name]
    assert main(["bench", *words, "--skip", "start", "--out", str(tmp_path), "--json", str(tmp_path / "b.json")]) == 0
    answer = json.loads((tmp_path / "bench.json").read_text())
    assert answer == json.loads((tmp_path / "b.json").read_text())
    assert (tmp_path / "bench.svg").read_text().count("<path") > 10
    printed = capsys.readouterr().out
    assert "matmul fp32" in printed
    assert f"{unit} per second" in printed

    devices = answer["device"]["count"]
    limits, step = answer["limits"], answer["step"]
    assert positive(limits["matmul"]["fp32"])
    assert positive(limits["memory"])
    assert positive(limits["all_reduce"]) == (devices > 1)
    assert [block["name"] for block in answer["blocks"]] == [*blocks, "optimizer"]
    for block in answer["blocks"]:
        assert positive(block["seconds"])
        assert positive(block["roofline_seconds"])
        assert block["bytes"] > 0
        expected = block["roofline_seconds"] / block["seconds"]
        assert block["share_of_roofline"] == pytest.approx(expected)
    assert step["unit"] == unit
    assert step["units_per_second"] == pytest.approx(step["units"] / step["seconds"])
    rate = step["flops_per_second_per_device"]
    assert rate == pytest.approx(step["model_flops"] / step["seconds"] / devices)
    # Emulated devices share the cores that were measured as one.
    assert step["share_of_measured_matmul"] == pytest.approx(rate * devices / limits["matmul"]["fp32"])
    assert step["host_seconds"] > 0
    assert positive(step["planned_bytes"])
    assert positive(step["process_peak_bytes"])
    # Every null has its reason.
    assert step["joules_per_unit"] is None
    assert step["model_flops_utilization"] is None
    assert answer["cpu"] is None
    lacking = {"start", "cpu", "step.joules_per_unit", "step.model_flops_utilization", "step.device_peak_bytes"}
    lacking |= {f"limits.matmul.{each}" for each, found in limits["matmul"].items() if found is None}
    assert lacking <= set(answer["reasons"])
    assert all(answer["reasons"].values())


def test_parts_left_out_are_not_drawn_as_nothing(tmp_path):
    bare = {"config": "c", "device": {"count": 1, "kind": "cpu"}}
    step = {"seconds": 2.0, "share_of_measured_matmul": None, "units_per_second": 5.0, "unit": "tokens"}
    drawn = {}
    for name, parts in {"nothing": {"blocks": None, "step": None}, "step": {"blocks": None, "step": step}}.items():
        draw(bare | parts, tmp_path / f"{name}.svg")
        drawn[name] = (tmp_path / f"{name}.svg").read_text()  # texts are paths, with a comment each
    assert drawn["nothing"].count("<!-- left out -->") == 2
    assert drawn["step"].count("<!-- left out -->") == 1
    assert "2,000 ms" in drawn["step"]
    assert "matmul rate" not in drawn["step"]
    assert "as timed alone" not in drawn["step"]


@pytest.mark.parametrize(("share", "is_said"), [(0.5, False), (1.03, False), (1.5, True)])
def test_shares_above_the_roofline_are_explained(tmp_path, share, is_said):
    block = {"name": "MLP", "count": 2, "seconds": 1e-3, "roofline_seconds": share * 1e-3, "share_of_roofline": share}
    answer = {"config": "c", "device": {"count": 1, "kind": "cpu"}, "blocks": [block], "step": None}
    draw(answer, tmp_path / "bench.svg")
    drawn = (tmp_path / "bench.svg").read_text()  # texts are paths, with a comment each
    assert ("<!-- above 100 %" in drawn) == is_said
    assert f"<!--  2 ms, {share:.0%} -->" in drawn


MISTAKES = {
    "part": (["bench", "bench_cpu", "--skip", "stop"], "--skip stop: no such part; there are"),
    "name for a file": (["bench", "--json", "quickstart"], "--json quickstart is a config; give the file to write"),
    "part of several": (["bench", "bench_cpu", "--skip", "start,stop"], "--skip stop: no such part; there are"),
    "limits": (["bench", "bench_cpu", "--skip", "limits"], "add --skip blocks"),
    "auto": (["bench", "bench_cpu", "parallel=auto"], "a bench measures one layout"),
    "config": (["bench", "bench_gpu"], "no config 'bench_gpu'"),
    "file": (["bench", "bench_cpu", "--json", "/nowhere/b.json"], "cannot write /nowhere/b.json"),
    "batch": (["bench", "bench_cpu", "train.global_batch_size=3", "--skip", "start"], "does not divide"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(capsys, name):
    words, said = MISTAKES[name]
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert len(error.splitlines()) == 1


def test_the_parts_are_those_of_the_help(capsys):
    assert main(["bench", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(part in said for part in PARTS)


def test_the_step_is_measured_first_and_counts_the_tokens_of_both_halves(monkeypatch):
    """Its peaks of memory are those of the process until then; tokens are counted as a run counts them."""
    words, _, _ = CONFIGS["encoder-decoder"]
    loaded = load_config(words[0], overrides=words[1:])
    step = WholeStep(0.5, 3, 1.0, 0.1, 0.1, None, None, 2**20, None, "no GPU")
    monkeypatch.setattr("jaxtrain.bench.whole_step.measure_step", lambda *_, **__: step)
    monkeypatch.setattr("jaxtrain.bench.limits.measure_limits", lambda: Limits({}, 1.0, None, {}))
    phases = []

    def phase(name):
        phases.append(name)
        return contextlib.nullcontext()

    skip = ["start", "blocks", "cpu"]
    answer = measure(loaded, words[0], words[1:], emulate=None, skip=skip, phase=phase)
    assert phases == ["timing the step", "measuring the device"]
    workload = describe_workload(loaded.config)
    assert workload.decoder_length
    assert answer["step"]["units"] == workload.tokens == workload.rows * (16 + workload.decoder_length)
    assert answer["step"]["units_per_second"] == answer["step"]["units"] / 0.5
