"""Mistakes of a classifier on the page, small pictures as PNG, and several runs on one page."""

import io
import json
import math
import re

import numpy as np
import pytest
from matplotlib import image

from jaxtrain.metrics.picture import thumbnail
from jaxtrain.metrics.report.compare import write_comparison
from jaxtrain.metrics.report.page import write_report
from jaxtrain.runtime.files import write_json_atomic

_HELD_OUT = {
    "task": "classification", "step": 10, "rows": 10, "of_rows": 10, "right": 7, "num_classes": 3,
    "classes": ["cat", "<b>dog</b>", "owl"], "matrix": [[0, 0, 4], [0, 1, 2], [1, 1, 3], [2, 0, 1]],
    "confusions": [[0, 1, 2], [2, 0, 1]],
    "mistakes": [{"row": 7, "target": 0, "predicted": 1, "loss": 3.25, "confidence": 0.9, "picture": "aGVsbG8="}],
}  # fmt: skip


def _run(run_dir, *, held_out=None, info=None, rows=()):
    run_dir.mkdir(exist_ok=True)
    write_json_atomic(
        run_dir / "run.json", {"name": run_dir.name, "status": "done", "task": "classification"} | (info or {})
    )
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if held_out is not None:
        write_json_atomic(run_dir / "held_out.json", held_out)
    return run_dir


def _text(page):
    page = re.sub(r"<(style|script).*?</\1>", "", page, flags=re.DOTALL).replace("<wbr>", "")
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def test_the_confusion_matrix_and_the_worst_mistakes_are_shown(tmp_path):
    html = write_report(_run(tmp_path, held_out=_HELD_OUT, rows=[{"step": 10, "loss": 1.0}])).read_text()
    text = _text(html)
    assert "7 of 10 held-out rows were classified correctly after step 10." in text
    # Long names stand in the rows only, with the numbers that the columns have.
    assert "0 1 2 0 cat 4 2 · 1 &lt;b&gt;dog&lt;/b&gt; · 3 · 2 owl 1 · ·" in text
    assert 'title="cat taken for &lt;b&gt;dog&lt;/b&gt;: 2 of 6"' in html
    assert "cat taken for &lt;b&gt;dog&lt;/b&gt; , 90 % sure row 7, loss 3.25" in text
    assert 'src="data:image/png;base64,aGVsbG8="' in html


def test_many_classes_are_told_in_words(tmp_path):
    many = _HELD_OUT | {"num_classes": 1000, "classes": None, "matrix": None, "of_rows": 50_000}
    text = _text(write_report(_run(tmp_path, held_out=many)).read_text())
    assert "7 of 10 held-out rows (spread over 50,000) were classified" in text
    assert "0 taken for 1: 2 times 2 taken for 0: 1 time" in text
    assert "Confusion matrix" not in text


def test_a_damaged_record_leaves_the_page_whole(tmp_path):
    held_out = _HELD_OUT | {"matrix": [[0, 9, 1], ["x"]], "mistakes": [{"row": "x"}, 3]}
    assert "</html>" in write_report(_run(tmp_path, held_out=held_out)).read_text()


def test_a_picture_cannot_leave_its_attribute(tmp_path):
    mistake = _HELD_OUT["mistakes"][0] | {"picture": '"><script>alert(1)</script>'}
    html = write_report(_run(tmp_path, held_out=_HELD_OUT | {"mistakes": [mistake]})).read_text()
    assert "alert(1)" not in html


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ((8, 6), np.float32, (8, 6)),
        ((100, 60, 3), np.uint8, (32, 32)),
    ],
    ids=["grey", "colour-averaged"],
)
def test_thumbnails_are_pictures_that_others_read(shape, dtype, size):
    values = np.random.default_rng(0).integers(0, 256, shape).astype(dtype)
    content = thumbnail(values)
    assert content is not None
    drawn = image.imread(io.BytesIO(content), format="png")
    assert drawn.shape[:2] == size
    if shape[0] <= 32:
        plain = values.reshape(shape[:2]).astype(float)
        # The smallest value is black and the largest white; PNG rounds to 1/255.
        np.testing.assert_allclose(drawn, (plain - plain.min()) / np.ptp(plain), atol=0.5 / 255 + 1e-6)


def test_what_is_no_picture_has_no_thumbnail():
    assert thumbnail(np.zeros(5)) is None
    assert thumbnail(np.full((4, 4), np.nan)) is None


_ROWS = {"fingerprint": {"kind": "digits"}, "num_outputs": 10}


def _compared(tmp_path, first, second, rows=None):
    rows = rows or [{"step": step, "loss": 2.0 / step, "accuracy": 0.5} for step in (1, 2, 4)]
    runs = [
        _run(tmp_path / name, info=info, rows=[*rows, {"step": 4, "eval_loss": 0.1 * (index + 3)}])
        for index, (name, info) in enumerate((("a", first), ("b", second)))
    ]
    html = write_comparison(runs, tmp_path / "compare.html").read_text()
    assert "://" not in html
    return html


def test_runs_are_compared_on_one_page(tmp_path):
    configs = [{"config": {"optimizer": {"learning_rate": rate, "b1": 0.9}}, "data": _ROWS} for rate in (0.1, 0.01)]
    html = _compared(tmp_path, *configs)
    text = _text(html)
    assert "a has the lowest held-out loss: 0.3, at step 4." in text
    assert "optimizer.learning_rate 0.1 0.01" in text
    assert "optimizer.b1" not in text
    assert "uniform guess, 10 classes: 2.303" in text
    assert f"<b>{0.3} (step 4)</b>" in html
    # Held-out loss, training loss and accuracy: each run by its colour and its dash.
    assert html.count("stroke-dasharray:6 3") > 3
    assert math.isclose(html.count("<figure>"), 3)


_GIVEN = {"kind": "batches", "num_validation_rows": 20, "validation": {"kind": "arrays", "sha256": "a"}}
_OTHER = _GIVEN | {"validation": {"kind": "arrays", "sha256": "b"}}


def _evaluated(fingerprint, *, most=50):
    config = {"evaluation": {"max_batches": most}, "train": {"global_batch_size": 8}}
    return {"data": {"fingerprint": fingerprint}, "config": config}


def _dpo(beta):
    config = {"task": "dpo", "loss": {"beta": beta, "label_smoothing": 0.0}}
    return {"task": "dpo", "task_is_shipped": True, "config": config, "data": _ROWS}


def _called(p):
    return {"config": {"task": {"call": "own.py:task", "args": {"p": p}}}, "data": _ROWS}


# Two runs, and why they are not ranked; None: they are.
_COMPARED = {
    "tasks": ({"task": "regression"}, {}, "The tasks differ (a regression, b classification): their losses are of"),
    "data": ({"data": _ROWS}, {"data": {"fingerprint": {"kind": "x"}}}, "The data differs between the runs"),
    "the same rows": (_evaluated(_GIVEN), _evaluated(_GIVEN), None),
    "other rows": (_evaluated(_GIVEN), _evaluated(_OTHER), "The data differs"),
    "fewer rows": (_evaluated(_GIVEN), _evaluated(_GIVEN, most=1), "different numbers of held-out rows (a all, b 8)"),
    "the same loss": (_dpo(0.1), _dpo(0.1), None),
    "another beta": (_dpo(0.1), _dpo(0.5), "The settings of the loss differ (a: dpo with loss.beta 0.1"),
    "another argument": (_called(1), _called(2), "The settings of the loss differ"),
}


@pytest.mark.parametrize(("first", "second", "words"), _COMPARED.values(), ids=_COMPARED)
def test_only_losses_of_the_same_rows_and_settings_are_ranked(tmp_path, first, second, words):
    html = _compared(tmp_path, first, second)
    ranked = ["has the lowest held-out loss" in _text(html), f"<b>{0.3} (step 4)</b>" in html]
    assert ranked == [words is None] * 2
    assert words is None or words in _text(html)


def _rows_of(*losses):
    return [{"step": 10 * place + 10, "eval_loss": loss} for place, loss in enumerate(losses)]


def test_the_sentence_and_the_bold_number_are_of_the_same_run_and_never_of_one_that_diverged(tmp_path):
    """The first run was once the best, and has risen since; the third was lower still, and diverged."""
    rows = {"a": _rows_of(0.2, 0.5), "b": _rows_of(0.4, 0.3), "c": _rows_of(0.1, None)}
    runs = [
        _run(tmp_path / name, info={"data": _ROWS, "status": "diverged" if name == "c" else "done"}, rows=found)
        for name, found in rows.items()
    ]
    html = write_comparison(runs, tmp_path / "compare.html").read_text()
    assert "a has the lowest held-out loss: 0.2, at step 10." in _text(html)
    assert re.findall("<td[^>]*><b>(.*?)</b>", html) == ["0.2 (step 10)"]
    assert "not finite" in _text(html)


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    runs = [_run(tmp_path / folder / "run") for folder in ("x", "y")]
    text = _text(write_comparison(runs, tmp_path / "page.html").read_text())
    assert "x/run" in text
    assert "y/run" in text
