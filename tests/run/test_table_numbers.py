"""Numbers of a table are learned and predicted in their own units, however large they are."""

import numpy as np
import pytest

import jaxtrain as jt


def prices(rng):
    inputs = rng.normal(size=(200, 2))
    return inputs, 100_000 + 30_000 * inputs @ np.array([1.0, -0.5])


def config(tmp_path, steps):
    inputs, targets = prices(np.random.default_rng(0))
    np.savez(tmp_path / "prices.npz", inputs=inputs, targets=targets)
    return {
        "task": "regression",
        "model": {"kind": "mlp", "hidden_dims": [16]},
        "data": {"kind": "table", "path": str(tmp_path / "prices.npz")},
        "optimizer": {"kind": "adamw", "learning_rate": 1e-2, "schedule": {"kind": "constant"}},
        "train": {"steps": steps, "global_batch_size": 32},
        "logging": {"report": False, "tensorboard": False},
    }


def test_prices_are_learned_in_few_steps_and_predicted_as_prices(tmp_path):
    inputs, targets = prices(np.random.default_rng(1))
    jt.run_config(config(tmp_path, 40), run_dir=tmp_path / "run")
    # The run goes on, with the scale of its first process.
    result = jt.run_config(config(tmp_path, 60), run_dir=tmp_path / "run")
    assert result.metrics["eval_loss"] < 0.1 * targets.var()
    run = jt.open_run(result.run_dir)
    predicted = np.asarray(run.predict(inputs))
    assert np.mean((predicted.reshape(-1) - targets) ** 2) < 0.1 * targets.var()
    # The scale is of the data of this run: its config, from which runs on other tables begin, has none.
    assert run.config.model.output_scale is None
    reading = run.info["data"]["reading"]
    scale = [*reading["target_mean"], *reading["target_deviation"]]
    np.testing.assert_allclose(scale, [100_000, 30_000 * 1.25**0.5], rtol=0.2)


def test_a_task_given_from_python_is_scaled_alike(tmp_path):
    results = [
        jt.run_config(config(tmp_path, 4), run_dir=tmp_path / name, task=task)
        for name, task in (("config", None), ("python", jt.regression()))
    ]
    assert results[0].metrics["eval_loss"] == results[1].metrics["eval_loss"]
    inputs, _ = prices(np.random.default_rng(1))
    given = jt.open_run(tmp_path / "python", task=jt.regression()).predict(inputs)
    np.testing.assert_array_equal(given, jt.open_run(tmp_path / "config").predict(inputs))


def test_a_constant_target_has_no_deviation_and_is_learned_as_it_is(tmp_path):
    np.savez(tmp_path / "constant.npz", inputs=np.arange(80.0).reshape(40, 2), targets=np.full(40, 7.0))
    data = jt.open_data({"kind": "table", "path": str(tmp_path / "constant.npz"), "task": "regression"})
    assert data.reading is not None
    assert (data.reading["target_mean"], data.reading["target_deviation"]) == ([7.0], [0.0])


def test_a_scale_of_another_number_of_outputs_is_refused(tmp_path):
    config_of_two = config(tmp_path, 2)
    config_of_two["model"]["output_scale"] = {"mean": [0.0, 1.0], "deviation": [1.0]}
    with pytest.raises(jt.ConfigError, match=r"model\.output_scale\.mean has 2 numbers, not one or 1"):
        jt.run_config(config_of_two, run_dir=tmp_path / "run")


def test_a_scale_of_classes_is_refused(tmp_path):
    scaled = {"mean": [0.0], "deviation": [1.0]}
    model = {"kind": "mlp", "hidden_dims": [8], "output_scale": scaled}
    with pytest.raises(jt.ConfigError, match=r"model\.output_scale is of numbers, and task=classification has none"):
        jt.run_config({"task": "classification", "model": model, "data": {"kind": "digits"}}, run_dir=tmp_path / "run")
