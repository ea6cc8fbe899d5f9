"""`jaxtrain predict` and `OpenedRun.predict_file`: rows read as in training, answers in their order, or one line."""

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import jaxtrain as jt
from jaxtrain.commands.predict import _csv_lines
from jaxtrain.config import load_config
from jaxtrain.data.permutation import split_examples
from jaxtrain.run.run import run_config

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
    (folder / "rows.csv").write_text(
        (folder / "rows.csv").read_text().replace("ant", "1700000001.5").replace("bee", "1700000002.5")
    )
    data = {"kind": "table", "path": str(folder / "rows.csv")}
    return {"task": "regression", "model": {"kind": "mlp", "hidden_dims": [8]}, "data": data}


def texts(folder):
    rows = [{"review": f"text {i}", "about": "x" * i, "label": ["good", "bad"][i % 2]} for i in range(32)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    data = {"kind": "labelled_text", "path": str(folder / "rows.jsonl"), "text": "review", **BYTES}
    return {"task": "classification", "model": {**ENCODER, "head": {"kind": "sequence"}}, "data": data}


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


KINDS = {"table": table, "numbers": numbers, "texts": texts, "images": images}
SHORT = ("table", "numbers")


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


def predicted(run, kind, path):
    """What a run predicts for the rows of its own data, opened as training opens them, in the order of the file."""
    config = {**run.config.data.model_dump(), "path": str(path), "validation_fraction": 0}
    config |= {"augment": False} if kind == "images" else {}
    data = jt.open_data(config, sequence_length=16, task=run.config.task, reading=run.info["data"]["reading"])
    order, _ = split_examples(len(data.train), validation_fraction=0, label="")
    return run.predict(data.train)[np.argsort(order)]


def refuse(*_, **__):
    raise AssertionError("a prediction builds no step and no optimizer")


@pytest.mark.parametrize("kind", rows_by_kind(KINDS))
def test_rows_are_read_as_in_training(kind, trained, monkeypatch):
    """The file that the run was trained on, through the loader of training and by `predict_file`."""
    folder = trained(kind)
    monkeypatch.setattr("jaxtrain.train.build.make_train_step", refuse)
    monkeypatch.setattr("jaxtrain.train.build.build_optimizer", refuse)
    run = jt.open_run(folder / "run")
    path = run.config.data.path
    outputs = predicted(run, kind, path)
    found = run.predict_file(path, probabilities=kind != "numbers", batch_size=8)
    assert [row["row"] for row in found] == list(range(1, 1 + len(outputs)))
    if kind == "numbers":
        # Beside 1.7e9, float32 has steps of 128.
        assert [row["number"] for row in found] == pytest.approx(outputs[:, 0].tolist(), rel=0, abs=1e-5)
        assert outputs[:, 0].std() > 0
        assert outputs[:, 0] == pytest.approx(1700000002, rel=0, abs=10)
        return
    shares = np.exp(outputs) / np.exp(outputs).sum(-1, keepdims=True)
    for row, share in zip(found, shares, strict=True):
        assert list(row["probabilities"]) == list(run.classes)
        assert row["class"] == run.classes[int(share.argmax())]
        assert row["probability"] == max(row["probabilities"].values())
        np.testing.assert_allclose(list(row["probabilities"].values()), share, rtol=1e-5)
    if kind == "images":
        assert [row["file"].rsplit("/", 2)[1] for row in found] == ["cat"] * 8 + ["dog"] * 8


def parsed(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_columns_are_found_by_their_names_and_forms_of_the_answer_agree(trained, tmp_path, cli):
    """In another order, with others between them and without the target; JSON lines as well as CSV."""
    folder = trained("table")
    cells = [line.split(",") for line in (folder / "rows.csv").read_text().splitlines()[1:]]
    (tmp_path / "other.csv").write_text(
        "\n".join(["name,height,width", *(f'"a, {i}",{row[1]},{row[0]}' for i, row in enumerate(cells))])
    )
    objects = [json.dumps({"height": float(row[1]), "width": int(row[0])}) for row in cells]
    (tmp_path / "other.jsonl").write_text("\n".join(objects))
    words = ("--probabilities", "--batch", "5")
    first, *others = [
        cli("predict", str(folder / "run"), str(path), *words)
        for path in (folder / "rows.csv", tmp_path / "other.csv", tmp_path / "other.jsonl")
    ]
    assert first.code == 0, first.err
    assert [other.out for other in others] == [first.out] * 2
    words = ("predict", str(folder / "run"), str(folder / "rows.csv"), *words)
    as_json = cli(*words, "--json")
    for name in ("a.csv", "a.jsonl"):
        assert cli(*words, "--out", str(tmp_path / name)).out == ""
    assert (tmp_path / "a.csv").read_text() == first.out
    assert (tmp_path / "a.jsonl").read_text() == as_json.out
    rows, objects = parsed(first.out), [json.loads(line) for line in as_json.out.splitlines()]
    assert objects == jt.open_run(folder / "run").predict_file(folder / "rows.csv", probabilities=True, batch_size=5)
    assert list(rows[0]) == ["row", "class", "probability", "probability_ant", "probability_bee"]
    for row, one in zip(rows, objects, strict=True):
        assert (int(row["row"]), row["class"]) == (one["row"], one["class"])
        assert float(row["probability"]) == one["probability"]
        assert float(row["probability_bee"]) == one["probabilities"]["bee"]
        assert sum(one["probabilities"].values()) == pytest.approx(1, abs=1e-6)


# Kind of the run, name and content of a file, words after the command, exit code, and what the line says.
WRONG = [
    ("table", "gone.csv", None, (), 3, "does not exist"),
    ("table", "a.csv", "width,size\n1,2\n", (), 3, "has no column 'height' (it has: width, size)"),
    ("table", "a.csv", "width,height\n1,2\n3,tall\n", (), 3, "a.csv:3 column 'height' is 'tall', not a"),
    ("table", "a.csv", "x", ("--out", "b.txt"), 2, "--out b.txt: give a .csv or .jsonl file"),
    (
        "table",
        "a.csv",
        "x",
        ("--out", "none/b.csv"),
        2,
        "give a .csv or .jsonl file in a folder that exists",
    ),
]
WRONG_KINDS = [
    ("texts", "a.jsonl", '{"review": 3}', (), 3, "a.jsonl:1 column 'review' is 3, not text"),
    ("images", "a.png", "no pixels", (), 3, "a.png cannot be decoded"),
    ("numbers", "a.csv", "x", ("--probabilities",), 2, "which have no probabilities"),
]


@pytest.mark.parametrize("rows", [WRONG, pytest.param(WRONG_KINDS, marks=pytest.mark.long)], ids=["a table", "others"])
def test_a_mistake_is_one_line(rows, trained, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    for kind, name, content, words, code, line in rows:
        if content is not None:
            (tmp_path / name).write_text(content)
        answer = cli("predict", str(trained(kind) / "run"), name, *words)
        assert (answer.code, answer.out) == (code, ""), answer.err
        assert len([one for one in answer.err.splitlines() if line in one]) == 1, answer.err
        assert "Traceback" not in answer.err
        assert not list(tmp_path.glob("b.*"))


def test_a_language_model_has_no_predictions(trained, tmp_path, cli):
    """Its run.json alone decides."""
    info = json.loads((trained("table") / "run" / "run.json").read_text())
    info["config"] |= {"task": "language_modeling", "data": {"kind": "text"}}
    info["config"]["model"] = {"kind": "transformer", "max_sequence_length": 8}
    (tmp_path / "run.json").write_text(json.dumps(info))
    answer = cli("predict", str(tmp_path), "texts.txt")
    assert (answer.code, answer.out) == (2, "")
    assert "gives no class, number or embedding per row of a file; jaxtrain sample continues texts" in answer.err


PUBLISHED = Path(__file__).parent.parent / "weights" / "published"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "one", "two", "three", "four"]


@pytest.fixture
def published(tmp_path):
    """Copies a published model of the fixtures, with a tokenizer of a few words and names for its classes."""

    def copy(name):
        shutil.copytree(PUBLISHED / name, tmp_path / name)
        model = models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        pair = [("[CLS]", WORDS.index("[CLS]")), ("[SEP]", WORDS.index("[SEP]"))]
        tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=pair)
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        config = json.loads((tmp_path / name / "config.json").read_text())
        config["id2label"] = {key: f"label {key}" for key in config.get("id2label", {"0": "", "1": ""})}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return tmp_path / name

    return copy


@pytest.mark.long
def test_a_published_model_reads_texts(published, tmp_path, cli):
    folder = published("bert_sequence")
    texts = ["one two", "three", "four three two one"]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    answer = cli("predict", str(folder), str(tmp_path / "texts.txt"))
    assert answer.code == 0, answer.err
    pretrained = jt.load_pretrained(folder)
    for row, text in zip(parsed(answer.out), texts, strict=True):
        ids = [2, *(WORDS.index(word) for word in text.split()), 3]
        outputs, _ = pretrained.model.apply(pretrained.params, {}, np.array([ids]), key=None, train=False)
        assert row["class"] == f"label {int(np.argmax(outputs[0]))}"


def test_a_model_from_python_is_given_again_and_its_task_decides(tmp_path):
    table(tmp_path)
    config = {**FEW_STEPS, "task": "classification", "data": {"kind": "table", "path": str(tmp_path / "rows.csv")}}
    model = jt.from_functions(lambda key: {"w": np.eye(2, dtype=np.float32)}, lambda params, x: x @ params["w"])
    run_config(load_config(config), run_dir=tmp_path / "run", model=model)
    run = jt.open_run(tmp_path / "run", model=model)
    outputs = predicted(run, "table", tmp_path / "rows.csv")
    found = run.predict_file(tmp_path / "rows.csv")
    assert [row["class"] for row in found] == [run.classes[k] for k in outputs.argmax(-1)]


def test_cells_that_spreadsheets_would_run_are_quoted_in_csv():
    names = ["=1+1", "-2+3+cmd|' /C calc'!A0", "@SUM(A1)", "-1", "+1.5e-3", "-", "a=b"]
    text = "".join(_csv_lines([{"row": 1 + row, "class": name} for row, name in enumerate(names)]))
    cells = [row["class"] for row in csv.DictReader(io.StringIO(text))]
    assert cells == [f"'{name}" for name in names[:3]] + names[3:]
    assert "'" not in "".join(_csv_lines([{"row": 1, "numbers": np.float32([-1.5, 2])}]))
