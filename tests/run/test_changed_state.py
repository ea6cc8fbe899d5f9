"""A run that goes on with a change: which parts of the state come, go and change, and what is refused for its form."""

from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx
from training_runs import rows

import jaxtrain as jt

RNG = np.random.default_rng(0)
DATA = (RNG.normal(size=(32, 4)).astype(np.float32), RNG.normal(size=(32, 2)).astype(np.float32))
LOGGING = {"every": 1, "tensorboard": False, "report": False}


def fit(run_dir: Path, optimizer: optax.GradientTransformation | None = None, **changes: Any) -> jt.Result:
    model = jt.from_nnx(lambda rngs: nnx.Linear(4, 2, rngs=rngs))
    arguments: dict[str, Any] = dict(data=DATA, steps=2, batch_size=8, run_dir=run_dir, logging=LOGGING)
    return jt.fit(model, jt.regression(), optimizer or optax.sgd(0.1), **(arguments | changes))


def test_a_loss_scale_comes_goes_and_stays_within_its_bounds(tmp_path: Path) -> None:
    """A run that diverges under fp16 is told to use bf16: its parameters and moments are the same."""
    raised = {"precision.loss_scale": {"initial": 2.0**17, "minimum": 2.0**16}}
    for steps, policy, overrides, scale in (
        (1, "fp32", {}, None),
        (2, "fp16", {}, 2.0**15),
        (3, "fp16", raised, 2.0**16),
        (4, "bf16", {}, None),
    ):
        state = fit(tmp_path, steps=steps, policy=policy, overrides=overrides, resume="auto").state
        assert (None if state.loss_scale is None else float(state.loss_scale.scale)) == scale
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


# Options of a call, and of another whose state has another form, of the same weights.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "average": (dict(), dict(ema_decay=0.9)),
    "frozen": (dict(), dict(trainable=lambda path: path != "bias")),
    "optimizer": (dict(), dict(optimizer=optax.sgd(0.1))),
    "precision": (dict(), dict(policy="bf16_pure")),
}


@pytest.mark.parametrize(("before", "after"), REFUSED.values(), ids=REFUSED)
def test_no_resume_is_offered_where_none_can_go_on(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    before, after = ({"optimizer": optax.adam(0.1), **options} for options in (before, after))
    fit(tmp_path / "run", **before)
    with pytest.raises(jt.UserError) as error:
        fit(tmp_path / "run", **after)
    assert "resume='must'" not in str(error.value)
    assert "\n" not in str(error.value)
    assert f", where params='{tmp_path / 'run'}' starts from its weights" in str(error.value)
    assert fit(tmp_path / "other", params=str(tmp_path / "run"), **after).step == 2
