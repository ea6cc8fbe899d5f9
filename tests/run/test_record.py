"""What a run writes of its steps: means since the row before, tokens without padding, the peak of all devices."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_fit import fit
from training_runs import rows

import jaxtrain as jt
from jaxtrain.config import load_config
from jaxtrain.data.configured import open_run_data
from jaxtrain.metrics import utilization
from jaxtrain.run.assemble import assemble
from jaxtrain.run.spec import RunSpec

QUIET = {"tensorboard": False, "report": False}


def values_of_steps(run_dir: Path, *, every: int, steps: int = 8, stop: int | None = None) -> dict[int, Any]:
    """Train with a bad batch at step 6, and return the metrics of each step."""
    seen: dict[int, Any] = {}

    def note(moment: jt.Moment) -> None:
        seen[moment.step] = moment.metrics

    def watch(moment: jt.Moment) -> str | None:
        return "stop" if moment.step == stop else None

    fit(
        run_dir,
        data=({"inputs": np.full((4, 1), np.nan if k == 5 else k, np.float32)} for k in range(steps)),
        batch_size=None,
        model=jt.from_functions(lambda key: {"w": jnp.ones(())}, lambda params, x: x * params["w"]),
        task=jt.Task("own", lambda outputs, batch: (outputs[:, 0] ** 2, {"half": outputs[:, 0] / 2})),
        optimizer=optax.sgd(1e-3),
        steps=steps,
        logging={"every": every, **QUIET},
        callbacks=[jt.Callback(on_step=note), jt.Callback(on_step=watch)],
    )
    return seen


def test_a_logged_row_has_the_means_of_its_finite_steps(tmp_path: Path) -> None:
    seen = values_of_steps(tmp_path / "run", every=4)
    logged = {row["step"]: row for row in rows(tmp_path / "run")}
    assert [*logged] == [1, 4, 8]
    assert math.isnan(seen[6]["loss"])
    for last, steps in {1: [1], 4: [2, 3, 4], 8: [5, 7, 8]}.items():
        for name in ("loss", "half"):
            assert logged[last][name] == pytest.approx(np.mean([seen[step][name] for step in steps])), (last, name)
        assert logged[last]["grad_norm"] == seen[last]["grad_norm"], "as it is after the step"
    every = values_of_steps(tmp_path / "every", every=1)
    for row in rows(tmp_path / "every"):
        value = every[row["step"]]["loss"]
        assert row["loss"] == (value if math.isfinite(value) else None)


def test_the_first_row_after_a_resume_has_the_steps_since_it(tmp_path: Path) -> None:
    values_of_steps(tmp_path, every=4, stop=3)
    seen = values_of_steps(tmp_path, every=4)
    logged = {row["step"]: row["loss"] for row in rows(tmp_path)}
    assert [*logged] == [1, 3, 4, 8]
    assert logged[4] == seen[4]["loss"]
    assert logged[8] == pytest.approx(np.mean([seen[step]["loss"] for step in (5, 7, 8)]))


def test_utilization_is_of_the_peak_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization, "peak_flops", lambda kind, policy: 1e9)
    words = ["data.kind=digits", "model.kind=mlp", "task=classification", "train.global_batch_size=32"]
    spec = RunSpec(load_config(None, overrides=[*words, "model.hidden_dims=[16]"]), Path("runs/unused"))
    run = assemble(spec, open_run_data(spec.config))
    meter = utilization.step_meter(run.config, run.step.model, run.data, num_devices=run.step.mesh.size)
    assert meter.peak_flops == jax.device_count() * 1e9 == 8e9


def test_the_tokens_of_a_step_are_those_without_padding(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"messages": messages})] * 8))
    words = [
        *("model.kind=transformer", "model.num_layers=1", "model.embed_dim=8", "model.num_heads=2"),
        *("model.max_sequence_length=96", "train.global_batch_size=8", "data.kind=chat", "data.template=chatml"),
        *(
            f"data.path={tmp_path}/chats.jsonl",
            "data.tokenizer.kind=byte",
            "data.packing=false",
            "data.validation_fraction=0",
        ),
    ]
    spec = RunSpec(load_config(None, overrides=words), Path("runs/unused"))
    run = assemble(spec, open_run_data(spec.config))
    inputs = run.data.train[0]["inputs"]
    tokens = np.flatnonzero(inputs != inputs[-1])[-1] + 1
    meter = utilization.step_meter(run.config, run.step.model, run.data, num_devices=run.step.mesh.size)
    assert meter.units_per_step == 8 * tokens < 8 * 96
