"""Losses and metrics against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.errors import ConfigError
from jaxtrain.models.task import Task
from jaxtrain.models.task_sums import task_sums
from jaxtrain.models.tasks import TASKS, classification, cross_entropy, language_modeling, regression


def reference(logits, targets):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(log_probabilities, np.asarray(targets)[..., None], -1)[..., 0]


RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(3, 5)).astype(np.float32)
TARGETS = np.array([0, 4, 2], np.int32)

CASES = {
    "ordinary": LOGITS,
    "all equal": np.zeros((3, 5), np.float32),
    "large": LOGITS * 1e4,
    "near the end of fp32": np.eye(3, 5, dtype=np.float32) * 3e38,
    "large offset": LOGITS + 1e4,
    "very negative": LOGITS - 1e30,
}


@pytest.mark.parametrize("logits", CASES.values(), ids=CASES)
def test_cross_entropy(logits):
    found, gradient = jax.value_and_grad(lambda x: jnp.sum(cross_entropy(x, TARGETS)))(logits)
    # fp32 against float64 of the same fp32 logits.
    np.testing.assert_allclose(cross_entropy(logits, TARGETS), reference(logits, TARGETS), rtol=1e-5, atol=1e-6)
    assert np.isfinite(found)
    assert np.all(np.isfinite(gradient))
    # Probabilities less the one-hot targets: each row sums to 0.
    np.testing.assert_allclose(np.sum(gradient, -1), 0, atol=1e-6)


@pytest.mark.parametrize("by", [None, "vocabulary"])
def test_an_id_that_no_logit_has_is_no_number(by):
    """Without a logit of its own its loss would be that of any other: classes that are counted from 1."""
    logits = jt.DeferredLogits(jnp.asarray(LOGITS)[None], jnp.eye(LOGITS.shape[-1]))
    targets = jnp.asarray([[0, LOGITS.shape[-1], -100]])
    losses = jt.cross_entropy(logits, targets, by=by)
    np.testing.assert_array_equal(np.isnan(losses), [[False, True, False]])
    for weight in (0.0, 1.0):  # 0 is what people pad with
        weights = jnp.asarray([[1.0, weight, 0.0]])
        total = jt.cross_entropy_sums(logits, targets, weights, by=by).total
        np.testing.assert_allclose(total, np.nan if weight else losses[0, 0], rtol=1e-6)


def test_cross_entropy_raises_bf16_to_float32():
    logits = jnp.asarray(LOGITS, jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        found = cross_entropy(logits, jnp.asarray(TARGETS))
    assert found.dtype == jnp.float32
    # No rounding after the logits': the same tolerance as above.
    np.testing.assert_allclose(found, reference(logits, TARGETS), rtol=1e-5, atol=1e-6)


def test_language_modeling_sums_over_weighted_tokens():
    logits, targets = RNG.normal(size=(2, 3, 5)).astype(np.float32), np.array([[0, 1, 2], [3, 4, 0]], np.int32)
    weights = np.array([[1, 0, 0.5], [1, 1, 0]], np.float32)
    total, weight, metrics = language_modeling().loss(logits, {"targets": targets, "weights": weights})
    assert (float(weight), metrics) == (3.5, {})
    np.testing.assert_allclose(total, np.sum(reference(logits, targets) * weights), rtol=1e-6)  # a sum of 6
    total, weight, _ = language_modeling().loss(logits, {"targets": targets})
    assert float(weight) == 6
    np.testing.assert_allclose(total, np.sum(reference(logits, targets)), rtol=1e-6)  # a sum of 6


def test_classification_counts_what_is_right():
    logits = np.array([[2, 0, 0], [0, 0, 1], [0, 3, 0], [9, 0, 0]], np.float32)
    targets, weights = np.array([0, 1, 1, 2], np.int32), np.array([1, 1, 0.5, 0], np.float32)
    total, weight, metrics = classification().loss(logits, {"targets": targets, "weights": weights})
    np.testing.assert_allclose(total, np.sum(reference(logits, targets) * weights), rtol=1e-6)  # a sum of 4
    assert float(weight) == 2.5
    assert tuple(map(float, metrics["accuracy"])) == (1.5, 2.5)


# outputs, targets, mean squared error of each row
REGRESSION = {
    "one column": ([[1.0], [4.0]], [[0.0], [2.0]], [1.0, 4.0]),
    "targets without a column": ([[1.0], [4.0]], [0.0, 2.0], [1.0, 4.0]),
    "two columns": ([[1.0, 3.0], [4.0, 0.0]], [[0.0, 0.0], [2.0, 0.0]], [5.0, 2.0]),
}


@pytest.mark.parametrize("weights", [None, [1.0, 0.0], [0.5, 2.0]], ids=["no weights", "padded", "weighted"])
@pytest.mark.parametrize(("outputs", "targets", "errors"), REGRESSION.values(), ids=REGRESSION)
def test_regression(outputs, targets, errors, weights):
    batch = {"targets": np.array(targets, np.float32)}
    if weights is not None:
        batch["weights"] = np.array(weights, np.float32)
    total, weight, metrics = regression().loss(jnp.asarray(outputs), batch)
    used = np.ones(2) if weights is None else np.array(weights)
    assert (float(total), float(weight), metrics) == (np.sum(errors * used), np.sum(used), {})


# task, outputs and targets of a row that stands for padding
PADDING = {
    "language modeling": ("language_modeling", (2, 3, 5), np.zeros((2, 3), np.int32)),
    "classification": ("classification", (2, 5), np.zeros(2, np.int32)),
    "regression": ("regression", (2, 2), np.zeros((2, 2), np.float32)),
}


@pytest.mark.parametrize(("name", "shape", "targets"), PADDING.values(), ids=PADDING)
def test_padding_does_not_matter(name, shape, targets):
    outputs = RNG.normal(size=shape).astype(np.float32)
    weights = np.ones(targets.shape if name == "language_modeling" else (2,), np.float32)
    weights[1] = 0
    loss = jax.jit(TASKS[name]().loss)

    def run(filler, label):
        padded_outputs, padded_targets = outputs.copy(), targets.copy()
        padded_outputs[1], padded_targets[1] = filler, label
        return loss(padded_outputs, {"targets": padded_targets, "weights": weights})

    assert jax.tree.map(float, run(0.0, 0)) == jax.tree.map(float, run(1e4, 3))


def test_outputs_of_another_width_are_refused():
    with pytest.raises(ConfigError, match=r"targets \[4, 1\] do not fit outputs \[4, 2\]"):
        regression().loss(jnp.zeros((4, 2)), {"targets": np.zeros((4, 1), np.float32)})


def test_losses_of_each_row_with_every_other_are_refused():
    """Outputs [B, 1] against targets [B] are [B, B], and trained to the mean of all targets in silence."""
    task = Task("squares", lambda outputs, batch: jnp.square(outputs - batch["targets"]))
    batch = {"inputs": jnp.ones((8, 8)), "targets": jnp.arange(8.0)}
    words = r"losses \[8, 8\].*outputs \[8, 1\], targets \[8\].*write outputs\[:, 0\]"
    with pytest.raises(ConfigError, match=words):
        task_sums(task, jnp.ones((8, 1)), batch, train=True)
    # A dimension that is as large as the batch by chance, and a batch of one row.
    square = {**batch, "targets": jnp.ones((8, 8))}
    assert task_sums(task, jnp.ones((8, 8)), square, train=True)[1] == 64
    one = jax.tree.map(lambda leaf: leaf[:1], batch)
    assert task_sums(task, jnp.ones((1, 1)), one, train=True)[1] == 1


def test_named_metrics_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng(0)
    logits, targets = draw.normal(size=(200, 4)).astype(np.float32), draw.integers(0, 4, 200).astype(np.int32)
    weights, said = draw.integers(0, 3, 200).astype(np.float32), logits.argmax(-1)
    task = jt.classification(metrics=["accuracy", "top_2", "precision", "recall", "f1"])
    _, _, sums = task.loss(jnp.asarray(logits), {"targets": jnp.asarray(targets), "weights": jnp.asarray(weights)})
    found = {name: np.asarray(total / weight) for name, (total, weight) in sums.items()}
    kept = {"sample_weight": weights}
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(targets, said, **kept))
    assert found["top_2"] == pytest.approx(metrics.top_k_accuracy_score(targets, logits, k=2, **kept))
    expected = metrics.precision_recall_fscore_support(targets, said, **kept)[:3]
    np.testing.assert_allclose([found[f"macro_{name}"] for name in ("precision", "recall", "f1")], expected, rtol=1e-5)


def test_smoothing_and_class_weights_are_those_of_optax_and_by_hand():
    draw = np.random.default_rng(1)
    logits, targets = jnp.asarray(draw.normal(size=(20, 3)), jnp.float32), jnp.asarray(draw.integers(0, 3, 20))
    batch, by_class = {"targets": targets}, np.array([1.0, 2.0, 0.5])
    total, weight, _ = jt.classification(label_smoothing=0.2).loss(logits, batch)
    smooth = optax.smooth_labels(jax.nn.one_hot(targets, 3), 0.2)
    assert float(total / weight) == pytest.approx(
        float(jnp.mean(optax.softmax_cross_entropy(logits, smooth))), rel=1e-5
    )
    total, weight, sums = jt.classification(class_weights=by_class).loss(logits, batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    assert float(total / weight) == pytest.approx(
        np.average(np.asarray(losses), weights=by_class[np.asarray(targets)]), rel=1e-5
    )
    assert sums["accuracy"][1] == 20


def test_errors_by_name_are_those_of_optax():
    outputs, targets = jnp.array([[0.5, 3.0], [1.0, -1.0]]), jnp.array([[0.0, 1.0], [1.0, 2.0]])
    total, weight, sums = jt.regression("huber", metrics=["mae", "mse"]).loss(outputs, {"targets": targets})
    assert float(total / weight) == pytest.approx(float(jnp.mean(optax.huber_loss(outputs, targets))))
    assert float(sums["mae"][0] / weight) == pytest.approx(float(jnp.mean(jnp.abs(outputs - targets))))
    assert float(sums["mse"][0] / weight) == pytest.approx(float(jnp.mean(jnp.square(outputs - targets))))
    with pytest.raises(ConfigError, match="there is no metric 'f1'; use mse, mae, huber"):
        jt.regression(metrics=["f1"])
