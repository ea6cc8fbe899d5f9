"""Runs of text tasks from config to evaluation: the same after a restart, classes kept, held-out rows predicted."""

import json

import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config import load_config
from jaxtrain.run.trainer import run_config

SMALL = {
    "model": {"num_layers": 1, "embed_dim": 32, "num_heads": 4, "mlp_dim": 64, "max_sequence_length": 32},
    # Without an end, the rate of a step does not depend on the number of steps.
    "optimizer": {"schedule": {"kind": "constant", "warmup_steps": 0}},
    "train": {"steps": 6, "global_batch_size": 8},
    "evaluation": {"every": 6, "max_batches": 2},
    "checkpoint": {"every": 3},
    "logging": {"every": 1, "report": False},
}
MASKED = {
    "task": "masked_language_modeling",
    "model": {**SMALL["model"], "causal": False},
    "data": {"kind": "text", "corruption": {"kind": "mask"}},
}
LABELLED = {
    "task": "classification",
    "model": {**SMALL["model"], "causal": False, "head": {"kind": "sequence"}},
    "data": {"kind": "labelled_text", "builtin": "python_docstrings"},
}
PAIRS = {
    "task": "sequence_to_sequence",
    "model": {"kind": "encoder_decoder", **SMALL["model"]},
    "data": {"kind": "text_pairs", "builtin": "python_docstrings", "target_length": 16},
}
TAGGED = {
    "task": "token_classification",
    "model": {**SMALL["model"], "causal": False, "head": {"kind": "token"}},
    "data": {"kind": "tagged_text", "path": "tagged.jsonl", "validation_fraction": 0.25},
}
NUMBERS = {
    "task": "regression",
    "model": {**SMALL["model"], "causal": False, "head": {"kind": "regression", "num_labels": 1}},
    "data": {"kind": "labelled_text", "path": "tagged.jsonl", "validation_fraction": 0.25},
}
IMAGES = {
    "task": "classification",
    "model": {"kind": "vit", "num_layers": 1, "embed_dim": 32, "num_heads": 4, "mlp_dim": 64, "patch_size": 4},
    "data": {"kind": "digits"},
}
pytestmark = pytest.mark.long


def run(parts, folder, **changes):
    return run_config(load_config({**SMALL, **parts}, keywords=changes), run_dir=folder)


def rows(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in found if "loss" in row}, [row for row in found if "eval_loss" in row]


@pytest.mark.parametrize("parts", [MASKED, PAIRS, LABELLED, IMAGES], ids=["masked", "pairs", "labelled", "vit"])
def test_a_restart_changes_nothing(parts, tmp_path):
    run(parts, tmp_path / "whole")
    run(parts, tmp_path / "parts", **{"train.steps": 3})
    run(parts, tmp_path / "parts")
    (whole, evaluated), (again, also) = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    # The same program on the same rows: the same numbers to the last bit.
    assert [whole[step]["loss"] for step in range(1, 7)] == [again[step]["loss"] for step in range(1, 7)]
    assert evaluated[-1]["eval_loss"] == also[-1]["eval_loss"]
    assert evaluated[-1]["eval_accuracy"] == also[-1]["eval_accuracy"]


def test_a_classifier_keeps_its_classes(tmp_path):
    result = run(LABELLED, tmp_path / "run")
    assert result.step == 6
    opened = jt.open_run(tmp_path / "run")
    saved = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["reading"]
    assert saved["classes"][0] == "asyncio"
    assert (tmp_path / "run" / "tokenizer.json").is_file()
    data = opened.data
    inputs = data.validation.gather(np.arange(8))["inputs"]
    logits = opened.predict(inputs)
    assert np.asarray(logits).shape == (8, 7)


# Parts of the config -> shape of what is predicted for 8 held-out rows.
PREDICTED = {"tags": (TAGGED, (8, 32, 3)), "images": (IMAGES, (8, 10)), "numbers": (NUMBERS, (8, 1))}


@pytest.mark.parametrize(("parts", "shape"), PREDICTED.values(), ids=PREDICTED)
def test_heads_predict_what_the_model_gives(parts, shape, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [{"words": ["red", "is", str(i)], "tags": ["color", "none", "digit"], "label": i} for i in range(40)]
    lines = [{**line, "text": " ".join(line["words"])} for line in lines]
    (tmp_path / "tagged.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    run(parts, tmp_path / "run", **{"train.steps": 2})
    opened = jt.open_run(tmp_path / "run")
    inputs = opened.data.validation.gather(np.arange(8))["inputs"]
    found = opened.predict(inputs)
    assert found.shape == shape
    wanted, _ = opened.sharded_model.model.apply(opened.params, opened.model_state, inputs, key=None, train=False)
    # Compiled and not: float32 sums in another order.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.ptp(wanted))
