"""What a run counts and predicts in: the tokens of its texts, and the numbers of a table, however large they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.data.rows import mean_tokens, split_rows


def prices(rng):
    inputs = rng.normal(size=(200, 2))
    return inputs, 100_000 + 30_000 * inputs @ np.array([1.0, -0.5])


def table(tmp_path, steps):
    inputs, targets = prices(np.random.default_rng(0))
    np.savez(tmp_path / "prices.npz", inputs=inputs, targets=targets)
    return {
        "task": "regression",
        "model": {"kind": "mlp", "hidden_dims": [16]},
        "data": {"kind": "table", "path": str(tmp_path / "prices.npz")},
        "optimizer": {"kind": "adamw", "learning_rate": 1e-2, "schedule": {"kind": "constant"}},
        "train": {"steps": steps, "global_batch_size": 32},
        "logging": {"report": False, "tensorboard": False},
    }


@pytest.mark.long
def test_prices_are_learned_in_few_steps_and_predicted_as_prices(tmp_path):
    inputs, targets = prices(np.random.default_rng(1))
    jt.run_config(table(tmp_path, 40), run_dir=tmp_path / "run")
    # The run goes on, with the scale of its first process.
    result = jt.run_config(table(tmp_path, 60), run_dir=tmp_path / "run")
    assert result.metrics["eval_loss"] < 0.1 * targets.var()
    run = jt.open_run(result.run_dir)
    predicted = np.asarray(run.predict(inputs))
    assert np.mean((predicted.reshape(-1) - targets) ** 2) < 0.1 * targets.var()
    # The scale is of the data of this run: its config, from which runs on other tables begin, has none.
    assert run.config.model.output_scale is None
    reading = run.info["data"]["reading"]
    scale = [*reading["target_mean"], *reading["target_deviation"]]
    np.testing.assert_allclose(scale, [100_000, 30_000 * 1.25**0.5], rtol=0.2)


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
        "labelled": [{"text": text, "label": i % 2} for i, text in enumerate(texts)],
        "tagged": [{"words": [text, "a"], "tags": ["x", "y"]} for text in texts],
        "texts": [{"source": text, "target": text[:3]} for text in texts],
    }
    for name, records in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


SOURCES: dict[str, dict[str, Any]] = {
    "chat": {"kind": "chat", "template": "chatml", "packing": False},
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
