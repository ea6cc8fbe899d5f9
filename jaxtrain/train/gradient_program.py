"""The compiled programs of `TrainStep.gradients`: gradients of a batch, with nothing updated and nothing donated."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.models.task import Batch
from jaxtrain.parallel.stage import check_branches
from jaxtrain.runtime.compiler import CompilerOptions
from jaxtrain.train.given_state import leaf_shapes
from jaxtrain.train.program import StepProgram, find_gradients
from jaxtrain.train.state import TrainState, select_leaves
from jaxtrain.train.update import MeanGradients


def compile_gradients(
    program: StepProgram, shardings: TrainState, options: CompilerOptions
) -> Callable[[TrainState, Batch], MeanGradients]:
    """A function of a placed state and batch, compiled once for each shape of batch, when it is first called.

    Args:
        program: of the step.
        shardings: of its state; gradients are sharded as the parameters.
        options: what the programs of the step are compiled with.
    """
    layout = program.sharded_model.layout
    replicated = NamedSharding(layout.mesh, PartitionSpec())
    trained = select_leaves(shardings.params, program.settings.trainable)
    places: Any = (trained, replicated, replicated, replicated)
    jitted = jax.jit(
        lambda state, batch: find_gradients(program, state, batch),
        out_shardings=MeanGradients(*places),
        compiler_options={**options.used} or None,
    )
    if program.pipeline is None:
        return jitted
    checked: dict[str, jax.stages.Compiled] = {}

    def run_checked(state: TrainState, batch: Batch) -> MeanGradients:
        shapes = str(sorted(leaf_shapes(batch).items()))
        if shapes not in checked:
            compiled = jitted.lower(state, batch).compile()
            check_branches(compiled.as_text() or "", layout)  # stages that would wait for each other for ever
            checked[shapes] = compiled
        return checked[shapes](state, batch)

    return run_checked
