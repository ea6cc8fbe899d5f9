"""jaxtrain's own loop on a BERT that learns labels, or on a T5, from a table of texts that it writes first.

python scripts/peers/ours_published.py bert|t5
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ours
from peer import (
    B1,
    B2,
    BERT,
    BERT_ROWS,
    BERT_TOKENS,
    CLIP,
    EPSILON,
    LABELS,
    RATE_PUBLISHED,
    T5,
    T5_ROWS,
    T5_SOURCE,
    T5_TARGET,
    WEIGHT_DECAY,
)

from jaxtrain.runtime.host import restart

_BERT = {
    **BERT, "kind": "transformer", "position": "learned", "norm": "layernorm", "norm_epsilon": 1e-12, "block": "post",
    "activation": "gelu_exact", "bias": True, "embedding_norm": True, "token_types": 2, "causal": False,
    "head": {"kind": "sequence", "hidden": "tanh", "num_labels": LABELS},
}  # fmt: skip
_T5 = {
    **T5, "kind": "encoder_decoder", "activation": "relu", "tie_embeddings": True, "attention_scale": 1.0,
    "logits_scale": T5["embed_dim"] ** -0.5, "max_sequence_length": T5_SOURCE,
}  # fmt: skip


def write_texts(path: Path, columns: dict[str, int], *, rows: int) -> None:
    """Write rows of random letters, so that no row has padding.

    Args:
        path: a .jsonl file.
        columns: column of a text -> its length in bytes; every row has a label besides.
        rows: number of rows.
    """
    generator = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            texts = {
                name: bytes(generator.integers(97, 123, length).astype(np.uint8)).decode()
                for name, length in columns.items()
            }
            file.write(json.dumps({**texts, "label": f"label {number % LABELS}"}) + "\n")


def config(name: str, folder: Path) -> dict[str, Any]:
    """Make the config of a run on texts in the folder, and write these."""
    path = folder / "texts.jsonl"
    if name == "bert":
        write_texts(path, {"text": 2 * BERT_TOKENS}, rows=64 * BERT_ROWS)
        data: dict[str, Any] = {"kind": "labelled_text", "sequence_length": BERT_TOKENS}
        model, task, size = _BERT, "classification", BERT_ROWS
    else:
        write_texts(path, {"source": 2 * T5_SOURCE, "target": 2 * T5_TARGET}, rows=64 * T5_ROWS)
        data = {"kind": "text_pairs", "sequence_length": T5_SOURCE, "target_length": T5_TARGET}
        model, task, size = _T5, "sequence_to_sequence", T5_ROWS
    return {
        "model": model,
        "task": task,
        "data": data | {"path": str(path), "tokenizer": {"kind": "byte"}},
        "optimizer": {
            "kind": "adamw", "learning_rate": RATE_PUBLISHED, "b1": B1, "b2": B2, "epsilon": EPSILON,
            "weight_decay": WEIGHT_DECAY, "clip_norm": CLIP, "schedule": {"kind": "constant"},
        },
        "train": {"steps": 1000, "global_batch_size": size},
    }  # fmt: skip


if __name__ == "__main__":
    restart(accelerator=False)  # as `jaxtrain train` does
    with tempfile.TemporaryDirectory() as made:
        ours.main(config(sys.argv[1], Path(made)), [])
