"""`data prepare`: the same shards whatever the number of ends in between."""

import hashlib
import json
import os
import subprocess
import sys
import time

import pytest
from format_files import write_rows

from jaxtrain.config.data import DocumentsData, TokenizerConfig
from jaxtrain.data import prepare_tokens
from jaxtrain.data.sources import shards as prepare
from jaxtrain.errors import DataError

ROWS = [{"text": " ".join(f"word{(i * k) % 89}" for k in range(1, i % 40 + 2))} for i in range(600)]
BPE = TokenizerConfig(kind="bpe", vocab_size=400)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(prepare, "BLOCK_CHARACTERS", 8000)
    monkeypatch.setenv("JAXTRAIN_CACHE_DIR", str(tmp_path / "cache"))


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def source(tmp_path, form, tokenizer=BPE):
    folder = tmp_path / form
    folder.mkdir(exist_ok=True)
    return DocumentsData(path=str(write_rows(folder, form, ROWS)), tokenizer=tokenizer)


def test_an_end_between_blocks_changes_nothing(tmp_path):
    config = source(tmp_path, "lines.zst")
    prepare_tokens(config, tmp_path / "whole", tokens_per_shard=3000)
    seen = []

    def stop(found):
        seen.append(found.documents)
        if len(seen) in (3, 5, 9):  # calls that begin again count too
            raise KeyboardInterrupt

    partial = tmp_path / ".cut.partial"
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            prepare_tokens(config, tmp_path / "cut", tokens_per_shard=3000, progress=stop)
        # What a killed process wrote after its last note of progress.
        last = sorted(partial.glob("shard-*.bin"))[-1]
        last.write_bytes(last.read_bytes() + b"more")
    prepare_tokens(config, tmp_path / "cut", tokens_per_shard=3000, progress=stop)
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")
    assert not partial.exists()


def test_what_another_call_left_is_begun_again(tmp_path, capsys):
    def stop(found):
        if found.documents:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_tokens(source(tmp_path, "lines"), tmp_path / "out", tokens_per_shard=3000, progress=stop)
    prepare_tokens(source(tmp_path, "lines"), tmp_path / "out", tokens_per_shard=4000)
    assert "was left by another call (other text or settings); starting over" in capsys.readouterr().err
    prepare_tokens(source(tmp_path, "lines"), tmp_path / "whole", tokens_per_shard=4000)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_two_calls_at_once_are_refused(tmp_path):
    def again(found):
        prepare_tokens(source(tmp_path, "lines"), tmp_path / "out")

    with pytest.raises(DataError, match="is being written by another process; wait, or give another"):
        prepare_tokens(source(tmp_path, "lines"), tmp_path / "out", progress=again)


SCRIPT = """
import sys, time
from jaxtrain.config.data import DocumentsData
from jaxtrain.config.data import TokenizerConfig
from jaxtrain.data import prepare_tokens
from jaxtrain.data.sources import shards as prepare
prepare.BLOCK_CHARACTERS = 8000
if __name__ == "__main__":
    path, output = sys.argv[1:]
    config = DocumentsData(path=path, tokenizer=TokenizerConfig(kind="bpe", vocab_size=400))
    prepare_tokens(config, output, tokens_per_shard=3000, progress=lambda found: time.sleep(0.1))
"""


@pytest.mark.long
def test_kills_change_nothing(tmp_path):
    """`kill -9` at different places, and this one goes on."""
    config = source(tmp_path, "parquet")
    prepare_tokens(config, tmp_path / "whole", tokens_per_shard=3000)
    (tmp_path / "run.py").write_text(SCRIPT)
    output, state = tmp_path / "out", tmp_path / ".out.partial" / prepare._PROGRESS
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(tmp_path / "run.py"), config.path, str(output)]
    for _ in range(2):
        before = blocks_done(state)
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 120
        while blocks_done(state) <= before + 1:
            assert time.monotonic() < end, "it came no further"
            assert process.poll() is None, "it ended"
            time.sleep(0.02)
        process.kill()
        process.wait()
    prepare_tokens(config, output, tokens_per_shard=3000)
    assert digests(output) == digests(tmp_path / "whole")


def blocks_done(state):
    try:
        return json.loads(state.read_text())["blocks"]
    except (OSError, ValueError):
        return -1
