"""Losses that call the model: each gives on a mesh what it gives on one device, and what its formula says."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxtrain as jt

ROWS, WIDTH, CLASSES = 16, 8, 4
MESHES = {"one": {"data": 1}, "data2_fsdp4": {"data": 2, "fsdp": 4}}


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


BATCH = {"inputs": numbers(ROWS, WIDTH), "targets": np.arange(ROWS) % CLASSES}


def dense(outputs: int = CLASSES, name: str = "dense") -> jt.Model:
    def init(key):
        return {"w": jax.random.normal(key, (WIDTH, outputs)) / 3, "b": jnp.zeros((outputs,))}

    return jt.from_functions(init, lambda params, x: jnp.tanh(x) @ params["w"] + params["b"], name=name)


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.first, self.drop = nnx.Linear(WIDTH, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.first(x))))


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(WIDTH, CLASSES, rngs=rngs), nnx.BatchNorm(CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


class DroppedAndNormed(nnx.Module):
    def __init__(self, rngs):
        self.drop, self.normed = nnx.Dropout(0.5, rngs=rngs), Normed(rngs)

    def __call__(self, x):
        return self.normed(self.drop(x))


def cross_entropy(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs.astype(jnp.float32), batch["targets"])


def plain(outputs, batch):
    losses = cross_entropy(outputs, batch) * batch["weights"]
    return jnp.sum(losses), jnp.sum(batch["weights"]), {}


def by_row(outputs, batch):
    return cross_entropy(outputs, batch), {}


def calls_once(apply, batch, key):
    return plain(apply(batch["inputs"]), batch)


def denoise(apply, batch, key):
    noise = jax.random.normal(key, batch["inputs"].shape)
    return jnp.mean(jnp.square(apply(batch["inputs"] + noise) - noise), axis=-1), {}


def follows_average(apply, batch, key):
    outputs, wanted = apply(batch["inputs"]), apply(batch["inputs"], params=apply.average, train=False)
    weight = jnp.minimum(1.0, apply.step / 2)
    return cross_entropy(outputs, batch) + weight * jnp.sum(jnp.square(outputs - wanted), axis=-1), {}


def penalised(apply, batch, key):
    inputs = batch["inputs"]
    slopes = jax.vmap(jax.grad(lambda x: jnp.sum(apply(x[None]))))(inputs)
    return cross_entropy(apply(inputs), batch) + jnp.sum(jnp.square(slopes), axis=-1), {}


def with_statistics(apply, batch, key):
    outputs, state = apply.with_state(batch["inputs"], key=key)
    return cross_entropy(outputs, batch), {}, state


def compared_with_start(apply, batch, key):
    outputs, state = apply.with_state(batch["inputs"], key=key)
    start = apply.reference(batch["inputs"])
    return jnp.sum(jnp.square(outputs - start - 1), axis=-1), {"start": start[:, 0]}, state


def train(task, model, *, mesh, steps=4, batch=BATCH, **options):
    step = jt.make_train_step(
        model, task, optax.adam(0.05), mesh=jt.make_mesh(**mesh, devices=devices(mesh)), **options
    )
    state, losses = step.init(0), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.array(losses), step, state


def devices(mesh):
    return jax.devices()[: int(np.prod(list(mesh.values())))]


CALLING = {
    "noise": (denoise, lambda: jt.from_nnx(Dropped), {}),
    "average_and_step": (follows_average, lambda: dense(), {"ema_decay": 0.9}),
    "input_gradient": (penalised, lambda: dense(), {}),
    "batch_statistics": (with_statistics, lambda: jt.from_nnx(Normed), {}),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name == "average_and_step" else pytest.mark.long) for name in CALLING],
)
def test_a_mesh_gives_the_losses_of_one_device(case):
    loss, model, options = CALLING[case]
    task = jt.Task.calling(case, loss)
    options = {**options, "accumulation_steps": 2}
    one, mesh = (train(task, model(), mesh=MESHES[name], **options)[0] for name in MESHES)
    np.testing.assert_allclose(mesh, one, rtol=1e-5)  # the bound of every layout
    assert one[-1] < one[0] or case == "noise"


WEIGHED = {**BATCH, "weights": np.where(np.arange(ROWS) < 5, 0.0, 1.0 + np.arange(ROWS) % 2).astype(np.float32)}


@functools.cache
def losses_of_the_plain_form():
    return train(jt.Task("plain", plain, reads_weights=True), dense(), mesh={"data": 1}, batch=WEIGHED)[0]


@pytest.mark.parametrize("task", [jt.Task("rows", by_row), jt.Task.calling("once", calls_once)], ids=lambda t: t.name)
def test_every_form_of_a_loss_is_the_same_loss(task):
    found = train(task, dense(), mesh={"data": 2}, batch=WEIGHED, accumulation_steps=4)[0]
    np.testing.assert_allclose(found, losses_of_the_plain_form(), rtol=1e-6)  # the order of sums


def test_evaluation_counts_weights_and_leaves_padding_out():
    task = jt.Task.calling("rows", lambda apply, batch, key: by_row(apply(batch["inputs"]), batch))
    step = jt.make_train_step(dense(), task, optax.sgd(0.1))
    state = step.init(0)
    rows = jt.ArrayRows({name: value[:11] for name, value in BATCH.items()})
    batches = jt.Batches(rows, 8, seed=0, shuffle=False)
    found = jt.Evaluator(step)(state, [step.loader(batches)(k) for k in range(len(batches))])
    outputs = step.model.apply(jax.device_get(state.params), {}, BATCH["inputs"][:11], key=None, train=False)[0]
    wanted = float(jnp.mean(cross_entropy(outputs, {"targets": BATCH["targets"][:11]})))
    assert found["eval_loss"] == pytest.approx(wanted, rel=1e-6)


def confusion(outputs, batch):
    table = jnp.zeros((CLASSES, CLASSES)).at[batch["targets"], jnp.argmax(outputs, axis=-1)].add(batch["weights"])
    return jnp.sum(cross_entropy(outputs, batch)), jnp.float32(len(table)), {"confusion": (table, None)}


def test_a_total_is_added_up_and_not_divided():
    mesh = jt.make_mesh(**MESHES["data2_fsdp4"])
    step = jt.make_train_step(dense(), jt.Task("confusion", confusion), optax.sgd(0.1), mesh=mesh, accumulation_steps=2)
    found = jt.Evaluator(step)(step.init(0), [BATCH, BATCH])
    assert found["eval_confusion"].sum() == 2 * ROWS
    np.testing.assert_array_equal(found["eval_confusion"].sum(axis=1), 2 * np.bincount(BATCH["targets"]))
    _, metrics = step(step.init(0), BATCH)
    assert metrics["confusion"].sum() == ROWS


def contrastive(outputs, batch):
    a, b = outputs["image"], outputs["text"]
    logits = a @ b.T / 0.5
    labels = jnp.arange(len(a))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses, {"negatives": (jnp.float32(len(a) - 1), jnp.float32(1))}


def pair():
    return jt.from_models({"image": dense(name="image"), "text": jt.from_nnx(Dropped)})


PAIRS = {"inputs": {"image": numbers(ROWS, WIDTH), "text": numbers(WIDTH, ROWS).reshape(ROWS, WIDTH)}}


def halves(outputs, batch):
    return contrastive({**outputs, "text": outputs["text"][:, :CLASSES]}, batch)


REFUSED = {
    "global": (jt.Task("c", contrastive, rows="global"), {"accumulation_steps": 2}, "use accumulation_steps=1"),
    "no_reference": (jt.Task.calling("c", compared_with_start), {}, "make its task with Task.calling(..., reference"),
    "no_average": (jt.Task.calling("c", follows_average), {}, "the step keeps none; give make_train_step"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_wrong_in_silence_is_refused(case):
    task, options, message = REFUSED[case]
    model = jt.from_models({"image": dense(name="image"), "text": dense(name="text")})

    def one_step():
        step = jt.make_train_step(model, task, optax.sgd(0.1), **options)
        step(step.init(0), PAIRS)

    with pytest.raises(jt.ConfigError, match=re.escape(message)) as found:
        one_step()
    assert "\n" not in str(found.value)


STAGES = jt.build_model(
    {"kind": "transformer", "num_layers": 2, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 8},
    input_shape=(8,),
    vocab_size=16,
)


def test_the_pipeline_refuses_what_needs_all_rows_in_one_place():
    calling, mixing = jt.Task.calling("once", calls_once), jt.Task("c", contrastive, rows="global")
    with pytest.raises(jt.ConfigError, match="calls the model itself; use parallel"):
        jt.make_train_step(STAGES, calling, optax.sgd(0.1), mesh=jt.make_mesh(pipe=2, devices=jax.devices()[:2]))
    with pytest.raises(jt.ConfigError, match="the last stage sees one microbatch"):
        jt.make_train_step(STAGES, mixing, optax.sgd(0.1), mesh=jt.make_mesh(pipe=2, data=4))


def test_calls_of_one_loss_draw_other_masks_and_take_other_parameters():
    def loss(apply, batch, key):
        rows = batch["left"]
        grown = jax.tree.map(lambda leaf: leaf + 0.1, apply.params)
        still = apply(rows, train=False)
        again, other = apply(rows, train=False), apply(rows, params=grown, train=False)
        pairs = (apply(rows), apply(rows)), (still, again), (still, other)
        apart = [jnp.mean(jnp.abs(a - b), axis=1) for a, b in pairs]
        return apart[0], dict(zip(("draws", "evaluations", "others"), apart, strict=True))

    mesh = jt.make_mesh(devices=jax.devices()[:1])
    step = jt.make_train_step(jt.from_nnx(Dropped), jt.Task.calling("calls", loss), optax.sgd(0.1), mesh=mesh)
    _, metrics = step(step.init(0), {"left": BATCH["inputs"]})  # a batch without inputs will do
    assert metrics["draws"] > 0
    assert metrics["evaluations"] == 0
    assert metrics["others"] > 0


def test_the_reference_is_the_model_at_the_start_without_dropout():
    model = jt.from_nnx(DroppedAndNormed)
    task = jt.Task.calling("start", compared_with_start, reference=True)
    mesh = jt.make_mesh(devices=jax.devices()[:1])
    step = jt.make_train_step(model, task, optax.adam(0.1), mesh=mesh, accumulation_steps=2)
    state = step.init(0)
    params, model_state = jax.tree.map(jnp.copy, (state.params, state.model_state))
    apply = step.sharded_model.apply
    outputs = jax.jit(lambda x: apply(params, model_state, x, key=None, train=False)[0])(BATCH["inputs"])
    expected = float(jnp.mean(outputs[:, 0]))
    for _ in range(3):
        state, metrics = step(state, BATCH)
        assert metrics["start"] == pytest.approx(expected, abs=1e-6)  # the order of sums
    assert jt.Evaluator(step)(state, [BATCH])["eval_start"] == pytest.approx(expected, abs=1e-6)
    assert not np.array_equal(state.params["normed"]["linear"]["kernel"], params["normed"]["linear"]["kernel"])
