"""Adapters of a model: what they train under every policy and optimizer, their dropout, merging, and users' models."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from pydantic import TypeAdapter

import jaxtrain as jt
from jaxtrain.config.optimizers import OptimizerConfig
from jaxtrain.errors import ConfigError
from jaxtrain.optim.optimizers import build_optimizer
from jaxtrain.runtime.tree import path_name

MODEL: dict[str, Any] = dict(
    kind="transformer", num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32, max_sequence_length=16, vocab_size=64
)
TOKENS = np.random.default_rng(0).integers(0, 8, (8, 17)).astype(np.int32)
BATCH = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}


def model(**options: Any) -> jt.Model:
    return jt.build_model(MODEL | options, input_shape=(16,))


def step_of(model: jt.Model, optimizer: Any = None, *, policy: str = "fp32", **options: Any) -> jt.TrainStep:
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    made = optax.adam(1e-2) if optimizer is None else optimizer
    return jt.make_train_step(model, jt.language_modeling(), made, mesh=mesh, policy=policy, **options)


def by_path(tree: Any) -> dict[str, np.ndarray]:
    return {path_name(path): np.array(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def optimizer_of(kind: str, model: jt.Model) -> Any:
    kind, _, moments = kind.partition(" ")
    options = {"min_dim_size_to_factor": 4} if kind == "adafactor" else {"moments": moments} if moments else {}
    config = TypeAdapter(OptimizerConfig).validate_python({"kind": kind, "learning_rate": 1e-2, **options})
    return build_optimizer(config, optax.constant_schedule(1e-2), axes=model.axes)


SETTINGS: dict[str, dict[str, Any]] = {
    "fp32, moving average": dict(ema_decay=0.9),
    "bf16, muon": dict(policy="bf16", kind="muon"),
    "fp16, adafactor": dict(policy="fp16", kind="adafactor"),
    "fp8, offloaded optimizer": dict(policy="fp8", offload_optimizer=True),
    "moments and base in int8": dict(kind="adamw int8", base="int8"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "fp32, moving average" else pytest.mark.long) for name in SETTINGS]
)
def test_the_first_loss_is_the_bases_and_the_base_stays(name: str) -> None:
    settings = dict(SETTINGS[name])
    kind, base = settings.pop("kind", "adamw"), settings.pop("base", None)
    adapted = jt.adapt(model(), lora=jt.LoraConfig(rank=4), base=base)
    step = step_of(adapted, optimizer_of(kind, adapted), **settings)
    state = step.init(0)
    before = by_path(state.params)
    losses = []
    for _ in range(6):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    # The product of the factors is exactly 0 at first.
    if base is None:
        plain = step_of(model(), policy=settings.get("policy", "fp32"))
        assert losses[0] == float(plain(plain.init(0), BATCH)[1]["loss"])
    assert losses[-1] < losses[0]
    for path, leaf in by_path(state.params).items():
        trained = path.endswith(("lora_a", "lora_b"))
        assert np.array_equal(leaf, before[path]) != trained, path
    moments = [leaf.size for leaf in jax.tree.leaves(step.abstract_state.optimizer_state)]
    assert sum(moments) < 3 * sum(leaf.size for path, leaf in before.items() if path.endswith(("lora_a", "lora_b")))


@pytest.mark.long
def test_dropout_drops_inputs_of_adapters_in_training_alone() -> None:
    adapted = jt.adapt(model(), lora=jt.LoraConfig(rank=4, dropout=0.5))
    params, _ = jax.jit(adapted.init)(jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + 0.1 if path_name(path).endswith("lora_b") else leaf, params
    )

    @functools.partial(jax.jit, static_argnames="train")
    def apply(key: jax.Array | None, *, train: bool) -> jax.Array:
        return adapted.apply(params, {}, BATCH["inputs"], key=key, train=train)[0]

    def outputs(key: int | None, *, train: bool) -> np.ndarray:
        return np.asarray(apply(None if key is None else jax.random.key(key), train=train))

    assert np.array_equal(outputs(1, train=False), outputs(None, train=True))
    assert np.array_equal(outputs(1, train=True), outputs(1, train=True))
    assert not np.array_equal(outputs(1, train=True), outputs(2, train=True))
    assert not np.array_equal(outputs(1, train=True), outputs(1, train=False))


@pytest.mark.parametrize("base", [None, pytest.param("int8", marks=pytest.mark.long)])
def test_merged_parameters_give_the_adapted_logits(base: str | None) -> None:
    adapted = jt.adapt(model(), lora=jt.LoraConfig(rank=4, rank_stabilised=True), base=base)
    params, _ = jax.jit(adapted.init)(jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + 0.02 if path_name(path).endswith("lora_b") else leaf, params
    )
    merged = jt.merge_adapters(params, adapted)
    assert jax.tree.structure(merged) == jax.tree.structure(jax.eval_shape(model().init, jax.random.key(0))[0])
    found, expected = (
        jax.jit(lambda params, one=one: one.apply(params, {}, BATCH["inputs"], key=None, train=False)[0])(given)
        for one, given in ((model(), merged), (adapted, params))
    )
    # Sums of 64 products in float32 in another order, through two layers.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        pytest.param(
            lambda: model(experts=dict(num_experts=2, experts_per_token=1)),
            dict(targets=("up",)),
            "'up' matches no linear layer of the model transformer; there are key",
            id="an expert",
        ),
        pytest.param(model, dict(train_also=("haed/*",)), "train_also: 'haed/", id="train also"),
    ],
)
def test_what_cannot_be_adapted_is_one_line(make: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        jt.adapt(make(), lora=jt.LoraConfig(**options))
