"""`jaxtrain.open_run`: predictions are those of the model, curves need no checkpoint, mistakes are one line."""

import shutil

import grain
import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.errors import CheckpointError, ConfigError, DataError, UserError

CONFIG = {
    "task": "classification",
    "model": {"kind": "mlp", "hidden_dims": [16]},
    "data": {"kind": "digits"},
    "optimizer": {"kind": "sgd", "learning_rate": 0.05, "ema_decay": 0.5},
    "parallel": {"data": 2, "fsdp": 4, "max_replicated_fraction": 1.0},
    "train": {"steps": 4, "global_batch_size": 32},
    "checkpoint": {"every": 2},
    "evaluation": {"every": 2, "max_batches": None},
    "logging": {"every": 1, "report": False, "tensorboard": False},
}
SHARDED = {"parallel.data": 2, "parallel.fsdp": 4, "parallel.max_replicated_fraction": 1.0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run that keeps a moving average, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    return jt.run_config(CONFIG, run_dir=folder)


@pytest.fixture(scope="module")
def run(trained):
    return jt.open_run(trained.run_dir)


@pytest.fixture(scope="module")
def held_out():
    """Inputs and targets of 21 held-out rows: with batches of 8, the last one is partial."""
    rows = jt.open_data({"kind": "digits"}).validation.gather(np.arange(21))
    return rows["inputs"], rows["targets"]


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of the run that a test may damage."""
    shutil.copytree(trained.run_dir, tmp_path / "run")
    return tmp_path / "run"


def by_hand(run, inputs):
    """The logits of the model, applied to all rows at once on one device."""
    params = jax.tree.map(np.asarray, run.params)
    return np.asarray(run.sharded_model.model.apply(params, {}, inputs, key=None, train=False)[0])


@pytest.mark.parametrize("overrides", [None, SHARDED], ids=["one device", "data=2 fsdp=4"])
def test_predictions_are_those_of_the_model(trained, held_out, overrides):
    given = {"mesh": jt.make_mesh(devices=jax.devices()[:1])} if overrides is None else {"overrides": overrides}
    run = jt.open_run(trained.run_dir, **given)
    inputs, _ = held_out
    wanted = by_hand(run, inputs)
    found = run.predict(inputs, batch_size=8)
    assert (type(found), found.dtype, found.shape) == (np.ndarray, np.float32, (21, 10))
    # Another batch sums the 64 products of a row in another order: a few units in the seventh digit.
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert run.evaluate()["eval_loss"] == pytest.approx(trained.metrics["eval_loss"], rel=1e-5)


def test_averaged_parameters_of_the_newest_step_are_read(run, trained):
    assert run.step == 4
    assert run.checkpoints == [2, 4]
    trees = run.params, trained.state.ema, trained.state.params
    for found, kept, raw in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_array_equal(found, kept)
        assert not np.array_equal(found, raw)
    assert jt.open_run(trained.run_dir, step=2).step == 2


def test_rows_as_people_have_them(run, held_out):
    inputs, targets = held_out
    wanted = run.predict(inputs)
    forms = {
        "float64": inputs.astype(np.float64),
        "jax": jax.numpy.asarray(inputs),
        "lists": inputs.tolist(),
        "grain": grain.MapDataset.source([{"inputs": row} for row in inputs]),
    }
    for name, form in forms.items():
        np.testing.assert_array_equal(run.predict(form), wanted, err_msg=name)
    assert len(run.predict(jt.open_data({"kind": "digits", "validation_fraction": 0}))) == 1797
    found = run.evaluate(jt.ArrayRows({"inputs": inputs, "targets": targets}))
    right = (by_hand(run, inputs).argmax(-1) == targets).mean()
    assert found["eval_accuracy"] == pytest.approx(right, rel=1e-6)
    assert run.evaluate((inputs, targets)) == run.evaluate({"inputs": inputs, "targets": targets}) == found
    with pytest.raises(UserError, match="the task needs an entry 'targets'"):
        run.evaluate({"inputs": inputs})


def of_rows(make):
    """Predicts rows that do not fit, made of eight by eight pixels."""
    return lambda folder: jt.open_run(folder).predict(make(np.zeros((21, 8, 8, 1), np.float32)))


WRONG = {
    "no run": (lambda folder: jt.open_run(folder.parent), "is not a run: it has no run.json"),
    "key": (lambda folder: jt.open_run(folder, overrides={"train.stps": 3}), "did you mean 'train.steps'?"),
    "other step": (lambda folder: jt.open_run(folder, step=3).params, "no checkpoint of step 3"),
    "metric": (lambda folder: jt.open_run(folder).plot("lss"), "the run logged no metric 'lss'; it logged loss"),
    "text model": (lambda folder: jt.open_run(folder).sample("a"), "(model mlp) generates no text"),
    "one row": (of_rows(lambda inputs: inputs[0]), "the model mlp cannot be applied to inputs (float32[8, 8, 1])"),
    "no rows": (of_rows(lambda inputs: inputs[:0]), "the data has no rows"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line(trained, name):
    call, line = WRONG[name]
    with pytest.raises(UserError) as caught:
        call(trained.run_dir)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_a_damaged_checkpoint_is_passed_over(copied, held_out):
    files = [path for path in (copied / "checkpoints" / "4").rglob("*") if path.is_file() and "ocdbt" in str(path)]
    for path in files or (copied / "checkpoints" / "4" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    said = []
    run = jt.open_run(copied, report=said.append)
    assert (run.step, len(run.predict(held_out[0]))) == (2, 21)
    (line,) = said
    assert " is used instead" in line
    with pytest.raises(CheckpointError, match="damaged"):
        jt.open_run(copied, step=4, report=said.append).predict(held_out[0])


def linear(width=10):
    return jt.from_functions(
        lambda key: {"w": jax.random.normal(key, (64, width)) / 8},
        lambda params, inputs: inputs.reshape(len(inputs), -1) @ params["w"],
        name="linear",
    )


@pytest.mark.long
def test_a_model_from_python_is_given_again(tmp_path, held_out):
    config = {key: value for key, value in CONFIG.items() if key not in ("model", "optimizer")}
    result = jt.run_config(config, model=linear(), run_dir=tmp_path / "own", overrides={"train.steps": 1})
    with pytest.raises(ConfigError, match=r"write jt.open_run\('.*', model=...\)"):
        jt.open_run(result.run_dir).predict(held_out[0])
    run = jt.open_run(result.run_dir, model=linear())
    weights = np.asarray(result.state.params["w"])
    np.testing.assert_allclose(run.predict(held_out[0]), held_out[0].reshape(21, -1) @ weights, rtol=1e-4, atol=1e-5)
    assert run.evaluate()["eval_loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-5)
    with pytest.raises(CheckpointError, match=r"of another model: .* w is float32\[64, 10\], not float32\[64, 11\]"):
        _ = jt.open_run(result.run_dir, model=linear(11)).params
    with pytest.raises(ConfigError, match=r"was trained with a model from Python \(linear\)"):
        jt.run_config(result.run_dir, run_dir=tmp_path / "other")


@pytest.mark.long
def test_data_that_scales_itself_is_not_taken_for_the_runs(tmp_path):
    """A table opened without the run's reading has scales of its own: half of its rows were wrong in silence."""

    def table(name, shift):
        columns = np.random.default_rng(0).normal(size=(40, 2)) + np.array([shift, 0])
        lines = [f"{a},{b},{'high' if a > 0 else 'low'}" for a, b in columns]
        (tmp_path / name).write_text("\n".join(["a,b,y", *lines]))
        return {"kind": "table", "path": str(tmp_path / name)}

    config = {**CONFIG, "data": table("train.csv", 0), "train": {"steps": 1, "global_batch_size": 32}}
    run = jt.open_run(jt.run_config(config, run_dir=tmp_path / "run").run_dir)
    assert run.classes == ["high", "low"]
    other, reading = table("other.csv", 1), run.info["data"]["reading"]
    for use in (run.evaluate, run.predict):
        with pytest.raises(DataError, match=r'mean, deviation of this data.*reading=run.info\["data"\]\["reading"\]'):
            use(jt.open_data({**other, "validation_fraction": 0}))
    rows = jt.open_data({**other, "validation_fraction": 0}, reading=reading)
    inputs = rows.train.gather(np.arange(40))["inputs"]
    np.testing.assert_allclose(run.predict(rows), by_hand(run, inputs), atol=1e-6)
    columns = inputs * np.array(reading["deviation"]) + reading["mean"]
    np.testing.assert_allclose(run.predict(columns), by_hand(run, inputs), atol=1e-5)
    with pytest.raises(DataError, match="a run on a table is evaluated on"):
        run.evaluate((columns, np.zeros(40, np.int32)))


@pytest.mark.long
def test_tokens_of_any_length_and_text(tmp_path):
    text = {
        "model": {"kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 16},
        "data": {"kind": "text", "tokenizer": {"kind": "byte"}},
        "train": {"steps": 2, "global_batch_size": 8},
        "evaluation": {"max_batches": 1},
        "logging": {"report": False, "tensorboard": False},
    }
    run = jt.open_run(jt.run_config(text, run_dir=tmp_path / "run").run_dir)
    ids = np.random.default_rng(0).integers(0, 256, (3, 12))
    assert run.predict(ids).shape == (3, 12, 256)
    assert run.sample("ab", new_tokens=3).startswith("ab")
    assert len(run.sample(["ab", "c"], new_tokens=3)) == 2
    for wrong, line in (
        (ids + 300, "holds"),
        (ids.astype(np.float32), "takes integers tokens"),
        (np.zeros((2, 40), np.int32), "40 tokens per row and the model 16 positions"),
    ):
        with pytest.raises(UserError) as caught:
            run.predict(wrong)
        assert line in str(caught.value)
