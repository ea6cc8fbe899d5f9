"""The tokenizer of a run is intact, or one line; the end of documents is kept with it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import jaxtrain as jt
from jaxtrain.config.data import TokenizerConfig
from jaxtrain.data import build_tokenizer
from jaxtrain.data.tokenizer import ByteTokenizer, load_tokenizer
from jaxtrain.errors import DataError
from jaxtrain.run.directory import TOKENIZER_DIGEST, TOKENIZER_FILE
from jaxtrain.run.export import export_run
from jaxtrain.run.published import keep_tokenizer, read_tokenizer


def test_a_tokenizer_that_is_damaged_or_gone(tmp_path: Path) -> None:
    tokenizer, path = ByteTokenizer(["<a>"]), tmp_path / TOKENIZER_FILE
    info = {TOKENIZER_DIGEST: keep_tokenizer(tmp_path, tokenizer)}
    found = read_tokenizer(tmp_path, info)
    assert isinstance(found, ByteTokenizer)
    assert found.special == ("<a>",)
    path.write_text('{"jaxtrain_tokenizer": "byte", "special": ["<x>"]}')
    for state in ("is damaged, or not the run's", "is gone"):
        with pytest.raises(
            DataError, match=rf"tokenizer\.json {state}.*; run 'jaxtrain train .*' again, which writes it"
        ):
            read_tokenizer(tmp_path, info)
        path.unlink(missing_ok=True)
    assert keep_tokenizer(tmp_path, tokenizer) == info[TOKENIZER_DIGEST]
    assert load_tokenizer(path).vocab_size == tokenizer.vocab_size


SETTINGS = '{"eos_token": "<|eot|>"}'


def config(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "tokenizer"
    if not folder.exists():
        folder.mkdir()
        made: Any = build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=280), ["hello world " * 50])
        text = made.to_json().replace("<|endoftext|>", "<|eot|>")
        Tokenizer.from_str(text).save(str(folder / "tokenizer.json"))
        lines = (json.dumps({"text": f"hello world {i}"}) + "\n" for i in range(200))
        (tmp_path / "a.jsonl").write_text("".join(lines))
    return {
        "model": {"kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 16},
        "data": {
            "kind": "jsonl",
            "path": str(tmp_path / "a.jsonl"),
            "tokenizer": {"kind": "file", "path": str(folder / "tokenizer.json")},
        },
        "optimizer": {"schedule": {"kind": "constant"}},
        "train": {"steps": 1, "global_batch_size": 8},
        "evaluation": {"max_batches": 1},
        "logging": {"report": False, "tensorboard": False},
    }


@pytest.mark.long
def test_a_run_keeps_the_end_of_its_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = config(tmp_path)
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(SETTINGS)
    run_dir = tmp_path / "run"
    jt.run_config(given, run_dir=run_dir)
    run = jt.open_run(run_dir)
    assert run.tokenizer is not None
    end = run.tokenizer.token_id("<|eot|>")  # pyright: ignore[reportAttributeAccessIssue] it is no tokenizer of bytes
    assert run.tokenizer.end_of_text == run.info["data"]["end_of_text"] == end
    # Held-out rows are those of the training, as the fingerprint says.
    assert json.loads(json.dumps(run.data.fingerprint)) == run.info["data"]["fingerprint"]
    assert "the data has changed" not in capsys.readouterr().err
    export_run(run_dir, tmp_path / "exported")
    said = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert said["eos_token_id"] == end
    assert json.loads((tmp_path / "exported" / "tokenizer_config.json").read_text())["eos_token"] == "<|eot|>"
