"""Policy fp8 on meshes: every layout trains as one device does, also where its rows weigh unequally."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import CASES, ONE, Layout, distance, layout, load_batches, make_step, transformer

from jaxtrain.parallel.microbatches import as_means, loss_constant, loss_divisor
from jaxtrain.precision.policy import Policy

# Linear layers in 8 bits, all else in float32, so that a difference is one of the 8-bit products: in bf16 every sum in
# another order would hide it.
POLICY = Policy("fp8 in float32", jnp.float32, jnp.float32, "highest", linear_format="fp8")
CASE = dataclasses.replace(CASES["transformer"], model=lambda remat: transformer(remat, num_layers=2))
STEPS = 4

# A scale that a shard chooses changes only what rounds to subnormals of the format, and a sum in another order may move
# a few numbers across the middle between two of its values, which are 1/8 of the number apart: measured 3e-7 on losses
# and 4e-9 on parameters (also for data=4) with these rows, and 4e-7 and 1.4e-5 with whole ones. That linear layers
# round to 8 bits at all moves the losses by 5e-5 in these steps, and the parameters by 1e-3. So do means of shards and
# microbatches that are differentiated as such: 1.5e-5 and 1e-3.
LOSS_TOLERANCE = 2e-6
PARAMETER_TOLERANCE = 5e-5

ACCUMULATION = 2
ROWS = {
    # Automatic: the largest magnitude is that of the whole tensor. Here the sequence is sharded too, and the batch is
    # not split, so that its one mean has another weight than that of any microbatch.
    "fsdp=2,tensor=2,sequence-parallel": (layout(fsdp=2, tensor=2, sp=True), 1),
    # Manual over data and pipe: it is that of the shard.
    "pipe=2,data=2": (layout(pipe=2, data=2), ACCUMULATION),
}


def padded_batches():
    """Rows of 5 to 32 tokens, so that shards and microbatches weigh unequally, as those of documents and chats do."""
    for batch in load_batches("transformer")[:STEPS]:
        rows, length = batch["targets"].shape
        ends = 5 + 11 * np.arange(rows)[:, None] ** 2 % 28
        yield {**batch, "weights": (np.arange(length) < ends).astype(np.float32)}


def train(where: Layout, accumulation: int = ACCUMULATION):
    step = make_step(CASE, where, accumulation, "dots", POLICY)
    batches = list(padded_batches())
    step.compile(batches[0])
    # One initialisation for all: that of other layouts is proved elsewhere.
    first, key = start()
    first = dataclasses.replace(first, key=jax.random.wrap_key_data(key))  # a step takes the arrays that it is given
    state = jax.device_put(first, step.state_shardings)
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.array(losses), jax.device_get(state.params)


@functools.cache
def start():
    state = make_step(CASE, ONE, ACCUMULATION, "dots", POLICY).init(0)
    return jax.device_get((dataclasses.replace(state, key=0), jax.random.key_data(state.key)))


@functools.cache
def alone():
    return train(ONE)


@pytest.mark.parametrize(("weight", "power"), [(1, 1), (7, 4), (8, 8), (0.3, 0.25), (0, 1), (-5, 4)])
def test_losses_are_differentiated_over_powers_of_two(weight, power):
    weight = jnp.float32(weight)
    assert float(loss_divisor(weight, powers_of_two=True)) == power
    if abs(weight) >= 0.1:
        assert loss_constant(abs(float(weight)), powers_of_two=True) == power
        mean = as_means(jnp.bfloat16(3), weight, powers_of_two=True)
        np.testing.assert_allclose(mean * weight, 3 * power, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS)
def test_layout(row):
    where, accumulation = ROWS[row]
    losses, params = train(where, accumulation=accumulation)
    expected, expected_params = alone()
    np.testing.assert_allclose(losses, expected, rtol=LOSS_TOLERANCE)
    assert distance(params, expected_params) < PARAMETER_TOLERANCE
