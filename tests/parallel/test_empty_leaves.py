"""A parameter without elements, as an optional part of a model may have, trains on every layout."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import COMPILER, ONE, Layout, layout

import jaxtrain as jt
from jaxtrain.layout.mesh import make_mesh


def _losses(where: Layout, accumulation: int) -> list[float]:
    model = jt.from_functions(
        lambda key: {"w": jax.random.normal(key, (8, 4)), "none": jnp.zeros((0, 4)), "narrow": jnp.zeros((4, 0))},
        lambda params, x: x @ params["w"] + params["none"].sum(0) + params["narrow"].sum(),
    )
    step = jt.make_train_step(
        model,
        jt.classification(),
        optax.adamw(1e-2),
        mesh=make_mesh(**{"data": 1, **where.degrees}, devices=jax.devices()[: math.prod(where.degrees.values())]),
        accumulation_steps=accumulation,
        parallelism=where.options,
        compiler_options=COMPILER,
    )
    random, state, found = np.random.default_rng(0), step.init(0), []
    for _ in range(2):
        batch = {"inputs": random.normal(size=(16, 8)).astype(np.float32), "targets": random.integers(0, 4, 16)}
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.parametrize("where", [layout(data=4, zero=1), layout(data=2, fsdp=2, zero=2)], ids=["zero=1", "zero=2"])
def test_it_gives_the_losses_of_one_device(where: Layout) -> None:
    np.testing.assert_allclose(_losses(where, 2), _losses(ONE, 1), rtol=1e-5)
