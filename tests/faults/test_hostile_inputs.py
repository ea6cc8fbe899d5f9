"""Security of what a run reads and writes: no code from data, private files, no secrets, no control of the terminal."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxtrain
from jaxtrain.cli import main
from jaxtrain.errors import CheckpointError
from jaxtrain.formats.safetensors import open_folder

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(jaxtrain.__file__).parent
SECRET, PASSWORD = "not-to-be-written-4711", "hunter-2-hunter"


# What makes objects, or runs code, of what it reads.
UNSAFE = re.compile(
    r"^\s*(?:import|from) (?:c?pickle|_pickle|dill|cloudpickle|joblib|marshal|shelve)\b|(?<![\w.])(?:eval|exec)\("
    r"|\byaml\.(?:load|load_all|unsafe_load|full_load|Loader|UnsafeLoader)\b|\btorch\.load\b|allow_pickle=(?!False)",
    re.IGNORECASE | re.MULTILINE,
)


def test_nothing_in_the_package_runs_code_of_what_it_reads():
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert {path: UNSAFE.findall(text) for path, text in texts.items() if UNSAFE.search(text)} == {}
    for wrong in ("import pickle", "from dill import x", "eval('1')", "load(f, allow_pickle=True)", "yaml.load(f)"):
        assert UNSAFE.search(wrong), wrong


@pytest.mark.long
def test_arrays_of_objects_are_refused(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", inputs=np.array([{"a": 1}] * 4), targets=np.zeros(4))
    words = ["data.kind=table", f"data.path={tmp_path / 'a.npz'}", "--run-dir", str(tmp_path / "run")]
    assert main(["train", "tabular_mlp", *words]) == 3
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line == (
        f"jaxtrain: {tmp_path / 'a.npz'} cannot be read (Object arrays cannot be loaded when allow_pickle=False); "
        "repair it, or download it again"
    )


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd"])
def test_an_index_leads_nowhere(tmp_path, file):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="does not match the files"):
        open_folder(folder)


TINY = """
name: hostile
task: classification
model: {kind: mlp, hidden_dims: [4]}
data: {call: "hostile_run:rows", args: {api_key: SECRET, path: "s3://me:PASSWORD@host/rows"}}
train: {steps: 1, global_batch_size: 8}
evaluation: {max_batches: 1}
logging: {every: 1}
"""
# Rows for a run whose function takes a secret.
ROWS = """
import numpy as np

def rows(api_key, path):
    assert api_key and path
    return {"inputs": np.ones((16, 4), np.float32), "targets": np.arange(16, dtype=np.int32) % 3}
"""


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    """A run below a folder whose name holds escape codes, with secrets in its config."""
    folder = tmp_path_factory.mktemp("hostile") / "\x1b[31mred"
    folder.mkdir()
    (folder.parent / "hostile_run.py").write_text(ROWS)
    config = folder / "hostile.yaml"
    config.write_text(TINY.replace("SECRET", SECRET).replace("PASSWORD", PASSWORD))
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder.parent))
        patch.setattr(sys, "stderr", errors)
        code = main(["train", str(config), "--run-dir", str(folder / "run")])
    assert code == 0, errors.getvalue()
    return folder / "run", errors.getvalue()


def test_secrets_are_in_no_file_of_a_run(hostile_run):
    folder, shown = hostile_run
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert SECRET.encode() not in content, path
            assert PASSWORD.encode() not in content, path
    assert SECRET not in shown
    assert PASSWORD not in shown
    saved = json.loads((folder / "run.json").read_text())
    assert saved["config"]["data"]["args"] == {"api_key": "(redacted)", "path": "s3://(redacted)@host/rows"}


def test_a_run_asks_for_its_secret_again(hostile_run, capsys):
    folder, _ = hostile_run
    assert main(["config", str(folder)]) == 2
    assert "data.args.api_key looked like a secret" in capsys.readouterr().err


def test_a_terminal_gets_no_escape_codes(hostile_run, capsys):
    folder, shown = hostile_run
    assert "\\x1b[31mred" in shown
    assert "\x1b" not in shown
    assert main(["config", f"{folder}/\x1b]0;title\x07"]) == 2
    assert main(["ckpt", "ls", f"{folder}"]) == 0
    printed = capsys.readouterr()
    assert re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", printed.err + printed.out) is None


def check_stream(command: str, streams: str, code: int, line: str = "") -> None:
    """A command whose standard output and error are redirected in a shell: its exit code, and what is left to see."""
    words = f"{sys.executable} -m jaxtrain {command} {streams}"
    settings = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        ["bash", "-c", words], capture_output=True, text=True, env=os.environ | settings, timeout=300, check=False
    )
    text = done.stderr + done.stdout
    assert "Traceback" not in text, text
    assert "Exception ignored" not in text, text
    assert done.returncode == code, text
    assert line in text


@pytest.mark.parametrize(
    "closed", ["<&- >&- 2>&-", *(pytest.param(one, marks=pytest.mark.long) for one in (">&-", "2>&-"))]
)
def test_a_command_works_with_closed_streams(closed, tmp_path):
    train = f"train digits_mlp train.steps=1 logging.report=false logging.tensorboard=false --run-dir {tmp_path}/run"
    check_stream(train, closed, 0)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["step"] == 1
    check_stream("config nonsense", closed, 2)


@pytest.mark.long
def test_a_reader_that_leaves_is_no_error(tmp_path):
    check_stream("config quickstart --yaml", "| true", 0)
    train = f"train digits_mlp train.steps=1 logging.report=false logging.tensorboard=false --run-dir {tmp_path}"
    # The answer of a run is lost, and not the run; so it is where a reader leaves while the run goes on.
    check_stream(f"{train}/unread", "2>&1 | true; exit ${PIPESTATUS[0]}", 141)
    assert json.loads((tmp_path / "unread" / "run.json").read_text())["status"] == "done"
