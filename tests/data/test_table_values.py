"""What a cell of a table may be: quotes, whole numbers, fractions, texts among numbers; one rule for every format."""

import json

import numpy as np
import pytest

from jaxtrain.data import open_data
from jaxtrain.data.sources.table_rows import read_input_columns
from jaxtrain.errors import DataError


def rows_of(path, **more):
    return open_data({"kind": "table", "path": str(path), **more})


def lines(*rows):
    return "".join(f"{row}\n" for row in rows)


STRAY = lines("a,y", *(f"{i},cat" for i in range(9)), '9,"dog', *(f"{i},cat" for i in range(10, 30)))

# Content of a.csv, more keys, what is said; {0} is the path.
QUOTES = {
    "never closed": (
        STRAY,
        {},
        '{0}:11 opens a quote (") that is never closed, so that it runs to the end of the file',
    ),
    "never closed, under skip": (STRAY, {"on_bad_record": "skip"}, "{0}:11 opens a quote"),
    "in the first column": (STRAY.replace('9,"dog', '"9,dog'), {"on_bad_record": "skip"}, "{0}:11 opens a quote"),
    "closed by the next one": (
        lines("a,y", '1,"cat', "2,dog", '3,"cat', "4,dog"),
        {"on_bad_record": "skip"},
        '{0}:2 opens a quote (") that runs to line 4',
    ),
    "in the header": (lines('a,"y"x', "1,2"), {"on_bad_record": "skip"}, "{0}:1 has text after the quote"),
    "text after it": (lines("a,y", "1,cat", '2,"do"g'), {}, '{0}:3 has text after the quote (") that closes a field'),
    "rows of several lines": (lines("a,y", "1,cat", '2,"a', 'b",3'), {}, "{0}:3-4 has 3 fields, the header has 2"),
}


@pytest.mark.parametrize("name", QUOTES)
def test_a_stray_quote_takes_no_rows_with_it(name, tmp_path):
    content, more, said = QUOTES[name]
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path / "a.csv", **more)
    assert str(caught.value).startswith(said.format(tmp_path / "a.csv"))
    assert "\n" not in str(caught.value)


def test_stray_quotes_in_texts_and_in_rows_to_predict(tmp_path):
    (tmp_path / "a.csv").write_text(STRAY.replace("a,y", "text,label"))
    with pytest.raises(DataError, match=r"a.csv:11 opens a quote"):
        open_data({"kind": "labelled_text", "path": str(tmp_path / "a.csv")}, sequence_length=16)
    (tmp_path / "a.csv").write_text(STRAY)
    with pytest.raises(DataError, match=r"a.csv:11 opens a quote"):
        read_input_columns(str(tmp_path / "a.csv"), ["a"], num_columns=1, target=None)


def test_a_line_with_text_after_a_quote_is_left_out_alone(tmp_path):
    (tmp_path / "a.csv").write_text(lines("a,y", "1,cat", '2,"do"g', "3,dog", '4,"d""g, or\nnot"', "5,cat"))
    data = rows_of(tmp_path / "a.csv", on_bad_record="skip", validation_fraction=0.0)
    assert (len(data.train), data.reading["classes"]) == (4, ["cat", 'd"g, or\nnot', "dog"])


def test_a_long_document_is_a_cell(tmp_path):
    long = "word " * 40_000
    (tmp_path / "a.csv").write_text(lines("text,label", f'"{long}",x', "short,y"))
    config = {"kind": "labelled_text", "path": str(tmp_path / "a.csv"), "validation_fraction": 0.0}
    assert len(open_data(config, sequence_length=16).train) == 2


BIG = {
    "int64": [9007199254740992 + i for i in range(4)],
    "uint64": [2**63 + i for i in range(4)],
    "beyond": [2**70 + i for i in range(4)],
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


def test_whole_numbers_with_a_point_are_the_same_classes(tmp_path):
    (tmp_path / "a.csv").write_text(lines("a,y", *(f"{i},{['1', '1.0', '2', '2e0'][i % 4]}" for i in range(20))))
    assert rows_of(tmp_path / "a.csv").reading["classes"] == ["1", "2"]


# Targets, whether float32 tells them apart.
STEPS = {
    "times of minutes": (1_700_000_000.0 + np.arange(200), False),
    "times of years": (1_700_000_000.0 + 1e5 * np.arange(200), True),
    "one time": (np.full(50, 1_700_000_001.0), True),
    "floats of the file": ((1_700_000_000 + 128 * (np.arange(200) % 3)).astype(np.float32), True),
    "prices": (100_000.5 + np.arange(200), True),
}


@pytest.mark.parametrize("name", STEPS)
def test_targets_that_float32_merges_are_refused(name, tmp_path):
    targets, is_fine = STEPS[name]
    np.savez(tmp_path / "a.npz", inputs=np.arange(2.0 * len(targets)).reshape(-1, 2), targets=targets)
    if is_fine:
        assert len(rows_of(tmp_path / "a.npz", task="regression").train)
        return
    with pytest.raises(
        DataError, match=r"targets up to 1700000199 .*steps of 128 there; subtract a constant .*1700000000"
    ):
        rows_of(tmp_path / "a.npz", task="regression")


def test_labels_of_texts_that_float32_merges_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text(lines("text,label", *(f"t,{1_700_000_000 + i}" for i in range(20))))
    with pytest.raises(DataError, match="steps of 128 there"):
        open_data({"kind": "labelled_text", "path": str(tmp_path / "a.csv")}, sequence_length=16, task="regression")


def test_truth_values_and_texts_of_numbers_are_read_alike_in_training_and_prediction(tmp_path):
    path = tmp_path / "a.jsonl"
    values = [True, "2.5", 3, False, 0.5]
    path.write_text(lines(*(json.dumps({"a": value, "y": i / 3}) for i, value in enumerate(values))))
    data = rows_of(path, validation_fraction=0.0, standardize=False)
    trained = sorted(data.train[i]["inputs"].tolist() for i in range(5))
    predicted = read_input_columns(str(path), ["a"], num_columns=1, target="y").tolist()
    assert trained == sorted(predicted) == [[0.0], [0.5], [1.0], [2.5], [3.0]]


def test_decimals_of_parquet_are_numbers(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    from decimal import Decimal

    path = tmp_path / "a.parquet"
    columns = {"a": [Decimal("1.5"), Decimal("2.5")] * 5, "y": [Decimal(9007199254740992 + i % 2) for i in range(10)]}
    parquet.write_table(arrow.table(columns), path)
    assert rows_of(path).reading["classes"] == ["9007199254740992", "9007199254740993"]
    assert read_input_columns(str(path), ["a"], num_columns=1, target=None).tolist()[:2] == [[1.5], [2.5]]


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
    for more, task in (({"task": "regression"}, None), ({}, "regression")):
        with pytest.raises(DataError) as caught:
            open_data({**config, **more}, task=task)
        assert str(caught.value).startswith(f"{where} column 'y' is 'NA', not a number; fix or remove the row, or set")
        data = open_data({**config, **more, "on_bad_record": "skip", "validation_fraction": 0.0}, task=task)
        assert (len(data.train), data.reading["classes"]) == (40, None)


# Numbers beside one NA, the classes; None: it is refused.
MIXED = {
    "fractions": ([i / 7 for i in range(40)], None),
    "whole quantities": (list(range(40)), None),
    "few classes": ([i % 2 for i in range(40)], ["0", "1", "NA"]),
}


@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize("name", MIXED)
def test_a_text_among_numbers_makes_no_classes_of_them(name, form, tmp_path):
    numbers, classes = MIXED[name]
    path, where = with_gap(form, tmp_path, numbers)
    if classes is None:
        with pytest.raises(DataError) as caught:
            rows_of(path)
        assert str(caught.value).startswith(f"{where} column 'y' is 'NA', and 40 of 41 targets are numbers")
        assert len(rows_of(path, task="classification").reading["classes"]) == 41
    else:
        assert rows_of(path).reading["classes"] == classes


def test_the_row_numbers_of_pandas_are_no_input(tmp_path, capsys):
    path = tmp_path / "a.csv"
    path.write_text(lines(",a,b,species", *(f"{i},{i % 3},{i % 5},{'xy'[i % 2]}" for i in range(20))))
    data = rows_of(path)
    assert data.reading["columns"] == ["a", "b"]
    assert "the first column has no name" in capsys.readouterr().err
    named = rows_of(path, columns=["", "a"])
    assert named.reading["columns"] == ["", "a"]


def test_names_of_columns_have_no_spaces_around_them_and_dates_are_no_numbers(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(lines("a, b, y", *(f"{i}, {i}, {'xy'[i % 2]}" for i in range(20))))
    data = rows_of(path, target="y")
    assert data.reading["columns"] == ["a", "b"]
    assert rows_of(path, target=" y", columns=["a", " b"]).reading["columns"] == ["a", "b"]
    assert read_input_columns(str(path), ["a", " b"], num_columns=2, target=None)[3].tolist() == [3.0, 3.0]
    path.write_text(lines("a,y", "2024_01,1"))
    with pytest.raises(DataError, match=r"a.csv:2 column 'a' is '2024_01', not a number"):
        rows_of(path)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_column_that_the_first_row_lacks_is_not_left_out_unsaid(form, tmp_path, capsys):
    rows = [{"a": float(i), "y": i % 2} | ({"b": 1.0} if i else {}) for i in range(10)]
    if form == "jsonl":
        path, first, later = tmp_path / "a.jsonl", "a.jsonl:1", "a.jsonl:2"
        path.write_text(lines(*map(json.dumps, rows)))
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        path, first, later = tmp_path, "a.parquet row 1", "b.parquet"
        for name, part in (("a", rows[:1]), ("b", [{"__index_level_0__": 1, **row} for row in rows[1:]])):
            parquet.write_table(arrow.Table.from_pylist(part), tmp_path / f"{name}.parquet")
    found = rows_of(path, target="y", validation_fraction=0)
    assert (found.reading["columns"], len(found.train)) == (["a"], 10)
    folder = f"{tmp_path}/"
    assert capsys.readouterr().err == (
        f"{folder}{later} has column 'b', which {folder}{first} lacks: it is no input; give all rows the same columns, "
        "or list the inputs in data.columns\n"
    )
    # Nothing is said where the inputs are known, and a row with more columns is no bad one.
    assert rows_of(path, target="y", columns=["a"]).reading["columns"] == ["a"]
    assert open_data({"kind": "table", "path": str(path), "target": "y"}, reading=found.reading).train
    assert capsys.readouterr().err == ""
    assert len(rows_of(path, target="y", on_bad_record="skip", validation_fraction=0).train) == 10
