"""What counts in a loss: own weights, ignored targets, the filling of a last batch, on every way to evaluate."""

import flax.linen
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.config.models import TransformerConfig
from jaxtrain.data.rows import ArrayRows, ConcatenatedRows
from jaxtrain.errors import ConfigError, DataError

RNG = np.random.default_rng(0)
TINY = {"kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 8}


def one_device():
    return jt.make_mesh(devices=jax.devices()[:1])


def linear(outputs: int):
    """x [B, 3] @ ones: the outputs are the sums of the rows."""
    return jt.from_functions(lambda key: {"w": jnp.ones((3, outputs))}, lambda params, x: x @ params["w"])


def evaluate(model, task, rows, *, size, mesh=None, **options):
    step = jt.make_train_step(model, task, optax.sgd(0.0), mesh=mesh or one_device(), **options)
    batches = jt.Batches(rows, size, seed=0, shuffle=False)
    load = step.loader(batches)
    return jt.Evaluator(step)(step.init(0), [load(k) for k in range(len(batches))])


def language_model(num_layers: int = 1):
    return jt.build_model({**TINY, "num_layers": num_layers}, input_shape=(8,), vocab_size=32)


def token_rows(count: int, **more):
    ids = RNG.integers(0, 32, (count, 9)).astype(np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:], **more}


def test_a_row_s_own_weights_count_in_evaluation_as_in_training():
    weights = (RNG.random((6, 8)) > 0.5).astype(np.float32) * 2
    columns = token_rows(6, weights=weights)
    step = jt.make_train_step(language_model(), jt.language_modeling(), optax.sgd(0.0), mesh=one_device())
    _, metrics = step(step.init(0), columns)
    found = evaluate(
        language_model(), jt.language_modeling(), ArrayRows(columns), size=4
    )  # the last batch is filled up
    assert float(metrics["weight"]) == weights.sum()
    # fp32 sums of 48 terms in another order.
    np.testing.assert_allclose(found["eval_loss"], metrics["loss"], rtol=1e-6)


def test_a_loss_finds_weights_in_training_as_in_evaluation():
    def loss(outputs, batch):
        return jnp.sum(outputs[:, 0] * batch["weights"]), jnp.sum(batch["weights"]), {}

    inputs = RNG.normal(size=(4, 3)).astype(np.float32)
    columns = {"inputs": inputs, "targets": np.zeros((4, 2), np.float32)}
    step = jt.make_train_step(linear(2), jt.Task("own", loss, reads_weights=True), optax.sgd(0.0), mesh=one_device())
    state, metrics = step(step.init(0), columns)
    found = jt.Evaluator(step)(state, [step.loader(jt.Batches(ArrayRows(columns), 4, seed=0, shuffle=False))(0)])
    np.testing.assert_allclose([metrics["loss"], found["eval_loss"]], inputs.sum(1).mean(), rtol=1e-5)


def test_a_weight_per_row_weighs_every_token_of_the_row():
    columns = token_rows(4)
    by_row, by_token = np.array([0, 1, 2, 0.5], np.float32), np.ones((4, 8), np.float32)
    step = jt.make_train_step(language_model(), jt.language_modeling(), optax.sgd(0.0), mesh=one_device())
    one, two = (
        step(step.init(0), {**columns, "weights": weights})[1] for weights in (by_row, by_row[:, None] * by_token)
    )
    assert float(one["loss"]) == float(two["loss"])
    assert float(one["weight"]) == float(two["weight"]) == 3.5 * 8


@pytest.mark.parametrize(
    ("logits", "layout"), [("whole", {}), ("tokens", {}), ("vocabulary", {"data": 2, "tensor": 2})], ids=str
)
def test_negative_targets_are_ignored_as_weight_0_is(logits, layout):
    columns = token_rows(4)
    ignored = RNG.random((4, 8)) > 0.5
    task = jt.language_modeling(logits=logits, block=None if logits == "whole" else 8)
    mesh = jt.make_mesh(**layout, devices=jax.devices()[: 4 if layout else 1])
    step = jt.make_train_step(language_model(), task, optax.sgd(0.1), mesh=mesh)
    negative = np.where(ignored, -100, columns["targets"]).astype(np.int32)
    masked = {**columns, "targets": negative, "weights": np.ones((4, 8), np.float32)}
    weighted = {**columns, "weights": (~ignored).astype(np.float32)}
    (state, found), (same, wanted) = step(step.init(0), masked), step(step.init(0), weighted)
    assert float(found["weight"]) == (~ignored).sum()
    # One program, and the ignored targets differ in nothing that it adds up.
    assert float(found["loss"]) == float(wanted["loss"])
    jax.tree.map(np.testing.assert_array_equal, state.params, same.params)


def test_classes_below_0_are_ignored():
    logits = jnp.asarray(RNG.normal(size=(4, 5)), jnp.float32)
    targets = np.array([1, -1, 3, -100], np.int32)
    total, weight, metrics = jt.classification().loss(logits, {"targets": targets})
    alone, _, right = jt.classification().loss(logits[::2], {"targets": targets[::2]})
    assert (float(weight), float(metrics["accuracy"][1])) == (2, 2)
    np.testing.assert_allclose(total, alone, rtol=1e-6)
    assert float(metrics["accuracy"][0]) == float(right["accuracy"][0])


@pytest.mark.parametrize("outputs", [2, 4])
def test_integer_regression_targets_are_numbers(outputs):
    inputs = RNG.normal(size=(6, 3)).astype(np.float32)
    targets = RNG.integers(-100, 100, (6, outputs)).astype(np.int32)
    found = evaluate(linear(outputs), jt.regression(), ArrayRows({"inputs": inputs, "targets": targets}), size=4)
    true = np.mean((inputs.sum(1, dtype=np.float64)[:, None] - targets) ** 2)
    np.testing.assert_allclose(found["eval_loss"], true, rtol=1e-6)


def plain(name: str = "plain"):
    """A task that knows nothing of weights."""

    def loss(outputs, batch):
        return jnp.sum(outputs[:, 0]), jnp.float32(outputs.shape[0]), {"columns": (jnp.sum(outputs, 0), len(outputs))}

    return jt.Task(name, loss)


LAYOUTS = {"one device": {}, "data=2 fsdp=2": {"data": 2, "fsdp": 2}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_task_that_reads_no_weights_does_not_see_the_filling(layout):
    inputs = RNG.normal(size=(9, 3)).astype(np.float32)
    rows = ArrayRows({"inputs": inputs, "targets": np.zeros((9, 2), np.float32)})
    mesh = jt.make_mesh(**LAYOUTS[layout], devices=jax.devices()[: 4 if LAYOUTS[layout] else 1])
    found = evaluate(linear(2), plain(), rows, size=8, mesh=mesh)
    np.testing.assert_allclose(found["eval_loss"], inputs.sum(1).mean(), rtol=1e-5)
    # A vector metric is a vector.
    np.testing.assert_allclose(found["eval_columns"], [inputs.sum(1).mean()] * 2, rtol=1e-5)


def test_a_task_that_reads_no_weights_does_not_see_the_filling_on_a_pipeline():
    columns = token_rows(5)

    def loss(outputs, batch):
        right = jnp.argmax(outputs, -1) == batch["targets"]
        return jnp.sum(jnp.max(outputs, -1)), jnp.float32(right.size), {}

    found = [
        evaluate(language_model(2), jt.Task("top", loss), ArrayRows(columns), size=4, mesh=mesh, **options)
        for mesh, options in (
            (one_device(), {}),
            (jt.make_mesh(pipe=2, data=2, devices=jax.devices()[:4]), {"accumulation_steps": 2}),
        )
    ]
    np.testing.assert_allclose(found[1]["eval_loss"], found[0]["eval_loss"], rtol=1e-5)


def test_a_mean_over_no_weight_is_nan():
    columns = token_rows(2, weights=np.zeros((2, 8), np.float32))
    found = evaluate(language_model(), jt.language_modeling(), ArrayRows(columns), size=2)
    assert np.isnan(found["eval_loss"])


# Nested entries, scalars and vectors.


def packed(count: int):
    return {
        "inputs": {
            "tokens": RNG.integers(0, 32, (count, 8)).astype(np.int32),
            "segments": np.tile(np.repeat([0, 1], 4), (count, 1)).astype(np.int32),
            "positions": np.tile(np.arange(4), (count, 2)).astype(np.int32),
        },
        "targets": RNG.integers(0, 32, (count, 8)).astype(np.int32),
    }


@pytest.mark.parametrize("shuffle", [True, False], ids=["train", "evaluate"])
def test_nested_rows_go_through_batches(shuffle):
    columns = packed(6)
    rows = [jax.tree.map(lambda column, i=i: column[i], columns) for i in range(6)]
    found = []
    for dataset in (ArrayRows(columns), grain.MapDataset.source(rows), ConcatenatedRows([ArrayRows(columns)])):
        step = jt.make_train_step(
            language_model(),
            jt.language_modeling(),
            optax.sgd(0.0),
            mesh=jt.make_mesh(data=2, fsdp=2, devices=jax.devices()[:4]),
        )
        batches = jt.Batches(dataset, 4, seed=0, shuffle=shuffle)
        batch = step.loader(batches)(1)
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), batches.spec()
        )
        found.append(jax.device_get(batch))
    jax.tree.map(np.testing.assert_array_equal, found[0], found[1])
    if not shuffle:
        expected = jax.tree.map(lambda column: column[[4, 5, 0, 0]], columns)
        jax.tree.map(np.testing.assert_array_equal, expected, {k: found[0][k] for k in expected})


def test_packed_rows_train_on_a_mesh_as_on_one_device():
    columns = packed(8)
    losses = []
    for layout, options in (({}, {}), ({"data": 2, "fsdp": 2}, {"accumulation_steps": 2})):
        mesh = jt.make_mesh(**layout, devices=jax.devices()[: 4 if layout else 1])
        step = jt.make_train_step(language_model(), jt.language_modeling(), optax.sgd(0.5), mesh=mesh, **options)
        state = step.init(0)
        for _ in range(2):
            state, metrics = step(state, columns)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize(("layout", "accumulation"), [({}, 1), ({"data": 2}, 2), ({"data": 2, "pipe": 2}, 2)], ids=str)
def test_a_scalar_of_a_batch_reaches_every_microbatch(layout, accumulation):
    def loss(outputs, batch):
        rows = batch["targets"].shape[0]
        return jnp.sum(batch["targets"]) * batch["temperature"] + 0 * jnp.sum(outputs), jnp.float32(rows), {}

    mesh = jt.make_mesh(**layout, devices=jax.devices()[: 2 ** len(layout)])
    model = language_model(2) if "pipe" in layout else linear(1)
    step = jt.make_train_step(
        model, jt.Task("scaled", loss), optax.sgd(0.1), mesh=mesh, accumulation_steps=accumulation
    )
    batch = token_rows(4)
    inputs = batch["inputs"] if "pipe" in layout else np.ones((4, 3), np.float32)
    _, metrics = step(step.init(0), {**batch, "inputs": inputs, "temperature": 2.5})
    np.testing.assert_allclose(metrics["loss"], 2.5 * batch["targets"].sum() / 4, rtol=1e-6)


def test_vector_metrics_reach_the_log(tmp_path):
    def loss(outputs, batch):
        by_class = jnp.sum(jax.nn.one_hot(batch["targets"], 3), 0)
        return jnp.sum(outputs**2), jnp.float32(len(outputs)), {"share": (by_class, jnp.float32(len(outputs)))}

    config = {
        "task": "classification",
        "model": {"kind": "mlp", "hidden_dims": [4]},
        "data": {"kind": "synthetic", "task": "table", "num_rows": 32, "num_columns": 4, "num_classes": 3},
        "train": {"steps": 2, "global_batch_size": 8},
        "logging": {"report": True, "tensorboard": True, "every": 1},
        "compilation_cache": None,
    }
    result = jt.run_config(config, task=jt.Task("own", loss), run_dir=tmp_path / "run")
    assert sum(result.metrics[f"share_{i}"] for i in range(3)) == pytest.approx(1)
    assert sum(result.metrics[f"eval_share_{i}"] for i in range(3)) == pytest.approx(1)


# One line for what is wrong.

REFUSED_IDS = {
    "targets": ({"targets": np.full((2, 8), 32, np.int32)}, "targets of 32, but the model has ids 0 to 31"),
    "inputs": ({"inputs": np.full((2, 8), 99, np.int32)}, "inputs of 99, but the model has ids 0 to 31"),
    "negative inputs": ({"inputs": np.full((2, 8), -1, np.int32)}, "inputs of -1"),
}


@pytest.mark.parametrize("case", REFUSED_IDS)
@pytest.mark.parametrize("way", ["loader", "call"])
def test_ids_that_the_model_does_not_have_are_refused_on_the_host(case, way):
    more, message = REFUSED_IDS[case]
    columns = {**token_rows(2), **more}
    step = jt.make_train_step(language_model(), jt.language_modeling(), optax.sgd(0.1), mesh=one_device())
    state = step.init(0) if way == "call" else None
    batches = jt.Batches(ArrayRows(columns), 2, seed=0, shuffle=True)
    with pytest.raises(DataError, match=message):
        step(state, columns) if state is not None else step.loader(batches)(0)


def test_classes_that_an_own_model_does_not_have_are_refused():
    step = jt.make_train_step(linear(3), jt.classification(), optax.sgd(0.1), mesh=one_device())
    batch = {"inputs": np.ones((2, 3), np.float32), "targets": np.array([0, 3], np.int32)}
    with pytest.raises(DataError, match="targets of 3, but the model has ids 0 to 2"):
        step(step.init(0), batch)
    # Of weight 0 they are what people pad with.
    step(step.init(0), {**batch, "weights": np.array([1, 0], np.float32)})


def test_ids_that_only_the_device_sees_make_the_step_not_finite():
    step = jt.make_train_step(linear(3), jt.classification(), optax.sgd(0.1), mesh=one_device())
    batch = jax.device_put(
        {"inputs": np.ones((2, 3), np.float32), "targets": np.array([0, 3], np.int32)}, jax.devices()[0]
    )
    state, metrics = step(step.init(0), batch)
    assert int(metrics["skipped_steps"]) == 1
    np.testing.assert_array_equal(state.params["w"], np.ones((3, 3)))


X, Y = np.ones((4, 3), np.float32), np.zeros(4, np.int32)
WRONG_BATCHES = {
    "targets [B, 1]": (jt.classification, {"inputs": X, "targets": Y[:, None]}, r"drop the last dimension"),
    "float classes": (jt.classification, {"inputs": X, "targets": X[:, 0]}, "needs integer targets"),
    "no targets": (jt.classification, {"inputs": X}, "needs an entry 'targets'"),
    "weights of another length": (
        jt.classification,
        {"inputs": X, "targets": Y, "weights": np.ones((4, 7), np.float32)},
        r"weights \[4, 7\] do not fit targets \[4\]",
    ),
    "regression of another width": (
        jt.regression,
        {"inputs": X, "targets": np.ones((4, 2), np.float32)},
        r"targets \[4, 2\] do not fit outputs \[4, 3\]",
    ),
    "regression of [B] with 3 outputs": (jt.regression, {"inputs": X, "targets": X[:, 0]}, "do not fit outputs"),
    "no inputs": (jt.classification, {"x": X, "targets": Y}, "no entry 'inputs'.*it holds x, targets"),
    "a tuple": (jt.classification, (X, Y), "not a dict of arrays"),
}


@pytest.mark.parametrize("case", WRONG_BATCHES)
def test_a_batch_that_does_not_fit_is_one_line(case):
    task, batch, message = WRONG_BATCHES[case]
    step = jt.make_train_step(linear(3), task(), optax.sgd(0.1), mesh=one_device())
    with pytest.raises(ConfigError, match=message) as caught:
        step(step.init(0), batch)
    assert "\n" not in str(caught.value)


WRONG_LOSSES = {
    "one number": (lambda outputs, batch: jnp.mean(outputs), r"must return \(sum, weight, metrics\)"),
    "a pair": (lambda outputs, batch: (jnp.sum(outputs), 1.0), "returned 2 values"),
    "a vector": (lambda outputs, batch: (outputs[:, 0], 4.0, {}), r"its sum is an array float32\[4\]"),
    "metrics without weights": (lambda outputs, batch: (jnp.sum(outputs), 4.0, {"a": jnp.sum(outputs)}), "pair"),
    "a metric called loss": (lambda outputs, batch: (jnp.sum(outputs), 4.0, {"loss": (1.0, 1.0)}), "rename it"),
}


@pytest.mark.parametrize("case", WRONG_LOSSES)
def test_a_loss_that_returns_something_else_is_one_line(case):
    loss, message = WRONG_LOSSES[case]
    step = jt.make_train_step(linear(3), jt.Task("mine", loss), optax.sgd(0.1), mesh=one_device())
    with pytest.raises(ConfigError, match=message) as caught:
        step(step.init(0), {"inputs": X, "targets": Y})
    assert "\n" not in str(caught.value)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(2)(x)


MODEL, TASK, OPTIMIZER = linear(2), jt.classification(), optax.sgd(0.1)
WRONG_PARTS = {
    "task: a function": (MODEL, lambda outputs, batch: 0.0, OPTIMIZER, r"jaxtrain\.Task\('name', loss\)"),
    "task: not called": (MODEL, jt.classification, OPTIMIZER, r"write jaxtrain\.classification\(\)"),
    "task: its name": (MODEL, "classification", OPTIMIZER, r"write jaxtrain\.classification\(\)"),
    "model: an NNX class": (Nnx, TASK, OPTIMIZER, r"the class Nnx.*from_nnx\(lambda rngs: Nnx\("),
    "model: an NNX module": (Nnx(nnx.Rngs(0)), TASK, OPTIMIZER, r"an instance of Nnx.*from_nnx"),
    "model: a Linen module": (Linen(), TASK, OPTIMIZER, r"from_linen\(Linen"),
    "model: a Linen class": (Linen, TASK, OPTIMIZER, r"from_linen\(Linen"),
    "model: a function": (lambda params, x: x, TASK, OPTIMIZER, "from_functions"),
    "model: a config": (TransformerConfig(), TASK, OPTIMIZER, "build_model"),
    "optimizer: of NNX": (
        MODEL,
        TASK,
        nnx.Optimizer(Nnx(nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param),
        "pass the optax transformation",
    ),
    "optimizer: not called": (MODEL, TASK, optax.adamw, r"optax\.adamw\(1e-3\)"),
    "optimizer: a rate": (MODEL, TASK, 1e-3, r"optax\.adamw\(0\.001\)"),
    "swapped": (TASK, MODEL, OPTIMIZER, "the model is an instance of Task"),
}


class Wide(nnx.Module):
    def __init__(self, width, rngs):
        self.linear = nnx.Linear(width, 2, rngs=rngs)


WRONG_CALLS = {
    "from_nnx: a module": (lambda: jt.from_nnx(Nnx(nnx.Rngs(0))), "not an instance of Nnx"),
    "from_nnx: more arguments": (lambda: jt.from_nnx(Wide), r"lambda rngs: Wide\(\.\.\., rngs=rngs\)"),
    "from_nnx: no module": (lambda: jt.from_nnx(lambda rngs: {"w": 1}), "returns an nnx.Module, not dict"),
    "from_nnx: a number": (lambda: jt.from_nnx(3), "takes a function"),
    "from_linen: a class": (lambda: jt.from_linen(Linen, X), r"from_linen\(Linen\(\), example_inputs\)"),
    "from_linen: NNX": (lambda: jt.from_linen(Nnx(nnx.Rngs(0)), X), "takes a module of flax.linen"),
    "from_functions: arrays": (lambda: jt.from_functions({"w": X}, lambda params, x: x), "takes two functions"),
    "run_config: rows": (lambda: jt.run_config("digits_mlp", data=ArrayRows({"inputs": X})), "not a jaxtrain.Data"),
    "run_config: a function": (
        lambda: jt.run_config("digits_mlp", task=jt.classification),
        r"jaxtrain\.classification\(\)",
    ),
    "run_config: a module": (lambda: jt.run_config("digits_mlp", model=Nnx), "from_nnx"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_a_call_with_something_else_is_one_line(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, message = WRONG_CALLS[case]
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", WRONG_PARTS)
def test_a_part_of_another_kind_is_one_line(case):
    model, task, optimizer, message = WRONG_PARTS[case]
    with pytest.raises(ConfigError, match=message) as caught:
        jt.make_train_step(model, task, optimizer, mesh=one_device())
    assert "\n" not in str(caught.value)


WRONG_ROWS = {
    "a dict": (lambda: jt.Batches({"inputs": X}, 2, seed=0, shuffle=True), "ArrayRows"),
    "an array": (lambda: jt.Batches(X, 2, seed=0, shuffle=True), "rows with an index"),
    "no entry": (lambda: ArrayRows({}), "it got none"),
    "sources with and without weights": (
        lambda: ConcatenatedRows([ArrayRows({"inputs": X}), ArrayRows({"inputs": X, "weights": X[:, 0]})]),
        "the sources hold different rows",
    ),
    "lengths that differ": (lambda: ArrayRows({"inputs": X, "targets": Y[:3]}), "inputs has 4, targets has 3 rows"),
    "rows of other entries": (
        lambda: jt.Batches(grain.MapDataset.source([{"inputs": X[0]}, {"x": X[0]}]), 2, seed=0, shuffle=True).load(
            0, {"inputs": jax.sharding.SingleDeviceSharding(jax.devices()[0])}
        ),
        "rows hold different entries",
    ),
    "rows of other shapes": (
        lambda: jt.Batches(
            grain.MapDataset.source([{"inputs": X[0]}, {"inputs": X[0, :2]}]), 2, seed=0, shuffle=True
        ).load(0, {"inputs": jax.sharding.SingleDeviceSharding(jax.devices()[0])}),
        "rows hold inputs of shapes",
    ),
}


@pytest.mark.parametrize("case", WRONG_ROWS)
def test_rows_of_another_kind_are_one_line(case):
    make, message = WRONG_ROWS[case]
    with pytest.raises(DataError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
