"""Layers written out (as a ResNet's are on CPU) and layers scanned compute the same."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxtrain.models.shipped import resnet as resnet_module
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.tasks import classification


@pytest.mark.parametrize(
    "remat", [pytest.param("none", marks=pytest.mark.long), "full", pytest.param("sqrt", marks=pytest.mark.long)]
)
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
        monkeypatch.setattr(resnet_module, "_UNROLL_ON", unroll_on)
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
