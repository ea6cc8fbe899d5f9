"""Which losses accumulation may divide: those that mix rows are refused, and no loss whose rows are separate."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt

ROWS, WIDTH = 16, 8


def numbers(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


BATCH = {
    "inputs": numbers(ROWS, WIDTH),
    "targets": np.arange(ROWS) % WIDTH,
    "reward": np.abs(numbers(ROWS)) + 0.1,
}


def init(key):
    kernel = jax.random.normal(key, (WIDTH, WIDTH)) / 3
    return {"kernel": kernel, "scale": jnp.ones(()), "prototypes": kernel.T}


MODELS = {
    "plain": lambda p, x: x @ p["kernel"],
    "temperature": lambda p, x: {"a": x @ p["kernel"], "b": jnp.tanh(x @ p["kernel"]), "scale": p["scale"]},
    "two_views": lambda p, x: jnp.concatenate([x @ p["kernel"], jnp.tanh(x) @ p["kernel"]]),
    "matrix": lambda p, x: (x @ p["kernel"]) @ (x @ p["kernel"]).T,
    "prototypes": lambda p, x: {"z": x @ p["kernel"], "prototypes": p["prototypes"]},
}


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def pairs(outputs, batch):
    logits = outputs["a"] @ outputs["b"].T * outputs["scale"]
    return cross_entropy(logits, jnp.arange(len(logits))), {}


def views(outputs, batch):
    count = len(outputs)
    logits = outputs @ outputs.T - 1e9 * jnp.eye(count)
    losses = cross_entropy(logits, (jnp.arange(count) + count // 2) % count)
    return jnp.sum(losses), jnp.float32(count), {}


def baseline(outputs, batch):
    advantage = batch["reward"] - jnp.mean(batch["reward"])
    return cross_entropy(outputs, batch["targets"]) * advantage, {}


def preferences(apply, batch, key):
    chosen, rejected = jnp.split(apply(jnp.concatenate([batch["inputs"], -batch["inputs"]])), 2)
    return jnp.sum(jax.nn.softplus(rejected - chosen), axis=-1), {}


def to_prototypes(outputs, batch):
    return cross_entropy(outputs["z"] @ outputs["prototypes"].T, batch["targets"]), {}


def task(loss, **options):
    return jt.Task("mine", loss, **options)


SEPARATE = {
    "prototypes": (task(to_prototypes), "prototypes"),
    "preference_pairs_in_one_call": (jt.Task.calling("mine", preferences), "plain"),
    "global_with_temperature": (task(pairs, rows="global"), "temperature"),
    "global_with_targets": (
        task(lambda outputs, batch: (cross_entropy(outputs["a"], batch["targets"]), {}), rows="global"),
        "temperature",
    ),
}
REFUSED = {
    "temperature": (task(pairs), "temperature", "mixes rows"),
    "baseline_of_the_batch": (task(baseline), "plain", "mixes rows"),
    "a_matrix_of_rows": (task(lambda outputs, batch: (jnp.mean(outputs, 1), {})), "matrix", "mixes rows"),
    "two_views": (task(views), "two_views", "mixes rows"),
    "global_with_two_views": (task(views, rows="global"), "two_views", "two views as a dict of two"),
}


def first_step(task, model, microbatches):
    step = jt.make_train_step(
        jt.from_functions(init, MODELS[model]),
        task,
        optax.sgd(0.1),
        accumulation_steps=microbatches,
        mesh=jt.make_mesh(devices=jax.devices()[:1]),
    )
    _, metrics = step(step.init(0), BATCH)
    return [float(metrics[name]) for name in ("loss", "grad_norm")]


@pytest.mark.parametrize("case", SEPARATE)
def test_microbatches_give_the_loss_of_the_batch(case):
    # In float32, the order of sums.
    np.testing.assert_allclose(first_step(*SEPARATE[case], 4), first_step(*SEPARATE[case], 1), rtol=2e-6)


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_microbatches_would_change_is_refused(case):
    *parts, words = REFUSED[case]
    with pytest.raises(jt.ConfigError, match=words):
        first_step(*parts, 2)


def test_evaluation_keeps_outputs_without_rows_whole():
    """The prototypes have as many rows as a batch of 8, of which the last one is filled up."""
    step = jt.make_train_step(jt.from_functions(init, MODELS["prototypes"]), task(to_prototypes), optax.sgd(0.1))
    mesh = jt.make_mesh(devices=jax.devices()[:1])
    evaluate = jt.Evaluator(jt.shard_model(step.model, mesh=mesh), step.task)
    params, _ = step.model.init(jax.random.key(0))
    rows = jt.ArrayRows({name: BATCH[name][:13] for name in ("inputs", "targets")})
    batches = jt.Batches(rows, 8, seed=0, shuffle=False)
    found = evaluate(jt.EvaluationState(params, {}), [evaluate.feed.loader(batches)(k) for k in range(len(batches))])
    losses, _ = to_prototypes(MODELS["prototypes"](params, BATCH["inputs"][:13]), {"targets": BATCH["targets"][:13]})
    assert found["eval_loss"] == pytest.approx(float(jnp.mean(losses)), rel=1e-6)


def test_evaluation_computes_outputs_of_rows_by_rows_of_the_real_rows():
    mesh = jt.make_mesh(devices=jax.devices()[:1])
    model = jt.from_functions(init, MODELS["matrix"])

    def similar(outputs, batch):
        return jnp.sum(outputs), jnp.float32(1), {}

    evaluate = jt.Evaluator(jt.shard_model(model, mesh=mesh), task(similar, rows="global"))
    params, _ = model.init(jax.random.key(0))
    weights = np.ones(8, np.float32)
    weights[5:] = 0
    batch = {"inputs": BATCH["inputs"][:8], "targets": BATCH["targets"][:8], "weights": weights}
    found = evaluate(jt.EvaluationState(params, {}), [batch])
    wanted = float(jnp.sum(MODELS["matrix"](params, BATCH["inputs"][:5])))
    assert found["eval_loss"] == pytest.approx(wanted, rel=1e-4)  # sums of both signs


@pytest.mark.long
def test_losses_per_row_beside_targets_per_token():
    """`Batches` weighs each token of integer targets; a row that fills the batch up has weights of 0 only."""

    def loss(outputs, batch):
        return jnp.mean(cross_entropy(outputs, batch["targets"]), axis=-1), {}

    model = jt.from_functions(lambda key: {"w": jax.random.normal(key, (WIDTH, 4))}, lambda p, x: x @ p["w"])
    rows = {"inputs": numbers(11, 6, WIDTH), "targets": np.arange(66).reshape(11, 6) % 4}
    step = jt.make_train_step(model, task(loss), optax.sgd(0.1), mesh=jt.make_mesh(devices=jax.devices()[:1]))
    batches = jt.Batches(jt.ArrayRows(rows), 8, seed=0, shuffle=False)
    state = step.init(0)
    found = jt.Evaluator(step)(state, [step.loader(batches)(k) for k in range(len(batches))])
    wanted = jnp.mean(cross_entropy(rows["inputs"] @ jax.device_get(state.params["w"]), rows["targets"]))
    assert found["eval_loss"] == pytest.approx(float(wanted), rel=1e-6)


def two_per_row(apply, batch, key):
    """Two inputs per row, one behind the other, as the answers of a pair."""
    both = jnp.stack([batch["inputs"], 2 * batch["inputs"]], axis=1)
    outputs = apply(both.reshape(-1, WIDTH)).reshape(-1, 2, WIDTH)
    return jnp.sum(jnp.square(outputs[:, 0] - outputs[:, 1]), axis=-1), {}


def two_per_row_mixed(apply, batch, key):
    both = jnp.stack([batch["inputs"], 2 * batch["inputs"]], axis=1)
    outputs = apply(both.reshape(-1, WIDTH)).reshape(-1, 2, WIDTH)
    return jnp.sum(jnp.square(outputs[:, 0] - jnp.mean(outputs[:, 1], axis=0)), axis=-1), {}


def test_inputs_of_a_row_may_be_one_behind_the_other():
    model = jt.from_functions(lambda key: {"w": jnp.eye(WIDTH)}, lambda params, x: x @ params["w"])
    mesh = jt.make_mesh(devices=jax.devices()[:1])
    separate, mixed = (
        jt.make_train_step(model, jt.Task.calling("two", loss), optax.sgd(0.1), mesh=mesh, accumulation_steps=2)
        for loss in (two_per_row, two_per_row_mixed)
    )
    separate.trace(BATCH)
    with pytest.raises(jt.ConfigError, match="mixes rows"):
        mixed.trace(BATCH)
