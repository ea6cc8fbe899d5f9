"""`jaxtrain bench` on a tiny model: everything is there and makes sense; mistakes are one line. No time is asserted."""

import contextlib
import json
import math

import pytest

from jaxtrain.bench.limits import Limits
from jaxtrain.bench.measure import measure
from jaxtrain.bench.step import WholeStep
from jaxtrain.cli import main
from jaxtrain.config import load_config
from jaxtrain.plan.workload import describe_workload

TINY = ["model.num_layers=2", "model.embed_dim=32", "model.num_heads=2", "model.max_sequence_length=32"]
TINY_RUN = [*TINY, "train.global_batch_size=8", "data.kind=synthetic", "data.num_rows=64"]

MLP = ["digits_mlp", "data.kind=synthetic", "data.task=table", "data.num_rows=64", "train.global_batch_size=16"]
# id: (words, unit)
CONFIGS = {
    "transformer": (["bench_cpu", *TINY_RUN], "tokens"),
    "mlp": (MLP, "examples"),
}


def positive(value) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["mlp", pytest.param("transformer", marks=pytest.mark.long)])
def test_what_is_measured_makes_sense(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setattr("jaxtrain.bench.limits._SIZES", {"cpu": 64})
    monkeypatch.setattr("jaxtrain.bench.limits._ALL_REDUCE_BYTES", {"cpu": 2**12})
    words, unit = CONFIGS[name]
    assert main(["bench", *words, "--skip", "start", "--seconds", "0.1", "--json", str(tmp_path / "bench.json")]) == 0
    answer = json.loads((tmp_path / "bench.json").read_text())
    printed = capsys.readouterr().out
    assert "matmul fp32" in printed
    assert "step units per second" in printed

    devices = answer["device"]["count"]
    limits, step = answer["limits"], answer["step"]
    assert positive(limits["matmul"]["fp32"])
    assert positive(limits["memory"])
    assert positive(limits["all_reduce"]) == (devices > 1)
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
    assert step["model_flops_utilization"] is None
    lacking = {"start", "step.model_flops_utilization", "step.device_peak_bytes"}
    lacking |= {f"limits.matmul.{each}" for each, found in limits["matmul"].items() if found is None}
    assert lacking <= set(answer["reasons"])
    assert all(answer["reasons"].values())


MISTAKES = {
    "part": (["bench", "bench_cpu", "--skip", "stop"], "--skip stop: no such part; there are"),
    "file": (
        ["bench", "bench_cpu", "--json", "/nowhere/b.json"],
        "--json /nowhere/b.json: No such file or directory; give a file in a folder",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(capsys, name):
    words, said = MISTAKES[name]
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert len(error.splitlines()) == 1


def test_the_step_is_measured_first_and_counts_the_tokens_of_both_halves(monkeypatch):
    """Its peaks of memory are those of the process until then; tokens are counted as a run counts them."""
    words = ["t5_small", *TINY, "model.head_dim=16", "model.mlp_dim=32", "data.sequence_length=16"]
    loaded = load_config(words[0], overrides=words[1:])
    step = WholeStep(0.5, 3, 1.0, 0.1, 0.1, None, None, 2**20)
    monkeypatch.setattr("jaxtrain.bench.step.measure_step", lambda *_, **__: step)
    monkeypatch.setattr("jaxtrain.bench.limits.measure_limits", lambda: Limits({}, 1.0, None, {}))
    phases = []

    def phase(name):
        phases.append(name)
        return contextlib.nullcontext()

    answer = measure(loaded, words[0], words[1:], emulate=None, skip=["start"], phase=phase)
    assert phases == ["timing the step", "measuring the device"]
    workload = describe_workload(loaded.config)
    assert workload.decoder_length
    assert answer["step"]["units"] == workload.tokens == workload.rows * (16 + workload.decoder_length)
    assert answer["step"]["units_per_second"] == answer["step"]["units"] / 0.5
