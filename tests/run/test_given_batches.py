"""Batches that a program gives: arrays that are refilled, iterators that end or were read before, and lists."""

from collections.abc import Iterator

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.data.stream import BatchStream

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
Y = X.argmax(-1).astype(np.int32)


def model() -> jt.Model:
    return jt.from_functions(
        lambda key: {"w": 0.1 * jax.random.normal(key, (4, 4))}, lambda params, x: x @ params["w"], name="linear"
    )


def refilling() -> Iterator[dict[str, np.ndarray]]:
    """Batches of 8 rows, all in the same two arrays."""
    inputs, targets = np.zeros((8, 4), np.float32), np.zeros(8, np.int32)
    for start in range(0, 64, 8):
        inputs[:], targets[:] = X[start : start + 8], Y[start : start + 8]
        yield {"inputs": inputs, "targets": targets}


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("by_hand", [False, True], ids=["a stream", "step.place"])
def test_arrays_that_are_refilled_leave_earlier_batches_alone(by_hand: bool, num_devices: int) -> None:
    step = jt.make_train_step(
        model(), jt.classification(), optax.sgd(0.1), mesh=jt.make_mesh(devices=jax.devices()[:num_devices])
    )
    if by_hand:
        found = [step.place(batch) for batch in refilling()]
    else:
        load = step.loader(BatchStream(refilling()))
        found = [load(k) for k in range(8)]
    np.testing.assert_array_equal(np.concatenate([batch["inputs"] for batch in found]), X)
    np.testing.assert_array_equal(np.concatenate([batch["targets"] for batch in found]), Y)
