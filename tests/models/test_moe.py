"""The mixture-of-experts layer: its parameters, its losses, and the published sizes."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_experts import dense_experts
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals
from pydantic import ValidationError

from jaxtrain.config.transformer import ExpertsConfig, TransformerConfig
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.shipped.axes import EXPERTS
from jaxtrain.models.shipped.moe import MoE
from jaxtrain.ops.experts.compute import Kernels, route

CONFIG = TransformerConfig(
    num_layers=2, embed_dim=16, num_heads=2, mlp_dim=24, experts=ExpertsConfig(num_experts=4, experts_per_token=2)
)
X = jax.random.normal(jax.random.key(0), (2, 6, 16))


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
    for path, shape in expected.items():
        assert len(EXPERTS[f"blocks/mlp/{path}"]) == 1 + len(shape)


def test_initial_values():
    config = CONFIG.model_copy(update={"embed_dim": 64, "mlp_dim": 64})
    module = MoE(config, nnx.Rngs(0))
    # 2 % is 4 standard errors of a standard deviation of 16384 draws; the router has 256.
    for kernel, stddev, error in (
        (module.router, 0.02, 0.18),
        (module.up, 0.02, 0.02),
        (module.down, 0.02 / np.sqrt(2 * 2), 0.02),
    ):
        assert np.std(kernel.kernel[...]) == pytest.approx(stddev, rel=error)
    assert np.unique(module.up.kernel[...].reshape(4, -1)[:, 0]).size == 4


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_output_is_that_of_the_dense_experts(activation):
    module = MoE(CONFIG.model_copy(update={"activation": activation}), nnx.Rngs(0))
    y, losses, load = module(X)
    gate = None if module.gate is None else module.gate.kernel[...]
    routing = route(X @ module.router.kernel[...], 2)
    expected = dense_experts(X, *routing, Kernels(module.up.kernel[...], gate, module.down.kernel[...]))
    # Outputs are of size 1e-3; fp32 sums in another order.
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-8)
    assert (losses.shape, losses.dtype, load.shape, load.dtype) == ((2, 6), jnp.float32, (4,), jnp.float32)
    assert np.sum(load) == pytest.approx(1)


def test_padding_counts_in_no_load_and_no_loss():
    module = MoE(CONFIG, nnx.Rngs(0))
    y, losses, load = module(X[:1, :4])
    # Padding that all goes where the first token goes.
    padded = jnp.concatenate([X[:1, :4], jnp.broadcast_to(X[:1, :1], (1, 8, 16))], axis=1)
    real = (jnp.arange(12) < 4)[None]
    found_y, found_losses, found_load = module(padded, real)
    np.testing.assert_array_equal(found_load, load)
    np.testing.assert_allclose(found_losses[:, :4], losses, rtol=1e-6)
    assert not np.any(found_losses[:, 4:])
    np.testing.assert_allclose(found_y[:, :4], y, rtol=1e-4, atol=1e-8)  # as in the test of dense experts
    nothing = module(X, jnp.zeros((2, 6), bool))
    assert not np.any(nothing[1])
    assert not np.any(nothing[2])


def test_half_precision_routes_in_float32():
    module = MoE(CONFIG, nnx.Rngs(0))
    x = X.astype(jnp.bfloat16)
    half = nnx.merge(nnx.graphdef(module), jax.tree.map(lambda p: p.astype(jnp.bfloat16), nnx.state(module)))
    y, losses, load = half(x)
    assert (y.dtype, losses.dtype, load.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    # The same rounded inputs in float32 choose the same experts and lose the same.
    rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), nnx.state(module))
    _, expected_losses, expected_load = nnx.merge(nnx.graphdef(module), rounded)(x.astype(jnp.float32))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    np.testing.assert_array_equal(load, expected_load)


def test_no_gradient_flows_through_the_load():
    gradient = jax.grad(lambda module: jnp.sum(module(X)[2] ** 2))(MoE(CONFIG, nnx.Rngs(0)))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_remat_finds_the_names():
    graph, params = nnx.split(MoE(CONFIG, nnx.Rngs(0)))

    def run(params, x):
        return jnp.sum(jnp.sin(nnx.merge(graph, params)(x)[0]))

    policy = jax.checkpoint_policies.save_only_these_names("mlp_hidden", "mlp_output")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_saved_residuals(jax.checkpoint(run, policy=policy), params, X)
    # 12 tokens with 2 experts each, 24 wide; the output as the sine needs it.
    assert "f32[24,24] named 'mlp_hidden'" in printed.getvalue()
    assert "f32[2,6,16] named 'mlp_output'" in printed.getvalue()


# Parameters, counted over the safetensors published with Mixtral-8x7B-v0.1 and Mixtral-8x22B-v0.1 (281,241,268,224
# bytes of bfloat16), and those that a token meets, as announced.
MIXTRAL = {"mixtral_8x7b": (46_702_792_704, 12.9e9), "mixtral_8x22b": (140_620_634_112, 39e9)}


@pytest.mark.parametrize(("size", "total", "active"), [(size, *counts) for size, counts in MIXTRAL.items()])
def test_mixtral_has_the_published_counts(size, total, active):
    config = TransformerConfig(size=size)
    assert config.experts is not None
    assert config.vocab_size is not None
    assert config.num_kv_heads is not None
    assert config.head_dim is not None
    state = nnx.state(nnx.eval_shape(lambda: MoE(config, nnx.Rngs(0))))
    mixture = sum(leaf.size for leaf in jax.tree.leaves(state))
    router = config.embed_dim * config.experts.num_experts
    experts, chosen = config.experts.num_experts, config.experts.experts_per_token
    attention = 2 * config.embed_dim * config.head_dim * (config.num_heads + config.num_kv_heads)
    norms = (2 * config.num_layers + 1) * config.embed_dim
    rest = config.num_layers * attention + 2 * config.vocab_size * config.embed_dim + norms
    assert rest + config.num_layers * mixture == total
    # 0.5 % is the rounding of the announced figures.
    met = rest + config.num_layers * (router + (mixture - router) * chosen // experts)
    assert met == pytest.approx(active, rel=5e-3)


WRONG = {
    "more a token than there are": (
        dict(experts=dict(num_experts=2, experts_per_token=3)),
        "experts_per_token 3 is more than num_experts 2; lower it",
    ),
    "no experts": (dict(experts=dict(num_experts=0)), "greater than 0"),
    "biases": (dict(experts={}, bias=True), "experts have no biases; set bias: false, or leave experts out"),
}


@pytest.mark.parametrize(("values", "message"), WRONG.values(), ids=WRONG)
def test_wrong_settings(values, message):
    with pytest.raises(ValidationError, match=message):
        TransformerConfig.model_validate(values)
