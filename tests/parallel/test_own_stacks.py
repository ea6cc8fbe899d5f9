"""A stack of a user's own module: under ZeRO, and on stages in fp16, as on one device."""

from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from layouts import make_mesh_of

import jaxtrain as jt


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = jt.make_stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 2, rngs)
        self.head = nnx.Linear(4, 4, rngs=rngs)


def net(teacher: jt.Model | None = None) -> jt.Model:
    """A net, whose embedding and head read what a teacher makes of their inputs."""
    params = {} if teacher is None else teacher.init(jax.random.key(9))[0]

    def taught(x: jax.Array) -> jax.Array:
        return x if teacher is None else x + teacher.apply(params, {}, x, key=None, train=False)[0]

    return jt.from_stages(
        Net,
        stack="blocks",
        embed=lambda net, x, key, train: taught(x),
        block=lambda layer, x, inputs, key, train: jnp.tanh(layer(x)),
        head=lambda net, x, train: net.head(taught(x)),
    )


def grad_norms(accumulation: int, zero: int, devices: int) -> list[float]:
    teacher = net()
    params = teacher.init(jax.random.key(8))[0]

    def loss(outputs: jax.Array, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        wanted = teacher.apply(params, {}, batch["inputs"], key=None, train=False)[0]
        return jnp.sum(jnp.square(outputs - wanted), axis=-1), {}

    step = jt.make_train_step(
        net(teacher),
        jt.Task("distil", loss),
        optax.sgd(0.1),
        mesh=make_mesh_of(dict(data=devices)),
        accumulation_steps=accumulation,
        parallelism=jt.Parallelism(zero=zero),
    )
    inputs = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    state, found = step.init(0), []
    for _ in range(2):
        state, metrics = step(state, {"inputs": inputs})
        found.append(float(metrics["grad_norm"]))
    return found


def test_a_teacher_takes_no_part_in_the_sums() -> None:
    """A model that calls another one of the same paths while its own stack adds gradients to sums over microbatches."""
    # Float32 sums in another order.
    np.testing.assert_allclose(grad_norms(2, 2, 2), grad_norms(1, 0, 1), rtol=1e-5)


def test_stages_in_fp16_move_by_the_gradients_of_one_device() -> None:
    inputs, targets = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)
    moves = []
    for degrees, policy in ((dict(data=1), "fp32"), (dict(pipe=2), "fp16")):
        options = dict(mesh=make_mesh_of(degrees), policy=policy)
        step = jt.make_train_step(net(), jt.regression(), optax.sgd(1.0), **options)
        state = step.init(0)
        before = jax.tree.map(np.array, state.params)
        state, metrics = step(state, {"inputs": inputs, "targets": targets})
        moves.append(jax.tree.map(lambda new, old: np.array(new) - old, state.params, before))
        assert metrics["grad_norm"] > 0.1
    # float16 rounds activations and gradients to 11 bits.
    chex.assert_trees_all_close(moves[1], moves[0], rtol=1e-2, atol=2e-3)
