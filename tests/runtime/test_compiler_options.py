"""Compiler options reach every program of a step; what a compiler does not know is told and left out."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import from_functions, make_mesh, make_train_step, regression
from jaxtrain.errors import ConfigError
from jaxtrain.runtime import compiler
from jaxtrain.runtime.compiler import OPTIONS, choose_options, option_notes

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
# What a compiler knows, and what a program for several GPUs gets.
COMPILERS = {"jax 0.10": (OLD, OLD), "jax 0.12": (NEW | OLD, NEW), "some later jax": (set(), set())}


@pytest.mark.parametrize("name", COMPILERS)
def test_an_older_compiler_gets_the_older_names(monkeypatch, name):
    known, expected = COMPILERS[name]

    def refuse(device, options):
        return {key: "No such compile option" for key, _ in options if key not in known}

    monkeypatch.setattr(compiler, "refused_options", refuse)
    gpu = SimpleNamespace(platform="gpu")
    chosen = choose_options(gpu, 8)
    assert set(chosen.used) == expected
    assert chosen.dropped == ()
    assert choose_options(gpu, 1).used == {}, "one card has nobody to wait for"
    # What a user says of either name stands, and the banner shows it.
    theirs = dict.fromkeys(expected, False)
    asked = choose_options(gpu, 8, theirs)
    assert asked.used == theirs
    assert len(option_notes(asked, asked=theirs)) == bool(theirs)


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
    monkeypatch.setattr(compiler, "refused_options", lambda device, options: {})
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


def test_a_step_is_compiled_with_what_is_tried_and_says_so():
    for tried, with_, line in (
        (WORKS, WORKS, ["compiler: with xla_llvm_disable_expensive_passes"]),
        ({}, {}, []),
        (FAILS, {}, ["compiler: goes without options with which it gave up: xla_no_such_option: INVALID_ARGUMENT: "]),
    ):
        step = small_step(tried=tried)
        step.compile(BATCH)
        assert step(step.init(0), BATCH)[1]["loss"] > 0
        assert step.compiled_with == {**step.compiler_options.used, **with_}
        assert [said[: len(line[0])] for said in step.choices if said.startswith("compiler: ")] == line
