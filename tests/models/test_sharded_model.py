"""A model on a mesh without a train step: where its parameters are, what it computes, what it refuses."""

import math
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.layout.sharding import path_name

TOKENS = np.random.default_rng(0).integers(0, 256, (8, 16)).astype(np.int32)
BATCH = {"inputs": TOKENS, "targets": np.roll(TOKENS, -1, axis=1)}


def transformer() -> jt.Model:
    return jt.build_model(
        {"kind": "transformer", "num_layers": 4, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 16},
        input_shape=(16,),
        vocab_size=256,
    )


def mesh(**degrees: int) -> jax.sharding.Mesh:
    degrees = {"data": 1, **degrees}
    return jt.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])


def test_it_knows_where_the_step_puts_its_parameters() -> None:
    model, options = transformer(), jt.Parallelism(zero=1)
    on = mesh(data=2, fsdp=2)
    step = jt.make_train_step(model, jt.language_modeling(), optax.adamw(0.1), mesh=on, parallelism=options)
    assert step.abstract_state.params == jt.shard_model(model, mesh=on, parallelism=options).abstract_params
    moments = step.abstract_state.optimizer_state[0].mu
    for path, leaf in jax.tree_util.tree_leaves_with_path(moments):
        assert leaf.sharding.spec == step.layout.parameters[path_name(path)].optimizer_state


@pytest.mark.parametrize(
    "degrees", [dict(data=2, fsdp=2), pytest.param(dict(pipe=2, data=2), marks=pytest.mark.long)], ids=str
)
def test_it_evaluates_as_the_step_does(degrees: dict[str, int]) -> None:
    model, task = transformer(), jt.language_modeling()
    step = jt.make_train_step(model, task, optax.sgd(0.1), mesh=mesh(**degrees))
    alone = jt.shard_model(model, mesh=mesh(**degrees))
    state = step.init(0)
    assert jt.Evaluator(alone, task)(state, [BATCH]) == jt.Evaluator(step)(state, [BATCH])


def test_it_applies_its_policy_and_its_layout_without_being_asked() -> None:
    """Outside `context` as inside it."""
    alone = jt.shard_model(transformer(), mesh=mesh(fsdp=2), policy="bf16")
    params = jax.tree.map(
        lambda leaf: jax.device_put(np.full(leaf.shape, 0.01, leaf.dtype), leaf.sharding), alone.abstract_params
    )

    def apply(params: Any, *, inside: bool) -> jax.Array:
        if inside:
            with alone.context():
                return alone.apply(params, {}, TOKENS, key=None, train=False)[0]
        return alone.apply(params, {}, TOKENS, key=None, train=False)[0]

    programs = [jax.jit(lambda p, inside=inside: apply(p, inside=inside)).lower(params) for inside in (True, False)]
    texts = [program.as_text() for program in programs]
    assert texts[0] == texts[1]
    assert "sharding_constraint" in texts[0].lower() or "@Sharding" in texts[0]
    assert "bf16" in texts[0]
