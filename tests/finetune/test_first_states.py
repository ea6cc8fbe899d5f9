"""States at step 0 over given parameters: a step takes over the arrays of its state, and never those of a user."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt

GROUP: dict[str, Any] = {"kind": "transformer", "embed_dim": 64, "num_heads": 4, "mlp_dim": 64, "num_layers": 1}
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 17))
BATCH = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
LORA = jt.LoraConfig(rank=2)
CASES = [
    pytest.param({"lora": LORA}, {"fsdp": 4, "tensor": 2}, id="floats"),
    pytest.param({"lora": LORA, "base": "int8"}, {"data": 1}, id="int8", marks=pytest.mark.long),
    pytest.param(None, {"data": 1}, id="all trained"),
]


@pytest.mark.parametrize(("adapted", "degrees"), CASES)
def test_what_a_user_gave_stays_as_it_was(adapted: dict[str, Any] | None, degrees: dict[str, int]) -> None:
    mesh = jt.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])
    model = jt.build_model(GROUP, input_shape=(16,), vocab_size=64)
    given, _ = jax.jit(model.init)(jax.random.key(3))
    before = jax.device_get(given)
    step = jt.make_train_step(
        model if adapted is None else jt.adapt(model, **adapted),
        jt.language_modeling(),
        optax.adam(1e-2),
        mesh=mesh,
        # Of a model this small, factors are more than the usual 2%.
        parallelism=jt.Parallelism(max_replicated_fraction=0.1),
    )
    step(step.init(5, jt.load_weights(step, given)), BATCH)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(given), before)
