"""What "tokens" of a run counts where rows are filled up: the texts, and not what fills the rows up."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.data.rows import mean_tokens, split_rows

LENGTH = 48


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats, pairs of answers, labelled and tagged texts and pairs of texts, of different lengths."""
    folder = tmp_path_factory.mktemp("texts")
    texts = ["ab" * (number % 7 + 1) for number in range(40)]
    asked = [{"role": "user", "content": f"q{number}"} for number in range(40)]
    rows = {
        "chat": [
            {"messages": [ask, {"role": "assistant", "content": text}]} for ask, text in zip(asked, texts, strict=True)
        ],
        "pairs": [
            {"prompt": ask["content"], "chosen": text, "rejected": f"{text}c"}
            for ask, text in zip(asked, texts, strict=True)
        ],
        "labelled": [{"text": text, "label": len(text) % 2} for text in texts],
        "tagged": [{"words": [text, "a"], "tags": ["x", "y"]} for text in texts],
        "texts": [{"source": text, "target": text[:3]} for text in texts],
    }
    for name, records in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


SOURCES: dict[str, dict[str, Any]] = {
    "chat": {"kind": "chat", "template": "chatml", "packing": False},
    "packed chat": {"kind": "chat", "template": "chatml"},
    "pairs": {"kind": "chat", "template": "chatml"},
    "labelled": {"kind": "labelled_text", "text": "text", "label": "label"},
    "tagged": {"kind": "tagged_text", "words": "words", "tags": "tags"},
    "texts": {"kind": "text_pairs", "source": "source", "target": "target", "target_length": 8},
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_tokens_of_rows_are_those_that_are_not_padding(files: Path, name: str) -> None:
    settings = {**SOURCES[name], "path": str(files / f"{name.split()[-1]}.jsonl"), "tokenizer": {"kind": "byte"}}
    data = jt.open_data(settings, sequence_length=LENGTH, task="dpo" if name == "pairs" else None)
    inputs = data.train.gather(np.arange(len(data.train)))["inputs"]
    if isinstance(inputs, dict):
        real = sum((inputs[entry] > 0).sum() for entry in inputs if entry.endswith("segments"))
    else:
        real = (inputs != inputs[0, ..., -1:]).sum()
    assert mean_tokens(data.train) == pytest.approx(real / len(data.train))
    assert real / len(data.train) < data.units_per_row
    parts = split_rows(data.train, share=0.3, seed=0)
    assert sum((mean_tokens(part) or 0) * len(part) for part in parts) == pytest.approx(real)


def logged(run_dir: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "tokens" in row]


def train(files: Path, run_dir: Path, steps: int) -> jt.Result:
    config = {
        "task": "classification",
        "model": {
            "kind": "transformer",
            "num_layers": 1,
            "embed_dim": 8,
            "num_heads": 2,
            "head": {"kind": "sequence", "pooling": "mean"},
        },
        "data": {**SOURCES["labelled"], "path": str(files / "labelled.jsonl"), "sequence_length": LENGTH},
        "train": {"steps": steps, "global_batch_size": 8},
        "logging": {"every": 1, "report": False, "tensorboard": False},
    }
    return jt.run_config(config, run_dir=run_dir)


def test_a_run_counts_texts_and_goes_on_as_it_began(
    files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(files, tmp_path, 2)
    mean = mean_tokens(jt.open_run(tmp_path).data.train)
    assert mean is not None
    assert f"2 steps of {8 * mean:,.0f} tokens ({8 * LENGTH} with padding)" in capfd.readouterr().err
    assert [row["tokens"] for row in logged(tmp_path)] == [round(step * 8 * mean) for step in (1, 2)]
    train(files, tmp_path, 3)
    assert logged(tmp_path)[-1]["tokens"] == round(3 * 8 * mean)
