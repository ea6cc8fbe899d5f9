"""Heads on top of the blocks, each against its formula in numpy; padding changes nothing.

Shapes: B batch, L length, D model width, C labels.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.config.model import HeadConfig, TransformerConfig
from jaxtrain.models.shipped.heads import MaskedLanguageModelHead, PooledHead, head_inputs, num_labels
from jaxtrain.models.shipped.shapes import head_rows

WIDTH, LABELS = 6, 3
X = np.random.default_rng(0).normal(size=(3, 4, WIDTH)).astype(np.float32)
# Rows of two, four and three tokens; the padding of the last one is on the left.
SEGMENTS = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1]], np.int32)
POOLED = {
    "first": X[:, 0],
    "last": np.stack([X[0, 1], X[1, 3], X[2, 3]]),
    "mean": np.stack([X[0, :2].mean(0), X[1].mean(0), X[2, 1:].mean(0)]),
}
# float32 sums of at most six products of numbers of about 1.
CLOSE = dict(rtol=1e-5, atol=1e-6)


def gelu_exact(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


ACTIVATIONS = {"tanh": np.tanh, "relu": lambda x: np.maximum(x, 0), "gelu_exact": gelu_exact}


def with_random_parameters(module):
    """Replaces every parameter by a draw, so that biases and scales matter."""
    rng = np.random.default_rng(1)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), nnx.state(module))
    nnx.update(module, state)
    return module


def with_head(head, **settings):
    sizes = dict(embed_dim=WIDTH, num_heads=1, causal=False, norm="layernorm", norm_epsilon=1e-3)
    return TransformerConfig(**{**sizes, **settings}, head=head)


def make(**settings):
    head = HeadConfig(**settings)
    return head, with_random_parameters(PooledHead(with_head(head), num_labels(head, LABELS), nnx.Rngs(0)))


def run(head, module, *, segments=SEGMENTS, key=None):
    return np.asarray(module(jnp.asarray(X), head_inputs(head, X.shape[:2], segments, key)))


def dense(layer, x):
    return x @ np.asarray(layer.kernel[...]) + (0 if layer.bias is None else np.asarray(layer.bias[...]))


def normalized(norm, x):
    y = x - x.mean(-1, keepdims=True)
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-3) * np.asarray(norm.scale[...])
    return y if norm.bias is None else y + np.asarray(norm.bias[...])


@pytest.mark.parametrize("pooling", POOLED)
def test_labels_of_a_text_are_a_linear_layer_on_what_is_pooled(pooling):
    head, module = make(kind="sequence", pooling=pooling)
    np.testing.assert_allclose(run(head, module), dense(module.output, POOLED[pooling]), **CLOSE)


@pytest.mark.parametrize("hidden", ACTIVATIONS)
def test_a_hidden_layer_comes_before_the_output(hidden):
    head, module = make(kind="sequence", hidden=hidden, bias=hidden != "relu")
    expected = dense(module.output, ACTIVATIONS[hidden](dense(module.hidden, X[:, 0])))
    np.testing.assert_allclose(run(head, module), expected, **CLOSE)


@pytest.mark.parametrize("bias", [True, "output", False])
def test_a_hidden_layer_may_have_a_norm_and_only_the_output_a_bias(bias):
    head, module = make(kind="sequence", hidden="relu", hidden_norm=True, bias=bias)
    biases = [one.bias is not None for one in (module.hidden, module.hidden_norm, module.output)]
    assert biases == [bias is True, bias is True, bias is not False]
    hidden = np.maximum(dense(module.hidden, X[:, 0]), 0)
    np.testing.assert_allclose(run(head, module), dense(module.output, normalized(module.hidden_norm, hidden)), **CLOSE)


def test_a_token_head_has_labels_for_each_token_and_without_segments_nothing_is_padding():
    head, module = make(kind="token")
    np.testing.assert_allclose(run(head, module), dense(module.output, X), **CLOSE)
    head, module = make(kind="embedding", pooling="last")
    np.testing.assert_array_equal(run(head, module, segments=None), X[:, -1])


def test_an_embedding_can_have_the_norm_1():
    head, module = make(kind="embedding", pooling="mean", normalize=True)
    expected = POOLED["mean"] / np.linalg.norm(POOLED["mean"], axis=1, keepdims=True)
    np.testing.assert_allclose(run(head, module), expected, **CLOSE)


def test_a_row_of_padding_alone_gives_finite_numbers():
    head, module = make(kind="embedding", pooling="mean", normalize=True)
    needs = head_inputs(head, X.shape[:2], SEGMENTS * 0, None)
    found, slope = jax.jit(jax.value_and_grad(lambda x: jnp.sum(module(x, needs))))(X)
    assert found == 0
    assert np.all(np.isfinite(slope))


def test_dropout_keeps_the_mean_and_draws_each_row_alone():
    head = HeadConfig(kind="token", dropout=0.5, num_labels=64)
    module = PooledHead(with_head(head, embed_dim=64), 64, nnx.Rngs(0))
    assert module.output is not None
    module.output.kernel[...] = jnp.eye(64)
    x = jnp.ones((2, 32, 64))
    draw = jax.jit(lambda seed: module(x, head_inputs(head, (2, 32), None, jax.random.key(seed))))
    found = np.asarray(draw(0))
    assert set(np.unique(found)) == {0.0, 2.0}
    # 2,048 draws of a row: the standard deviation of their mean is 1 / sqrt(2048) = 0.022.
    assert np.all(np.abs(found.mean((1, 2)) - 1) < 0.1)
    assert np.mean(found[0] == found[1]) < 0.6
    np.testing.assert_array_equal(found, draw(0))
    assert np.mean(found == draw(1)) < 0.6
    np.testing.assert_array_equal(module(x, head_inputs(head, (2, 32), None, None)), x)


@pytest.mark.parametrize("width", [None, 4])
def test_a_masked_language_model_head_transforms_what_the_output_layer_takes(width):
    config = with_head(HeadConfig(kind="masked_language_model"), embedding_width=width, tie_embeddings=True)
    module = with_random_parameters(MaskedLanguageModelHead(config, 11, nnx.Rngs(0)))
    y = normalized(module.norm, gelu_exact(dense(module.dense, X)))
    assert y.shape[-1] == (width or WIDTH)
    np.testing.assert_allclose(module(jnp.asarray(X)), y, **CLOSE)
    assert module.bias is not None
    assert module.bias[...].shape == (11,)


@pytest.mark.parametrize(
    "settings",
    [
        dict(kind="masked_language_model", bias=False),
        dict(kind="masked_language_model", bias="output"),
        dict(kind="sequence", hidden="tanh"),
        dict(kind="sequence", hidden="gelu_exact", hidden_norm=True, bias="output"),
        dict(kind="token", bias=False),
        dict(kind="embedding"),
    ],
    ids=str,
)
def test_the_shapes_are_those_of_the_modules(settings):
    head = HeadConfig(**settings)
    config, labels = with_head(head), num_labels(head, LABELS)
    if head.kind == "masked_language_model":
        module = MaskedLanguageModelHead(config, 11, nnx.Rngs(0))
    else:
        module = PooledHead(config, labels, nnx.Rngs(0))
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(module)))
    found = {"/".join(["head", *(str(part.key) for part in path)]): leaf.shape for path, leaf in leaves}
    rows = head_rows(config, vocab_size=11, num_labels=labels)
    assert found == {path: shape for path, (shape, _) in rows.items()}
