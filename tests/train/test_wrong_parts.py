"""Mistakes that a user of the Python contract makes: each is refused before anything runs."""

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.data.rows import ArrayRows, ConcatenatedRows
from jaxtrain.errors import ConfigError, DataError


def one_device():
    return jt.make_mesh(devices=jax.devices()[:1])


def linear(outputs: int):
    """x [B, 3] @ ones: the outputs are the sums of the rows."""
    return jt.from_functions(lambda key: {"w": jnp.ones((3, outputs))}, lambda params, x: x @ params["w"])


@pytest.mark.parametrize("wrong", [{"targets": 32}, {"inputs": -1}], ids=str)
def test_ids_that_the_model_does_not_have_are_refused_on_the_host(wrong):
    sizes = {"kind": "transformer", "num_layers": 1, "embed_dim": 8, "num_heads": 2, "max_sequence_length": 8}
    model = jt.build_model(sizes, input_shape=(8,), vocab_size=32)
    step = jt.make_train_step(model, jt.language_modeling(), optax.sgd(0.1), mesh=one_device())
    [(name, value)] = wrong.items()
    columns = {"inputs": np.zeros((2, 8), np.int32), "targets": np.zeros((2, 8), np.int32)}
    columns[name][:] = value
    batches = jt.Batches(ArrayRows(columns), 2, seed=0, shuffle=True)
    for give in (lambda: step.loader(batches)(0), lambda: step(step.init(0), columns)):
        with pytest.raises(DataError, match=f"{name} of {value}, but the model has ids 0 to 31"):
            give()


def test_classes_that_an_own_model_does_not_have_are_refused():
    step = jt.make_train_step(linear(3), jt.classification(), optax.sgd(0.1), mesh=one_device())
    batch = {"inputs": np.ones((2, 3), np.float32), "targets": np.array([0, 3], np.int32)}
    with pytest.raises(DataError, match="targets of 3, but the model has ids 0 to 2"):
        step(step.init(0), batch)
    # Of weight 0 they are what people pad with.
    step(step.init(0), {**batch, "weights": np.array([1, 0], np.float32)})


X, Y = np.ones((4, 3), np.float32), np.zeros(4, np.int32)
WRONG_BATCHES = {
    "weights of another length": (
        jt.classification,
        {"inputs": X, "targets": Y, "weights": np.ones((4, 7), np.float32)},
        r"weights \[4, 7\] do not fit targets \[4\]",
    ),
    "regression of [B] with 3 outputs": (jt.regression, {"inputs": X, "targets": X[:, 0]}, "do not fit outputs"),
    "no inputs": (jt.classification, {"x": X, "targets": Y}, "no entry 'inputs'.*it holds x, targets"),
    "no rows": (jt.classification, {"inputs": X[:0], "targets": Y[:0]}, "global_batch_size=0 does not divide"),
}


@pytest.mark.parametrize("case", WRONG_BATCHES)
def test_a_batch_that_does_not_fit_is_one_line(case):
    task, batch, message = WRONG_BATCHES[case]
    step = jt.make_train_step(linear(3), task(), optax.sgd(0.1), mesh=one_device())
    with pytest.raises(ConfigError, match=message):
        step(step.init(0), batch)


WRONG_LOSSES = {
    "one number": (lambda outputs, batch: jnp.mean(outputs), r"must return \(sum, weight, metrics\)"),
    "a pair": (lambda outputs, batch: (jnp.sum(outputs), 1.0), "must return"),
    "a vector": (lambda outputs, batch: (outputs[:, 0], 4.0, {}), r"returned .*an array float32\[4\]"),
    "metrics without weights": (lambda outputs, batch: (jnp.sum(outputs), 4.0, {"a": jnp.sum(outputs)}), "pair"),
    "a metric called loss": (lambda outputs, batch: (jnp.sum(outputs), 4.0, {"loss": (1.0, 1.0)}), "rename it"),
    "a complex sum": (lambda outputs, batch: (jnp.sum(outputs) + 1j, 4.0, {}), "two real numbers"),
}


@pytest.mark.parametrize("case", WRONG_LOSSES)
def test_a_loss_that_returns_something_else_is_one_line(case):
    loss, message = WRONG_LOSSES[case]
    step = jt.make_train_step(linear(3), jt.Task("mine", loss), optax.sgd(0.1), mesh=one_device())
    with pytest.raises(ConfigError, match=message):
        step(step.init(0), {"inputs": X, "targets": Y})


def test_a_model_without_logits_is_one_line():
    model = jt.from_functions(lambda key: {"w": jnp.ones((3, 3))}, lambda params, x: {"scores": x @ params["w"]})
    step = jt.make_train_step(model, jt.classification(), optax.sgd(0.1), mesh=one_device())
    with pytest.raises(ConfigError, match=r"needs logits \[B, ..., classes\] from the model, which gives"):
        step.place({"inputs": X, "targets": Y})


def test_rows_of_another_kind_are_one_line():
    with pytest.raises(DataError, match="the sources hold different rows"):
        ConcatenatedRows([ArrayRows({"inputs": X}), ArrayRows({"inputs": X, "weights": X[:, 0]})])
    batches = jt.Batches(grain.MapDataset.source([{"inputs": X[0]}, {"x": X[0]}]), 2, seed=0, shuffle=True)
    with pytest.raises(DataError, match="rows hold different entries"):
        batches.load(0, {"inputs": jax.sharding.SingleDeviceSharding(jax.devices()[0])})
