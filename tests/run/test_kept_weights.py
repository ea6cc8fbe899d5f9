"""A run opens with the weights that its evaluations used, also where its optimizer keeps them and no moving average."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import schedule_free_sgd

import jaxtrain as jt

X = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
DATA = {"inputs": X, "targets": (X.sum(axis=1) > 0).astype(np.int32)}
OPTIMIZERS = {
    "lookahead in a chain": lambda: optax.chain(optax.clip(1.0), jt.lookahead(optax.adam(0.1), sync_period=4)),
    "schedule-free": lambda: schedule_free_sgd(0.5),
}


# The names of parameters may hold a slash.
@pytest.mark.parametrize("name", ["lookahead in a chain", pytest.param("schedule-free", marks=pytest.mark.long)])
def test_an_opened_run_has_the_weights_of_its_evaluation(name: str, tmp_path: Path) -> None:
    model = jt.from_functions(
        lambda key: {"linear/w": jnp.full((4, 2), 0.1), "linear/b": jnp.zeros(2)},
        lambda params, inputs: inputs @ params["linear/w"] + params["linear/b"],
    )
    settings: dict[str, Any] = dict(steps=7, batch_size=32, logging={"report": False, "tensorboard": False})
    result = jt.fit(model, jt.classification(), OPTIMIZERS[name](), data=DATA, run_dir=tmp_path, **settings)
    wanted = result.state.evaluation_params
    opened = jt.open_run(tmp_path, model=model, task=jt.classification())
    fresh = jt.make_train_step(model, jt.classification(), optax.sgd(0.1)).init(0, params=str(tmp_path))
    for found in (opened.params, fresh.params):
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert not np.array_equal(wanted["linear/b"], result.state.params["linear/b"])
