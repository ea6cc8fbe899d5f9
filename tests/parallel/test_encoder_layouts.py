"""Layout equality of encoders with heads and of the vision transformer: every mesh gives the numbers of one device."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from layouts import ADAMW, ONE, Case, Layout, distance, layout, make_step
from test_layouts import LOSS_TOLERANCE, PARAMETER_TOLERANCE

from jaxtrain.models.model import Model
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.tasks import TASKS
from jaxtrain.remat.policy import Remat

ROWS, LENGTH, VOCABULARY, CLASSES = 16, 16, 32, 4
STEPS = 10
MASKED = 1  # the id that stands for a masked token


def encoder(remat: str, **head: Any) -> Model:
    """BERT's block, with dropout: the masks have to be the same on every layout too."""
    settings = dict(
        kind="transformer",
        num_layers=2,
        embed_dim=32,
        num_heads=4,
        mlp_dim=64,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position="learned",
        norm="layernorm",
        activation="gelu_exact",
        block="post",
        embedding_norm=True,
        token_types=2,
        bias=True,
        causal=False,
        tie_embeddings=True,
        dropout=0.1,
        head=head,
    )
    return build_model(settings, input_shape=(LENGTH,), num_outputs=CLASSES, remat=Remat(remat))


def vision(remat: str) -> Model:
    settings = dict(kind="vit", num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64, patch_size=2, dropout=0.1)
    return build_model(settings, input_shape=(8, 8, 1), num_outputs=CLASSES, remat=Remat(remat))


def text(rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Rows of repeated ids, padded to different lengths, and which tokens are padding."""
    tokens = np.repeat(rng.integers(2, VOCABULARY, (ROWS, 1)), LENGTH, axis=1).astype(np.int32)
    real = np.arange(LENGTH) < rng.integers(LENGTH // 2, LENGTH + 1, (ROWS, 1))
    types = (np.arange(LENGTH) >= LENGTH // 2).astype(np.int32) * np.ones((ROWS, 1), np.int32)
    return {"tokens": np.where(real, tokens, 0), "segments": real.astype(np.int32), "token_types": types}, real


def masked_batch(rng: np.random.Generator) -> dict[str, Any]:
    inputs, real = text(rng)
    chosen = real & (rng.random((ROWS, LENGTH)) < 0.3)
    targets = np.where(chosen, inputs["tokens"], -100).astype(np.int32)
    tokens = np.where(chosen, MASKED, inputs["tokens"]).astype(np.int32)
    return {"inputs": {**inputs, "tokens": tokens}, "targets": targets, "weights": chosen.astype(np.float32)}


def labelled_batch(rng: np.random.Generator) -> dict[str, Any]:
    inputs, _ = text(rng)
    return {"inputs": inputs, "targets": inputs["tokens"][:, 0] % CLASSES, "weights": np.ones(ROWS, np.float32)}


def image_batch(rng: np.random.Generator) -> dict[str, Any]:
    targets = rng.integers(0, CLASSES, ROWS).astype(np.int32)
    images = rng.normal(0, 0.3, (ROWS, 8, 8, 1)) + targets[:, None, None, None]
    return {"inputs": images.astype(np.float32), "targets": targets, "weights": np.ones(ROWS, np.float32)}


# model, name of the task, (generator) -> batch
MODELS = {
    "masked": (lambda remat: encoder(remat, kind="masked_language_model"), "masked_language_modeling", masked_batch),
    # What the head needs beside the residual stream travels through a pipeline: the weights of the mean, and seeds.
    "labels": (
        lambda remat: encoder(remat, kind="sequence", pooling="mean", hidden="tanh", dropout=0.2),
        "classification",
        labelled_batch,
    ),
    "vit": (vision, "classification", image_batch),
}
MESHES: dict[str, Layout] = {
    "fsdp=2,tensor=2": layout(fsdp=2, tensor=2),
    "pipe=2": layout(pipe=2),
    "pipe=2,fsdp=2,tensor=2": layout(pipe=2, fsdp=2, tensor=2),
    "zero=2,data=2,fsdp=2,tensor=2,sequence-parallel": layout(data=2, fsdp=2, tensor=2, zero=2, sp=True),
}
CASES = [
    ("masked", "fsdp=2,tensor=2"),
    ("masked", "pipe=2"),
    ("labels", "pipe=2"),
    ("labels", "zero=2,data=2,fsdp=2,tensor=2,sequence-parallel"),
    ("vit", "fsdp=2,tensor=2"),
    ("vit", "pipe=2,fsdp=2,tensor=2"),
]


def run(name: str, where: Layout, remat: str = "none", start: Any = None) -> tuple[Any, Any, np.ndarray]:
    """The first state, and parameters and losses after a few steps; from `start`, the first state of another run."""
    model, task, make_batch = MODELS[name]
    case = Case(model, TASKS[task](), None, ROWS, ADAMW.model_copy(update=dict(learning_rate=3e-3)), 1.0)
    step = make_step(case, where, 2, remat)
    rng = np.random.default_rng(0)
    batches = [make_batch(rng) for _ in range(STEPS)]
    step.compile(batches[0])
    state, losses = step.init(0) if start is None else jax.device_put(start, step.state_shardings), []
    # The step donates its state.
    first = jax.device_get(dataclasses.replace(state, key=0))
    first = dataclasses.replace(first, key=jax.random.wrap_key_data(jax.device_get(jax.random.key_data(state.key))))
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return first, jax.device_get(state.params), np.array(jax.device_get(losses), np.float64)


@functools.cache
def alone(name: str) -> tuple[Any, Any, np.ndarray]:
    return run(name, ONE)


# In plain pytest tests/models/test_text_tasks.py proves an encoder on a mesh, and test_layouts.py pipelines.
@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_every_mesh_gives_the_numbers_of_one_device(name: str, mesh: str) -> None:
    start, expected_params, expected = alone(name)
    _, params, losses = run(name, MESHES[mesh], "full" if "tensor" in mesh else "none", start)
    np.testing.assert_allclose(losses, expected, rtol=LOSS_TOLERANCE)
    assert distance(params, expected_params) < PARAMETER_TOLERANCE
    assert expected[-3:].mean() < expected[:3].mean(), "a run that learns nothing would prove nothing"
