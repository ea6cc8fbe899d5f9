"""cuDNN's attention: what it refuses, and that it may run on the shards (with XLA's own attention in its place)."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import CASES, TRANSFORMERS, load_batches, make_step

from jaxtrain.ops import attention, cudnn_attention

WHOLE = {"data": 1, "pipe": 1}


def gpu(monkeypatch, capability: str, degrees: dict[str, int] | None = None) -> None:
    """Pretend that the step is traced for GPUs of this compute capability."""
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    layout = SimpleNamespace(
        mesh=SimpleNamespace(devices=np.array([device]), shape=degrees or WHOLE),
        rules={"batch": ("data",), "sequence": (), "activation_heads": (), "activation_kv_heads": ()},
        degree=lambda axis: (degrees or WHOLE)[axis],
    )
    monkeypatch.setattr(cudnn_attention, "current_layout", lambda: layout)
    monkeypatch.setattr(cudnn_attention.importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("capability", "degrees", "dtype", "head_dim", "segments", "says"),
    [
        ("9.0", None, jnp.bfloat16, 64, False, None),
        ("8.0", None, jnp.float16, 128, False, None),
        ("", None, jnp.bfloat16, 64, False, None),
        ("9.0", None, jnp.float32, 64, False, "float32"),
        ("7.5", None, jnp.bfloat16, 64, False, "capability 7.5"),
        ("9.0", None, jnp.bfloat16, 63, False, "head dim is 63"),
        ("9.0", None, jnp.bfloat16, 256, False, "head dim is 256"),
        ("9.0", None, jnp.bfloat16, 64, True, "packed"),
        ("9.0", {"data": 3, "pipe": 1}, jnp.bfloat16, 64, False, "do not divide"),
    ],
)
def test_refusals(monkeypatch, capability, degrees, dtype, head_dim, segments, says) -> None:
    gpu(monkeypatch, capability, degrees)
    q = jax.ShapeDtypeStruct((2, 16, 4, head_dim), dtype)
    documents = jax.ShapeDtypeStruct((2, 16), jnp.int32) if segments else None
    found = cudnn_attention.refusal(q, q, documents)  # pyright: ignore[reportArgumentType]
    assert (found is None) == (says is None), found
    assert says is None or says in str(found)


def test_cpu_is_refused() -> None:
    q = jnp.zeros((2, 16, 4, 64), jnp.bfloat16)
    assert cudnn_attention.refusal(q, q, None) == "the platform is cpu"


@pytest.mark.long
@pytest.mark.parametrize("row", ["tensor=2,fsdp=2,data=2", "pipe=2,data=2,tensor=2,zero=1"])
def test_on_the_shards_it_gives_the_losses_of_the_reference(monkeypatch, row: str) -> None:
    """Inside the regions of accumulation (manual over data) and of pipelines too; float32 sums in another order."""
    batch = load_batches("transformer")[0]

    start: list[Any] = []

    def losses() -> np.ndarray:
        step = make_step(CASES["transformer"], TRANSFORMERS[row], 4, "dots")
        step.compile(batch)
        if not start:
            start.append(jax.device_get(dataclasses.replace(step.init(0), key=0)))
        state = dataclasses.replace(start[0], key=jax.random.key(0))
        state, found = jax.device_put(state, step.state_shardings), []
        for _ in range(3):
            state, metrics = step(state, batch)
            found.append(metrics["loss"])
        return np.array(jax.device_get(found))

    plain = losses()
    original, calls = jax.nn.dot_product_attention, []

    def pretended(*arguments, implementation, **settings):
        calls.append(implementation)
        return original(*arguments, implementation="xla", **settings)

    monkeypatch.setattr(attention, "refusal", lambda *_: None)
    monkeypatch.setattr(jax.nn, "dot_product_attention", pretended)
    np.testing.assert_allclose(losses(), plain, rtol=1e-5)
    assert set(calls) == {"cudnn"}
