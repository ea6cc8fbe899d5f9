"""A run that goes on with a change: which parts of the state come, go and change, and what is refused for its form."""

from pathlib import Path
from typing import Any

import numpy as np
import optax
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
