"""A run keeps the token that ends its documents: resumed, opened, evaluated and exported; and one of before resumes."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import jaxtrain as jt
from jaxtrain.config.tokenizer import TokenizerConfig
from jaxtrain.data import build_tokenizer
from jaxtrain.run.import_run import export_run

SETTINGS = '{"eos_token": "<|eot|>"}'


def config(tmp_path: Path, **tokenizer: Any) -> dict[str, Any]:
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
            "tokenizer": {"kind": "file", "path": str(folder / "tokenizer.json"), **tokenizer},
        },
        "optimizer": {"schedule": {"kind": "constant"}},
        "train": {"steps": 2, "global_batch_size": 8},
        "evaluation": {"max_batches": 1},
        "logging": {"report": False, "tensorboard": False},
    }


def longer(tmp_path: Path, **tokenizer: Any) -> dict[str, Any]:
    return {**config(tmp_path, **tokenizer), "train": {"steps": 4, "global_batch_size": 8}}


def test_a_run_keeps_the_end_of_its_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = config(tmp_path)
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(SETTINGS)
    run_dir = tmp_path / "run"
    jt.run_config(given, run_dir=run_dir)
    jt.run_config(longer(tmp_path), run_dir=run_dir)
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
    # run.json says it where the file beside the tokenizer is gone.
    (run_dir / "special_tokens_map.json").unlink()
    again = jt.open_run(run_dir).tokenizer
    assert again is not None
    assert again.end_of_text == end
