"""Layers written out and layers scanned compute the same."""

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

from jaxtrain.models.shipped import resnet as resnet_module
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.stack import scan_stack
from jaxtrain.models.tasks import classification


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "full", "sqrt"])
def test_scanned_and_unrolled_blocks_agree(remat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, gradients and batch statistics; other fusions sum in another order, so within rounding (2^-24).

    Segments are loops everywhere, so that theirs are compared with blocks written out without remat.
    """
    from jaxtrain.remat.policy import Remat

    inputs = np.random.default_rng(0).normal(size=(8, 8, 8, 1)).astype(np.float32)
    batch = {"inputs": inputs, "targets": np.arange(8, dtype=np.int32)}
    config = {"kind": "resnet", "stage_blocks": [3, 2], "width": 8, "stem": "small"}
    results: list[Any] = []
    programs = []
    for unroll_on in ((), ("cpu",)):
        monkeypatch.setattr(resnet_module, "scan_stack", functools.partial(scan_stack, unroll_on=unroll_on))
        policy = "none" if remat == "sqrt" and unroll_on else remat
        model = build_model(config, input_shape=(8, 8, 1), num_outputs=10, remat=Remat(policy))

        def loss(params: Any, model_state: Any, model: Any = model) -> Any:
            outputs, model_state = model.apply(params, model_state, batch["inputs"], key=None, train=True)
            total, weight, _ = classification().loss(outputs, batch)
            return total / weight, model_state

        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        params, model_state = jax.jit(model.init)(jax.random.key(0))
        programs.append(step.lower(params, model_state).as_text())
        results.append(jax.device_get(step(params, model_state)))
    assert "stablehlo.while" in programs[0]
    assert "stablehlo.while" not in programs[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *results)


def test_convolutions_in_the_loop_over_blocks_are_those_that_cpus_are_fast_at() -> None:
    """XLA brings the dims of a convolution into the order of its fast form outside of loops only."""
    config = {"kind": "resnet", "stage_blocks": [3], "width": 8, "stem": "small"}
    model = build_model(config, input_shape=(8, 8, 1), num_outputs=10, remat=None)
    inputs = np.zeros((2, 8, 8, 1), np.float32)

    def total(params: Any, model_state: Any) -> Any:
        return model.apply(params, model_state, inputs, key=None, train=True)[0].sum()

    program = jax.jit(jax.grad(total)).lower(*jax.jit(model.init)(jax.random.key(0))).compile().as_text() or ""
    in_loops = [line for line in program.splitlines() if " convolution(" in line and "while/body" in line]
    # Two in a block forward; of each, the gradients of its images and of its kernel.
    assert len(in_loops) == 6
    assert {found for line in in_loops for found in re.findall(r"dim_labels=(\S+?),", line)} == {"b01f_01io->b01f"}
