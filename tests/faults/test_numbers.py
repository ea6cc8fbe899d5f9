"""Numbers that go wrong in a run: spikes, and steps that are not finite."""

from pathlib import Path
from typing import Any

import pytest
from number_runs import bits, metrics, table, train

import jaxtrain as jt


def test_a_spike_is_skipped_and_the_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    data = table(spikes=(40,))
    keys: dict[str, Any] = {"spikes__window": 32}
    whole, lines = train(tmp_path / "whole", data, **keys)
    assert [line for line in lines if "spike" in line and "step 41 is a spike" in line]
    rows = metrics(tmp_path / "whole")
    assert (rows[40]["spikes"], rows[41]["spikes"], rows[60]["spikes"], rows[60]["skipped_steps"]) == (0, 1, 1, 1)
    train(tmp_path / "part", data, **keys, train__steps=35)
    resumed, _ = train(tmp_path / "part", data, **keys)
    assert bits(resumed.state) == bits(whole.state)


def test_a_step_that_is_not_finite_names_its_batch(tmp_path: Path) -> None:
    """One row is not a number; the target of another is finite, and its loss is not."""
    _, lines = train(tmp_path, table(nan_batch=20, far_batch=30), train__steps=33)
    said = [line for line in lines if "is not finite" in line]
    assert [line.partition(" is ")[0] for line in said] == ["step 21", "step 31"]
    assert [line.rpartition("; ")[2] for line in said] == ["batch 20 is skipped", "batch 30 is skipped"]
    assert metrics(tmp_path)[33]["skipped_steps"] == 2


@pytest.mark.long
def test_spikes_in_a_row_end_the_run(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"spikes__window": 16, "train__max_skipped_in_a_row": 3}
    with pytest.raises(
        jt.DivergedError, match=r"were spikes .* 3 steps in a row, up to step 23; parameters are as before"
    ):
        train(tmp_path, table(spikes=(20, 21, 22, 23)), **keys)
