"""Data that is bad, that lies about its size, or that changes while it is read: one line, or skipped and counted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtrain.cli import main
from jaxtrain.config.data import ImageFolderData, JsonlData, TextData, TokenizerConfig
from jaxtrain.data import open_data
from jaxtrain.data.permutation import split_examples
from jaxtrain.data.sources.prepare import prepare_tokens
from jaxtrain.data.sources.texts import documents_of
from jaxtrain.errors import DataError

PIL = pytest.importorskip("PIL.Image")
SKIP: dict[str, Any] = {"on_bad_record": "skip", "max_bad_fraction": 0.25}


def image_folder(folder: Path, *, bad: tuple[int, ...] = (), count: int = 12) -> Path:
    """Two classes of images, each of one brightness; the content of the bad ones is cut off."""
    for number in range(count):
        path = folder / str(number % 2) / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.fromarray(np.full((8, 8, 3), 10 * number, np.uint8)).save(path)
        if number in bad:
            path.write_bytes(path.read_bytes()[:40])
    return folder


def images(folder: Path, **keys: Any) -> ImageFolderData:
    keys = {"image_size": 8, "validation_fraction": 0.0, **keys}
    return ImageFolderData(path=str(folder), **keys)


def shuffled(folder: Path) -> list[Path]:
    """The images of the training rows; the split into training and evaluation has shuffled them."""
    files = sorted(folder.rglob("*.png"))
    return [files[i] for i in split_examples(len(files), validation_fraction=0.0, label="images")[0]]


@pytest.mark.parametrize("augment", [False, True])
def test_the_next_good_image_takes_the_place_of_a_bad_one_in_any_order_of_reading(tmp_path, augment, capsys):
    bad = (2, 4, 11)
    folder = image_folder(tmp_path, bad=bad)

    def rows() -> Any:
        return open_data(images(folder, augment=augment, **SKIP), seed=3)

    forwards, backwards = rows(), rows()
    read = [forwards.train[i] for i in range(24)]
    for i in reversed(range(24)):  # as a resumed run, or another process, which has not seen the rows before
        np.testing.assert_array_equal(backwards.train[i]["inputs"], read[i]["inputs"])
        assert backwards.train[i]["targets"] == read[i]["targets"]
    numbers = [int(path.stem) for path in shuffled(folder)]
    for i in range(len(numbers)):
        following = [*numbers[i:], *numbers]
        taken = next(other for other in following if other not in bad)
        assert int(read[i]["targets"]) == taken % 2
        if not augment:
            brightness = (taken * 10 / 255 - 0.485) / 0.229
            np.testing.assert_allclose(read[i]["inputs"][..., 0], brightness, atol=1e-5)  # float32
    (skipped,) = forwards.skipped
    assert skipped.count == 3
    named = [line for line in capsys.readouterr().err.splitlines() if line.startswith("skipped bad record")]
    assert len(named) == 6  # each once by each of the two
    assert any("0/02.png cannot be decoded" in line for line in named)


LINES = ['{"text": "one"}', '{"text": 3}', '{"text": "two"}', "not JSON", "[1]", "", '{"text": "three"}'] + [
    '{"text": "more"}'
] * 10


@pytest.mark.long
def test_bad_lines_of_json_are_left_out_and_counted(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_bytes("\n".join(LINES).encode() + b'\n{"text": "\xff"}\n')
    found = documents_of(JsonlData(path=str(path), **SKIP))
    for _ in range(2):  # a pass for the tokenizer, and one for the ids
        assert list(found.read()) == ["one", "two", "three"] + ["more"] * 10
        assert found.skipped is not None
        assert found.skipped.count == 4
    data = open_data(JsonlData(path=str(path), sequence_length=4, validation_fraction=0.0, **SKIP))
    assert data.skipped[0].count == 4
    assert [line.split(": ", 1)[1].split(" ")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"{path}:2",
        f"{path}:4",
        f"{path}:5",
        str(path),
    ]
    with pytest.raises(DataError, match="at least 4 bad records of 17, more than"):
        list(documents_of(JsonlData(path=str(path), on_bad_record="skip")).read())


def test_a_run_records_what_it_skipped(tmp_path, capsys):
    folder = image_folder(tmp_path / "images", bad=(2,))
    config = tmp_path / "a.yaml"
    config.write_text(
        f"task: classification\nmodel: {{kind: mlp, hidden_dims: [4]}}\n"
        f"data: {{kind: image_folder, path: {folder}, image_size: 8, on_bad_record: skip}}\n"
        "train: {steps: 3, global_batch_size: 8}\nlogging: {every: 1, report: false}\n"
    )
    assert main(["train", str(config), "--run-dir", str(tmp_path / "run")]) == 0
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["skipped_records"]["count"] == 1
    assert "02.png cannot be decoded" in info["skipped_records"]["first"][0]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped_records"] for row in rows if "loss" in row][-1] == 1
    assert capsys.readouterr().err.count("skipped bad record") == 1


CHANGES = {
    "other ids of the same vocabulary": lambda content: content[:-8] + content[:8],
    "an id outside the vocabulary": lambda content: content[:-2] + b"\xff\x7f",
    "cut short": lambda content: content[:-200],
}


@pytest.mark.long
def test_a_token_shard_that_changed_is_found_before_a_resumed_step(tmp_path, cli):
    (tmp_path / "long.txt").write_text("some text that is long enough " * 600)
    text = TextData(path=str(tmp_path / "long.txt"), tokenizer=TokenizerConfig(kind="byte"))
    prepare_tokens(text, tmp_path / "shards")
    config, run_dir = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(
        "model: {kind: transformer, num_layers: 1, embed_dim: 16, num_heads: 2, max_sequence_length: 16}\n"
        f"data: {{kind: tokens, path: {tmp_path / 'shards'}}}\ntrain: {{steps: 2, global_batch_size: 8}}\n"
        "evaluation: {every: null}\nlogging: {tensorboard: false, report: false}\n"
    )
    assert cli("train", str(config), "--run-dir", str(run_dir)).code == 0
    before = (run_dir / "metrics.jsonl").read_bytes()
    (shard,) = (tmp_path / "shards").glob("*.bin")
    content = shard.read_bytes()
    for name, change in CHANGES.items():
        shard.write_bytes(change(content))
        answer = cli("train", str(config), "train.steps=4", "--run-dir", str(run_dir))
        assert answer.code == DataError.exit_code, name
        assert "Traceback" not in answer.err, name
        assert (run_dir / "metrics.jsonl").read_bytes() == before, name
