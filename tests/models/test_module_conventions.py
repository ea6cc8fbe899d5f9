"""Conventions of module libraries that a model keeps: modes, constants, sown values, names of inputs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jaxtrain as jt
from jaxtrain.errors import ConfigError
from jaxtrain.models.from_nnx import scan_stack
from jaxtrain.models.model import Model

ROWS = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
BATCH = {"inputs": ROWS, "targets": (np.arange(16) % 3).astype(np.int32)}


def trained(model: Model, *, steps: int = 3, **options: Any) -> Any:
    """The state after a few steps on one device, and the step."""
    mesh = jt.make_mesh(devices=jax.devices()[:1])
    step = jt.make_train_step(model, jt.classification(), optax.sgd(0.1), mesh=mesh, **options)
    state = step.init(0)
    for _ in range(steps):
        state, metrics = step(state, BATCH)
    assert np.isfinite(metrics["loss"])
    return state, step


class Regularised(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(x)))


def test_call_finds_the_module_in_the_mode_of_the_step() -> None:
    plain = jt.from_nnx(Regularised)
    called = jt.from_nnx(Regularised, call=lambda module, inputs, key, train: module(inputs))
    params, model_state = jax.jit(plain.init)(jax.random.key(0))

    @jax.jit
    def run(params: Any) -> Any:
        return [
            [model.apply(params, model_state, ROWS, key=jax.random.key(1), train=train)[0] for model in (plain, called)]
            for train in (True, False)
        ]

    for outputs in run(params):
        np.testing.assert_array_equal(*outputs)


TOKENS = np.arange(16, dtype=np.int32).reshape(2, 8)


def transformer(**keys: Any) -> Model:
    sizes = {"num_layers": 1, "num_heads": 2, "embed_dim": 8, "max_sequence_length": 8, "vocab_size": 16}
    return jt.build_model({"kind": "transformer", **sizes, **keys}, input_shape=(8,), num_outputs=16)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"tokens": TOKENS, "attention_mask": TOKENS}, "takes integers tokens, positions, segments.*attention_mask"),
        ({"segments": TOKENS}, "takes integers tokens"),
        (TOKENS.astype(np.float32), "takes integers tokens"),
    ],
    ids=["attention_mask", "no-tokens", "float-tokens"],
)
def test_inputs_that_the_transformer_would_not_read(inputs: Any, message: str) -> None:
    model = transformer()
    params = jax.eval_shape(model.init, jax.random.key(0))[0]
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda params: model.apply(params, {}, inputs, key=None, train=False)[0], params)


def scaled(make_scale: Any) -> Any:
    """A maker of a module whose attribute `scale` is what `make_scale` gives."""

    class Scaled(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.head = nnx.Linear(4, 3, rngs=rngs)
            self.scale = make_scale()

        def __call__(self, x):
            return self.head(x) * jax.tree.leaves(self.scale)[0]

    return Scaled


@pytest.mark.long
@pytest.mark.parametrize(
    "make_scale",
    [lambda: np.arange(3, dtype=np.float32) + 1, lambda: nnx.List([jnp.arange(3) + 1])],
    ids=["numpy", "list-of-integers"],
)
def test_arrays_that_are_plain_attributes_are_constants(make_scale: Any) -> None:
    model = jt.from_nnx(scaled(make_scale))
    state, _ = trained(model, accumulation_steps=2)
    np.testing.assert_array_equal(jax.tree.leaves(state.model_state)[0], [1, 2, 3])


class ScaledBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(4, 4, rngs=rngs)
        self.scale = jnp.full(4, 0.5)

    def __call__(self, x):
        return x + self.scale * self.inner(x)


class Stacked(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = jt.make_stack(ScaledBlock, 2, rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x, _ = scan_stack(self.blocks, lambda b, x, *_: (b(x), None), x, path="blocks", remat=jt.Remat(policy="none"))
        return self.head(x)


def test_constants_of_a_stack() -> None:
    state, _ = trained(jt.from_nnx(Stacked))
    np.testing.assert_array_equal(state.model_state["blocks"]["scale"], np.full((2, 4), 0.5))
    with pytest.raises(ConfigError, match=r"blocks/scale is not a parameter; .* nnx\.Param"):
        jt.from_stages(
            Stacked,
            stack="blocks",
            embed=lambda net, x, key, train: x,
            block=lambda block, x, inputs, key, train: block(x),
            head=lambda net, x, train: net.head(x),
        )


class Sowing(linen.Module):
    """Sows into a collection of its own, and into one that holds a counter."""

    @linen.compact
    def __call__(self, x, train: bool = False):
        count = self.variable("counts", "calls", lambda: jnp.int32(0))
        if train and not self.is_initializing():
            count.value = count.value + 1
        h = linen.Dense(8)(x)
        self.sow("losses", "aux", jnp.mean(h**2))
        self.sow("counts", "aux", jnp.mean(h))
        if train:
            self.sow("counts", "in_training", jnp.mean(h))
        return linen.Dense(3)(linen.relu(h))


def test_what_a_linen_module_sows_is_not_state() -> None:
    accumulation_steps = 2
    model = jt.from_linen(Sowing(), jax.ShapeDtypeStruct((1, 4), jnp.float32))
    state, step = trained(model, accumulation_steps=accumulation_steps)
    assert jax.tree.map(int, state.model_state) == {"counts": {"calls": 3 * accumulation_steps}}
    assert np.isfinite(jt.Evaluator(step)(state, [BATCH])["eval_loss"])
