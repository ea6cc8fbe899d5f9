"""Options of a train step: what each means at its ends, and one line for what it cannot be."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.errors import ConfigError

MODEL = jt.from_functions(lambda key: {"w": jax.random.normal(key, (3, 2))}, lambda params, x: x @ params["w"])
BATCH = {"inputs": np.ones((4, 3), np.float32), "targets": np.zeros((4, 2), np.float32)}


def make(optimizer=None, **options):
    mesh = jt.make_mesh(devices=jax.devices()[:1])
    return jt.make_train_step(MODEL, jt.regression(), optimizer or optax.sgd(0.1), mesh=mesh, **options)


def train(step, steps: int = 3):
    state = step.init(0)
    for _ in range(steps):
        state, metrics = step(state, BATCH)
    return state, metrics


def test_an_infinite_clip_norm_clips_nothing():
    (clipped, _), (plain, _) = train(make(clip_norm=float("inf"))), train(make())
    np.testing.assert_array_equal(clipped.params["w"], plain.params["w"])


def test_an_option_out_of_range_is_one_line():
    with pytest.raises(
        ConfigError,
        match=r"optimizer takes an optax transformation, .*accumulation_steps in place of optax\.MultiSteps",
    ):
        make(optax.MultiSteps(optax.sgd(0.1), 2))
    for option in ({"clip_norm": 0}, {"ema_decay": 1.0}, {"accumulation_steps": 0}):
        [(name, value)] = option.items()
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            make(**option)


def test_a_compiled_step_takes_no_other_shape():
    step = make()
    step.compile(BATCH)
    with pytest.raises(TypeError, match="compiled"):
        step(step.init(0), {name: np.concatenate([leaf, leaf]) for name, leaf in BATCH.items()})


def test_every_integer_is_a_seed_and_nothing_else():
    step = make()
    for seed in (np.int64(3), np.uint8(3), jnp.int32(3), jax.random.key(3)):
        np.testing.assert_array_equal(step.init(seed).params["w"], step.init(3).params["w"])
    with pytest.raises(ConfigError, match="more than 32 bits"):
        step.init(2**32 + 5)
    with pytest.raises(TypeError):
        step.init(0.5)


def test_weight_decay_of_bf16_parameters_is_not_rounded_before_it_counts():
    decays = []

    def update(updates, state, params=None):
        decays.append(params["w"].dtype)
        return updates, state

    train(make(optax.GradientTransformation(lambda _: optax.EmptyState(), update), policy="bf16_pure"), 1)
    assert set(decays) == {jnp.dtype("float32")}


READ_THE_LOSS = {
    "reduce_on_plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, rtol=0.9)),
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=0.1),
}


@pytest.mark.parametrize(
    ("name", "offload"), [pytest.param("reduce_on_plateau", False, marks=pytest.mark.long), ("polyak_sgd", True)]
)
def test_an_optimizer_that_reads_the_loss_gets_it(name, offload):
    optimizer = READ_THE_LOSS[name]()
    state, _ = train(make(optimizer, offload_optimizer=offload), 4)

    def loss(params):
        return jnp.mean(jnp.square(BATCH["inputs"] @ params["w"] - BATCH["targets"]))

    @jax.jit
    def update(params, own):
        value, gradient = jax.value_and_grad(loss)(params)
        updates, own = optimizer.update(gradient, own, params, value=value)
        return optax.apply_updates(params, updates), own

    params = make().init(0).params
    own = optimizer.init(params)
    for _ in range(4):
        params, own = update(params, own)
    np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-5)
