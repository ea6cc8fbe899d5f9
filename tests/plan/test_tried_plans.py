"""A plan compiles what a run compiles: with the options that are tried, or without them, and its notes say which."""

import dataclasses
import json
from typing import Any

import jax
import pytest

from jaxtrain.config import load_config
from jaxtrain.plan.catalogue.hardware import parse_targets
from jaxtrain.plan.compilers import topology
from jaxtrain.plan.compilers.exact import ExactMemory, exact_memory, planned_step
from jaxtrain.plan.report.show import as_json, table
from jaxtrain.plan.search import make
from jaxtrain.plan.search.analyse import analyse
from jaxtrain.plan.workload.describe import describe_workload
from jaxtrain.runtime.compiler_options import CompilerOptions, choose_options
from jaxtrain.train import make_step

OPTION = "xla_llvm_disable_expensive_passes"
GIVES_UP = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem"
NO_ROOM = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 50.24G of 15.75G hbm."
# id: (what the compiler says with the option, and without; None: it compiles, what the plan says).
ROWS = {
    "taken": (None, None, f"compiler: with {OPTION}"),
    "given up": (GIVES_UP, None, f"compiler: goes without {OPTION}, with which it gave up: {GIVES_UP}"),
    "no room with it": (NO_ROOM, None, f"compiler: goes without {OPTION}, with which it gave up: {NO_ROOM}"),
    "no room at all": (GIVES_UP, NO_ROOM, f"compiler: gave up with {OPTION}, and without"),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_memory_is_of_the_program_that_a_run_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_it, without, line = ROWS[name]
    asked: list[Any] = []
    compile_for = topology.compile_for

    def choose(*arguments: Any, **options: Any) -> CompilerOptions:
        return dataclasses.replace(choose_options(*arguments, **options), tried={OPTION: True})

    def compiled(device: Any, lowered: Any, *, on_host: Any = None, options: Any = None) -> Any:
        asked.append(dict(options))
        if (said := with_it if options else without) is not None:
            raise jax.errors.JaxRuntimeError(said)
        return compile_for(device, lowered, on_host=on_host, options=options)

    monkeypatch.setattr(make_step, "choose_options", choose)
    monkeypatch.setattr(topology, "compile_for", compiled)
    config = load_config("digits_mlp").config
    workload = describe_workload(config)
    found = exact_memory(config, workload, jax.devices())
    assert found.lines == (line,)
    assert asked == [{OPTION: True}, {}][: 1 if with_it is None else 2]
    if without is not None:
        assert (found.peak_bytes, found.capacity_bytes) == (round(50.24 * 2**30), round(15.75 * 2**30))
        return
    # Beside it, the program of a run.
    step, batch = planned_step(config, workload, jax.devices())
    tried = {} if with_it else {OPTION: True}
    memory = step.lower(batch).compile(compiler_options=tried or None).memory_analysis()
    assert found.temporary_bytes == memory.temp_size_in_bytes


def test_the_notes_of_a_plan_say_which_options_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"compiler: goes without {OPTION}, with which it gave up: {GIVES_UP}"]
    answer = json.loads(json.dumps(dataclasses.asdict(ExactMemory(2**20, 2**21, 2**20, None, 1.0, 0, tuple(lines)))))
    monkeypatch.setattr(make, "_compile", lambda _: answer)
    estimate = make.with_compiler(analyse(load_config("digits_mlp").config, parse_targets("v5e-8")[0]), lambda _: None)
    assert estimate.exact is not None
    assert estimate.exact.lines == tuple(lines)
    assert lines[0] in " ".join(table([estimate]).split())
    assert list(as_json(estimate)["exact"]["lines"]) == lines
