"""A run opens with the weights that its evaluations used, also where its optimizer keeps them and no moving average."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import schedule_free_adamw, schedule_free_sgd

import jaxtrain as jt
from jaxtrain.checkpoint.kept_weights import find_kept_weights
from jaxtrain.checkpoint.tree import describe, flatten
from jaxtrain.optim.wrappers import evaluation_weights, kept_nodes

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


class OwnState(NamedTuple):
    count: Any
    slow: Any


def own_optimizer() -> optax.GradientTransformation:
    """An average of the gradients, in fields of the names that Lookahead's have."""

    def init(params: Any) -> OwnState:
        return OwnState(jnp.int32(0), jax.tree.map(jnp.zeros_like, params))

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


# Branches named as fields are, beside a path that theirs ends in: `slow` is what two-stream networks call one.
PARAMS = {
    "head": jnp.arange(3.0),
    "slow": {"head": jnp.ones(3), "deep": {"head": jnp.ones(3)}},
    "z": {"head": jnp.ones(3)},
    "b1": jnp.ones(()),
    "count": jnp.ones(()),
}
LABELS = {name: "a" if name == "head" else "b" for name in PARAMS}
KEEPERS: dict[str, Any] = {
    "adam": lambda: optax.adam(0.1),
    "lookahead in a chain": lambda: optax.chain(optax.clip(1.0), jt.lookahead(optax.adam(0.1))),
    "schedule-free of lookahead": lambda: optax.contrib.schedule_free(jt.lookahead(optax.adam(0.1)), 0.1),
    "schedule-free": lambda: schedule_free_adamw(0.5),
    "two kinds": lambda: optax.multi_transform(
        {"a": schedule_free_sgd(0.1), "b": jt.lookahead(optax.adam(0.1))}, LABELS
    ),
    "injected": lambda: optax.inject_hyperparams(schedule_free_adamw)(learning_rate=0.05),
    "one's own fields": own_optimizer,
}


@pytest.mark.parametrize("optimizer", KEEPERS.values(), ids=KEEPERS)
def test_what_a_checkpoint_keeps_is_what_evaluation_uses(optimizer: Any) -> None:
    first = optimizer().init(PARAMS)
    # Every array of the state differs from every other, so that the wrong one shows.
    drawn = (np.random.default_rng(number) for number in range(1000))
    state = jax.tree.map(lambda leaf: jnp.asarray(next(drawn).uniform(0.1, 0.9, jnp.shape(leaf))), first)
    wanted = flatten(evaluation_weights(state, PARAMS)).leaves

    arrays = flatten({"params": PARAMS, "optimizer_state": state}).leaves
    saved = flatten({"params": PARAMS, "optimizer_state": first}).leaves
    leaves = {name: describe(leaf, name) for name, leaf in saved.items()}
    found = find_kept_weights(leaves, kept_nodes(first))
    for name, param in flatten(PARAMS).leaves.items():
        kept, b1 = found.get(name, (None, None))
        value = param if kept is None else arrays[kept]
        if b1 is not None:
            value = (param - (1 - arrays[b1]) * value) / arrays[b1]
        np.testing.assert_allclose(value, wanted[name], rtol=1e-6, err_msg=name)
