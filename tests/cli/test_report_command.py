"""`jaxtrain report`: one page again or several runs compared, and every mistake as one line."""

import errno
import json
import os
from pathlib import Path

import pytest


def _run(folder, name):
    run_dir = folder / name
    run_dir.mkdir()
    (run_dir / "run.json").write_text(json.dumps({"name": name, "status": "done", "config": {}}))
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    return run_dir


def test_one_run_gets_its_page_again(cli, tmp_path):
    run_dir = _run(tmp_path, "a")
    answer = cli("report", str(run_dir))
    assert (answer.code, answer.out) == (0, f"report: {run_dir / 'report.html'}\n")
    assert "<svg" in (run_dir / "report.html").read_text()


def test_a_page_goes_where_it_is_asked(cli, tmp_path):
    page = tmp_path / "page.html"
    assert cli("report", str(_run(tmp_path, "a")), "--output", str(page)).code == 0
    assert page.is_file()
    assert not (tmp_path / "a" / "report.html").exists()


def test_several_runs_get_one_page(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [str(_run(tmp_path, name)) for name in ("a", "b", "c")]
    answer = cli("report", *runs)
    assert (answer.code, answer.out) == (0, "report: compare.html\n")
    assert "Comparison of 3 runs" in (tmp_path / "compare.html").read_text()


def test_a_folder_of_runs_and_more_than_eight_get_a_table(cli, tmp_path, monkeypatch):
    folder = tmp_path / "sweep"
    folder.mkdir()
    runs = [str(_run(folder, f"{number:03d}")) for number in range(9)]
    (folder / "previous").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli("report", "sweep").out == f"report: {Path('sweep') / 'report.html'}\n"
    assert cli("report", *runs).out == "report: compare.html\n"
    assert (folder / "report.html").read_text() == (tmp_path / "compare.html").read_text()
    assert "<h1>9 runs</h1>" in (folder / "report.html").read_text()
    assert cli("report", "sweep", "-o", "page.html").out == "report: page.html\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{here}/none"], "no run at {here}/none; give the directory of a run"),
        (["{here}/a", "{here}/a/../a"], "is given twice; give each run once"),
        (["{here}/a", "{here}"], "{here} is not a run: it has no run.json"),
        (["{here}/a", "-o", "{here}"], "--output {here} is a folder; give the path of a page"),
        (["{here}/a", "-o", "{here}/no/page.html"], "there is no folder {here}/no; make it"),
        (["{here}/a", "-o", "gs://bucket/page.html"], "gs://bucket/page.html"),
    ],
    ids=["no-run", "twice", "not-a-run", "folder", "no-folder", "address"],
)  # fmt: skip
def test_mistakes_are_one_line(cli, tmp_path, words, said):
    _run(tmp_path, "a")
    answer = cli("report", *(word.format(here=tmp_path) for word in words))
    assert answer.code == 2
    assert said.format(here=tmp_path) in answer.err
    assert len(answer.err.splitlines()) == 1


def test_metrics_that_cannot_be_read_are_named(cli, tmp_path):
    run_dir = _run(tmp_path, "a")
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "metrics.jsonl").mkdir()
    answer = cli("report", str(run_dir))
    assert answer.code == 2
    assert f"cannot read {run_dir}/metrics.jsonl: Is a directory" in answer.err
    assert len(answer.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (errno.EACCES, 2, "cannot write {page}: Permission denied; name another file with --output FILE"),
        (errno.EROFS, 2, "cannot write {page}: Read-only file system; name another file with --output FILE"),
        (errno.ENOSPC, 1, "free space or use another folder"),
    ],
    ids=["permission", "read-only", "full"],
)
def test_a_page_that_cannot_be_written_is_named(cli, tmp_path, monkeypatch, number, code, said):
    run_dir = _run(tmp_path, "a")

    def refuse(path, text):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("jaxtrain.metrics.report.page.write_text_atomic", refuse)
    answer = cli("report", str(run_dir))
    assert answer.code == code
    assert said.format(page=run_dir / "report.html") in answer.err
    assert len(answer.err.splitlines()) == 1
