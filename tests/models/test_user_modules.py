"""Dropout and batch statistics of users' own modules, against what the layers are documented to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxtrain.errors import ConfigError
from jaxtrain.models.from_linen import from_linen
from jaxtrain.models.from_nnx import from_nnx

ONES = np.ones((4, 64), np.float32)
ROWS = np.linspace(-1, 3, 4 * 64, dtype=np.float32).reshape(4, 64)


class NNXDropout(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(()))
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = x * self.scale[...]
        return jnp.stack([self.first(x), self.second(x), self.first(x)])


class NNXStackedDropout(nnx.Module):
    """Three layers, each with a stream of its own that its stack holds along a leading dim."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Dropout:
            return nnx.Dropout(0.5, rngs=rngs)

        self.scale = nnx.Param(jnp.ones(()))
        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))
        def scan(layer, x):
            return x, layer(x)

        return scan(self.layers, x * self.scale[...])[1]


class LinenDropout(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool):
        x = x * self.param("scale", lambda key: jnp.ones(()))
        first, second = (linen.Dropout(0.5, deterministic=not train) for _ in range(2))
        return jnp.stack([first(x), second(x), first(x)])


class LinenDeterministic(linen.Module):
    @linen.compact
    def __call__(self, x, deterministic: bool = True):
        return LinenDropout()(x, train=not deterministic)


class LinenBothWords(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool, deterministic: bool = True):
        assert train != deterministic
        return LinenDropout()(x, train)


class LinenField(linen.Module):
    is_training: bool = False

    @linen.compact
    def __call__(self, x):
        return LinenDropout()(x, self.is_training)


class LinenNoise(linen.Module):
    """Draws from a stream with a name of its own."""

    @linen.compact
    def __call__(self, x, training: bool = False):
        x = x * self.param("scale", lambda key: jnp.ones(()))
        if not training:
            return jnp.stack([x] * 3)
        return jnp.stack([2 * x * jax.random.bernoulli(self.make_rng("noise"), 0.5, x.shape) for _ in range(3)])


class LinenUntold(linen.Module):
    layer: linen.Module

    @linen.compact
    def __call__(self, x):
        return self.layer(linen.Dense(64)(x))


class NNXNorm(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(64, momentum=0.9, epsilon=0.0, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


class LinenNorm(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool):
        return linen.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=0.0, name="norm")(x)


def applied(model, inputs, *, seed, train, state=None):
    params, first_state = jax.jit(model.init)(jax.random.key(0))
    state = first_state if state is None else state
    run = jax.jit(lambda p, s, key: model.apply(p, s, inputs, key=key, train=train))
    return run(params, state, jax.random.key(seed))


DROPOUT = {
    "nnx": lambda: from_nnx(NNXDropout),
    "nnx stack": lambda: from_nnx(NNXStackedDropout),
    "linen train": lambda: from_linen(LinenDropout(), ONES),
    "linen deterministic": lambda: from_linen(LinenDeterministic(), ONES),
    "linen both words": lambda: from_linen(LinenBothWords(), ONES),
    "linen field": lambda: from_linen(LinenField(), ONES),
    "linen training, own stream": lambda: from_linen(LinenNoise(), ONES),
}


@pytest.mark.parametrize("make", DROPOUT.values(), ids=DROPOUT)
def test_dropout(make):
    model = make()
    one, _ = applied(model, ONES, seed=1, train=True)
    again, _ = applied(model, ONES, seed=1, train=True)
    other, _ = applied(model, ONES, seed=2, train=True)
    np.testing.assert_array_equal(one, again)
    assert set(np.unique(one)) == {0.0, 2.0}
    # Each layer, each call and each step draws a mask of its own: two of 256 fair bits agree in half of the places.
    masks = np.concatenate([np.asarray(one), np.asarray(other)]).reshape(6, -1) > 0
    for a in range(6):
        for b in range(a):
            # Five standard deviations of 0.5 / sqrt(256).
            assert abs(np.mean(masks[a] == masks[b]) - 0.5) < 5 * 0.5 / 16, (a, b)
    evaluated, _ = applied(model, ONES, seed=1, train=False)
    np.testing.assert_array_equal(evaluated, np.stack([ONES] * 3))


UNTOLD = {
    "dropout": linen.Dropout(0.5, deterministic=True),
    "attention": linen.SelfAttention(num_heads=1, dropout_rate=0.5, deterministic=True),
    "norm": linen.BatchNorm(use_running_average=True),
}


@pytest.mark.filterwarnings("ignore:SelfAttention:DeprecationWarning")
@pytest.mark.parametrize("layer", UNTOLD.values(), ids=UNTOLD)
def test_linen_layers_that_nothing_tells_to_train(layer):
    with pytest.raises(ConfigError, match=rf"^LinenUntold holds {type(layer).__name__}.*add `train: bool` to __call__"):
        from_linen(LinenUntold(layer), ONES)


def test_linen_modules_without_such_layers_need_no_argument():
    model = from_linen(LinenUntold(linen.Dropout(0.0, deterministic=True)), ONES)
    assert applied(model, ONES, seed=0, train=True)[0].shape == (4, 64)


def test_linen_takes_examples_in_float64_without_a_warning():
    """NumPy's default; the batch norm has `from_linen` look at the module's state as well."""
    model = from_linen(LinenNorm(), ROWS.astype(np.float64))
    assert model.init(jax.random.key(0))[1]["batch_stats"]["norm"]["mean"].dtype == jnp.float32


NORMS = {
    "nnx": (lambda: from_nnx(NNXNorm), lambda state: state["norm"]),
    "linen": (lambda: from_linen(LinenNorm(), ROWS), lambda state: state["batch_stats"]["norm"]),
}


@pytest.mark.parametrize(("make", "statistics"), NORMS.values(), ids=NORMS)
def test_batch_statistics(make, statistics):
    model = make()
    outputs, state = applied(model, ROWS, seed=0, train=True)
    mean, variance = ROWS.mean(0), ROWS.var(0)
    # fp32 means of 4 values.
    np.testing.assert_allclose(outputs, (ROWS - mean) / np.sqrt(variance), atol=1e-5)
    np.testing.assert_allclose(statistics(state)["mean"], 0.1 * mean, atol=1e-6)
    np.testing.assert_allclose(statistics(state)["var"], 0.9 + 0.1 * variance, rtol=1e-5)
    # Evaluation uses the running ones and leaves them.
    evaluated, same = applied(model, ROWS, seed=0, train=False, state=state)
    running = (ROWS - 0.1 * mean) / np.sqrt(0.9 + 0.1 * variance)
    np.testing.assert_allclose(evaluated, running, atol=1e-5)
    np.testing.assert_array_equal(statistics(same)["mean"], statistics(state)["mean"])


class NNXNotes(nnx.Module):
    """Writes down an activation on the way."""

    def __init__(self, rngs: nnx.Rngs):
        self.layer = nnx.Linear(64, 2, rngs=rngs)

    def __call__(self, x):
        x = self.layer(x)
        self.sow(nnx.Intermediate, "seen", x)
        return x


class LinenNotes(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(2)(x)
        self.sow("intermediates", "seen", x)
        return x


NOTES = {"nnx": lambda: from_nnx(NNXNotes), "linen": lambda: from_linen(LinenNotes(), ROWS)}


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")  # outside nnx.capture, as old modules do
@pytest.mark.parametrize("make", NOTES.values(), ids=NOTES)
def test_intermediates_are_not_state(make):
    # A state that grows on the first step would not fit the step's output shardings.
    _, state = applied(make(), ROWS, seed=0, train=True)
    assert state == {}


class LinenPartitioned(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model"))
        return linen.Dense(2, kernel_init=init)(x)


def test_linen_partitioning_boxes_are_taken_off():
    # Sharding comes from the axes table; a box would be neither a dict nor an array.
    model = from_linen(LinenPartitioned(), ROWS)
    params, _ = jax.jit(model.init)(jax.random.key(0))
    assert isinstance(params["Dense_0"]["kernel"], jax.Array)
    assert applied(model, ROWS, seed=0, train=True)[0].shape == (4, 2)


class FlaxStyle(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.norm, self.linear = nnx.BatchNorm(64, rngs=rngs), nnx.Linear(64, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.dropout(self.norm(x)))


def test_a_class_of_flax_style_and_an_instance_are_models_and_training_starts_from_the_values_of_the_instance():
    module = FlaxStyle(rngs=nnx.Rngs(7))
    own = np.asarray(module.linear.kernel[...])
    by_class, by_instance = (from_nnx(given) for given in (FlaxStyle, module))
    drawn, _ = by_class.init(jax.random.key(1))
    params, state = jax.jit(by_instance.init)(jax.random.key(1))
    assert not np.array_equal(drawn["linear"]["kernel"], own)
    np.testing.assert_array_equal(params["linear"]["kernel"], own)
    found = [by_instance.apply(params, state, ROWS, key=jax.random.key(seed), train=True) for seed in (1, 1, 2)]
    assert np.array_equal(found[0][0], found[1][0])
    assert not np.array_equal(found[0][0], found[2][0])
    assert jnp.any(found[0][1]["norm"]["mean"])
    assert not jnp.any(module.norm.mean[...])
