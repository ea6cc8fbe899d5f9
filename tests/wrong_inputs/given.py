"""What the rows of wrong inputs take as given: small parts, each made once and only when a row asks for it."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxtrain as jt

X, Y = np.ones((8, 4), np.float32), np.zeros(8, np.int32)
MASKED = np.ma.masked_array(X, mask=X > 0)
TASK, OPTIMIZER = jt.classification(), optax.sgd(0.1)


class Net(nnx.Module):
    """x [B, 4] -> [B, 3]."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear(x)


class LinenNet(flax.linen.Module):
    """x [B, 4] -> [B, 3]."""

    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        return flax.linen.Dense(3)(x)


def init(key: Any) -> dict[str, Any]:
    return {"w": jnp.ones((4, 3))}


def apply(params: Any, x: Any) -> Any:
    return x @ params["w"]


def loss(outputs: Any, batch: Any) -> Any:
    return jnp.sum(outputs), jnp.float32(1), {}


@functools.cache
def model() -> jt.Model:
    return jt.from_functions(init, apply)


@functools.cache
def text_model() -> jt.Model:
    config = {"kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 8}
    return jt.build_model(config, input_shape=(8,), vocab_size=256)


@functools.cache
def one_device() -> Any:
    return jt.make_mesh(devices=jax.devices()[:1])


@functools.cache
def step() -> jt.TrainStep:
    return jt.make_train_step(model(), TASK, OPTIMIZER, mesh=one_device())


@functools.cache
def state() -> jt.TrainState:
    return step().init(0)


@functools.cache
def text_step() -> jt.TrainStep:
    return jt.make_train_step(text_model(), jt.language_modeling(), OPTIMIZER, mesh=one_device())


@functools.cache
def batches() -> jt.Batches:
    return jt.Batches(rows(), 8, seed=0, shuffle=False)


@functools.cache
def rows() -> jt.ArrayRows:
    return jt.ArrayRows({"inputs": X, "targets": Y})


@functools.cache
def data() -> jt.Data:
    return jt.open_data({"kind": "synthetic", "task": "images", "image_size": 8})


def folder() -> Path:
    return Path(tempfile.mkdtemp())


@functools.cache
def checkpointer() -> jt.Checkpointer:
    """With a step 3."""
    made = jt.Checkpointer(folder())
    made.save(3, {"w": jnp.ones(4)}, metadata={})
    made.wait()
    return made


def writer() -> jt.JsonlWriter:
    return jt.JsonlWriter(folder() / "metrics.jsonl")
