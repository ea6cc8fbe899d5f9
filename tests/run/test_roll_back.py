"""Which batch a step reads in a run that went back: a pure function of what is recorded."""

from jaxtrain.run.resume import SpikeError, batch_of, recorded, with_spike


def after(*spikes: tuple[int, int], skip: int = 10) -> dict:
    """The metadata of a run with spikes (step, step that it goes back to)."""
    metadata: dict = {}
    for step, to_step in spikes:
        metadata |= with_spike(metadata, SpikeError(step, 9.0, 9.0, to_step=to_step), skip_batches=skip)
    return metadata


# spikes -> {steps done: batch that is read next}
ROWS = {
    "none": ([], {0: 0, 7: 7}),
    "one": ([(30, 25)], {24: 24, 25: 35, 26: 36}),
    "past-its-own-batch": ([(50, 25)], {24: 24, 25: 50, 30: 55}),
    "twice-to-one-step": ([(30, 25), (28, 25)], {24: 24, 25: 45}),
    "a-later-one": ([(30, 25), (60, 50)], {24: 24, 25: 35, 49: 59, 50: 70}),
    # The second spike, at batch 37, takes the place of the first roll back; its range covers the first one's.
    "back-beyond-the-first": ([(30, 25), (28, 20)], {19: 19, 20: 38, 25: 43}),
    "forward-again": ([(30, 25), (28, 20), (45, 40)], {20: 38, 39: 57, 40: 68}),
}


def test_batches_after_roll_backs() -> None:
    for case, (spikes, expected) in ROWS.items():
        rolled_back = recorded(after(*spikes))
        assert {k: batch_of(k, rolled_back) for k in expected} == expected, case
        # No batch is read twice in the line of steps that stays.
        read = [batch_of(k, rolled_back) for k in range(100)]
        assert read == sorted(set(read))
