"""Classes of data that a published head would take for one another are refused, and unknown names are said."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxtrain.config.load import load_config
from jaxtrain.errors import ConfigError
from jaxtrain.run.class_order import class_notes
from jaxtrain.run.import_run import import_run
from jaxtrain.run.trainer import run_config

PUBLISHED = Path(__file__).resolve().parent / "published" / "vit_classification"
NAMES = ("wolf", "cat", "ant")


def folder_of(folder, names=NAMES):
    shutil.copytree(PUBLISHED, folder)
    config = json.loads((folder / "config.json").read_text())
    assert len(config["id2label"]) == len(NAMES)
    config["id2label"] = {str(number): name for number, name in enumerate(names)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(folder, **model):
    return load_config({"model": {"from": str(folder), **model}, "data": {"kind": "digits"}}).config


ROWS = {
    "the same": (NAMES, None),
    "whole numbers": (("0", "1", "2"), None),
    "no classes": (None, None),
    "another number": (("ant", "cat"), None),
    "other names": (("a", "b", "c"), "calls its outputs wolf, cat, ant: the classes of the data, a, b, c"),
}


@pytest.mark.parametrize(("classes", "said"), ROWS.values(), ids=ROWS)
def test_names_that_do_not_contradict(tmp_path, classes, said):
    notes = class_notes(config_of(folder_of(tmp_path / "model")), classes)
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


def test_another_head_has_no_order(tmp_path):
    assert class_notes(config_of(folder_of(tmp_path / "model"), num_classes=4), sorted(NAMES)) == []


def test_another_order_is_refused_before_anything_is_made(tmp_path):
    folder = folder_of(tmp_path / "model")
    for name in NAMES:
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(4):
            pixels = np.full((16, 16, 3), 40 * number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    data = {"kind": "image_folder", "path": str(tmp_path / "images"), "image_size": 16}
    tree = {"task": "classification", "model": {"from": str(folder)}, "data": data}
    said = r"gives wolf, cat, ant, in this order, .* numbered ant, cat, wolf.*whole numbers \(0 for wolf, 1 for cat"
    with pytest.raises(ConfigError, match=said):
        run_config(tree, run_dir=tmp_path / "run")
    words = ["task=classification", *(f"data.{key}={value}" for key, value in data.items())]
    with pytest.raises(ConfigError, match=said):
        import_run(folder, tmp_path / "imported", overrides=words)
    assert not (tmp_path / "imported").exists()
