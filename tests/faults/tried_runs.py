"""One process of two that train with an option that is tried, and whose compiler may give up with it; run as a program.

Arguments: the run's directory, and what the compiler of this process does once it is asked for a program with the
option: `compiles`, `gives up`, `raises` (what is no failure of a compiler) or `dies` (later, when it compiles without).
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

import jaxtrain as jt
from jaxtrain.cli import main
from jaxtrain.runtime import distributed
from jaxtrain.runtime.compiler_options import CompilerOptions, choose_options
from jaxtrain.train import make_step
from jaxtrain.train.step import TrainStep

# What it decides is known to the compiler of CPUs; a step of this size computes the same numbers with it.
TRIED = {"xla_llvm_disable_expensive_passes": True}
LETHAL = 9


def choose(*arguments: Any, **options: Any) -> CompilerOptions:
    """The options that are chosen, and one to try."""
    return replace(choose_options(*arguments, **options), tried=TRIED)


def watch_compiler(does: str) -> None:
    """Let the compiler of this process do something else where it is asked for a program with the option."""
    compile_program, asked = jax.stages.Lowered.compile, []

    def watched(lowered: Any, compiler_options: Mapping[str, Any] | None = None, **others: Any) -> Any:
        if compiler_options == TRIED:
            asked.append(True)
            print("the compiler is asked for the option", flush=True)
            if does == "raises":
                raise LookupError("no such program")
            if does in ("gives up", "dies"):
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem")
        elif asked and does == "dies":
            os._exit(LETHAL)
        return compile_program(lowered, compiler_options, **others)

    jax.stages.Lowered.compile = watched  # pyright: ignore[reportAttributeAccessIssue]


def watch_step() -> None:
    """Print what each step is compiled with."""
    use = TrainStep.use

    def watched(step: TrainStep, *arguments: Any, **others: Any) -> Any:
        result = use(step, *arguments, **others)
        print(f"compiled {'with' if TRIED.items() <= step.compiled_with.items() else 'without'} the option", flush=True)
        return result

    TrainStep.use = watched


def own_loop() -> None:
    """Two steps of a loop of one's own on the devices of all processes."""
    distributed.start(emulate=2)
    model = jt.from_functions(lambda key: {"w": np.ones((4, 1), np.float32)}, lambda params, x: x @ params["w"])
    step = jt.make_train_step(model, jt.regression(), optax.sgd(0.1), mesh=jt.make_mesh(data=4))
    batch = {"inputs": np.ones((8, 4), np.float32), "targets": np.ones((8, 1), np.float32)}
    step.compile(batch)
    state = step.init(0)
    for _ in range(2):
        state, metrics = step(state, batch)
    print(f"loss {float(metrics['loss'])}; {step.choices[-1]}", flush=True)


if __name__ == "__main__":
    place, does = sys.argv[1:3]
    make_step.choose_options = choose
    watch_compiler(does)
    watch_step()
    if place == "own loop":
        own_loop()
    else:
        sys.exit(main(["train", f"{place}.yaml", "--run-dir", place, "--emulate", "2", *sys.argv[3:]]))
