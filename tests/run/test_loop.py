"""What the loop reports of each step: its own wait, and the rest of its time, pauses left out."""

import numpy as np
import pytest

from jaxtrain.run import loop


@pytest.mark.parametrize("pause_every", [None, 3], ids=["no pause", "a pause every 3 steps"])
def test_a_step_s_seconds_are_its_own_wait_and_its_own_work(monkeypatch, pause_every):
    clock = [0.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock[0])
    waits = [0.1 * number for number in range(1, 7)]
    rows = []

    class Metrics(dict):
        """Reading it waits for the device: 0.5 s of work a step."""

        def __getitem__(self, name):
            clock[0] += 0.5
            return 0

    def batches():
        for wait in waits:
            clock[0] += wait
            yield {}

    def pause(number, state):
        clock[0] += 100

    def finished(number, metrics, seconds, waited):
        rows.append((seconds, waited))
        if number == 3:  # what is looked into after this step is not the next one's time
            clock[0] += 7
            return 7.0

    loop.train_loop(
        lambda state, batch: (state, Metrics()),  # pyright: ignore[reportArgumentType] a stand-in
        None,  # pyright: ignore[reportArgumentType]
        batches(),
        first=1,
        last=6,
        max_skipped_in_a_row=10,
        hooks=loop.Hooks(
            lambda number: None,
            finished,
            lambda number: pause_every is not None and number % pause_every == 0,
            pause,
            lambda number: False,
        ),
    )
    np.testing.assert_allclose([waited for _, waited in rows], waits)
    np.testing.assert_allclose([seconds for seconds, _ in rows], [0.5 + wait for wait in waits])
