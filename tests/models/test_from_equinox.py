"""Equinox modules: what the library applies is what the module itself computes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt

INPUTS = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)


class Net(eqx.Module):
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


def test_outputs_are_those_of_the_module():
    make = lambda key: eqx.nn.MLP(8, 4, 16, 2, key=key)  # noqa: E731  # the form that users write
    model = jt.from_equinox(make)
    params, state = model.init(jax.random.key(3))
    found, _ = model.apply(params, state, INPUTS, key=None, train=False)
    np.testing.assert_array_equal(found, jax.vmap(make(jax.random.key(3)))(INPUTS))
    assert sorted(params["layers"]["0"]) == ["bias", "weight"]
    assert state == {}


def test_state_and_dropout_follow_training_and_evaluation():
    model = jt.from_equinox(eqx.nn.make_with_state(Net))
    params, before = model.init(jax.random.key(0))
    key = jax.random.key(1)
    trained, after = model.apply(params, before, INPUTS, key=key, train=True)
    again, unchanged = model.apply(params, after, INPUTS, key=None, train=False)
    module, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    module = eqx.nn.inference_mode(module)
    state = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(after))
    wanted, _ = jax.vmap(module, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(INPUTS, state)
    np.testing.assert_array_equal(again, wanted)
    assert not np.array_equal(trained, again)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, before)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
    assert any(jax.tree.leaves(changed))
    assert not any(jax.tree.leaves(jax.tree.map(lambda a, b: not np.array_equal(a, b), after, unchanged)))


@pytest.mark.long
@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 4}], ids=["data2_fsdp4"])
def test_a_mesh_gives_the_losses_of_one_device(mesh):
    batch = {"inputs": INPUTS, "targets": np.arange(16) % 4}
    losses = []
    for degrees, devices in (({}, jax.devices()[:1]), (mesh, jax.devices())):
        step = jt.make_train_step(
            jt.from_equinox(eqx.nn.make_with_state(Net)),
            jt.classification(),
            optax.adam(0.05),
            mesh=jt.make_mesh(**degrees, devices=devices),
        )
        state = step.init(0)
        found = []
        for _ in range(4):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        losses.append([*found, jt.Evaluator(step)(state, [batch])["eval_loss"]])
    np.testing.assert_allclose(*losses, rtol=1e-5)  # the bound of every layout


WRONG = {
    "a_module": (eqx.nn.Identity(), "takes a function from a key to a module, not an instance of Identity"),
    "another_result": (lambda key: 3, "takes a function that returns an equinox.Module, or a module and its state"),
}


@pytest.mark.parametrize("case", WRONG)
def test_anything_else_is_one_line(case):
    make, message = WRONG[case]
    with pytest.raises(jt.ConfigError, match=message) as found:
        jt.from_equinox(make)
    assert "\n" not in str(found.value)
