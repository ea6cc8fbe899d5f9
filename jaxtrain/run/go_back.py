"""The state of a checkpoint before a spike, in the place of the one that the run has."""

import functools
from collections.abc import Callable

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import DamagedError
from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.models.model import Params
from jaxtrain.run.base import trained_leaves
from jaxtrain.run.changed_state import as_kept, as_saved
from jaxtrain.run.roll_back import SpikeError
from jaxtrain.train.base import with_base, without_base
from jaxtrain.train.state import TrainState, select_leaves
from jaxtrain.train.step import TrainStep


def frozen_params(step: TrainStep) -> Params | None:
    """The parameters that checkpoints of a run do not hold, from its last state; None: they hold all."""
    trains, state = trained_leaves(step), step.last_state()
    if trains is None or state is None:
        return None
    return select_leaves(state.params, lambda path: not trains(path))


def restored_before(
    step: TrainStep,
    checkpointer: Checkpointer,
    spike: SpikeError,
    frozen: Params | None,
    *,
    report: Callable[[str], None],
) -> tuple[SpikeError, TrainState]:
    """The state that a spike goes back to, an older one where that is damaged. The next save abandons those after it.

    Args:
        step: of the run.
        checkpointer: of the run.
        spike: where to.
        frozen: from `frozen_params`.
        report: called with one line where a checkpoint is damaged.

    Returns:
        The spike with the step that was gone back to, and the state after that.

    Raises:
        CheckpointError: no checkpoint can be read.
    """
    target = without_base(step.abstract_state, trained_leaves(step))
    to_step = spike.to_step
    while True:
        try:
            state = checkpointer.restore(as_saved(target, checkpointer, step=to_step), step=to_step)
            break
        except DamagedError as error:
            older = [one for one in checkpointer.steps() if one < to_step]
            to_step = from_process_0(functools.partial(max, older, default=-1))
            if to_step < 0:
                raise
            report(f"{error}; step {to_step} is used instead")
    spike = SpikeError(spike.step, spike.loss, spike.grad_norm, to_step=to_step)
    return spike, as_kept(state if frozen is None else with_base(state, frozen), step)
