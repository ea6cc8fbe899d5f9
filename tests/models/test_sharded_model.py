"""A model on a mesh without a train step: where its parameters are, what it computes, what it refuses."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.layout.sharding import layer_specs, parameter_specs, path_name

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


def sharded(zero: int = 0, **degrees: int) -> jt.ShardedModel:
    options = jt.Parallelism(zero=zero, max_replicated_fraction=1.0)
    return jt.shard_model(transformer(), mesh=mesh(**degrees), parallelism=options)


@pytest.mark.parametrize("manual", [(), ("data",), ("pipe", "data"), ("pipe", "data", "fsdp", "tensor")], ids=str)
def test_a_spec_that_is_looked_up_is_the_one_that_the_rules_give(manual: tuple[str, ...]) -> None:
    """Inside the step's own regions too, whose axes leave every spec, and for the layers of one stage."""
    table = sharded(zero=1, pipe=2, data=2, fsdp=2).layout
    assert len({specs.stored for specs in table.parameters.values()}) > 3, "a table of one spec would prove little"
    inside = dataclasses.replace(table, manual=frozenset(manual))
    derived = dataclasses.replace(inside, parameters={})
    for path, specs in table.parameters.items():
        found, expected = (parameter_specs(path, specs.shape, layout) for layout in (inside, derived))
        assert (found.stored, found.gathered) == (expected.stored, expected.gathered), path
        if not manual:
            assert found is specs, "derived again"
            assert found.optimizer_state == expected.optimizer_state
        if path.startswith("blocks/"):
            layers = (layer_specs(path, specs.shape[1:], layout, num_layers=2) for layout in (inside, derived))
            found, expected = layers
            assert (found.stored, found.gathered) == (expected.stored, expected.gathered), path


def test_it_knows_where_the_step_puts_its_parameters() -> None:
    model, options = transformer(), jt.Parallelism(zero=1)
    on = mesh(data=2, fsdp=2)
    step = jt.make_train_step(model, jt.language_modeling(), optax.adamw(0.1), mesh=on, parallelism=options)
    assert step.abstract_state.params == jt.shard_model(model, mesh=on, parallelism=options).abstract_params
    moments = step.abstract_state.optimizer_state[0].mu
    for path, leaf in jax.tree_util.tree_leaves_with_path(moments):
        assert leaf.sharding.spec == step.layout.parameters[path_name(path)].optimizer_state


@pytest.mark.parametrize(
    "degrees",
    [
        dict(data=2, fsdp=2),
        *(pytest.param(one, marks=pytest.mark.long) for one in (dict(data=1), dict(pipe=2, data=2))),
    ],
    ids=str,
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


def test_it_writes_text_as_the_step_does() -> None:
    model = transformer()
    step = jt.make_train_step(model, jt.language_modeling(), optax.sgd(0.1), mesh=mesh())
    params, greedy = step.init(0).params, jt.Sampling(temperature=0.0)
    texts = [
        jt.generate_text(source, params, ByteTokenizer(), ["ab"], new_tokens=4, sampling=greedy)
        for source in (step, step.sharded_model, jt.shard_model(model, mesh=mesh()))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_frozen_parameters_keep_their_dtype() -> None:
    model = jt.from_functions(
        lambda key: {"frozen": jnp.ones((4, 4), jnp.float16), "head": jnp.ones((4, 2))},
        lambda params, x: x @ params["frozen"] @ params["head"],
    )
    trainable = lambda path: path == "head"  # noqa: E731
    alone = jt.shard_model(model, mesh=mesh(), policy="bf16_pure", trainable=trainable)
    assert {name: leaf.dtype for name, leaf in alone.abstract_params.items()} == {
        "frozen": jnp.float16,
        "head": jnp.bfloat16,
    }


def test_what_does_not_fit_is_one_line() -> None:
    one_function = jt.from_functions(lambda key: {"w": jnp.ones((4, 2))}, lambda params, x: x @ params["w"])
    mistakes = {
        "parallel.pipe=2, but the model": lambda: jt.shard_model(one_function, mesh=mesh(pipe=2)),
        "parallel.tensor=2, but no parameter": lambda: jt.shard_model(one_function, mesh=mesh(tensor=2)),
        "not a jaxtrain.Model": lambda: jt.shard_model(lambda x: x),  # pyright: ignore[reportArgumentType]
        "unknown precision policy": lambda: jt.shard_model(one_function, mesh=mesh(), policy="half"),
        "not a jaxtrain.Task": lambda: jt.Evaluator(jt.shard_model(one_function, mesh=mesh())),
    }
    for message, make in mistakes.items():
        with pytest.raises(jt.ConfigError, match=message) as caught:
            make()
        assert "\n" not in str(caught.value)
