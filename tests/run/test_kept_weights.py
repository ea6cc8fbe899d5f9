"""A run opens with the weights that its evaluations used, also where its optimizer keeps them and no moving average."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxtrain as jt

X = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
DATA = {"inputs": X, "targets": (X.sum(axis=1) > 0).astype(np.int32)}
OPTIMIZERS = {
    "lookahead": lambda: jt.lookahead(optax.sgd(0.5), sync_period=6),
    "lookahead_in_a_chain": lambda: optax.chain(optax.clip(1.0), jt.lookahead(optax.adam(0.1), sync_period=4)),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(0.5),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "lookahead" else pytest.mark.long) for name in OPTIMIZERS]
)
def test_an_opened_run_has_the_weights_of_its_evaluation(name, tmp_path):
    model = jt.from_nnx(lambda rngs: nnx.Linear(4, 2, rngs=rngs))
    result = jt.fit(
        model,
        jt.classification(),
        OPTIMIZERS[name](),
        data=DATA,
        validation=DATA,
        steps=7,
        batch_size=32,
        run_dir=tmp_path,
        logging={"report": False},
    )
    wanted = result.state.evaluation_params
    opened = jt.open_run(tmp_path, model=model, task=jt.classification())
    fresh = jt.make_train_step(model, jt.classification(), optax.sgd(0.1)).init(0, params=str(tmp_path))
    for found in (opened.params, fresh.params):
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert not np.array_equal(jax.tree.leaves(wanted)[0], jax.tree.leaves(result.state.params)[0])
