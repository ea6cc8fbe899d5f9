"""The state of a checkpoint before a spike, in the place of the one that the run has."""

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.models.model import Params
from jaxtrain.run.base import trained_leaves
from jaxtrain.run.roll_back import SpikeError
from jaxtrain.run.spike_history import as_kept, as_saved
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
    step: TrainStep, checkpointer: Checkpointer, spike: SpikeError, frozen: Params | None
) -> TrainState:
    """The state that a spike goes back to. The next save abandons the checkpoints after it.

    Args:
        step: of the run.
        checkpointer: of the run.
        spike: where to.
        frozen: from `frozen_params`.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    target = without_base(step.abstract_state, trained_leaves(step))
    state = checkpointer.restore(as_saved(target, checkpointer, step=spike.to_step), step=spike.to_step)
    return as_kept(state if frozen is None else with_base(state, frozen), step)
