"""The mixture-of-experts layer: its parameters, its losses, and the published sizes."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dense_experts import dense_experts
from flax import nnx

import jaxtrain as jt
from jaxtrain.config.model import ExpertsConfig, TransformerConfig
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.shipped.moe import MoE
from jaxtrain.ops.experts.compute import Kernels, route
from jaxtrain.optim.wrappers import balance_experts

CONFIG = TransformerConfig(
    num_layers=2, embed_dim=16, num_heads=2, mlp_dim=24, experts=ExpertsConfig(num_experts=4, experts_per_token=2)
)
X = np.random.default_rng(0).normal(size=(2, 6, 16)).astype(np.float32)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_parameters_follow_the_axes_table(activation):
    config = CONFIG.model_copy(update={"activation": activation})
    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: MoE(config, nnx.Rngs(0)))))
    shapes = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    expected = {"router/kernel": (16, 4), "up/kernel": (4, 16, 24), "down/kernel": (4, 24, 16)}
    if activation == "swiglu":
        expected["gate/kernel"] = (4, 16, 24)
    assert {path: leaf.shape for path, leaf in shapes.items()} == expected
    assert {leaf.dtype for leaf in shapes.values()} == {jnp.dtype(jnp.float32)}


def parts(config=CONFIG):
    """The parameters, drawn as they are (of size 0.02), and a compiled call."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: MoE(config, nnx.Rngs(0))))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: (0.02 * rng.normal(size=leaf.shape)).astype(np.float32), shapes)
    return params, jax.jit(lambda params, *inputs: nnx.merge(graph, params)(*inputs))


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_output_is_that_of_the_dense_experts(activation):
    params, apply = parts(CONFIG.model_copy(update={"activation": activation}))
    y, losses, load = apply(params, X)
    kernels = nnx.to_pure_dict(params)
    gate = kernels["gate"]["kernel"] if activation == "swiglu" else None
    expected = jax.jit(
        lambda x, up, gate, down: dense_experts(x, *route(x @ kernels["router"]["kernel"], 2), Kernels(up, gate, down))
    )(X, kernels["up"]["kernel"], gate, kernels["down"]["kernel"])
    # Outputs are of size 1e-3; fp32 sums in another order.
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-8)
    assert (losses.shape, losses.dtype, load.shape, load.dtype) == ((2, 6), jnp.float32, (4,), jnp.float32)
    assert np.sum(load) == pytest.approx(1)


def test_padding_counts_in_no_load_and_no_loss():
    params, apply = parts()
    real = np.arange(6)[None] < np.array([[4], [0]])
    # Padding that all goes where the first token goes.
    filled = np.where(real[..., None], X, X[:1, :1])
    y, losses, load = apply(params, X, real)
    found_y, found_losses, found_load = apply(params, filled, real)
    scores = X[0, :4] @ nnx.to_pure_dict(params)["router"]["kernel"]
    counts = np.bincount(np.argsort(-scores, axis=-1)[:, :2].ravel(), minlength=4)
    np.testing.assert_allclose(load, counts / 8, rtol=1e-6)
    np.testing.assert_array_equal(found_load, load)
    np.testing.assert_array_equal(found_losses, losses)
    assert np.array_equal(losses != 0, real)
    np.testing.assert_allclose(found_y[0, :4], y[0, :4], rtol=1e-4, atol=1e-8)  # as in the test of dense experts


def test_a_bias_of_all_experts_is_added_to_each_token_once():
    """The weights of a token's experts sum to 1."""
    params, apply = parts(CONFIG.model_copy(update={"bias": True}))
    kernels = nnx.to_pure_dict(params)
    offset = np.arange(16, dtype=np.float32)
    kernels["down"]["bias"] = kernels["down"]["bias"] + offset
    np.testing.assert_allclose(apply(nnx.State(kernels), X)[0] - apply(params, X)[0], offset + 0 * X, rtol=1e-5)


def test_half_precision_routes_in_float32():
    params, apply = parts()
    half, x = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), (params, X))
    y, losses, load = apply(half, x)
    assert (y.dtype, losses.dtype, load.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    # The same rounded inputs in float32 choose the same experts and lose the same.
    _, expected_losses, expected_load = apply(*jax.tree.map(np.float32, (half, x)))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    np.testing.assert_array_equal(load, expected_load)


def test_bias_of_scores_moves_against_the_load_and_levels_it():
    params, apply = parts(CONFIG.model_copy(update={"experts": ExpertsConfig(num_experts=4, score_bias=True)}))
    kernels, rest = {"moe": nnx.to_pure_dict(params)}, optax.sgd(0.5)
    kernels["moe"]["score_bias"] = np.zeros(4, np.float32)
    kernels["moe"]["router"]["kernel"][:, 0] += X.mean((0, 1))  # the first expert has most tokens
    loss = jax.jit(jax.grad(lambda tree: jnp.sum(apply(nnx.State(tree["moe"]), X)[1])))
    optimizer = balance_experts(rest, 0.002)
    tree, state, loads = kernels, optimizer.init(kernels), []
    for _ in range(60):
        loads.append(np.asarray(apply(nnx.State(tree["moe"]), X)[2]))
        gradients = loss(tree)
        updates, state = optimizer.update(gradients, state, tree)
        expected = -0.002 * np.sign(loads[-1] - 1 / 4)
        np.testing.assert_allclose(updates["moe"]["score_bias"], expected, rtol=1e-6)
        np.testing.assert_array_equal(updates["moe"]["up"]["kernel"], -0.5 * gradients["moe"]["up"]["kernel"])
        tree = {"moe": kernels["moe"] | {"score_bias": tree["moe"]["score_bias"] + updates["moe"]["score_bias"]}}
    assert np.max(loads[0]) > 0.4
    assert np.max(np.mean(loads[-10:], axis=0)) < 0.3
    norms = [float(optax.tree.norm(one)) for one in (gradients, {"moe": gradients["moe"] | {"score_bias": 0.0}})]
    assert norms[0] == norms[1]


@pytest.mark.parametrize(
    ("degrees", "accumulation"),
    [
        pytest.param(dict(data=1), 4, id="accumulation"),
        pytest.param(dict(data=2), 2, id="accumulation, data", marks=pytest.mark.long),
        pytest.param(dict(pipe=2, data=2), 2, id="pipe, data", marks=pytest.mark.long),
    ],
)
def test_routers_count_tokens_alike_whatever_the_loss_weighs_in_their_microbatch(degrees, accumulation):
    """Rows with prompts of different lengths, one without any weight, and padding: the numbers of one batch."""
    experts = dict(num_experts=4, score_bias=True, load_balance_weight=0.0, router_z_weight=0.1)
    sizes = CONFIG.model_dump() | {"kind": "transformer", "vocab_size": 16, "num_layers": 2, "experts": experts}
    rng = np.random.default_rng(1)
    weights = (np.arange(12) >= np.array([1, 11, 6, 12, 3, 0, 9, 11])[:, None]).astype(np.float32)
    segments = (np.arange(12) < np.array([12, 12, 5, 12, 8, 12, 3, 12])[:, None]).astype(np.int32)
    inputs = {"tokens": rng.integers(0, 16, (8, 12)).astype(np.int32), "segments": segments}
    batch = {"inputs": inputs, "targets": rng.integers(0, 16, (8, 12)).astype(np.int32), "weights": weights}

    def after_a_step(degrees, accumulation):
        mesh = jt.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])
        model = jt.build_model(sizes, input_shape=(12,))
        options = dict(mesh=mesh, accumulation_steps=accumulation)
        step = jt.make_train_step(model, jt.language_modeling(), optax.sgd(0.1), **options)
        state, metrics = step(step.init(0), batch)
        return jax.device_get((state.params, {name: metrics[name] for name in ("loss", "router_loss")}))

    params, metrics = after_a_step(degrees, accumulation)
    expected_params, expected_metrics = after_a_step(dict(data=1), 1)
    bias, expected = (tree["blocks"]["mlp"]["score_bias"] for tree in (params, expected_params))
    assert set(np.sign(expected).flat) >= {-1.0, 1.0}
    np.testing.assert_array_equal(bias, expected)
    chex.assert_trees_all_close((params, metrics), (expected_params, expected_metrics), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.0), optax.adamw(0.1, weight_decay=0.5)], ids=["sgd", "adamw"])
def test_a_step_moves_the_bias_of_scores_whatever_the_optimizer(optimizer):
    sizes = CONFIG.model_dump() | {"experts": {"num_experts": 4, "score_bias": True, "score_bias_step": 0.25}}
    model = jt.build_model(sizes | {"kind": "transformer", "vocab_size": 16}, input_shape=(12,))
    step = jt.make_train_step(model, "language_modeling", optimizer, mesh=jt.make_mesh(devices=jax.devices()[:1]))
    tokens = np.random.default_rng(0).integers(0, 16, (3, 13)).astype(np.int32)
    state, _ = step(step.init(0), {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
    moved = np.asarray(state.params["blocks"]["mlp"]["score_bias"])
    assert set(np.unique(np.abs(moved))) <= {0.0, 0.25}
    assert np.all(np.any(moved > 0, axis=1) & np.any(moved < 0, axis=1))
