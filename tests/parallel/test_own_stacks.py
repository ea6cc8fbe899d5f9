"""A stack of a user's own module, whose table of axes does not say which dim counts layers, under ZeRO."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.models.stack import scan_stack
from jaxtrain.remat.policy import Remat


class Stacked(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = jt.make_stack(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 4, rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x, _ = scan_stack(
            self.blocks,
            lambda layer, x, key, extra: (jnp.tanh(layer(x)), None),
            x,
            path="blocks",
            remat=Remat("none"),
        )
        return self.head(x)


def losses(devices: int, zero: int, accumulation: int) -> list[float]:
    step = jt.make_train_step(
        jt.from_nnx(Stacked, gathers_itself=("blocks",)),
        jt.classification(),
        optax.sgd(0.5),
        mesh=jt.make_mesh(data=devices, devices=jax.devices()[:devices]),
        accumulation_steps=accumulation,
        parallelism=jt.Parallelism(zero=zero),
    )
    inputs = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    state, found = step.init(0), []
    for _ in range(3):
        state, metrics = step(state, {"inputs": inputs, "targets": np.arange(8, dtype=np.int32) % 3})
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.parametrize(
    ("zero", "accumulation"),
    [pytest.param(2, 2), pytest.param(1, 2, marks=pytest.mark.long), pytest.param(2, 1, marks=pytest.mark.long)],
)
def test_a_stack_that_is_scattered_over_its_layers_trains_as_on_one_device(zero: int, accumulation: int) -> None:
    # Float32 sums in another order.
    np.testing.assert_allclose(losses(2, zero, accumulation), losses(1, 0, accumulation), rtol=1e-5)
