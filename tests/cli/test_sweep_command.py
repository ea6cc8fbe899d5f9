"""`jaxtrain sweep`: which trials there are, what becomes of each, and every mistake as one line.

The trials of the plain tests are processes of a small script that ends as it is told to; the last test trains.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtrain.commands import sweep
from jaxtrain.commands.sweep import all_trials
from jaxtrain.errors import ConfigError

# Trials start with a function before exec, as the processes of `launch` do; jax warns of forks of its process.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")

ROOT = Path(__file__).resolve().parents[2]

# Takes the words of `jaxtrain train`; seed=N says how it ends.
TRIAL = """
import json, pathlib, sys
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--run-dir") + 1])
keys = dict(word.split("=", 1) for word in words if "=" in word)
code = {"5": 5, "75": 75, "9": 1, "33": 3}.get(keys["seed"], 0)
status = {0: "done", 5: "diverged", 75: "preempted", 1: "running", 3: "failed"}[code]
with (folder / "starts").open("a") as file:
    file.write("x")
(folder / "run.json").write_text(json.dumps({"name": keys["name"], "status": status, "config": {"seed": keys["seed"]}}))
(folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": float(keys["seed"])}) + "\\n")
print("a line of the trial", file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture
def trials(tmp_path, monkeypatch):
    """Replaces `jaxtrain` by the script, and works in a folder of its own."""
    script = tmp_path / "trial.py"
    script.write_text(TRIAL)
    monkeypatch.setattr(sweep, "JAXTRAIN", (sys.executable, "-S", str(script)))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "s"


def test_combinations_are_in_the_order_of_the_words():
    found = all_trials(["seed=0,1", "train.steps=10", "model.dropout=0.0,0.1"])
    assert found == [[f"seed={s}", "train.steps=10", f"model.dropout={d}"] for s in "01" for d in ("0.0", "0.1")]
    groups = 'optimizer.groups=[{"match": ["a", "b"]}]'
    assert all_trials([groups, 'name="a,b",c']) == [[groups, 'name="a,b"'], [groups, "name=c"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["a"], "cannot read 'a'", id="no-value"),
        pytest.param(["a=1,2", "b=1", "a=3"], "a is given twice", id="twice"),
    ],
)
def test_settings_that_cannot_be_read(words, said):
    with pytest.raises(ConfigError, match=said):
        all_trials(words)


def test_trials_end_in_their_ways_and_only_the_unfinished_run_again(cli, trials):
    words = ["sweep", "quickstart", "seed=3,5,75,9,2", "--run-dir", str(trials), "--jobs", "2"]
    for starts in (1, 2):
        answer = cli(*words)
        assert (answer.code, answer.out) == (0, f"report: {trials / 'report.html'}\n")
        codes = [json.loads((trials / f"{number:03d}" / "trial.json").read_text())["exit_code"] for number in range(5)]
        assert codes == [0, 5, 75, 1, 0]
        started = [len((trials / f"{number:03d}" / "starts").read_text()) for number in range(5)]
        assert started == [1, 1, starts, starts, 1]
    assert (trials / "000" / "trial.log").read_text() == "a line of the trial\n"
    assert "004: seed=2: ended with exit code 0" in answer.err
    page = (trials / "report.html").read_text()
    assert page.index("<td>004") < page.index("<td>000")  # the lowest loss first
    assert "diverged" in page
    assert "failed (exit code 1): 003" in page  # its run.json says that it is running
    assert "running:" not in page


SWEEP = """
name: tiny
model: {kind: transformer, num_layers: 1, embed_dim: 32, num_heads: 4, max_sequence_length: 32}
data: {kind: text, tokenizer: {kind: byte}}
train: {steps: 20, global_batch_size: 8, max_skipped_in_a_row: 2}
evaluation: {max_batches: 2, sample_prompt: null}
checkpoint: {every: 10}
logging: {every: 5, tensorboard: false, report: false}
"""


@pytest.mark.long
def test_a_sweep_trains_is_stopped_and_goes_on(tmp_path):
    (tmp_path / "tiny.yaml").write_text(SWEEP)
    command = [sys.executable, "-m", "jaxtrain", "sweep", "tiny.yaml", "optimizer.learning_rate=1e-2,1e-3"]
    command += ["train.steps=20,60000", "--run-dir", "sweep"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 240
        rows = tmp_path / "sweep" / "001" / "metrics.jsonl"
        while process.poll() is None and not rows.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=240)[1]
    assert process.returncode == 75, said
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("sweep/*/trial.json"))]
    assert [record["exit_code"] for record in records] == [0, 75, None, None]
    assert "not started" in (tmp_path / "sweep" / "report.html").read_text()
