"""The directory of a run where a config is wanted: its own config, going on with it or beginning another run."""

import json

import pytest

import jaxtrain as jt
from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError

CONFIG = {
    "task": "classification",
    "model": {"kind": "mlp", "hidden_dims": [8]},
    "data": {"kind": "digits"},
    "optimizer": {"kind": "sgd", "learning_rate": 0.05},
    "train": {"steps": 2, "global_batch_size": 32},
    "logging": {"every": 1, "report": False, "tensorboard": False},
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished run of two steps."""
    return jt.run_config(CONFIG, run_dir=tmp_path_factory.mktemp("runs") / "first").run_dir


def test_its_config_is_read_as_it_was_resolved(run_dir):
    loaded = load_config(run_dir, overrides=["train.steps=5"])
    assert loaded.config == load_config({**CONFIG, "train.steps": 5}).config
    assert (loaded.name, loaded.run_dir, dict(loaded.from_python)) == ("run", run_dir, {})
    assert loaded.origins["optimizer.learning_rate"] == f"{run_dir}/run.json"
    assert loaded.origins["model.kind"] == f"{run_dir}/run.json"
    assert loaded.origins["train.steps"] == "command line"
    assert loaded.notes == ()


def test_no_override_is_lost_beside_a_loaded_config(tmp_path):
    with pytest.raises(ConfigError, match="load_config"):
        jt.run_config(load_config(CONFIG), overrides={"train.steps": 3}, run_dir=tmp_path / "run")


@pytest.mark.long
def test_it_goes_on_where_no_other_directory_is_named(run_dir):
    before = (run_dir / "metrics.jsonl").read_text()
    longer = jt.run_config(run_dir, overrides={"train.steps": 3})
    assert (longer.run_dir, longer.step) == (run_dir, 3)
    assert (run_dir / "metrics.jsonl").read_text().startswith(before)
    other = jt.run_config(run_dir, overrides={"train.steps": 2}, run_dir=run_dir.parent / "second")
    losses = [json.loads(line)["loss"] for line in before.splitlines() if '"loss"' in line]
    # The same config and seed on the same devices: the same numbers.
    assert jt.open_run(other.run_dir).history["loss"].tolist() == losses
    assert load_config(run_dir).config.train.steps == 3


def test_other_settings_do_not_go_on_in_silence(run_dir):
    with pytest.raises(ConfigError, match=r"holds a run with another configuration: optimizer.learning_rate"):
        jt.run_config(run_dir, overrides={"optimizer.learning_rate": 1.0})


OWN = {"model": "Mine", "task": None, "data": None}


def test_parts_from_python_are_not_replaced_by_the_config(cli, run_dir, tmp_path):
    info = json.loads((run_dir / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**info, "from_python": OWN}))
    for command, code in (("plan", 2), ("train", 2), ("config", 0)):
        answer = cli(command, str(tmp_path))
        assert answer.code == code
        said = "came from Python (Mine)" if code == 0 else "was trained with a model from Python (Mine)"
        assert said in answer.err.splitlines()[-1]
