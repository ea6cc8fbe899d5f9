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
pytestmark = pytest.mark.long


def run(parts, folder, **changes):
    return run_config(load_config({**SMALL, **parts}, keywords=changes), run_dir=folder)


def rows(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in found if "loss" in row}, [row for row in found if "eval_loss" in row]


@pytest.mark.parametrize("parts", [MASKED, PAIRS], ids=["masked", "pairs"])
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
