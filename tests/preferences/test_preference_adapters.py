"""Losses that call the model, on adapted models: dropout, other parameters, meshes and quantized bases.

Shapes: B pairs, L sequence, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt

B, L, V = 8, 8, 16
# Widths of whole blocks of 64 weights, so that a base may be quantized.
SIZES = {"num_layers": 1, "embed_dim": 64, "num_heads": 2, "max_sequence_length": L, "vocab_size": V}
DRAW = np.random.default_rng(0)
TOKENS = DRAW.integers(0, V, (B, 2, L + 1)).astype(np.int32)
BATCH = {
    "inputs": TOKENS[..., :-1],
    "targets": TOKENS[..., 1:],
    "weights": np.ones((B, 2, L), np.float32),
    "reference": DRAW.normal(-22, 1, (B, 2)).astype(np.float32),
}


def adapted(*, base=None, dropout=0.0, **more) -> jt.Model:
    model = jt.build_model({"kind": "transformer", **SIZES, **more}, input_shape=(L,), vocab_size=V)
    also = ("head/*",) if "head" in more else ()
    return jt.adapt(model, lora=jt.LoraConfig(rank=2, dropout=dropout, train_also=also), base=base)


def step_of(model, task, mesh=None, **options):
    mesh = mesh or {"data": 1}
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    return jt.make_train_step(model, task, optax.sgd(1.0), mesh=jt.make_mesh(**mesh, devices=devices), **options)


def losses(step, steps=3):
    state, found = step.init(0), []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        found.append(float(metrics["loss"]))
    return np.array(found)


CASES = {
    "dpo with dropout on nf4": (
        lambda **more: adapted(base="nf4", dropout=0.3, **more),
        jt.dpo(logits="vocabulary", block=5),
    ),
    "reward with a head trained whole": (
        lambda **more: adapted(head={"kind": "regression", "num_labels": 1, "pooling": "last"}, **more),
        jt.reward(),
    ),
}
# Mesh and microbatches of each case.
ON_MESHES = {
    "dpo with dropout on nf4": ({"data": 2, "fsdp": 2}, 2),
    "reward with a head trained whole": ({"fsdp": 2, "tensor": 2}, 1),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_an_adapted_model_gives_the_losses_of_one_device(case):
    make, task = CASES[case]
    degrees, accumulation = ON_MESHES[case]
    # Dropout draws a key per microbatch, so that another number of them is another run.
    accumulated = {"accumulation_steps": accumulation}
    alone = losses(step_of(make(), task, **accumulated))
    np.testing.assert_allclose(losses(step_of(make(), task, degrees, **accumulated)), alone, rtol=1e-5)
    assert alone[0] != alone[2]


@pytest.mark.long
def test_calls_of_one_loss_draw_other_masks_and_take_other_parameters():
    def loss(apply, batch, key):
        inputs = batch["inputs"][:, 0]
        first, second = apply(inputs), apply(inputs)
        still = [apply(inputs, train=False) for _ in range(2)]
        grown = jax.tree.map(
            lambda leaf: leaf + 0.1 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, apply.params
        )
        other = apply(inputs, params=grown, train=False)
        apart = [jnp.mean(jnp.abs(a - b), axis=(1, 2)) for a, b in ((first, second), still, (still[0], other))]
        return apart[0], dict(zip(("draws", "evaluations", "others"), apart, strict=True))

    step = step_of(adapted(dropout=0.5), jt.Task.calling("calls", loss))
    state = step.init(0)
    # Factors of zero would hide the masks.
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + 0.1 if "lora_b" in jax.tree_util.keystr(path) else leaf, state.params
    )
    state = dataclasses.replace(state, params=params)
    metrics = step.gradients(state, BATCH).metrics
    assert metrics["draws"] > 0
    assert metrics["evaluations"] == 0
    assert metrics["others"] > 0
