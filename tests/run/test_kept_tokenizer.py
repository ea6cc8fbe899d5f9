"""The tokenizer of a run is intact, or its second copy is used, or one line; the end of documents is kept with it."""

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
from jaxtrain.run.export import export_run
from jaxtrain.run.kept_tokenizer import COPY_FILE, DIGEST_KEY, TOKENIZER_FILE, keep_tokenizer, read_tokenizer

DAMAGED = {"another": b'{"jaxtrain_tokenizer": "byte", "special": ["<x>"]}', "gone": None}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_tokenizer_that_is_damaged_or_gone(tmp_path: Path, content: bytes | None) -> None:
    def damage(name: str) -> None:
        (tmp_path / name).unlink()
        if content is not None:
            (tmp_path / name).write_bytes(content)

    tokenizer, lines = ByteTokenizer(["<a>"]), []
    digest, line = keep_tokenizer(tmp_path, tokenizer)
    assert line is None
    assert keep_tokenizer(tmp_path, tokenizer) == (digest, None)
    info = {DIGEST_KEY: digest}
    damage(TOKENIZER_FILE)
    found = read_tokenizer(tmp_path, info, lines.append)
    assert isinstance(found, ByteTokenizer)
    assert found.special == ("<a>",)
    assert "tokenizer.copy.json is used" in lines[0]
    damage(COPY_FILE)
    with pytest.raises(DataError, match=r"tokenizer\.json is .*; run 'jaxtrain train .*' again, which writes it"):
        read_tokenizer(tmp_path, info, lines.append)
    # What both kinds of damage leave is written again; that both files are gone is what a run finds that begins.
    _, line = keep_tokenizer(tmp_path, tokenizer)
    assert (line is None) == (content is None)
    assert load_tokenizer(tmp_path / TOKENIZER_FILE).vocab_size == tokenizer.vocab_size


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
