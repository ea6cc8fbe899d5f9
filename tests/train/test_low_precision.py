"""What fewer bits cost: the quickstart's model trained in fp8 against bf16, and evaluated with int8 weights."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import Evaluator, quantize
from jaxtrain.config import load_config
from jaxtrain.config.schema import Remat
from jaxtrain.data import Batches, open_data
from jaxtrain.errors import ConfigError
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.tasks import language_modeling, regression
from jaxtrain.models.wrap import from_functions
from jaxtrain.precision.kernels import QuantizedKernel, is_quantized
from jaxtrain.train.build import make_train_step
from jaxtrain.train.step import TrainStep

STEPS, ROWS, LENGTH = 50, 8, 32
SIZES = ["model.num_layers=2", "model.embed_dim=64", "model.num_heads=2", "model.mlp_dim=128"]


@functools.cache
def setting():
    """A small model as that of the quickstart, with a vocabulary of bytes, on its text."""
    config = load_config("quickstart", overrides=[*SIZES, "data.tokenizer.kind=byte"]).config
    data = open_data(config.data, sequence_length=LENGTH, seed=0)
    return config.model, data


def make_step(policy: str, num_devices: int = 1, **degrees: int) -> TrainStep:
    model_config, data = setting()
    model = build_model(model_config, input_shape=(LENGTH,), vocab_size=data.vocab_size, remat=Remat(policy="dots"))
    mesh = make_mesh(**{"data": 1, **degrees}, devices=jax.devices()[:num_devices])
    return make_train_step(model, language_modeling(), optax.adamw(3e-3), mesh=mesh, policy=policy, clip_norm=1.0)


def load(step: TrainStep, rows: Any, count: int) -> list[dict[str, jax.Array]]:
    batches = Batches(rows, ROWS, seed=0, shuffle=True)
    return [step.loader(batches)(k) for k in range(count)]


@functools.cache
def trained(policy: str) -> tuple[TrainStep, Any, np.ndarray]:
    step = make_step(policy)
    state = step.init(0)
    losses = []
    for batch in load(step, setting()[1].train, STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return step, state, np.array(losses)


@pytest.mark.long
def test_fp8_trains_as_bf16_does():
    """Within 1 % of the loss of bf16 after the same steps (the whole quickstart: docs/precision.md)."""
    (_, _, losses), (_, _, expected) = trained("fp8"), trained("bf16")
    assert abs(losses[-10:].mean() / expected[-10:].mean() - 1) < 0.01
    assert expected[-10:].mean() < 0.7 * expected[0], "a run that learns little would prove little"
    assert not np.array_equal(losses, expected)


@functools.cache
def evaluated(format: str | None) -> tuple[float, Any]:
    step, state, _ = trained("bf16")
    params = state.params if format is None else jax.jit(lambda p: quantize(p, step.model, format))(state.params)
    rows = load(step, setting()[1].validation, 8)
    return Evaluator(step)(dataclasses.replace(state, params=params, ema=None), rows)["eval_loss"], params


def test_int8_evaluates_as_bf16_does():
    """Within 1 % of its loss, with linear layers of half the bytes and the scales."""
    (loss, params), (expected, _) = evaluated("int8"), evaluated(None)
    assert abs(loss / expected - 1) < 0.01
    assert loss != expected
    kernels = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(leaf)]
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(kernels))
    in_bf16 = sum(2 * math.prod(kernel.shape) for kernel in kernels)
    # A float32 scale for each of the 64 to 128 numbers of a channel.
    assert stored < (0.5 + 2 / 64) * in_bf16
    blocks = params["blocks"]
    assert isinstance(blocks["mlp"]["up"]["kernel"], QuantizedKernel)
    assert blocks["mlp_norm"]["scale"].dtype == jnp.float32


@pytest.mark.long
def test_int8_on_a_mesh():
    """Quantized parameters lie and are gathered as any others are."""
    step = make_step("fp32", 4, fsdp=2, tensor=2)
    alone = jax.device_get(evaluated("int8")[1])
    rows = [jax.device_get(batch) for batch in load(step, setting()[1].validation, 2)]
    losses = []
    for where in (make_step("fp32"), step):
        placed = jax.device_put(alone, jax.sharding.NamedSharding(where.mesh, jax.sharding.PartitionSpec()))
        whole = dataclasses.replace(where.abstract_state, params=placed, model_state={}, ema=None)
        on_mesh = [jax.device_put(batch, where.batch_shardings(batch)) for batch in rows]
        losses.append(Evaluator(where)(whole, on_mesh)["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # float32 in another order


def test_mistakes_are_one_line():
    with pytest.raises(ConfigError, match=r"precision\.policy is 'int8' \(command line\), not one of fp32"):
        load_config("quickstart", overrides=["precision.policy=int8"])
    model = from_functions(lambda key: {"w": jnp.ones((4, 2))}, lambda params, x: x @ params["w"], name="mine")
    with pytest.raises(ConfigError, match="is quantized already"):
        quantize(evaluated("int8")[1], make_step("bf16").model, "nf4")
    step = make_train_step(model, regression(), optax.sgd(0.1), mesh=make_mesh(devices=jax.devices()[:1]), policy="fp8")
    with pytest.raises(ConfigError, match=r"precision.policy=fp8 needs linear layers .* the model mine has none"):
        step.lower({"inputs": np.ones((2, 4), np.float32), "targets": np.ones((2, 2), np.float32)})
