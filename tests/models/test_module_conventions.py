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
from jaxtrain.models.model import Model
from jaxtrain.models.stack import scan_stack

ROWS = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
BATCH = {"inputs": ROWS, "targets": (np.arange(16) % 3).astype(np.int32)}


def trained(model: Model, *, steps: int = 3, **options: Any) -> Any:
    """The state after a few steps, and the step."""
    step = jt.make_train_step(model, jt.classification(), optax.sgd(0.1), **options)
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
    params, model_state = plain.init(jax.random.key(0))
    for train in (True, False):
        outputs = [
            model.apply(params, model_state, ROWS, key=jax.random.key(1), train=train)[0] for model in (plain, called)
        ]
        np.testing.assert_array_equal(*outputs)


TOKENS = np.arange(16, dtype=np.int32).reshape(2, 8)


def transformer(**keys: Any) -> Model:
    sizes = {"num_layers": 1, "num_heads": 2, "embed_dim": 8, "max_sequence_length": 8, "vocab_size": 16}
    return jt.build_model({"kind": "transformer", **sizes, **keys}, input_shape=(8,), num_outputs=16)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"tokens": TOKENS, "segment_ids": TOKENS}, "'segment_ids'.* did you mean 'segments'"),
        ({"tokens": TOKENS, "position_ids": TOKENS}, "'position_ids'.* did you mean 'positions'"),
        ({"tokens": TOKENS, "attention_mask": TOKENS}, "'attention_mask'.* did you mean 'segments'.* weights of 0"),
        ({"input_ids": TOKENS}, "'input_ids'.* did you mean 'tokens'"),
        ({"segments": TOKENS}, "no entry 'tokens'"),
        (TOKENS.astype(np.float32), "tokens .* are integers, but the inputs hold float32"),
    ],
    ids=["segment_ids", "position_ids", "attention_mask", "input_ids", "no-tokens", "float-tokens"],
)
def test_inputs_that_the_transformer_would_not_read(inputs: Any, message: str) -> None:
    model = transformer()
    with pytest.raises(ConfigError, match=message) as raised:
        jax.eval_shape(lambda key: model.apply(*model.init(key), inputs, key=None, train=False)[0], jax.random.key(0))
    assert "\n" not in str(raised.value)


def scaled(make_scale: Any) -> Any:
    """A maker of a module whose attribute `scale` is what `make_scale` gives."""

    class Scaled(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.head = nnx.Linear(4, 3, rngs=rngs)
            self.scale = make_scale()

        def __call__(self, x):
            return self.head(x) * jax.tree.leaves(self.scale)[0]

    return Scaled


@pytest.mark.parametrize(
    "make_scale",
    [
        lambda: jnp.arange(3.0) + 1,
        lambda: np.arange(3, dtype=np.float32) + 1,
        lambda: nnx.data(np.arange(3, dtype=np.float32) + 1),
        lambda: nnx.List([jnp.arange(3) + 1]),
    ],
    ids=["jax", "numpy", "data", "list-of-integers"],
)
def test_arrays_that_are_plain_attributes_are_constants(make_scale: Any) -> None:
    model = jt.from_nnx(scaled(make_scale))
    state, _ = trained(model, accumulation_steps=2)
    np.testing.assert_array_equal(jax.tree.leaves(state.model_state)[0], [1, 2, 3])
    outputs, _ = model.apply(state.params, state.model_state, ROWS, key=None, train=False)
    head = state.params["head"]
    np.testing.assert_allclose(outputs, (ROWS @ head["kernel"] + head["bias"]) * np.arange(1, 4), rtol=1e-5, atol=1e-6)


def test_an_array_in_a_tuple_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scale of the module is a tuple .* nnx\.Variable"):
        jt.from_nnx(scaled(lambda: (jnp.ones(3),)))


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
        x, _ = scan_stack(self.blocks, lambda b, x, *_: (b(x), None), x, path="blocks", remat=jt.Remat())
        return self.head(x)


def test_constants_of_a_stack() -> None:
    state, _ = trained(jt.from_nnx(Stacked))
    np.testing.assert_array_equal(state.model_state["blocks"]["scale"], np.full((2, 4), 0.5))
    with pytest.raises(ConfigError, match=r"blocks/scale is not a parameter; .* wrap them in nnx\.Param"):
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


def test_a_linen_module_that_draws_in_evaluation_is_one_line():
    class Noisy(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(2)(x) + jax.random.normal(self.make_rng("noise"), (2,))

    model = jt.from_linen(Noisy(), np.ones((1, 3), np.float32))
    params, state = model.init(jax.random.key(0))
    with pytest.raises(ConfigError, match="Noisy draws random numbers in evaluation") as caught:
        model.apply(params, state, np.ones((1, 3), np.float32), key=None, train=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_what_a_linen_module_sows_is_not_state(accumulation_steps: int) -> None:
    model = jt.from_linen(Sowing(), jax.ShapeDtypeStruct((1, 4), jnp.float32))
    state, step = trained(model, accumulation_steps=accumulation_steps)
    assert jax.tree.map(int, state.model_state) == {"counts": {"calls": 3 * accumulation_steps}}
    assert np.isfinite(jt.Evaluator(step)(state, [BATCH])["eval_loss"])


def permuted(*names: str) -> Model:
    return jt.from_functions(
        lambda key: {"w": jax.random.normal(key, (4, 3)), **{name: jnp.arange(4)[::-1] for name in names}},
        lambda params, x: x[:, params[names[0]]] @ params["w"],
    )


@pytest.mark.parametrize(
    ("names", "rule"),
    [(("order",), "path != 'order'"), (("order", "second"), r"path not in \('order', 'second'\)")],
    ids=["one", "two"],
)
def test_integers_do_not_train(names: tuple[str, ...], rule: str) -> None:
    with pytest.raises(ConfigError, match=f"parameter order holds int32.* trainable=lambda path: {rule}"):
        jt.make_train_step(permuted(*names), jt.classification(), optax.sgd(0.1)).init(0)
    state, _ = trained(permuted(*names), trainable=lambda path: path not in names)
    np.testing.assert_array_equal(state.params["order"], [3, 2, 1, 0])


def test_rotary_positions_need_an_even_head() -> None:
    for keys in ({"head_dim": 3}, {"embed_dim": 6}):
        with pytest.raises((ConfigError, ValueError), match="head_dim 3 is odd, but rotary positions"):
            transformer(position="rotary", **keys)
    transformer(position="learned", head_dim=3)
