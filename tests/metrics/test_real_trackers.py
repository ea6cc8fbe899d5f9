"""What the trackers themselves say of a run that was logged to them, without a network.

Each is asked through its own API or its own file. Their packages are in the extra `dev`; where they are not installed,
these tests say so. A run is a process, because its trackers keep threads and warn of other packages.
"""

import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mlflow", "sqlalchemy", "wandb")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(package) for package in PACKAGES),
        reason="trackers are not installed: pip install '.[mlflow,wandb]'",
    ),
]
CONFIG = """
name: tiny
model: {kind: transformer, num_layers: 1, embed_dim: 32, num_heads: 4, max_sequence_length: 32}
data: {kind: text, tokenizer: {kind: byte}}
optimizer: {schedule: {kind: constant}}
train: {steps: 40, global_batch_size: 8}
evaluation: {max_batches: 2, every: 20, sample_prompt: "a", sample_tokens: 4}
checkpoint: {every: 20}
logging: {every: 5, tensorboard: false, mlflow: true, wandb: true, project: p, tags: {team: vision}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run that was killed and resumed with all trackers."""
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "tiny.yaml").write_text(CONFIG)
    killed = process(folder, "train.steps=100000", "checkpoint.every=20")
    deadline = time.monotonic() + 240
    # Killed in the middle, once every tracker has rows of it.
    while killed.poll() is None and time.monotonic() < deadline:
        if all(record(folder, name).get("last_steps", {}).get("loss", 0) >= 20 for name in ("mlflow", "wandb")):
            break
        time.sleep(0.05)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL, (folder / "log").read_text()
    newest = max(int(path.name) for path in (folder / "run" / "checkpoints").iterdir() if path.name.isdigit())
    done = process(folder, f"train.steps={newest + 40}", "--resume", "must")
    assert done.wait(240) == 0, (folder / "log").read_text()
    return folder


def process(folder, *words):
    environment = {
        **os.environ,
        **{"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"},
        **{"MLFLOW_TRACKING_URI": address(folder), "MLFLOW_DISABLE_TELEMETRY": "true"},
    }
    command = [sys.executable, "-m", "jaxtrain", "train", "tiny.yaml", *words, "--run-dir", "run"]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def address(folder):
    return f"sqlite:///{folder / 'mlflow.db'}"


def record(folder, name):
    try:
        return json.loads((folder / "run" / "trackers" / f"{name}.json").read_text())
    except (OSError, ValueError):
        return {}


def logged(folder, name):
    """step -> value in metrics.jsonl, without the first step after a resume.

    That step is logged beside the others; a tracker that has later ones of the killed process does not get it.
    """
    resumed = json.loads((folder / "run" / "run.json").read_text())["resumed_after"]
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[name] for row in rows if name in row and row["step"] - 1 not in resumed}


def check_steps(found, wanted, *, with_gap=False):
    """Every step that metrics.jsonl holds, once, with its value; steps that the kill undid may be there besides.

    With a gap, neighbouring steps may be missing: what the tracker itself held in memory at the kill, of which
    nobody can know whether it arrived. A second one, or a step that is there twice, would be of our making.
    """
    steps = [step for step, _ in found]
    assert len(set(steps)) == len(steps)
    places = [place for place, step in enumerate(sorted(wanted)) if step not in steps]
    assert not places or (with_gap and places == list(range(places[0], places[-1] + 1)))
    assert [(step, value) for step, value in found if wanted.get(step, value) != value] == []


def test_mlflow_has_every_step_once(folder):
    names = ["loss", "eval_loss", "grad_norm"]
    # In a process: its imports warn.
    code = (
        "import json, sys; from mlflow.tracking import MlflowClient; client = MlflowClient(sys.argv[1]); "
        "run = client.get_run(sys.argv[2]); "
        "found = [client.get_metric_history(sys.argv[2], name) for name in sys.argv[3:]]; "
        "files = [file.path for file in client.list_artifacts(sys.argv[2])]; "
        "found = [[[metric.step, metric.value] for metric in one] for one in found]; "
        "print(json.dumps([found, run.info.status, run.data.tags, run.data.params, files]))"
    )
    words = [sys.executable, "-W", "ignore", "-c", code, address(folder), record(folder, "mlflow")["id"], *names]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found, status, tags, parameters, files = json.loads(done.stdout)
    for name, steps in zip(names, found, strict=True):
        check_steps(steps, logged(folder, name))
    assert (status, tags["jaxtrain.status"], tags["team"]) == ("FINISHED", "done", "vision")
    assert (parameters["train.steps"], parameters["model.embed_dim"]) == ("100000", "32")
    assert {"run.json", "report.html", "sample"} <= set(files)


def test_wandb_has_no_step_twice_under_one_id(folder):
    files = sorted((folder / "run" / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert {path.name for path in files} == {f"run-{record(folder, 'wandb')['id']}.wandb"}
    assert len(files) == 2  # a file per process, which `wandb sync` puts together
    found = [row for path in files for row in history(path.read_bytes())]
    for name in ("loss", "eval_loss"):
        check_steps([(row["step"], row[name]) for row in found if name in row], logged(folder, name), with_gap=True)


def history(data):
    """The rows of a file of W&B: records of protobuf in the blocks of LevelDB's log, after 7 bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, parts = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found, parts = Record.FromString(parts), b""
            if found.WhichOneof("record_type") == "history":
                items = found.history.item
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
