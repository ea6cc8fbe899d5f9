"""A stack of a user's own module, or parts of a user's own functions, under ZeRO."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.layout import gather
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


@pytest.mark.long
@pytest.mark.parametrize(("zero", "accumulation"), [(2, 2), (1, 2), (2, 1)])
def test_a_stack_that_is_scattered_over_its_layers_trains_as_on_one_device(zero: int, accumulation: int) -> None:
    # Float32 sums in another order.
    np.testing.assert_allclose(losses(2, zero, accumulation), losses(1, 0, accumulation), rtol=1e-5)


def parts_step(
    devices: int, zero: int, *, fsdp: int = 1, trainable: Callable[[str], bool] | None = None
) -> jt.TrainStep:
    """A step of functions whose carry holds a Python number, on which the head branches."""

    def init(key: jax.Array) -> dict[str, Any]:
        names = {"blocks": (2, 8, 8), "middle": (8, 16), "head": (16, 8)}
        keys = zip(names.items(), jax.random.split(key, 3), strict=True)
        drawn = {name: jax.random.normal(one, shape) / 4 for (name, shape), one in keys}
        return {**drawn, "blocks": {"w": drawn["blocks"]}}

    def layers(
        stack: Any, carry: Any, inputs: jax.Array, *, first_layer: Any, key: jax.Array | None, train: bool
    ) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), carry[0], stack["w"])[0], carry[1]

    def head(params: Any, carry: Any, *, train: bool) -> jax.Array:
        return jnp.tanh(carry[0] @ params["middle"]) @ params["head"] * (carry[1] if carry[1] < 1 else 1)

    parts = jt.Parts("blocks", 2, lambda params, inputs, *, key, train: (inputs, 0.5), layers, head)
    return jt.make_train_step(
        jt.from_functions(init, parts=parts, axes={"blocks/w": ("layers", None, None)}),
        jt.classification(),
        optax.sgd(0.5),
        mesh=jt.make_mesh(data=devices, fsdp=fsdp, devices=jax.devices()[: devices * fsdp]),
        accumulation_steps=2,
        trainable=trainable,
        parallelism=jt.Parallelism(zero=zero, max_replicated_fraction=1),
    )


BATCH = {
    "inputs": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32),
    "targets": np.arange(8, dtype=np.int32) % 3,
}


def test_a_carry_may_hold_a_python_number() -> None:
    found = []
    for step in (parts_step(1, 0), parts_step(2, 2)):
        state, _ = step(step.init(0), BATCH)
        found.append(float(step(state, BATCH)[1]["loss"]))
    # Float32 sums in another order.
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_a_frozen_parameter_that_only_the_head_reads_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no sum that it could wait for."""
    placed: list[tuple[tuple[int, ...], Any]] = []
    plain = gather._constrain

    def constrain(shardings: Any, x: jax.Array) -> jax.Array:
        placed.extend((x.shape, sharding.spec) for sharding in shardings[-1:])
        return plain(shardings, x)

    monkeypatch.setattr(gather, "_constrain", constrain)
    parts_step(2, 2, fsdp=2, trainable=lambda path: path != "middle").compile(BATCH)
    whole = [shape for shape, spec in placed if not any(spec)]
    # As often as the trained one beside it, in every trace of the model.
    assert whole.count((8, 16)) == whole.count((16, 8)) > 0
