"""Losses and metrics against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.errors import ConfigError
from jaxtrain.models.task import Task, task_sums
from jaxtrain.models.tasks import classification, cross_entropy, language_modeling, regression
from jaxtrain.ops.loss import cross_entropy as losses
from jaxtrain.train.update import mean_metrics


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


@jax.jit
def losses_and_gradient(logits):
    def total(logits):
        losses = cross_entropy(logits, TARGETS)
        return jnp.sum(losses), losses

    gradient, losses = jax.grad(total, has_aux=True)(logits)
    return losses, gradient


@pytest.mark.parametrize("logits", CASES.values(), ids=CASES)
def test_cross_entropy(logits):
    found, gradient = losses_and_gradient(logits)
    # fp32 against float64 of the same fp32 logits.
    np.testing.assert_allclose(found, reference(logits, TARGETS), rtol=1e-5, atol=1e-6)
    exact = logits.astype(np.float64)
    weights = np.exp(exact - exact.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) - (np.arange(5) == TARGETS[:, None])
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("by", [None, "vocabulary"])
@pytest.mark.parametrize("wrong", [LOGITS.shape[-1], -1])
def test_an_id_that_no_logit_has_is_no_number(by, wrong):
    """Without a logit of its own its loss would be that of any other: classes that are counted from 1."""
    logits = jt.DeferredLogits(jnp.asarray(LOGITS)[None], jnp.eye(LOGITS.shape[-1]))
    targets = jnp.asarray([[0, wrong, -100]])

    @jax.jit
    def run(weights):
        return jt.cross_entropy(logits, targets, by=by), jt.cross_entropy_sums(logits, targets, weights, by=by).total

    for weight in (0.0, 1.0):  # 0 is what people pad with
        losses, total = run(jnp.asarray([[1.0, weight, 1.0]]))
        np.testing.assert_array_equal(np.isnan(losses), [[False, True, False]])
        assert losses[0, 2] == 0
        np.testing.assert_allclose(total, np.nan if weight else losses[0, 0], rtol=1e-6)


def test_language_modeling_sums_over_weighted_tokens():
    logits, targets = RNG.normal(size=(2, 3, 5)).astype(np.float32), np.array([[0, 1, 2], [3, 4, 0]], np.int32)
    weights = np.array([[1, 0, 0.5], [1, 1, 0]], np.float32)
    total, weight, metrics = language_modeling().loss(logits, {"targets": targets, "weights": weights})
    assert (float(weight), metrics) == (3.5, {})
    np.testing.assert_allclose(total, np.sum(reference(logits, targets) * weights), rtol=1e-6)  # a sum of 6


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


@pytest.mark.parametrize(("outputs", "targets", "errors"), REGRESSION.values(), ids=REGRESSION)
def test_regression(outputs, targets, errors):
    outputs, targets = jnp.asarray(outputs), np.array(targets, np.float32)
    total, weight, metrics = regression().loss(outputs, {"targets": targets})
    assert (float(total), float(weight), metrics) == (np.sum(errors), 2, {})
    weights = np.array([0.5, 2.0], np.float32)
    total, weight, _ = regression().loss(outputs, {"targets": targets, "weights": weights})
    assert (float(total), float(weight)) == (np.sum(errors * weights), 2.5)


def test_outputs_of_another_width_are_refused():
    with pytest.raises(ConfigError, match=r"targets \[4, 1\] do not fit outputs \[4, 2\]"):
        regression().loss(jnp.zeros((4, 2)), {"targets": np.zeros((4, 1), np.float32)})


def test_losses_of_each_row_with_every_other_are_refused():
    """Outputs [B, 1] against targets [B] are [B, B], and trained to the mean of all targets in silence."""
    task = Task("squares", lambda outputs, batch: jnp.square(outputs - batch["targets"]))
    batch = {"inputs": jnp.ones((8, 8)), "targets": jnp.arange(8.0)}
    with pytest.raises(ConfigError, match=r"losses \[8, 8\].*\[8, 1\], \[8\]"):
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
    _, _, sums = jax.jit(task.loss)(logits, {"targets": targets, "weights": weights})
    found = mean_metrics(sums)
    kept = {"sample_weight": weights}
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(targets, said, **kept))
    assert found["top_2"] == pytest.approx(metrics.top_k_accuracy_score(targets, logits, k=2, **kept))
    expected = metrics.precision_recall_fscore_support(targets, said, average="macro", **kept)[:3]
    np.testing.assert_allclose([found[f"macro_{name}"] for name in ("precision", "recall", "f1")], expected, rtol=1e-5)


# Targets and predictions of 2 or 4 classes.
OCCURRENCES = {
    "a class is never predicted": (4, [0, 1, 2, 3, 3, 1], [0, 1, 2, 2, 1, 1]),
    "a class is predicted and never occurs": (4, [0, 1, 2, 2, 1, 0], [0, 3, 2, 3, 1, 2]),
    "a class does neither": (4, [0, 1, 1, 3, 3, 0], [0, 1, 3, 3, 0, 0]),
    "all three": (4, [0, 0, 1, 1, -100, 0], [0, 2, 0, 0, 3, 0]),
    "class 1 of two is never predicted": (2, [0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0]),
    "class 1 of two is neither": (2, [0, 0, 0, 0, -100, 0], [0, 0, 0, 0, 1, 0]),
    "class 1 of two never occurs": (2, [0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 1, 0]),
}


@pytest.mark.filterwarnings("ignore:.*ill-defined")
@pytest.mark.parametrize(("classes", "targets", "said"), OCCURRENCES.values(), ids=OCCURRENCES)
def test_means_over_classes_are_those_of_scikit_learn_however_rows_are_divided(classes, targets, said):
    metrics = pytest.importorskip("sklearn.metrics")
    columns = {"inputs": np.eye(classes, dtype=np.float32)[said], "targets": np.array(targets)}
    counts = columns["targets"] >= 0
    names, average = ("precision", "recall", "f1"), "binary" if classes == 2 else "macro"
    scores = metrics.precision_recall_fscore_support(np.array(targets)[counts], np.array(said)[counts], average=average)
    model = jt.from_functions(lambda key: {"w": jnp.zeros(())}, lambda params, x: x + params["w"])
    mesh = jt.make_mesh(data=2, devices=jax.devices()[:2])
    step = jt.make_train_step(model, classification(metrics=names), optax.sgd(0.0), mesh=mesh)
    batches = jt.Batches(jt.ArrayRows(columns), 4, seed=0, shuffle=False)  # the last one is filled up
    found = jt.Evaluator(step)(step.init(0), [step.loader(batches)(k) for k in range(2)])
    prefix = "eval_" if classes == 2 else "eval_macro_"
    np.testing.assert_allclose([found[f"{prefix}{name}"] for name in names], scores[:3], rtol=1e-6)


def test_smoothing_and_class_weights_are_those_of_optax_and_by_hand():
    draw = np.random.default_rng(1)
    logits, targets = draw.normal(size=(20, 3)).astype(np.float32), draw.integers(0, 3, 20)
    batch, by_class = {"targets": targets}, np.array([1.0, 2.0, 0.5])

    @jax.jit
    def run(logits):
        smooth = optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(targets, 3), 0.2))
        tasks = (jt.classification(label_smoothing=0.2), jt.classification(class_weights=by_class))
        return *(task.loss(logits, batch) for task in tasks), jnp.mean(smooth)

    (smoothed, count, _), (total, weight, sums), expected = run(logits)
    assert float(smoothed / count) == pytest.approx(float(expected), rel=1e-5)
    by_hand = np.average(reference(logits, targets), weights=by_class[targets])
    assert float(total / weight) == pytest.approx(by_hand, rel=1e-5)
    assert sums["accuracy"][1] == 20


def test_errors_by_name_are_those_of_optax():
    outputs, targets = np.array([[0.5, 3.0], [1.0, -1.0]]), np.array([[0.0, 1.0], [1.0, 2.0]])
    total, weight, sums = jax.jit(jt.regression("huber", metrics=["mae", "mse"]).loss)(outputs, {"targets": targets})
    assert float(total / weight) == pytest.approx(float(jnp.mean(optax.huber_loss(outputs, targets))))
    assert float(sums["mae"][0] / weight) == pytest.approx(np.mean(np.abs(outputs - targets)))
    assert float(sums["mse"][0] / weight) == pytest.approx(np.mean(np.square(outputs - targets)))
    with pytest.raises(ConfigError, match="there is no metric 'f1'"):
        jt.regression(metrics=["f1"])


# Tasks of hidden and tagged tokens.
HIDDEN = RNG.normal(size=(2, 12, 8)).astype(np.float32)
KERNEL = RNG.normal(size=(8, 32)).astype(np.float32)
TOKEN_TARGETS = np.where(RNG.random((2, 12)) < 0.4, RNG.integers(0, 32, (2, 12)), -100).astype(np.int32)


def deferred():
    return jt.DeferredLogits(jnp.asarray(HIDDEN), jnp.asarray(KERNEL))


@pytest.mark.parametrize("make", [jt.masked_language_modeling, jt.sequence_to_sequence], ids=["masked", "pairs"])
@pytest.mark.parametrize("logits", ["whole", "deferred"])
def test_only_tokens_with_a_target_count(make, logits):
    outputs = jnp.asarray(HIDDEN @ KERNEL) if logits == "whole" else deferred()
    task = make()
    total, weight, metrics = jax.jit(task.evaluation)(outputs, {"targets": TOKEN_TARGETS})
    counted = TOKEN_TARGETS >= 0
    plain = reference((HIDDEN @ KERNEL)[counted], TOKEN_TARGETS[counted])
    assert float(weight) == counted.sum()
    np.testing.assert_allclose(total, plain.sum(), rtol=1e-5)  # sums of about ten float32 numbers
    correct = ((HIDDEN @ KERNEL).argmax(-1) == TOKEN_TARGETS)[counted].sum()
    assert [float(value) for value in metrics["accuracy"]] == [correct, counted.sum()]
    # Training computes the loss alone: the accuracy would take the logits once more.
    assert jax.eval_shape(task.loss, outputs, {"targets": TOKEN_TARGETS})[2] == {}


def test_accuracy_in_blocks_is_that_of_all_logits(monkeypatch):
    weights = np.where(TOKEN_TARGETS >= 0, RNG.random((2, 12)), 0).astype(np.float32)
    best = (HIDDEN @ KERNEL).argmax(-1)
    targets = np.where(RNG.random((2, 12)) < 0.5, best, 0).astype(np.int32)
    whole = losses.weight_of_right(deferred(), targets, weights)
    for positions in (3, 5):  # 5 does not divide 12: blocks of 4
        monkeypatch.setattr(losses, "_BLOCK_BYTES", 4 * 2 * 32 * positions)
        np.testing.assert_allclose(losses.weight_of_right(deferred(), targets, weights), whole, rtol=1e-6)
    np.testing.assert_allclose(whole, weights[best == targets].sum(), rtol=1e-6)  # float32 sums in another order


def test_tags_are_classes_of_tokens():
    logits, targets = HIDDEN[..., :5], np.where(TOKEN_TARGETS >= 0, TOKEN_TARGETS % 5, -100).astype(np.int32)
    task = jt.token_classification()
    found, plain = (jax.jit(one.loss)(logits, {"targets": targets}) for one in (task, jt.classification()))
    jax.tree.map(np.testing.assert_array_equal, found, plain)
    assert float(found[1]) == (targets >= 0).sum()
    assert task.batch_axes["inputs"] == ("batch", "sequence")
