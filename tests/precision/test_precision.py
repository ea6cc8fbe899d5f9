"""Policies, casts and the dynamic loss scale."""

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.errors import ConfigError
from jaxtrain.precision.kernels import QuantizedKernel
from jaxtrain.precision.policy import LossScale, LossScaling, cast_floats, check_sums, get_policy

SCALING = LossScaling(initial=8.0, growth_interval=3, minimum=2.0, maximum=32.0)

# Steps (1 finite, 0 not) and the scale after each.
MOVES = {
    "stops at the maximum": ("1" * 12, [8, 8, 16, 16, 16, 32, 32, 32, 32, 32, 32, 32]),
    "stops at the minimum": ("0000", [4, 2, 2, 2]),
    "counts from the last bad step": ("110111", [8, 8, 4, 4, 4, 8]),
}


def test_loss_scale():
    move = jax.jit(lambda state, finite: state.move(finite, SCALING))
    for name, (steps, scales) in MOVES.items():
        state, found = LossScale.create(SCALING), []
        for step in steps:
            state = move(state, jnp.bool_(step == "1"))
            found.append(float(state.scale))
        assert found == scales, name
        assert (state.scale.dtype, state.finite_steps.dtype) == (jnp.float32, jnp.int32)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(initial=1.0, minimum=8.0), r"initial=1, with minimum=8"),
        (dict(growth_interval=0), r"growth_interval=0; use .* growth_interval of 1 or more"),
    ],
)
def test_scales_that_cannot_move_as_they_say_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        LossScaling(**values)


def test_casts_touch_floats_only():
    tree = {
        "w": jnp.ones(2, jnp.float32),
        "h": jnp.ones(2, jnp.float16),
        "i": jnp.arange(2),
        "b": jnp.array([True]),
        "k": jax.random.key(0),
        "n": np.ones(2, np.float32),
        "q": QuantizedKernel(jnp.ones((2, 2), jnp.int8), jnp.ones(2, jnp.float32)),
        "score_bias": jnp.ones(2, jnp.float32),
        "logit_scale": jnp.float32(4.6),
        "none": None,
    }
    cast = cast_floats(tree, jnp.bfloat16)
    quantized = cast.pop("q")
    assert (quantized.values.dtype, quantized.scale.dtype) == (jnp.int8, jnp.float32)
    assert {name: leaf.dtype for name, leaf in cast.items() if leaf is not None} == {
        "w": jnp.bfloat16,
        "h": jnp.bfloat16,
        "i": jnp.int32,
        "b": jnp.bool_,
        "k": tree["k"].dtype,
        "n": jnp.bfloat16,
        "score_bias": jnp.float32,  # rounded, it would choose other experts
        "logit_scale": jnp.float32,  # rounded, it would change the scale of CLIP by up to 1.6 %
    }
    assert cast["none"] is None


# What a step under each policy does: the dtype of the parameters, that of what the model computes with, the precision
# that its products ask for, and whether the state has a loss scale. Of fp8 it is in tests/train/test_low_precision.py.
STEPS = {
    "fp32": (jnp.float32, jnp.float32, "[HIGHEST, HIGHEST]", False),
    "tf32": (jnp.float32, jnp.float32, "[HIGH, HIGH]", False),
    "bf16": (jnp.float32, jnp.bfloat16, None, False),
    "bf16_pure": (jnp.bfloat16, jnp.bfloat16, None, False),
    "fp16": (jnp.float32, jnp.float16, None, True),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_keeps_and_computes_in_the_dtypes_of_its_policy(name):
    kept, computed, precision, scaled = STEPS[name]
    seen = []

    def apply(params, model_state, inputs, *, key, train):
        seen.append((params["kernel"].dtype, inputs.dtype))
        return inputs @ params["kernel"], model_state

    model = jt.Model("product", lambda key: ({"kernel": jax.random.normal(key, (4, 3))}, {}), apply)
    one = jt.make_mesh(devices=jax.devices()[:1])
    step = jt.make_train_step(model, jt.classification(), optax.adam(1e-3), mesh=one, policy=name)
    state = step.abstract_state
    assert state.params["kernel"].dtype == kept
    assert (state.loss_scale is not None) == scaled
    program = step.lower({"inputs": np.ones((8, 4), np.float32), "targets": np.zeros(8, np.int32)}).as_text()
    assert set(seen) == {(jnp.dtype(computed), jnp.dtype(computed))}
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert products
    for line in products:
        assert (precision in line) if precision else "HIGH" not in line, line


# Policy, platform, whether it is a cluster, degrees, whether there is a backward pass, and whether it is refused.
SUMS = [
    ("fp16", "cpu", True, {"data": 4}, True, True),
    ("fp16", "cpu", True, {"data": 4}, False, False),
    ("fp16", "cpu", True, {"data": 2, "tensor": 2}, False, True),
    ("fp16", "cpu", False, {"data": 4}, True, False),
    ("fp16", "gpu", True, {"data": 4}, True, False),
    ("bf16", "cpu", True, {"tensor": 4}, True, False),
]


def test_float16_is_not_added_up_by_gloo(monkeypatch):
    for policy, platform, cluster, axes, backward, refused in SUMS:
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda cluster=cluster: cluster)
        size = math.prod(axes.values())
        devices = np.array([SimpleNamespace(platform=platform)] * size)
        mesh: Any = SimpleNamespace(devices=devices, shape=axes, size=size)
        with pytest.raises(ConfigError, match="between CPU processes") if refused else contextlib.nullcontext():
            check_sums(get_policy(policy), mesh, backward=backward)
