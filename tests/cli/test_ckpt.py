"""`jaxtrain ckpt`: what is there, what it holds, and whether it is what was saved."""

import json
import shutil

import pytest


@pytest.fixture
def damaged_run(text_run, tmp_path):
    """A copy of the run with bytes all over the arrays of step 4 changed."""
    copy = shutil.copytree(text_run, tmp_path / "damaged")
    for path in (copy / "checkpoints" / "4" / "state").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            content = bytearray(path.read_bytes())
            content[500::100] = bytes(byte ^ 0xFF for byte in content[500::100])
            path.write_bytes(content)
    return copy


def test_lists_the_steps(cli, text_run):
    header, *rows = cli("ckpt", "ls", str(text_run)).out.splitlines()
    assert header.split() == ["step", "saved_at", "bytes", "eval_loss", "ok"]
    assert [row.split()[0] for row in rows] == ["2", "4"]
    assert {row.split()[-1] for row in rows} == {"True"}


def test_verify_finds_damage(cli, damaged_run):
    answer = cli("ckpt", "ls", str(damaged_run), "--verify")
    assert answer.code == 4
    assert [line.split()[-1] for line in answer.out.splitlines()[1:]] == ["True", "False"]
    assert answer.err.count("\n") == 1
    assert "4 is damaged" in answer.err


def test_shows_leaves_totals_and_metadata(cli, text_run):
    shown = json.loads(cli("ckpt", "show", str(text_run), "--json").out)
    leaves = {leaf["path"]: leaf for leaf in shown["leaves"]}
    assert leaves["params/embedding"] == {
        "path": "params/embedding",
        "shape": [256, 32],
        "dtype": "float32",
        "bytes": 256 * 32 * 4,
    }
    assert shown["step"] == 4
    assert shown["totals"]["params"]["numbers"] == sum(
        json.loads((text_run / "run.json").read_text())["model"][name] for name in ("num_parameters",)
    )
    assert shown["totals"]["all"]["bytes"] == sum(leaf["bytes"] for leaf in shown["leaves"])
    assert shown["metadata"]["config"]["train"]["steps"] == 4
    text = cli("ckpt", "show", str(text_run), "--step", "2").out
    assert "params/embedding" in text
    assert "optimizer_state" in text
    assert text.splitlines()[-1].endswith("checkpoints/2")
