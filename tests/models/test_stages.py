"""A user's own NNX model: data and fsdp without a word, tensor with a table, every axis when it declares stages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxtrain import (
    ConfigError,
    Model,
    Parallelism,
    classification,
    from_nnx,
    from_stages,
    make_mesh,
    make_stack,
    make_train_step,
)

DIM, LAYERS, CLASSES = 16, 4, 8


class Residual(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(DIM, 2 * DIM, rngs=rngs)
        self.down = nnx.Linear(2 * DIM, DIM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(x)))


class Mine(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Linear(8, DIM, rngs=rngs)
        self.blocks = make_stack(Residual, LAYERS, rngs)
        self.head = nnx.Linear(DIM, CLASSES, rngs=rngs)


class Unrolled(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Linear(8, DIM, rngs=rngs)
        self.blocks = nnx.List([Residual(rngs) for _ in range(2)])
        self.head = nnx.Linear(DIM, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


STACK_AXES = {
    "blocks/up/kernel": ("layers", "embed", "mlp"),
    "blocks/up/bias": ("layers", "mlp"),
    "blocks/down/kernel": ("layers", "mlp", "embed"),
}


def staged(axes: dict[str, tuple[str | None, ...]] | None = None) -> Model:
    return from_stages(
        Mine,
        stack="blocks",
        embed=lambda module, x, key, train: module.embedding(x),
        block=lambda block, x, inputs, key, train: block(x),
        head=lambda module, x, train: module.head(x),
        axes=axes,
    )


def plain(axes: dict[str, tuple[str | None, ...]] | None = None) -> Model:
    return from_nnx(Unrolled, axes=axes)


UNROLLED_AXES = {
    "blocks/*/up/kernel": ("embed", "mlp"),
    "blocks/*/up/bias": ("mlp",),
    "blocks/*/down/kernel": ("mlp", "embed"),
}

# model, degrees, options
ROWS = {
    "nnx data": (plain(), dict(data=8), {}),
    "nnx fsdp": (plain(), dict(data=2, fsdp=4), {}),
    "nnx zero 2": (plain(), dict(data=8), dict(zero=2)),
    "nnx tensor by a table": (plain(UNROLLED_AXES), dict(tensor=4, data=2), {}),
    "stages data": (staged(), dict(data=8), {}),
    "stages fsdp": (staged(), dict(fsdp=8), {}),
    "stages pipe": (staged(), dict(pipe=4, data=2), {}),
    "stages interleaved x fsdp": (staged(), dict(pipe=2, fsdp=2, data=2), dict(schedule="interleaved_1f1b")),
    "stages pipe x tensor by a table": (staged(STACK_AXES), dict(pipe=2, tensor=2, data=2), {}),
}


def losses(model: Model, degrees: dict[str, int], options: dict[str, object]) -> list[float]:
    mesh = make_mesh(**{"data": 1, **degrees}, devices=jax.devices()[: int(np.prod(list(degrees.values())))])
    # Biases are a tenth of these small models, and some have no dim that divides.
    parallelism = Parallelism(**{"max_replicated_fraction": 0.2, **options})
    step = make_train_step(
        model, classification(), optax.adamw(1e-2), mesh=mesh, accumulation_steps=4, parallelism=parallelism
    )
    random = np.random.default_rng(0)
    batch = {
        "inputs": random.normal(size=(32, 8)).astype(np.float32),
        "targets": random.integers(0, CLASSES, 32, dtype=np.int32),
    }
    state = step.init(0)
    found = []
    for _ in range(8):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


@functools.cache
def losses_alone(kind: str) -> list[float]:
    """On one device, without a table of axes: it moves no number."""
    return losses({"nnx": plain, "stages": staged}[kind](), dict(data=1), {})


# Further meshes of what the other rows hold.
LONG = (
    "nnx tensor by a table",
    "nnx data",
    "nnx fsdp",
    "nnx zero 2",
    "stages data",
    "stages fsdp",
    "stages pipe",
    "stages interleaved x fsdp",
)


@pytest.mark.parametrize("row", [pytest.param(row, marks=pytest.mark.long if row in LONG else ()) for row in ROWS])
def test_losses_are_those_of_one_device(row: str) -> None:
    model, degrees, options = ROWS[row]
    alone = losses_alone(row.split()[0])
    np.testing.assert_allclose(losses(model, degrees, options), alone, rtol=1e-5)
    assert alone[-1] < 0.9 * alone[0]


def test_pipeline_says_what_a_model_has_to_declare() -> None:
    with pytest.raises(
        ConfigError, match="Unrolled does not declare its embedding, stack and head; build it with from_"
    ):
        make_train_step(plain(), classification(), optax.sgd(0.1), mesh=make_mesh(pipe=8))


class Noisy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = make_stack(lambda rngs: nnx.BatchNorm(4, rngs=rngs), 2, rngs)


@pytest.mark.parametrize(
    ("make", "stack", "message"),
    [
        (Noisy, "blocks", "holds parameters only, but blocks/mean is not a parameter"),
        (Mine, "layers", "no attribute 'layers'"),
    ],
)
def test_what_cannot_be_stages(make: type[nnx.Module], stack: str, message: str) -> None:
    def nothing(*_: object) -> jax.Array:
        return jnp.zeros(())

    with pytest.raises(ConfigError, match=message):
        from_stages(make, stack=stack, embed=nothing, block=nothing, head=nothing)
