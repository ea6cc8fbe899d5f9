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
    scale = run.config.model.output_scale
    assert scale is not None
    np.testing.assert_allclose([*scale.mean, *scale.deviation], [100_000, 30_000 * 1.25**0.5], rtol=0.2)


def test_a_scale_of_another_number_of_outputs_is_refused(tmp_path):
    config_of_two = config(tmp_path, 2)
    config_of_two["model"]["output_scale"] = {"mean": [0.0, 1.0], "deviation": [1.0]}
    with pytest.raises(jt.ConfigError, match=r"model\.output_scale\.mean has 2 numbers, not one or 1"):
        jt.run_config(config_of_two, run_dir=tmp_path / "run")
