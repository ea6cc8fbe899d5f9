"""Experts on every mesh give the numbers of one device: outputs, losses, load and all gradients."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_experts import dense_experts
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config.transformer import ExpertsConfig, TransformerConfig
from jaxtrain.layout.gather import gather_parameters
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.sharding import Layout, parameter_shardings, use_layout
from jaxtrain.models.shipped import moe
from jaxtrain.models.shipped.axes import EXPERTS
from jaxtrain.ops.experts.compute import Kernels, count_tokens, route, router_loss
from jaxtrain.ops.experts.exchange import expert_load, experts_mlp

NUM_EXPERTS, BATCH, LENGTH, WIDTH, HIDDEN = 8, 8, 4, 8, 16
# fp32 sums in another order: 32 tokens of products of size up to 10, a few times 2^-24 = 6e-8 of it; measured 4e-6.
TOLERANCE = dict(rtol=1e-5, atol=1e-5)

TOKENS = PartitionSpec(("data", "fsdp", "expert"), "context")
AXES = {path.removeprefix("blocks/mlp/"): row[1:] for path, row in EXPERTS.items()}

MESHES = {
    "expert=4,data=2": dict(expert=4, data=2),
    "expert=2,tensor=2,fsdp=2": dict(expert=2, tensor=2, fsdp=2),
    "expert=2,context=2,data=2": dict(expert=2, context=2, data=2),
}


def make_layout(degrees: dict[str, int]) -> Layout:
    return Layout(make_mesh(**{"data": 1, **degrees}), AXES)


def make_module(choices: int) -> moe.MoE:
    experts = ExpertsConfig(
        num_experts=NUM_EXPERTS, experts_per_token=choices, load_balance_weight=0.5, router_z_weight=0.1
    )
    config = TransformerConfig(num_layers=1, embed_dim=WIDTH, num_heads=1, mlp_dim=HIDDEN, experts=experts)
    return moe.MoE(config, nnx.Rngs(0))


@functools.cache
def make_inputs(choices: int) -> tuple[Any, Any, Any]:
    """Parameters large enough that routing is far from ties, tokens, and weights of the outputs in the loss."""
    rng = np.random.default_rng(1)
    graph, params = nnx.split(make_module(choices))
    params = jax.device_get(jax.tree.map(lambda p: p * 20, nnx.to_pure_dict(params)))
    x, target = (rng.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32) for _ in range(2))
    return graph, params, (x, target)


def loss_of(output: tuple[jax.Array, jax.Array, jax.Array], target: jax.Array) -> tuple[jax.Array, Any]:
    y, losses, load = output
    # Tokens with weights of their own, as a task that masks padding gives them.
    return jnp.sum(y * target) + jnp.sum(losses * target[..., 0]), (y, losses, load)


def run_module(graph: Any, params: Any, x: jax.Array, target: jax.Array) -> tuple[jax.Array, Any]:
    params = gather_parameters(params)
    return loss_of(nnx.merge(graph, nnx.State(jax.tree.map(nnx.Param, params)))(x), target)


@functools.cache
def reference(choices: int) -> Any:
    """Value and gradients of every expert on every token, on one device."""
    _, params, (x, target) = make_inputs(choices)

    def loss(params: Any, x: jax.Array, target: jax.Array) -> tuple[jax.Array, Any]:
        logits = jnp.einsum("BLD,DE->BLE", x, params["router"]["kernel"])
        weights, ids = route(logits, choices)
        load = count_tokens(ids, NUM_EXPERTS) / ids.size
        losses = router_loss(logits, load, load_balance_weight=0.5, router_z_weight=0.1)
        kernels = Kernels(*(params[name]["kernel"] for name in ("up", "gate", "down")))
        return loss_of((dense_experts(x, weights, ids, kernels), losses, load), target)

    return jax.device_get(jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x, target))


def check(found: Any, choices: int) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE),
        jax.device_get(jax.block_until_ready(found)),
        reference(choices),
    )


def compiled(layout: Layout, choices: int) -> Any:
    """Value and gradients under a layout, parameters as stored and tokens as a step holds them."""
    graph, params, (x, target) = make_inputs(choices)

    def step(params: Any, x: jax.Array, target: jax.Array) -> Any:
        with use_layout(layout):
            return jax.value_and_grad(functools.partial(run_module, graph), (0, 1), has_aux=True)(params, x, target)

    tokens = NamedSharding(layout.mesh, TOKENS)
    shardings = (parameter_shardings(params, layout), tokens, tokens)
    lowered = jax.jit(step, in_shardings=shardings, out_shardings=None).lower(params, x, target)
    return lowered.compile(), jax.device_put((params, x, target), shardings)


# The axis alone with one choice, and beside one that splits each expert with two.
@pytest.mark.parametrize(
    ("mesh", "choices"),
    [
        ("expert=4,data=2", 1),
        ("expert=2,tensor=2,fsdp=2", 2),
        pytest.param("expert=2,context=2,data=2", 2, marks=pytest.mark.long),
    ],
)
def test_mesh_gives_the_numbers_of_one_device(mesh: str, choices: int) -> None:
    program, inputs = compiled(make_layout(MESHES[mesh]), choices)
    check(program(*inputs), choices)
    collectives = set(re.findall(r" (all-to-all|collective-permute|all-gather)\(", program.as_text()))
    assert "all-to-all" in collectives
    assert "collective-permute" not in collectives, "it would hang in a branch of a pipeline stage"
    if "fsdp" not in mesh:
        assert "all-gather" not in collectives, "tokens are sharded from end to end"


def apply_experts(layout: Layout | None, x: jax.Array, weights: jax.Array, ids: jax.Array, kernels: Kernels) -> Any:
    def run(*args: Any) -> jax.Array:
        with use_layout(layout):
            return experts_mlp(*args)

    return jax.block_until_ready(jax.jit(run)(x, weights, ids, kernels))


def make_kernels(params: Any) -> Kernels:
    return Kernels(*(params[name]["kernel"] for name in ("up", "gate", "down")))


def test_bfloat16_across_devices_is_that_of_one() -> None:
    _, params, (x, _) = make_inputs(2)
    x, kernels = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (x, make_kernels(params)))
    ids = jax.lax.top_k(jax.random.normal(jax.random.key(0), (BATCH, LENGTH, NUM_EXPERTS)), 2)[1]
    weights = jnp.full(ids.shape, 0.5, jnp.float32)
    alone = apply_experts(None, x, weights, ids, kernels)
    y = apply_experts(make_layout(MESHES["expert=2,tensor=2,fsdp=2"]), x, weights, ids, kernels)
    assert y.dtype == jnp.bfloat16
    # The sums over shards of experts and of the hidden dim round to 8 bits where one device rounds once.
    np.testing.assert_allclose(y.astype(jnp.float32), alone.astype(jnp.float32), rtol=0.02, atol=0.02)


def test_even_routing_has_the_load_balance_loss_of_its_weight() -> None:
    layout = make_layout(dict(expert=4, data=2))
    ids = jnp.arange(BATCH * LENGTH * 2, dtype=jnp.int32).reshape(BATCH, LENGTH, 2) % NUM_EXPERTS

    def run(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        with use_layout(layout):
            load = expert_load(ids, NUM_EXPERTS)
        logits = jnp.zeros((BATCH, LENGTH, NUM_EXPERTS))
        return load, jnp.mean(router_loss(logits, load, load_balance_weight=0.01, router_z_weight=0.0))

    tokens = NamedSharding(layout.mesh, PartitionSpec(("data", "expert")))
    load, loss = jax.block_until_ready(jax.jit(run)(jax.device_put(ids, tokens)))
    np.testing.assert_array_equal(load, np.full(NUM_EXPERTS, 1 / NUM_EXPERTS, np.float32))
    np.testing.assert_allclose(loss, 0.01, rtol=1e-6)
