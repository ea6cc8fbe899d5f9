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
REFERENCE = np.random.default_rng(1).normal(-30, 1, (B, 2)).astype(np.float32)


def log_probabilities(model: jt.Model, params, batch) -> jax.Array:
    """The definition, of all logits in float32: [B, 2]."""
    logits, _ = model.apply(params, {}, batch["inputs"].reshape(-1, L), key=None, train=False)
    found = jax.nn.log_softmax(logits.astype(jnp.float32)).reshape(*batch["targets"].shape, V)
    own = jnp.take_along_axis(found, batch["targets"][..., None], axis=-1)[..., 0]
    return jnp.sum(own * (batch["weights"] != 0), axis=-1)


def margins(model, params, batch, beta):
    over = beta * (log_probabilities(model, params, batch) - batch["reference"])
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
    # Weights of rows, and a row that counts nothing.
    batch = {**BATCH, "reference": REFERENCE, "weights": BATCH["weights"] * np.array([2, 0] + [1] * 6)[:, None, None]}

    def loss(params):
        weights = row_weights(batch)
        margin = margins(model, params, batch, 0.3)
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
    "data2_fsdp2": {"data": 2, "fsdp": 2},
    "fsdp2_tensor2": {"fsdp": 2, "tensor": 2},
    "data2_context2": {"data": 2, "context": 2},
}


# Each loss, each mesh, and accumulation.
ON_MESHES = [("dpo", "data2_fsdp2", 1), ("dpo by vocabulary", "fsdp2_tensor2", 2), ("reward", "data2_context2", 1)]


@pytest.mark.long
@pytest.mark.parametrize(("task", "mesh", "accumulation"), ON_MESHES)
def test_a_mesh_gives_the_losses_of_one_device(task, mesh, accumulation):
    tasks = {"dpo": jt.dpo(), "dpo by vocabulary": jt.dpo(logits="vocabulary", block=6), "reward": jt.reward()}
    model = transformer(**(SCORES if task == "reward" else {}))

    def losses(mesh, accumulation):
        step = step_of(model, tasks[task], mesh=mesh, optimizer=optax.adam(0.01), accumulation_steps=accumulation)
        state, found = step.init(0), []
        for _ in range(3):
            state, metrics = step(state, {**BATCH, "reference": REFERENCE})
            found.append([float(metrics[name]) for name in ("loss", "accuracy", "margin")])
        return np.array(found)

    np.testing.assert_allclose(losses(MESHES[mesh], accumulation), losses({"data": 1}, 1), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def dpo_step():
    return step_of(transformer(), jt.dpo())


def test_the_first_loss_is_ln_2_and_padding_counts_nothing(dpo_step):
    step, model = dpo_step, dpo_step.model
    state = step.init(0)
    rows = jt.ArrayRows(pairs(5))
    known = [jt.reference_rows(step, state, rows, batch_size=size) for size in (2, 5)]
    values = [np.stack([one[i]["reference"] for i in range(5)]) for one in known]
    # Sums of a few tokens in another order.
    np.testing.assert_allclose(values[0], values[1], rtol=1e-6)
    np.testing.assert_allclose(values[0], log_probabilities(model, state.params, pairs(5)), rtol=1e-5)
    means = jt.Evaluator(step)(state, [step.loader(jt.Batches(known[0], 8, seed=0, shuffle=False))(0)])
    assert abs(means["eval_loss"] - np.log(2)) < 1e-6
    assert abs(means["eval_margin"]) < 1e-5
