"""The page of several runs: its order, what differs, what is not ranked, runs that are broken or have not ended."""

import json
import re

import pytest

from jaxtrain.metrics.report.compare import runs_below, write_comparison


def run(folder, *, losses=(2.0, 1.0), held_out=None, status="done", **config):
    folder.mkdir(parents=True)
    data = {"fingerprint": {"kind": "text", "sha256": "a"}}
    info = {"name": folder.name, "status": status, "config": {"name": folder.name, **config}, "data": data}
    info["task"] = "classification"
    (folder / "run.json").write_text(json.dumps(info))
    rows = [{"step": step + 1, "loss": loss} for step, loss in enumerate(losses)]
    rows += [{"step": len(rows), "eval_loss": held_out}] if held_out is not None else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def table(page):
    """The header and the rows of the table, as texts."""
    body = page.read_text().partition('<table class="grid">')[2].partition("</table>")[0]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", body)]
    return [[re.sub(r"<[^>]+>", "", cell) for cell in row] for row in rows]


def words(page):
    return re.sub(r"<[^>]+>", "", page.read_text().partition('<ul class="words">')[2].partition("</ul>")[0])


def test_the_best_comes_first_with_what_differs(tmp_path):
    runs = [
        run(tmp_path / "000", held_out=0.9, optimizer={"learning_rate": 0.1, "kind": "adamw"}, seed=0),
        run(tmp_path / "001", held_out=0.5, optimizer={"learning_rate": 0.2, "kind": "adamw"}, seed=0),
        run(tmp_path / "002", held_out=0.7, optimizer={"learning_rate": 0.3, "kind": "adamw"}, seed=0),
    ]
    page = write_comparison(runs, tmp_path / "page.html")
    header, *rows = table(page)
    figures = ["best held-out loss", "at step", "held-out loss", "training loss", "steps"]
    assert header == ["run", "status", *figures, "optimizer.learning_rate"]
    assert [row[0] for row in rows] == ["001", "002", "000"]
    assert rows[0][1:] == ["done", "0.5", "2", "0.5", "1", "2", "0.2"]
    assert "001 has the lowest held-out loss: 0.5, at step 2." in words(page)
    assert page.read_text().count("<figure>") == 2


def test_runs_that_are_broken_or_have_not_ended_are_shown_as_such(tmp_path):
    good = run(tmp_path / "000", seed=0)
    diverged = run(tmp_path / "001", losses=(0.1,), status="diverged", seed=1)
    running = run(tmp_path / "002", losses=(), status="running", seed=2)
    for name, content in (
        ("003", {"settings": ["seed=3"], "exit_code": 3}),
        ("004", {"exit_code": None}),
        ("005", None),
    ):
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "trial.json").write_text(json.dumps(content))
    (tmp_path / "005" / "run.json").write_text("{")
    (tmp_path / "notes").mkdir()
    folders = runs_below(tmp_path)
    assert folders[:3] == [good, diverged, running]
    page = write_comparison(folders, tmp_path / "page.html")
    header, *rows = table(page)
    shown = {row[0]: (row[1], row[header.index("seed")]) for row in rows}
    assert shown == {
        "000": ("done", "0"),
        "001": ("diverged", "1"),
        "002": ("running", "2"),
        "003": ("failed (exit code 3)", "3"),
        "004": ("not started", "-"),
        "005": ("broken", "-"),
    }
    # A run that diverged is never the best, however low its loss once was.
    assert [row[0] for row in rows][:2] == ["000", "001"]
    assert "000 has the lowest training loss" in words(page)
    assert "broken: 005." in words(page)


@pytest.mark.parametrize("count", [0, 60], ids=["none", "sixty"])
def test_any_number_of_runs_fits_a_page(tmp_path, count):
    runs = [
        run(tmp_path / f"{number:03d}", losses=(number + 1.0, number + 0.5), seed=number) for number in range(count)
    ]
    page = write_comparison(runs, tmp_path / "page.html")
    assert len(table(page)) == count + 1
    assert page.read_text().count("stroke-dasharray") >= (7 if count else 0)
    assert len(page.read_text()) < 100_000


def _data(**fingerprint):
    return {"data": {"fingerprint": fingerprint, "num_validation_rows": 20}}


def _dpo(beta):
    return {"task": "dpo", "config": {"task": "dpo", "loss": {"beta": beta}}}


# What two runs say of themselves, and why they are not ranked; None: they are.
_COMPARED = {
    "tasks": ({"task": "regression"}, {}, "task"),
    "other rows": (_data(sha256="a"), _data(sha256="b"), "data"),
    "the same rows": (_data(validation={"sha256": "a"}, seed=0), _data(validation={"sha256": "a"}, seed=1), None),
    "another beta": (_dpo(0.1), _dpo(0.5), "settings of the loss"),
}


@pytest.mark.parametrize(("first", "second", "why"), _COMPARED.values(), ids=_COMPARED)
def test_only_losses_of_the_same_rows_and_settings_are_ranked(tmp_path, first, second, why):
    runs = [run(tmp_path / "000", held_out=0.9), run(tmp_path / "001", held_out=0.5)]
    for folder, more in zip(runs, (first, second), strict=True):
        info = json.loads((folder / "run.json").read_text()) | more
        (folder / "run.json").write_text(json.dumps(info))
    page = write_comparison(runs, tmp_path / "page.html")
    is_ranked = why is None
    assert ("the lowest" in words(page), "Sorted by" in page.read_text()) == (is_ranked, is_ranked)
    # What is not ranked stays in the order that was given.
    assert [row[0] for row in table(page)[1:]] == (["001", "000"] if is_ranked else ["000", "001"])
    assert is_ranked or f"their losses differ in the {why}" in words(page)


def test_the_end_of_the_training_loss_ranks_and_not_its_luckiest_batch(tmp_path):
    """Small batches have the lowest single losses, although their mean is higher."""
    noise = [0.9 if step % 2 else -0.9 for step in range(200)]
    runs = [
        run(tmp_path / "small", losses=[2.0 + one for one in noise]),
        run(tmp_path / "large", losses=[1.8 + one / 9 for one in noise]),
        run(tmp_path / "lost", losses=[1.0] * 100 + [None] * 100, status="running"),
    ]
    page = write_comparison(runs, tmp_path / "page.html")
    header, *rows = table(page)
    assert header[2] == "training loss at the end"
    assert [row[0] for row in rows] == ["large", "small", "lost"]
    assert [row[2] for row in rows] == ["1.8", "2", "-"]
    assert rows[2][header.index("last training loss")] == "not finite"
    assert "large has the lowest training loss at its end: 1.8, at step 200." in words(page)
