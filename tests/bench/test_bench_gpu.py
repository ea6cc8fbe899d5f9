"""`scripts/bench_gpu.py` with tiny shapes on this CPU: rows are measured, one that fails leaves the others alone."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.config import load_config
from jaxtrain.plan.workload.describe import describe_workload

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_gpu.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("bench_gpu_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.long
def test_rows_are_measured_and_failures_are_recorded(tmp_path):
    """On a CPU there is no card to describe, and Python stands in for one that has no PyTorch."""
    words = [sys.executable, str(SCRIPT), "--smoke", "--out", str(tmp_path), "--torch-python", "/nowhere/python"]
    words += ["--timeout", "500"]
    for name in ("card", "GPT-2 124M bf16, PyTorch", "Llama 1b fp8"):
        words += ["--only", name]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    card, torch, llama = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert "there is no card" in card["error"]
    assert "cannot start /nowhere/python" in torch["error"]
    assert llama["bench"]["step"]["units_per_second"] > 0
    table = (tmp_path / "table.md").read_text()
    assert table.count("failed: ") == 2
    assert "Llama 1b fp8" in table


@pytest.mark.parametrize("smoke", [False, True], ids=["as measured", "smoke"])
def test_every_row_s_command_is_accepted(script, cli, tmp_path, smoke):
    """Up to where its answer would be written, which is the last check before anything is measured."""
    for row in script.ROWS:
        words = script.command_of(row, tmp_path, "python", smoke=smoke)
        if row.kind != "bench":
            assert Path(words[1]).is_file()
            continue
        assert words[:4] == [sys.executable, "-m", "jaxtrain", "bench"]
        given = [word for word in words[5:] if "=" in word]
        describe_workload(load_config(words[4], overrides=given).config)
        answer = cli(*words[3 : words.index("--json")], "--json", "/nowhere/rows.json")
        assert (answer.code, answer.out) == (2, "")
        assert "cannot write /nowhere/rows.json" in answer.err


def test_check_plan_takes_the_rows(script):
    (row,) = [row for row in script.ROWS if row.words[0] == "check_plan.py"]
    for words in row.words[1:]:
        name, *overrides = words.split()
        describe_workload(load_config(name, overrides=overrides).config)
