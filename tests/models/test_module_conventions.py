"""Conventions of module libraries that a model keeps: modes, constants, sown values, names of inputs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jaxtrain as jt
from jaxtrain.errors import ConfigError
from jaxtrain.models.model import Model

ROWS = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
BATCH = {"inputs": ROWS, "targets": (np.arange(8) % 3).astype(np.int32)}


def trained(model: Model, *, steps: int = 3, **options: Any) -> Any:
    """The state after a few steps, and the step."""
    step = jt.make_train_step(model, jt.classification(), optax.sgd(0.1), **options)
    state = step.init(0)
    for _ in range(steps):
        state, metrics = step(state, BATCH)
    assert np.isfinite(metrics["loss"])
    return state, step


class Regularised(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(x)))


def test_call_finds_the_module_in_the_mode_of_the_step() -> None:
    plain = jt.from_nnx(Regularised)
    called = jt.from_nnx(Regularised, call=lambda module, inputs, key, train: module(inputs))
    params, model_state = plain.init(jax.random.key(0))
    for train in (True, False):
        outputs = [
            model.apply(params, model_state, ROWS, key=jax.random.key(1), train=train)[0] for model in (plain, called)
        ]
        np.testing.assert_array_equal(*outputs)


TOKENS = np.arange(16, dtype=np.int32).reshape(2, 8)


def transformer(**keys: Any) -> Model:
    sizes = {"num_layers": 1, "num_heads": 2, "embed_dim": 8, "max_sequence_length": 8, "vocab_size": 16}
    return jt.build_model({"kind": "transformer", **sizes, **keys}, input_shape=(8,), num_outputs=16)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"tokens": TOKENS, "segment_ids": TOKENS}, "'segment_ids'.* did you mean 'segments'"),
        ({"tokens": TOKENS, "position_ids": TOKENS}, "'position_ids'.* did you mean 'positions'"),
        ({"tokens": TOKENS, "attention_mask": TOKENS}, "'attention_mask'.* did you mean 'segments'.* weights of 0"),
        ({"input_ids": TOKENS}, "'input_ids'.* did you mean 'tokens'"),
        ({"segments": TOKENS}, "no entry 'tokens'"),
        (TOKENS.astype(np.float32), "tokens .* are integers, but the inputs hold float32"),
    ],
    ids=["segment_ids", "position_ids", "attention_mask", "input_ids", "no-tokens", "float-tokens"],
)
def test_inputs_that_the_transformer_would_not_read(inputs: Any, message: str) -> None:
    model = transformer()
    with pytest.raises(ConfigError, match=message) as raised:
        jax.eval_shape(lambda key: model.apply(*model.init(key), inputs, key=None, train=False)[0], jax.random.key(0))
    assert "\n" not in str(raised.value)
