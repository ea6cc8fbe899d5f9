"""`jax.debug.print` in a loss: it gets the global microbatch under accumulation, and pipelines refuse it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import make_mesh_of, transformer

from jaxtrain import ConfigError, Task, make_train_step

ROWS = np.arange(8 * 32, dtype=np.int32).reshape(8, 32)
BATCH = {"inputs": ROWS, "targets": ROWS}


def printing_loss(outputs: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    jax.debug.print("loss {rows}", rows=batch["inputs"][:, 0])
    return jnp.sum(outputs), jnp.float32(outputs.shape[0]), {}


def step_on(**degrees: int) -> Any:
    mesh = make_mesh_of(degrees)
    return make_train_step(
        transformer("none"), Task("sum", printing_loss), optax.sgd(0.1), mesh=mesh, accumulation_steps=2
    )


def test_it_prints_the_global_microbatch(capfd: pytest.CaptureFixture[str]) -> None:
    step = step_on(data=2)
    step.compile(BATCH)
    capfd.readouterr()
    jax.block_until_ready(step(step.init(0), BATCH))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.splitlines()) == ["loss [  0  64 128 192]", "loss [ 32  96 160 224]"]


def test_a_pipeline_refuses_it() -> None:
    with pytest.raises(ConfigError, match=r"^parallel.pipe=2, but the model or its loss prints .*parallel.pipe=1"):
        step_on(pipe=2).lower(BATCH)
