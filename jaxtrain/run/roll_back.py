"""Going back to a checkpoint before a spike, and past the data around it; batches follow from what is recorded.

Batch numbers are a pure function of the steps and the recorded roll backs, so that a run that is killed and resumed
reads the batches that an undisturbed one reads. Every checkpoint of the new line records them. A kill before its first
checkpoint resumes the old line, meets the same spike, and goes back once more.

Source: Chowdhery et al. 2022 (PaLM), section 5.1, which restarts about 100 steps before a spike and skips 200 to 500
batches.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.config.schema import SpikesConfig
from jaxtrain.data import Data
from jaxtrain.data.stream import BatchStream
from jaxtrain.errors import ConfigError

RECORD = "rolled_back"
"""Key of the metadata of a checkpoint, and of run.json."""


@dataclass(frozen=True)
class RollBack:
    """One time that a run went back.

    Attributes:
        from_step: the step that was a spike.
        to_step: the step whose checkpoint was restored.
        first_batch: number of the first batch that was left out.
        num_batches: batches that were left out.
        loss, grad_norm: of the spike.
    """

    from_step: int
    to_step: int
    first_batch: int
    num_batches: int
    loss: float
    grad_norm: float


class SpikeError(Exception):
    """A step was a spike, and the run goes back; caught inside the run.

    Attributes:
        step: its number.
        loss, grad_norm: of it.
        to_step: whose checkpoint the run goes back to.
    """

    def __init__(self, step: int, loss: float, grad_norm: float, *, to_step: int) -> None:
        super().__init__(step, loss, grad_norm)
        self.step, self.loss, self.grad_norm, self.to_step = step, loss, grad_norm, to_step


def recorded(metadata: Mapping[str, Any]) -> tuple[RollBack, ...]:
    """The roll backs of a run, in their order, as the metadata of a checkpoint has them."""
    return tuple(RollBack(**one) for one in metadata.get(RECORD, ()))


def batch_of(k: int, rolled_back: Sequence[RollBack]) -> int:
    """The number of the batch that is read after k steps.

    A roll back moves all later steps past the batches that it leaves out, until one to an earlier step takes its place.

    Args:
        k: steps done.
        rolled_back: in their order.
    """
    return k + sum(
        one.num_batches
        for i, one in enumerate(rolled_back)
        if one.to_step <= k and all(later.to_step >= one.to_step for later in rolled_back[i + 1 :])
    )


def with_spike(metadata: Mapping[str, Any], spike: SpikeError, *, skip_batches: int) -> dict[str, Any]:
    """The entry of the metadata that records the roll backs, with one more.

    Args:
        metadata: of the run's next checkpoint before that.
        spike: the step that was one, and where the run goes back to.
        skip_batches: batches to leave out at least; those up to the spike's own are always left out.
    """
    rolled_back, step = recorded(metadata), spike.to_step
    # Of a roll back to a later step nothing stays in the new line: its batches are in the range of this one.
    first = batch_of(step, [one for one in rolled_back if one.to_step <= step])
    count = max(skip_batches, batch_of(spike.step - 1, rolled_back) + 1 - first)
    done = RollBack(spike.step, step, first, count, spike.loss, spike.grad_norm)
    return {RECORD: [dataclasses.asdict(one) for one in (*rolled_back, done)]}


def check_can_go_back(spikes: SpikesConfig | None, data: Data) -> None:
    """Raise where a run may have to go back and its batches have no index.

    Raises:
        ConfigError: names the key.
    """
    if spikes is not None and spikes.action == "roll_back" and isinstance(data.train, BatchStream):
        raise ConfigError(
            "spikes.action=roll_back reads batches by their number, and an iterable has none; give a dataset with "
            "__len__ and __getitem__, or set spikes.action=skip"
        )
