"""Fused attention on the shards of a mesh: each kernel's losses against the reference's."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from layouts import CASES, LAYOUTS, ONE, Layout, load_batches, make_step

from jaxtrain.ops.attention import table as attention
from jaxtrain.ops.attention.blockwise import blockwise_attention
from jaxtrain.ops.attention.reference import reference_attention
from jaxtrain.ops.attention.table import BLOCKWISE, CUDNN, SPLASH


def train(row: Layout) -> np.ndarray:
    """Losses of three steps with the kernel that the table of attention chooses."""
    batch = load_batches("transformer")[0]
    step = make_step(CASES["transformer"], row, 4, "dots")
    step.compile(batch)
    state = dataclasses.replace(first_state(), key=jax.random.key(0))
    state, found = jax.device_put(state, step.state_shardings), []
    for _ in range(3):
        state, metrics = step(state, batch)
        found.append(metrics["loss"])
    return np.array(jax.device_get(found))


@functools.cache
def first_state() -> Any:
    """The state that every row starts from, on the host."""
    step = make_step(CASES["transformer"], ONE, 4, "dots")
    return jax.device_get(dataclasses.replace(step.init(0), key=0))


@functools.cache
def plain_losses() -> np.ndarray:
    """Those of the reference on one device, before any kernel is replaced."""
    return train(ONE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kernel", "row"),
    [
        ("cudnn", "tensor=2,fsdp=2,data=2"),
        ("cudnn", "pipe=2,data=2,tensor=2,zero=1"),
        ("splash", "pipe=2,data=2,tensor=2,zero=1"),
        ("blockwise", "pipe=2,data=2,tensor=2,zero=1"),
    ],
)
def test_on_the_shards_it_gives_the_losses_of_the_reference(monkeypatch, kernel: str, row: str) -> None:
    """Inside the regions of accumulation (manual over data) and of pipelines too; float32 sums in another order.

    The kernels of absent hardware are replaced inside, cuDNN's by XLA's attention and splash by the plain formula; what
    stands around them is what runs there.
    """
    plain = plain_losses()
    original, calls = jax.nn.dot_product_attention, []

    def pretended(*arguments, implementation, **settings):
        return original(*arguments, implementation="xla", **settings)

    def counted(row: attention.Kernel, attend: attention.Attend) -> attention.Kernel:
        def call(*arguments: Any) -> jax.Array:
            calls.append(row.name)
            return attend(*arguments)

        return dataclasses.replace(row, attend=call)

    def plain_splash(heads: int, length: int, form: Any, *, interpret: bool) -> Any:
        def kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            q, k, v = (x.swapaxes(0, 1)[None] for x in (q * q.shape[-1] ** 0.5, k, v))
            return reference_attention(q, k, v, None, form)[0].swapaxes(0, 1)

        return kernel

    monkeypatch.setattr(jax.nn, "dot_product_attention", pretended)
    monkeypatch.setattr(attention, "_kernel", plain_splash)
    rows = {
        "cudnn": counted(CUDNN, CUDNN.attend),
        "splash": counted(SPLASH, SPLASH.attend),
        "blockwise": counted(BLOCKWISE, functools.partial(blockwise_attention, block=4)),
    }
    monkeypatch.setattr(attention, "TABLE", {"cpu": (rows[kernel],)})
    np.testing.assert_allclose(train(LAYOUTS[row]), plain, rtol=1e-5)
    assert set(calls) == {kernel}
