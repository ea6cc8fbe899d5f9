"""Where rows come from, in words, through splits, selections and transformations."""

from pathlib import Path

import numpy as np
from PIL import Image

import jaxtrain as jt
from jaxtrain.data.row_names import row_name
from jaxtrain.data.rows import ConcatenatedRows, MappedRows, SelectedRows, selected_rows


def test_rows_of_a_table_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("x,y\n" + "".join(f"{i},{2 * i}\n" for i in range(20)))
    data = jt.open_data(
        {"kind": "table", "path": str(path), "target": "y", "standardize": False, "validation_fraction": 0.2},
        task="regression",
    )
    for number in range(len(data.train)):
        value = int(data.train[number]["inputs"][0])
        assert row_name(data.train, number) == f"row {value + 1} of {path}"


def test_names_go_through_what_rows_are_made_into(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("0123456789" * 20)
    data = jt.open_data({"kind": "text", "path": str(text), "tokenizer": {"kind": "byte"}}, sequence_length=8)
    rows = data.train
    assert row_name(rows, 3) == "tokens 24 to 32 of its source"
    assert row_name(SelectedRows(rows, np.array([5, 3])), 1) == "tokens 24 to 32 of its source"
    assert row_name(MappedRows(rows, lambda row, _: row), 3) == "tokens 24 to 32 of its source"
    assert row_name(ConcatenatedRows([selected_rows(rows, np.arange(4)), rows]), 7) == "tokens 24 to 32 of its source"
    assert row_name(rows.map(lambda row: row), 3) == "tokens 24 to 32 of its source"
    assert row_name(jt.ArrayRows({"x": np.ones(3)}), 1) is None
    assert row_name(rows.shuffle(seed=0), 3) is None


def test_an_image_is_named_by_its_file(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for i in range(4):
            Image.new("RGB", (8, 8)).save(tmp_path / label / f"{i}.png")
    data = jt.open_data({"kind": "image_folder", "path": str(tmp_path), "image_size": 8, "validation_fraction": 0.25})
    found = {row_name(data.train, number) for number in range(len(data.train))}
    assert len(found) == 6
    assert all(Path(str(name)).suffix == ".png" for name in found)
