"""Relative positions and the encoder-decoder give the same losses and parameters on every layout as on one device."""

import functools
import math
from typing import Any

import jax
import numpy as np
import optax
import pytest
from layouts import COMPILER, ONE, Layout, distance, layout

from jaxtrain.errors import ConfigError
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.models.model import Model
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.tasks import language_modeling
from jaxtrain.remat.policy import Remat
from jaxtrain.train.make_step import make_train_step
from jaxtrain.train.step import TrainStep

STEPS, ROWS, INPUT, OUTPUT, VOCABULARY = 8, 8, 24, 16, 48
_SIZES = dict(embed_dim=16, num_heads=4, head_dim=8, mlp_dim=32, relative_buckets=8, relative_max_distance=16)
_MODELS = {
    # T5's own variants, with dropout: the masks have to be the same on every layout too.
    "encoder_decoder": dict(
        kind="encoder_decoder", num_layers=2, num_decoder_layers=3, attention_scale=1.0, activation="relu",
        tie_embeddings=True, logits_scale=0.25, dropout=0.1,
    ),
    "rotary encoder_decoder": dict(kind="encoder_decoder", num_layers=1, position="rotary"),
    # Sequences of several blocks of queries: 16 of 8 would be one.
    "transformer": dict(kind="transformer", num_layers=4, position="relative", attention="blockwise"),
}  # fmt: skip


def _model(name: str, remat: str) -> Model:
    return build_model(_SIZES | _MODELS[name], input_shape=(INPUT,), vocab_size=VOCABULARY, remat=Remat(remat))


@functools.cache
def _batches(name: str) -> list[dict[str, Any]]:
    """Inputs and outputs of random tokens, the lower ones more often; an output repeats its input; rows are padded."""
    random, found = np.random.default_rng(0), []
    for _ in range(STEPS):
        tokens = (1 + (VOCABULARY - 1) * random.random((ROWS, INPUT)) ** 3).astype(np.int32)
        seen = (np.arange(INPUT)[None] < random.integers(16, INPUT + 1, (ROWS, 1))).astype(np.int32)
        targets = tokens[:, :OUTPUT]
        weights = seen[:, 4 : 4 + OUTPUT].astype(np.float32)
        before = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
        inputs = {"tokens": tokens, "segments": seen, "decoder_tokens": before}
        if name == "transformer":
            inputs, targets, weights = tokens[:, :-1], tokens[:, 1:], seen[:, 1:].astype(np.float32)
        found.append({"inputs": inputs, "targets": targets, "weights": weights})
    return found


def _step(name: str, where: Layout, *, accumulation: int = 1, remat: str = "none", policy: str = "fp32") -> TrainStep:
    mesh = make_mesh(**{"data": 1, **where.degrees}, devices=jax.devices()[: math.prod(where.degrees.values())])
    return make_train_step(
        _model(name, remat),
        language_modeling(),
        optax.adamw(3e-3),
        mesh=mesh,
        policy=policy,
        accumulation_steps=accumulation,
        parallelism=where.options,
        compiler_options=COMPILER,
    )


def _run(name: str, where: Layout, **options: Any) -> tuple[np.ndarray, Any]:
    step = _step(name, where, **options)
    state, losses = step.init(0), []
    for batch in _batches(name):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.array(losses), jax.device_get(state.params)


@functools.cache
def _reference(name: str, accumulation: int = 1) -> tuple[np.ndarray, Any]:
    return _run(name, ONE, accumulation=accumulation)


_ROWS = [
    pytest.param("rotary encoder_decoder", layout(context=2, tensor=2), 1, "none", id="encoder_decoder-rotary-context"),
    pytest.param(
        "encoder_decoder", layout(data=2, fsdp=2, tensor=2, sp=True), 2, "sqrt",
        id="encoder_decoder-all-axes-accumulation-sequence-split",
    ),
    pytest.param("encoder_decoder", layout(data=2, fsdp=2, zero=2), 1, "full", id="encoder_decoder-zero-2-remat"),
    pytest.param("transformer", layout(data=2, fsdp=2), 2, "full", id="transformer-accumulation-remat"),
    pytest.param(
        "transformer", layout(pipe=2, tensor=2, schedule="interleaved_1f1b"), 1, "full", id="transformer-chunks-tensor"
    ),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("name", "where", "accumulation", "remat"), _ROWS)
def test_a_layout_trains_as_one_device(name, where, accumulation, remat):
    """Tolerances as in test_layouts.py: float32 sums in another order, carried through Adam."""
    losses, params = _run(name, where, accumulation=accumulation, remat=remat)
    wanted_losses, wanted = _reference(name, accumulation)
    assert wanted_losses[-1] < wanted_losses[0]
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    assert distance(params, wanted) < 1e-4


@pytest.mark.long
def test_an_encoder_decoder_trains_in_fp8():
    """Eight bits leave 3 bits of mantissa: losses of a few steps stay within some per cent of those in float32."""
    losses, _ = _run("encoder_decoder", layout(data=2), policy="fp8")
    np.testing.assert_allclose(losses, _reference("encoder_decoder")[0], rtol=0.05)


@pytest.mark.parametrize(
    ("degrees", "line"),
    [
        (dict(pipe=2), r"parallel.pipe=2, but the model encoder_decoder .* use parallel.pipe=1"),
        (dict(context=2), r"parallel.context=2 .* model.position=relative .* use parallel.context=1"),
    ],
    ids=["pipe", "context"],
)
def test_an_axis_that_two_stacks_cannot_use_is_refused_in_one_line(degrees, line):
    with pytest.raises(ConfigError, match=line) as error:
        _step("encoder_decoder", layout(**degrees)).lower(_batches("encoder_decoder")[0])
    assert "\n" not in str(error.value)
