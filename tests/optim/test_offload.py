"""Optimizer state in the host's memory: the numbers of a state on the device, on meshes and through checkpoints."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pydantic import TypeAdapter

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config.model import MLPConfig
from jaxtrain.config.optimizers import OptimizerConfig
from jaxtrain.config.schema import Parallelism
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.tasks import classification
from jaxtrain.optim import rules as update_slices
from jaxtrain.optim.offload import owners, why_not_in_slices
from jaxtrain.optim.optimizers import build_optimizer
from jaxtrain.optim.rules import num_slices, updates_elementwise
from jaxtrain.optim.wrappers import elementwise
from jaxtrain.runtime.compiler import record_choices
from jaxtrain.train.build import make_train_step
from jaxtrain.train.step import TrainStep

RNG = np.random.default_rng(0)
BATCH = {"inputs": RNG.normal(size=(8, 64)).astype(np.float32), "targets": np.arange(8, dtype=np.int32)}
UNDECLARED = optax.adamw(optax.linear_schedule(1e-2, 0.0, 100), weight_decay=0.1)
ADAMW = elementwise(UNDECLARED)
ADAFACTOR = optax.adafactor(1e-2, min_dim_size_to_factor=8)


def make(optimizer: Any, *, offload: bool, devices: int = 1, zero: int = 0, **degrees: int) -> TrainStep:
    model = build_model(MLPConfig(hidden_dims=(32, 16)), input_shape=(64,), num_outputs=10)
    return make_train_step(
        model,
        classification(),
        optimizer,
        mesh=make_mesh(**{"data": 1, **degrees}, devices=jax.devices()[:devices]),
        clip_norm=0.5,
        ema_decay=0.9,
        trainable=lambda path: path != "layers/1/bias",
        parallelism=Parallelism(zero=zero, max_replicated_fraction=1.0),
        offload_optimizer=offload,
    )


def train(step: TrainStep, state: Any = None) -> tuple[Any, list[str]]:
    """Two steps, one that is not finite, another; what is kept on the host after them."""
    state = step.init(0) if state is None else state
    broken = {**BATCH, "inputs": BATCH["inputs"] * np.float32("nan")}
    with record_choices() as choices:
        for batch in (BATCH, BATCH, broken, BATCH):
            state, _ = step(state, batch)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(step.state_shardings), strict=True):
        assert leaf.sharding.memory_kind == sharding.memory_kind
    return state, choices


def host(state: Any) -> Any:
    return jax.device_get(dataclasses.replace(state, key=0))


def assert_equal(found: Any, wanted: Any) -> None:
    # The same operations on the same numbers, fused differently in a loop: a few roundings of fp32, 2^-24 each.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), host(found), host(wanted))


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that the matrices of the MLP pass in several slices, and its vectors in several groups."""
    monkeypatch.setattr(update_slices, "SLICE_BYTES", 1024)


@pytest.fixture(scope="module")
def alone() -> tuple[TrainStep, Any]:
    step = make(ADAMW, offload=False)
    return step, train(step)[0]


@pytest.mark.parametrize(
    ("devices", "zero", "degrees"),
    [
        pytest.param(1, 0, {}, id="one device"),
        pytest.param(4, 1, dict(data=2, fsdp=2), id="zero-1 over data, and fsdp", marks=pytest.mark.long),
    ],
)
def test_offloaded_state_gives_the_numbers_of_one_on_the_device(alone, devices, zero, degrees):
    state, choices = train(make(ADAMW, offload=True, devices=devices, zero=zero, **degrees))
    assert_equal(state, alone[1])
    assert any("in slices" in line for line in choices)
    kinds = {leaf.ndim > 0: leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.optimizer_state)}
    assert kinds == {True: "pinned_host", False: "device"}


@pytest.mark.long
def test_other_updates_get_whole_arrays():
    state, choices = train(make(ADAFACTOR, offload=True))
    assert_equal(state, train(make(ADAFACTOR, offload=False))[0])
    assert any("as whole arrays" in line and "not declared" in line for line in choices)
    params = {"kernel": jnp.ones((16, 16)), "bias": jnp.ones(16)}
    for optimizer, why in (
        (UNDECLARED, "not declared"),
        (elementwise(ADAFACTOR), "has no parameter's path"),  # its sums mirror no parameter, whatever is said of it
    ):
        assert why in str(why_not_in_slices(optimizer, jax.eval_shape(optimizer.init, params), params))


def test_a_checkpoint_moves_between_host_and_device(alone, tmp_path):
    """Saved from the host, restored to the device, and back: bit for bit; training goes on with the same numbers."""
    plain, _ = alone
    moved = make(ADAMW, offload=True)
    state, _ = train(moved)
    saved = host(state)
    with Checkpointer(tmp_path / "from host") as checkpointer:
        checkpointer.save(4, state, metadata={})
        back, same = (checkpointer.restore(step.abstract_state) for step in (plain, moved))
    for restored, step in ((back, plain), (same, moved)):
        chex.assert_trees_all_equal(host(restored), saved)
        kinds = jax.tree.map(lambda leaf: leaf.sharding.memory_kind, restored)
        assert kinds == jax.tree.map(lambda sharding: sharding.memory_kind, step.state_shardings)
    with Checkpointer(tmp_path / "from device") as checkpointer:
        checkpointer.save(4, back, metadata={})
        to_host = checkpointer.restore(moved.abstract_state)
    chex.assert_trees_all_equal(host(to_host), saved)
    assert_equal(train(moved, to_host)[0], train(plain, back)[0])


# The group of an optimizer -> whether its update treats every number alone.
KINDS = {
    "sgd, nesterov": ({"kind": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, True),
    "lion": ({"kind": "lion", "weight_decay": 0.1}, True),
    "adafactor": ({"kind": "adafactor"}, False),
    "lion, bfloat16": ({"kind": "lion", "moments": "bfloat16"}, False),
    "muon": ({"kind": "muon"}, False),
}


@pytest.mark.parametrize(("group", "alone"), KINDS.values(), ids=KINDS)
def test_exactly_those_optimizers_are_declared_whose_slices_update_alone(group, alone):
    """Two updates of an array, and of its two halves by themselves: the declaration says whether they are equal."""
    config = TypeAdapter(OptimizerConfig).validate_python(group)
    optimizer = build_optimizer(config, optax.constant_schedule(1e-3), axes={"hidden/kernel": ("embed", "mlp")})
    rng = np.random.default_rng(0)
    # The halves differ in size, as layers do; each is large enough to be factored and to have its moments stored.
    rows = np.repeat([1.0, 8.0], 128)[:, None]
    params, *gradients = ({"hidden": {"kernel": np.float32(rows * rng.normal(size=(256, 256)))}} for _ in range(3))

    @jax.jit
    def updated(params, gradients):
        state = optimizer.init(params)
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        return params["hidden"]["kernel"]

    halves = [
        updated(*jax.tree.map(lambda x, half=half: x[half], (params, gradients)))
        for half in (slice(0, 128), slice(128, 256))
    ]
    difference = np.max(np.abs(np.concatenate(halves) - updated(params, gradients)))
    # Of numbers up to 32: the same operations, contracted alike, so equal but for a rounding of fp32.
    assert (difference <= 32 * 2.0**-23) == alone
    shapes = jax.eval_shape(optimizer.init, params)
    assert (why_not_in_slices(optimizer, shapes, params) is None) == updates_elementwise(config) == alone


def test_slices_divide_and_state_has_the_owner_of_the_longest_path():
    assert (num_slices((6, 100)), num_slices((7, 100))) == (3, 7)
    params = {name: {"head": jnp.ones((4, 4))} for name in ("0/mu", "other")} | {"head": jnp.ones((4, 4))}
    found = owners(optax.adam(0.1).init(params), params)
    names = ["head", "0/mu/head", "other/head"]
    assert [found[f"0/mu/{name}"] for name in names] == names
