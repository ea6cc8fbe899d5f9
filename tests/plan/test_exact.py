"""The compiler in a plan: beside the analytic figure where it is installed, its lack told in one line where not."""

import importlib.util
import math
import re
from typing import Any

import jax
import pytest

from jaxtrain.config import load_config
from jaxtrain.plan import plans, topology
from jaxtrain.plan.compile import exact_memory
from jaxtrain.plan.estimate import Estimate, analyse
from jaxtrain.plan.plans import analytic_plan, with_compiler
from jaxtrain.plan.targets import parse_targets
from jaxtrain.plan.workload import describe_workload
from jaxtrain.train.step import TrainStep

has_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="pip install '.[aot-tpu]'")
LLAMA = ["data.sequence_length=4096", "train.global_batch_size=8", "train.accumulation_steps=1"]


@has_libtpu
def test_8b_does_not_fit_a_v5e_and_the_compiler_says_so() -> None:
    estimate = analytic_plan(load_config("llama3_8b", overrides=LLAMA).config, parse_targets("v5e-8")[0])
    said: list[str] = []
    compiled = with_compiler(estimate, said.append)
    assert said == ["compiling the step for v5e-8"]
    assert compiled.exact is not None, compiled.exact_missing
    assert compiled.fits is False
    assert compiled.exact.capacity_bytes == pytest.approx(15.75 * 2**30)
    # What libtpu says before it lays the program out.
    assert compiled.exact.peak_bytes == pytest.approx(estimate.memory.total_bytes, rel=0.15)
    assert compiled.exact.state_bytes == pytest.approx(estimate.memory.state_bytes, rel=0.01)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_the_compiler_the_analytic_answer_is_given_and_marked(cli) -> None:
    answer = cli("plan", "gpt2_124m", "--on", "v5e-8")
    assert answer.code == 0
    assert ", by formulas\n" in answer.out
    (line,) = answer.err.splitlines()  # and none that says that something is compiled
    assert line.startswith("jaxtrain: the figures are analytic; compiling for v5e takes libtpu, which is not installed")
    assert line.endswith("pip install '.[aot-tpu]'")
    assert "pip install" not in cli("plan", "gpt2_124m", "--on", "v5e-8", "--analytic").err


def test_exact_insists_on_a_compiler(cli, tmp_path) -> None:
    path = tmp_path / "planned.yaml"
    # No compiler for it runs anywhere.
    answer = cli("plan", "gpt2_124m", "--on", "rtx4090", "--exact", "--config", str(path))
    assert (answer.code, answer.out) == (2, "")
    assert not path.exists()
    assert "--exact: rtx4090: no compiler for it" in answer.err


def compiled_as(monkeypatch, overrides, times) -> tuple[Estimate, Estimate]:
    """A plan before and after a compiler that finds so many times its peak."""
    config = load_config("llama3_8b", overrides=overrides).config
    before = analytic_plan(config, parse_targets("h100x8")[0])
    answer = {"state_bytes": 1, "peak_bytes": round(times * before.memory.total_bytes), "temporary_bytes": 1}
    monkeypatch.setattr(plans, "check_compiler", lambda target: None)
    monkeypatch.setattr(plans, "ask", lambda *_: {**answer, "capacity_bytes": None, "compile_seconds": 1.0})
    return before, with_compiler(before, lambda _: None)


def test_advice_leaves_room_for_what_the_compiler_found_more(monkeypatch):
    before, after = compiled_as(monkeypatch, ["remat.policy=none"], 0.2)
    assert before.advice
    assert after.fits
    assert after.advice == ()
    before, after = compiled_as(monkeypatch, ["remat.policy=dots"], 3.0)
    assert before.fits
    assert after.fits is False
    usable = after.memory.usable_bytes
    assert usable is not None
    sizes = [float(found[1]) * 2**30 for line in after.advice if (found := re.search(r": ([\d.]+) GiB", line))]
    assert sizes
    assert all(3 * size <= usable + 3 * 2**27 for size in sizes)


def test_a_program_without_room_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_for(device: Any, lowered: Any) -> Any:
        words = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 50.24G of 15.75G hbm."
        raise jax.errors.JaxRuntimeError(words)

    monkeypatch.setattr(topology, "compile_for", compile_for)
    config = load_config("digits_mlp").config
    found = exact_memory(config, describe_workload(config), jax.devices())
    assert (found.peak_bytes, found.capacity_bytes) == (round(50.24 * 2**30), round(15.75 * 2**30))


def test_kernels_are_lowered_where_they_can_ask_for_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts need it on jax 0.11 and later, with the CUDA plugin; here a step says which mesh it was lowered in."""
    meshes: list[Any] = []
    lower = TrainStep.lower

    def noting_the_mesh(step: TrainStep, batch: Any) -> Any:
        meshes.append(jax.sharding.get_abstract_mesh().axis_sizes)
        return lower(step, batch)

    monkeypatch.setattr(TrainStep, "lower", noting_the_mesh)
    config = load_config("digits_mlp").config
    exact_memory(config, describe_workload(config), jax.devices())
    assert [math.prod(sizes) for sizes in meshes] == [len(jax.devices())]


# What takes a compiler a minute or more, with the part by which the planner's peak may differ.
SHARED = ["train.accumulation_steps=1", "precision.policy=bf16", "remat.policy=full", "parallel.data=1"]
EIGHT = [*SHARED, "train.global_batch_size=64", "parallel.fsdp=8"]
# Short rows: what takes a compiler long is the kernels of long ones. 16 divides all lengths: XLA's compiler for absent
# GPUs, which cannot try tiles out, gives up on others (197 positions of an image of 224 pixels; jax 0.10.2).
PAIRS = "data={kind: text_pairs, path: null, builtin: python_docstrings, sequence_length: 128, target_length: 64}"
IMAGES = "data={kind: synthetic, task: images, image_size: 256, num_classes: 1000}"
ENCODER_DECODER = ["model={kind: encoder_decoder, size: flan_t5_base}", PAIRS, "task=sequence_to_sequence"]
VISION = ["model={kind: vit, size: vit_base, image_size: 256, pooling: mean}", IMAGES, "task=classification"]
# 160 M parameters in the blocks: their state is 1.2 GiB, of which 5/6 pass in slices of an array of 256 MiB. Since the
# weight of a loss depends on its targets, libtpu schedules 0.2 GB more for it than is planned: 2.49 for 1.98.
SIZES = ("num_layers=8", "embed_dim=1024", "mlp_dim=8192", "num_heads=8", "vocab_size=512")
SAVERS = [*SHARED, "train.global_batch_size=8", *(f"model.{size}" for size in SIZES)]
OFFLOADED = ["optimizer.offload=true", "remat.offload=[block_input]"]
STEPS = {
    "encoder-decoder": ("v5e-8", [*EIGHT, *ENCODER_DECODER], 0.25),
    "experts": ("h100x8", [*EIGHT, "model.num_layers=2", "model.experts.num_experts=8"], 0.25),
    "vision transformer": ("h100x8", [*EIGHT, *VISION], 0.25),
    "offloaded state": ("v5e-1", [*SAVERS, *OFFLOADED], 0.27),
}


@pytest.mark.long
@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_what_is_planned(name: str) -> None:
    on, overrides, near = STEPS[name]
    package = "libtpu" if on.startswith("v") else "jax_cuda12_plugin"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[aot,aot-tpu]'")
    config = load_config("gpt2_124m", overrides=overrides).config
    found = with_compiler(analyse(config, parse_targets(on)[0]), lambda _: None)
    assert found.exact is not None, found.exact_missing
    assert found.fits
    # State is a matter of shapes.
    assert found.exact.state_bytes == pytest.approx(found.memory.state_bytes, rel=0.01)
    assert found.exact.peak_bytes == pytest.approx(found.memory.total_bytes, rel=near)
    moved = found.memory.host_parts.get("optimizer state", 0)
    assert (moved > 0) == ("offloaded" in name)
    assert found.exact.host_bytes == pytest.approx(sum(found.memory.host_parts.values()), rel=0.05)
    if moved:
        # All of it at once, beside gradients as large as the parameters (all other state), would be more than there is.
        assert found.exact.temporary_bytes < moved + found.exact.state_bytes
