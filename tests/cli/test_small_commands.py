"""`jaxtrain report`, `data prepare` and `doctor`: what they write and print, and each mistake as one line."""

import json
from pathlib import Path

from jaxtrain.config import load_config
from jaxtrain.data import open_data


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
    assert cli("report", str(run_dir), "--output", str(tmp_path / "page.html")).code == 0
    assert (tmp_path / "page.html").is_file()


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


def test_prepare_prints_the_config_that_reads_what_it_wrote(cli, tmp_path):
    (tmp_path / "text.txt").write_text("Some words and more words. " * 50)
    words = (f"data.path={tmp_path / 'text.txt'}", "data.tokenizer.kind=byte")
    answer = cli("data", "prepare", "quickstart", *words, "-o", str(tmp_path / "tokens"))
    assert answer.code == 0
    assert "(1 documents, 1,351 tokens)" in answer.err
    (tmp_path / "config.yaml").write_text(answer.out)
    config = load_config(tmp_path / "config.yaml").config
    assert (config.data.kind, config.data.path) == ("tokens", str(tmp_path / "tokens"))
    data = open_data(config.data, sequence_length=32, seed=0)
    assert (data.vocab_size, data.units_per_row) == (256, 32)
    again = cli("data", "prepare", "quickstart", *words, "-o", str(tmp_path / "tokens"))
    assert (again.code, again.out) == (3, "")
    assert "\njaxtrain: output " in again.err


def test_reports_what_is_here(cli):
    answer = cli("doctor", "--json")
    assert (answer.code, answer.err) == (0, "")
    found = json.loads(answer.out)
    assert found["devices"]["count"] == 8
    assert found["collective_works"] is True
    assert set(found["matmul_gflops_per_second"]) == {"float32", "bfloat16"}
    assert min(found["matmul_gflops_per_second"].values()) > 0
    assert found["versions"].keys() >= {"python", "jax", "flax", "optax", "orbax-checkpoint", "grain"}
    assert all(not problem["fatal"] for problem in found["problems"])
