"""BERT and T5 of transformers on the CPU: eager PyTorch, its attention (SDPA), fused AdamW.

python scripts/peers/torch_published.py bert|t5
"""

# Its imports are installed in the environment of the peers only.
# pyright: reportMissingImports=false
import os
import sys
from typing import Any

import torch
import transformers
from peer import B1, B2, CLIP, EPSILON, RATE_PUBLISHED, WEIGHT_DECAY, folder, serve, steps
from torch import nn
from torch_transformer import set_rate


def model_of(name: str) -> Any:
    """Open the published folder of the given values, without dropout."""
    path = folder() / "published"
    if name == "bert":
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForSequenceClassification.from_pretrained(path, **off)
    return transformers.T5ForConditionalGeneration.from_pretrained(path, dropout_rate=0.0, use_cache=False)


def main(name: str) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = model_of(name)
    model.train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE_PUBLISHED, betas=(B1, B2), eps=EPSILON, fused=True)

    given_steps = steps()

    def run(steps: int) -> float:
        losses = []
        for _ in range(steps):
            given, rate = next(given_steps)
            tokens = torch.from_numpy(given["inputs/tokens"]).long()
            labels = torch.from_numpy(given["targets"]).long()
            batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
            set_rate(optimizer, rate)
            optimizer.zero_grad(set_to_none=True)
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean().item()

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    serve(run, parameters=sum(p.numel() for p in model.parameters()), versions=versions)


if __name__ == "__main__":
    main(sys.argv[1])
