"""Dropout and batch statistics of users' own modules, against what the layers are documented to do."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jaxtrain as jt
from jaxtrain.errors import ConfigError
from jaxtrain.models.from_nnx import from_nnx
from jaxtrain.models.wrap import from_linen

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


class LinenDropout(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool):
        x = x * self.param("scale", lambda key: jnp.ones(()))
        first, second = (linen.Dropout(0.5, deterministic=not train) for _ in range(2))
        return jnp.stack([first(x), second(x), first(x)])


class LinenNoise(linen.Module):
    """Draws from a stream with a name of its own."""

    @linen.compact
    def __call__(self, x, training: bool = False):
        x = x * self.param("scale", lambda key: jnp.ones(()))
        if not training:
            return jnp.stack([x] * 3)
        return jnp.stack([2 * x * jax.random.bernoulli(self.make_rng("noise"), 0.5, x.shape) for _ in range(3)])


class NNXNorm(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(64, momentum=0.9, epsilon=0.0, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


class LinenNorm(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool):
        return linen.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=0.0, name="norm")(x)


class LinenFieldNorm(linen.Module):
    """Told by a field, as modules that others configure are."""

    use_running_average: bool = True

    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(self.use_running_average, momentum=0.9, epsilon=0.0, name="norm")(x)


def applied(model, inputs, *, seed, train, state=None):
    """With parameters that are one: the functions of a model are compiled for each of its calls once."""
    shapes, first_state = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
    if state is None:
        state = jax.jit(model.init)(jax.random.key(0))[1] if first_state else {}
    return run(model, params, state, inputs, jax.random.key(seed), train)


@functools.partial(jax.jit, static_argnums=(0, 5))
def compiled(apply, params, state, inputs, key, train):
    return apply(params, state, inputs, key=key, train=train)


def run(model, *arguments):
    return compiled(model.apply, *arguments)


DROPOUT = {
    "nnx": lambda: from_nnx(NNXDropout),
    "linen train": lambda: from_linen(LinenDropout(), ONES),
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


NORMS = {
    "nnx": (lambda: from_nnx(NNXNorm), lambda state: state["norm"]),
    "linen": (lambda: from_linen(LinenNorm(), ROWS), lambda state: state["batch_stats"]["norm"]),
    "linen, by a field": (lambda: from_linen(LinenFieldNorm(), ROWS), lambda state: state["batch_stats"]["norm"]),
}


@pytest.mark.parametrize(("make", "statistics"), NORMS.values(), ids=NORMS)
def test_batch_statistics(make, statistics):
    model = make()
    outputs, state = applied(model, ROWS, seed=0, train=True)
    mean, variance = ROWS.mean(0), ROWS.var(0)
    # fp32 means of 4 values.
    np.testing.assert_allclose(outputs, (ROWS - mean) / np.sqrt(variance) + 1, atol=1e-5)  # a bias of 1
    np.testing.assert_allclose(statistics(state)["mean"], 0.1 * mean, atol=1e-6)
    np.testing.assert_allclose(statistics(state)["var"], 0.9 + 0.1 * variance, rtol=1e-5)
    # Evaluation uses the running ones and leaves them.
    evaluated, same = applied(model, ROWS, seed=0, train=False, state=state)
    running = (ROWS - 0.1 * mean) / np.sqrt(0.9 + 0.1 * variance) + 1
    np.testing.assert_allclose(evaluated, running, atol=1e-5)
    np.testing.assert_array_equal(statistics(same)["mean"], statistics(state)["mean"])


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
    (drawn, _), (params, state) = (jax.jit(model.init)(jax.random.key(1)) for model in (by_class, by_instance))
    assert not np.array_equal(drawn["linear"]["kernel"], own)
    np.testing.assert_array_equal(params["linear"]["kernel"], own)
    found = [run(by_instance, params, state, ROWS, jax.random.key(seed), True) for seed in (1, 1, 2)]
    assert np.array_equal(found[0][0], found[1][0])
    assert not np.array_equal(found[0][0], found[2][0])
    assert jnp.any(found[0][1]["norm"]["mean"])
    assert not jnp.any(module.norm.mean[...])


EQUINOX_INPUTS = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key):
        first, last = jax.random.split(key)
        # Without a bias, which a batch norm would remove again: its gradient is rounding, which Adam scales up.
        self.first = eqx.nn.Linear(8, 16, use_bias=False, key=first)
        self.norm, self.drop = eqx.nn.BatchNorm(16, "batch", mode="batch"), eqx.nn.Dropout(0.5)
        self.last = eqx.nn.Linear(16, 4, key=last)

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(self.first(x), state)
        return self.last(self.drop(jax.nn.relu(x), key=key)), state


def test_outputs_are_those_of_an_equinox_module():
    make = lambda key: eqx.nn.MLP(8, 4, 16, 2, key=key)  # noqa: E731  # the form that users write
    model = jt.from_equinox(make)
    params, state = model.init(jax.random.key(3))
    found, _ = run(model, params, state, EQUINOX_INPUTS, None, False)
    np.testing.assert_allclose(found, jax.vmap(make(jax.random.key(3)))(EQUINOX_INPUTS), rtol=1e-5, atol=1e-6)
    assert sorted(params["layers"]["0"]) == ["bias", "weight"]
    assert state == {}


def test_state_and_dropout_of_equinox_follow_training_and_evaluation():
    model = jt.from_equinox(eqx.nn.make_with_state(EquinoxNet))
    params, before = model.init(jax.random.key(0))
    key = jax.random.key(1)
    trained, after = run(model, params, before, EQUINOX_INPUTS, key, True)
    again, unchanged = run(model, params, after, EQUINOX_INPUTS, None, False)
    module, state = eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0))
    module = eqx.nn.inference_mode(module)
    state = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(after))
    wanted, _ = jax.vmap(module, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(EQUINOX_INPUTS, state)
    np.testing.assert_allclose(again, wanted, rtol=1e-5, atol=1e-6)
    assert not np.array_equal(trained, again)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, before)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
    assert any(jax.tree.leaves(changed))
    assert not any(jax.tree.leaves(jax.tree.map(lambda a, b: not np.array_equal(a, b), after, unchanged)))


@pytest.mark.long
def test_a_mesh_gives_the_losses_of_one_device_for_equinox():
    batch = {"inputs": EQUINOX_INPUTS, "targets": np.arange(16) % 4}
    losses = []
    for degrees, devices in (({}, jax.devices()[:1]), ({"data": 2, "fsdp": 4}, jax.devices())):
        mesh, model = jt.make_mesh(**degrees, devices=devices), jt.from_equinox(eqx.nn.make_with_state(EquinoxNet))
        step = jt.make_train_step(model, jt.classification(), optax.adam(0.05), mesh=mesh)
        state, found = step.init(0), []
        for _ in range(3):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        losses.append(found)
    np.testing.assert_allclose(*losses, rtol=1e-5)  # the bound of every layout


def test_what_is_no_equinox_module_is_refused():
    for make in (eqx.nn.Identity(), lambda key: 3):
        with pytest.raises(ConfigError, match="takes a function"):
            jt.from_equinox(make)
