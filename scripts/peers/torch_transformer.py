"""The same transformer in PyTorch: SDPA, fused AdamW, eager or `torch.compile`.

python scripts/peers/torch_transformer.py eager|compile
"""

# Its imports are installed in the environment of the peers only.
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
    serve,
    steps,
    values,
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
        qkv = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Its parameters are set by `given`."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.empty(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, eps=NORM_EPSILON, bias=False)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make AdamW in one kernel, with weight decay of matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(B1, B2), eps=EPSILON, fused=True)


def given(model: Transformer) -> None:
    """Set the parameters of the model to the given values."""
    ours = {path: torch.from_numpy(value) for path, value in values().items()}

    def fill(parameter: nn.Parameter, value: torch.Tensor) -> None:
        parameter.copy_(value.reshape(parameter.shape))

    with torch.no_grad():
        fill(model.embedding.weight, ours["embedding"])
        fill(model.positions, ours["positions"])
        fill(model.norm.weight, ours["output_norm/scale"])
        fill(model.output.weight, ours["output"].T)
        for number, block in enumerate(model.blocks):
            own = {path.removeprefix("blocks/"): value[number] for path, value in ours.items() if "blocks/" in path}
            width = own["attention_norm/scale"].numel()
            rows = [own[f"attention/{name}/kernel"].reshape(width, width).T for name in ("query", "key", "value")]
            fill(block.qkv.weight, torch.cat(rows))
            fill(block.out.weight, own["attention/output/kernel"].reshape(width, width).T)
            fill(block.up.weight, own["mlp/up/kernel"].T)
            fill(block.down.weight, own["mlp/down/kernel"].T)
            fill(block.norm1.weight, own["attention_norm/scale"])
            fill(block.norm2.weight, own["mlp_norm/scale"])


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the step that comes."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def main(*, compiled: bool) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = Transformer()
    given(model)
    optimizer = adamw(model)

    def loss_of(inputs, targets):
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    loss_of = torch.compile(loss_of) if compiled else loss_of
    given_steps = steps()

    def run(steps: int) -> float:
        losses = []
        for _ in range(steps):
            batch, rate = next(given_steps)
            inputs, targets = (torch.from_numpy(batch[name]).long() for name in ("inputs", "targets"))
            set_rate(optimizer, rate)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean().item()

    serve(run, parameters=sum(p.numel() for p in model.parameters()), versions=f"torch {torch.__version__}")


if __name__ == "__main__":
    main(compiled=sys.argv[1] == "compile")
