"""Data that changes while a run is stopped: one line before the first step."""

import pytest

from jaxtrain.config.data import TextData, TokenizerConfig
from jaxtrain.data.sources.shards import prepare_tokens
from jaxtrain.errors import DataError

CHANGES = {
    "other ids of the same vocabulary": lambda content: content[:-8] + content[:8],
    "an id outside the vocabulary": lambda content: content[:-2] + b"\xff\x7f",
    "cut short": lambda content: content[:-200],
}


@pytest.mark.long
def test_a_token_shard_that_changed_is_found_before_a_resumed_step(tmp_path, cli):
    (tmp_path / "long.txt").write_text("some text that is long enough " * 600)
    text = TextData(path=str(tmp_path / "long.txt"), tokenizer=TokenizerConfig(kind="byte"))
    prepare_tokens(text, tmp_path / "shards")
    config, run_dir = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(
        "model: {kind: transformer, num_layers: 1, embed_dim: 16, num_heads: 2, max_sequence_length: 16}\n"
        f"data: {{kind: tokens, path: {tmp_path / 'shards'}}}\ntrain: {{steps: 2, global_batch_size: 8}}\n"
        "evaluation: {every: null}\nlogging: {tensorboard: false, report: false}\n"
    )
    assert cli("train", str(config), "--run-dir", str(run_dir)).code == 0
    before = (run_dir / "metrics.jsonl").read_bytes()
    (shard,) = (tmp_path / "shards").glob("*.bin")
    content = shard.read_bytes()
    for name, change in CHANGES.items():
        shard.write_bytes(change(content))
        answer = cli("train", str(config), "train.steps=4", "--run-dir", str(run_dir))
        assert answer.code == DataError.exit_code, name
        assert "Traceback" not in answer.err, name
        assert (run_dir / "metrics.jsonl").read_bytes() == before, name
