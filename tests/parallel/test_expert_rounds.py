"""Experts on a mesh drop no token, whatever the routing, and give the gradients of every expert on every token."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_experts import dense_experts
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config.model import TransformerConfig
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.sharding import Layout, use_layout
from jaxtrain.models.shipped.shapes import model_tensors
from jaxtrain.ops.experts.compute import Kernels
from jaxtrain.ops.experts.exchange import experts_mlp

NUM_EXPERTS, BATCH, LENGTH, WIDTH, HIDDEN, CHOICES = 8, 8, 64, 8, 16, 2
TABLE = model_tensors(TransformerConfig(experts={}), vocab_size=8).axes
AXES = {path.removeprefix("blocks/mlp/"): row[1:] for path, row in TABLE.items() if "/mlp/" in path}
MESHES = {
    "expert=4,data=2": dict(expert=4, data=2),
    "expert=2,tensor=2,fsdp=2": dict(expert=2, tensor=2, fsdp=2),
    "expert=2,context=2,data=2": dict(expert=2, context=2, data=2),
}
# float32 sums over up to 512 tokens of products of size up to 10 in another order.
TOLERANCE = dict(rtol=1e-5, atol=1e-4)


def even() -> np.ndarray:
    return np.arange(BATCH * LENGTH * CHOICES).reshape(BATCH, LENGTH, CHOICES) % NUM_EXPERTS


def to_one_expert() -> np.ndarray:
    """Every token's first choice is expert 5, its second one any other."""
    others = [expert for expert in range(NUM_EXPERTS) if expert != 5]
    second = np.random.default_rng(0).choice(others, size=(BATCH, LENGTH))
    return np.stack([np.full((BATCH, LENGTH), 5), second], axis=-1)


def to_one_shard() -> np.ndarray:
    return np.broadcast_to([7, 6], (BATCH, LENGTH, CHOICES))


def one_row_to_one_shard() -> np.ndarray:
    """Of one device of eight, where the others are even: one queue alone is long."""
    ids = even()
    ids[3] = [0, 1]
    return ids


ROUTINGS = {
    "even": even,
    "all to one expert": to_one_expert,
    "all to one shard": to_one_shard,
    "one device to one shard": one_row_to_one_shard,
}


@functools.cache
def inputs() -> tuple[Any, ...]:
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    up, gate = (normal(NUM_EXPERTS, WIDTH, HIDDEN) * 0.3 for _ in range(2))
    kernels = Kernels(up, gate, normal(NUM_EXPERTS, HIDDEN, WIDTH) * 0.3)
    weights = rng.uniform(size=(BATCH, LENGTH, CHOICES)).astype(np.float32)
    return normal(BATCH, LENGTH, WIDTH), weights, kernels, normal(BATCH, LENGTH, WIDTH)


def differentiated(experts: Any) -> Any:
    def loss(x: Any, weights: Any, kernels: Any, target: Any, ids: Any) -> tuple[jax.Array, jax.Array]:
        y = experts(x, weights, ids, kernels)
        return jnp.sum(y * target), y

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)


@functools.cache
def program(mesh: str) -> Any:
    layout = Layout(make_mesh(**{"data": 1, **MESHES[mesh]}), AXES)
    tokens = NamedSharding(layout.mesh, PartitionSpec(("data", "fsdp", "expert"), "context"))

    def run(*arguments: Any) -> Any:
        with use_layout(layout):
            return differentiated(experts_mlp)(*arguments)

    ids = jax.ShapeDtypeStruct((BATCH, LENGTH, CHOICES), jnp.int32)
    shardings = (tokens, tokens, None, tokens, tokens)
    return jax.jit(run, in_shardings=shardings).lower(*inputs(), ids).compile()


reference = jax.jit(differentiated(dense_experts))


@pytest.mark.parametrize(
    ("mesh", "routing"),
    [
        *(("expert=4,data=2", routing) for routing in ROUTINGS),
        pytest.param("expert=2,tensor=2,fsdp=2", "all to one shard", marks=pytest.mark.long),
        pytest.param("expert=2,context=2,data=2", "one device to one shard", marks=pytest.mark.long),
    ],
)
def test_no_routing_drops_a_token(mesh: str, routing: str) -> None:
    ids = ROUTINGS[routing]().astype(np.int32)
    assert np.all(ids[..., 0] != ids[..., 1])
    compiled = program(mesh)
    found = compiled(*jax.device_put((*inputs(), ids), compiled.input_shardings[0]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), found, reference(*inputs(), ids))
    collectives = set(re.findall(r" (all-to-all|collective-permute|all-gather)\(", compiled.as_text()))
    assert "all-to-all" in collectives
    assert "collective-permute" not in collectives, "it would hang in a branch of a pipeline stage"
    if "fsdp" not in mesh:
        assert "all-gather" not in collectives, "tokens are sharded from end to end"


@pytest.mark.parametrize("mesh", ["expert=4,data=2", "expert=2,tensor=2,fsdp=2"])
def test_one_row_of_one_token(mesh: str) -> None:
    """What is sampled does not divide by the mesh: every device has the token, and some of its experts."""
    x, weights, kernels, _ = inputs()
    one = (x[:1, :1], weights[:1, :1], np.array([[[2, 7]]], np.int32), kernels)

    def run(*arguments: Any) -> Any:
        with use_layout(Layout(make_mesh(**{"data": 1, **MESHES[mesh]}), AXES)):
            return experts_mlp(*arguments)

    np.testing.assert_allclose(jax.jit(run)(*one), dense_experts(*one), **TOLERANCE)


def test_tokens_that_every_shard_of_experts_has_get_all_of_their_gradient() -> None:
    """A batch of one does not divide by the degree of `expert`: shards have the same tokens, and sum gradients."""
    layout = Layout(make_mesh(data=1, expert=2, devices=jax.devices()[:2]), AXES)

    def run(*arguments: Any) -> Any:
        with use_layout(layout):
            return differentiated(experts_mlp)(*arguments)

    x, weights, kernels, target = inputs()
    arguments = (x[:1], weights[:1], kernels, target[:1], even()[:1].astype(np.int32))
    found = jax.jit(run)(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), found, reference(*arguments))
