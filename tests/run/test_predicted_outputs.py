"""What predictions are called: names of outputs, scores of reward models, and outputs of models from Python."""

import dataclasses

import grain
import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.run.predict_file import predicted_rows
from jaxtrain.run.predict_rows import RowReader

SMALL = {
    "kind": "transformer",
    "num_layers": 1,
    "embed_dim": 16,
    "num_heads": 2,
    "max_sequence_length": 16,
    "causal": False,
}

# Names that the data gave -> names of four outputs.
NAMES = {
    "fewer classes than outputs": (("ant", "bee"), ["ant", "bee", "2", "3"]),
    "classes that are called by numbers": (("2", "3"), ["2", "3", "output 2", "output 3"]),
    "two classes of one name": (("ant", "bee", "ant", "cat"), ["ant (0)", "bee", "ant (2)", "cat"]),
}


@pytest.mark.parametrize(("classes", "wanted"), NAMES.values(), ids=NAMES)
def test_every_output_has_a_name_of_its_own(classes, wanted, tmp_path):
    model = load_config({"task": "classification", "model": {"kind": "mlp", "hidden_dims": [8]}}).config.model
    reader = RowReader("run", model, None, task="classification", classes=classes)
    np.save(tmp_path / "rows.npy", np.zeros((4, 2)))
    rows = predicted_rows(reader, lambda inputs: 9 * np.eye(4), tmp_path / "rows.npy", probabilities=True)
    assert [row["class"] for row in rows] == wanted
    assert [list(row["probabilities"]) for row in rows] == [wanted] * 4


@pytest.mark.parametrize("head", ["regression", "sequence"])
def test_a_reward_model_reads_no_texts_and_gives_scores(head, tmp_path):
    """A text without its template would get a score that means nothing, and one class the probability 1."""
    tree = {"task": "reward", "model": {**SMALL, "head": {"kind": head, "num_labels": 1}}, "data": {"kind": "chat"}}
    config = load_config(tree).config
    reader = RowReader("run", config.model, None, data=config.data, task=config.task)
    with pytest.raises(ConfigError, match="run scores chats, not the rows of a file"):
        predicted_rows(reader, len, "texts.txt", probabilities=False)
    np.save(tmp_path / "rows.npy", np.zeros((2, 16), np.int32))
    scores = predicted_rows(reader, lambda inputs: np.ones((2, 1)), tmp_path / "rows.npy", probabilities=False)
    assert scores == [{"row": 1, "number": 1.0}, {"row": 2, "number": 1.0}]


def test_a_run_from_python_takes_arrays(tmp_path):
    """Its config holds defaults for the parts that were given: a language model, and another task."""
    model = jt.from_functions(lambda key: {"w": np.eye(3, dtype=np.float32)}, lambda params, x: x @ params["w"])
    rows = {"inputs": np.eye(3, dtype=np.float32)[[2, 0, 1, 1]], "targets": np.zeros(4, np.int32)}
    np.save(tmp_path / "rows.npy", rows["inputs"])
    mesh = jt.make_mesh(devices=jax.devices()[:1])
    own = jt.Task.calling("own", lambda apply, batch, key: (apply(batch["inputs"])[:, 0], {}))
    found = []
    for task in (jt.classification(), own):
        options = {"data": rows, "steps": 1, "batch_size": 4, "mesh": mesh, "logging": {"report": False}}
        jt.fit(model, task, optax.sgd(0.0), run_dir=tmp_path / task.name, **options)
        found.append(jt.open_run(tmp_path / task.name, model=model))
    assert [row["class"] for row in found[0].predict_file(tmp_path / "rows.npy")] == ["2", "0", "1", "1"]
    masked = np.ma.masked_equal(rows["inputs"], 0)
    for given in (masked, grain.MapDataset.source([{"inputs": row} for row in masked])):
        with pytest.raises(DataError, match=r"with masked entries; fill them \(\.filled\(0\)\)"):
            found[0].predict(given)
    with pytest.raises(DataError, match="data holds 'inputs' with masked entries"):
        found[0].evaluate({**rows, "inputs": masked})
    with pytest.raises(ConfigError, match="was trained with a task of its own"):
        found[1].predict_file(tmp_path / "rows.npy")
    several = dataclasses.replace(model, apply=lambda *given, **named: ((model.apply(*given, **named)[0],) * 2, {}))
    with pytest.raises(ConfigError, match="gives several outputs and none is 'logits'"):
        jt.open_run(tmp_path / "classification", model=several).predict_file(tmp_path / "rows.npy")
