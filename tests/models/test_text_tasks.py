"""Tasks of hidden and tagged tokens: losses against those of plain classes, accuracy in blocks, equality on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.config.transformer import TransformerConfig
from jaxtrain.models.shipped.build import build_model
from jaxtrain.ops.loss import right

RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(2, 12, 8)).astype(np.float32)
KERNEL = RNG.normal(size=(8, 32)).astype(np.float32)
TARGETS = np.where(RNG.random((2, 12)) < 0.4, RNG.integers(0, 32, (2, 12)), -100).astype(np.int32)


def deferred():
    return jt.DeferredLogits(jnp.asarray(HIDDEN), jnp.asarray(KERNEL))


@pytest.mark.parametrize("make", [jt.masked_language_modeling, jt.sequence_to_sequence], ids=["masked", "pairs"])
@pytest.mark.parametrize("logits", ["whole", "deferred"])
def test_only_tokens_with_a_target_count(make, logits):
    outputs = jnp.asarray(HIDDEN @ KERNEL) if logits == "whole" else deferred()
    total, weight, metrics = make().evaluation(outputs, {"targets": TARGETS})
    counted = TARGETS >= 0
    plain = np.asarray(jt.cross_entropy(jnp.asarray((HIDDEN @ KERNEL)[counted]), jnp.asarray(TARGETS[counted])))
    assert float(weight) == counted.sum()
    np.testing.assert_allclose(total, plain.sum(), rtol=1e-5)  # sums of about ten float32 numbers
    correct = ((HIDDEN @ KERNEL).argmax(-1) == TARGETS)[counted].sum()
    assert [float(value) for value in metrics["accuracy"]] == [correct, counted.sum()]
    # Training computes the loss alone: the accuracy would take the logits once more.
    assert make().loss(outputs, {"targets": TARGETS})[2] == {}


def test_accuracy_in_blocks_is_that_of_all_logits(monkeypatch):
    weights = np.where(TARGETS >= 0, RNG.random((2, 12)), 0).astype(np.float32)
    best = (HIDDEN @ KERNEL).argmax(-1)
    targets = np.where(RNG.random((2, 12)) < 0.5, best, 0).astype(np.int32)
    whole = right.weight_of_right(deferred(), targets, weights)
    for positions in (1, 3, 5):  # 5 does not divide 12: blocks of 4
        monkeypatch.setattr(right, "_BLOCK_BYTES", 4 * 2 * 32 * positions)
        np.testing.assert_allclose(right.weight_of_right(deferred(), targets, weights), whole, rtol=1e-6)
    np.testing.assert_allclose(whole, weights[best == targets].sum(), rtol=1e-6)  # float32 sums in another order


def test_tags_are_classes_of_tokens():
    logits, targets = jnp.asarray(HIDDEN[..., :5]), np.where(TARGETS >= 0, TARGETS % 5, -100).astype(np.int32)
    task = jt.token_classification()
    found, plain = (one.loss(logits, {"targets": targets}) for one in (task, jt.classification()))
    jax.tree.map(np.testing.assert_array_equal, found, plain)
    assert float(found[1]) == (targets >= 0).sum()
    assert task.batch_axes["inputs"] == ("batch", "sequence")


BLOCK = {"num_layers": 1, "embed_dim": 16, "num_heads": 4, "mlp_dim": 32, "max_sequence_length": 32, "causal": False}
# id: (data, task, head)
RUNS = {
    "masked": (
        {"kind": "synthetic", "num_rows": 64, "corruption": {"kind": "mask"}},
        jt.masked_language_modeling,
        None,
    ),
    "labelled": (
        {"kind": "labelled_text", "builtin": "python_docstrings"},
        jt.classification,
        {"kind": "sequence", "pooling": "mean"},
    ),
}


@functools.cache
def opened(name):
    return jt.open_data(RUNS[name][0], sequence_length=32)


def losses(name, **degrees):
    """Losses of three steps, and the metrics of an evaluation."""
    data, (_, task, head) = opened(name), RUNS[name]
    model = build_model(
        TransformerConfig(**BLOCK, head=head),
        input_shape=data.input_shape,
        vocab_size=data.vocab_size,
        num_outputs=data.num_outputs,
    )
    mesh = jt.make_mesh(**degrees, devices=jax.devices()[: max(1, np.prod([*degrees.values()]))])
    step = jt.make_train_step(model, task(), optax.adamw(1e-2), mesh=mesh)
    load, state, found = step.loader(jt.Batches(data.train, 8, seed=0, shuffle=True)), step.init(0), []
    for k in range(3):
        state, metrics = step(state, load(k))
        found.append(float(metrics["loss"]))
    held_out = jt.Batches(data.validation, 8, seed=0, shuffle=False)
    load = step.loader(held_out)
    return found, jt.Evaluator(step)(state, [load(0)])


@functools.cache
def on_one(name):
    return losses(name)


LONG = pytest.mark.long
ROWS = [
    pytest.param("masked", {"data": 2, "fsdp": 2}, id="masked: data=2,fsdp=2", marks=LONG),
    pytest.param("masked", {"context": 2, "tensor": 2}, id="masked: context=2,tensor=2", marks=LONG),
    pytest.param("labelled", {"data": 2, "fsdp": 2}, id="labelled: data=2,fsdp=2", marks=LONG),
]


@pytest.mark.parametrize(("name", "degrees"), ROWS)
def test_equal_on_every_layout(name, degrees):
    (one, metrics), (many, others) = on_one(name), losses(name, **degrees)
    # Three steps of float32 in another order of summation: the layout tests' 1e-5.
    np.testing.assert_allclose(many, one, rtol=1e-5)
    assert many[-1] < many[0]
    assert others.keys() == metrics.keys() >= {"eval_loss", "eval_accuracy"}
    np.testing.assert_allclose(others["eval_loss"], metrics["eval_loss"], rtol=1e-5)
    assert others["eval_accuracy"] == pytest.approx(metrics["eval_accuracy"])
