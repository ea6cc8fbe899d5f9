"""Compiler options reach every program of a step; what a compiler does not know is told and left out."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import from_functions, make_mesh, make_train_step, regression
from jaxtrain.runtime import compiler
from jaxtrain.runtime.compiler import OF_SEVERAL, OF_UPDATES, OPTIONS, choose_options, option_notes

BATCH = {"inputs": np.ones((2, 4), np.float32), "targets": np.ones((2, 1), np.float32)}


def small_step(*, devices=1, **options):
    model = from_functions(lambda key: {"w": jnp.ones((4, 1))}, lambda params, x: x @ params["w"])
    mesh = make_mesh(data=devices, devices=jax.devices()[:devices])
    return make_train_step(model, regression(), optax.sgd(0.1), mesh=mesh, compiler_options=options)


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
    shipped = OPTIONS["cpu"] | OF_UPDATES["cpu"]
    assert step.compiler_options.used == {**shipped, "xla_llvm_disable_expensive_passes": False}
    assert step.compiler_options.dropped == (
        "the compiler for cpu does not support xla_no_such_option, so it is left out",
    )
    assert step(step.init(0), BATCH)[1]["loss"] > 0


@pytest.mark.parametrize("known", ["pipeline_", "enable_pipelined_", "of some later jax"])
def test_a_compiler_gets_the_names_that_it_knows(monkeypatch, known):
    """Those of jax 0.12, those of 0.10, and none."""
    monkeypatch.setattr(
        compiler,
        "refused_options",
        lambda device, options: {key: "No such compile option" for key, _ in options if known not in key},
    )
    gpu = SimpleNamespace(platform="gpu")
    chosen = choose_options(gpu, 8)
    assert set(chosen.used) == {name for name in OF_SEVERAL["gpu"] if known in name}
    assert chosen.dropped == ()
    assert choose_options(gpu, 1).used == {}, "one card has nobody to wait for"
    # What a user says of either name stands, and the banner shows it.
    theirs = dict.fromkeys(chosen.used, False)
    asked = choose_options(gpu, 8, theirs)
    assert asked.used == theirs
    assert len(option_notes(asked, asked=theirs)) == bool(theirs)
