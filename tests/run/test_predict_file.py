"""`jaxtrain predict` and `OpenedRun.predict_file`: rows read as in training, answers in their order, or one line."""

import csv
import io
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import jaxtrain as jt
from jaxtrain.config import load_config
from jaxtrain.data.permutation import split_examples
from jaxtrain.errors import ConfigError
from jaxtrain.run.predict import RowReader, predicted_rows
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
SHORT = ("table",)


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
    return run.predict(data.train)[np.argsort(order)], [data.train[int(i)] for i in np.argsort(order)]


def refuse(*_, **__):
    raise AssertionError("a prediction builds no step and no optimizer")


@pytest.mark.parametrize("kind", rows_by_kind(KINDS))
def test_rows_are_read_as_in_training(kind, trained, monkeypatch):
    """The file that the run was trained on, through the loader of training and by `predict_file`."""
    folder = trained(kind)
    monkeypatch.setattr("jaxtrain.train.assemble.make_train_step", refuse)
    monkeypatch.setattr("jaxtrain.train.assemble.build_optimizer", refuse)
    run = jt.open_run(folder / "run")
    path = run.config.data.path
    outputs, rows = predicted(run, kind, path)
    found = run.predict_file(path, probabilities=kind != "numbers", batch_size=8)
    assert [row["row"] for row in found] == list(range(1, 1 + len(outputs)))
    if kind == "numbers":
        assert [row["number"] for row in found] == pytest.approx(outputs[:, 0].tolist(), rel=1e-6)
        return
    shares = np.exp(outputs) / np.exp(outputs).sum(-1, keepdims=True)
    for row, share, read in zip(found, shares, rows, strict=True):
        if kind == "tags":
            places = np.flatnonzero(read["targets"] != -100)
            given = [list(one.values()) for one in row["probabilities"] if one is not None]
            assert row["classes"] == [run.classes[i] for i in share[places].argmax(-1)] + [None] * (3 - len(places))
            # A batch of another size sums in another order.
            np.testing.assert_allclose(given, share[places], rtol=1e-5)
        else:
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
    ("table", "a.csv", "x", ("--out", "b.txt"), 2, "--out b.txt: name a file .csv or .jsonl"),
    (
        "table",
        "a.csv",
        "x",
        ("--out", "none/b.csv"),
        2,
        "name a file .csv or .jsonl, by the format, in a folder that is there",
    ),
]
WRONG_KINDS = [
    ("texts", "a.jsonl", '{"review": 3}', (), 3, "a.jsonl:1 column 'review' holds a value of type int"),
    ("images", "a.png", "no pixels", (), 3, "a.png cannot be decoded"),
    ("images", "a.txt", "gone.png\n", (), 3, "a.txt:1 names gone.png, which is no file"),
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
    assert "gives no class, number or embedding per row; jaxtrain sample continues texts" in answer.err


PUBLISHED = Path(__file__).parent.parent / "interop" / "published"
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


# Published model -> the columns of the answer.
HEADS = {
    "bert_sequence": ["row", "class", "probability"],
    "bert_token": ["row", "word", "text", "class"],
    "bert_base": None,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in HEADS])
def test_a_published_model_reads_texts(name, published, tmp_path, cli):
    folder = published(name)
    texts = ["one two", "three", "four three two one"]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    answer = cli("predict", str(folder), str(tmp_path / "texts.txt"))
    assert answer.code == 0, answer.err
    rows = parsed(answer.out)
    pretrained = jt.load_pretrained(folder)
    for number, text in enumerate(texts):
        ids = [2, *(WORDS.index(word) for word in text.split()), 3]
        outputs, _ = pretrained.model.apply(pretrained.params, {}, np.array([ids]), key=None, train=False)
        given = [row for row in rows if int(row["row"]) == number + 1]
        if name == "bert_base":
            found = [float(value) for key, value in given[0].items() if key != "row"]
            # Padding is masked and adds zeros; the sums of float32 are in another order.
            np.testing.assert_allclose(found, outputs[0], rtol=1e-4, atol=1e-5)
        elif name == "bert_token":
            assert [row["text"] for row in given] == text.split()
            assert [row["class"] for row in given] == [f"label {i}" for i in np.argmax(outputs[0, 1:-1], -1)]
        else:
            assert given[0]["class"] == f"label {int(np.argmax(outputs[0]))}"
    assert HEADS[name] is None or list(rows[0]) == HEADS[name]


@pytest.mark.long
@pytest.mark.parametrize("name", ["vit_classification"])
def test_a_published_model_reads_images(name, published, tmp_path, cli):
    """As its preprocessor_config.json says; without one it takes arrays alone."""
    folder, photos = published(name), tmp_path / "photos"
    photos.mkdir()
    drawn = np.random.default_rng(0).integers(0, 256, (2, 20, 24, 3), dtype=np.uint8)
    for number, pixels in enumerate(drawn):
        Image.fromarray(pixels).save(photos / f"{number}.png")
    answer = cli("predict", str(folder), str(photos))
    assert (answer.code, answer.out) == (2, "")
    assert "preprocessor_config.json" in answer.err
    half = [0.5, 0.5, 0.5]
    settings = {"image_processor_type": "ViTImageProcessor", "size": 16, "image_mean": half, "image_std": half}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    answer = cli("predict", str(folder), str(photos), "--probabilities")
    assert answer.code == 0, answer.err
    pretrained = jt.load_pretrained(folder)
    squeezed = [Image.fromarray(pixels).resize((16, 16), Image.Resampling.BILINEAR) for pixels in drawn]
    inputs = np.stack([np.asarray(image, np.float32) for image in squeezed]) / 127.5 - 1
    outputs, _ = pretrained.model.apply(pretrained.params, pretrained.model_state, inputs, key=None, train=False)
    rows = parsed(answer.out)
    assert [Path(row["file"]).name for row in rows] == ["0.png", "1.png"]
    for row, logits in zip(rows, np.asarray(outputs, np.float64), strict=True):
        shares = np.exp(logits) / np.exp(logits).sum()
        found = [float(row[f"probability_label {i}"]) for i in range(3)]
        # Rows fill up a batch, and float32 sums are in another order.
        np.testing.assert_allclose(found, shares, rtol=1e-4)
        assert row["class"] == f"label {int(shares.argmax())}"


def test_a_reward_model_reads_no_texts_and_gives_scores(tmp_path):
    """A text without its template would get a score that means nothing, and one class the probability 1."""
    tree = {
        "task": "reward",
        "model": {**ENCODER, "head": {"kind": "sequence", "num_labels": 1}},
        "data": {"kind": "chat"},
    }
    config = load_config(tree).config
    reader = RowReader("run", config.model, None, data=config.data, task=config.task)
    with pytest.raises(ConfigError, match="run cannot read texts"):
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
    with pytest.raises(ConfigError, match="gives no class, number or embedding per row"):
        found[1].predict_file(tmp_path / "rows.npy")
