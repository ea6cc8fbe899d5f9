"""Losses of pairs of answers: each is what its formula says, and a mesh gives what one device gives.

Shapes: B pairs, L sequence, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.models.task import CallingLoss
from jaxtrain.runtime.tree import paths_of

B, L, V = 8, 12, 24
SIZES = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": L, "vocab_size": V}
SCORES = {"head": {"kind": "regression", "num_labels": 1, "pooling": "last"}}


def transformer(**more) -> jt.Model:
    return jt.build_model({"kind": "transformer", **SIZES, **more}, input_shape=(L,), vocab_size=V)


def pairs(rows: int = B, seed: int = 0) -> dict[str, np.ndarray]:
    """Pairs whose answers begin and end at other tokens."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, V, (rows, 2, L + 1)).astype(np.int32)
    begins, ends = draw.integers(1, 4, (rows, 2, 1)), draw.integers(6, L + 1, (rows, 2, 1))
    places = np.arange(L)
    weights = ((places >= begins) & (places < ends)).astype(np.float32)
    return {"inputs": tokens[..., :-1], "targets": tokens[..., 1:], "weights": weights}


BATCH = pairs()


def log_probabilities(model: jt.Model, params, batch) -> jax.Array:
    """The definition, of all logits in float32: [B, 2]."""
    logits, _ = model.apply(params, {}, batch["inputs"].reshape(-1, L), key=None, train=False)
    found = jax.nn.log_softmax(logits.astype(jnp.float32)).reshape(*batch["targets"].shape, V)
    own = jnp.take_along_axis(found, batch["targets"][..., None], axis=-1)[..., 0]
    return jnp.sum(own * (batch["weights"] != 0), axis=-1)


def margins(model, params, start, batch, beta):
    over = beta * (log_probabilities(model, params, batch) - log_probabilities(model, start, batch))
    return over[:, 0] - over[:, 1]


def row_weights(batch):
    return batch["weights"].max(axis=(1, 2))


def step_of(model, task, *, mesh=None, optimizer=None, **options):
    mesh = mesh or {"data": 1}
    on = jt.make_mesh(**mesh, devices=jax.devices()[: int(np.prod(list(mesh.values())))])
    return jt.make_train_step(model, task, optimizer or optax.sgd(0.1), mesh=on, **options)


def test_dpo_is_its_formula_with_its_gradient():
    task = jt.dpo(0.3, label_smoothing=0.2, logits="vocabulary", block=7)
    model = transformer()
    step = step_of(model, task, optimizer=optax.sgd(1.0))
    state = step.init(0)
    start = jax.tree.map(jnp.array, state.params)
    state, _ = step(state, pairs(seed=1))
    # Weights of rows, and a row that counts nothing.
    batch = {**BATCH, "weights": BATCH["weights"] * np.array([2, 0] + [1] * 6)[:, None, None]}

    def loss(params):
        weights = row_weights(batch)
        margin = margins(model, params, start, batch, 0.3)
        losses = -0.8 * jax.nn.log_sigmoid(margin) - 0.2 * jax.nn.log_sigmoid(-margin)
        return jnp.sum(losses * weights) / jnp.sum(weights), margin

    params = jax.tree.map(jnp.array, state.params)
    (wanted, margin), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    state, found = step(state, batch)
    # float32 sums of a hundred terms in another order.
    np.testing.assert_allclose(found["loss"], wanted, rtol=2e-6)
    moved = jax.tree.map(lambda new, old: old - new, state.params, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), moved, gradients)
    right = np.sum((margin > 0) * row_weights(batch)) / row_weights(batch).sum()
    np.testing.assert_allclose(found["accuracy"], right, rtol=1e-6)


def test_a_reward_model_scores_the_token_that_ends_the_answer():
    model = transformer(**SCORES)
    step = step_of(model, jt.reward())
    state = step.init(0)
    batch = {name: column[:2] for name, column in BATCH.items()}
    scores = np.zeros((2, 2))
    score = jax.jit(lambda params, text: model.apply(params, {}, text, key=None, train=False)[0])
    for row, answer in np.ndindex(2, 2):
        end = min(int(np.flatnonzero(batch["weights"][row, answer]).max()) + 2, L)
        text = batch["inputs"][row, answer, :end]  # without padding, so that its last token is pooled
        scores[row, answer] = score(state.params, text[None]).item()
    wanted = np.mean(np.logaddexp(0, scores[:, 1] - scores[:, 0]))
    _, found = step(state, batch)
    np.testing.assert_allclose(found["loss"], wanted, rtol=1e-5)  # other lengths, other sums
    np.testing.assert_allclose(found["margin"], np.mean(scores[:, 0] - scores[:, 1]), rtol=1e-3, atol=1e-6)


def test_the_text_of_a_reward_ends_with_the_token_after_the_last_that_counts():
    seen = []

    def apply(inputs):
        seen.append(np.asarray(inputs["segments"]))
        return jnp.zeros(len(inputs["tokens"]))

    weights = np.zeros((1, 2, L), np.float32)
    weights[0, 0, 2:5] = 1  # its last token is the input after place 4
    weights[0, 1, 3:] = 0.5  # up to the end of the row
    batch = {name: BATCH[name][:1] for name in ("inputs", "targets")} | {"weights": weights}
    loss = jt.reward().loss
    assert isinstance(loss, CallingLoss)
    loss.function(apply, batch, jax.random.key(0))
    assert seen[0].tolist() == [[1] * 6 + [0] * (L - 6), [1] * L]


MESHES = {
    "data4": {"data": 4},
    "data2_fsdp2": {"data": 2, "fsdp": 2},
    "fsdp2_tensor2": {"fsdp": 2, "tensor": 2},
    "data2_context2": {"data": 2, "context": 2},
}


# Task, mesh, and what else the step does.
ON_MESHES = {
    "fsdp": ("dpo", "data2_fsdp2", {}),
    "tensor, microbatches": ("dpo by vocabulary", "fsdp2_tensor2", {"accumulation_steps": 2}),
    "ZeRO, microbatches": ("dpo", "data4", {"accumulation_steps": 2, "parallelism": jt.Parallelism(zero=2)}),
    "ZeRO, offload": ("dpo", "data4", {"parallelism": jt.Parallelism(zero=1), "offload_optimizer": True}),
    "rewards": ("reward", "data2_context2", {}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ON_MESHES)
def test_a_mesh_gives_the_losses_of_one_device(name):
    task, mesh, options = ON_MESHES[name]
    tasks = {"dpo": jt.dpo(), "dpo by vocabulary": jt.dpo(logits="vocabulary", block=6), "reward": jt.reward()}
    model = transformer(**(SCORES if task == "reward" else {}))

    def losses(mesh, options):
        step = step_of(model, tasks[task], mesh=mesh, optimizer=optax.adam(0.01), **options)
        state, found = step.init(0), []
        for _ in range(3):
            state, metrics = step(state, BATCH)
            found.append([float(metrics[name]) for name in ("loss", "accuracy", "margin")])
        return np.array(found)

    np.testing.assert_allclose(losses(MESHES[mesh], options), losses({"data": 1}, {}), rtol=1e-5, atol=1e-6)


# How a model is adapted and computed, and the dtype of what is kept as the reference.
STORED = {
    "fp32": ({}, {}, "float32"),
    "bf16": ({}, {"policy": "bf16"}, "bfloat16"),
    "fp16": ({}, {"policy": "fp16"}, "float16"),
    "adapters": ({"lora": jt.LoraConfig(rank=2)}, {}, "float32"),
    "adapters over nf4": ({"lora": jt.LoraConfig(rank=2), "base": "nf4"}, {"policy": "bf16"}, "bfloat16"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "adapters" else pytest.mark.long) for name in STORED]
)
def test_the_first_loss_is_ln_2_and_what_is_trained_is_kept(name):
    adapters, options, dtype = STORED[name]
    model = transformer(embed_dim=64)  # nf4 has blocks of 64
    model = jt.adapt(model, **adapters) if adapters else model
    step = step_of(model, jt.dpo(), optimizer=optax.adam(0.01), **options)
    state = step.init(0)
    leaves = paths_of(state.reference)
    assert set(leaves) == {f"params/{path}" for path in paths_of(step.program.trained(state.params))}
    assert {leaf.dtype.name for leaf in leaves.values()} == {dtype}
    before = {path: np.array(leaf) for path, leaf in leaves.items()}
    losses = []
    for _ in range(5):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses[0] == np.float32(np.log(2))
    assert losses[-1] < losses[0]
    for path, leaf in paths_of(state.reference).items():
        np.testing.assert_array_equal(leaf, before[path], err_msg=path)


def test_evaluation_compares_with_the_start_and_padding_counts_nothing():
    model, held_out = transformer(), pairs(5, seed=2)
    step = step_of(model, jt.dpo(), optimizer=optax.adam(0.01))
    state = step.init(0)
    start = jax.tree.map(jnp.array, state.params)
    for _ in range(3):
        state, _ = step(state, BATCH)
    batches = jt.Batches(jt.ArrayRows(held_out), 8, seed=0, shuffle=False)
    means = jt.Evaluator(step)(state, [step.loader(batches)(0)])
    margin = margins(model, state.params, start, held_out, 0.1)
    assert means["eval_margin"] == pytest.approx(float(jnp.mean(margin)), rel=1e-4)  # differences of sums
    assert means["eval_loss"] == pytest.approx(float(-jnp.mean(jax.nn.log_sigmoid(margin))), rel=1e-6)
