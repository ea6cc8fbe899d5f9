"""What a cell of a table may be, and rows of another file read as the run read its own: scales, classes, columns."""

import json

import numpy as np
import pytest

from jaxtrain.config.data import TableData
from jaxtrain.data import open_data
from jaxtrain.errors import DataError


def rows_of(path, **more):
    return open_data({"kind": "table", "path": str(path), **more})


def lines(*rows):
    return "".join(f"{row}\n" for row in rows)


# Content of a.csv, what is said.
QUOTES = {
    "never closed": (lines("a,y", "8,cat", '9,"dog', "1,cat"), "close the quote that runs to line 4"),
    "closed by the next one": (lines("a,y", '1,"cat', "2,dog", '3,"cat', "4,dog"), "the quote that runs to line 4"),
    "text after it": (lines("a,y", "1,cat", '2,"do"g'), "a.csv:3 is not CSV"),
}


@pytest.mark.parametrize("name", QUOTES)
def test_a_stray_quote_takes_no_rows_with_it(name, tmp_path):
    content, said = QUOTES[name]
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path / "a.csv")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


BIG = {
    "int64": [9007199254740992 + i for i in range(4)],
    "beside a text": [9007199254740992, 9007199254740993, 9007199254740994, "none"],
}


@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize("name", BIG)
def test_large_class_ids_stay_apart(name, form, tmp_path):
    targets = [target for target in BIG[name] for _ in range(5)]
    path = tmp_path / f"a.{form}"
    rows = [{"a": i, "y": target} for i, target in enumerate(targets)]
    write = json.dumps if form == "jsonl" else lambda row: f"{row['a']},{row['y']}"
    path.write_text(lines(*(["a,y"] if form == "csv" else []), *map(write, rows)))
    data = rows_of(path, validation_fraction=0.0)
    assert data.reading["classes"] == [str(target) for target in BIG[name]]
    assert np.bincount([data.train[i]["targets"] for i in range(20)]).tolist() == [5] * 4


def with_gap(form, tmp_path, numbers):
    """A file of numbers to predict, one of which is NA."""
    path = tmp_path / f"a.{form}"
    cells = [*numbers[:20], "NA", *numbers[20:]]
    if form == "csv":
        path.write_text(lines("a,y", *(f"{i},{cell}" for i, cell in enumerate(cells))))
    else:
        path.write_text(lines(*(json.dumps({"a": i, "y": cell}) for i, cell in enumerate(cells))))
    return path, f"{path}:{22 if form == 'csv' else 21}"


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_text_among_numbers_to_predict_is_a_bad_record(form, tmp_path):
    path, where = with_gap(form, tmp_path, [i / 7 for i in range(40)])
    config = {"kind": "table", "path": str(path)}
    with pytest.raises(DataError) as caught:
        open_data(config, task="regression")
    assert str(caught.value).startswith(f"{where} column 'y' is 'NA', not a number (or a class: task=classification")


# Numbers beside one NA, the classes; None: it is refused.
MIXED = {
    "fractions": ([i / 7 for i in range(40)], None),
    "few classes": ([i % 2 for i in range(40)], ["0", "1", "NA"]),
}


@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize("name", MIXED)
def test_a_text_among_numbers_makes_no_classes_of_them(name, form, tmp_path):
    numbers, classes = MIXED[name]
    path, _ = with_gap(form, tmp_path, numbers)
    if classes is None:
        with pytest.raises(DataError) as caught:
            rows_of(path)
        assert "has 40 numbers among 41 targets, beside 'NA'" in str(caught.value)
        assert len(rows_of(path, task="classification").reading["classes"]) == 41
    else:
        assert rows_of(path).reading["classes"] == classes


def test_numbers_that_are_written_as_texts_need_a_task(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(*(json.dumps({"a": str(i), "y": str(i / 7)}) for i in range(40))))
    with pytest.raises(DataError, match="has numbers as targets, written as texts; set task=regression"):
        rows_of(path)
    assert rows_of(path, task="regression").reading["classes"] is None


def test_the_row_numbers_of_pandas_are_no_input(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(lines(",a,b,species", *(f"{i},{i % 3},{i % 5},{'xy'[i % 2]}" for i in range(20))))
    data = rows_of(path)
    assert data.reading["columns"] == ["a", "b"]
    named = rows_of(path, columns=["", "a"])
    assert named.reading["columns"] == ["", "a"]


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


def test_other_rows_must_have_known_classes(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,ant\n2,dog\n3,ant\n")
    reading = {"kind": "table", "classes": ["ant", "bee"], "mean": [0.0], "deviation": [1.0]}
    said = r"has class 'dog', which the run was not trained on \(its classes: ant, bee\)"
    with pytest.raises(DataError, match=said) as caught:
        open_data(TableData(path=str(tmp_path / "a.csv")), reading=reading)
    assert "\n" not in str(caught.value)


# Codes of the run's table, codes of another one, the classes that its rows have; None: the one that is refused.
CODES = {
    "texts of the same number": (["1", "01", "2A", "2B"], ["01", "1"], ["01", "1"]),
    "a number in other words": (["1", "2"], ["01", "2.0"], ["1", "2"]),
    "another code": (["01", "02", "2A"], ["01", "03"], "03"),
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
    with pytest.raises(DataError, match=r"has no column 'z' \(it has: x, zz, y\)"):
        open_data(table("c.csv", ["x", "zz", "y"]), reading=first.reading)


def test_an_index_that_was_read_again_is_no_input_but_other_nameless_columns_are(tmp_path):
    path = tmp_path / "a.csv"
    rows = [(19 - i, i, i * i % 7, "xy"[i % 2]) for i in range(20)]
    path.write_text(
        lines("Unnamed: 0.1,Unnamed: 0,a,kind", *(",".join(map(str, (2 * i, j, a, y))) for i, j, a, y in rows))
    )
    data = rows_of(path)
    assert data.reading["columns"] == ["Unnamed: 0.1", "a"]
    assert "Unnamed: 0 numbers the rows and is left out" in data.description[-1]
    assert rows_of(path, columns=["Unnamed: 0", "a"]).reading["columns"] == ["Unnamed: 0", "a"]
    # A part of the rows, whose numbers do not begin at 0.
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, *others[4:]]))
    assert rows_of(path, validation_fraction=0.5).reading["columns"] == ["Unnamed: 0.1", "Unnamed: 0", "a"]
    other = open_data({"kind": "table", "path": str(path)}, reading=data.reading)
    assert other.reading == data.reading


@pytest.mark.parametrize("form", ["csv", "jsonl", "npz"])
def test_numbers_to_predict_keep_their_differences(form, tmp_path):
    when = 1.7e9 + 0.25 * np.arange(64)
    path = tmp_path / f"a.{form}"
    if form == "csv":
        path.write_text(lines("x,when", *(f"{i},{value}" for i, value in enumerate(when))))
    elif form == "jsonl":
        path.write_text(lines(*(json.dumps({"x": i, "when": value}) for i, value in enumerate(when))))
    else:
        np.savez(path, inputs=np.arange(64.0)[:, None], targets=np.stack([when, np.arange(64) / 4], 1))
    data = rows_of(path, task="regression", validation_fraction=0.0)
    rows = gathered(data.train)
    order = np.argsort(rows["inputs"][:, 0])
    np.testing.assert_array_equal(rows["targets"][order, 0] + np.float64(data.reading["target_offset"][0]), when)
    assert data.reading["target_mean"][0] == when.mean()
    if form == "npz":
        assert data.reading["target_offset"][1] == 0
    reading = json.loads(json.dumps(data.reading))
    again = open_data({"kind": "table", "path": str(path), "validation_fraction": 0.0}, reading=reading)
    assert again.fingerprint == data.fingerprint


def test_prices_stay_as_they_are(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(lines("x,price", *(f"{i},{250000 + 1000.5 * i}" for i in range(40))))
    data = rows_of(path, validation_fraction=0.0)
    assert "target_offset" not in data.reading
    assert gathered(data.train)["targets"].max() == 250000 + 1000.5 * 39


@pytest.mark.parametrize("form", ["csv", "npz"])
def test_targets_of_one_class_are_one_line(form, tmp_path):
    path = tmp_path / f"a.{form}"
    path.write_text(lines("x,y", *(f"{i},same" for i in range(20))))
    if form == "npz":
        np.savez(path, inputs=np.ones((20, 2)), targets=np.full(20, True))
    with pytest.raises(DataError, match=rf"a\.{form} has rows of one class \('(same|True)'\); name another column"):
        rows_of(path)
