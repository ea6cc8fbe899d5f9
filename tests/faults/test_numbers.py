"""Numbers that go wrong in a run: spikes, steps that are not finite, and devices that compute or keep other bits."""

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from number_runs import Lines, bits, corrupt, metrics, rows_of, table, train

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


def test_a_step_that_is_not_finite_names_its_row(tmp_path: Path) -> None:
    """One row is not a number; the target of another is finite, and its loss is not: there the batch is named."""
    _, lines = train(tmp_path, table(nan_batch=20, far_batch=30), train__steps=33)
    row = int(rows_of(20)[5])
    for step, rows in ((21, [(row, ["inputs"])]), (31, [])):
        found = json.loads((tmp_path / "nonfinite" / f"step_{step}.json").read_text())
        assert found["batch_rows"] == rows_of(step - 1).tolist()
        assert [(one["row"], one["not_finite"]) for one in found["rows"]] == rows
    said = [line for line in lines if "is not finite and skipped" in line]
    assert f"batch 20, row {row} (inputs not finite); " in said[0]
    assert "batch 30; " in said[1]
    assert len(said) == 2
    assert metrics(tmp_path)[33]["skipped_steps"] == 2


def test_a_flipped_bit_in_one_copy_names_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corrupt(monkeypatch.setattr, call=7, device=3)
    with pytest.raises(
        jt.CorruptionError, match=r"after step 8 the copies of .*differ.*: device 3 \(process 0\) holds"
    ) as error:
        train(tmp_path, table(), checks__replicas_every=4, train__steps=12)
    assert error.value.exit_code == 1


def fit_batches(run_dir: Path, batches: list[Any], overrides: dict[str, Any]) -> list[str]:
    """Train on an iterator of batches; returns the lines."""
    model = jt.from_functions(lambda _: {"kernel": jnp.ones((8, 1))}, lambda params, x: x @ params["kernel"])
    progress, logging = Lines(), {"tensorboard": False, "report": False}
    more: dict[str, Any] = {"run_dir": run_dir, "overrides": overrides, "logging": logging, "progress": progress}
    jt.fit(model, jt.regression(), optax.sgd(0.1), data=iter(batches), steps=3, **more)
    return progress.lines


@pytest.mark.long
def test_an_iterable_skips_such_a_step(tmp_path: Path) -> None:
    values = np.ones((3, 8, 8), np.float32)
    values[1, 6, 0] = np.inf
    batches = [{"inputs": one, "targets": np.ones((8, 1), np.float32)} for one in values]
    lines = fit_batches(tmp_path / "run", batches, {})
    assert any("step 2 is not finite and skipped" in line and "batch 1; " in line for line in lines)


@pytest.mark.long
def test_two_processes_name_the_rank_of_a_flipped_bit_and_a_row(start_ranks, tmp_path: Path) -> None:
    ranks = start_ranks([[Path(__file__).with_name("number_runs.py"), tmp_path / "run"]] * 2)
    outputs = [rank.communicate(timeout=200) for rank in ranks]
    for rank, (out, err) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 1, err
        assert "after step 8 the copies of params/layers/0/bias" in out
        assert re.search(r"device \d+ \(process 1\) holds other bits than the rest", out)
    found = json.loads((tmp_path / "run" / "nonfinite" / "step_3.json").read_text())
    assert [one["row"] for one in found["rows"]] == [int(rows_of(2)[5])]


@pytest.mark.long
def test_spikes_in_a_row_end_the_run(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"spikes__window": 16, "train__max_skipped_in_a_row": 3}
    with pytest.raises(
        jt.DivergedError, match=r"were spikes .* 3 steps in a row, up to step 23; parameters are as before"
    ):
        train(tmp_path, table(spikes=(20, 21, 22, 23)), **keys)
