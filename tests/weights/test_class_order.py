"""Classes in another order than a published head has them are refused; exports name the classes of the run."""

import json
import shutil
from pathlib import Path

import pytest

import jaxtrain as jt
from jaxtrain.config.published import settings_of
from jaxtrain.run.start import check_class_order
from jaxtrain.weights.write import Origin, Texts, saved_dtypes, write_published

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


def test_another_order_is_refused_before_anything_is_made(tmp_path):
    shutil.copytree(ORIGIN, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["id2label"], config["label2id"] = {"0": "yes", "1": "no"}, {"yes": 0, "no": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    found = jt.load_config({"model": {"from": str(tmp_path / "model")}, "data": {"kind": "digits"}}).config
    check_class_order(found, ("yes", "no"))
    with pytest.raises(jt.ConfigError, match=r"numbers its classes yes, no, .* the data no, yes, .* \(0 for yes"):
        check_class_order(found, ("no", "yes"))
