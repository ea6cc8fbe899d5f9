"""Mistakes that a user of the Python contract makes: each is one line, before anything runs."""

import flax.linen
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.config.models import TransformerConfig
from jaxtrain.data.rows import ArrayRows, ConcatenatedRows
from jaxtrain.errors import ConfigError, DataError

RNG = np.random.default_rng(0)
TINY = {"kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 8}


def one_device():
    return jt.make_mesh(devices=jax.devices()[:1])


def linear(outputs: int):
    """x [B, 3] @ ones: the outputs are the sums of the rows."""
    return jt.from_functions(lambda key: {"w": jnp.ones((3, outputs))}, lambda params, x: x @ params["w"])


def language_model(num_layers: int = 1):
    return jt.build_model({**TINY, "num_layers": num_layers}, input_shape=(8,), vocab_size=32)


def token_rows(count: int, **more):
    ids = RNG.integers(0, 32, (count, 9)).astype(np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:], **more}


REFUSED_IDS = {
    "targets": ({"targets": np.full((2, 8), 32, np.int32)}, "targets of 32, but the model has ids 0 to 31"),
    "inputs": ({"inputs": np.full((2, 8), 99, np.int32)}, "inputs of 99, but the model has ids 0 to 31"),
    "negative inputs": ({"inputs": np.full((2, 8), -1, np.int32)}, "inputs of -1"),
}


@pytest.mark.parametrize("case", REFUSED_IDS)
@pytest.mark.parametrize("way", ["loader", "call"])
def test_ids_that_the_model_does_not_have_are_refused_on_the_host(case, way):
    more, message = REFUSED_IDS[case]
    columns = {**token_rows(2), **more}
    step = jt.make_train_step(language_model(), jt.language_modeling(), optax.sgd(0.1), mesh=one_device())
    state = step.init(0) if way == "call" else None
    batches = jt.Batches(ArrayRows(columns), 2, seed=0, shuffle=True)
    with pytest.raises(DataError, match=message):
        step(state, columns) if state is not None else step.loader(batches)(0)


def test_classes_that_an_own_model_does_not_have_are_refused():
    step = jt.make_train_step(linear(3), jt.classification(), optax.sgd(0.1), mesh=one_device())
    batch = {"inputs": np.ones((2, 3), np.float32), "targets": np.array([0, 3], np.int32)}
    with pytest.raises(DataError, match="targets of 3, but the model has ids 0 to 2"):
        step(step.init(0), batch)
    # Of weight 0 they are what people pad with.
    step(step.init(0), {**batch, "weights": np.array([1, 0], np.float32)})


def test_ids_that_only_the_device_sees_make_the_step_not_finite():
    step = jt.make_train_step(linear(3), jt.classification(), optax.sgd(0.1), mesh=one_device())
    batch = jax.device_put(
        {"inputs": np.ones((2, 3), np.float32), "targets": np.array([0, 3], np.int32)}, jax.devices()[0]
    )
    state, metrics = step(step.init(0), batch)
    assert int(metrics["skipped_steps"]) == 1
    np.testing.assert_array_equal(state.params["w"], np.ones((3, 3)))


X, Y = np.ones((4, 3), np.float32), np.zeros(4, np.int32)
WRONG_BATCHES = {
    "targets [B, 1]": (jt.classification, {"inputs": X, "targets": Y[:, None]}, r"drop the last dimension"),
    "float classes": (jt.classification, {"inputs": X, "targets": X[:, 0]}, "needs integer targets"),
    "no targets": (jt.classification, {"inputs": X}, "needs an entry 'targets'"),
    "weights of another length": (
        jt.classification,
        {"inputs": X, "targets": Y, "weights": np.ones((4, 7), np.float32)},
        r"weights \[4, 7\] do not fit targets \[4\]",
    ),
    "regression of another width": (
        jt.regression,
        {"inputs": X, "targets": np.ones((4, 2), np.float32)},
        r"targets \[4, 2\] do not fit outputs \[4, 3\]",
    ),
    "regression of [B] with 3 outputs": (jt.regression, {"inputs": X, "targets": X[:, 0]}, "do not fit outputs"),
    "no inputs": (jt.classification, {"x": X, "targets": Y}, "no entry 'inputs'.*it holds x, targets"),
    "a tuple": (jt.classification, (X, Y), "not a dict of arrays"),
    "targets of None": (jt.classification, {"inputs": X, "targets": None}, "needs an entry 'targets'.* holds inputs"),
    "a number as name": (jt.classification, {"inputs": X, "targets": Y, 1: Y}, "an entry 1, which is no text"),
    "no rows": (jt.classification, {"inputs": X[:0], "targets": Y[:0]}, "global_batch_size=0 does not divide"),
}


@pytest.mark.parametrize("case", WRONG_BATCHES)
def test_a_batch_that_does_not_fit_is_one_line(case):
    task, batch, message = WRONG_BATCHES[case]
    step = jt.make_train_step(linear(3), task(), optax.sgd(0.1), mesh=one_device())
    with pytest.raises(ConfigError, match=message) as caught:
        step(step.init(0), batch)
    assert "\n" not in str(caught.value)


WRONG_LOSSES = {
    "one number": (lambda outputs, batch: jnp.mean(outputs), r"must return \(sum, weight, metrics\)"),
    "a pair": (lambda outputs, batch: (jnp.sum(outputs), 1.0), "returned 2 values"),
    "a vector": (lambda outputs, batch: (outputs[:, 0], 4.0, {}), r"its sum is an array float32\[4\]"),
    "metrics without weights": (lambda outputs, batch: (jnp.sum(outputs), 4.0, {"a": jnp.sum(outputs)}), "pair"),
    "a metric called step": (lambda outputs, batch: (jnp.sum(outputs), 4.0, {"step": (1.0, 1.0)}), "rename it"),
    "a metric without a name": (
        lambda outputs, batch: (jnp.sum(outputs), 4.0, {1: (1.0, 1.0)}),
        "metric 1, which is no",
    ),
    "complex losses": (lambda outputs, batch: outputs[:, 0] + 1j, r"complex numbers \(an array complex64\[4\]\)"),
    "a complex sum": (lambda outputs, batch: (jnp.sum(outputs) + 1j, 4.0, {}), "return real ones"),
    "a complex metric": (lambda outputs, batch: (outputs[:, 0], {"a": outputs[:, 0] + 1j}), "return real ones"),
    "a metric called loss": (lambda outputs, batch: (jnp.sum(outputs), 4.0, {"loss": (1.0, 1.0)}), "rename it"),
}


@pytest.mark.parametrize("case", WRONG_LOSSES)
def test_a_loss_that_returns_something_else_is_one_line(case):
    loss, message = WRONG_LOSSES[case]
    step = jt.make_train_step(linear(3), jt.Task("mine", loss), optax.sgd(0.1), mesh=one_device())
    with pytest.raises(ConfigError, match=message) as caught:
        step(step.init(0), {"inputs": X, "targets": Y})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("give", [lambda x: (x, x), lambda x: None, lambda x: {"scores": x}])
def test_a_model_without_logits_is_one_line(give):
    model = jt.from_functions(lambda key: {"w": jnp.ones((3, 3))}, lambda params, x: give(x @ params["w"]))
    step = jt.make_train_step(model, jt.classification(), optax.sgd(0.1), mesh=one_device())
    with pytest.raises(ConfigError, match=r"needs logits \[B, ..., classes\] from the model, which gives"):
        step.place({"inputs": X, "targets": Y})


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(2)(x)


MODEL, TASK, OPTIMIZER = linear(2), jt.classification(), optax.sgd(0.1)
WRONG_PARTS = {
    "task: a function": (MODEL, lambda outputs, batch: 0.0, OPTIMIZER, r"jaxtrain\.Task\('name', loss\)"),
    "task: not called": (MODEL, jt.classification, OPTIMIZER, r"write jaxtrain\.classification\(\)"),
    "model: an NNX class": (Nnx, TASK, OPTIMIZER, r"the class Nnx.*from_nnx\(lambda rngs: Nnx\("),
    "model: an NNX module": (Nnx(nnx.Rngs(0)), TASK, OPTIMIZER, r"an instance of Nnx.*from_nnx"),
    "model: a Linen module": (Linen(), TASK, OPTIMIZER, r"from_linen\(Linen"),
    "model: a Linen class": (Linen, TASK, OPTIMIZER, r"from_linen\(Linen"),
    "model: a function": (lambda params, x: x, TASK, OPTIMIZER, "from_functions"),
    "model: a config": (TransformerConfig(), TASK, OPTIMIZER, "build_model"),
    "optimizer: of NNX": (
        MODEL,
        TASK,
        nnx.Optimizer(Nnx(nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param),
        "pass the optax transformation",
    ),
    "optimizer: not called": (MODEL, TASK, optax.adamw, r"optax\.adamw\(1e-3\)"),
    "optimizer: a rate": (MODEL, TASK, 1e-3, r"optax\.adamw\(0\.001\)"),
    "swapped": (TASK, MODEL, OPTIMIZER, "the model is an instance of Task"),
}


class Wide(nnx.Module):
    def __init__(self, width, rngs):
        self.linear = nnx.Linear(width, 2, rngs=rngs)


WRONG_CALLS = {
    "language_modeling: an unknown cut": (lambda: jt.language_modeling(logits="vocab"), "use auto, whole"),
    "language_modeling: a block of 0": (lambda: jt.language_modeling(logits="tokens", block=0), "loss.block=0"),
    "from_nnx: more arguments": (lambda: jt.from_nnx(Wide), r"lambda rngs: Wide\(width=width, rngs=rngs\)"),
    "from_nnx: no module": (lambda: jt.from_nnx(lambda rngs: {"w": 1}), "returns an nnx.Module, not dict"),
    "from_nnx: a number": (lambda: jt.from_nnx(3), "takes a function"),
    "from_linen: a class": (lambda: jt.from_linen(Linen, X), r"from_linen\(Linen\(\), example_inputs\)"),
    "from_linen: NNX": (lambda: jt.from_linen(Nnx(nnx.Rngs(0)), X), "takes a module of flax.linen"),
    "from_functions: arrays": (lambda: jt.from_functions({"w": X}, lambda params, x: x), "takes two functions"),
    "run_config: rows": (lambda: jt.run_config("digits_mlp", data=ArrayRows({"inputs": X})), "not a jaxtrain.Data"),
    "run_config: a function": (
        lambda: jt.run_config("digits_mlp", task=jt.classification),
        r"jaxtrain\.classification\(\)",
    ),
    "run_config: a module": (lambda: jt.run_config("digits_mlp", model=Nnx), "from_nnx"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_a_call_with_something_else_is_one_line(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, message = WRONG_CALLS[case]
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", WRONG_PARTS)
def test_a_part_of_another_kind_is_one_line(case):
    model, task, optimizer, message = WRONG_PARTS[case]
    with pytest.raises(ConfigError, match=message) as caught:
        jt.make_train_step(model, task, optimizer, mesh=one_device())
    assert "\n" not in str(caught.value)


WRONG_ROWS = {
    "a dict": (lambda: jt.Batches({"inputs": X}, 2, seed=0, shuffle=True), "ArrayRows"),
    "an array": (lambda: jt.Batches(X, 2, seed=0, shuffle=True), "rows with an index"),
    "no entry": (lambda: ArrayRows({}), "it got none"),
    "sources with and without weights": (
        lambda: ConcatenatedRows([ArrayRows({"inputs": X}), ArrayRows({"inputs": X, "weights": X[:, 0]})]),
        "the sources hold different rows",
    ),
    "lengths that differ": (lambda: ArrayRows({"inputs": X, "targets": Y[:3]}), "inputs has 4, targets has 3 rows"),
    "rows of other entries": (
        lambda: jt.Batches(grain.MapDataset.source([{"inputs": X[0]}, {"x": X[0]}]), 2, seed=0, shuffle=True).load(
            0, {"inputs": jax.sharding.SingleDeviceSharding(jax.devices()[0])}
        ),
        "rows hold different entries",
    ),
    "rows of other shapes": (
        lambda: jt.Batches(
            grain.MapDataset.source([{"inputs": X[0]}, {"inputs": X[0, :2]}]), 2, seed=0, shuffle=True
        ).load(0, {"inputs": jax.sharding.SingleDeviceSharding(jax.devices()[0])}),
        "rows hold inputs of shapes",
    ),
}


@pytest.mark.parametrize("case", WRONG_ROWS)
def test_rows_of_another_kind_are_one_line(case):
    make, message = WRONG_ROWS[case]
    with pytest.raises(DataError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
