"""Policy fp8 on meshes: every layout trains as one device does, also where its rows weigh unequally."""

import dataclasses
import functools
from typing import Any

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

# A scale that a shard chooses changes only what rounds to subnormals of the format, and a sum in another order may move
# a few numbers across the middle between two of its values, which are 1/8 of the number apart: measured 3e-7 on losses
# and 4e-9 on parameters (also for data=4) with these rows, and 4e-7 and 1.4e-5 with whole ones. That linear layers
# round to 8 bits at all moves the losses by 5e-5 in these steps, and the parameters by 1e-3. So do means of shards and
# microbatches that are differentiated as such: 1.5e-5 and 1e-3.
LOSS_TOLERANCE = 2e-6
PARAMETER_TOLERANCE = 5e-5

ROWS = {
    # Automatic: the largest magnitude is that of the whole tensor. Here the sequence is sharded too, and the batch is
    # not split, so that its one mean has another weight than that of any microbatch.
    "fsdp=2,tensor=2,sequence-parallel": (layout(fsdp=2, tensor=2, sp=True), 1),
    # Manual over data and pipe: it is that of the shard.
    "pipe=2,data=2": (layout(pipe=2, data=2), 2),
}


def train(where: Layout, accumulation: int) -> tuple[np.ndarray, Any]:
    """Losses and parameters; rows of 5 to 32 tokens, so that shards and microbatches weigh unequally."""
    step = make_step(CASE, where, accumulation, "dots", POLICY)
    state, losses = step.init(0), []
    for batch in load_batches("transformer")[:4]:
        rows, length = batch["targets"].shape
        ends = 5 + 11 * np.arange(rows)[:, None] ** 2 % 28
        state, metrics = step(state, {**batch, "weights": (np.arange(length) < ends).astype(np.float32)})
        losses.append(float(metrics["loss"]))
    return np.array(losses), jax.device_get(state.params)


alone = functools.cache(lambda: train(ONE, 2))


def test_losses_are_differentiated_over_powers_of_two() -> None:
    for weight, power in ((7, 4), (8, 8), (0.3, 0.25)):
        assert float(loss_divisor(jnp.float32(weight), powers_of_two=True)) == power
        assert loss_constant(weight, powers_of_two=True) == power
        mean = as_means(jnp.bfloat16(3), jnp.float32(weight), powers_of_two=True)
        np.testing.assert_allclose(mean * weight, 3 * power, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS)
def test_layout(row: str) -> None:
    (losses, params), (expected, expected_params) = train(*ROWS[row]), alone()
    np.testing.assert_allclose(losses, expected, rtol=LOSS_TOLERANCE)
    assert distance(params, expected_params) < PARAMETER_TOLERANCE
