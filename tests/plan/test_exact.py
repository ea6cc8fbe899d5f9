"""The compiler in a plan: beside the analytic figure where it is installed, its lack told in one line where not."""

import importlib.util
import json
import re

import pytest

from jaxtrain.config import load_config
from jaxtrain.plan.catalogue.hardware import parse_targets
from jaxtrain.plan.compilers.exact import _USED
from jaxtrain.plan.search.analyse import analyse
from jaxtrain.plan.search.make import analytic_plan, how_to_check, with_compiler

has_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="pip install 'jaxtrain[aot-tpu]'")
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


@has_libtpu
def test_a_step_that_fits_has_both_figures() -> None:
    overrides = ["precision.policy=bf16", "train.accumulation_steps=1", "train.global_batch_size=8"]
    config = load_config("gpt2_124m", overrides=[*overrides, "model.num_layers=2", "model.vocab_size=4096"]).config
    compiled = with_compiler(analyse(config, parse_targets("v5e-8")[0]), lambda _: None)
    assert compiled.exact is not None, compiled.exact_missing
    assert compiled.fits
    assert compiled.exact.peak_bytes == pytest.approx(compiled.memory.total_bytes, rel=0.25)


@pytest.mark.long
def test_the_cpu_s_own_compiler_is_always_there(cli) -> None:
    answer = cli("plan", "digits_mlp", "--on", "cpux2", "--json")
    assert answer.code == 0
    plan = json.loads(answer.out)["plans"][0]
    assert plan["exact"]["state_bytes"] == pytest.approx(plan["memory"]["state_bytes"], rel=0.01)


def test_a_compiler_s_process_joins_no_cluster(monkeypatch) -> None:
    """As a second one under the number of the process that asks, it would have jax abort all of them."""
    for name, value in {"COORDINATOR_ADDRESS": "127.0.0.1:1", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    monkeypatch.setenv("JAXTRAIN_JOIN_TIMEOUT_SECONDS", "1")
    estimate = with_compiler(analytic_plan(load_config("digits_mlp").config, parse_targets("cpu")[0]), lambda _: None)
    assert estimate.exact is not None, estimate.exact_missing


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_the_compiler_the_analytic_answer_is_given_and_marked(cli) -> None:
    answer = cli("plan", "gpt2_124m", "--on", "v5e-8")
    assert answer.code == 0
    assert "analytic only" in answer.out
    last = answer.err.splitlines()[-1]
    assert last.startswith("jaxtrain: the figures for v5e-8 are analytic; to check them")
    assert last.endswith("pip install 'jaxtrain[aot-tpu]'")
    assert "pip install" not in cli("plan", "gpt2_124m", "--on", "v5e-8", "--analytic").err


@pytest.mark.long
def test_exact_insists_on_a_compiler(cli, tmp_path) -> None:
    page = tmp_path / "plan.html"
    # No compiler for it runs anywhere.
    answer = cli("plan", "gpt2_124m", "--on", "rtx4090", "--exact", "--html", str(page))
    assert answer.code == 2
    assert answer.out == ""
    assert not page.exists()
    assert re.fullmatch(r"jaxtrain: --exact: rtx4090: no compiler for it .*; without --exact, .*", answer.err.strip())
    assert cli("plan", "digits_mlp", "--on", "cpu", "--exact").code == 0
    both = cli("plan", "gpt2_124m", "--on", "rtx4090", "--exact", "--analytic")
    assert both.code == 2
    assert "not allowed with" in both.err


def test_hardware_without_a_compiler_is_no_error() -> None:
    estimate = with_compiler(analyse(load_config("gpt2_124m").config, parse_targets("rtx4090")[0]), lambda _: None)
    assert estimate.exact is None
    assert estimate.exact_missing is not None
    assert how_to_check(estimate) is None


@pytest.mark.parametrize(
    ("message", "used", "available"),
    [
        ("Ran out of memory in memory space hbm. Used 50.24G of 15.75G hbm.", "50.24", "15.75"),
        ("total memory required for HLO temporaries (20.55G) exceeds available HBM (15.75G).", "20.55", "15.75"),
    ],
)
def test_both_of_libtpu_s_messages_are_read(message: str, used: str, available: str) -> None:
    found = _USED.search(message)
    assert found is not None
    assert (found[1], found[3]) == (used, available)
