"""Classes of data that a published head would take for one another are refused, and exports name those of the run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import jaxtrain as jt
from jaxtrain.config.load import load_config
from jaxtrain.config.published import settings_of
from jaxtrain.errors import ConfigError
from jaxtrain.interop.write import Origin, Texts, saved_dtypes, write_published
from jaxtrain.run.import_run import import_run
from jaxtrain.run.published import check_class_order
from jaxtrain.run.run import run_config

PUBLISHED = Path(__file__).resolve().parent / "published" / "vit_classification"
NAMES = ("wolf", "cat", "ant")


def folder_of(folder, names=NAMES):
    shutil.copytree(PUBLISHED, folder)
    config = json.loads((folder / "config.json").read_text())
    assert len(config["id2label"]) == len(NAMES)
    config["id2label"] = {str(number): name for number, name in enumerate(names)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_another_order_is_refused_before_anything_is_made(tmp_path):
    folder = folder_of(tmp_path / "model")
    check_class_order(load_config({"model": {"from": str(folder)}, "data": {"kind": "digits"}}).config, ("a", "b", "c"))
    for name in NAMES:
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(4):
            pixels = np.full((16, 16, 3), 40 * number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    data = {"kind": "image_folder", "path": str(tmp_path / "images"), "image_size": 16}
    tree = {"task": "classification", "model": {"from": str(folder)}, "data": data}
    said = r"gives wolf, cat, ant, .* numbers its classes ant, cat, wolf, .* as numbers \(0 for wolf, 1 for cat"
    with pytest.raises(ConfigError, match=said):
        run_config(tree, run_dir=tmp_path / "run")
    words = ["task=classification", *(f"data.{key}={value}" for key, value in data.items())]
    with pytest.raises(ConfigError, match=said):
        import_run(folder, tmp_path / "imported", overrides=words)
    assert not (tmp_path / "imported").exists()


ORIGIN = Path(__file__).parent / "published" / "bert_sequence"
OLD = {"id2label": {"0": "no", "1": "maybe", "2": "yes"}, "problem_type": "multi_label_classification"}


@pytest.mark.parametrize(
    ("classes", "wanted"),
    [
        pytest.param(None, ["no", "maybe", "yes"], id="those of the origin"),
        pytest.param(("ham", "spam", "mail"), ["ham", "spam", "mail"], id="as many others"),
        pytest.param(("ham", "spam"), ["ham", "spam", "LABEL_2"], id="fewer than outputs"),
    ],
)
def test_classes_are_those_that_were_trained(classes, wanted, tmp_path):
    start = jt.load_pretrained(ORIGIN)
    origin = Origin({**start.published.source.config, **OLD}, {}, saved_dtypes(start.published))
    settings = settings_of(start.config)
    texts = Texts(classes=classes)
    write_published(tmp_path / "out", settings, start.params, start.model_state, origin=origin, texts=texts)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["id2label"] == {str(number): name for number, name in enumerate(wanted)}
    assert classes is None or said["label2id"] == {name: number for number, name in enumerate(wanted)}
    # Rows of one class each are not those of the origin.
    assert said.get("problem_type") == (OLD["problem_type"] if classes is None else None)
