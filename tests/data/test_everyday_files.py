"""Data as other programs leave it: hidden files, turned photographs, marked rows, other separators, named classes."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxtrain.data import open_data
from jaxtrain.data.sources.images import centered_images
from jaxtrain.errors import DataError

BYTES = {"kind": "byte"}
ASK = {"role": "user", "content": "q"}


def answer(text, **marks):
    return {"role": "assistant", "content": text, **marks}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def write_rows(path, rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("kind", ["jsonl", "table", "chat"])
def test_hidden_files_are_no_rows(kind, tmp_path):
    row = {"text": "some text", "x": 1.5, "label": 1, "messages": [ASK, answer("a")]}
    write_rows(tmp_path / "d" / "deep" / "a.jsonl", [row, row | {"label": 2, "messages": [ASK, answer("b")]}] * 20)
    for hidden in (".cache/b.jsonl", "deep/._a.jsonl"):
        write(tmp_path / "d" / hidden, "no JSON at all")
    more = {"columns": ["x"], "target": "label"} if kind == "table" else {"tokenizer": BYTES}
    more |= {"validation_fraction": 0.0}
    data = open_data({"kind": kind, "path": str(tmp_path / "d"), **more}, sequence_length=64)
    assert len(data.train)


def png(width, height, **more):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "png", **more)
    return file.getvalue()


@pytest.mark.parametrize("orientation", [3, 6])
def test_photographs_stand_as_viewers_show_them(orientation, tmp_path):
    scene = np.zeros((96, 64, 3), np.uint8)
    scene[:48, :, 0], scene[:, :32, 1] = 255, 255  # red above, green on the left
    upright = Image.fromarray(scene)
    # What the camera stores, of which the orientation makes the scene.
    stored = upright.transpose({3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90}[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    for name, image, more in (("turned", stored, {"exif": exif}), ("plain", upright, {})):
        image.save(tmp_path / f"{name}.jpg", **more)
    files = [tmp_path / f"{name}.jpg" for name in ("turned", "plain")]
    turned, plain = (centered_images(files, image_size=16)[i]["inputs"] for i in range(2))
    np.testing.assert_allclose(turned, plain, atol=0.3)


def trained_text(row, tmp_path, **config):
    path = write_rows(tmp_path / "c.jsonl", [row])
    group = {"kind": "chat", "path": path, "validation_path": path, "tokenizer": BYTES, "packing": False, **config}
    one = open_data(group, sequence_length=256).train[0]
    return bytes(i for i in one["targets"][one["weights"] > 0].tolist() if i < 256).decode()


@pytest.mark.parametrize("mark", [{"weight": 0.0}, {"training": False}])
@pytest.mark.parametrize("train_on", ["answers", "last"])
def test_an_answer_without_weight_is_not_trained(train_on, mark, tmp_path):
    said = [ASK, answer("one", weight=1), ASK, answer("two", train=True), ASK, answer("three", **mark)]
    assert trained_text({"messages": said}, tmp_path, train_on=train_on) == ("two" if train_on == "last" else "onetwo")


@pytest.mark.parametrize(("suffix", "separator"), [("csv", ";"), ("csv", "\t"), ("tsv", ",")])
def test_tables_with_other_separators_and_truth_values(suffix, separator, tmp_path):
    lines = [["open", "size, in m", "kind"], *([["TRUE", "false"][i % 2], str(i), "ab"[i % 2]] for i in range(20))]
    path = write(tmp_path / f"a.{suffix}", "".join(separator.join(f'"{one}"' for one in row) + "\n" for row in lines))
    data = open_data({"kind": "table", "path": path, "standardize": False, "validation_fraction": 0.0})
    assert all(int(row["inputs"][1]) % 2 == 1 - row["inputs"][0] for row in map(data.train.__getitem__, range(20)))
    assert data.reading["classes"] == ["a", "b"]
    texts = {"kind": "labelled_text", "path": path, "text": "size, in m", "label": "kind", "tokenizer": BYTES}
    assert open_data(texts, sequence_length=8).reading["classes"] == ["a", "b"]


def save_classes(path, features, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({**columns})
    described = json.dumps({"info": {"features": features}})
    parquet.write_table(table.replace_schema_metadata({"huggingface": described}), path)
    return str(path)


def test_the_classes_that_a_file_names_are_the_classes(tmp_path):
    label = {"names": ["sport", "art", "news"], "_type": "ClassLabel"}
    path = save_classes(tmp_path / "a.parquet", {"label": label}, text=["a", "bbbb"] * 4, x=[1.0] * 8, label=[0, 1] * 4)
    group = {"kind": "labelled_text", "path": path, "tokenizer": BYTES, "validation_fraction": 0.0}
    data = open_data(group, sequence_length=8)
    assert data.reading["classes"] == ["sport", "art", "news"]
    rows = [data.train[i] for i in range(8)]
    assert all((row["inputs"]["segments"].sum() > 3) == row["targets"] for row in rows)
    assert open_data({"kind": "table", "path": path, "columns": ["x"]}).reading["classes"] == ["art", "sport"]
    wrong = save_classes(tmp_path / "wrong.parquet", {"label": label}, text=["t"] * 4, x=[1.0] * 4, label=[0, 1, 3, 0])
    with pytest.raises(DataError, match="'3', none of those that the file names"):
        open_data(group | {"path": wrong}, sequence_length=8)
    with pytest.raises(DataError, match="is 3, not a class"):
        open_data({"kind": "table", "path": wrong, "columns": ["x"]})
    tags = {"feature": {"names": ["O", "B-PER"], "_type": "ClassLabel"}, "_type": "List"}
    path = save_classes(tmp_path / "b.parquet", {"tags": tags}, words=[["a", "b"]] * 8, tags=[[1, 0]] * 8)
    group = {"kind": "tagged_text", "path": path, "tokenizer": BYTES, "tags": "tags", "words": "words"}
    assert open_data(group, sequence_length=8).reading["classes"] == ["O", "B-PER"]


def test_a_written_end_of_text_divides_plain_text_alone(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    model.add_special_tokens(["<|end_of_text|>"])
    model.save(str(tmp_path / "tokenizer.json"))
    text = "a fox<|end_of_text|>\n\na dog </s> <|endoftext|> sat\n<|end_of_text|>\n"
    ended = {}
    for kind, path in (
        ("text", write(tmp_path / "a.txt", text)),
        ("jsonl", write_rows(tmp_path / "a.jsonl", [{"text": text}])),
    ):
        tokenizer = {"kind": "file", "path": str(tmp_path / "tokenizer.json")}
        group = {"kind": kind, "path": path, "tokenizer": tokenizer, "validation_fraction": 0.0}
        data = open_data(group, sequence_length=8)
        ended[kind] = sum(int((data.train[i]["inputs"] == 256).sum()) for i in range(len(data.train)))
        ended[kind] += int(data.train[len(data.train) - 1]["targets"][-1] == 256)
        shown = " ".join(data.description)
        assert ("2 documents" if kind == "text" else "1 document") in shown, shown
    assert ended["text"] > ended["jsonl"]
