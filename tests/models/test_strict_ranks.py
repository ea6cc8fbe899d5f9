"""Every shipped model and its loss run where jax refuses arrays of fewer dims beside arrays of more."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.inference.generate import make_generator

TOKENS = np.arange(32, dtype=np.int32).reshape(4, 8)
IMAGES = np.ones((4, 8, 8, 3), np.float32)
CLASSES = np.arange(4) % 3
SMALL = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 8}
GPT = {"position": "learned", "norm": "layernorm", "bias": True, "dropout": 0.1}
GEMMA = {"block": "sandwich", "norm_offset": True, "qk_norm": True, "attention_softcap": 30.0, "logits_softcap": 20.0}
NEXT = {"inputs": TOKENS, "targets": TOKENS}


def _built(**settings: Any) -> jt.Model:
    return jt.build_model(settings, input_shape=(8, 8, 3) if "num_classes" in settings else (8,), vocab_size=50)


def _decoder(**settings: Any) -> jt.Model:
    return _built(kind="transformer", **SMALL, **settings)


def _pairs() -> jt.Task:
    return jt.Task("pairs", jt.language_modeling().loss)


KINDS: dict[str, tuple[Callable[[], jt.Model], Callable[[], jt.Task], dict[str, Any]]] = {
    "mlp": (
        lambda: _built(kind="mlp", hidden_dims=[8], num_outputs=3, dropout=0.1),
        jt.classification,
        {"inputs": np.ones((4, 8), np.float32), "targets": CLASSES},
    ),
    "resnet": (
        lambda: _built(kind="resnet", stage_blocks=[1, 1], width=4, stem="small", num_classes=3),
        jt.classification,
        {"inputs": IMAGES, "targets": CLASSES},
    ),
    "vit": (
        lambda: _built(kind="vit", num_layers=1, embed_dim=16, num_heads=2, patch_size=4, image_size=8, num_classes=3),
        jt.classification,
        {"inputs": IMAGES, "targets": CLASSES},
    ),
    "transformer": (
        lambda: _decoder(rope_scaling={"kind": "yarn", "factor": 2.0, "original_length": 4}),
        jt.language_modeling,
        NEXT,
    ),
    "transformer as gpt": (lambda: _decoder(**GPT), jt.language_modeling, NEXT),
    "transformer as gemma": (lambda: _decoder(**GEMMA), jt.language_modeling, NEXT),
    "transformer with experts": (lambda: _decoder(experts={"num_experts": 4}), jt.language_modeling, NEXT),
    "transformer with relative positions": (lambda: _decoder(position="relative"), jt.language_modeling, NEXT),
    "encoder-decoder": (
        lambda: _built(kind="encoder_decoder", dropout=0.1, **SMALL),
        _pairs,
        {"inputs": {"tokens": TOKENS, "decoder_tokens": TOKENS}, "targets": TOKENS},
    ),
}


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_written_out(kind: str) -> None:
    model, task, batch = KINDS[kind]
    mesh = jt.make_mesh(devices=jax.devices()[:1])
    step = jt.make_train_step(model(), task(), optax.adamw(1e-3), mesh=mesh, clip_norm=1.0, ema_decay=0.9)
    step.lower(batch)


def test_texts_are_continued() -> None:
    """Caches have ranks of their own."""
    model = _decoder()
    generate = make_generator(model, new_tokens=2, sampling=jt.Sampling())
    params = jax.eval_shape(lambda: model.init(jax.random.key(0))[0])
    prompts = np.array([[1, 2], [3, 4]], np.int32)
    found = jax.eval_shape(generate, params, prompts, np.array([2, 2], np.int32), jax.random.key(0))
    assert found.shape == (2, 2)
