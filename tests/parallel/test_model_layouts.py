"""Forms of the transformer's block, encoders with heads, ViTs, CLIP and encoder-decoders: every mesh as one device.

Tiny models on rows of their own kind: packed, padded, masked, labelled, pairs of sequences. What is drawn (dropout) has
to be the same on every layout too.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import pytest
from layouts import ONE, Layout, distance, layout, make_mesh_of

from jaxtrain.config.schema import Remat
from jaxtrain.errors import ConfigError
from jaxtrain.models.model import Model
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.tasks import TASKS
from jaxtrain.train.build import make_train_step
from jaxtrain.train.step import TrainStep

STEPS, ROWS, LENGTH, OUTPUT, VOCABULARY, CLASSES = 4, 8, 32, 16, 48, 4
MASKED = 1  # the id that stands for a masked token
Batch = dict[str, Any]


def draw_tokens(random: np.random.Generator, length: int = LENGTH) -> np.ndarray:
    """The lower ones more often, which a few steps learn."""
    return (2 + (VOCABULARY - 2) * random.random((ROWS, length)) ** 3).astype(np.int32)


def plain_rows(random: np.random.Generator) -> Batch:
    tokens = draw_tokens(random, LENGTH + 1)
    weights = (np.arange(LENGTH) < random.integers(16, LENGTH + 1, (ROWS, 1))).astype(np.float32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def packed_rows(random: np.random.Generator) -> Batch:
    """Documents that cross the shards of a sequence, of 10 tokens and more; the tail of each row is padding."""
    segments, positions = np.zeros((ROWS, LENGTH), np.int32), np.zeros((ROWS, LENGTH), np.int32)
    for row in range(ROWS):
        first, second = 4 + row, 14
        segments[row, : first + second] = np.repeat([1, 2], [first, second])
        positions[row] = np.concatenate([np.arange(n) for n in (first, second, LENGTH - first - second)])
    tokens = draw_tokens(random)
    inputs = {"tokens": tokens, "segments": segments, "positions": positions}
    return {"inputs": inputs, "targets": np.roll(tokens, 3, axis=1), "weights": (segments != 0).astype(np.float32)}


def padded_rows(random: np.random.Generator) -> Batch:
    """Rows of 3 to 32 real tokens, of which the first two are a prompt; shards and microbatches have unequal parts."""
    tokens = draw_tokens(random)
    real = np.arange(LENGTH)[None] < np.array([32, 3, 5, 9, 3, 3, 22, 4])[:, None]
    trained = (real & (np.arange(LENGTH) >= 2)).astype(np.float32)
    inputs = {"tokens": np.where(real, tokens, 0), "segments": real.astype(np.int32)}
    return {"inputs": inputs, "targets": np.roll(tokens, -1, axis=1), "weights": trained}


def pairs_of_sequences(random: np.random.Generator) -> Batch:
    """An output repeats its input; rows are padded."""
    tokens = draw_tokens(random)
    seen = (np.arange(LENGTH)[None] < random.integers(16, LENGTH + 1, (ROWS, 1))).astype(np.int32)
    targets = tokens[:, :OUTPUT]
    before = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    inputs = {"tokens": tokens, "segments": seen, "decoder_tokens": before}
    return {"inputs": inputs, "targets": targets, "weights": seen[:, 12 : 12 + OUTPUT].astype(np.float32)}


def texts(random: np.random.Generator) -> tuple[Batch, np.ndarray]:
    """Rows of repeated ids, padded to different lengths, and which tokens are padding."""
    tokens = np.repeat(random.integers(2, VOCABULARY, (ROWS, 1)), LENGTH, axis=1).astype(np.int32)
    real = np.arange(LENGTH) < random.integers(LENGTH // 2, LENGTH + 1, (ROWS, 1))
    types = (np.arange(LENGTH) >= LENGTH // 2).astype(np.int32) * np.ones((ROWS, 1), np.int32)
    return {"tokens": np.where(real, tokens, 0), "segments": real.astype(np.int32), "token_types": types}, real


def masked_rows(random: np.random.Generator) -> Batch:
    inputs, real = texts(random)
    chosen = real & (random.random((ROWS, LENGTH)) < 0.3)
    targets = np.where(chosen, inputs["tokens"], -100).astype(np.int32)
    tokens = np.where(chosen, MASKED, inputs["tokens"]).astype(np.int32)
    return {"inputs": {**inputs, "tokens": tokens}, "targets": targets, "weights": chosen.astype(np.float32)}


def labelled_rows(random: np.random.Generator) -> Batch:
    inputs, _ = texts(random)
    return {"inputs": inputs, "targets": inputs["tokens"][:, 0] % CLASSES, "weights": np.ones(ROWS, np.float32)}


def images(random: np.random.Generator) -> Batch:
    targets = random.integers(0, CLASSES, ROWS).astype(np.int32)
    found = random.normal(0, 0.3, (ROWS, 8, 8, 1)) + targets[:, None, None, None]
    return {"inputs": found.astype(np.float32), "targets": targets, "weights": np.ones(ROWS, np.float32)}


def images_and_texts(random: np.random.Generator) -> Batch:
    """Texts begin with the class of their image, and end with the largest id at different places."""
    found, tokens = images(random), draw_tokens(random, OUTPUT)
    tokens[:, :3] = found["targets"][:, None]
    tokens[np.arange(ROWS), random.integers(3, OUTPUT, ROWS)] = VOCABULARY - 1
    return {"inputs": {"images": found["inputs"], "tokens": tokens}}


@dataclass(frozen=True)
class Case:
    """Settings of a model, its rows, and its task."""

    settings: dict[str, Any]
    make_batch: Callable[[np.random.Generator], Batch]
    task: str = "language_modeling"


DECODER = dict(
    kind="transformer", num_layers=4, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=32, max_sequence_length=64,
    vocab_size=VOCABULARY,
)  # fmt: skip
STATES = dict(position="none", mlp_dim=None, num_kv_heads=None, state_space=dict(state_dim=4, groups=2, chunk=4))
POST = dict(
    block="post", norm="layernorm", bias=True, activation="gelu_exact", position="learned", embedding_norm=True,
    token_types=2, num_kv_heads=4,
)  # fmt: skip
ENCODER = {**DECODER, **POST, "num_layers": 2, "causal": False, "tie_embeddings": True, "dropout": 0.1}
PAIRS = dict(
    kind="encoder_decoder", embed_dim=16, num_heads=4, head_dim=8, mlp_dim=32, vocab_size=VOCABULARY,
    relative_buckets=8, relative_max_distance=16,
)  # fmt: skip
TOWER = dict(num_layers=2, embed_dim=16, num_heads=4, mlp_dim=32)
EXPERTS = dict(num_experts=4, experts_per_token=1, load_balance_weight=0.5, router_z_weight=0.0)
SHARED = dict(scores="sigmoid", score_bias=True, weights_scale=1.5, shared_dim=8)
LEADING = dict(dense_layers=2, dense_dim=24)
LATENT = dict(query_rank=8, key_value_rank=8, nope_dim=6, rope_dim=4, value_dim=8)

CASES = {
    "biased experts": Case(
        dict(
            DECODER, experts={**EXPERTS, "experts_per_token": 2, **SHARED}, bias=True, activation="clamped_swiglu",
            attention_sinks=True, local_layers=dict(pattern=(1, 0), window=7),
        ),
        plain_rows,
    ),
    "sandwich": Case(
        dict(
            DECODER, block="sandwich", norm_offset=True, activation="geglu", qk_norm=True, attention_scale=0.4,
            embedding_scale=4.0, attention_softcap=5.0, logits_softcap=3.0, tie_embeddings=True,
            local_layers=dict(pattern=(1, 0, 1), window=7, rope_theta=100.0),
        ),
        plain_rows,
    ),
    "one norm": Case(
        dict(
            DECODER, block="parallel_one_norm", norm="layernorm", norm_bias=True, bias="attention", output_bias=True,
            qk_norm="per_head", rotary_interleaved=True, rope_layers=(1, 0),
        ),
        plain_rows,
    ),
    "chunks": Case(
        dict(
            DECODER, local_layers=dict(pattern=(1, 0), window=7, chunked=True), rope_layers=(1, 0), qk_norm="rotated",
            attention_temperature=dict(scale=0.7, step=4),
            experts={**EXPERTS, "scores": "sigmoid", "weigh_inputs": True, "shared_dim": 8},
        ),
        padded_rows,
    ),
    "norms of outputs": Case(dict(DECODER, block="output", qk_norm="whole", residual_scale=0.5), plain_rows),
    "norm of embeddings": Case(
        dict(
            DECODER, num_kv_heads=4, causal=False, norm="layernorm", embedding_norm="first_layer", dropout=0.1,
            embedding_width=8, activation="geglu_exact", tie_embeddings=True, token_types=2,
            local_layers=dict(pattern=(0, 1, 1), window=5, rope_theta=100.0),
            head=dict(kind="masked_language_model", bias="output"),
        ),
        masked_rows,
        "masked_language_modeling",
    ),
    "parallel": Case(
        dict(
            DECODER, block="parallel", norm="layernorm", bias=True, activation="gelu_exact", rotary_fraction=0.5,
            dropout=0.1, rope_scaling=dict(kind="yarn", factor=4.0, original_length=16),
        ),
        plain_rows,
    ),
    "post": Case(dict(DECODER, **POST, position_offset=2, logits_scale=0.5), plain_rows),
    # Sequences of several blocks of queries: 16 of 8 would be one.
    "relative": Case(dict(DECODER, position="relative", bias="qkv", attention="blockwise"), plain_rows),
    "longrope": Case(
        dict(
            DECODER,
            rope_scaling=dict(kind="longrope", short_factors=[1.0, 1.2], long_factors=[4.0, 8.0], original_length=10),
        ),
        plain_rows,
    ),
    "latents": Case(dict(DECODER, num_kv_heads=4, latent=LATENT, experts={**EXPERTS, **SHARED, **LEADING}), plain_rows),
    "state space": Case(dict(DECODER, **STATES), plain_rows),
    # Real tokens alone count in the router's loss.
    "padded experts": Case(dict(DECODER, experts=EXPERTS), padded_rows),
    "masked": Case(dict(ENCODER, head=dict(kind="masked_language_model")), masked_rows, "masked_language_modeling"),
    # What the head needs beside the residual stream travels through a pipeline: the weights of the mean, and seeds.
    "labels": Case(
        dict(ENCODER, head=dict(kind="sequence", pooling="mean", hidden="tanh", dropout=0.2)),
        labelled_rows,
        "classification",
    ),
    "vit": Case(
        dict(kind="vit", num_layers=2, embed_dim=16, num_heads=4, mlp_dim=32, patch_size=2, dropout=0.1),
        images,
        "classification",
    ),
    "clip": Case(
        dict(
            kind="clip", projection_dim=8, text=dict(TOWER, vocab_size=VOCABULARY, max_sequence_length=OUTPUT),
            image=dict(TOWER, patch_size=2, image_size=8, channels=1),
        ),
        images_and_texts,
        "contrastive",
    ),
    "encoder_decoder": Case(
        dict(
            PAIRS, num_layers=2, num_decoder_layers=3, attention_scale=1.0, activation="relu", tie_embeddings=True,
            logits_scale=0.25, dropout=0.1,
        ),
        pairs_of_sequences,
    ),
    "rotary encoder_decoder": Case(dict(PAIRS, num_layers=1, position="rotary"), pairs_of_sequences),
}  # fmt: skip


def make_model(name: str, remat: str = "none", **settings: Any) -> Model:
    case = CASES[name]
    shape = (8, 8, 1) if name == "vit" else (LENGTH,)
    classes = None if case.task == "language_modeling" else CLASSES
    return build_model({**case.settings, **settings}, input_shape=shape, num_outputs=classes, remat=Remat(policy=remat))


@functools.cache
def batches(name: str) -> list[Batch]:
    random = np.random.default_rng(0)
    return [CASES[name].make_batch(random) for _ in range(STEPS)]


def make_step(name: str, where: Layout, remat: str = "none") -> TrainStep:
    task = TASKS[CASES[name].task]()
    return make_train_step(
        make_model(name, remat),
        task,
        # Without such an epsilon Adam makes full steps of the rounding of gradients that are 0 (biases of keys).
        optax.adamw(3e-3, eps=1e-5),
        mesh=make_mesh_of(where.degrees),
        accumulation_steps=1 if task.rows == "global" else 2,
        # Of models this small the biases are more than the usual limit.
        parallelism=where.options.model_copy(update={"max_replicated_fraction": 1.0}),
    )


def run(name: str, where: Layout, remat: str = "none") -> tuple[np.ndarray, Any]:
    """All metrics of every step, the gradient norm last, and the parameters after them."""
    step = make_step(name, where, remat)
    state, found = step.init(0), []
    for batch in batches(name):
        state, metrics = step(state, batch)
        found.append([float(metrics[metric]) for metric in sorted(metrics, key=lambda name: name == "grad_norm")])
    return np.array(found), jax.device_get(state.params)


# What shards the parameters of a form and what splits its stack; attention that has code of its own on a sequence in
# shards; pipelines that carry more than activations.
ROWS_OF_MODELS = [
    ("biased experts", layout(expert=2, data=2), "none"),
    ("biased experts", layout(expert=2, tensor=2), "dots"),
    ("biased experts", layout(fsdp=2, tensor=2, data=2, zero=2), "full"),
    ("biased experts", layout(pipe=2, expert=2), "full"),
    ("sandwich", layout(fsdp=2, tensor=2), "dots"),
    ("sandwich", layout(pipe=2, context=2), "none"),
    ("parallel", layout(pipe=2, tensor=2), "full"),
    ("one norm", layout(pipe=2, tensor=2), "full"),
    ("one norm", layout(fsdp=2, context=2), "dots"),
    ("chunks", layout(tensor=2, fsdp=2), "dots"),
    ("chunks", layout(pipe=2, context=2), "full"),
    ("chunks", layout(context=2, expert=2), "none"),
    ("norms of outputs", layout(fsdp=2, tensor=2, sp=True), "dots"),
    ("norm of embeddings", layout(pipe=2, tensor=2), "full"),
    ("norm of embeddings", layout(fsdp=2, tensor=2, sp=True), "dots"),
    ("post", layout(fsdp=2, tensor=2), "dots"),
    ("relative", layout(pipe=2, tensor=2, schedule="interleaved_1f1b"), "full"),
    ("latents", layout(fsdp=2, tensor=2, sp=True), "dots"),
    ("latents", layout(pipe=2, fsdp=2, context=2), "none"),
    ("latents", layout(data=2, expert=2, zero=2), "full"),
    ("state space", layout(pipe=2, fsdp=2, tensor=2), "sqrt"),
    ("state space", layout(data=2, tensor=4, sp=True, zero=2), "dots"),
    ("longrope", layout(context=4, attention="ring"), "full"),
    ("longrope", layout(pipe=2, context=2), "none"),
    ("padded experts", layout(expert=2, data=2, zero=2), "none"),
    ("padded experts", layout(pipe=2, data=2), "none"),
    ("padded experts", layout(context=2, expert=2), "none"),
    ("masked", layout(fsdp=2, tensor=2, data=2, zero=2, sp=True), "full"),
    ("labels", layout(pipe=2), "none"),
    ("vit", layout(pipe=2, fsdp=2, tensor=2), "full"),
    ("clip", layout(data=2, fsdp=2, tensor=2), "full"),
    ("clip", layout(fsdp=2, tensor=2, data=2, zero=2, sp=True), "dots"),
    ("encoder_decoder", layout(data=2, fsdp=2, tensor=2, sp=True), "sqrt"),
    ("rotary encoder_decoder", layout(context=2, tensor=2), "none"),
]


@functools.cache
def reference(name: str) -> tuple[np.ndarray, Any]:
    return run(name, ONE)


# In plain pytest test_layouts.py proves layouts, and tests/models/ what these settings compute.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "where", "remat"),
    ROWS_OF_MODELS,
    ids=[f"{name}-{'-'.join(where.degrees)}" for name, where, _ in ROWS_OF_MODELS],
)
def test_numbers_of_one_device(name: str, where: Layout, remat: str) -> None:
    """Tolerances as in test_layouts.py: float32 sums in another order, carried through Adam."""
    (found, params), (expected, expected_params) = run(name, where, remat), reference(name)
    np.testing.assert_allclose(found[:, :-1], expected[:, :-1], rtol=1e-5, atol=1e-6)
    # Measured 2e-5 under softcaps.
    np.testing.assert_allclose(found[:, -1], expected[:, -1], rtol=1e-4)
    assert distance(params, expected_params) < 1e-4


def test_stages_that_two_stacks_cannot_have_are_refused() -> None:
    line = r"parallel.pipe=2, but the model encoder_decoder .* use parallel.pipe=1"
    with pytest.raises(ConfigError, match=line):
        make_step("encoder_decoder", layout(pipe=2)).lower(batches("encoder_decoder")[0])
