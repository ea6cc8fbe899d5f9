"""Rows of another file are read as the run read its own: its scales, classes and columns."""

import json
import re

import numpy as np
import pytest

from jaxtrain.config.data import TableData
from jaxtrain.data import open_data
from jaxtrain.data.sources.arrays import open_arrays
from jaxtrain.errors import DataError


def gathered(rows):
    return rows.gather(np.arange(len(rows)))


def test_other_rows_are_read_with_the_scales_and_classes_of_the_first(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{i},{['ant', 'bee', 'cat'][i % 3]}\n" for i in range(60)))
    (tmp_path / "b.csv").write_text("x,y\n" + "".join(f"{1000 + i},{['cat', 'bee'][i % 2]}\n" for i in range(20)))
    first = open_data(TableData(path=str(tmp_path / "a.csv")))
    reading = json.loads(json.dumps(first.reading))
    other = open_data(TableData(path=str(tmp_path / "b.csv"), validation_fraction=0.5), reading=reading)
    rows = gathered(other.validation)
    values = rows["inputs"][:, 0].astype(np.float64) * reading["deviation"][0] + reading["mean"][0]
    assert sorted(rows["targets"].tolist()) == sorted(2 if round(value) % 2 == 0 else 1 for value in values)
    assert values.min() > 999
    assert (other.num_outputs, other.reading) == (3, first.reading)
    again = open_data(TableData(path=str(tmp_path / "a.csv")), reading=reading)
    assert again.fingerprint == first.fingerprint


@pytest.mark.parametrize(
    ("table", "settings", "error"),
    [
        ("x,y\n1,ant\n2,dog\n3,ant\n", {}, "has class 'dog', which the run was not trained on (its classes: ant, bee)"),
        ("x,z,y\n1,2,ant\n2,3,bee\n", {}, "has 2 input columns, the run was trained on 1"),
        ("x,y\n1,ant\n2,bee\n", {"standardize": False}, "data.standardize=false differs from the run"),
    ],
    ids=["class", "columns", "standardize"],
)
def test_other_rows_must_fit_the_reading(table, settings, error, tmp_path):
    (tmp_path / "a.csv").write_text(table)
    reading = {"kind": "table", "classes": ["ant", "bee"], "mean": [0.0], "deviation": [1.0]}
    with pytest.raises(DataError, match=re.escape(error)) as caught:
        open_data(TableData(path=str(tmp_path / "a.csv"), **settings), reading=reading)
    assert "\n" not in str(caught.value)


def test_a_constant_column_carries_nothing(tmp_path):
    for name, unseen in (("a", 0.1), ("b", 0.6)):
        rows = "".join(f"{unseen if i == 0 else 0.1},{i},{'ab'[i % 2]}\n" for i in range(30))
        (tmp_path / f"{name}.csv").write_text("x,z,y\n" + rows)
    first = open_data(TableData(path=str(tmp_path / "a.csv")))
    assert not gathered(first.train)["inputs"][:, 0].any()
    other = open_data(TableData(path=str(tmp_path / "b.csv")), reading=first.reading)
    seen = [*gathered(other.train)["inputs"][:, 0], *gathered(other.validation)["inputs"][:, 0]]
    assert max(seen) == pytest.approx(0.5)


# Codes of the run's table, codes of another one, the classes that its rows have; None: the one that is refused.
CODES = {
    "texts without their letters": (["01", "02", "2A"], ["01", "02"], ["01", "02"]),
    "texts of the same number": (["1", "01", "2A", "2B"], ["01", "1"], ["01", "1"]),
    "a number in other words": (["1", "2"], ["01", "2.0"], ["1", "2"]),
    "a code beside a text": (["1", "2A"], ["001", "2A"], "001"),
    "fractions": (["0.5", "1", "x"], ["0.50", "1.0"], ["0.5", "1"]),
    "another code": (["01", "02", "2A"], ["01", "03"], "03"),
    "a text that is no class": (["1", "2"], ["01", "2A"], "2A"),
}


@pytest.mark.parametrize("name", CODES)
def test_a_class_is_what_is_written_and_a_number_only_where_that_is_none(name, tmp_path):
    own, others, found = CODES[name]
    for file, codes in (("a.csv", own), ("b.csv", others)):
        (tmp_path / file).write_text("x,y\n" + "".join(f"{i},{codes[i % len(codes)]}\n" for i in range(24)))
    reading = open_data(TableData(path=str(tmp_path / "a.csv"), task="classification")).reading
    other = TableData(path=str(tmp_path / "b.csv"), validation_fraction=0)
    if isinstance(found, str):
        with pytest.raises(DataError, match=f"has class '{found}', which the run was not trained on"):
            open_data(other, reading=reading)
        return
    rows = gathered(open_data(other, reading=reading).train)
    values = np.round(rows["inputs"][:, 0] * reading["deviation"][0] + reading["mean"][0]).astype(int)
    assert [reading["classes"][i] for i in rows["targets"]] == [found[i % len(found)] for i in values]


@pytest.mark.parametrize("row", ["1e39,1.5", "1.5,-1e39"], ids=["input", "target"])
def test_a_value_beyond_float32_is_refused(row, tmp_path):
    (tmp_path / "a.csv").write_text(f"x,y\n1,2.5\n{row}\n3,4.5\n")
    with pytest.raises(DataError, match=r"in row 2, column 1 of the .*beyond what float32 holds"):
        open_data(TableData(path=str(tmp_path / "a.csv")))


def test_columns_of_other_rows_are_found_by_their_names(tmp_path):
    def table(name, columns):
        values = {"x": lambda i: i, "z": lambda i: 100 * i + i % 7, "y": lambda i: i % 2}
        lines = [",".join(str(values[column[0]](i)) for column in columns) for i in range(40)]
        (tmp_path / name).write_text(",".join(columns) + "\n" + "\n".join(lines) + "\n")
        return TableData(path=str(tmp_path / name), target="y")

    first = open_data(table("a.csv", ["x", "z", "y"]))
    other = open_data(table("b.csv", ["z", "x", "y"]), reading=first.reading)
    np.testing.assert_array_equal(gathered(other.train)["inputs"], gathered(first.train)["inputs"])
    assert other.reading == first.reading
    with pytest.raises(DataError, match=r"no input column 'z', which the run was trained on \(it has: x, zz\)"):
        open_data(table("c.csv", ["x", "zz", "y"]), reading=first.reading)


def test_classes_of_held_out_rows_count():
    inputs = np.zeros((8, 4), np.float32)
    made = {"train": {"inputs": inputs, "targets": np.arange(8) % 3}, "validation": {"inputs": inputs}}
    assert open_arrays(made, label="f").num_outputs == 3
    made["validation"]["targets"] = np.arange(8) % 4
    assert open_arrays(made, label="f").num_outputs == 4
