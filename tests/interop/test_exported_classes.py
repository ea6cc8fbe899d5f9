"""The names of classes in a published folder: those of the rows that the model was trained on."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import jaxtrain as jt
from jaxtrain.config import load_config
from jaxtrain.interop.save import Origin, saved_dtypes, write_published
from jaxtrain.interop.settings import settings_of
from jaxtrain.run.import_run import export_run
from jaxtrain.run.trainer import run_config

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
    write_published(tmp_path / "out", settings, start.params, start.model_state, origin=origin, classes=classes)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["id2label"] == {str(number): name for number, name in enumerate(wanted)}
    assert classes is None or said["label2id"] == {name: number for number, name in enumerate(wanted)}
    # Rows of one class each are not those of the origin.
    assert said.get("problem_type") == (OLD["problem_type"] if classes is None else None)


@pytest.mark.long
def test_a_run_exports_its_own_classes(tmp_path):
    shutil.copytree(ORIGIN, tmp_path / "base")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "one", "two"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "base" / "tokenizer.json"))
    rows = [{"text": "one two", "label": ("ham", "spam", "mail")[i % 3]} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    config = {
        "task": "classification",
        "model": {"from": str(tmp_path / "base")},
        "data": {"kind": "labelled_text", "path": str(tmp_path / "rows.jsonl"), "sequence_length": 16},
        "train": {"steps": 1, "global_batch_size": 8},
        "logging": {"report": False},
    }
    run_config(load_config(config), run_dir=tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert tuple(said["id2label"].values()) == jt.open_run(tmp_path / "run").classes == ("ham", "mail", "spam")
