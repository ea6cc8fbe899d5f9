"""The same transformer in PyTorch: SDPA, fused AdamW, eager or `torch.compile`.

python scripts/peers/torch_transformer.py eager|compile
"""

# What it imports is in the peers' environment only.
# pyright: reportMissingImports=false
import os
import sys

import torch
from peer import (
    B1,
    B2,
    CLIP,
    EPSILON,
    HEADS,
    LAYERS,
    LEARNING_RATE,
    LENGTH,
    NORM_EPSILON,
    VOCABULARY,
    WEIGHT_DECAY,
    WIDTH,
    batches,
    serve,
)
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, eps=NORM_EPSILON, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH, eps=NORM_EPSILON, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.empty(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, eps=NORM_EPSILON, bias=False)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                small = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * LAYERS) ** 0.5 if small else 0.02)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def main(*, compiled: bool) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model = Transformer()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(B1, B2), eps=EPSILON, fused=True)

    def loss_of(inputs, targets):
        return functional.cross_entropy(model(inputs).view(-1, VOCABULARY), targets.view(-1))

    loss_of = torch.compile(loss_of) if compiled else loss_of
    rows = batches()

    def run(steps: int) -> float:
        loss = torch.tensor(float("nan"))
        for _ in range(steps):
            inputs, targets = (torch.from_numpy(part).long() for part in next(rows))
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        return loss.item()

    serve(run, parameters=sum(p.numel() for p in model.parameters()), versions=f"torch {torch.__version__}")


if __name__ == "__main__":
    main(compiled=sys.argv[1] == "compile")
