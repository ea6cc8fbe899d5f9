"""Compiler options reach every program of a step; what a compiler does not know is told and left out.

Options that a compiler may give up with are taken or left out by all processes alike, and remembered.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import from_functions, make_mesh, make_train_step, regression
from jaxtrain.errors import ConfigError
from jaxtrain.runtime import compiler_options
from jaxtrain.runtime.compiler_options import OPTIONS, choose_options, option_notes
from jaxtrain.runtime.tried_options import compile_trying, settle, try_options

BATCH = {"inputs": np.ones((2, 4), np.float32), "targets": np.ones((2, 1), np.float32)}


def small_step(*, devices=1, size=4, tried=None, **options):
    model = from_functions(lambda key: {"w": jnp.ones((size, 1))}, lambda params, x: x @ params["w"][:4])
    mesh = make_mesh(data=devices, devices=jax.devices()[:devices])
    step = make_train_step(model, regression(), optax.sgd(0.1), mesh=mesh, compiler_options=options)
    step.compiler_options = replace(step.compiler_options, tried=tried or {})
    return step


WAYS = {
    "called": lambda step: step(step.init(0), BATCH),
    "lowered, as the session does": lambda step: step.use(step.lower(BATCH).compile()),
}


@pytest.mark.parametrize("way", WAYS)
def test_options_reach_the_program(tmp_path, way):
    """The compiler writes what it compiles where an option tells it to."""
    step = small_step(xla_dump_to=str(tmp_path))
    WAYS[way](step)
    assert [path.name for path in tmp_path.iterdir() if "jit__step" in path.name]


def test_an_unknown_option_is_told_and_the_others_are_used():
    step = small_step(xla_no_such_option=1, xla_llvm_disable_expensive_passes=False)
    of_cpu = [option for option in OPTIONS if option.backend == "cpu"]
    shipped = {option.name: option.value for option in of_cpu}
    assert step.compiler_options.used == {**shipped, "xla_llvm_disable_expensive_passes": False}
    assert step.compiler_options.dropped == (
        "the compiler for cpu does not know xla_no_such_option, so programs go without it",
    )
    assert step(step.init(0), BATCH)[1]["loss"] > 0


def test_a_wrong_value_is_an_error():
    with pytest.raises(ConfigError, match=r"compiler_options\.xla_backend_optimization_level=high: .* use another"):
        small_step(xla_backend_optimization_level="high")


GPU = [option for option in OPTIONS if option.backend == "gpu"]
NEW, OLD = {option.name for option in GPU}, {option.older for option in GPU}
# What a compiler knows -> what a program for several GPUs gets, and how many lines say what it goes without.
COMPILERS = {"jax 0.10": (OLD, OLD, 0), "some later jax": (set(), set(), len(NEW))}


@pytest.mark.parametrize("name", COMPILERS)
def test_an_older_compiler_gets_the_older_names(monkeypatch, name):
    known, expected, num_lines = COMPILERS[name]

    def refuse(device, options):
        return {key: "No such compile option" for key, _ in options if key not in known}

    monkeypatch.setattr(compiler_options, "refused_options", refuse)
    gpu = SimpleNamespace(platform="gpu")
    chosen = choose_options(gpu, 8)
    assert set(chosen.used) == expected
    assert len(chosen.dropped) == num_lines
    assert len(option_notes(chosen, asked=())) == num_lines
    assert choose_options(gpu, 1).used == {}, "one card has nobody to wait for"
    # What a user says of either name stands.
    theirs = dict.fromkeys(expected, False)
    asked = choose_options(gpu, 8, theirs)
    assert asked.used == theirs
    assert len(option_notes(asked, asked=theirs)) == bool(theirs) + len(asked.dropped), (
        "the banner shows what they asked"
    )


@pytest.mark.parametrize(("devices", "in_place"), [(1, True), (2, False)])
def test_a_step_on_one_device_updates_in_place(devices, in_place):
    step = small_step(devices=devices)
    assert ("xla_cpu_copy_insertion_use_region_analysis" in step.compiler_options.used) == in_place


V5E = "TPU v5 lite"
FUSE_SCATTER = "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter"
# id: (kind of device, mesh axes of several devices, whether options are tried).
TPUS = {
    "v5e, fsdp": (V5E, ("fsdp",), True),
    "v5e, tensor, of which no program was looked at": (V5E, ("fsdp", "tensor"), False),
    "v5p, where fusions may compute wrong numbers": ("TPU v5", ("fsdp",), False),
}


@pytest.mark.parametrize("name", TPUS)
def test_options_that_may_fail_are_for_kinds_of_tpus_and_layouts(monkeypatch, name):
    kind, axes, expected = TPUS[name]
    monkeypatch.setattr(compiler_options, "refused_options", lambda device, options: {})
    device = SimpleNamespace(platform="tpu", device_kind=kind)
    chosen = choose_options(device, 8, axes=axes)
    assert chosen.used == {}, "programs that are compiled on the way are compiled without"
    assert (FUSE_SCATTER in chosen.tried) == expected
    if expected:  # what a user says is no try
        asked = choose_options(device, 8, {FUSE_SCATTER: False}, axes=axes)
        assert asked.used == {FUSE_SCATTER: False}
        assert set(asked.tried) == set(chosen.tried) - {FUSE_SCATTER}


WORKS = {"xla_llvm_disable_expensive_passes": True}
FAILS = {"xla_no_such_option": True}


@pytest.fixture
def cache(tmp_path):
    """A folder of compiled programs of a test's own; the programs themselves are not kept in it."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def notes(folder):
    return sorted(folder.glob("gave-up-*.json"))


def attempts(step):
    """Compile, and give the options of each time that the compiler was asked with some, and the line of the step."""
    asked, lower = [], step.lower

    class Watched:
        def __init__(self, lowered):
            self.as_text, self._lowered = lowered.as_text, lowered

        def compile(self, compiler_options=None):
            asked.append(compiler_options)
            return self._lowered.compile(compiler_options=compiler_options)

    step.lower = lambda batch: Watched(lower(batch))
    step.compile(BATCH)
    assert step(step.init(0), BATCH)[1]["loss"] > 0
    lines = [line for line in step.choices if line.startswith("compiler: ")]
    return [options for options in asked if options], lines


def test_a_step_is_compiled_with_what_is_tried_and_says_so(cache):
    step = small_step(tried=WORKS)
    asked, lines = attempts(step)
    assert (asked, lines) == ([WORKS], ["compiler: with xla_llvm_disable_expensive_passes"])
    assert step.compiled_with == {**step.compiler_options.used, **WORKS}
    assert notes(cache) == []
    assert attempts(small_step(tried={})) == ([], [])


def test_a_second_start_goes_without_at_once(cache):
    step = small_step(tried=FAILS)
    asked, (line,) = attempts(step)
    assert asked == [FAILS]
    assert line.startswith("compiler: goes without xla_no_such_option, with which it gave up: INVALID_ARGUMENT: ")
    assert step.compiled_with == step.compiler_options.used
    (note,) = notes(cache)
    again = small_step(tried=FAILS)
    asked, (line,) = attempts(again)
    assert asked == []
    assert line == (
        f"compiler: goes without xla_no_such_option, with which it gave up at an earlier start ({note}; delete it to "
        f"try again): {json.loads(note.read_text())['gave_up']}"
    )
    assert again.compiled_with == again.compiler_options.used
    # As the line says.
    note.unlink()
    assert attempts(small_step(tried=FAILS))[0] == [FAILS]


def test_a_process_that_did_not_give_up_goes_without_where_another_one_did(cache):
    step = small_step(tried=WORKS)
    lowered = step.lower(BATCH)
    attempt = try_options(lowered, step.compiler_options, step.mesh)
    assert attempt.compiled is not None
    taken = settle(attempt, ["", "RESOURCE_EXHAUSTED: vmem"], step.compiler_options)
    assert taken.tried == {}
    assert "gave up on process 1: RESOURCE_EXHAUSTED: vmem" in taken.lines[0]
    again = try_options(lowered, step.compiler_options, step.mesh)
    assert (again.compiled, again.gave_up, again.was_known) == (None, "RESOURCE_EXHAUSTED: vmem", True)


def test_a_program_of_this_process_alone_is_compiled_with_or_without():
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(()))
    rows = {
        "nothing is tried": ({}, {}, 0),
        "it works": (WORKS, WORKS, 1),
        "it gives up": (FAILS, {}, 1),
    }
    for name, (tried, expected, num_lines) in rows.items():
        taken = compile_trying(lambda more: lowered.compile(compiler_options=dict(more) or None), tried)
        assert (taken.tried, len(taken.lines)) == (expected, num_lines), name
        assert float(taken.compiled(jnp.zeros(()))) == 1.0


# One of two processes, whose compiler gives up with the option where it is process 0.
TWO = """
import sys
from dataclasses import replace
import jax, numpy as np, optax
import jaxtrain as jt
from jaxtrain.train import make_step

tried = {"xla_llvm_disable_expensive_passes": True}
choose, compile_program = make_step.choose_options, jax.stages.Lowered.compile

def watched(lowered, compiler_options=None, **others):
    if compiler_options == tried and jax.process_index() == 0:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: vmem")
    return compile_program(lowered, compiler_options, **others)

make_step.choose_options = lambda *words, **more: replace(choose(*words, **more), tried=tried)
jax.stages.Lowered.compile = watched
jt.start(emulate=1, compilation_cache=None)
model = jt.from_functions(lambda key: {"w": np.ones((4, 1), np.float32)}, lambda params, x: x @ params["w"])
step = jt.make_train_step(model, jt.regression(), optax.sgd(0.1), mesh=jt.make_mesh(data=2))
batch = {"inputs": np.ones((8, 4), np.float32), "targets": np.ones((8, 1), np.float32)}
step.compile(batch)
state = step.init(0)
for _ in range(2):
    state, metrics = step(state, batch)
sys.stderr.write(f"loss {float(metrics['loss'])}; {step.choices[-1]}\\n")
"""


@pytest.mark.long
def test_two_processes_take_one_program(tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    words = [sys.executable, "-m", "jaxtrain", "launch", "--processes", "2", "--", sys.executable, "two.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    first, second = (line.removeprefix("[1] ") for line in done.stderr.splitlines() if "loss " in line)
    assert first == second
    assert "compiler: goes without xla_llvm_disable_expensive_passes, with which it gave up on process 0" in first
