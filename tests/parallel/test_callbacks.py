"""Callbacks (`jax.debug.print`) in users' models and losses: they work under accumulation; pipelines refuse them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import make_mesh_of

from jaxtrain import ConfigError, Parts, Task, from_functions, make_train_step

ROWS = np.arange(8, dtype=np.int32)


def printing_loss(outputs: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    jax.debug.print("loss {rows}", rows=batch["inputs"])
    return jnp.sum(outputs), jnp.float32(outputs.shape[0]), {}


def look_up(params: Any, numbers: jax.Array) -> jax.Array:
    outputs = params["code"][numbers]
    jax.debug.callback(lambda seen: print(f"model {np.sum(seen):g}"), outputs)
    return outputs


def lines(loss: Any, degrees: dict[str, int], capfd: pytest.CaptureFixture[str]) -> tuple[list[str], float, Any]:
    model = from_functions(lambda key: {"code": jnp.arange(8.0)}, look_up)
    step = make_train_step(model, Task("sum", loss), optax.sgd(0.1), mesh=make_mesh_of(degrees), accumulation_steps=2)
    batch = {"inputs": ROWS, "targets": ROWS}
    step.compile(batch)
    capfd.readouterr()
    _, metrics = jax.block_until_ready(step(step.init(0), batch))
    jax.effects_barrier()
    return sorted(capfd.readouterr().out.splitlines()), float(metrics["loss"]), step.choices


@pytest.mark.long
def test_what_prints_is_the_microbatch_on_every_mesh(capfd: pytest.CaptureFixture[str]) -> None:
    printed, loss, choices = lines(printing_loss, dict(data=1), capfd)
    assert printed == ["loss [0 2 4 6]", "loss [1 3 5 7]", "model 12", "model 16"]
    assert choices == ()
    found = lines(printing_loss, dict(data=2, fsdp=2), capfd)
    assert (found[0], found[1]) == (printed, pytest.approx(loss))
    assert "calls back to Python" in found[2][0]


def test_a_pipeline_refuses_it() -> None:
    parts = Parts(
        "blocks",
        2,
        lambda params, inputs, *, key, train: params["code"][inputs][:, None],
        lambda stack, carry, inputs, *, first_layer, key, train: carry * jnp.prod(stack["scale"]),
        lambda params, carry, *, train: carry,
    )
    model = from_functions(
        lambda key: {"code": jnp.arange(8.0), "blocks": {"scale": jnp.ones((2,))}}, parts=parts, name="mine"
    )
    batch = {"inputs": ROWS, "targets": ROWS}
    step = make_train_step(
        model, Task("sum", printing_loss), optax.sgd(0.1), mesh=make_mesh_of(dict(pipe=2)), accumulation_steps=2
    )
    with pytest.raises(ConfigError, match=r"^parallel.pipe=2, but the model or its loss calls back .*parallel.pipe=1"):
        step.lower(batch)
