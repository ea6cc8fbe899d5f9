"""BERT and T5 of transformers on the CPU: eager PyTorch, its attention (SDPA), fused AdamW.

python scripts/peers/torch_published.py bert|t5
"""

# Its imports are installed in the environment of the peers only.
# pyright: reportMissingImports=false
import os
import sys
from typing import Any

import numpy as np
import torch
import transformers
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
    serve,
)
from torch import nn


def bert() -> tuple[Any, dict[str, torch.Tensor]]:
    """Make a BERT for the classification of sequences, and a batch for it."""
    config = transformers.BertConfig(
        vocab_size=BERT["vocab_size"], hidden_size=BERT["embed_dim"], num_hidden_layers=BERT["num_layers"],
        num_attention_heads=BERT["num_heads"], intermediate_size=BERT["mlp_dim"],
        max_position_embeddings=BERT["max_sequence_length"], num_labels=LABELS, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    generator = np.random.default_rng(0)
    tokens = torch.from_numpy(generator.integers(4, 256, (BERT_ROWS, BERT_TOKENS)))
    labels = torch.from_numpy(generator.integers(0, LABELS, BERT_ROWS))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    return transformers.BertForSequenceClassification._from_config(config), batch


def t5() -> tuple[Any, dict[str, torch.Tensor]]:
    """Make a T5 v1.0, and a batch of sources and targets for it."""
    config = transformers.T5Config(
        vocab_size=T5["vocab_size"], d_model=T5["embed_dim"], d_kv=T5["head_dim"], d_ff=T5["mlp_dim"],
        num_layers=T5["num_layers"], num_heads=T5["num_heads"], dropout_rate=0.0, decoder_start_token_id=0,
        use_cache=False,
    )  # fmt: skip
    generator = np.random.default_rng(0)
    tokens = torch.from_numpy(generator.integers(4, 256, (T5_ROWS, T5_SOURCE)))
    labels = torch.from_numpy(generator.integers(4, 256, (T5_ROWS, T5_TARGET)))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    return transformers.T5ForConditionalGeneration._from_config(config), batch


def main(name: str) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model, batch = bert() if name == "bert" else t5()
    model.train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE_PUBLISHED, betas=(B1, B2), eps=EPSILON, fused=True)

    def run(steps: int) -> float:
        loss = torch.tensor(float("nan"))
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        return loss.item()

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    serve(run, parameters=sum(p.numel() for p in model.parameters()), versions=versions)


if __name__ == "__main__":
    main(sys.argv[1])
