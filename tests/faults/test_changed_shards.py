"""A token shard that changes between the kill of a run and its next start: found before the first step, exit code 3."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtrain.config.data import TextData
from jaxtrain.config.tokenizer import TokenizerConfig
from jaxtrain.data.sources.prepare import prepare_tokens
from jaxtrain.errors import DataError

CONFIG = """
name: shards
model: {kind: transformer, num_layers: 1, embed_dim: 16, num_heads: 2, max_sequence_length: 16}
data: {kind: tokens, path: SHARDS}
train: {steps: 100000, global_batch_size: 4}
evaluation: {every: null}
checkpoint: {every: 20}
logging: {every: 1, tensorboard: false, report: false}
"""
CHANGES = {
    "other ids of the same vocabulary": lambda content: content[:-8] + content[:8],
    "an id outside the vocabulary": lambda content: content[:-2] + b"\xff\x7f",
    "cut short": lambda content: content[:-200],
    "longer": lambda content: content + content[-200:],
}
"""What another content of the file is."""


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory) -> tuple[Path, Path, bytes]:
    """Config, shard and its content of a run that was killed after a checkpoint."""
    folder = tmp_path_factory.mktemp("changed-shards")
    (folder / "long.txt").write_text("some text that is long enough " * 600)
    text = TextData(path=str(folder / "long.txt"), tokenizer=TokenizerConfig(kind="byte"))
    prepare_tokens(text, folder / "shards")
    config = folder / "config.yaml"
    config.write_text(CONFIG.replace("SHARDS", str(folder / "shards")))
    process = start(config)
    deadline = time.monotonic() + 120
    while not (folder / "run" / "checkpoints" / "20").is_dir():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (shard,) = (folder / "shards").glob("*.bin")
    return config, shard, shard.read_bytes()


def start(config: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jaxtrain", "train", str(config), "--run-dir", str(config.parent / "run")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.long
def test_a_changed_shard_is_found_before_the_first_step(killed_run, change):
    config, shard, content = killed_run
    metrics = config.parent / "run" / "metrics.jsonl"
    shard.write_bytes(CHANGES[change](content))
    before = metrics.read_bytes()
    process = start(config)
    try:
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        shard.write_bytes(content)
    assert process.returncode == DataError.exit_code, said
    assert "Traceback" not in said
    assert said.strip().splitlines()[-1].startswith("jaxtrain: ")
    assert metrics.read_bytes() == before
