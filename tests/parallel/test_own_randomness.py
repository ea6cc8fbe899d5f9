"""Random numbers of users' own models: every row draws for itself, and drawn by row they are the same on every mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from layouts import make_mesh_of

from jaxtrain import (
    DrawsByRow,
    Model,
    Parallelism,
    Task,
    from_nnx,
    from_stages,
    make_stack,
    make_train_step,
)
from jaxtrain.layout.keys import microbatch_key, row_keys
from jaxtrain.models.layers import dropout

ROWS, WIDTH = 16, 64


class OwnDropout(nnx.Module):
    """Row i of a batch looks up row i of the code, so that the gradient of the code is the mask of each row."""

    def __init__(self, rngs: nnx.Rngs):
        self.code = nnx.Param(jnp.ones((ROWS, WIDTH)))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, numbers: jax.Array) -> jax.Array:
        return self.dropout(self.code[...][numbers])


class Scale(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones((WIDTH,)))


class OwnStages(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.code = nnx.Param(jnp.ones((ROWS, WIDTH)))
        self.blocks = make_stack(Scale, 2, rngs)


def opaque(x: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)


@jax.checkpoint  # JAX keeps its trace from the first step on, whatever the microbatches
def by_row(x: jax.Array, key: jax.Array) -> jax.Array:
    return dropout(x, 0.5, key)


def with_stages(drop: Callable[..., Any], mark: Callable[..., Any]) -> Model:
    def embed(module: Any, numbers: jax.Array, key: jax.Array, train: bool) -> jax.Array:
        return drop(module.code[...][numbers], key)

    def block(layer: Any, x: jax.Array, numbers: jax.Array, key: jax.Array, train: bool) -> jax.Array:
        return drop(x * layer.scale[...], key)

    return from_stages(OwnStages, stack="blocks", embed=mark(embed), block=mark(block), head=lambda module, x, train: x)


def own_dropout(module: Any, numbers: jax.Array, key: Any, train: bool) -> jax.Array:
    module.train()
    return module(numbers)


def summed(outputs: jax.Array, batch: dict[str, Any]) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    return jnp.sum(outputs), jnp.float32(outputs.shape[0]), {}


def masks(model: Model, degrees: dict[str, int], microbatches: int = 2) -> np.ndarray:
    """The mask of each row, [ROWS, WIDTH]."""
    options = dict(accumulation_steps=microbatches, parallelism=Parallelism(max_replicated_fraction=1))
    step = make_train_step(model, Task("sum", summed), optax.sgd(1.0), mesh=make_mesh_of(degrees), **options)
    state = step.init(0)
    before = np.asarray(state.params["code"])
    state, _ = step(state, {"inputs": np.arange(ROWS, dtype=np.int32), "targets": np.arange(ROWS, dtype=np.int32)})
    return before - np.asarray(state.params["code"])


def unmarked(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


# The last number: how many draws a row passes, each of which keeps half of its numbers.
ROW_DRAWS = {
    "nnx marked, its own dropout": (lambda: from_nnx(OwnDropout, call=DrawsByRow(own_dropout)), dict(data=4), 1),
    "stages, pipe": (lambda: with_stages(opaque, unmarked), dict(pipe=2, data=2), 3),
    "stages, by row": (lambda: with_stages(by_row, DrawsByRow), dict(data=4), 3),
}

ROWS_OF_DRAWS = [
    pytest.param(*row, id=name, marks=pytest.mark.long if "pipe" in name else ()) for name, row in ROW_DRAWS.items()
]


@pytest.mark.parametrize(("make", "degrees", "draws"), ROWS_OF_DRAWS)
def test_every_row_draws_for_itself(make: Callable[[], Model], degrees: dict[str, int], draws: int) -> None:
    found = masks(make(), degrees)
    assert len(np.unique(found, axis=0)) == ROWS
    # Five standard deviations of a mean of 1024 fair bits.
    assert abs(np.mean(found > 0) - 0.5**draws) < 5 * 0.5 / 32


@pytest.mark.parametrize(
    ("degrees", "microbatches"),
    [
        pytest.param(dict(data=1), 4, id="accumulation"),
        pytest.param(dict(data=2), 2, id="accumulation, data", marks=pytest.mark.long),
        pytest.param(dict(pipe=2, data=2), 4, id="pipe, data", marks=pytest.mark.long),
    ],
)
def test_drawn_by_row_they_are_the_same_on_every_mesh(degrees: dict[str, int], microbatches: int) -> None:
    alone = masks(with_stages(by_row, DrawsByRow), dict(data=1), 1)
    np.testing.assert_array_equal(masks(with_stages(by_row, DrawsByRow), degrees, microbatches), alone)


def test_keys_of_pairs_follow_from_their_row_and_draws_at_once_from_the_microbatch() -> None:
    """Two answers stand for a row of the batch; rows of microbatch m of 3 are m, m + 3, m + 6, m + 9."""
    key = jax.random.key(0)
    of_batch = jax.random.key_data(row_keys(key, 24)).reshape(4, 3, 2, 2)
    parts = [microbatch_key(key, jnp.int32(m), np.zeros((3, 4))) for m in range(3)]
    found = [jax.random.key_data(row_keys(part, 8)).reshape(4, 2, 2) for part in parts]
    np.testing.assert_array_equal(np.stack(found, axis=1), of_batch)
    drawn = [float(jax.random.uniform(jax.random.split(part)[1])) for part in parts]
    assert len(set(drawn)) == 3
