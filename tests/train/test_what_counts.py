"""What counts in a loss: own weights, ignored targets, the filling of a last batch, on every way to evaluate."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxtrain as jt
from jaxtrain.data.rows import ArrayRows
from jaxtrain.errors import DataError

RNG = np.random.default_rng(0)
TINY = {"kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 8}
X = np.ones((4, 3), np.float32)


def one_device():
    return jt.make_mesh(devices=jax.devices()[:1])


def linear(outputs: int):
    """x [B, 3] @ ones: the outputs are the sums of the rows."""
    return jt.from_functions(lambda key: {"w": jnp.ones((3, outputs))}, lambda params, x: x @ params["w"])


def evaluate(model, task, rows, *, size, mesh=None, **options):
    step = jt.make_train_step(model, task, optax.sgd(0.0), mesh=mesh or one_device(), **options)
    batches = jt.Batches(rows, size, seed=0, shuffle=False)
    load = step.loader(batches)
    return jt.Evaluator(step)(step.init(0), [load(k) for k in range(len(batches))])


def language_model(num_layers: int = 1):
    return jt.build_model({**TINY, "num_layers": num_layers}, input_shape=(8,), vocab_size=32)


def token_rows(count: int, **more):
    ids = RNG.integers(0, 32, (count, 9)).astype(np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:], **more}


@pytest.fixture(scope="module")
def language_step():
    """A language model whose parameters stay, on one device."""
    return jt.make_train_step(language_model(), jt.language_modeling(), optax.sgd(0.0), mesh=one_device())


@pytest.fixture(scope="module")
def evaluate_texts(language_step):
    """The mean loss of rows in batches of 4, the last of which is filled up."""
    evaluator, state = jt.Evaluator(language_step), language_step.init(0)

    def evaluate(columns):
        batches = jt.Batches(ArrayRows(columns), 4, seed=0, shuffle=False)
        load = language_step.loader(batches)
        return evaluator(state, [load(k) for k in range(len(batches))])["eval_loss"]

    return evaluate


def test_a_row_s_own_weights_count_in_evaluation_as_in_training(language_step, evaluate_texts):
    weights = (RNG.random((6, 8)) > 0.5).astype(np.float32) * 2
    columns = token_rows(6, weights=weights)
    _, metrics = language_step(language_step.init(0), columns)
    assert float(metrics["weight"]) == weights.sum()
    # fp32 sums of 48 terms in another order.
    np.testing.assert_allclose(evaluate_texts(columns), metrics["loss"], rtol=1e-6)
    # A mean over no weight.
    assert np.isnan(evaluate_texts({**columns, "weights": 0 * weights}))


def test_a_loss_finds_weights_in_training_as_in_evaluation():
    def loss(outputs, batch):
        return jnp.sum(outputs[:, 0] * batch["weights"]), jnp.sum(batch["weights"]), {}

    inputs = RNG.normal(size=(4, 3)).astype(np.float32)
    columns = {"inputs": inputs, "targets": np.zeros((4, 2), np.float32)}
    step = jt.make_train_step(linear(2), jt.Task("own", loss, reads_weights=True), optax.sgd(0.0), mesh=one_device())
    state, metrics = step(step.init(0), columns)
    found = jt.Evaluator(step)(state, [step.loader(jt.Batches(ArrayRows(columns), 4, seed=0, shuffle=False))(0)])
    np.testing.assert_allclose([metrics["loss"], found["eval_loss"]], inputs.sum(1).mean(), rtol=1e-5)


def test_a_weight_per_row_weighs_every_token_of_the_row(language_step):
    columns = token_rows(6)
    by_row, by_token = np.array([0, 1, 2, 0.5, 0, 0], np.float32), np.ones((6, 8), np.float32)
    one, two = (
        language_step(language_step.init(0), {**columns, "weights": weights})[1]
        for weights in (by_row, by_row[:, None] * by_token)
    )
    np.testing.assert_allclose(one["loss"], two["loss"], rtol=1e-6)
    assert float(one["weight"]) == float(two["weight"]) == 3.5 * 8


@pytest.mark.parametrize(
    ("logits", "layout"),
    [
        ("whole", {}),
        ("tokens", {}),
        pytest.param("vocabulary", {"data": 2, "tensor": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_targets_of_minus_100_are_ignored_as_weight_0_is(logits, layout):
    columns = token_rows(4)
    ignored = RNG.random((4, 8)) > 0.5
    task = jt.language_modeling(logits=logits, block=None if logits == "whole" else 8)
    mesh = jt.make_mesh(**layout, devices=jax.devices()[: 4 if layout else 1])
    step = jt.make_train_step(language_model(), task, optax.sgd(0.1), mesh=mesh)
    negative = np.where(ignored, -100, columns["targets"]).astype(np.int32)
    masked = {**columns, "targets": negative, "weights": np.ones((4, 8), np.float32)}
    weighted = {**columns, "weights": (~ignored).astype(np.float32)}
    (state, found), (same, wanted) = step(step.init(0), masked), step(step.init(0), weighted)
    assert float(found["weight"]) == (~ignored).sum()
    # One program, and the ignored targets differ in nothing that it adds up.
    assert float(found["loss"]) == float(wanted["loss"])
    chex.assert_trees_all_equal(state.params, same.params)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_an_own_loss_sees_every_integer_target_but_minus_100(dtype):
    squares = jt.Task("squares", lambda outputs, batch: jnp.square(outputs[:, 0] - batch["targets"]))
    targets = np.array([-99, -1, 0, 5, -100, -101, 7, -3], dtype)
    columns = {"inputs": RNG.normal(size=(8, 3)).astype(np.float32), "targets": targets}
    counts = targets != -100
    wanted = np.mean((columns["inputs"].sum(1) - targets)[counts] ** 2)
    step = jt.make_train_step(linear(1), squares, optax.sgd(0.0), mesh=one_device())
    _, metrics = step(step.init(0), columns)
    assert float(metrics["weight"]) == 7
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    np.testing.assert_allclose(evaluate(linear(1), squares, ArrayRows(columns), size=4)["eval_loss"], wanted, rtol=1e-5)
    # Numbers without a sign have no -100, and floats are no ids.
    for other in (np.uint8, np.float32):
        positive = {**columns, "targets": np.abs(targets).astype(other) + 56}
        assert float(step(step.init(0), positive)[1]["weight"]) == 8


LABELS = np.array([1, -1, -1, 1])


@pytest.mark.parametrize("task", [jt.classification(), jt.token_classification(), jt.language_modeling()], ids=repr)
def test_labels_of_minus_1_are_refused_on_the_host_and_no_number_on_the_device(task):
    targets = LABELS if task.name == "classification" else np.stack([LABELS] * 3, axis=-1)
    inputs = np.ones((*targets.shape, 3), np.float32)
    step = jt.make_train_step(linear(2), task, optax.sgd(0.1), mesh=one_device())
    message = r"targets of -1, but the model has ids 0 to 1; write -100 where .* number classes from 0, as np\.unique"
    with pytest.raises(DataError, match=message):
        step(step.init(0), {"inputs": inputs, "targets": targets})
    ignored = np.where(targets < 0, -100, targets)
    _, metrics = step(step.init(0), {"inputs": inputs, "targets": ignored})
    assert float(metrics["weight"]) == (targets > 0).sum()
    # A mask may hide any number.
    masked = {"inputs": inputs, "targets": targets, "weights": (targets > 0).astype(np.float32)}
    assert float(step(step.init(0), masked)[1]["loss"]) == float(metrics["loss"])
    _, metrics = step(step.init(0), jax.device_put({"inputs": inputs, "targets": targets}, one_device().devices.item()))
    assert np.isnan(metrics["loss"])
    assert int(metrics["skipped_steps"]) == 1


def plain(name: str = "plain"):
    """A task that knows nothing of weights."""

    def loss(outputs, batch):
        return jnp.sum(outputs[:, 0]), jnp.float32(outputs.shape[0]), {"columns": (jnp.sum(outputs, 0), len(outputs))}

    return jt.Task(name, loss)


def test_a_task_that_reads_no_weights_does_not_see_the_filling():
    inputs = RNG.normal(size=(9, 3)).astype(np.float32)
    rows = ArrayRows({"inputs": inputs, "targets": np.zeros((9, 2), np.float32)})
    mesh = jt.make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])
    found = evaluate(linear(2), plain(), rows, size=8, mesh=mesh)
    np.testing.assert_allclose(found["eval_loss"], inputs.sum(1).mean(), rtol=1e-5)
    # A vector metric is a vector.
    np.testing.assert_allclose(found["eval_columns"], [inputs.sum(1).mean()] * 2, rtol=1e-5)


# Nested entries, scalars and vectors.


@pytest.mark.parametrize(
    ("layout", "accumulation"),
    [({"data": 2}, 2), pytest.param({"data": 2, "pipe": 2}, 2, marks=pytest.mark.long)],
    ids=str,
)
def test_a_scalar_of_a_batch_reaches_every_microbatch(layout, accumulation):
    def loss(outputs, batch):
        rows = batch["targets"].shape[0]
        return jnp.sum(batch["targets"]) * batch["temperature"] + 0 * jnp.sum(outputs), jnp.float32(rows), {}

    mesh = jt.make_mesh(**layout, devices=jax.devices()[: 2 ** len(layout)])
    model = language_model(2) if "pipe" in layout else linear(1)
    step = jt.make_train_step(
        model, jt.Task("scaled", loss), optax.sgd(0.1), mesh=mesh, accumulation_steps=accumulation
    )
    batch = token_rows(4)
    inputs = batch["inputs"] if "pipe" in layout else np.ones((4, 3), np.float32)
    _, metrics = step(step.init(0), {**batch, "inputs": inputs, "temperature": 2.5})
    np.testing.assert_allclose(metrics["loss"], 2.5 * batch["targets"].sum() / 4, rtol=1e-6)


# Weights of either sign, narrow ids, numbers that are missing or too large.


def test_signed_weights_give_one_gradient_however_the_batch_is_divided():
    inputs = RNG.normal(size=(8, 3)).astype(np.float32)
    steps = [
        jt.make_train_step(
            linear(2),
            jt.regression(),
            optax.sgd(0.1),
            mesh=jt.make_mesh(data=size, devices=jax.devices()[:size]),
            accumulation_steps=accumulation,
        )
        for size, accumulation in ((1, 1), (1, 2), (2, 2))
    ]
    for weights in ([1, 1, 1, -2] * 2, [2, 1, -1, -3] * 2, [1e-11] * 8, [1, -1, 1, 1] * 2):
        batch = {"inputs": inputs, "targets": np.zeros((8, 2), np.float32), "weights": np.array(weights, np.float32)}
        found = [step(step.init(0), batch)[1] for step in steps]
        rows = inputs.sum(1)
        wanted = np.sum(rows**2 * weights) / (np.sum(weights) or 1)
        # fp32 sums in another order, of terms that cancel.
        np.testing.assert_allclose([one["loss"] for one in found], wanted, rtol=1e-4, atol=1e-5)
        norms = [float(one["grad_norm"]) for one in found]
        np.testing.assert_allclose(norms, norms[0], rtol=1e-4, atol=1e-5)


def test_integers_of_more_than_32_bits_are_refused():
    columns = {"inputs": X, "targets": np.full((4, 3), 3_000_000_000)}
    step = jt.make_train_step(linear(3), jt.regression(), optax.sgd(0.1), mesh=one_device())
    with pytest.raises(DataError, match="targets of 3000000000, outside the range of int32"):
        step(step.init(0), columns)
    with pytest.raises(DataError, match="outside the range of int32"):
        step.loader(jt.Batches(ArrayRows(columns), 4, seed=0, shuffle=True))(0)


def test_a_batch_that_lies_elsewhere_on_the_devices_is_moved():
    """A compiled program takes arrays that are sharded as it was compiled for, and no others."""
    batch = {"inputs": X, "targets": np.ones((4, 1), np.float32)}
    devices = jax.devices()[:2]
    step = jt.make_train_step(linear(1), jt.regression(), optax.sgd(0.0), mesh=jt.make_mesh(data=2, devices=devices))
    step.compile(batch)
    state, evaluator = step.init(0), jt.Evaluator(step)
    replicated = NamedSharding(step.mesh, PartitionSpec())
    turned = NamedSharding(jax.make_mesh((2,), ("rows",), devices=devices[::-1]), PartitionSpec("rows"))
    for place in (devices[0], replicated, turned):
        moved = jax.device_put(batch, place)
        state, metrics = step(state, moved)
        assert float(metrics["loss"]) == evaluator(state, [moved])["eval_loss"] == 4.0
