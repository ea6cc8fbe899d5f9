"""`jaxtrain predict` and `OpenedRun.predict_file`: rows read as in training, answers in their order, or one line."""

import csv
import io
import json

import numpy as np
import pytest
from PIL import Image

import jaxtrain as jt
from jaxtrain.config import load_config
from jaxtrain.run.trainer import run_config

FEW_STEPS = {
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "train": {"steps": 2, "global_batch_size": 8},
    "evaluation": {"every": 2, "max_batches": 1},
    "logging": {"report": False, "tensorboard": False},
}
ENCODER = {
    "kind": "transformer",
    "num_layers": 1,
    "embed_dim": 16,
    "num_heads": 2,
    "mlp_dim": 16,
    "max_sequence_length": 16,
    "causal": False,
}
BYTES = {"tokenizer": {"kind": "byte"}, "validation_fraction": 0.25}


def table(folder):
    lines = [f"{i % 7},{i * 0.5},{'ant' if i % 2 else 'bee'}" for i in range(32)]
    (folder / "rows.csv").write_text("\n".join(["width,height,kind", *lines]) + "\n")
    data = {"kind": "table", "path": str(folder / "rows.csv")}
    return {"task": "classification", "model": {"kind": "mlp", "hidden_dims": [8]}, "data": data}


def numbers(folder):
    table(folder)
    (folder / "rows.csv").write_text((folder / "rows.csv").read_text().replace("ant", "1.5").replace("bee", "2.5"))
    data = {"kind": "table", "path": str(folder / "rows.csv")}
    return {"task": "regression", "model": {"kind": "mlp", "hidden_dims": [8]}, "data": data}


def texts(folder):
    rows = [{"review": f"text {i}", "about": "x" * i, "label": ["good", "bad"][i % 2]} for i in range(32)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    data = {"kind": "labelled_text", "path": str(folder / "rows.jsonl"), "text": "review", **BYTES}
    return {"task": "classification", "model": {**ENCODER, "head": {"kind": "sequence"}}, "data": data}


def tags(folder):
    rows = [{"words": ["red", "is", str(i)], "tags": ["color", "none", "digit"]} for i in range(32)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    data = {"kind": "tagged_text", "path": str(folder / "rows.jsonl"), **BYTES}
    return {"task": "token_classification", "model": {**ENCODER, "head": {"kind": "token"}}, "data": data}


def images(folder):
    random = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / "images" / name).mkdir(parents=True)
        for i in range(8):
            pixels = random.integers(0, 256, (12, 16, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{i}.png")
    data = {"kind": "image_folder", "path": str(folder / "images"), "image_size": 8, "validation_fraction": 0.25}
    model = {"kind": "resnet", "stem": "small", "stage_blocks": [1], "width": 4}
    return {"task": "classification", "model": model, "data": data}


KINDS = {"table": table, "numbers": numbers, "texts": texts, "tags": tags, "images": images}
SHORT = ("table", "texts")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Makes the run of a kind once; its data stand beside it."""
    made = {}

    def run(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            run_config(load_config({**FEW_STEPS, **KINDS[kind](folder)}), run_dir=folder / "run")
            made[kind] = folder
        return made[kind]

    return run


def rows_by_kind(names):
    return [pytest.param(name, id=name, marks=() if name in SHORT else pytest.mark.long) for name in names]


@pytest.mark.parametrize("kind", rows_by_kind(KINDS))
def test_predictions_are_those_of_the_rows_as_training_reads_them(kind, trained, tmp_path, monkeypatch):
    """The file that the run was trained on, through the loader of training and through the file alone."""
    folder = trained(kind)
    run = jt.open_run(folder / "run")
    config = {**KINDS[kind](tmp_path)["data"], "validation_fraction": 0}
    config |= {"tokenizer": {"kind": "file", "path": str(folder / "run" / "tokenizer.json")}} if "tokenizer" in config else {}
    config |= {"augment": False} if kind == "images" else {}
    data = jt.open_data(config, sequence_length=16, task=KINDS[kind](tmp_path / "again")["task"] if False else None, reading=run.info["data"]["reading"])
    wanted = run.predict(data.train)
    monkeypatch.setattr("jaxtrain.train.make_step.make_train_step", None)
    found = jt.open_run(folder / "run").predict_file(config["path"], probabilities=kind != "numbers", batch_size=8)
    assert [row["row"] for row in found] == list(range(1, len(wanted) + 1))
