"""`scripts/gpu_minutes.py` with tiny sizes on this CPU: all its figures are there. No time is asserted."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.plan.estimate import analyse
from jaxtrain.plan.targets import parse_targets

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_minutes.py"
# A CPU has no published peak, reports no memory, and PyTorch is not among what the tests install.
MISSING_HERE = (": MFU", ": peak", "torch.compile")
# Part -> what the names of its figures begin with.
FIGURES = {
    "llama": ["Llama 1.2B bf16, remat dots", "Llama 1.2B fp8, remat dots over bf16", "Llama 1.2B bf16, remat full"],
    "resnet": ["ResNet-50 bf16"],
    "plan": ["ResNet-50 bf16: planned peak", "GPT-2 124M bf16: planned time", "matmul_efficiency"],
    "doctor": ["matmul float32", "blockwise attention", *(f"quickstart in {one}" for one in ("fp32", "fp16", "fp8"))],
    "decode": ["memory", *(f"smollm2_135m {weights}" for weights in ("bf16", "int8", "nf4"))],
    "experts": ["our kernels: result", "ragged_dot: forward and backward", "int8 moments", "moments on the host"],
    "resume": ["losses that differ after kill -9", "arrays of the last checkpoint that differ"],
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_minutes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def results_of(out, *words):
    done = subprocess.run([sys.executable, *words, "--out", str(out)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {"log.txt", "results.json", "table.md"}
    return json.loads((out / "results.json").read_text())["parts"], (out / "table.md").read_text()


@pytest.mark.long
@pytest.mark.parametrize("parts", ["llama,resnet,plan", "doctor,decode,experts,resume"])
def test_every_part_has_its_figures(tmp_path, parts):
    found, table = results_of(tmp_path, SCRIPT, "--rehearse", "--only", parts)
    assert ",".join(found) == parts
    for part, result in found.items():
        assert result["error"] is None, (part, result["error"])
        names = [figure["name"] for figure in result["figures"]]
        assert [begin for begin in FIGURES[part] if not any(name.startswith(begin) for name in names)] == []
        for figure in result["figures"]:
            assert figure["name"] in table
            if figure["value"] is None:
                assert any(text in figure["name"] for text in MISSING_HERE), figure
                assert figure["note"]
            else:
                # Differences may be none.
                assert math.isfinite(figure["value"]), figure
                assert figure["value"] > 0 or (figure["goal"].startswith("at most") and figure["value"] == 0), figure
            if figure["goal"].startswith("at most"):
                assert figure["met"], figure


WRONG_PARTS = """
import sys, time
sys.path.insert(0, {folder!r})
import gpu_minutes as minutes

def hangs(given):
    time.sleep(600)
    yield minutes.figure("never", 1.0)

def fails(given):
    yield minutes.figure("before", 2.0, "GB")
    raise ValueError("no such card")

def works(given):
    yield from minutes.attempt("a piece", lambda: fails(given))
    yield minutes.figure("after", 0.5, "x", ("at least", 0.7))

minutes.PARTS = {{"hangs": (hangs, 1), "fails": (fails, 300), "works": (works, 300)}}
minutes.main()
"""


def test_a_part_that_hangs_or_fails_costs_only_itself(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(WRONG_PARTS.format(folder=str(SCRIPT.parent)))
    found, table = results_of(tmp_path / "out", program)
    assert (found["hangs"]["error"], found["hangs"]["figures"]) == ("not done within 1 s", [])
    assert found["fails"]["error"] == "ValueError: no such card"
    assert [(one["name"], one["value"]) for one in found["fails"]["figures"]] == [("before", 2.0)]
    assert found["works"]["error"] is None
    assert [one["value"] for one in found["works"]["figures"]] == [2.0, None, 0.5]
    assert "| fails | before | 2 GB |" in table
    assert "| works | a piece | not available (ValueError: no such card) |" in table
    assert "| works | after | 0.5 x | MISSED: at least 0.7 |" in table
    assert table.count("failed after") == 2


def test_a_card_has_room_for_every_config(script):
    (target,) = parse_targets("h200")
    for name, words in script.CONFIGS.items():
        estimate = analyse(script.config_of(words), target)
        assert estimate.fits, name
        assert estimate.time is not None
    assert sum(seconds for _, seconds in script.PARTS.values()) <= 540
